#!/usr/bin/env python3
"""fp8 through sf-host, with emulate on the CPU: each draft trains, the plan names what is taken over, resume is exact, an export is what it was without, refusals.

    tests/e2e/test_fp8.py BUILD_DIR TESTS_DIR [CASE ...]

Standard library only. Ends with `N passed, N failed`.
"""
import json
import shutil

import tiny
from tiny import Work, expect

FP8 = ("--set", "plugin.fp8.emulate=true")
SINGLE = ("--backend", "single+fp8", *FP8)


def captured(algorithm="dflash2", steps=10):
    work = Work(steps=steps, algorithm=algorithm)
    work.host("capture")
    return work


def curve(work, run):
    lines = [json.loads(line) for line in (work.path / "out" / run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "lr" in line]


def tensors(folder):
    whole = (folder / "model.safetensors").read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def every_draft_trains_and_its_export_has_the_form_that_it_had_without():
    for algorithm in ("dflash2", "dspark", "eagle3"):
        work = captured(algorithm, steps=30)
        work.host("train", "--set", 'run_id="plain"')
        told = work.host("train", *SINGLE, "--set", 'run_id="fp8"').stderr
        expect(told, "in effect: fp8 computes midlayer" if algorithm == "eagle3" else "in effect: fp8 computes block.0 to block.1", "mlp.down_proj")
        plain, found = curve(work, "plain"), curve(work, "fp8")
        assert plain != found, "fp8 changed nothing"
        for a, b in zip(plain, found, strict=True):
            assert abs(a - b) < 0.1 * a, (algorithm, a, b)
        forms = {}
        for run, backend in (("plain", ()), ("fp8", SINGLE)):
            work.host("export", "--set", f'run_id="{run}"', *backend, "--output", work.path / f"export-{run}")
            forms[run] = tensors(work.path / f"export-{run}")
        assert forms["plain"] == forms["fp8"]
        shutil.rmtree(work.path)


def the_plan_says_what_is_taken_over_and_what_that_takes():
    work = captured()
    told = work.host("plan", *SINGLE).stdout
    expect(told, "transform", "fp8 0.1.0", "weights of fp8", "block.0 to block.1: self_attn.q_proj, self_attn.k_proj")
    assert "attention_conv.kernel_projection" in told.split("weights of fp8")[1].splitlines()[0], told
    expect(work.host("plan", *SINGLE, "--set", 'plugin.fp8.skip=["self_attn.*", "kernel_projection"]').stdout, "block.0 to block.1: mlp.gate_proj, mlp.up_proj, mlp.down_proj")
    lines = [{line["name"]: line["bytes"] for line in work.json("plan", *SINGLE, "--set", f"plugin.fp8.head={head}")["sizes"]} for head in ("false", "true")]
    assert "head in float8" not in lines[0] and lines[1]["head in float8"] == 2 * 320 * 64 + 4 * (320 + 64), lines
    assert lines[1]["total (estimate)"] - lines[0]["total (estimate)"] == lines[1]["head in float8"], lines
    shutil.rmtree(work.path)


def the_plan_counts_what_a_gather_in_float8_and_copies_between_gpus_change():
    work = captured("dspark")
    def sizes(*more):
        plan = work.json("plan", "--backend", "fsdp2+fp8", *FP8, "--nproc", "2", *more)
        return {line["name"]: line["bytes"] for line in plan["sizes"]}
    plain, coded = sizes(), sizes("--set", "plugin.fp8.gather=true")
    carried = 2 * (2 * 64 * 96 + 2 * 64 * 48 + 3 * 64 * 128)   # two blocks of the tiny target: queries and output, keys and values, MLP
    assert plain["whole parameters"] - coded["whole parameters"] == 4 * carried, (plain, coded)
    others = 2 * (2 * 64 + 2 * 24)                            # norms of a block: rows, and heads
    assert coded["communication buffers"] - plain["communication buffers"] == (carried + 4 * others) // 2, (plain, coded)
    assert plain["weights of fp8"] == coded["weights of fp8"]
    on, off = (sizes("--set", 'device="cuda"', "--set", f"training.peer_copies={copies}")["communication buffers"] for copies in ("on", "off"))
    root = on - off                                            # half of the largest group, in bfloat16
    assert root > 0 and sizes("--set", 'device="cuda"', "--set", "training.peer_copies=on", "--set", 'training.reduce_dtype="float32"')["communication buffers"] - \
        sizes("--set", 'device="cuda"', "--set", "training.peer_copies=off", "--set", 'training.reduce_dtype="float32"')["communication buffers"] == 2 * root
    shutil.rmtree(work.path)


def a_run_that_goes_on_from_a_checkpoint_has_the_losses_of_one_that_did_not_stop():
    work = captured(steps=10)
    work.host("train", *SINGLE, "--set", 'run_id="whole"')
    work.host("train", *SINGLE, "--set", 'run_id="halves"', "--set", "training.max_steps=4", "--set", "training.total_steps=10")
    work.host("train", *SINGLE, "--set", 'run_id="halves"', "--set", "training.total_steps=10", "--resume", "auto")
    assert curve(work, "halves") == curve(work, "whole")
    shutil.rmtree(work.path)


def recompute_and_ranks_agree():
    work = captured(steps=6)
    work.host("train", *SINGLE, "--set", 'run_id="plain"')
    work.host("train", *SINGLE, "--set", 'run_id="recomputed"', "--set", 'training.recompute=["block.*"]')
    assert curve(work, "recomputed") == curve(work, "plain")
    work.host("train", "--backend", "fsdp2+fp8", *FP8, "--set", 'run_id="ranks"', "--nproc", "2", "--set", "training.accumulation_steps=1", "--set", 'training.reduce_dtype="float32"')
    for a, b in zip(curve(work, "plain"), curve(work, "ranks"), strict=True):
        assert abs(a - b) < 0.02 * a, (a, b)   # a sum that rounds another way moves an encoded number by a whole step
    assert abs(curve(work, "plain")[0] - curve(work, "ranks")[0]) < 1e-4 * curve(work, "plain")[0]
    shutil.rmtree(work.path)


def an_evaluation_is_that_of_the_draft_as_it_is_exported():
    work = captured(steps=6)
    work.host("train", *SINGLE)
    with_fp8, without = work.json("eval", *SINGLE), work.json("eval")
    assert with_fp8["loss"] == without["loss"]
    shutil.rmtree(work.path)


def the_head_in_float8_is_an_option_of_its_own_and_evaluations_say_how_far_it_is():
    for algorithm in ("dflash2", "dspark"):
        work = captured(algorithm, steps=12)
        head = ("--set", "plugin.fp8.head=true")
        work.host("train", *SINGLE, "--set", 'run_id="without"')
        work.host("train", *SINGLE, *head, "--set", 'run_id="with"')
        without, found = curve(work, "without"), curve(work, "with")
        assert without != found
        for a, b in zip(without, found, strict=True):
            assert abs(a - b) < 0.1 * a, (algorithm, a, b)
        report = work.json("eval", *SINGLE, *head, "--set", 'run_id="with"')
        assert 0.5 < report["metrics"]["fp8/head/argmax_agreement"] <= 1 and 0 < report["metrics"]["fp8/head/nll_difference"] < 0.5, report["metrics"]
        assert work.json("eval", "--set", 'run_id="with"')["loss"] == report["loss"], "what is evaluated is the draft as it is served"
        shutil.rmtree(work.path)
    work = captured("eagle3")   # its head is trained
    for verb in ("plan", "train"):
        expect(work.host(verb, *SINGLE, "--set", "plugin.fp8.head=true", code=2).stderr, "fp8/head-is-trained", "EAGLE3 trains a head of its own")
    shutil.rmtree(work.path)


def refusals_say_why_and_what_to_do():
    work = captured(steps=2)
    for verb, *more in (["plan"], ["train"], ["bench"]):
        expect(work.host(verb, "--backend", "single+fp8", *more, code=2).stderr, "error[F9]", "compute capability 8.9", "plugin.fp8.emulate = true")
        expect(work.host(verb, "--backend", "fsdp1+fp8", *FP8, *more, code=2).stderr, "error[B2]", "fsdp1 does not offer what fp8 needs", "single and fsdp2 do")
    expect(work.host("train", *SINGLE, "--set", 'plugin.fp8.skip=["*"]', code=2).stderr, "[F5] fp8 has nothing to do")
    expect(work.host("train", *SINGLE, "--set", 'plugin.fp8.skip=["q_porj"]', code=2).stderr, '"q_porj" names no linear', "the blocks have", "self_attn.q_proj")
    expect(work.host("plan", "--backend", "fp8", *FP8, "--set", "plugin.fp8.gather=true", "--set", 'plugin.fp8.scaling="row"', code=2).stderr, "error[F11]")
    shutil.rmtree(work.path)


def a_number_that_is_not_finite_ends_the_run_and_names_unit_and_linear():
    work = captured(steps=8)
    told = work.host("train", *SINGLE, "--set", "training.learning_rate=1e30", "--set", "training.warmup_ratio=0.0", code=None)
    assert told.returncode == 2, told.stderr
    expect(told.stderr, "the run diverged: in update", "of linear '", "in unit 'block.", "is not finite", "lower training.learning_rate")
    assert not list((work.path / "out" / "tiny").glob("step-*")), "what was trained before it may have gone wrong already"
    shutil.rmtree(work.path)


if __name__ == "__main__":
    tiny.main(globals())
