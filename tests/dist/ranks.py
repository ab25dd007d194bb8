#!/usr/bin/env python3
"""Ranks as processes of sf-host on the CPU: the same training as one process, and what happens when ranks die, hang, differ or are too many.

    tests/dist/ranks.py BUILD_DIR TESTS_DIR [case ...]

On GPUs with SF_DEVICE=cuda; tests/sharding/backends.py says what the other variables do.
Standard library only. Ends with `N passed, N failed`.
"""
import atexit
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from tiny import BUILD, ENVIRONMENT, HOST, Work, expect, main  # noqa: E402

FSDP2 = ("--backend", "fsdp2", "--set", 'training.reduce_dtype="float32"', *(part for one in os.environ.get("SF_SET", "").split() for part in ("--set", one)))


class Ranks(Work):
    """A folder with captured features, made once and copied."""

    features = {}  # by number of samples

    def __init__(self, steps=8, samples=24):
        super().__init__(steps=steps, samples=samples)
        made = Ranks.features.get(samples)
        if made is None:
            self.host("capture")
            made = Ranks.features[samples] = pathlib.Path(tempfile.mkdtemp(prefix="sf-e2e-features-")) / "features"
            atexit.register(shutil.rmtree, made.parent)
            shutil.copytree(self.path / "features", made)
        else:
            shutil.copytree(made, self.path / "features")

    def train(self, *arguments, ranks=1, code=0, run="tiny", **options):
        sets = ("--set", f'run_id="{run}"', "--set", "data.eval_hidden_states_path=\"\"")
        return self.host("train", *(("--nproc", str(ranks), *FSDP2) if ranks > 1 else ()), *sets, *arguments, code=code, **options)

    def curve(self, run):
        lines = [json.loads(line) for line in (self.path / "out" / run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    def start_ranks(self, ranks, *arguments):
        return self.start("--nproc", str(ranks), *FSDP2, *arguments)


def close(a, b, tolerance=2e-5):
    """float32: sums in another order; over some updates of a small draft that grows a little."""
    assert a.keys() == b.keys(), (sorted(a), sorted(b))
    for step in a:
        for x, y in zip(a[step], b[step]):
            assert abs(x - y) <= tolerance * max(abs(x), abs(y)), f"step {step}: {a[step]} against {b[step]}"


def children_of(process):
    return [int(word) for word in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition, seconds, what):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, what
        time.sleep(0.02)


def finish(process, seconds, code):
    start = time.time()
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, f"exit {process.returncode}, expected {code}\n{out}\n{err}"
    assert time.time() - start < seconds, f"took {time.time() - start:.1f} s"
    return err


def errors_in(text):
    return [line for line in text.splitlines() if "error: " in line]


def ranks_train_as_one_process_does():
    work = Ranks()
    work.train("--set", "training.batch_size=4", run="one")  # 4 x 2 samples in a window
    work.train(ranks=2, run="two")                            # 2 ranks x 2 x 2
    close(work.curve("one"), work.curve("two"))
    work.train("--set", "training.batch_size=1", ranks=4, run="four")
    close(work.curve("one"), work.curve("four"))
    told = work.train("--json", "-v", ranks=2, run="again")
    assert json.loads(told.stdout)["updates"] == 8, "only rank 0 prints the summary"
    lines = [line for line in told.stderr.splitlines() if " debug " in line]
    assert all(re.match(r"(\[rank 1\] )?\d\d:\d\d:\d\d debug ", line) for line in lines), lines
    assert any(line.startswith("[rank 1] ") for line in lines), "lines of ranks other than 0 say whose they are"
    assert work.curve("two") == work.curve("again"), "the same bits in every run"
    shutil.rmtree(work.path)


def samples_that_ranks_do_not_divide_are_used_once_each():
    work = Ranks(samples=7)
    one_epoch = ("--set", "training.max_steps=0", "--set", "training.num_epochs=2", "--set", "training.accumulation_steps=1")
    work.train(*one_epoch, "--set", "training.batch_size=3", run="one")             # 14 entries: windows of 3, the last has 2
    work.train(*one_epoch, "--set", "training.batch_size=1", ranks=3, run="three")
    close(work.curve("one"), work.curve("three"))
    assert len(work.curve("three")) == 5
    done = work.train(*one_epoch, "--set", "training.batch_size=4", ranks=4, run="many")   # 16 places for 7 samples: more ranks than samples at the end
    expect(done.stderr, "goes through the data more than once")
    work.train(*one_epoch, "--set", "training.batch_size=16", run="large")
    close(work.curve("large"), work.curve("many"))
    shutil.rmtree(work.path)


def evaluations_agree_and_only_rank_0_writes():
    work = Ranks(steps=4)
    keep = ("--set", 'data.eval_hidden_states_path="features/eval"')
    work.train("--set", "training.batch_size=4", *keep, run="one")
    done = work.train(*keep, ranks=2, run="two")
    ends = []
    for run in ("one", "two"):
        lines = [json.loads(line) for line in (work.path / "out" / run / "metrics.jsonl").read_text().splitlines()]
        assert len([line for line in lines if "eval" in line]) == 2, "before and after"
        ends.append([line["eval"] for line in lines if "eval" in line][-1])
    assert ends[0]["samples"] == ends[1]["samples"] == 6
    for name in ("loss", "acceptance_length"):
        assert abs(ends[0][name] - ends[1][name]) < 1e-4, (name, ends)
    assert "[rank 1]" not in done.stderr, done.stderr
    expect(done.stdout, "2 ranks", "gloo")
    shutil.rmtree(work.path)


def ctrl_c_finishes_the_window_saves_and_goes_on_to_the_same_weights():
    work = Ranks(steps=30)
    work.train(ranks=2, run="tiny")
    shutil.move(work.path / "out" / "tiny", work.path / "out" / "whole")
    whole = (work.path / "out" / "whole" / "metrics.jsonl").read_text()
    arguments = ("--set", 'data.eval_hidden_states_path=""')
    process = work.start_ranks(2, *arguments)
    work.wait_for_step(process, 9)
    process.send_signal(signal.SIGINT)
    finish(process, 20, 130)
    assert work.steps() and work.steps()[-1] < 30, work.steps()
    work.train("--resume", "auto", ranks=2)
    rows = [[(line["step"], line["loss"]) for line in map(json.loads, text.splitlines()) if "loss" in line] for text in (whole, (work.run / "metrics.jsonl").read_text())]
    assert rows[0] == rows[1], "every loss is the same"
    shutil.rmtree(work.path)


def ctrl_c_while_ranks_are_starting_ends_all():
    work = Ranks(steps=4000)
    for delay in (0, 0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
        process = work.start_ranks(2, "--set", 'run_id="early"', "--set", 'data.eval_hidden_states_path=""')
        wait_until(lambda: len(children_of(process)) >= 1, 10, "no ranks")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        text = finish(process, 20, 130)
        assert "was killed by signal" not in text, text
    shutil.rmtree(work.path)


def ranks_inside_of_torchrun_keep_their_own_store():
    work = Ranks(steps=2)
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    command = [HOST, "train", work.path / "recipe.toml", "--nproc", "2", *FSDP2, "--set", 'data.eval_hidden_states_path=""', "--set", 'training.dist_timeout="10s"']
    done = subprocess.run(command, cwd=work.path, capture_output=True, text=True, timeout=60, env={**ENVIRONMENT, **inherited})
    assert done.returncode == 0 and work.steps() == [2], done.stderr
    shutil.rmtree(work.path)


def a_log_that_nobody_reads_any_more_ends_no_run():
    work = Ranks(steps=12)
    for ranks in (1, 2):
        run = ("--set", f'run_id="unread{ranks}"', "--set", 'data.eval_hidden_states_path=""', "-v")
        process = work.start_ranks(2, *run) if ranks == 2 else work.start(*run)
        process.stdout.readline()  # the plan has been printed
        process.stderr.readline()
        process.stderr.close()
        process.wait(timeout=60)
        assert process.returncode == 0, process.returncode
        assert (work.path / "out" / f"unread{ranks}" / "step-00000012" / "COMMITTED").exists()
    shutil.rmtree(work.path)


def what_a_stopped_run_tells_as_its_loss_is_that_of_all_ranks():
    work = Ranks(steps=4000)
    process = work.start_ranks(2, "--json", "--set", 'data.eval_hidden_states_path=""', "--set", "training.log_interval=4000")
    wait_until(lambda: work.run.joinpath("metrics.jsonl").exists() and work.losses(), 60, "no progress")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    told = json.loads(out)
    assert process.returncode == 130 and told["updates"] > 1, (process.returncode, out, err)
    assert told["loss"] == work.losses()[1], "other windows' losses were not summed over the ranks"
    shutil.rmtree(work.path)


def a_killed_rank_ends_all_with_one_message():
    work = Ranks(steps=4000)
    for victim in (1, 0):
        process = work.start_ranks(2, "--set", f'run_id="killed{victim}"', "--set", 'data.eval_hidden_states_path=""', "--set", "training.save_interval=0")
        metrics = work.path / "out" / f"killed{victim}" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 60, "no progress")
        ranks = children_of(process)
        assert len(ranks) == 2
        os.kill(ranks[victim], signal.SIGKILL)
        text = finish(process, 20, 6)
        assert len(errors_in(text)) == 1, text
        expect(errors_in(text)[0], f"rank {victim} was killed by signal 9")
        assert not any(is_alive(pid) for pid in ranks)
    shutil.rmtree(work.path)


def a_rank_killed_before_its_first_window_ends_all():
    work = Ranks(steps=4000)
    for victim, delay in ((1, 0.2), (0, 0.2), (1, 0.8), (1, 1.5), (1, 2.5)):  # at different places of the start
        process = work.start_ranks(2, "--set", 'run_id="early"', "--set", 'data.eval_hidden_states_path=""', "--set", "training.save_interval=0", "--set", "training.log_interval=4000")
        wait_until(lambda: len(children_of(process)) == 2, 10, "no ranks")
        ranks = children_of(process)
        time.sleep(delay)
        os.kill(ranks[victim], signal.SIGKILL)
        text = finish(process, 20, 6)
        assert len(errors_in(text)) == 1, text
        expect(errors_in(text)[0], f"rank {victim} was killed by signal 9")
        assert not any(is_alive(pid) for pid in ranks)
    shutil.rmtree(work.path)


def a_rank_that_hangs_is_named_with_the_collective():
    work = Ranks(steps=4000)
    process = work.start_ranks(3, "--set", 'data.eval_hidden_states_path=""', "--set", 'training.dist_timeout="5s"')
    work.wait_for_step(process, 3)
    ranks = children_of(process)
    os.kill(ranks[2], signal.SIGSTOP)
    text = finish(process, 40, 6)
    assert len(errors_in(text)) == 1, text
    expect(text, "rank 2")
    assert "had not arrived, and says nothing any more" in text or "and rank 2 says nothing any more" in text or "silent" in text, text
    assert not any(is_alive(pid) for pid in ranks), "no rank is left behind, stopped ones included"
    shutil.rmtree(work.path)


def no_rank_outlives_a_launcher_that_is_killed():
    work = Ranks(steps=4000)
    process = work.start_ranks(2, "--set", 'data.eval_hidden_states_path=""')
    work.wait_for_step(process, 2)
    ranks = children_of(process)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in ranks), 5, "ranks are left")
    shutil.rmtree(work.path)


