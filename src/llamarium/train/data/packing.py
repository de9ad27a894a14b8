"""Rows for pretraining: the stream of a corpus cut into rows of equal length, without padding or dropped tokens.

    documents      "the_cat_sat", "a_dog_ran_off", "so_it_goes"
    rows of 8      the_cat_  sata_dog  _ran_off  so_it_go      (here a character is a token)
    segments       00000000  00011111  00000000  00000000      attention stays within a segment
    positions      01234567  01201234  01234567  01234567      counted from the first token of a segment
    labels         he_cat_s  at._dog_  ran_off.  o_it_goe      the next token, but not across documents

A row has T input tokens, and one more as the label of the last. Each epoch cuts at another offset, so that the first
token of a row, which has no context, has context in other epochs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llamarium.errors import TrainingError, counted
from llamarium.train.data.batch import IGNORED, TrainingBatch, join
from llamarium.train.data.corpus import Corpus
from llamarium.train.data.mixture import Mixture
from llamarium.train.data.order import derived_seed


class PackedRows:
    """The rows of a corpus, by epoch and index; `fingerprint` covers the corpus, the context and the seed."""

    def __init__(self, corpus: Corpus, context: int, seed: int | None) -> None:
        """Cut a corpus into rows of `context` tokens; TrainingError if it has less than `context` + 1 tokens.

        `seed` determines the offset of each epoch; None uses offset 0 in every epoch, for validation on the same rows.
        """
        if context < 1:
            raise TrainingError(f"a row of {context} tokens; expected a context of at least 1")
        if corpus.num_tokens < context + 1:
            raise TrainingError(
                f"{corpus.name}: {counted(corpus.num_tokens, 'token')}, fewer than one row: a context "
                f"of {context} needs "
                f"{context + 1}; use more data or a shorter context"
            )
        if corpus.num_tokens == corpus.num_documents:
            raise TrainingError(
                f"{corpus.name}: each of its {counted(corpus.num_documents, 'document')} is a single "
                "token, so no token follows "
                "another and there is nothing to learn; join the texts into longer documents"
            )
        self.corpus = corpus
        self.context = context
        self._seed = seed
        described = f"packed rows 1 {corpus.fingerprint} {context} {seed}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()
        self.about = corpus.about

    def offset(self, epoch: int) -> int:
        """Return the start of an epoch's first row: less than T, and with at least one row after it."""
        if self._seed is None:
            return 0
        generator = torch.Generator().manual_seed(derived_seed("offset", self._seed, epoch))
        return int(torch.randint(self._num_offsets, (), generator=generator))

    @property
    def _num_offsets(self) -> int:
        return 1 if self._seed is None else min(self.context, self.corpus.num_tokens - self.context)

    @property
    def fewest_rows(self) -> int:
        """Minimum number of rows in an epoch; some epochs have one more."""
        return (self.corpus.num_tokens - self._num_offsets) // self.context

    def num_rows(self, epoch: int) -> int:
        """Return the number of complete rows in an epoch."""
        return (self.corpus.num_tokens - self.offset(epoch) - 1) // self.context

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        first, context = self.offset(epoch), self.context
        rows_B = torch.as_tensor(indices, dtype=torch.int64)
        # Overlapping views of T + 1 tokens: a row's last label is the next row's first token.
        tokens_BU = self.corpus.ids[first:].unfold(0, context + 1, context)[rows_B].long()
        ids_BT, next_BT = tokens_BU[:, :-1].contiguous(), tokens_BU[:, 1:].contiguous()
        if self.corpus.num_documents == 1:
            return TrainingBatch(ids_BT, next_BT, torch.arange(context).repeat(len(indices), 1), None)

        begins_B1 = (first + rows_B * context)[:, None]
        places_BU = begins_B1 + torch.arange(context + 1)
        documents_BU = torch.searchsorted(self.corpus.starts, places_BU, right=True) - 1
        documents_BT = documents_BU[:, :-1]
        segments_BT = documents_BT - documents_BT[:, :1]
        starts_BT = self.corpus.starts[documents_BT].maximum(begins_B1)  # of the document's part in this row
        return TrainingBatch(
            ids_BT,
            next_BT.masked_fill(documents_BU[:, 1:] != documents_BT, IGNORED),
            places_BU[:, :-1] - starts_BT,
            segments_BT if segments_BT.any() else None,
        )


class MixedRows:
    """A weighted mixture of several corpora's rows; each pass over a corpus uses another epoch of its `PackedRows`."""

    def __init__(self, parts: Sequence[PackedRows], weights: Mapping[str, float], seed: int | None) -> None:
        """Mix `parts`, one per source in `weights`; `seed` determines the order, None is for validation."""
        self.parts, self.context = parts, parts[0].context
        self.mixture = Mixture(weights, [part.fewest_rows for part in parts], seed)
        described = f"{[part.fingerprint for part in parts]}{self.mixture.label}"
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    @property
    def about(self) -> dict[str, Any]:
        """Counts of the whole corpus and of each source, and the SHA-256 of text and tokenizer."""
        return {**self.parts[0].about, **self.mixture.about([part.corpus.num_tokens for part in self.parts])}

    def num_rows(self, epoch: int) -> int:
        """Return the number of draws in an epoch, the same for every epoch."""
        return sum(self.mixture.counts)

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        rows: dict[tuple[int, int], list[int]] = {}
        for source, done, row in self.mixture.draws(epoch)[torch.as_tensor(indices)].tolist():
            rows.setdefault((source, done), []).append(row)
        return join([self.parts[source].batch(done, rows[source, done]) for source, done in sorted(rows)])
