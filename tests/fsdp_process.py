"""One of two processes that train together; test_processes.py starts them.

usage: python fsdp_process.py ADDRESS INDEX FOLDER
"""

import pathlib
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa

SHAPES = {"w": (16, 6), "b": (8,)}
NUM_STEPS = 3
TX = optax.chain(jfa.fused_adamw(0.1, weight_decay=0.1, max_grad_norm=1.0))


def whole(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


@jax.jit(donate_argnums=(0, 1))
def train_step(params, state, grads):
    return jfa.step(TX, grads, state, params)


def main(address: str, index: str, folder: str) -> None:
    jax.distributed.initialize(address, 2, int(index))
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))

    def distribute(tree):
        """Every process holds the rows of its own devices."""
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, rows, x.__getitem__), tree
        )

    params, state = distribute(whole(0)), None
    state = jax.jit(TX.init)(params)
    norms = []
    for seed in range(1, 1 + NUM_STEPS):
        grads = distribute(whole(seed))
        compiled = train_step.lower(params, state, grads).compile().as_text()
        assert "all-gather" not in compiled and "all-reduce" in compiled
        params, state = train_step(params, state, grads)
        norms.append(np.asarray(state[0].report.norm))
    saved = {"norms": norms, "devices": [jax.device_count(), jax.local_device_count()]}
    for name, leaf in params.items():
        assert leaf.sharding == rows and state[0].mu[name].sharding == rows
        for shard in leaf.addressable_shards:
            saved[f"{name}:{shard.index[0].start}"] = shard.data
    np.savez(pathlib.Path(folder) / index, **saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
