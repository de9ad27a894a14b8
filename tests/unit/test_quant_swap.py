"""Replacing Linears in place: the tree, memory, and what cannot be done."""

import weakref

import pytest
import torch
from torch import nn

from llamarium.errors import OptionError
from llamarium.presets import preset
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.swap import quantize_linears, swap_linears

KINDS = {"NF4": Linear4bit, "Q8_0": Linear8bit, "q4_1": LinearInt4}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=False)
        self.mlp = nn.Sequential(nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False))

    def forward(self, x):
        return x + self.mlp(self.q_proj(x))


class Model(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(64, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.mark.parametrize("method", KINDS)
def test_all_but_the_head_are_quantized(method):
    model, ids = Model(), torch.arange(6).view(2, 3)
    weights = {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    logits = model(ids)
    quantize_linears(model, method)
    kinds = {name: type(model.get_submodule(name)) for name in weights}
    assert kinds.pop("lm_head") is nn.Linear and set(kinds.values()) == {KINDS[method]} and len(kinds) == 9
    for name in kinds:
        expected = KINDS[method].from_weight(weights[name]).dequantize()
        assert torch.equal(model.get_submodule(name).dequantize(), expected)
    assert (model(ids) - logits).norm() < 0.15 * logits.norm()
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("method", KINDS)
def test_the_meta_device_gives_the_same_tree(method):
    with torch.device("meta"):
        meta = Model()
    real = Model()
    quantize_linears(meta, method)
    quantize_linears(real, method)
    assert repr(meta) == repr(real)
    shapes = [{name: (t.shape, t.dtype) for name, t in model.state_dict().items()} for model in (meta, real)]
    # A checkpoint's bf16 becomes no part of the tree; everything else agrees.
    assert shapes[0] == shapes[1] and all(t.is_meta for t in meta.state_dict().values())


def test_one_linear_at_a_time_is_alive_twice():
    """When the next Linear is asked for, the one before it is gone."""
    model, before = Model(), []

    def factory(name, linear):
        assert all(ref() is None for ref in before), name
        before.append(weakref.ref(linear))
        return Linear4bit.from_weight(linear.weight)

    assert swap_linears(model, factory) == 9


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), 0), (("lm_head",), 1), (("layers.1",), 3), (("mlp",), 6), (("q_proj",), 3), (("layers.0.mlp.2",), 1),
        (("proj", "layer"), 0), (("lm_head", "layers"), 10),
    ],
)  # fmt: skip
def test_skip_names_whole_parts_of_a_path(skip, left):
    model = Model(tied=False)
    assert swap_linears(model, lambda name, linear: nn.Identity(), skip) == 10 - left
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == left


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(OptionError, match="'int3'; expected one of NF4, Q8_0, Q4_1"):
        quantize_linears(Model(), "int3")
    with pytest.raises(OptionError, match="lm_head shares its weight"):
        quantize_linears(Model(), "NF4", skip=())
    with torch.device("meta"), pytest.raises(OptionError, match="lm_head shares its weight"):
        quantize_linears(Model(), "NF4", skip=())
    with pytest.raises(OptionError, match="0 has a bias"):
        quantize_linears(nn.Sequential(nn.Linear(64, 64)), "Q8_0")
    model = Model()
    quantize_linears(model, "NF4")
    with pytest.raises(OptionError, match="no Linear left to quantize as Q8_0"):
        quantize_linears(model, "Q8_0")


def test_an_untied_head_may_be_quantized():
    model = Model(tied=False)
    quantize_linears(model, "Q8_0", skip=())
    assert isinstance(model.lm_head, Linear8bit)


def test_llama_has_the_published_tree():
    llama = pytest.importorskip("llamarium.model.llama")
    with torch.device("meta"):
        model = llama.LlamaForCausalLM(preset("llama-3.2-1b"))
    quantize_linears(model, "NF4")
    shown = [line.strip() for line in repr(model).splitlines() if "Linear" in line]
    sizes = {"q": 2048, "k": 512, "v": 512, "o": 2048}
    expected = [f"({n}_proj): Linear4bit(in_features=2048, out_features={s}, bias=False)" for n, s in sizes.items()]
    expected += [f"({n}_proj): Linear4bit(in_features=2048, out_features=8192, bias=False)" for n in ("gate", "up")]
    expected += ["(down_proj): Linear4bit(in_features=8192, out_features=2048, bias=False)"]
    assert shown == [*expected, "(lm_head): Linear(in_features=2048, out_features=128256, bias=False)"]