def a_port_in_use_is_told():
    work = Ranks()
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        port = taken.getsockname()[1]
        text = work.train("--rendezvous", f"127.0.0.1:{port}", "--set", 'training.dist_timeout="3s"', ranks=2, code=6).stderr
    expect(text, f"port {port} is in use", "--rendezvous")
    shutil.rmtree(work.path)


def variables_of_torchrun(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def variables_of_a_pod(rank, size, port):
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def variables_of_mpirun(rank, size, port):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            "MASTER_PORT": port}


def variables_of_srun(rank, size, port):
    return {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0, "MASTER_PORT": port}


def ranks_by_hand(work, port, rows, limit="20s", variables=variables_of_torchrun, places=None, **more):
    """Ranks as another launcher starts them: one process each, with that one's variables. rows: extra arguments of each, None: does not come. places: the folder
    that each stands in. more: for the last of them."""
    processes = []
    for rank, extra in enumerate(rows):
        if extra is None:
            continue
        environment = {**ENVIRONMENT, **{name: str(value) for name, value in variables(rank, len(rows), port).items()}}
        command = [HOST, "train", work.path / "recipe.toml", *FSDP2, "--set", 'data.eval_hidden_states_path=""', "--set", f'training.dist_timeout="{limit}"', *extra]
        processes.append(subprocess.Popen(command, cwd=places[rank] if places else work.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                                          **(more if rank + 1 == len(rows) else {})))
    results = [process.communicate(timeout=60) for process in processes]
    return [process.returncode for process in processes], results


