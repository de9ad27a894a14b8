"""The trunk and the head."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Floats, Ints, floats, softmax

OnRows = Callable[[Floats], Floats]


def trunk(ids_T: Ints, embed: Callable[[Ints], Floats], layers: Sequence[OnRows], norm: OnRows) -> Floats:
    """Run the model without its head: rows of the table, all layers, the last norm.

    Args:
        ids_T: Token ids, (T,).
        embed: embed(ids) -> (T, D).
        layers: The layers in order; each takes and returns the stream, (T, D).
        norm: The norm after the last layer.

    Returns:
        (T, D).
    """
    x_TD = embed(ids_T)
    for layer in layers:
        x_TD = layer(x_TD)
    return norm(x_TD)


def head(x_TD: Floats, table_VD: Floats) -> Floats:
    """Give each token of the vocabulary a logit: the product with its row of the embedding table (a tied head).

    Args:
        x_TD: What the trunk returns, (T, D).
        table_VD: The embedding table, (V, D).

    Returns:
        Logits, (T, V).
    """
    return x_TD @ table_VD.T


def _through(x: Floats, layers: Sequence[OnRows]) -> Floats:
    return reduce(lambda stream, layer: layer(stream), layers, x)


def _scaled(x: Floats) -> Floats:
    return x * np.sqrt(np.float32(x.shape[-1]))


def _of_length_1(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _trunk_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    def layer(matrix: Floats, x: Floats) -> Floats:
        return x + np.tanh(x @ matrix)

    def norm(gamma: Floats, x: Floats) -> Floats:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True)) * gamma

    for tokens, width, num_layers in ((4, 6, 3), (3, 8, 2), (2, 5, 4)):
        table = floats(rng, 9, width)
        layers = [partial(layer, floats(rng, width, width)) for _ in range(num_layers)]
        last = partial(norm, floats(rng, width) + 2)
        yield rng.integers(0, 9, tokens), lambda ids, table=table: table[ids], layers, last


def _head_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for tokens, width, words in ((4, 8, 8), (3, 6, 11), (1, 12, 5)):
        yield floats(rng, tokens, width), floats(rng, words, width)


STEPS = (
    Step(
        trunk,
        "The trunk",
        "All layers, one after the other, on one stream that begins as rows of the table and ends with a norm.",
        "4-what-a-layer-does#Everything is added to one stream",
        "residual",
        ("x TD",),
        ("A loop over the layers: each takes the stream and returns it.", "embed, then the loop, then the norm."),
        _trunk_cases,
        (
            Mistake("The last norm is left out.", lambda ids, embed, layers, norm: _through(embed(ids), layers)),
            Mistake("The rows of the table are multiplied by the root of D, as Gemma does; Llama takes them as they "
                    "are.",
                    lambda ids, embed, layers, norm: norm(_through(_scaled(embed(ids)), layers))),
            Mistake("The norm runs after every layer; it runs once, after the last.",
                    lambda ids, embed, layers, norm: reduce(lambda x, layer: norm(layer(x)), layers, embed(ids))),
            Mistake("The norm runs after every layer, and once more at the end; it runs once, after the last.",
                    lambda ids, embed, layers, norm: norm(reduce(lambda x, layer: norm(layer(x)), layers, embed(ids)))),
            Mistake("The last norm runs twice.",
                    lambda ids, embed, layers, norm: norm(norm(_through(embed(ids), layers)))),
            Mistake("The rows of the table are added again at the end; they are in the stream already.",
                    lambda ids, embed, layers, norm: norm((x := embed(ids)) + _through(x, layers))),
            Mistake("What the layers return is added up; each reads what the one before it returned.",
                    lambda ids, embed, layers, norm:
                        norm((x := embed(ids)) + sum((layer(x) for layer in layers), np.zeros_like(x)))),
            Mistake("No layer runs.", lambda ids, embed, layers, norm: norm(embed(ids))),
            Mistake("The layers run from the last to the first.",
                    lambda ids, embed, layers, norm: norm(_through(embed(ids), layers[::-1]))),
            Mistake("The last layer is left out.",
                    lambda ids, embed, layers, norm: norm(_through(embed(ids), layers[:-1]))),
            Mistake("The first layer is left out.",
                    lambda ids, embed, layers, norm: norm(_through(embed(ids), layers[1:]))),
            Mistake("Every layer reads the rows of the table; each reads what the one before it returned.",
                    lambda ids, embed, layers, norm: norm(layers[-1](embed(ids)))),
            Mistake("The rows of the table are normalised before the first layer; the norm comes after the last.",
                    lambda ids, embed, layers, norm: norm(_through(norm(embed(ids)), layers))),
            Mistake("What a layer returns is added to the stream, which it has done itself.",
                    lambda ids, embed, layers, norm: norm(reduce(lambda x, layer: x + layer(x), layers, embed(ids)))),
        ),
    ),
    Step(
        head,
        "The head, tied",
        "The table that turned ids into rows turns rows into logits: one product with every row of it.",
        "5-how-a-sentence-grows#From a vector to probabilities",
        "sampler",
        ("logits TV",),
        (
            "One product; there is no weight of its own.",
            "x @ table.T: row t, column w is the product of x[t] and the table's row w.",
        ),
        _head_cases,
        (
            Mistake("The table is transposed: a row of it stands for a token, and the product is x @ table.T.",
                    lambda x, table: x @ table),
            Mistake("Softmax is applied; logits are wanted, and the choice makes probabilities of them.",
                    lambda x, table: softmax(head(x, table))),
            Mistake("The logarithm of softmax is returned; logits are wanted.",
                    lambda x, table: np.log(softmax(head(x, table)))),
            Mistake("The rows are normalised again; the trunk has done that.",
                    lambda x, table: head(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), table)),
            Mistake("The logits are multiplied by the root of D.", lambda x, table: _scaled(x) @ table.T),
            Mistake("The logits are bounded by tanh (30 tanh(z / 30)), as Gemma 2 does; Llama does not.",
                    lambda x, table: 30 * np.tanh(head(x, table) / 30)),
            Mistake("The rows are divided by their lengths (a cosine); the plain product is wanted.",
                    lambda x, table: head(_of_length_1(x), _of_length_1(table))),
            Mistake("The logits are divided by the root of D; only attention's scores are divided.",
                    lambda x, table: head(x, table) / np.sqrt(np.float32(x.shape[-1]))),
            Mistake("Only the last token's logits are returned; each token gets its own.",
                    lambda x, table: head(x[-1:], table)),
        ),
    ),
)  # fmt: skip
