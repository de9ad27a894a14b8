"""Experiments of one flag: the same run twice or three times, one thing changed, and a page that compares them.

| experiment | what is changed                                                         |
|------------|-------------------------------------------------------------------------|
| tied       | the head is the embedding table, or a matrix of its own                 |
| rope       | queries and keys are turned by their position, or nothing knows it      |
| causal     | a token sees those before it, or its whole row                          |
| heads      | key-value heads: one for each query head, one for some, one for all     |
| norm       | RMSNorm before every block, or none                                     |

All runs of an experiment see the same rows in the same order, and begin with the same weights where they have the same
matrices. What no Llama config can say (no RoPE, no norm, looking ahead) is done to a model from outside, never by a
switch within it. Such a model is no Llama, and its checkpoints do not look like one: they have no `config.json`, and
nothing but the experiment goes on from them.
"""

import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.attention import CausalAttend, attend_eagerly
from llamarium.checkpoints.decode import tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.save import SAFETENSORS_DTYPES, Weight, write_safetensors
from llamarium.checkpoints.storage import TensorFile
from llamarium.config import read_json_object
from llamarium.errors import TrainingError, show_value
from llamarium.io import write_json
from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.rope import Rotary
from llamarium.presets import preset
from llamarium.train.conduct import conduct, is_acceptance, save_settings
from llamarium.train.config import PretrainConfig
from llamarium.train.data.batch import Rows
from llamarium.train.objective import Trunk
from llamarium.train.pretrain import prepare
from llamarium.train.report.write import compare, write_report
from llamarium.train.setup import Emit, Event, Setup
from llamarium.train.state.lock import RunLock
from llamarium.train.step import bidirectional_trunk, causal_trunk, evaluate

Watch = Callable[[str], AbstractContextManager[Emit]]
"""From a variant's name to what shows its events."""

_WEIGHTS, _ABOUT = "variant.safetensors", "variant.json"
_FORMAT = "weights of an experiment: no Llama config describes this model, and only its experiment can go on from it"


# --- what is swapped in -----------------------------------------------------------------------------------------------


class NoRotary(nn.Module):
    """Stands where `LlamaRotaryEmbedding` stood, and turns nothing: the rotation by zero."""

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cos 0 and sin 0, whatever the positions are."""
        one_1111 = torch.ones(1, 1, 1, 1, dtype=dtype, device=positions_BT.device)
        return Rotary(one_1111, torch.zeros_like(one_1111))


class NoNorm(nn.Module):
    """Stands where a `LlamaRMSNorm` stood, and returns what it is given.

    Its weight is no parameter and multiplies nothing: the model asks it for device and dtype.
    """

    weight: Tensor

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight.detach().clone(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return x."""
        return x_BTD


def without_rope(model: LlamaForCausalLM) -> None:
    """Take the positions away, in place."""
    model.model.set_submodule("rotary_emb", NoRotary())