def free_port(address):
    with socket.socket() as some:
        some.bind((address, 0))
        return some.getsockname()[1]


def ranks_of_another_launcher_join():
    work = Ranks(steps=3)
    curves = []
    for index, (variables, *named) in enumerate([(variables_of_torchrun, "RANK=0", "WORLD_SIZE=2"), (variables_of_a_pod, "Kubernetes", "RANK=0"),
                                                 (variables_of_mpirun, "OMPI_COMM_WORLD_RANK=0"), (variables_of_srun, "SLURM_PROCID=0")]):
        run = ("--set", f'run_id="r{index}"')
        codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [run, run], variables=variables)
        assert codes == [0, 0], results
        expect(results[0][0], *named)
        curves.append(work.curve(f"r{index}"))
    assert len(curves[0]) == 3 and all(curve == curves[0] for curve in curves), curves
    shutil.rmtree(work.path)


def several_machines_are_one_run():  # two launchers, as two machines start them; both are this one
    work = Ranks(steps=3)
    work.train("--set", "training.batch_size=4", run="one")
    port = free_port("127.0.0.1")
    def start(node, *more):
        command = [HOST, "train", work.path / "recipe.toml", *FSDP2, "--nproc", "1", "--nnodes", "2", "--node-rank", str(node), "--rendezvous", f"127.0.0.1:{port}",
                   "--set", 'data.eval_hidden_states_path=""', "--set", 'training.dist_timeout="20s"', *more]
        return subprocess.Popen(command, cwd=work.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    nodes = [start(0), start(1)]
    told = [finish(node, 40, 0) for node in nodes]
    close(work.curve("one"), work.curve("tiny"))
    assert not errors_in("".join(told)), told
    # A rank that dies on one machine ends the other, and rank 0's machine says why.
    long = ("--set", "training.max_steps=4000", "--set", 'run_id="killed"', "--set", "training.save_interval=0")
    nodes = [start(0, *long), start(1, *long)]
    metrics = work.path / "out" / "killed" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 60, "no progress")
    os.kill(children_of(nodes[1])[0], signal.SIGKILL)
    told = [finish(node, 20, 6) for node in nodes]
    assert re.search("error: .*rank 1 (was killed by signal 9|no longer is there)", told[0]), told[0]  # its launcher's word, or what rank 0 saw first
    expect(told[1], "rank 1 was killed by signal 9")
    shutil.rmtree(work.path)


