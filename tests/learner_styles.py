"""Right functions of the steps of `llamarium build`, as learners write them: not as the library does, in NumPy."""

STYLES: dict[str, dict[str, str]] = {
    "merge": {
        "best of a loop": """
def merge(piece, rank):
    parts = [bytes([b]) for b in piece]
    while len(parts) > 1:
        best, where = None, -1
        for i in range(len(parts) - 1):
            r = rank(parts[i], parts[i + 1])
            if r is not None and (best is None or r < best):
                best, where = r, i
        if where < 0:
            break
        parts = parts[:where] + [parts[where] + parts[where + 1]] + parts[where + 2:]
    return parts
""",
        "recursion": """
def merge(piece, rank):
    def joined(parts):
        ranks = {i: rank(*parts[i:i + 2]) for i in range(len(parts) - 1)}
        ranks = {i: r for i, r in ranks.items() if r is not None}
        if not ranks:
            return parts
        i = min(ranks, key=ranks.get)
        return joined(parts[:i] + [b"".join(parts[i:i + 2])] + parts[i + 2:])
    return joined([piece[i:i + 1] for i in range(len(piece))])
""",
        "cuts": """
def merge(piece, rank):
    cuts = list(range(len(piece) + 1))
    while True:
        pairs = [(rank(piece[a:b], piece[b:c]), b) for a, b, c in zip(cuts, cuts[1:], cuts[2:])]
        pairs = sorted(pair for pair in pairs if pair[0] is not None)
        if not pairs:
            return [piece[a:b] for a, b in zip(cuts, cuts[1:])]
        cuts.remove(pairs[0][1])
""",
    },
    "embed": {
        "take": "def embed(ids, table):\n    return np.take(table, ids, axis=0)\n",
        "rows": "def embed(ids, table):\n    return np.stack([table[int(i)] for i in ids])\n",
        "one-hot": """
def embed(ids, table):
    one_hot = (ids[:, None] == np.arange(len(table))).astype(np.float32)
    return one_hot @ table
""",
        "loop": """
def embed(ids, table):
    out = np.empty((len(ids), table.shape[1]), dtype=table.dtype)
    for t in range(len(ids)):
        out[t] = table[ids[t]]
    return out
""",
    },
    "rms_norm": {
        "numbers": """
import math
def rms_norm(x, gamma, eps):
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        total = 0.0
        for value in x[t]:
            total += float(value) ** 2
        root = math.sqrt(total / x.shape[1] + eps)
        for d in range(x.shape[1]):
            out[t, d] = x[t, d] / root * gamma[d]
    return out
""",
        "einsum": """
def rms_norm(x, gamma, eps):
    square = np.einsum('td,td->t', x, x) / x.shape[-1]
    return np.einsum('td,t,d->td', x, (square + eps) ** -0.5, gamma).astype(np.float32)
""",
        "norm": """
def rms_norm(x, gamma, eps):
    size = np.linalg.norm(x, axis=1, keepdims=True)
    return gamma * x / np.sqrt(size * size / x.shape[1] + eps)
""",
        "double": """
def rms_norm(x, gamma, eps):
    x = x.astype('float64')
    return x * gamma / np.sqrt(np.square(x).sum(-1)[:, None] / x.shape[1] + eps)
""",
        "rows": """
def rms_norm(x, gamma, eps):
    return np.array([row * gamma / np.sqrt(np.dot(row, row) / len(row) + eps) for row in x], dtype=np.float32)
""",
    },
    "project": {
        "einsum": """
def project(x, w_q, w_k, w_v, n, k):
    cut = lambda w, heads: np.einsum('td,hsd->ths', x, w.reshape(heads, -1, x.shape[1]))
    return cut(w_q, n), cut(w_k, k), cut(w_v, k)
""",
        "heads": """
def project(x, w_q, w_k, w_v, n, k):
    size = w_q.shape[0] // n
    def heads(w, count):
        return np.stack([x @ w[i * size:(i + 1) * size].T for i in range(count)], axis=1)
    return heads(w_q, n), heads(w_k, k), heads(w_v, k)
""",
        "fused": """
def project(x, w_q, w_k, w_v, n, k):
    h = len(w_q) // n
    qkv = np.matmul(x, np.concatenate([w_q, w_k, w_v]).T)
    q, key, v = np.split(qkv, [n * h, n * h + k * h], axis=1)
    return [q.reshape(-1, n, h), key.reshape(-1, k, h), v.reshape(-1, k, h)]
""",
        "dot": """
def project(x, w_q, w_k, w_v, n, k):
    T, H = x.shape[0], w_k.shape[0] // k
    return (np.dot(w_q, x.T).T.reshape(T, n, H), np.dot(w_k, x.T).T.reshape(T, k, H),
            np.inner(x, w_v).reshape(T, k, H))
""",
        "numbers": """
def project(x, w_q, w_k, w_v, n, k):
    T, D = x.shape
    H = w_q.shape[0] // n
    def made(w, heads):
        out = np.zeros((T, heads, H), np.float32)
        for t in range(T):
            for head in range(heads):
                for i in range(H):
                    out[t, head, i] = np.sum(x[t] * w[head * H + i])
        return out
    return made(w_q, n), made(w_k, k), made(w_v, k)
""",
    },
    "rotate": {
        "complex": """
def rotate(q, k, v, positions, theta):
    half = q.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) * 2 / q.shape[-1]))[:, None, :]
    def turned(x):
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1).astype(np.float32)
    return turned(q), turned(k), v
""",
        "rotate half": """
def rotate(q, k, v, positions, theta):
    H = q.shape[-1]
    inv_freq = 1.0 / theta ** (np.arange(0, H, 2, dtype=np.float32) / H)
    emb = np.outer(positions, inv_freq)
    emb = np.concatenate((emb, emb), axis=-1)[:, None]
    cos, sin = np.cos(emb), np.sin(emb)
    def rotate_half(x):
        return np.concatenate((-x[..., H // 2:], x[..., : H // 2]), axis=-1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v
""",
        "numbers": """
import math
def rotate(q, k, v, positions, theta):
    def turned(x):
        T, N, H = x.shape
        out = np.empty((T, N, H), dtype=np.float32)
        for t in range(T):
            for i in range(H // 2):
                angle = int(positions[t]) * theta ** (-2 * i / H)
                c, s = math.cos(angle), math.sin(angle)
                for n in range(N):
                    a, b = x[t, n, i], x[t, n, i + H // 2]
                    out[t, n, i] = a * c - b * s
                    out[t, n, i + H // 2] = b * c + a * s
        return out
    return turned(q), turned(k), v
""",
        "matrices": """
def rotate(q, k, v, positions, theta):
    h = q.shape[-1] // 2
    angles = np.multiply.outer(positions, np.power(float(theta), -np.arange(h) / h))
    c, s = np.cos(angles), np.sin(angles)
    turn = np.array([[c, -s], [s, c]])
    def turned(x):
        pairs = x.reshape(*x.shape[:-1], 2, h)
        return np.einsum('abti,tnbi->tnai', turn, pairs).reshape(x.shape)
    return turned(q), turned(k), v
""",
        "joined heads": """
def rotate(q, k, v, positions, theta):
    n, half = q.shape[1], q.shape[2] // 2
    x = np.concatenate([q, k], axis=1).copy()
    angle = positions.reshape(-1, 1, 1) / theta ** (np.arange(half) / half)
    a, b = x[:, :, :half].copy(), x[:, :, half:].copy()
    x[:, :, :half] = a * np.cos(angle) - b * np.sin(angle)
    x[:, :, half:] = b * np.cos(angle) + a * np.sin(angle)
    return x[:, :n], x[:, n:], v.copy()
""",
    },
    "attend": {
        "heads": """
def attend(q, k, v, positions):
    T, N, H = q.shape
    S, K, _ = k.shape
    pattern = np.zeros((N, T, S), np.float32)
    out = np.zeros((T, N, H), np.float32)
    for n in range(N):
        kv = n // (N // K)
        for t in range(T):
            seen = int(positions[t]) + 1
            scores = k[:seen, kv] @ q[t, n] / H ** 0.5
            e = np.exp(scores - scores.max())
            pattern[n, t, :seen] = e / e.sum()
            out[t, n] = pattern[n, t] @ v[:, kv]
    return pattern, out
""",
        "groups": """
def attend(q, k, v, positions):
    (T, N, H), (S, K, _) = q.shape, k.shape
    grouped = q.reshape(T, K, N // K, H)
    scores = np.einsum('tkgh,skh->kgts', grouped, k) * H ** -0.5
    scores = scores + np.where(np.arange(S)[None] > positions[:, None], -1e9, 0)
    scores -= scores.max(-1, keepdims=True)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return p.reshape(N, T, S), np.einsum('kgts,skh->tkgh', p, v).reshape(T, N, H)
""",
        "matmul": """
def attend(q, k, v, positions):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat(times, 1).transpose(1, 2, 0), v.repeat(times, 1).transpose(1, 0, 2)
    scores = q.transpose(1, 0, 2) @ k / np.sqrt(q.shape[-1])
    hidden = np.arange(k.shape[-1])[None, :] > positions[:, None]
    scores[:, hidden] = -np.inf
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)
    return p, np.swapaxes(p @ v, 0, 1)
""",
        "tril": """
def attend(q, k, v, positions):
    T, N, H = q.shape
    S = k.shape[0]
    index = np.arange(N) // (N // k.shape[1])
    scores = np.einsum('tnh,snh->nts', q, k[:, index]) / np.sqrt(H)
    mask = np.tril(np.ones((S, S), bool))[positions]
    top = np.max(np.where(mask, scores, -np.inf), -1, keepdims=True)
    e = np.where(mask, np.exp(np.minimum(scores - top, 0)), 0)
    p = e / np.sum(e, -1, keepdims=True)
    return p, np.einsum('nts,snh->tnh', p, v[:, index])
""",
    },
    "join": {
        "sum": """
def join(heads, w_o):
    T, N, H = heads.shape
    return sum(heads[:, n] @ w_o[:, n * H:(n + 1) * H].T for n in range(N))
""",
        "einsum": """
def join(heads, w_o):
    return np.einsum('tnh,dnh->td', heads, w_o.reshape(len(w_o), *heads.shape[1:]))
""",
        "concatenate": """
def join(heads, w_o):
    side_by_side = np.concatenate([heads[:, n, :] for n in range(heads.shape[1])], axis=1)
    return np.matmul(side_by_side, w_o.T)
""",
        "tokens": "def join(heads, w_o):\n    return np.array([w_o @ heads[t].flatten() for t in range(len(heads))])\n",
    },
    "swiglu": {
        "numbers": """
import math
def swiglu(x, gate, up, down):
    out = np.zeros((len(x), len(down)), np.float32)
    for t in range(len(x)):
        inner = []
        for f in range(len(gate)):
            z = float(np.dot(gate[f], x[t]))
            inner.append(z / (1 + math.exp(-z)) * float(np.dot(up[f], x[t])))
        out[t] = down @ np.array(inner, np.float32)
    return out
""",
        "fused": """
def swiglu(x, gate, up, down):
    both = x @ np.vstack([gate, up]).T
    g, u = both[:, :len(gate)], both[:, len(gate):]
    return (g * (1 / (1 + np.exp(-g))) * u) @ down.T
""",
        "tanh": """
def swiglu(x, gate, up, down):
    g = np.einsum('td,fd->tf', x, gate)
    sigmoid = 0.5 * (1 + np.tanh(g / 2))
    return np.einsum('tf,df->td', g * sigmoid * (x @ up.T), down)
""",
        "tokens": """
def swiglu(x, gate, up, down):
    def of_row(row):
        z = gate @ row
        return down @ (z / (1 + np.exp(-z)) * (up @ row))
    return np.apply_along_axis(of_row, 1, x)
""",
    },
}
