"""Faults of saved and restored optimizer state, as inputs with right answers.

A test's number is that of its case.
"""

import functools
import io
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, plain_tx, random_like

import jax_fused_adamw as jfa

TX = plain_tx(learning_rate=0.1, weight_decay=0.1, amsgrad=True)
PARAMS = random_like(
    {
        "w": jnp.zeros((3, 2)),
        "h": [jnp.zeros(5, jnp.bfloat16), None, jnp.zeros((), jnp.float16)],
    },
    seed=1,
)


@jax.jit
def train_step(params, state):
    return TX.step(params, state, params)


def train(params, state, num_steps):
    for _ in range(num_steps):
        params, state = train_step(params, state)
    return params, state


@pytest.fixture(scope="module")
def saved():
    return train(PARAMS, TX.init(PARAMS), 3)


# Each takes (tree, folder) and returns what comes back from a save and a restore.


def by_pickle(tree, folder):
    del folder
    return pickle.loads(pickle.dumps(tree))


def by_pickle_of_host_arrays(tree, folder):
    return by_pickle(jax.device_get(tree), folder)


def by_numpy(tree, folder):
    del folder
    leaves, treedef = jax.tree.flatten(tree)
    file = io.BytesIO()
    # npz knows no bfloat16: the bytes, and the dtype from the tree.
    np.savez(file, *(np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in leaves))
    file.seek(0)
    with np.load(file) as stored:
        arrays = [stored[f"arr_{i}"] for i in range(len(leaves))]
    pairs = zip(arrays, leaves, strict=True)
    return treedef.unflatten([a.view(x.dtype).reshape(x.shape) for a, x in pairs])


def by_flax(tree, folder):
    del folder
    target = jax.tree.map(jnp.zeros_like, tree)
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))


def by_flax_state_dict(tree, folder):
    del folder
    target = jax.tree.map(jnp.zeros_like, tree)
    return flax.serialization.from_state_dict(
        target, flax.serialization.to_state_dict(tree)
    )


def by_orbax(tree, folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", tree)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        return checkpointer.restore(folder / "checkpoint", target)


def by_orbax_without_waiting(tree, folder):
    """While the arrays that it saves are donated to steps in place."""
    ocp = pytest.importorskip("orbax.checkpoint")
    donated = jax.tree.map(jnp.array, tree)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, donated)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", donated)
        zeros = jax.jit(
            lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0
        )
        jax.block_until_ready(zeros(donated))
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", target)


def by_equinox(tree, folder):
    eqx = pytest.importorskip("equinox")
    eqx.tree_serialise_leaves(folder / "leaves.eqx", tree)
    like = jax.tree.map(jnp.zeros_like, tree)
    return eqx.tree_deserialise_leaves(folder / "leaves.eqx", like)


RESTORES = [
    by_pickle,
    by_pickle_of_host_arrays,
    by_numpy,
    by_flax,
    by_flax_state_dict,
    by_orbax,
    by_orbax_without_waiting,
    by_equinox,
]
every_restore = pytest.mark.parametrize("restore", RESTORES, ids=lambda f: f.__name__)


@every_restore
def test_b50_restored_state_is_the_same_pytree(restore, saved, tmp_path):
    restored = restore(saved, tmp_path)
    assert isinstance(restored[1], jfa.FusedAdamWState)
    assert_same_bits(restored, saved)
    kept = jax.jit(
        lambda keep, a, b: jax.lax.cond(keep, lambda: a, lambda: train_step(*b))
    )
    assert_same_bits(kept(True, restored, saved), saved)
    assert_same_bits(kept(False, saved, restored), train_step(*saved))


@every_restore
def test_b51_restored_arrays_step_without_being_moved(restore, saved, tmp_path):
    """Host arrays too, in and outside jit."""
    params, state = restore(saved, tmp_path)
    expected = train_step(*saved)
    assert_same_bits(train_step(params, state), expected)
    assert_same_bits(TX.step(params, state, params), expected)


@every_restore
def test_b53_resuming_equals_not_stopping(restore, tmp_path):
    start = (PARAMS, TX.init(PARAMS))
    uninterrupted = train(*start, 16)
    at_eight = train(*start, 8)
    resumed = train(*restore(at_eight, tmp_path), 8)
    assert_same_bits(resumed, uninterrupted)
    assert [leaf.dtype for leaf in jax.tree.leaves(resumed[1])] == [
        leaf.dtype for leaf in jax.tree.leaves(start[1])
    ]


# Every kind of state; what a rounding or a skip decides must survive too.
KINDS = {
    "bfloat16": dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, seed=3),
    "kept": dict(master_weights=True, ema_decay=0.9, compute_dtype=jnp.bfloat16),
    "clip": dict(max_grad_norm=0.5, learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
}


@functools.cache
def windowed_run(kind):
    """A step of a window of three, and the run's trees after 4 and 9 of them."""
    tx = jfa.accumulate(jfa.fused_adamw(**({"learning_rate": 0.1} | KINDS[kind])), 3)

    @jax.jit
    def step(params, state, loss_scale):
        scale = loss_scale.value
        grads = jax.tree.map(lambda x: x * scale.astype(x.dtype), params)
        report = jfa.grad_stats(grads, scale)
        params, state = jfa.step(tx, grads, state, params, gradient_scale=scale)
        return params, state, loss_scale.update(report)

    tree = (PARAMS, tx.init(PARAMS), jfa.DynamicLossScale(2.0, growth_interval=2))
    trees = [tree]
    for _ in range(9):
        trees.append(step(*trees[-1]))
    return step, trees[4], trees[9]


@every_restore
@pytest.mark.parametrize("kind", KINDS)
def test_b53_resuming_in_a_window_equals_not_stopping(kind, restore, tmp_path):
    step, tree, expected = windowed_run(kind)
    assert tree[1].mini_step == 1
    tree = restore(tree, tmp_path)
    for _ in range(5):
        tree = step(*tree)
    assert_same_bits(tree, expected)


def test_b50_orbax_without_target_loses_only_the_containers(saved, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved[1])
        checkpointer.wait_until_finished()
        fields = checkpointer.restore(tmp_path / "checkpoint")
    assert_same_bits(jfa.FusedAdamWState(**fields), saved[1])
