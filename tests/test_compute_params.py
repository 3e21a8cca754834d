"""Low-precision copies for the forward pass, written by the step."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import WAYS, assert_same_bits, make_tx, take_step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from low_precision import GRADS, PARAMS, as_float64, each_implementation, steps
from meshes import is_placed, place, zero_1

import jax_fused_adamw as jfa
import jax_fused_adamw.flax

BF16 = jnp.bfloat16
WIDE = {name for name, x in PARAMS.items() if x.dtype == jnp.float32}


def assert_rounded(compute, params, dtype=BF16):
    """Copies are their parameters, rounded to nearest; other leaves the parameters."""
    for got, p in zip(*map(jax.tree.leaves, (compute, params)), strict=True):
        expected = np.asarray(p)
        if p.dtype == jnp.float32:
            expected = expected.astype(dtype)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), expected)


@each_implementation
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("master_weights", [False, True])
def test_copies_of_the_new_parameters(way, dtype, master_weights, implementation):
    options = dict(
        learning_rate=0.1, master_weights=master_weights, implementation=implementation
    )
    tx = make_tx(way, **options, compute_dtype=dtype)
    plain = make_tx(way, **options)
    params, state = PARAMS, tx.init(PARAMS)
    assert_rounded(jfa.compute_params(state, params), params, dtype)
    step = jax.jit(functools.partial(take_step, way, tx))
    for _ in range(3):
        params, state = step(GRADS, state, params)
        assert {k for k, x in state.compute.items() if x is not None} == WIDE
        assert_rounded(jfa.compute_params(state, params), params, dtype)
    assert step._cache_size() == 1
    expected, expected_state = PARAMS, plain.init(PARAMS)
    for _ in range(3):
        expected, expected_state = take_step(
            way, plain, GRADS, expected_state, expected
        )
    if implementation == "ffi" and way != "update":  # XLA adds there, and may fuse
        got = (params, state._replace(compute=None))
        assert_same_bits(got, (expected, expected_state))


@each_implementation
@pytest.mark.parametrize("way", WAYS)
def test_skipped_step_keeps_every_bit(way, implementation):
    tx = make_tx(
        way, learning_rate=0.1, compute_dtype=BF16, implementation=implementation
    )
    state = tx.init(PARAMS)
    changed = jax.tree.map(lambda x: x + 1, PARAMS)
    step = jax.jit(functools.partial(take_step, way, tx, skip_update=True))
    params, new = step(GRADS, state, changed)
    assert_same_bits(params, changed)
    assert_same_bits(new.compute, state.compute)


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"])
    return jnp.square((hidden @ params["v"]).astype(jnp.float32)).mean()


MODEL = {"w": jnp.linspace(-1, 1, 24 * 32).reshape(24, 32), "v": jnp.ones((32, 1))}
X = jnp.linspace(-1, 1, 48).reshape(2, 24).astype(BF16)


def train_step(tx, params, state, x, use_copies=True):
    compute = jfa.compute_params(state, params) if use_copies else None
    value_and_grad = jfa.value_and_grad(loss_fn, compute_dtype=BF16)
    loss, grads = value_and_grad(params, x, compute_params=compute)
    params, state = jfa.step(tx, grads, state, params)
    return params, state, loss


def casts_of_params(lowered_text):
    """Conversions of arrays of a parameter's size from float32 to bfloat16."""
    return len(
        re.findall(
            r"convert.*tensor<(?:24x32|32x1)xf32>\) -> tensor<\S+bf16>", lowered_text
        )
    )


