"""Checkpoints of a past release: restored, continued, compared with where it ended."""

import shutil

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import jax_fused_adamw as jfa


@pytest.fixture(scope="module")
def stored():
    return golden.read()


def end_of(stored, case, tx):
    """Where the past release ended, and the gradients on the way there."""
    start = golden.start(tx)
    grads = golden.gradients(start["params"])
    # The bits of the normal numbers are NumPy's affair.
    grads = golden.unpack("grads", stored[0], grads)[golden.SAVED :]
    return golden.unpack(f"{case}/end", stored[0], golden.to_plain(start)), grads


def restored(stored, case, implementation=None):
    inner, tx = golden.make(case, implementation)
    assert inner.check_options(stored[1][case]) == ()
    start = golden.start(tx)
    plain = golden.unpack(f"{case}/saved", stored[0], golden.to_plain(start))
    return tx, golden.from_plain(plain, inner, start)


@pytest.mark.parametrize("case", golden.CASES)
def test_the_native_kernel_goes_on_bit_for_bit(stored, case):
    tx, tree = restored(stored, case)
    expected, grads = end_of(stored, case, tx)
    assert_same_bits(golden.to_plain(golden.advance(tx, tree, grads)), expected)


@pytest.mark.parametrize("case", golden.CASES)
def test_plain_jax_goes_on_nearly_so(stored, case):
    tx, tree = restored(stored, case, "xla")
    expected, grads = end_of(stored, case, tx)
    got = golden.to_plain(golden.advance(tx, tree, grads))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        # One unit of a stored dtype, where the two round to different neighbours.
        unit = float(jnp.finfo(e.dtype).eps) if e.dtype.kind not in "iub" else 0.0
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(a, e, rtol=max(4 * unit, 1e-5), atol=1e-6)


def test_a_record_of_orbax_goes_on(stored, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")
    case = golden.ORBAX_CASE
    inner, tx = golden.make(case)
    shutil.copytree(golden.ORBAX, tmp_path / "record")  # which orbax may write to
    with jfa.TrainingRecord(tmp_path / "record", inner) as record:
        step, tree, not_compared = record.restore(golden.start(tx))
    assert step == golden.SAVED and not_compared == ()
    assert tree["state"].mini_step == 1  # in the middle of a window
    expected, grads = end_of(stored, case, tx)
    assert_same_bits(golden.to_plain(golden.advance(tx, tree, grads)), expected)


def test_the_cases_are_of_every_kind():
    """And what they store is apart, so that none stands for another."""
    arrays, options = golden.read()
    assert options.keys() == golden.CASES.keys()
    ends = {
        case: arrays[f"{case}/end/['params']['w']:float32"].tobytes()
        for case in golden.CASES
    }
    # Copies, averages, masters and a mask of another leaf do not move this one.
    like_float32 = {"params", "ema", "compute", "master"}
    apart = {case: x for case, x in ends.items() if case not in like_float32}
    assert len(set(apart.values())) == len(apart)
    parts = {key.split("/")[2].split("'")[3] for key in arrays if "['parts']" in key}
    assert parts == set(jfa.FusedAdamWState._fields)
