"""The tables: they hold the numbers, fit 80 columns, and cannot drive a terminal."""

import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, Group, RenderableType

from llamarium.checkpoints.options import TensorSource
from llamarium.cli import output, views
from llamarium.inspect.neighbors import Neighbor, Neighbors, QueryWord
from llamarium.inspect.next_tokens import NextStep
from llamarium.inspect.score import Score, TokenScore
from llamarium.inspect.summary import summarize
from llamarium.inspect.tokens import Candidate
from llamarium.presets import PRESETS, preset


def render(view: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=80, markup=False, emoji=False, highlight=False).print(view)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert all(c.isprintable() or c == "\n" for c in text)
    return text


def lines(view: RenderableType) -> list[str]:
    """Every line with runs of spaces as one, which no column width changes."""
    return [" ".join(line.split()) for line in render(view).splitlines()]


def candidate(token_id: int, probability: float, text: str) -> Candidate:
    return Candidate(token_id, probability, math.log(probability), text)


COFFEE, TEA = candidate(6728, 0.5, " coffee"), candidate(12, 0.000034, "[red]:smile:\x1b[31m")


def test_next_shows_every_step_and_marks_the_choice() -> None:
    steps = [
        NextStep(1, "I love\n\x1b[2J", (1, 2), (COFFEE, TEA), COFFEE),
        NextStep(2, "x" * 300 + " coffee", (1, 2, 3), (TEA, COFFEE), TEA),
    ]
    shown = [*lines(views.step_view(steps[0])), *lines(views.step_view(steps[1])), *lines(views.after_view(steps[1]))]
    assert shown[0] == r'step 1: "I love\n\x1b[2J"'
    assert '→ 1 " coffee" 6728 50.0 % -0.693 ████████' in shown
    assert r'2 "[red]:smile:\x1b[31m" 12 0.0034 % -10.289' in shown
    (second,) = [line for line in shown if line.startswith("step 2")]
    assert second.endswith('xx coffee"') and '"…xxx' in second
    assert sum(line.startswith("→") for line in shown) == 2
    assert shown[-1].startswith('then: "…xxx') and shown[-1].endswith(r' coffee[red]:smile:\x1b[31m"')


@pytest.mark.parametrize(
    ("text", "shown"), [('say "hi"', "'say \"hi\"'"), ("it's", '"it\'s"'), ('it\'s "hi"', '"it\'s "hi""'), ("", '""')]
)
def test_quotation_marks_are_not_those_of_the_text_where_others_are_free(text: str, shown: str) -> None:
    assert output.quote(text) == shown
    assert lines(views.step_view(NextStep(1, text, (1,), (COFFEE,), COFFEE)))[0] == f"step 1: {shown}"


def test_score_shows_the_chain_and_its_product() -> None:
    found = Score((TokenScore(1, None, None, "<s>"), TokenScore(5, math.log(0.25), 2, " a"), TokenScore(6, -3.0, 70)))
    shown = lines(views.score_view(found))
    assert '0 "<s>" 1 - - -' in shown
    assert '1 " a" 5 25.0 % -1.3863 2' in shown
    assert "2 - 6 5.0 % -3.0000 70" in shown
    assert "sum of log P -4.3863" in shown
    assert "P of the text, the product e^-4.3863 = 10^-1.9049" in shown
    assert "perplexity, e^(-mean log P) 8.9634" in shown
    alone = lines(views.score_view(Score((TokenScore(1, None, None, "<s>"),))))
    assert any("no probability" in line for line in alone)


def test_neighbors_say_which_tokens_were_used() -> None:
    query = (
        QueryWord("+", "king", 4197, " king"),
        QueryWord("-", "man", 555, " man"),
        QueryWord("+", "woman", 9, "woman"),
    )
    found = Neighbors(query, (Neighbor(15731, " queen", 0.72814), Neighbor(3, "\u202eneeuq", -0.25)))
    shown = lines(views.neighbors_view(found))
    assert shown[0] == '" king" (4197) - " man" (555) + "woman" (9)'
    assert '1 " queen" 15731 0.7281 ███████████▋' in shown
    assert r'2 "\u202eneeuq" 3 -0.2500' in shown


@pytest.mark.parametrize("name", PRESETS)
def test_info_fits_for_every_preset(name: str) -> None:
    shown = lines(views.summary_view(summarize(preset(name))))
    assert f"total {summarize(preset(name)).parameters.total:,}" in shown


