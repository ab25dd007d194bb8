#!/usr/bin/env python3
"""Options on every launch path of sf-host: each one changes something that can be measured, or the run ends and says which one does not.

    tests/e2e/options.py BUILD_DIR TESTS_DIR [CASE ...]

Standard library only. Ends with `N passed, N failed`.
"""
import itertools
import json
import re
import shutil
import tomllib

import tiny
from tiny import BUILD, TESTS, Work, expect

FAKE = BUILD / "tests/plugins/host/fake_effect.so"
WITH_FAKE = ("--plugin", f"fake_effect={FAKE}", "--backend", "fake_effect")


BENCH = ("--warmup", "1", "--steps", "1", "--repeats", "1")


def captured(steps=4, algorithm="dflash2"):
    work = Work(steps=steps, algorithm=algorithm)
    work.host("capture")
    return work


def an_option_that_reached_nothing_ends_every_verb_before_its_first_step():
    work = captured()
    work.host("train", *WITH_FAKE)
    for verb, *arguments in (["train", "--set", 'run_id="other"'], ["eval"], ["eval", "--checkpoint", "untrained"], ["bench", *BENCH]):
        done = work.host(verb, *arguments, *WITH_FAKE, "--set", "plugin.fake_effect.at_build=0", code=3)
        expect(done.stderr, "plugin/option-no-effect", "plugin.fake_effect.at_build", "fix:")
        assert "eval after" not in done.stderr and "loss" not in done.stderr, done.stderr
    assert not (work.path / "out/other").exists(), "nothing was begun"
    shutil.rmtree(work.path)


def an_option_with_an_effect_lets_every_verb_through():
    work = captured()
    for verb, *arguments in (["train"], ["eval"], ["export", "--output", work.path / "export"], ["bench", *BENCH]):
        work.host(verb, *arguments, *WITH_FAKE, "--set", "plugin.fake_effect.at_build=2", "--set", "plugin.fake_effect.in_window=1")
    shutil.rmtree(work.path)


def what_a_plugin_throws_names_it_and_the_call():
    work = captured()
    for call in ("build", "begin_window"):
        done = work.host("train", *WITH_FAKE, "--set", f"plugin.fake_effect.throw_in={call}", "--set", f'run_id="{call}"', code=1)
        expect(done.stderr, f'plugin "fake_effect" failed in {call}: told to throw')
    shutil.rmtree(work.path)


def an_option_that_nobody_read_ends_every_verb():
    work = captured()
    for verb, *arguments in (["train"], ["eval", "--checkpoint", "untrained"], ["capture"], ["export", "--output", work.path / "export"], ["bench", *BENCH]):
        expect(work.host(verb, *arguments, *WITH_FAKE, "--set", "plugin.fake_effect.unread=true", code=3).stderr, "plugin/option-unclaimed",
               "plugin.fake_effect.unread")
    shutil.rmtree(work.path)


def an_effect_that_shows_in_the_first_window_alone_is_asked_for_then():
    work = captured()
    done = work.host("train", *WITH_FAKE, "--set", "plugin.fake_effect.in_window=0", code=3)
    expect(done.stderr, "plugin/option-no-effect", "plugin.fake_effect.in_window")
    assert not work.steps(), "a run without the option's effect leaves no checkpoint"
    expect(work.host("bench", *BENCH, *WITH_FAKE, "--set", "plugin.fake_effect.in_window=0", code=3).stderr, "plugin/option-no-effect")
    told = json.loads(work.host("train", *WITH_FAKE, "--set", "plugin.fake_effect.in_window=0", "--json", code=3).stdout)
    assert [problem["id"] for problem in told["problems"]] == ["plugin/option-no-effect"], told
    shutil.rmtree(work.path)


