"""More of learner_styles.py: a layer and what follows it."""

STYLES: dict[str, dict[str, str]] = {
    "layer": {
        "names": """
def layer(x, norm_1, attention, norm_2, mlp):
    middle = x + attention(norm_1(x))
    return middle + mlp(norm_2(middle))
""",
        "in place": """
def layer(x, norm_1, attention, norm_2, mlp):
    h = x.copy()
    h += attention(norm_1(h))
    h += mlp(norm_2(h))
    return h
""",
        "loop": """
def layer(x, norm_1, attention, norm_2, mlp):
    for norm, part in ((norm_1, attention), (norm_2, mlp)):
        x = np.add(x, part(norm(x)))
    return x
""",
    },
    "trunk": {
        "loop": """
def trunk(ids, embed, layers, norm):
    x = embed(ids)
    for i in range(len(layers)):
        x = layers[i](x)
    return norm(x)
""",
        "reduce": """
from functools import reduce
def trunk(ids, embed, layers, norm):
    return norm(reduce(lambda x, layer: layer(x), layers, embed(ids)))
""",
        "recursion": """
def trunk(ids, embed, layers, norm):
    def run(x, rest):
        return run(rest[0](x), rest[1:]) if rest else norm(x)
    return run(embed(ids), list(layers))
""",
    },
    "head": {
        "inner": "def head(x, table):\n    return np.inner(x, table)\n",
        "einsum": "def head(x, table):\n    return np.einsum('td,vd->tv', x, table)\n",
        "tokens": "def head(x, table):\n    return np.stack([table @ row for row in x])\n",
        "dot": "def head(x, table):\n    return np.dot(table, x.transpose()).transpose()\n",
    },
    "choose": {
        "lists": """
import math
def choose(logits, temperature, top_p, u):
    if temperature == 0:
        return max(range(len(logits)), key=lambda i: logits[i])
    top = float(max(logits))
    weights = [math.exp((float(z) - top) / temperature) for z in logits]
    whole = sum(weights)
    pairs = sorted(((w / whole, i) for i, w in enumerate(weights)), key=lambda pair: -pair[0])
    kept, total = [], 0.0
    for p, i in pairs:
        kept.append((p, i))
        total += p
        if total >= top_p:
            break
    point, reached = u * total, 0.0
    for p, i in kept:
        reached += p
        if point < reached:
            return i
    return kept[-1][1]
""",
        "before": """
def choose(logits, temperature, top_p, u):
    if not temperature:
        return np.argmax(logits)
    z = logits.astype(float) / temperature
    p = np.exp(z - np.logaddexp.reduce(z))
    order = np.argsort(p)[::-1]
    sums = np.cumsum(p[order])
    kept = order[sums - p[order] < top_p]
    share = np.cumsum(p[kept]) / p[kept].sum()
    return kept[np.argmax(share > u)]
""",
    },
    "generate": {
        "for": """
def generate(ids, bos_id, stop_ids, max_new_tokens, next_logits, choose):
    new = []
    start = [bos_id] if bos_id is not None and (not ids or ids[0] != bos_id) else []
    for _ in range(max_new_tokens):
        token = int(choose(next_logits(start + ids + new)))
        if token in set(stop_ids):
            return new
        new += [token]
    return new
""",
        "recursion": """
def generate(ids, bos_id, stop_ids, max_new_tokens, next_logits, choose):
    if bos_id is not None and ids[0] != bos_id:
        ids = [bos_id] + ids
    def rest(text, count):
        if count == 0:
            return []
        token = choose(next_logits(text))
        return [] if token in stop_ids else [token] + rest(text + [token], count - 1)
    return rest(list(ids), max_new_tokens)
""",
        "slice": """
def generate(ids, bos_id, stop_ids, max_new_tokens, next_logits, choose):
    text = ids.copy()
    if bos_id is not None and text[0] != bos_id:
        text.insert(0, bos_id)
    begin = len(text)
    while len(text) - begin < max_new_tokens:
        text.append(choose(next_logits(text)))
        if text[-1] in stop_ids:
            text.pop()
            break
    return text[begin:]
""",
    },
    "attend_cached": {
        "stack": """
def attend_cached(x, k_past, v_past, project, rotate, attend, join):
    start = k_past.shape[0]
    positions = np.arange(start, start + x.shape[0])
    q, k, v = project(x)
    q, k, v = rotate(q, k, v, positions)
    k, v = np.vstack((k_past, k)), np.vstack((v_past, v))
    return join(attend(q, k, v, positions)[1]), k, v
""",
        "one by one": """
def attend_cached(x, k_past, v_past, project, rotate, attend, join):
    rows, k, v = [], k_past, v_past
    for t in range(len(x)):
        place = np.array([len(k)])
        q_1, k_1, v_1 = rotate(*project(x[t:t + 1]), place)
        k, v = np.append(k, k_1, axis=0), np.append(v, v_1, axis=0)
        rows.append(join(attend(q_1, k, v, place)[1])[0])
    return np.array(rows), k, v
""",
        "filled": """
def attend_cached(x, k_past, v_past, project, rotate, attend, join):
    S, T = len(k_past), len(x)
    k_all = np.empty((S + T, *k_past.shape[1:]), np.float32)
    v_all = np.empty_like(k_all)
    k_all[:S], v_all[:S] = k_past, v_past
    q, k_all[S:], v_all[S:] = rotate(*project(x), S + np.arange(T))
    _, heads = attend(q, k_all, v_all, S + np.arange(T))
    return join(heads), k_all, v_all
""",
    },
    "unpack_q4_0": {
        "struct": """
import struct
def unpack_q4_0(block):
    (scale,) = struct.unpack('<e', block[:2])
    w = [0.0] * 32
    for j, byte in enumerate(block[2:]):
        w[j] = scale * ((byte & 0x0F) - 8)
        w[j + 16] = scale * ((byte >> 4) - 8)
    return np.array(w, dtype=np.float32)
""",
        "dtype": """
def unpack_q4_0(block):
    parts = np.frombuffer(block, dtype=[('d', '<f2'), ('codes', 'u1', 16)])[0]
    low, high = parts['codes'] % 16, parts['codes'] // 16
    return (np.r_[low, high].astype(np.int8) - 8) * np.float32(parts['d'])
""",
        "divmod": """
def unpack_q4_0(block):
    scale = float(np.frombuffer(block[:2], np.float16)[0])
    high, low = zip(*(divmod(byte, 16) for byte in block[2:18]))
    return np.array([scale * (code - 8) for code in low + high])
""",
    },
    "loss": {
        "numbers": """
import math
def loss(logits, ids, is_answer):
    total = count = 0
    for t in range(len(ids) - 1):
        if is_answer[t + 1]:
            row = [float(z) for z in logits[t]]
            top = max(row)
            total += top + math.log(sum(math.exp(z - top) for z in row)) - row[ids[t + 1]]
            count += 1
    return total / count
""",
        "logaddexp": """
def loss(logits, ids, is_answer):
    of_all = np.logaddexp.reduce(logits[:-1], axis=1) - np.take_along_axis(logits[:-1], ids[1:, None], 1)[:, 0]
    weights = is_answer[1:].astype(float)
    return (of_all * weights).sum() / weights.sum()
""",
        "places": """
def loss(logits, ids, is_answer):
    places = np.flatnonzero(is_answer[1:])
    z = logits[places].astype(np.float64)
    z -= z.max(1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    chosen = z[range(len(z)), ids[places + 1]] - np.log(np.exp(z).sum(1))
    return np.average(-chosen)
""",
    },
    "adamw_step": {
        "plain": """
def adamw_step(w, g, m, v, t, lr, b1, b2, eps, wd):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    m_hat = m / (1 - b1 ** t)
    v_hat = v / (1 - b2 ** t)
    return w * (1 - lr * wd) - lr * m_hat / (v_hat ** 0.5 + eps), m, v
""",
        "folded": """
def adamw_step(w, g, m, v, t, lr, b1, b2, eps, wd):
    new_m, new_v = m + (1 - b1) * (g - m), v + (1 - b2) * (g ** 2 - v)
    root = np.sqrt(new_v) / np.sqrt(1 - b2 ** t) + eps
    size = lr / (1 - b1 ** t)
    return w - lr * wd * w - size * new_m / root, new_m, new_v
""",
        "numbers": """
import math
def adamw_step(w, g, m, v, t, lr, b1, b2, eps, wd):
    w2, m2, v2 = (np.zeros_like(w) for _ in range(3))
    for i in np.ndindex(w.shape):
        m2[i] = b1 * m[i] + (1 - b1) * g[i]
        v2[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
        step = (m2[i] / (1 - b1 ** t)) / (math.sqrt(v2[i] / (1 - b2 ** t)) + eps)
        w2[i] = w[i] - lr * (step + wd * w[i])
    return w2, m2, v2
""",
    },
    "lora": {
        "merged": "def lora(x, w, a, b, alpha):\n    return x @ (w + alpha / len(a) * b @ a).T\n",
        "einsum": """
def lora(x, w, a, b, alpha):
    scale = alpha / a.shape[0]
    return np.einsum('ti,oi->to', x, w) + scale * np.einsum('ti,ri,or->to', x, a, b, optimize=True)
""",
        "two paths": """
def lora(x, w, a, b, alpha):
    thin = np.dot(x, a.T)
    return np.dot(x, w.T) + np.dot(thin * (alpha / thin.shape[1]), b.T)
""",
        "tokens": """
def lora(x, w, a, b, alpha):
    return np.stack([w @ row + (b @ (a @ row)) * alpha / b.shape[1] for row in x])
""",
    },
}

