#!/usr/bin/env python3
"""Plugins in a run: whatever call of an algorithm or a sharding backend throws, the run ends with the plugin, the call and the unit named, and nothing half done
stays; the host's services reach a plugin.

    tests/sdk/calls.py BUILD_DIR TESTS_DIR [CASE ...]
"""
import re
import shutil
import sys

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parent.parent / "e2e"))

import tiny  # noqa: E402
from tiny import BUILD, Work, expect  # noqa: E402

tiny.SETTINGS["fake_draft"] = ""
tiny.OPTIONS["fake_draft"] = ""
DRAFT = ("--plugin", f"fake_draft={BUILD}/tests/plugins/host/fake_draft.so")
BACKEND = ("--plugin", f"fake_effect={BUILD}/tests/plugins/host/fake_effect.so", "--backend", "fake_effect")


def captured(steps=2, samples=8):
    work = Work(steps=steps, algorithm="fake_draft", samples=samples)
    work.host("capture", *DRAFT)
    return work


def what_an_algorithm_throws_names_it_the_call_and_the_unit():
    work = captured()
    for call in ("describe", "unit", "bind", "prepare", "finish", "weigh", "micro_step", "derive_metrics"):
        done = work.host("train", *DRAFT, "--set", f"plugin.fake_draft.throw_in={call}", "--set", f'run_id="{call}"', code=1)
        expect(done.stderr, f'plugin "fake_draft" failed in {call}: told to throw')
        assert call == "derive_metrics" or not list((work.path / "out" / call).glob("step-*")), call   # that one comes after an update, which is kept
    for phase, told in (("forward", "evaluating"), ("backward", "backward")):   # a run evaluates before its first step
        done = work.host("train", *DRAFT, "--set", f"plugin.fake_draft.throw_in={phase}", "--set", f'run_id="{phase}"', code=1)
        expect(done.stderr, f"plugin \"fake_draft\", unit 'guess', use 0, {told}: told to throw")
        assert not list((work.path / "out" / phase).glob("step-*")), phase
    expect(work.host("plan", *DRAFT, "--set", "plugin.fake_draft.throw_in=describe", code=1).stderr, 'plugin "fake_draft" failed in describe: told to throw')
    for call, code in (("create", "plugin/create-failed"), ("start", "plugin/start-failed")):
        expect(work.host("train", *DRAFT, "--set", f"plugin.fake_draft.throw_in={call}", code=3).stderr, code, 'plugin "fake_draft" can\'t', "told to throw")
    done = work.host("train", *DRAFT, "--set", "plugin.fake_draft.throw_in=stop")
    expect(done.stderr, "plugin 'fake_draft' failed to stop: told to throw")
    expect(work.host("export", *DRAFT, "--set", "plugin.fake_draft.throw_in=export_spec", "--output", work.path / "export", code=1).stderr,
           'plugin "fake_draft" failed in export_spec: told to throw')
    assert not (work.path / "export").exists()
    shutil.rmtree(work.path)


def what_a_sharding_backend_throws_names_it_and_the_call():
    work = captured(steps=3)
    for call in ("memory", "build", "take_tables", "whole", "begin_window", "before_use", "after_use", "plan", "reduce", "end_window", "gradient_norm", "begin_evaluation",
                 "end_evaluation"):
        done = work.host("train", *DRAFT, *BACKEND, "--set", f"plugin.fake_effect.throw_in={call}", "--set", f'run_id="{call}"', "--set", "training.eval_interval=1", code=1)
        expect(done.stderr, f'plugin "fake_effect" failed in {call}: told to throw')
        assert not list((work.path / "out" / call).glob("step-*")), call
    shutil.rmtree(work.path)


def on_two_ranks_one_error_is_told_and_both_end():
    work = captured()
    done = work.host("train", *DRAFT, "--nproc", "2", "--backend", "fsdp2", "--set", "plugin.fake_draft.throw_in=backward", code=1)
    expect(done.stderr, "plugin \"fake_draft\", unit 'guess', use 0, backward: told to throw")
    shutil.rmtree(work.path)


def services_reach_a_plugin_and_the_collectives_once_the_ranks_have_met():
    work = captured()
    alone = work.host("train", *DRAFT).stderr
    expect(alone, "the host does not offer sf.comm/1: there are no collectives: the run has one process", "collectives none yet")
    both = work.host("train", *DRAFT, "--nproc", "2", "--backend", "fsdp2", "--set", 'run_id="both"').stderr
    expect(both, "fake_draft: 2 ranks, their sum is 3")
    draws = [re.search(r"fake_draft: random (\d+), ", text)[1] for text in (alone, both)]
    assert draws[0] == draws[1] != "0", draws
    shutil.rmtree(work.path)


def an_algorithm_that_reads_tokens_alone_is_captured_and_trains():
    work = Work(steps=2, algorithm="fake_draft", samples=8)
    alone = (*DRAFT, "--set", "plugin.fake_draft.reads_states=false")
    expect(work.host("capture", *alone).stderr, "reads nothing of the target's states")
    work.host("train", *alone)
    assert work.steps() == [2], work.steps()
    expect(work.host("train", *DRAFT, "--set", 'run_id="other"', code=4).stderr, "the target's last state, which the draft reads as 'last_state', was not captured")
    shutil.rmtree(work.path)


if __name__ == "__main__":
    tiny.main(globals())
