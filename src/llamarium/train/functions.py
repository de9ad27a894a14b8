"""Training from Python: `pretrain`, `finetune`, `dpo` and `grpo`, with the settings of the command line.

llamarium.pretrain("runs/story", data="story.txt", preset="tiny", steps=200)
llamarium.finetune("runs/mine", data="examples.jsonl", steps=100)
llama = llamarium.load(adapter="runs/mine/best")
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from llamarium.datasets.sources import named_rows
from llamarium.errors import TrainingError, warn_caller
from llamarium.extras import need_torch
from llamarium.kernels.threads import computing_with
from llamarium.keywords import shows_options
from llamarium.train.config import DPOConfig, FinetuneConfig, GRPOConfig, PretrainConfig, RunConfig
from llamarium.train.keywords import DPOKeywords, FinetuneKeywords, GRPOKeywords, PretrainKeywords

if TYPE_CHECKING:
    from llamarium.train.journal import Event
    from llamarium.train.run import TrainingResult


@shows_options(PretrainConfig, error=TrainingError)
def pretrain(
    out: str | Path = "runs/pretrain",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: "Callable[[Event], None] | None" = None,
    **settings: Unpack[PretrainKeywords],
) -> "TrainingResult":
    """Train a model from scratch, or continue from `model`. SIGTERM and Ctrl-C save a checkpoint and stop.

    >>> short = {"device": "cpu", "steps": 2, "batch_rows": 2, "warmup_steps": 1, "sample_every": 0}
    >>> result = llamarium.pretrain("story", data="shakespeare", preset="tiny", tokenizer="bpe", vocab_size=280,
    ...                             context=64, **short)
    >>> result.position.step
    2

    Args:
        out: Folder of the run: settings, metrics.jsonl and checkpoints; `best` has the lowest validation loss.
        resume: Continue from the newest checkpoint with the run's settings, except those given here.
        allow_changes: Resume even if settings or data have changed.
        watch: Called with each event: the lines of metrics.jsonl, and the current activity. Without it, alarms become
            warnings.
        **settings: Fields of `PretrainConfig`; on the command line they are flags.

    Returns:
        The last position and checkpoint, the signal that stopped the run or None, and whether the run was already
        complete.

    Raises:
        LlamariumError: If PyTorch is missing, settings or data are invalid, or the run cannot continue.
    """
    return _train(PretrainConfig, Path(out), resume, allow_changes, watch, settings)


@shows_options(FinetuneConfig, error=TrainingError)
def finetune(
    out: str | Path = "runs/finetune",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: "Callable[[Event], None] | None" = None,
    **settings: Unpack[FinetuneKeywords],
) -> "TrainingResult":
    """Fine-tune a model on the examples in `data`: LoRA adapters, or all weights with `method="full"`.

    Arguments and errors are those of `pretrain`; settings are the fields of `FinetuneConfig`. `data` may also be Python
    rows: any iterable of dicts, a `datasets.Dataset`, or an Arrow table.

    >>> rows = [{"prompt": "To be", "completion": ", or not to be"}] * 8
    >>> base = {"model": "story/best", "chat_format": "none", "context": 64, "rank": 2, **short}
    >>> llamarium.finetune("tuned", data=rows, **base).position.step
    2
    """
    return _train(FinetuneConfig, Path(out), resume, allow_changes, watch, settings)


@shows_options(DPOConfig, error=TrainingError)
def dpo(
    out: str | Path = "runs/dpo",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: "Callable[[Event], None] | None" = None,
    **settings: Unpack[DPOKeywords],
) -> "TrainingResult":
    """Tune a model on preferences (DPO): `data` has pairs of a chosen and a rejected answer.

    Arguments and errors are those of `pretrain`; settings are the fields of `DPOConfig`.

    >>> pairs = [{"prompt": "To be", "chosen": ", or not to be", "rejected": " a cat"}] * 8
    >>> llamarium.dpo("preferred", data=pairs, **base).position.step
    2
    """
    return _train(DPOConfig, Path(out), resume, allow_changes, watch, settings)


@shows_options(GRPOConfig, error=TrainingError)
def grpo(
    out: str | Path = "runs/grpo",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: "Callable[[Event], None] | None" = None,
    **settings: Unpack[GRPOKeywords],
) -> "TrainingResult":
    """Train a model with rewards (GRPO): it samples answers to the prompts in `data`, and `reward` scores them.

    Arguments and errors are those of `pretrain`; settings are the fields of `GRPOConfig`.

    >>> prompts = [{"prompt": "To be"}] * 4
    >>> llamarium.grpo("rewarded", data=prompts, reward="length:20", max_tokens=8, group_size=2,
    ...                gradient_accumulation_steps=1, **base).position.step
    2
    """
    return _train(GRPOConfig, Path(out), resume, allow_changes, watch, settings)


def _train(
    kind: type[RunConfig],
    out: Path,
    resume: bool,
    allow_changes: bool,
    watch: "Callable[[Event], None] | None",
    settings: Mapping[str, Any],
) -> "TrainingResult":
    need_torch("training", "train")
    out = out.absolute()  # a reward function may change the working directory
    file = out / "train.toml"
    with named_rows(settings.get("data")) as data:
        named = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        named |= {"data": data} if "data" in settings else {}
        config = kind.resolve(file if resume and file.exists() else None, named)
        return _conduct(config, out, resume, allow_changes, watch)


def _conduct(
    config: RunConfig, out: Path, resume: bool, allow_changes: bool, watch: "Callable[[Event], None] | None"
) -> "TrainingResult":
    from llamarium.train import pretrain
    from llamarium.train.conduct import conduct, init_process_group

    with computing_with(config.threads), init_process_group(config) as group:
        if isinstance(config, PretrainConfig):
            make = partial(pretrain.prepare, config, out, process_group=group)
        else:
            make = partial(tuning_of(type(config)).prepare, config, group)
        watching = nullcontext(watch or _warn_of_alarms)
        return conduct(make, out, process_group=group, resume=resume, allow_changes=allow_changes, watch=watching)


def _warn_of_alarms(event: "Event") -> None:
    if event["event"] == "alarm":
        warn_caller(f"step {event['step']}: {event['message']}")


def tuning_of(kind: type[RunConfig]) -> Any:
    """Return the module that prepares runs of this kind, other than pretraining: it has `prepare` and `first_row`."""
    from llamarium.train import dpo, finetune
    from llamarium.train.rewards import grpo

    return dpo if kind is DPOConfig else grpo if kind is GRPOConfig else finetune
