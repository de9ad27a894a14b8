"""Mistakes in learners' functions: what is changed in a right one of learner_styles.py, and what a check must say."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planted_mistakes_2 import FURTHER, SOURCES

PLANTED: tuple[tuple[str, str, str, str, str], ...] = (
    # step, style, what is replaced, by what, how the cause begins; "" for none
    ("merge", "best of a loop", "best is None or r < best", "best is None", "The first pair that has a rank"),
    ("merge", "best of a loop", "r < best", "r > best", "The pair with the highest rank is joined first;"),
    ("merge", "recursion", "min(ranks, key=ranks.get)", "max(reversed(ranks), key=ranks.get)",
     "The pair with the highest rank is joined first, the rightmost"),
    ("merge", "best of a loop", "r < best", "r <= best", "Of equal pairs the rightmost"),
    ("merge", "best of a loop", "    while len(parts) > 1:", "    for _ in range(1):", "Only one merge"),
    ("merge", "recursion", "return joined([", "return list([", "Nothing is merged"),
    ("merge", "best of a loop", "[bytes([b]) for b in piece]", "[c.encode() for c in piece.decode()]",
     "The piece is cut into characters"),
    ("embed", "take", "axis=0)", "axis=1).T", "Columns are taken"),
    ("embed", "rows", "table[int(i)]", "table[int(i) + 1]", "Ids count from 0"),
    ("embed", "one-hot", "one_hot @ table", "one_hot @ table * table.shape[1] ** 0.5", "The rows are scaled by"),
    ("embed", "loop", "= table[ids[t]]", "= table[ids[t]] / np.sqrt((table[ids[t]] ** 2).sum())",
     "The rows are divided by their length"),
    ("rms_norm", "double", "x = x.astype('float64')", "x = x - x.mean(1)[:, None]", "The mean is subtracted"),
    ("rms_norm", "numbers", "/ x.shape[1] + eps)", "/ x.shape[1]) + eps", "eps is added outside"),
    ("rms_norm", "norm", " + eps)", ")", "eps is left out"),
    ("rms_norm", "rows", "row * gamma", "row", "gamma is left out"),
    ("rms_norm", "rows", "row * gamma", "row * (1 + gamma)", "gamma counts from 0"),
    ("rms_norm", "double", " / x.shape[1]", "", "The squares are summed"),
    ("rms_norm", "double", "np.square(x).sum(-1)[:, None] / x.shape[1]", "np.square(x).sum(0) / x.shape[0]",
     "The mean is taken over the tokens"),
    ("rms_norm", "einsum", "np.einsum('td,td->t', x, x) / x.shape[-1]", "np.vdot(x, x) / x.size + np.zeros(len(x))",
     "The mean is taken over all numbers"),
    ("rms_norm", "einsum", "** -0.5", "** -1", "The root is missing"),
    ("project", "fused", "np.concatenate([w_q, w_k, w_v]).T",
     "np.concatenate([w_q.T.reshape(w_q.shape), w_k.T.reshape(w_k.shape), w_v.T.reshape(w_v.shape)]).T", ""),
    ("project", "dot", "np.dot(w_q, x.T).T", "np.dot(x, w_q)",
     "The weight of the queries is transposed"),  # of one weight alone
    ("project", "numbers", "w[head * H + i]", "w[:, head * H + i]", "The weights are transposed"),
    ("project", "einsum", "'td,hsd->ths', x, w.reshape(heads, -1, x.shape[1])",
     "'td,shd->ths', x, w.reshape(-1, heads, x.shape[1])", "The numbers of a row are cut as (H, heads)"),
    ("project", "fused", "q.reshape(-1, n, h), key.reshape(-1, k, h), v.reshape(-1, k, h)",
     "*(z.reshape(c, -1, h).transpose(1, 0, 2) for z, c in ((q, n), (key, k), (v, k)))",
     "The rows of different tokens are mixed"),
    ("project", "heads", "heads(w_k, k), heads(w_v, k)", "heads(w_v, k), heads(w_k, k)", "Keys and values are swapped"),
    ("project", "numbers", "made(w_v, k)", "made(w_k, k)", "The values are made with the weight of the keys"),
    ("project", "fused", "[q.reshape(-1, n, h)", "[q.reshape(-1, n, h) / h ** 0.5", "The queries are divided"),
    ("project", "einsum", "cut(w_k, k), cut(w_v, k)", "cut(w_k, k).repeat(n // k, 1), cut(w_v, k).repeat(n // k, 1)",
     "Keys and values are repeated"),
    ("rotate", "complex",
     "z = (x[..., :half] + 1j * x[..., half:]) * turn\n        return np.concatenate([z.real, z.imag], "
     "axis=-1)", "z = (x[..., ::2] + 1j * x[..., 1::2]) * turn\n        return np.stack([z.real, z.imag], "
     "axis=-1).reshape(x.shape)", "The pairs are interleaved"),
    ("rotate", "rotate half", "np.concatenate((emb, emb), axis=-1)", "np.repeat(emb, 2, axis=-1)",
     "The angles lie in the order of interleaved pairs"),
    ("rotate", "numbers", "turned(k), v", "turned(k), turned(v)", "The values are rotated too"),
    ("rotate", "matrices", "turned(q), turned(k)", "turned(q), k", "Only the queries are rotated"),
    ("rotate", "complex", "return turned(q)", "return q", "Only the keys are rotated"),
    ("rotate", "numbers", "int(positions[t])", "(int(positions[t]) + 1)", "Positions are counted from 1"),
    ("rotate", "rotate half", "np.outer(positions, inv_freq)", "np.outer(np.arange(len(q)), inv_freq)",
     "The positions that were given are not used"),
    ("rotate", "matrices", "[[c, -s], [s, c]]", "[[c, s], [-s, c]]", "The hands turn backwards"),
    ("rotate", "joined heads", "theta **", "10000.0 **", "The base is always 10,000"),
    ("rotate", "numbers", "-2 * i / H", "-i / H", "The exponent is half as large"),
    ("rotate", "matrices", "-np.arange(h) / h", "-2 * np.arange(h) / h", "The exponent is twice as large"),
    ("rotate", "joined heads", "positions.reshape(-1, 1, 1)", "positions[-1:].reshape(-1, 1, 1)",
     "All tokens are turned by the same angle"),
    ("attend", "matmul", "k.repeat(times, 1).transpose(1, 2, 0), v.repeat(times, 1)",
     "np.tile(k, (1, times, 1)).transpose(1, 2, 0), np.tile(v, (1, times, 1))",
     "The heads of keys are repeated as a whole"),
    ("attend", "heads", "n // (N // K)", "n % K", "The heads of keys are repeated as a whole"),
    ("attend", "heads", " / H ** 0.5", "", "The scores are not divided"),
    ("attend", "groups", "H ** -0.5", "H ** -1", "The scores are divided by H"),
    ("attend", "tril", "np.sqrt(H)", "np.sqrt(N * H)", "The scores are divided by the root of N * H"),
    ("attend", "matmul", "> positions[:, None]", ">= positions[:, None]", "The mask is off by one: a token does not"),
    ("attend", "heads", "int(positions[t]) + 1", "int(positions[t]) + 2", "The mask is off by one: a token sees"),
    ("attend", "heads", "int(positions[t]) + 1", "S", "There is no mask"),
    ("attend", "tril", "np.tril(", "np.triu(", "The mask is turned around"),
    ("attend", "tril", "[positions]", "[:T]", "The mask begins at the first key"),
    ("attend", "matmul", "= -np.inf", "= 0", "Scores that are not seen are set to 0"),
    ("attend", "groups", "    scores = scores + np.where(np.arange(S)[None] > positions[:, None], -1e9, 0)\n"
     "    scores -= scores.max(-1, keepdims=True)\n    p = ", "    scores -= scores.max(-1, keepdims=True)\n    p = "
     "(np.arange(S)[None] <= positions[:, None]) * ", "The mask comes after softmax"),
    ("attend", "matmul", "axis=2", "axis=1", "Softmax goes over the queries"),
    ("attend", "groups", "    scores -= scores.max(-1, keepdims=True)\n", "", "exp overflows"),
    ("join", "concatenate", "heads[:, n, :] for n in range(heads.shape[1])",
     "heads[:, :, h] for h in range(heads.shape[2])", "The heads are joined in the wrong order"),
    ("join", "sum", "heads[:, n] @", "heads[:, N - 1 - n] @", "The heads lie from the last"),
    ("join", "tokens", "w_o @ heads[t].flatten()", "w_o @ heads.swapaxes(0, 1).reshape(len(heads), -1)[t]",
     "Tokens and heads are mixed"),
    ("join", "tokens", "w_o @ heads[t].flatten()", "heads[t].flatten() @ w_o", "The weight is transposed"),
    ("join", "sum", "for n in range(N))", "for n in range(N)) / N", "The result is divided by the number of heads"),
    ("swiglu", "fused", " * u) @", ") @", "The product with up is left out"),
    ("swiglu", "fused", "both[:, :len(gate)], both[:, len(gate):]", "both[:, len(gate):], both[:, :len(gate)]",
     "SiLU is on the wrong half"),
    ("swiglu", "numbers", "z / (1 + math.exp(-z))", "z", "SiLU is missing"),
    ("swiglu", "tanh", "g * sigmoid * (x @ up.T)", "g * sigmoid + x @ up.T", "The halves are added"),
    ("swiglu", "tanh", "g * sigmoid *", "sigmoid *", "The gate is a sigmoid"),
    ("swiglu", "tokens", "z / (1 + np.exp(-z))", "np.maximum(z, 0)", "The gate is ReLU"),
    ("swiglu", "tanh", "0.5 * (1 + np.tanh(g / 2))", "0.5 * (1 + np.tanh(0.7978846 * (g + 0.044715 * g ** 3)))",
     "The gate is GELU"),
    ("layer", "names", "middle = x + attention(norm_1(x))\n    return middle + mlp(norm_2(middle))",
     "middle = norm_1(x + attention(x))\n    return norm_2(middle + mlp(middle))", "The norms come after (post-norm)"),
    ("layer", "loop", "part(norm(x))", "norm(part(x))", "What comes out of attention and MLP is normalised"),
    ("layer", "loop", "np.add(x, part(norm(x)))", "part(norm(x))", "The stream is lost"),
    ("layer", "names", "middle = x +", "middle =", "Attention's result is not added"),
    ("layer", "names", "return middle +", "return", "The MLP's result is not added"),
    ("layer", "in place", "mlp(norm_2(h))", "mlp(norm_2(x))", "The MLP reads the stream from before attention"),
    ("layer", "loop", "(norm_2, mlp)", "(norm_1, mlp)", "norm_1 is used twice"),
    ("layer", "names", "mlp(norm_2(middle))", "mlp(middle)", "The MLP's norm is left out"),
    ("layer", "loop", "(norm_1, attention), (norm_2, mlp)", "(norm_2, mlp), (norm_1, attention)",
     "The MLP comes before"),
    ("trunk", "loop", "norm(x)", "x", "The last norm is left out"),
    ("trunk", "reduce", "layers, embed", "layers[::-1], embed", "The layers run from the last"),
    ("trunk", "loop", "range(len(layers))", "range(len(layers) - 1)", "The last layer is left out"),
    ("trunk", "loop", "range(len(layers))", "range(1, len(layers))", "The first layer is left out"),
    ("trunk", "loop", "x = layers[i](x)", "x = layers[i](embed(ids))", "Every layer reads the rows"),
    ("trunk", "loop", "x = layers[i](x)", "x = x + layers[i](x)", "What a layer returns is added"),
    ("head", "inner", "np.inner(x, table)", "np.inner(x, table) / x.shape[1] ** 0.5", "The logits are divided"),
    ("head", "einsum", "np.einsum('td,vd->tv', x, table)", "(lambda z: z / z.sum(-1, keepdims=True))(np.exp(np.einsum("
     "'td,vd->tv', x, table)))", "Softmax is applied"),
    ("head", "tokens", "for row in x]", "for row in x[-1:]]", "Only the last token's"),
    ("choose", "before", "logits.astype(float) / temperature\n    p = np.exp(z - np.logaddexp.reduce(z))",
     "logits.astype(float)\n    p = np.exp(z - np.logaddexp.reduce(z)) / temperature\n    p = np.exp(p) / "
     "np.exp(p).sum()",
     "The temperature comes after the softmax"),
    ("choose", "before", "/ temperature", "* temperature", "The logits are multiplied"),
    ("choose", "before", "order[sums - p[order] < top_p]", "order[sums <= top_p] if sums[0] <= top_p else order[-1:]",
     "top-p keeps tokens while their sum is at most"),
    ("choose", "before", "order[sums - p[order] < top_p]", "order[:max(1, (sums <= top_p).sum())]",
     "top-p leaves out the token that reaches"),
    ("choose", "lists", "        if total >= top_p:\n            break\n", "", "top-p has no effect"),
    ("choose", "before", "np.argsort(p)[::-1]", "np.argsort(p)", "The tokens are sorted from the least"),
    ("choose", "before", "if not temperature:", "if temperature < 10:", "The choice is always greedy"),
    ("generate", "for", " and (not ids or ids[0] != bos_id)", "", "BOS is put in front a second time"),
    ("generate", "slice", "bos_id is not None and", "False and", "BOS is never put"),
    ("generate", "for", "start + ids + new", "(start + ids + new)[-1:]", "The model reads only the last token"),
    ("generate", "for", "start + ids + new", "start + ids", "The model reads the prompt each time"),
    ("generate", "slice", "            text.pop()\n", "", "The stop id is part of the text"),
    ("generate", "recursion", "[] if token in stop_ids else ", "", "Stop ids do not end"),
    ("generate", "for", "range(max_new_tokens)", "range(max_new_tokens - 1)", "One token too few"),
    ("generate", "recursion", "max_new_tokens)\n", "max_new_tokens + 1)\n", "One token too many"),
    ("generate", "slice", "text[begin:]", "text", "The prompt is returned"),
    ("attend_cached", "stack", "np.vstack((k_past, k))", "rotate(np.vstack((k_past, k)), np.vstack("
     "(k_past, k)), v, np.arange(len(k_past) + len(k)))[1]", "Keys from the cache are rotated again, with the new"),
    ("attend_cached", "stack", "np.vstack((k_past, k))",
     "np.vstack((rotate(k_past, k_past, v_past, np.arange(start))[1], "
     "k))", "Keys from the cache are rotated again; they"),
    ("attend_cached", "filled", "project(x), S + np.arange(T)", "project(x), np.arange(T)", "The new tokens are"),
    ("attend_cached", "filled", "v_all, S + np.arange(T)", "v_all, np.arange(T)", "The new tokens see as if"),
    ("attend_cached", "stack", "np.arange(start, start + x.shape[0])", "np.arange(x.shape[0])", "Positions begin at 0"),
    ("attend_cached", "filled", "q, k_all[S:], v_all[S:] = rotate(*project(x), S + np.arange(T))",
     "q, k_all[S:], v_all[S:] = project(x)\n    q = rotate(q, k_all[S:], v_all[S:], S + np.arange(T))[0]",
     "Keys are kept before their rotation"),
    ("attend_cached", "stack", "np.vstack((k_past, k)), np.vstack((v_past, v))",
     "np.vstack((k, k_past)), np.vstack((v, v_past))", "The new keys and values stand in front"),
    ("attend_cached", "filled", "return join(heads), k_all, v_all", "return join(heads), k_all[S:], v_all[S:]",
     "Only the new keys and values are returned"),
    ("unpack_q4_0", "struct", "w[j] =", "w[2 * j] =", ""),
    ("unpack_q4_0", "dtype", "np.r_[low, high]", "np.stack([low, high], 1).ravel()", "The two codes of a byte"),
    ("unpack_q4_0", "divmod", "low + high", "high + low", "The high bits are taken first"),
    ("unpack_q4_0", "divmod", "(code - 8)", "code", "8 is not subtracted"),
    ("unpack_q4_0", "divmod", "(code - 8)", "(code - 7)", "7 is subtracted"),
    ("unpack_q4_0", "struct", "'<e'", "'>e'", "The scale's bytes are swapped"),
    ("unpack_q4_0", "dtype", ".astype(np.int8)", "", "8 is subtracted from bytes"),
    ("loss", "numbers", "        if is_answer[t + 1]:", "        if True:", "The loss is on the prompt too"),
    ("loss", "logaddexp", "is_answer[1:]", "(~is_answer[1:])", "The loss is on the prompt, and not"),
    ("loss", "numbers", "is_answer[t + 1]", "is_answer[t]", "The mask is not shifted"),
    ("loss", "logaddexp", "/ weights.sum()", "", "The surprises are summed"),
    ("loss", "logaddexp", "/ weights.sum()", "/ len(weights)", "The sum is divided by all"),
    ("loss", "places", "np.average(-chosen)", "np.average(-chosen) / np.log(2)", "The logarithm is to the base of 2"),
    ("loss", "places", "-chosen", "chosen", "The sign is missing"),
    ("adamw_step", "plain", "    m = b1 * m", "    g, wd = g + wd * w, 0\n    m = b1 * m",
     "Weight decay is added to the"),
    ("adamw_step", "plain", "m / (1 - b1 ** t)\n    v_hat = v / (1 - b2 ** t)", "m\n    v_hat = v", "m and v are not"),
    ("adamw_step", "plain", "v_hat = v / (1 - b2 ** t)", "v_hat = v", "Only m is corrected"),
    ("adamw_step", "plain", "(v_hat ** 0.5 + eps)", "(v_hat + eps) ** 0.5", "eps stands inside"),
    ("adamw_step", "numbers", "step + wd * w[i]", "step", "There is no weight decay"),
    ("adamw_step", "folded", "lr * wd * w", "wd * w", "Weight decay is not multiplied"),
    ("adamw_step", "folded", "- size", "+ size", "The weights move uphill"),
    ("lora", "merged", "alpha / len(a)", "alpha", "alpha is not divided by the rank"),
    ("lora", "merged", "alpha / len(a)", "alpha / len(a) ** 0.5", "alpha is divided by the root"),
    ("lora", "two paths", "np.dot(x, w.T) + ", "", "The base's product is left out"),
    ("lora", "einsum", "+ scale", "- scale", "The correction is subtracted"),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A learner's file with a mistake in it.

    Attributes:
        label: Which one it is.
        source: The file.
        cause: How the cause begins; "" where none is known.
    """

    label: str
    source: str
    cause: str

    def is_named(self, cause: str) -> bool:
        """Return whether a check's cause is this mistake's."""
        return cause.startswith(self.cause) if self.cause else not cause


def planted_in(step: str, styles: Mapping[str, Mapping[str, str]]) -> Iterator[Planted]:
    """Yield the mistakes of a step."""
    for name, style, old, new, cause in (*PLANTED, *FURTHER):
        if name == step:
            right = styles[name][style]
            assert old in right, (style, old)
            yield Planted(f"{style}: {old!r} -> {new!r}", right.replace(old, new), cause)
    for name, source, cause in SOURCES:
        if name == step:
            yield Planted(source, source, cause)
