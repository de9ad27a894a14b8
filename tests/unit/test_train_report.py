"""Reports: everything that a run wrote is shown, nothing in it can become markup, and nothing is fetched."""

import json
import math
import shlex
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarium.cli.main import main
from llamarium.errors import OutputError, TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.presets import PRESETS
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.train.report import page
from llamarium.train.report.embeddings import project
from llamarium.train.report.page import Series, facts, figure, labels, smoothed, spread, ticks
from llamarium.train.report.write import compare, write_report
from llamarium.train.state.snapshots import read_snapshot, save_snapshot, snapshot_path, token_texts

pytestmark = pytest.mark.torch

EVIL = "<script>alert(1)</script> & \x1b[2J\x00 \u202e \"'\nnext"
VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Reads a page, checks that its elements nest, and collects texts and what could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def journal(run: Path, *events: dict[str, Any], **start: Any) -> Path:
    run.mkdir(exist_ok=True)
    first = {
        "event": "start", "step": 0, "settings": {"steps": 30}, "model": PRESETS["tiny"].to_hf(), "parameters": 1234,
        "trainable": 1234, "device": "cpu", "tokens": ["a", "b"],
    }  # fmt: skip
    lines = [{**first, **start}, *events]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def steps(*losses: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": i * 10, "loss": loss, "grad_norm": 1.5, "learning_rate": 1e-3, "tokens_per_s": 900.0,
         "num_tokens": i * 100, "seconds": 3.0 * i, "mfu": None}
        for i, loss in enumerate(losses, start=1)
    ]  # fmt: skip


def test_a_page_shows_curves_numbers_and_samples(tmp_path: Path) -> None:
    run = journal(
        tmp_path / "run",
        *steps(4.5, 3.25, 2.125),
        {"event": "validation", "step": 10, "loss": 4.0625, "best": True},
        {"event": "validation", "step": 30, "loss": 2.5, "best": True},
        {"event": "sample", "step": 30, "prompt": "To ", "text": "be or not"},
        {"event": "end", "step": 30, "signal": None},
    )
    path = write_report(run)
    assert path == run / "report.html"
    found = Page(path.read_text())
    shown = " ".join(found.texts)
    for expected in (
        "30 of 30 steps on cpu; finished",
        "best validation loss, step 30 2.5",
        "4.062",
        "2.125",
        "1,234",
        "To",
        "be or not",
    ):
        assert expected in shown
    assert found.tags.count("polyline") == 3 + 3  # the loss, and three more
    assert not list(run.glob(".report*"))


def test_every_drawing_has_a_title_and_a_description_and_is_xml(tmp_path: Path) -> None:
    html = write_report(journal(tmp_path / "run", *steps(4.5, 3.25))).read_text()
    drawings = [part.split("</svg>")[0] + "</svg>" for part in html.split("<svg ")[1:]]
    for drawing in drawings:
        element = ElementTree.fromstring("<svg " + drawing)
        if element.get("aria-hidden") != "true":
            assert element.get("role") == "img" and "over steps 10 to 20" in element.get("aria-label", "")
            assert element.findtext("title")
    assert "NaN" not in html.upper().replace("NANO", "") and "inf," not in html


def test_it_says_how_the_checkpoints_are_opened(tmp_path: Path) -> None:
    """The command as a shell reads it, and a link that holds while it runs."""
    run = journal(tmp_path / "a run & <b>more", *steps(4.5))
    assert "there is no checkpoint with a whole model" in write_report(run).read_text()
    for step in (5, 10):
        (run / f"step-{step:08d}").mkdir()
    found = Page(write_report(run).read_text())
    command = next(text for text in found.texts if text.startswith("llamarium inspect"))
    assert shlex.split(command) == ["llamarium", "inspect", "--checkpoints", str(run), "--port", "8765"]
    link = next(urlsplit(value or "") for name, value in found.attributes if name == "href")
    assert (link.netloc, link.query) == ("127.0.0.1:8765", "")
    assert parse_qs(link.fragment) == {"stage": ["checkpoints"], "run": [run.name]}
    assert "2 checkpoints are on the disk" in "".join(found.texts)
    (run / "step-00000010" / "adapter_config.json").write_text("{}")
    assert "there is no checkpoint with a whole model" in write_report(run).read_text()


