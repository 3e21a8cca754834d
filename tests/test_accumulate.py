"""`jfa.accumulate`: windows, weights and skips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    WAYS,
    assert_same_bits,
    bits,
    plain_tx,
    random_like,
    take_step,
)

import jax_fused_adamw as jfa

every_way = pytest.mark.parametrize("way", WAYS)

PARAMS = random_like(
    {
        "w": jnp.zeros((5, 3)),
        "h": [jnp.zeros(7, jnp.bfloat16), None],
        "b": jnp.zeros(()),
    },
    seed=1,
)
MICRO = [random_like(PARAMS, seed=seed) for seed in range(2, 10)]


def ours(way="step", **options):
    options = {"learning_rate": 0.1, "weight_decay": 0.1, **options}
    return plain_tx(way, **options)


def clipped(way="step"):
    return optax.chain(optax.clip_by_global_norm(0.5), ours(way))


def masked(way="step"):
    return optax.masked(ours(way), {"w": True, "h": True, "b": False})


def multi(way="step"):
    groups = {"fast": ours(way, learning_rate=1.0), "slow": ours(way)}
    return optax.multi_transform(groups, {"w": "fast", "h": "slow", "b": "fast"})


def injected(way="step"):
    factory = optax.inject_hyperparams(
        jfa.fused_adamw, static_args="in_place", hyperparam_dtype=jnp.float32
    )
    return factory(learning_rate=lambda n: 0.1 / (n + 1), in_place=way == "in_place")


def nested(way="step"):
    return optax.chain(
        optax.identity(), optax.masked(clipped(way), {"w": True, "h": True, "b": False})
    )


def adam(way="step"):
    return optax.adam(0.1)


INNER = [ours, clipped, masked, multi, injected, nested, adam]


def mean(grads, weights=None):
    """In float32, in the order of the micro-batches, correctly rounded."""
    weights = np.float32(weights or [1] * len(grads))
    total = None
    for weight, grad in zip(weights, grads, strict=True):
        term = jax.tree.map(lambda g, w=weight: w * np.float32(g), grad)
        total = term if total is None else jax.tree.map(np.add, total, term)
    return jax.tree.map(lambda t: jnp.asarray(t / weights.sum()), total)


def times(grads, factor):
    return jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), grads)


def with_step(tx, way="step"):
    def step(params, state, grads, extra):
        return take_step(way, tx, grads, state, params, **extra)

    return tx, jax.jit(step)


@functools.cache
def windows(k, inner=None, way="step"):
    """``accumulate`` and its step, compiled once for all tests."""
    return with_step(jfa.accumulate((inner or ours)(way), k), way)


@functools.cache
def alone(inner=None, way="step"):
    return with_step((inner or ours)(way), way)


NEUTRAL = {
    "weight": jnp.float32(1.0),
    "skip_update": jnp.array(False),
    "gradient_scale": jnp.float32(1.0),
    "report": jfa.GradReport(jnp.float32(1.0), jnp.float32(1.0), jnp.int32(0)),
}


def walk(tx_and_step, grads, params=PARAMS, extras=None, state=None):
    """Parameters and states after every micro-batch."""
    tx, step = tx_and_step
    state = tx.init(params) if state is None else state
    extras = [{**NEUTRAL, **extra} for extra in extras] if extras else [{}] * len(grads)
    for grad, extra in zip(grads, extras, strict=True):
        params, state = step(params, state, grad, extra)
        yield params, state


def last(steps):
    *_, end = steps
    return end


# --- Windows --------------------------------------------------------------------------


WAYS_OF_INNER = [(inner, "step") for inner in INNER] + [
    (ours, "in_place"),
    (ours, "update"),
    (multi, "in_place"),
    (adam, "update"),
]
every_inner = pytest.mark.parametrize(
    "inner, way", WAYS_OF_INNER, ids=lambda x: getattr(x, "__name__", x)
)


@every_inner
def test_windows_equal_steps_on_means_and_one_nan_skips_its_own(inner, way):
    """Through optax's wrappers and around its own transformations."""
    grads = list(MICRO) + list(MICRO[:4])
    grads[6] = spoiled(grads[6])
    _, reference = alone(inner, way)
    # XLA may round clipping and adam otherwise where it fuses them with the mean.
    same = assert_close if inner in (clipped, nested, adam) else assert_same_bits
    params, inner_state = PARAMS, inner(way).init(PARAMS)
    for i, (new, state) in enumerate(walk(windows(4, inner, way), grads)):
        if i in (3, 11):
            gradients = mean(grads[i - 3 : i + 1])
            expected, expected_state = reference(params, inner_state, gradients, {})
            # A float32 gradient promotes adam's bfloat16 moments.
            same(new, expected)
            same(
                without_skips(state.inner_opt_state),
                jax.tree.map(
                    lambda x, old: x.astype(old.dtype),
                    without_skips(expected_state),
                    without_skips(inner_state),
                ),
            )
            assert (bits(new["w"]) != bits(params["w"])).all()
        else:
            assert_same_bits(new, params)
            kept = without_skips(inner_state)
            assert_same_bits(without_skips(state.inner_opt_state), kept)
        assert int(state.skipped_windows) == (i >= 7)
        for counted in states_of_ours(state.inner_opt_state):
            assert int(counted.skipped) == (i >= 7)
            assert int(counted.consecutive) == (7 <= i < 11)
        params, inner_state = new, state.inner_opt_state