def a_draft_configuration_with_several_mistakes_is_told_whole_before_anything_is_made():
    work = captured()
    plain = work.path / "draft.json"
    work.host("train")
    work.host("export", "--output", work.path / "export")
    config = json.loads((work.path / "export/config.json").read_text())
    config |= {"hidden_act": "gelu", "attention_dropout": 0.1, "num_key_value_heads": 3, "rms_norm_eps": "small", "vocab_size": 300, "block_size": 1}
    config["dflash_config"] |= {"block_size": 1, "target_layer_ids": [1, 99], "selector_rank": 0, "selector_topk": 4}
    del config["dflash_config"]["conv_group_size"]
    plain.write_text(json.dumps(config))
    mistakes = ['"hidden_act" is "gelu"', '"attention_dropout"', '"num_key_value_heads" 3', '"rms_norm_eps" is "small"', "vocab_size is 300", "block_size is 1",
                "target layer 99", "selector_rank is 0", "unknown key dflash_config.selector_topk", 'did you mean "selector_top_k"',
                "dflash_config.conv_group_size is missing"]
    sets = ["--set", f'model.draft_model_config="{plain}"', "--set", 'run_id="other"', "--set", "model.draft_block_size=0", "--set", "model.target_layer_ids=[]"]
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        sets += ["--set", f"plugin.dflash2.{name}=0"]
    for verb in ("train", "plan", "capture"):
        told = work.host(verb, *sets, code=2).stderr
        expect(told, "error[draft/bad-config]", str(plain), *mistakes, "10 errors.")
        assert told.count("fix:") == 10, told
    problems = json.loads(work.host("train", *sets, "--json", code=2).stdout)["problems"]
    assert [problem["id"] for problem in problems] == ["draft/bad-config"] * 10, problems
    assert not (work.path / "out/other").exists()
    shutil.rmtree(work.path)


def what_a_flag_or_key_lacks_is_said_with_its_name():
    work = captured()
    expect(work.host("train", "--init-from", "auto", code=2).stderr, "--init-from", "--resume auto")
    for key, verb in (("data.hidden_states_path", "train"), ("data.eval_hidden_states_path", "eval")):
        told = work.host(verb, "--set", f'{key}="nowhere"', *(["--checkpoint", "untrained"] if verb == "eval" else []), code=4).stderr
        expect(told, "nowhere", f"let {key} name a folder")
    expect(work.host("eval", "--features", "nowhere", "--checkpoint", "untrained", code=4).stderr, "let --features name a folder")
    shutil.rmtree(work.path)


