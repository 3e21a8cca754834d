"""Float32 masters of low-precision parameters, which are their rounded copies."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import HYPERPARAMS, WAYS, assert_same_bits, make_tx, random_like, take_step
from low_precision import GRADS, PARAMS, as_float64, each_implementation, steps

import jax_fused_adamw as jfa

each_way = pytest.mark.parametrize("way", WAYS)
LOW = {name for name, x in PARAMS.items() if x.dtype != jnp.float32}


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def assert_rounded(params, master):
    """Every parameter with a master is it, rounded to nearest even."""
    for name in LOW:
        rounded = np.asarray(master[name]).astype(params[name].dtype)
        np.testing.assert_array_equal(params[name], rounded)


def walk(way, tx, params, grads, count):
    state, step = tx.init(params), jax.jit(functools.partial(take_step, way, tx))
    for _ in range(count):
        params, state = step(grads, state, params)
        yield params, state
    assert step._cache_size() == 1


@each_implementation
@each_way
def test_masters_step_as_float32_parameters_and_params_are_their_copies(
    way, implementation
):
    options = HYPERPARAMS | dict(implementation=implementation)
    tx = make_tx(way, **options, master_weights=True)
    exact = make_tx("step", **options)
    expected = walk("step", exact, wide(PARAMS), GRADS, 5)
    for (params, state), (masters, want) in zip(
        walk(way, tx, PARAMS, GRADS, 5), expected, strict=True
    ):
        assert {k: x.dtype for k, x in params.items()} == {
            k: x.dtype for k, x in PARAMS.items()
        }
        assert {k for k, x in state.master.items() if x is not None} == LOW
        assert_rounded(params, state.master)
        for name in PARAMS:
            got = state.master[name] if name in LOW else params[name]
            assert got.dtype == jnp.float32
            if implementation == "ffi":
                np.testing.assert_array_equal(got, masters[name])
            np.testing.assert_allclose(got, masters[name], rtol=1e-5, atol=1e-7)
        assert int(state.count) == int(want.count)


@each_implementation
@each_way
def test_b27_steps_below_half_an_ulp_add_up(way, implementation):
    params = jnp.ones(3, jnp.bfloat16)
    tx = make_tx(
        way,
        learning_rate=1e-4,
        weight_decay=0.0,
        master_weights=True,
        implementation=implementation,
    )
    *_, (new, state) = walk(way, tx, params, params, 50)
    np.testing.assert_allclose(state.master, np.full(3, 0.995), rtol=1e-6)
    assert (as_float64(new) == 0.99609375).all()


@each_implementation
@each_way
def test_b22_zero_gradients_and_decay(way, implementation):
    params = jnp.array([1.0, -2.0, 0.5], jnp.float16)
    for decay, masters in ((0.0, [1.0, -2.0, 0.5]), (0.1, [0.9999, -1.9998, 0.49995])):
        tx = make_tx(
            way,
            learning_rate=1e-3,
            weight_decay=decay,
            master_weights=True,
            implementation=implementation,
        )
        [(new, state)] = walk(way, tx, params, jnp.zeros_like(params), 1)
        np.testing.assert_allclose(state.master, masters, rtol=1e-6)
        np.testing.assert_array_equal(new, np.float16(state.master))


def test_plain_updates_are_float32_differences_to_the_copy():
    """C7: no bfloat16 difference leads to every copy."""
    tx = jfa.fused_adamw(1e-3, master_weights=True, implementation="xla")
    params = random_like({"b": jnp.zeros(20_000, jnp.bfloat16)}, seed=1)
    grads, state = random_like(params, seed=2), tx.init(params)
    updates, new = tx.update(grads, state, params)
    assert updates["b"].dtype == jnp.float32
    copy = np.asarray(new.master["b"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["b"], copy)
    difference = as_float64(copy) - as_float64(params["b"])
    np.testing.assert_array_equal(as_float64(updates["b"]), difference)
    low = (params["b"] + updates["b"].astype(jnp.bfloat16)).astype(jnp.bfloat16)
    assert (np.asarray(low) != copy).any()
    same = copy == np.asarray(params["b"])
    assert same.any() and np.signbit(np.asarray(updates["b"])[same]).all()


def test_every_low_half_of_a_master_rounds_to_nearest_even():
    """All 2^16 of them, under several high halves: a step that moves nothing."""
    highs = [0x3F80, 0x3F81, 0xBF7F, 0x0080, 0x7F7F, 0x4240, 0xC77F]
    masters = np.concatenate(
        [(high << 16 | np.arange(2**16, dtype=np.uint32)) for high in highs]
    ).view(np.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        tx = jfa.fused_adamw(0.0, weight_decay=0.0, master_weights=True)
        params = jnp.zeros(masters.size, dtype)
        state = tx.init(params)._replace(master=jnp.asarray(masters))
        for implementation in ("ffi", "xla"):
            if implementation == "ffi" and not jfa.kernel_info().cpu.loaded:
                continue
            tx = jfa.fused_adamw(
                0.0,
                weight_decay=0.0,
                master_weights=True,
                implementation=implementation,
            )
            new, _ = tx.step(jnp.zeros_like(params), state, params)
            with np.errstate(over="ignore"):
                expected = masters.astype(np.asarray(new).dtype)
            np.testing.assert_array_equal(np.asarray(new), expected)


@each_implementation
@each_way
def test_skipped_step_keeps_every_bit(way, implementation):
    """Also where parameter and master disagree, which is then not mended silently."""
    tx = make_tx(
        way, learning_rate=0.1, master_weights=True, implementation=implementation
    )
    state = tx.init(PARAMS)
    changed = PARAMS | {"b": PARAMS["b"].at[3].set(jnp.nan).at[4].set(-0.0)}
    step = jax.jit(functools.partial(take_step, way, tx, skip_update=True))
    params, new = step(GRADS, state, changed)
    assert_same_bits(params, changed)
    assert_same_bits(new.master, state.master)
    assert (int(new.count), int(new.skipped)) == (0, 1)


@each_implementation
@pytest.mark.parametrize(
    "options", [dict(max_grad_norm=0.1), dict(amsgrad=True)], ids=str
)
def test_all_ways_lead_to_the_same_params(options, implementation):
    results = []
    for way in WAYS:
        tx = make_tx(
            way,
            learning_rate=0.1,
            master_weights=True,
            implementation=implementation,
            **options,
        )
        *_, last = walk(way, tx, PARAMS, GRADS, 3)
        results.append(last)
    for params, state in results[1:]:
        if implementation == "ffi":
            assert_same_bits((params, state), results[0])
        assert_rounded(params, state.master)


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {k: k != "d" for k in PARAMS}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"ours": tx, "sgd": optax.sgd(0.1)},
        {k: "sgd" if k == "a" else "ours" for k in PARAMS},
    ),
    "accumulate": lambda tx: jfa.accumulate(tx, 1),
}


@each_implementation
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_through_wrappers(wrapper, implementation):
    ours = jfa.fused_adamw(0.1, master_weights=True, implementation=implementation)
    params, state = steps(WRAPPERS[wrapper](ours), PARAMS, GRADS)
    assert_rounded(params, optax.tree.get(state, "master"))
    assert int(optax.tree.get(state, "count")) == 3


@each_implementation
def test_through_inject_hyperparams(implementation):
    make = optax.inject_hyperparams(
        jfa.fused_adamw,
        static_args=("master_weights", "implementation"),
        hyperparam_dtype=jnp.float32,
    )
    tx = make(0.1, master_weights=True, implementation=implementation)
    params, state = steps(tx, PARAMS, GRADS)
    assert_rounded(params, state.inner_state.master)


@each_implementation
def test_first_step_without_a_state(implementation):
    tx = jfa.fused_adamw(0.1, master_weights=True, implementation=implementation)
    expected = tx.step(GRADS, tx.init(PARAMS), PARAMS)
    got = jfa.adamw_step(PARAMS, GRADS, options=tx)
    assert_same_bits(got, expected)


@each_implementation
@pytest.mark.parametrize("jit", [False, True])
def test_init_shares_no_buffer(jit, implementation):
    """C16; a master of each parameter, and none of float32 ones."""
    tx = jfa.fused_adamw(
        0.1,
        master_weights=True,
        ema_decay=0.9,
        compute_dtype=jnp.bfloat16,
        implementation=implementation,
    )
    init = jax.jit(tx.init) if jit else tx.init
    leaves = jax.tree.leaves((PARAMS, init(PARAMS)))
    pointers = [x.unsafe_buffer_pointer() for x in leaves if x.size]
    assert len(set(pointers)) == len(pointers)
    assert all(not x.weak_type for x in jax.tree.leaves(init(PARAMS)))


def test_state_survives_a_checkpoint():
    tx = jfa.fused_adamw(0.1, master_weights=True, implementation="xla")
    params, state = steps(tx, PARAMS, GRADS)
    saved = flax.serialization.to_bytes((params, state))
    target = jax.tree.map(jnp.zeros_like, (params, state))
    restored = jax.tree.map(jnp.asarray, flax.serialization.from_bytes(target, saved))
    assert_same_bits(restored, (params, state))
    expected = steps(tx, params, GRADS, 2, state)
    assert_same_bits(steps(tx, restored[0], GRADS, 2, restored[1]), expected)


def test_state_of_other_options_or_params_is_refused():
    tx = jfa.fused_adamw(0.1, master_weights=True, implementation="xla")
    plain = jfa.fused_adamw(0.1, implementation="xla")
    with pytest.raises(ValueError, match="has no master, but master_weights is True"):
        tx.update(GRADS, plain.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="has a master, but master_weights is False"):
        plain.update(GRADS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"state.master\['b'\] has no counterpart"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS | {"b": wide(PARAMS["b"])})
    state = tx.init(PARAMS)
    state = state._replace(master=state.master | {"b": PARAMS["b"]})
    with pytest.raises(TypeError, match=r"state.master\['b'\] has dtype bfloat16"):
        tx.update(GRADS, state, PARAMS)


# --- bfloat16 parameters without masters ----------------------------------------------


@each_implementation
@each_way
def test_small_steps_of_bfloat16_move_by_the_right_mean(way, implementation):
    """|u| < 2^-9 |p| vanishes in rounding to nearest, and not in "params"."""
    n = 1 << 16
    params, grads = jnp.ones(n, jnp.bfloat16), jnp.ones(n, jnp.bfloat16)
    options = dict(
        learning_rate=2.0**-12, weight_decay=0.0, implementation=implementation
    )
    for rounding in (True, False):
        tx = make_tx(way, stochastic_rounding=rounding, **options)
        *_, (stuck, _) = walk(way, tx, params, grads, 4)
        assert (as_float64(stuck) == 1.0).all()
    tx = make_tx(way, stochastic_rounding="params", **options)
    *_, (moved, state) = walk(way, tx, params, grads, 4)
    assert moved.dtype == jnp.bfloat16 and state.mu.dtype == jnp.float32
    values = as_float64(moved)
    sigma = values.std() / np.sqrt(n)
    assert abs(values.mean() - (1 - 4 * 2.0**-12)) < 4 * sigma + 2.0**-20
    assert set(values) <= {1 - k * 2.0**-8 for k in range(5)}


@each_implementation
def test_params_rounding_leaves_other_dtypes_and_masters_alone(implementation):
    make = functools.partial(jfa.fused_adamw, 1e-3, implementation=implementation)
    params, _ = steps(make(stochastic_rounding="params"), PARAMS, GRADS)
    nearest, _ = steps(make(), PARAMS, GRADS)
    for name in PARAMS.keys() - {"b", "e"}:
        np.testing.assert_array_equal(params[name], nearest[name])
    assert (np.asarray(params["b"]) != np.asarray(nearest["b"])).any()
    make = functools.partial(make, master_weights=True)
    assert_same_bits(
        steps(make(stochastic_rounding="params"), PARAMS, GRADS),
        steps(make(), PARAMS, GRADS),
    )
