"""The summary of a run: percentiles of its times, throughput, goodput, errors."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarium.load_test.drive import LoadRun
from llamarium.load_test.exchange import Goal


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of some values, or None without any."""
        if not values:
            return None
        cuts = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=100, method="inclusive")
        return cls(math.fsum(values) / len(values), cuts[49], cuts[89], cuts[98], max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """The numbers of a run; times are of complete answers alone, in seconds.

    Attributes:
        num_requests: That ended, with or without a failure.
        num_unfinished: Interrupted.
        errors: Numbers of failures, by kind.
        examples: The first message of each kind.
        total_tokens_per_s: With their prompts' tokens; None if the server does not report them.
        goodput_per_s: Answers a second that meet the goal; None without a goal.
        cached_tokens: Of the prompts.
        server_counts: Whether tokens are the server's counts, or pieces.
        cpu_s_per_token: Processor time of the load generator for each token of an answer.
        cpu_share: Its share of one processor's time.
    """

    duration_s: float
    num_requests: int
    num_answered: int
    num_unfinished: int
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    mean_concurrency: float
    goodput_per_s: float | None
    num_good: int | None
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    prompt_tokens: Spread | None
    cached_tokens: Spread | None
    output_tokens: Spread | None
    server_counts: bool
    cpu_s_per_token: float | None
    cpu_share: float


def summarize(run: LoadRun, goal: Goal | None = None) -> LoadSummary:
    """Summarize a run."""
    answers = [exchange for exchange in run.exchanges if exchange.failure is None]
    failures = [exchange.failure for exchange in run.exchanges if exchange.failure is not None]
    usages = [exchange.usage for exchange in answers if exchange.usage is not None]
    num_output = sum(exchange.num_tokens for exchange in answers)
    num_good = None if goal is None else sum(map(goal.is_met, answers))
    server_counts = len(usages) == len(answers) > 0
    seconds = run.duration_s or math.inf
    return LoadSummary(
        duration_s=run.duration_s,
        num_requests=len(run.exchanges),
        num_answered=len(answers),
        num_unfinished=run.num_started - len(run.exchanges),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        examples={failure.kind: failure.message for failure in reversed(failures)},
        requests_per_s=len(answers) / seconds,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_output + sum(u.prompt_tokens for u in usages)) / seconds if server_counts else None,
        mean_concurrency=sum(exchange.e2e_s for exchange in run.exchanges) / seconds,
        goodput_per_s=None if num_good is None else num_good / seconds,
        num_good=num_good,
        ttft_s=Spread.of([exchange.ttft_s for exchange in answers]),
        itl_s=Spread.of([gap for exchange in answers for gap in exchange.gaps_s]),
        tpot_s=Spread.of([tpot for exchange in answers if (tpot := exchange.tpot_s) is not None]),
        e2e_s=Spread.of([exchange.e2e_s for exchange in answers]),
        prompt_tokens=Spread.of([usage.prompt_tokens for usage in usages]),
        cached_tokens=Spread.of([usage.cached_tokens for usage in usages if usage.cached_tokens is not None]),
        output_tokens=Spread.of([exchange.num_tokens for exchange in answers]),
        server_counts=server_counts,
        cpu_s_per_token=run.cpu_s / num_output if num_output else None,
        cpu_share=run.cpu_s / seconds,
    )
