"""The config: what is read, and that nothing is guessed."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarium.config import ModelConfig, RopeScaling
from llamarium.cost import count_parameters, flops, kv_bytes_per_token
from llamarium.errors import ConfigError, LlamariumError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import PRESETS, preset
from llamarium.strict_json import NotJson, parse_json

pytestmark = pytest.mark.torch

SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING["original_max_position_embeddings"] = 8192
GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": SCALING,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SMALLER = "num_key_value_heads head_dim rope_scaling tie_word_embeddings bos_token_id eos_token_id".split()


def test_a_published_config_equals_its_preset() -> None:
    assert ModelConfig.from_hf(GOOD) == preset("llama-3.2-1b")


def test_old_type_key_and_defaults_that_follow_from_the_shape() -> None:
    old = {k: v for k, v in GOOD.items() if k not in SMALLER} | {
        "rope_scaling": {**{k: v for k, v in SCALING.items() if k != "rope_type"}, "type": "llama3"}
    }
    config = ModelConfig.from_hf(old)
    assert (config.num_key_value_heads, config.head_dim, config.tie_word_embeddings) == (32, 64, False)
    assert config.rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert (config.bos_token_id, config.eos_token_id) == (None, ())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_round_trip_in_either_spelling(name: str) -> None:
    config = preset(name)
    both = config.to_hf()
    v4 = {k: v for k, v in both.items() if k != "rope_parameters"}
    v5 = {k: v for k, v in both.items() if k not in ("rope_theta", "rope_scaling")}
    assert ModelConfig.from_hf(both) == ModelConfig.from_hf(v4) == ModelConfig.from_hf(v5) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {**SCALING, "rope_theta": 10000.0}}, r"rope_theta is given twice: \[10000.0, 500000.0\]"),
        ({"rope_parameters": {**SCALING, "factor": 8.0, "rope_theta": 5e5}}, r"rope_scaling says .*32.* and .*8\.0"),
        ({"rope_scaling": {**SCALING, "rope_type": "longrope"}}, r"rope_type is '?longrope'?; supported are llama3"),
        ({"rope_scaling": {**SCALING, "rope_type": ["yarn"]}}, r"rope_type is "),
        ({"rope_scaling": {"factor": 2.0}}, r"a factor but no rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, r"factor is None; expected float"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"rope_scaling.factor is 0.0; expected .* at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -4.0}}, r"rope_scaling.factor is -4.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, r"rope_scaling.factor is nan"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e9}}, r"rope_scaling.factor is 1000000000.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 10**400}}, r"factor is "),
        ({"rope_scaling": {**YARN, "attention_factor": 0.0}}, r"rope_scaling.attention_factor is 0.0"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, r"rope_scaling.attention_factor is -1.0"),
        ({"rope_scaling": {**YARN, "beta_fast": -1.0}}, r"rope_scaling.beta_fast is -1.0"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, r"rope_scaling.beta_fast is 1.0"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1e400}}, r"mscale_all_dim is inf"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, r"truncate is 1; expected bool"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, r"original_max_position_embeddings is 0"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, r"rope_theta is 1.0; expected a number above 1"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor is '?0.5"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": SCALING}}, r"differs by layer"),
        ({"rope_interleaved": True}, r"rope_interleaved is true"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types differ"),
        ({"rope_scaling": {k: v for k, v in SCALING.items() if k != "factor"}}, r"factor is missing"),
        ({"rope_scaling": {**SCALING, "factor": "32"}}, r"factor is \"'32'\"|factor is '32'"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, r"rope_scaling.factor is 0.5; expected .* at least 1"),
        (
            {"rope_scaling": {**SCALING, "factor": float("inf")}},
            r"rope_scaling.factor is inf; expected a finite number",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling is '?\[1\]'?; expected dict"),
        ({"model_type": "gemma"}, r'model_type is .*gemma.*; supported are "llama" and "mistral"'),
        ({"model_type": ["llama"]}, r"model_type is "),
        ({"model_type": ...}, r'model_type is missing; expected "llama"'),
        ({"hidden_act": "gelu"}, r'hidden_act is "gelu"; supported is "silu" only'),
        ({"attention_bias": 1}, r"attention_bias is 1; expected bool"),
        ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window is 0; expected at least 1"),
        ({"model_type": "mistral", "sliding_window": -5}, r"sliding_window is -5; expected at least 1"),
        ({"model_type": "mistral", "sliding_window": 0.5}, r"sliding_window is 0.5; expected int"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            r"whether attention is windowed is not clear",
        ),
        ({"vocab_size": ...}, r"vocab_size is missing"),
        ({"vocab_size": -3}, r"vocab_size is -3; expected a whole number from 1 to 2\^31"),
        ({"hidden_size": "2048"}, r"hidden_size is \"?'2048'\"?; expected int"),
        ({"hidden_size": True}, r"hidden_size is True; expected int"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads is 5; expected a divisor of num_attention_heads \(32\)"),
        ({"head_dim": 63}, r"head_dim is 63; expected an even number"),
        ({"head_dim": ..., "hidden_size": 2049}, r"hidden_size 2049 is not a multiple of num_attention_heads 32"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0.0; expected a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is '?1000"),
        ({"rope_theta": 10**400}, r"rope_theta is '?1000"),
        ({"rope_theta": 1e-300}, r"rope_theta is 1e-300; expected a finite number above 1e-30"),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers is 1000000000000"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id is .*; expected ids of 0 or more"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id is \[1, 2\]; expected one id"),
    ],
)
def test_what_is_refused_says_found_and_expected(change: dict[str, Any], message: str) -> None:
    raw = {k: v for k, v in {**GOOD, **change}.items() if v is not ...}
    with pytest.raises(ConfigError, match=f"my.json: .*{message}"):
        ModelConfig.from_hf(raw, "my.json")


def test_unknown_fields_are_a_warning_that_names_them() -> None:
    with pytest.warns(UserWarning, match="fields not known and not used: logit_softcap"):
        ModelConfig.from_hf({**GOOD, "logit_softcap": 30.0})


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name not in names} | changes


def test_missing_fields_have_the_published_defaults() -> None:
    from transformers import LlamaConfig

    left_out = "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads"
    raw = without(*left_out, "hidden_act", "tie_word_embeddings", "attention_bias")
    config, theirs = ModelConfig.from_hf(raw), LlamaConfig(**raw)
    for name in (*left_out[2:], "tie_word_embeddings", "initializer_range", "attention_bias", "mlp_bias"):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] == 10000
    noted = " ".join(config.notes)
    assert all(name in noted for name in ("rope_theta 10000", "rms_norm_eps 1e-06", "max_position_embeddings 2048"))
    assert len(config.notes) == 3
    assert ModelConfig.from_hf(GOOD).notes == ()
    assert config == replace(config, notes=())


def test_missing_fields_of_a_mistral() -> None:
    from transformers import MistralConfig

    left_out = "max_position_embeddings", "num_key_value_heads", "rope_theta", "rope_scaling", "attention_bias"
    raw = without(*left_out, model_type="mistral", sliding_window=None)
    config, theirs = ModelConfig.from_hf(raw), MistralConfig(**raw)
    assert config.max_position_embeddings == theirs.max_position_embeddings == 131072
    assert config.num_key_value_heads == theirs.num_key_value_heads == 8
    assert config.sliding_window is theirs.sliding_window is None
    assert ModelConfig.from_hf(raw | {"num_key_value_heads": None}).num_key_value_heads == 32


def test_a_window_that_holds_the_whole_context_is_none() -> None:
    for raw in ({"sliding_window": 4096}, {"sliding_window": 5000}, {}):  # the default is 4096
        config = ModelConfig.from_hf(GOOD | {"model_type": "mistral", "max_position_embeddings": 4096} | raw)
        assert config.sliding_window is None and config.to_hf()["model_type"] == "llama"


def test_a_llamas_window_and_a_mistrals_bias_are_not_used() -> None:
    with pytest.warns(UserWarning, match="sliding_window 4096"):
        assert ModelConfig.from_hf(GOOD | {"sliding_window": 4096}) == ModelConfig.from_hf(GOOD)
    with pytest.warns(UserWarning, match="attention_bias"):
        raw = GOOD | {"model_type": "mistral", "sliding_window": None, "attention_bias": True}
        assert not ModelConfig.from_hf(raw).attention_bias


def test_a_window_is_written_as_a_mistrals() -> None:
    config = replace(preset("tiny"), sliding_window=7)
    written = config.to_hf()
    assert (written["model_type"], written["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert written["sliding_window"] == 7
    assert "sliding_window" not in preset("tiny").to_hf()
    with pytest.raises(ConfigError):
        replace(config, attention_bias=True)


@pytest.mark.parametrize("names", [["LLaMAForCausalLM"], ["MistralForCausalLM"], ["LlamaForCausalLM", "Other"]])
def test_spellings_of_the_architecture(names: list[str]) -> None:
    assert ModelConfig.from_hf(GOOD | {"architectures": names}) == ModelConfig.from_hf(GOOD)
    raw = without("model_type", architectures=names, sliding_window=None)
    assert ModelConfig.from_hf(raw) == ModelConfig.from_hf(GOOD)


def test_fields_without_effect_are_noted_or_silent() -> None:
    config = ModelConfig.from_hf(GOOD | {"pretraining_tp": 2, "use_cache": False, "attention_dropout": 0.1})
    assert config == ModelConfig.from_hf(GOOD) and ["pretraining_tp 2" in note for note in config.notes] == [True]


def test_biases_are_read_and_written() -> None:
    config = ModelConfig.from_hf(GOOD | {"attention_bias": True, "mlp_bias": True})
    assert config.attention_bias and config.mlp_bias and ModelConfig.from_hf(config.to_hf()) == config


def test_fields_that_a_type_of_scaling_does_not_use_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="attention_factor"):
        assert ModelConfig.from_hf(GOOD | {"rope_scaling": {**SCALING, "attention_factor": 2.0}}) == preset(
            "llama-3.2-1b"
        )


def test_the_original_context_of_the_config_comes_first() -> None:
    raw = GOOD | {"rope_scaling": YARN, "original_max_position_embeddings": 1024}
    scaling = ModelConfig.from_hf(raw).rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 1024
    default = {"rope_type": "yarn", "factor": 4.0}
    config = ModelConfig.from_hf(GOOD | {"rope_scaling": default})
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position_embeddings == 131072 and len(config.notes) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), value=JSON)
@pytest.mark.filterwarnings("ignore")
def test_any_value_of_any_field_is_read_or_refused(name: str, value: Any) -> None:
    try:
        ModelConfig.from_hf({**GOOD, name: value})
    except LlamariumError as error:
        assert name.split("_")[0] in str(error) or "rope" in str(error)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}{"b": 2}', b"null", b'{"a": 1, "a": 2}']
)
def test_files_that_are_no_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        ModelConfig.from_file(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read as JSON"):
        ModelConfig.from_file(tmp_path / "missing.json")


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="is not a regular file"):
            ModelConfig.from_file(path)


def test_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert ModelConfig.from_file(tmp_path / "config.json") == preset("llama-3.2-1b")


def test_a_preset_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'llama-4'; there are: llama-3\.2-1b"):
        preset("llama-4")


@pytest.mark.parametrize(
    ("name", "total"),
    [("llama-3.2-1b", 1_235_814_400), ("llama-3.2-3b", 3_212_749_824), ("llama-3.1-8b", 8_030_261_248)],
)
def test_published_parameter_counts(name: str, total: int) -> None:
    assert count_parameters(preset(name)).total == total
    with torch.device("meta"):
        model = LlamaForCausalLM(preset(name))
    assert sum(p.numel() for p in model.parameters()) == total


def test_flops_are_what_the_matmuls_do() -> None:
    """Counted by torch itself over one pass; norms, rotations and softmax are not matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    from llamarium.attention import EagerAttend

    config = replace(preset("tiny"), num_key_value_heads=4)
    model = init_weights(LlamaForCausalLM(config), seed=0)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(9).unsqueeze(0), attend=EagerAttend())
    square = 4 * 9 * 9 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    triangle = 4 * 45 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert flops(config, 9, num_logits=9) == counter.get_total_flops() - square + triangle
    step_by_step = sum(flops(config, 1, n) for n in range(9))
    assert step_by_step == flops(config, 9, num_logits=9)


