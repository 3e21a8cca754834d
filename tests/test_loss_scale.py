"""`jfa.DynamicLossScale`: its scales, next to Flax's, and its life as a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import assert_same_bits, random_like
from test_cases_checkpoints import RESTORES

import jax_fused_adamw as jfa


def report_of(nonfinite) -> jfa.GradReport:
    zero = jnp.float32(0.0)
    return jfa.GradReport(zero, zero, jnp.int32(nonfinite))


def follow(loss_scale, finite):
    """The scales after each of many steps, in one scan."""

    def body(loss_scale, finite):
        loss_scale = loss_scale.update(finite=finite)
        return loss_scale, loss_scale.value

    return jax.jit(lambda s, f: jax.lax.scan(body, s, f))(loss_scale, finite)


FLAX_OPTIONS = [
    {},
    dict(growth_interval=3),
    dict(growth_interval=1, growth_factor=1.7, backoff_factor=0.3),
    dict(growth_interval=2, growth_factor=1e20, backoff_factor=1e-20),
]


@pytest.mark.parametrize("options", FLAX_OPTIONS, ids=str)
def test_scales_are_those_of_flax(options):
    """Side by side on one sequence, up to the largest float32 and back to the least."""
    rng = np.random.default_rng(0)
    finite = rng.random(12000) < np.repeat([0.95, 1.0, 0.4, 0.9], 3000)

    def body(scales, is_finite):
        ours, theirs = scales
        x = jnp.where(is_finite, 1.0, jnp.nan)
        theirs, seen, _, _ = theirs.value_and_grad(lambda w: w * x)(jnp.float32(2.0))
        ours = ours.update(finite=seen)
        pair = (ours.value, theirs.scale, ours.finite_steps, theirs.fin_steps)
        return (ours, theirs), pair

    theirs = DynamicScale(**options)
    theirs = theirs.replace(fin_steps=jnp.int32(0), scale=jnp.float32(theirs.scale))
    walk = jax.jit(lambda *scales: jax.lax.scan(body, scales, finite)[1])
    value, scale, finite_steps, fin_steps = walk(
        jfa.DynamicLossScale(**options), theirs
    )
    # At the largest scales a sound loss overflows too, so finiteness is Flax's.
    assert_same_bits(value, scale)
    assert_same_bits(finite_steps, fin_steps)
    assert len(np.unique(value)) >= 3


def test_growth_and_backoff():
    options = dict(value=8.0, growth_interval=2, min_scale=2.0, max_scale=16.0)
    finite = jnp.array([1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1], bool)
    end, values = follow(jfa.DynamicLossScale(**options), finite)
    expected = [8, 8, 16, 16, 16, 16, 8, 8, 8, 4, 2, 2, 2, 2, 4]
    assert values.tolist() == expected
    assert int(end.finite_steps) == 0
    defaults = jfa.DynamicLossScale()
    assert float(defaults.value) == 65536.0
    _, values = follow(defaults, jnp.ones(2001, bool))
    assert (values[1999], values[2000]) == (65536.0, 131072.0)


@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3), (3e38, 1e-38)], ids=str)
@pytest.mark.parametrize("finite", [True, False])
def test_scale_stays_usable_for_ever(factors, finite):
    growth, backoff = factors
    loss_scale = jfa.DynamicLossScale(
        growth_factor=growth, backoff_factor=backoff, growth_interval=1
    )
    end, values = follow(loss_scale, jnp.full(1000, finite))
    assert np.isfinite(values).all()
    assert (values >= np.finfo(np.float32).tiny).all()
    info = np.finfo(np.float32)
    assert float(end.value) == (info.max if finite else info.tiny)
    # And it comes back from either end.
    _, values = follow(end, jnp.full(1000, not finite))
    assert values[-1] == (info.tiny if finite else info.max)


def test_counter_beyond_the_interval_and_at_its_limit():
    """A counter restored into another interval; and the largest interval."""
    loss_scale = jfa.DynamicLossScale(value=4.0, growth_interval=10, finite_steps=50)
    assert float(loss_scale.update(finite=True).value) == 8.0
    largest = 2**31 - 1
    loss_scale = jfa.DynamicLossScale(growth_interval=largest, finite_steps=largest - 1)
    loss_scale = loss_scale.update(finite=True)
    assert int(loss_scale.finite_steps) == largest
    loss_scale = loss_scale.update(finite=True)
    assert (float(loss_scale.value), int(loss_scale.finite_steps)) == (131072.0, 0)


def test_update_takes_a_report_or_finite():
    start = jfa.DynamicLossScale(finite_steps=7)
    assert_same_bits(start.update(report_of(0)), start.update(finite=True))
    for nonfinite in (1, 2**31 - 1):
        after = start.update(report_of(nonfinite))
        assert_same_bits(after, start.update(finite=jnp.array(False)))
        assert float(after.value) == 32768.0 and int(after.finite_steps) == 0
    assert int(start.finite_steps) == 7


SCALED_DTYPES = {"float16": "float32", "bfloat16": "float32", "float32": "float32"}


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
def test_scaled_loss_is_float32(dtype):
    """100 * 65536 is beyond float16."""
    loss_scale = jfa.DynamicLossScale()
    scaled = loss_scale.scale(jnp.full((3,), 100.0, dtype))
    assert scaled.dtype == SCALED_DTYPES[dtype] and not scaled.weak_type
    np.testing.assert_array_equal(scaled, np.full(3, 6553600.0))
    with jax.enable_x64(True):
        assert loss_scale.scale(jnp.float64(1.0)).dtype == jnp.float64
        assert loss_scale.update(finite=True).value.dtype == jnp.float32
    assert loss_scale.scale(2.0).dtype == jnp.float32


@pytest.mark.parametrize(
    "kind, options",
    [
        (ValueError, dict(growth_factor=1.0)),
        (ValueError, dict(growth_factor=float("inf"))),
        (ValueError, dict(backoff_factor=0.0)),
        (ValueError, dict(backoff_factor=1.0)),
        (ValueError, dict(backoff_factor=float("nan"))),
        (ValueError, dict(growth_interval=0)),
        (ValueError, dict(growth_interval=2**31)),
        (TypeError, dict(growth_interval=10.0)),
        (ValueError, dict(min_scale=0.0)),
        (ValueError, dict(min_scale=1e-40)),
        (ValueError, dict(max_scale=float("inf"))),
        (ValueError, dict(min_scale=2.0, max_scale=1.0)),
        (ValueError, dict(value=0.0)),
        (ValueError, dict(value=float("inf"))),
        (ValueError, dict(value=float("nan"))),
        (ValueError, dict(value=1.0, min_scale=2.0)),
        (TypeError, dict(value="65536")),
        (TypeError, dict(value=np.ones((), np.float16))),
        (TypeError, dict(value=True)),
        (ValueError, dict(value=jnp.ones(2))),
        (ValueError, dict(value=jnp.float32(-3.0))),
        (ValueError, dict(value=np.array(np.nan, np.float32))),
        (ValueError, dict(finite_steps=-1)),
        (ValueError, dict(finite_steps=jnp.zeros((1,), jnp.int32))),
        (ValueError, dict(finite_steps=jnp.int32(-1))),
        (TypeError, dict(finite_steps=1.0)),
    ],
    ids=str,
)
def test_bad_options_are_named(kind, options):
    name = list(options)[0]
    with pytest.raises(kind, match=f"DynamicLossScale.*{name}"):
        jfa.DynamicLossScale(**options)


def test_a_scale_at_its_limit_is_taken_again():
    """Float32's 0.1 is above Python's."""
    end = jfa.DynamicLossScale(value=0.05, max_scale=0.1, growth_interval=1)
    end = end.update(finite=True).update(finite=True)
    again = jfa.DynamicLossScale(value=end.value, max_scale=0.1)
    assert again.value == np.float32(0.1)


def test_bad_calls_are_named():
    loss_scale = jfa.DynamicLossScale()
    with pytest.raises(TypeError, match="neither"):
        loss_scale.update()
    with pytest.raises(TypeError, match="both"):
        loss_scale.update(report_of(0), finite=True)
    with pytest.raises(TypeError, match="GradReport.*finite="):
        loss_scale.update(jnp.array(True))
    with pytest.raises(TypeError, match="bool"):
        loss_scale.update(finite=jnp.float32(1.0))
    with pytest.raises(ValueError, match=r"\(2,\).*all"):
        loss_scale.update(finite=jnp.array([True, False]))
    with pytest.raises(TypeError, match="int32"):
        loss_scale.scale(jnp.int32(3))


def test_pytree_has_two_strong_leaves_and_static_options():
    loss_scale = jfa.DynamicLossScale(growth_interval=5)
    leaves, treedef = jax.tree.flatten(loss_scale)
    assert [(x.dtype, x.shape, x.weak_type) for x in leaves] == [
        (jnp.float32, (), False),
        (jnp.int32, (), False),
    ]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(loss_scale)]
    assert paths == [".value", ".finite_steps"]
    other = jfa.DynamicLossScale(growth_interval=6)
    assert treedef != jax.tree.structure(other)
    assert treedef == jax.tree.structure(loss_scale.update(finite=False))
    axes = jax.tree.map(lambda _: 0, loss_scale)  # any object may stand in a leaf
    assert axes.value == 0 and axes.growth_interval == 5


@pytest.mark.parametrize("restore", RESTORES, ids=lambda f: f.__name__)
def test_save_and_restore(restore, tmp_path):
    loss_scale = jfa.DynamicLossScale(value=48.0, growth_interval=5, finite_steps=3)
    restored = restore({"loss_scale": loss_scale}, tmp_path)["loss_scale"]
    assert isinstance(restored, jfa.DynamicLossScale)
    assert restored[1:-1] == loss_scale[1:-1]
    finite = jnp.array([1, 1, 1, 1, 0], bool)
    assert_same_bits(follow(restored, finite), follow(loss_scale, finite))


def test_jit_cond_vmap_and_donation():
    start = jfa.DynamicLossScale(growth_interval=1, finite_steps=1)
    step = jax.jit(lambda s, finite: s.update(finite=finite), donate_argnums=0)
    loss_scale = start
    for finite in (True, False, False, True, True, True):
        before = loss_scale
        loss_scale = step(loss_scale, jnp.array(finite))
        assert before.value.is_deleted()
    assert step._cache_size() == 1
    assert float(loss_scale.value) == 65536.0
    kept = jax.jit(
        lambda yes, s: jax.lax.cond(
            yes, lambda s: s.update(finite=True), lambda s: s, s
        )
    )
    assert_same_bits(kept(False, loss_scale), loss_scale)
    assert_same_bits(kept(True, loss_scale), loss_scale.update(finite=True))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), loss_scale)
    finite = jnp.array([True, False])
    after = jax.vmap(lambda s, f: s.update(finite=f))(many, finite)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], after)
        assert_same_bits(one, loss_scale.update(finite=finite[i]))


def make_train_step(tx):
    def train_step(params, state, loss_scale, x):
        def scaled_loss(params):
            return loss_scale.scale((params["w"].astype(jnp.float16) * x).sum())

        grads = jax.grad(scaled_loss)(params)
        finite = jnp.isfinite(grads["w"]).all()
        params, state = jfa.step(
            tx,
            grads,
            state,
            params,
            skip_update=~finite,
            gradient_scale=loss_scale.value,
        )
        return params, state, loss_scale.update(finite=finite)

    return jax.jit(train_step, donate_argnums=(0, 1, 2))


def test_train_step_settles_without_reading_the_device():
    """The first scales overflow float16; afterwards it trains as without a scale."""
    tx = jfa.fused_adamw(0.1)
    params = random_like({"w": jnp.zeros(5)}, seed=1)
    x = jnp.full(5, 4.0, jnp.float16)
    reference, ref_state = dict(params), tx.init(params)
    for _ in range(3):
        grads = {"w": jnp.full(5, 4.0)}
        reference, ref_state = jfa.step(tx, grads, ref_state, reference)
    train_step = make_train_step(tx)
    state, loss_scale = tx.init(params), jfa.DynamicLossScale(2.0**18)
    text = train_step.lower(params, state, loss_scale, x).as_text()
    assert "callback" not in text
    with jax.transfer_guard("disallow"):
        for _ in range(8):
            params, state, loss_scale = train_step(params, state, loss_scale, x)
    # 2^18 down to 2^13, the first whose product with 4 is a float16.
    assert float(loss_scale.value) == 2.0**13
    assert (int(state.skipped), int(state.count)) == (5, 3)
    assert_same_bits(params, reference)
    assert train_step._cache_size() == 1


def test_flax_dynamic_scale_drives_skip_update():
    """Flax has unscaled already: its is_finite is all that the step needs."""
    tx = jfa.fused_adamw(0.1)
    params = {"w": jnp.ones(3)}

    @jax.jit
    def train_step(params, state, dynamic_scale, x):
        def loss(params):
            return (params["w"] * x).sum()

        dynamic_scale, is_finite, _, grads = dynamic_scale.value_and_grad(loss)(params)
        params, state = jfa.step(tx, grads, state, params, skip_update=~is_finite)
        return params, state, dynamic_scale

    state, dynamic_scale = tx.init(params), DynamicScale()
    good, bad = jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])
    for x in (good, bad, good):
        params, state, dynamic_scale = train_step(params, state, dynamic_scale, x)
    assert (int(state.count), int(state.skipped)) == (2, 1)
    assert float(dynamic_scale.scale) == 32768.0
    np.testing.assert_allclose(params["w"], np.full(3, 0.8), rtol=1e-4)
