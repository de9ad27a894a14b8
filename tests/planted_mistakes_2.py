"""More of planted_mistakes.py, and whole files of functions that keep something from call to call."""

FURTHER: tuple[tuple[str, str, str, str, str], ...] = (
    # bytes, ranks and rows
    ("merge", "best of a loop", "[bytes([b]) for b in piece]", "[chr(b).encode() for b in piece]",
     "Bytes are taken for characters"),
    ("merge", "best of a loop", "[bytes([b]) for b in piece]", "list(piece)", "The parts are numbers"),
    ("merge", "best of a loop", "[bytes([b]) for b in piece]", "list(piece.decode())", "The parts are text (str), and"),
    ("merge", "best of a loop", "    return parts", "    return [part.decode('latin-1') for part in parts]",
     "The parts are text (str), characters"),
    ("merge", "best of a loop", "r is not None and", "r and", "The pair with rank 0 is never"),
    ("merge", "recursion", "if r is not None}", "if r}", "The pair with rank 0 is never"),
    ("embed", "take", "ids, axis", "ids - 1, axis", "Ids count from 0; the row before"),
    ("embed", "rows", "for i in ids]", "for i in ids + 1]", "Ids count from 0; the row after"),
    ("embed", "take", "np.take(table, ids, axis=0)", "np.take(table, ids, axis=0) * np.sqrt(table.shape[1])",
     "The rows are scaled by"),
    # norms
    ("rms_norm", "rows", "row * gamma / np.sqrt(np.dot(row, row) / len(row) + eps)",
     "row / np.sqrt(np.dot(row, row) / len(row) + eps) + gamma", "gamma is added"),
    ("rms_norm", "double", "x * gamma /", "x / gamma /", "The row is divided by gamma"),
    ("rms_norm", "double", "np.square(x).sum(-1)[:, None] / x.shape[1]", "np.var(x, -1)[:, None]",
     "The row is divided by its standard"),
    ("rms_norm", "rows", "np.sqrt(np.dot(row, row) / len(row) + eps)", "(np.abs(row).mean() + eps)",
     "The mean is of absolute"),
    ("rms_norm", "double", ".sum(-1)[:, None]", ".sum(-1)", "keepdims=True is missing"),
    ("rms_norm", "norm", "gamma * x / np", "gamma * x * np", "Rows are multiplied"),
    ("rms_norm", "double", "x.shape[1] + eps)", "x.shape[1]) + eps", "eps is added to the result"),
    ("rms_norm", "numbers", "total / x.shape[1] + eps", "total + eps", "The squares are summed"),
    ("rms_norm", "einsum", "x, (square + eps) ** -0.5, gamma)", "x, (square + eps) ** -0.5, 1 + gamma)",
     "gamma counts from 0"),
    # queries, keys, values
    ("project", "einsum", "cut(w_k, k), cut(w_v, k)", "cut(w_v, k), cut(w_v, k)", "The keys are made with"),
    ("project", "fused", "q.reshape(-1, n, h), key", "q.reshape(-1, n, h) * h ** -0.5, key", "The queries are divided"),
    ("project", "heads", "    return heads(w_q, n), heads(w_k, k), heads(w_v, k)",
     "    rms = lambda z: z / np.sqrt((z ** 2).mean(-1, keepdims=True) + 1e-6)\n"
     "    return rms(heads(w_q, n)), rms(heads(w_k, k)), heads(w_v, k)", "Queries and keys are normalised"),
    ("rotate", "numbers", "a * c - b * s\n", "a * s - b * c\n", ""),  # of one line alone
    ("rotate", "complex", "np.exp(1j *", "1j * np.exp(-1j *", "Sine and cosine are exchanged"),
    ("rotate", "numbers", "= a * c - b * s", "= a * c + b * s", "A sign is wrong: the first"),
    ("rotate", "numbers", "b * c + a * s", "b * c - a * s", "A sign is wrong: the second"),
    ("rotate", "numbers", "= b * c + a * s", "= b * c + out[t, n, i] * s", "The second number of a pair is made"),
    ("rotate", "joined heads", "b = x[:, :, :half].copy(), x[:, :, half:].copy()", "b = x[:, :, :half], x[:, :, half:]",
     "The second number of a pair is made"),
    ("rotate", "rotate half", "rotate_half(q) * sin, k * cos + rotate_half(k) * sin", "q * sin, k * cos + k * sin", ""),
    ("rotate", "numbers", "theta ** (-2 * i / H)", "theta ** (2 * i / H)", "The sign of the exponent"),
    ("rotate", "matrices", "-np.arange(h) / h", "-np.arange(1, h + 1) / h", "i counts from 1"),
    ("rotate", "complex", "theta ** (", "500000.0 ** (", "The base is always 500,000"),
    ("rotate", "rotate half", "np.cos(emb), np.sin(emb)", "np.sin(emb), np.cos(emb)", "Sine and cosine are exchanged"),
    ("rotate", "rotate half", "1.0 / theta", "1.0 / 10000.0", "The base is always 10,000"),
    # attention
    ("attend", "matmul",
     "hidden = np.arange(k.shape[-1])[None, :] > positions[:, None]\n    scores[:, hidden] = -np.inf",
     "hidden = np.arange(k.shape[-1])[None, :] >= positions[:, None]\n    scores[:, hidden] = -1e9",
     "The mask is off by one: a token does not see itself. The first"),
    ("attend", "groups", "> positions[:, None], -1e9", ">= positions[:, None], -1e30",
     "The mask is off by one: a token does not see itself. The first"),
    ("attend", "matmul", "/ np.sqrt(q.shape[-1])", "* np.sqrt(q.shape[-1])", "The scores are multiplied by the root"),
    ("attend", "groups", "    return p.reshape", "    p = p * H ** -0.5\n    return p.reshape",
     "The shares are divided by the root of H, as"),
    ("attend", "groups", "H ** -0.5", "1 / H", "The scores are divided by H;"),
    ("attend", "matmul", "    p /= p.sum(axis=2, keepdims=True)\n", "", "The sum is missing in softmax"),
    ("attend", "tril", "    return p, ", "    return np.where(mask, scores, -np.inf), ", "Scores are returned"),
    ("attend", "tril", "p, v[:, index]", "p, k[:, index]", "The heads gather keys"),
    ("attend", "tril", "q, k[:, index]", "q, v[:, index]", "Queries are compared with values"),
    ("attend", "heads", "    T, N, H = q.shape\n", "    k, v = v, k\n    T, N, H = q.shape\n",
     "Keys and values are exchanged"),
    ("attend", "matmul", "np.swapaxes(p @ v, 0, 1)", "np.swapaxes(p.swapaxes(1, 2) @ v, 0, 1)",
     "The pattern is transposed"),
    ("attend", "heads", "n // (N // K)", "0", "All query heads use the first"),
    ("attend", "heads", "k[:seen, kv] @", "k[:seen, n % K] @",
     "The heads of keys are repeated as a whole (0 1 0 1), th"),
    ("attend", "heads", "@ v[:, kv]", "@ v[:, n % K]", "The heads of values are repeated"),
    ("attend", "tril", "np.arange(N) // (N // k.shape[1])", "np.arange(N) % k.shape[1]",
     "The heads of keys are repeated as a whole (0 1 0 1);"),
    ("attend", "heads", "/ H ** 0.5", "/ H", "The scores are divided by H;"),
    ("attend", "matmul", "scores[:, hidden] = -np.inf", "scores[:, hidden] = 0",
     "Scores that are not seen are set to 0"),
    ("join", "tokens", "w_o @ heads[t].flatten()", "heads[t].flatten()", "The output weight is left out"),
    ("join", "einsum", "np.einsum('tnh,dnh->td'", "len(heads[0]) ** -1 * np.einsum('tnh,dnh->td'",
     "The result is divided by the number of heads"),
    ("join", "einsum", "'tnh,dnh->td', heads, w_o.reshape(len(w_o), *heads.shape[1:])",
     "'tnh,dhn->td', heads, w_o.reshape(len(w_o), *heads.shape[:0:-1])", "The heads are joined in the wrong order"),
    # the MLP and the layer
    ("swiglu", "fused", "(g * (1 / (1 + np.exp(-g))) * u) @", "u @", "The gate is left out"),
    ("swiglu", "tokens", "np.exp(-z)", "np.exp(z)", "The exponent's sign"),
    ("swiglu", "fused", "return (g * (1 / (1 + np.exp(-g))) * u) @ down.T",
     "y = (g * u) @ down.T\n    return y / (1 + np.exp(-y))", "SiLU is applied to the result"),
    ("swiglu", "fused", "return (g", "return x + (g", "The stream is added to the result"),
    ("swiglu", "numbers", "z / (1 + math.exp(-z))", "0.5 * z * (1 + math.erf(z / math.sqrt(2)))",
     "The gate is GELU, computed with erf"),
    ("swiglu", "tokens", "np.exp(-z)", "np.exp(-1.702 * z)", "The gate is QuickGELU"),
    ("swiglu", "fused", "(1 / (1 + np.exp(-g))) * u", "(1 / (1 + np.exp(-g))) * u / (1 + np.exp(-u))",
     "SiLU is on both halves"),
    ("swiglu", "fused", "g * (1 / (1 + np.exp(-g))) * u", "(g * u) * (1 / (1 + np.exp(-g * u)))",
     "silu is applied to the product"),
    ("layer", "names", "norm_1(x))\n    return middle + mlp(norm_2(", "norm_2(x))\n    return middle + mlp(norm_1(",
     "The norms are exchanged"),
    ("layer", "loop", "(norm_1, attention)", "(norm_2, attention)", "norm_2 is used twice"),
    ("layer", "names", "return middle +", "return x + middle +", "The residual is added twice: the stream of"),
    ("layer", "names", "middle = x +", "middle = x + x +", "The residual is added twice: x + attention"),
    ("layer", "names", "return middle +", "return middle + middle +", "The residual is added twice in the MLP"),
    ("layer", "loop", "np.add(x, part(norm(x)))", "x + x + part(norm(x))", "The residual is added twice, in both"),
    ("layer", "names", "return middle +", "return x +", "The MLP's line adds to the stream from before"),
    ("layer", "loop", "    for norm, part",
     "    z = norm_1(x)\n    return x + attention(z) + mlp(z)\n    for norm, part",
     "Attention and the MLP both read norm_1"),
    ("layer", "loop", "part(norm(x))", "part(x)", "Both norms are left out"),
    ("layer", "names", "+ mlp(", "+ attention(", "Attention runs twice"),
    ("layer", "names", "attention(norm_1(x))", "attention(x)", "Attention's norm is left out"),
    ("layer", "names", "middle + mlp(norm_2(middle))", "middle + mlp(norm_2(attention(norm_1(x))))",
     "The MLP reads attention's result"),
    # the trunk and the head
    ("trunk", "loop", "x = embed(ids)", "x = embed(ids)\n    x = x * x.shape[1] ** 0.5",
     "The rows of the table are mult"),
    ("trunk", "loop", "x = layers[i](x)", "x = norm(layers[i](x))",
     "The norm runs after every layer, and once"),
    ("trunk", "loop", "x = layers[i](x)\n    return norm(x)", "x = norm(layers[i](x))\n    return x",
     "The norm runs after every layer;"),
    ("trunk", "loop", "    return norm(x)", "    return x", "The last norm is left out"),
    ("trunk", "loop", "return norm(x)", "return norm(norm(x))", "The last norm runs twice"),
    ("trunk", "recursion", "else norm(x)", "else norm(x + embed(ids))", "The rows of the table are added again"),
    ("trunk", "loop", "range(len(layers))", "range(0)", "No layer runs"),
    ("trunk", "recursion", "run(embed(ids)", "run(norm(embed(ids))", "The rows of the table are normalised"),
    ("head", "inner", "np.inner(x, table)", "np.inner(x, table) * x.shape[1] ** 0.5", "The logits are multiplied"),
    ("head", "inner", "np.inner(x, table)", "30 * np.tanh(np.inner(x, table) / 30)", "The logits are bounded"),
    ("head", "inner", "    return np.inner(x, table)",
     "    z = np.inner(x, table)\n    return z - np.log(np.exp(z).sum(-1, keepdims=True))", "The logarithm of softmax"),
    ("head", "inner", "np.inner(x,", "np.inner(x / np.sqrt((x ** 2).mean(-1, keepdims=True)),",
     "The rows are normalised again"),
    # choices
    ("choose", "before", "np.argsort(p)[::-1]", "np.arange(len(p))", "top-p is applied to tokens in the order"),
    ("choose", "lists", "sorted(((w / whole, i) for i, w in enumerate(weights)), key=lambda pair: -pair[0])",
     "[(w / whole, i) for i, w in enumerate(weights)]", "top-p is applied to tokens in the order"),
    ("choose", "before", "order[sums - p[order] < top_p]", "order[:max(1, (p >= top_p).sum())]",
     "top-p keeps the tokens whose own"),
    ("choose", "before", "order[sums - p[order] < top_p]", "order[p[order] >= top_p * p.max()]",
     "top-p keeps the tokens with top_p times"),
    ("choose", "before", "return kept[np.argmax(share > u)]", "return int(np.argmax(share > u))", "The place among"),
    ("choose", "before", "share > u", "share > 1 - u", "The stretches are laid from"),
    ("choose", "before", "return np.argmax(logits)", "return np.argmin(logits)", "With temperature 0 the smallest"),
    ("choose", "lists", "    if temperature == 0:\n        return max(range(len(logits)), key=lambda i: logits[i])\n",
     "    temperature = temperature or 1.0\n", "With temperature 0 a token is sampled"),
    ("choose", "before", "    if not temperature:\n        return np.argmax(logits)\n", "",
     "With temperature 0 the logits are divided"),
    ("choose", "lists", "point, reached = u * total", "point, reached = u", "The kept probabilities are not scaled"),
    # the loop
    ("generate", "for", "token in set(stop_ids)", "token == stop_ids[0]", "Only the first of the stop ids"),
    ("generate", "recursion", "token in stop_ids", "token == stop_ids[-1]", "Only the last of the stop ids"),
    ("generate", "for", "int(choose(next_logits(start + ids + new)))",
     "int(choose(next_logits(start + ids + new)))\n        token = int(choose(next_logits(start + ids + new)))",
     "Two tokens are chosen"),
    ("generate", "for", "range(max_new_tokens)", "range(max_new_tokens - len(ids))", "The prompt's tokens count"),
    ("generate", "slice", "len(text) - begin <", "len(text) <", "The prompt's tokens, BOS included"),
    ("generate", "for", "        new += [token]\n", "        new += [token]\n        break\n",
     "Only one token is written"),
    ("generate", "for", "start + ids + new", "(new or (start + ids)[-1:])", "The model reads the new tokens"),
    # the cache
    ("attend_cached", "stack", "np.arange(start, start + x.shape[0])", "np.arange(start, start + x.shape[0]) + 1",
     "Positions are one too large"),
    ("attend_cached", "stack", "np.arange(start, start + x.shape[0])",
     "np.arange(start, start + x.shape[0]) - (start > 0)", "Positions are one too small"),
    ("attend_cached", "stack", "    q, k, v = rotate(q, k, v, positions)\n", "", "Queries and keys are not rotated"),
    ("attend_cached", "stack", "[1]), k, v", "[1]), v, k", "Keys and values are returned in the wrong"),
    ("attend_cached", "filled", "return join(heads), k_all, v_all", "return join(heads), k_past, v_past",
     "The new keys and values are used, and the old"),
    ("attend_cached", "stack", "    q, k, v = rotate(q, k, v, positions)\n    k, v = np.vstack((k_past, k)), "
     "np.vstack((v_past, v))\n    return join(attend(q, k, v, positions)[1]), k, v",
     "    k, v = np.vstack((k_past, k)), np.vstack((v_past, v))\n"
     "    q = rotate(q, k[start:], v[start:], positions)[0]\n"
     "    turned = rotate(k, k, v, np.arange(len(k)))[1]\n    return join(attend(q, turned, v, positions)[1]), k, v",
     "Keys are kept before their rotation, and rotated in each"),
    ("attend_cached", "one by one", "np.array([len(k)])", "np.array([len(k) + 1])",
     "The new tokens are rotated one position too far"),
    # four bits and training
    ("unpack_q4_0", "struct", "(byte >> 4)", "(byte & 0xF0)", "The high bits are not shifted"),
    ("unpack_q4_0", "struct", "(byte & 0x0F)", "byte", "The low bits are not cut out"),
    ("unpack_q4_0", "struct", "enumerate(block[2:])", "enumerate(block[:16])", "The codes are read from the first"),
    ("unpack_q4_0", "divmod", "scale * (code - 8)", "(code - 8) / scale", "The scale divides"),
    ("unpack_q4_0", "divmod", "scale * (code - 8)", "float(code - 8)", "The scale is left out"),
    ("unpack_q4_0", "divmod", "(code - 8)", "(code - 16)", "16 is subtracted"),
    ("unpack_q4_0", "divmod", "scale * (code - 8)", "(scale * code - 8)", "8 is subtracted after the scale"),
    ("loss", "places", "z[range(len(z)), ids[places + 1]] - np.log(np.exp(z).sum(1))",
     "np.log(p.astype(np.float32)[range(len(z)), ids[places + 1]])", "P is rounded to 0"),
    ("loss", "places", "    z -= z.max(1, keepdims=True)\n", "", "exp overflows"),
    ("loss", "places", "np.average(-chosen)", "np.exp(np.average(-chosen))", "exp of the loss"),
    ("loss", "places", "np.average(-chosen)", "np.average(np.exp(chosen))", "The probability is averaged"),
    ("loss", "places", "np.average(-chosen)", "np.average(1 - np.exp(chosen))", "The missing probability"),
    ("loss", "places", " - np.log(np.exp(z).sum(1))", "",
     "The logarithm of the sum is missing"),
    ("loss", "logaddexp", "/ weights.sum()", "/ len(ids)", "The sum is divided by all T tokens"),
    ("loss", "logaddexp", "np.logaddexp.reduce(logits[:-1], axis=1) - np.take_along_axis(logits[:-1]",
     "np.logaddexp.reduce(logits[1:], axis=1) - np.take_along_axis(logits[1:]", "Logits and tokens are not shifted"),
    ("adamw_step", "plain", "v_hat ** 0.5", "v_hat", "The root is missing"),
    ("adamw_step", "plain", "(1 - b1) * g", "g", "1 - beta_1 is missing"),
    ("adamw_step", "plain", "m = b1 * m + (1 - b1) * g\n    v = b2 * v + (1 - b2) * g * g",
     "m = b1 * m + g\n    v = b2 * v + g * g", "1 - beta is missing"),
    ("adamw_step", "plain", "(1 - b1 ** t)\n    v_hat = v / (1 - b2 ** t)",
     "(1 - b1 * t)\n    v_hat = v / (1 - b2 * t)",
     "beta is multiplied by step"),
    ("adamw_step", "plain", "w * (1 - lr * wd) - lr * m_hat / (v_hat ** 0.5 + eps)",
     "(w - lr * m_hat / (v_hat ** 0.5 + eps)) * (1 - lr * wd)", "Weights shrink after the move"),
    ("adamw_step", "plain", "(1 - lr * wd)", "(1 + lr * wd)", "Weight decay lets the weights grow"),
    ("adamw_step", "plain", "    m_hat = m / (1 - b1 ** t)\n    v_hat = v / (1 - b2 ** t)\n",
     "    m_hat = (m - (1 - b1) * g) / b1 / (1 - b1 ** t)\n    v_hat = (v - (1 - b2) * g * g) / b2 / (1 - b2 ** t)\n",
     "The weights move by m and v from before"),
    ("lora", "merged", "alpha / len(a)", "alpha * len(a)", "alpha is multiplied by the rank"),
    ("lora", "merged", "alpha / len(a)", "alpha / len(b)", "alpha is divided by the number of outputs"),
    ("lora", "merged", "alpha / len(a)", "alpha / a.shape[1]", "alpha is divided by the number of inputs"),
    ("lora", "merged", "    return x @ (w + alpha / len(a) * b @ a).T",
     "    return x @ w.T + alpha / len(a) * x @ b @ a",
     "a and b are exchanged"),
    ("lora", "merged", "b @ a).T", "a @ b).T", "The factors are in the wrong order"),
    ("lora", "merged", "b @ a).T", "b @ a)", "The base's weight and its correction"),
    ("lora", "two paths", "np.dot(x, w.T) + ", "np.dot(x, w) + ", "The base's weight is transposed"),
    ("lora", "two paths", " + np.dot(thin * (alpha / thin.shape[1]), b.T)", "", "There is no correction"),
)  # fmt: skip

