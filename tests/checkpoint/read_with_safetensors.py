"""The weights of a checkpoint, read by the Python package safetensors: another program must find the same numbers in the same file."""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import fetch_smollm2  # noqa: E402

fetch_smollm2.use_python_packages()
import safetensors  # noqa: E402

with tempfile.TemporaryDirectory(prefix="sf-checkpoint-") as folder:
    subprocess.run([sys.argv[1], "--test-case=checkpoint: written for another reader"], check=True, stdout=subprocess.DEVNULL,
                   env=os.environ | {"SF_CHECKPOINT_OUT": folder})
    file = Path(folder) / "step-00001000/rank00000.safetensors"
    with safetensors.safe_open(file, "np") as tensors:
        assert sorted(tensors.keys()) == ["counter", "moments/fc", "weights/fc"], tensors.keys()
        weights = tensors.get_tensor("weights/fc")
        assert weights.shape == (5, 3) and weights.dtype == "float32", weights
        assert weights.ravel().tolist() == [1000.0 + i for i in range(15)], weights
        assert tensors.get_tensor("counter").shape == () and int(tensors.get_tensor("counter")) == 1000
        assert tensors.get_slice("moments/fc").get_dtype() == "BF16"
print("the same numbers")
