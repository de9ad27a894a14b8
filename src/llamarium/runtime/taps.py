"""Taps: activations that a forward pass returns. Torch-free.

A tapped pass is the same pass, with the same bits, as one without taps. Attention scores and weights are not tapped,
because they follow from the queries and the cached keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig

Key = tuple[str, int | None]
"""An activation's name and layer; the layer is None for activations outside the layers."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A kind of activation.

    Attributes:
        axes: One letter per axis: T requested positions, S all tokens, and the project's D N K H F V.
        description: Description for users.
        module: Path of the module that it is read from; relative to the layer if `in_layer`, "" for the layer itself.
        side: The module's input, its output, or what its `attend` computes.
        in_layer: Whether each layer has one.
    """

    axes: str
    description: str
    module: str
    side: Literal["in", "out", "attend"] = "out"
    in_layer: bool = True


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "embed": Activation("TD", "rows of the embedding table", "model.embed_tokens", in_layer=False),
        "attn_norm": Activation("TD", "residual stream, normalised for attention", "input_layernorm"),
        "q": Activation("TNH", "queries, before rotation", "self_attn.q_proj"),
        "k": Activation("SKH", "keys, before rotation", "self_attn.k_proj"),
        "v": Activation("SKH", "values", "self_attn.v_proj"),
        "q_rot": Activation("TNH", "queries, rotated by their positions", "self_attn", "attend"),
        "k_rot": Activation("SKH", "keys, rotated by their positions, as the cache keeps them", "self_attn", "attend"),
        "scores": Activation("NTS", "q·k / sqrt(H); -inf where a query may not look", "self_attn", "attend"),
        "pattern": Activation("NTS", "softmax of the scores: what each query reads", "self_attn", "attend"),
        "head_out": Activation("TNH", "what each head gathered", "self_attn.o_proj", "in"),
        "attn_out": Activation("TD", "what attention adds to the stream", "self_attn"),
        "resid_mid": Activation("TD", "residual stream after attention", "post_attention_layernorm", "in"),
        "mlp_norm": Activation("TD", "residual stream, normalised for the MLP", "post_attention_layernorm"),
        "gate": Activation("TF", "gate projection", "mlp.act_fn", "in"),
        "up": Activation("TF", "up projection", "mlp.up_proj"),
        "act": Activation("TF", "silu(gate)", "mlp.act_fn"),
        "gated": Activation("TF", "silu(gate) · up", "mlp.down_proj", "in"),
        "mlp_out": Activation("TD", "what the MLP adds to the stream", "mlp"),
        "resid": Activation("TD", "residual stream after the layer", ""),
        "final_norm": Activation("TD", "residual stream, normalised for the head", "model.norm", in_layer=False),
        "logits": Activation("TV", "a score for each token to come next", "lm_head", in_layer=False),
    }
)
"""Every activation by its public name, in the order of computation."""


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the length of each axis by its letter, except the token axes T and S."""
    return {
        "D": config.hidden_size, "N": config.num_attention_heads, "K": config.num_key_value_heads,
        "H": config.head_dim, "F": config.intermediate_size, "V": config.vocab_size,
    }  # fmt: skip


def sizes_of(name: str, config: ModelConfig) -> list[int]:
    """Return the sizes of an activation's axes, without the first, the token axis."""
    sizes = axis_sizes(config)
    return [sizes[axis] for axis in ACTIVATIONS[name].axes[1:]]


FROM_CACHE = ("k_rot", "scores", "pattern")
"""Activations that are computed from the queries and the KV cache instead of being tapped."""


class Taps:
    """The activations requested of a pass, and their values.

    Args:
        keys: The activations, neither logits nor those in `FROM_CACHE`.

    Attributes:
        keys: The same, as a set.
        kept: By key, one float32 array (M, ...) for each part in which the batch was run.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self.keys = frozenset(keys)
        self.kept: dict[Key, list[NDArray[np.float32]]] = {key: [] for key in self.keys}

    def put(self, key: Key, value: NDArray[np.float32]) -> None:
        """Store an activation if it was requested."""
        if key in self.keys:
            self.kept[key].append(value)
