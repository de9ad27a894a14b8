"""A tiny training run: some words in random order, two layers, seconds."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from llamarium.train.conduct import conduct
from llamarium.train.config import PretrainConfig
from llamarium.train.pretrain import prepare

WORDS = "the cat sat on a mat and so did every other cat that had come by".split()


def write_words(file: Path) -> Path:
    """Write a text of those words, always the same, and return its file."""
    generator = random.Random(0)
    file.write_text(" ".join(generator.choice(WORDS) for _ in range(700)) + "\n")
    return file


def tiny_config(text: Path, **changes: Any) -> PretrainConfig:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    run = {
        "steps": 24,
        "batch_rows": 4,
        "gradient_accumulation_steps": 2,
        "save_every": 5,
        "eval_every": 6,
        "sample_every": 12,
        "precision": "float32",
    }
    options = {"num_key_value_heads": 2, "context": 32, "warmup_steps": 3, "sample_tokens": 5, "log_every": 1}
    return PretrainConfig(
        **{"data": str(text), "preset": "tiny", "device": "cpu", **shape, **run, **options, **changes}
    )


def tiny_run(folder: Path, **changes: Any) -> Path:
    """Train one with checkpoints at steps 5, 10, 15, 20 and 24, where nothing else is asked for; return its folder."""
    how = {"save_total_limit": 9, "eval_every": 5, "threads": 1, **changes}
    config = tiny_config(write_words(folder.with_suffix(".txt")), **how)
    conduct(lambda: prepare(config, folder), folder, resume=False, watch=nullcontext(lambda event: None))
    return folder
