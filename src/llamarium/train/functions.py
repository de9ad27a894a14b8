"""Training from Python: `pretrain`, `finetune` and `dpo`, with the settings that the shell's flags have.

llamarium.pretrain("runs/story", data="story.txt", preset="tiny", steps=200)
llamarium.finetune("runs/mine", data="examples.jsonl", steps=100)
llama = llamarium.load(adapter="runs/mine/best")
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, Unpack

from llamarium.kernels.threads import set_num_threads
from llamarium.train import dpo as dpo_run
from llamarium.train import finetune as finetune_run
from llamarium.train import pretrain as pretrain_run
from llamarium.train.conduct import take_part
from llamarium.train.config import DPOConfig, FinetuneConfig, PretrainConfig, RunConfig
from llamarium.train.distributed.process_group import ProcessGroup, init_process_group
from llamarium.train.run import Ending
from llamarium.train.settings import DPOSettings, FinetuneSettings, PretrainSettings
from llamarium.train.setup import Event, Setup

_Config = TypeVar("_Config", bound=RunConfig)


def pretrain(
    out: str | Path = "runs/pretrain",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: Callable[[Event], None] | None = None,
    **settings: Unpack[PretrainSettings],
) -> Ending:
    """Train a model from scratch, to its last step, or until SIGTERM or Ctrl-C, which save and end the run.

    Args:
        out: The run's folder: settings, metrics.jsonl, checkpoints; `best` is the one of the lowest validation loss.
        resume: Go on from the newest checkpoint, with the settings of the run but for those given here, or begin.
        allow_changes: Resume although settings or data have changed.
        watch: Is told what happens: each line of metrics.jsonl, and what the run is doing meanwhile.
        **settings: As `PretrainConfig` has them, and the shell as flags.

    Returns:
        Where the run ended, its last checkpoint, and the signal that ended it early, or None.

    Raises:
        LlamariumError: If settings or data are refused, or the run cannot go on.
    """
    out = Path(out)
    config = _config(PretrainConfig, out, resume, settings)
    return _run(config, out, resume, allow_changes, watch, lambda group: pretrain_run.prepare(config, out, None, group))


def finetune(
    out: str | Path = "runs/finetune",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: Callable[[Event], None] | None = None,
    **settings: Unpack[FinetuneSettings],
) -> Ending:
    """Teach a model by examples, with adapters beside it or all of it; arguments as of `pretrain`.

    Args:
        out: The run's folder; checkpoints hold an adapter, or with `method="full"` a model.
        resume: As for `pretrain`.
        allow_changes: As for `pretrain`.
        watch: As for `pretrain`.
        **settings: As `FinetuneConfig` has them; `data` is needed.

    Raises:
        LlamariumError: As `pretrain`, or if the base is refused.
    """
    out = Path(out)
    config = _config(FinetuneConfig, out, resume, settings)
    return _run(config, out, resume, allow_changes, watch, lambda group: finetune_run.prepare(config, group))


def dpo(
    out: str | Path = "runs/dpo",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: Callable[[Event], None] | None = None,
    **settings: Unpack[DPOSettings],
) -> Ending:
    """Teach a model by preferences: of two answers the better one becomes likelier; arguments as of `finetune`.

    Args:
        out: As for `finetune`.
        resume: As for `pretrain`.
        allow_changes: As for `pretrain`.
        watch: As for `pretrain`.
        **settings: As `DPOConfig` has them; `data` is needed.

    Raises:
        LlamariumError: As `finetune`.
    """
    out = Path(out)
    config = _config(DPOConfig, out, resume, settings)
    return _run(config, out, resume, allow_changes, watch, lambda group: dpo_run.prepare(config, group))


def _config(kind: type[_Config], out: Path, resume: bool, settings: Any) -> _Config:
    file = out / "train.toml"
    return kind.resolve(file if resume and file.exists() else None, settings)


def _run(
    config: RunConfig,
    out: Path,
    resume: bool,
    allow_changes: bool,
    watch: Callable[[Event], None] | None,
    prepare: Callable[[ProcessGroup], Setup],
) -> Ending:
    put_back = (lambda: None) if config.threads is None else set_num_threads(config.threads)
    try:
        with init_process_group(config) as process_group:
            watching = nullcontext(watch or (lambda event: None))
            return take_part(process_group, prepare, out, resume=resume, allow_changes=allow_changes, watch=watching)
    finally:
        put_back()
