"""A Llama by hand: five words, one layer, eight numbers a word, and every matrix between text and answer printed.

`I love dogs` becomes three ids, three rows of a table of five words, (3, 8), and a batch of one text, (1, 3, 8). Then
one layer: norms, queries, keys, values, rotation, scores, mask, softmax, the heads' outputs, the MLP; and the logits of
the next word. All is numpy; a test holds each matrix equal to what the library's modules compute from the same weights.
The weights are drawn at random and rounded to two places, so the answer means nothing, but each number can be checked.

    python examples/five_words.py
    python examples/five_words.py you love cats
"""

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

WORDS = ("I", "you", "love", "dogs", "cats")
HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, MLP = 8, 2, 1, 4, 12  # both query heads share one key-value head
THETA, EPS = 10000.0, 1e-5
LONGEST = 8  # words of a text


def make_weights(seed: int = 0) -> dict[str, Matrix]:
    """Draw the weights, by the names that a checkpoint gives them; a Linear's is (outputs, inputs)."""
    queries, keys = HEADS * HEAD_DIM, KEY_VALUE_HEADS * HEAD_DIM
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (len(WORDS), HIDDEN),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (queries, HIDDEN),
        layer + "self_attn.k_proj.weight": (keys, HIDDEN),
        layer + "self_attn.v_proj.weight": (keys, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, queries),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate_proj.weight": (MLP, HIDDEN),
        layer + "mlp.up_proj.weight": (MLP, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, MLP),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (len(WORDS), HIDDEN),
    }
    generator = np.random.default_rng(seed)
    drawn = {name: generator.normal(1.0 if len(shape) == 1 else 0.0, 0.4, shape) for name, shape in shapes.items()}
    return {name: values.round(2).astype(np.float32) for name, values in drawn.items()}


# --- the pieces -------------------------------------------------------------------------------------------------------


def rms_norm(x_TD: Matrix, weight_D: Matrix) -> Matrix:
    """Divide each row by the root of its mean square, and multiply each column by its weight."""
    return x_TD / np.sqrt((x_TD**2).mean(axis=-1, keepdims=True) + EPS) * weight_D


def split_heads(x_TE: Matrix) -> Matrix:
    """Cut each row into heads: (T, heads * H) becomes (heads, T, H)."""
    return x_TE.reshape(len(x_TE), -1, HEAD_DIM).swapaxes(0, 1)


def rotate(x_NTH: Matrix) -> Matrix:
    """Turn the pair (i, i + H/2) of position p by the angle p * theta^(-2i/H)."""
    half = HEAD_DIM // 2
    angles_TI = np.arange(x_NTH.shape[1])[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles_TI).astype(np.float32), np.sin(angles_TI).astype(np.float32)
    first, second = x_NTH[..., :half], x_NTH[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: Matrix) -> Matrix:
    """Make each row positive with the sum 1; what is -inf becomes 0."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def silu(x: Matrix) -> Matrix:
    """Return x times its sigmoid."""
    return x / (1 + np.exp(-x))


# --- the pass ---------------------------------------------------------------------------------------------------------


def run(ids: Sequence[int], weights: dict[str, Matrix]) -> dict[str, Matrix]:
    """Return every matrix of the pass, in order; T words, N heads, and the sizes above."""
    x_TD = weights["model.embed_tokens.weight"][list(ids)]
    found = {"rows": x_TD, "batch": x_TD[None]}
    layer = {name.split(".", 3)[3]: value for name, value in weights.items() if ".layers." in name}
    x_TD = attention(x_TD, layer, found)
    x_TD = mlp(x_TD, layer, found)
    found["final norm"] = rms_norm(x_TD, weights["model.norm.weight"])
    found["logits"] = found["final norm"] @ weights["lm_head.weight"].T
    found["probabilities"] = softmax(found["logits"])
    return found


def attention(x_TD: Matrix, layer: dict[str, Matrix], found: dict[str, Matrix]) -> Matrix:
    """Let each word look at those before it and at itself; return the rows with what they took added."""
    normed_TD = found["norm before attention"] = rms_norm(x_TD, layer["input_layernorm.weight"])
    for name in "qkv":
        found[name] = split_heads(normed_TD @ layer[f"self_attn.{name}_proj.weight"].T)
    found["q rotated"], found["k rotated"] = rotate(found["q"]), rotate(found["k"])
    k_NTH, v_NTH = (x.repeat(HEADS // KEY_VALUE_HEADS, axis=0) for x in (found["k rotated"], found["v"]))
    found["scores"] = found["q rotated"] @ k_NTH.swapaxes(1, 2) / np.float32(HEAD_DIM**0.5)
    later_TT = np.triu(np.ones((len(x_TD), len(x_TD)), bool), 1)
    found["scores with the mask"] = np.where(later_TT, np.float32(-np.inf), found["scores"])
    found["attention"] = softmax(found["scores with the mask"])
    found["head outputs"] = found["attention"] @ v_NTH
    found["heads joined"] = found["head outputs"].swapaxes(0, 1).reshape(len(x_TD), -1)
    found["attention's output"] = found["heads joined"] @ layer["self_attn.o_proj.weight"].T
    found["after attention"] = x_TD + found["attention's output"]
    return found["after attention"]


def mlp(x_TD: Matrix, layer: dict[str, Matrix], found: dict[str, Matrix]) -> Matrix:
    """Transform each word's row by itself; return the rows with the result added."""
    normed_TD = found["norm before the MLP"] = rms_norm(x_TD, layer["post_attention_layernorm.weight"])
    found["gate"] = normed_TD @ layer["mlp.gate_proj.weight"].T
    found["up"] = normed_TD @ layer["mlp.up_proj.weight"].T
    found["SiLU(gate) * up"] = silu(found["gate"]) * found["up"]
    found["MLP's output"] = found["SiLU(gate) * up"] @ layer["mlp.down_proj.weight"].T
    found["after the MLP"] = x_TD + found["MLP's output"]
    return found["after the MLP"]


