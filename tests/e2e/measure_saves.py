#!/usr/bin/env python3
"""What a save costs the training thread, built-in writer against async_ckpt, in turn: docs/benchmarks/checkpoints.md's figures for two CPU cores. About a minute.

    tests/e2e/measure_saves.py BUILD_DIR TARGET FOLDER [repeats] [-- more arguments of sf-host bench]

TARGET holds the config.json of SmolLM2-135M (tools/quickstart makes it), FOLDER is on the disk in question. On an idle machine; standard library only.
"""
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bench(host, target, folder, writer, more):
    shutil.rmtree(folder / writer, ignore_errors=True)
    command = [host, "bench", ROOT / "recipes" / "smollm2-135m-dflash2.toml", "--mode", "run", "--backend", f"single+{writer}", "--samples", 16, "--warmup", 3, "--steps", 30,
               "--repeats", 1, "--json"]
    for line in (f"model.target_model_path={target}", f"data.hidden_states_path={folder}/features", "data.eval_hidden_states_path=", "training.eval_interval=0",
                 "training.save_interval=10", "training.max_checkpoints=1", f"output_dir={folder}/{writer}"):
        command += ["--set", line]
    done = subprocess.run([*map(str, command), *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / writer)
    return json.loads(done.stdout)


def main():
    words, more = (sys.argv[1:], []) if "--" not in sys.argv else (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :])
    host, target, folder = pathlib.Path(words[0]).resolve() / "bin" / "sf-host", pathlib.Path(words[1]).resolve(), pathlib.Path(words[2]).resolve()
    repeats = int(words[3]) if len(words) > 3 else 3
    folder.mkdir(parents=True, exist_ok=True)
    found = {"sync": [], "async_ckpt": []}
    for _ in range(repeats):
        for writer, results in found.items():
            results.append(bench(host, target, folder, writer, more))
    middle = {}
    print(f"| writer | saves | MB | stall ms, median (range) | until committed, s | step ms, quiet | step ms beside a save | CPUs {os.cpu_count()} |\n|---|---|---|---|---|---|---|---|")
    for writer, results in found.items():
        saves = [result["save"] for result in results]
        stalls = [save["stall_ms"][name] + save["device_wait_ms"][name] for save in saves for name in ("median",)]
        low, high = min(save["stall_ms"]["min"] for save in saves), max(save["stall_ms"]["max"] for save in saves)
        middle[writer] = statistics.median(stalls)
        step = {name: statistics.median(save[name]["median"] for save in saves if name in save) if any(name in save for save in saves) else None
                for name in ("step_ms_quiet", "step_ms_beside_save")}
        middle[writer + " step"] = step["step_ms_quiet"]
        seconds = statistics.median(save["seconds"]["median"] for save in saves)
        text = {name: f"{value:.1f}" if value is not None else "" for name, value in step.items()}
        print(f"| {writer} | {sum(save['count'] for save in saves)} | {saves[0]['bytes'] / 1e6:.0f} | {middle[writer]:.1f} ({low:.1f} to {high:.1f}) | {seconds:.2f} | "
              f"{text['step_ms_quiet']} | {text['step_ms_beside_save']} | |")
    print(f"async_ckpt stalls for {100 * middle['async_ckpt'] / middle['sync']:.1f} % of the built-in writer's stall, {100 * middle['async_ckpt'] / middle['sync step']:.1f} % of a step")


if __name__ == "__main__":
    main()
