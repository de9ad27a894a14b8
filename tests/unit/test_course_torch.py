"""`llamarium build` in PyTorch: right functions pass, mistakes are named, and the steps equal PyTorch's own."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

import llamarium
from learners import CONFIG, check_source, random_weights
from llamarium.config import ModelConfig
from llamarium.course import check_whole
from llamarium.course.folder.source import solution, start
from llamarium.course.outline import Course, file_of, step_named
from llamarium.course.passes import RIGHT, Pass, Weights
from llamarium.course.steps import STEPS
from llamarium.model.llama import LlamaForCausalLM
from serving import save_small_model

pytestmark = pytest.mark.torch

STYLES = {
    "embed": "def embed(ids, table):\n    return F.embedding(ids, table)\n",
    "rms_norm": "def rms_norm(x, gamma, eps):\n    return F.rms_norm(x, gamma.shape, gamma, eps)\n",
    "project": """
def project(x, w_q, w_k, w_v, n, k):
    qkv = F.linear(x, torch.cat([w_q, w_k, w_v]))
    h = len(w_q) // n
    return tuple(part.unflatten(-1, (-1, h)) for part in qkv.split([n * h, k * h, k * h], dim=-1))
""",
    "rotate": """
def rotate(q, k, v, positions, theta):
    half = q.shape[-1] // 2
    angles = torch.outer(positions.float(), theta ** (-torch.arange(half) / half))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    def turned(x):
        z = torch.view_as_complex(torch.stack(x.split(half, -1), -1).contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)
    return turned(q), turned(k), v
""",
    "attend": """
def attend(q, k, v, positions):
    q, k, v = (z.transpose(0, 1) for z in (q, k, v))
    times = len(q) // len(k)
    k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
    mask = torch.arange(k.shape[1]) <= positions[:, None]
    heads = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float('-inf'))
    return scores.softmax(-1), heads.transpose(0, 1)
""",
    "join": "def join(heads, w_o):\n    return F.linear(heads.flatten(1), w_o)\n",
    "swiglu": """
def swiglu(x, gate, up, down):
    g, u = F.linear(x, torch.cat([gate, up])).chunk(2, dim=-1)
    return F.linear(F.silu(g) * u, down).requires_grad_()
""",
    "layer": """
def layer(x, norm_1, attention, norm_2, mlp):
    x = torch.add(x, attention(norm_1(x)))
    return x + mlp(norm_2(x))
""",
    "trunk": """
def trunk(ids, embed, layers, norm):
    x = embed(ids)
    for run in layers:
        x = run(x)
    return norm(x)
""",
    "head": "def head(x, table):\n    return torch.einsum('td,vd->tv', x, table)\n",
    "choose": """
def choose(logits, temperature, top_p, u):
    if temperature == 0:
        return logits.argmax()
    p, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
    return order[(p.cumsum(-1) / p.sum() > u).int().argmax()].item()
""",
    "generate": """
def generate(ids, bos_id, stop_ids, max_new_tokens, next_logits, choose):
    text = torch.tensor(([bos_id] if bos_id is not None and ids[0] != bos_id else []) + ids)
    start = len(text)
    for _ in range(max_new_tokens):
        token = choose(next_logits(text.tolist()))
        if token in stop_ids:
            break
        text = torch.cat([text, torch.tensor([token])])
    return list(text[start:])
""",
    "attend_cached": """
def attend_cached(x, k_past, v_past, project, rotate, attend, join):
    positions = k_past.size(0) + torch.arange(x.size(0))
    q, k, v = rotate(*project(x), positions)
    k, v = torch.cat([k_past, k]), torch.cat([v_past, v])
    return join(attend(q, k, v, positions)[1]), k, v
""",
    "unpack_q4_0": """
def unpack_q4_0(block):
    raw = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    codes = torch.cat([raw[2:] & 15, raw[2:] >> 4]).float()
    return (codes - 8) * raw[:2].view(torch.float16).float()
""",
    "loss": """
def loss(logits, ids, is_answer):
    targets = torch.where(is_answer, ids, -100)
    return F.cross_entropy(logits[:-1], targets[1:], ignore_index=-100)
""",
    "adamw_step": """
def adamw_step(w, g, m, v, step, lr, b1, b2, eps, decay):
    m, v = torch.lerp(g, m, b1), v.mul(b2).addcmul(g, g, value=1 - b2)
    root = (v / (1 - b2 ** step)).sqrt().add(eps)
    return (w * (1 - lr * decay)).addcdiv(m / (1 - b1 ** step), root, value=-lr), m, v
