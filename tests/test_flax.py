"""`jfa.flax.TrainState`, and the same data through `nnx.Optimizer`."""

import subprocess
import sys
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from helpers import assert_same_bits, copies, random_like

import jax_fused_adamw as jfa
import jax_fused_adamw.flax

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 96 * 40).reshape(96, 40),
    "b": jnp.linspace(0.5, 1.5, 96),
}
GRADS = random_like(PARAMS, seed=1, scale=0.1)


def create(cls=jfa.flax.TrainState, tx=None, params=PARAMS, **fields):
    params = jax.tree.map(jnp.copy, params)
    tx = tx or jfa.fused_adamw(1e-2)
    return cls.create(apply_fn=None, params=params, tx=tx, **fields)


def apply(state, grads, extra):
    return state.apply_gradients(grads=grads, **extra)


def in_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )


def test_flax_is_imported_on_demand():
    code = "import sys, jax_fused_adamw; assert 'flax' not in sys.modules"
    assert in_python(code).returncode == 0
    code = "import sys; sys.modules['flax'] = None; import jax_fused_adamw.flax"
    assert "ImportError: jax_fused_adamw.flax needs" in in_python(code).stderr
    assert "pip install flax" in in_python(code).stderr


@pytest.mark.parametrize(
    "tx",
    [
        jfa.fused_adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), jfa.fused_adamw(1e-2)),
        optax.adamw(1e-2),
    ],
    ids=["ours", "chain", "optax"],
)
def test_follows_flax(tx):
    """Fields and bits of Flax's own, for three steps."""
    ours, theirs = create(tx=tx), create(train_state.TrainState, tx=tx)
    for _ in range(3):
        ours = jax.jit(apply)(ours, GRADS, {})
        theirs = jax.jit(apply)(theirs, GRADS, {})
    assert isinstance(ours, train_state.TrainState)
    assert_same_bits(
        (ours.step, ours.params, ours.opt_state),
        (theirs.step, theirs.params, theirs.opt_state),
    )
    assert int(ours.step) == 3


def test_step_data_reaches_the_optimizer():
    state = create()
    plain = apply(state, GRADS, {})
    doubled = jax.tree.map(lambda g: 2.0 * g, GRADS)
    scaled = apply(state, doubled, {"gradient_scale": 2.0})
    assert_same_bits(scaled.params, plain.params)
    skipped = jax.jit(apply)(plain, GRADS, {"skip_update": jnp.array(True)})
    assert_same_bits(skipped.params, plain.params)
    assert_same_bits(skipped.opt_state.mu, plain.opt_state.mu)
    counters = (skipped.step, skipped.opt_state.count, skipped.opt_state.skipped)
    assert [int(x) for x in counters] == [2, 1, 1]  # step counts calls


def recorder():
    """A transformation whose state is the extra arguments that it was given."""

    def update(updates, state, params=None, **extra_args):
        del state, params
        return updates, extra_args

    return optax.GradientTransformationExtraArgs(lambda params: {}, update)


def test_only_what_is_given_is_passed_on():
    state = create(tx=recorder())
    assert apply(state, GRADS, {}).opt_state == {}
    report = jfa.GradReport(jnp.float32(1.0), jnp.float32(1.0), jnp.int32(0))
    given = dict(skip_update=jnp.array(False), gradient_scale=4.0, report=report)
    after = apply(state, GRADS, {**given, "extra_args": {"value": 3.0}})
    assert after.opt_state == {**given, "value": 3.0}


def test_step_data_compiles_once():
    step = jax.jit(apply, donate_argnums=0)
    state = create()
    state = state.replace(step=jnp.int32(0))
    for skip, scale in [(False, 1.0), (True, 2.0), (False, 4.0)]:
        extra = {"skip_update": jnp.array(skip), "gradient_scale": jnp.float32(scale)}
        state = step(state, GRADS, extra)
    assert step._cache_size() == 1
    assert int(state.opt_state.count) == 2


