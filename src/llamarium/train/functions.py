"""Train from Python: `pretrain`, `finetune` and `dpo`, with the settings of the command line.

llamarium.pretrain("runs/story", data="story.txt", preset="tiny", steps=200)
llamarium.finetune("runs/mine", data="examples.jsonl", steps=100)
llama = llamarium.load(adapter="runs/mine/best")
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from llamarium.kernels.threads import computing_with
from llamarium.train import dpo as dpo_run
from llamarium.train import finetune as finetune_run
from llamarium.train import pretrain as pretrain_run
from llamarium.train.conduct import conduct
from llamarium.train.config import DPOConfig, FinetuneConfig, OptimizerName, PretrainConfig, RunConfig, ScheduleName
from llamarium.train.distributed.process_group import ProcessGroup
from llamarium.train.distributed.start import init_process_group
from llamarium.train.run import TrainingResult
from llamarium.train.setup import Event, Setup

_Config = TypeVar("_Config", bound=RunConfig)


# --- the settings of `train/config.py` by name and type, which a test holds equal -------------------------------------


class RunSettings(TypedDict, total=False):
    """Settings of `RunConfig`, which has their defaults and ranges."""

    steps: int
    batch_rows: int
    gradient_accumulation_steps: int
    optimizer: OptimizerName
    learning_rate: float
    muon_learning_rate: float | None
    schedule: ScheduleName
    warmup_steps: int | None
    final_ratio: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    seed: int
    precision: Literal["float32", "bfloat16"]
    checkpoint_activations: bool
    compile: bool
    device: str
    threads: int | None
    tensor_parallel: int
    log_every: int
    eval_every: int
    eval_rows: int
    sample_every: int
    sample_tokens: int
    sample_prompt: str
    save_every: int
    save_total_limit: int


class PretrainSettings(RunSettings, total=False):
    """Settings of `PretrainConfig`, which has their defaults and ranges."""

    data: str | None
    text_field: str
    validation: float
    tokenizer: str
    bpe_vocab_size: int
    preset: str
    hidden_size: int | None
    intermediate_size: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    context: int | None
    tie_word_embeddings: bool | None
    rope_theta: float | None
    initializer_range: float | None


class FinetuneSettings(RunSettings, total=False):
    """Settings of `FinetuneConfig`, which has their defaults and ranges."""

    model: str
    data: str
    validation: float
    context: int
    chat_format: Literal["auto", "llama3", "chatml", "none"]
    too_long: Literal["error", "drop"]
    dtype: Literal["auto", "float32", "bfloat16"]
    quantize: Literal["none", "NF4", "Q8_0", "Q4_1"]
    dequantize: Literal["auto", "load", "use"]
    method: Literal["lora", "full"]
    rank: int
    alpha: float
    dropout: float
    target_modules: str
    rslora: bool
    dora: bool


class DPOSettings(FinetuneSettings, total=False):
    """Settings of `DPOConfig`, which has their defaults and ranges."""

    beta: float


# --- the functions ----------------------------------------------------------------------------------------------------


def pretrain(
    out: str | Path = "runs/pretrain",
    *,
    resume: bool = False,
    allow_changes: bool = False,
    watch: Callable[[Event], None] | None = None,
    **settings: Unpack[PretrainSettings],
) -> TrainingResult:
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
) -> TrainingResult:
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
) -> TrainingResult:
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
) -> TrainingResult:
    with computing_with(config.threads), init_process_group(config) as process_group:
        return conduct(
            lambda: prepare(process_group),
            out,
            process_group=process_group,
            resume=resume,
            allow_changes=allow_changes,
            watch=nullcontext(watch or (lambda event: None)),
        )
