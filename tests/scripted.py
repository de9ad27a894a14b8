"""A model whose answers are written down: for what happens to an answer's tokens, whatever they are."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np

from llamarium.api import Llama
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.batch import Batch
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.native.runner import NativeRunner
from llamarium.tokenizer.base import Tokenizer
from native_models import weights_of

_CONFIG = replace(
    preset("smollm2-135m"),
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=4096,
)


class ScriptedRunner(NativeRunner):
    """Answers every prompt with the same tokens, at any temperature.

    Attributes:
        script: The answer's.
        start: How long the prompts are; set by `ScriptedLlama.will_say`.
    """

    script: Sequence[int] = ()
    start = 0

    def run(self, batch: Batch, cache: Any, taps: Any = None) -> Any:
        logits_WV = np.full((len(batch.logit_rows), self.config.vocab_size), -1e4, np.float32)
        for row, token in enumerate(batch.logit_rows):
            place = batch.positions[token] + 1 - self.start
            logits_WV[row, self.script[min(place, len(self.script) - 1)]] = 1e4
        return logits_WV


class ScriptedLlama(Llama):
    """A `Llama` over a `ScriptedRunner`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        config = replace(_CONFIG, vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.bos_token_id)
        model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
        self.scripted = ScriptedRunner(config, weights_of(model))
        super().__init__("scripted", LoadedModel(self.scripted, lambda: model), tokenizer)

    def will_say(self, ids: Sequence[int], num_prompt: int) -> None:
        """Answer prompts of so many tokens with these, and the token that ends an answer."""
        self.scripted.script, self.scripted.start = [*ids, min(self.stop_ids)], num_prompt


def cut_into_tokens(tokenizer: Tokenizer, text: str, data: st.DataObject) -> list[int]:
    """Cut the bytes of a text anywhere, and return a token for each of them, or those of a part."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i < 512}
    ids: list[int] = []
    while text:
        cut = data.draw(st.integers(1, min(8, len(text))))
        part, text = text[:cut], text[cut:]
        whole = data.draw(st.booleans()) or not all(bytes([b]) in single for b in part.encode())
        ids += (
            tokenizer.encode(part, add_special_tokens=False) if whole else [single[bytes([b])] for b in part.encode()]
        )
    return ids
