"""An encoder and a decoder in numpy: how `examples/english_french.py`'s small model translates a sentence.

The encoder's tokens see each other in both directions. A decoder layer attends twice: to the words written so far, and
to what the encoder has made of the source. Equal to the modules that were trained (`CrossAttend`); a test holds
the two together.

Source: "Attention Is All You Need", with the Llama's RMSNorm, RoPE and SwiGLU. Cross-attention has no rotation, since
positions of two texts are not comparable.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.config import read_json_object
from llamarium.errors import InputError, counted, escape
from llamarium.file_names import SAFETENSORS
from llamarium.inspect.numbers import Floats, JsonView, largest, scores_of, softmax
from llamarium.inspect.tokens import Candidate

_PAD, _BEGIN, _END = range(3)
_LONGEST = 24  # words of a sentence


@dataclass(frozen=True, slots=True, eq=False)
class Translation(JsonView):
    """A sentence, its translation, and the attention that made it; shares of each query's row sum to one.

    Attributes:
        source: The words of the source and its end, S of them.
        written: What the decoder reads, T of them: its begin, then the words it has written.
        candidates: For each of those the most probable next words, the best first; the first is what is written.
        encoder_LNSS: Encoder self-attention, without a mask.
        decoder_LNTT: Decoder self-attention, causal.
        cross_LNTS: From each written word to the source.
    """

    source: tuple[str, ...]
    written: tuple[str, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    encoder_LNSS: Floats
    decoder_LNTT: Floats
    cross_LNTS: Floats


class Translator:
    """An encoder-decoder of words, from a folder as the example writes it: `translator.json`, `model.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self.about: Mapping[str, Any] = read_json_object(folder / "translator.json")
        file = folder / SAFETENSORS
        data = file.read_bytes()
        self._weights: dict[str, Floats] = {
            key: np.frombuffer(data, np.float16, tensor.num_bytes // 2, tensor.offset)
            .reshape(tensor.shape)
            .astype(np.float32)
            for key, tensor in read_safetensors(file).items()
        }
        self._words: list[str] = self.about["words"]
        self._num_heads: int = self.about["num_attention_heads"]

    def ids(self, text: str) -> list[int]:
        """Return the ids of a sentence and its end; InputError for words that were not learned, or too many."""
        id_of, words = {word: i for i, word in enumerate(self._words)}, text.split()
        strange = [word for word in words if word not in self.about["english"]]
        if strange or not 0 < len(words) <= _LONGEST:
            problem = (
                f"{escape(strange[0], 40)!r} is none of its words"
                if strange
                else f"it has {counted(len(words), 'word')}"
            )
            all_words = ", ".join(self.about["english"])
            raise InputError(f"{problem}; this model reads 1 to {_LONGEST} words of these: {all_words}")
        return [*(id_of[word] for word in words), _END]

    def translate(self, text: str, *, k: int = 3) -> Translation:
        """Write the most probable words one after another, with `k` candidates for each."""
        source, written = self.ids(text), [_BEGIN]
        memory_SD, encoder_LNSS = self.read(source)
        while True:
            logits_TV, decoder_LNTT, cross_LNTS = self.write(written, memory_SD)
            following = int(logits_TV[-1].argmax())
            if following == _END or len(written) > _LONGEST:
                break
            written.append(following)
        shares_TV = softmax(logits_TV)
        candidates = (tuple(self._candidate(row, i) for i in largest(row, k).tolist()) for row in shares_TV)
        first, second = (tuple(self._words[i] for i in ids) for ids in (source, written))
        return Translation(first, second, tuple(candidates), encoder_LNSS, decoder_LNTT, cross_LNTS)

    def read(self, ids: list[int]) -> tuple[Floats, Floats]:
        """Return the encoder's last stream (S, D), and its patterns (L, N, S, S)."""
        x_SD, patterns = self._weights["encoder.embed_tokens.weight"][ids], list[Floats]()
        for layer in self._layers("encoder.layers."):
            normed_SD = self._norm(f"{layer}.input_layernorm", x_SD)
            added_SD, pattern_NSS = self._attend(f"{layer}.self_attn", normed_SD, normed_SD, rotates=True)
            x_SD = x_SD + added_SD
            x_SD = x_SD + self._mlp(f"{layer}.mlp", self._norm(f"{layer}.post_attention_layernorm", x_SD))
            patterns.append(pattern_NSS)
        return self._norm("encoder.norm", x_SD), np.stack(patterns)

    def write(self, ids: list[int], memory_SD: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the logits after each written word (T, V), and both patterns: (L, N, T, T) and (L, N, T, S)."""
        x_TD, patterns = self._weights["embed_tokens.weight"][ids], list[tuple[Floats, Floats]]()
        for layer in self._layers("layers."):
            normed_TD = self._norm(f"{layer}.norms.0", x_TD)
            own_TD, own_NTT = self._attend(f"{layer}.self_attn", normed_TD, normed_TD, rotates=True, causal=True)
            x_TD = x_TD + own_TD
            cross_TD, cross_NTS = self._attend(f"{layer}.cross_attn", self._norm(f"{layer}.norms.1", x_TD), memory_SD)
            x_TD = x_TD + cross_TD
            x_TD = x_TD + self._mlp(f"{layer}.mlp", self._norm(f"{layer}.norms.2", x_TD))
            patterns.append((own_NTT, cross_NTS))
        own_LNTT, cross_LNTS = map(np.stack, zip(*patterns, strict=True))
        return self._linear("head", self._norm("norm", x_TD)), own_LNTT, cross_LNTS

    def _layers(self, start: str) -> list[str]:
        return sorted({f"{start}{key[len(start)]}" for key in self._weights if key.startswith(start)})

    def _linear(self, name: str, x_TD: Floats) -> Floats:
        return x_TD @ self._weights[f"{name}.weight"].T

    def _norm(self, name: str, x_TD: Floats) -> Floats:
        mean_T1 = np.square(x_TD).mean(-1, keepdims=True)
        return x_TD / np.sqrt(mean_T1 + np.float32(self.about["rms_norm_eps"])) * self._weights[f"{name}.weight"]

    def _mlp(self, name: str, x_TD: Floats) -> Floats:
        gate_TF = self._linear(f"{name}.gate_proj", x_TD)
        gated_TF = gate_TF / (1 + np.exp(-gate_TF)) * self._linear(f"{name}.up_proj", x_TD)
        return self._linear(f"{name}.down_proj", gated_TF.astype(np.float32))

    def _attend(
        self, name: str, x_TD: Floats, seen_SD: Floats, *, rotates: bool = False, causal: bool = False
    ) -> tuple[Floats, Floats]:
        """Return what attention adds, (T, D), and its pattern (N, T, S)."""
        q_TNH, k_SNH, v_SNH = (
            self._linear(f"{name}.{part}_proj", x).reshape(len(x), self._num_heads, -1)
            for part, x in (("q", x_TD), ("k", seen_SD), ("v", seen_SD))
        )
        if rotates:
            q_TNH, k_SNH = self._rotate(q_TNH), self._rotate(k_SNH)
        visible_TS = np.ones((len(x_TD), len(seen_SD)), np.bool_)
        pattern_NTS = softmax(scores_of(q_TNH, k_SNH, np.tril(visible_TS) if causal else visible_TS))
        out_TNH = np.einsum("nts,snh->tnh", pattern_NTS, v_SNH)
        return self._linear(f"{name}.o_proj", out_TNH.reshape(len(x_TD), -1)), pattern_NTS

    def _rotate(self, x_TNH: Floats) -> Floats:
        half = x_TNH.shape[-1] // 2
        angles_TP = np.outer(np.arange(len(x_TNH)), self.about["rope_theta"] ** -(np.arange(half) / half))
        cos_T1P, sin_T1P = (f(angles_TP).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        first, second = x_TNH[..., :half], x_TNH[..., half:]
        return np.concatenate((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P), -1)

    def _candidate(self, shares_V: NDArray[np.float32], word: int) -> Candidate:
        share = float(shares_V[word])
        return Candidate(word, share, float(np.log(share)), self._words[word])


@functools.cache
def packaged_translator() -> Translator:
    """Return the packaged translator from English to French."""
    return Translator(Path(__file__).parents[2] / "models" / "english-french")
