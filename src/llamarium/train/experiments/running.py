"""Run an experiment: train every variant with every seed in its own folder, and compare the runs."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch

from llamarium.checkpoints.decode import tensor_in
from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.checkpoints.huggingface.writer import write_safetensors
from llamarium.checkpoints.save import SAFETENSORS_DTYPES, tensor_weight
from llamarium.checkpoints.storage import TensorFile
from llamarium.config import read_json_object
from llamarium.errors import TrainingError, show_value
from llamarium.io import write_json
from llamarium.kernels.threads import computing_with
from llamarium.model import LlamaForCausalLM
from llamarium.train.conduct import conduct, is_acceptance, save_settings
from llamarium.train.config import ExperimentConfig
from llamarium.train.experiments.ngrams import conduct_ngrams
from llamarium.train.experiments.peeking import about_peeking, measure_peeking
from llamarium.train.experiments.variants import EXPERIMENTS, Variant, set_embedding_std
from llamarium.train.experiments.verdict import verdict
from llamarium.train.history import RunHistory, read_history
from llamarium.train.journal import Emit, Event
from llamarium.train.pretrain import prepare
from llamarium.train.setup import Setup
from llamarium.train.state.lock import run_lock

Watch = Callable[[str], AbstractContextManager[Emit]]
"""Maps a variant's name to a context manager that yields the consumer of its events."""

_WEIGHTS, _ABOUT = "variant.safetensors", "variant.json"
_FORMAT = "weights of an experiment: no Llama config describes this model, and only its experiment can go on from it"


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant's results: those of its first run, and the best validation loss of each.

    Attributes:
        parameters: Number of parameters, or of the counts of an n-gram model.
        training_loss: Training loss at the end, in nats; None for an n-gram model.
        kv_bytes: KV cache per token in bfloat16; None for an n-gram model.
        tokens_per_s: Median throughput of training.
        sample: Last text that it wrote.
        losses: Best validation loss per seed, in nats; empty without validation.
        measures: What the experiment measures besides, by name.
    """

    parameters: int
    training_loss: float | None
    kv_bytes: int | None
    tokens_per_s: float | None
    sample: str
    losses: list[float] = field(default_factory=list[float])
    measures: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an experiment.

    Attributes:
        signal: Signal that stopped the experiment, or None.
        arms: Results by variant; none if it was stopped.
        notes: What to look for, in paragraphs.
        verdict: Statistical comparison in words; empty without validation.
    """

    signal: int | None
    arms: Mapping[str, Arm] = field(default_factory=dict[str, Arm])
    notes: tuple[str, ...] = ()
    verdict: str = ""


def run_experiment(
    name: str, config: ExperimentConfig, out: Path, *, resume: bool, allow_changes: bool = False, watch: Watch
) -> Outcome:
    """Train every variant in its own folder below `out`, and compare them.

    The settings are written to `out/experiment.toml`, which reproduces the experiment. `resume` continues an earlier
    call and skips finished runs; `watch` shows the runs. Other arguments and errors are those of `conduct`.
    """
    if name not in EXPERIMENTS:
        raise TrainingError(f"no experiment {show_value(name)}; there are: {', '.join(EXPERIMENTS)}")
    if config.tensor_parallel > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("an experiment trains in one process; start it without torchrun and tensor_parallel")
    if config.model or (isinstance(config.data, Mapping) and name == "ngrams"):
        reason = "model: its runs begin from scratch" if config.model else "data: counts know no weights of sources"
        raise TrainingError(f"the experiment {name} does not take {reason}; leave it out")
    if config.embedding_std is not None and name != "tied":
        raise TrainingError(f"embedding_std: of no effect in the experiment {name}; leave it out, or ask for tied")
    variants = EXPERIMENTS[name].variants(config)
    notes = [EXPERIMENTS[name].note]
    threads: int | None = None  # all runs use those of the first, as their speeds are compared
    arms: dict[str, Arm] = {}
    with run_lock(out):
        for (label, variant), seed in product(variants.items(), range(config.seed, config.seed + config.seeds)):
            run_name = label if seed == config.seed else f"{label}-seed-{seed}"
            make = cache(partial(_setup, label, variant, replace(config, seed=seed), out, threads))
            watching = _settling(watch(run_name), config, out / "experiment.toml")
            if variant.ngram_order is not None:
                if label not in arms:
                    arms[label] = _count(make(), variant.ngram_order, config, out / label, watching)
                continue
            ending = conduct(make, out / run_name, resume=resume, allow_changes=allow_changes, watch=watching)
            if ending.signal is not None:
                return Outcome(ending.signal)
            history = read_history(out / run_name)
            threads = threads or history.threads
            if label not in arms:
                arms[label] = _arm(history)
                if config.embedding_std is not None and (losses := history.values("step", "loss")):
                    arms[label].measures["first loss"] = losses[0]
                if name == "causal" and (validation := make().validation) is not None:
                    with computing_with(threads):
                        seen = measure_peeking(make().model, validation, variant.trunk, make().config)
                    arms[label].measures.update({"loss, causal": seen.loss_without, "weight on next": seen.share})
                    notes += [about_peeking(label, seen)] if seen.share > 0 else []
            arms[label].losses.extend([] if history.best_loss is None else [history.best_loss])
        summary = verdict({label: arm.losses for label, arm in arms.items()}) if config.validation else ""
        return Outcome(None, arms, tuple(notes), summary)