def test_nothing_from_a_file_becomes_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    run = journal(
        tmp_path / "<b>run",
        *steps(EVIL, 3.0, 2.0),
        {"event": "sample", "step": 20, "prompt": EVIL, "text": EVIL},
        {"event": "sample", "step": 30, "prompt": "", "error": EVIL},
        {"event": "embeddings", "step": 0},
        {"event": "embeddings", "step": 20},
        settings={EVIL: EVIL, "steps": EVIL},
        model={EVIL: EVIL},
        device=EVIL,
        tokens=[EVIL, EVIL, EVIL],
        parameters=EVIL,
    )
    model = LlamaForCausalLM(PRESETS["tiny"])
    for step in (0, 20):
        save_snapshot(model, run, step)
    for path in (write_report(run), compare({EVIL: run}, tmp_path / "all.html", EVIL, notes=[EVIL])):
        html = path.read_text()
        found = Page(html)
        assert "script" not in found.tags and "b" not in found.tags
        assert "<script>alert(1)</script>" in "".join(found.texts)
        assert not {"\x1b", "\x00", "\u202e"} & set(html)
        assert r"\x1b[2J\x00" in html
        assert not {"src", "href", "onload"} & {name for name, _ in found.attributes}
        assert "default-src 'none'" in html and "@import" not in html and "url(" not in html


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    odd = steps(None, True, [1], 1e300, -1e-300, 10**400, 2.0)
    odd[0]["step"], odd[1]["step"] = "one", None
    found = " ".join(Page(write_report(journal(tmp_path / "run", *odd)).read_text()).texts)
    assert "training loss 2" in found


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"metrics\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(TrainingError, match="0 runs"):
        compare({}, tmp_path / "all.html", "none")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = journal(tmp_path / "run", *steps(4.5))
    with pytest.raises(OutputError, match="cannot be written"):
        compare({"one": run}, tmp_path / "no folder" / "all.html", "one")


@pytest.mark.parametrize("name", ["metrics.jsonl", "mine.html", "folder.html", "model"])
def test_only_a_report_makes_way_for_a_report(name: str, tmp_path: Path) -> None:
    run = journal(tmp_path / "run", *steps(4.5))
    (run / "folder.html").mkdir()
    (run / "mine.html").write_text("<!doctype html>\n<html><title>mine</title></html>")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(OutputError, match=f"{name}: is (no name of a page|there already, and is no report)"):
        compare({"one": run}, run / name, "one")
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    for title in ("first", "second"):
        assert title in compare({"one": run}, tmp_path / "all.html", title).read_text()


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    found = " ".join(Page(write_report(journal(tmp_path / "run")).read_text()).texts)
    assert "still running, or killed" in found and "None were taken" in found


def test_runs_are_compared_on_one_plot(tmp_path: Path) -> None:
    runs = {}
    for name, loss in (("tied", 3.5), ("untied", 3.125)):
        validations = [{"event": "validation", "step": s, "loss": loss + 1 - s / 30, "best": True} for s in (10, 30)]
        runs[name] = journal(tmp_path / name, *steps(4.5, loss), *validations)
    path = compare(runs, tmp_path / "all.html", "Two", notes=["Read it so."], columns={"extra": {"tied": "yes"}})
    html = path.read_text()
    first = html.split("<figure>")[1].split("</figure>")[0]
    assert "Validation loss" in first
    assert first.split("<ul")[0].count("<polyline") == 2
    assert first.count('<ul class="legend">') == 1
    shown = Page(html).texts
    for expected in ("Read it so.", "tied", "untied", "3.5 (step 30)", "3.125 (step 30)", "512", "yes", "-"):
        assert expected in shown


# --- snapshots of the embedding table ---------------------------------------------------------------------------------


def test_a_snapshot_holds_the_first_rows_unless_the_table_is_frozen(tmp_path: Path) -> None:
    model = LlamaForCausalLM(PRESETS["small"])
    assert save_snapshot(model, tmp_path, 7)
    expected = model.model.embed_tokens.weight[:256].detach().half().float()
    assert torch.equal(torch.from_numpy(read_snapshot(tmp_path, 7)), expected)
    model.requires_grad_(False)
    assert not save_snapshot(model, tmp_path, 8)
    assert not snapshot_path(tmp_path, 8).exists()


def test_a_damaged_snapshot_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    moments = [{"event": "embeddings", "step": s} for s in (0, 10)]
    run = journal(tmp_path / "run", *steps(4.5), *moments)
    save_snapshot(LlamaForCausalLM(PRESETS["tiny"]), run, 0)
    snapshot_path(run, 10).write_bytes(b"junk")
    shown = " ".join(Page(write_report(run).read_text()).texts)
    assert "They cannot be shown" in shown and "step-00000010" in shown


def test_rows_are_projected_onto_the_last_moments_principal_components() -> None:
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(20, 6, generator=generator) * torch.tensor([9.0, 4.0, 0.1, 0.1, 0.1, 0.1]) + 3
    found, share = project([(last * 0.5).numpy(), last.numpy()])
    places = torch.from_numpy(found)
    assert places.shape == (2, 20, 2) and 0.99 < share <= 1
    variances = places[1].var(dim=0)
    assert variances[0] > variances[1]
    assert torch.allclose(places[1].mean(dim=0), torch.zeros(2), atol=1e-4)
    distances = torch.cdist(last, last)
    assert torch.allclose(torch.cdist(places[1], places[1]), distances, atol=1.5)
    with pytest.raises(TrainingError, match="one shape"):
        project([last[:5].numpy(), last.numpy()])
    with pytest.raises(TrainingError, match="not finite"):
        project([(last * torch.nan).numpy(), last.numpy()])


