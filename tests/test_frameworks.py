"""Training in Flax, Haiku, Equinox and plain optax: optax.adamw's losses, in place.

Both optimizers train the same model from the same parameters on the same batches. They
round differently, above all in the bias corrections (optax's are off by up to 3e-5 of
an update after its square root), so after 50 steps losses agree to 1e-5 of themselves
and parameters to 2e-5 of the way they have gone; five times that is allowed here.
Leaving out the decay or the clip, or reading the schedule one step late, changes losses
by a hundred times as much (`test_variants_differ`).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from frameworks import (
    CLASSES,
    IN_PLACE,
    LOOPS,
    STEPS,
    compiled_step,
    equinox_model,
    train,
)
from helpers import assert_same_bits

import jax_fused_adamw as jfa

LOSS_RTOL, PARAMS_RTOL = 5e-5, 1e-4
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 10, STEPS)


def only_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def plain(adamw):
    return adamw(1e-2, weight_decay=0.1)


def clipped(adamw):
    return optax.chain(optax.clip_by_global_norm(0.1), plain(adamw))


def scheduled(adamw):
    return adamw(SCHEDULE, weight_decay=0.1)


def masked_decay(adamw):
    return adamw(1e-2, weight_decay=1.0, mask=only_matrices)


def injected(adamw):
    factory = optax.inject_hyperparams(
        adamw, static_args=("mask",), hyperparam_dtype=jnp.float32
    )
    return factory(SCHEDULE, b1=0.8, weight_decay=0.5, mask=only_matrices)


VARIANTS = [plain, clipped, scheduled, masked_decay, injected]


@pytest.fixture(autouse=True)
def float32_products():
    """A GPU's default products have 10 bits, and each program picks its own order."""
    with jax.default_matmul_precision("highest"):
        yield


def make_loop(framework, variant, in_place=None):
    if in_place is None:
        in_place = framework in IN_PLACE

    # optax.inject_hyperparams reads the signature.
    @functools.wraps(jfa.fused_adamw)
    def ours(*args, **options):
        return jfa.fused_adamw(*args, **{**options, "in_place": in_place})

    return LOOPS[framework](variant(ours))


def theirs(framework, variant):
    return LOOPS[framework](variant(optax.adamw))


def arrays(loop):
    return [np.asarray(x) for x in loop.params(loop.state)]


def assert_agree(ours, theirs, start):
    """Losses, and parameters relative to how far those of their array have gone."""
    np.testing.assert_allclose(ours[0], theirs[0], rtol=LOSS_RTOL)
    for a, b, begin in zip(ours[1], theirs[1], start, strict=True):
        gone = np.abs(b - begin).max()
        assert gone > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=PARAMS_RTOL * gone)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("framework", LOOPS)
def test_training_follows_optax(framework, variant):
    loop = theirs(framework, variant)
    start = arrays(loop)
    expected = train(loop)
    assert expected[0][-1] < expected[0][0] / 3  # it learns
    assert_agree(train(make_loop(framework, variant)), expected, start)


@pytest.mark.parametrize("framework", LOOPS)
def test_clip_of_the_step_follows_optax(framework):
    loop = theirs(framework, clipped)
    start = arrays(loop)
    fused = make_loop(
        framework, lambda adamw: plain(functools.partial(adamw, max_grad_norm=0.1))
    )
    assert_agree(train(fused), train(loop), start)


def written_again(loop):
    """Shapes of parameters that the compiled step copies, adds to or subtracts from.

    The last bias does not count: the loss is computed after it has been written, so
    XLA copies it, for optax.adamw too.
    """
    text = compiled_step(loop).as_text()
    shapes = {x.shape for x in arrays(loop)} - {(CLASSES,)}
    return {
        (op, shape)
        for shape in shapes
        for op in ("add", "subtract", "copy")
        if re.search(rf"= f32\[{','.join(map(str, shape))}\]\S* {op}\(", text)
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("framework", LOOPS)
def test_step_is_in_place(framework, variant):
    loop = make_loop(framework, variant)
    compiled = compiled_step(loop)
    assert "jax_fused_adamw_update" in compiled.as_text()
    assert written_again(loop) == set()
    params_and_moments = 3 * sum(x.nbytes for x in arrays(loop))
    assert compiled.memory_analysis().alias_size_in_bytes >= params_and_moments


@pytest.mark.parametrize("framework", IN_PLACE)
def test_without_the_option_the_protocol_adds(framework):
    """What the test above looks for is there where it should be."""
    adds = written_again(make_loop(framework, plain, in_place=False))
    assert {op for op, _ in adds} >= {"add"}
    both = [train(make_loop(framework, plain, in_place=x)) for x in (False, True)]
    np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-5)


def test_variants_differ():
    """Each variant does something that the comparisons would see."""
    ends = {v.__name__: train(theirs("optax, step", v))[0] for v in VARIANTS}
    ends["no decay"] = train(LOOPS["optax, step"](optax.adamw(1e-2, weight_decay=0.0)))[
        0
    ]

    def late(count):
        return SCHEDULE(count + 1)

    ends["late schedule"] = train(
        LOOPS["optax, step"](optax.adamw(late, weight_decay=0.1))
    )[0]
    names = list(ends)
    for i, name in enumerate(names):
        for other in names[:i]:
            distance = np.abs(ends[name] / ends[other] - 1).max()
            assert distance > 20 * LOSS_RTOL, (name, other, distance)


def test_equinox_apply_updates_names_the_way_out():
    """It maps over the updates first, which takes them apart."""
    eqx = pytest.importorskip("equinox")
    model = equinox_model()
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = jfa.fused_adamw(1e-2, in_place=True)
    updates, _ = tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError) as caught:
        eqx.apply_updates(model, updates)
    for part in ("InPlaceUpdate", "optax.apply_updates", "jax_fused_adamw.step"):
        assert part in str(caught.value)
    # What the message says works, as does the plain protocol.
    moved = eqx.combine(optax.apply_updates(params, updates), model)
    tx = jfa.fused_adamw(1e-2)
    updates, _ = tx.update(params, tx.init(params), params)
    plain = eqx.apply_updates(model, updates)
    assert_same_bits(*(eqx.filter(x, eqx.is_array) for x in (moved, plain)))