LOOPS = {
    "project": """
def project(x, w_q, w_k, w_v, n, k):
    T, D = x.shape
    def made(w, heads):
        H = len(w) // heads
        out = np.zeros((T, heads, H), np.float32)
        for t in range(T):
            for head in range(heads):
                for i in range(H):
                    total = 0.0
                    for d in range(D):
                        total += x[t, d] * w[head * H + i, d]
                    out[t, head, i] = total
        return out
    return made(w_q, n), made(w_k, k), made(w_v, k)
""",
    "join": """
def join(heads, w_o):
    T, N, H = heads.shape
    out = np.zeros((T, len(w_o)), np.float32)
    for t in range(T):
        for d in range(len(w_o)):
            total = 0.0
            for n in range(N):
                for h in range(H):
                    total += float(heads[t, n, h]) * float(w_o[d, n * H + h])
            out[t, d] = total
    return out
""",
    "swiglu": """
import math
def product(x, w):
    out = [[0.0] * len(w) for _ in x]
    for t in range(len(x)):
        for f in range(len(w)):
            total = 0.0
            for d in range(len(w[f])):
                total += x[t][d] * w[f][d]
            out[t][f] = float(total)
    return out
def swiglu(x, gate, up, down):
    g, u = product(x, gate), product(x, up)
    inner = [[a / (1 + math.exp(-a)) * b for a, b in zip(*pair)] for pair in zip(g, u)]
    return np.array(product(inner, down), np.float32)
""",
    "head": """
def head(x, table):
    logits = np.zeros((len(x), len(table)), dtype=np.float32)
    for t in range(len(x)):
        for v in range(len(table)):
            for d in range(x.shape[1]):
                logits[t, v] += x[t, d] * table[v, d]
    return logits
""",
}
"""Products as loops over single numbers."""