def test_info_names_what_differs_between_llamas() -> None:
    shown = lines(views.summary_view(summarize(preset("llama-3.2-1b"))))
    assert "attention heads 32 query, 8 key-value (grouped-query), 64 wide" in shown
    assert "vocabulary 128,256; head tied" in shown
    assert "RoPE theta 500,000, llama3 scaling by 32 from 8,192 tokens" in shown
    assert "head 0 0.0 % the embedding's" in shown
    assert "begin, end, padding 128000; 128001, 128008, 128009; none" in shown
    assert "KV cache per token, bfloat16 32.8 kB" in shown and "of 131,072 tokens 4.3 GB" in shown
    shown = lines(views.summary_view(summarize(preset("llama-2-7b"))))
    assert "attention heads 32 query, 32 key-value (multi-head), 128 wide" in shown
    assert "vocabulary 32,000; head of its own" in shown and "RoPE theta 10,000, no scaling" in shown
    shown = lines(views.summary_view(summarize(replace(preset("tiny"), num_key_value_heads=1))))
    assert "attention heads 4 query, 1 key-value (multi-query), 32 wide" in shown


def sources(*, file: str = "a.gguf", renamed: bool = True) -> list[TensorSource]:
    def one(key: str, name: str, stored: str, held: str, tied_to: str | None = None) -> TensorSource:
        name = name if renamed else key
        return TensorSource(key, (2, 2), Path(file), name, stored, held, "attn_q" in name, tied_to, 1_500_000)

    norm = "post_attention_layernorm.weight"
    return [
        one("model.embed_tokens.weight", "token_embd.weight", "Q8_0", "Q8_0"),
        *(
            one(f"model.layers.{i}.self_attn.q_proj.weight", f"blk.{i}.attn_q.weight", "Q4_1", "bfloat16")
            for i in range(3)
        ),
        *(one(f"model.layers.{i}.{norm}", f"blk.{i}.attn_output.weight", "F32", "float32") for i in range(3)),
        one("lm_head.weight", "token_embd.weight", "Q8_0", "Q8_0", tied_to="model.embed_tokens.weight"),
    ]


def test_info_says_where_weights_came_from() -> None:
    shown = lines(views.summary_view(summarize(preset("tiny"), None, sources(file="evil\x1b[31m.gguf"))))
    assert "layer weight from type" in shown
    assert "embed_tokens token_embd Q8_0" in shown
    assert "0-2 q_proj blk.*.attn_q Q4_1 → BF16 permuted" in shown
    assert "0-2 post_attention_layernorm blk.*.attn_output F32" in shown
    assert "lm_head token_embd Q8_0 tied" in shown
    assert r"file 1: evil\x1b[31m.gguf" in shown
    assert "weights in bfloat16 4.5 MB" in shown and "weights in all 12.0 MB" in shown


def test_info_leaves_out_what_says_nothing() -> None:
    parts = [*sources(file="1.safetensors", renamed=False)[:2], *sources(file="2.safetensors", renamed=False)[2:]]
    shown = lines(views.summary_view(summarize(preset("tiny"), None, parts)))
    assert "layer weight type file" in shown
    assert "0-2 q_proj Q4_1 → BF16 1-2" in shown
    assert "file 2: 2.safetensors" in shown and not any("permuted" in line for line in shown)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), ([2, 1, 1], "1-2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert output.ranges(numbers) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(999, "999 bytes"), (23_040, "23.0 kB"), (5_000_000, "5.0 MB"), (10**12, "1,000.0 GB")]
)  # fmt: skip
def test_size(num_bytes: int, text: str) -> None:
    assert output.size(num_bytes) == text


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(1.0, "█" * 16), (0.5, "█" * 8), (1 / 128, "▏"), (0.172, "██▊"), (0.001, ""), (-0.5, ""), (math.nan, "")],
)
def test_bar(share: float, drawn: str) -> None:
    assert output.bar(share) == drawn


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (1.0, "100.0 %"), (0.0124, "1.2 %"), (0.000034, "0.0034 %"), (1e-9, "1e-07 %")]
)
def test_percent(share: float, text: str) -> None:
    assert output.percent(share) == text


def test_rich_is_imported_when_a_table_is_made() -> None:
    for name, late in (("views", {"rich"}), ("output", {"rich", "torch"})):
        code = f"import sys, llamarium.cli.{name}; assert not {late} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("columns", [24, 40, 60, 80])
def test_no_word_is_broken_and_no_cell_is_lost_in_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = output.table("name", "token", "what it is", "P", "", right=("P",))
    shown.add_row("embedding", '" little"', "on this machine, fetched", "21.0 %", "█" * 12)
    shown.add_row("norms", '" there"', "short", "0.026 %", "█")
    output.show(Group(shown))
    said = capsys.readouterr().out
    for word in ("embedding", '" little"', '" there"', "machine,", "fetched", "21.0 %", "0.026 %"):
        assert word in said
    assert ("█" in said) == (columns > 50)  # bars go first
    assert max(map(len, said.splitlines())) <= max(columns, 44)
