"""Validate and interpret the JSON files of a Hugging Face tokenizer.

Everything is checked here before the `tokenizers` package reads the file.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llamarium.errors import TokenizerError, escape, show_value
from llamarium.tokenizer.backends.files import MAX_TOKENS
from llamarium.tokenizer.special import SpecialTokens, TypedToken, find_special_tokens

# Key of the list in a `Sequence`.
_MEMBERS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_DROPPING_CUTTERS = ("BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit")


def check_tokenizer_json(raw: Mapping[str, Any], source: str) -> set[int]:
    """Validate the types, ids and features of a `tokenizer.json`, and return its ids."""
    model = _object(raw, "model", source)
    kind = model.get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise TokenizerError(
            f'{source}: model.type is {escape(kind)!r}; supported are "BPE", "Unigram" and "WordLevel"'
        )
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise TokenizerError(f"{source}: model.{name} is {show_value(model[name])}; expected none")
    if not isinstance(model.get("merges"), list):
        raise TokenizerError(f"{source}: model.merges is {type(model.get('merges')).__name__}; expected a list")
    added: dict[str, Mapping[str, Any]] = {}
    for token in added_tokens(raw, source):
        if added.setdefault(token["content"], token) != token:
            name = escape(token["content"])
            raise TokenizerError(f"{source}: the added token {name!r} is there twice, with different ids or flags")
    ids = _object(model, "vocab", source) | {content: token["id"] for content, token in added.items()}
    _check_ids(ids, source)
    return set(ids.values())


def check_vocabulary(raw: Mapping[str, Any], source: str) -> dict[str, int]:
    """Validate and return the tokens and ids of a `tokenizer.json`, without added tokens."""
    ids = _object(_object(raw, "model", source), "vocab", source)
    _check_ids(ids, source)
    return ids


def merges(raw: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    """Return the merges as pairs in order of rank; older files have them as "left right"."""
    pairs = raw["model"]["merges"]
    if set(map(type, pairs)) == {str}:
        pairs = [merge.split(" ") for merge in pairs if not merge.startswith("#version")]  # the package skips it, too
    if set(map(type, pairs)) - {list} or set(map(len, pairs)) - {2}:  # a loop over 280,000 of them takes long
        wrong = next(merge for merge in pairs if type(merge) is not list or len(merge) != 2)
        raise TokenizerError(f"{source}: model.merges holds {show_value(wrong)}; expected pairs of tokens")
    return list(map(tuple, pairs))


def _object(parent: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    value = parent.get(name)
    if not isinstance(value, dict):
        raise TokenizerError(f"{source}: {name} is {type(value).__name__}; expected an object")
    return value


def _check_ids(ids: Mapping[str, Any], source: str) -> None:
    if not ids:
        raise TokenizerError(f"{source}: no tokens; expected model.vocab to hold some")
    texts: dict[int, str] = {}
    for token, i in ids.items():
        if type(i) is not int or not 0 <= i < MAX_TOKENS:
            raise TokenizerError(
                f"{source}: {escape(token)!r} has the id {escape(i)}; expected a whole number of 0 to {MAX_TOKENS - 1}"
            )
        if texts.setdefault(i, token) != token:
            raise TokenizerError(
                f"{source}: {escape(texts[i])!r} and {escape(token)!r} share the id {i}; expected one id per token"
            )


def added_tokens(raw: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Return the added tokens as in the file."""
    tokens = raw.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise TokenizerError(f"{source}: added_tokens is {type(tokens).__name__}; expected a list")
    return [_added_token(token, i, source) for i, token in enumerate(tokens)]


def _added_token(token: Any, position: int, source: str) -> dict[str, Any]:
    content = token.get("content") if isinstance(token, dict) else None
    if not isinstance(content, str) or not content or "id" not in token:
        raise TokenizerError(
            f"{source}: added_tokens[{position}] is {show_value(token)}; expected an object with id and content"
        )
    return {**token, "special": bool(token.get("special"))}


def is_byte_level(raw: Mapping[str, Any], source: str) -> bool:
    """Return True for byte-level BPE, and False for SentencePiece-style BPE with byte fallback, by the decoder."""
    kinds = {step["type"] for _, step in steps(raw, "decoder", source)}
    cutters = [step for _, step in steps(raw, "pre_tokenizer", source)]
    if "ByteLevel" in kinds and any(step["type"] == "ByteLevel" for step in cutters):
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    names = escape(", ".join(sorted(kinds)) or "none")
    raise TokenizerError(
        f"{source}: the decoder is {names}; supported are byte-level BPE (Llama 3) and BPE with byte fallback (Llama 2)"
    )


