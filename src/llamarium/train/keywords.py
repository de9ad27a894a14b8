"""Keyword arguments as type checkers read them. Written by tools/options.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from llamarium.train.choices import Examples


class PretrainKeywords(TypedDict, total=False):
    """Settings of `PretrainConfig`, which declares them."""

    steps: int
    epochs: float | None
    tokens: int | None
    batch_rows: int
    gradient_accumulation_steps: int
    optimizer: Literal["adamw", "muon"] | None
    learning_rate: float | None
    muon_learning_rate: float | None
    schedule: Literal["cosine", "linear", "wsd", "constant"]
    warmup_steps: int | None
    final_ratio: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    seed: int
    precision: Literal["auto", "float32", "bfloat16"]
    checkpoint_activations: bool
    compile: bool
    device: str
    threads: int | None
    tensor_parallel: int
    log_every: int
    eval_every: int | None
    eval_rows: int
    patience: int
    alarm_validations: int
    sample_every: int | None
    sample_tokens: int
    sample_prompt: str
    save_every: int
    save_total_limit: int
    data: Examples | None
    text_field: str
    validation: float
    model: str | Path
    tokenizer: str | Path
    vocab_size: int
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


class FinetuneKeywords(TypedDict, total=False):
    """Settings of `FinetuneConfig`, which declares them."""

    steps: int
    epochs: float | None
    tokens: int | None
    batch_rows: int
    gradient_accumulation_steps: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    muon_learning_rate: float | None
    schedule: Literal["cosine", "linear", "wsd", "constant"]
    warmup_steps: int | None
    final_ratio: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    seed: int
    precision: Literal["auto", "float32", "bfloat16"]
    checkpoint_activations: bool
    compile: bool
    device: str
    threads: int | None
    tensor_parallel: int
    log_every: int
    eval_every: int | None
    eval_rows: int
    patience: int
    alarm_validations: int
    sample_every: int | None
    sample_tokens: int
    sample_prompt: str
    save_every: int
    save_total_limit: int
    model: str | Path
    data: Examples
    validation: float
    context: int
    chat_format: Literal["auto", "llama3", "chatml", "llama2", "mistral", "vicuna", "alpaca", "zephyr", "none"]
    truncate: Literal["error", "drop", "keep-start", "keep-end"]
    columns: str
    roles: str
    skip_bad: bool
    packing: bool
    dtype: Literal["auto", "float32", "bfloat16"]
    quantize: Literal["none", "NF4", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q5_0"]
    dequantize: Literal["auto", "load", "use"]
    adapter: str | Path
    method: Literal["lora", "full"]
    rank: int
    alpha: float
    dropout: float
    target_modules: str
    rslora: bool
    dora: bool


class DPOKeywords(TypedDict, total=False):
    """Settings of `DPOConfig`, which declares them."""

    steps: int
    epochs: float | None
    tokens: int | None
    batch_rows: int
    gradient_accumulation_steps: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    muon_learning_rate: float | None
    schedule: Literal["cosine", "linear", "wsd", "constant"]
    warmup_steps: int | None
    final_ratio: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    seed: int
    precision: Literal["auto", "float32", "bfloat16"]
    checkpoint_activations: bool
    compile: bool
    device: str
    threads: int | None
    tensor_parallel: int
    log_every: int
    eval_every: int | None
    eval_rows: int
    patience: int
    alarm_validations: int
    sample_every: int | None
    sample_tokens: int
    sample_prompt: str
    save_every: int
    save_total_limit: int
    model: str | Path
    data: Examples
    validation: float
    context: int
    chat_format: Literal["auto", "llama3", "chatml", "llama2", "mistral", "vicuna", "alpaca", "zephyr", "none"]
    truncate: Literal["error", "drop", "keep-start", "keep-end"]
    columns: str
    roles: str
    skip_bad: bool
    packing: bool
    dtype: Literal["auto", "float32", "bfloat16"]
    quantize: Literal["none", "NF4", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q5_0"]
    dequantize: Literal["auto", "load", "use"]
    adapter: str | Path
    method: Literal["lora", "full"]
    rank: int
    alpha: float
    dropout: float
    target_modules: str
    rslora: bool
    dora: bool
    beta: float
    label_smoothing: float


class GRPOKeywords(TypedDict, total=False):
    """Settings of `GRPOConfig`, which declares them."""

    steps: int
    epochs: float | None
    tokens: int | None
    batch_rows: int
    gradient_accumulation_steps: int
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    muon_learning_rate: float | None
    schedule: Literal["cosine", "linear", "wsd", "constant"]
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
    eval_every: int | None
    eval_rows: int
    patience: int
    alarm_validations: int
    sample_every: int | None
    sample_tokens: int
    sample_prompt: str
    save_every: int
    save_total_limit: int
    model: str | Path
    data: Examples
    validation: float
    context: int
    chat_format: Literal["auto", "llama3", "chatml", "llama2", "mistral", "vicuna", "alpaca", "zephyr", "none"]
    truncate: Literal["error", "drop", "keep-start", "keep-end"]
    columns: str
    roles: str
    skip_bad: bool
    packing: bool
    dtype: Literal["auto", "float32", "bfloat16"]
    quantize: Literal["none", "NF4", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q5_0"]
    dequantize: Literal["auto", "load", "use"]
    adapter: str | Path
    method: Literal["lora", "full"]
    rank: int
    alpha: float
    dropout: float
    target_modules: str
    rslora: bool
    dora: bool
    reward: str | Sequence[str] | Mapping[str, float]
    reward_weights: str
    group_size: int
    max_tokens: int
    stop: str
    epsilon: float
    beta: float
    num_iterations: int
    exact: bool
    alarm_kl: float
    alarm_collapse: float
