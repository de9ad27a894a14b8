"""Meta's own folders of Llama 2, from the shell and from Python; transformers reads what is exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import llamarium
from llamarium.cli.main import main
from sentencepiece_models import library, trained

pytestmark = pytest.mark.torch


def test_a_folder_of_llama_2_reads_text_and_is_exported(
    model_files: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Meta's own: params.json, consolidated.00.pth and SentencePiece's tokenizer.model."""
    data = trained(byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity")
    theirs = library(data)
    folder = model_files(vocab_size=len(theirs), bos_token_id=1, eos_token_id=(2,)).meta()
    (folder / "tokenizer.model").write_bytes(data)
    tokenizer = llamarium.load(folder, device="cpu").tokenizer
    text = " a  the dog"
    assert tokenizer.encode(text) == [1, *theirs.encode(text)]
    assert main(["tokenize", text, "-m", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["ids"] == theirs.encode(text)
    assert main(["export", "-m", str(folder), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert main(["export", "-m", str(folder), "--format", "gguf", "--out", str(tmp_path / "m.gguf")]) == 0
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        assert llamarium.load(path, device="cpu").tokenizer.encode(text) == tokenizer.encode(text)
    text = text.strip()  # transformers puts no space before one that is there; the library does
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text).input_ids == tokenizer.encode(text)
