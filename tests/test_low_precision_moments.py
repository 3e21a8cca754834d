"""Moments below float32: what they hold, how they are rounded, what stays the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import HYPERPARAMS, WAYS, assert_same_bits, make_tx, random_like, take_step
from low_precision import GRADS, PARAMS, as_float64, each_implementation, steps
from oracle import LeafState, Oracle

import jax_fused_adamw as jfa

DTYPES = [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float16", "float32")]
LOW = {"mu_dtype": jnp.bfloat16, "nu_dtype": jnp.bfloat16}
each_dtype = pytest.mark.parametrize("mu_dtype, nu_dtype", DTYPES)


@each_implementation
@each_dtype
@pytest.mark.parametrize("way", WAYS)
def test_dtypes_never_change(mu_dtype, nu_dtype, way, implementation):
    tx = make_tx(
        way,
        **HYPERPARAMS,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        amsgrad=True,
        implementation=implementation,
    )
    step = jax.jit(functools.partial(take_step, way, tx))
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(GRADS, state, params)
    assert step._cache_size() == 1
    for name, dtype in (("mu", mu_dtype), ("nu", nu_dtype), ("nu_max", nu_dtype)):
        assert {x.dtype for x in jax.tree.leaves(getattr(state, name))} == {
            jnp.dtype(dtype)
        }
    assert all(x.dtype == PARAMS[name].dtype for name, x in params.items())


@each_implementation
def test_float32_moments_have_no_noise(implementation):
    make = functools.partial(jfa.fused_adamw, 0.1, implementation=implementation)
    expected = steps(make(), PARAMS, GRADS)
    for options in (
        dict(seed=7),
        dict(stochastic_rounding=False),
        dict(mu_dtype=jnp.float32, nu_dtype="float32"),
    ):
        assert_same_bits(steps(make(**options), PARAMS, GRADS), expected)


@each_implementation
@each_dtype
@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_one_step_rounds_the_moments_of_a_float32_step(
    mu_dtype, nu_dtype, amsgrad, nesterov, implementation
):
    """From representable moments: the update is that of the unrounded new moments, and
    what is stored is a neighbour of theirs, the nearest without stochastic rounding."""
    options = HYPERPARAMS | dict(
        amsgrad=amsgrad, nesterov=nesterov, implementation=implementation
    )
    exact = jfa.fused_adamw(**options)
    dtypes = dict(mu_dtype=mu_dtype, nu_dtype=nu_dtype)
    start = jfa.fused_adamw(**options, **dtypes).init(PARAMS)
    rounded = start._replace(
        count=jnp.int32(7),
        mu=random_like(start.mu, 3, scale=0.1),
        nu=jax.tree.map(jnp.square, random_like(start.nu, 4, scale=0.3)),
    )
    if amsgrad:
        rounded = rounded._replace(nu_max=jax.tree.map(lambda x: 2 * x, rounded.nu))
    wide = rounded._replace(
        **{
            name: jax.tree.map(lambda x: x.astype(jnp.float32), getattr(rounded, name))
            for name in ("mu", "nu", "nu_max")
        }
    )
    params, expected = steps(exact, PARAMS, GRADS, 1, wide)
    for stochastic in (False, True):
        tx = jfa.fused_adamw(**options, **dtypes, stochastic_rounding=stochastic)
        new_params, new = steps(tx, PARAMS, GRADS, 1, rounded)
        if implementation == "ffi":
            assert_same_bits(new_params, params)
        # Two programs of XLA's may differ in the last bit of float32.
        for got, want in zip(*map(jax.tree.leaves, (new_params, params)), strict=True):
            np.testing.assert_allclose(as_float64(got), as_float64(want), rtol=1e-6)
        for name in ("mu", "nu", "nu_max"):
            leaves = map(jax.tree.leaves, (getattr(new, name), getattr(expected, name)))
            for got, want in zip(*leaves, strict=True):
                nearest = np.asarray(want).astype(got.dtype)
                step = np.spacing(np.abs(nearest)).astype(np.float64)
                is_nearest = not stochastic or name == "nu_max"
                bound = step * (0.5 if is_nearest else 1.0) * (1 + 2.0**-12)
                error = np.abs(as_float64(got) - as_float64(want))
                assert (error <= bound + (got.dtype == np.float32) * step).all()


@each_implementation
def test_nu_sticks_without_stochastic_rounding_and_not_with_it(implementation):
    """bfloat16 has 8 bits: from 0.25 on, 0.001 * (1 - nu) is below half a step, and the
    direction is nearly twice too large."""
    params, grads = jnp.zeros(4096), jnp.ones(4096)
    make = functools.partial(
        jfa.fused_adamw, 1e-3, weight_decay=0.0, implementation=implementation, **LOW
    )
    _, stuck = steps(make(stochastic_rounding=False), params, grads, 3000)
    assert (as_float64(stuck.nu) == 0.25).all()
    direction = 1 / np.sqrt(as_float64(stuck.nu) / (1 - 0.999**3000))
    assert (direction > 1.9).all()
    # Where it is larger, from larger gradients, it sticks too.
    state = stuck._replace(nu=jnp.full(4096, 0.5, jnp.bfloat16))
    _, stuck = steps(make(stochastic_rounding=False), params, grads, 3, state)
    assert (as_float64(stuck.nu) == 0.5).all()
    _, moving = steps(make(), params, grads, 3000)
    assert as_float64(moving.nu).mean() == pytest.approx(1 - 0.999**3000, rel=0.01)


@each_implementation
@each_dtype
def test_stochastic_rounding_is_unbiased(mu_dtype, nu_dtype, implementation):
    n = 1 << 16
    params, grads = jnp.zeros(n), jnp.full(n, 0.7853)
    tx = jfa.fused_adamw(
        1e-3, mu_dtype=mu_dtype, nu_dtype=nu_dtype, implementation=implementation
    )
    _, state = steps(tx, params, grads, 1)
    g = float(np.float32(0.7853))
    for got, want in ((state.mu, 0.1 * g), (state.nu, 0.001 * g * g)):
        values = as_float64(got)
        if got.dtype == jnp.float32:
            continue
        assert len(set(values.tolist())) == 2
        sigma = values.std() / np.sqrt(n)
        assert abs(values.mean() - want) < 4 * sigma + want * 2.0**-20


@each_implementation
def test_the_noise_is_of_seed_step_and_leaf(implementation):
    params = {"a": jnp.zeros(512), "b": jnp.zeros(512)}
    grads = jax.tree.map(lambda x: x + 0.7853, params)

    def mu(count=0, **options):
        tx = jfa.fused_adamw(1e-3, implementation=implementation, **LOW, **options)
        state = tx.init(params)._replace(count=jnp.int32(count))
        return steps(tx, params, grads, 1, state)[1].mu

    assert_same_bits(mu(), mu())
    first = mu()
    for other in (mu(seed=1), mu(count=1), mu(seed=1 << 32)):
        assert (np.asarray(other["a"]) != np.asarray(first["a"])).any()
    assert (np.asarray(first["a"]) != np.asarray(first["b"])).any()


@each_implementation
def test_seed_may_be_injected(implementation):
    options = dict(implementation=implementation, **LOW)
    expected = steps(jfa.fused_adamw(0.1, seed=3, **options), PARAMS, GRADS)
    tx = optax.inject_hyperparams(
        jfa.fused_adamw,
        static_args=("mu_dtype", "nu_dtype", "implementation"),
        hyperparam_dtype=jnp.float32,
    )(0.1, seed=3, **options)
    _, state = steps(tx, PARAMS, GRADS)
    new = state.inner_state
    for got, want in zip(jax.tree.leaves(new.mu), jax.tree.leaves(expected[1].mu)):
        # The learning rate is another operand; the moments do not read it.
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@each_implementation
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_stay_in_the_moments(value, implementation):
    params, grads = jnp.ones(9), jnp.full(9, value)
    for mu_dtype, nu_dtype in DTYPES:
        for stochastic in (False, True):
            tx = jfa.fused_adamw(
                1e-3,
                mu_dtype=mu_dtype,
                nu_dtype=nu_dtype,
                stochastic_rounding=stochastic,
                implementation=implementation,
            )
            _, state = steps(tx, params, grads, 1)
            np.testing.assert_array_equal(as_float64(state.mu), np.full(9, value))
            np.testing.assert_array_equal(as_float64(state.nu), np.full(9, abs(value)))


@each_implementation
@pytest.mark.parametrize("stochastic", [False, True])
def test_skipped_step_keeps_every_bit(stochastic, implementation):
    tx = jfa.fused_adamw(
        0.1,
        **LOW,
        amsgrad=True,
        stochastic_rounding=stochastic,
        implementation=implementation,
    )
    params, state = steps(tx, PARAMS, GRADS)
    new_params, new = steps(tx, params, GRADS, 1, state, skip_update=True)
    assert_same_bits(new_params, params)
    assert_same_bits(new, state._replace(skipped=new.skipped, consecutive=jnp.int32(1)))


def run_numpy(optimizer, grads, p):
    state = LeafState.zeros(p.shape)
    for step, g in enumerate(grads, 1):
        update, state = optimizer.update(p, g, state, step)
        p = p + update
    return p


@each_implementation
def test_error_against_float64_is_at_most_twice_that_of_optax(implementation):
    """With the same dtype of mu, which is all that optax stores low."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=2000)
    grads = [rng.normal(size=2000) * 0.1 + 0.05 for _ in range(100)]
    options = dict(learning_rate=1e-3, weight_decay=0.01)
    exact = run_numpy(Oracle(**options), grads, start)
    ours = jfa.fused_adamw(
        **options, mu_dtype=jnp.bfloat16, implementation=implementation
    )
    errors = []
    for tx in (ours, optax.adamw(**options, mu_dtype=jnp.bfloat16)):
        params = jnp.asarray(start, jnp.float32)
        state, step = tx.init(params), jax.jit(functools.partial(jfa.step, tx))
        for g in grads:
            params, state = step(jnp.asarray(g, jnp.float32), state, params)
        errors.append(np.abs(as_float64(params) - exact).mean())
    assert errors[0] <= 2 * errors[1]