def assert_close(actual, expected):
    def check(a, e):
        assert a.dtype == e.dtype
        rtol = 2.0**-7 if a.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.float32(a), np.float32(e), rtol=rtol)

    jax.tree.map(check, actual, expected)


def is_ours(node):
    return isinstance(node, jfa.FusedAdamWState)


def states_of_ours(state):
    return [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]


def without_skips(state):
    def drop(node):
        return node._replace(skipped=None, consecutive=None) if is_ours(node) else node

    return jax.tree.map(drop, state, is_leaf=is_ours)


def spoiled(grads, value=np.nan):
    return {**grads, "w": grads["w"].at[1, 2].set(value)}


def test_mean_of_three_is_correctly_rounded():
    """The kernel divides; XLA multiplies by a third."""
    params, state = last(walk(windows(3), MICRO[:3]))
    expected = ours().step(mean(MICRO[:3]), ours().init(PARAMS), PARAMS)
    assert_same_bits((params, state.inner_opt_state), expected)


@every_way
def test_b35_bfloat16_window(way):
    """Three calls leave the bits, the fourth equals one with the mean."""
    params = {
        "w": jnp.array([-0.0, 0.0, 1.5, -2.0], jnp.bfloat16),
        "b": jnp.float32(-0.0),
    }

    def full(value):
        return jax.tree.map(lambda p: jnp.full_like(p, value), params)

    grads = [full(g) for g in (1.0, 2.0, 3.0, 4.0)]
    steps = list(walk(windows(4, ours, way), grads, params))
    for new, state in steps[:3]:
        assert_same_bits(new, params)
        assert int(state.inner_opt_state.count) == 0
    expected = last(walk(alone(ours, way), [full(2.5)], params))
    assert_same_bits((steps[3][0], steps[3][1].inner_opt_state), expected)
    assert (bits(expected[0]["w"]) != bits(params["w"])).all()


@every_way
def test_window_of_one_is_the_step_itself(way):
    got = last(walk(windows(1, ours, way), MICRO[:3]))
    expected = last(walk(alone(ours, way), MICRO[:3]))
    assert_same_bits((got[0], got[1].inner_opt_state), expected)


def test_schedule_moves_once_per_window():
    """1e-3 for updates 1 to 100, 5e-4 from 101."""
    schedule = optax.exponential_decay(1e-3, 100, 0.5, staircase=True)
    tx = jfa.accumulate(plain_tx(learning_rate=schedule, eps=0.0), 2)
    params, grads = jnp.float32(0.0), jnp.float32(1.0)

    def body(carry, _):
        params, state = carry
        after = jfa.step(tx, grads, state, params)
        return after, params - after[0]

    moves = jax.jit(lambda c: jax.lax.scan(body, c, length=204)[1])
    moves = moves((params, tx.init(params)))
    assert not moves[::2].any()
    np.testing.assert_allclose(moves[1::2], [1e-3] * 100 + [5e-4] * 2, rtol=1e-3)


@pytest.mark.parametrize("inner", [ours, clipped])
def test_weights(inner):
    """Sum of w g over sum of w: the mean of all samples of unequal micro-batches."""
    weights = [3, 1, 4]
    extras = [{"weight": jnp.float32(w)} for w in weights]
    got = last(walk(windows(3, inner), MICRO[:3], extras=extras))
    expected = last(walk(alone(inner), [mean(MICRO[:3], weights)]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.float32(a), np.float32(b), rtol=1e-5
        ),
        got[0],
        expected[0],
    )
    assert float(got[1].total_weight) == 8.0
    equal = last(walk(windows(3, inner), MICRO[:3]))
    assert not np.allclose(got[0]["w"], equal[0]["w"], rtol=1e-3)


@pytest.mark.parametrize("garbage", [np.nan, 1.0])
def test_weight_zero_adds_nothing(garbage):
    """The mean over no samples is NaN, and no reason to skip."""
    padding = jax.tree.map(lambda p: jnp.full_like(p, garbage), PARAMS)
    for grads, weights in [
        ([padding, MICRO[0], MICRO[1]], (0.0, 1.0, 1.0)),
        ([MICRO[0], MICRO[1], padding], (1.0, 1.0, 0.0)),
    ]:
        extras = [{"weight": jnp.float32(w)} for w in weights]
        got = last(walk(windows(3), grads, extras=extras))
        expected = last(walk(windows(2), MICRO[:2]))
        assert_same_bits(got, expected)


