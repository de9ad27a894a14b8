"""What `llamarium bench serve` prints: a table in 80 columns."""

from typing import TYPE_CHECKING

from llamarium.cli.output import printable, show
from llamarium.cli.tables import percent, table

if TYPE_CHECKING:
    from llamarium.load_test.summary import LoadSummary, Spread

_BUSY = 0.5  # of one processor; above, the generator's own turns are late


def print_summary(title: str, summary: "LoadSummary") -> None:
    print(f"{printable(title)}\n{_outcome(summary)}\n")
    if summary.num_answered:
        _print_times(summary)
        print()
        _print_rates(summary)
        print(f"\n{_generator(summary)}")
    if summary.errors:
        rows = ((f"{number:,}", kind, printable(summary.examples[kind])) for kind, number in summary.errors.items())
        print()
        show(table("failed", "why", "for example", right=("failed",), rows=rows))


def _outcome(summary: "LoadSummary") -> str:
    asked = "1 request" if summary.num_requests == 1 else f"{summary.num_requests:,} requests"
    parts = [f"{summary.num_answered:,} of {asked} answered in {summary.duration_s:,.1f} s"]
    parts += [f"{sum(summary.errors.values()):,} failed"] if summary.errors else []
    parts += [f"{summary.num_unfinished:,} more cut short"] if summary.num_unfinished else []
    return ", ".join(parts)


def _print_times(summary: "LoadSummary") -> None:
    numbers = ("mean", "p50", "p90", "p99", "max")
    shown = table("ms", *numbers, right=numbers)
    for name, spread in (
        ("first token", summary.ttft_s),
        ("between pieces", summary.itl_s),
        ("token", summary.tpot_s),
        ("whole answer", summary.e2e_s),
    ):
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            shown.add_row(name, *(f"{1000 * seconds:,.1f}" for seconds in values))
    show(shown)


def _print_rates(summary: "LoadSummary") -> None:
    total = summary.total_tokens_per_s
    print(
        f"throughput   {summary.requests_per_s:,.2f} requests/s, {summary.output_tokens_per_s:,.1f} tokens/s"
        + ("" if total is None else f", {total:,.1f} with prompts")
    )
    if summary.goodput_per_s is not None and summary.num_good is not None:
        share = percent(summary.num_good / summary.num_requests)
        print(f"goodput      {summary.goodput_per_s:,.2f} requests/s, {share} of all")
    print(f"under way    {summary.mean_concurrency:,.1f} requests on average")
    if summary.server_counts:
        cached = summary.cached_tokens
        share = f", {cached.mean:,.1f} of them cached" if cached is not None and cached.mean >= 0.05 else ""
        print(f"prompts      {_tokens(summary.prompt_tokens)}{share}")
        print(f"answers      {_tokens(summary.output_tokens)}")
    else:
        print(f"answers      {_tokens(summary.output_tokens)}: pieces, as the server does not count")


def _tokens(spread: "Spread | None") -> str:
    if spread is None:
        return "-"
    return f"{spread.mean:,.1f} tokens on average, {spread.max:,.0f} at most"


def _generator(summary: "LoadSummary") -> str:
    took = "" if summary.cpu_s_per_token is None else f" {1e6 * summary.cpu_s_per_token:,.0f} us of processor a token,"
    said = f"the load generator took{took} {percent(summary.cpu_share)} of one processor"
    if summary.cpu_share > _BUSY:
        said += ":\ntoo much to measure by; use fewer clients, or several generators"
    return said
