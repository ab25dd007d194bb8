#!/usr/bin/env python3
"""Checkpoints through sf-host: saves beside training, kill -9 at random moments, damage, other ranks and backends on resume, the verb checkpoints. About 45 s.

    tests/e2e/checkpoints.py BUILD_DIR TESTS_DIR [CASE ...]          SF_KILLS=200 kills more often (tools/check), SF_KILLS_SEED=n at other moments

Needs the Python packages of tools/setup for one case (safetensors). Ends with `N passed, N failed`.
"""
import atexit
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import tiny
from tiny import BUILD, ENVIRONMENT, HOST, Work, expect

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
KILLS = int(os.environ.get("SF_KILLS", "10"))
SEED = int(os.environ.get("SF_KILLS_SEED", "7"))   # of their moments
NO_EVAL = ("--set", 'data.eval_hidden_states_path=""')
FLOAT = ("--set", 'training.reduce_dtype="float32"')
WRITER = {"sync": "sync", "async": "async_ckpt"}


def expect_not(text, *parts):
    for part in parts:
        assert part not in text, f"'{part}' is in:\n{text}"


class Run(Work):
    """A folder with captured features, made once and copied."""

    features = None

    def __init__(self, steps=8, samples=24):
        super().__init__(steps=steps, samples=samples)
        if Run.features is None:
            self.host("capture")
            Run.features = pathlib.Path(tempfile.mkdtemp(prefix="sf-e2e-features-")) / "features"
            atexit.register(shutil.rmtree, Run.features.parent)
            shutil.copytree(self.path / "features", Run.features)
        else:
            shutil.copytree(Run.features, self.path / "features")

    def arguments(self, ranks=1, backend=None, writer="sync", run="tiny"):
        backend = backend or ("single" if ranks == 1 else "fsdp2")
        out = ["--backend", f"{backend}+{WRITER[writer]}", "--set", f'run_id="{run}"', *NO_EVAL]
        out += FLOAT if backend == "fsdp2" else ()
        return out + (["--nproc", str(ranks)] if ranks > 1 else [])

    def train(self, *arguments, code=0, **where):
        return self.host("train", *self.arguments(**where), *arguments, code=code)

    def begin(self, *arguments, output=subprocess.PIPE, **where):
        return subprocess.Popen([HOST, "train", self.path / "recipe.toml", *self.arguments(**where), *arguments], cwd=self.path, stdout=output,
                                stderr=output, text=True, env=ENVIRONMENT, start_new_session=True)

    def folder(self, run="tiny"):
        return self.path / "out" / run

    def lines(self, run="tiny"):
        out = []
        for line in (self.folder(run) / "metrics.jsonl").read_text().splitlines():
            try:
                out.append(json.loads(line))
            except ValueError:  # being written
                pass
        return out

    def curve(self, run="tiny"):
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in self.lines(run) if "loss" in line}

    def saves(self, run="tiny"):
        return [line["save"] for line in self.lines(run) if "save" in line]

    def files(self, step, run="tiny"):
        return {file.name: file.read_bytes() for file in sorted((self.folder(run) / f"step-{step:08d}").glob("*.safetensors"))}