def test_paths_are_drawn_with_the_tokens_texts(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer.from_text("a<\n")
    moments = [{"event": "embeddings", "step": s} for s in (0, 10)]
    run = journal(tmp_path / "run", *steps(4.5), *moments, tokens=token_texts(tokenizer))
    model = LlamaForCausalLM(PRESETS["tiny"])
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:3]
    save_snapshot(model, run, 0)
    model.model.embed_tokens.weight.data += 1
    save_snapshot(model, run, 10)
    html = write_report(run).read_text()
    drawing = html.split("How embedding rows moved")[1].split("</svg>")[0]
    assert drawing.count("<polyline") == 3
    assert "<title>&lt;</title>" in drawing and r"<title>\n</title>" in drawing


# --- parts ------------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_within(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 7 or low + span == low
    slack = 1e-6 * span + 4 * math.ulp(abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in found)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_enclosing_ticks_hold_the_data(low: float, span: float) -> None:
    found = ticks(low, low + span, enclosing=True)
    slack = 1e-6 * span + 4 * math.ulp(abs(low) + span)
    assert len(found) <= 9 and found[0] - slack <= low and low + span <= found[-1] + slack
    assert len(labels(found)) == len(found)


def test_ticks_of_steps_are_whole_and_those_of_an_axis_are_written_alike() -> None:
    assert ticks(9, 11, whole=True) == [9, 10, 11]
    assert ticks(0, 12, whole=True) == [0, 5, 10]
    assert labels(ticks(2.868, 2.875)) == ["2.868", "2.870", "2.872", "2.874"]
    assert labels(ticks(0, 1e-4, enclosing=True)) == ["0", "0.2e-4", "0.4e-4", "0.6e-4", "0.8e-4", "1.0e-4"]
    assert labels([0, 5000, 10000]) == ["0", "5k", "10k"]
    assert labels([2.8725, 2.875]) == ["2.8725", "2.8750"]


def test_one_point_is_a_dot_in_the_legend_too() -> None:
    html = figure("One", "unit", [Series("one", [(10.0, 2.0)]), Series("two", [(10.0, 3.0)], 1, dots=True)])
    legend = html.split('<ul class="legend">')[1]
    assert legend.count("<circle") == 2 and "<line" not in legend and "<polyline" not in html
    assert ">9.5<" not in html and "over steps 10 to 10" in html


def test_no_label_is_wider_than_its_margin() -> None:
    html = figure("Wide", "unit", [Series("wide", [(1.0, 123.45678), (2.0, 123.45679)])])
    texts = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6]).findall("text")
    ends = [t for t in texts if t.get("text-anchor") == "end"]
    assert all(float(t.get("x", 0)) >= 7 * len(t.text or "") for t in ends)


@pytest.mark.parametrize(("tiles", "columns"), [(1, 1), (6, 6), (7, 4), (8, 4), (9, 5)])
def test_tiles_fill_their_rows(tiles: int, columns: int) -> None:
    assert f"--columns: {columns}" in facts(("name", str(i)) for i in range(tiles))


@given(st.text(max_size=60))
def test_any_text_is_shown_as_text(value: str) -> None:
    found = page.text(value)
    assert not set("<>\"'") & set(found)
    assert all(c.isprintable() or c == "\n" for c in found)


def test_means_stay_within_and_long_curves_are_thinned() -> None:
    points = [(float(i), float(i % 2)) for i in range(5000)]
    assert all(0 <= y <= 1 for _, y in smoothed(points))
    assert smoothed(points[:1]) == points[:1]
    html = figure("Long", "unit", [Series("one", points)])
    assert html.split('points="')[1].split('"')[0].count(",") <= 400
    assert html.count("<tr>") <= 26
    assert "4,999" in html
    assert spread(range(10), 3) == [0, 4, 9]
    assert spread("ab", 3) == ["a", "b"]


def test_a_curve_without_points_is_no_figure() -> None:
    assert figure("None", "unit", [Series("none", [])]) == ""
    assert figure("One", "unit", [Series("one", [(5.0, 2.0)])]).count("<circle") == 1


def test_from_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        journal(tmp_path / name, *steps(3.0, 2.0))
    assert main(["report", str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one' / 'report.html'}\n"
    page = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(page)]) == 0
    assert "one against two" in page.read_text()
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert main(["report", str(tmp_path / "one"), "--out", str(page)]) == 2
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