def test_empty_window_is_a_no_op():
    extras = [{"weight": jnp.float32(0.0)}] * 2
    start = last(walk(windows(2), MICRO[:2]))
    after = last(walk(windows(2), MICRO[2:4], start[0], extras, start[1]))
    assert_same_bits(after[0], start[0])
    assert_same_bits(after[1].inner_opt_state, start[1].inner_opt_state)
    assert int(after[1].mini_step) == 0 and int(after[1].skipped_windows) == 0
    assert_same_bits(
        last(walk(windows(2), MICRO[4:6], after[0], state=after[1])),
        last(walk(windows(2), MICRO[4:6], start[0], state=start[1])),
    )


@pytest.mark.parametrize("wrap", [lambda tx: tx, optax.chain], ids=["bare", "chained"])
@pytest.mark.parametrize(
    "options", [{"master_weights": True}, {"stochastic_rounding": "params"}, {}]
)
def test_in_place_updates_lead_to_the_same_params_across_a_jit(options, wrap):
    """There only the difference survives: float32 where no other leads everywhere."""
    params = {"w": jnp.linspace(0.5, 2.0, 999, dtype=jnp.bfloat16), "b": jnp.ones(3)}
    grads = random_like(params, seed=3)

    def updates_and_state(**more):
        tx = jfa.fused_adamw(0.01, **options, **more)
        tx = jfa.accumulate(wrap(tx), 1)
        return jax.jit(tx.update)(grads, tx.init(params), params)

    updates, state = updates_and_state(in_place=True)
    plain, plain_state = updates_and_state()
    dtypes = [x.dtype for x in jax.tree.leaves(updates)]
    assert dtypes == [x.dtype for x in jax.tree.leaves(plain)]
    if options:
        expected = optax.apply_updates(params, plain)
        assert_same_bits(optax.apply_updates(params, updates), expected)
        assert_same_bits(state, plain_state)


# --- Skips ----------------------------------------------------------------------------


CAUSES = {
    "nan": lambda g: (spoiled(g), {}),
    "inf": lambda g: (spoiled(g, np.inf), {}),
    "skip": lambda g: (g, {"skip_update": jnp.array(True)}),
    "report": lambda g: (
        g,
        {"report": jfa.GradReport(*[jnp.float32(0)] * 2, jnp.int32(2))},
    ),
    "scale inf": lambda g: (g, {"gradient_scale": jnp.float32(np.inf)}),
    "scale 0": lambda g: (
        jax.tree.map(jnp.zeros_like, g),
        {"gradient_scale": jnp.float32(0)},
    ),
    "scale -1": lambda g: (g, {"gradient_scale": jnp.float32(-1)}),
    "scale nan": lambda g: (g, {"gradient_scale": jnp.float32(np.nan)}),
    "weight -1": lambda g: (g, {"weight": jnp.float32(-1)}),
    "weight inf": lambda g: (g, {"weight": jnp.float32(np.inf)}),
    "weight nan": lambda g: (g, {"weight": jnp.float32(np.nan)}),
}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_of_a_skip(cause, position):
    """Counted once, in the wrapper and in ours; gone with the next window."""
    run = windows(2, clipped)
    grads, extras = list(MICRO[:2]), [{}, {}]
    grads[position], extras[position] = CAUSES[cause](grads[position])
    params, state = last(walk(run, grads, extras=extras))
    assert_same_bits(params, PARAMS)
    inner = state.inner_opt_state[1]
    assert (int(inner.skipped), int(inner.consecutive), int(inner.count)) == (1, 1, 0)
    assert int(state.skipped_windows) == 1 and int(state.mini_step) == 0
    params, state = last(walk(run, MICRO[2:4], params, state=state))
    inner = state.inner_opt_state[1]
    assert (int(inner.skipped), int(inner.consecutive), int(inner.count)) == (1, 0, 1)
    assert_same_bits(params, last(walk(run, MICRO[2:4]))[0])


def test_sum_beyond_float32_skips():
    params = jnp.ones(3)
    grads = [jnp.full(3, 3e38)] * 2
    params, state = last(walk(windows(2), grads, params))
    assert_same_bits(params, jnp.ones(3))
    assert int(state.skipped_windows) == 1


def test_weights_beyond_float32_skip():
    extras = [{"weight": jnp.float32(3e38)}] * 2
    grads = [times(g, 1e-30) for g in MICRO[:2]]  # their sums are finite
    params, state = last(walk(windows(2), grads, extras=extras))
    assert_same_bits(params, PARAMS)
    assert int(state.skipped_windows) == 1


def test_skips_are_counted_without_overflow():
    tx = jfa.accumulate(ours(), 1)
    most = jnp.int32(2**31 - 1)
    state = tx.init(PARAMS)
    inner = state.inner_opt_state._replace(skipped=most, consecutive=most)
    state = state._replace(inner_opt_state=inner, skipped_windows=most)
    _, state = jfa.step(tx, MICRO[0], state, PARAMS, skip_update=True)
    inner = state.inner_opt_state
    for count in (inner.skipped, inner.consecutive, state.skipped_windows):
        assert_same_bits(count, most)
