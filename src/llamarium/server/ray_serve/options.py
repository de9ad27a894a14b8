"""The options of an application of Ray Serve: the model, access, limits, and the number of replicas."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from llamarium.adapters.model_names import base_model, public_name
from llamarium.engine.proposers.lookup import POOL_BYTES
from llamarium.errors import OptionError
from llamarium.runtime.runner import CacheDtype
from llamarium.server.http.access_keys import KEY_VARIABLE, access_keys
from llamarium.server.settings import Settings
from llamarium.tokenizer.tools.forms import ToolForm

_DEFAULTS = Settings()

Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One name, or a list of them."""


_OF_ENGINE = ("adapters", "kv_memory", "max_num_seqs", "kv_cache_dtype")
_OF_DRAFTS = ("prompt_lookup", "ngram_pool", "draft_model")
_OF_DRAFT = ("dtype", "device")


class ModelOptions(BaseModel):
    """How a replica loads its model; fields without a description are those of `llamarium.load`.

    Attributes:
        adapters: Folders of LoRA adapters by name, for requests to choose; `adapter` applies to all requests.
        prompt_lookup: As `llamarium serve --prompt-lookup`.
        ngram_pool: Bytes of each API key's earlier texts in a replica, to draft from; 0 is none.
        draft_model: As `llamarium serve --draft-model`.
        kv_memory: Bytes of keys and values; None is a quarter of the memory that is free, 4 GiB at most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = None
    adapter: str | None = None
    adapters: dict[str, str] = Field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    dequantize: str = "auto"
    deterministic: bool = False
    input_bits: int | None = None
    strict: bool = False
    chat_template: str | None = None
    prompt_lookup: bool = False
    ngram_pool: int = Field(POOL_BYTES, ge=0)
    draft_model: str | None = None
    kv_memory: int | None = Field(None, gt=0)
    max_num_seqs: int = Field(_DEFAULTS.max_num_seqs, ge=1)
    kv_cache_dtype: CacheDtype = "auto"

    def load_options(self) -> dict[str, Any]:
        """Return the arguments of `llamarium.load`; without a model it is the adapters' base."""
        own = {name: getattr(self, name) for name in ModelOptions.model_fields.keys() - {*_OF_ENGINE, *_OF_DRAFTS}}
        return own | {"model": base_model(self.model, self.adapter, self.adapters)}

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments of `Llama.engine`, without what drafts."""
        return {name: getattr(self, name) for name in _OF_ENGINE}

    def draft_options(self) -> dict[str, Any]:
        """Return the arguments of `llamarium.load` for the draft model."""
        return {"model": self.draft_model} | {name: getattr(self, name) for name in _OF_DRAFT}


class RayOptions(ModelOptions):
    """The arguments of `build`; those of `llamarium serve` have the same meaning.

    Attributes:
        num_cpus: Of a replica, and its threads.
        num_gpus: Of a replica.
        min_replicas: Always running; with 0 the first request waits for a model to load.
        max_replicas: At most.
        target_ongoing_requests: Of a replica, on average, before another one starts; None is half of `max_num_seqs`.
        num_fronts: Forward requests.
    """

    num_cpus: float = Field(gt=0)
    num_gpus: float = Field(0, ge=0)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float | None = Field(None, gt=0)
    num_fronts: int = Field(1, ge=1)

    served_model_name: Names = ()
    api_key_file: Path | None = None
    allow_anyone: bool = False
    allowed_host: Names = ()
    cors_origin: Names = ()
    max_queue: int = Field(_DEFAULTS.max_queue, ge=0)
    max_context: int | None = Field(None, ge=1)
    request_timeout: float = Field(_DEFAULTS.request_timeout_s or 0, ge=0)
    drain_timeout: float = Field(_DEFAULTS.drain_timeout_s, ge=0)
    tool_form: ToolForm | None = None
    strict_fields: bool = False
    open_objects: bool = False
    log_format: Literal["text", "json"] = _DEFAULTS.log_format

    def of_model(self) -> ModelOptions:
        """Return a replica's part."""
        return ModelOptions(**{name: getattr(self, name) for name in ModelOptions.model_fields})

    def settings(self) -> Settings:
        """Return a server's settings; it accepts all addresses of its machine."""
        return Settings.of(self, host="0.0.0.0", api_keys=self._keys())

    def served_names(self) -> tuple[str, ...]:
        """Return the model's names for requests; the first is used in replies."""
        names = self.served_model_name or (public_name(self.model, self.adapter, self.adapters),)
        if both := [name for name in names if name in self.adapters]:
            raise OptionError(f"adapters: {both[0]} is what the model itself is called; choose another name")
        return names

    def _keys(self) -> tuple[str, ...]:
        keys = access_keys(self.api_key_file)
        if not keys and not self.allow_anyone:
            raise OptionError(
                "a cluster's proxies are reachable for other machines; give api_key_file or the variable "
                f"{KEY_VARIABLE}, or allow_anyone=true"
            )
        return keys


def options_of(args: dict[str, Any]) -> RayOptions:
    """Read the arguments of an application."""
    try:
        found = RayOptions.model_validate(args)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        known = ", ".join(RayOptions.model_fields)
        raise OptionError(f"{name}: {fault['msg']}; the application takes {known}") from None
    if found.adapter is not None and found.adapters:
        raise OptionError("adapter is in all answers, adapters are chosen by requests; give one of them")
    if found.min_replicas > found.max_replicas:
        raise OptionError(f"min_replicas is {found.min_replicas}, more than max_replicas, {found.max_replicas}")
    return found