def checkpoints(*arguments, code=0, cwd=None):
    done = subprocess.run([HOST, "checkpoints", *map(str, arguments)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=cwd)
    assert code is None or done.returncode == code, f"sf-host checkpoints {arguments}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done


def saves_beside_training_are_those_of_the_built_in_writer():
    work = Run(steps=12)
    work.train("--set", "training.save_interval=3", run="sync")
    work.train("--set", "training.save_interval=3", run="async", writer="async")
    small = ("--set", 'checkpoint.staging_bytes="64KiB"', "--set", "plugin.async_ckpt.threads=3")
    work.train("--set", "training.save_interval=3", *small, run="ring", writer="async")
    for run in ("async", "ring"):
        assert work.curve(run) == work.curve("sync")
        for step in (3, 6, 9, 12):
            assert json.loads(checkpoints("diff", work.folder("sync") / f"step-{step:08d}", work.folder(run) / f"step-{step:08d}", "--json").stdout)["tensors"] == []
            if run == "async":
                assert work.files(step, run) == work.files(step, "sync"), f"{run}, step {step}"
        assert [save["step"] for save in work.saves(run)] == [3, 6, 9, 12], "each save is told once, when it is committed"
        assert all(save["bytes"] > 0 and save["seconds"] > 0 for save in work.saves(run))
    plan = work.host("plan", "--backend", "single+async_ckpt", *small).stdout
    expect(plan, "checkpoint staging", "a ring that", "a save waits for the disk", "async_ckpt")
    expect(work.host("plan", "--backend", "single+async_ckpt").stdout, "checkpoint staging", "a whole snapshot: training goes on while it is written")
    shutil.rmtree(work.path)


def every_sharding_backend_saves_beside_training():
    """Rule A1."""
    work = Run(steps=6)
    for backend, ranks in (("fsdp1", 2), ("fsdp2", 1)):   # fsdp2 on two ranks: the kills, and the package safetensors
        work.train("--set", "training.save_interval=2", run=backend, backend=backend, ranks=ranks, writer="async")
        work.train("--set", "training.save_interval=2", run=backend + "-sync", backend=backend, ranks=ranks)
        for step in (2, 4, 6):
            assert work.files(step, backend) == work.files(step, backend + "-sync")
        assert [save["step"] for save in work.saves(backend)] == [2, 4, 6]
        checkpoints("verify", work.folder(backend))
    shutil.rmtree(work.path)


def ctrl_c_and_sigterm_wait_for_a_slow_save():
    work = Run(steps=4000)
    slow = ("--set", 'plugin.async_ckpt.bandwidth="3MB"', "--set", "training.save_interval=5")
    for number, how in enumerate((signal.SIGINT, signal.SIGTERM)):
        run = f"stopped{number}"
        process = work.begin(*slow, writer="async", run=run)
        limit = time.time() + 60
        while not (work.folder(run) / "metrics.jsonl").exists() or max(work.curve(run), default=0) < 7:
            assert time.time() < limit and process.poll() is None
            time.sleep(0.01)
        process.send_signal(how)
        subprocess.run(["bash", "-c", f"kill -{int(how)} {process.pid}"], check=True)  # as of a batch system beside a launcher: the same wish from another side
        process.communicate(timeout=60)
        assert process.returncode == 130, process.returncode
        last = max(work.curve(run))
        newest = json.loads(checkpoints("list", work.folder(run), "--json").stdout)[0]
        assert newest["state"] == "complete" and newest["step"] == last and newest["latest"], newest
        checkpoints("verify", work.folder(run))
    shutil.rmtree(work.path)


def a_second_ctrl_c_waits_for_nothing():
    work = Run(steps=4000)
    process = work.begin("--set", 'plugin.async_ckpt.bandwidth="20kB"', "--set", "training.save_interval=5", writer="async")
    limit = time.time() + 60
    while not (work.folder() / "metrics.jsonl").exists() or max(work.curve(), default=0) < 4:
        assert time.time() < limit and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "it waits for the save"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130, process.returncode
    assert [path.name for path in work.folder().glob("step-*")] == [], "the save is cut short"
    shutil.rmtree(work.path)


def names_of(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def moment_of(folder):
    """What a run is doing, by the names on its disk: removing, committing (rank 0 adds state, index and marker), saving, or nothing of this."""
    names = names_of(folder)
    if any(name.startswith(".removed-") for name in names):
        return "rotation"
    partial = next((name for name in names if name.startswith(".partial-step-")), None)
    if partial is None:
        return "step"
    return "save" if all(name.endswith(".safetensors") for name in names_of(folder / partial)) else "commit"


def wait_for_moment(work, process, draw, run, wanted):
    """Returns when the run is there, with a random delay, or has ended."""
    folder, limit = work.folder(run), time.time() + 60
    if wanted == "start":
        time.sleep(draw.uniform(0, 0.6))
        return
    begun = max(work.curve(run), default=0) if folder.exists() else 0
    if wanted == "step":
        begun += draw.randrange(0, 4)
        while process.poll() is None and not ((folder / "metrics.jsonl").exists() and max(work.curve(run), default=0) > begun):
            assert time.time() < limit, "no progress"
            time.sleep(0.004)
        time.sleep(draw.uniform(0, 0.03))
        return
    while process.poll() is None and moment_of(folder) != "step":  # what the last kill left is swept first
        assert time.time() < limit, "nothing was swept"
    while process.poll() is None and (moment_of(folder) != wanted or draw.random() < 0.5):  # not always the first one
        assert time.time() < limit, f"no {wanted}"
    time.sleep(draw.choice((0, 0, draw.uniform(0, 0.002))))


def kill_one_rank(process, draw):
    """The launcher goes on; it ends the others."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if children:
        try:
            os.kill(int(draw.choice(children)), signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(timeout=60)


def kill_again_and_again(work, draw, kills, ranks, run, met):
    """Starts, kills -9 at a moment of some kind, looks at what is there, and again, with either writer in turn; then lets the run end. The start after a kill
    is the next one that is killed. `met` counts kills by what the disk showed."""
    newest, number = 0, 0
    busy = ("--set", "training.save_interval=2", "--set", "training.max_checkpoints=3")
    moments = ["step", "save", "commit", "rotation", "step", "save", "commit", "start"]
    while number < kills:
        writer = "async" if number % 2 else "sync"
        slow = ("--set", f'plugin.async_ckpt.bandwidth="{draw.choice((0, 2, 20))}MB"') if writer == "async" else ()
        wanted = moments[(number // 2) % len(moments)]
        with open(work.path / "log", "w+") as log:
            process = work.begin(*busy, *slow, ranks=ranks, writer=writer, run=run, output=log)
            before = newest
            wait_for_moment(work, process, draw, run, wanted)
            if process.poll() is not None:  # it got to its end: from the start again
                log.seek(0)
                assert process.returncode == 0, log.read()
                shutil.rmtree(work.folder(run))
                newest = 0
                continue
            number += 1
            if ranks > 1 and draw.random() < 0.5:
                kill_one_rank(process, draw)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            log.seek(0)
            said = log.read()
        wait_for_end_of_lock(work.folder(run))
        if not work.folder(run).exists():
            continue
        moment = moment_of(work.folder(run))
        met[f"{writer} {moment}"] = met.get(f"{writer} {moment}", 0) + 1
        if "going on from" in said:
            expect(said, f"going on from {work.folder(run)}/step-{before:08d} ")
        else:
            assert before == 0 or wanted == "start", f"step {before} was there, and the run started without it:\n{said}"
        found = json.loads(checkpoints("verify", work.folder(run), "--json", code=None).stdout)
        assert all(one["state"] != "damaged" for one in found), found
        whole = [one["step"] for one in found if one["state"] == "complete"]
        assert max(whole, default=0) >= newest, f"step {newest} was there: {found}"
        newest = max(whole, default=0)
    work.train(*busy, ranks=ranks, writer="async", run=run)


def wait_for_end_of_lock(folder):
    """Ranks of a launcher that was killed die with it, a moment later."""
    limit = time.time() + 10
    while any(str(folder.parent.parent) in text for text in command_lines(pathlib.Path("/proc"))):
        assert time.time() < limit, "a rank is left"
        time.sleep(0.01)


def command_lines(processes):
    for path in processes.glob("[0-9]*/cmdline"):
        try:
            yield path.read_text()
        except OSError:
            pass


def killed_at_any_moment_a_run_ends_with_the_same_bits():
    draw = random.Random(SEED)
    shares = {1: (KILLS + 1) // 2, 2: KILLS // 2}
    steps = 20 + 4 * shares[1]
    work = Run(steps=steps)
    met = {}
    for ranks, kills in shares.items():
        work.train("--set", "training.save_interval=0", ranks=ranks, run=f"whole{ranks}")
        run = f"killed{ranks}"
        kill_again_and_again(work, draw, kills, ranks, run, met)
        assert work.files(steps, run) == work.files(steps, f"whole{ranks}"), f"weights, masters and moments: {run}"
        assert work.curve(run) == work.curve(f"whole{ranks}"), f"every loss: {run}"
        checkpoints("verify", work.folder(run))
    print(f"        {KILLS} kills; the disk showed {', '.join(f'{count} x {what}' for what, count in sorted(met.items()))}")
    assert sum(count for what, count in met.items() if "step" not in what) >= KILLS // 4, "too few of them within a save"
    shutil.rmtree(work.path)


def close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    worst = 0
    for step, (loss, norm) in expected.items():
        for a, b in zip(found[step], (loss, norm)):
            worst = max(worst, abs(a - b) / max(abs(a), abs(b)))
    assert worst < tolerance, f"relative difference {worst}"
    return worst


def window(ranks):
    """12 samples in a window, on 1, 2 and 3 ranks."""
    micro_steps, batch = {1: (3, 4), 2: (2, 3), 3: (2, 2)}[ranks]
    return ("--set", f"training.accumulation_steps={micro_steps}", "--set", f"training.batch_size={batch}")


CALM = ("--set", "training.save_interval=0", "--set", "training.learning_rate=1e-3")


def legs(work, run, order):
    """The run in parts, each on other ranks and another backend; the optimizer's state goes with it."""
    for number, (backend, ranks) in enumerate(order, 1):
        done = work.train(*window(ranks), *CALM, "--set", f"training.max_steps={3 * number}", "--set", f"training.total_steps={3 * len(order)}",
                          backend=backend, ranks=ranks, run=run, writer="async" if number % 2 else "sync")
        if number > 1:
            expect(done.stdout + done.stderr, "going on from")
            expect_not(done.stdout + done.stderr, "an optimizer step took")


def losses_go_on_on_other_numbers_of_ranks():
    work = Run(steps=12)
    work.train(*window(1), *CALM, run="whole")
    legs(work, "ranks", [("single", 1), ("fsdp2", 2), ("fsdp2", 3), ("single", 1)])
    print(f"        1, 2, 3, 1 ranks: relative difference {close(work.curve('ranks'), work.curve('whole')):.1e}")
    told = work.train("--set", "training.max_steps=13", "--set", "training.total_steps=12", *window(1), ranks=2, run="ranks").stderr
    assert told.count("an optimizer step took") == 1, told  # by one rank for all
    shutil.rmtree(work.path)


def losses_go_on_under_other_backends():
    work = Run(steps=9)
    work.train(*window(1), *CALM, run="whole")
    legs(work, "backends", [("fsdp1", 2), ("fsdp2", 2), ("single", 1)])
    print(f"        fsdp1, fsdp2, single: relative difference {close(work.curve('backends'), work.curve('whole')):.1e}")
    for step in (3, 6, 9):
        folder = work.folder("backends") / f"step-{step:08d}"
        work.host("export", "--set", 'run_id="backends"', "--output", work.path / f"export{step}", "--checkpoint", folder, *window(1))
        assert (work.path / f"export{step}" / "model.safetensors").exists()
    assert json.loads(checkpoints("inspect", work.folder("backends") / "step-00000003", "--json").stdout)["sharding"] == "fsdp1"
    refused = work.train(*window(1), "--set", "training.seed=7", run="backends", code=7).stderr
    expect(refused, "seed: the checkpoint has 42, this run 7")
    shutil.rmtree(work.path)


def every_damage_has_one_message_and_the_good_one_before_it_is_named():
    work = Run(steps=4)
    work.train("--set", "training.save_interval=2", ranks=2)
    good, last = work.folder() / "step-00000002", work.folder() / "step-00000004"
    kept = work.path / "kept"
    shutil.copytree(last, kept)

    def flip(name, place):
        data = bytearray((last / name).read_bytes())
        data[place] ^= 1
        (last / name).write_bytes(data)

    def cut(name):
        data = (last / name).read_bytes()
        (last / name).write_bytes(data[: len(data) // 2])

    damages = {
        "a bit flipped": (lambda: flip("rank00001.safetensors", -5), "in rank00001.safetensors has changed since it was written (checksum)"),
        "a rank's file missing": (lambda: (last / "rank00001.safetensors").unlink(), "rank00001.safetensors is missing"),
        "a file removed": (lambda: (last / "state.json").unlink(), "state.json is missing"),
        "index truncated": (lambda: cut("index.json"), "index.json is not the one that COMMITTED names"),
        "a file truncated": (lambda: cut("rank00000.safetensors"), "bytes, expected"),
        "marker gone": (lambda: (last / "COMMITTED").unlink(), "has no COMMITTED"),
    }
    for name, (damage, message) in damages.items():
        damage()
        told = checkpoints("verify", work.folder(), code=7).stdout
        expect(told, "step-00000004", message)
        assert sum("damaged:" in line for line in told.splitlines()) == 1, f"{name}: {told}"
        expect(checkpoints("inspect", last, code=7).stderr, message, str(good))
        if name in ("a bit flipped", "a rank's file missing"):
            told = work.train("--set", "training.max_steps=6", "--set", "training.total_steps=4", ranks=2, code=7).stderr
            assert told.count("error: ") == 1, told
            expect(told, message, str(good))
        shutil.rmtree(last)
        shutil.copytree(kept, last)
    checkpoints("verify", work.folder())
    shutil.rmtree(work.path)


def a_full_disk_ends_the_run_and_the_step_before_stays():
    work = Run(steps=9)
    often = ("--set", "training.save_interval=3", "--set", "training.total_steps=9")
    for writer in WRITER:
        work.train(*often, "--set", "training.max_steps=3", writer=writer, run=writer)
        limited = ["bash", "-c", 'ulimit -f "$0"; exec "$@"', "120", HOST, "train", work.path / "recipe.toml", *work.arguments(writer=writer, run=writer), *often]
        # files of 120 KiB stand for the disk: features are larger and only read
        done = subprocess.run(list(map(str, limited)), cwd=work.path, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
        assert done.returncode == 7, done.stderr
        assert done.stderr.count("error: ") == 1, done.stderr
        expect(done.stderr, "saving step 6", "rank00000.safetensors", "free some space", "the last checkpoint is step 3")
        assert [path.name for path in work.folder(writer).glob("*step-*")] == ["step-00000003"], "nothing half is left"
        checkpoints("verify", work.folder(writer))
        work.train(*often, writer=writer, run=writer)
        assert sorted(path.name for path in work.folder(writer).glob("step-*")) == ["step-00000003", "step-00000006", "step-00000009"]
    assert work.files(9, "sync") == work.files(9, "async")
    shutil.rmtree(work.path)


def the_default_goes_on_and_none_starts_only_where_nothing_is():
    work = Run(steps=6)
    work.train("--set", "training.max_steps=3", "--set", "training.total_steps=6")
    expect(work.train().stderr + "", "going on from")
    expect(work.train().stderr, "nothing to do")
    expect(work.train("--resume", "none", code=2).stderr, "already holds checkpoints", "--resume auto")
    expect(work.train("--init-from", work.folder() / "step-00000003", code=2).stderr, "already holds checkpoints")
    expect(work.train("--resume", work.path / "out", code=7).stderr, "holds no checkpoint itself", "name one of the runs in it", "out/tiny")
    expect(work.train("--init-from", work.path / "nowhere", run="other", code=7).stderr, "nowhere does not exist", "name a step's folder, or a run's")
    expect(work.train("--set", "training.learning_rate=3e-3", "--set", "training.max_steps=3", "--set", "training.total_steps=6").stderr,
           "training.learning_rate was 0.01 and is 0.003")
    work.train("--init-from", work.folder() / "step-00000003", run="other")
    assert min(work.curve("other")) == 1
    work.train("--resume", work.folder() / "step-00000003", "--set", "training.save_interval=2")
    assert work.steps() == [3, 4, 6], "the future that a rewound run overtakes goes when its first save is committed"
    shutil.rmtree(work.path)


def the_verb_lists_inspects_compares_and_prunes():
    work = Run(steps=10)
    work.train("--set", "training.save_interval=2", "--set", "training.max_checkpoints=4", "--set", "checkpoint.keep_every=4")
    assert work.steps() == [4, 6, 8, 10], "the newest four; 4 and 8 are multiples of 4"
    recipe = (work.path / "recipe.toml", *NO_EVAL)
    listed = checkpoints("list", *recipe, cwd=work.path).stdout
    assert [line.split()[0] for line in listed.splitlines()] == [f"step-{step:08d}" for step in (10, 8, 6, 4)], listed
    expect(listed.splitlines()[0], "latest", "1 rank of single")
    expect(checkpoints("inspect", work.folder()).stdout, "tensors", "exp_avg_sq", "training.batch_size", "rank00000.safetensors")
    told = checkpoints("diff", work.folder() / "step-00000004", work.folder() / "step-00000006").stdout
    expect(told, "step: 4 and 6", "numbers differ, by")
    expect(checkpoints("prune", work.folder(), "--keep", 1, "--dry-run").stdout, "would delete")
    assert len(work.steps()) == 4
    checkpoints("prune", work.folder(), "--keep", 1, "--keep-every", 4)
    assert work.steps() == [4, 8, 10]
    expect(checkpoints("prune", work.folder(), code=2).stderr, "--keep")
    expect(checkpoints("lst", work.folder(), code=2).stderr, "did you mean", "list")
    expect(checkpoints("diff", work.folder(), code=2).stderr, "takes 2 arguments")
    expect(checkpoints("list", work.path / "nowhere", code=7).stderr, "nowhere")
    expect(checkpoints("list", work.path / "out").stdout, "no checkpoint in", "runs below it", "out/tiny")
    for action in (("list",), ("prune", "--keep", 1)):
        expect(checkpoints(action[0], work.folder() / "step-00000008", *action[1:], code=7).stderr, "is one checkpoint, not a run", str(work.folder()))
    expect(checkpoints("verify", work.folder()).stdout, "every byte checked: 3 whole, 0 damaged")
    expect(work.train("--resume", "step-00000008", code=7).stderr, "no folder is called so", "out/tiny/step-00000008")
    shutil.rmtree(work.path)


def a_list_has_nothing_that_a_run_removes_meanwhile():
    work = Run(steps=80)
    process = work.begin("--set", "training.save_interval=1", "--set", "training.max_checkpoints=2", "--set", "training.log_interval=1000")
    while not work.steps():
        assert process.poll() is None
    while process.poll() is None:
        assert "damaged" not in checkpoints("list", work.folder()).stdout
    process.communicate()
    assert process.returncode == 0, process.returncode
    shutil.rmtree(work.path)


def weights_of_many_ranks_are_read_by_the_package_safetensors():
    import fetch_smollm2

    fetch_smollm2.use_python_packages()
    import numpy
    import safetensors

    work = Run(steps=2)
    work.train(ranks=2, writer="async")
    folder = work.folder() / "step-00000002"
    index = json.loads((folder / "index.json").read_text())
    work.host("export", "--output", work.path / "export", "--checkpoint", folder, "--set", 'export.dtype="float32"')
    count = 0
    with safetensors.safe_open(work.path / "export" / "model.safetensors", "np") as exported:
        files = {name: safetensors.safe_open(folder / name, "np") for name in index["files"] if name.endswith(".safetensors")}
        for name in exported.keys():
            parts = [file.get_tensor("weights/" + name) for file in files.values() if "weights/" + name in file.keys()]
            assert numpy.array_equal(numpy.concatenate(parts).reshape(exported.get_tensor(name).shape), exported.get_tensor(name)), name
            count += 1
    assert count > 20, count
    shutil.rmtree(work.path)


if __name__ == "__main__":
    tiny.main(globals())
