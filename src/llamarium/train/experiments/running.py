"""Run an experiment: train every variant with every seed in its own folder, and write a page to compare them."""

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
from llamarium.train.experiments.peeking import Peeking, about_peeking, measure_peeking
from llamarium.train.experiments.variants import EXPERIMENTS, TrainingExperiment, Variant, set_embedding_std
from llamarium.train.experiments.verdict import spread_of, verdict
from llamarium.train.pretrain import prepare
from llamarium.train.report.history import History, number_of
from llamarium.train.report.journal import Emit, Event
from llamarium.train.report.write import compare, write_report
from llamarium.train.setup import Setup
from llamarium.train.state.lock import run_lock

Watch = Callable[[str], AbstractContextManager[Emit]]
"""Maps a variant's name to a context manager that yields the consumer of its events."""

_WEIGHTS, _ABOUT = "variant.safetensors", "variant.json"
_FORMAT = "weights of an experiment: no Llama config describes this model, and only its experiment can go on from it"


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant's number of parameters, and its best validation loss per seed, in nats; empty without validation."""

    parameters: int
    losses: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an experiment.

    Attributes:
        report: The page, or None if a signal stopped the experiment.
        signal: That signal, or None.
        arms: Results by variant.
        verdict: Statistical comparison in words; empty without validation.
    """

    report: Path | None
    signal: int | None
    arms: Mapping[str, Arm] = field(default_factory=dict[str, Arm])
    verdict: str = ""


def run_experiment(
    name: str, config: ExperimentConfig, out: Path, *, resume: bool, allow_changes: bool = False, watch: Watch
) -> Outcome:
    """Train every variant in its own folder below `out`, and write `out/report.html`.

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
    measured: dict[str, Peeking] = {}
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
                return Outcome(None, ending.signal)
            write_report(out / run_name)
            history = History.read(out / run_name)
            threads = threads or history.start.get("threads")
            arm = arms.setdefault(label, Arm(int(number_of(history.start.get("parameters")) or 0)))
            if best := history.best():
                arm.losses.append(best[1])
            if seed != config.seed:
                continue
            if name == "causal" and (validation := make().validation) is not None:
                with computing_with(threads):
                    measured[label] = measure_peeking(make().model, validation, variant.trunk, make().config)
        summary = verdict({label: arm.losses for label, arm in arms.items()}) if config.validation else ""
        return Outcome(_write_page(EXPERIMENTS[name], config, out, arms, measured, summary), None, arms, summary)


def _write_page(
    experiment: TrainingExperiment,
    config: ExperimentConfig,
    out: Path,
    arms: Mapping[str, Arm],
    measured: Mapping[str, Peeking],
    found: str,
) -> Path:
    notes = [experiment.note, *(about_peeking(label, seen) for label, seen in measured.items() if seen.share > 0)]
    columns: dict[str, dict[str, str]] = {}
    if found:
        notes.append(found)
        if config.seeds > 1:
            notes.append("Mean and deviation are over the seeds; other columns, curves and texts are the first seed's.")
            columns["validation loss, mean ± deviation"] = {k: spread_of(arm.losses) for k, arm in arms.items()}
    if config.embedding_std is not None:
        first = {label: History.read(out / label).curve("step", "loss") for label in arms}
        columns["loss at the first step told"] = {k: f"{points[0][1]:.4g}" for k, points in first.items() if points}
    if measured:
        columns["loss without looking ahead"] = {k: f"{seen.loss_without:.4g}" for k, seen in measured.items()}
        columns["attention on the next token"] = {k: f"{seen.share:.0%}" for k, seen in measured.items()}
    folders, title = {label: out / label for label in arms}, f"Experiment: {experiment.title}"
    return compare(folders, out / "report.html", title, notes=notes, columns=columns)


def _count(setup: Setup, order: int, config: ExperimentConfig, out: Path, watch: AbstractContextManager[Emit]) -> Arm:
    """Count an n-gram model, which does not depend on the seed."""
    with watch as show:
        parameters, loss = conduct_ngrams(setup, config, order, out, show)
    write_report(out)
    return Arm(parameters, [loss] * config.seeds)


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
