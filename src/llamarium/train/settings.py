"""A run's settings as keyword arguments: those of `train/config.py` by name and type, which a test holds equal."""

from typing import Literal, TypedDict

from llamarium.train.config import OptimizerName, ScheduleName


class RunSettings(TypedDict, total=False):
    """Those of `RunConfig`, where their defaults and ranges stand."""

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
    """Those of `PretrainConfig`, where their defaults and ranges stand."""

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
    """Those of `FinetuneConfig`, where their defaults and ranges stand."""

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
    """Those of `DPOConfig`, where their defaults and ranges stand."""

    beta: float