@each_implementation
def test_no_cast_of_parameters_remains(implementation):
    tx = jfa.fused_adamw(0.1, compute_dtype=BF16, implementation=implementation)
    state = tx.init(MODEL)

    def text(use_copies, compiled=False):
        step = functools.partial(train_step, tx, use_copies=use_copies)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(MODEL, state, X)
        return lowered.compile().as_text() if compiled else lowered.as_text()

    if implementation == "ffi":
        assert casts_of_params(text(use_copies=True)) == 0
        assert casts_of_params(text(use_copies=False)) == 2
        compiled = text(use_copies=True, compiled=True)
        assert not re.search(r"= bf16\[(24,32|32,1)\]\S* convert\(f32", compiled)
        assert not re.search(r"copy\(%(state|params)_", compiled)
    # The loss and its gradients do not read the float32 parameters at all.
    value_and_grad = jfa.value_and_grad(loss_fn, compute_dtype=BF16)

    def gradients(params, state):
        return value_and_grad(
            params, X, compute_params=jfa.compute_params(state, params)
        )

    jaxpr = jax.make_jaxpr(gradients)(MODEL, state).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars}
    assert not any(id(x) in read for x in jaxpr.invars[:2])


@each_implementation
def test_copies_train_as_casts_do(implementation):
    tx = jfa.fused_adamw(0.1, compute_dtype=BF16, implementation=implementation)
    runs = []
    for use_copies in (True, False):
        step = jax.jit(functools.partial(train_step, tx, use_copies=use_copies))
        params, state = MODEL, tx.init(MODEL)
        for _ in range(4):
            params, state, loss = step(params, state, X)
        runs.append((params, state, loss))
    if implementation == "ffi":
        assert_same_bits(*runs)
    np.testing.assert_allclose(runs[0][2], runs[1][2], rtol=1e-2)


def test_value_and_grad_is_that_of_jax_on_rounded_parameters():
    rounded = jax.tree.map(lambda x: x.astype(BF16), MODEL)
    expected = jax.value_and_grad(loss_fn)(rounded, X)
    got = jfa.value_and_grad(loss_fn, compute_dtype=BF16)(MODEL, X)
    assert_same_bits(got, expected)
    assert all(g.dtype == BF16 for g in got[1].values())

    def two(x, params, others, *, scale):
        return loss_fn(params | others, x) * scale, x

    for argnums in ((1, 2), 1):
        expected = jax.value_and_grad(two, argnums, has_aux=True)
        got = jfa.value_and_grad(two, argnums, has_aux=True, compute_dtype=BF16)
        parts = {"w": MODEL["w"]}, {"v": MODEL["v"]}
        low = {"w": rounded["w"]}, {"v": rounded["v"]}
        wide_v = parts[1] if argnums == 1 else low[1]
        assert_same_bits(
            got(X, *parts, scale=2.0), expected(X, low[0], wide_v, scale=2.0)
        )
        given = low if argnums == (1, 2) else low[0]
        assert_same_bits(
            got(X, *parts, scale=2.0, compute_params=given),
            got(X, *parts, scale=2.0),
        )


def test_value_and_grad_leaves_low_precision_leaves_alone():
    params = MODEL | {"v": MODEL["v"].astype(jnp.float16)}
    _, grads = jfa.value_and_grad(loss_fn, compute_dtype=BF16)(params, X)
    assert (grads["w"].dtype, grads["v"].dtype) == (BF16, jnp.float16)


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {k: k != "d" for k in PARAMS}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"ours": tx, "again": tx}, {k: "again" if k == "a" else "ours" for k in PARAMS}
    ),
    "accumulate": lambda tx: jfa.accumulate(tx, 2),
    "accumulate in chain": lambda tx: optax.chain(jfa.accumulate(tx, 1)),
}


@each_implementation
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_are_found_in_wrappers(wrapper, implementation):
    tx = WRAPPERS[wrapper](
        jfa.fused_adamw(0.1, compute_dtype=BF16, implementation=implementation)
    )
    params, state = steps(tx, PARAMS, GRADS, 4)
    compute = jfa.compute_params(state, params)
    if wrapper == "masked":
        assert compute["d"] is params["d"]
        compute, params = ({k: x[k] for k in "abce"} for x in (compute, params))
    assert_rounded(compute, params)


