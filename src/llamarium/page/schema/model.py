"""The model, or a published shape."""

from typing import Literal

from llamarium.page.schema.base import View

PublishedShape = Literal["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"]
"""Shapes that can be looked at without a model."""


class ModuleNode(View):
    """A module of the model.

    Attributes:
        name: Its name in its parent, as in `q_proj`.
        path: Its whole name, as in `model.layers.0.self_attn.q_proj`.
        shape: Of its weight; empty where it has none of its own.
        parameters: Of it and all that it holds; a tied head has none.
        num_bytes: That they occupy; 2 a parameter where nothing was loaded.
        type: What its weight is in memory, as in BF16 or Q4_1; None where it has none.
        tied_to: The weight that is its own too.
        flops: Of its products for one token, of it and all that it holds; a multiply and an add are two.
    """

    name: str
    path: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    num_bytes: int
    type: str | None
    tied_to: str | None
    flops: int
    children: tuple["ModuleNode", ...]


class Sizes(View):
    """Sizes: D hidden, N query heads, K key-value heads, H a head, F intermediate, V vocabulary, L layers."""

    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    L: int


class ModelView(View):
    """A model, or a shape.

    Attributes:
        runner: Display name of the backend; None for a shape.
        input_bits: Of the inputs of packed weights; None where inputs are not rounded.
        context: Tokens that it was made for.
        window: How many tokens each sees, the last one itself; None where it sees all before it.
        tied: Whether the head's weight is the embedding table.
        attention_flops_per_position: Of one token, for each earlier one that it sees.
        kv_bytes_per_token: What its key and value occupy in the cache.
        adds_bos: Whether its tokenizer puts a token before every text; None for a shape.
        adapters: Names that a pass may choose.
        loaded_with: Arguments of `llamarium.load` besides the name, as the server was started with.
        has_lesson: Whether the server was started with a lesson; never of a shape.
    """

    name: str
    runner: str | None
    dtype: str | None
    input_bits: int | None
    shape: Sizes
    context: int
    window: int | None
    rms_norm_eps: float
    rope_scaling: dict[str, float | str | bool] | None
    tied: bool
    tree: ModuleNode
    attention_flops_per_position: int
    kv_bytes_per_token: int
    num_bytes: int
    adds_bos: bool | None
    adapters: tuple[str, ...]
    loaded_with: dict[str, str | int | bool]
    has_lesson: bool = False


class SourceView(View):
    """The lines that are executed, as they are installed.

    Attributes:
        file: Path within the package.
        line: Number of the first.
    """

    name: str
    file: str
    line: int
    text: str
