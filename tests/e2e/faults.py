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
