"""Meshes of as many devices as there are, and trees on them.

On eight devices: (8,), (4, 2), (2, 2, 2); on one, all axes have size 1, where nothing
is communicated and everything else holds.
"""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa

KINDS = ("Auto", "Explicit")


def make_mesh(*axes: str, kind: str = "Auto") -> jax.sharding.Mesh:
    """All devices, two of them along each axis but the first as far as they go."""
    rest, shape = jax.device_count(), []
    for _ in axes[1:]:
        shape.append(2 if rest % 2 == 0 else 1)
        rest //= shape[-1]
    kinds = (getattr(AxisType, kind),) * len(axes)
    return jax.make_mesh((rest, *shape), axes, axis_types=kinds)


def place(mesh, tree, specs):
    """Copies of host arrays on the mesh; ``specs`` is a tree of theirs or one spec."""
    if isinstance(specs, P):
        specs = dict.fromkeys(tree, specs)

    def put(leaf, spec):
        # As on results, since P() is not P(None) to jit's cache.
        if AxisType.Explicit in mesh.axis_types:
            spec = P(*spec, *(None,) * (leaf.ndim - len(spec)))
        return jax.device_put(np.array(leaf), NamedSharding(mesh, spec))

    return {name: put(leaf, specs[name]) for name, leaf in tree.items()}


def is_placed(leaf, mesh, spec) -> bool:
    return leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


def zero_1(tx, mesh, params):
    """Parameters whole on the mesh in use, and a state cut along axis ``x``."""
    whole = place(mesh, params, P())
    shardings = jfa.state_shardings(tx, place(mesh, params, P("x")))
    return whole, jax.jit(tx.init, out_shardings=shardings)(whole)