""",
    "lora": "def lora(x, w, a, b, alpha):\n    return F.linear(x, w) + F.linear(x @ a.T, b) * (alpha / len(a))\n",
}
HEAD = "import torch\nimport torch.nn.functional as F\n"


@pytest.mark.parametrize("name", STYLES)
def test_a_right_function_in_pytorch_passes(name: str, tmp_path: Path) -> None:
    result = check_source(tmp_path, name, HEAD + STYLES[name])
    assert result.passed, result
    assert not result.printed


PLANTED = (
    ("rms_norm", "F.rms_norm(x,", "F.layer_norm(x,", None),
    ("attend", "repeat_interleave(times, 0)", "repeat(times, 1, 1)", "The heads of keys are repeated as a whole"),
    ("attend", "torch.arange(k.shape[1]) <= positions[:, None]", "torch.ones(q.shape[1], k.shape[1]).tril().bool()",
     "The mask begins at the first key"),
    ("join", "heads.flatten(1)", "heads.mT.flatten(1)", "The heads are joined in the wrong order"),
    ("swiglu", "F.silu(g) * u", "g * F.silu(u)", "SiLU is on the wrong half"),
    ("swiglu", "F.silu(g) * u", "F.silu(g)", "The product with up is left out"),
    ("swiglu", "F.silu", "F.gelu", "The gate is GELU, computed with erf"),
    ("swiglu", "F.silu(g) * u", "F.sigmoid(g) * u", "The gate is a sigmoid"),
    ("loss", "torch.where(is_answer, ids, -100)", "ids", "The loss is on the prompt too"),
    ("loss", "ignore_index=-100", "reduction='sum'", "The surprises are summed"),
    ("loss", "logits[:-1], targets[1:]", "logits, targets", None),
    ("adamw_step", ".sqrt().add(eps)", ".add(eps).sqrt()", "eps stands inside the root"),
    ("lora", " * (alpha / len(a))", " * alpha", "alpha is not divided by the rank"),
)  # fmt: skip


@pytest.mark.parametrize("index", range(len(PLANTED)))
def test_a_planted_mistake_in_pytorch_is_named(index: int, tmp_path: Path) -> None:
    name, old, new, cause = PLANTED[index]
    assert old in STYLES[name]
    result = check_source(tmp_path, name, HEAD + STYLES[name].replace(old, new))
    assert not result.passed
    assert cause is None or result.cause.startswith(cause), result


def test_what_torch_functions_do_wrong_is_said(tmp_path: Path) -> None:
    for body, status, words in (
        ("x.mul_(2); return x", "changed", "changes its input x_TD"),
        ("x.numpy()[0] = 0; return x", "changed", "changes its input x_TD"),
        ("return x.bfloat16()", "shape", "returned a tensor of dtype bfloat16; expected float32"),
        ("return x.to('meta')", "raised", "raises "),
        ("return torch.empty(1 << 50)", "memory", "needs more memory than a check allows"),
    ):
        result = check_source(tmp_path, "rms_norm", f"{HEAD}def rms_norm(x, gamma, eps):\n    {body}\n")
        assert (result.status, words in result.message) == (status, True), result


# --- what is called right, held to others -----------------------------------------------------------------------------


def cases(name: str) -> list[tuple]:
    return list(step_named(name).cases(np.random.default_rng(0)))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_pass_is_the_modules_in_other_shapes(is_tied: bool) -> None:
    config = ModelConfig.from_hf(CONFIG.to_hf() | {"tie_word_embeddings": is_tied})
    weights = random_weights(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = dict(model.named_parameters(remove_duplicate=False))
    state = {key: torch.from_numpy(weights.table if "embed" in key else weights[key]) for key in names}
    if is_tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    ids = [5, 300, 17, 5, 96, 2]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))
    running = Pass(weights)
    whole, _ = running.logits(np.array(ids), running.empty())
    first, past = running.logits(np.array(ids[:4]), running.empty())
    rest, _ = running.logits(np.array(ids[4:]), past)
    torch.testing.assert_close(torch.from_numpy(whole)[None], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([first, rest]), whole, rtol=1e-4, atol=1e-5)


def test_loss_is_cross_entropy() -> None:
    for logits, ids, is_answer in cases("loss"):
        targets = torch.from_numpy(np.where(is_answer, ids, -100))
        expected = functional.cross_entropy(torch.from_numpy(logits)[:-1], targets[1:])
        assert RIGHT["loss"](logits, ids, is_answer) == pytest.approx(float(expected), rel=1e-5)


def test_adamw_is_torchs_over_several_steps() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 3)).astype(np.float32)
    m = v = np.zeros_like(w)
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3)
    for step in range(1, 6):
        gradient = rng.normal(size=w.shape).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        w, m, v = RIGHT["adamw_step"](w, gradient, m, v, step, 0.01, 0.9, 0.95, 1e-6, 0.3)
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_lora_is_the_merged_weight() -> None:
    for x, w, a, b, alpha in cases("lora"):
        merged = torch.from_numpy(w) + alpha / a.shape[0] * torch.from_numpy(b) @ torch.from_numpy(a)
        expected = functional.linear(torch.from_numpy(x), merged)
        torch.testing.assert_close(torch.from_numpy(RIGHT["lora"](x, w, a, b, alpha)), expected, rtol=1e-4, atol=1e-4)


def test_q4_0_is_ggufs() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_0)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    found = [RIGHT["unpack_q4_0"](block.tobytes()) for block in packed.reshape(-1, 18)]
    assert np.array_equal(np.concatenate(found).reshape(3, 64), expected)


def test_merges_are_tokenizers(smollm2_path: Path) -> None:
    from tokenizers import Tokenizer as Oracle
    from tokenizers.models import BPE

    from llamarium.checkpoints.open import open_model

    tokenizer = open_model(str(smollm2_path)).tokenizer
    assert tokenizer is not None
    text = "The quick brown foxes' 12 naïve 🐸 unbelievable extraordinariness"
    vocabulary = tokenizer.backend.byte_level_bpe()
    parts = [part for piece in vocabulary.cut(text) for part in RIGHT["merge"](piece.encode(), vocabulary.rank)]
    assert [vocabulary.ids[part] for part in parts] == tokenizer.encode(text)
    letters = BPE({"a": 0, "b": 1, "ab": 2, "aba": 3, "bab": 4}, [("a", "b"), ("ab", "a"), ("b", "ab")])
    ranks = {(b"a", b"b"): 0, (b"ab", b"a"): 1, (b"b", b"ab"): 2}
    for word in ("ababab", "babab", "aabba"):
        found = RIGHT["merge"](word.encode(), lambda left, right: ranks.get((left, right)))
        assert [part.decode() for part in found] == Oracle(letters).encode(word).tokens


def test_choices_have_the_probabilities_of_top_p() -> None:
    """Over evenly spaced u, each token comes as often as its probability among the kept is."""
    logits = np.array([0.3, 2.0, -1.0, 1.1, 0.9], np.float32)
    p = torch.from_numpy(logits).div(0.8).softmax(-1)
    ordered, order = p.sort(descending=True)
    kept = order[ordered.cumsum(-1) - ordered < 0.8]
    expected = torch.zeros(5).index_put((kept,), p[kept] / p[kept].sum())
    found = np.bincount([RIGHT["choose"](logits, 0.8, 0.8, (i + 0.5) / 4000) for i in range(4000)], minlength=5) / 4000
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-3)


def test_weights_read_each_key_once_and_again_when_forgotten() -> None:
    read: list[str] = []
    weights = Weights(CONFIG, lambda key: read.append(key) or np.zeros(1, np.float32))
    for _ in range(2):
        _ = weights["a"], weights.table, weights.head
    weights.forget()
    _ = weights["a"]
    assert read == ["a", "model.embed_tokens.weight", "a"]


STALE = """
import numpy as np
memo = {}
def attend_cached(x, k_past, v_past, project, rotate, attend, join):
    positions = len(k_past) + np.arange(len(x))
    q, k, v = rotate(*project(x), positions)
    k, v = memo.setdefault((len(k_past), len(x), x[0].tobytes()), (k, v))
    k, v = np.vstack((k_past, k)), np.vstack((v_past, v))
    return join(attend(q, k, v, positions)[1]), k, v
