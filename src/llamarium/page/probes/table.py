"""The page's probes by the path of their route: the function, and the field that errors are attributed to.

The routes (`routes/probes.py`), the validation of queries, and the TypeScript types (`schema/everything.py`) are
generated from it.
"""

from collections.abc import Mapping

from llamarium.page.compare import probes as compare
from llamarium.page.probes import interventions, layers, model, rope, sampling, text, translation, weights
from llamarium.page.probes.probe import Probe

OF_PASS: Mapping[str, Probe] = {
    "activations/{name}": Probe(layers.activations, "name"),
    "next": Probe(sampling.following, "position"),
    "sampler": Probe(sampling.sampler, "position"),
    "score": Probe(sampling.score, "start"),
    "cost": Probe(sampling.cost, "id"),
    "heads": Probe(layers.heads, "layer"),
    "heads/added": Probe(layers.heads_added, "layer"),
    "head_kinds": Probe(layers.head_kinds, "id"),
    "neurons": Probe(layers.neurons, "k"),
    "attribution": Probe(layers.attribution, "token_id"),
    "lens": Probe(layers.lens, "k"),
    "lens/grid": Probe(layers.lens_grid, "token_id"),
    "picture": Probe(layers.picture, "stop"),
    "distances": Probe(rope.distances, "stop"),
    "matrix": Probe(weights.matrix, "linear"),
    "inputs": Probe(weights.inputs, "linear"),
    "errors": Probe(weights.errors, "quantize"),
    "lesson": Probe(weights.lesson, "id"),
    "edited": Probe(interventions.edited, "edits"),
    "patches": Probe(interventions.patches, "source_ids"),
    "compare": Probe(compare.compare, "side"),
    "bits": Probe(compare.bits, "of"),
    "moment": Probe(compare.moment, "layer"),
    "moment/pattern": Probe(compare.moment_pattern, "layer"),
}
"""Probes of a pass, below `/inspect/passes/{pass_id}/`."""

OF_MODEL: Mapping[str, Probe] = {
    "model": Probe(model.model, "shape"),
    "source": Probe(model.source, "name"),
    "weights": Probe(model.weight, "key"),
    "rows": Probe(text.rows, "ids"),
    "tokens": Probe(text.tokens, "text"),
    "word": Probe(text.word, "word"),
    "neighbors": Probe(text.neighbors, "word"),
    "similarity": Probe(text.similarity, "word"),
    "rope": Probe(rope.rope, "position"),
    "codes": Probe(weights.codes, "quantize"),
    "linear_probe": Probe(layers.linear_probe, "task"),
    "after_error": Probe(layers.after_error, "kind"),
    "translations": Probe(translation.translations, "text"),
    "compare": Probe(compare.sides, "side"),
    "runs": Probe(compare.runs, "run"),
    "runs/{run}/rows": Probe(compare.run_rows, "ids"),
    "runs/{run}/history": Probe(compare.run_history, "run"),
}
"""Probes of the model, below `/inspect/`."""
