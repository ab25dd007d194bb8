"""sf-host prepare and doctor data from outside: counts that add up, stop and go on, what must not be half-written, the page. About 60 s."""
import fcntl
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/prepare"))
import families  # noqa: E402

BUILD = Path(os.environ.get("SF_BUILD", ROOT / "build"))
HOST = BUILD / "bin/sf-host"
RECIPE = """
run_id = "prepare"
output_dir = "out"
device = "cpu"
[model]
target_model_path = "target"
draft_num_hidden_layers = 1
draft_block_size = 4
target_layer_ids = [1, 3]
mask_token_id = 1
[algorithm]
name = "dflash2"
[backend]
sharding = "single"
[data]
train_conversations_path = "chat.jsonl"
train_data_path = "tokens/train.jsonl"
hidden_states_path = "features"
max_length = 256
"""


def chat(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def words(draw, count):
    return " ".join(draw.choice("rain river stone light cold bread north seven under quiet".split()) for _ in range(count))


class Prepare(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.targets = Path(tempfile.mkdtemp(prefix="sf-prepare-targets-"))
        families.write_folders(cls.targets, ["chatml"])
        config = json.loads((ROOT / "tests/parity/golden/target_llama_tied/config.json").read_text())
        config["vocab_size"] = 49400
        for folder in cls.targets.iterdir():
            (folder / "config.json").write_text(json.dumps(config))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.targets)

    def setUp(self):
        self.place = Path(tempfile.mkdtemp(prefix="sf-prepare-"))
        self.use("chatml")
        (self.place / "recipe.toml").write_text(RECIPE)

    def tearDown(self):
        shutil.rmtree(self.place)

    def use(self, family):
        target = self.place / "target"
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(self.targets / family, target)

    def write(self, records, name="chat.jsonl"):
        (self.place / name).write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))

    def host(self, *arguments, verb="prepare", **more):
        return subprocess.run([HOST, *verb.split(), self.place / "recipe.toml", *arguments], capture_output=True, text=True, timeout=120, **more)

    def report(self, *arguments):
        done = self.host("--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
        return json.loads(done.stdout)

    def records(self, name="train.jsonl"):
        return [json.loads(line) for line in (self.place / "tokens" / name).read_text().splitlines()]

    def nothing_written(self):
        tokens = self.place / "tokens"
        return not tokens.exists() or not list(tokens.iterdir())

    def test_every_row_is_accounted_for(self):
        draw = random.Random(1)
        good = [chat(words(draw, 5), words(draw, 12), id=f"c{i}") for i in range(30)]
        bad = [b"{", b'{"messages": "\xff"}', {"messages": []}, {"prompt": "x"}, {"messages": [{"role": "alien", "content": "x"}]}, chat("a", ""),
               {"messages": [{"role": "assistant", "content": "first"}]}, good[3], good[7]]
        self.write(good[:10] + [b"", b"  "] + bad + good[10:] + [chat(words(draw, 400), "too far")])
        report = self.report()["train"]
        self.assertEqual(report["rows"], len(good) + len(bad) + 1)
        self.assertEqual(report["rows"], report["records"] + sum(report["skipped"].values()))
        self.assertEqual(report["skipped"], {"json": 1, "encoding": 1, "empty": 1, "no-conversation": 1, "unknown-role": 1, "too-few-supervised": 1, "no-question": 1,
                                             "duplicate": 2, "cut-before-answer": 1})
        self.assertEqual(report["examples"]["json"][0][:15], "chat.jsonl:13: ")
        records = self.records()
        self.assertEqual([r["id"] for r in records], [f"c{i}" for i in range(30)])
        self.assertTrue(all(len(r["input_ids"]) == len(r["loss_mask"]) and r["loss_mask"][-1] == 1 for r in records))
        self.assertEqual(report["outputs"][0]["supervised"], sum(sum(r["loss_mask"]) for r in records))
        self.assertEqual({role for r in records for role, _, _ in r["roles"]}, {"user", "assistant"})

    def test_a_small_input_is_tokenized_without_the_faster_library_to_the_same_bytes(self):
        draw = random.Random(8)
        self.write([chat(words(draw, 9) + "'s 12\n\n  é", words(draw, 30), id=str(k)) for k in range(50)])
        made = {}
        for wanted in ("", "1"):
            shutil.rmtree(self.place / "tokens", ignore_errors=True)
            done = self.host("--json", env={**os.environ, "SF_FAST_TOKENIZER": wanted})
            self.assertEqual(done.returncode, 0, done.stderr)
            made[json.loads(done.stdout)["train"]["rules"]["tokenizer"]["encoder"].split()[0]] = (self.place / "tokens/train.jsonl").read_bytes()
        self.assertEqual(sorted(made), ["fastokens", "tokenizers"])
        self.assertEqual(made["fastokens"], made["tokenizers"])

    def test_again_nothing_is_done_and_other_options_do_it_anew(self):
        draw = random.Random(2)
        self.write([chat(words(draw, 5), words(draw, 12)) for _ in range(5)])
        self.assertFalse(self.report()["train"]["was_finished"])
        before = (self.place / "tokens/train.jsonl").stat().st_mtime_ns
        self.assertTrue(self.report()["train"]["was_finished"])
        self.assertEqual((self.place / "tokens/train.jsonl").stat().st_mtime_ns, before)
        self.assertFalse(self.report("--set", "data.max_length=30")["train"]["was_finished"])
        self.assertEqual(max(len(r["input_ids"]) for r in self.records()), 30)
        (self.place / "tokens/train.jsonl").write_text("somebody else's\n")
        done = self.host()
        self.assertEqual(done.returncode, 4)
        self.assertIn("is not what prepare wrote", done.stderr)

    def test_killed_and_gone_on_with_it_writes_the_same(self):
        draw = random.Random(3)
        self.write([chat(words(draw, 30), words(draw, 120)) for _ in range(2500)])
        whole = self.report("--set", "data.held_out_share=0.2", "--set", f"data.eval_data_path={self.place}/tokens/eval.jsonl", "--workers", "1")["train"]
        expected = [(self.place / "tokens" / name).read_bytes() for name in ("train.jsonl", "eval.jsonl")]
        shutil.rmtree(self.place / "tokens")
        command = [HOST, "prepare", self.place / "recipe.toml", "--json", "--workers", "2", "--set", "data.held_out_share=0.2", "--set",
                   f"data.eval_data_path={self.place}/tokens/eval.jsonl"]
        kills = 0
        for stop in (signal.SIGKILL, signal.SIGINT):
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            parts = self.place / "tokens/train.jsonl.preparing"
            had = len(list(parts.glob("*.json"))) if parts.exists() else 0
            limit = time.time() + 60
            while run.poll() is None and (not parts.exists() or len(list(parts.glob("*.json"))) <= had + 1) and time.time() < limit:
                time.sleep(0.01)
            run.send_signal(stop)
            code = run.wait(30)
            kills += code in (-9, 130)
            self.assertFalse((self.place / "tokens/train.jsonl").exists() and code != 0)
        self.assertEqual(kills, 2, "it was done before it was stopped")
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("goes on", done.stderr)
        self.assertEqual([(self.place / "tokens" / name).read_bytes() for name in ("train.jsonl", "eval.jsonl")], expected)
        again = json.loads(done.stdout)["train"]
        self.assertEqual((again["rows"], again["skipped"], again["records"]), (whole["rows"], whole["skipped"], whole["records"]))
        shares = [output["records"] / whole["records"] for output in whole["outputs"]]
        self.assertTrue(0.15 < shares[1] < 0.25, shares)
        self.assertFalse(parts.exists())

    def test_too_many_skipped_or_none_supervised_is_an_error_and_writes_nothing(self):
        self.write([chat("a b c", "d e f")] + [{"messages": []}] * 2)
        done = self.host()
        self.assertEqual(done.returncode, 4)
        self.assertIn("2 of 3 rows were skipped, more than data.max_skipped_share = 0.5", done.stderr)
        self.assertIn("chat.jsonl:2: there is no message", done.stderr)
        self.assertTrue(self.nothing_written())
        self.assertEqual(self.host("--set", "data.max_skipped_share=1").returncode, 0)
        shutil.rmtree(self.place / "tokens")
        self.write([chat("a", "")] * 3)
        done = self.host()
        self.assertEqual(done.returncode, 4)
        self.assertIn("of 3 rows none gives a usable record", done.stderr)
        self.assertTrue(self.nothing_written())

    def test_a_target_that_does_not_fit_is_refused_before_anything_is_written(self):
        self.write([chat("a b c", "d e f")])
        target = self.place / "target"
        config = json.loads((target / "config.json").read_text())
        for change, part in [
                (lambda: (target / "config.json").write_text(json.dumps({**config, "vocab_size": 49152})), "the tokenizer has ids up to"),
                (lambda: (target / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
                (lambda: (target / "chat_template.jinja").write_text("{{ raise_exception('not for you') }}"), "not for you"),
                (lambda: (target / "chat_template.jinja").write_text("{% if %}"), "can't be compiled"),
                (lambda: (target / "chat_template.jinja").write_bytes(b"\xff\xfe"), "chat_template.jinja can't be read"),
                (lambda: (target / "chat_template.jinja").write_text(" \n"), "is empty, a Jinja text expected"),
                (lambda: (target / "tokenizer.json").write_text("{}"), "tokenizer.json can't be read"),
                (lambda: (target / "tokenizer_config.json").write_text("[]"), "holds a list, an object expected"),
                (lambda: (target / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}'), "is NoneType, a Jinja text expected"),
                (lambda: (target / "generation_config.json").write_text("[1]"), "generation_config.json holds a list, an object expected"),
                (lambda: (target / "tokenizer_config.json").write_text('{"chat_template": "x", "added_tokens_decoder": {"a": {"content": "b"}}}'), "can't be used: ValueError"),
                (lambda: (self.place / "chat.jsonl").write_text(""), "is empty"),
                (lambda: (self.place / "chat.jsonl").unlink(), "does not exist")]:
            with self.subTest(part):
                change()
                done = self.host()
                self.assertEqual(done.returncode, 4, done.stderr)
                self.assertIn(part, done.stderr)
                self.assertIn("fix:", done.stderr)
                self.assertTrue(self.nothing_written())
                self.use("chatml")
        self.write([chat("a b c", "d e f")])
        done = self.host(env={**os.environ, "SF_PYTHON": "/no/python"})
        self.assertEqual(done.returncode, 4)
        self.assertIn("there is no Python", done.stderr)
        self.assertIn("input_ids and loss_mask", done.stderr)

    def test_one_file_for_two_outputs_and_a_split_with_an_empty_side_are_refused(self):
        self.write([chat("a b c", "d e f"), chat("g h i", "j k l")])
        share, tokens = "data.held_out_share=0.3", self.place / "tokens"
        for settings, code, part in [
                ([share, f"data.eval_data_path={tokens}/train.jsonl"], 2, "have one file"),
                ([f"data.prompts_conversations_path={self.place}/chat.jsonl", f"data.prompts_data_path={tokens}/../tokens/train.jsonl"], 2, "have one file"),
                ([f"data.eval_conversations_path={self.place}/chat.jsonl", f"data.eval_data_path={tokens}/train.jsonl"], 2, "have one file"),
                (["data.held_out_share=0.0001", f"data.eval_data_path={tokens}/eval.jsonl"], 4, "of 2 records none is held out"),
                (["data.held_out_share=0.9", "data.split_seed=42", f"data.eval_data_path={tokens}/eval.jsonl"], 4, "of 2 records all are held out"),
                (['data.chat_template_options=["tools=1"]'], 2, "comes from the records"),
                (['data.chat_template_options=["mood=1", "mood=2"]'], 2, "sets mood, twice"),
                (['data.ignored_texts=[""]'], 2, "empty text")]:
            with self.subTest(settings):
                done = self.host(*(part for one in settings for part in ("--set", one)))
                self.assertEqual(done.returncode, code, done.stderr + done.stdout)
                self.assertIn(part, done.stderr)
                self.assertIn("fix:", done.stderr)
                self.assertTrue(self.nothing_written())
        self.assertEqual(self.host("--workers", "-1").returncode, 2)

    def test_records_do_not_go_among_the_conversations_that_a_folder_holds(self):
        folder = self.place / "chats"
        folder.mkdir()
        self.write([chat("a b c", "d e f"), chat("g h i", "j k l")], "chats/one.jsonl")
        of_folder = ("--set", f"data.train_conversations_path={folder}")
        for more in (("--set", f"data.train_data_path={folder}/train.jsonl"), ("--set", f"data.train_data_path={folder}/../chats/train.jsonl"),
                     ("--set", "data.held_out_share=0.5", "--set", f"data.eval_data_path={folder}/eval.jsonl"),
                     ("--set", f"data.prompts_conversations_path={folder}/one.jsonl", "--set", f"data.prompts_data_path={folder}/prompts.jsonl")):
            done = self.host(*of_folder, *more)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("the next call would read its records as rows", done.stderr)
        self.assertEqual([path.name for path in folder.iterdir()], ["one.jsonl"])
        within = (*of_folder, "--set", f"data.train_data_path={folder}/tokens/train.jsonl")  # the folder's own files are read, not those below
        self.assertFalse(self.report(*within)["train"]["was_finished"])
        self.assertTrue(self.report(*within)["train"]["was_finished"])

    def test_held_out_records_that_a_later_call_does_not_hold_out_any_more_are_told(self):
        draw, tokens = random.Random(11), self.place / "tokens"
        self.write([chat(words(draw, 6), words(draw, 9)) for _ in range(40)])
        done = self.host("--set", "data.held_out_share=0.3", "--set", f"data.eval_data_path={tokens}/eval.jsonl")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("of an earlier call", done.stderr)
        done = self.host("--set", f"data.eval_data_path={tokens}/eval.jsonl")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.records()), 40)
        self.assertIn(f"{tokens}/eval.jsonl is of an earlier call", done.stderr)

    def test_records_that_were_moved_with_their_report_are_known_where_they_are(self):
        draw, there = random.Random(13), self.place / "there"
        self.write([chat(words(draw, 6), words(draw, 9)) for _ in range(40)])
        self.report("--set", "data.held_out_share=0.3", "--set", f"data.eval_data_path={self.place}/tokens/eval.jsonl")
        (self.place / "tokens").rename(there)
        moved = ("--set", "data.held_out_share=0.3", "--set", f"data.train_data_path={there}/train.jsonl", "--set", f"data.eval_data_path={there}/eval.jsonl")
        report = self.report(*moved)["train"]
        self.assertTrue(report["was_finished"])
        self.assertEqual([output["path"] for output in report["outputs"]], [f"{there}/train.jsonl", f"{there}/eval.jsonl"])
        done = self.host(*moved, "--set", "data.max_length=30")  # other records may take their place
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("of an earlier call", done.stderr)
        elsewhere = (*moved[:-1], f"data.eval_data_path={there}/another.jsonl")
        self.assertFalse(self.report(*elsewhere)["train"]["was_finished"])
        self.assertTrue((there / "another.jsonl").exists())

    def test_texts_that_are_supervised_as_a_whole_are_split_by_their_own_tokens(self):
        draw = random.Random(12)
        self.write([{"text": words(draw, 20)} for _ in range(60)])
        report = self.report("--set", 'data.text_supervision="all"', "--set", "data.held_out_share=0.3", "--set", f"data.eval_data_path={self.place}/tokens/eval.jsonl")
        held_out = report["train"]["outputs"][1]["records"]
        self.assertTrue(6 < held_out < 32, held_out)
        result = json.loads(self.host("--json", verb="doctor data").stdout)
        self.assertEqual(result["data.train_data_path"]["repeated_questions"], 0)

    def test_half_a_surrogate_pair_in_a_name_harms_nobody(self):
        self.write([chat("a b c", "d e f", id="cut \ud83d", category="\udc00"), {"cut \ud83d": 1}, chat("g h i", "j k l", id=7, category=3)])
        report = self.report()["train"]
        self.assertEqual((report["records"], report["skipped"]), (2, {"no-conversation": 1}))
        self.assertEqual([(r["id"], r["category"]) for r in self.records()], [("cut \\ud83d", "\\udc00"), ("7", "3")])

    def test_killed_between_the_names_of_two_outputs_it_goes_on(self):
        draw, tokens = random.Random(6), self.place / "tokens"
        self.write([chat(words(draw, 6), words(draw, 9)) for _ in range(40)])
        split = ("--set", "data.held_out_share=0.3", "--set", f"data.eval_data_path={tokens}/eval.jsonl")
        self.report()
        before = (tokens / "train.jsonl").read_bytes(), json.loads((tokens / "train.jsonl.report.json").read_text())
        self.report(*split)
        report = json.loads((tokens / "train.jsonl.report.json").read_text())
        self.assertNotIn("replaces", report)
        after = (tokens / "train.jsonl").read_bytes(), (tokens / "eval.jsonl").read_bytes()
        self.assertNotEqual(before[0], after[0])
        report["replaces"] = [{"path": output["path"], "sha256": output["sha256"]} for output in before[1]["outputs"]]
        for left in (before[0], after[0]):  # the report is there, and none or one of the names
            (tokens / "train.jsonl").write_bytes(left)
            (tokens / "eval.jsonl").unlink()
            (tokens / "train.jsonl.report.json").write_text(json.dumps(report))
            self.assertFalse(self.report(*split)["train"]["was_finished"])
            self.assertEqual(((tokens / "train.jsonl").read_bytes(), (tokens / "eval.jsonl").read_bytes()), after)

    def test_two_at_once_do_not_write_the_same_records(self):
        self.write([chat("a b c", "d e f")])
        place = self.place / "tokens/train.jsonl.preparing"
        place.mkdir(parents=True)
        held = os.open(place, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        done = self.host()
        self.assertEqual(done.returncode, 4)
        self.assertIn("another prepare is at work here", done.stderr)
        os.close(held)
        self.assertEqual(self.host().returncode, 0)

    def test_files_that_are_no_text_are_named_for_what_they_are(self):
        row = json.dumps(chat("a b", "c d")).encode()
        for content, part in [(gzip.compress(row), "packed with gzip"), (b"PAR1" + row, "a Parquet file"), (row.decode().encode("utf-16"), "in UTF-16")]:
            (self.place / "chat.jsonl").write_bytes(content)
            done = self.host()
            self.assertEqual(done.returncode, 4)
            self.assertIn(part, done.stderr)
            self.assertTrue(self.nothing_written())

    ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

    def endless(self, when=None):
        """The target's template loops for ever: over everything, or over conversations with `when` in them."""
        own = json.loads((self.place / "target/tokenizer_config.json").read_text())["chat_template"]
        loop = self.ENDLESS if when is None else "{% if '" + when + "' in messages[0].content %}" + self.ENDLESS + "{% endif %}"
        (self.place / "target/chat_template.jinja").write_text(loop + own)

    def test_a_template_that_does_not_end_is_an_error_that_names_the_conversation(self):
        draw = random.Random(9)
        rows = [chat(words(draw, 4), words(draw, 6)) for _ in range(90)]
        rows[80] = chat("round and round", "it goes")
        self.write([b"", *rows])
        short = {**os.environ, "SF_TEXT_SECONDS": "1"}
        self.endless("round and round")
        done = self.host(env=short)
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("chat.jsonl:82: the chat template is still at work on this conversation", done.stderr)
        self.assertIn("data.chat_template_path", done.stderr.split("fix:")[1])
        self.assertFalse(list(self.place.glob("tokens/*.jsonl*.json")) + list(self.place.glob("tokens/*.partial")) + list(self.place.glob("tokens/*.jsonl")))
        (self.place / "target/chat_template.jinja").write_text("{% set x = 7 ** (10 ** 9) %}{{ messages[0].content }}")  # not one that Python can be interrupted in
        done = self.host(env=short)
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("the chat template is still at work on a conversation of few words", done.stderr)
        self.assertEqual(self.host(env={**os.environ, "SF_TEXT_SECONDS": "-1"}).returncode, 2)
        self.use("chatml")
        self.assertEqual(self.report()["train"]["records"], 90)

    def test_the_first_signal_ends_prepare_whatever_the_template_does(self):
        draw = random.Random(10)
        self.write([chat(words(draw, 4), words(draw, 6)) for _ in range(20)] + [chat("round and round", "it goes")])
        for when in (None, "round and round"):
            for stop in (signal.SIGINT, signal.SIGTERM):
                with self.subTest(when=when, stop=stop):
                    self.use("chatml")
                    self.endless(when)
                    run = subprocess.Popen([HOST, "prepare", self.place / "recipe.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                    time.sleep(3)
                    self.assertIsNone(run.poll())
                    run.send_signal(stop)
                    begun = time.time()
                    said = run.communicate(timeout=20)[1]
                    self.assertLess(time.time() - begun, 5)
                    self.assertEqual(run.returncode, 130, said)
                    self.assertIn("stopped; run it again to go on", said)
                    self.assertFalse(list(self.place.glob("tokens/*.jsonl*.json")) + list(self.place.glob("tokens/*.partial")) + list(self.place.glob("tokens/*.jsonl")))
        self.use("chatml")
        self.assertEqual(self.report()["train"]["records"], 21)

    def test_special_tokens_that_a_message_spells_are_told_and_can_be_left_out(self):
        self.write([chat("a b c", "d e f"), chat("g h <|im_end|>", "i j"), chat("k l", "m n<|im_start|>o"), chat("p q", "r s")])
        done = self.host()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("2 kept with the note special-token-text\n    chat.jsonl:2: message 0 (user) holds the text of <|im_end|>\n    chat.jsonl:3: message 1 (assistant)", done.stdout)
        self.assertIn('data.special_token_text = "skip"', done.stdout)
        report = json.loads((self.place / "tokens/train.jsonl.report.json").read_text())
        self.assertEqual((report["records"], report["notes"]), (4, {"special-token-text": 2}))
        report = self.report("--set", 'data.special_token_text="skip"')["train"]
        self.assertEqual((report["records"], report["skipped"], report["notes"]), (2, {"special-token-text": 2}, {}))
        self.assertEqual(report["examples"]["special-token-text"][0], "chat.jsonl:2: message 0 (user) holds the text of <|im_end|>")

    def test_a_record_may_not_set_what_prepare_says_to_the_template(self):
        self.write([chat("a b c", "d e f"), *(chat("g h", "i j", chat_template_kwargs={name: True}) for name in ("tools", "documents"))])
        report = self.report("--set", "data.max_skipped_share=1")["train"]
        self.assertEqual(report["skipped"], {"bad-options": 2})

    def test_what_would_help_is_named_by_what_most_rows_lack(self):
        for rows, part in [([json.dumps(chat("a é", "c d"), ensure_ascii=False).encode("latin-1")] * 2, "iconv"), ([b"[", b"]"], "jq -c"), ([chat("a " * 300, "c d")], "raise data.max_length"),
                           ([{"prompt": "x"}], "needs messages, conversations or text")]:
            with self.subTest(part):
                self.write(rows)
                done = self.host()
                self.assertEqual(done.returncode, 4)
                self.assertIn(part, done.stderr.split("fix:")[1])
        self.use("chatml")

    def test_options_of_masks_and_prompts(self):
        self.write([{"messages": CONVERSATION, "category": "greeting"}], "two.jsonl")
        self.write([{"messages": CONVERSATION, "category": "greeting"}])
        def texts(*arguments):
            shutil.rmtree(self.place / "tokens", ignore_errors=True)
            self.report(*arguments)
            [record] = self.records()
            return [i for i, one in enumerate(record["loss_mask"]) if one]
        all_answers = texts()
        last = texts("--set", "data.train_only_last_turn=true")
        self.assertEqual(last, [i for i in all_answers if i >= last[0]])
        self.assertLess(len(last), len(all_answers))
        said = texts("--set", "data.train_on_reasoning=false")
        ignored = texts("--set", 'data.ignored_texts=["<think>\\nhm\\n</think>\\n\\n"]')
        self.assertEqual(said, ignored)
        self.assertLess(len(said), len(all_answers))
        self.report("--set", f"data.prompts_conversations_path={self.place}/two.jsonl", "--set", f"data.prompts_data_path={self.place}/tokens/prompts.jsonl")
        [prompt] = self.records("prompts.jsonl")
        self.assertEqual(sum(prompt["loss_mask"]), 0)
        self.assertEqual(prompt["category"], "greeting")

    def ids(self, *sets, name="train.jsonl"):
        """Ids of all records that prepare makes with these options, anew."""
        shutil.rmtree(self.place / "tokens", ignore_errors=True)
        self.report(*(part for one in sets for part in ("--set", one)))
        return [record["input_ids"] for record in self.records(name)]

    def test_a_template_is_given_options_another_day_or_another_place(self):
        self.write([chat("a b c", "d e f")])
        template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        own = self.ids()
        (self.place / "other.jinja").write_text("{{ '<|im_start|>system\nBe brief, ' + (mood or 'calm') + ', ' + strftime_now('%Y-%m-%d') + '<|im_end|>\n' }}"
                                                + template)
        path, day = f'data.chat_template_path="{self.place}/other.jinja"', 'data.chat_template_date="2025-02-03"'
        [other] = self.ids(path, day)
        self.assertNotEqual([other], own)
        self.assertEqual([other], self.ids(path, day))
        self.assertNotEqual([other], self.ids(path, 'data.chat_template_date="2025-02-04"'))
        moods = [self.ids(path, day, f'data.chat_template_options=["mood={mood}"]') for mood in ("glad", "sad", "calm")]
        self.assertNotEqual(moods[0], moods[1])
        self.assertEqual(moods[2], [other])
        from tokenizers import Tokenizer
        text = Tokenizer.from_file(str(self.place / "target/tokenizer.json")).decode(other, skip_special_tokens=False)
        self.assertEqual(text, "<|im_start|>system\nBe brief, calm, 2025-02-03<|im_end|>\n<|im_start|>user\na b c<|im_end|>\n<|im_start|>assistant\nd e f<|im_end|>")
        for bad, said in ((f'data.chat_template_path="{self.place}/no.jinja"', "does not exist"), ('data.chat_template_date="tomorrow"', "chat_template_date"),
                          ('data.chat_template_options=["mood"]', "chat_template_options")):
            shutil.rmtree(self.place / "tokens", ignore_errors=True)
            done = self.host("--set", bad)
            self.assertIn(done.returncode, (2, 4), done.stderr)
            self.assertIn(said, done.stderr)
            self.assertTrue(self.nothing_written())

    def test_the_split_follows_its_seed_and_keeps_a_question_on_one_side(self):
        draw = random.Random(5)
        questions = [words(draw, 6) for _ in range(60)]
        self.write([chat(q, words(draw, 9)) for q in questions for _ in range(2)])
        share, out = "data.held_out_share=0.3", f'data.eval_data_path="{self.place}/tokens/eval.jsonl"'
        sides = {}
        for seed in (1, 1, 2):
            train = self.ids(share, out, f"data.split_seed={seed}")
            held_out = [record["input_ids"] for record in self.records("eval.jsonl")]
            self.assertEqual(len(train) + len(held_out), 120)
            asked = [{tuple(r["input_ids"][:r["loss_mask"].index(1)]) for r in self.records(name)} for name in ("train.jsonl", "eval.jsonl")]
            self.assertFalse(asked[0] & asked[1])
            if seed in sides:
                self.assertEqual(sides[seed], held_out)
            sides[seed] = held_out
        self.assertNotEqual(sides[1], sides[2])

    def test_duplicates_are_left_out_unless_they_are_wanted(self):
        self.write([chat("a b c", "d e f"), chat("g h i", "j k l"), chat("a b c", "d e f"), chat("a b c", "d e f")])
        self.assertEqual(len(self.ids()), 2)
        examples = json.loads((self.place / "tokens/train.jsonl.report.json").read_text())["examples"]["duplicate"]
        self.assertEqual(examples, [f'chat.jsonl: "chat.jsonl:{line}": the same tokens came before' for line in (3, 4)])
        self.assertEqual(len(self.ids("data.deduplicate=false")), 4)

    def test_doctor_has_one_result_when_the_plan_is_refused(self):
        done = self.host("--json", "--set", f"model.target_model_path={self.place}/nowhere", verb="doctor")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn({"check": "plan", "fine": False, "text": "refused; the reasons are on stderr"}, json.loads(done.stdout))
        self.assertIn("there is no target folder", done.stderr)

    def test_doctor_refuses_records_in_which_nothing_is_supervised(self):
        (self.place / "tokens").mkdir()
        (self.place / "tokens/train.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}) + "\n")
        done = self.host("--json", verb="doctor data")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("nothing can be learnt from it", json.loads(done.stdout)["doubts"][0])
        done = self.host(verb="doctor vocabulary")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("no token is supervised", done.stderr)

    def test_rendered_texts_are_supervised_in_answers_or_as_a_whole(self):
        text = "<|im_start|>user\na b c<|im_end|>\n<|im_start|>assistant\nd e f<|im_end|>\n"
        self.write([{"text": text}])
        self.ids()
        [record] = self.records()
        self.assertEqual(record["loss_mask"][0], 0)
        self.assertLess(sum(record["loss_mask"]), len(record["loss_mask"]) - 4)
        self.ids('data.text_supervision="all"')
        [record] = self.records()
        self.assertEqual(sum(record["loss_mask"]), len(record["loss_mask"]))
        self.write([{"text": "no turn is marked in this text"}] * 2)
        self.assertEqual(self.host().returncode, 4)
        self.assertEqual(len(self.ids('data.text_supervision="all"')), 1)

    def test_held_out_conversations_may_be_a_file_of_their_own(self):
        self.write([chat("a b c", "d e f")])
        self.write([chat("g h i", "j k l"), chat("m n o", "p q r")], "eval.jsonl")
        sets = (f'data.eval_conversations_path="{self.place}/eval.jsonl"', f'data.eval_data_path="{self.place}/tokens/held_out.jsonl"')
        self.assertEqual(len(self.ids(*sets)), 1)
        self.assertEqual(len(self.records("held_out.jsonl")), 2)
        done = self.host("--set", sets[0], "--set", sets[1], "--set", "data.held_out_share=0.1")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("held_out_share", done.stderr)

    def test_doctor_finds_a_tokenizer_that_is_not_the_records_own(self):
        self.write([chat("a b c", "d e f"), chat("g h i", "j k l")])
        self.report()
        self.assertEqual(json.loads(self.host("--json", verb="doctor data").stdout)["doubts"], [])
        features = ("--json", "--set", f'data.hidden_states_path="{self.place}/features"')
        said = {one["check"]: one["fine"] for one in json.loads(self.host(*features, verb="doctor features").stdout)}
        self.assertTrue(said["data.train_data_path: tokenizer"])
        tokenizer = self.place / "target/tokenizer.json"
        known = json.loads(tokenizer.read_text())
        known["model"]["vocab"] |= {"the": known["model"]["vocab"]["and"], "and": known["model"]["vocab"]["the"]}
        tokenizer.write_text(json.dumps(known))
        done = self.host("--json", verb="doctor data")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("its ids mean other tokens", json.loads(done.stdout)["doubts"][0])
        self.assertIn("its ids mean other tokens", done.stderr)
        done = self.host(*features, verb="doctor features")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertFalse({one["check"]: one["fine"] for one in json.loads(done.stdout)}["data.train_data_path: tokenizer"])

    def test_doctor_shows_tokens_masks_and_shares(self):
        draw = random.Random(4)
        self.write([chat(words(draw, 5), words(draw, 12)) for _ in range(40)] + [{"messages": CONVERSATION}])
        self.report()
        page = self.place / "page.html"
        done = self.host("--output", page, "--samples", "41", verb="doctor data")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("41 records", done.stdout)
        self.assertIn("And now?<|im_end|>⏎", done.stdout.replace("\n", ""))
        self.assertIn("[<think>⏎", done.stdout)
        html = page.read_text()
        self.assertNotIn("http", html)
        self.assertNotIn("<script", html)
        self.assertEqual(html.count("<pre>"), 42)
        self.assertIn('class="s', html)
        result = json.loads(self.host("--json", verb="doctor data").stdout)
        statistics = result["data.train_data_path"]
        self.assertEqual(statistics["records"], 41)
        self.assertEqual(sum(statistics["histogram"]["records"]), 41)
        self.assertEqual(statistics["supervised"], sum(turn["supervised"] for turn in statistics["turns"]))
        self.assertEqual(statistics["tokens"], sum(role["tokens"] for role in statistics["roles"].values()))
        self.assertEqual(statistics["roles"]["user"]["supervised"], 0)
        self.assertEqual(result["vocabulary"]["draft_length"], 3)  # of a DFlash2 block of four tokens the first is known
        sizes = result["vocabulary"]["sizes"]
        self.assertEqual(sizes[-1]["size"], 49400)
        self.assertEqual(sizes[-1]["coverage"], 1.0)
        self.assertTrue(all(a["ceiling"] <= b["ceiling"] for a, b in zip(sizes, sizes[1:])))


CONVERSATION = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello you"}, {"role": "user", "content": "And now?"},
                {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNow we part."}]

if __name__ == "__main__":
    unittest.main(verbosity=2)
