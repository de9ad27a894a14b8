"""Settings of a training run: one flat list, from a TOML file and from flags, which take precedence.

Every setting has a default that trains. The resolved list is written beside the checkpoints as `train.toml`, which
starts the same run again.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_type_hints

from llamarium.datasets.rows import Reading
from llamarium.datasets.sources import Data, parse_data
from llamarium.errors import TrainingError, escape, show_value
from llamarium.keywords import unknown_names
from llamarium.quant.formats import chosen_type
from llamarium.train.choices import ChatFormatName, OptimizerName, QuantizeName, ScheduleName
from llamarium.train.rewards.names import RewardNames, parse_rewards
from llamarium.train.setting_checks import check_setting
from llamarium.train.settings_file import read_toml, renamed, toml_value

FILES_OF_ROWS = ".jsonl, .json, .csv, .tsv or .parquet file (all but .parquet also as .gz or .zst)"
DATA_HELP = f"a text file, a {FILES_OF_ROWS}, a folder, shakespeare, or org/name on the hub; left out: Python's manual"
ROWS_HELP = f"a {FILES_OF_ROWS}, a folder, org/name on the hub, or several (a.jsonl=2,b.jsonl=1), of rows with "

EPOCHS_COUNTED = 10
"""Epochs whose packed rows are counted to find the steps of `epochs`; more have the mean number of rows of these."""

_MAX_CONTEXT = 2**20  # tokens a row: eight times what Llama 3 reads

SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings", "rope_theta", "initializer_range",
)  # fmt: skip
"""Settings that change a preset's shape."""

_LENGTHS = ("steps", "epochs", "tokens")
_OF_SCRATCH = ("preset", "tokenizer", "vocab_size", *SHAPE)
_OF_ADAPTERS = ("rank", "alpha", "target_modules", "rslora", "dora")
# Settings that count only where another one has one of these values.
_NEEDS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "muon_learning_rate": ("optimizer", ("muon", None)),
    "decay_share": ("schedule", ("wsd",)),
    "final_ratio": ("schedule", ("cosine", "linear", "wsd")),
    "vocab_size": ("tokenizer", ("bpe", "words")),
    **dict.fromkeys(("adapter", *_OF_ADAPTERS, "dropout", "quantize", "dequantize", "dtype"), ("method", ("lora",))),
}


