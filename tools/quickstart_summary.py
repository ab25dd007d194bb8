#!/usr/bin/env python3
"""Prints what tools/quickstart has achieved, from the JSON results of its stages, and writes it to OUT/summary.json.

    tools/quickstart_summary.py OUT SF_HOST RUN [RUN ...]

With one run the summary is that run's; with several it is {"runs": [...]}, one for each.
"""
import json
import sys
from pathlib import Path

# How each engine is told to use a draft, by the architecture in its configuration.
SGLANG = {"DFlash2DraftModel": "DFLASH", "DSparkDraftModel": "DSPARK", "LlamaForCausalLMEagle3": "EAGLE3"}
VLLM = {"DFlash2DraftModel": "dflash", "DSparkDraftModel": "dspark", "LlamaForCausalLMEagle3": "eagle3"}


def summarize(out: Path, run: str) -> dict:
    stage = {name: json.loads((out / f"{run}.{name}.json").read_text()) for name in ("before", "after", "train", "export")}
    before, after = stage["before"], stage["after"]
    draft = Path(stage["export"]["folder"])
    config = json.loads((draft / "config.json").read_text())
    survival = survivals(after["metrics"])
    # A run that was stopped and went on reports its last part's speed; one that had nothing left to do reports none.
    return {
        "run": run,
        "architecture": config["architectures"][0],
        "parameters": stage["export"]["parameters"],
        "loss": {"before": before["loss"], "after": after["loss"]},
        "acceptance_length": {"before": before["acceptance_length"], "after": after["acceptance_length"],
                              "bigram": after["bigram_acceptance_length"]},
        "hit_rate": [here / max(earlier, 1e-12) for earlier, here in zip([1.0] + survival, survival)],
        "steps": stage["train"]["updates"],
        "tokens_per_second": stage["train"]["tokens_per_second"],
        "target": str(out / "target"),
        "draft": str(draft),
        "drafted_tokens": len(survival),
        "recipe": str(out / f"{run}.toml"),
    }


def survivals(metrics: dict) -> list:
    """Share of drafts whose first 1, 2, .. tokens were all accepted."""
    found = []
    while (name := f"position_{len(found) + 1}/acceptance/prefix_survival") in metrics:
        found.append(metrics[name])
    return found


def serving(result: dict) -> str:
    name, text = result["architecture"], ""
    if name in SGLANG:
        text += f"""  python -m sglang.launch_server --model-path {result['target']} \\
    --speculative-algorithm {SGLANG[name]} --speculative-draft-model-path {result['draft']}
"""
    if name in VLLM:
        text += f"""  vllm serve {result['target']} \\
    --speculative-config '{{"method": "{VLLM[name]}", "model": "{result['draft']}", "num_speculative_tokens": {result['drafted_tokens']}}}'
"""
    return text


def speed(result: dict) -> str:
    return f"{result['tokens_per_second']:.0f}" if result["tokens_per_second"] else "was done"


def report(result: dict, host: str) -> str:
    loss, accept = result["loss"], result["acceptance_length"]
    rate = f"{speed(result)} tokens/s" if result["tokens_per_second"] else "was done before"
    return f"""
held-out conversations     untrained   trained   bigram baseline
  loss                     {loss['before']:9.3f} {loss['after']:9.3f}
  acceptance length        {accept['before']:9.3f} {accept['after']:9.3f} {accept['bigram']:17.3f}

acceptance length: tokens per pass of the target, greedy drafting compared with what the target wrote (1 = no help)
training: {result['steps']} steps, {rate}
draft:    {result['draft']}

serve it (engines that know the architecture {result['architecture']}):
{serving(result)}
look closer:
  {host} eval {result['recipe']} --checkpoint best
  {host} plan {result['recipe']}
"""


def table(results: list, host: str) -> str:
    columns = [[""] + ["parameters", "steps", "loss untrained", "loss trained", "accept untrained", "accept trained", "accept bigram"]
               + [f"hit rate, token {k + 1}" for k in range(max(len(r["hit_rate"]) for r in results))]
               + ["training tokens/s", "accept decoding", "  95 % interval", "  estimated speed-up"]]
    for r in results:
        rates = [f"{rate:.3f}" for rate in r["hit_rate"]]
        decoded = r["decoding"]["acceptance_length"]
        columns.append([r["architecture"], f"{r['parameters'] / 1e6:.2f} M", str(r["steps"]), f"{r['loss']['before']:.3f}", f"{r['loss']['after']:.3f}",
                        *(f"{r['acceptance_length'][key]:.3f}" for key in ("before", "after", "bigram")),
                        *(rates + ["-"] * (len(columns[0]) - 12 - len(rates))), speed(r), f"{decoded['value']:.3f}",
                        interval(decoded), f"{r['decoding']['speedup_estimated']:.2f}"])
    text = "\n"
    for row in zip(*columns):
        text += f"{row[0]:<20}" + "".join(f"{cell:>26}" for cell in row[1:]) + "\n"
    text += """
accept: acceptance length on held-out conversations, tokens per pass of the target (1 = no help), or while decoding held-out prompts; hit rate: of
drafts that got so far, how many had this token right, too. Losses are each algorithm's own and can't be compared.

"""
    for r in results:
        text += f"{r['architecture']}: {r['draft']}\n{serving(r)}"
    return text + f"\nlook closer:\n  {host} eval {results[0]['recipe']} --checkpoint best\n"


def interval(length: dict) -> str:
    return f"{length['low']:.3f} to {length['high']:.3f}" if length["prompts"] > 1 else "no interval"


def decoding(report: dict, out: Path) -> str:
    text = f"""
decoding {report['prompts']} held-out prompts with the drafts: {report['lossless_text']}
"""
    for draft in report["drafts"]:
        length = draft["acceptance_length"]
        text += f"  {draft['name']:<20} acceptance length {length['value']:.3f} ({interval(length)}), hit rates " + \
                " ".join(f"{place['rate']:.3f}" for place in draft["per_position"]) + f", estimated speed-up {draft['speedup_estimated']:.2f}\n"
    return text + f"  report: {out / 'speculative.html'}\n"


def main() -> None:
    out, host, runs = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    results = [summarize(out, run) for run in runs]
    speculative = json.loads((out / f"{runs[0]}.speculative.json").read_text())
    for result, draft in zip(results, speculative["drafts"]):
        result["decoding"] = {key: draft[key] for key in ("acceptance_length", "per_position", "speedup_estimated", "teacher_forced")} | {
            "lossless": speculative["lossless"], "prompts": speculative["prompts"]}
    (out / "summary.json").write_text(json.dumps(results[0] if len(results) == 1 else {"runs": results}, indent=2) + "\n")
    print(report(results[0], host) if len(results) == 1 else table(results, host), decoding(speculative, out), sep="")


if __name__ == "__main__":
    main()
