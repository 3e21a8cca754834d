"""float64 gradients in statistics and clipping, and float64 leaves in all the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, count_ops
from jax.sharding import PartitionSpec as P
from low_precision import each_implementation, needs_kernel, steps
from meshes import KINDS, is_placed, make_mesh, place

import jax_fused_adamw as jfa

FLOAT32_MAX = np.finfo(np.float32).max


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


with_x64 = pytest.mark.usefixtures("x64")


def normal(seed, shape=(16, 8), dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# --- What is refused ------------------------------------------------------------------


def test_without_x64_it_is_refused():
    with pytest.raises(TypeError, match=r"params\['w'\].*float64.*jax_enable_x64"):
        jfa.fused_adamw(0.1).init({"w": np.ones(3)})
    with pytest.raises(TypeError, match=r"grads\['w'\].*float64.*cast") as caught:
        jfa.grad_stats({"w": np.ones(3)})
    assert "jax_enable_x64" not in str(caught.value)


@with_x64
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_wider_than_its_parameter_is_refused(dtype):
    tx = jfa.fused_adamw(0.1)
    params = {"w": jnp.ones(3, dtype)}
    with pytest.raises(TypeError, match=rf"grads\['w'\].*float64.*{dtype}.*astype"):
        tx.update({"w": jnp.ones(3)}, tx.init(params), params)


@with_x64
def test_state_of_a_narrower_parameter_is_refused():
    tx = jfa.fused_adamw(0.1)
    params = {"w": jnp.ones(3)}
    state = tx.init({"w": jnp.ones(3, jnp.float32)})
    with pytest.raises(TypeError, match=r"state.mu\['w'\].*float32, expected float64"):
        tx.update(params, state, params)


# --- Statistics -----------------------------------------------------------------------

GRADIENTS = {
    "float32 rounding": ([3.0 + 1e-12, 4.0, 1e-300], (5.0, 4.0, 0)),
    "beyond float32": ([1e300, -2e300, 1.0], (FLOAT32_MAX, FLOAT32_MAX, 0)),
    "one beyond": ([0.0, 0.0, -1e300], (FLOAT32_MAX, FLOAT32_MAX, 0)),
    "just beyond": ([float(FLOAT32_MAX) * (1 + 1e-9), 0.0], (FLOAT32_MAX,) * 2 + (0,)),
    "infinite": ([1e300, np.inf, -np.inf], (np.inf, np.inf, 2)),
    "NaN": ([1e300, np.inf, np.nan], (np.nan, np.nan, 2)),
}


@with_x64
@each_implementation
@pytest.mark.parametrize("name", GRADIENTS)
def test_statistics(name, implementation):
    values, expected = GRADIENTS[name]
    grads = {"z": jnp.array(values), "a": jnp.zeros(5, jnp.bfloat16)}
    report = jfa.grad_stats(grads, implementation=implementation)
    assert [x.dtype for x in report] == [jnp.float32, jnp.float32, jnp.int32]
    np.testing.assert_array_equal(report, expected)


@with_x64
@each_implementation
def test_statistics_are_those_of_the_rounded_gradients(implementation):
    grads = {"w": normal(1), "b": normal(2, (5000,)) * 1e-3}
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    got, expected = (
        jfa.grad_stats(tree, 3.0, per_leaf=True, implementation=implementation)
        for tree in (grads, rounded)
    )
    assert_same_bits(got, expected)


@with_x64
def test_derivative_of_the_norm():
    grads = normal(1)

    def norm(x):
        return jfa.grad_stats(x, implementation="xla").norm

    got = jax.grad(norm)(grads)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, grads / jnp.linalg.norm(grads), rtol=1e-5)


@with_x64
@each_implementation
def test_clip_by_global_norm(implementation):
    """In float64 by the float32 norm: the digits of the gradients stay."""
    tx = jfa.clip_by_global_norm(0.5, implementation=implementation)
    grads = {"z": normal(1), "a": normal(2, dtype=np.float32)}
    updates, state = tx.update(grads, tx.init(grads))
    assert updates["z"].dtype == jnp.float64 and updates["a"].dtype == jnp.float32
    norm = np.float64(state.report.norm)
    np.testing.assert_allclose(updates["z"], grads["z"] / norm * 0.5, rtol=1e-15)
    tx = jfa.clip_by_global_norm(1e9, implementation=implementation)
    unclipped, _ = tx.update(grads, tx.init(grads))
    assert_same_bits(unclipped, grads)


@with_x64
@each_implementation
def test_clip_of_what_float32_cannot_hold(implementation):
    tx = jfa.fused_adamw(0.1, b1=0.0, max_grad_norm=1.0, implementation=implementation)
    params = jnp.ones(3)
    _, state = tx.step(jnp.array([1e39, -1e39, 0.0]), tx.init(params), params)
    assert int(state.skipped) == 0 and state.report.norm == FLOAT32_MAX
    # Each element counts as the largest float32, the norm is sqrt(2) of that.
    expected = np.array([1e39, -1e39, 0.0]) / (np.sqrt(2.0) * float(FLOAT32_MAX))
    np.testing.assert_allclose(state.mu, expected, rtol=1e-6)


@with_x64
@each_implementation
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e300, 1e-300, np.nan])
def test_a_scale_that_float32_has_no_place_for(scale, implementation):
    tx = jfa.fused_adamw(0.1, skip_nonfinite=True, implementation=implementation)
    params = normal(1)
    new, state = tx.step(params, tx.init(params), params, gradient_scale=scale)
    assert int(state.skipped) == 1
    assert_same_bits(new, params)
    tx = jfa.fused_adamw(0.1, implementation=implementation)
    new, _ = tx.step(params, tx.init(params), params, gradient_scale=scale)
    assert jnp.isnan(new).all()


# --- Around the step ------------------------------------------------------------------


@with_x64
@each_implementation
def test_accumulate(implementation):
    """In float64: a float32 sum would lose the small gradient."""
    tx = jfa.fused_adamw(0.1, b1=0.0, implementation=implementation)
    windows = jfa.accumulate(tx, 2)
    params = {"z": jnp.ones(4), "a": jnp.ones(3, jnp.float32)}
    state = windows.init(params)
    assert state.acc_grads["z"].dtype == jnp.float64
    for value in (1.0, 1e-12):
        grads = optax.tree.full_like(params, value)
        params, state = jfa.step(windows, grads, state, params)
    assert int(state.inner_opt_state.count) == 1
    mean = (1.0 + 1e-12) / 2
    np.testing.assert_allclose(state.inner_opt_state.mu["z"], mean, rtol=1e-15)


@with_x64
@each_implementation
def test_loss_scale(implementation):
    loss_scale = jfa.DynamicLossScale(2.0**15)
    tx = jfa.fused_adamw(0.1, skip_nonfinite=True, implementation=implementation)
    params = {"w": normal(1)}

    def loss(params, factor):
        return loss_scale.scale((params["w"] ** 2).sum() * factor)

    state = tx.init(params)
    grads = jax.grad(loss)(params, 1.0)
    scaled, _ = tx.step(grads, state, params, gradient_scale=loss_scale.value)
    grads = jax.tree.map(lambda x: 2 * x, params)
    assert_same_bits(scaled, tx.step(grads, state, params)[0])
    grads = jax.grad(loss)(params, jnp.inf)
    _, state = tx.step(grads, state, params, gradient_scale=loss_scale.value)
    assert loss_scale.update(state.report).value == 2.0**14


@with_x64
def test_memory_estimate():
    params = {"z": jax.ShapeDtypeStruct((100,), jnp.float64)}
    low = dict(mu_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, master_weights=True)
    estimate = jfa.memory_estimate(params, ema_decay=0.9, **low)
    assert (estimate.params, estimate.grads) == (800, 800)
    assert estimate.state == 3 * 800 + 12
    real = {"z": jnp.ones(100)}
    state = jfa.fused_adamw(0.1, ema_decay=0.9, **low).init(real)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == estimate.state


@with_x64
@each_implementation
def test_members(implementation):
    """A mixed tree; each member has its own learning rate, and one is skipped."""
    params = {"z": normal(1, (3, 5)), "a": normal(2, (3, 4), np.float32)}
    rates, skips = jnp.array([0.1, 0.2, 0.3], jnp.float32), jnp.arange(3) == 1

    def step(params, rate, skip):
        tx = jfa.fused_adamw(rate, implementation=implementation)
        return tx.step(params, tx.init(params), params, skip_update=skip)

    got = jax.vmap(step)(params, rates, skips)
    members = [
        step({name: x[i] for name, x in params.items()}, rates[i], skips[i])
        for i in range(3)
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *members)
    if implementation == "ffi":
        assert_same_bits(got, expected)
    for name in params:
        np.testing.assert_allclose(got[0][name], expected[0][name], rtol=1e-6)
    assert_same_bits(got[0]["z"][1], params["z"][1])


@with_x64
@pytest.mark.parametrize("kind", KINDS)
@each_implementation
def test_sharded(kind, implementation):
    """Nothing is gathered; only the rows of the norm cross devices."""
    tx = jfa.fused_adamw(
        0.1, max_grad_norm=1.0, mu_dtype=jnp.bfloat16, implementation=implementation
    )
    shapes = {"z": (16, 8), "b": (16,), "a": (16, 8)}
    host = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    host = jax.device_get(host | {"a": host["a"].astype(jnp.float32)})
    specs = {"z": P("x", "y"), "b": P(("x", "y")), "a": P("x")}
    expected, expected_state = tx.step(host, tx.init(host), host)
    mesh = make_mesh("x", "y", kind=kind)
    with jax.set_mesh(mesh):
        params = place(mesh, host, specs)
        state = jax.jit(tx.init)(params)
        compiled = jax.jit(tx.step).lower(params, state, params).compile()
        new, state = compiled(params, state, params)
    assert count_ops(compiled, "all-gather") == 0
    for name, spec in specs.items():
        assert is_placed(new[name], mesh, spec)
        assert is_placed(state.nu[name], mesh, spec)
    shardings = jfa.state_shardings(tx, params)
    assert shardings.mu["z"].is_equivalent_to(state.mu["z"].sharding, 2)
    assert state.mu["z"].dtype == jnp.float64 and state.mu["a"].dtype == jnp.bfloat16
    # The norm is added in another order on several devices, which moves it by an ulp.
    np.testing.assert_allclose(state.report.norm, expected_state.report.norm, 1e-6)
    np.testing.assert_allclose(state.nu["z"], expected_state.nu["z"], rtol=1e-5)
    np.testing.assert_allclose(new["z"], expected["z"], rtol=1e-6)


@with_x64
@needs_kernel
def test_sharded_bits(mesh):
    """Without a norm they are those of one device."""
    tx = jfa.fused_adamw(0.1, amsgrad=True, weight_decay=0.1)
    host = jax.device_get({"z": normal(1), "a": normal(2, dtype=np.float32)})
    expected = jax.device_get(steps(tx, host, host))
    got = steps(tx, *(place(mesh, host, P("x", "y")) for _ in range(2)))
    assert_same_bits(jax.device_get(got), expected)


# --- Files ----------------------------------------------------------------------------


@with_x64
@needs_kernel
def test_export():
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers", reason="it comes with the test extra")
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0)
    params = {"z": normal(1), "a": normal(2, dtype=np.float32)}
    treedef = jax.tree.structure(tx.init(params))

    def step(params, leaves):  # export knows no types of ours
        new, state = tx.step(params, treedef.unflatten(leaves), params)
        return new, jax.tree.leaves(state)

    arguments = params, jax.tree.leaves(tx.init(params))
    checks = [
        export.DisabledSafetyCheck.custom_call(f"jax_fused_adamw_{name}")
        for name in ("update_v2", "analyze_gradient_v1", "merge_gradient_stats_v1")
    ]
    program = export.export(jax.jit(step), disabled_checks=checks)(*arguments)
    loaded = export.deserialize(program.serialize())
    assert_same_bits(loaded.call(*arguments), step(*arguments))