# Every option of the host and of dflash2: a verb, a value, and what else is set on both sides of the comparison. EXPECTED TO END: the value can't be had.
ENDS = "the run ends"
OPTIONS = {
    "run_id": ("train", '"another"'),
    "output_dir": ("train", '"elsewhere"'),
    "device": ("train", '"cuda"', ENDS),
    "model.target_model_path": ("train", '"nowhere"', ENDS),
    "model.draft_model_config": ("train", '"nowhere.json"', ENDS),
    "model.draft_num_hidden_layers": ("train", "1"),
    "model.draft_block_size": ("train", "3"),
    "model.target_layer_ids": ("capture", "[0, 2]"),
    "model.embedding_key": ("train", '"nothing.weight"', ENDS),
    "model.lm_head_key": ("train", '"nothing.weight"', ENDS),
    "model.torch_dtype": ("train", '"bfloat16"'),
    "model.mask_token_id": ("train", "7"),
    "model.rope_rounding": ("train", '"reference"'),
    "data.train_data_path": ("capture", '"eval.jsonl"'),
    "data.eval_data_path": ("capture", '"train.jsonl"'),
    "data.hidden_states_path": ("train", '"features/eval"', 'data.eval_hidden_states_path=""'),
    "data.eval_hidden_states_path": ("eval", '"features/train"', 'data.hidden_states_path=""'),
    "data.max_length": ("train", "10"),
    "data.shard_bytes": ("capture", '"1MiB"', "model.target_layer_ids=[0, 1, 2, 3]", "samples=600"),
    "data.verify_checksums": ("train", "true", "damaged"),
    "training.num_epochs": ("train", "2", "training.num_epochs=1", "training.max_steps=0"),
    "training.max_steps": ("train", "3"),
    "training.total_steps": ("train", "9"),
    "training.batch_size": ("train", "3"),
    "training.accumulation_steps": ("train", "1"),
    "training.learning_rate": ("train", "2e-3"),
    "training.lr_scheduler": ("train", '"constant"'),
    "training.warmup_ratio": ("train", "0.5"),
    "training.max_grad_norm": ("train", "0.01"),
    "training.weight_decay": ("train", "0.5"),
    "training.seed": ("train", "43"),
    "training.static_shapes": ("train", "true"),
    "training.static_shape_buckets": ("train", "[128]", "training.static_shapes=true", "data.max_length=256"),
    "training.grad_accum_dtype": ("train", '"bfloat16"'),
    "training.recompute": ("train", '["nothing*"]', ENDS),  # what it changes is memory; that a name is read shows in this
    "training.log_interval": ("train", "2"),
    "training.eval_interval": ("train", "2"),
    "training.save_interval": ("train", "2"),
    "training.max_checkpoints": ("train", "1", "training.save_interval=1"),
    "training.eval_max_samples": ("eval", "2"),
    "export.dtype": ("export", '"float32"'),
    "backend.sharding": ("train", '"nothing"', ENDS),
    "backend.transforms": ("train", '["nothing"]', ENDS),
    "backend.checkpoint": ("train", '"nothing"', ENDS),
    "algorithm.name": ("train", '"nothing"', ENDS),
    "training.compile_blocks": ("train", "true", ENDS),
    "training.fsdp_sharding": ("train", '"FULL_SHARD"', ENDS),
    "training.reduce_dtype": ("train", '"float32"', ENDS),
    "training.shard_frozen_tables": ("train", "true", ENDS),
    "training.peer_copies": ("train", '"on"', ENDS),
    "training.reduce_scatter_max_input_buffers": ("train", "2", ENDS),
    "training.separate_reduce_scatter_group": ("train", "true", ENDS),
    "training.num_anchors": ("train", "3"),
    "training.loss_decay_gamma": ("train", "2.0"),
    "training.loss_type": ("train", '"dpace"'),
    "training.dpace_alpha": ("train", "0.1", 'training.loss_type="dpace"'),
    "training.lk_loss_type": ("train", '"tv"'),
    "training.kl_scale": ("train", "0.5", 'training.lk_loss_type="lambda"'),
    "training.kl_decay": ("train", "3.0", 'training.lk_loss_type="lambda"'),
    "training.dflash2_selector_loss_alpha": ("train", "0.5"),
    "training.dflash2_selector_warmup_ratio": ("train", "0.5"),
    "training.dflash2_selector_ramp_ratio": ("train", "1.0"),
    "training.dflash2_selector_stop_gradient": ("train", "true"),
    "algorithm.selector_policy": ("train", '"insert_gold"'),
    "plugin.dflash2.architecture": ("train", '"dflash"', "plain"),
    "plugin.dflash2.conv_kernel_size": ("train", "3"),
    "plugin.dflash2.conv_group_size": ("train", "4"),
    "plugin.dflash2.selector_rank": ("train", "2"),
    "plugin.dflash2.selector_top_k": ("train", "2"),
    "plugin.dflash2.dpace_normalization": ("train", '"batch"', 'training.loss_type="dpace"'),
}
# A transform beside dflash2, on the CPU.
WITH_FP8 = ('backend.transforms=["fp8"]', "plugin.fp8.emulate=true")
OPTIONS_OF_FP8 = {
    "plugin.fp8.scaling": ("train", '"row"', *WITH_FP8),
    "plugin.fp8.gradients": ("train", '"e4m3"', *WITH_FP8),
    "plugin.fp8.grad_input": ("train", '"bf16"', *WITH_FP8),
    "plugin.fp8.grad_weight": ("train", '"bf16"', *WITH_FP8),
    "plugin.fp8.skip": ("train", '["down_proj"]', *WITH_FP8),
    "plugin.fp8.emulate": ("train", "false", ENDS, *WITH_FP8),
    "plugin.fp8.head": ("train", "true", *WITH_FP8),
    "plugin.fp8.gather": ("train", "true", ENDS, *WITH_FP8),
}
# What the other algorithms declare, from recipes of their own.
OPTIONS_OF = {
    "dspark": {
        "training.num_anchors": ("train", "3"),
        "training.loss_decay_gamma": ("train", "2.0"),
        "training.dspark_ce_loss_alpha": ("train", "0.5"),
        "training.dspark_l1_loss_alpha": ("train", "0.5"),
        "training.dspark_confidence_head_alpha": ("train", "0.5"),
        "plugin.dspark.schedule_threshold": ("eval", "0.05"),
        "plugin.dspark.markov_rank": ("train", "4"),
        "plugin.dspark.markov_head_type": ("train", '"gated"'),
        "plugin.dspark.enable_confidence_head": ("train", "false", "training.dspark_confidence_head_alpha=0"),
        "plugin.dspark.confidence_head_with_markov": ("train", "false"),
    },
    "eagle3": {
        "training.ttt_length": ("train", "2"),
        "training.lk_loss_type": ("train", '"alpha"'),
        "training.kl_scale": ("train", "0.5", 'training.lk_loss_type="lambda"'),
        "training.kl_decay": ("train", "3.0", 'training.lk_loss_type="lambda"'),
        "model.vocab_mapping_path": ("train", '"nowhere.safetensors"', ENDS),
        "plugin.eagle3.draft_vocab_size": ("train", "100"),
        "plugin.eagle3.train_embedding": ("train", "true"),
        "plugin.eagle3.architecture": ("train", '"eagle3.1"'),
    },
}
# What changes is speed or memory alone, which a tiny run does not show.
SILENT = {"training.objective_chunk_rows": "memory of the head", "training.compact_teacher": "sets the chunk below",
          "training.compact_teacher_chunk_size": "memory of the teacher", "data.capture_batch_size": "how many samples go through the target at once", "training.objective_chunk_blocks": "memory of the head",
          "training.dist_timeout": "shows when a rank is stuck: tests/dist/ranks.py",
          "checkpoint.staging_bytes": "room for a snapshot: tests/train/staging_test.cpp, tests/e2e/checkpoints.py", "checkpoint.keep_every": "tests/e2e/checkpoints.py",
          "backend.trackers": "opens other plugins: tests/tracker/tensorboard_files.py",
          **dict.fromkeys((f"data.{name}" for name in (
              "train_conversations_path", "eval_conversations_path", "prompts_conversations_path", "prompts_data_path", "held_out_share", "split_seed", "deduplicate",
              "min_supervised_tokens", "max_skipped_share", "ignored_texts", "text_supervision", "special_token_text", "train_only_last_turn", "train_on_reasoning", "chat_template_path",
              "chat_template_options", "chat_template_date")), "read by prepare, which this walk does not run: tests/e2e/test_prepare.py, tests/prepare")}