# --- the print --------------------------------------------------------------------------------------------------------

ABOUT = {
    "rows": "the table's row of each word",
    "batch": "the same for a batch of one text; below, the batch is left out",
    "norm before attention": "each row by its root mean square",
    "q": "queries: what each word looks for, cut into two heads",
    "k": "keys: what each offers; both query heads share one",
    "v": "values: what each word gives to those that look at it",
    "q rotated": "each pair (i, i + 2), by position * angle",
    "k rotated": "keys too; values are not",
    "scores": "q . k / sqrt(4), of each word (a row) with each (a column)",
    "scores with the mask": "a word must not see those after it",
    "attention": "softmax: each row sums to 1",
    "head outputs": "the values, weighted by the attention",
    "heads joined": "side by side again",
    "attention's output": "times o_proj",
    "after attention": "added to the rows: the residual stream",
    "norm before the MLP": "as above, with weights of its own",
    "gate": "8 numbers become 12",
    "up": "and 12 others",
    "SiLU(gate) * up": "SwiGLU: one opens or shuts the other",
    "MLP's output": "12 become 8 again, by down_proj",
    "after the MLP": "added to the stream; a larger Llama repeats the layer",
    "final norm": "the last norm, each row by itself",
    "logits": "times the head: a number for each word of the vocabulary",
    "probabilities": "softmax: the guesses for the word after each",
}


def show(name: str, matrix: Matrix, words: Sequence[str]) -> None:
    """Print a matrix of two or three dimensions, a word a row, at most 80 columns wide."""
    print(f"\n{name}, {tuple(matrix.shape)}: {ABOUT[name]}")
    columns = {"scores": words, "scores with the mask": words, "attention": words}.get(name, ())
    columns = WORDS if name in ("logits", "probabilities") else columns
    if columns:
        print(" " * 6 + "".join(f"{word:>6}" for word in columns))
    blocks = matrix[None] if matrix.ndim == 2 else matrix
    for number, block in enumerate(blocks):
        if len(blocks) > 1:
            print(f"  head {number}")
        for word, row in zip(words, block, strict=True):
            print(f"{word:<6}" + "".join(f"{value:>6.2f}" for value in row))


def main() -> None:
    """Print the pass of a text of the five words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"of {', '.join(WORDS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    args = parser.parse_args()
    words = args.words or ["I", "love", "dogs"]
    if unknown := [word for word in words if word not in WORDS]:
        parser.error(f"{unknown[0]!r} is not in the vocabulary: {', '.join(WORDS)}")
    if len(words) > LONGEST:
        parser.error(f"{len(words)} words; expected at most {LONGEST}, whose scores fit in 80 columns")
    ids, weights = [WORDS.index(word) for word in words], make_weights(args.seed)
    table = weights["model.embed_tokens.weight"]
    print(f"the table of {len(WORDS)} words, {table.shape}, a row each; its line is the word's id")
    for i, (word, row) in enumerate(zip(WORDS, table, strict=True)):
        print(f"{i} {word:<4}" + "".join(f"{value:>6.2f}" for value in row))
    print(f"\n{' '.join(words)!r}: the ids {ids}")
    found = run(ids, weights)
    for name, matrix in found.items():
        show(name, matrix, words)
    best = WORDS[int(found["probabilities"][-1].argmax())]
    print(f"\nAfter {words[-1]!r} this Llama, which has learned nothing, would write {best!r}.")


if __name__ == "__main__":
    main()
