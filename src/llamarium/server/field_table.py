"""The table of known request fields that this server does not support, by the object that contains them.

A request field is supported, a hint, rejected, or unknown. Supported fields are declared by the bodies (`Body`). This
table lists the others: a **hint** has no effect and can safely be ignored; a **rejected** field would change the
answer, so it is an error unless its value disables it. Names in neither place are unknown and treated like hints.
docs/reference/server.md lists the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hint:
    """A field without effect, except where `server/hints.py` finds that this model or server uses it.

    Attributes:
        kind: Type of its values; None if they are never read.
        help: Description in the OpenAPI schema, if `kind` makes it a field.
    """

    kind: Any = None
    help: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer.

    Attributes:
        reason: Why it is not supported, or what to use instead.
        off: Values that disable the field; with one of these it is a hint.
    """

    reason: str
    off: tuple[Any, ...] = ()


Row = Mapping[str, Hint | Refused]

HINT = Hint()
_NO_CUSTOM = Refused("only function tools with a JSON schema are supported")
_NO_SERVER_TOOLS = Refused("the server does not run tools")
_TEXT_ONLY = Refused("only text input and output are supported")
_NO_SUCH_SAMPLER = "this sampler is not implemented"
_TOP_LEVEL = Refused("set its fields at the top level of the request", off=({},))


def _hints(names: str) -> dict[str, Hint | Refused]:
    return dict.fromkeys(names.split(), HINT)


def _refused(reason: str, **off: Any) -> dict[str, Hint | Refused]:
    """Return fields that are rejected for the same reason; `off` are the values that disable each of them."""
    return {name: Refused(reason, values if isinstance(values, tuple) else (values,)) for name, values in off.items()}


def _off_at(values: Any, names: str) -> dict[str, Any]:
    """Return the same disabling values for several fields."""
    return dict.fromkeys(names.split(), values)


_CACHED = _hints("cache_control")

_OPENAI: Row = {
    **_hints("prompt_cache_options prompt_cache_retention service_tier"),
    "metadata": Hint(
        dict[str, Any], "without effect; repeated in responses"
    ),  # /v1/responses repeats these four in its reply
    "prompt_cache_key": Hint(str, "name of the conversation, by which Ray Serve chooses a replica"),
    "safety_identifier": Hint(str, "without effect; repeated in responses"),
    "user": Hint(str, "without effect; repeated in responses"),
}

