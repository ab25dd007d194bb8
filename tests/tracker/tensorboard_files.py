#!/usr/bin/env python3
"""Trackers through sf-host: TensorBoard's own reader finds in the event files what metrics.jsonl has, also after a resume, and a tracker that fails
does not end training in silence.

    tests/tracker/tensorboard_files.py BUILD_DIR TESTS_DIR [CASE ...]

Ends with `N passed, N failed`.
"""
import json
import math
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(sys.argv[2]).resolve()
sys.path.insert(0, str(TESTS / "e2e"))
for line in subprocess.run([TESTS.parent / "tools" / "setup", "--print"], check=True, capture_output=True, text=True).stdout.splitlines():
    name, _, value = line.removeprefix("export ").partition("=")
    if name in ("SF_PYTHON_DIR", "SF_TEST_PYTHON_DIR"):
        sys.path.insert(0, value)

import tiny  # noqa: E402
from tiny import Work, expect  # noqa: E402
from tensorboard.backend.event_processing import event_accumulator, event_file_loader  # noqa: E402

BOARD = ("--backend", "single+tensorboard", "--set", "plugin.tensorboard.flush_seconds=0")
FAKE = ("--plugin", f"fake_tracker={tiny.BUILD / 'tests/plugins/host/fake_tracker.so'}", "--backend", "single+fake_tracker")


def figures(line, prefix=""):
    for key, value in line.items():
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and (prefix or key != "step"):
            yield prefix + key, value


def expected(work):
    """{name: {step: value}} of metrics.jsonl."""
    out = {}
    for line in map(json.loads, (work.run / "metrics.jsonl").read_text().splitlines()):
        for name, value in figures(line):
            out.setdefault(name, {})[line["step"]] = value
    return out


def found(folder):
    board = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0})
    board.Reload()
    return board, {name: {e.step: e.value for e in board.Scalars(name)} for name in board.Tags()["scalars"]}


def same(work):
    board, curves = found(work.run / "tensorboard")
    wanted = expected(work)
    assert set(curves) == set(wanted), set(curves) ^ set(wanted)
    for name, values in wanted.items():
        assert set(curves[name]) == set(values), (name, sorted(curves[name]), sorted(values))
        for step, value in values.items():
            assert math.isclose(curves[name][step], value, rel_tol=1e-6, abs_tol=1e-30), (name, step, curves[name][step], value)
    return board, curves


def tensorboard_reads_what_metrics_jsonl_has_and_the_recipe():
    work = Work(steps=12)
    work.host("capture")
    summary = json.loads(work.host("train", *BOARD, "--set", "training.eval_interval=5", "--json").stdout)
    assert summary["tracker_failures"] == {"tensorboard": 0}, summary
    board, curves = same(work)
    assert len(curves["loss"]) == 12 and "eval/acceptance_length" in curves and "perf/tokens_per_second" in curves
    assert "recipe/text_summary" in board.Tags()["tensors"] or "recipe" in board.Tags()["tensors"], board.Tags()
    text = board.Tensors(next(tag for tag in board.Tags()["tensors"] if tag.startswith("recipe")))[0].tensor_proto.string_val[0].decode()
    expect(text, "batch_size = 2", 'run_id = "tiny"')


def a_resumed_run_replaces_the_future_that_it_gave_up():
    work = Work(steps=12)
    work.host("capture")
    work.host("train", *BOARD)
    first = next((work.run / "tensorboard").iterdir())
    os.rename(first, first.with_name(first.name.replace("tfevents.", "tfevents.0")))  # an earlier second
    for step in (12,):
        for entry in work.run.glob(f"step-{step:08d}*"):
            subprocess.run(["rm", "-r", entry], check=True)
    work.host("train", "--resume", "auto", *BOARD)
    files = sorted((work.run / "tensorboard").iterdir())
    assert len(files) == 2, files
    _, curves = same(work)
    assert sorted(curves["loss"]) == list(range(1, 13))
    starts = [e for e in event_file_loader.EventFileLoader(str(files[-1])).Load() if e.HasField("session_log")]
    assert [e.step for e in starts] == [8], "saved every 7 steps: going on with step 8"


def a_tracker_that_fails_is_told_and_counted_and_training_goes_on():
    work = Work(steps=6)
    work.host("capture")
    done = work.host("train", *FAKE, "--set", "plugin.fake_tracker.fail_in=record", "--json")
    assert json.loads(done.stdout)["tracker_failures"] == {"fake_tracker": 6}, "steps 2, 4, 6, the evaluations at 0 and 6, and the save at 6"
    expect(done.stderr, "tracker 'fake_tracker' failed at step 0: told to fail in record", "training goes on", "failed in 6 of 10 calls")
    assert done.stderr.count("told to fail") == 1, done.stderr
    text = (work.run / "fake_tracker.txt").read_text()
    assert (work.run / "fake_tracker.note").read_text() == "whole", "written through the host's sf.run-files/1"
    expect(text, "begin tiny 1 of 6", "5 loss", "finish")
    assert max(work.losses()) == 6


def a_tracker_that_can_not_begin_ends_the_run_before_its_first_step():
    work = Work(steps=6)
    work.host("capture")
    done = work.host("train", *FAKE, "--set", "plugin.fake_tracker.fail_in=begin", code=3)
    expect(done.stderr, "tracker \"fake_tracker\" can't begin: told to fail in begin", "backend.trackers")
    assert not work.losses() and not work.steps()


def with_ranks_the_first_alone_calls_its_trackers():
    work = Work(steps=4)
    work.host("capture")
    done = work.host("train", "--plugin", FAKE[1], "--backend", "fsdp2+fake_tracker+tensorboard", "--nproc", "2")
    text = (work.run / "fake_tracker.txt").read_text()
    assert text.count("begin") == 1 and text.count("finish") == 1, (text, done.stderr)
    same(work)


if __name__ == "__main__":
    tiny.main(globals())
