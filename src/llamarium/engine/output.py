"""Turn a step's logits and hidden states into events: sampled tokens, prompt scores and vectors. Torch-free."""

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
    """Distributes a step's outputs to the scheduler's sequences, removes ended ones, and collects events.

    Attributes:
        events: Events that `Engine.step` has not returned yet.
    """

    def __init__(self, scheduler: Scheduler, sampler: Sampler, counts: Counts, *, use_cache: bool) -> None:
        self._scheduler, self._sampler, self._counts, self._use_cache = scheduler, sampler, counts, use_cache
        self.events = list[TokenEvent]()

    def process(self, items: Sequence[StepItem], logits_WV: Logits, taps: Taps | None) -> None:
        """Process the outputs of a step; `items` are in the order of the batch."""
        hidden_MD = None if taps is None or HIDDEN not in taps.kept else taps.kept[HIDDEN][0]
        ready, logits_rows = list[EngineSequence](), list[int]()
        next_token = next_row = 0
        for item in items:
            sequence, span = item.sequence, item.span
            logits_row = (
                next_row if sequence.scores is None else sequence.score(item, logits_WV, next_row, self._sampler)
            )
            if sequence.pool is not None and hidden_MD is not None:
                sequence.pool.take(hidden_MD[next_token : next_token + len(span.token_ids)], span.start)
            if sequence.states is not None:
                sequence.states.take(taps, next_token, span.start, item.end)
            next_row, next_token = next_row + span.num_logits, next_token + len(span.token_ids)
            self._scheduler.mark_computed(sequence, item.end)
            for awaiting in self._awaiting_token(sequence, item.end):
                ready.append(awaiting)
                logits_rows.append(logits_row)
        self._choose(ready, logits_rows, logits_WV)

    def end(self, sequence: EngineSequence, reason: FinishReason, cause: NoToken, vector: Vector | None = None) -> None:
        """End a sequence without a token; `cause` becomes the event's token id."""
        sequence.finish_reason = reason
        self._emit(sequence, Chosen(cause), vector)

    def _awaiting_token(self, sequence: EngineSequence, end: int) -> list[EngineSequence]:
        """Return the sequences that sample a token now that `sequence` is computed up to `end`.

        When a prompt is complete, these are the sequence and the followers that share its prompt.
        """
        if sequence.scores is not None and not sequence.scores.is_finite:
            self.end(sequence, "error", NoToken.NOT_FINITE)
            return []
        if end < len(sequence.ids):
            return []
        if sequence.sampling.num_tokens:
            return [sequence]

        # The whole prompt has been computed.
        counts = self._counts
        counts.prompt_tokens += end
        counts.sought_tokens += sequence.num_sought
        counts.cached_tokens += sequence.num_cached
        counts.disk_tokens += sequence.num_disk
        if sequence.pool is not None:
            vector = sequence.pool.vector()
            self.end(sequence, "error" if vector is None else "stop", NoToken.NOT_ASKED, vector)
            return []

        joined = [sequence, *(self._scheduler.fork(sequence) if sequence.followers else ())]
        for member in joined:
            if len(member.ids) >= member.limit:  # max_tokens is 0: only the prompt's scores are needed
                self.end(member, "length", NoToken.NOT_ASKED)
        return [member for member in joined if member.finish_reason is None]

    def _choose(self, sequences: list[EngineSequence], logits_rows: list[int], logits_WV: Logits) -> None:
        """Sample the next token of each sequence, and further ones while they match its draft.

        `logits_rows` are the rows of the logits after each sequence's last token; those after its draft tokens follow.
        Each round of the loop samples one token for all sequences whose draft has matched so far.
        """
        proposer, draft_place = self._scheduler.proposer, 0
        while sequences:
            logits_BV = logits_WV if logits_rows == list(range(len(logits_WV))) else logits_WV[logits_rows]
            try:
                choices = self._sampler.sample([sequence.sampling for sequence in sequences], logits_BV)
            except MemoryBudgetError:
                for sequence in sequences:
                    sequence.num_computed -= 1  # the next step runs its last token again, to the same logits
                raise

            ahead: list[int] = []
            for row, (sequence, chosen) in enumerate(zip(sequences, choices, strict=True)):
                self._accept(sequence, chosen)
                if proposer is None or sequence.finish_reason is not None:
                    continue
                if self._is_ahead(proposer, sequence, draft_place, chosen.token_id):
                    ahead.append(row)
            sequences, logits_rows = [sequences[row] for row in ahead], [logits_rows[row] + 1 for row in ahead]
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
        """Return whether the draft token at `place` was accepted, so that the logits after it are available."""
        if not proposer.policy.check(sequence.draft, place, token_id):
            return False
        self._counts.accepted_tokens += 1
        self._scheduler.mark_computed(sequence, len(sequence.ids))
        return True

    def _emit(self, sequence: EngineSequence, chosen: Chosen, vector: Vector | None = None) -> None:
        reason = sequence.finish_reason
        states = () if sequence.states is None else sequence.states.drain()
        event = TokenEvent(
            sequence.number,
            sequence.row,
            *chosen,
            reason,
            num_cached=max(0, sequence.num_cached),
            num_disk=sequence.num_disk,
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
            sequence.num_computed = 0  # the next step computes all of its tokens again
