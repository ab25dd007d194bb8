#!/usr/bin/env python3
"""What goes wrong on the way, and what is said about it: a run that diverges, files that are in the way, data that is too short.

    tests/e2e/faults.py BUILD_DIR TESTS_DIR [CASE ...]

Standard library only. Ends with `N passed, N failed`.
"""
import json
import os
import shutil
import subprocess
import time

import tiny
from tiny import Work, expect


def captured(steps=4, algorithm="dflash2"):
    work = Work(steps=steps, algorithm=algorithm)
    work.host("capture")
    return work


def sets(*pairs):
    return [part for one in pairs for part in ("--set", one)]


def a_run_that_diverges_names_the_learning_rate_and_saves_nothing_of_it():
    work = captured()
    for name, more in {"evaluated": [], "unseen": ['data.eval_hidden_states_path=""']}.items():
        done = work.host("train", *sets("training.max_steps=1", "training.learning_rate=1e30", "training.warmup_ratio=0.0", f'run_id="{name}"', *more), code=2)
        expect(done.stderr, "the run diverged", "training.learning_rate is 1e+30", "nothing was saved", "lower training.learning_rate")
        assert not list((work.path / "out" / name).glob("step-*")) and not (work.path / "out" / name / "best.json").exists()
        assert "features hold" not in done.stderr, done.stderr
    shutil.rmtree(work.path)


