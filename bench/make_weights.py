"""Write random weights in the real shape of a published model as a Hugging Face folder, bfloat16.

    python bench/make_weights.py llama-3.2-1b

The folder has config.json and one model.safetensors; a tied head is left out, as published checkpoints do.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from common import GENERATED
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import PRESETS, preset


def make(name: str) -> Path:
    """Return the folder, writing it if it is not there."""
    folder = GENERATED / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = init_weights(LlamaForCausalLM(preset(name)), seed=0)
    torch.set_default_dtype(previous)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(model.config.to_hf() | {"dtype": "bfloat16"}, indent=2))
    save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("preset", choices=list(PRESETS))
    print(make(arguments.parse_args().preset))
