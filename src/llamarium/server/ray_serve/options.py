"""Options of the Ray Serve application: model, access, limits, and number of replicas."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llamarium.adapters.model_names import base_model, public_name
from llamarium.errors import OptionError
from llamarium.keywords import unknown_names
from llamarium.options.declare import Option, declared, option
from llamarium.options.loading import LoadOptions
from llamarium.options.serving import AccessOptions, DraftOptions, EngineOptions, ServingOptions
from llamarium.server.http.access_keys import KEY_VARIABLE, access_keys
from llamarium.server.settings import Settings

_LEAST = 1e-4  # smallest share of a CPU or GPU that Ray can assign


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions, DraftOptions, EngineOptions):
    """Options with which a replica loads its model."""

    model: str | None = option(None, "the model; left out, it is the adapters' base", metavar="NAME")
    adapters: Mapping[str, str] | None = option(
        None, "folders of LoRA adapters by name, for requests to choose; `adapter` applies to all requests"
    )

    def load_options(self) -> dict[str, Any]:
        """Return the arguments of `llamarium.load`; the model defaults to the adapters' base."""
        options = {name: getattr(self, name) for name in declared(LoadOptions)}
        return options | {"model": base_model(self.model, self.adapter, self.adapters or {})}

    def engine_options(self) -> dict[str, Any]:
        """Return the arguments of `Llama.engine`, except those for speculative decoding."""
        return {"adapters": self.adapters, **{name: getattr(self, name) for name in declared(EngineOptions)}}

    def draft_options(self) -> dict[str, Any]:
        """Return the arguments of `llamarium.load` for the draft model."""
        return {"model": self.draft_model, "dtype": self.dtype, "device": self.device}


@dataclass(frozen=True, kw_only=True)
class RayOptions(ModelOptions, ServingOptions, AccessOptions):
    """The arguments of `build`; options of `llamarium serve` have the same names and meanings."""

    num_cpus: float = option(text="CPUs of a replica, and its threads", low=_LEAST)
    num_gpus: float = option(0, "GPUs of a replica", low=0)
    min_replicas: int = option(1, "replicas that always run; with 0 the first request waits for a model to load", low=0)
    max_replicas: int = option(1, "maximum number of replicas", low=1)
    target_ongoing_requests: float | None = option(
        None, "requests of a replica, on average, before another one starts (default: half of max_num_seqs)", low=_LEAST
    )
    num_fronts: int = option(1, "processes that forward requests", low=1)

    def __post_init__(self) -> None:
        """Validate values and combinations."""
        super().__post_init__()
        if self.adapter is not None and self.adapters:
            raise OptionError("adapter is in all answers, adapters are chosen by requests; give one of them")
        if self.min_replicas > self.max_replicas:
            raise OptionError(f"min_replicas is {self.min_replicas}, more than max_replicas, {self.max_replicas}")

    def of_model(self) -> ModelOptions:
        """Return the options for replicas."""
        return ModelOptions(**{name: getattr(self, name) for name in declared(ModelOptions)})

    def settings(self) -> Settings:
        """Return the server's settings; all addresses of the machine are accepted as host names."""
        alike = {name: getattr(self, name) for name in declared(ServingOptions)}
        return Settings(**alike, host="0.0.0.0", api_keys=self._keys())

    def served_names(self) -> tuple[str, ...]:
        """Return the model's served names; the first one is used in replies."""
        adapters = self.adapters or {}
        names = self.served_model_name or (public_name(self.model, self.adapter, adapters),)
        if ambiguous := [name for name in names if name in adapters]:
            raise OptionError(f"adapters: {ambiguous[0]} is what the model itself is called; choose another name")
        return names

    def _keys(self) -> tuple[str, ...]:
        keys = access_keys(self.api_key_file)
        if not keys and not self.allow_anyone:
            raise OptionError(
                "a cluster's proxies are reachable for other machines; give api_key_file or the variable "
                f"{KEY_VARIABLE}, or allow_anyone=true"
            )
        return keys


def options_of(args: Mapping[str, Any]) -> RayOptions:
    """Return the options in the arguments of an application, whose values may be strings from a command line.

    Raises:
        OptionError: If an argument is unknown, missing or invalid.
    """
    options = {declaration.public_name: declaration for declaration in declared(RayOptions).values()}
    if unknown := [name for name in args if name not in options]:
        raise OptionError(unknown_names(unknown, options))
    values = {options[name].name: _read(options[name], value) for name, value in args.items()}
    for declaration in options.values():
        if declaration.default is MISSING and declaration.name not in values:
            raise OptionError(f"{declaration.public_name} has to be given: {declaration.help}")
    return RayOptions(**values)


def _read(declaration: Option, value: Any) -> Any:
    if value is None or (declaration.repeats and isinstance(value, str)):
        return value if value is None else (value,)
    try:
        return TypeAdapter[Any](declaration.kind if declaration.choices else declaration.hint).validate_python(value)
    except ValidationError as error:
        raise OptionError(
            f"{declaration.public_name}: {error.errors()[0]['msg']}; expected {declaration.expected}"
        ) from None
