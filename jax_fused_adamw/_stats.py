"""Statistics of gradients, computed and kept on the device."""

from typing import NamedTuple

import jax


class GradReport(NamedTuple):
    """What :func:`grad_stats` found, on the device.

    A tree with a NaN has ``norm`` and ``max_abs`` NaN, one with an infinity but no NaN
    has them infinite. A finite tree whose norm exceeds float32 reports the largest
    float32. Of no elements all three are zero.
    """

    norm: jax.Array  # float32[]: global L2 norm
    max_abs: jax.Array  # float32[]: largest magnitude
    nonfinite: jax.Array  # int32[]: number of NaN and infinite elements, saturating