"""
GREEDY = "def choose(logits, temperature, top_p, u):\n    return int(logits.argsort()[-2])\n"


@pytest.mark.usefixtures("own_folders_list")
def test_a_whole_model_is_right_for_further_prompts_in_the_same_process(tmp_path: Path, smollm2_path: Path) -> None:
    """The first prompt alone would not show a cache that is never cleared."""
    folder = tmp_path / "mine"
    model = save_small_model(tmp_path / "model", smollm2_path)
    start(folder, Course(model=str(model)))
    for step in STEPS:
        (folder / file_of(step)).write_text(solution(step))
    right = check_whole(folder)
    assert right.passed, right
    assert right.text == right.library_text and right.nats < 1e-5 and not right.is_slow
    (folder / file_of(step_named("attend_cached"))).write_text(STALE)
    stale = check_whole(folder)
    assert not stale.passed and stale.nats > 0.01
    assert stale.text == stale.library_text and stale.prompt == "The capital of Japan is"
    (folder / file_of(step_named("attend_cached"))).write_text(solution(step_named("attend_cached")))
    (folder / file_of(step_named("choose"))).write_text(GREEDY)
    other = check_whole(folder)
    assert not other.passed and other.nats < 1e-5 and "the library with" in other.error


@pytest.mark.usefixtures("own_folders_list")
def test_a_model_whose_file_imports_torch_gets_tensors(tmp_path: Path) -> None:
    source = "import torch\ndef join(heads, w):\n    return torch.reshape(heads, (len(heads), -1)) @ w.T\n"
    start(tmp_path / "mine", Course(model="shakespeare-char", texts=("What light is this",)))
    for step in STEPS:
        (tmp_path / "mine" / file_of(step)).write_text(source if step.name == "join" else solution(step))
    texts = {
        llamarium.load(model, dtype="float32", device="cpu").generate("What light", temperature=0, max_tokens=12).text
        for model in (tmp_path / "mine", "shakespeare-char")
    }
    assert len(texts) == 1
