#!/usr/bin/env python3
"""Random weights and features in the shape of a real target, for timing and smoke runs where the real one is not at hand.

    tools/make_random_features.py --config path/to/config.json --layers 5 --samples 16 --tokens 2048 --out FOLDER

FOLDER/target holds config.json and a model.safetensors with embedding and head alone (what training reads of a target);
FOLDER/features holds records in the reference's offline format (torch.save): input_ids, loss_mask, hidden_states [1, tokens, layers * hidden].
A tenth of each sample at the front is prompt (mask 0). Needs the Python packages torch and safetensors.
"""
import argparse
import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=pathlib.Path, required=True, help="a Hugging Face config.json")
    parser.add_argument("--layers", type=int, default=5, help="captured layers in hidden_states")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    config = json.loads(arguments.config.read_text())
    text = config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    random = torch.Generator().manual_seed(arguments.seed)

    target = arguments.out / "target"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(arguments.config, target / "config.json")
    tables = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=random).mul_(0.02).bfloat16()}
    if not text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        tables["lm_head.weight"] = torch.randn(vocab, hidden, generator=random).mul_(0.02).bfloat16()
    save_file(tables, target / "model.safetensors")

    features = arguments.out / "features"
    features.mkdir(exist_ok=True)
    mask = torch.ones(arguments.tokens, dtype=torch.int64)
    mask[: arguments.tokens // 10] = 0
    for index in range(arguments.samples):
        torch.save(
            {
                "input_ids": torch.randint(0, vocab, (arguments.tokens,), generator=random),
                "loss_mask": mask,
                "hidden_states": torch.randn(1, arguments.tokens, arguments.layers * hidden, generator=random).bfloat16(),
            },
            features / f"data_{index}.ckpt",
        )
    print(f"{arguments.out}: target tables {vocab} x {hidden}, {arguments.samples} samples of {arguments.tokens} tokens")


if __name__ == "__main__":
    main()
