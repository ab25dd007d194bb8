#!/usr/bin/env python3
"""Ten updates (twenty on GPUs) of each algorithm under fsdp1 and fsdp2, over ranks that are processes, equal those of one process; and checkpoints go from one to another.

    tests/sharding/backends.py BUILD_DIR [--all] [case ...]

Runs the tiny recipes on the CPU; SF_DEVICE=cuda and SF_MOST_RANKS=2 run them on two GPUs; SF_SET="training.peer_copies=off ..." sets more options
wherever there are several ranks. Without --all each backend meets each mode and each number of ranks once; with it every combination runs
(tools/check). Standard library only. Ends with `N passed, N failed`.
"""
import array
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

BUILD = pathlib.Path(sys.argv[1]).resolve()
HOST = BUILD / "bin" / "sf-host"
ROOT = pathlib.Path(__file__).resolve().parents[2]
ALL = "--all" in sys.argv
DEVICE = os.environ.get("SF_DEVICE", "cpu")
MOST_RANKS = int(os.environ.get("SF_MOST_RANKS", "4"))
MORE = [part for one in os.environ.get("SF_SET", "").split() for part in ("--set", one)]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEPS = 10 if DEVICE == "cpu" else 20
TOLERANCE = 1e-6 if DEVICE == "cpu" else 1e-5  # seen on the CPU: 2.4e-7

# Which runs must agree depends on how an algorithm pools (docs/architecture.md): (micro-steps, batch) on 1, 2, 3 and 4 ranks, 12 samples in a window.
POOLING = {
    "dflash2": {1: (6, 2), 2: (2, 3), 3: (4, 1), 4: (1, 3)},   # window: any split of the same samples
    "dspark": {1: (1, 12), 2: (1, 6), 3: (1, 4), 4: (1, 3)},   # micro: W ranks x b against one rank x W * b
    "eagle3": {1: (12, 1), 2: (6, 1), 3: (4, 1), 4: (3, 1)},   # mean: W ranks against one with W times the micro-steps
}
MODES = ("SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD")
FEW = [("fsdp1", "SHARD_GRAD_OP", 2), ("fsdp1", "FULL_SHARD", 3), ("fsdp1", "NO_SHARD", 4), ("fsdp2", "SHARD_GRAD_OP", 4), ("fsdp2", "FULL_SHARD", 2),
       ("fsdp2", "NO_SHARD", 3)]
EVERY = [(backend, mode, ranks) for backend in ("fsdp1", "fsdp2") for mode in MODES for ranks in (1, 2, 3, 4)]