def strips_first_space(raw: Mapping[str, Any], source: str) -> bool:
    """Return whether the decoder of a `tokenizer.json` removes the first space of a text."""
    return any(
        (step["type"] == "Strip" and step.get("start") == 1)
        or (step["type"] == "Metaspace" and _prepend_scheme(step) != "never")
        for _, step in steps(raw, "decoder", source)
    )


def _prepend_scheme(step: Mapping[str, Any]) -> str:
    """Return when a Metaspace step adds a space before a text; older files use `add_prefix_space`."""
    scheme = step.get("prepend_scheme")
    return scheme if isinstance(scheme, str) else "never" if step.get("add_prefix_space") is False else "always"


def steps(raw: Mapping[str, Any], name: str, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the steps of a pipeline component with their places for messages; a `Sequence` is flattened."""
    members = _MEMBERS[name]
    waiting: list[tuple[str, Any]] = [] if raw.get(name) is None else [(name, raw[name])]
    while waiting:
        where, step = waiting.pop()
        if not isinstance(step, dict) or not isinstance(step.get("type"), str):
            raise TokenizerError(f"{source}: {where} is {show_value(step)}; expected an object with a type")
        if step["type"] != "Sequence":
            yield where, step
            continue
        inner = step.get(members)
        if not isinstance(inner, list):
            raise TokenizerError(f"{source}: {where}.{members} is {type(inner).__name__}; expected a list")
        waiting += reversed([(f"{where}.{members}[{i}]", item) for i, item in enumerate(inner)])


def check_pieces(raw: Mapping[str, Any], source: str) -> None:
    """Raise TokenizerError for pre-tokenizers that drop the characters at which they split."""
    for where, step in steps(raw, "pre_tokenizer", source):
        if step["type"] in _DROPPING_CUTTERS or (step.get("behavior") == "Removed" and not step.get("invert")):
            raise TokenizerError(
                f"{source}: {where} ({escape(step['type'])}) removes characters from the text; expected one that keeps "
                "them, or decoding would not give the text back"
            )


def text_changes(raw: Mapping[str, Any], source: str, *, byte_level: bool) -> Iterator[str]:
    """Yield a sentence for each rule of the file that may cause `decode(encode(text))` to differ from `text`.

    Llama 2's normalizer (▁ before the text, and for each space) is undone by decoding.
    """
    strips = strips_first_space(raw, source)
    undone = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if strips:
        undone.append({"type": "Prepend", "prepend": "▁"})
    normalizers = list(steps(raw, "normalizer", source))
    for where, step in normalizers:
        if byte_level or step not in undone:
            yield f"{where} ({escape(step['type'])}) rewrites it before encoding"
    prepends = any(step["type"] == "Prepend" for _, step in normalizers)
    cutters = list(steps(raw, "pre_tokenizer", source))
    for where, step in cutters:
        if step.get("behavior") == "Removed":
            yield f"{where} ({escape(step['type'])}) drops what its pattern does not match"
        if step.get("add_prefix_space") and step["type"] == "ByteLevel":
            yield f"{where} (ByteLevel) puts a space before it, which decoding keeps"
        if step["type"] == "Metaspace" and _prepend_scheme(step) != "never" and not prepends:
            prepends = True
            kept = "a space at its beginning is taken for the one that is put there" if strips else "decoding keeps it"
            yield f"{where} (Metaspace) puts a space before it unless one is there; {kept}"
    if strips and not prepends:
        yield "the decoder removes a space at its beginning, which encoding does not put there"
    for i, token in enumerate(raw["added_tokens"]):
        if not token["special"] and (token.get("lstrip") or token.get("rstrip")):
            yield f"added_tokens[{i}] ({show_value(token['content'])}) takes away the spaces beside it"


class Reading(NamedTuple):
    """Special tokens of a tokenizer's files.

    Attributes:
        special: The special tokens.
        added: Added tokens, including those only in tokenizer_config.json; control tokens are flagged.
        notes: Ignored settings, one sentence each.
    """

    special: SpecialTokens
    added: list[dict[str, Any]]
    notes: list[str]


def read_special_tokens(
    raw: Mapping[str, Any], config: Mapping[str, Any], template: str | None, source: str
) -> Reading:
    """Read the control tokens, and whether BOS is added before a text.

    An explicit `add_bos_token` in tokenizer_config.json takes precedence over the post-processor, as in transformers.
    EOS is never added, even if the files say so, as prompts are continued.
    """
    notes: list[str] = []
    added = added_tokens(raw, source)
    flagged = _flagged_in_config(config)
    for token in added:
        token["special"] = token["special"] or token["content"] in flagged
    named = {
        name: _named_id(config, name, added, raw, notes, source) for name in ("bos_token", "eos_token", "pad_token")
    }
    before, after = _template_ids(raw, source)
    bos = named["bos_token"] if named["bos_token"] is not None else before
    if before not in (None, bos):
        raise TokenizerError(
            f"{source}: the post-processor puts the id {before} before a text, tokenizer_config.json says that "
            f"bos_token is {bos}; expected the same"
        )
    add_bos = config.get("add_bos_token")
    add_bos = before is not None if add_bos is None else bool(add_bos)
    if add_bos and bos is None and config.get("bos_token") is not None:
        raise TokenizerError(
            f"{source}: tokenizer_config.json sets add_bos_token, and its bos_token is not in the vocabulary; correct "
            "bos_token, or set add_bos_token to false"
        )
    if config.get("add_eos_token") or after:
        rule = "add_eos_token" if config.get("add_eos_token") else "the post-processor"
        notes.append(f"{rule} puts a token after each text; none is put after a prompt, which is continued")
    eos = () if named["eos_token"] is None else (named["eos_token"],)
    typed = [TypedToken(token["content"], token["id"], token["special"]) for token in added]
    special = find_special_tokens(
        typed, template, bos=bos, eos=eos, pad=named["pad_token"], add_bos=add_bos and bos is not None
    )
    flags = [token | {"special": token["content"] in special.ids} for token in added]
    return Reading(special, flags, notes)


def _flagged_in_config(config: Mapping[str, Any]) -> set[str]:
    """Return the spellings of the special tokens in tokenizer_config.json."""
    decoder, additional = config.get("added_tokens_decoder"), config.get("additional_special_tokens")
    tokens: list[Any] = [*decoder.values()] if isinstance(decoder, dict) else []
    tokens = [token for token in tokens if isinstance(token, dict) and token.get("special")]
    tokens += additional if isinstance(additional, list) else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return {text for text in texts if isinstance(text, str)}


def _named_id(
    config: Mapping[str, Any],
    name: str,
    added: list[dict[str, Any]],
    raw: Mapping[str, Any],
    notes: list[str],
    source: str,
) -> int | None:
    """Look up `bos_token` and similar fields; the token becomes a control token, as in transformers."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise TokenizerError(f"{source}: tokenizer_config.json has {name} {show_value(text)}; expected text")
    for token in added:
        if token["content"] == text:
            token["special"] = True
            return token["id"]
    token_id = raw["model"]["vocab"].get(text)
    if token_id is None:
        notes.append(f"tokenizer_config.json names the {name} {show_value(text)}, which no token is; it is ignored")
        return None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added.append({"id": token_id, "content": text, **flags})
    return token_id


def _template_ids(raw: Mapping[str, Any], source: str) -> tuple[int | None, list[int]]:
    """Return the id that the post-processor adds before a text, or None, and those that it adds after it."""
    before: list[int] = []
    after: list[int] = []
    for _, step in steps(raw, "post_processor", source):
        if step["type"] == "ByteLevel":
            continue  # it adjusts offsets only
        around, texts = before, list[object]()
        try:
            if step["type"] in ("BertProcessing", "RobertaProcessing"):
                before.append(step["cls"][1])
                after.append(step["sep"][1])
                continue
            if step["type"] != "TemplateProcessing":
                raise TokenizerError(f"{source}: post_processor {escape(step['type'])!r} is not supported")
            for item in step["single"]:
                if "Sequence" in item:
                    around = after
                    texts.append(item["Sequence"]["id"])
                else:
                    around += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        except (KeyError, TypeError, IndexError):
            raise TokenizerError(f"{source}: post_processor: the template is malformed") from None
        if texts != ["A"]:
            raise TokenizerError(
                f"{source}: post_processor: the template of a single text holds the texts {show_value(texts)}; "
                "expected A, once"
            )
    if len(before) > 1:
        raise TokenizerError(
            f"{source}: the post-processor puts the ids {escape(before)} before a text; supported is one BOS token"
        )
    return (before[0] if before else None), after
