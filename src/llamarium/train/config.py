"""Settings of a training run: one flat list, read from a TOML file and from flags, which take precedence.

Every setting has a usable default. The resolved settings are written next to the checkpoints as `train.toml`, which
reproduces the run.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from llamarium.datasets.rows import Reading
from llamarium.datasets.sources import Data, parse_data
from llamarium.errors import TrainingError, escape, show_value
from llamarium.keywords import unknown_names
from llamarium.options.declare import check_options, declared, option, with_default
from llamarium.train.choices import ChatFormatName, OptimizerName, QuantizeName, ScheduleName
from llamarium.train.rewards.names import RewardNames, parse_rewards
from llamarium.train.settings_file import check_text, read_toml, renamed, toml_value

FILES_OF_ROWS = ".jsonl, .json, .csv, .tsv or .parquet file (all but .parquet also as .gz or .zst)"
DATA_HELP = f"a text file, a {FILES_OF_ROWS}, a folder, shakespeare, or org/name on the hub; left out: Python's manual"
ROWS_HELP = f"a {FILES_OF_ROWS}, a folder, org/name on the hub, or several (a.jsonl=2,b.jsonl=1), of rows with "

EPOCHS_COUNTED = 10
"""Number of epochs whose packed rows are counted to convert `epochs` to steps; more epochs count with the mean."""

_MAX_CONTEXT = 2**20  # tokens per row: eight times the context of Llama 3.1

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings", "rope_theta", "initializer_range",
)  # fmt: skip
"""Settings that change a preset's architecture."""