class Place:
    """A folder with captured features of one algorithm's tiny recipe."""

    def __init__(self, algorithm):
        self.algorithm = algorithm
        self.recipe = ROOT / "recipes" / f"tiny-{algorithm}.toml"
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="sf-backends-"))
        self.host("capture")

    def host(self, verb, *arguments, code=0, ranks=1):
        sets = {"device": DEVICE, "output_dir": self.path / "runs", "data.hidden_states_path": self.path / "train", "data.eval_hidden_states_path": self.path / "held_out"}
        command = [HOST, verb, self.recipe] + [part for key, value in sets.items() for part in ("--set", f'{key}="{value}"')]
        command += ["--nproc", str(ranks), *MORE] if ranks > 1 else []
        done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        assert done.returncode == code, f"{' '.join(map(str, arguments))}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
        return done

    def train(self, run, *arguments, backend="single", mode=None, ranks=1, steps=STEPS, code=0, writer="sync"):
        micro_steps, batch = POOLING[self.algorithm][ranks]
        values = {"run_id": f'"{run}"', "training.max_steps": steps, "training.total_steps": STEPS, "training.accumulation_steps": micro_steps,
                  "training.batch_size": batch, "training.learning_rate": 1e-3, "training.log_interval": 1, "training.save_interval": 0,
                  "training.eval_interval": 0, "training.max_checkpoints": 0, "data.eval_hidden_states_path": '""'}
        if not backend.startswith("single"):
            values["training.fsdp_sharding"] = f'"{mode}"'
        if backend.startswith("fsdp2"):
            values["training.reduce_dtype"] = '"float32"'
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        return self.host("train", "--backend", f"{backend}+{writer}", *sets, *arguments, ranks=ranks, code=code)

    def curve(self, run):
        lines = [json.loads(line) for line in (self.path / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]

    def tensors(self, run, step=STEPS):
        """Every float32 tensor of a checkpoint, put together from the ranks' slices."""
        folder = self.path / "runs" / run / f"step-{step:08d}"
        files = {}
        found = {}
        for name, tensor in json.loads((folder / "index.json").read_text())["tensors"].items():
            size = 1
            for extent in tensor["shape"]:
                size *= extent
            whole = array.array("f", bytes(4 * size))
            for piece in tensor["slices"]:
                if piece["file"] not in files:
                    files[piece["file"]] = (folder / piece["file"]).read_bytes()
                values = array.array("f", files[piece["file"]][piece["offset"] : piece["offset"] + piece["bytes"]])
                row = 1
                for extent in (tensor["shape"][1:] if len(piece["start"]) == len(tensor["shape"]) else []):
                    row *= extent
                begin = (piece["start"][0] if piece["start"] else 0) * row
                whole[begin : begin + len(values)] = values
            found[name] = whole
        return found


def relative(a, b):
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def compare(place, run, expected, what):
    """The largest relative difference of a loss or a gradient norm."""
    curve = place.curve(run)
    assert len(curve) == STEPS, f"{what}: {len(curve)} updates"
    for step, (found, wanted) in enumerate(zip(curve, expected["curve"]), 1):
        assert relative(found[0], wanted[0]) < TOLERANCE, f"{what}, update {step}: loss {found[0]}, expected {wanted[0]}"
        assert relative(found[1], wanted[1]) < TOLERANCE, f"{what}, update {step}: gradient norm {found[1]}, expected {wanted[1]}"
    tensors = place.tensors(run)
    assert tensors.keys() == expected["tensors"].keys(), what
    for name, wanted in expected["tensors"].items():
        if not name.startswith("weights/"):
            continue
        largest = max(map(abs, wanted), default=0) or 1
        worst = max((abs(a - b) for a, b in zip(tensors[name], wanted)), default=0)
        # AdamW's first updates go by the sign of a gradient: an element whose gradient is all rounding may move by the learning rate either way.
        assert worst < 2e-3 * largest or worst < 2e-3, f"{what}: {name} differs by {worst} of {largest}"
        mean = sum(abs(a - b) for a, b in zip(tensors[name], wanted)) / max(1, len(wanted))
        assert mean < 1e-5 * largest, f"{what}: {name} differs by {mean} of {largest} on average"
    return max(relative(a, b) for pair in zip(curve, expected["curve"]) for a, b in zip(*pair))


def trains_as_one_process(algorithm):
    place = Place(algorithm)
    place.train("single")
    expected = {"curve": place.curve("single"), "tensors": place.tensors("single")}
    options = [(), ("--set", "training.reduce_scatter_max_input_buffers=2"), ("--set", "training.separate_reduce_scatter_group=true"),
               ("--set", "training.shard_frozen_tables=true")]
    few = FEW + [("fsdp2", "SHARD_GRAD_OP", 1)] if algorithm == "dflash2" else FEW
    for number, (backend, mode, ranks) in enumerate(case for case in (EVERY if ALL else few) if case[2] <= MOST_RANKS):
        more = options[number % 4] if backend == "fsdp2" and mode != "NO_SHARD" and ranks > 1 else ()
        what = f"{algorithm}, {backend} {mode}, {ranks} ranks {' '.join(more[1:])}"
        place.train("run", *more, backend=backend, mode=mode, ranks=ranks)
        compare(place, "run", expected, what)
        shutil.rmtree(place.path / "runs" / "run")
    shutil.rmtree(place.path)


def dflash2_trains_as_one_process():
    trains_as_one_process("dflash2")


def dspark_trains_as_one_process():
    trains_as_one_process("dspark")


def eagle3_trains_as_one_process():
    trains_as_one_process("eagle3")


def a_window_has_one_gather_and_one_reduction_for_each_group():
    for algorithm, layers in (("dflash2", 3), ("dspark", 2), ("eagle3", 1)):
        for backend in ("fsdp1", "fsdp2"):
            command = [HOST, "bench", ROOT / "recipes" / f"tiny-{algorithm}.toml", "--nproc", "2", "--backend", backend, "--steps", "2", "--repeats", "1",
                       "--json", "--set", f'device="{DEVICE}"', "--set", "training.accumulation_steps=3", "--set", f"model.draft_num_hidden_layers={layers}", *MORE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout)
            counts = dict(result["collectives"])
            windows = result["windows"]
            assert windows >= 2
            assert counts.pop("all_reduce denominators") == windows and counts.pop("all_reduce gradient norm") == windows, counts
            gathers = {name: times for name, times in counts.items() if name.startswith("all_gather ")}
            reductions = {name: times for name, times in counts.items() if name.startswith("reduce_scatter ")}
            assert "all_gather root" in gathers and len(gathers) == len(reductions) == layers + 1, f"{algorithm}: {counts}"
            assert set(gathers.values()) == set(reductions.values()) == {windows}, f"{algorithm}, {windows} windows: {counts}"
            assert len(gathers) + len(reductions) == len(counts), f"{algorithm}: nothing else is communicated: {counts}"


def a_run_goes_on_under_the_same_backend_with_the_same_bits():
    place = Place("dflash2")
    for backend, mode, ranks in (("fsdp1", "FULL_SHARD", 2), ("fsdp2", "SHARD_GRAD_OP", min(3, MOST_RANKS))):
        place.train("whole", backend=backend, mode=mode, ranks=ranks)
        place.train("cut", backend=backend, mode=mode, ranks=ranks, steps=4)
        place.train("cut", "--resume", "auto", backend=backend, mode=mode, ranks=ranks)
        assert place.curve("cut") == place.curve("whole")
        assert place.tensors("cut") == place.tensors("whole")
        shutil.rmtree(place.path / "runs")
    shutil.rmtree(place.path)


def a_run_goes_on_from_two_ranks_to_one_and_back_with_the_same_losses():
    place = Place("dflash2")
    place.train("whole")
    for backend, mode in (("fsdp1", "SHARD_GRAD_OP"), ("fsdp2", "FULL_SHARD")):
        run = f"{backend}-legs"
        for ranks, end in ((2, STEPS // 3), (1, 2 * STEPS // 3), (2, STEPS)):
            done = place.train(run, backend=backend if ranks > 1 else "single", mode=mode, ranks=ranks, steps=end, writer="async_ckpt")
            assert end == STEPS // 3 or "going on from" in done.stdout + done.stderr
        worst = compare(place, run, {"curve": place.curve("whole"), "tensors": place.tensors("whole")}, f"{backend}: 2, 1, 2 ranks")
        print(f"        {backend}: 2, 1, 2 ranks: relative difference {worst:.1e}")
    shutil.rmtree(place.path)


def a_run_goes_on_under_other_backends_and_numbers_of_ranks():
    if MOST_RANKS < 4:
        return
    place = Place("dflash2")
    same = ("--set", "training.accumulation_steps=1", "--set", "training.batch_size=2")
    place.train("run", *same, backend="fsdp2", mode="FULL_SHARD", ranks=3, steps=3)            # 3 windows of 6 samples
    before = place.tensors("run", 3)
    done = place.train("run", *same, "--resume", "auto", backend="fsdp1", mode="SHARD_GRAD_OP", ranks=2, steps=5)   # 2 windows of 4
    assert "going on from" in done.stdout + done.stderr
    place.train("run", *same, "--resume", "auto", steps=6)                                     # 1 window of 2
    positions = [json.loads((place.path / "runs" / "run" / f"step-{step:08d}" / "state.json").read_text())["position"] for step in (3, 5, 6)]
    assert positions == [18, 26, 28], f"every sample of the stream once: {positions}"
    # What was read is what was saved: weights alone, into yet another cut.
    folder = place.path / "runs" / "run" / "step-00000003"
    done = place.train("weights", *same, "--init-from", folder, "--set", "training.learning_rate=1e-30", backend="fsdp1", mode="FULL_SHARD", ranks=4, steps=1)
    after = place.tensors("weights", 1)
    for name in before:  # what the one update of no size has added to a zero is nothing, too
        assert not name.startswith("weights/") or max(abs(a - b) for a, b in zip(after[name], before[name])) < 1e-20, name
    place.host("export", "--set", 'run_id="run"', "--output", place.path / "export", "--checkpoint", folder)
    assert (place.path / "export" / "model.safetensors").exists()
    shutil.rmtree(place.path)


def float8_on_two_ranks_trains_as_on_one_and_a_gather_in_float8_changes_no_bit():
    place = Place("dspark")
    fp8 = () if DEVICE == "cuda" else ("--set", "plugin.fp8.emulate=true")
    if DEVICE == "cuda":
        fp8 += ("--set", 'model.torch_dtype="bfloat16"')
    place.train("one", *fp8, backend="single+fp8")
    one = place.curve("one")
    for mode in ("SHARD_GRAD_OP", "FULL_SHARD"):
        curves = []
        for gather in ("false", "true"):
            run = f"{mode}-{gather}"
            place.train(run, *fp8, "--set", f"plugin.fp8.gather={gather}", backend="fsdp2+fp8", mode=mode, ranks=2)
            curves.append(place.curve(run))
        assert curves[0] == curves[1], f"{mode}: {curves}"
        worst = [max(relative(a[i], b[i]) for a, b in zip(one, curves[0])) for i in (0, 1)]
        print(f"        {mode}: first loss differs by {relative(one[0][0], curves[0][0][0]):.1e}, all losses by up to {worst[0]:.1e}, norms by {worst[1]:.1e}")
        assert relative(one[0][0], curves[0][0][0]) < 2e-3 and worst[0] < 2e-2, (one, curves[0])   # a sum that rounds another way moves an encoded number by a whole step
    shutil.rmtree(place.path)


def main():
    cases = [dflash2_trains_as_one_process, dspark_trains_as_one_process, eagle3_trains_as_one_process, a_window_has_one_gather_and_one_reduction_for_each_group,
             a_run_goes_on_under_the_same_backend_with_the_same_bits, a_run_goes_on_from_two_ranks_to_one_and_back_with_the_same_losses, a_run_goes_on_under_other_backends_and_numbers_of_ranks,
             float8_on_two_ranks_trains_as_on_one_and_a_gather_in_float8_changes_no_bit]
    only = [word for word in sys.argv[2:] if not word.startswith("--")]
    passed = failed = 0
    for case in cases:
        if only and case.__name__ not in only:
            continue
        start = time.time()
        try:
            case()
            passed += 1
            print(f"ok      {case.__name__.replace('_', ' ')} ({time.time() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {case.__name__.replace('_', ' ')}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
