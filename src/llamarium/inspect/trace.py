"""The glass box: one pass of the real model, with what it computed on the way.

`trace` runs the model that answers requests, not a copy of its arithmetic. It watches from two places: hooks on the
modules (what goes in, what comes out) and a `RecordingAttend` at the seam where queries meet keys. The hooks sit on a
shell of the model, which shares every weight and owns nothing but its hook tables; so a request that runs on the same
weights at the same moment is neither slowed nor recorded, and two traces cannot mix.

`ACTIVATIONS` names everything that can be seen. A trace of everything is large (the pattern alone is N·T·T numbers a
layer), so what was asked for is weighed from the config before anything runs, and refused if it exceeds its budget.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from llamarium.attention import CausalAttend, Context, RecordingAttend, attend_eagerly
from llamarium.errors import InputError, MemoryBudgetError
from llamarium.inspect.tokens import as_row
from llamarium.model import LlamaForCausalLM

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Activation:
    """Something that can be seen.

    Attributes:
        axes: One letter an axis: T the positions asked for, S all tokens, and the project's D N K H F V.
        description: What it is.
        module: The module that it is read from; within a layer relative to the layer, "" being the layer itself.
        side: What goes into that module, what comes out, or what its `attend` saw.
        in_layer: There is one for each layer.
    """

    axes: str
    description: str
    module: str
    side: Literal["in", "out", "attend"] = "out"
    in_layer: bool = True

    @property
    def is_float32(self) -> bool:
        """Attention is written out in float32; all else is in the model's own dtype."""
        return self.axes == "NTS"


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "embed": Activation("TD", "rows of the embedding table", "model.embed_tokens", in_layer=False),
        "attn_norm": Activation("TD", "residual stream, normalised for attention", "input_layernorm"),
        "q": Activation("TNH", "queries, before rotation", "self_attn.q_proj"),
        "k": Activation("SKH", "keys, before rotation", "self_attn.k_proj"),
        "v": Activation("SKH", "values", "self_attn.v_proj"),
        "q_rot": Activation("TNH", "queries, rotated by their positions", "self_attn", "attend"),
        "k_rot": Activation("SKH", "keys, rotated by their positions", "self_attn", "attend"),
        "scores": Activation("NTS", "q·k / sqrt(H); -inf where a query may not look", "self_attn", "attend"),
        "pattern": Activation("NTS", "softmax of the scores: who looks at whom", "self_attn", "attend"),
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


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Mapping[str, Tensor]):
    """Activations by key, in the order of computation: "embed", "layers.0.attn_norm", ..., "logits".

    Attributes:
        token_ids: The ids that were run; their number is S.
        positions: The tokens that the T axes hold, in this order.
        activations: The tensors, on the model's device; shapes as `ACTIVATIONS` says.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    activations: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        """Return one tensor; KeyError as for a dict."""
        return self.activations[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.activations)

    def __len__(self) -> int:
        return len(self.activations)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of which there is something."""
        return tuple(sorted({layer for _, layer in map(split_key, self) if layer is not None}))

    def select(
        self,
        *,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> "Trace":
        """Return the part that `trace` would have returned for these arguments.

        Raises:
            InputError: For an unknown name, or a layer or position that this trace does not hold.
        """
        wanted = set(_check_names(names))
        kept_layers = _among(layers, self.layers, "layers")
        kept_positions = _among(positions, self.positions, "positions")
        rows = None if positions is None else [self.positions.index(p) for p in kept_positions]
        part: dict[str, Tensor] = {}
        for key, tensor in self.items():
            name, layer = split_key(key)
            if name in wanted and (layer is None or layer in kept_layers):
                axis = ACTIVATIONS[name].axes.find("T")
                part[key] = tensor if rows is None or axis < 0 else _take(tensor, axis, rows)
        return Trace(self.token_ids, kept_positions, part)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; what is not finite (the -inf of `scores`) becomes None."""
        return {
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "activations": {
                key: {
                    "axes": list(ACTIVATIONS[split_key(key)[0]].axes),
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "values": _finite(tensor.tolist()),  # sync: to show
                }
                for key, tensor in self.items()
            },
        }


def trace(
    model: LlamaForCausalLM,
    ids: Sequence[int] | Tensor,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    positions: Sequence[int] | None = None,
    budget_mb: float = 1024,
) -> Trace:
    """Run one text through the model and keep what it computed.

    Args:
        model: The model, on any device, its Linears of any kind.
        ids: The token ids of one text, BOS included if the model expects one.
        names: Of `ACTIVATIONS`; all where left out.
        layers: Whose activations are kept; negative ones count from the last. All where left out.
        positions: The tokens whose activations are kept (as queries, where attention is meant); negative ones count
            from the last. All where left out, and then `logits` are those of `model(ids)` to the bit. A selection runs
            through the head alone, in a smaller matmul that may round the last bit otherwise.
        budget_mb: What the trace may hold, in megabytes of 10^6 bytes.

    Raises:
        InputError: For ids, names, layers or positions that there are not.
        ContextLengthError: If there are more ids than the context holds.
        MemoryBudgetError: If more than the budget is needed. Nothing has been run then.
    """
    ids_1T = as_row(model, ids)
    plan = _Plan.of(model, ids_1T.shape[1], names, layers, positions)
    plan.check_budget(budget_mb)
    recorder = _Recorder(plan, model.config.head_dim)
    shell = _shell(model)
    recorder.watch(shell)
    attend = RecordingAttend(CausalAttend(), recorder.record) if plan.has_side("attend") else CausalAttend()
    positions_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device).unsqueeze(0)
    with torch.no_grad():
        hidden_BTD = shell.model(ids_1T, positions_1T, attend)
        if "logits" in plan.keys:
            shell.logits(plan.rows_of(hidden_BTD, axis=1))
    kept = {key: recorder.kept[key] for key in plan.keys}
    return Trace(tuple(ids_1T[0].tolist()), plan.positions, kept)  # sync: the ids, once


def make_key(name: str, layer: int | None) -> str:
    """Return the key of an activation in a trace: "q" of layer 3 is "layers.3.q"."""
    return name if layer is None else f"layers.{layer}.{name}"


def split_key(key: str) -> tuple[str, int | None]:
    """Return the name and the layer of a key: "layers.3.q" is ("q", 3), "embed" is ("embed", None)."""
    if not key.startswith("layers."):
        return key, None
    _, layer, name = key.split(".")
    return name, int(layer)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is kept, decided and weighed before the run.

    Attributes:
        keys: The trace's keys, in the order of computation.
        positions: The tokens on the T axes.
        takes_all: They are all tokens, in order.
        sizes: The length of each axis by its letter.
        itemsize: Bytes of a number in the model's dtype.
    """

    keys: tuple[str, ...]
    positions: tuple[int, ...]
    takes_all: bool
    sizes: Mapping[str, int]
    itemsize: int

    @classmethod
    def of(
        cls,
        model: LlamaForCausalLM,
        num_tokens: int,
        names: Collection[str] | None,
        layers: Collection[int] | None,
        positions: Sequence[int] | None,
    ) -> "_Plan":
        c = model.config
        wanted = _check_names(names)
        kept = _indices(positions, num_tokens, "positions")
        sizes = {
            "T": len(kept), "S": num_tokens, "D": c.hidden_size, "N": c.num_attention_heads,
            "K": c.num_key_value_heads, "H": c.head_dim, "F": c.intermediate_size, "V": c.vocab_size,
        }  # fmt: skip
        keys = _keys(wanted, sorted(_indices(layers, c.num_hidden_layers, "layers")))
        return cls(keys, kept, kept == tuple(range(num_tokens)), sizes, model.dtype.itemsize)

    def has_side(self, side: str) -> bool:
        return any(ACTIVATIONS[split_key(key)[0]].side == side for key in self.keys)

    def wants(self, name: str, layer: int) -> bool:
        return make_key(name, layer) in self.keys

    def rows_of(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the positions asked for."""
        return tensor if self.takes_all else _take(tensor, axis, self.positions)

    def num_bytes(self, key: str) -> int:
        activation = ACTIVATIONS[split_key(key)[0]]
        return math.prod(self.sizes[a] for a in activation.axes) * (4 if activation.is_float32 else self.itemsize)

    def working_bytes(self) -> int:
        """What watching one layer's attention takes beside what is kept: its mask, and `attend_eagerly`."""
        if not self.has_side("attend"):
            return 0
        s = self.sizes
        mask = 2 * s["S"] * s["S"]
        if not any(ACTIVATIONS[split_key(key)[0]].is_float32 for key in self.keys):
            return mask
        matrices = 2 * 4 * s["N"] * s["T"] * s["S"]
        keys_and_values = 2 * 4 * s["S"] * s["N"] * s["H"]
        return mask + matrices + keys_and_values

    def check_budget(self, budget_mb: float) -> None:
        by_name: dict[str, int] = {}
        for key in self.keys:
            name = split_key(key)[0]
            by_name[name] = by_name.get(name, 0) + self.num_bytes(key)
        needed = sum(by_name.values()) + self.working_bytes()
        if needed <= budget_mb * 1e6:
            return
        largest = sorted(by_name, key=lambda name: by_name[name], reverse=True)[:3]
        raise MemoryBudgetError(
            f"tracing {self.sizes['S']} tokens needs {needed / 1e6:,.1f} MB and the budget is {budget_mb:,.1f} MB; the "
            f"largest: {', '.join(f'{name} {by_name[name] / 1e6:,.1f} MB' for name in largest)}. "
            "Restrict names, layers or positions, or raise budget_mb"
        )


class _Recorder:
    """Keeps what the hooks and the attend object see, and only what the plan asks for."""

    def __init__(self, plan: _Plan, head_dim: int) -> None:
        self.plan = plan
        self.head_dim = head_dim
        self.kept: dict[str, Tensor] = {}

    def watch(self, shell: LlamaForCausalLM) -> None:
        """Hook every module that the plan reads from."""
        for key in self.plan.keys:
            name, layer = split_key(key)
            root = shell if layer is None else shell.model.layers[layer]
            if ACTIVATIONS[name].side != "attend":
                self._hook(root.get_submodule(ACTIVATIONS[name].module), key)

    def _hook(self, module: nn.Module, key: str) -> None:
        activation = ACTIVATIONS[split_key(key)[0]]

        def see(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen = (args[0] if activation.side == "in" else output)[0]  # the batch is one row
            if len(activation.axes) > seen.ndim:
                seen = seen.unflatten(-1, (-1, self.head_dim))
            # The head is given the positions asked for, and no others.
            has_all = activation.axes[0] == "T" and key != "logits"
            self.kept[key] = self.plan.rows_of(seen, axis=0) if has_all else seen

        module.register_forward_hook(see)

    def record(self, layer_idx: int, q_BTNH: Tensor, context: Context) -> None:
        """Keep what one layer's attention saw."""
        q_BTNH = self.plan.rows_of(q_BTNH, axis=1)
        self._keep("q_rot", layer_idx, q_BTNH[0])
        self._keep("k_rot", layer_idx, context.k_BSKH[0])
        if self.plan.wants("scores", layer_idx) or self.plan.wants("pattern", layer_idx):
            visible_BTS = self.plan.rows_of(context.visible_BTS, axis=1)
            seen = attend_eagerly(q_BTNH, context._replace(visible_BTS=visible_BTS))
            self._keep("scores", layer_idx, seen.scores_BNTS[0])
            self._keep("pattern", layer_idx, seen.pattern_BNTS[0])

    def _keep(self, name: str, layer: int, tensor: Tensor) -> None:
        if self.plan.wants(name, layer):
            self.kept[make_key(name, layer)] = tensor


def _shell(module: ModuleT) -> ModuleT:
    """Return a module tree that shares every parameter and buffer with `module`, but not its hook tables.

    Hooks that a caller has put on the model run in a trace too: they are part of what the model computes.
    """
    shell = copy.copy(module)
    own = shell.__dict__
    own["_modules"] = {name: None if child is None else _shell(child) for name, child in own["_modules"].items()}
    own["_forward_hooks"] = own["_forward_hooks"].copy()
    return shell


def _keys(names: Sequence[str], layers: Sequence[int]) -> tuple[str, ...]:
    """Every key, in the order of computation."""
    outer = [name for name in names if not ACTIVATIONS[name].in_layer]
    inner = [make_key(name, layer) for layer in layers for name in names if ACTIVATIONS[name].in_layer]
    first = [name for name in outer if name == "embed"]
    return (*first, *inner, *outer[len(first) :])


def _check_names(names: Collection[str] | None) -> list[str]:
    """Return the names asked for, in the order of computation."""
    wanted = set(ACTIVATIONS) if names is None else {names} if isinstance(names, str) else set(names)
    unknown = sorted(map(str, wanted - set(ACTIVATIONS)))
    if unknown or not wanted:
        found = f"unknown activations {', '.join(unknown)}" if unknown else "no activation was named"
        raise InputError(f"{found}; there are: {', '.join(ACTIVATIONS)}")
    return [name for name in ACTIVATIONS if name in wanted]


def _indices(wanted: Collection[int] | None, size: int, what: str) -> tuple[int, ...]:
    """Return the indices asked for, each once, in the order given, negative ones counted from the end."""
    if wanted is None:
        return tuple(range(size))
    if not wanted or any(not -size <= i < size for i in wanted):
        raise InputError(f"{what} are {list(wanted)}; expected some within {-size}..{size - 1}")
    return tuple(dict.fromkeys(i % size for i in wanted))


def _among(wanted: Collection[int] | None, held: tuple[int, ...], what: str) -> tuple[int, ...]:
    if wanted is None:
        return held
    if not set(wanted) <= set(held):
        raise InputError(f"{what} are {list(wanted)}; this trace holds {list(held)}")
    return tuple(dict.fromkeys(wanted))


def _take(tensor: Tensor, axis: int, rows: Sequence[int]) -> Tensor:
    return tensor.index_select(axis, torch.tensor(rows, device=tensor.device))


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None