GENERATION: Row = {
    # scheduling, caching and reporting of other servers
    **_hints(
        "cache_prompt id_slot slot_id n_keep n_cache_reuse n_discard t_max_predict_ms t_max_prompt_ms return_progress "
        "timings_per_token priority request_id session_id kv_transfer_params keep_alive num_ctx "
        "return_tokens_as_token_ids"
    ),
    # choice of provider, and its reporting
    **_hints("transforms route models provider plugins usage extra_headers extra_query timeout num_retries trace tags"),
    # location and amount of reasoning
    **_hints(
        "include_reasoning separate_reasoning stream_reasoning reasoning_format reasoning_budget thinking_budget "
        "thinking_token_budget think parse_tool_calls"
    ),
    # grammar backends and detokenization
    **_hints("guided_decoding_backend guided_whitespace_pattern spaces_between_special_tokens web_search_options"),
    # settings of samplers that are disabled unless another field enables them
    **_hints(
        "mirostat_tau mirostat_eta mirostat_lr dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
        "xtc_threshold dynatemp_exponent smoothing_curve"
    ),
    # samplers
    **_refused(
        _NO_SUCH_SAMPLER,
        **_off_at(0, "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range top_a smoothing_factor"),
        **_off_at(0, "epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha"),
        **_off_at(1, "typical_p typ_p tfs_z tfs guidance_scale"),
        **_off_at((-1, 0), "top_n_sigma adaptive_target"),
        **_off_at([], "samplers sampler_order sampler_priority logits_processors"),
        watermark=False,
        custom_logit_processor="",
    ),
    **_refused(
        "beam search is not implemented",
        use_beam_search=False,
        num_beams=1,
        length_penalty=1,
        early_stopping=False,
    ),
    **_refused("use logit_bias", bad_words=([], ""), banned_tokens=([], ""), custom_token_bans=""),
    **_refused("use logit_bias or structured outputs", allowed_token_ids=[]),
    **_refused("penalties apply to all tokens of the prompt and the answer", repeat_last_n=-1, penalize_nl=False),
    **_refused("use stop with literal strings", stop_regex=("", [])),
    **_refused("the stop string is never part of the answer", include_stop_str_in_output=False, no_stop_trim=False),
    **_refused("special tokens are always removed from answers", skip_special_tokens=True),
    **_refused("prompts are never truncated", truncate_prompt_tokens=(), truncate=(), truncation_length=()),
    **_refused("the model's own chat template is always used", chat_template=(), add_special_tokens=()),
    **_refused("set it in chat_template_kwargs of a chat completion", enable_thinking=True),
    **_refused("set model to the adapter's name", lora=[], lora_path=(), lora_request=(), adapter_id=()),
    **_refused("prompts must be text or token ids", prompt_embeds=(), documents=[], images=[], videos=[], audios=[]),
    # other names of supported fields
    **_refused("use repetition_penalty", repeat_penalty=1, rep_pen=1),
    **_refused("use max_tokens", n_predict=-1, num_predict=-1, max_new_tokens=(), max_length=()),
    **_refused("use min_tokens", min_length=0, min_new_tokens=0),
    **_refused("use temperature 0", do_sample=True),
    **_refused("use temperature", temp=()),
    **_refused("use seed", random_seed=(), sampling_seed=()),
    **_refused("use n", num_return_sequences=1),
    **_refused("use logprobs", n_probs=0, post_sampling_probs=False),
    **_refused("use structured_outputs", ebnf="", structural_tag=(), format="", regex="", choice=[], lark=""),
    **_refused("use response_format", guided_json_object=False, json_object=False, response_schema=()),
    **_refused("use a system message", safe_prompt=False),
    **_refused("answers never include the prompt", return_full_text=False),
    **_refused("only completions return the prompt", echo=False),
    **_refused("ranking answers is not implemented", best_of=1),
    **_refused("background responses are not implemented", background=False),
    "extra_body": _TOP_LEVEL,
    "options": _TOP_LEVEL,
    "parameters": _TOP_LEVEL,
    "sampling_params": _TOP_LEVEL,
}
"""Names of other servers and libraries, for every request that generates text."""

