"""The whole way on a few conversations: quickstart from the target to the export, and again. About 3 minutes on two cores."""
import hashlib
import json
import os
import re
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

SAMPLES, STEPS = "48", "40"

# What engines read of a DFlash2 draft of this size: 1 layer, 5 target layers, 9 and 3 heads of 64, 2 taps, 36 groups of 16, rank 32.
H, I, V = 576, 1536, 49152
TENSORS = {
    "fc.weight": [H, 5 * H], "hidden_norm.weight": [H], "norm.weight": [H],
    "layers.0.input_layernorm.weight": [H], "layers.0.post_attention_layernorm.weight": [H],
    "layers.0.self_attn.q_proj.weight": [576, H], "layers.0.self_attn.k_proj.weight": [192, H],
    "layers.0.self_attn.v_proj.weight": [192, H], "layers.0.self_attn.o_proj.weight": [H, 576],
    "layers.0.self_attn.q_norm.weight": [64], "layers.0.self_attn.k_norm.weight": [64],
    "layers.0.mlp.gate_proj.weight": [I, H], "layers.0.mlp.up_proj.weight": [I, H], "layers.0.mlp.down_proj.weight": [H, I],
    "layers.0.attention_conv.base_kernel": [2, 2, H], "layers.0.attention_conv.kernel_projection.weight": [2 * 2 * 36, H],
    "layers.0.mlp_conv.base_kernel": [2, 2, H], "layers.0.mlp_conv.kernel_projection.weight": [2 * 2 * 36, H],
    "candidate_selector.predecessor_codebook": [V, 32], "candidate_selector.successor_codebook": [V, 32],
    "candidate_selector.hidden_projection.weight": [32, H],
}


def quickstart(out, steps=STEPS):
    return subprocess.run([ROOT / "tools/quickstart", "--no-build", "--samples", SAMPLES, "--steps", steps, "--device", "cpu", "--out", out],
                          capture_output=True, text=True)


def sum_of(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


class Quickstart(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = Path(tempfile.mkdtemp(prefix="sf-quickstart-"))
        cls.out = cls.place / "out"
        cls.first = quickstart(cls.out)
        assert cls.first.returncode == 0, cls.first.stdout[-4000:] + cls.first.stderr[-4000:]
        cls.summary = json.loads((cls.out / "summary.json").read_text())
        cls.run_name = cls.summary["run"]

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.place)

    def test_0_its_stages_are_counted_to_the_last(self):
        said = re.findall(r"^== (\d+)/(\d+)  ", self.first.stdout, re.MULTILINE)
        self.assertEqual(said, [(str(n + 1), str(len(said))) for n in range(len(said))])

    def test_1_training_lowers_the_loss_and_lengthens_what_is_accepted(self):
        loss, accept = self.summary["loss"], self.summary["acceptance_length"]
        self.assertLess(loss["after"], 0.5 * loss["before"])  # the untrained draft foresees its own mask token: loss near 70
        self.assertGreater(accept["after"], accept["before"] + 0.02)
        self.assertGreaterEqual(accept["before"], 1.0)
        self.assertTrue(1.0 < accept["bigram"] < 2.0, accept)
        self.assertEqual(self.summary["steps"], int(STEPS))
        self.assertGreater(self.summary["tokens_per_second"], 0)
        self.assertIn("sglang.launch_server", self.first.stdout)

    def test_2_the_export_is_what_engines_read(self):
        draft = self.out / "draft"
        config = json.loads((draft / "config.json").read_text())
        self.assertEqual(config["architectures"], ["DFlash2DraftModel"])
        self.assertEqual(config["dtype"], "bfloat16")
        self.assertEqual([config[key] for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                                  "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "rope_theta")],
                         ["qwen3", H, I, 1, 9, 3, 64, V, False, 100000.0])
        block = config["dflash_config"]
        self.assertEqual([block[key] for key in ("target_layer_ids", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank",
                                                 "selector_top_k")], [[1, 8, 15, 22, 28], 16, 2, 16, 32, 8])
        self.assertEqual(block.get("block_size", config.get("block_size")), 5)
        with safetensors.safe_open(draft / "model.safetensors", "np") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}
            self.assertEqual(found, TENSORS)
            self.assertEqual({file.get_slice(name).get_dtype() for name in file.keys()}, {"BF16"})

    def test_3_running_again_keeps_what_is_done(self):
        weights = sum_of(self.out / "draft/model.safetensors")
        shard = next((self.out / f"features/train-{SAMPLES}").glob("*.safetensors"))
        before = shard.stat().st_mtime_ns
        again = quickstart(self.out)
        self.assertEqual(again.returncode, 0, again.stderr[-4000:])
        self.assertEqual(shard.stat().st_mtime_ns, before)
        self.assertIn("nothing to do", again.stderr)
        self.assertEqual(sum_of(self.out / "draft/model.safetensors"), weights)

    def test_4_the_records_are_those_of_the_raw_conversations_and_the_features_stand_up_to_the_doctor(self):
        shipped = {record["id"]: record for record in map(json.loads, (ROOT / "recipes/data/smollm2-135m/train.jsonl").read_text().splitlines())}
        prepared = [json.loads(line) for line in (self.out / f"tokens/train-{SAMPLES}.jsonl").read_text().splitlines()]
        self.assertEqual(len(prepared), int(SAMPLES))
        self.assertGreaterEqual(sum(record["input_ids"] == shipped[record["id"]]["input_ids"] for record in prepared), int(SAMPLES) - 3)
        host = Path(os.environ.get("SF_BUILD", ROOT / "build")) / "bin/sf-host"
        done = subprocess.run([host, "doctor", "features", self.out / f"{self.run_name}.toml", "--json"], capture_output=True, text=True)
        findings = json.loads(done.stdout)
        self.assertEqual([finding for finding in findings if not finding["fine"]], [])
        self.assertTrue(any("the head predicts the next token" in finding["check"] for finding in findings))


if __name__ == "__main__":
    unittest.main(verbosity=2)
