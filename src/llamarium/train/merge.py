"""Merge an adapter into its base model, into a checkpoint that other tools can read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from llamarium.adapters.base_check import trained_quantized
from llamarium.adapters.files import base_of, read_metadata
from llamarium.adapters.load import tokenizer_beside, with_answer_ends
from llamarium.api import Llama, load
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.options import quantized_types
from llamarium.errors import OptionError, OutputError, escape, warn_caller
from llamarium.extras import need_torch
from llamarium.hub.resolve import resolve
from llamarium.io import atomic_folder
from llamarium.keywords import shows_options
from llamarium.options.keywords import WeightKeywords
from llamarium.options.loading import LoadOptions
from llamarium.quant.formats import METHODS, chosen_type

if TYPE_CHECKING:
    from torch import Tensor

    from llamarium.adapters.merge import MergeReport


@shows_options(LoadOptions)
def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    onto: Literal["trained", "full"] = "full",
    check_base: bool = True,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **loading: Unpack[WeightKeywords],
) -> "MergeReport":
    """Merge an adapter into its base, compare the result with the unmerged adapter, and save it.

    >>> llamarium.merge("tuned/best", "merged", device="cpu").kept > 0.9
    True

    Args:
        adapter: The adapter's folder.
        out: Folder of the merged model; unchanged on failure.
        model: Base model; None reads it from the adapter.
        onto: "full" merges into the base as stored; "trained" into the base as used in training, quantized for QLoRA.
        check_base: Raise if the base is not the adapter's, or if it already contains the adapter.
        force: Replace an existing model at `out`.
        progress: Called with (bytes read, total bytes).
        **loading: As for `load`. `dtype` is also the merged model's (float32 avoids rounding).

    Returns:
        The share of the adapter's change that was kept, the base used in training, and distances; see `MergeReport`.

    Raises:
        LlamariumError: As `load`; if the adapter does not fit; if `quantize` differs from training.
        TrainingError: If half of the adapter's change is lost in rounding, or if the merged model's logits differ.
    """
    need_torch("merging an adapter")
    from llamarium.adapters.merge import merge_adapter

    adapter, out = Path(adapter), Path(out)
    base = model or base_of(adapter)
    _check_out(out, adapter, Path(base))
    over = trained_quantized(read_metadata(adapter))
    quantize = _quantize(onto, over, loading.get("quantize"), adapter)
    loading = _held_in(quantize, base, loading) if onto == "trained" else {**loading, "quantize": quantize}
    with atomic_folder(out, replace=force) as folder:
        logits = None
        if over not in (None, quantize or "none"):
            logits = _trained_logits(adapter, base, over, loading, check_base=check_base)
        llama = load(base, progress=progress, **loading)
        report = merge_adapter(llama.model, adapter, check_base=check_base, trained=logits)
        _save(llama, adapter, folder)
    return _with_bases(report, over, quantize)


def _check_out(out: Path, adapter: Path, base: Path) -> None:
    for what, path in (("the adapter", adapter), ("the base model", base)):
        if out.resolve() == path.resolve():
            raise OutputError(f"{escape(out)}: is {what}; choose another folder for the merged model")


def _save(llama: Llama, adapter: Path, folder: Path) -> None:
    """Save a merged model with the adapter's tokenizer if it has one, else the base's."""
    from llamarium.checkpoints.save import save_model

    tokenizer, recommended = llama.optional_tokenizer, llama.generation_config
    if (learned := tokenizer_beside(adapter, llama.config)) is not None:
        tokenizer, recommended = learned, with_answer_ends(recommended, llama.config, learned)
    if tokenizer is None:
        warn_caller(f"the merged model is saved without a tokenizer: {llama.why_no_tokenizer}")
    save_model(llama.model, folder, tokenizer=tokenizer, generation_config=recommended)


def _quantize(onto: str, over: str | None, asked: str | None, adapter: Path) -> str | None:
    """Return the type to quantize the base to before the merge, or None."""
    asked = None if asked is None else chosen_type("quantize", asked, METHODS)
    if onto == "full":
        return asked
    if over is None:
        raise OptionError(
            f"{escape(adapter)}: does not say what training held the base in, so it cannot be merged onto that; name "
            "it with --quantize, or leave out --onto (in Python: quantize=, onto=)"
        )
    if asked not in (None, over):
        raise OptionError(f"quantize is {asked}, and training held the base in {over}; leave one of them out")
    return None if over == "none" else over


def _trained_logits(
    adapter: Path,
    base: str | Path,
    over: str,
    loading: WeightKeywords,
    *,
    check_base: bool,
) -> "Tensor":
    """Return the logits of the adapter on the base as used in training."""
    from llamarium.adapters.merge import adapted_logits

    held = _held_in(None if over == "none" else over, base, loading)
    return adapted_logits(load(base, **held).model, adapter, check_base=check_base)


def _held_in(quantize: str | None, base: str | Path, loading: WeightKeywords) -> WeightKeywords:
    """Return options that load the base as in training, which requantized a base that is stored quantized."""
    held: WeightKeywords = {**loading, "quantize": quantize}
    if quantize is not None and quantized_types(open_checkpoint(resolve(str(base)))):
        held["dequantize"] = "load"
    return held


def _with_bases(report: "MergeReport", over: str | None, quantize: str | None) -> "MergeReport":
    """Add the types of the base in training and in the merge to the report.

    Warn if the difference between the two bases exceeds the adapter's effect.
    """
    named = {"none": "stored"}
    report = replace(report, trained_over=over and named.get(over, over), merged_onto=quantize or "stored")
    if over is None:
        return report
    if report.from_trained is None:
        return replace(report, from_trained=report.difference)
    if report.from_trained > report.effect:
        warn_caller(
            f"training held the base in {report.trained_over}: the merged model's logits are {report.from_trained:.2%} "
            f"away from those of the model that was trained, and the adapter moves them by {report.effect:.2%}; "
            '`--onto trained` (in Python: onto="trained") merges into the base that training used'
        )
    return report
