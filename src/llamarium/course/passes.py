"""A pass that is made of the steps' functions, over a real model's weights. Never torch.

Any of the functions can be a learner's; the others are the right ones. `check.py` puts one of them in and looks at
every call; `worker.py` runs a whole model of them.
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
    """A model's weights as float32, each read by its key at its first use.

    OptionError if the model has what no step does.
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
        """Unpack anew what is asked for from here on, as something has written to the arrays."""
        self._found.clear()

    @property
    def table(self) -> Floats:
        """The embedding table, (V, D)."""
        return self[EMBEDDING]

    @property
    def head(self) -> Floats:
        """The head's table, (V, D): the embedding's where it is tied."""
        return self.table if self.config.tie_word_embeddings else self[HEAD]


class Pass:
    """Runs tokens through a model that is made of functions.

    Args:
        weights: The model.
        functions: The functions by the names of their steps.
        taps: What is to be handed out on the way; see `runtime/taps.py`.

    Attributes:
        layer: Which layer is running; None outside of them.
    """

    def __init__(self, weights: Weights, functions: Mapping[str, Function] = RIGHT, taps: Taps | None = None) -> None:
        self.layer: int | None = None
        self._weights, self._functions, self._taps = weights, functions, taps

    def logits(self, ids_T: Ints, past: Sequence[KeysAndValues]) -> tuple[Floats, list[KeysAndValues]]:
        """Run tokens that follow those whose keys and values are given, one pair a layer; return logits (T, V) too."""
        hidden_TD, kept = self.hidden(ids_T, past)
        return self._functions["head"](hidden_TD, self._weights.head), kept

    def hidden(self, ids_T: Ints, past: Sequence[KeysAndValues]) -> tuple[Floats, list[KeysAndValues]]:
        """Run tokens without the head: (T, D)."""
        kept = list(past)
        layers = [partial(self._run_layer, idx, past, kept) for idx in range(self._weights.config.num_hidden_layers)]
        hidden_TD = self._functions["trunk"](
            ids_T, self.embed, layers, partial(self._norm, "model.norm.weight", "final_norm")
        )
        return hidden_TD, kept

    def read_stream(self, x_TD: Floats) -> Floats:
        """Return what the last norm and the head make of rows of the residual stream: (T, D) to logits (T, V)."""
        return self._functions["head"](self._norm("model.norm.weight", "final_norm", x_TD), self._weights.head)

    def empty(self) -> list[KeysAndValues]:
        """Return the keys and values of no tokens."""
        config = self._weights.config
        none = np.zeros((0, config.num_key_value_heads, config.head_dim), np.float32)
        return [(none, none)] * config.num_hidden_layers

    def embed(self, ids_T: Ints) -> Floats:
        """Run the begin of a pass alone: (T, D)."""
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
        """Attend over what was kept; the same however often it is called."""
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
        if self._taps is not None and halves & self._taps.keys:  # a swiglu hands out its result alone
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
    """Return the right functions, one of them watched: each call goes through `watch(layer, right, arguments)`."""

    def call(*args: Any) -> Any:
        return watch(running().layer, RIGHT[name], args)

    return {**RIGHT, name: call}