def declared(*manifests):
    for manifest in manifests:
        table = tomllib.loads((TESTS.parent / manifest).read_text())
        for name in table["options"]:
            yield name if "." in name or table["plugin"]["kind"] == "host" else f"plugin.{table['plugin']['name']}.{name}"


def observed(work, verb, sets, place):
    """What a run leaves behind: exit code, every number that is no time, every file and its size."""
    arguments = [part for one in sets for part in ("--set", one)]
    if verb == "capture":
        arguments += ["--set", f'data.hidden_states_path="{place}/train"', "--set", f'data.eval_hidden_states_path="{place}/eval"']
    elif verb == "train":
        arguments = ["--set", f'output_dir="{place}"', *arguments]
    elif verb == "export":
        arguments += ["--output", work.path / place]
    done = work.host(verb, *arguments, *(["--json"] if verb == "eval" else []), code=None)
    seen = {"code": done.returncode}
    if done.returncode != 0:
        seen["why"] = done.stderr
        return seen
    if verb == "eval":
        seen["numbers"] = {k: v for k, v in json.loads(done.stdout).items() if k not in ("seconds", "features")}
    for root in sorted(path for name in (place, "elsewhere") if (path := work.path / name).exists()):
        for file in sorted(root.rglob("*")):
            name = str(file.relative_to(work.path)).replace(str(place), "PLACE")
            if file.name == "metrics.jsonl":
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                seen[name] = [{k: v for k, v in line.items() if not k.startswith("perf/") or k == "perf/padded_share"} | {"eval": line.get("eval", {}).get("loss")}
                              for line in lines]
            elif file.is_file() and file.suffix == ".safetensors":
                seen[name] = file.read_bytes() if verb != "train" else file.stat().st_size
            elif file.is_file():
                seen[name] = None
    return seen


