"""Whole weights of an adapter that replace the base's. Torch-free.

Low-rank corrections of Linears are applied in addition to the base's weights. Everything else that PEFT trains is
converted to new weights here: the embedding with its low-rank correction, the rows of some tokens, and saved modules.

Source: peft, `tuners/lora/layer.py` (`Embedding`), `tuners/lora/dora.py`, `tuners/trainable_tokens/layer.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamarium.adapters.config import EMBED_TOKENS, LM_HEAD
from llamarium.adapters.files import EMBEDDING_A, SavedAdapter
from llamarium.config import EMBEDDING, HEAD, ModelConfig

_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Weights that replace a base's, and the config of the resulting model.

    Attributes:
        config: The base's config, with the adapter's vocabulary size, and untied if the head differs from the
            embedding.
        weights: float32, by key. An untied head that is not included is the base's embedding table.
    """

    config: ModelConfig
    weights: Mapping[str, _Floats]


def replacement_of(saved: SavedAdapter, config: ModelConfig, read: Callable[[str], _Floats]) -> Replacement | None:
    """Return the weights that an adapter replaces; None if it only corrects Linears, or repeats the base's weights.

    `read` returns a whole weight of the base by its key, in float32.
    """
    if not saved.replaces_weights:
        return None
    tied = config.tie_word_embeddings
    weights = dict(saved.weights)

    if tied and saved.keeps_head_tied and (EMBEDDING in weights) != (HEAD in weights):  # one table, saved once
        table = weights.get(EMBEDDING, weights.get(HEAD))
        assert table is not None
        weights |= {EMBEDDING: table, HEAD: table}
    if _changes_embedding(saved):
        base = weights[EMBEDDING] if EMBEDDING in weights else read(EMBEDDING)
        weights[EMBEDDING] = _with_rows(_with_correction(base, saved), saved, EMBED_TOKENS)
    if _changes_head(saved, tied=tied):
        rows_of = LM_HEAD if LM_HEAD in saved.token_rows else EMBED_TOKENS
        base = weights[HEAD] if HEAD in weights else read(EMBEDDING if tied else HEAD)
        weights[HEAD] = _with_rows(base, saved, rows_of)

    are_equal = HEAD in weights and EMBEDDING in weights and np.array_equal(weights[HEAD], weights[EMBEDDING])
    is_tied = tied and (are_equal or not {EMBEDDING, HEAD} & weights.keys())
    if is_tied:
        weights.pop(HEAD, None)
    for key in [key for key in weights if key != HEAD or not tied]:  # PEFT also saves unchanged weights of the base
        base = read(key)
        if base.shape == weights[key].shape and np.array_equal(base, weights[key]):
            del weights[key]
    if not weights and is_tied == tied:
        return None
    rows = len(weights[EMBEDDING]) if EMBEDDING in weights else config.vocab_size
    return Replacement(replace(config, tie_word_embeddings=is_tied, vocab_size=rows), weights)


def _changes_embedding(saved: SavedAdapter) -> bool:
    return EMBED_TOKENS in saved.token_rows or EMBEDDING_A in saved.tensors


def _changes_head(saved: SavedAdapter, *, tied: bool) -> bool:
    return LM_HEAD in saved.token_rows or (tied and EMBED_TOKENS in saved.token_rows)


def _with_correction(table_VD: _Floats, saved: SavedAdapter) -> _Floats:
    """Return the embedding with its low-rank correction; DoRA scales each column by its learned magnitude."""
    a = saved.tensors.get(EMBEDDING_A)
    if a is None:
        return table_VD
    b = saved.tensors[f"{EMBED_TOKENS}.lora_embedding_B"]
    corrected: _Floats = saved.scales[EMBED_TOKENS] * (a.T @ b.T)  # remains float32: the scale is a Python float
    corrected += table_VD
    magnitude = saved.tensors.get(f"{EMBED_TOKENS}.lora_magnitude_vector")
    if magnitude is not None:
        corrected *= magnitude / np.linalg.norm(corrected, axis=0)
    return corrected


def _with_rows(table_VD: _Floats, saved: SavedAdapter, module: str) -> _Floats:
    if module not in saved.token_rows:
        return table_VD
    ids, rows = saved.token_rows[module]
    table_VD = table_VD.copy()
    table_VD[ids] = rows
    return table_VD