def ranks_with_different_recipes_are_told_apart():
    work = Ranks()
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(), ("--set", "training.seed=7")])
    assert codes == [6, 6], results
    expect(results[0][1], "rank 1 differs from rank 0", "training.seed is 42 on rank 0 and 7 on rank 1")
    assert not errors_in(results[1][1]), results[1]
    shutil.rmtree(work.path)


def ranks_with_different_builds_of_a_plugin_are_told_apart():
    work = Ranks()
    other = work.path / "other"
    other.mkdir()
    (other / "fsdp2.so").write_bytes((BUILD / "lib" / "sf" / "plugins" / "fsdp2.so").read_bytes() + b"\0")  # another SHA-256, the same code
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(), ("--plugin", f"fsdp2={other / 'fsdp2.so'}")])
    assert codes == [6, 6], results
    told = re.search(r"sharding plugin fsdp2 is (\w{16}) on rank 0 and (\w{16}) on rank 1", results[0][1])
    assert told and told[1] != told[2], results[0][1]
    expect(results[0][1], "rank 1 differs from rank 0", "start all ranks with the same recipe, flags and build")
    assert not errors_in(results[1][1]), results[1]
    shutil.rmtree(work.path)


def a_rank_that_never_comes_is_named():
    work = Ranks()
    start = time.time()
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(), None], limit="2s")
    assert codes == [6], results
    expect(results[0][1], "rank 1 of 2 did not arrive at the start of the run")
    assert time.time() - start < 20
    shutil.rmtree(work.path)