def _arm(history: RunHistory) -> Arm:
    return Arm(
        int(history.parameters or 0),
        history.loss,
        history.kv_bytes,
        history.tokens_per_s,
        history.samples[-1].text if history.samples else "",
    )


def _count(setup: Setup, order: int, config: ExperimentConfig, out: Path, watch: AbstractContextManager[Emit]) -> Arm:
    """Count an n-gram model, which does not depend on the seed."""
    with watch as show:
        _, loss = conduct_ngrams(setup, config, order, out, show)
    arm = _arm(read_history(out))
    arm.losses.extend([loss] * config.seeds)
    return arm


@contextmanager
def _settling(watch: AbstractContextManager[Emit], config: ExperimentConfig, path: Path) -> Generator[Emit]:
    """Watch a run, and write the shared settings once the run is accepted."""
    with watch as show:

        def emit(event: Event) -> None:
            if is_acceptance(event):
                save_settings(config, path)
            show(event)

        yield emit


def _setup(label: str, variant: Variant, config: ExperimentConfig, out: Path, threads: int | None) -> Setup:
    """Prepare a variant's run; the tokenized data is shared."""
    setup = replace(prepare(replace(config, **variant.changes), out), threads=threads)
    if variant.transform is not None:
        variant.transform(setup.model)
    if variant.embedding_std is not None:
        set_embedding_std(setup.model, variant.embedding_std, config.seed)
    if variant.is_llama:
        return setup
    return replace(
        setup,
        trunk=variant.trunk,
        save=partial(save_variant, setup.model, label),
        restore=partial(restore_variant, setup.model, label),
    )


def save_variant(model: LlamaForCausalLM, label: str, folder: Path) -> None:
    """Write the weights of a model that is not a Llama, in a format that is not mistaken for a model's folder."""
    write_safetensors(folder / _WEIGHTS, [tensor_weight(key, p) for key, p in model.named_parameters()])
    write_json(folder / _ABOUT, {"format": _FORMAT, "variant": label, "trained_as": model.config.to_hf()})


@torch.no_grad()
def restore_variant(model: LlamaForCausalLM, label: str, folder: Path) -> None:
    """Load the weights written by `save_variant` in place; TrainingError if variant or shapes differ."""
    about = read_json_object(folder / _ABOUT)
    table, file = read_safetensors(folder / _WEIGHTS), TensorFile(folder / _WEIGHTS)
    parameters = dict(model.named_parameters())
    expected = {key: ("F32", tuple(p.shape)) for key, p in parameters.items()}
    if about.get("variant") != label or {key: (t.dtype, t.shape) for key, t in table.items()} != expected:
        raise TrainingError(f"{folder}: holds another variant than {label!r}, or one of another shape")
    for key, tensor in table.items():
        parameters[key].copy_(tensor_in(file, tensor.offset, tensor.shape, SAFETENSORS_DTYPES[tensor.dtype]))
