"""One capture for several algorithms on the tiny target: what it holds, training from it, a stop and a resume to the same bits, refusals. About 30 s."""
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

BUILD = Path(os.environ.get("SF_BUILD", ROOT / "build"))
HOST = BUILD / "bin/sf-host"
ALGORITHMS = [name for name in ("eagle3", "dflash2", "dspark") if (BUILD / f"lib/sf/plugins/{name}.so").exists()]
STEPS = 24


def recipe(algorithm):
    return ROOT / f"recipes/tiny-{algorithm}.toml"


class OneCapture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-one-capture-"))
        done = cls.host("dflash2", "capture", "--for", ",".join(str(recipe(name)) for name in ALGORITHMS))
        assert done.returncode == 0, done.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def host(cls, algorithm, verb, *arguments, features="features"):
        paths = {"output_dir": "runs", "data.hidden_states_path": f"{features}/train", "data.eval_hidden_states_path": f"{features}/held_out"}
        sets = [part for key, folder in paths.items() for part in ("--set", f'{key}="{cls.place / folder}"')]
        return subprocess.run([HOST, verb, recipe(algorithm), *sets, *arguments], capture_output=True, text=True, timeout=300)

    def train(self, algorithm, run_id, *arguments):
        done = self.host(algorithm, "train", "--resume", "auto", "--set", f'run_id="{run_id}"', "--set", "training.total_steps=160", "--set",
                         "training.eval_interval=0", "--set", "training.save_interval=8", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)

    def weights(self, run_id):
        with safetensors.safe_open(self.place / f"runs/{run_id}/step-{STEPS:08d}/rank00000.safetensors", "np") as file:
            return {name: file.get_tensor(name).tobytes() for name in file.keys()}

    def test_1_it_holds_all_layers_once_and_the_last_state(self):
        features = json.loads((self.place / "features/train/manifest.json").read_text())["features"]
        self.assertEqual(set(features), {"hidden_states", "target_last_hidden_states"})
        layers = features["hidden_states"]["layer_ids"]
        self.assertEqual(layers, sorted(set(layers)))
        self.assertLessEqual({1, 3, 5}, set(layers))

    def test_2_each_algorithm_trains_from_it_and_a_stopped_run_ends_with_the_same_bits(self):
        for name in ALGORITHMS:
            with self.subTest(name):
                self.train(name, f"{name}-whole", "--set", f"training.max_steps={STEPS}")
                self.train(name, f"{name}-cut", "--set", "training.max_steps=11")
                self.train(name, f"{name}-cut", "--set", f"training.max_steps={STEPS}")
                whole, cut = self.weights(f"{name}-whole"), self.weights(f"{name}-cut")
                self.assertEqual(set(whole), set(cut))
                self.assertEqual([key for key in whole if whole[key] != cut[key]], [])

    def test_3_names_alone_will_do_for_drafts_of_one_kind(self):
        done = self.host("dflash2", "capture", "--for", "dflash2,dspark", "--json", features="by-name")
        self.assertEqual(done.returncode, 0, done.stderr)
        features = json.loads((self.place / "by-name/train/manifest.json").read_text())["features"]
        self.assertEqual(features["hidden_states"]["layer_ids"], [1, 3, 5])
        self.assertIn("target_last_hidden_states", features)

    def test_4_a_recipe_that_needs_more_is_told_what_is_missing(self):
        self.assertEqual(self.host("dflash2", "capture", features="less").returncode, 0)
        done = self.host("dspark", "train", features="less")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("the target's last state", done.stderr)
        self.assertIn("was not captured; there are: 'hidden_states' (layers [1, 3, 5])", done.stderr)
        self.assertIn("--for", done.stderr)
        done = self.host("dflash2", "train", "--set", "model.target_layer_ids=[1, 2, 4]", features="less")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("layers [2, 4] were not captured", done.stderr)
        done = self.host("dflash2", "train", "--set", f"model.target_model_path=\"{ROOT / 'tests/parity/golden/target_qwen2'}\"", features="less")
        self.assertNotEqual(done.returncode, 0)
        self.assertTrue("another target" in done.stderr, done.stderr)

    def test_5_wrong_names_and_targets_are_refused(self):
        for readers, code, text in [("dflash2,,dspark", 2, "names with commas"), ("dflash3", 3, "no plugin \"dflash3\""), ("", 2, "--for is empty")]:
            done = self.host("dflash2", "capture", "--for", readers, features="never")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stderr)
        self.assertFalse((self.place / "never").exists())

    def test_6_what_the_second_split_lacks_is_told_before_the_first_is_captured(self):
        for setting, code, text in [(f'data.eval_data_path="{self.place}/nowhere.jsonl"', 4, "(data.eval_data_path): there is no such file"),
                                    ('data.eval_hidden_states_path=""', 2, "capturing the split 'eval' needs data.eval_data_path and data.eval_hidden_states_path")]:
            done = self.host("dflash2", "capture", "--set", setting, "--set", "training.eval_interval=0", features="never")
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(text, done.stderr)
            self.assertFalse((self.place / "never").exists())
        self.assertEqual(self.host("dflash2", "capture", "--split", "train", "--set", 'data.eval_hidden_states_path=""', "--set", "training.eval_interval=0", features="one-split").returncode, 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
