"""From a step's logits and hidden states to events: scores, vectors, and the tokens that are chosen. Never torch."""

from collections.abc import Sequence

from llamarium.engine.counts import Counts
from llamarium.engine.pooling import HIDDEN, Vector
from llamarium.engine.proposers.base import Proposer
from llamarium.engine.request import EngineSequence, FinishReason, StepItem, TokenEvent
from llamarium.engine.scheduler import Scheduler
from llamarium.errors import MemoryBudgetError
from llamarium.runtime.runner import Logits
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.row import Chosen
from llamarium.sampling.sampler import Sampler


class OutputProcessor:
    """Gives each of a scheduler's sequences what a step computed for it, removes those that end, collects the events.

    Without `use_cache` a sequence's keys and values are dropped after each token.

    Attributes:
        events: Those that were not taken yet.
    """

    def __init__(self, scheduler: Scheduler, sampler: Sampler, counts: Counts, *, use_cache: bool) -> None:
        self._scheduler, self._sampler, self._counts, self._use_cache = scheduler, sampler, counts, use_cache
        self.events = list[TokenEvent]()

    def process(self, items: Sequence[StepItem], logits_WV: Logits, taps: Taps | None) -> None:
        """Deliver a step's logits, and its hidden states if a sequence needs a vector; items in the batch's order."""
        hidden_MD = None if taps is None or HIDDEN not in taps.kept else taps.kept[HIDDEN][0]
        ready, places = list[EngineSequence](), list[int]()
        token = row = 0
        for item in items:
            sequence, span = item.sequence, item.span
            place = row if sequence.scores is None else sequence.score(item, logits_WV, row, self._sampler)
            if sequence.pool is not None and hidden_MD is not None:
                sequence.pool.take(hidden_MD[token : token + len(span.token_ids)], span.start)
            if sequence.states is not None:
                sequence.states.take(taps, token, span.start, item.end)
            row, token = row + span.num_logits, token + len(span.token_ids)
            self._scheduler.mark_computed(sequence, item.end)
            for one in self._awaiting_token(sequence, item.end):
                ready.append(one)
                places.append(place)
        self._choose(ready, places, logits_WV)

    def end(self, sequence: EngineSequence, reason: FinishReason, why: NoToken, vector: Vector | None = None) -> None:
        """End a sequence without a token."""
        sequence.finish_reason = reason
        self._emit(sequence, Chosen(why), vector)

    def _awaiting_token(self, sequence: EngineSequence, end: int) -> list[EngineSequence]:
        """Return the sequences that get a token now that one is computed up to `end`: it, and those that join it."""
        if sequence.scores is not None and not sequence.scores.is_finite:
            self.end(sequence, "error", NoToken.NOT_FINITE)
            return []
        if end < len(sequence.ids):
            return []
        if sequence.sampling.num_tokens:
            return [sequence]

        counts = self._counts  # the prompt is computed
        counts.prompt_tokens += end
        counts.sought_tokens += sequence.num_sought
        counts.cached_tokens += sequence.num_cached
        counts.disk_tokens += sequence.num_disk
        if sequence.pool is not None:
            vector = sequence.pool.vector()
            self.end(sequence, "error" if vector is None else "stop", NoToken.NOT_ASKED, vector)
            return []

        joined = [sequence, *(self._scheduler.fork(sequence) if sequence.followers else ())]
        for one in joined:
            if len(one.ids) >= one.limit:  # only the prompt's scores are wanted
                self.end(one, "length", NoToken.NOT_ASKED)
        return [one for one in joined if one.finish_reason is None]

    def _choose(self, sequences: list[EngineSequence], places: list[int], logits_WV: Logits) -> None:
        """Choose the next token of each sequence, and further ones as long as they are those of its draft.

        `places` are the rows of the logits after each one's last token; those after its draft's tokens follow.
        """
        proposer, draft_place = self._scheduler.proposer, 0
        while sequences:
            logits_BV = logits_WV if places == list(range(len(logits_WV))) else logits_WV[places]
            try:
                found = self._sampler.sample([sequence.sampling for sequence in sequences], logits_BV)
            except MemoryBudgetError:
                for sequence in sequences:
                    sequence.num_computed -= 1  # its last token is run again in the next step, to the same logits
                raise

            ahead: list[int] = []
            for row, (sequence, chosen) in enumerate(zip(sequences, found, strict=True)):
                self._accept(sequence, chosen)
                if proposer is None or sequence.finish_reason is not None:
                    continue
                if self._is_ahead(proposer, sequence, draft_place, chosen.token_id):
                    ahead.append(row)
            sequences, places = [sequences[row] for row in ahead], [places[row] + 1 for row in ahead]
            draft_place += 1

    def _accept(self, sequence: EngineSequence, chosen: Chosen) -> None:
        if chosen.token_id < 0:
            sequence.finish_reason = "error"
        else:
            self._counts.generated_tokens += 1
            sequence.ids.append(chosen.token_id)
            constraint = sequence.sampling.constraint
            if chosen.token_id in sequence.stops or (constraint is not None and constraint.is_finished):
                sequence.finish_reason = "stop"
            elif len(sequence.ids) >= sequence.limit:
                sequence.finish_reason = "length"
        self._emit(sequence, chosen)

    def _is_ahead(self, proposer: Proposer, sequence: EngineSequence, place: int, token_id: int) -> bool:
        """Whether the token is the draft's and was run, so that the logits after it are there."""
        if not proposer.policy.check(sequence.draft, place, token_id):
            return False
        self._counts.accepted_tokens += 1
        self._scheduler.mark_computed(sequence, len(sequence.ids))
        return True

    def _emit(self, sequence: EngineSequence, chosen: Chosen, vector: Vector | None = None) -> None:
        found, reason = (max(0, sequence.num_cached), sequence.num_disk), sequence.finish_reason
        states = () if sequence.states is None else sequence.states.drain()
        event = TokenEvent(
            sequence.number,
            sequence.row,
            *chosen,
            reason,
            *found,
            vector=vector,
            states=states,
            failure=sequence.sampling.failure,
        )
        if sequence.scores is not None and sequence.scores.is_complete:
            event, sequence.scores = event._replace(prompt_scores=sequence.scores), None
        self.events.append(event)
        if reason is not None:
            self._scheduler.remove(sequence)
        elif not self._use_cache:
            sequence.num_computed = 0