def without_norms(model: LlamaForCausalLM) -> None:
    """Take every norm away, in place."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, LlamaRMSNorm)]
    for name, module in norms:
        model.set_submodule(name, NoNorm(module))


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the runs.

    Attributes:
        changes: Settings that are its own.
        transform: What is done to the model.
        trunk: How its hidden states are computed.
    """

    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    transform: Callable[[LlamaForCausalLM], None] | None = None
    trunk: Trunk = causal_trunk

    @property
    def is_llama(self) -> bool:
        """Whether a Llama config describes the model, so that it is saved as one."""
        return self.transform is None and self.trunk is causal_trunk


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs that differ in one thing.

    Attributes:
        title: Of the page.
        note: How to read it.
        variants: By name; made from the settings that they share.
    """

    title: str
    note: str
    variants: Callable[[PretrainConfig], Mapping[str, Variant]]


def _tied(config: PretrainConfig) -> dict[str, Variant]:
    if config.tie_word_embeddings is not None:
        raise TrainingError("the experiment decides tie_word_embeddings itself; leave it out")
    return {"tied": Variant({"tie_word_embeddings": True}), "untied": Variant({"tie_word_embeddings": False})}


def _causal(config: PretrainConfig) -> dict[str, Variant]:
    if config.validation == 0:
        raise TrainingError("validation is 0; expected a share above it, by which the experiment shows who cheats")
    return {"causal": Variant(), "bidirectional": Variant(trunk=bidirectional_trunk)}


def _heads(config: PretrainConfig) -> dict[str, Variant]:
    base = preset(config.preset)
    heads = config.num_attention_heads or base.num_attention_heads
    between = [k for k in range(2, heads) if heads % k == 0]
    groups = config.num_key_value_heads or min(between, key=lambda k: abs(k - math.sqrt(heads)), default=0)
    if not between:
        raise TrainingError(f"num_attention_heads is {heads}; expected a number that can be grouped, such as 4 or 6")
    if groups not in between:
        raise TrainingError(
            f"num_key_value_heads is {groups}; expected one between 1 and {heads} that divides {heads} query heads: "
            f"{', '.join(map(str, between))}"
        )
    counts = {"mha": heads, "gqa": groups, "mqa": 1}
    return {name: Variant({"num_key_value_heads": count}) for name, count in counts.items()}


EXPERIMENTS: Mapping[str, Experiment] = {
    "tied": Experiment(
        "Tied against untied embeddings",
        "Tied, one table both reads and writes tokens: fewer parameters, and every row learns from both sides. The "
        "smaller the model, the larger is the table's share of it, and the more of its parameters tying saves.",
        _tied,
    ),
    "rope": Experiment(
        "RoPE against none",
        "Without RoPE nothing tells the model where a token stands. It is not quite blind: under the causal mask a "
        "token sees only those before it, and what several layers make of that hints at the order.",
        lambda config: {"rope": Variant(), "no-rope": Variant(transform=without_rope)},
    ),
    "causal": Experiment(
        "Causal against bidirectional attention",
        "An encoder sees its whole row. Asked for the next token, it need not predict it: the token stands right "
        "there. Its loss says nothing about writing, where the next token is not there yet. The text below is written "
        "one token after the other, so each sees only those before it.",
        _causal,
    ),
    "heads": Experiment(
        "MHA against GQA against MQA",
        "Query heads that share key-value heads need a smaller cache: of N query heads MHA (multi-head) has N "
        "key-value heads, MQA (multi-query) one for all, and GQA (grouped-query) some number between. What is saved "
        "stands in the table beside what it costs. The speed is that of training; the cache counts in generation.",
        _heads,
    ),
    "norm": Experiment(
        "RMSNorm against none",
        "RMSNorm gives each block inputs of the same size, whatever the layers before have added to the stream. "
        "Without it the size is left to the weights: compare how fast the loss falls, and the gradients' norms.",
        lambda config: {"rmsnorm": Variant(), "no-norm": Variant(transform=without_norms)},
    ),
}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an experiment ended.

    Attributes:
        report: The page, or None where it ended early.
        signal: The signal that ended it early, or None.
    """

    report: Path | None
    signal: int | None


def run_experiment(
    name: str, config: PretrainConfig, out: Path, *, resume: bool, allow_changes: bool = False, watch: Watch
) -> Outcome:
    """Train every variant in a folder of its own below `out`, and write `out/report.html`.

    The settings are in `out/experiment.toml`, which starts the same experiment again.

    Args:
        name: One of `EXPERIMENTS`.
        config: The settings that all share.
        out: The experiment's folder.
        resume: Go on where an earlier call ended; runs that are done are not repeated.
        allow_changes: Resume although settings or data have changed.
        watch: Shows the runs.

    Raises:
        LlamariumError: As `pretrain.prepare` and `run` do.
    """
    if name not in EXPERIMENTS:
        raise TrainingError(f"no experiment {show_value(name)}; there are: {', '.join(EXPERIMENTS)}")
    if config.tensor_parallel > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("an experiment trains in one process; start it without torchrun and tensor_parallel")
    variants = EXPERIMENTS[name].variants(config)
    with RunLock(out):
        return _run_all(name, config, variants, out, resume, allow_changes, watch)


def _run_all(
    name: str,
    config: PretrainConfig,
    variants: Mapping[str, Variant],
    out: Path,
    resume: bool,
    allow_changes: bool,
    watch: Watch,
) -> Outcome:
    measured: dict[str, Peeking] = {}
    for label, variant in variants.items():
        make = cache(partial(_setup, label, variant, config, out))
        watching = _settling(watch(label), config, out / "experiment.toml")
        ending = conduct(make, out / label, resume=resume, allow_changes=allow_changes, watch=watching)
        if ending.signal is not None:
            return Outcome(None, ending.signal)
        write_report(out / label)
        if name == "causal" and (validation := make().validation) is not None:
            measured[label] = measure_peeking(make().model, validation, variant.trunk, config)
    experiment = EXPERIMENTS[name]
    notes = [experiment.note, *(_about_peeking(label, found) for label, found in measured.items() if found.share > 0)]
    columns = {
        "loss without looking ahead": {label: f"{found.loss_without:.4g}" for label, found in measured.items()},
        "attention on the next token": {label: f"{found.share:.0%}" for label, found in measured.items()},
    }
    folders = {label: out / label for label in variants}
    title = f"Experiment: {experiment.title}"
    report = compare(folders, out / "report.html", title, notes=notes, columns=columns if measured else None)
    return Outcome(report, None)


