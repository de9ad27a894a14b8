"""The Unigram model of a `tokenizer.json`, whose vocabulary is a list of pieces with scores; others' is a table of ids.

Everything else here takes tables, so it is read as one, with the scores beside it, and becomes a list when it is
written.
"""

from typing import Any

from llamarium.errors import TokenizerError, show_value


def unigram_table(model: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a Unigram model with its list of pieces and scores as a vocabulary, like BPE's, and a list of scores."""
    pairs = model.get("vocab")
    if not isinstance(pairs, list) or not all(_is_scored(pair) for pair in pairs):
        raise TokenizerError(f"{source}: model.vocab is {show_value(pairs)}; expected a list of pieces with scores")
    unknown = model.get("unk_id")
    if unknown is not None and (type(unknown) is not int or not 0 <= unknown < len(pairs)):
        raise TokenizerError(f"{source}: model.unk_id is {show_value(unknown)}; expected an id below {len(pairs)}")
    vocab = {piece: i for i, (piece, _) in enumerate(pairs)}
    if len(vocab) != len(pairs):
        twice = next(piece for i, (piece, _) in enumerate(pairs) if vocab[piece] != i)
        raise TokenizerError(f"{source}: model.vocab holds {show_value(twice)} twice; expected each piece once")
    scores = [float(score) for _, score in pairs]
    names = {} if unknown is None else {"unk_token": pairs[unknown][0]}
    return model | names | {"vocab": vocab, "scores": scores, "merges": []}


def _is_scored(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    return type(pair[1]) in (int, float) and abs(pair[1]) < 1e30


def unigram_list(model: dict[str, Any]) -> dict[str, Any]:
    """Return what `unigram_table` made as the file has it."""
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kept = {key: value for key, value in model.items() if key not in ("scores", "merges", "unk_token")}
    return kept | {"vocab": [[piece, score] for piece, score in zip(pieces, model["scores"], strict=True)]}
