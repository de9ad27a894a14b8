"""What `next`, `score`, `neighbors` and `info` print: results as tables that fit 80 columns.

A token stands between quotes, so that the space it begins with is seen, and what could drive a terminal stands escaped
(`Tokenizer.token_text`, `errors.escape`). rich is imported when a table is made.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamarium.cli.output import bar, percent, quote, ranges, size, table
from llamarium.errors import escape

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llamarium.config import ModelConfig
    from llamarium.inspect.neighbors import Neighbors
    from llamarium.inspect.next_tokens import NextStep
    from llamarium.inspect.score import Score
    from llamarium.inspect.summary import SourceGroup, Summary

CONTEXT_WIDTH = 68


def step_view(step: "NextStep") -> "RenderableType":
    """Show a generation step: the text so far, and the candidates with an arrow at the sampled one."""
    result = table("", "#", "token", "id", "P", "log P", " ", right=("#", "id", "P", "log P"))
    ranked = [(str(rank), c) for rank, c in enumerate(step.candidates, start=1)]
    if all(c.token_id != step.chosen.token_id for c in step.candidates):  # drawn from further down
        ranked.append(("…", step.chosen))
    for rank, c in ranked:
        arrow = "→" if c.token_id == step.chosen.token_id else ""
        numbers = (str(c.token_id), percent(c.probability), f"{c.logprob:.3f}")
        result.add_row(arrow, rank, quote(c.text), *numbers, bar(c.probability))
    return _stack(_line(f"step {step.step}: {_tail(step.context)}", bold=True), result, _line())


def after_view(last: "NextStep") -> "RenderableType":
    """Show the text after the last step."""
    return _line(f"then: {_tail(last.context + (last.chosen.text or ''))}", bold=True)


def score_view(score: "Score") -> "RenderableType":
    """Show each token's conditional probability, and their product."""
    result = table("#", "token", "id", "P", "log P", "rank", right=("#", "id", "P", "log P", "rank"))
    for i, t in enumerate(score.tokens):
        if t.logprob is None:
            values = ("-", "-", "-")
        else:
            values = (percent(math.exp(t.logprob)), f"{t.logprob:.4f}", str(t.rank))
        result.add_row(str(i), quote(t.text), str(t.token_id), *values)
    return _stack(result, _line(), _chain(score))


def _chain(score: "Score") -> "RenderableType":
    if score.perplexity is None:
        return _line("Nothing comes before a single token, so it has no probability; give a longer text.")
    total = score.total_logprob
    sums = {
        "tokens with a probability": f"{score.num_scored:,}",
        "sum of log P": f"{total:.4f}",
        "P of the text, the product": f"e^{total:.4f} = 10^{total / math.log(10):.4f}",
        "perplexity, e^(-mean log P)": f"{score.perplexity:,.{2 if score.perplexity >= 10 else 4}f}",
    }
    return table("", "", rows=sums.items())


def neighbors_view(nearest: "Neighbors") -> "RenderableType":
    """Show which tokens stood for the words, and the nearest rows."""
    words = [f"{w.sign} {quote(w.text)} ({w.token_id})" for w in nearest.query]
    rows = (
        (str(rank), quote(n.text), str(n.token_id), f"{n.cosine:.4f}", bar(n.cosine))
        for rank, n in enumerate(nearest.neighbors, start=1)
    )
    result = table("#", "token", "id", "cosine", "", right=("#", "id", "cosine"), rows=rows)
    return _stack(_line(" ".join(words).removeprefix("+ "), bold=True), result)


def summary_view(summary: "Summary") -> "RenderableType":
    """Show configuration, parameters, bytes, costs and where the weights came from."""
    parts = [_config(summary), _parameters(summary), _costs(summary)]
    if summary.sources:
        parts.append(_sources(summary.sources))
    return _stack(parts[0], *(item for part in parts[1:] for item in (_line(), part)))


def _config(summary: "Summary") -> "RenderableType":
    c = summary.config
    result = table("configuration", "")
    result.add_row("layers", f"{c.num_hidden_layers}")
    result.add_row("hidden size", f"{c.hidden_size:,}")
    result.add_row("intermediate size", f"{c.intermediate_size:,}")
    kind = {1: "multi-head", c.num_attention_heads: "multi-query"}.get(c.num_query_groups, "grouped-query")
    heads = f"{c.num_attention_heads} query, {c.num_key_value_heads} key-value ({kind}), {c.head_dim} wide"
    result.add_row("attention heads", heads)
    result.add_row("vocabulary", f"{c.vocab_size:,}; head {'tied' if c.tie_word_embeddings else 'of its own'}")
    result.add_row("context", f"{c.max_position_embeddings:,} tokens")
    result.add_row("RoPE", f"theta {c.rope_theta:,g}, {_rope_scaling(c)}")
    if c.sliding_window is not None:
        result.add_row("attention window", f"{c.sliding_window:,} tokens")
    if c.attention_bias or c.mlp_bias:
        result.add_row("biases", " and ".join(["attention"] * c.attention_bias + ["MLP"] * c.mlp_bias))
    result.add_row("RMSNorm", f"eps {c.rms_norm_eps:g}")
    result.add_row("begin, end, padding", f"{_ids(c.bos_token_id)}; {_ids(*c.eos_token_id)}; {_ids(c.pad_token_id)}")
    for note in c.notes:
        result.add_row("note", note)
    if summary.why_no_text:
        result.add_row("text", f"none: {escape(summary.why_no_text)}")
    return result


