"""The tiny EAGLE3 recipe through sf-host: training, the draft's vocabulary on its way, resume, export, the reference's records. About 20 s."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile
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
RECIPE = ROOT / "recipes/tiny-eagle3.toml"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
VOCABULARY, DRAFTED = 320, 200


def torch_saved(path, t2d, d2t):
    """The dictionary {"d2t": int64, "t2d": bool} as torch.save writes it, without torch: a stored zip with a pickle and raw storages."""
    def tensor(key, storage, count):
        text = lambda value: b"X" + struct.pack("<I", len(value)) + value.encode()
        number = lambda value: b"J" + struct.pack("<i", value)
        persistent = b"(" + text("storage") + b"ctorch\n" + storage.encode() + b"\n" + text(key) + text("cpu") + number(count) + b"tQ"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + number(0) + number(count) + b"\x85" + number(1) + b"\x85" + b"\x89ccollections\nOrderedDict\n)RtR"

    text = lambda value: b"X" + struct.pack("<I", len(value)) + value.encode()
    pickle = b"\x80\x02}(" + text("d2t") + tensor("0", "LongStorage", len(d2t)) + text("t2d") + tensor("1", "BoolStorage", len(t2d)) + b"u."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("map/data.pkl", pickle)
        archive.writestr("map/data/0", d2t.astype("<i8").tobytes())
        archive.writestr("map/data/1", t2d.astype(np.uint8).tobytes())


def mapping(size):
    kept = np.arange(0, size, dtype=np.int64)
    kept[-1] = VOCABULARY - 1
    t2d = np.zeros(VOCABULARY, dtype=bool)
    t2d[kept] = True
    return t2d, kept - np.arange(size)


class TinyEagle3(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-tiny-eagle3-"))
        cls.features = {"data.hidden_states_path": cls.place / "features/train", "data.eval_hidden_states_path": cls.place / "features/held_out"}
        assert cls.host("capture").returncode == 0
        cls.trained = cls.host("train", steps=60)
        assert cls.trained.returncode == 0, cls.trained.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def host(cls, verb, *arguments, steps=None, **paths):
        sets = {"output_dir": cls.place / "runs", **cls.features, **{key.replace("__", "."): value for key, value in paths.items()}}
        flags = [part for key, value in sets.items() for part in ("--set", f'{key}="{value}"')]
        if steps is not None:
            flags += ["--set", f"training.max_steps={steps}", "--set", "training.eval_interval=0"]
        return subprocess.run([HOST, verb, RECIPE, *flags, *arguments], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)

    def done(self, verb, *arguments, code=0, **options):
        done = self.host(verb, *arguments, **options)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def result(self, verb, *arguments, **options):
        return json.loads(self.done(verb, "--json", *arguments, **options).stdout)

    def weights(self, run_id, step):
        return (self.place / f"runs/{run_id}/step-{step:08d}/rank00000.safetensors").read_bytes()

    def test_the_draft_learns_what_the_target_would_say(self):
        before = self.result("eval", "--checkpoint", "untrained")
        after = self.result("eval", "--checkpoint", "auto")
        self.assertLess(after["loss"], before["loss"] - 0.1)  # the text is not the target's own, so acceptance says nothing here
        for use in range(3):
            self.assertGreater(after["metrics"][f"acc_{use}"], before["metrics"][f"acc_{use}"])
        for name in ("ploss_2", "acceptance_rate_2", "acceptance_length", "simulated_acc_len", "position_3/acceptance/prefix_survival"):
            self.assertIn(name, after["metrics"])
        self.assertIn("bigram_acceptance_length", after)

    def test_the_plan_counts_rows_and_the_drafts_own_vocabulary(self):
        plan = self.done("plan").stdout
        self.assertIn(f"{4 * 128 * 3} draft rows", plan)
        self.assertIn(f"1024 rows x {DRAFTED}", plan)

    def test_a_run_in_two_parts_has_the_bits_of_one(self):
        total = ("--set", "training.total_steps=24", "--set", "training.save_interval=12")
        self.done("train", *total, steps=24, run_id="whole")
        self.done("train", *total, steps=12, run_id="cut")
        self.done("train", "--resume", "auto", *total, steps=24, run_id="cut")
        self.assertEqual(self.weights("cut", 24), self.weights("whole", 24))

    def test_the_vocabulary_is_said_kept_and_travels_with_the_weights(self):
        self.assertRegex(self.trained.stderr + self.trained.stdout, rf"draft vocabulary: {DRAFTED} of {VOCABULARY} tokens, 100.00 % of the \d+ supervised tokens.*only \d+ different ones occur")
        again = self.done("train", steps=1, run_id="again")
        cached = Path(re.search("draft vocabulary from (.*)", again.stderr + again.stdout).group(1).strip("'\""))
        with safetensors.safe_open(cached, "np") as made, safetensors.safe_open(self.place / "runs/tiny-eagle3/step-00000060/rank00000.safetensors", "np") as saved:
            for name in ("t2d", "d2t"):
                np.testing.assert_array_equal(made.get_tensor(name), saved.get_tensor(f"buffers/{name}"))
        cached.write_bytes(b"damaged")
        self.assertIn("is damaged and made again", self.done("train", steps=1, run_id="once-more").stderr)
        # a checkpoint needs neither samples nor cache; an untrained draft does
        missing = {"data__hidden_states_path": self.place / "nowhere"}
        self.result("eval", "--checkpoint", "auto", **missing)
        self.assertIn("vocabulary", self.done("eval", "--checkpoint", "untrained", code=4, **missing).stderr)

    def test_a_mapping_of_ones_own_is_taken_in_both_formats_and_refused_when_it_does_not_fit(self):
        t2d, d2t = mapping(DRAFTED)
        plain, saved = self.place / "map.safetensors", self.place / "map.pt"
        safetensors.numpy.save_file({"t2d": t2d, "d2t": d2t}, plain)
        torch_saved(saved, t2d, d2t)
        self.done("train", steps=2, run_id="mapped", model__vocab_mapping_path=plain)
        self.done("train", steps=2, run_id="mapped-torch", model__vocab_mapping_path=saved)
        self.assertEqual(self.weights("mapped", 2), self.weights("mapped-torch", 2))
        with safetensors.safe_open(self.place / "runs/mapped/step-00000002/rank00000.safetensors", "np") as weights:
            np.testing.assert_array_equal(weights.get_tensor("buffers/d2t"), d2t)
        # Weights bring their own along: another one would change nothing but what the user believes.
        self.done("train", "--set", "training.total_steps=2", steps=3, run_id="mapped", model__vocab_mapping_path=saved)
        other = self.place / "other.safetensors"
        swapped = d2t.copy()
        swapped[-1] -= 1
        safetensors.numpy.save_file({"t2d": np.isin(np.arange(VOCABULARY), swapped + np.arange(DRAFTED)), "d2t": swapped}, other)
        for flags in (("--resume", "auto", "--set", 'run_id="mapped"'), ("--init-from", self.place / "runs/mapped/step-00000002", "--set", 'run_id="another"')):
            told = self.done("train", *flags, "--set", "training.total_steps=2", code=2, steps=4, model__vocab_mapping_path=other).stderr
            self.assertIn("were trained for another vocabulary ('d2t' differs)", told)
        t2d, d2t = mapping(DRAFTED - 1)
        safetensors.numpy.save_file({"t2d": t2d, "d2t": d2t}, plain)
        self.assertIn("'d2t' has shape", self.done("train", code=4, steps=2, run_id="unfit", model__vocab_mapping_path=plain).stderr)
        self.assertIn("no such file", self.done("train", code=4, steps=2, run_id="unfit", model__vocab_mapping_path=self.place / "none.pt").stderr)

    def test_the_export_has_the_vocabulary_and_starts_another_run(self):
        self.result("export", "--checkpoint", "auto", "--output", str(self.place / "draft"))
        tensors = dict(safetensors.deserialize((self.place / "draft/model.safetensors").read_bytes()))
        self.assertEqual((tensors["t2d"]["dtype"], tensors["t2d"]["shape"]), ("BOOL", [VOCABULARY]))
        self.assertEqual((tensors["d2t"]["dtype"], tensors["d2t"]["shape"]), ("I64", [DRAFTED]))
        self.assertEqual((tensors["lm_head.weight"]["dtype"], tensors["lm_head.weight"]["shape"]), ("BF16", [DRAFTED, 64]))
        self.assertFalse([name for name in tensors if "embed" in name])
        kept = np.flatnonzero(np.frombuffer(tensors["t2d"]["data"], np.uint8))
        np.testing.assert_array_equal(kept, np.arange(DRAFTED) + np.frombuffer(tensors["d2t"]["data"], "<i8"))
        self.done("train", "--init-from", str(self.place / "draft"), steps=1, run_id="second")
        self.done("train", "--init-from", str(self.place / "runs/tiny-eagle3"), steps=1, run_id="third")

    def test_records_of_the_reference_train_as_they_are(self):
        records = {"data__hidden_states_path": ROOT / "tests/data/features_eagle3"}
        done = self.done("train", "--json", "--set", "data.eval_hidden_states_path=\"\"", steps=3, run_id="records", **records)
        self.assertEqual(json.loads(done.stdout)["updates"], 3)

    def test_losses_architectures_and_a_trained_embedding_run(self):
        for name, sets in {"alpha": ['training.lk_loss_type="alpha"'], "lambda": ['training.lk_loss_type="lambda"', "training.kl_decay=3.0"],
                           "newer": ['plugin.eagle3.architecture="eagle3.1"'], "embedding": ["plugin.eagle3.train_embedding=true"],
                           "half": ['model.torch_dtype="bfloat16"'], "all tokens": ["plugin.eagle3.draft_vocab_size=320"],
                           "static": ["training.static_shapes=true"], "recomputed": ['training.recompute=["midlayer"]']}.items():
            with self.subTest(name):
                self.done("train", *[part for one in sets for part in ("--set", one)], steps=3, run_id=name.replace(" ", "-"))

    def test_bad_input_is_refused_before_training(self):
        for sets, code, part in ((["plugin.eagle3.draft_vocab_size=400"], 2, "the target has 320 tokens"),
                                 (["model.target_layer_ids=[3, 1, 5]"], 2, "ascend"),
                                 (["model.target_layer_ids=[1, 3, 6]"], 2, "layers 0 to 5"),
                                 (["model.target_layer_ids=[1, 2, 5]"], 4, "layers"),
                                 (["training.ttt_length=60", "data.max_length=60"], 2, "eagle3/unroll-longer-than-samples"),
                                 (["model.draft_block_size=4"], 2, "ttt_length")):
            with self.subTest(sets):
                done = self.done("train", *[one for each in sets for one in ("--set", each)], code=code, steps=2, run_id="bad")
                self.assertIn(part, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
