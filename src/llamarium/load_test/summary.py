"""Summarizes a run: latency percentiles, throughput, goodput and errors."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamarium.load_test.drive import LoadRun
from llamarium.load_test.exchange import Goal


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of a set of values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of values, or None if there are none."""
        if not values:
            return None
        cuts = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=100, method="inclusive")
        return cls(math.fsum(values) / len(values), cuts[49], cuts[89], cuts[98], max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """The results of a run. Latencies are in seconds and include only complete answers.

    Attributes:
        duration_s: Duration of the run.
        num_requests: Number of finished requests, including failed ones.
        num_answered: Number of complete answers.
        num_unfinished: Number of interrupted requests.
        errors: Number of failures by kind.
        examples: First error message of each kind.
        requests_per_s: Complete answers per second.
        output_tokens_per_s: Generated tokens per second.
        total_tokens_per_s: Prompt and generated tokens per second; None if the server does not report token counts.
        mean_concurrency: Mean number of concurrent requests.
        goodput_per_s: Answers per second that meet the goal; None without a goal.
        num_good: Number of answers that meet the goal; None without a goal.
        ttft_s: Time to first token.
        itl_s: Inter-token latency.
        tpot_s: Time per output token.
        e2e_s: End-to-end latency.
        prompt_tokens: Prompt tokens per request.
        cached_tokens: Prompt tokens per request read from the prefix cache.
        output_tokens: Generated tokens per request.
        server_counts: Whether tokens are counted by the server; otherwise pieces are counted.
        cpu_s_per_token: CPU time of the load generator per generated token.
        cpu_share: CPU time of the load generator relative to the duration, where 1 is one core.
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
    """Return the summary of a run; with a goal, it includes the goodput."""
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
