import numpy as np

from ctr_ps.ctr_model.layers.products import add_bias_relu


def test_nan_is_not_hidden_by_the_activation() -> None:
    """A diverged model must be seen, so max(nan, 0) stays nan."""
    out = np.array([[np.nan, 1.0]], np.float32)

    add_bias_relu(np.zeros(2, np.float32), out)

    assert np.isnan(out[0, 0])