def test_kv_bytes() -> None:
    assert kv_bytes_per_token(preset("llama-3.2-1b")) == 32_768
    assert kv_bytes_per_token(preset("smollm2-135m"), "float32") == 46_080


def test_fresh_weights_belong_to_their_seed() -> None:
    first, again, other = (init_weights(LlamaForCausalLM(preset("tiny")), seed=s) for s in (1, 1, 2))
    state = first.state_dict()
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in state.items())
    key = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(state[key], other.state_dict()[key])
    assert float(state[key].std()) == pytest.approx(0.02, rel=0.05)
    assert bool((state["model.norm.weight"] == 1).all())


@pytest.mark.parametrize("names", [["GemmaForCausalLM"], "LlamaForCausalLM", [{}]])
def test_other_architectures_are_refused(names: Any) -> None:
    assert ModelConfig.from_hf(GOOD | {"architectures": None}) == ModelConfig.from_hf(GOOD)
    with pytest.raises(ConfigError, match="architectures is "):
        ModelConfig.from_hf(GOOD | {"architectures": names})


def test_the_last_of_many_keys_that_stands_twice_is_found_at_once() -> None:
    keys = [f'"key {i}": 0' for i in range(300_000)]
    assert len(parse_json("{" + ", ".join(keys) + "}")) == 300_000
    begin = time.process_time()
    with pytest.raises(NotJson, match="key 299999"):
        parse_json("{" + ", ".join([*keys, keys[-1]]) + "}")
    assert time.process_time() - begin < 2  # comparing each key with each takes an hour