def two_processes_of_one_number_are_told_apart():
    work = Ranks()
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(), (), ()], variables=lambda rank, size, port: variables_of_torchrun(min(rank, 1), 2, port))
    assert codes == [6, 6, 6], results
    expect(results[0][1], "two processes say that they are rank 1 of 2: process ", "fix:")
    shutil.rmtree(work.path)


def ranks_that_count_differently_are_told():
    work = Ranks()
    for sizes in ((2, 3), (3, 2)):
        start = time.time()
        codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(), ()], limit="30s", variables=lambda rank, size, port: {**variables_of_torchrun(rank, sizes[rank], port), "LOCAL_WORLD_SIZE": 2})
        assert codes == [6, 6], results
        expect(results[0][1], f"rank 1 was started as one of {sizes[1]} ranks, and rank 0 as one of {sizes[0]}", "fix:")
        assert time.time() - start < 20, results
    shutil.rmtree(work.path)


def elsewhere(work, name):
    """Another machine's disk: the path /proc/self/cwd means the folder that a process stands in."""
    place = work.path / name
    place.mkdir()
    return place


HERE = "/proc/self/cwd"


def machines_with_other_data_are_told_apart():
    work, other = Ranks(), Ranks(samples=12)
    data = ("--set", f'data.hidden_states_path="{HERE}/features/train"', "--set", f'output_dir="{work.path}/out"')
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [data, data], places=[work.path, other.path])
    assert codes == [6, 6], results
    expect(results[0][1], "rank 1 differs from rank 0 in the data: data.hidden_states_path is ", "(24 samples) on rank 0", "(12 samples) on rank 1", "fix:")
    assert not (work.path / "out").exists(), "nothing is begun"
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [data, data], places=[work.path, elsewhere(work, "nothing")])
    assert codes[0] == codes[1] == 4, results
    expect(results[0][1], "error: rank 1: ", "features/train")
    assert not errors_in(results[1][1]), results[1]
    for one in (work, other):
        shutil.rmtree(one.path)


def a_run_folder_that_is_not_shared_is_told_before_the_first_window():
    work = Ranks(steps=3)
    sets = ("--set", f'output_dir="{HERE}/out"', "--set", f'data.hidden_states_path="{work.path}/features/train"')
    place = elsewhere(work, "machine")
    (place / "out" / "tiny").mkdir(parents=True)  # of an earlier run
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [sets, sets], places=[work.path, place])
    assert codes == [7, 7], results
    expect(results[0][1], "rank 1 does not see what rank 0 writes into the run folder", "set output_dir to a folder on a disk that the machines of all ranks share")
    assert not list((work.path / "out").glob("tiny/*")), list((work.path / "out").glob("tiny/*"))
    codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [sets, sets])
    assert codes == [0, 0], results
    assert work.steps() == [3], work.steps()
    shutil.rmtree(work.path)


