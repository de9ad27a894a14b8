"""A forward pass made of the steps' functions, with a real model's weights. Torch-free.

Each function can be a learner's or the right one. `check.py` replaces one function and compares each of its calls;
`whole.py` and `serve.py` replace all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.course.step import Function
from llamarium.course.steps import STEPS
from llamarium.course.steps.types import Floats, Ints
from llamarium.errors import OptionError
from llamarium.runtime.taps import Taps

RIGHT: Mapping[str, Function] = {step.name: step.right for step in STEPS}

KeysAndValues = tuple[Floats, Floats]


class Weights:
    """A model's weights as float32, each read on first use.

    Args:
        config: The model's configuration.
        read: Returns the weight with a key.

    Raises:
        OptionError: If the model has features that no step implements.
    """

    def __init__(self, config: ModelConfig, read: Callable[[str], Floats]) -> None:
        if config.rope_scaling is not None:
            raise OptionError("the course's model has RoPE scaling, which no step implements; use another model")
        if config.sliding_window is not None:
            raise OptionError("the course's model has a sliding window, which no step implements; use another model")
        if config.attention_bias or config.mlp_bias:
            raise OptionError("the course's model has biases, which no step implements; use another model")
        self.config, self._read = config, read
        self._found: dict[str, Floats] = {}

    def __getitem__(self, key: str) -> Floats:
        if key not in self._found:
            self._found[key] = self._read(key)
        return self._found[key]

    def forget(self) -> None:
        """Drop all arrays, so that they are read again; needed when a function has overwritten one."""
        self._found.clear()

    @property
    def table(self) -> Floats:
        """The embedding matrix (V, D)."""
        return self[EMBEDDING]

    @property
    def head(self) -> Floats:
        """The LM head (V, D), which is the embedding matrix if they are tied."""
        return self.table if self.config.tie_word_embeddings else self[HEAD]


class Pass:
    """Runs tokens through a model made of functions.

    Args:
        weights: The model's weights.
        functions: The functions, by name of their steps.
        taps: Collects activations; see `runtime/taps.py`.

    Attributes:
        layer: Index of the running layer; None outside of the layers.
    """

    def __init__(self, weights: Weights, functions: Mapping[str, Function] = RIGHT, taps: Taps | None = None) -> None:
        self.layer: int | None = None
        self._weights, self._functions, self._taps = weights, functions, taps

    def logits(self, ids_T: Ints, past: Sequence[KeysAndValues]) -> tuple[Floats, list[KeysAndValues]]:
        """Run tokens.

        Args:
            ids_T: Token ids (T,), which follow those in the KV cache.
            past: The KV cache: keys and values (S, K, H) for each layer.

        Returns:
            Logits (T, V), and the KV cache including the new tokens.
        """
        hidden_TD, kept = self.hidden(ids_T, past)
        return self._functions["head"](hidden_TD, self._weights.head), kept

    def hidden(self, ids_T: Ints, past: Sequence[KeysAndValues]) -> tuple[Floats, list[KeysAndValues]]:
        """Run tokens without the LM head; return hidden states (T, D) after the final norm, and the new KV cache."""
        kept = list(past)
        layers = [partial(self._run_layer, idx, past, kept) for idx in range(self._weights.config.num_hidden_layers)]
        hidden_TD = self._functions["trunk"](
            ids_T, self.embed, layers, partial(self._norm, "model.norm.weight", "final_norm")
        )
        return hidden_TD, kept

    def read_stream(self, x_TD: Floats) -> Floats:
        """Apply the final norm and the LM head to the residual stream (T, D), and return logits (T, V)."""
        return self._functions["head"](self._norm("model.norm.weight", "final_norm", x_TD), self._weights.head)

    def empty(self) -> list[KeysAndValues]:
        """Return an empty KV cache."""
        config = self._weights.config
        none = np.zeros((0, config.num_key_value_heads, config.head_dim), np.float32)
        return [(none, none)] * config.num_hidden_layers

    def embed(self, ids_T: Ints) -> Floats:
        """Return the embeddings (T, D) of tokens, the start of a forward pass."""
        return self._tap("embed", self._functions["embed"](ids_T, self._weights.table))

    def _norm(self, key: str, name: str, x_TD: Floats) -> Floats:
        normalised = self._functions["rms_norm"](x_TD, self._weights[key], self._weights.config.rms_norm_eps)
        return self._tap(name, normalised)

    def _run_layer(self, idx: int, past: Sequence[KeysAndValues], kept: list[KeysAndValues], x_TD: Floats) -> Floats:
        self.layer = idx
        prefix = f"model.layers.{idx}."
        try:
            out_TD = self._functions["layer"](
                x_TD,
                partial(self._norm, f"{prefix}input_layernorm.weight", "attn_norm"),
                partial(self._attention, idx, past, kept),
                partial(self._second_norm, f"{prefix}post_attention_layernorm.weight"),
                partial(self._mlp, f"{prefix}mlp."),
            )
            return self._tap("resid", out_TD)
        finally:
            self.layer = None

    def _second_norm(self, key: str, x_TD: Floats) -> Floats:
        self._tap("resid_mid", x_TD)
        return self._norm(key, "mlp_norm", x_TD)

    def _attention(self, idx: int, past: Sequence[KeysAndValues], kept: list[KeysAndValues], x_TD: Floats) -> Floats:
        """Run attention over `past` and write the new KV cache to `kept`; repeated calls have the same result."""
        config, prefix = self._weights.config, f"model.layers.{idx}.self_attn."
        weights = [self._weights[f"{prefix}{name}_proj.weight"] for name in "qkv"]

        def project(x_TD: Floats) -> Any:
            heads = self._functions["project"](x_TD, *weights, config.num_attention_heads, config.num_key_value_heads)
            return self._tap_all(("q", "k", "v"), heads)

        def rotate(q_TNH: Floats, k_TKH: Floats, v_TKH: Floats, positions_T: Ints) -> Any:
            return self._tap_all(
                ("q_rot",), self._functions["rotate"](q_TNH, k_TKH, v_TKH, positions_T, config.rope_theta)
            )

        def join(heads_TNH: Floats) -> Floats:
            self._tap("head_out", heads_TNH)
            return self._functions["join"](heads_TNH, self._weights[f"{prefix}o_proj.weight"])

        attend = self._functions["attend"]
        out_TD, k_SKH, v_SKH = self._functions["attend_cached"](x_TD, *past[idx], project, rotate, attend, join)
        kept[idx] = k_SKH, v_SKH
        return self._tap("attn_out", out_TD)

    def _mlp(self, prefix: str, x_TD: Floats) -> Floats:
        gate, up, down = (self._weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        halves = {(name, self.layer) for name in ("gate", "up", "act", "gated")}
        if self._taps is not None and halves & self._taps.keys:  # swiglu only returns its result
            gate_TF, up_TF = x_TD @ gate.T, x_TD @ up.T
            act_TF = gate_TF / (1 + np.exp(-gate_TF))
            self._tap_all(("gate", "up", "act", "gated"), (gate_TF, up_TF, act_TF, act_TF * up_TF))
        return self._tap("mlp_out", self._functions["swiglu"](x_TD, gate, up, down))

    def _tap_all(self, names: Sequence[str], values: Any) -> Any:
        for name, value in zip(names, values, strict=False):
            self._tap(name, value)
        return values

    def _tap(self, name: str, value: Any) -> Any:
        if self._taps is not None:
            self._taps.put((name, None if name in ("embed", "final_norm") else self.layer), value)
        return value


Watch = Callable[[int | None, Function, tuple[Any, ...]], Any]


def watched(name: str, running: Callable[[], Pass], watch: Watch) -> dict[str, Function]:
    """Return the right functions, with calls of one of them replaced by `watch(layer, right, arguments)`.

    Args:
        name: Name of the watched step.
        running: Returns the running pass, for its layer.
        watch: Returns the results of a call.
    """

    def call(*args: Any) -> Any:
        return watch(running().layer, RIGHT[name], args)

    return {**RIGHT, name: call}