def test_copies_are_found_under_inject_hyperparams():
    make = optax.inject_hyperparams(
        jfa.fused_adamw, static_args=("compute_dtype", "implementation")
    )
    tx = make(0.1, compute_dtype=BF16, implementation="xla")
    params, state = steps(tx, MODEL, MODEL)
    assert_rounded(jfa.compute_params(state, params), params)


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: jfa.accumulate(tx, 2)])
def test_with_a_loss_scale(wrap):
    tx = wrap(
        jfa.fused_adamw(
            0.1, compute_dtype=jnp.float16, max_grad_norm=1.0, implementation="xla"
        )
    )

    @jax.jit
    def step(params, state, loss_scale, x):
        def scaled_loss(params):
            return loss_scale.scale(loss_fn(params, x.astype(jnp.float16)))

        _, grads = jfa.value_and_grad(scaled_loss, compute_dtype=jnp.float16)(
            params, compute_params=jfa.compute_params(state, params)
        )
        report = jfa.grad_stats(grads, loss_scale.value, implementation="xla")
        params, state = jfa.step(
            tx, grads, state, params, gradient_scale=loss_scale.value, report=report
        )
        return params, state, loss_scale.update(report)

    params, state, loss_scale = MODEL, tx.init(MODEL), jfa.DynamicLossScale(2.0**20)
    for _ in range(24):
        params, state, loss_scale = step(params, state, loss_scale, X)
    assert float(loss_scale.value) < 2.0**20
    assert int(optax.tree.get(state, "count")) > 0
    assert_rounded(jfa.compute_params(state, params), params, jnp.float16)


def test_sharded_copies_lie_where_their_parameters_do(mesh):
    tx = jfa.fused_adamw(0.1, compute_dtype=BF16)
    specs = {"w": P("x", "y"), "v": P("x", None)}
    params = place(mesh, MODEL, specs)
    state = jax.jit(tx.init)(params)
    step = jax.jit(functools.partial(jfa.step, tx))
    for _ in range(2):
        params, state = step(params, state, params)
    for name, x in jfa.compute_params(state, params).items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim)
    assert step._cache_size() == 1 or 1 in mesh.shape.values()
    assert_rounded(jfa.compute_params(state, params), params)


@pytest.mark.devices(8)
@pytest.mark.parametrize("how", ["eager", "jit"])
@each_implementation
def test_zero_1_updates(mesh, how, implementation):
    """The copies of whole parameters are cut as the rest of the state."""
    tx = jfa.fused_adamw(0.1, compute_dtype=BF16, implementation=implementation)
    params, state = zero_1(tx, mesh, MODEL)
    update = jax.jit(tx.update) if how == "jit" else tx.update
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    # Where types do not tell, XLA decides.
    if how == "eager" or mesh.axis_types[0] == AxisType.Explicit:
        assert all(is_placed(x, mesh, P("x")) for x in state.compute.values())
    assert_rounded(jfa.compute_params(state, params), params)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dtype=BF16)(nn.tanh(nn.Dense(8, dtype=BF16)(x)))


@each_implementation
def test_flax_linen(implementation):
    model = Linen()
    tx = jfa.fused_adamw(0.05, compute_dtype=BF16, implementation=implementation)
    state = jfa.flax.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=tx
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        def loss(params):
            return jnp.square(state.apply_fn(params, X) - 1).mean()

        compute = jfa.compute_params(state.opt_state, state.params)
        value_and_grad = jfa.value_and_grad(loss, compute_dtype=BF16)
        value, grads = value_and_grad(state.params, compute_params=compute)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(10):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    assert_rounded(jfa.compute_params(state.opt_state, state.params), state.params)


