"""Compares the logits of consolidated models in transformers with candle-zero's: check_consolidated.py FOLDER

FOLDER contains a folder per model, with model/ written by `zerorun consolidate`, and logits.safetensors with ids and
candle-zero's logits.
"""

import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LIMIT = 1e-4

models = sorted(path.parent for path in pathlib.Path(sys.argv[1]).glob("*/logits.safetensors"))
assert models, f"no model in {sys.argv[1]}"
for folder in models:
    ours = load_file(folder / "logits.safetensors")
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        folder / "model", output_loading_info=True, torch_dtype=torch.float32
    )
    wrong = {key: names for key, names in loading_info.items() if names and key != "missing_keys"}
    # A tied output projection is not stored in any file.
    missing = set(loading_info["missing_keys"]) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert not wrong and not missing, f"{folder}: {wrong} {missing}"
    with torch.no_grad():
        theirs = model.eval()(ours["ids"]).logits
    assert theirs.shape == ours["logits"].shape, f"{folder}: {theirs.shape} for {ours['logits'].shape}"
    distance = (theirs - ours["logits"]).abs().max().item()
    print(f"{folder.name:16}{type(model).__name__:24}largest difference of logits {distance:.2e}")
    assert distance <= LIMIT, f"{folder}: {distance} exceeds {LIMIT}"
