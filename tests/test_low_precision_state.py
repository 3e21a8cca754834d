"""The low-precision state in files, exports, windows, with x64 and learning rates."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from low_precision import EVERYTHING, GRADS, PARAMS, each_implementation, steps

import jax_fused_adamw as jfa

FILLED = {name: x for name, x in PARAMS.items() if x.size}  # orbax saves no others


def make(implementation="xla", **options):
    return jfa.fused_adamw(0.1, implementation=implementation, **EVERYTHING | options)


@each_implementation
def test_export(implementation):
    pytest.importorskip("flatbuffers", reason="it comes with the test extra")
    from jax import export

    tx = make(implementation)
    state = tx.init(PARAMS)
    check = export.DisabledSafetyCheck.custom_call("jax_fused_adamw_update_v2")
    exported = export.export(jax.jit(tx.step), disabled_checks=[check])
    program = export.deserialize(exported(GRADS, state, PARAMS).serialize())
    expected = jax.jit(tx.step)(GRADS, state, PARAMS)
    assert_same_bits(program.call(GRADS, state, PARAMS), expected)


def test_pickle():
    saved = steps(make(), PARAMS, GRADS)
    assert_same_bits(pickle.loads(pickle.dumps(saved)), saved)


def test_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")
    tx, grads = make(), {name: GRADS[name] for name in FILLED}
    saved = steps(tx, FILLED, grads)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        checkpointer.wait_until_finished()
        params, state = checkpointer.restore(tmp_path / "step", like)
    assert_same_bits((params, state), saved)
    expected = steps(tx, saved[0], grads, 2, saved[1])
    assert_same_bits(steps(tx, params, grads, 2, state), expected)


@each_implementation
@pytest.mark.parametrize("in_place", [False, True])
def test_windows_of_accumulate(in_place, implementation):
    """The first of two micro-batches touches nothing, the second one takes the step."""
    tx = jfa.accumulate(make(implementation, in_place=in_place), 2)
    params, state = steps(tx, PARAMS, GRADS, 1)
    unchanged = (PARAMS, tx.init(PARAMS).inner_opt_state)
    assert_same_bits((params, state.inner_opt_state), unchanged)
    params, state = steps(tx, params, GRADS, 1, state)
    inner = state.inner_opt_state
    assert int(inner.count) == 1
    for name in ("b", "c"):
        rounded = np.asarray(inner.master[name]).astype(params[name].dtype)
        np.testing.assert_array_equal(params[name], rounded)


@each_implementation
def test_b31_x64_changes_nothing(implementation):
    tx = make(implementation)
    expected = steps(tx, PARAMS, GRADS)
    with jax.enable_x64(True):
        assert_same_bits(steps(tx, PARAMS, GRADS), expected)


@each_implementation
def test_b18_order_of_leaves_of_other_dtypes(implementation):
    """Without noise, which is numbered by the order."""
    tx = make(implementation, stochastic_rounding=False)
    expected, _ = steps(tx, PARAMS, GRADS)
    order = list(reversed(PARAMS))
    params, grads = ([tree[name] for name in order] for tree in (PARAMS, GRADS))
    got, _ = steps(tx, params, grads)
    assert_same_bits(dict(zip(order, got)), {name: expected[name] for name in order})


@each_implementation
@pytest.mark.parametrize(
    "learning_rate", [np.float32(0.1), np.array(0.1), lambda count: 0.1]
)
def test_b30_kinds_of_learning_rates(learning_rate, implementation):
    expected = steps(make(implementation), PARAMS, GRADS)
    options = dict(implementation=implementation, **EVERYTHING)
    got = steps(jfa.fused_adamw(learning_rate, **options), PARAMS, GRADS)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type)
    if not isinstance(learning_rate, np.float32):  # float32(0.1) is not 0.1
        assert_same_bits(got, expected)


def test_names_of_the_state():
    state = make().init(jnp.ones(3))
    assert state._fields[-1] == "compute" and state.master is None
