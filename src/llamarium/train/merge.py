"""Merge an adapter into its base: a plain model's folder, which every tool of the ecosystem reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from llamarium.adapters.files import base_of
from llamarium.adapters.load import tokenizer_beside, with_answer_ends
from llamarium.api import Loading, load
from llamarium.checkpoints.options import DtypeName
from llamarium.errors import OutputError, escape, warn_caller
from llamarium.extras import need_torch
from llamarium.io import atomic_folder
from llamarium.keywords import shows_options

if TYPE_CHECKING:
    from llamarium.adapters.merge import MergeReport


@shows_options(load)
def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    dtype: Literal["auto"] | DtypeName = "auto",
    check_base: bool = True,
    force: bool = False,
    **loading: Unpack[Loading],
) -> "MergeReport":
    """Merge an adapter into its base, compare the result with the adapter, and save it.

    Args:
        adapter: The adapter's folder.
        out: Folder of the merged model; complete or absent.
        model: The base; None is the one that the adapter names.
        dtype: As for `load`, and of the merged model. Rounding to float32 loses nothing.
        check_base: Refuse another base than the adapter's own, and one that contains the adapter already.
        force: Replace a model that is at `out`.
        **loading: As for `load`: device, quantize (the merged model is plain again), dequantize, strict, progress.

    Returns:
        The share of the correction in the merged weights, and the distance of its logits from the adapter's.

    Raises:
        LlamariumError: As `load`; if the adapter cannot be read or does not fit; if `out` cannot be written.
        TrainingError: If the merged model computes something else than the adapter; warns if a tenth of it is lost.
    """
    need_torch("merging an adapter")
    from llamarium.adapters.merge import merge_adapter
    from llamarium.checkpoints.save import save_model

    adapter, out = Path(adapter), Path(out)
    base = model or base_of(adapter)
    for what, path in (("the adapter", adapter), ("the base model", Path(base))):
        if out.resolve() == path.resolve():
            raise OutputError(f"{escape(out)}: is {what}; choose another folder for the merged model")
    with atomic_folder(out, replace=force) as folder:
        llama = load(base, dtype=dtype, **loading)
        report = merge_adapter(llama.model, adapter, check_base=check_base)
        tokenizer, recommended = llama.optional_tokenizer, llama.generation_config
        if (learned := tokenizer_beside(adapter, llama.config)) is not None:
            tokenizer, recommended = learned, with_answer_ends(recommended, llama.config, learned)
        if tokenizer is None:
            warn_caller(f"the merged model is saved without a tokenizer: {llama.why_no_tokenizer}")
        save_model(llama.model, folder, tokenizer=tokenizer, generation_config=recommended)
    return report
