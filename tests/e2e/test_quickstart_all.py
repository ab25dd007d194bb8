"""quickstart --algorithm all on a few conversations: three drafts from one capture and one table. About 2 minutes on two cores."""
import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ["LlamaForCausalLMEagle3", "DFlash2DraftModel", "DSparkDraftModel"]
STEPS = 8


class QuickstartAll(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-quickstart-all-"))
        cls.done = subprocess.run([ROOT / "tools/quickstart", "--no-build", "--algorithm", "all", "--samples", "16", "--steps", str(STEPS), "--device", "cpu",
                                   "--out", cls.place / "out"], capture_output=True, text=True)
        assert cls.done.returncode == 0, cls.done.stdout[-4000:] + cls.done.stderr[-4000:]
        cls.runs = json.loads((cls.place / "out/summary.json").read_text())["runs"]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def test_three_drafts_stand_in_one_table(self):
        self.assertEqual([run["architecture"] for run in self.runs], ARCHITECTURES)
        for run in self.runs:
            with self.subTest(run["architecture"]):
                self.assertEqual(run["steps"], STEPS)
                self.assertEqual(run["drafted_tokens"], 4)
                self.assertEqual(len(run["hit_rate"]), 4)
                self.assertTrue(all(0 <= rate <= 1 for rate in run["hit_rate"]))
                self.assertGreater(run["parameters"], 1e6)
                self.assertLess(run["loss"]["after"], run["loss"]["before"])
                self.assertTrue((Path(run["draft"]) / "model.safetensors").exists())
        self.assertEqual(len({run["acceptance_length"]["bigram"] for run in self.runs}), 1)  # as many tokens drafted, the same text
        header = next(line for line in self.done.stdout.splitlines() if ARCHITECTURES[0] in line and ARCHITECTURES[2] in line)
        self.assertIn(ARCHITECTURES[1], header)
        for row in ("parameters", "loss trained", "accept trained", "hit rate, token 4", "training tokens/s", "accept decoding", "95 % interval"):
            self.assertIn(row, self.done.stdout)

    def test_they_share_one_capture(self):
        folders = sorted(path.name for path in (self.place / "out/features").iterdir())
        self.assertEqual(folders, ["all-held_out-16", "all-train-16"])
        features = json.loads((self.place / "out/features/all-train-16/manifest.json").read_text())["features"]
        self.assertEqual(features["hidden_states"]["layer_ids"], [1, 8, 15, 22, 28])
        self.assertIn("target_last_hidden_states", features)


if __name__ == "__main__":
    unittest.main(verbosity=2)
