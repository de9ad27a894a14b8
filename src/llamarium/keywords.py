"""Keyword options of public functions: the signature that editors show, and what an unknown name gets. Never torch.

Options are declared once: their types in a `TypedDict`, which type checkers read, their defaults where they are used.
"""

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast, get_args

from llamarium.errors import LlamariumError, OptionError, escape

F = TypeVar("F", bound=Callable[..., Any])

_GREEDY = "temperature=0 is greedy; above 0, which is the default of most models, tokens are drawn"
_ANSWER_ONLY = "max_tokens limits the answer alone, without the prompt"
_STREAMS = "stream(...) and stream_chat(...) yield an answer piece by piece"
_NO_BEAMS = "there is no beam search; n=5 gives five answers, logprobs=0 their log-probabilities"
_ADAPTERS = (
    'an adapter is chosen when the model is loaded, load(adapter="folder"), or for each request of '
    'engine(adapters={"name": "folder"})'
)
_AT_LOADING = "it is chosen when the model is loaded: load(..., {name}=...)"
_WHOLE_CONTEXT = "answers may fill the model's whole context, and memory is taken as it grows; leave it out"
_PROCESSOR = "it is not built in; logits_processor takes a function that does it"

FOREIGN: Mapping[str, tuple[str, ...]] = {
    # names of an option of ours
    **dict.fromkeys(("num_return_sequences", "best_of", "num_completions", "candidate_count"), ("n",)),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "num_predict", "max_gen_len"), ("max_tokens",)),
    **dict.fromkeys(("min_length", "min_new_tokens"), ("min_tokens",)),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_criteria", "stopping_criteria"), ("stop",)),
    **dict.fromkeys(("eos_token_id", "eos_token_ids", "stop_ids"), ("stop_token_ids",)),
    **dict.fromkeys(("random_seed", "random_state", "sampling_seed"), ("seed",)),
    **dict.fromkeys(("output_scores", "return_logprobs", "top_logprobs"), ("logprobs",)),
    **dict.fromkeys(("logits_processors", "processors"), ("logits_processor",)),
    **dict.fromkeys(("guided_json", "schema", "response_model"), ("json_schema",)),
    **dict.fromkeys(("guided_regex", "pattern"), ("regex",)),
    **dict.fromkeys(("guided_choice", "choices"), ("choice",)),
    **dict.fromkeys(("guided_grammar", "gbnf"), ("grammar",)),
    **dict.fromkeys(("assistant_model", "speculative_model"), ("draft_model",)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "ngram_speculation"), ("prompt_lookup",)),
    **dict.fromkeys(("input_ids", "inputs", "prompts", "text", "texts"), ("prompt", "text", "texts", "data")),
    **dict.fromkeys(("sampling_params", "sampling", "generation_config"), ("params",)),
    **dict.fromkeys(("functions",), ("tools",)),
    **dict.fromkeys(("torch_dtype", "compute_dtype", "data_type"), ("dtype",)),
    **dict.fromkeys(("device_map", "backend"), ("device",)),
    **dict.fromkeys(("quantization", "quant"), ("quantize",)),
    **dict.fromkeys(("model_path", "model_name", "model_id", "model_name_or_path", "path", "repo_id"), ("model",)),
    **dict.fromkeys(("pretrained_model_name_or_path", "base_model"), ("model",)),
    **dict.fromkeys(("lora", "lora_path", "peft_model", "adapter_path"), ("adapter", "adapters")),
    **dict.fromkeys(("loras", "lora_modules"), ("adapters",)),
    **dict.fromkeys(("batch_size", "max_batch_size", "num_parallel"), ("max_num_seqs", "batch_rows")),
    **dict.fromkeys(("kv_cache", "cache_dtype", "kv_dtype", "cache_implementation"), ("kv_cache_dtype",)),
    **dict.fromkeys(("timeout", "timeout_seconds"), ("timeout_s",)),
    **dict.fromkeys(("template",), ("chat_template",)),
    **dict.fromkeys(("output_dir", "output", "output_path", "save_path"), ("out",)),
    # of training
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), ("epochs",)),
    **dict.fromkeys(("max_steps", "num_steps", "iterations", "max_iters"), ("steps",)),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "micro_batch_size"), ("batch_rows",)),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), ("gradient_accumulation_steps",)),
    **dict.fromkeys(("train_dataset", "dataset", "train_data", "train_file"), ("data",)),
    **dict.fromkeys(("dataset_text_field", "text_column"), ("text_field",)),
    **dict.fromkeys(("eval_dataset", "val_split", "validation_split", "test_size"), ("validation",)),
    **dict.fromkeys(("lr", "peak_lr"), ("learning_rate",)),
    **dict.fromkeys(("lr_scheduler_type", "scheduler", "lr_scheduler"), ("schedule",)),
    **dict.fromkeys(("warmup", "num_warmup_steps"), ("warmup_steps",)),
    **dict.fromkeys(("adam_beta1",), ("beta1",)),
    **dict.fromkeys(("adam_beta2",), ("beta2",)),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "clip_grad_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), ("precision",)),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), ("checkpoint_activations",)),
    **dict.fromkeys(("torch_compile",), ("compile",)),
    **dict.fromkeys(("max_seq_length", "block_size", "seq_len", "sequence_length"), ("context", _WHOLE_CONTEXT)),
    **dict.fromkeys(("logging_steps", "log_interval"), ("log_every",)),
    **dict.fromkeys(("eval_steps", "eval_interval"), ("eval_every",)),
    **dict.fromkeys(("save_steps", "save_interval"), ("save_every",)),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), ("patience", _NO_BEAMS)),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), ("rank",)),
    **dict.fromkeys(("lora_alpha",), ("alpha",)),
    **dict.fromkeys(("lora_dropout",), ("dropout",)),
    **dict.fromkeys(("lora_target_modules",), ("target_modules",)),
    **dict.fromkeys(("num_generations",), ("group_size",)),
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_func"), ("reward",)),
    **dict.fromkeys(("resume_from_checkpoint",), ("resume",)),
    **dict.fromkeys(("callback", "callbacks"), ("progress", "watch")),
    # what is done otherwise here
    **dict.fromkeys(("max_length",), ("context", _ANSWER_ONLY)),
    **dict.fromkeys(("stream", "streaming", "streamer"), (_STREAMS,)),
    **dict.fromkeys(("do_sample", "greedy", "sample"), (_GREEDY,)),
    **dict.fromkeys(("num_beams", "use_beam_search", "beam_width", "length_penalty"), (_NO_BEAMS,)),
    **dict.fromkeys(("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "typical_p", "tfs_z"), (_PROCESSOR,)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "guidance_scale", "dry_multiplier", "top_a"), (_PROCESSOR,)),
    **dict.fromkeys(("adapter", "adapter_name", "lora_request", "adapters"), ("adapters", _ADAPTERS)),
    **dict.fromkeys(("device", "dtype", "quantize", "chat_template", "deterministic"), (_AT_LOADING,)),
    **dict.fromkeys(("max_model_len", "n_ctx", "num_ctx", "max_seq_len", "context_length"), (_WHOLE_CONTEXT,)),
    "messages": ("chat(messages) and stream_chat(messages) answer a dialog",),
    "system": ('a system prompt is the first message: chat([{"role": "system", "content": ...}, ...])',),
    "system_prompt": ('a system prompt is the first message: chat([{"role": "system", "content": ...}, ...])',),
    "response_format": ("json_schema, json_object, regex and choice hold an answer to a form",),
    "echo": ("an answer is without its prompt, whose ids are Generation.prompt_ids",),
    "return_full_text": ("an answer is without its prompt, whose ids are Generation.prompt_ids",),
    "skip_special_tokens": ("a text is without special tokens; Completion.token_ids has them",),
    "pad_token_id": ("nothing is padded; leave it out",),
    "attention_mask": ("nothing is padded; leave it out",),
    "load_in_4bit": ('quantize="NF4", or "Q4_K"',),
    "load_in_8bit": ('quantize="Q8_0"',),
    "quantization_config": ('quantize="NF4", "Q4_K" or "Q8_0"',),
    "n_gpu_layers": ('device="cuda" puts the whole model on the GPU',),
    "gpu_layers": ('device="cuda" puts the whole model on the GPU',),
    "tensor_parallel_size": ("a model is on one device",),
    "gpu_memory_utilization": ("engine(kv_memory=...) is the KV cache's size in bytes",),
    "n_threads": ("the environment variable OMP_NUM_THREADS sets the number of threads",),
    "num_threads": ("threads", "the environment variable OMP_NUM_THREADS sets the number of threads"),
    "trust_remote_code": ("no code that comes with a model is run; leave it out",),
    "use_safetensors": ("the format is recognised; leave it out",),
    "attn_implementation": ("the kernels are chosen for the device; leave it out",),
    "low_cpu_mem_usage": ("weights are mapped, not copied, where that is possible; leave it out",),
}
"""Names of other libraries, and what does it here: the first option of ours that a function has, or a sentence."""


def unknown_names(names: Iterable[object], known: Collection[str]) -> str:
    """Return what an error says of names that are none of the `known` options."""
    return "; ".join(f"unknown option {escape(name, 40)}{_hint(str(name), known)}" for name in names)


def _hint(name: str, known: Collection[str]) -> str:
    for instead in FOREIGN.get(name, ()):
        if instead in known:
            return f": use {instead}"
        if " " in instead or "=" in instead:
            return f": {instead.replace('{name}', name)}"
    if similar := difflib.get_close_matches(name, known, n=1):
        return f": did you mean {similar[0]}?"
    return f"; there are: {', '.join(known)}"


def shows_options(
    *sources: object, error: type[LlamariumError] = OptionError, is_checked: bool = True, **defaults: object
) -> Callable[[F], F]:
    """Decorate a function so that `help` and editors show its options, and a name that it lacks is explained.

    An unpacked `TypedDict` becomes keyword parameters. Their defaults are those of `sources`, dataclasses and
    functions, of which later ones win, then `defaults`; an option of none of them is None. Help texts that the
    dataclasses declare (`options/declare.py`) follow the docstring's line for `**options`.

    Args:
        sources: Where the defaults are declared.
        error: Raised for an unknown name.
        is_checked: False leaves names to the function, which then costs nothing more.
        defaults: By name.
    """
    declared = {name: value for source in sources for name, value in _declared(source)} | defaults

    def decorate(function: F) -> F:
        signature = _signature(function, declared)
        function.__doc__ = _with_texts(function.__doc__ or "", signature, sources)
        if not is_checked:
            function.__dict__["__signature__"] = signature
            return function
        option_names = [name for name in signature.parameters if name not in ("self", "cls")]
        names = frozenset(signature.parameters)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if not names.issuperset(options):
                raise error(unknown_names([name for name in options if name not in names], option_names))
            return function(*args, **options)

        checked.__dict__["__signature__"] = signature
        return cast(F, checked)

    return decorate


def _with_texts(doc: str, signature: inspect.Signature, sources: Iterable[object]) -> str:
    """Return a docstring in which the help text of each option follows the line for all of them."""
    texts = {
        item.name: item.metadata["option"]["help"]
        for source in sources
        if isinstance(source, type) and is_dataclass(source)
        for item in fields(source)
        if "option" in item.metadata
    }
    match = re.search(r"^( +)\*\*\w+: .*\n(\1 +\S.*\n)*", doc, re.MULTILINE)
    if match is None:
        return doc
    lines = (f"{match[1]}{name}: {texts[name]}." for name in signature.parameters if name in texts)
    wrapped = (textwrap.fill(line, 120, subsequent_indent=match[1] + "    ") + "\n" for line in lines)
    return doc[: match.end()] + "".join(wrapped) + doc[match.end() :]


def _declared(source: object) -> Iterator[tuple[str, object]]:
    """Yield the names and defaults of a dataclass' fields or a function's parameters."""
    if isinstance(source, type) and is_dataclass(source):
        yield from ((item.name, item.default) for item in fields(source) if item.default is not MISSING)
    else:
        parameters = inspect.signature(cast(Callable[..., Any], source)).parameters.values()
        yield from (
            (parameter.name, parameter.default) for parameter in parameters if parameter.default is not parameter.empty
        )


def _signature(function: Callable[..., Any], declared: Mapping[str, object]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        (unpacked,) = get_args(parameters.pop().annotation)
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared.get(name), annotation=hint)
            for name, hint in unpacked.__annotations__.items()
        ]
    return signature.replace(parameters=parameters)
