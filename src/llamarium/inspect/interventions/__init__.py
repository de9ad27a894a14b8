"""Interventions: edits, experiments, activations of a second prompt, and their effect; and one step of training.

What PyTorch computes is imported at its first use. OptionError if PyTorch is not installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from llamarium.extras import need_torch

if TYPE_CHECKING:
    from llamarium.inspect.interventions.edits import edited, effect_of, scale, steer
    from llamarium.inspect.interventions.experiments import Experiment, begin, trace_experiment
    from llamarium.inspect.interventions.patching import PatchGrid
    from llamarium.inspect.interventions.variants import variant_bytes, variant_of
    from llamarium.inspect.probes.learning import learn, lesson_bytes

__all__ = ["Experiment", "PatchGrid", "begin", "edited", "effect_of", "learn", "lesson_bytes", "scale", "steer",
           "trace_experiment", "variant_bytes", "variant_of"]  # fmt: skip

_PLACES = {
    ("interventions.edits", "an edit"): ("edited", "effect_of", "scale", "steer"),
    ("interventions.experiments", "an experiment"): ("Experiment", "begin", "trace_experiment"),
    ("interventions.patching", "a patch"): ("PatchGrid",),
    ("interventions.variants", "a variant"): ("variant_bytes", "variant_of"),
    ("probes.learning", "a step of training"): ("learn", "lesson_bytes"),
}


def __getattr__(name: str) -> Any:
    for (module, purpose), names in _PLACES.items():
        if name in names:
            need_torch(purpose)
            return getattr(importlib.import_module(f"llamarium.inspect.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