def a_line_of_the_metrics_that_is_no_json_takes_no_other_with_it():
    work = captured(steps=8)
    work.host("train")
    shutil.rmtree(work.run / "step-00000008")
    lines = (work.run / "metrics.jsonl").read_text().splitlines()
    kept = [json.loads(line)["step"] for index, line in enumerate(lines) if index != 3]
    lines[3] = "garbage"
    (work.run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    expect(work.host("train", "--resume", "auto").stderr, "1 line is no JSON and left out, the first is line 4")
    after = [json.loads(line)["step"] for line in (work.run / "metrics.jsonl").read_text().splitlines()]
    old = [step for step in kept if step <= 7]
    assert after[: len(old)] == old, (after, old)
    shutil.rmtree(work.run / "step-00000008")
    os.remove(work.run / "metrics.jsonl")
    os.mkdir(work.run / "metrics.jsonl")
    expect(work.host("train", "--resume", "auto", code=7).stderr, "metrics.jsonl is a folder", "fix:")
    shutil.rmtree(work.path)


def a_fresh_start_has_no_lines_of_the_run_before():
    work = captured()
    work.run.mkdir(parents=True)
    (work.run / "metrics.jsonl").write_text('{"step": 0, "eval": {"loss": 1.5}}\n{"step": 1, "loss": 2.5}\n')  # of a run that was killed before its first save
    work.host("train")
    lines = [json.loads(line) for line in (work.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval"]["samples"] for line in lines if line["step"] == 0] == [6], lines
    shutil.rmtree(work.path)


def a_first_save_that_was_cut_short_is_in_no_ones_way():
    work = captured(steps=4)
    work.host("train")
    (work.path / "out" / "second" / ".partial-step-00000003").mkdir(parents=True)
    again = ("train", "--init-from", work.run / "step-00000004", *sets('run_id="second"'))
    expect(work.host(*again).stderr, "weights from")
    expect(work.host(*again, code=2).stderr, "already holds checkpoints (newest: step 4)")
    (work.path / "out" / "third" / ".partial-step-00000003").mkdir(parents=True)
    expect(work.host("train", "--resume", "none", *sets('run_id="third"')).stderr, "step 4/4")
    shutil.rmtree(work.path)


def weights_start_a_run_of_the_other_type():
    work = captured(steps=8)
    work.host("train", *sets('run_id="float32"'))
    work.host("train", *sets('run_id="bfloat16"', 'model.torch_dtype="bfloat16"'))
    for source, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        folder = work.path / "out" / source
        done = json.loads(work.host("train", "--init-from", folder, "--resume", "none", "--json", *sets(f'run_id="{other}-2"', f'model.torch_dtype="{other}"', "training.max_steps=1")).stdout)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        before, after = ([line["eval"]["loss"] for line in lines if "eval" in line][place] for place in (0, -1))
        assert abs(done["eval_before"]["loss"] - after) < 0.1 * (before - after), (source, before, after, done["eval_before"]["loss"])
    shutil.rmtree(work.path)


def best_is_of_the_way_that_the_run_has_gone():
    work = captured(steps=8)
    every = sets("training.eval_interval=1", "training.save_interval=2")
    work.host("train", *every)
    best = json.loads((work.run / "best.json").read_text())
    assert best["measured_on"].endswith(", 6 samples"), best
    for step in (4, 8):  # a score that no other step reaches, of a future that is left: step 4 is saved anew, step 8 behind it
        (work.run / "best.json").write_text(json.dumps({**best, "step": step, "folder": f"step-{step:08d}", "score": 99.0}))
        work.host("train", "--resume", work.run / "step-00000002", *sets("training.eval_interval=1", "training.save_interval=4"))
        now = json.loads((work.run / "best.json").read_text())
        lines = [json.loads(line) for line in (work.run / "metrics.jsonl").read_text().splitlines()]
        scores = {line["step"]: line["eval"]["acceptance_length"] for line in lines if "eval" in line and line["step"] > 2}
        assert now["score"] == max(scores.values()) and scores[now["step"]] == now["score"], (now, scores)
        work.host("train", "--resume", work.run / "step-00000002", *every)
    shutil.rmtree(work.path)


def going_on_from_another_run_deletes_nothing_of_this_one():
    work = captured(steps=6)
    often = sets("training.save_interval=2", 'data.eval_hidden_states_path=""')
    for run in ("one", "two"):
        work.host("train", *often, *sets(f'run_id="{run}"'))
    one, two = work.path / "out" / "one", work.path / "out" / "two"
    done = work.host("train", "--resume", one / "step-00000002", *often, *sets('run_id="two"'), code=2)
    expect(done.stderr, "of another run, and", "holds checkpoints of its own (newest: step 6)", "fix:")
    assert len(list(two.glob("step-*"))) == 3
    work.host("train", "--resume", one / "step-00000002", *often, *sets('run_id="three"'))
    (work.path / "link").symlink_to(two / "step-00000002")
    work.host("train", "--resume", work.path / "link", *often, *sets('run_id="two"'))   # its own, by another name
    (two / "step-00000004").rename(work.path / "step-00000004")
    (two / "step-00000004").symlink_to(work.path / "step-00000004")
    work.host("train", "--resume", two / "step-00000004", *often, *sets('run_id="two"'))   # moved to another disk
    shutil.rmtree(work.path)


def best_on_other_samples_is_no_score_to_beat():
    work = captured(steps=8)
    half = sets("training.max_steps=4", "training.total_steps=8", "training.eval_interval=4")
    work.host("train", *half)
    best = json.loads((work.run / "best.json").read_text())
    (work.run / "best.json").write_text(json.dumps({**best, "score": 99.0}))
    done = work.host("train", *sets("training.eval_interval=4", "training.eval_max_samples=3"))
    expect(done.stderr, "step 4 is the best so far on other held-out samples", "6 samples", "3 samples")
    now = json.loads((work.run / "best.json").read_text())
    assert now["step"] == 8 and now["score"] < 10, now
    shutil.rmtree(work.path)


def held_out_samples_that_can_not_be_used_are_no_loss_of_nothing():
    work = Work(steps=4)
    lines = [json.loads(line) for line in (work.path / "eval.jsonl").read_text().splitlines()]
    length = len(lines[0]["input_ids"])
    lines[0]["loss_mask"] = [0] * (length - 2) + [1] * 2  # behind what a run with short samples sees
    (work.path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work.host("capture")
    done = work.host("train", *sets("training.eval_max_samples=1", "data.max_length=10"), code=4)
    expect(done.stderr, "none of the 1 held-out samples that are looked at can be used", "no two consecutive supervised tokens", "training.eval_max_samples")
    assert not work.steps()
    expect(work.host("eval", "--checkpoint", "untrained", *sets("training.eval_max_samples=1", "data.max_length=10"), code=4).stderr, "none of the 1 held-out samples")
    work.host("train", *sets("training.eval_max_samples=2", "data.max_length=10"))
    shutil.rmtree(work.path)


def held_out_samples_that_are_the_training_samples_are_told():
    work = captured()
    shutil.copytree(work.path / "features" / "train", work.path / "copy")
    told = "data.eval_hidden_states_path holds the same samples as data.hidden_states_path"
    expect(work.host("train", *sets('data.eval_hidden_states_path="copy"', 'run_id="copy"')).stderr, told)
    assert told not in work.host("train").stderr
    shutil.rmtree(work.path)


def a_schedule_that_ends_before_the_run_is_told():
    work = captured(steps=8)
    expect(work.host("train", *sets("training.total_steps=5")).stderr, "training.total_steps = 5 is less than the run's 8 updates", "last learning rate")
    assert "training.total_steps" not in work.host("train", *sets("training.total_steps=8", 'run_id="whole"')).stderr
    expect(work.host("train", *sets("training.total_steps=1000", 'run_id="warm"')).stderr, "the run's 8 updates all lie in the warm-up, which takes 100 of the schedule's 1000")
    shutil.rmtree(work.path)


def a_path_that_can_not_be_looked_at_is_a_failure_of_the_world():
    work = captured()
    (work.path / "loop").symlink_to("loop")
    for verb, *arguments in (("train", *sets('data.hidden_states_path="loop/x"')), ("train", "--init-from", work.path / "loop" / "x"), ("plan", *sets('model.target_model_path="loop/x"'))):
        done = work.host(verb, *arguments, code=None)
        assert done.returncode in (4, 7), (verb, arguments, done.returncode, done.stderr)
        expect(done.stderr, "loop/x", "fix:")
        assert "filesystem error" not in done.stderr, done.stderr
    shutil.rmtree(work.path)


def something_else_called_latest_loses_no_step():
    work = captured(steps=8)
    (work.run / "latest" / "mine").mkdir(parents=True)
    expect(work.host("train").stderr, "the step itself is saved")
    assert work.steps() == [7, 8], work.steps()
    shutil.rmtree(work.path)


def data_that_is_too_short_is_told_by_plan_and_train():
    work = captured(algorithm="eagle3")
    expect(work.host("train", *sets("training.ttt_length=47"), code=2).stderr, "training.ttt_length = 47, and none of the 24 samples is that long", "fix:")
    expect(work.host("train", *sets("training.ttt_length=30", "training.max_steps=1")).stderr, "of the 24 samples are that long")
    expect(work.host("plan", *sets("training.batch_size=20")).stdout, "a window takes 40 samples (1 ranks x 2 micro-steps x 20), and there are 24")
    expect(work.host("train", *sets("training.batch_size=20", "training.max_steps=1", 'run_id="wide"')).stderr, "a window takes 40 samples, and there are 24")
    shutil.rmtree(work.path)
    work = captured()
    expect(work.host("train", *sets("model.draft_block_size=64"), code=2).stderr, "dflash2/block-longer-than-samples")
    expect(work.host("train", *sets("model.draft_block_size=45"), code=2).stderr, "blocks of 45 tokens, and none of the 24 samples is that long")
    shutil.rmtree(work.path)


def numbers_in_a_configuration_have_the_limits_of_the_options():
    work = captured()
    work.host("export", "--checkpoint", "untrained", "--output", work.path / "export", code=None)
    work.host("train")
    work.host("export", "--output", work.path / "made")
    config = json.loads((work.path / "made" / "config.json").read_text())
    no = sets('model.draft_model_config="draft.json"', "model.target_layer_ids=[]", "model.draft_num_hidden_layers=0", "model.draft_block_size=0", "model.mask_token_id=-1",
              *(f"plugin.dflash2.{name}=0" for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")))
    for key, value in (("num_hidden_layers", 10**7), ("dflash_config.selector_rank", 10**12), ("dflash_config.mask_token_id", "x"), ("dflash_config.mask_token_id", 10**20)):
        changed = json.loads(json.dumps(config))
        place = changed["dflash_config"] if "." in key else changed
        place[key.split(".")[-1]] = value
        changed.pop("layer_types", None)
        (work.path / "draft.json").write_text(json.dumps(changed))
        begin = time.time()
        expect(work.host("plan", *no, code=2).stderr, "draft/bad-config", key.split(".")[-1], "fix:")
        assert time.time() - begin < 10
    shutil.rmtree(work.path)


def a_folder_for_temporary_files_that_is_none_is_told():
    work = captured()
    command = [tiny.HOST, "train", work.path / "recipe.toml", "--nproc", "2", "--backend", "fsdp2"]
    done = subprocess.run(command, cwd=work.path, env={**tiny.ENVIRONMENT, "TMPDIR": "/no/such/folder"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 6, (done.returncode, done.stderr)
    expect(done.stderr, 'TMPDIR is "/no/such/folder"', "fix:")
    shutil.rmtree(work.path)


def too_many_ranks_and_an_unknown_host_are_refused_once():
    work = captured()
    expect(work.host("train", "--nproc", "100000", "--backend", "fsdp2", code=2).stderr, "--nproc 100000: this machine has", "fix:")
    done = work.host("train", "--nproc", "1", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "no-such-host.invalid:29500", "--backend", "fsdp2", code=6)
    expect(done.stderr, 'the host "no-such-host.invalid" is not known here')
    assert done.stderr.count("error:") == 1, done.stderr
    shutil.rmtree(work.path)


if __name__ == "__main__":
    tiny.main(globals())