TABLE: Mapping[str, Row] = {
    "headers": _hints("anthropic-beta openai-beta"),
    "generation": GENERATION,
    "completions": {
        **_hints("user"),
        "store": Hint(bool, "false: exclude the texts from records and from the n-gram pool"),
    },
    "embeddings": _hints("user"),
    "stream_options": _hints("include_obfuscation continuous_usage_stats"),
    "chat": {
        **_OPENAI,
        **_hints("prediction reasoning thinking verbosity"),
        "store": Hint(bool, "false: exclude the texts from records and from the n-gram pool"),
        "reasoning_effort": Hint(str, "value of `reasoning_effort` for chat templates that use it"),
        "audio": _TEXT_ONLY,
        "function_call": Refused("use tool_choice"),
        "functions": Refused("use tools", off=([],)),
        "moderation": Refused("moderation is not implemented"),
        "prefix": Refused("use continue_final_message", off=(False,)),
    },
    "text completions": {"suffix": Refused("fill-in-the-middle is not implemented", off=("",))},
    "chat messages[]": {
        **_CACHED,
        **_hints("annotations context id parsed provider_specific_fields reasoning reasoning_details thinking_blocks"),
        "name": Hint(str, "name of the author, for chat templates that use it"),
        "reasoning_content": Hint(str, "reasoning before the answer, for chat templates that use it"),
        "function_call": Refused("use tool_calls"),
        "audio": _TEXT_ONLY,
        "images": Refused(_TEXT_ONLY.reason, off=([],)),
        "refusal": Refused("use content"),
        "prefix": Refused("use continue_final_message", off=(False,)),
        "partial": Refused("use continue_final_message", off=(False,)),
    },
    "chat messages[].content[]": {**_CACHED, **_hints("prompt_cache_breakpoint")},
    "chat messages[].tool_calls[]": {**_hints("index provider_specific_fields"), "custom": _NO_CUSTOM},
    "chat messages[].tool_calls[].function": _hints("parsed_arguments"),
    "chat tools[]": {
        **_CACHED,
        **dict.fromkeys("parameters input_schema inputSchema".split(), Refused("move it into function")),
    },
    "chat tools[].function": {
        "return": Hint(dict[str, Any], "JSON schema of the result, for chat templates that use it"),
        "input_schema": Refused("use parameters"),
        "inputSchema": Refused("use parameters"),
    },
    "responses": {
        **_OPENAI,
        **_hints("client_metadata context_management max_tool_calls truncation"),
        "include": Hint(list[str]),
        "store": Hint(bool, "false: exclude the texts from records and from the n-gram pool"),
        "access_programs": Refused("hosted programs are not available"),
        "background_options": Refused("background responses are not implemented"),
        "conversation": Refused("use previous_response_id (--store-responses), or send the whole dialog as input"),
        "image": _TEXT_ONLY,
        "moderation": Refused("moderation is not implemented"),
        "prompt": Refused("stored prompts are not available; use instructions and input"),
    },
    "responses reasoning": {
        **_hints("context generate_summary mode summary"),
        "effort": Hint(str, "value of `reasoning_effort` for chat templates that use it"),
    },
    "responses text": _hints("verbosity"),
    "responses tools[]": {
        **_hints("async output_schema allowed_callers defer_loading"),
        "input_schema": Refused("use parameters"),
        "inputSchema": Refused("use parameters"),
        "function": Refused("set its fields at the top level of the tool"),
    },
    "responses input[]": _hints("id status"),
    "responses input[] of message": _hints("phase"),
    "responses input[] of call": {
        "async": Refused("functions run in the client"),
        "caller": _NO_SERVER_TOOLS,
        "namespace": Refused("tool namespaces are not supported"),
    },
    "responses input[] of output": {
        "async": Refused("functions run in the client"),
        "caller": _NO_SERVER_TOOLS,
        "namespace": Refused("tool namespaces are not supported"),
        "name": Refused("call_id identifies the call"),
    },
    "responses input[] of reasoning": _hints("content encrypted_content summary"),
    "responses input[].content[]": {
        **_hints("annotations logprobs prompt_cache_breakpoint"),
        **dict.fromkeys("detail file_data file_id file_url filename image_url".split(), _TEXT_ONLY),
        "refusal": Refused("use text"),
    },
    "messages": {
        **_hints("metadata service_tier mcp_servers container"),
        "diagnostics": Refused("requests are not stored"),
        "inference_geo": Refused("the model runs on this machine"),
    },
    "messages prompt": {**_CACHED, **_hints("context_management speed thinking user_profile_id workspace_id")},
    "messages output_config": {"effort": Hint(str, "value of `reasoning_effort` for chat templates that use it")},
    "messages content[]": _CACHED,
    "messages content[] of text": _hints("citations"),
    "messages content[] of thinking": _hints("data signature thinking"),
    "messages content[] of tool_use": {"caller": _NO_SERVER_TOOLS, "toolset_name": _NO_SERVER_TOOLS},
    "messages content[] of tool_result": {"toolset_name": _NO_SERVER_TOOLS},
    "messages tools[]": {
        **_CACHED,
        **_hints("eager_input_streaming input_examples allowed_callers defer_loading"),
        "parameters": Refused("use input_schema"),
        "inputSchema": Refused("use input_schema"),
        "function": Refused("set its name and description at the top level of the tool"),
    },
}
"""Known fields by name, for each containing object."""