def _rope_scaling(config: "ModelConfig") -> str:
    if (scaling := config.rope_scaling) is None:
        return "no scaling"
    if scaling.rope_type == "dynamic":
        return f"dynamic scaling by {scaling.factor:g} beyond the context, which is not supported"
    original = scaling.original_max_position_embeddings
    return f"{scaling.rope_type} scaling by {scaling.factor:g}" + (f" from {original:,} tokens" if original else "")


def _parameters(summary: "Summary") -> "RenderableType":
    p = summary.parameters
    result = table("parameters", "number", "share", "", right=("number", "share"))
    for name in ("embedding", "attention", "mlp", "norms", "head"):
        number: int = getattr(p, name)
        share_bar = (
            "the embedding's" if name == "head" and summary.config.tie_word_embeddings else bar(number / p.total)
        )
        result.add_row(name, f"{number:,}", percent(number / p.total), share_bar)
    result.add_row("total", f"{p.total:,}", "", "")
    return result


def _costs(summary: "Summary") -> "RenderableType":
    context = summary.config.max_position_embeddings
    result = table("costs", "")
    for dtype, num_bytes in summary.bytes_by_dtype.items():
        result.add_row(f"weights in {escape(dtype)}", size(num_bytes))
    if len(summary.bytes_by_dtype) > 1:
        result.add_row("weights in all", size(sum(summary.bytes_by_dtype.values())))
    for dtype, products in summary.products.items():
        main_backend, *other_backends = sorted(products, key=lambda by: -len(products[by]))
        result.add_row(f"{escape(dtype)} multiplied by", main_backend)
        for by in other_backends:
            result.add_row("  " + ", ".join(map(_short, products[by])), by)
    result.add_row("FLOPs per token", _billions(summary.flops_per_token))
    full = summary.flops_per_token_at_full_context
    result.add_row(f"  with {context - 1:,} before it", _billions(full))
    result.add_row(f"KV cache per token, {summary.kv_dtype}", size(summary.kv_bytes_per_token))
    result.add_row(f"  of {context:,} tokens", size(summary.kv_bytes_at_full_context))
    return result


def _billions(count: float) -> str:
    return f"{count / 1e9:,.3f} billion" if count >= 1e9 else f"{count / 1e6:,.3f} million"


def _sources(groups: "Sequence[SourceGroup]") -> "RenderableType":
    """Show one line per kind of weight, without columns that would be the same everywhere."""
    files = list(dict.fromkeys(file for group in groups for file in group.files))
    columns = {
        "layer": [ranges(g.layers) for g in groups],
        "weight": [_short(g.pattern) for g in groups],
        "from": [_short(g.name) for g in groups],
        "type": [_type(g) for g in groups],
        "file": [ranges(files.index(file) + 1 for file in g.files) for g in groups],
        "": ["tied" if g.tied_to else "permuted" if g.permuted else "" for g in groups],
    }
    if columns["from"] == columns["weight"]:
        del columns["from"]
    if len(files) == 1:
        del columns["file"]
    result = table(*columns, rows=zip(*columns.values(), strict=True))
    notes = [f"file {i}: {escape(file)}" for i, file in enumerate(files, start=1)]
    if "permuted" in columns[""]:
        notes.append("permuted: the file has the rows in Meta's RoPE order; they were put into half-split order")
    return _stack(result, _line(), *map(_line, notes))


def _short(name: str) -> str:
    """A weight's name without what every name has, and without its layer, which stands beside it."""
    short = name.removeprefix("model.").removesuffix(".weight")
    for layer in ("layers.*.self_attn.", "layers.*.mlp.", "layers.*."):
        short = short.removeprefix(layer)
    return escape(short)


def _type(group: "SourceGroup") -> str:
    """The type in the file and, where it is another, in memory, in the files' spelling."""
    in_memory = _FILE_SPELLING.get(group.dtype, group.dtype)
    return escape(in_memory if in_memory == group.stored_dtype else f"{group.stored_dtype} → {in_memory}")


_FILE_SPELLING = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _ids(*ids: int | None) -> str:
    return ", ".join(str(i) for i in ids if i is not None) or "none"


def _tail(context: str) -> str:
    text = escape(context, limit=len(context) * 10)
    return quote(text if len(text) <= CONTEXT_WIDTH else f"…{text[1 - CONTEXT_WIDTH :]}")


def _line(text: str = "", *, bold: bool = False) -> "RenderableType":
    from rich.text import Text

    return Text(text, style="bold" if bold else "")


def _stack(*parts: "RenderableType") -> "RenderableType":
    from rich.console import Group

    return Group(*parts)
