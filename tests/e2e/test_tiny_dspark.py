"""The shipped tiny DSpark recipe through sf-host: from conversations to an export, in two parts, on two ranks. About 15 s."""
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
import safetensors  # noqa: E402

HOST = Path(os.environ.get("SF_BUILD", ROOT / "build")) / "bin/sf-host"
RECIPE = ROOT / "recipes/tiny-dspark.toml"
STEPS = 80


class TinyDSpark(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-tiny-dspark-"))
        assert cls.host("capture").returncode == 0
        trained = cls.host("train", "--set", f"training.max_steps={STEPS}", "--set", "training.log_interval=1")
        assert trained.returncode == 0, trained.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def host(cls, verb, *arguments):
        paths = {"output_dir": "runs", "data.hidden_states_path": "features/train", "data.eval_hidden_states_path": "features/held_out"}
        sets = [part for key, folder in paths.items() for part in ("--set", f'{key}="{cls.place / folder}"')]
        return subprocess.run([HOST, verb, RECIPE, *sets, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def done(self, verb, *arguments):
        done = self.host(verb, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def result(self, verb, *arguments):
        return json.loads(self.done(verb, "--json", *arguments).stdout)

    def test_training_beats_the_untrained_draft(self):
        before = self.result("eval", "--checkpoint", "untrained")
        after = self.result("eval", "--checkpoint", "auto")
        self.assertLess(after["loss"], 0.8 * before["loss"])
        self.assertGreater(after["acceptance_length"], before["acceptance_length"] + 0.3)

    def test_every_line_of_the_log_is_finite_and_has_the_three_losses(self):
        lines = [json.loads(line) for line in (self.place / "runs/tiny-dspark/metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "loss" in line]
        self.assertEqual([line["step"] for line in lines], list(range(1, STEPS + 1)))
        self.assertLess(sum(line["loss"] for line in lines[-10:]), 0.8 * sum(line["loss"] for line in lines[:10]))
        for line in lines:
            self.assertTrue(all(value == value for value in line.values() if isinstance(value, float)), line)
        for name in ("ce_loss", "l1_loss", "confidence_loss"):
            self.assertTrue(any(name in key for key in lines[-1]), (name, sorted(lines[-1])))

    def test_the_export_is_a_dspark_draft_with_its_markov_and_confidence_heads(self):
        self.result("export", "--checkpoint", "auto", "--output", str(self.place / "draft"))
        config = json.loads((self.place / "draft/config.json").read_text())
        self.assertEqual(config["architectures"], ["DSparkDraftModel"])
        self.assertEqual((config["dflash_config"]["markov_rank"], config["dflash_config"]["mask_token_id"], config["dflash_config"]["target_layer_ids"]), (8, 3, [1, 3, 5]))
        with safetensors.safe_open(self.place / "draft/model.safetensors", "np") as exported:
            names = list(exported.keys())
        for part in ("markov", "confidence"):
            self.assertTrue(any(part in name for name in names), (part, names))

    def test_a_run_in_two_parts_has_the_bits_of_one(self):
        total = ("--set", "training.total_steps=12", "--set", "training.save_interval=6", "--set", "training.eval_interval=0", "--backend", "single+async_ckpt")
        self.done("train", *total, "--set", "training.max_steps=12", "--set", 'run_id="whole"')
        self.done("train", *total, "--set", "training.max_steps=6", "--set", 'run_id="cut"')
        self.done("train", *total, "--set", "training.max_steps=12", "--set", 'run_id="cut"')
        file = "step-00000012/rank00000.safetensors"
        self.assertEqual((self.place / "runs/cut" / file).read_bytes(), (self.place / "runs/whole" / file).read_bytes())


if __name__ == "__main__":
    unittest.main(verbosity=2)
