"""What the tests of `llamarium build` share: a small random model, and checks of a learner's source in this process."""

import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import learner_styles
import learner_styles_2
from llamarium.checkpoints.open import open_model
from llamarium.config import ModelConfig
from llamarium.course.arguments import Source
from llamarium.course.check import Result
from llamarium.course.limits import LIMITS, Limits
from llamarium.course.outline import file_of, step_named
from llamarium.course.passes import Weights
from llamarium.course.worker import _check
from llamarium.tokenizer.base import Tokenizer

STYLES: Mapping[str, Mapping[str, str]] = learner_styles.STYLES | learner_styles_2.STYLES

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, rope_theta=20_000.0, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip


def random_weights(config: ModelConfig = CONFIG) -> Weights:
    """Weights of this shape: products keep the size of their inputs, norms are around 1."""
    rng = np.random.default_rng(0)
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    outs = {"q": heads, "k": kv_heads, "v": kv_heads, "o": config.hidden_size, "down": config.hidden_size}

    def read(key: str) -> np.ndarray:
        if "norm" in key:
            return rng.uniform(0.5, 1.5, config.hidden_size).astype(np.float32)
        name = key.split(".")[-2].removesuffix("_proj")
        inputs = {"o": heads, "down": config.intermediate_size}.get(name, config.hidden_size)
        rows = config.vocab_size if name in ("embed_tokens", "lm_head") else outs.get(name, config.intermediate_size)
        return (rng.normal(size=(rows, inputs)) / inputs**0.5).astype(np.float32)

    return Weights(config, read)


class FewIds:
    """The built-in's tokenizer, whose ids are folded into a small vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        return [token % CONFIG.vocab_size for token in self._tokenizer.encode(text)]


@lru_cache(1)
def tokenizer() -> Any:
    found = open_model("smollm2-135m").tokenizer
    assert found is not None
    return FewIds(found)


@lru_cache(1)
def weights() -> Weights:
    return random_weights()


def check_source(
    folder: Path, name: str, source: str, seed: int = 0, limits: Limits = LIMITS, model: Weights | None = None
) -> Result:
    """Check a step whose file holds this text, inside the small model or another one."""
    head = "" if "import torch" in source else "import numpy as np\n"
    (folder / file_of(step_named(name))).write_text(head + source, encoding="utf-8")
    path = list(sys.path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's are no errors in a learner's process
            return _check(Source(model or weights(), tokenizer()), folder, name, seed, limits)
    finally:
        sys.path[:] = path
