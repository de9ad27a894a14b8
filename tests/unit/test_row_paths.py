"""Rows of the embedding table over a run are projected onto the last checkpoint's principal components."""

import numpy as np
import pytest

from llamarium.errors import TrainingError
from llamarium.train.row_paths import project


def test_rows_are_projected_onto_the_last_moments_principal_components() -> None:
    last_RD = np.random.default_rng(0).normal(size=(20, 6)) * (9.0, 4.0, 0.1, 0.1, 0.1, 0.1) + 3
    places_SR2, share = project([last_RD.astype(np.float32) * 0.5, last_RD.astype(np.float32)])
    assert places_SR2.shape == (2, 20, 2) and 0.99 < share <= 1
    variances = places_SR2[1].var(axis=0)
    assert variances[0] > variances[1]
    assert np.allclose(places_SR2[1].mean(axis=0), 0, atol=1e-4)

    def distances(rows: np.ndarray) -> np.ndarray:
        return np.linalg.norm(rows[:, None] - rows[None], axis=-1)

    assert np.allclose(distances(places_SR2[1]), distances(last_RD), atol=1.5)


def test_snapshots_of_several_shapes_or_without_finite_values_are_refused() -> None:
    rows_RD = np.ones((20, 6), np.float32)
    with pytest.raises(TrainingError, match="one shape"):
        project([rows_RD[:5], rows_RD])
    with pytest.raises(TrainingError, match="not finite"):
        project([rows_RD * np.nan, rows_RD])