_KEPT = "Keys and values of"
_BEGIN = "\ndef attend_cached(x, k_past, v_past, project, rotate, attend, join):\n    positions = len(k_past) + "
_BEGIN += "np.arange(len(x))\n    q, k, v = rotate(*project(x), positions)\n"
_END = "    return join(attend(q, k, v, positions)[1]), k, v\n"

SOURCES: tuple[tuple[str, str, str], ...] = (
    # step, source, how the cause begins: what keeps something from call to call, and what computes in few bits
    (
        "attend_cached",
        f"keys, values = [], []{_BEGIN}    keys.append(k)\n    values.append(v)\n"
        f"    k, v = np.concatenate(keys), np.concatenate(values)\n{_END}",
        f"{_KEPT} several layers or texts",
    ),
    (
        "attend_cached",
        f"memo = {{}}{_BEGIN}    k, v = memo.setdefault((len(k_past), len(x), x[0].tobytes()), (k, v))\n"
        f"    k, v = np.vstack((k_past, k)), np.vstack((v_past, v))\n{_END}",
        f"{_KEPT} an earlier text",
    ),
    (
        "attend_cached",
        f"cache = []{_BEGIN}    if len(k_past):\n        k, v = (np.vstack(pair) for pair in "
        f"zip(cache[-1], (k, v)))\n    cache.append((k, v))\n{_END}",
        _KEPT,
    ),
    (
        "attend_cached",
        f"layers, turn = {{}}, 0{_BEGIN}    global turn\n    layer, turn = turn % 2, turn + 1\n"
        "    if len(k_past):\n        k, v = (np.vstack(pair) for pair in zip(layers[layer], (k, v)))\n"
        f"    layers[layer] = k, v\n{_END}",
        f"{_KEPT} an earlier text",
    ),
    (
        "rotate",
        """
table = {}
def rotate(q, k, v, positions, theta):
    half = q.shape[-1] // 2
    if len(positions) not in table:
        angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
        table[len(positions)] = np.cos(angles), np.sin(angles)
    cos, sin = table[len(positions)]
    turned = lambda a, b: np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned(q[..., :half], q[..., half:]), turned(k[..., :half], k[..., half:]), v
""",
        "Something of an earlier call",
    ),
    (
        "generate",
        """
def generate(ids, bos_id, stop_ids, max_new_tokens, next_logits, choose, new=[]):
    start = [bos_id] if bos_id is not None and ids[:1] != [bos_id] else []
    while len(new) < max_new_tokens:
        token = choose(next_logits(start + ids + new))
        if token in stop_ids:
            break
        new.append(token)
    return new
""",
        "Something of an earlier call",
    ),
    (
        "choose",
        """
def choose(logits, temperature, top_p, u):
    if temperature == 0:
        return int(logits.argmax())
    p = np.exp((logits - logits.max()).astype(float) / temperature)
    return int(np.random.choice(len(p), p=p / p.sum()))
""",
        "Two calls with the same arguments return different results",
    ),
    (
        "swiglu",
        """
def swiglu(x, gate, up, down):
    x, gate, up, down = (z.astype(np.float16) for z in (x, gate, up, down))
    z = x @ gate.T
    return ((z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T).astype(np.float32)
""",
        "The results are rounded to float16",
    ),
    (
        "rms_norm",
        """
def rms_norm(x, gamma, eps):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True, dtype=np.float16).astype(np.float32) + eps) * gamma
""",
        "All numbers are almost right",
    ),
)
