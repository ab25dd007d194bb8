"""The quickstart's target and conversations: conversion of the GGUF, and what the shipped records must be."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "core/prepare")]
import fetch_smollm2  # noqa: E402
import make_conversations  # noqa: E402

fetch_smollm2.use_python_packages()
import numpy as np  # noqa: E402
import text_worker  # noqa: E402

DATA = ROOT / "recipes/data/smollm2-135m"
END_OF_TURN = 2
ASSISTANT = [1, 520, 9531, 198]
# Here the target chose tokens that its tokenizer would not choose for the same text.
OTHER_TOKENS = {"story/a young baker", "tips/make a cup of tea", "child/cheese", "use/a wheel", "describe/a microscope"}


def read(file):
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def fetch(folder):
    return subprocess.run([sys.executable, ROOT / "tools/fetch_smollm2.py", folder], capture_output=True, text=True)


class Conversion(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = tempfile.mkdtemp(prefix="sf-target-")
        cls.folder = Path(cls.place) / "smollm2"
        first = fetch(cls.folder)
        assert first.returncode == 0, first.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def test_rows_of_a_head_go_from_pairs_to_halves(self):
        pairs = np.array([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of size 4: rows i and i+2 of a head were neighbours
        expected = [0, 1, 10, 11, 2, 3, 12, 13]
        self.assertEqual(fetch_smollm2.halves_from_pairs(pairs, 2)[:, 0].tolist(), expected)

    def test_a_cache_folder_with_a_blank_in_its_name_is_looked_for_by_its_name(self):
        environment = {**{key: value for key, value in os.environ.items() if key != "SF_PYTHON_DIR"}, "SF_CACHE": f"{self.place}/a cache"}
        done = subprocess.run([sys.executable, ROOT / "tools/fetch_smollm2.py", Path(self.place) / "never"], capture_output=True, text=True, env=environment)
        self.assertIn(f"are not in {self.place}/a cache/deps/python-", done.stderr)

    def test_bfloat16_rounds_to_nearest_even(self):
        values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5], np.float32)
        bits = np.frombuffer(fetch_smollm2.bfloat16_bytes(values), "<u2")
        back = (bits.astype(np.uint32) << 16).view(np.float32)
        self.assertEqual(back.tolist(), [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -2.5])

    def test_tensors_are_handed_over_as_both_ages_of_safetensors_want_them(self):
        import ctypes
        import safetensors
        tensors = {"a": {"dtype": "bfloat16", "shape": [2, 2], "data": bytes(range(8))}, "b": {"dtype": "bfloat16", "shape": [1], "data": b"xy"}}
        written = {}
        by_address = {
            "TensorSpec": lambda **spec: spec,
            "serialize_file": lambda specs, path, about: written.update(
                {name: (one["dtype"], one["shape"], ctypes.string_at(one["data_ptr"], one["data_len"])) for name, one in specs.items()})}
        with mock.patch.multiple(safetensors, create=True, **by_address):
            fetch_smollm2.write_tensors(tensors, Path("unused"))
        self.assertEqual(written, {name: (one["dtype"], one["shape"], one["data"]) for name, one in tensors.items()})
        if not hasattr(safetensors, "TensorSpec"):  # the version of tools/requirements-python.txt
            path = Path(self.place) / "small.safetensors"
            fetch_smollm2.write_tensors(tensors, path)
            self.assertTrue(path.read_bytes().endswith(bytes(range(8)) + b"xy"))

    def test_config_describes_the_tensors(self):
        import safetensors
        config = json.loads((self.folder / "config.json").read_text())
        self.assertEqual((config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"],
                          config["head_dim"], config["vocab_size"], config["tie_word_embeddings"], config["rope_theta"], config["rms_norm_eps"]),
                         (576, 30, 9, 3, 64, 49152, True, 100000.0, 1e-5))
        with safetensors.safe_open(self.folder / "model.safetensors", "np") as file:
            names = list(file.keys())
            self.assertEqual(len(names), 2 + 9 * 30)
            self.assertEqual(file.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape(), [192, 576])
            self.assertEqual(file.get_slice("model.layers.0.mlp.down_proj.weight").get_shape(), [576, 1536])
            self.assertEqual(file.get_slice("model.embed_tokens.weight").get_dtype(), "BF16")

    def test_tokenizer_splits_digits_and_round_trips(self):
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        text = "<|im_start|>user\nWörld 2026, it's\n\n fine<|im_end|>\n"
        encoded = tokenizer.encode(text)
        self.assertEqual(tokenizer.decode(encoded.ids, skip_special_tokens=False), text)
        self.assertEqual((encoded.ids[0], encoded.ids[-2]), (1, END_OF_TURN))
        self.assertEqual([token for token in encoded.tokens if token.isdigit()], ["2", "0", "2", "6"])

    def test_a_held_out_answer_is_what_this_target_says(self):
        # finds a wrong permutation, rope base, epsilon or head order: any of them gives another text within a few tokens
        record = read("held_out.jsonl")[0]
        start = record["loss_mask"].index(1)
        target = make_conversations.Target(self.folder)
        answer = target.answer([record["input_ids"][:start]], 12)[0]
        self.assertEqual(answer[:12], record["input_ids"][start:start + 12])

    def test_running_again_keeps_a_good_folder_and_renews_a_damaged_one(self):
        before = (self.folder / "config.json").stat().st_mtime_ns
        self.assertIn("is current", fetch(self.folder).stdout)
        self.assertEqual((self.folder / "config.json").stat().st_mtime_ns, before)
        (self.folder / "config.json").write_text("{}")
        self.assertIn("wrote", fetch(self.folder).stdout)
        self.assertEqual(json.loads((self.folder / "config.json").read_text())["hidden_size"], 576)
        self.assertEqual(sorted(path.name for path in Path(self.place).iterdir()), ["smollm2"])  # no temporary folder left

    def test_a_folder_of_somebody_else_is_left_alone(self):
        foreign = Path(self.place) / "foreign"
        foreign.mkdir()
        (foreign / "thesis.txt").write_text("mine")
        result = fetch(foreign)
        self.assertEqual(result.returncode, 1)
        self.assertIn("not of this script's making", result.stderr)
        self.assertEqual((foreign / "thesis.txt").read_text(), "mine")
        shutil.rmtree(foreign)


    def test_the_raw_conversations_are_the_shipped_records(self):
        worker = text_worker.TextWorker({"target": str(self.folder)})
        different = set()
        for file in ("train", "held_out"):
            lines = (DATA / f"{file}.chat.jsonl").read_bytes().splitlines()
            shipped = read(f"{file}.jsonl")
            self.assertEqual(len(lines), len(shipped))
            for row, record in zip(worker.rows(lines), shipped):
                [[first, last, _]] = row["answers"]
                self.assertEqual(row["id"], record["id"])
                if list(row["ids"][:last]) != record["input_ids"]:
                    different.add(record["id"])
                    self.assertEqual(worker.tokenizer.decode(row["ids"][:last]), worker.tokenizer.decode(record["input_ids"]))
                else:
                    self.assertEqual([0] * first + [1] * (last - first), record["loss_mask"])
        self.assertEqual(different, OTHER_TOKENS)

    def test_prompts_end_where_answers_begin(self):
        worker = text_worker.TextWorker({"target": str(self.folder), "prompts": True})
        rows = worker.rows((DATA / "prompts.chat.jsonl").read_bytes().splitlines())
        held_out = {tuple(r["input_ids"][:r["loss_mask"].index(1)]) for r in read("held_out.jsonl")}
        train = {tuple(r["input_ids"][:r["loss_mask"].index(1)]) for r in read("train.jsonl")}
        prompts = {tuple(row["ids"]) for row in rows}
        self.assertEqual(len(prompts), len(rows))
        self.assertGreaterEqual(len(prompts), 104)
        self.assertLessEqual(held_out, prompts)
        self.assertFalse(train & prompts)
        self.assertTrue(all(row["category"] == row["id"].split("/")[0] for row in rows))


class Conversations(unittest.TestCase):
    def setUp(self):
        self.train, self.held_out = read("train.jsonl"), read("held_out.jsonl")

    def test_records_are_whole_and_supervise_the_answer_alone(self):
        for record in self.train + self.held_out:
            ids, mask = record["input_ids"], record["loss_mask"]
            self.assertEqual(len(ids), len(mask), record["id"])
            self.assertTrue(all(0 <= token < 49152 for token in ids), record["id"])
            start = mask.index(1)
            self.assertEqual(mask, [0] * start + [1] * (len(ids) - start), record["id"])
            self.assertGreaterEqual(len(ids) - start, 2, record["id"])
            self.assertEqual(ids[start - 4:start], ASSISTANT, record["id"])
            self.assertNotIn(END_OF_TURN, ids[start:-1], record["id"])

    def test_no_prompt_is_in_both_and_a_tenth_is_held_out(self):
        prompt = lambda record: tuple(record["input_ids"][:record["loss_mask"].index(1)])  # noqa: E731
        train, held_out = {prompt(r) for r in self.train}, {prompt(r) for r in self.held_out}
        self.assertEqual(len(train) + len(held_out), len(self.train) + len(self.held_out))
        self.assertFalse(train & held_out)
        share = len(held_out) / (len(train) + len(held_out))
        self.assertTrue(0.06 < share < 0.12, share)

    def test_the_script_still_asks_what_was_asked(self):
        asked = {name for name, _ in make_conversations.all_prompts()}
        shipped = {record["id"] for record in self.train + self.held_out}
        self.assertLessEqual(shipped, asked)
        self.assertGreater(len(shipped), 0.8 * len(asked))
        self.assertLessEqual({r["id"] for r in self.held_out}, make_conversations.held_out_ids(make_conversations.all_prompts()))


if __name__ == "__main__":
    unittest.main(verbosity=2)
