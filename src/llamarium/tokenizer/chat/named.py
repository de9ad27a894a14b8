"""Chat formats that can be selected by name, as chat templates.

Llama 3 and ChatML also have built-in implementations with the same ids (`builtin`). The others are for models whose
files often lack a template. If a format's markers are ordinary text (`[INST]`, `USER:`, `### Instruction:`), users can
write them.

Sources: meta-llama/llama, `llama/generation.py` (Llama 2); lm-sys/FastChat, `fastchat/conversation.py` (Vicuna);
tatsu-lab/stanford_alpaca, `train.py`; HuggingFaceH4/zephyr-7b-beta, `tokenizer_config.json`; mistralai, "Tokenization";
meta-llama/llama3, `llama/tokenizer.py`; openai/openai-python at v0.27, `chatml.md`.
"""

from typing import NamedTuple

LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class NamedFormat(NamedTuple):
    """A chat format; `tokens` are the control tokens that it needs besides BOS and EOS."""

    template: str
    tokens: tuple[str, ...] = ()


# These strings contain actual line ends, not the escape sequence.
_CHATML_MESSAGE = (
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML = "{% for message in messages %}" + _CHATML_MESSAGE
_LLAMA3_PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
_LLAMA3 = (  # unlike the published template below, it supports tools and vocabularies without BOS
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}" + _LLAMA3_PROMPT
)

# The system message is put before the first user message, and roles must alternate.
_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system, turns = messages[0]['content'], messages[1:] %}"
    "{% else %}{% set system, turns = none, messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('roles must alternate between user and assistant, after at most one system message') }}"
    "{% endif %}"
)
_LLAMA2 = (
    _SPLIT_SYSTEM + "{% if message['role'] == 'user' %}{% set content = message['content'] %}"
    "{% if loop.first and system is not none %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + content %}{% endif %}"
    "{{ bos_token }}{{ '[INST] ' + content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}" + _SPLIT_SYSTEM + "{% if message['role'] == 'user' %}{% set content = message['content'] %}"
    "{% if loop.first and system is not none %}{% set content = system + '\n\n' + content %}{% endif %}"
    "{{ '[INST] ' + content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user\\'s questions."
)
_VICUNA = (
    "{{ bos_token }}" + _SPLIT_SYSTEM + "{% if loop.first %}"
    "{{ (system if system is not none else '" + _VICUNA_SYSTEM + "') + ' ' }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
_ALPACA = (
    "{{ bos_token }}" + _SPLIT_SYSTEM + "{% if loop.first %}"
    "{{ (system if system is not none else '" + _ALPACA_SYSTEM + "') + '\n\n' }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
_ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

NAMED_FORMATS = {
    "llama3": NamedFormat(_LLAMA3, LLAMA3_TOKENS),
    "chatml": NamedFormat(_CHATML, CHATML_TOKENS),
    "llama2": NamedFormat(_LLAMA2),
    "mistral": NamedFormat(_MISTRAL),
    "vicuna": NamedFormat(_VICUNA),
    "alpaca": NamedFormat(_ALPACA),
    "zephyr": NamedFormat(_ZEPHYR),
}

KNOWN_TEMPLATES = {
    _CHATML: "chatml",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}" + _CHATML_MESSAGE: "smollm2",
    _LLAMA3: "llama3",
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}" + _LLAMA3_PROMPT: "llama3",
}
"""Templates for which a built-in format gives the same ids."""
