"""Derivatives through the norm, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_fused_adamw as jfa

TREE = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[1.0], [2.0]]), "c": jnp.zeros(0)}


def stats(grads, *args, **options):
    return jfa.grad_stats(grads, *args, implementation="xla", **options)


def assert_close(got, expected, rtol=1e-5):
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=rtol), got, expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_norm_and_maximum(transform):
    norm = transform(jax.grad(lambda x: stats(x).norm))(TREE)
    assert_close(norm, jax.grad(optax.tree.norm)(TREE))
    max_abs = transform(jax.grad(lambda x: stats(x).max_abs))(TREE)
    assert_close(
        max_abs, {**jax.tree.map(jnp.zeros_like, TREE), "a": np.array([0, -1])}
    )


def test_ties_share_the_maximum():
    grad = jax.grad(lambda x: stats(x).max_abs)(jnp.array([2.0, -2.0, 1.0]))
    np.testing.assert_allclose(grad, [0.5, -0.5, 0.0])


def test_against_finite_differences_with_a_scale():
    def f(x, scale):
        total, leaves = stats(x, scale, per_leaf=True)
        return total.norm, total.max_abs, leaves.norm[:2], leaves.max_abs[:2]

    check_grads(f, (TREE, jnp.float32(2.0)), order=2, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("size", [1e-30, 1e30, 3e38])
def test_no_overflow(size):
    grad = jax.grad(lambda x: stats(x).norm)(jnp.full(4, size, jnp.float32))
    np.testing.assert_allclose(grad, np.full(4, 0.5), rtol=1e-6)


def test_zero_norm_has_zero_derivatives():
    for x in (jnp.zeros(3), {}, jnp.zeros(0)):
        grad = jax.grad(lambda x: stats(x).norm + stats(x).max_abs)(x)
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(grad))


def test_low_precision_and_vmap():
    x = jnp.array([[3.0, 4.0], [6.0, 8.0]], jnp.bfloat16)
    grad = jax.vmap(jax.grad(lambda x: stats(x).norm))(x)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(grad.astype(np.float32), [[0.6, 0.8]] * 2, rtol=1e-2)


@pytest.mark.devices(8)
@pytest.mark.parametrize("name", ["norm", "max_abs"])
def test_inside_shard_map(name):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tree = {"cut": jnp.arange(1.0, 17.0), "whole": jnp.array([20.0, 7.0])}

    def statistic(grads):
        return getattr(stats(grads), name)

    specs = {"cut": P("x"), "whole": P()}
    inside = jax.shard_map(statistic, mesh=mesh, in_specs=(specs,), out_specs=P())
    assert_close(jax.jit(jax.grad(inside))(tree), jax.grad(statistic)(tree))


@pytest.mark.parametrize("max_norm", [0.5, 100.0, np.inf])
@pytest.mark.parametrize("tree", [TREE, {"a": jnp.zeros(2)}], ids=["tree", "zeros"])
def test_clip_as_optax(max_norm, tree):
    ours = jfa.clip_by_global_norm(max_norm, implementation="xla")
    weights = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape) + 0.5, tree)

    def weighted(tx, grads):
        clipped, _ = tx.update(grads, tx.init(grads))
        return optax.tree.vdot(clipped, weights)

    got = jax.grad(lambda grads: weighted(ours, grads))(tree)
    if max_norm == np.inf or not any(x.any() for x in jax.tree.leaves(tree)):
        expected = weights  # where optax's are NaN
    else:
        theirs = optax.clip_by_global_norm(max_norm)
        expected = jax.grad(lambda grads: weighted(theirs, grads))(tree)
    assert_close(got, expected, rtol=1e-4)


@pytest.mark.parametrize("max_norm", [1.0, 1e3])
def test_step_as_optax(max_norm):
    params = {"w": jnp.array([1.0, -2.0, 3.0])}
    options = {"eps": 1e-2, "eps_root": 1e-3}
    ours = jfa.fused_adamw(0.1, max_grad_norm=max_norm, implementation="xla", **options)
    theirs = optax.chain(
        optax.clip_by_global_norm(max_norm), optax.adamw(0.1, **options)
    )

    def after_step(tx, scale):
        grads = jax.tree.map(lambda p: p**3 + scale, params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return jnp.square(updates["w"]).sum()

    got = jax.grad(lambda scale: after_step(ours, scale))(0.3)
    expected = jax.grad(lambda scale: after_step(theirs, scale))(0.3)
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    assert got != 0