def _setting(default: Any, text: str, low: float | None = None, high: float | None = None, free: bool = False) -> Any:
    """Define a setting: default, help text, range; `free` ones may change when a run is resumed."""
    return field(default=default, metadata={"help": text, "low": low, "high": high, "free": free})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of every run; their help texts document them (`llamarium pretrain --help`)."""

    # the recipe
    steps: int = _setting(2000, "optimizer steps", 1)
    epochs: float | None = _setting(
        None, f"passes over the data, instead of steps; above {EPOCHS_COUNTED} steps are estimated", 1e-6, 1e6
    )
    tokens: int | None = _setting(None, "tokens that are trained on, instead of steps", 1)
    batch_rows: int = _setting(32, "rows that are computed at once", 1)
    gradient_accumulation_steps: int = _setting(1, "batches that make one step", 1)
    optimizer: OptimizerName | None = _setting(
        None, "muon for the layers' matrices, or adamw; left out: muon if small, from scratch, on a CPU with bfloat16"
    )
    learning_rate: float | None = _setting(None, "the peak; left out: 1e-3, a small muon 8e-3, --model 1e-4", 1e-12, 10)
    muon_learning_rate: float | None = _setting(None, "muon's peak, where AdamW's beside it is another", 1e-12, 10.0)
    schedule: ScheduleName = _setting("cosine", "how the learning rate falls")
    warmup_steps: int | None = _setting(None, "steps until the peak; left out: a tenth of them, at most 100", 0)
    final_ratio: float = _setting(0.1, "what is left of the peak at the end", 0.0, 1.0)
    decay_share: float = _setting(0.2, "the last part of a wsd run, in which it falls", 0.0, 1.0)
    weight_decay: float = _setting(0.1, "of matrices", 0.0, 10.0)
    beta1: float = _setting(0.9, "adamw's memory of gradients", 0.0, 0.9999)
    beta2: float = _setting(0.95, "adamw's memory of their squares", 0.0, 0.99999)
    max_grad_norm: float = _setting(1.0, "the largest gradient norm; 0 is off", 0.0)
    seed: int = _setting(0, "of fresh weights and the order of the data", 0, 2**31 - 1)
    precision: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "what products are computed in; auto: bfloat16 on a CPU that multiplies it faster, else float32"
    )
    checkpoint_activations: bool = _setting(False, "compute activations twice instead of keeping them")
    compile: bool = _setting(False, "fuse the step by torch.compile (needs a C++ compiler)", free=True)

    # the machine
    device: str = _setting("auto", "cpu, cuda, cuda:1; auto is a GPU where there is one", free=True)
    threads: int | None = _setting(None, "CPU threads; left out: the fewest within 5 % of the best", 1, 1024, free=True)
    tensor_parallel: int = _setting(1, "processes of torchrun that shard each layer's matrices", 1, free=True)

    # watching and saving
    log_every: int = _setting(10, "steps between lines of metrics", 1, free=True)
    eval_every: int | None = _setting(None, "steps between validations; left out: 1/8, at most 250", 1, free=True)
    eval_rows: int = _setting(200, "rows of a validation at most; 0 is all", 0, free=True)
    patience: int = _setting(0, "validations without a better loss that end the run; 0 is off", 0, free=True)
    alarm_validations: int = _setting(
        5, "validations in a row worse than the best that raise an alarm; 0 is off", 0, free=True
    )
    sample_every: int | None = _setting(
        None, "steps between samples of text; left out: a quarter of the run, at most 500; 0 is never", 0, free=True
    )
    sample_tokens: int = _setting(200, "tokens of a sample", 1, free=True)
    sample_prompt: str = _setting("\n", "what a sample begins with", free=True)
    save_every: int = _setting(500, "steps between checkpoints", 1, free=True)
    save_total_limit: int = _setting(2, "checkpoints that are kept, besides the best", 1, free=True)

    def __post_init__(self) -> None:
        """Check types and ranges; TrainingError names the setting, its value and what was expected."""
        if (data := getattr(self, "data", None)) is not None:
            object.__setattr__(self, "data", parse_data(data))
        hints = get_type_hints(type(self))
        for item in dataclasses.fields(self):
            check_setting(item, hints[item.name], getattr(self, item.name))
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
        """Steps between samples; 0 is never."""
        return min(500, max(1, self.steps // 4)) if self.sample_every is None else self.sample_every

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step."""
        return self.batch_rows * self.gradient_accumulation_steps

    @property
    def chosen_precision(self) -> Literal["float32", "bfloat16"]:
        """The precision of a prepared run."""
        assert self.precision != "auto", "`with_precision` comes first"
        return self.precision

    @property
    def chosen_optimizer(self) -> tuple[OptimizerName, float]:
        """The optimizer and the peak rate of a prepared run."""
        assert self.optimizer and self.learning_rate, "`with_optimizer` comes first"
        return self.optimizer, self.learning_rate

    @classmethod
    def resolve(cls, file: Path | None, flags: Mapping[str, Any]) -> Self:
        """Combine defaults, a TOML file (if not None) and flags, in this order; TrainingError for invalid settings."""
        settings, where = ({}, "") if file is None else (read_toml(file), f"{file}: ")
        known = [item.name for item in dataclasses.fields(cls)]
        if unknown := [name for name in (*settings, *flags) if name not in known]:
            raise TrainingError(f"{where}{unknown_names(unknown, known)}")
        if any(name in flags for name in _LENGTHS):  # a flag takes the place of all that the file says of the length
            settings = {name: value for name, value in settings.items() if name not in _LENGTHS}
        name, before = flags.get("optimizer"), settings.get("optimizer")
        if name and before not in (None, name) and "learning_rate" in settings.keys() - flags.keys():
            raise TrainingError(f"{where}learning_rate is that of {escape(before)}; give one beside optimizer {name}")
        found = cls(**{**settings, **flags})
        _refuse_brought(found, flags)  # also the defaults, named
        return found

    def to_toml(self) -> str:
        """Return the settings as TOML for `resolve`; those that are None are comments."""
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
        return next(item.default for item in dataclasses.fields(cls) if item.name == name)

    def changed(self, names: Sequence[str]) -> list[str]:
        """Return those of some settings that are not their defaults."""
        return [name for name in names if getattr(self, name) != self.default(name)]

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """List a resumed run's changes as "name: before -> now"; a setting missing in `before` had its default."""
        free = {item.name for item in dataclasses.fields(self) if item.metadata["free"]}
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
    """Settings of pretraining: data, tokenizer and shape."""

    # the data; what it holds is compared, not where it lies
    data: Data | None = _setting(None, f"{DATA_HELP}; several with weights: a.txt=2,b.txt=1", free=True)
    text_field: str = _setting("text", "the field of a file's rows that holds the text")
    validation: float = _setting(0.1, "the share at the end that is held out", 0.0, 0.9)
    model: str = _setting("", "a model to go on from: its weights, shape and tokenizer; what -m takes elsewhere")
    tokenizer: str = _setting("characters", "chars, words or bpe, learned from the data, or a tokenizer's name or path")
    vocab_size: int = _setting(4096, "tokens of bpe, or of words at most", 3, 2**21)

    # the model: a preset, and what differs from it
    preset: str = _setting("small", "the model's shape, by name; the settings below change it")
    hidden_size: int | None = _setting(None, "width of the residual stream", 2)
    intermediate_size: int | None = _setting(
        None, "width of the SwiGLU; left out, it grows with hidden_size, in multiples of 64", 1
    )
    num_hidden_layers: int | None = _setting(None, "decoder layers", 1)
    num_attention_heads: int | None = _setting(None, "query heads", 1)
    num_key_value_heads: int | None = _setting(None, "key-value heads", 1)
    head_dim: int | None = _setting(None, "width of a head", 2)
    context: int | None = _setting(None, "tokens a row: the model's context", 2)
    tie_word_embeddings: bool | None = _setting(None, "the head is the embedding table")
    rope_theta: float | None = _setting(None, "base of the RoPE frequencies", 1.0)
    initializer_range: float | None = _setting(None, "standard deviation of fresh weights", 0.0, 10.0)

    def __post_init__(self) -> None:
        """Check types and ranges; "chars" is the short name of "characters"."""
        if self.tokenizer == "chars":
            object.__setattr__(self, "tokenizer", "characters")
        RunConfig.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """Settings of fine-tuning: base model, dialogs and adapters."""

    # smaller defaults, as the model is trained already
    steps: int = _setting(300, "optimizer steps", 1)
    batch_rows: int = _setting(4, "rows that are computed at once", 1)
    optimizer: OptimizerName = _setting("adamw", "adamw, or muon for the layers' matrices")
    learning_rate: float = _setting(2e-4, "the peak", 1e-12, 10.0)
    weight_decay: float = _setting(0.0, "of matrices", 0.0, 10.0)
    sample_prompt: str = _setting("Hello!", "what a sample answers", free=True)
    save_every: int = _setting(100, "steps between checkpoints", 1, free=True)

    # the base and the data
    model: str = _setting("smollm2-135m", "the base: what -m takes elsewhere")
    data: Data = _setting(
        "", ROWS_HELP + "messages, conversations, prompt and completion, instruction and output, or text", free=True
    )
    validation: float = _setting(0.05, "the share of examples at the end that is held out", 0.0, 0.9)
    context: int = _setting(512, "tokens a row", 2, _MAX_CONTEXT)
    chat_format: ChatFormatName = _setting("auto", "the dialog format; auto: the model's own")
    truncate: Literal["error", "drop", "keep-start", "keep-end"] = _setting(
        "error", "examples longer than a row: an error, left out, or what is kept of them"
    )
    columns: str = _setting("", "fields by the data's names, such as prompt=question,completion=answer")
    roles: str = _setting("", "roles of messages by the data's names, such as human=user,gpt=assistant")
    skip_bad: bool = _setting(False, "leave out rows that cannot be used, and count them")
    packing: bool = _setting(True, "several examples share a row; without, each has one")
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "of the frozen base; auto: as stored, on a CPU float32 unless products are in bfloat16; full: float32"
    )
    quantize: QuantizeName = _setting("none", "keep the base in few bits: QLoRA")
    dequantize: Literal["auto", "load", "use"] = _setting("auto", "of a base whose file is quantized")

    # what is learned
    adapter: str = _setting("", "the folder of an adapter to go on from; its base, rank, alpha and targets count")
    method: Literal["lora", "full"] = _setting("lora", "adapters beside the frozen base, or all of its weights")
    rank: int = _setting(16, "of the adapters", 1, 4096)
    alpha: float = _setting(32.0, "their strength", 1e-6, 1e6)
    dropout: float = _setting(0.0, "of their inputs", 0.0, 0.99)
    target_modules: str = _setting("all-linear", "names with commas, also lm_head, embed_tokens; all-linear: in layers")
    rslora: bool = _setting(False, "scale by alpha / sqrt(rank)")
    dora: bool = _setting(False, "learn each row's length, too")

    def __post_init__(self) -> None:
        """Check types and ranges; names of quantized types may be in small letters."""
        object.__setattr__(self, "quantize", chosen_type("quantize", self.quantize, get_args(QuantizeName)))
        RunConfig.__post_init__(self)
        assert self.reading is not None  # it raises for texts that are none

    @property
    def reading(self) -> Reading:
        """How the rows of the data are read."""
        return Reading.parse(self.columns, self.roles, skip_bad=self.skip_bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(FinetuneConfig):
    """Settings of preference training, with smaller defaults: it changes a model less."""

    data: Data = _setting("", ROWS_HELP + "prompt or messages, chosen and rejected", free=True)
    learning_rate: float = _setting(5e-5, "the peak", 1e-12, 10.0)
    steps: int = _setting(200, "optimizer steps", 1)
    context: int = _setting(1024, "tokens a row, which holds both answers of a pair", 2, _MAX_CONTEXT)
    beta: float = _setting(0.1, "the cost of leaving the base: rewards are beta times what P has grown", 1e-6, 1e3)
    label_smoothing: float = _setting(
        0.0, "share of pairs whose answers are assumed to be exchanged (conservative DPO)", 0.0, 0.5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(FinetuneConfig):
    """Settings of learning from rewards: a row is an answer, and the answers of a step are groups of equal size."""

    data: Data = _setting("", ROWS_HELP + "prompt or messages, and what the reward reads", free=True)
    learning_rate: float = _setting(2e-5, "the peak", 1e-12, 10.0)
    steps: int = _setting(200, "rollouts, each followed by its updates", 1)
    batch_rows: int = _setting(8, "answers that are computed at once", 1)
    gradient_accumulation_steps: int = _setting(4, "batches that make one step", 1)
    precision: Literal["float32", "bfloat16"] = _setting(
        "float32", "what products are computed in; in bfloat16 the pass that samples differs from the one that trains"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "float32", "of the frozen base; in bfloat16, too, the two passes differ; auto: as finetune has it"
    )
    reward: RewardNames = _setting(
        "", "what an answer is worth: exact, regex:PATTERN, schema:FILE, length:N, FILE.py:NAME (repeatable)"
    )
    reward_weights: str = _setting("", "weights of several rewards, in their order, such as 1,0.5; left out: all 1")
    group_size: int = _setting(8, "answers to each prompt", 2, 1024)
    max_tokens: int = _setting(128, "tokens of an answer at most", 1, _MAX_CONTEXT)
    stop: str = _setting("", "a text of one token that ends an answer, besides the model's own ends")
    epsilon: float = _setting(0.2, "how far from 1 a ratio pulls a token", 0.0, 1.0)
    beta: float = _setting(0.04, "the weight of KL, the distance from the base; 0 is off", 0.0, 1e3)
    num_iterations: int = _setting(1, "updates by the same answers", 1, 64)
    exact: bool = _setting(False, "take log P in training from the pass in C, too: ratios begin at exactly 1")
    alarm_kl: float = _setting(0.5, "KL in nats per token above which an alarm is raised; 0 is off", 0.0, free=True)
    alarm_collapse: float = _setting(
        0.2, "share of the first length or entropy below which a higher reward raises an alarm; 0 is off", 0.0, 1.0,
        free=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check types and ranges, and that groups are whole; `reward` has the weights of several from here on."""
        object.__setattr__(self, "reward", parse_rewards(self.reward, self.reward_weights))
        object.__setattr__(self, "reward_weights", self.reward_weights and "")  # None stays, and is refused
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


def _default(name: str, value: Any) -> Any:
    """Change a setting's default; its help and range stay."""
    return field(default=value, metadata=next(i for i in dataclasses.fields(PretrainConfig) if i.name == name).metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig(PretrainConfig):
    """Settings of an experiment's runs, which take a minute or two on a laptop."""

    steps: int = _default("steps", 400)
    batch_rows: int = _default("batch_rows", 16)
    optimizer: OptimizerName = _setting("adamw", "adamw, or muon for the layers' matrices")
    learning_rate: float = _setting(3e-3, "the peak; muon wants more", 1e-12, 10.0)
    log_every: int = _default("log_every", 5)
    eval_every: int = _default("eval_every", 50)
    eval_rows: int = _default("eval_rows", 50)
    sample_every: int = _default("sample_every", 200)
    sample_prompt: str = _default("sample_prompt", "The")
    save_every: int = _default("save_every", 200)
    save_total_limit: int = _default("save_total_limit", 1)
    preset: str = _default("preset", "tiny")
    context: int = _default("context", 128)
    seeds: int = _setting(1, "how often each is trained, with seed, seed + 1, ...", 1, 100)
    embedding_std: float | None = _setting(
        None, "tied: two more runs whose embedding begins with this deviation; nn.Embedding's is 1", 1e-6, 100.0
    )

    def __post_init__(self) -> None:
        """Check types and ranges; the runs of an experiment have the same number of steps."""
        RunConfig.__post_init__(self)
        if given := self.changed(["epochs", "tokens"]):
            raise TrainingError(f"{given[0]}: of no effect on an experiment; give steps")


def _refuse_brought(config: RunConfig, given: Collection[str] | None = None) -> None:
    """Refuse what a model or an adapter brings: settings that are `given`, else those that are not defaults."""
    for other, names in (("model", _OF_SCRATCH), ("adapter", _OF_ADAPTERS)):
        if hasattr(config, names[0]) and getattr(config, other):
            for name in config.changed(names) if given is None else filter(given.__contains__, names):
                raise TrainingError(f"{name}: of no effect beside {other}, which has its own; leave it out")
