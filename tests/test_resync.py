"""Masters and parameters that have come apart: reported and mended."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits
from low_precision import (
    EVERYTHING,
    GRADS,
    PARAMS,
    as_float64,
    needs_kernel,
    steps,
)
from meshes import zero_1

import jax_fused_adamw as jfa

LOW = {name for name, x in PARAMS.items() if x.dtype != jnp.float32}
WRAPPERS = {
    "bare": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {k: k != "d" for k in PARAMS}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"ours": tx, "again": tx}, {k: "again" if k == "b" else "ours" for k in PARAMS}
    ),
    "accumulate": lambda tx: jfa.accumulate(tx, 1),
}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


def make(wrapper="bare", **options):
    options = options or EVERYTHING
    return WRAPPERS[wrapper](jfa.fused_adamw(0.1, implementation="xla", **options))


def mismatch(state, params):
    """How many elements differ, of the leaves that have some."""
    return {k: int(n) for k, n in jfa.master_mismatch(state, params).items() if n}


def changed(params):
    """As a restore may leave them: two elements of b, the only one of c."""
    return params | {
        "b": params["b"].at[jnp.array([0, 7])].add(1.0),
        "c": params["c"] + 1,
    }


@each_wrapper
def test_a_mismatch_is_counted_by_leaf(wrapper):
    params, state = steps(make(wrapper), PARAMS, GRADS, 2)
    assert mismatch(state, params) == {}
    counts = jax.jit(jfa.master_mismatch)(state, changed(params))
    assert all(x.dtype == jnp.int32 and x.shape == () for x in counts.values())
    assert {"['a']", "['b']", "['c']", "['e']"} <= set(counts)
    assert {k: int(n) for k, n in counts.items() if n} == {"['b']": 2, "['c']": 1}


def test_a_copy_of_old_parameters_is_a_mismatch():
    params = {"w": jnp.array([1.0, 2.0, 3.0])}
    state = make(compute_dtype=jnp.bfloat16).init(params)
    clipped = {"w": jnp.clip(params["w"], 0.0, 2.0)}
    assert mismatch(state, params) == {}
    assert mismatch(state, clipped) == {"['w']": 1}
    _, state = jfa.resync(state, clipped, "params")
    assert mismatch(state, clipped) == {}
    assert_same_bits(state.compute["w"], clipped["w"].astype(jnp.bfloat16))


@each_wrapper
def test_params_from_masters(wrapper):
    params, state = steps(make(wrapper), PARAMS, GRADS, 2)
    mended, same = jfa.resync(state, changed(params), source="master")
    assert_same_bits(mended, params)
    assert_same_bits(same, state)


@each_wrapper
def test_masters_and_copies_from_params(wrapper):
    params, state = steps(make(wrapper), PARAMS, GRADS, 2)
    other = changed(params) | {"a": params["a"] + 1}
    same, mended = jfa.resync(state, other, "params")
    assert_same_bits(same, other)
    assert mismatch(mended, other) == {}
    copies = jfa.compute_params(mended, other)
    np.testing.assert_array_equal(copies["a"], other["a"].astype(jnp.bfloat16))

    def rest(state):
        return jax.tree.map(
            lambda x: x._replace(master=None, compute=None) if is_ours(x) else x,
            state,
            is_leaf=is_ours,
        )

    assert_same_bits(rest(mended), rest(state))


def is_ours(node):
    return isinstance(node, jfa.FusedAdamWState)


def test_the_next_step_goes_on_from_what_was_right():
    """After a restore of parameters alone, from the parameters."""
    tx = make()
    params, state = steps(tx, PARAMS, GRADS, 2)
    other = changed(params)
    without, _ = steps(tx, other, GRADS, 1, state)
    assert_same_bits(without, steps(tx, params, GRADS, 1, state)[0])
    _, mended = jfa.resync(state, other, "params")
    resumed, _ = steps(tx, other, GRADS, 1, mended)
    moved = np.abs(as_float64(resumed["c"]) - as_float64(other["c"]))
    assert moved < 0.2  # and not back to what the old master says, one less


def test_nan_and_zeros_are_no_mismatch():
    params = {"w": jnp.array([jnp.nan, 0.0, -0.0, jnp.inf, 1.0], jnp.bfloat16)}
    state = make(master_weights=True).init(params)
    other = {"w": jnp.array([jnp.nan, -0.0, 0.0, -jnp.inf, jnp.nan], jnp.bfloat16)}
    assert mismatch(state, params) == {}
    assert mismatch(state, other) == {"['w']": 2}


def test_new_arrays_share_no_buffer():
    tx = make(compute_dtype=jnp.bfloat16, master_weights=True)
    params, state = PARAMS, tx.init(PARAMS)
    _, mended = jfa.resync(state, params, "params")
    mended_params, _ = jfa.resync(state, params, "master")
    new = (mended.master, mended.compute, {k: mended_params[k] for k in LOW})
    pointers = [
        x.unsafe_buffer_pointer()
        for x in jax.tree.leaves((params, state.master, state.compute, new))
        if x.size
    ]
    assert len(set(pointers)) == len(pointers)


def test_sharded_state_stays_where_it_is(mesh):
    where = jax.NamedSharding(mesh, jax.P("x"))
    params = {"w": jax.device_put(jnp.ones((16, 3), jnp.bfloat16), where)}
    tx = jfa.fused_adamw(0.1, master_weights=True)
    state = jax.jit(tx.init)(params)
    for source in ("params", "master"):
        new = jax.jit(jfa.resync, static_argnums=2)(state, params, source)
        for x in (new[0]["w"], new[1].master["w"]):
            assert x.sharding.is_equivalent_to(where, 2)
    assert mismatch(state, params) == {}


ZERO_1 = {
    "w": jnp.linspace(-1.0, 1.0, 48, dtype=jnp.bfloat16).reshape(16, 3),
    "v": jnp.linspace(-1.0, 1.0, 40).reshape(8, 5),
}


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.devices(8)
@pytest.mark.parametrize("how", ["eager", "jit"])
@needs_kernel  # plain JAX cuts the parameters too
def test_zero_1_new_arrays_lie_where_the_old_did(mesh, how):
    """State cut, parameters whole: the next step compiles no second time."""
    tx = jfa.fused_adamw(0.1, **EVERYTHING)
    params, state = zero_1(tx, mesh, ZERO_1)
    step = jax.jit(tx.step)
    params, state = step(params, state, params)
    params, state = step(params, state, params)
    compiled, resync = step._cache_size(), jfa.resync
    if how == "jit":
        if mesh.axis_types[0] != jax.sharding.AxisType.Explicit:
            pytest.skip("types do not tell placements there")
        resync = jax.jit(resync, static_argnums=2)
    for source in ("params", "master"):
        new = resync(state, params, source)
        assert shardings(new) == shardings((params, state))
        assert_same_bits(new[0], params)
        step(params, new[1], new[0])
    assert step._cache_size() == compiled
    other = params | {"w": params["w"] + 1}
    assert mismatch(state, params) == {}
    assert mismatch(state, other) == {"['w']": 48}
    assert mismatch(resync(state, other, "params")[1], other) == {}


def test_uncommitted_arrays_stay_so():
    tx = make(master_weights=True)
    state = tx.init(PARAMS)
    for source in ("params", "master"):
        new = jfa.resync(state, PARAMS, source)
        assert not any(x.committed for x in jax.tree.leaves(new))


def test_errors():
    plain = jfa.fused_adamw(0.1, implementation="xla")
    state = make(master_weights=True).init(PARAMS)
    with pytest.raises(ValueError, match="^resync: source must be one of"):
        jfa.resync(state, PARAMS, "state")
    for source in ("master", "params"):
        with pytest.raises(ValueError, match="^resync: .*master_weights"):
            jfa.resync(plain.init(PARAMS), PARAMS, source)
    with pytest.raises(ValueError, match="^master_mismatch: .*master_weights=True"):
        jfa.master_mismatch(plain.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="^master_mismatch: the tree of state.master"):
        jfa.master_mismatch(state, {"a": PARAMS["a"]})
    with pytest.raises(ValueError, match=r"state.master\['b'\] has shape \(33,\)"):
        jfa.resync(state, PARAMS | {"b": jnp.ones(3, jnp.bfloat16)}, "params")
    assert jfa.master_mismatch(plain.init({}), {}) == {}


def test_flax_nnx():
    """Weights that were written outside of the step, as the README puts them back."""
    tx = jfa.fused_adamw(0.1, master_weights=True, in_place=True)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.kernel[...] = jnp.full((3, 2), 5.0, jnp.bfloat16)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    _, state = jfa.resync(nnx.as_pure(optimizer.opt_state), params, source="params")
    structure = jax.tree.structure(optimizer.opt_state)
    optimizer.opt_state = jax.tree.unflatten(structure, jax.tree.leaves(state))
    expected, _ = tx.step(params, state, params)
    grads = nnx.state(model, nnx.Param)
    nnx.jit(lambda optimizer, model: optimizer.update(model, grads))(optimizer, model)
    assert optimizer.opt_state.count[...] == 1
    assert_same_bits(nnx.as_pure(nnx.state(model, nnx.Param)), expected)
    assert float(model.kernel[0, 0]) < 5.0