def walk(work, options):
    """Each option alone against a run without it. Removes `work`."""
    many = None
    work.host("train", "--set", "training.max_steps=2")
    counter, before, silent = itertools.count(), {}, []
    for key, (verb, value, *given) in options.items():
        here = work
        sets = ["training.max_steps=5"] if verb == "train" else []
        if "samples=600" in given:
            here = many = many or Work(steps=4, samples=600)
        if "damaged" in given:
            here = captured()
            shard = next((here.path / "features/train").glob("*.safetensors"))
            whole = bytearray(shard.read_bytes())
            size = int.from_bytes(whole[:8], "little")
            whole[8 + size + json.loads(whole[8 : 8 + size])["hidden_states"]["data_offsets"][1] - 2] ^= 1  # the last bit of a bfloat16
            shard.write_bytes(whole)
        if "plain" in given:  # what the recipe says about convolution and selector would be warned about
            sets += [f"plugin.dflash2.{name}=0" for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")]
        sets += [one for one in given if "=" in one and not one.startswith("samples")]
        base_key = (verb, tuple(sets), here.path)
        if base_key not in before:
            before[base_key] = observed(here, verb, sets, f"base{next(counter)}")
        base = before[base_key]
        assert base["code"] == 0, f"{key}: the comparison itself fails\n{base.get('why')}"
        found = observed(here, verb, [*sets, f"{key}={value}"], f"run{next(counter)}")
        if ENDS in given or "damaged" in given:
            assert found["code"] not in (0, 1), f"{key} = {value}: the run goes on"
            name = key.split(".")[-1]
            assert re.search(f"{name}|nothing|nowhere|{key}", found["why"]) or "damaged" in given, f"{key}: not named in\n{found['why']}"
        else:
            assert found["code"] == 0, f"{key} = {value}\n{found['why']}"
            if found == base:
                silent.append(f"{verb} {key} = {value}")
    assert not silent, f"accepted, and nothing changed: {silent}"
    for one in filter(None, (work, many)):
        shutil.rmtree(one.path)


def each_option_changes_something_or_ends_the_run():
    known = set(declared("core/recipe/host.toml", "plugins/algorithm/dflash2/plugin.toml")) - set(SILENT)
    assert known == set(OPTIONS), known ^ set(OPTIONS)
    walk(captured(), OPTIONS)


def each_option_of_fp8_changes_something_or_ends_the_run():
    assert set(declared("plugins/transform/fp8/plugin.toml")) == set(OPTIONS_OF_FP8)
    walk(captured(), OPTIONS_OF_FP8)


def each_option_of_the_other_algorithms_changes_something_or_ends_the_run():
    for algorithm, options in OPTIONS_OF.items():
        known = set(declared(f"plugins/algorithm/{algorithm}/plugin.toml")) - set(SILENT)
        assert known == set(options), known ^ set(options)
        walk(captured(algorithm=algorithm), options)


BACKEND_OPTIONS = {"shard_frozen_tables": "true", "reduce_scatter_max_input_buffers": "2", "separate_reduce_scatter_group": "true",
                   "reduce_dtype": '"float32"', "fsdp_sharding": '"FULL_SHARD"'}


def what_a_backend_does_not_offer_is_refused_by_name_and_one_rank_is_told():
    work = captured()
    for name, value in BACKEND_OPTIONS.items():
        for backend in ("single", "fsdp1"):
            if backend == "fsdp1" and name == "fsdp_sharding":
                continue
            for verb, *arguments in (["plan"], ["train"], ["eval", "--checkpoint", "untrained"], ["bench", *BENCH]):
                told = work.host(verb, *arguments, "--backend", backend, "--set", f"training.{name}={value}", code=2).stderr
                expect(told, f"{backend} does not offer training.{name}; fsdp", "fix:")
    every = [part for name, value in BACKEND_OPTIONS.items() for part in ("--set", f"training.{name}={value}")]
    told = work.host("train", "--backend", "fsdp2", *every)
    expect(told.stderr, "fsdp2: one rank")
    expect(told.stdout, "fsdp2/tables-on-one-rank", "fsdp2/reduce-buffers-on-one-rank", "fsdp2/reduce-group-on-one-rank")
    saved = (work.run / "recipe.toml").read_text()  # spells out every value: other backends know the keys
    (work.path / "saved.toml").write_text(saved)
    expect(work.host("plan", "--backend", "fsdp1", recipe="saved.toml", code=2).stderr, "B3", "B5/buffers", "B5/group", "B5/dtype")
    defaults = [part for name, value in {"shard_frozen_tables": "false", "reduce_scatter_max_input_buffers": "1", "separate_reduce_scatter_group": "false",
                                         "reduce_dtype": '"bfloat16"'}.items() for part in ("--set", f"training.{name}={value}")]
    work.host("plan", "--backend", "fsdp1", *defaults, recipe="saved.toml")
    shutil.rmtree(work.path)


def every_option_of_a_backend_says_how_many_things_it_changed_under_two_ranks():
    work = captured(steps=3)
    for index, (name, value) in enumerate(BACKEND_OPTIONS.items()):
        told = work.host("train", "--nproc", "2", "--backend", "fsdp2", "--set", f"training.{name}={value}", "--set", f'run_id="r{index}"').stderr
        found = re.search(rf"in effect, .*training\.{name} = {re.escape(value)} \((\d+)\)", told)
        assert found and int(found[1]) > 0, told
        assert "in effect" not in told.replace(found[0], ""), "told once, and of this option alone"
        expect(work.host("bench", *BENCH, "--nproc", "2", "--backend", "fsdp2", "--set", f"training.{name}={value}").stderr, found[0])
    shutil.rmtree(work.path)


def static_shapes_and_buckets_change_the_padding_and_not_the_losses():
    work = captured(steps=5)
    runs = {}
    for name, sets in {"dynamic": [], "static": ["training.static_shapes=true"], "buckets": ["training.static_shapes=true", "training.static_shape_buckets=[128]"]}.items():
        arguments = [part for one in [*sets, "data.max_length=256", f'run_id="{name}"'] for part in ("--set", one)]
        told = work.host("train", *arguments).stderr
        runs[name] = [json.loads(line) for line in (work.path / "out" / name / "metrics.jsonl").read_text().splitlines() if '"lr"' in line]
        assert ("static shapes" in told) == (name != "dynamic"), told
        expect(told, {"dynamic": "", "static": "padded to [256] tokens and 6 block slots", "buckets": "padded to [128, 256] tokens"}[name])
    for name in ("static", "buckets"):
        for plain, padded in zip(runs["dynamic"], runs[name], strict=True):
            assert abs(plain["loss"] - padded["loss"]) < 1e-4 * plain["loss"], (name, plain["loss"], padded["loss"])
            assert plain["dflash/hard_label/block_count"] == padded["dflash/hard_label/block_count"]
    shares = {name: lines[0]["perf/padded_share"] for name, lines in runs.items()}
    assert shares["dynamic"] < shares["buckets"] < shares["static"], shares
    shutil.rmtree(work.path)


if __name__ == "__main__":
    tiny.main(globals())