@contextmanager
def _settling(watch: AbstractContextManager[Emit], config: PretrainConfig, path: Path) -> Generator[Emit]:
    """Watch a run, and write the settings that all share once its own are accepted."""
    with watch as show:

        def emit(event: Event) -> None:
            if is_acceptance(event):
                save_settings(config, path)
            show(event)

        yield emit


def _setup(label: str, variant: Variant, config: PretrainConfig, out: Path) -> Setup:
    """Prepare a variant's run; the ids of the data are shared."""
    setup = prepare(replace(config, **variant.changes), out)
    if variant.transform is not None:
        variant.transform(setup.model)
    if variant.is_llama:
        return setup
    return replace(
        setup,
        trunk=variant.trunk,
        save=partial(save_variant, setup.model, label),
        restore=partial(restore_variant, setup.model, label),
    )


def save_variant(model: LlamaForCausalLM, label: str, folder: Path) -> None:
    """Write the weights of a model that is no Llama, in a form that no reader of models takes for one."""
    write_safetensors(folder / _WEIGHTS, [Weight.of(key, p.detach()) for key, p in model.named_parameters()])
    write_json(folder / _ABOUT, {"format": _FORMAT, "variant": label, "trained_as": model.config.to_hf()})


@torch.no_grad()
def restore_variant(model: LlamaForCausalLM, label: str, folder: Path) -> None:
    """Read back what `save_variant` wrote, in place.

    Raises:
        TrainingError: If it is another variant's, or of another shape.
        CheckpointError: If a file is malformed.
    """
    about = read_json_object(folder / _ABOUT)
    table, file = read_safetensors(folder / _WEIGHTS), TensorFile(folder / _WEIGHTS)
    parameters = dict(model.named_parameters())
    expected = {key: ("F32", tuple(p.shape)) for key, p in parameters.items()}
    if about.get("variant") != label or {key: (t.dtype, t.shape) for key, t in table.items()} != expected:
        raise TrainingError(f"{folder}: holds another variant than {label!r}, or one of another shape")
    for key, tensor in table.items():
        parameters[key].copy_(tensor_in(file, tensor.offset, tensor.shape, SAFETENSORS_DTYPES[tensor.dtype]))


# --- how looking ahead cheats -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peeking:
    """What a model does with the token that it is to predict.

    Attributes:
        loss: As it was trained, in nats.
        loss_without: When each token sees only those before it, in nats.
        share: Of the attention that a token gives to the next one, in the head that gives most.
        layer_idx: That head's layer.
        head_idx: Its number there.
    """

    loss: float
    loss_without: float
    share: float
    layer_idx: int
    head_idx: int


class _NextTokenShares:
    """Attends as in training, and notes what share of its attention each head gives to the next token."""

    def __init__(self, inner: CausalAttend) -> None:
        self.inner = inner
        self.shares: list[Tensor] = []

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        eager = attend_eagerly(q_BTNH, self.inner.context(layer_idx, k_BTKH, v_BTKH))
        self.shares.append(eager.pattern_BNTS.diagonal(1, dim1=-2, dim2=-1).mean(dim=(0, 2)))
        return eager.out_BTNH


@torch.no_grad()
def measure_peeking(model: LlamaForCausalLM, rows: Rows, trunk: Trunk, config: PretrainConfig) -> Peeking:
    """Measure a model with and without the next token in sight, and find the head that reads it."""
    how: dict[str, Any] = {
        "batch_rows": config.batch_rows, "max_rows": config.eval_rows, "precision": config.precision,
    }  # fmt: skip
    batch = rows.batch(0, range(min(4, rows.num_rows(0)))).to(model.device)
    ahead = trunk is bidirectional_trunk
    attend = _NextTokenShares(CausalAttend(segments_BT=batch.segments_BT, bidirectional=ahead))
    model.model(batch.ids_BT, batch.positions_BT, attend)
    shares_LN = torch.stack(attend.shares)
    layer_idx, head_idx = divmod(int(shares_LN.argmax()), shares_LN.shape[1])
    return Peeking(
        evaluate(model, rows, trunk=trunk, **how),
        evaluate(model, rows, trunk=causal_trunk, **how),
        float(shares_LN.max()),
        layer_idx,
        head_idx,
    )


def _about_peeking(label: str, found: Peeking) -> str:
    return (
        f"How it cheats: in layer {found.layer_idx}, head {found.head_idx} of the {label} model gives "
        f"{found.share:.0%} of its attention to the very next token, which is the answer. Its validation loss is "
        f"{found.loss:.3f} nats with that token in sight, and {found.loss_without:.3f} when each token sees only those "
        "before it."
    )
