"""The shipped tiny recipe through sf-host: what a run leaves behind, and a damaged checkpoint and a full disk under it. About 20 s."""
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

BUILD = Path(os.environ.get("SF_BUILD", ROOT / "build"))
HOST = BUILD / "bin/sf-host"
RECIPE = ROOT / "recipes/tiny-dflash2.toml"
STEPS = 160
LAST = f"step-{STEPS:08d}/rank00000.safetensors"


def sum_of(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


class Tiny(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-tiny-"))
        cls.captured = cls.host("capture")
        assert cls.captured.returncode == 0, cls.captured.stderr
        cls.trained = cls.host("train")
        assert cls.trained.returncode == 0, cls.trained.stderr
        cls.run_folder = cls.place / "runs/tiny-dflash2"

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    @classmethod
    def command(cls, verb, *arguments):
        paths = {"output_dir": "runs", "data.hidden_states_path": "features/train", "data.eval_hidden_states_path": "features/held_out"}
        sets = [part for key, folder in paths.items() for part in ("--set", f'{key}="{cls.place / folder}"')]
        return [HOST, verb, RECIPE, *sets, *arguments]

    @classmethod
    def host(cls, verb, *arguments):
        return subprocess.run(cls.command(verb, *arguments), capture_output=True, text=True, timeout=120)

    def result(self, verb, *arguments):
        done = self.host(verb, "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def finish(self, run_id, *arguments):
        done = self.host("train", "--resume", "auto", "--set", f'run_id="{run_id}"', *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_training_beats_the_untrained_draft_and_the_bigram_baseline(self):
        before = self.result("eval", "--checkpoint", "untrained")
        after = self.result("eval", "--checkpoint", "auto")
        self.assertLess(after["loss"], 0.7 * before["loss"])
        self.assertGreater(after["acceptance_length"], before["acceptance_length"] + 0.3)
        self.assertGreater(after["acceptance_length"], after["bigram_acceptance_length"])

    def test_the_run_keeps_its_recipe_metrics_and_checkpoints(self):
        names = {path.name for path in self.run_folder.iterdir()}
        self.assertLessEqual({"recipe.toml", "metrics.jsonl", "latest", "best.json"}, names)
        steps = [json.loads(line)["step"] for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual(steps, sorted(steps))
        self.assertEqual(steps[-1], STEPS)
        self.assertIn("num_anchors = 8", (self.run_folder / "recipe.toml").read_text())
        checkpoints = [name for name in names if name.startswith("step-")]
        self.assertIn(f"step-{STEPS:08d}", checkpoints)
        self.assertLessEqual(len(checkpoints), 3)  # two newest and the best

    def test_the_export_has_the_checkpoints_weights_as_bfloat16(self):
        export = self.result("export", "--checkpoint", "auto", "--output", str(self.place / "draft"))
        self.assertEqual(export["step"], STEPS)
        with safetensors.safe_open(self.run_folder / LAST, "np") as saved:
            exact = saved.get_tensor("weights/fc.weight")
        raw = dict(safetensors.deserialize((self.place / "draft/model.safetensors").read_bytes()))["fc.weight"]
        self.assertEqual((raw["dtype"], raw["shape"]), ("BF16", [64, 192]))
        back = (np.frombuffer(raw["data"], "<u2").astype(np.uint32) << 16).view(np.float32).reshape(64, 192)
        self.assertEqual(bytes(raw["data"]), fetch_smollm2.bfloat16_bytes(exact))
        self.assertLess(np.abs(back - exact).max(), 2**-8 * np.abs(exact).max())
        config = json.loads((self.place / "draft/config.json").read_text())
        self.assertEqual(config["architectures"], ["DFlash2DraftModel"])
        self.assertEqual(config["dflash_config"]["mask_token_id"], 3)

    def test_a_damaged_checkpoint_is_named_and_the_good_one_before_it_offered(self):
        self.finish("damaged", "--set", "training.max_steps=20", "--set", "training.save_interval=10", "--set", "training.eval_interval=0")
        file = self.place / "runs/damaged/step-00000020/rank00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        done = self.host("eval", "--set", 'run_id="damaged"')
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertIn("step-00000020", done.stderr)
        self.assertIn("step-00000010", done.stderr)

    def test_a_full_disk_while_saving_is_an_error_and_the_run_goes_on_later(self):
        # a limit on the size of files stands for the disk: features and logs are smaller, the checkpoint is not
        self.finish("full", "--set", "training.max_steps=20", "--set", "training.save_interval=10", "--set", "training.eval_interval=0",
                    "--set", "training.total_steps=20")
        size = (self.place / "runs/full/step-00000020/rank00000.safetensors").stat().st_size
        shutil.rmtree(self.place / "runs/full/step-00000020")
        arguments = self.command("train", "--resume", "auto", "--set", 'run_id="full"', "--set", "training.max_steps=20", "--set",
                                 "training.total_steps=20", "--set", "training.save_interval=10", "--set", "training.eval_interval=0")
        limited = subprocess.run(["bash", "-c", f'trap "" XFSZ; ulimit -f {size // 2048}; exec "$@"', "bash", *arguments],
                                 capture_output=True, text=True)
        self.assertEqual(limited.returncode, 7, limited.stderr)
        self.assertIn("saving step 20", limited.stderr)
        self.assertEqual([path.name for path in (self.place / "runs/full").glob("*step-*")], ["step-00000010"])
        self.assertEqual(subprocess.run(arguments, capture_output=True).returncode, 0)
        self.assertTrue((self.place / "runs/full/step-00000020/COMMITTED").exists())


if __name__ == "__main__":
    unittest.main(verbosity=2)
