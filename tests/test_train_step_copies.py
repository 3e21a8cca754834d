"""Train steps with gradients of the bfloat16 copies that the step has written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_helpers import reasons, statuses, toy_workload

import jax_fused_adamw as jfa
from jax_fused_adamw.bench import _gpt, _train_step
from jax_fused_adamw.bench._results import TrainResults
from jax_fused_adamw.bench._train_rows import OPTIMIZERS, Optimizer, TrainStepper
from jax_fused_adamw.bench._workloads import gpt_workload, ppo_workload

BF16_ROWS = [each for each in OPTIMIZERS if each.compute_dtype is not None]
OURS = [each for each in BF16_ROWS if each.ours]
NAMES = [each.name for each in OURS]
PLAIN, CLIPPED = (each.peer for each in OURS)


def toy():
    return dataclasses.replace(toy_workload(), activations="bfloat16")


@pytest.fixture
def run(monkeypatch):
    """Measures these optimizers on a workload."""

    def run(workload, *optimizers):
        monkeypatch.setattr(_train_step, "OPTIMIZERS", optimizers)
        models = [_train_step._measure_workload(workload, 2, 1, graphs=False)]
        return TrainResults({}, {}, {}, models)

    return run


def named(name):
    (optimizer,) = [each for each in OPTIMIZERS if each.name == name]
    return optimizer


def test_rows_come_where_the_activations_are_bfloat16():
    workload = gpt_workload(_gpt.GPT2, 4, attention="xla")
    assert [(each.name, each.peer) for each in BF16_ROWS] == [
        (PLAIN, "bf16 grads, optax.adamw"),
        ("bf16 grads, fused_adamw", PLAIN),
        (CLIPPED, "bf16 grads, clip, optax.adamw"),
        ("bf16 grads, if finite, clip, fused_adamw", CLIPPED),
    ]
    for optimizer in BF16_ROWS:
        assert optimizer.suits(workload) and not optimizer.suits(ppo_workload())
    assert all(each.suits(ppo_workload()) for each in OPTIMIZERS[:5])


def test_losses_are_those_of_the_peer(run):
    results = run(toy(), *BF16_ROWS)
    assert set(statuses(results).values()) == {"measured"}


@pytest.mark.parametrize("name", [PLAIN, CLIPPED])
def test_optax_takes_bfloat16_gradients_and_computes_in_float32(name):
    """Its moments after a step are those of the rounded gradients, exactly."""
    params = {"w": jnp.array([1.001, 2.0, 3.0]), "b": jnp.zeros(1)}
    batch = jax.tree.map(lambda x: x[0], toy().batch)
    optimizer = named(name)
    state = optimizer.make().init(params)
    _, grads = optimizer.value_and_grad(toy().loss_fn, state, params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"bfloat16"}
    _, state = optimizer.update(grads, state, params)
    rounded = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
    tx = optimizer.make()
    _, expected = tx.update(rounded, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("optimizer", OURS, ids=NAMES)
def test_gradients_are_of_the_copies_alone(optimizer):
    params = {"w": jnp.array([1.001, 2.0, 3.0]), "b": jnp.zeros(1)}
    state = optimizer.make().init(params)
    batch = jax.tree.map(lambda x: x[0], toy().batch)
    loss, grads = optimizer.value_and_grad(toy().loss_fn, state, params, batch)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"bfloat16"}
    # The parameters are not read, so that none is cast.
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    again, _ = optimizer.value_and_grad(toy().loss_fn, state, broken, batch)
    rounded = {"w": jnp.array([1.0, 2.0, 3.0]), "b": jnp.zeros(1)}
    assert loss == again == toy().loss_fn(rounded, batch)
    assert loss != toy().loss_fn(params, batch)


def test_copies_that_stay_behind_are_found(run):
    """The forward pass of such a step sees the first parameters for ever."""
    right = named(NAMES[0])

    class Stale(Optimizer):
        def update(self, grads, state, params):
            copies = state.compute
            params, state = super().update(grads, state, params)
            return params, state._replace(compute=copies)

    fields = {f.name: getattr(right, f.name) for f in dataclasses.fields(right)}
    results = run(toy(), named(PLAIN), Stale(**fields))
    # All that are compared, but the first one.
    assert reasons(results)[right.name].startswith("5 of 6 losses differ")


def test_a_step_that_is_too_long_is_found(run):
    right = named(NAMES[0])
    make = lambda: jfa.fused_adamw(3.3e-4, compute_dtype="bfloat16")  # noqa: E731
    results = run(toy(), named(PLAIN), dataclasses.replace(right, make=make))
    assert f"losses differ from those of {PLAIN}" in reasons(results)[right.name]


def test_state_that_the_step_returns_has_the_copies_of_its_parameters():
    stepper = TrainStepper(toy(), named(NAMES[0]))
    stepper.start()
    stepper.run(2)
    params, state = stepper._carry
    for copy, param in zip(*map(jax.tree.leaves, (state.compute, params)), strict=True):
        assert copy.dtype == jnp.bfloat16 and param.dtype == jnp.float32
        np.testing.assert_array_equal(copy, param.astype(jnp.bfloat16))


def test_losses_are_compared_before_roundings_part_them():
    checked = {each.name: _train_step._checked_updates(each) for each in OPTIMIZERS}
    assert {checked[each.name] for each in BF16_ROWS} == {6}
    assert {n for name, n in checked.items() if not name.startswith("bf16")} == {8}
    expected = _train_step.ExpectedLosses(20)
    row = _train_step._Row(PLAIN, None, PLAIN, checked_updates=6)
    losses = np.linspace(10.0, 5.0, 20)
    assert (
        expected.difference(row, losses) is None
    )  # the first to come is the reference
    for update, is_wrong in ((0, True), (5, True), (6, False)):
        moved = losses + 0.3 * (np.arange(20) == update)
        assert (expected.difference(row, moved) is not None) == is_wrong
