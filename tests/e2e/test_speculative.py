"""The tiny target answers prompts, drafts learn its answers, are exported and decode: generate, export --check, eval --speculative. Then drafts that are broken on
purpose, each caught by one of them. About 40 s."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import fetch_smollm2  # noqa: E402

fetch_smollm2.use_python_packages()
import numpy as np  # noqa: E402
import safetensors  # noqa: E402
import safetensors.numpy  # noqa: E402

BUILD = Path(os.environ.get("SF_BUILD", ROOT / "build"))
HOST = BUILD / "bin/sf-host"
ALGORITHMS = ("dflash2", "dspark", "eagle3")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
NEW_TOKENS = 32


def recipe(algorithm):
    return ROOT / f"recipes/tiny-{algorithm}.toml"


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_tensors(path):
    """Names to (dtype, shape, bytes)."""
    return {name: (one["dtype"], one["shape"], bytes(one["data"])) for name, one in safetensors.deserialize(Path(path).read_bytes())}


def write_tensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


class Decoding(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-speculative-"))
        cls.generated = cls.ok("dflash2", "generate", "--prompts", ROOT / "recipes/data/tiny/train.jsonl", "--output", cls.place / "train.jsonl",
                               "--max-new-tokens", str(NEW_TOKENS))
        cls.ok("dflash2", "generate", "--prompts", ROOT / "recipes/data/tiny/held_out.jsonl", "--output", cls.place / "held_out.jsonl", "--max-new-tokens", str(NEW_TOKENS))
        cls.ok("dflash2", "capture", "--for", ",".join(str(recipe(name)) for name in ALGORITHMS))
        cls.drafts, cls.exports = {}, {}
        for name in ALGORITHMS:
            cls.ok(name, "train")
            cls.drafts[name] = cls.place / f"draft-{name}"
            cls.exports[name] = cls.ok(name, "export", "--checkpoint", "auto", "--output", cls.drafts[name])

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def host(cls, algorithm, verb, *arguments, features="features"):
        paths = {"output_dir": "runs", "data.train_data_path": "train.jsonl", "data.eval_data_path": "held_out.jsonl", "data.hidden_states_path": f"{features}/train",
                 "data.eval_hidden_states_path": f"{features}/held_out"}
        sets = [part for key, path in paths.items() for part in ("--set", f'{key}="{cls.place / path}"')]
        return subprocess.run([HOST, *verb.split(), recipe(algorithm), *sets, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)

    @classmethod
    def ok(cls, algorithm, verb, *arguments, code=0, **options):
        done = cls.host(algorithm, verb, *arguments, "--json", **options)
        assert done.returncode == code, f"{verb}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def refused(self, code, text, algorithm, verb, *arguments):
        done = self.host(algorithm, verb, *arguments)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        self.assertIn(text, done.stderr)

    def speculate(self, *arguments, algorithm="dflash2", code=0):
        return self.ok(algorithm, "eval", "--speculative", "--max-new-tokens", NEW_TOKENS, "--batch-size", 3, *arguments, code=code)

    # ---- generate

    def test_generated_answers_are_token_records_in_the_order_of_the_prompts(self):
        prompts, answers = read_jsonl(ROOT / "recipes/data/tiny/train.jsonl"), read_jsonl(self.place / "train.jsonl")
        self.assertEqual([one["id"] for one in prompts], [one["id"] for one in answers])
        for prompt, answer in zip(prompts, answers):
            length = prompt["loss_mask"].index(1)
            self.assertEqual(answer["input_ids"][:length], prompt["input_ids"][:length])
            self.assertEqual(answer["loss_mask"], [0] * length + [1] * (len(answer["input_ids"]) - length))
            new = len(answer["input_ids"]) - length
            self.assertTrue(new == NEW_TOKENS if answer["stop"] == "length" else answer["input_ids"][-1] == 2)
        self.assertEqual(sum(self.generated["stop_reasons"].values()), len(prompts))
        bytes_read = self.generated["decode_seconds"] * self.generated["decode_passes_per_second"] * self.generated["weight_bytes_per_pass"] + self.generated["cache_bytes_read"]
        bound = self.generated["memory_bandwidth"] / bytes_read  # passes of all in a second
        self.assertAlmostEqual(self.generated["share_of_bandwidth"] * self.generated["decode_seconds"] * bound, 1, places=6)

    def test_a_generation_that_was_killed_goes_on_and_ends_the_same(self):
        output = self.place / "again.jsonl"
        call = ("generate", "--prompts", ROOT / "recipes/data/tiny/train.jsonl", "--output", output, "--max-new-tokens", 12, "--temperature", 0.7, "--seed", 3)
        whole = self.ok("dflash2", *call)
        text = output.read_text()
        self.assertTrue(self.ok("dflash2", *call)["was_finished"])
        self.refused(2, "holds something else", "dflash2", *call[:-1], 4)
        lines = [json.dumps({**json.loads(line), "index": index}) for index, line in enumerate(text.splitlines())]
        kept = lines[40:] + lines[:10]  # as answers end, not in order
        header = json.dumps({"format": "sf-generate-partial", "fingerprint": whole["fingerprint"]})
        output.unlink()
        Path(f"{output}.partial").write_text("\n".join([header, *kept, lines[20][:35]]))  # the last line torn
        rest = self.ok("dflash2", *call)
        self.assertEqual(output.read_text(), text)
        self.assertLess(rest["tokens_generated"], 0.6 * whole["tokens_generated"])
        self.assertFalse(Path(f"{output}.partial").exists())
        output.write_text("".join(text.splitlines(keepends=True)[:-1]))
        self.refused(2, "holds something else", "dflash2", *call)
        output.unlink()
        Path(f"{output}.partial").write_text(header + "\n")
        self.refused(4, "answers of another call", "dflash2", *call[:-1], 4)
        for mine in ("my notes\n", "", '{"format": 3}\n'):  # nothing is lost with a file that has nothing in it
            Path(f"{output}.partial").write_text(mine)
            done = self.host("dflash2", *call, "--max-prompts", 2)
            self.assertEqual(done.returncode, 4 if mine else 0, done.stderr)
            if mine:
                self.assertIn("is none of sf-host generate's", done.stderr)
                self.assertEqual(Path(f"{output}.partial").read_text(), mine)
            else:
                output.unlink()

    def test_generate_refuses_what_it_can_not_answer(self):
        empty, long = self.place / "empty.jsonl", self.place / "long.jsonl"
        empty.write_text("\n")
        long.write_text(json.dumps({"input_ids": [5] * 600}) + "\n")
        target = "generate", "--output", self.place / "never.jsonl"
        self.refused(4, "no prompt in it", "dflash2", *target, "--prompts", empty)
        self.refused(4, "context ends at 512", "dflash2", *target, "--prompts", long)
        self.refused(4, "missing.jsonl", "dflash2", *target, "--prompts", self.place / "missing.jsonl")
        self.refused(2, "no token of the target", "dflash2", *target, "--stop-tokens", "2,400")
        self.refused(2, "without --temperature", "dflash2", *target, "--top-k", 5)
        self.refused(2, "its folder does not exist", "dflash2", "generate", "--output", self.place / "no/where.jsonl")
        self.assertFalse((self.place / "never.jsonl").exists())
        self.assertFalse((self.place / "never.jsonl.partial").exists())

    def test_numbers_that_mean_nothing_are_refused(self):
        output = "generate", "--output", self.place / "never.jsonl"
        for flag, value in (("--max-new-tokens", 0), ("--max-prompts", -1), ("--batch-size", 0), ("--temperature", "inf"), ("--temperature", "nan"), ("--temperature", 1e-30)):
            self.refused(2, f"{flag} ", "dflash2", *output, flag, value)
        self.assertFalse((self.place / "never.jsonl").exists())

    def test_a_target_whose_weights_are_damaged_answers_nothing(self):
        target = self.place / "damaged-target"
        shutil.copytree(ROOT / "tests/parity/golden/target_llama_tied", target)
        tensors = read_tensors(target / "model.safetensors")
        name = next(name for name in tensors if name.endswith("layers.3.mlp.up_proj.weight"))
        dtype, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, np.array([np.nan], np.float32).tobytes() + raw[4:])
        self.assertEqual(dtype, "F32")
        write_tensors(target / "model.safetensors", tensors)
        sets = "--set", f'model.target_model_path="{target}"'
        self.refused(4, "logits are not finite", "dflash2", "generate", "--output", self.place / "junk.jsonl", *sets)
        self.assertFalse((self.place / "junk.jsonl").exists())
        folder = self.place / "draft-of-no-record"  # without a record of its target
        shutil.copytree(self.drafts["dflash2"], folder)
        (folder / "export.json").unlink()
        self.refused(4, "logits are not finite", "dflash2", "eval", "--speculative", "--draft", folder, *sets)

    def test_what_decoding_can_turn_is_named_when_memory_runs_out(self):
        target = self.place / "endless-target"  # whose context no machine has the memory for
        shutil.copytree(ROOT / "tests/parity/golden/target_llama_tied", target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**31 - 1}))
        sets = "--set", f'model.target_model_path="{target}"', "--max-new-tokens", 2**31 - 1000, "--stop-tokens", "none"
        folder = self.place / "draft-of-any-target"
        shutil.copytree(self.drafts["dflash2"], folder)
        (folder / "export.json").unlink()
        done = self.host("dflash2", "eval", "--speculative", "--draft", folder, *sets)
        self.assertEqual(done.returncode, 5, done.stderr + done.stdout)
        self.assertIn("out of memory", done.stderr)
        hint = done.stderr.split("fix:")[1]
        self.assertIn("--max-new-tokens", hint)
        self.assertIn("--draft-tokens", hint)
        self.assertNotIn("training.", hint)

    # ---- speculative decoding

    def test_answers_of_one_token_leave_nothing_to_draft_and_that_is_said(self):
        report = self.ok("dspark", "eval", "--speculative", "--draft", self.drafts["dspark"], "--max-new-tokens", 1, "--page", self.place / "short.html")
        self.assertTrue(report["lossless"])
        self.assertIn("nothing was drafted", report["drafts"][0]["verdict"])

    def test_one_prompt_has_a_length_and_no_interval(self):
        page = self.place / "one.html"
        for prompts, interval in ((1, False), (3, True)):
            draft = self.speculate("--draft", self.drafts["dflash2"], "--max-prompts", prompts, "--page", page)["drafts"][0]
            self.assertEqual("passes of one prompt" not in draft["verdict"], interval, draft["verdict"])
            self.assertEqual(f"<small>{draft['acceptance_length']['low']:.3f} to" in page.read_text(), interval)

    def test_answers_may_be_as_long_as_the_context_and_take_no_more_memory(self):
        report = self.ok("dflash2", "eval", "--speculative", "--draft", self.drafts["dflash2"], "--max-new-tokens", 10**10, "--max-prompts", 2, "--stop-tokens", "none")
        self.assertTrue(report["lossless"])
        self.assertGreater(report["plain_tokens"], 2 * 400)  # of 512

    def test_a_draft_that_chance_alone_makes_worse_is_not_accused(self):
        folder = self.place / "draft-recorded"
        shutil.copytree(self.drafts["dflash2"], folder)
        record = json.loads((folder / "export.json").read_text())
        for recorded, accused, few in ((1.01, False, ("--max-new-tokens", 2, "--max-prompts", 2)), (9.0, True, ("--max-new-tokens", 16))):
            record["origin"]["acceptance_length"] = recorded
            (folder / "export.json").write_text(json.dumps(record))
            # one short answer each: a draft with 1.01 need not have a single hit
            forced = self.ok("dflash2", "eval", "--speculative", "--draft", folder, *few)["drafts"][0]["teacher_forced"]
            self.assertEqual(not forced["as_recorded"], accused, forced)

    def test_a_chain_that_is_cut_shorter_is_not_held_against_what_it_had_when_it_was_saved(self):
        folder = self.place / "draft-long-chain"
        shutil.copytree(self.drafts["eagle3"], folder)
        record = json.loads((folder / "export.json").read_text())
        record["origin"]["acceptance_length"] = 9.0  # more than any chain here can have
        (folder / "export.json").write_text(json.dumps(record))
        whole, cut = (self.speculate("--draft", folder, "--max-prompts", 8, *extra)["drafts"][0]["teacher_forced"] for extra in ((), ("--draft-tokens", 1)))
        self.assertFalse(whole["as_recorded"])
        self.assertNotIn("as_recorded", cut)
        self.assertTrue(cut["agrees"])

    def test_every_draft_decodes_losslessly_and_as_training_evaluates_it(self):
        page = self.place / "report.html"
        drafts = [part for name in ALGORITHMS for part in ("--draft", self.drafts[name])]
        report = self.speculate(*drafts, "--sweep", "1,2", "--page", page)
        self.assertTrue(report["lossless"])
        self.assertEqual(report["exact_answers"] + report["ties"], report["compared_answers"])
        self.assertEqual(report["compared_answers"], report["prompts"] * 3 * len(ALGORITHMS))
        self.assertEqual([one["name"] for one in report["drafts"]], [f"draft-{name}" for name in ALGORITHMS])
        for one in report["drafts"]:
            with self.subTest(one["name"]):
                length, forced = one["acceptance_length"], one["teacher_forced"]
                self.assertTrue(forced["agrees"], one["verdict"])
                self.assertAlmostEqual(forced["walk_length"], length["value"], places=6)  # pass for pass: the tiny target computes in float32
                self.assertTrue(forced["as_recorded"], one["verdict"])
                self.assertGreater(length["value"], 1.3)
                self.assertLessEqual(length["low"], length["value"])
                self.assertLessEqual(length["value"], length["high"])
                first = one["per_position"][0]
                self.assertEqual(first["reached"], one["passes"])
                self.assertAlmostEqual(length["value"], 1 + sum(place["survival"] for place in one["per_position"]), places=6)
                self.assertEqual(sum(category["passes"] for category in one["by_category"].values()), one["passes"])
                measured = {entry["draft_tokens"]: entry["acceptance_length"] for entry in one["by_draft_tokens"] if entry["how"] == "measured"}
                self.assertLessEqual({1, 2, one["draft_tokens"]}, set(measured))
                self.assertLessEqual(measured[1], 2.0)
                self.assertLessEqual(measured[1], measured[2] + 1e-9)
        text = page.read_text()
        self.assertIn("draft-eagle3", text)
        self.assertNotIn("http", text)
        # what the target pass gives beside the first token of each answer
        tokens = sum(one["loss_mask"].count(1) for one in read_jsonl(self.place / "held_out.jsonl"))
        self.assertEqual(report["plain_tokens"], tokens - report["prompts"])

    def test_a_checkpoint_decodes_like_its_export_up_to_rounding(self):
        of_run = self.speculate("--checkpoint", "auto", algorithm="dspark")["drafts"][0]
        of_export = self.speculate("--draft", self.drafts["dspark"], algorithm="dspark")["drafts"][0]
        self.assertTrue(of_run["teacher_forced"]["agrees"])
        self.assertAlmostEqual(of_run["acceptance_length"]["value"], of_export["acceptance_length"]["value"], delta=0.15)

    def test_the_confidence_schedule_drafts_less_and_stays_lossless(self):
        whole, cut = (self.speculate("--draft", self.drafts["dspark"], *extra)["drafts"][0] for extra in ((), ("--schedule",)))
        self.assertLessEqual(cut["acceptance_length"]["value"], whole["acceptance_length"]["value"] + 1e-9)
        self.assertAlmostEqual(whole["schedule"]["acceptance_length"], 1 + whole["schedule"]["advised_tokens"] * whole["schedule"]["hit_rate"], places=6)
        self.assertNotIn("agrees", cut["teacher_forced"])

    def test_decoding_refuses_what_does_not_fit(self):
        self.refused(2, "do nothing without --speculative", "dflash2", "eval", "--prompts", "x")
        self.refused(2, "no exported draft", "dflash2", "eval", "--speculative", "--draft", self.place)
        self.refused(2, "exclude each other", "dflash2", "eval", "--speculative", "--draft", self.drafts["dspark"], "--checkpoint", "best")
        self.refused(2, "drafts 1 to 3 tokens", "dflash2", "eval", "--speculative", "--draft", self.drafts["dflash2"], "--draft-tokens", 9)
        draft = "dflash2", "eval", "--speculative", "--draft", self.drafts["dflash2"]
        self.refused(2, "its folder does not exist", *draft, "--page", self.place / "no/where.html")
        self.refused(2, "is a folder", *draft, "--page", self.place)
        self.refused(2, "--draft-cost", *draft, "--draft-cost", "nan")
        self.refused(7, "is an exported draft and no checkpoint", "dflash2", "eval", "--checkpoint", self.drafts["dflash2"])
        self.refused(2, "--schedule does nothing", *draft, "--schedule")
        self.refused(2, "--draft-tokens 0", *draft, "--draft-tokens", 0)
        self.refused(2, "--features does nothing with --no-check", "dflash2", "export", "--output", self.place / "never", "--no-check", "--features", "x")
        self.refused(2, "do nothing with doctor target", "dflash2", "doctor target", "--samples", 3)
        self.refused(2, "its folder does not exist", "dflash2", "doctor data", "--output", self.place / "no/where.html")
        other = ROOT / "tests/parity/golden/target_llama_yarn"
        self.refused(4, "trained for another target", "dflash2", "eval", "--speculative", "--draft", self.drafts["eagle3"], "--set", f'model.target_model_path="{other}"')
        empty = self.place / "empty.jsonl"
        empty.write_text("")
        self.refused(4, "no prompt in it", "dflash2", "eval", "--speculative", "--draft", self.drafts["dflash2"], "--prompts", empty)

    # ---- export --check

    def test_an_export_is_checked_as_it_is_written(self):
        for name, export in self.exports.items():
            with self.subTest(name):
                check = export["check"]
                self.assertTrue(check["fine"], check["problems"])
                self.assertGreater(check["replayed"]["blocks"], 50)
                self.assertEqual(check["replayed"]["largest_difference"], 0)
                self.assertGreater(check["acceptance_length"], 1.3)
                self.assertEqual(set(check["serve"]), {"sglang", "vllm"})
                self.assertIn(str(self.drafts[name]), check["serve"]["vllm"])

    def test_without_features_the_rest_is_checked_and_that_is_said(self):
        done = self.host("dflash2", "export", "--output", self.place / "unreplayed", features="nowhere")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no recorded features", done.stderr)

    def test_a_target_that_the_draft_was_not_trained_for_is_told(self):
        target = self.place / "finetuned-target"
        shutil.copytree(ROOT / "tests/parity/golden/target_llama_tied", target)
        tensors = read_tensors(target / "model.safetensors")
        dtype, shape, raw = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = (dtype, shape, (1.25 * np.frombuffer(raw, np.float32)).tobytes())
        write_tensors(target / "model.safetensors", tensors)
        done = self.host("dflash2", "export", "--check-only", "--output", self.drafts["dflash2"], "--set", f'model.target_model_path="{target}"', features="nowhere")
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertIn("the checkpoint was trained for another target", done.stderr)

    def test_an_export_of_another_runs_step_says_whose_it_is(self):
        run = next((self.place / "runs").glob("*dflash2*"))
        other = self.place / "runs/another-run"
        shutil.copytree(run, other, symlinks=True)
        best = json.loads((other / "best.json").read_text())
        (other / "best.json").write_text(json.dumps({**best, "score": 3.875}))
        state = next(other.glob("step-*/state.json"))
        folder = self.place / "export-of-another-run"
        for checkpoint, score in ((other / best["folder"], 3.875), (run / best["folder"], best["score"])):
            self.ok("dflash2", "export", "--no-check", "--checkpoint", checkpoint, "--output", folder)
            origin = json.loads((folder / "export.json").read_text())["origin"]
            self.assertEqual((origin["acceptance_length"], origin["run"], origin["step"]), (score, json.loads(state.read_text())["run_id"], best["step"]))

    def test_hit_rates_are_those_of_what_a_draft_is_to_foresee(self):
        """What stands behind an answer, the next question for one, is no guess that it could miss."""
        records = read_jsonl(self.place / "held_out.jsonl")
        for record in records:
            record["input_ids"] += [5, 90, 17, 250, 33]
            record["loss_mask"] += [0] * 5
        (self.place / "followed.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        self.ok("dflash2", "capture", "--split", "eval", "--set", f'data.eval_data_path="{self.place / "followed.jsonl"}"', "--set",
                f'data.eval_hidden_states_path="{self.place / "followed"}"')
        checks = [self.ok("dflash2", "export", "--checkpoint", "auto", "--check-only", "--output", self.drafts["dflash2"], "--features", folder)["check"]
                  for folder in (self.place / "features/held_out", self.place / "followed")]
        self.assertEqual(checks[0]["per_position"], checks[1]["per_position"])
        self.assertLess(checks[0]["per_position"][-1]["reached"], checks[0]["replayed"]["blocks"])

    def test_the_flag_check_asks_for_what_is_done_anyway(self):
        export = self.ok("dflash2", "export", "--check", "--output", self.place / "asked")
        self.assertTrue(export["check"]["fine"])
        self.refused(2, "exclude each other", "dflash2", "export", "--check", "--no-check", "--output", self.place / "never")

    def test_features_that_can_not_be_replayed_are_not_the_drafts_fault(self):
        self.refused(2, "there is no such folder", "dflash2", "export", "--output", self.place / "never", "--features", self.place / "nowhere")
        self.assertFalse((self.place / "never").exists())
        (self.place / "no-features").mkdir()
        done = self.host("dflash2", "export", "--check-only", "--output", self.drafts["dflash2"], "--features", self.place / "no-features")
        self.assertEqual(done.returncode, 7)
        self.assertIn("which says nothing of the draft", done.stderr)

    def test_a_damaged_record_of_an_export_is_told(self):
        folder = self.place / "damaged-record"
        shutil.copytree(self.drafts["dflash2"], folder)
        (folder / "export.json").write_text("x")
        done = self.host("dflash2", "export", "--check-only", "--output", folder)
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertIn("export.json is damaged", done.stderr)
        done = self.host("dflash2", "eval", "--speculative", "--draft", folder)
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("export.json:1:1: not valid JSON", done.stderr)
        self.assertIn("fix:", done.stderr)

    # ---- drafts broken on purpose

    def broken(self, name, change, checksums=True):
        """A copy of a draft with `change(config, tensors)` done to it; checksums as if it had been written so."""
        folder = self.place / f"broken-{self.id().rsplit('.', 1)[1]}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.drafts[name], folder)
        config, tensors = json.loads((folder / "config.json").read_text()), read_tensors(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        write_tensors(folder / "model.safetensors", tensors)
        if checksums:
            record = json.loads((folder / "export.json").read_text())
            record["files"] = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in record["files"]}
            (folder / "export.json").write_text(json.dumps(record))
        return folder

    def caught(self, name, text, change, **options):
        folder = self.broken(name, change, **options)
        check = self.ok(name, "export", "--checkpoint", "auto", "--check-only", "--output", folder, code=7)["check"]
        self.assertFalse(check["fine"])
        self.assertTrue(any(text in problem for problem in check["problems"]), check["problems"])
        return check

    def test_broken_rope_theta_in_both_spellings(self):
        def change(config, _):
            config["rope_theta"] = 1e6
            if "rope_parameters" in config:
                config["rope_parameters"]["rope_theta"] = 1e6
        check = self.caught("dflash2", "rope_theta", change)
        self.assertTrue(any(problem.startswith("replay") for problem in check["problems"]), check["problems"])

    def test_broken_rope_theta_where_old_readers_look(self):
        self.caught("eagle3", "\"rope_theta\" is missing", lambda config, _: config.pop("rope_theta"))

    def test_broken_order_of_captured_layers(self):
        def change(config, _):
            config["dflash_config"]["target_layer_ids"] = [3, 1, 5]
        self.caught("dflash2", "does not ascend", change)

    def test_broken_captured_layers(self):
        def change(config, _):
            for place in (config, config["dflash_config"]):
                place["target_layer_ids"] = [1, 2, 5]
        self.caught("dspark", "target_layer_ids", change)

    def test_broken_mask_token(self):
        def change(config, _):
            config["dflash_config"]["mask_token_id"] = 4
        check = self.caught("dflash2", "mask_token_id", change)
        self.assertTrue(any(problem.startswith("replay") for problem in check["problems"]), check["problems"])

    def test_broken_block_size_one_too_many(self):
        def change(config, _):
            config["block_size"] += 1
            config["dflash_config"]["block_size"] += 1
        self.caught("dflash2", "block_size", change)

    def test_broken_block_size_in_one_place(self):
        def change(config, _):
            config["dflash_config"]["block_size"] = 7
        self.caught("dspark", "engines read one or the other", change)

    def test_broken_columns_of_swapped_layers_in_the_weights(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["fc.weight"]
            columns = np.frombuffer(raw, np.uint16).reshape(shape[0], 3, shape[1] // 3)
            tensors["fc.weight"] = (dtype, shape, columns[:, [1, 0, 2]].tobytes())
        self.caught("dflash2", "replay", change)

    def test_broken_vocabulary_of_ids_instead_of_offsets(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["d2t"]
            tensors["d2t"] = (dtype, shape, (np.frombuffer(raw, np.int64) + np.arange(shape[0])).tobytes())
        self.caught("eagle3", "d2t holds offsets", change)

    def test_broken_vocabulary_of_another_draft(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["d2t"]
            kept = np.zeros(tensors["t2d"][1][0], np.uint8)
            kept[-shape[0]:] = 1
            tensors["t2d"] = (*tensors["t2d"][:2], kept.tobytes())
            tensors["d2t"] = (dtype, shape, np.full(shape[0], len(kept) - shape[0], np.int64).tobytes())
        folder = self.broken("eagle3", change)
        one = self.speculate("--draft", folder)["drafts"][0]
        self.assertFalse(one["teacher_forced"]["as_recorded"], one["verdict"])

    def test_broken_head_at_random(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["lm_head.weight"]
            draw = np.random.default_rng(1).normal(0, 0.02, shape).astype(np.float32)
            tensors["lm_head.weight"] = (dtype, shape, fetch_smollm2.bfloat16_bytes(draw))
        self.caught("eagle3", "replay", change)

    def test_broken_halves_of_the_unrolled_layers_input(self):
        def change(_, tensors):
            for name in ("q_proj", "k_proj", "v_proj"):
                dtype, shape, raw = tensors[f"midlayer.self_attn.{name}.weight"]
                halves = np.frombuffer(raw, np.uint16).reshape(shape[0], 2, shape[1] // 2)
                tensors[f"midlayer.self_attn.{name}.weight"] = (dtype, shape, halves[:, ::-1].tobytes())
        self.caught("eagle3", "replay", change)

    def test_broken_missing_norm(self):
        self.caught("eagle3", "\"norm.weight\" [64] is missing", lambda _, tensors: tensors.pop("norm.weight"))

    def test_broken_name_that_no_engine_knows(self):
        self.caught("dspark", "no tensor of DSparkDraftModel", lambda _, tensors: tensors.update({"logit_head.markov_head.markov_w1.weight": tensors.pop("markov_head.markov_w1.weight")}))

    def test_broken_markov_head_without_effect(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["markov_head.markov_w2.weight"]
            tensors["markov_head.markov_w2.weight"] = (dtype, shape, bytes(len(raw)))
        self.caught("dspark", "replay", change)

    def test_broken_markov_keys_at_the_top(self):
        self.caught("dspark", "markov_rank", lambda config, _: config.pop("markov_rank"))

    def test_broken_selector_tables_swapped(self):
        def change(_, tensors):
            one, other = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
            tensors[one], tensors[other] = tensors[other], tensors[one]
        self.caught("dflash2", "replay", change)

    def test_broken_norm_epsilon(self):
        def change(config, _):
            config["rms_norm_eps"] = 1e-2
        self.caught("dspark", "rms_norm_eps", change)

    def test_broken_tie_that_takes_the_head_away(self):
        def change(config, _):
            config["tie_word_embeddings"] = True
        self.caught("eagle3", "in the place of the draft's head", change)

    def test_broken_after_it_was_written(self):
        def change(_, tensors):
            dtype, shape, raw = tensors["norm.weight"]
            tensors["norm.weight"] = (dtype, shape, raw[2:] + raw[:2])
        self.caught("dflash2", "changed after it was written", change, checksums=False)

    def changed_features(self, name, change, tensors=("hidden_states",)):
        """A copy of the features whose states were changed, rows [tokens, columns] of a record at a time."""
        for split in ("train", "held_out"):
            folder = self.place / name / split
            shutil.copytree(self.place / "features" / split, folder)
            for file in folder.glob("*.safetensors"):
                whole = bytearray(file.read_bytes())
                size = int.from_bytes(whole[:8], "little")
                header = json.loads(whole[8:8 + size])
                for tensor in tensors:
                    states = header[tensor]
                    begin, end = (8 + size + offset for offset in states["data_offsets"])
                    rows = np.frombuffer(bytes(whole[begin:end]), np.uint16).reshape(states["shape"])
                    whole[begin:end] = change(rows).tobytes()
                file.write_bytes(whole)

    def trained_on(self, name, change):
        """What decoding says of a draft whose features were changed."""
        self.changed_features(name, change)
        elsewhere = ("--set", f'run_id="{name}"', "--set", "data.verify_checksums=false")
        self.ok("dflash2", "train", *elsewhere, features=name)
        self.ok("dflash2", "export", "--checkpoint", "best", "--output", self.place / f"draft-{name}", *elsewhere, features=name)
        one = self.speculate("--draft", self.place / f"draft-{name}")["drafts"][0]
        self.assertFalse(one["teacher_forced"]["as_recorded"], one["verdict"])
        self.assertIn("WHEN IT WAS SAVED", one["verdict"])
        self.assertTrue(one["teacher_forced"]["agrees"])

    def test_broken_features_of_another_model(self):
        """Trained on states whose columns stand elsewhere: loss and held-out acceptance look as ever, and decoding shows it."""
        self.trained_on("elsewhere", lambda rows: rows[:, ::-1])

    def test_broken_labels_off_by_one(self):
        """Each token beside the state of the next one: a draft is told what it has to guess, and looks better than any other until it serves."""
        self.changed_features("shifted", lambda rows: np.concatenate([rows[1:], rows[:1]]), ("hidden_states", "target_last_hidden_states"))
        done = self.host("dflash2", "doctor features", "--set", "data.verify_checksums=false", features="shifted")
        self.assertEqual(done.returncode, 4, done.stdout + done.stderr)
        self.assertIn("the features are shifted", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
