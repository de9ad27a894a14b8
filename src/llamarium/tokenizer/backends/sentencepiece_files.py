"""A `tokenizer.model` in SentencePiece's format, with the JSON files that Hugging Face's folders have beside it.

Alone, as in Meta's folders of Llama 1 and 2, it is a whole tokenizer. `tokenizer_config.json`,
`special_tokens_map.json` and `added_tokens.json` name the control tokens and add more of them; whatever they leave out
is as `LlamaTokenizer` of transformers has it: a text begins with BOS.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarium.errors import TokenizerError, escape, show_value, warn_caller
from llamarium.file_names import ADDED_TOKENS, TOKENIZER_CONFIG, TOKENS_MAP
from llamarium.tokenizer.backends.files import MAX_SMALL_FILE_BYTES, MAX_TOKENS, read_bytes, read_json
from llamarium.tokenizer.backends.sentencepiece import AddedToken, SentencePieceBackend
from llamarium.tokenizer.backends.template_files import read_templates
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, read_model
from llamarium.tokenizer.sentencepiece.piece_type import PieceType
from llamarium.tokenizer.special import SpecialTokens, TypedToken, find_special_tokens

_NAMES = ("bos", "eos", "pad")


def load_sentencepiece(path: Path) -> Tokenizer:
    """Read a `tokenizer.model` and the JSON files in the same folder.

    Warns (UserWarning, one per rule) if the vocabulary's rules change texts, so that decoding does not restore them.

    Raises:
        TokenizerError: If a file is damaged, or contradicts another.
        UnsupportedTokenizerError: For SentencePiece's models of words or characters.
    """
    source = str(path)
    data = read_bytes(path)
    model = read_model(data, source)
    beside = _read_beside(path.parent)
    added = _added_tokens(model, beside, source)
    templates = read_templates(path.parent, beside.config)
    special = _special_tokens(model, added, beside, templates.text, source)
    if isinstance(prefix := beside.config.get("add_prefix_space"), bool):
        model = replace(model, add_dummy_prefix=prefix)
    backend = SentencePieceBackend(
        model,
        special.ids,
        source,
        added=added,
        prefix_after_tokens=beside.config.get("legacy") is not False,
        file=data,
    )
    for change in text_changes(model):
        warn_caller(f"{escape(source, 4096)}: text is changed: {change}")
    return Tokenizer(
        backend,
        special,
        vocab_size=max(len(model.pieces), *(token.id + 1 for token in added)) if added else len(model.pieces),
        source=source,
        chat_template=templates,
        strip_first_space=model.add_dummy_prefix and not model.whitespace_as_suffix,
    )


def text_changes(model: SentencePieceModel) -> Iterator[str]:
    """Yield one sentence per rule because of which `decode(encode(text))` may differ from `text`."""
    if model.charsmap:
        yield "the vocabulary's normalization rules rewrite characters before encoding"
    if model.remove_extra_whitespaces:
        yield "spaces at its ends, and all but one of several in a row, are dropped"
    if model.whitespace_as_suffix and model.add_dummy_prefix:
        yield "a space is put behind it"
    if not model.byte_fallback:
        yield "characters that the vocabulary lacks become the unknown piece"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """The JSON files in the folder of a `tokenizer.model`; empty for missing ones."""

    config: dict[str, Any]
    names: dict[str, Any]
    added: dict[str, Any]
    folder: Path

    def spelling(self, name: str) -> str | None:
        """Return the text of "bos_token" or a similar field, or None if no file has it."""
        for values in (self.config, self.names):
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None:
                if not isinstance(text, str):
                    raise TokenizerError(f"{self.folder}: {name} is {show_value(text)}; expected a token's text")
                return text
        return None

    def decoder(self) -> dict[str, Any]:
        """Return the added tokens of tokenizer_config.json, by their ids as text."""
        listed = self.config.get("added_tokens_decoder")
        return listed if isinstance(listed, dict) else {}

    def control(self) -> Iterator[str]:
        """Yield the texts of tokens that are flagged or listed as control tokens."""
        for value in self.decoder().values():
            if isinstance(value, dict) and value.get("special"):
                yield value["content"]
        for values in (self.config, self.names):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = values.get(key)
                for value in listed if isinstance(listed, list) else []:
                    text = value.get("content") if isinstance(value, dict) else value
                    if isinstance(text, str):
                        yield text


def _read_beside(folder: Path) -> _Beside:
    files = (TOKENIZER_CONFIG, TOKENS_MAP, ADDED_TOKENS)
    config, names, added = (
        read_json(folder / name, MAX_SMALL_FILE_BYTES) if (folder / name).exists() else {} for name in files
    )
    return _Beside(config=config, names=names, added=added, folder=folder)


def _added_tokens(model: SentencePieceModel, beside: _Beside, source: str) -> list[AddedToken]:
    """Return the added tokens, by their ids; TokenizerError if they contradict each other or the pieces."""
    tokens = [_from_decoder(key, value, source) for key, value in beside.decoder().items()]
    contents = {token.content for token in tokens}
    tokens += [_checked(i, content, source) for content, i in beside.added.items() if content not in contents]
    by_id: dict[int, AddedToken] = {}
    for token in tokens:
        other = by_id.setdefault(token.id, token).content
        if token.id < len(model.pieces):
            other = model.pieces[token.id]
        if other != token.content:
            raise TokenizerError(
                f"{source}: the added token {show_value(token.content)} has the id {token.id}, which "
                f"{show_value(other)} has; expected one id per token"
            )
    return [by_id[i] for i in sorted(by_id)]


def _from_decoder(key: str, value: Any, source: str) -> AddedToken:
    if not isinstance(value, dict) or not key.isascii() or not key.isdecimal() or len(key) > 7:
        raise TokenizerError(
            f"{source}: added_tokens_decoder of tokenizer_config.json has {show_value(key)}: {show_value(value)}; "
            "expected an id and an object with content"
        )
    flags = {name: bool(value.get(name)) for name in ("lstrip", "rstrip", "single_word")}
    return replace(_checked(int(key), value.get("content"), source), **flags)


def _checked(token_id: Any, content: Any, source: str) -> AddedToken:
    if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS or not isinstance(content, str) or not content:
        raise TokenizerError(
            f"{source}: the added token {show_value(content)} has the id {show_value(token_id)}; expected a text and a "
            f"whole number of 0 to {MAX_TOKENS - 1}"
        )
    return AddedToken(content=content, id=token_id)


def _special_tokens(
    model: SentencePieceModel, added: list[AddedToken], beside: _Beside, template: str | None, source: str
) -> SpecialTokens:
    flagged = {*model.of_type(PieceType.UNKNOWN), *model.of_type(PieceType.CONTROL)}
    texts = {i: model.pieces[i] for i in (*flagged, *model.of_type(PieceType.USER_DEFINED))}
    texts |= {token.id: token.content for token in added}
    ids = {model.pieces[i]: i for i in flagged} | {token.content: token.id for token in added}
    named = {name: _named_id(model, name, ids, beside, source) for name in _NAMES}
    control = set(beside.control())
    flagged |= {i for i, text in texts.items() if text in control or i in named.values()}
    if beside.config.get("add_eos_token"):
        warn_caller(
            f"{escape(source, 4096)}: tokenizer_config.json sets add_eos_token; no token is put after a prompt, which "
            "is continued"
        )
    add_bos = beside.config.get("add_bos_token")
    eos = named["eos"]
    return find_special_tokens(
        [TypedToken(texts[i], i, i in flagged) for i in sorted(texts)],
        template,
        bos=named["bos"],
        eos=() if eos is None else (eos,),
        pad=named["pad"],
        add_bos=named["bos"] is not None and (add_bos is None or bool(add_bos)),
    )


def _named_id(model: SentencePieceModel, name: str, ids: Mapping[str, int], beside: _Beside, source: str) -> int | None:
    spelling = beside.spelling(f"{name}_token")
    if spelling is None:
        return model.named_id(name)
    if spelling not in ids:
        if name == "pad":
            warn_caller(
                f"{escape(source, 4096)}: pad_token {show_value(spelling)} has no id; there is no padding token"
            )
            return None
        raise TokenizerError(f"{source}: {name}_token is {show_value(spelling)}, which is not in the vocabulary")
    return ids[spelling]
