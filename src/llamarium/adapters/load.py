"""Apply adapters to a loaded model. Torch is imported only if PyTorch modules run the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarium.adapters.base_check import WeightBase, check_base
from llamarium.adapters.files import SavedAdapter, read_adapter
from llamarium.adapters.replacement import replacement_of
from llamarium.checkpoints.open import OpenedModel, read_tokenizer
from llamarium.checkpoints.tokenizers import find_tokenizer, fit_tokenizer
from llamarium.checkpoints.weights import float_weights, replaced_in_c
from llamarium.config import ModelConfig
from llamarium.errors import OptionError, escape
from llamarium.runtime.adapter import Adapter
from llamarium.runtime.loaded_model import LoadedModel
from llamarium.runtime.native.weights import Weight
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.choose import with_template


def with_adapter(loaded: LoadedModel, saved: SavedAdapter) -> LoadedModel:
    """Return a model with an adapter: applied by the runner if it supports adapters, or else to the modules, in place.

    CheckpointError if the model is another base, or contains the adapter already.
    """
    runner = loaded.runner()
    if runner.adapters is None:
        from llamarium.adapters.modules import put_whole

        put_whole(loaded.model, saved)
        return loaded.with_modules()
    base = WeightBase(runner, saved)
    check_base(base, saved, loaded.stored)
    replacement = replacement_of(saved, runner.config, runner.dequantize)
    adapted, weights = runner, dict[str, Weight]()
    if replacement is not None:
        weights = float_weights(replacement.weights, runner.weights["model.norm.weight"].type_name)
        adapted = replaced_in_c(runner, replacement.config, weights)

    def put_on_modules(model: Any) -> None:
        from llamarium.adapters.modules import put_on, put_weights

        if replacement is not None:
            put_weights(model, replacement.config, weights)
        put_on(model, saved, check_base=False)  # checked above

    corrections = WeightBase(adapted, saved).adapter()  # for the replaced weights, which may have more rows
    return loaded.with_runner(adapted.with_adapters([corrections], default=0), put_on_modules)


def read_beside(folder: Path, loaded: LoadedModel, tokenizer: Tokenizer) -> tuple[SavedAdapter, Adapter]:
    """Read one of several adapters for a model, and return it also in the runner's form.

    OptionError if the runner does not support adapters, already has a default one, or the adapter was trained with
    another dialog format; other errors as `read_adapter` and `with_adapter`.
    """
    runner = loaded.runner()
    if runner.adapters is None:
        runner.with_adapters(())  # raises the error
    if runner.adapters:
        raise OptionError("the model has an adapter already; load the base without one to choose among several")
    saved = read_adapter(folder, runner.config)
    if replacement_of(saved, runner.config, runner.dequantize) is not None:
        raise OptionError(
            f"{escape(folder)}: the adapter replaces whole weights (the embedding, the head, or saved modules), so it "
            "cannot run beside others; load it alone (adapter=), or merge it (llamarium merge)"
        )
    check_same_dialogs(tokenizer, saved, runner.config)
    base = WeightBase(runner, saved)
    check_base(base, saved, loaded.stored)
    return saved, base.adapter()


def check_same_dialogs(tokenizer: Tokenizer, saved: SavedAdapter, config: ModelConfig) -> None:
    """Check that an adapter was trained with the base's dialog format; OptionError if not."""
    learned = tokenizer_beside(saved.folder, config)
    if learned is None or learned.chat_format is None:
        return
    probe = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    if tokenizer.chat_format is None or learned.chat(probe) != tokenizer.chat(probe):
        raise OptionError(
            f"{saved.folder}: the adapter learned dialogs in another form than the base's; answer with it alone: "
            "load(adapter=...)"
        )


def tokenizer_beside(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer in an adapter's folder, with the dialog format used in training; None if there is none."""
    tokenizer = find_tokenizer(folder)
    if tokenizer is not None:
        fit_tokenizer(tokenizer, config, folder)
    return tokenizer


def read_chosen_tokenizer(
    opened: OpenedModel, saved: SavedAdapter | None, chat_template: str | Path | None
) -> OpenedModel:
    """Add a tokenizer to a model that was opened without it: its own or its adapter's, with the chat template.

    Raises as `read_tokenizer`, `tokenizer_beside` and `with_template`.
    """
    opened = read_tokenizer(opened)
    if saved is not None:
        opened = _with_tokenizer_of(opened, saved.folder)
    if chat_template is None:
        return opened
    return replace(opened, optional_tokenizer=with_template(opened.tokenizer, chat_template))


def _with_tokenizer_of(opened: OpenedModel, folder: Path) -> OpenedModel:
    """Use the tokenizer of an adapter's folder, if any, and its end-of-turn ids; raises as `tokenizer_beside`."""
    config, tokenizer = opened.checkpoint.config, tokenizer_beside(folder, opened.checkpoint.config)
    if tokenizer is None:
        return opened
    recommended = with_answer_ends(opened.generation_config, config, tokenizer)
    return replace(opened, optional_tokenizer=tokenizer, generation_config=recommended)


def with_answer_ends(recommended: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Add the end-of-turn ids of the tokenizer's dialog format to the EOS ids of a generation config.

    A generation config without EOS ids has those of `config`.
    """
    stop_ids = recommended.get("eos_token_id", config.eos_token_id)
    eos_ids = [stop_ids] if isinstance(stop_ids, int) else [*(stop_ids or ())]
    ends = () if tokenizer.chat_format is None else tokenizer.chat_format.stop_ids
    added = [i for i in ends if i not in eos_ids]
    return {**recommended, "eos_token_id": [*eos_ids, *added]} if added else recommended
