"""The frequencies of RoPE without torch are those of the model."""

import dataclasses

import numpy as np
import pytest

from llamarium.model.rope import rope_frequencies as of_the_model
from llamarium.presets import PRESETS
from llamarium.runtime.rope import rope_frequencies


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_have_the_same_bits(name):
    found, expected = rope_frequencies(PRESETS[name]), of_the_model(PRESETS[name]).numpy()
    assert found.dtype == np.float32 and np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("head_dim", [16, 48, 96, 112, 256])
def test_others_are_off_by_the_last_bits_at_most(head_dim):
    config = dataclasses.replace(PRESETS["llama-3.2-1b"], head_dim=head_dim, rope_theta=12345.0)
    for scaling in (None, config.rope_scaling):
        config = dataclasses.replace(config, rope_scaling=scaling)
        np.testing.assert_allclose(rope_frequencies(config), of_the_model(config).numpy(), rtol=1e-6, atol=0)
