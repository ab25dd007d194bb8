#!/usr/bin/env python3
"""sf-host bench on the tiny recipe: a step benchmark, one from feature files on, a matrix, and the table of their results."""
import json
import os
import pathlib
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOST = pathlib.Path(os.environ["SF_BUILD"]) / "bin" / "sf-host"
RECIPE = ROOT / "recipes" / "tiny-dflash2.toml"
SHORT = ["--warmup", "1", "--steps", "2", "--repeats", "3"]


def run(*arguments, code=0):
    done = subprocess.run([HOST, "bench", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"exit {done.returncode}, expected {code}: {done.stdout}\n{done.stderr}"
    return done


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        own = ["--set", f"output_dir={folder}/runs", "--set", f"data.hidden_states_path={folder}/features",
               "--set", "data.eval_hidden_states_path=", "--set", "training.eval_interval=0"]

        # Step by step: the parts add up to no more than the whole, and the loss is that of a working draft.
        run(RECIPE, *SHORT, *own, "--output", folder / "step.json")
        step = json.loads((folder / "step.json").read_text())
        spread = step["step_ms"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"], spread
        parts = step["split_ms"]
        assert set(parts) == {"forward", "backward", "reduce", "optimizer"}, parts
        assert 0 < sum(parts.values()) <= 1.5 * spread["max"], (parts, spread)
        assert abs(step["samples_per_second"] - 4e3 / spread["median"]) < 1e-6 * step["samples_per_second"], step
        assert 1 < step["loss"] < 20 and step["grad_norm"] > 0, step
        assert step["options"]["training.batch_size"] == "4" and step["plugins"]["single"], step
        # What a window computes by the formulas, and what part of a product's pace that is.
        flop = step["model_flop"]
        assert set(flop) == {"products", "head", "attention"} and all(value > 0 for value in flop.values()), flop
        assert abs(step["model_tflops"] - sum(flop.values()) / spread["median"] * 1e-9) < 1e-6 * step["model_tflops"], step
        assert abs(step["share_of_product_ceiling"] - step["model_tflops"] / step["product_ceiling_tflops"]) < 1e-6 and step["share_of_product_ceiling"] < 1.2, step
        # Hidden 64 and 128 inside, 4 heads of 16 for 2, vocabulary 320, one layer; 4 samples of 128 tokens, 8 blocks of 4 each, of which 3 rows have a label.
        rows, context, h, inner, query, key = 4 * 8 * 4, 4 * 128, 64, 128, 64, 32
        products = 4 * context * 3 * h * h                                                      # of features, which want no gradient
        products += 6 * (rows * (2 * h * query + 3 * h * inner) + 2 * (rows + context) * h * key)
        products += 6 * (2 * rows * h * 16 + 4 * 8 * 3 * h * 8)                               # two convolutions' coefficients, the selector
        assert flop["products"] == products, (flop, products)
        assert flop["head"] == 4 * 4 * 8 * 3 * h * 320, flop
        pairs = flop["attention"] / (12 * query)
        assert rows * 4 < pairs < rows * (128 + 4), pairs
        assert not (folder / "runs").exists(), "a step benchmark leaves no run behind"

        # The same data each time, other data for another mask.
        again = json.loads(run(RECIPE, *SHORT, *own, "--json").stdout)
        assert again["loss"] == step["loss"], (again["loss"], step["loss"])
        masked = json.loads(run(RECIPE, *SHORT, *own, "--json", "--variable-mask", "--variable-length").stdout)
        assert masked["loss"] != step["loss"] and masked["tokens_per_second"] > 0

        # From feature files on: train itself, its own metrics; the files are known again.
        run(RECIPE, *SHORT, *own, "--mode", "run", "--label", "files", "--output", folder / "run.json")
        files = json.loads((folder / "run.json").read_text())
        assert files["run"]["updates"] == 7 and files["data_wait_ms"]["median"] >= 0, files
        stamp = (folder / "features" / "manifest.json").stat().st_mtime_ns
        run(RECIPE, *SHORT, *own, "--mode", "run")
        assert (folder / "features" / "manifest.json").stat().st_mtime_ns == stamp
        refused = run(RECIPE, *SHORT, *own, "--mode", "run", "--variable-mask", code=4)
        saving = json.loads(run(RECIPE, "--warmup", "1", "--steps", "12", "--repeats", "1", *own, "--set", f"data.hidden_states_path={folder}/more", "--mode", "run",
                                "--json", "--set", "training.save_interval=4", "--backend", "single+async_ckpt").stdout)["save"]
        assert saving["count"] >= 2 and saving["bytes"] > 0 and saving["device_wait_ms"]["max"] >= 0, saving
        assert 0 < saving["stall_ms"]["median"] and saving["step_ms_beside_save"]["median"] > 0, saving
        assert "features" in refused.stderr, refused.stderr

        # Variants in turn, one table; what fails is named and the rest is kept.
        done = run("matrix", RECIPE, "--warmup", "1", "--steps", "1", "--repeats", "2", *own, "--variant", "base", "--variant",
                   "wide:training.batch_size=8", "--variant", "broken:training.batch_size=0", "--output", folder / "matrix", code=1)
        assert "| base |" in done.stdout and "| wide |" in done.stdout and "broken (repeat 1" in done.stderr, done.stdout + done.stderr
        wide = json.loads((folder / "matrix" / "wide.json").read_text())
        assert wide["runs"] == 2 and wide["options"]["training.batch_size"] == "8", wide

        # For a script: one document, whatever the children print. One name is one result, and a flag that would be lost is refused.
        both = json.loads(run("matrix", RECIPE, "--warmup", "1", "--steps", "1", "--repeats", "1", *own, "--variant", "base", "--variant", "wide:training.batch_size=8",
                              "--compare", folder / "step.json", "--output", folder / "again", "--json").stdout)
        assert [result["label"] for result in both] == ["tiny-dflash2", "base", "wide"], both
        for flags, told in ((("--variant", "base:training.batch_size=8"), 'two variants are called "base"'), (("--label", "x"), "--label has no meaning"),
                            (("--nproc", "1", "--nnodes", "2", "--rendezvous", "127.0.0.1:29500"), "--nnodes asks for several")):
            assert told in run("matrix", RECIPE, *own, "--variant", "base", *flags, code=2).stderr, flags
        # SIGTERM for the parent alone reaches the run that is being measured.
        long = subprocess.Popen([HOST, "bench", "matrix", RECIPE, "--warmup", "1", "--steps", "100000", "--repeats", "1", *own, "--variant", "base", "--output", folder / "long"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(2)
        long.terminate()
        long.communicate(timeout=60)
        assert long.returncode == 130, long.returncode

        table = run("summarize", folder / "step.json", folder / "run.json").stdout
        assert "| tiny-dflash2 |" in table and "| files |" in table, table
        beside = run(RECIPE, *SHORT, *own, "--compare", folder / "run.json").stdout
        assert "beside the earlier result" in beside and "| files |" in beside, beside

        # Too much for the machine: refused before anything is allocated, with what would fit.
        huge = run(RECIPE, *SHORT, *own, "--set", "training.batch_size=65536", "--set", "training.num_anchors=2048", "--set", "data.max_length=4096", code=5).stderr
        assert "the run needs about" in huge and "are available on this machine" in huge and "any one of these would fit: training.batch_size = " in huge, huge

        # A plan for a GPU names what has no kernel there; one for this machine has nothing to name.
        planned = [subprocess.run([HOST, "plan", RECIPE, *own, "--set", f"device={device}"], capture_output=True, text=True, timeout=60).stdout for device in ("cuda", "cpu")]
        assert "block_attention runs as LibTorch operations: its kernel takes bfloat16" in planned[0] and "slower paths" not in planned[1], planned

        assert "no usable name" in run("matrix", RECIPE, "--variant", ":a=1", code=2).stderr
        assert "at least 1" in run(RECIPE, "--warmup", "0", code=2).stderr
        lost = run(RECIPE, *SHORT, *own, "--output", folder / "nowhere" / "step.json", code=2).stderr
        assert "its folder does not exist" in lost and "repeat 1" not in lost, "told before the work: " + lost
        (folder / "no.json").write_text("{}")
        assert "not a benchmark's result" in run("summarize", folder / "no.json", code=2).stderr


if __name__ == "__main__":
    main()