_LENGTHS = ("steps", "epochs", "tokens")
_OF_SCRATCH = ("preset", "tokenizer", "vocab_size", *SHAPE)
_OF_ADAPTERS = ("rank", "alpha", "target_modules", "rslora", "dora")
# Settings that have an effect only if another setting has one of these values.
_NEEDS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "muon_learning_rate": ("optimizer", ("muon", None)),
    "decay_share": ("schedule", ("wsd",)),
    "final_ratio": ("schedule", ("cosine", "linear", "wsd")),
    "vocab_size": ("tokenizer", ("bpe", "words")),
    **dict.fromkeys(("adapter", *_OF_ADAPTERS, "dropout", "quantize", "dequantize", "dtype"), ("method", ("lora",))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings that all runs share; their help texts document them (`llamarium pretrain --help`)."""

    # the recipe
    steps: int = option(2000, "optimizer steps", 1)
    epochs: float | None = option(
        None, f"passes over the data, instead of steps; above {EPOCHS_COUNTED} steps are estimated", 1e-6, 1e6
    )
    tokens: int | None = option(None, "tokens that are trained on, instead of steps", 1)
    batch_rows: int = option(32, "rows that are computed at once", 1)
    gradient_accumulation_steps: int = option(1, "batches that make one step", 1)
    optimizer: OptimizerName | None = option(
        None, "muon for the layers' matrices, or adamw; left out: muon if small, from scratch, on a CPU with bfloat16"
    )
    learning_rate: float | None = option(None, "the peak; left out: 1e-3, a small muon 8e-3, --model 1e-4", 1e-12, 10)
    muon_learning_rate: float | None = option(None, "muon's peak, where AdamW's beside it is another", 1e-12, 10.0)
    schedule: ScheduleName = option("cosine", "how the learning rate falls")
    warmup_steps: int | None = option(None, "steps until the peak; left out: a tenth of them, at most 100", 0)
    final_ratio: float = option(0.1, "what is left of the peak at the end", 0.0, 1.0)
    decay_share: float = option(0.2, "the last part of a wsd run, in which it falls", 0.0, 1.0)
    weight_decay: float = option(0.1, "of matrices", 0.0, 10.0)
    beta1: float = option(0.9, "adamw's memory of gradients", 0.0, 0.9999)
    beta2: float = option(0.95, "adamw's memory of their squares", 0.0, 0.99999)
    max_grad_norm: float = option(1.0, "the largest gradient norm; 0 is off", 0.0)
    seed: int = option(0, "of fresh weights and the order of the data", 0, 2**31 - 1)
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "what products are computed in; auto: bfloat16 on a CPU that multiplies it faster, else float32"
    )
    checkpoint_activations: bool = option(False, "compute activations twice instead of keeping them")
    compile: bool = option(False, "fuse the step by torch.compile (needs a C++ compiler)", is_free=True)

    # the machine
    device: str = option("auto", "cpu, cuda, cuda:1; auto is a GPU where there is one", is_free=True)
    threads: int | None = option(
        None, "CPU threads; left out: the fewest within 5 % of the best", 1, 1024, is_free=True
    )
    tensor_parallel: int = option(1, "processes of torchrun that shard each layer's matrices", 1, is_free=True)

    # logging, validation and checkpoints
    log_every: int = option(10, "steps between lines of metrics", 1, is_free=True)
    eval_every: int | None = option(None, "steps between validations; left out: 1/8, at most 250", 1, is_free=True)
    eval_rows: int = option(200, "rows of a validation at most; 0 is all", 0, is_free=True)
    patience: int = option(0, "validations without a better loss that end the run; 0 is off", 0, is_free=True)
    alarm_validations: int = option(
        5, "validations in a row worse than the best that raise an alarm; 0 is off", 0, is_free=True
    )
    sample_every: int | None = option(
        None, "steps between samples of text; left out: a quarter of the run, at most 500; 0 is never", 0, is_free=True
    )
    sample_tokens: int = option(200, "tokens of a sample", 1, is_free=True)
    sample_prompt: str = option("\n", "what a sample begins with", is_free=True)
    save_every: int = option(500, "steps between checkpoints", 1, is_free=True)
    save_total_limit: int = option(2, "checkpoints that are kept, besides the best", 1, is_free=True)

    def __post_init__(self) -> None:
        """Check types and ranges; the TrainingError has the setting's name, its value and the expected values."""
        if (data := getattr(self, "data", None)) is not None:
            object.__setattr__(self, "data", parse_data(data))
        check_options(self, TrainingError)
        for name in declared(type(self)):
            check_text(name, getattr(self, name))
        for name, (other, wanted) in _NEEDS.items():
            if hasattr(self, name) and self.changed([name]) and getattr(self, other) not in wanted:
                raise TrainingError(f"{name}: of no effect where {other} is {getattr(self, other)}; leave it out")
        if self.patience and not getattr(self, "validation", 1):
            raise TrainingError("patience: of no effect where validation is 0; leave it out")
        _refuse_brought(self)
        if len(lengths := self.changed(_LENGTHS)) > 1:
            raise TrainingError(f"{' and '.join(lengths)} are given; expected one of {', '.join(_LENGTHS)}")
        if self.num_warmup_steps > self.steps:
            raise TrainingError(f"warmup_steps is {self.warmup_steps}; expected at most steps, which is {self.steps}")

    @property
    def eval_steps(self) -> int:
        """Steps between validations."""
        return min(250, max(1, self.steps // 8)) if self.eval_every is None else self.eval_every

    @property
    def sample_steps(self) -> int:
        """Steps between samples; 0 disables them."""
        return min(500, max(1, self.steps // 4)) if self.sample_every is None else self.sample_every

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step."""
        return self.batch_rows * self.gradient_accumulation_steps

    @property
    def chosen_precision(self) -> Literal["float32", "bfloat16"]:
        """Compute precision, once "auto" is resolved."""
        assert self.precision != "auto", "`with_precision` comes first"
        return self.precision

    @property
    def chosen_optimizer(self) -> tuple[OptimizerName, float]:
        """Optimizer and peak learning rate, once they are resolved."""
        assert self.optimizer and self.learning_rate, "`with_optimizer` comes first"
        return self.optimizer, self.learning_rate

    @classmethod
    def resolve(cls, file: Path | None, flags: Mapping[str, Any]) -> Self:
        """Combine defaults, a TOML file (if not None) and flags; later ones win. TrainingError for invalid settings."""
        settings, where = ({}, "") if file is None else (read_toml(file), f"{file}: ")
        names = [*declared(cls)]
        if unknown := [name for name in (*settings, *flags) if name not in names]:
            raise TrainingError(f"{where}{unknown_names(unknown, names)}")
        if any(name in flags for name in _LENGTHS):  # a flag replaces whichever of these settings the file has
            settings = {name: value for name, value in settings.items() if name not in _LENGTHS}
        name, before = flags.get("optimizer"), settings.get("optimizer")
        if name and before not in (None, name) and "learning_rate" in settings.keys() - flags.keys():
            raise TrainingError(f"{where}learning_rate is that of {escape(before)}; give one beside optimizer {name}")
        config = cls(**{**settings, **flags})
        _refuse_brought(config, flags)  # also flags that repeat a default
        return config

    def to_toml(self) -> str:
        """Return the settings as TOML for `resolve`; settings that are None become comments."""
        values = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return "".join(
            f"# {name} =\n" if value is None else f"{name} = {toml_value(value)}\n" for name, value in values
        )

    @property
    def num_warmup_steps(self) -> int:
        """Steps until the peak of the learning rate."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @classmethod
    def default(cls, name: str) -> Any:
        """Return a setting's default."""
        return declared(cls)[name].default

    def changed(self, names: Sequence[str]) -> list[str]:
        """Return the names whose settings differ from their defaults."""
        return [name for name in names if getattr(self, name) != self.default(name)]

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """List a resumed run's changes as "name: before -> now"; a setting missing in `before` counts as its default.

        Settings that may change freely (`is_free`) are left out.
        """
        free = {name for name, one in declared(type(self)).items() if one.is_free}
        now, before = dataclasses.asdict(self), renamed(before)
        pairs = [(name, before.get(name, self.default(name)), value) for name, value in now.items()]
        pairs += [(name, value, None) for name, value in before.items() if name not in now]
        return [
            f"{name}: {show_value(was)} -> {show_value(value)}"
            for name, was, value in pairs
            if was != value and name not in free
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(RunConfig):
    """Settings of pretraining: data, tokenizer and architecture."""

    # data: a resumed run compares its content, not its path
    data: Data | None = option(None, f"{DATA_HELP}; several with weights: a.txt=2,b.txt=1", is_free=True, repeats=True)
    text_field: str = option("text", "the field of a file's rows that holds the text")
    validation: float = option(0.1, "the share at the end that is held out", 0.0, 0.9)
    model: str = option("", "a model to go on from: its weights, shape and tokenizer; what -m takes elsewhere")
    tokenizer: str = option("characters", "chars, words or bpe, learned from the data, or a tokenizer's name or path")
    vocab_size: int = option(4096, "tokens of bpe, or of words at most", 3, 2**21)

    # architecture: a preset and changes to it
    preset: str = option("small", "the model's shape, by name; the settings below change it")
    hidden_size: int | None = option(None, "width of the residual stream", 2)
    intermediate_size: int | None = option(
        None, "width of the SwiGLU; left out, it grows with hidden_size, in multiples of 64", 1
    )
    num_hidden_layers: int | None = option(None, "decoder layers", 1)
    num_attention_heads: int | None = option(None, "query heads", 1)
    num_key_value_heads: int | None = option(None, "key-value heads", 1)
    head_dim: int | None = option(None, "width of a head", 2)
    context: int | None = option(None, "tokens a row: the model's context", 2)
    tie_word_embeddings: bool | None = option(None, "the head is the embedding table")
    rope_theta: float | None = option(None, "base of the RoPE frequencies", 1.0)
    initializer_range: float | None = option(None, "standard deviation of fresh weights", 0.0, 10.0)

    def __post_init__(self) -> None:
        """Check types and ranges; "chars" is short for "characters"."""
        if self.tokenizer == "chars":
            object.__setattr__(self, "tokenizer", "characters")
        RunConfig.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """Settings of fine-tuning: base model, dialogs and adapters."""

    # smaller defaults, as the model is pretrained
    steps: int = with_default(RunConfig, "steps", 300)
    batch_rows: int = with_default(RunConfig, "batch_rows", 4)
    optimizer: OptimizerName = option("adamw", "adamw, or muon for the layers' matrices")
    learning_rate: float = option(2e-4, "the peak", 1e-12, 10.0)
    weight_decay: float = with_default(RunConfig, "weight_decay", 0.0)
    sample_prompt: str = option("Hello!", "what a sample answers", is_free=True)
    save_every: int = with_default(RunConfig, "save_every", 100)

    # base model and data
    model: str = option("smollm2-135m", "the base: what -m takes elsewhere")
    data: Data = option(
        "",
        ROWS_HELP + "messages, conversations, prompt and completion, instruction and output, or text",
        is_free=True,
        repeats=True,
    )
    validation: float = option(0.05, "the share of examples at the end that is held out", 0.0, 0.9)
    context: int = option(512, "tokens a row", 2, _MAX_CONTEXT)
    chat_format: ChatFormatName = option("auto", "the dialog format; auto: the model's own")
    truncate: Literal["error", "drop", "keep-start", "keep-end"] = option(
        "error", "examples longer than a row: an error, left out, or what is kept of them"
    )
    columns: str = option("", "fields by the data's names, such as prompt=question,completion=answer")
    roles: str = option("", "roles of messages by the data's names, such as human=user,gpt=assistant")
    skip_bad: bool = option(False, "leave out rows that cannot be used, and count them")
    packing: bool = option(True, "several examples share a row; without, each has one")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the frozen base; auto: as stored, on a CPU float32 unless products are in bfloat16; full: float32"
    )
    quantize: QuantizeName = option("none", "keep the base in few bits: QLoRA", ignores_case=True)
    dequantize: Literal["auto", "load", "use"] = option("auto", "of a base whose file is quantized")

    # trained parameters
    adapter: str = option("", "the folder of an adapter to go on from; its base, rank, alpha and targets count")
    method: Literal["lora", "full"] = option("lora", "adapters beside the frozen base, or all of its weights")
    rank: int = option(16, "of the adapters", 1, 4096)
    alpha: float = option(32.0, "their strength", 1e-6, 1e6)
    dropout: float = option(0.0, "of their inputs", 0.0, 0.99)
    target_modules: str = option("all-linear", "names with commas, also lm_head, embed_tokens; all-linear: in layers")
    rslora: bool = option(False, "scale by alpha / sqrt(rank)")
    dora: bool = option(False, "learn each row's length, too")

    def __post_init__(self) -> None:
        """Check types and ranges."""
        RunConfig.__post_init__(self)
        assert self.reading is not None  # raises for malformed columns and roles

    @property
    def reading(self) -> Reading:
        """Options for reading the rows of the data."""
        return Reading.parse(self.columns, self.roles, skip_bad=self.skip_bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(FinetuneConfig):
    """Settings of preference tuning, with smaller defaults than fine-tuning, as it changes a model less."""

    data: Data = option("", ROWS_HELP + "prompt or messages, chosen and rejected", is_free=True, repeats=True)
    learning_rate: float = with_default(FinetuneConfig, "learning_rate", 5e-5)
    steps: int = with_default(FinetuneConfig, "steps", 200)
    context: int = option(1024, "tokens a row, which holds both answers of a pair", 2, _MAX_CONTEXT)
    beta: float = option(0.1, "the cost of leaving the base: rewards are beta times what P has grown", 1e-6, 1e3)
    label_smoothing: float = option(
        0.0, "share of pairs whose answers are assumed to be exchanged (conservative DPO)", 0.0, 0.5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(FinetuneConfig):
    """Settings of GRPO: a row is a sampled answer, and the answers of a step form groups of equal size."""

    data: Data = option("", ROWS_HELP + "prompt or messages, and what the reward reads", is_free=True, repeats=True)
    learning_rate: float = with_default(FinetuneConfig, "learning_rate", 2e-5)
    steps: int = option(200, "rollouts, each followed by its updates", 1)
    batch_rows: int = option(8, "answers that are computed at once", 1)
    gradient_accumulation_steps: int = with_default(RunConfig, "gradient_accumulation_steps", 4)
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "what products are computed in; in bfloat16 the pass that samples differs from the one that trains"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "float32", "of the frozen base; in bfloat16, too, the two passes differ; auto: as finetune has it"
    )
    reward: RewardNames = option(
        "", "what an answer is worth: exact, regex:PATTERN, schema:FILE, length:N, FILE.py:NAME", repeats=True
    )
    reward_weights: str = option("", "weights of several rewards, in their order, such as 1,0.5; left out: all 1")
    group_size: int = option(8, "answers to each prompt", 2, 1024)
    max_tokens: int = option(128, "tokens of an answer at most", 1, _MAX_CONTEXT)
    stop: str = option("", "a text of one token that ends an answer, besides the model's own ends")
    epsilon: float = option(0.2, "how far from 1 a ratio pulls a token", 0.0, 1.0)
    beta: float = option(0.04, "the weight of KL, the distance from the base; 0 is off", 0.0, 1e3)
    num_iterations: int = option(1, "updates by the same answers", 1, 64)
    exact: bool = option(False, "take log P in training from the pass in C, too: ratios begin at exactly 1")
    alarm_kl: float = option(0.5, "KL in nats per token above which an alarm is raised; 0 is off", 0.0, is_free=True)
    alarm_collapse: float = option(
        0.2, "share of the first length or entropy below which a higher reward raises an alarm; 0 is off", 0.0, 1.0,
        is_free=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check types and ranges, and that a step has whole groups; merge `reward_weights` into `reward`."""
        object.__setattr__(self, "reward", parse_rewards(self.reward, self.reward_weights))
        object.__setattr__(self, "reward_weights", self.reward_weights and "")  # None stays None, to be refused below
        FinetuneConfig.__post_init__(self)
        if self.rows_per_step % self.group_size:
            raise TrainingError(
                f"batch_rows times gradient_accumulation_steps is {self.rows_per_step}; expected a multiple of "
                f"group_size, which is {self.group_size}"
            )
        unread = ["packing", "sample_prompt", "sample_tokens"] + ["epsilon"] * (self.num_iterations == 1)
        if given := self.changed(unread):
            why = "where num_iterations is 1" if given[0] == "epsilon" else "on groups of sampled answers"
            raise TrainingError(f"{given[0]}: of no effect {why}; leave it out")
        if self.dropout:
            raise TrainingError(f"dropout is {self.dropout}; expected 0, as the pass that samples has none")
        if self.max_tokens >= self.context:
            raise TrainingError(f"max_tokens is {self.max_tokens}; expected less than context, which is {self.context}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig(PretrainConfig):
    """Settings of an experiment's runs, sized for a minute or two on a laptop."""

    steps: int = with_default(PretrainConfig, "steps", 400)
    batch_rows: int = with_default(PretrainConfig, "batch_rows", 16)
    optimizer: OptimizerName = with_default(FinetuneConfig, "optimizer", "adamw")
    learning_rate: float = option(3e-3, "the peak; muon wants more", 1e-12, 10.0)
    log_every: int = with_default(PretrainConfig, "log_every", 5)
    eval_every: int = with_default(PretrainConfig, "eval_every", 50)
    eval_rows: int = with_default(PretrainConfig, "eval_rows", 50)
    sample_every: int = with_default(PretrainConfig, "sample_every", 200)
    sample_prompt: str = with_default(PretrainConfig, "sample_prompt", "The")
    save_every: int = with_default(PretrainConfig, "save_every", 200)
    save_total_limit: int = with_default(PretrainConfig, "save_total_limit", 1)
    preset: str = with_default(PretrainConfig, "preset", "tiny")
    context: int = with_default(PretrainConfig, "context", 128)
    seeds: int = option(1, "how often each is trained, with seed, seed + 1, ...", 1, 100)
    embedding_std: float | None = option(
        None, "tied: two more runs whose embedding begins with this deviation; nn.Embedding's is 1", 1e-6, 100.0
    )

    def __post_init__(self) -> None:
        """Check types and ranges; only `steps` sets the length, so that all runs have the same number of steps."""
        RunConfig.__post_init__(self)
        if given := self.changed(["epochs", "tokens"]):
            raise TrainingError(f"{given[0]}: of no effect on an experiment; give steps")


def _refuse_brought(config: RunConfig, given: Collection[str] | None = None) -> None:
    """Raise for settings that the model or adapter determines: those in `given`, or if None all non-default ones."""
    for other, names in (("model", _OF_SCRATCH), ("adapter", _OF_ADAPTERS)):
        if hasattr(config, names[0]) and getattr(config, other):
            for name in config.changed(names) if given is None else filter(given.__contains__, names):
                raise TrainingError(f"{name}: of no effect beside {other}, which has its own; leave it out")
