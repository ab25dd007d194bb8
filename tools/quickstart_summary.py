#!/usr/bin/env python3
"""Prints what tools/quickstart has achieved, from the JSON results of its stages, and writes it to OUT/summary.json.

    tools/quickstart_summary.py OUT RUN SF_HOST
"""
import json
import sys
from pathlib import Path


def summarize(out: Path, run: str) -> dict:
    stage = {name: json.loads((out / f"{run}.{name}.json").read_text()) for name in ("before", "after", "train", "export")}
    before, after = stage["before"], stage["after"]
    # A run that was stopped and went on reports its last part's speed; one that had nothing left to do reports none.
    return {
        "run": run,
        "loss": {"before": before["loss"], "after": after["loss"]},
        "acceptance_length": {"before": before["acceptance_length"], "after": after["acceptance_length"],
                              "bigram": after["bigram_acceptance_length"]},
        "steps": stage["train"]["updates"],
        "tokens_per_second": stage["train"]["tokens_per_second"],
        "target": str(out / "target"),
        "draft": stage["export"]["folder"],
        "block_size": block_size(Path(stage["export"]["folder"])),
        "recipe": str(out / f"{run}.toml"),
    }


def block_size(draft: Path) -> int:
    config = json.loads((draft / "config.json").read_text())
    return config["block_size"] if "block_size" in config else config["dflash_config"]["block_size"]


def report(result: dict, host: str) -> str:
    loss, accept = result["loss"], result["acceptance_length"]
    speed = f"{result['tokens_per_second']:.0f} tokens/s" if result["tokens_per_second"] else "was done before"
    return f"""
held-out conversations     untrained   trained   bigram baseline
  loss                     {loss['before']:9.3f} {loss['after']:9.3f}
  acceptance length        {accept['before']:9.3f} {accept['after']:9.3f} {accept['bigram']:17.3f}

acceptance length: tokens per pass of the target, greedy drafting compared with what the target wrote (1 = no help)
training: {result['steps']} steps, {speed}
draft:    {result['draft']}

serve it with SGLang, or with vLLM (versions that know the architecture DFlash2DraftModel):
  python -m sglang.launch_server --model-path {result['target']} \\
    --speculative-algorithm DFLASH --speculative-draft-model-path {result['draft']}
  vllm serve {result['target']} \\
    --speculative-config '{{"method": "dflash", "model": "{result['draft']}", "num_speculative_tokens": {result['block_size'] - 1}}}'

look closer:
  {host} eval {result['recipe']} --checkpoint best
  {host} plan {result['recipe']}
"""


def main() -> None:
    out, run, host = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    result = summarize(out, run)
    (out / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    print(report(result, host))


if __name__ == "__main__":
    main()