@each_implementation
@pytest.mark.slow
def test_no_drift_over_3000_steps(implementation):
    """Parameters that chase a moving target end where those of float32 moments do."""
    target = jnp.linspace(-1.0, 1.0, 4096)

    def run(**options):
        tx = jfa.fused_adamw(
            3e-3, weight_decay=0.0, implementation=implementation, **options
        )

        @jax.jit
        def step(params, state, i):
            noise = jax.random.normal(jax.random.key(i), params.shape)
            return jfa.step(tx, params - target + 0.1 * noise, state, params)

        params, state = jnp.zeros(4096), tx.init(target)
        for i in range(3000):
            params, state = step(params, state, i)
        return as_float64(params - target)

    exact, low = run(), run(**LOW)
    assert np.sqrt((low**2).mean()) <= 1.1 * np.sqrt((exact**2).mean())
    assert abs(low.mean()) <= abs(exact.mean()) + 4 * low.std() / 64


@each_implementation
def test_state_of_other_dtypes_is_refused(implementation):
    tx = jfa.fused_adamw(0.1, implementation=implementation, **LOW)
    state = jfa.fused_adamw(0.1).init(PARAMS)
    with pytest.raises(
        TypeError, match=r"state.mu\['a'\] has dtype float32, expected b"
    ):
        tx.update(GRADS, state, PARAMS)


@each_implementation
def test_vmap_is_a_loop_over_members(implementation):
    """Noise too: it is that of the element in its own member."""
    tx = jfa.fused_adamw(0.1, implementation=implementation, **LOW)
    members = [random_like(GRADS, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    state = tx.init(PARAMS)
    step = jax.jit(functools.partial(jfa.step, tx))
    expected = [step(grads, state, PARAMS) for grads in members]
    batched = jax.jit(jax.vmap(step, in_axes=(0, None, None)))(stacked, state, PARAMS)
    for i, (params, new) in enumerate(expected):
        got_params, got = jax.tree.map(lambda x, i=i: x[i], batched)
        assert_same_bits(got_params, params)
        assert_same_bits((got.mu, got.nu), (new.mu, new.nu))
