"""Private names of control tokens, to prevent injection through text.

The `tokenizers` package finds added tokens by searching for their spelling, so it cannot distinguish a control token of
the dialog format from the same characters in a user's text. The package therefore gets a vocabulary in which each
control token has a private name: random characters of a Unicode private use area, new in each process. A control token
is inserted into a string by this name, and the package encodes the whole string with its rules around control tokens.
The spelling of a control token is ordinary text, and no merge produces a control token.
"""

import json
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamarium.errors import TokenizerError, escape
from llamarium.tokenizer.backends.unigram import unigram_table

if TYPE_CHECKING:
    import tokenizers

_FIRST, _NUM_CHARACTERS = 0xE000, 6400  # the private use area of the basic plane
_NONCE_CHARACTERS = 8  # of 6,400 each: 2**101 possibilities
_WORD_EDGE = "\ua4d0"  # a letter without case or decomposition
_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)


class PrivateNames:
    """The private name of each control token.

    A name begins and ends with a letter if the control token does, as tokens with `single_word` depend on the adjacent
    characters.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        """Draw names for the control tokens, spelling to id."""
        nonce = "".join(chr(_FIRST + secrets.randbelow(_NUM_CHARACTERS)) for _ in range(_NONCE_CHARACTERS))
        self._by_spelling: dict[str, str] = {}
        for number, spelling in enumerate(control):
            digits = (chr(_FIRST + digit) for digit in divmod(number, _NUM_CHARACTERS))
            self._by_spelling[spelling] = _edge(spelling[0]) + nonce + "".join(digits) + _edge(spelling[-1])
        self._spellings = {name: spelling for spelling, name in self._by_spelling.items()}
        self.by_id = {i: self._by_spelling[spelling] for spelling, i in control.items()}

    def hide(self, spelling: str) -> str:
        """Return the private name of a control token, and any other token unchanged."""
        return self._by_spelling.get(spelling, spelling)

    def show(self, name: str) -> str:
        """Return the spelling for a private name, and any other token unchanged."""
        return self._spellings.get(name, name)


def _edge(character: str) -> str:
    is_word = unicodedata.category(character)[0] in "LMN" or character == "_"
    return _WORD_EDGE if is_word else ""


class PrivateTokenizer:
    """A tokenizer of the `tokenizers` package with private names for control tokens.

    Attributes:
        inner: The package's tokenizer, without a post-processor, truncation and padding.
        names: The private names.
    """

    def __init__(self, raw: Mapping[str, Any], control: Mapping[str, int], source: str) -> None:
        """Build the tokenizer from the contents of a `tokenizer.json` whose added tokens hold all control tokens.

        The package reads the small parts as JSON, and takes the vocabulary and the merges as they lie here, which takes
        half as long. Added tokens come after the vocabulary, from which they get their ids. TokenizerError if these are
        not the file's; errors of the package otherwise.
        """
        import tokenizers

        self.names = PrivateNames(control)
        model: Mapping[str, Any] = raw["model"]
        added = [token | {"content": self.names.hide(token["content"])} for token in raw["added_tokens"]]
        small = {**raw, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": added}
        tokens = tokenizers.Tokenizer.from_str(json.dumps(small)).get_added_tokens_decoder()
        small |= {"added_tokens": [], "post_processor": None}
        self.inner = tokenizers.Tokenizer.from_str(json.dumps(small))
        self.inner.no_truncation()
        self.inner.no_padding()

        vocab = dict(model["vocab"])
        for spelling in control.keys() & vocab.keys():
            vocab[self.names.hide(spelling)] = vocab.pop(spelling)
        self.inner.model = self._model(model, vocab)
        self.inner.add_tokens([tokens[i] for i in sorted(tokens)])
        self._check_ids(raw["added_tokens"], source)

    def _check_ids(self, added: Sequence[Mapping[str, Any]], source: str) -> None:
        """Raise TokenizerError if the package assigns an id other than the file's, with which the model was trained."""
        for token in added:
            actual_id = self.inner.token_to_id(self.names.hide(token["content"]))
            if actual_id != token["id"]:
                raise TokenizerError(
                    f"{source}: the added token {escape(token['content'])!r} has the id {token['id']}, but the "
                    f"vocabulary gives it {actual_id}; expected one id"
                )

    def _model(self, model: Mapping[str, Any], vocab: dict[str, int]) -> "tokenizers.models.Model":
        """Build the model without merges from or to control tokens, which text must not produce."""
        from tokenizers.models import BPE, Unigram

        self._left_out: list[tuple[int, tuple[str, str]]] = []
        if "scores" in model:
            scored = [(piece, model["scores"][i]) for piece, i in sorted(vocab.items(), key=lambda item: item[1])]
            return Unigram(scored, unk_id=model.get("unk_id"), byte_fallback=bool(model.get("byte_fallback")))
        options = {name: model[name] for name in _OPTIONS if model.get(name) is not None}
        if "unk_token" in options:
            options["unk_token"] = self.names.hide(options["unk_token"])
        merges: list[tuple[str, str]] = list(map(tuple, model["merges"]))
        try:
            return BPE(vocab, merges, **options)
        except Exception:
            hidden = {self.names.show(name) for name in self.names.by_id.values()}
            self._left_out = [
                (i, pair) for i, pair in enumerate(merges) if not hidden.isdisjoint((*pair, "".join(pair)))
            ]
            if not self._left_out:
                raise
            places = {i for i, _ in self._left_out}
            return BPE(vocab, [pair for i, pair in enumerate(merges) if i not in places], **options)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a `tokenizer.json`, with all tokens under their real names."""
        raw: dict[str, Any] = json.loads(self.inner.to_str())
        show = self.names.show
        for token in raw["added_tokens"]:
            token["content"] = show(token["content"])
        model = raw["model"]
        if model["type"] == "Unigram":
            model["vocab"] = [[show(piece), score] for piece, score in model["vocab"]]
            raw["model"] = unigram_table(model, "tokenizer")
            return raw
        model["vocab"] = {show(token): i for token, i in model["vocab"].items()}
        if model.get("unk_token") is not None:
            model["unk_token"] = show(model["unk_token"])
        for place, pair in self._left_out:
            model["merges"].insert(place, list(pair))
        return raw
