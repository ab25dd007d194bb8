#!/usr/bin/env python3
"""sf-host from conversations to an export on a tiny target, and what happens when it is interrupted, killed or given bad input.

    tests/e2e/tiny.py BUILD_DIR TESTS_DIR

Standard library only. Ends with `N passed, N failed`.
"""
import inspect
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
import traceback

BUILD, TESTS = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
HOST = BUILD / "bin" / "sf-host"
TARGET = TESTS / "parity" / "golden" / "target_qwen3"

DEVICE = os.environ.get("SF_DEVICE", "cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # tiny products gain nothing from threads, and wait for each other on a busy machine

RECIPE = """
run_id = "tiny"
output_dir = "out"
device = "{device}"

[model]
target_model_path = "{target}"
torch_dtype = "float32"
draft_num_hidden_layers = {layers}
{block}target_layer_ids = {target_layers}

[data]
train_data_path = "train.jsonl"
eval_data_path = "eval.jsonl"
hidden_states_path = "features/train"
eval_hidden_states_path = "features/eval"
max_length = 48

[training]
num_epochs = 1000
max_steps = {steps}
batch_size = 2
accumulation_steps = 2
learning_rate = 1e-2
warmup_ratio = 0.1
save_interval = 7
log_interval = 1
{settings}
[backend]
sharding = "single"

[algorithm]
name = "{algorithm}"

[plugin.{algorithm}]
{options}"""
SETTINGS = {"dflash2": "num_anchors = 6\n", "dspark": "num_anchors = 6\n", "eagle3": "ttt_length = 3\n"}  # of [training]
OPTIONS = {"dflash2": "conv_kernel_size = 2\nconv_group_size = 8\nselector_rank = 4\nselector_top_k = 4\n", "dspark": "markov_rank = 8\n",
           "eagle3": "draft_vocab_size = 200\n"}


class Work:
    """A folder with conversations and a recipe; removed at the end."""

    def __init__(self, steps=40, target=TARGET, samples=24, algorithm="dflash2"):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="sf-e2e-"))
        draw = random.Random(5)
        vocab = json.loads((TARGET / "config.json").read_text())["vocab_size"]
        for name, count in (("train", samples), ("eval", 6)):
            with open(self.path / f"{name}.jsonl", "w") as file:
                for index in range(count):
                    length = draw.randint(12, 40)
                    ids = [draw.randrange(2, vocab)]
                    while len(ids) < length:  # a learnable text: mostly the next number
                        ids.append(ids[-1] % (vocab - 2) + 2 if draw.random() < 0.9 else draw.randrange(2, vocab))
                    file.write(json.dumps({"id": f"{name}/{index}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)}) + "\n")
        self.write_recipe(steps, target, algorithm)

    def write_recipe(self, steps=40, target=TARGET, algorithm="dflash2"):
        is_eagle3 = algorithm == "eagle3"
        (self.path / "recipe.toml").write_text(RECIPE.format(
            device=DEVICE, steps=steps, target=target, algorithm=algorithm, settings=SETTINGS[algorithm], options=OPTIONS[algorithm], layers=1 if is_eagle3 else 2,
            block="" if is_eagle3 else "draft_block_size = 4\nmask_token_id = 1\n", target_layers="[1, 3, 5]" if is_eagle3 else "[1, 3]"))

    def host(self, verb, *arguments, code=0, recipe="recipe.toml"):
        done = subprocess.run([HOST, verb, self.path / recipe, *arguments], cwd=self.path, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
        assert code is None or done.returncode == code, f"sf-host {verb} {arguments}: exit {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, verb, *arguments, **options):
        return json.loads(self.host(verb, *arguments, "--json", **options).stdout)

    def start(self, *arguments):
        return subprocess.Popen([HOST, "train", self.path / "recipe.toml", *arguments], cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)

    @property
    def run(self):
        return self.path / "out" / "tiny"

    def steps(self):
        return sorted(int(p.name.split("-")[1]) for p in self.run.glob("step-*"))

    def weights(self, step):
        folder = self.run / f"step-{step:08d}"
        return (folder / "rank00000.safetensors").read_bytes()

    def losses(self):
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def wait_for_step(self, process, step):
        limit = time.time() + 60
        while time.time() < limit:
            try:
                if max(self.losses(), default=0) >= step:
                    return
            except (OSError, ValueError):
                pass
            assert process.poll() is None, f"training ended early: {process.stderr.read()}"
            time.sleep(0.005)
        raise AssertionError("no progress within 60 s")


def expect(text, *parts):
    for part in parts:
        assert part in text, f"'{part}' is missing in:\n{text}"


def from_conversations_to_an_export():
    work = Work(steps=150)
    plan = work.host("plan").stdout
    expect(plan, "dflash2", "single", "training.batch_size")
    captured = work.json("capture")
    assert captured["train"]["records"] == 24 and captured["eval"]["records"] == 6
    again = work.json("capture")
    assert again["train"]["was_finished"], "a finished capture is recognised"
    seen = ("--features", work.path / "features" / "train")  # random weights teach little about unseen text: that is test_tiny_recipe's
    before = work.json("eval", "--checkpoint", "untrained", *seen)
    trained = work.json("train")
    assert trained["updates"] == 150 and not trained["interrupted"]
    after = work.json("eval", "--checkpoint", "auto", *seen)
    assert after["loss"] < before["loss"] - 1.0, (before["loss"], after["loss"])
    assert after["acceptance_length"] > before["acceptance_length"] + 0.3, (before["acceptance_length"], after["acceptance_length"])
    after = work.json("eval", "--checkpoint", "auto")
    assert 1.0 <= after["bigram_acceptance_length"] <= 4.0
    work.json("export", "--output", work.path / "export")
    config = json.loads((work.path / "export" / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["mask_token_id"] == 1
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    header = (work.path / "export" / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert "layers.1.self_attn.q_proj.weight" in names and "candidate_selector.predecessor_codebook" in names
    assert names["fc.weight"]["dtype"] == "BF16"
    shutil.rmtree(work.path)


def the_plan_counts_blocks():
    work = Work()
    for anchors, rows in ((6, 2 * 6 * 4), (40, 2 * 40 * 4), (512, 2 * 47 * 4)):  # batch 2, blocks of 4, at most 47 starts in 48 tokens; 128 blocks before the head
        expect(work.host("plan", "--set", f"training.num_anchors={anchors}").stdout, f"{rows} draft rows", f"{min(rows, 384)} rows x 320")
    shutil.rmtree(work.path)


def a_run_that_was_stopped_equals_one_that_was_not():
    whole = Work(steps=30)
    whole.host("capture")
    whole.host("train")
    for how in (signal.SIGINT, signal.SIGKILL):
        cut = Work(steps=30)
        shutil.copytree(whole.path / "features", cut.path / "features")
        process = cut.start()
        cut.wait_for_step(process, 9)
        process.send_signal(how)
        process.communicate(timeout=60)
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), process.returncode
        assert cut.steps(), "something was saved"
        assert cut.steps()[-1] < 30, "it was stopped before its end"
        cut.host("train", "--resume", "none", code=2)  # a run that exists is not overwritten
        cut.host("train")
        assert cut.weights(30) == whole.weights(30), f"weights, masters and moments are the same bits after {how.name}"
        assert cut.losses() == whole.losses(), f"every loss is the same after {how.name}"
        shutil.rmtree(cut.path)
    shutil.rmtree(whole.path)


def a_run_killed_again_and_again_ends_the_same():
    whole = Work(steps=30)
    whole.host("capture")
    whole.host("train")
    cut = Work(steps=30)
    shutil.copytree(whole.path / "features", cut.path / "features")
    draw = random.Random(11)
    kills = 0
    while kills < 6:
        process = cut.start("--resume", "auto")
        try:
            process.communicate(timeout=draw.uniform(0.6, 2.0))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    cut.host("train", "--resume", "auto")
    assert cut.weights(30) == whole.weights(30)
    shutil.rmtree(cut.path)
    shutil.rmtree(whole.path)


def another_run_is_not_taken_for_a_continuation():
    work = Work(steps=8)
    work.host("capture")
    work.host("train")
    done = work.host("train", "--resume", "auto", "--set", "training.batch_size=1", code=7)
    expect(done.stderr, "training.batch_size", "1", "2")
    shutil.rmtree(work.path)


def two_processes_never_train_in_one_run_folder():
    work = Work(steps=400)
    work.host("capture")
    process = work.start()
    work.wait_for_step(process, 2)
    expect(work.host("train", "--resume", "auto", code=7).stderr, "another process")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130, process.returncode
    shutil.rmtree(work.path)


def finished_updates_are_kept_when_a_later_sample_is_damaged():
    work = Work(steps=12)
    work.host("capture")
    shard = next((work.path / "features" / "train").glob("*.safetensors"))
    whole = bytearray(shard.read_bytes())
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    start = 8 + size + header["hidden_states"]["data_offsets"][1]
    whole[start - 2 : start] = b"\xc0\x7f"  # bfloat16 NaN in the last record
    shard.write_bytes(whole)
    done = work.host("train", "--set", "training.save_interval=0", "--set", "data.verify_checksums=false", code=4)
    expect(done.stderr, "hidden_states", "NaN", "saved step")
    assert len(work.steps()) == 1
    shutil.rmtree(work.path)


def a_run_that_diverges_says_so_and_saves_nothing_more():
    work = Work(steps=12)
    work.host("capture")
    done = work.host("train", "--set", "training.learning_rate=1e30", "--set", "training.save_interval=0", "--set", "training.warmup_ratio=0.0", code=2)
    expect(done.stderr, "diverged", "learning_rate")
    assert not work.steps()
    shutil.rmtree(work.path)


def weights_go_only_where_all_of_them_fit():
    work = Work(steps=4)
    work.host("capture")
    work.host("train")
    work.host("export", "--output", work.path / "export")
    for source in (work.run, work.path / "export"):
        done = work.host("train", "--init-from", source, "--set", 'run_id="less"', "--set", "model.draft_num_hidden_layers=1", code=7)
        expect(done.stderr, "no place")
    started = work.json("train", "--init-from", work.path / "export", "--set", 'run_id="again"', "--set", "training.max_steps=1")
    assert started["updates"] == 1
    expect(work.host("eval", "--set", "model.mask_token_id=9", code=7).stderr, "another draft configuration")
    shutil.rmtree(work.path)


def recompute_changes_no_bit_and_must_name_units():
    work = Work(steps=6)
    work.host("capture")
    work.host("train", "--set", "training.log_interval=1")
    plain = work.losses()
    work.host("train", "--set", 'run_id="tiny2"', "--set", 'training.recompute=["block.*"]')
    lines = [json.loads(line) for line in (work.path / "out" / "tiny2" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == plain
    work.host("train", "--set", 'run_id="tiny3"', "--set", 'training.recompute=["*"]')
    expect(work.host("train", "--set", 'run_id="tiny4"', "--set", 'training.recompute=["nothing*"]', code=2).stderr, "nothing*", "block.0")
    shutil.rmtree(work.path)


def options_that_are_wrong_are_refused_at_once_and_all_together():
    work = Work()
    start = time.time()
    done = work.host("plan", "--set", "training.batch_sise=4", "--set", "training.learning_rate=\"fast\"", "--set", "training.max_grad_norm=0", code=2)
    assert time.time() - start < 1.0, "a refused plan opens nothing"
    expect(done.stderr, "training.batch_sise", "did you mean", "batch_size", "training.learning_rate", "max_grad_norm")
    expect(work.host("plan", "--set", "training.static_shape_buckets=[128]", code=2).stderr, "static_shapes")
    expect(work.host("plan", "--set", "backend.sharding=\"fsdp9\"", code=3).stderr, "fsdp9")
    shutil.rmtree(work.path)


def damaged_inputs_end_with_a_clear_message():
    work = Work(steps=4)
    work.host("capture")
    shard = next((work.path / "features" / "train").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    expect(work.host("train", code=4).stderr, shard.name)
    shard.write_bytes(whole)
    (work.path / "empty").mkdir()
    expect(work.host("train", "--set", 'data.hidden_states_path="empty"', code=4).stderr, "empty")
    expect(work.host("train", "--set", "model.target_layer_ids=[1, 2]", code=4).stderr, "1, 3")

    target = work.path / "target"
    shutil.copytree(TARGET, target)
    (target / "model.safetensors").unlink()
    work.write_recipe(4, target)
    expect(work.host("train", code=4).stderr, "target")
    shutil.rmtree(work.path)


def samples_without_supervision_are_counted_or_refused():
    work = Work(steps=4)
    lines = [json.loads(line) for line in (work.path / "train.jsonl").read_text().splitlines()]
    for line in lines[:10]:
        line["loss_mask"] = [index % 2 for index in range(len(line["input_ids"]))]  # never two in a row
    (work.path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert work.json("capture")["train"]["samples_unsupervised"] == 10
    work.host("train")
    for line in lines:
        line["loss_mask"] = [0] * len(line["input_ids"])
    (work.path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.rmtree(work.path / "features")
    expect(work.host("capture", code=4).stderr, "supervised")
    shutil.rmtree(work.path)


def main(names):
    """Runs the cases of a script and ends it. names: its globals(). A case is a function of the script itself without parameters; whatever helps them has some."""
    cases = [value for value in names.values() if inspect.isfunction(value) and value.__module__ == "__main__" and not inspect.signature(value).parameters]
    only = sys.argv[3:]
    unknown = sorted(set(only) - {case.__name__ for case in cases})
    if unknown or not cases:
        sys.exit(f"no such case: {', '.join(unknown) or 'the script has none'}")
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
    main(globals())
