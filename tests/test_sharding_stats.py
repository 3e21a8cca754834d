"""Statistics, clip and skip on a mesh: global, one all-reduce for each set of axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import is_placed, make_mesh
from meshes import place as place_on
from test_sharding import SPECS, VALUES

import jax_fused_adamw as jfa


def place(mesh, tree):
    return place_on(mesh, tree, SPECS)


def is_reduced_once_for_each_set_of_axes(compiled, mesh) -> bool:
    """The sets are x and y together, x alone, y alone."""
    count = count_ops(compiled, "all-reduce")
    return count == 3 if 1 not in mesh.shape.values() else count <= 3


NORM = np.sqrt(sum(np.sum(v.astype(np.float64) ** 2) for v in VALUES.values()))


@pytest.mark.parametrize("per_leaf", [False, True])
def test_norm_is_global_and_whole_leaves_count_once(mesh, per_leaf):
    stats = jax.jit(lambda grads: jfa.grad_stats(grads, per_leaf=per_leaf))
    grads = place(mesh, VALUES)
    compiled = stats.lower(grads).compile()
    assert count_ops(compiled, "all-gather") == 0
    assert is_reduced_once_for_each_set_of_axes(compiled, mesh)
    report = stats(grads)
    if per_leaf:
        report, of_leaves = report
        expected = [
            np.linalg.norm(VALUES[k].astype(np.float64)) for k in sorted(VALUES)
        ]
        np.testing.assert_allclose(of_leaves.norm, expected, rtol=2e-7)
    np.testing.assert_allclose(report.norm, NORM, rtol=2e-7)
    np.testing.assert_array_max_ulp(report.norm, jfa.grad_stats(VALUES).norm, 2)
    assert report.max_abs == max(np.abs(v).max() for v in VALUES.values())
    assert report.nonfinite == 0


def test_b42_norm_of_a_leaf_over_all_devices(mesh):
    ones = jax.device_put(jnp.ones(64), NamedSharding(mesh, P(("x", "y"))))
    assert jax.jit(jfa.grad_stats)(ones).norm == 8.0


@pytest.mark.parametrize("name", VALUES)
def test_nonfinite_value_on_one_shard_skips_everywhere(mesh, name):
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    bad = {**VALUES, name: VALUES[name].copy()}
    bad[name].flat[-1] = np.nan
    params, grads = place(mesh, VALUES), place(mesh, bad)
    new_params, state = jax.jit(tx.step)(grads, tx.init(params), params)
    assert_same_bits(jax.device_get(new_params), VALUES)
    assert (state.count, state.skipped, state.report.nonfinite) == (0, 1, 1)


def test_clipped_step_equals_one_device_given_the_same_report(mesh):
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0, weight_decay=0.1)
    report = jfa.grad_stats(VALUES)
    expected = tx.step(VALUES, tx.init(VALUES), VALUES, report=report)
    params, grads = place(mesh, VALUES), place(mesh, VALUES)
    step = jax.jit(lambda p, s, g, r: tx.step(g, s, p, report=r))
    sharded = step(params, tx.init(params), grads, report)
    assert_same_bits(jax.device_get(sharded), jax.device_get(expected))


def test_donated_clipped_step_gathers_and_copies_nothing(mesh):
    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0)
    params, grads = place(mesh, VALUES), place(mesh, VALUES)
    step = jax.jit(lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1))
    compiled = step.lower(params, tx.init(params), grads).compile()
    assert count_ops(compiled, "all-gather") == 0
    assert is_reduced_once_for_each_set_of_axes(compiled, mesh)
    assert copies(compiled) == 0


def test_members_stay_where_they_are(mesh):
    values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
    grads = jax.device_put(values, NamedSharding(mesh, P("x")))
    stats = jax.jit(jax.vmap(jfa.grad_stats))
    assert count_ops(stats.lower(grads).compile(), "all-gather") == 0
    report = stats(grads)
    assert is_placed(report.norm, mesh, P("x"))
    expected = [jfa.grad_stats(row).norm for row in values]
    np.testing.assert_array_equal(report.norm, expected)


@pytest.mark.parametrize("run", ["stats", "per_leaf", "shared_leaf", "clip", "step"])
def test_members_on_an_explicit_mesh(run):
    """What is computed from their reports is checked against where they lie."""
    explicit = make_mesh("x", kind="Explicit")
    values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)
    tx, params = jfa.fused_adamw(0.1, max_grad_norm=1.0), jnp.ones(100)
    clip = jfa.clip_by_global_norm(1.0)
    results = {
        "stats": jfa.grad_stats,
        "per_leaf": lambda g: jfa.grad_stats(g, per_leaf=True),
        "shared_leaf": lambda g: jfa.grad_stats((params, g)),
        "clip": lambda g: clip.update(g, clip.init(g)),
        "step": lambda g: tx.step(g, tx.init(params), params),
    }[run]

    def doubled(grad):
        return jax.tree.map(lambda x: x + x, results(grad))

    expected = jax.device_get(jax.vmap(doubled)(values))
    with jax.set_mesh(explicit):
        grads = jax.device_put(values, NamedSharding(explicit, P("x")))
        compiled = jax.jit(jax.vmap(doubled)).lower(grads).compile()
        got = compiled(grads)
    if run != "step":  # which runs where the moments lie: made here, on no axis
        assert count_ops(compiled, "all-gather") == 0
    assert all(x.sharding.spec[0] == "x" for x in jax.tree.leaves(got))
    assert_same_bits(jax.device_get(got), expected)


@pytest.mark.parametrize("manual", [("x", "y"), ("x",)])
def test_inside_shard_map(manual):
    """A leaf that varies is one array along those axes; others count once."""
    mesh = make_mesh("x", "y")
    specs = {
        name: P(*(entry if entry in manual else None for entry in spec))
        for name, spec in {**SPECS, "flat": P("x")}.items()
    }
    inside = jax.shard_map(
        jfa.grad_stats,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(),
        axis_names=set(manual),
    )
    report = jax.jit(inside)({k: jnp.asarray(v) for k, v in VALUES.items()})
    np.testing.assert_allclose(report.norm, NORM, rtol=3e-7)
    assert report.nonfinite == 0


def test_padding_of_uneven_parts_is_not_counted():
    """XLA may cut 37 elements into 8 parts of 5, the last one filled up."""
    mesh = make_mesh("x")
    values = np.arange(1.0, 41.0, dtype=np.float32)
    values[37:] = np.nan
    y = jax.device_put(values, NamedSharding(mesh, P("x")))
    report = jax.jit(lambda y: jfa.grad_stats(y[:37]))(y)
    np.testing.assert_allclose(report.norm, np.linalg.norm(values[:37]), rtol=1e-6)
    assert report.nonfinite == 0
    rows = jax.device_put(np.tile(values, (2, 1)), NamedSharding(mesh, P(None, "x")))
    batched = jax.jit(jax.vmap(lambda y: jfa.grad_stats(y[:37])))(rows)
    np.testing.assert_array_equal(batched.norm, [report.norm] * 2)


@pytest.mark.parametrize("outer", ["vmap", "shard_map"])
def test_vmap_and_shard_map_together(outer):
    mesh = make_mesh("x")
    values = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    values[1, 5] = np.nan

    def over_devices(function, spec):
        return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=P())

    if outer == "vmap":
        stats = jax.vmap(over_devices(jfa.grad_stats, P("x")))
    else:
        stats = over_devices(jax.vmap(jfa.grad_stats), P(None, "x"))
    report = jax.jit(stats)(values)
    expected = [jfa.grad_stats(row) for row in values]
    for name in report._fields:
        np.testing.assert_allclose(
            getattr(report, name), [getattr(e, name) for e in expected], rtol=2e-7
        )


def test_scale_that_varies_over_devices_is_refused():
    mesh = make_mesh("x")
    inside = jax.shard_map(
        lambda g, scale: jfa.grad_stats(g, scale[0]),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    with pytest.raises(TypeError, match="gradient_scale varies over the mesh axes"):
        jax.jit(inside)(jnp.ones(3), jnp.ones(8))


def test_reduced_report_where_nothing_is_known_to_vary():
    """With ``check_vma=False``, the recipe of the README."""
    mesh = make_mesh("x")
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0)
    grads = np.random.default_rng(0).normal(size=64).astype(np.float32)
    grads[5] = np.nan

    def step(grads):
        own = jfa.grad_stats(grads)
        report = jfa.GradReport(
            jnp.sqrt(jax.lax.psum(own.norm**2, "x")),
            jax.lax.pmax(own.max_abs, "x"),
            jax.lax.psum(own.nonfinite, "x"),
        )
        params, state = tx.step(grads, tx.init(grads), grads, report=report)
        return params, state.skipped[None], report

    inside = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=P("x"),
        out_specs=(P("x"), P("x"), P()),
        check_vma=False,
    )
    params, skipped, report = jax.jit(inside)(grads)
    assert_same_bits(params, grads)
    assert skipped.tolist() == [1] * jax.device_count() and report.nonfinite == 1
    report = jax.jit(inside)(np.nan_to_num(grads))[2]
    np.testing.assert_allclose(report.norm, np.linalg.norm(np.nan_to_num(grads)), 1e-6)