def a_disk_that_is_full_for_one_rank_ends_all_and_the_step_before_stays():
    import resource

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))  # what the checkpoint's part of a rank is larger than

    for writer in ("sync", "async_ckpt"):
        work = Ranks(steps=9)
        sets = ("--set", f'backend.checkpoint="{writer}"', "--set", "training.save_interval=3", "--set", "training.total_steps=9")
        work.train(*sets, "--set", "training.max_steps=3", ranks=2)
        assert work.steps() == [3], work.steps()
        codes, results = ranks_by_hand(work, free_port("127.0.0.1"), [(*sets, "--resume", "auto")] * 2, preexec_fn=small_files, restore_signals=False)
        assert codes == [7, 7], results
        expect(results[0][1], "saving step 6", "rank 1", "rank00001.safetensors", "free some space", "the last checkpoint is step 3")
        assert len(errors_in(results[0][1])) == 1 and not errors_in(results[1][1]), results
        assert [path.name for path in work.run.glob("*step-*")] == ["step-00000003"], list(work.run.iterdir())
        work.train(*sets, "--resume", "auto", ranks=2)
        assert work.steps() == [3, 6, 9], work.steps()
        shutil.rmtree(work.path)


def spoil_last_record(work, split):
    shard = next((work.path / "features" / split).glob("*.safetensors"))
    whole = bytearray(shard.read_bytes())
    size = int.from_bytes(whole[:8], "little")
    start = 8 + size + json.loads(whole[8 : 8 + size])["hidden_states"]["data_offsets"][1]
    whole[start - 2 : start] = b"\xc0\x7f"  # bfloat16 NaN in the last record
    shard.write_bytes(whole)


def a_held_out_sample_that_one_rank_can_not_read_ends_all():
    work = Ranks(steps=6)
    spoil_last_record(work, "eval")
    text = work.train("--set", 'data.eval_hidden_states_path="features/eval"', "--set", 'training.dist_timeout="30s"', ranks=2, code=4).stderr
    assert len(errors_in(text)) == 1, text
    expect(text, "NaN", "features/eval")
    shutil.rmtree(work.path)


def no_usable_sample_ends_all_ranks():
    work = Ranks()
    text = work.train("--set", "data.max_length=4", ranks=2, code=4).stderr
    assert len(errors_in(text)) == 1, text
    expect(text, "can be used")
    shutil.rmtree(work.path)


def a_damaged_sample_of_one_rank_ends_all_and_keeps_finished_updates():
    work = Ranks(steps=12)
    spoil_last_record(work, "train")
    text = work.train("--set", "training.save_interval=0", ranks=2, code=4).stderr
    assert len(errors_in(text)) == 1, text
    expect(text, "rank ", "NaN", "saved step")
    assert len(work.steps()) == 1, work.steps()
    shutil.rmtree(work.path)


def what_makes_no_sense_is_refused_before_anything_starts():
    work = Ranks()
    expect(work.host("train", "--nproc", "2", code=2).stderr, "several ranks, and backend.sharding is single")
    expect(work.host("train", "--nproc", "0", code=2).stderr, "--nproc 0")
    expect(work.host("train", "--nnodes", "2", code=2).stderr, "go with --nproc")
    expect(work.host("train", "--nproc", "2", "--nnodes", "2", *FSDP2, code=2).stderr, "--rendezvous")
    plan = work.host("plan", "--nproc", "2", *FSDP2).stdout
    expect(plan, "2 ranks, 2 of them on this machine", "sf-host --nproc 2", "gloo")
    shutil.rmtree(work.path)


if __name__ == "__main__":
    main(globals())
