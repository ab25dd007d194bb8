#!/usr/bin/env python3
"""Blocks replayed as CUDA graphs train to the same bits as eager ones: losses, gradient norms and checkpoints of the three tiny recipes.

    tests/e2e/test_compile_blocks.py BUILD_DIR

Needs a GPU, and has more cases with two (SF_MOST_RANKS=2); SF_CASES="2 ranks" picks those whose name has this in it; without one says so and passes. Standard library only. Ends with `N passed, N failed`.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback

BUILD = pathlib.Path(sys.argv[1]).resolve()
HOST = BUILD / "bin" / "sf-host"
ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 6


def host(*words, code=0):
    done = subprocess.run([str(HOST), *map(str, words)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"{' '.join(map(str, words))}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def trains_to_the_same_bits(algorithm, place, dtype, backend="single", *more):
    ranks, more = (["--nproc", "2"], more[1:]) if more[:1] == ("2 ranks",) else ([], more)
    common = ["--set", 'device="cuda"', "--set", f'model.torch_dtype="{dtype}"', "--set", f'output_dir="{place}/runs"', "--set", f'data.hidden_states_path="{place}/{algorithm}-{dtype}"',
              "--set", 'data.eval_hidden_states_path=""', "--set", "training.eval_interval=0"]
    if algorithm != "eagle3":
        common += ["--set", "model.draft_num_hidden_layers=3"]
    recipe = ROOT / "recipes" / f"tiny-{algorithm}.toml"
    if not (place / f"{algorithm}-{dtype}").exists():
        host("capture", recipe, *common, "--split", "train")
    runs = {}
    for name, compiled in (("eager", "false"), ("graphs", "true")):
        shutil.rmtree(place / "runs", ignore_errors=True)
        said = host("train", recipe, *common, *ranks, "--backend", backend, "--set", f'run_id="{name}"', "--set", f"training.compile_blocks={compiled}", "--set", "training.static_shapes=true",
                    "--set", "training.accumulation_steps=3", "--set", "training.batch_size=2", "--set", f"training.max_steps={STEPS}", "--set", f"training.total_steps={STEPS}",
                    "--set", "training.log_interval=1", "--set", "training.save_interval=0", *[word for one in more for word in ("--set", one)])
        assert ("CUDA graphs" in said) == (compiled == "true"), said
        folder = place / "runs" / name
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curve = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
        assert len(curve) == STEPS, curve
        step = folder / f"step-{STEPS:08d}"
        files = {path.name: path.read_bytes() for path in sorted(step.iterdir()) if path.suffix not in (".json", ".toml") and path.is_file() and path.stat().st_size > 1000}
        assert files, f"{step} holds {list(step.iterdir())}"
        runs[name] = (curve, files)
    assert runs["eager"][0] == runs["graphs"][0], f"{algorithm} {dtype} {backend}: {runs['eager'][0]}\n{runs['graphs'][0]}"
    assert runs["eager"][1].keys() == runs["graphs"][1].keys()
    for name, data in runs["eager"][1].items():
        assert data == runs["graphs"][1][name], f"{algorithm} {dtype} {backend}: {name} differs"
    return runs["eager"][0][-1]


def main():
    if not os.path.exists("/dev/nvidia0"):
        print("skipped: no GPU\n0 passed, 0 failed")
        return 0
    place = pathlib.Path(tempfile.mkdtemp(prefix="sf-compile-blocks-"))
    passed = failed = 0
    cases = [(algorithm, dtype, "single") for algorithm in ("dflash2", "dspark", "eagle3") for dtype in ("float32", "bfloat16")]
    cases += [("dflash2", "bfloat16", "fsdp2"), ("eagle3", "bfloat16", "fsdp2"), ("dflash2", "float32", "single", 'training.recompute=["block.*"]'),
              ("dflash2", "float32", "single", "training.grad_accum_dtype=\"bfloat16\""),
              ("dflash2", "bfloat16", "single+fp8"), ("eagle3", "bfloat16", "single+fp8"), ("dspark", "bfloat16", "fsdp2+fp8")]
    if os.environ.get("SF_MOST_RANKS") == "2":
        of_two = [(algorithm, "bfloat16", "fsdp2", "2 ranks", f"training.peer_copies={copies}", *mode) for algorithm in ("dflash2", "dspark", "eagle3") for copies, mode in
                  (("on", ()), ("on", ('training.fsdp_sharding="FULL_SHARD"',)), ("off", ()))]
        of_two.append(("dspark", "bfloat16", "fsdp2+fp8", "2 ranks", "training.peer_copies=on", "plugin.fp8.gather=true"))
        cases += of_two
    cases = [case for case in cases if os.environ.get("SF_CASES", "") in " ".join(case)]
    for algorithm, dtype, backend, *more in cases:
        try:
            last = trains_to_the_same_bits(algorithm, place, dtype, backend, *more)
            print(f"same bits: {algorithm} {dtype} {backend} {' '.join(more)}: last loss and norm {last}", flush=True)
            passed += 1
        except Exception:
            traceback.print_exc()
            failed += 1
    shutil.rmtree(place)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