@each_implementation
def test_flax_nnx(implementation):
    model = nnx.Linear(24, 1, dtype=BF16, rngs=nnx.Rngs(0))
    tx = jfa.fused_adamw(
        0.05,
        compute_dtype=BF16,
        master_weights=True,
        in_place=True,
        implementation=implementation,
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        graph, params = nnx.split(model, nnx.Param)

        def loss(params):
            return jnp.square(nnx.merge(graph, params)(X) - 1).mean()

        state, pure = nnx.as_pure(optimizer.opt_state), nnx.as_pure(params)
        compute = jax.tree.leaves(jfa.compute_params(state, pure))
        compute = jax.tree.structure(params).unflatten(compute)  # nnx's variables
        value_and_grad = jfa.value_and_grad(loss, compute_dtype=BF16)
        value, grads = value_and_grad(params, compute_params=compute)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    compute = jfa.compute_params(nnx.as_pure(optimizer.opt_state), params)
    assert_rounded(compute, params)
    with pytest.raises(ValueError, match="nnx.as_pure"):
        jfa.compute_params(optimizer.opt_state, nnx.state(model, nnx.Param))


def test_errors():
    tx = jfa.fused_adamw(0.1, compute_dtype=BF16, implementation="xla")
    plain = jfa.fused_adamw(0.1, implementation="xla")
    with pytest.raises(ValueError, match="^compute_params: .*compute_dtype"):
        jfa.compute_params(plain.init(MODEL), MODEL)
    with pytest.raises(ValueError, match="^compute_params: the tree of state.compute"):
        jfa.compute_params(tx.init(MODEL), {"w": MODEL["w"]})
    with pytest.raises(ValueError, match=r"state.compute\['v'\] has shape \(32, 1\)"):
        jfa.compute_params(tx.init(MODEL), MODEL | {"v": jnp.ones((1, 32))})
    with pytest.raises(ValueError, match="has no compute, but compute_dtype is bfloat"):
        tx.update(MODEL, plain.init(MODEL), MODEL)
    with pytest.raises(ValueError, match="value_and_grad: compute_dtype must be"):
        jfa.value_and_grad(loss_fn, compute_dtype=jnp.float32)
    with pytest.raises(TypeError, match="value_and_grad: compute_dtype must be"):
        jfa.value_and_grad(loss_fn, compute_dtype=None)
    value_and_grad = jfa.value_and_grad(loss_fn, compute_dtype=BF16)
    with pytest.raises(
        ValueError, match=r"value_and_grad: .*compute_params\['v'\] is m"
    ):
        value_and_grad(MODEL, X, compute_params={"w": MODEL["w"]})
    with pytest.raises(
        TypeError, match=r"compute_params\['v'\]: expected bfloat16, got f"
    ):
        value_and_grad(MODEL, X, compute_params=MODEL | {"w": MODEL["w"].astype(BF16)})
    with pytest.raises(TypeError, match="positional arguments, of which there are 0"):
        value_and_grad(params=MODEL, x=X)
    of_both = jfa.value_and_grad(jnp.dot, argnums=(0, 1), compute_dtype=BF16)
    for given, got in [((X[0],), "1"), (X[:2], "ArrayImpl"), ((None,) * 3, "3")]:
        with pytest.raises(TypeError, match=rf"tuple of 2, .*\(0, 1\), got {got}"):
            of_both(X[0], X[0], compute_params=given)
    of_both(X[0], X[0], compute_params=(None, X[0].astype(BF16)))
    assert jfa.compute_params(plain.init({}), {}) == {}
    low = jnp.ones(3, BF16)
    assert jfa.compute_params(tx.init(low), low) is low


def test_the_distance_to_float64_is_that_of_rounded_weights():
    """A copy never lags: after a step it is the rounding of this step's parameter."""
    tx = jfa.fused_adamw(0.3, compute_dtype=BF16, implementation="xla")
    params, state = steps(tx, MODEL, MODEL, 1)
    error = np.abs(as_float64(state.compute["w"]) - as_float64(params["w"]))
    assert (error <= np.abs(as_float64(params["w"])) * 2.0**-8).all()
    assert (np.abs(as_float64(MODEL["w"]) - as_float64(params["w"])) > 0.1).all()
