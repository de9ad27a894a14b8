"""Which format a tokenizer's dialogs have: the one of its template, else the one that its control tokens name."""

from typing import TypeVar

from llamarium.errors import ChatFormatError, show_value
from llamarium.tokenizer.chat.builtin import CHATML_TOKENS, LLAMA3_TOKENS, ChatMLFormat, Llama3Format
from llamarium.tokenizer.chat.format import ChatFormat, Vocabulary

VocabularyT = TypeVar("VocabularyT", bound=Vocabulary)


def choose_format(tokenizer: Vocabulary) -> ChatFormat | None:
    """Return the format of a tokenizer's dialogs.

    The file's template decides: a known one has its format built in, any other runs in the sandbox. Without a template
    the control tokens that the vocabulary has name the format.
    """
    special = tokenizer.special.ids
    is_llama3 = all(name in special for name in LLAMA3_TOKENS)
    is_chatml = all(name in special for name in CHATML_TOKENS)
    template = tokenizer.chat_template
    known = None if template is None else _KNOWN_TEMPLATES.get(template.replace("\\n", "\n").strip())
    if is_llama3 and (template is None or known == "llama3"):
        return Llama3Format(tokenizer)
    if is_chatml and (template is None or known in ("chatml", "smollm2")):
        return ChatMLFormat(tokenizer, default_system=_SMOLLM2_SYSTEM if known == "smollm2" else None)
    if template is None:
        return None
    from llamarium.tokenizer.chat.template import TemplateFormat

    return TemplateFormat(tokenizer, template)


def with_format(tokenizer: VocabularyT, name: str) -> VocabularyT:
    """Return a tokenizer whose dialogs are in a format, which its saved files name: "llama3" or "chatml".

    "auto" is its own format: the one of its template, else the one that its control tokens name, else none.
    """
    if name == "auto":
        own = choose_format(tokenizer) if tokenizer.chat_template is None else None
        if own is None:
            return tokenizer
        name = own.name
    if name not in _FORMATS:
        raise ChatFormatError(f"the dialog format is {show_value(name)}; there are: {', '.join(_FORMATS)}")
    needed, template = _FORMATS[name]
    if missing := [token for token in needed if token not in tokenizer.special.ids]:
        raise ChatFormatError(f"{tokenizer.source}: has no {', '.join(missing)}, which the format {name} is made of")
    return tokenizer.with_chat_template(template)


_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Templates whose dialogs a built-in format writes, id for id; line ends are real ones here.
_CHATML_MESSAGE = (
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_TEMPLATE = "{% for message in messages %}" + _CHATML_MESSAGE
_LLAMA3_PROMPT = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
_LLAMA3_TEMPLATE = (  # unlike the published one below it has tools, and vocabularies without BOS
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}" + _LLAMA3_PROMPT
)
_KNOWN_TEMPLATES = {
    _CHATML_TEMPLATE: "chatml",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + _SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}" + _CHATML_MESSAGE: "smollm2",
    _LLAMA3_TEMPLATE: "llama3",
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}" + _LLAMA3_PROMPT: "llama3",
}
_FORMATS = {"llama3": (LLAMA3_TOKENS, _LLAMA3_TEMPLATE), "chatml": (CHATML_TOKENS, _CHATML_TEMPLATE)}
