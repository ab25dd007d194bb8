"""Chat formats of tests/prepare/templates as target folders, and the conversations that are rendered with them.

All folders have one tokenizer: SmolLM2's own, out of the GGUF that tools/setup installed, with the tokens of every format added to it.
"""
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "core/prepare")]
import fetch_smollm2  # noqa: E402

PACKAGES = fetch_smollm2.use_python_packages()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CHATML = ["<|im_start|>", "<|im_end|>"]
# name: (bos, eos, tokens that the format adds)
FAMILIES = {
    "chatml": (None, "<|im_end|>", CHATML),
    "qwen3": (None, "<|im_end|>", CHATML),
    "thinking_prompt": (None, "<|im_end|>", CHATML),
    "generation_marks": (None, "<|im_end|>", CHATML),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "mistral": ("<s>", "</s>", ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "gemma": ("<bos>", "<eos>", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
    "phi3": ("<s>", "<|endoftext|>", ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]),
    "phi4": (None, "<|im_end|>", CHATML + ["<|im_sep|>"]),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", [
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"]),
    "harmony": (None, "<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]),
    "glm": (None, "<|user|>", ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"]),
    "granite": (None, "<|end_of_text|>", ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"]),
    "zephyr": ("<s>", "</s>", ["<s>", "</s>"]),
    "vicuna": ("<s>", "</s>", ["<s>", "</s>"]),
}

CALL = {"id": "call00007", "type": "function", "function": {"name": "tide", "arguments": {"place": "Ayr", "day": 3}}}
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "Tells the tide.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}, "day": {"type": "integer"}}, "required": ["place"]}}}]


def say(role, content, **more):
    return {"role": role, "content": content, **more}


# name: (messages, tools)
CONVERSATIONS = {
    "two_turns": ([say("user", "Hi there"), say("assistant", "Hello you"), say("user", "And now?"), say("assistant", "Now we part.")], None),
    "system": ([say("system", "Be brief."), say("user", "Hi there"), say("assistant", "Hello you")], None),
    "tool": ([say("user", "Tide at Ayr?"), say("assistant", "", tool_calls=[CALL]), say("tool", '{"high": 3}', name="tide", tool_call_id="call00007"),
              say("assistant", "It is high at 3.")], TOOLS),
    "reasoning": ([say("user", "Hi there"), say("assistant", "Hello you", reasoning_content="They greet.", thinking="They greet."), say("user", "And now?"),
                   say("assistant", "Now we part.", reasoning_content="They leave.", thinking="They leave.")], None),
    "inline_think": ([say("user", "Hi there"), say("assistant", "<think>\nThey greet.\n</think>\n\nHello you"), say("user", "And now?"),
                      say("assistant", "<think>\nThey leave.\n</think>\n\nNow we part.")], None),
    "empty_think": ([say("user", "Hi there"), say("assistant", "<think>\n\n</think>\n\nHello you")], None),
    "scripts": ([say("user", "Ünï — 日本語 🙂?"), say("assistant", "\n  é́ 👩‍👩‍👧 العربية\t1234 \n")], None),
    "blanks": ([say("user", "  two before, one after "), say("assistant", "a\n\n\nb   c\n")], None),
}
DATE = "2026-01-31"


def write_folders(out: Path, names=tuple(FAMILIES)) -> None:
    """One target folder for each family that is named, without weights."""
    import gguf
    from tokenizers import AddedToken, Tokenizer
    reader = gguf.GGUFReader(PACKAGES / fetch_smollm2.GGUF)
    text, config = fetch_smollm2.tokenizer_of(lambda key: reader.fields[key].contents())
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(t for _, _, added in FAMILIES.values() for t in added)])
    text = tokenizer.to_str()
    for name in names:
        bos, eos, _ = FAMILIES[name]
        folder = out / name
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "unk_token": config["unk_token"], "eos_token": eos,
                 "chat_template": (ROOT / f"tests/prepare/templates/{name}.jinja").read_text(encoding="utf-8")}
        if bos:
            facts["bos_token"] = bos
        (folder / "tokenizer_config.json").write_text(json.dumps(facts, ensure_ascii=False))


def workers(out: Path):
    """(name, TextWorker) of each family; the tokenizer is read once."""
    import text_worker
    write_folders(out)
    first = text_worker.TextWorker({"target": str(out / next(iter(FAMILIES))), "date": DATE, "own_values": ["messages", "tools", "add_generation_prompt"]})
    specials = {token.content for token in first.tokenizer.get_added_tokens_decoder().values() if token.special}
    for name in FAMILIES:
        config = json.loads((out / name / "tokenizer_config.json").read_text())
        worker = text_worker.TextWorker.__new__(text_worker.TextWorker)
        worker.__dict__.update(first.__dict__)
        tokens = text_worker.special_texts_of(config, {})
        worker.template = text_worker.Renderer(config["chat_template"], tokens, specials, {tokens["eos_token"]}, date=DATE)
        worker.templates = {"default": worker.template}
        yield name, worker


def rows(worker, lines):
    """What the worker answers to lines of a file, ids as lists."""
    return [{**row, "ids": row["ids"].tolist()} if "ids" in row else row for row in worker.rows(lines)]
