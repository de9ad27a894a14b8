"""Fine-tuning: all weights of a model, or LoRA adapters on frozen weights.

The rows are dialogs in which the assistant's tokens are learned; the training loop is that of pretraining (`run`). A
checkpoint contains the whole model in full fine-tuning, else the adapter in PEFT's layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from safetensors.torch import load_file

from llamarium.adapters.base_check import LINEARS_KEY, QUANTIZED_KEY, STORED_KEY, same_linears
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.files import PREFIX, base_of, read_metadata
from llamarium.adapters.load import tokenizer_beside, with_answer_ends
from llamarium.adapters.lora import apply_lora
from llamarium.adapters.modules import load_adapter
from llamarium.adapters.save import adapter_metadata, adapter_tensors, save_adapter
from llamarium.checkpoints.checkpoint import Checkpoint, stored_fingerprint
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.tokenizers import find_tokenizer, load_tokenizer
from llamarium.errors import TrainingError, escape
from llamarium.file_names import ADAPTER
from llamarium.hub.folders import is_adapter
from llamarium.hub.resolve import resolve
from llamarium.kernels.cpu_half import cpu_has_native_bf16
from llamarium.model import LlamaForCausalLM
from llamarium.options.loading import DtypeName, LoadOptions
from llamarium.runtime.device import choose_device
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.choose import with_format
from llamarium.train.config import FILES_OF_ROWS, FinetuneConfig
from llamarium.train.data.batch import SplitRows
from llamarium.train.data.dialog_rows import DialogRows, preview
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.pretrain import SaveAndRestore, fitting_tokenizer, load_whole, train_all
from llamarium.train.setup import Setup, with_precision, with_steps

if TYPE_CHECKING:
    from rich.text import Text

_Rows = TypeVar("_Rows", bound=DialogRows)
_Config = TypeVar("_Config", bound=FinetuneConfig)
_Read = Callable[[_Config, Tokenizer], SplitRows]


def prepare(
    config: _Config, process_group: ProcessGroup = SINGLE_PROCESS, read: "_Read[_Config] | None" = None
) -> Setup:
    """Load the base and the rows (by `read`; None reads dialogs), and add the adapters.

    LlamariumError if the base or the data cannot be read, or if the settings conflict.
    """
    check(config)
    config = with_precision(with_base(config), process_group)
    checkpoint, tokenizer = _open(config)
    rows, validation = (read_rows(config, tokenizer, DialogRows) if read is None else read(config, tokenizer)), None
    if config.validation > 0:
        rows, validation = rows.split(config.validation)
    config = with_steps(config, rows)
    chat = tokenizer.chat_format is not None and config.chat_format != "none"
    device = str(choose_device(config.device))
    if config.method == "full":
        model, recommended = load_whole(checkpoint, device), checkpoint.generation_config
        if chat:
            recommended = with_answer_ends(recommended, model.config, tokenizer)
        save, restore = train_all(model, tokenizer, recommended, process_group)
    else:
        options = LoadOptions(
            dtype=base_dtype(config, device),
            device=device,
            quantize=None if config.quantize == "none" else config.quantize,
            dequantize=config.dequantize,
            join=False,
        )
        model, _ = load_model(checkpoint, options)
        save, restore = _train_adapters(model, tokenizer, config, process_group, stored_fingerprint(checkpoint))
    return Setup(config, model, tokenizer, rows, validation, save, restore, chat, process_group=process_group)


def with_base(config: _Config) -> _Config:
    """Set `model` to the base model of `adapter`, unless a model is given.

    LlamariumError if the adapter cannot be read; TrainingError if `model` is an adapter.
    """
    if is_adapter(Path(config.model).expanduser()):
        name = escape(config.model)
        raise TrainingError(f"{name}: is a LoRA adapter; go on from it with --adapter {name} (in Python: adapter=)")
    if not config.adapter or config.model != type(config).default("model"):
        return config
    return replace(config, model=base_of(Path(config.adapter).expanduser()))


def _open(config: FinetuneConfig) -> tuple[Checkpoint, Tokenizer]:
    path = resolve(config.model)
    checkpoint, tokenizer = open_checkpoint(path), find_tokenizer(path)
    if config.adapter:
        tokenizer = tokenizer_beside(Path(config.adapter).expanduser(), checkpoint.config) or tokenizer
    fitting = fitting_tokenizer(config.model, path, checkpoint, tokenizer, config.context)
    return checkpoint, with_chat_format(config, fitting)


def base_dtype(config: FinetuneConfig, device: str) -> Literal["auto"] | DtypeName:
    """Return the dtype to load the frozen base in; "auto" is the stored dtype.

    On a CPU it is float32 unless the CPU has native bfloat16 and the run computes in it: without native support,
    bfloat16 matrix products are many times slower.
    """
    if config.dtype != "auto":
        return config.dtype
    halves = cpu_has_native_bf16() and config.chosen_precision == "bfloat16"
    return "auto" if device != "cpu" or halves else "float32"


def _train_adapters(
    model: LlamaForCausalLM, tokenizer: Tokenizer, config: FinetuneConfig, process_group: ProcessGroup, stored: str
) -> SaveAndRestore:
    metadata = adapter_metadata(model, config.model, stored, config.quantize)  # before the base is wrapped
    if config.adapter:
        load_adapter(model, Path(config.adapter).expanduser(), trainable=True)
    else:
        names = config.target_modules
        lora = LoRAConfig(
            r=config.rank, alpha=config.alpha, dropout=config.dropout,
            target_modules=names if names == "all-linear" else tuple(part.strip() for part in names.split(",")),
            use_rslora=config.rslora, use_dora=config.dora,
        )  # fmt: skip
        apply_lora(model, lora, seed=config.seed)

    def save(folder: Path) -> None:
        save_adapter(
            model, folder, base_model=config.model, metadata=metadata, full_tensor=process_group.full_tensor,
            tokenizer=tokenizer,
        )  # fmt: skip

    return save, lambda folder: restore_adapter(model, folder, process_group, metadata)


def with_chat_format(config: FinetuneConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with the run's dialog format; ChatFormatError if the vocabulary lacks its control tokens."""
    return tokenizer if config.chat_format == "none" else with_format(tokenizer, config.chat_format)