def test_donated_step_copies_nothing():
    extra = {"skip_update": jnp.array(True), "gradient_scale": jnp.float32(2.0)}
    step = jax.jit(apply, donate_argnums=0)
    compiled = step.lower(create(), GRADS, extra).compile()
    assert "jax_fused_adamw_update" in compiled.as_text()
    assert copies(compiled) == 0
    assert "f32[96,40]{1,0} add(" not in compiled.as_text()
    theirs = step.lower(create(train_state.TrainState), GRADS, {}).compile()
    assert "f32[96,40]{1,0} add(" in theirs.as_text()


class WithBatchStats(jfa.flax.TrainState):
    batch_stats: Any


def test_subclass_fields_are_replaced():
    state = create(WithBatchStats, batch_stats={"mean": jnp.zeros(2)})
    stats = {"mean": jnp.ones(2)}
    after = apply(state, GRADS, {"batch_stats": stats, "skip_update": True})
    assert isinstance(after, WithBatchStats)
    assert_same_bits(after.batch_stats, stats)
    assert_same_bits(after.params, state.params)
    with pytest.raises(TypeError, match="no_such_field"):
        apply(state, GRADS, {"no_such_field": 1})


@pytest.mark.parametrize("skip", [None, False, True, jnp.int32(2)], ids=str)
def test_overwrite_with_gradient(skip):
    params = {"params": PARAMS, OVERWRITE_WITH_GRADIENT: {"amax": jnp.ones(4)}}
    grads = {"params": GRADS, OVERWRITE_WITH_GRADIENT: {"amax": jnp.full(4, 7.0)}}
    state = create(params=params)
    assert jax.tree.structure(state.opt_state.mu) == jax.tree.structure(PARAMS)
    after = apply(state, grads, {} if skip is None else {"skip_update": skip})
    if skip:
        assert_same_bits(after.params, params)
        return
    assert_same_bits(after.params["params"], apply(create(), GRADS, {}).params)
    assert_same_bits(
        after.params[OVERWRITE_WITH_GRADIENT], grads[OVERWRITE_WITH_GRADIENT]
    )
    theirs = create(train_state.TrainState, params=params)
    assert_same_bits(after.params, theirs.apply_gradients(grads=grads).params)


def test_serialization_resumes():
    tx = jfa.accumulate(jfa.fused_adamw(1e-2), 2)
    state = apply(create(tx=tx), GRADS, {})
    stored = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(create(tx=tx), stored)
    resumed, expected = apply(restored, GRADS, {}), apply(state, GRADS, {})
    assert (resumed.step, int(resumed.opt_state.inner_opt_state.count)) == (2, 1)
    assert_same_bits(
        (resumed.params, resumed.opt_state), (expected.params, expected.opt_state)
    )
    weighted = apply(state, GRADS, {"extra_args": {"weight": 3.0}})
    assert float(weighted.opt_state.total_weight) == 4.0


def test_nnx_optimizer_passes_step_data():
    """Nothing of ours is needed: nnx passes keyword arguments to the transformation."""
    x = jnp.ones((4, 96))

    @nnx.jit
    def train_step(model, optimizer, scale, skip):
        grads = nnx.grad(lambda m: scale * jnp.square(m(x)).mean())(model)
        optimizer.update(model, grads, skip_update=skip, gradient_scale=scale)

    def train(steps):
        model = nnx.Linear(96, 40, rngs=nnx.Rngs(0))
        tx = jfa.fused_adamw(1e-2, in_place=True)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for scale, skip in steps:
            train_step(model, optimizer, jnp.float32(scale), jnp.array(skip))
        return nnx.to_pure_dict(nnx.state(model)), optimizer

    plain, _ = train([(1.0, False)])
    got, optimizer = train([(8.0, False), (8.0, True)])
    assert_same_bits(got, plain)
    state = optimizer.opt_state
    assert (int(state.count[...]), int(state.skipped[...])) == (1, 1)