def read_rows(config: FinetuneConfig, tokenizer: Tokenizer, kind: type[_Rows]) -> _Rows:
    """Read and pack the examples, with the tokenizer of `with_chat_format`; TrainingError for invalid examples."""
    return kind.from_file(
        config.data,
        tokenizer,
        config.context,
        seed=config.seed,
        truncate=config.truncate,
        chat=config.chat_format != "none",
        packing=config.packing,
        reading=config.reading,
    )


def first_row(config: FinetuneConfig, kind: type[DialogRows] = DialogRows) -> "Text":
    """Format the first row, with its learned tokens marked; errors as `read_rows`."""
    tokenizer = bare_tokenizer(config)
    return preview(read_rows(config, tokenizer, kind).batch(0, [0]), tokenizer)


def bare_tokenizer(config: FinetuneConfig) -> Tokenizer:
    """Load the tokenizer of a run without loading the model."""
    check(config)
    return with_chat_format(config, load_tokenizer(with_base(config).model))


@torch.no_grad()
def restore_adapter(
    model: LlamaForCausalLM,
    folder: Path,
    process_group: ProcessGroup = SINGLE_PROCESS,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Load a saved adapter into the model's adapters, in place.

    `metadata` is the `adapter_metadata` of the model's base. TrainingError if the base or the tensors' names, shapes or
    dtypes differ.
    """
    written = read_metadata(folder)
    if metadata is not None and not _same_base(written, metadata):
        raise TrainingError(f"{folder}: the adapter was trained on another base than the one that is loaded now")
    saved = load_file(folder / ADAPTER)
    held = {f"{PREFIX}{key}": tensor for key, tensor in adapter_tensors(model).items()}
    expected = {key: (torch.float32, tensor.shape) for key, tensor in held.items()}
    if {key: (tensor.dtype, tensor.shape) for key, tensor in saved.items()} != expected:
        raise TrainingError(f"{folder}: holds an adapter of other modules, another rank or dtype than this run's")
    for key, tensor in held.items():
        tensor.copy_(process_group.distribute(saved[key], tensor))


def _same_base(written: Mapping[str, str], here: Mapping[str, str]) -> bool:
    has_both = LINEARS_KEY in written and LINEARS_KEY in here
    linears = same_linears(written[LINEARS_KEY], here[LINEARS_KEY]) if has_both else None
    how_held = (LINEARS_KEY, STORED_KEY, QUANTIZED_KEY)
    others = (written.get(key, value) == value for key, value in here.items() if key not in how_held)
    return linears is not False and all(others)


def check(config: FinetuneConfig) -> None:
    """Check settings that depend on each other; TrainingError if they conflict."""
    if not config.data:
        raise TrainingError(
            f"no data; expected a {FILES_OF_ROWS} of examples, a folder of them, or org/name on the hub"
        )
    if "lm_head" in config.target_modules and config.dropout > 0:
        raise TrainingError("target_modules has lm_head, whose inputs cannot be dropped out; set dropout to 0")
