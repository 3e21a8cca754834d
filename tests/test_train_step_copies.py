"""Train steps with gradients of the bfloat16 copies that the step has written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_helpers import reasons, statuses

import jax_fused_adamw as jfa
from jax_fused_adamw.bench import _gpt, _train_step
from jax_fused_adamw.bench._results import TrainResults
from jax_fused_adamw.bench._train_rows import OPTIMIZERS, Optimizer, TrainStepper
from jax_fused_adamw.bench._workloads import gpt_workload, ppo_workload

BF16_ROWS = [each for each in OPTIMIZERS if each.compute_dtype is not None]
NAMES = [each.name for each in BF16_ROWS]
CONFIG = _gpt.Config(vocabulary=64, context=16, width=16, heads=2, num_blocks=1)


@pytest.fixture
def workload():
    return gpt_workload(CONFIG, 2, attention="xla")


@pytest.fixture
def run(workload, monkeypatch):
    """Measures these optimizers on a small GPT."""

    def run(*optimizers):
        monkeypatch.setattr(_train_step, "OPTIMIZERS", optimizers)
        models = [_train_step._measure_workload(workload, 8, 1, graphs=False)]
        return TrainResults({}, {}, {}, models)

    return run


def named(name):
    (optimizer,) = [each for each in OPTIMIZERS if each.name == name]
    return optimizer


def test_rows_come_where_the_activations_are_bfloat16(workload):
    assert NAMES == [
        "bf16 grads, fused_adamw",
        "bf16 grads, if finite, clip, fused_adamw",
    ]
    for optimizer in BF16_ROWS:
        assert optimizer.suits(workload) and not optimizer.suits(ppo_workload())
    assert all(each.suits(ppo_workload()) for each in OPTIMIZERS[:5])


@pytest.mark.parametrize("optimizer", BF16_ROWS, ids=NAMES)
def test_losses_are_those_of_the_peer(run, optimizer):
    results = run(named(optimizer.peer), optimizer)
    assert statuses(results)[results.models[0].name, optimizer.name] == "measured"


@pytest.mark.parametrize("optimizer", BF16_ROWS, ids=NAMES)
def test_gradients_are_of_the_copies_alone(workload, optimizer):
    params = workload.init()
    state = optimizer.make().init(params)
    arguments = workload.loss_fn, state, params, workload.batch
    loss, grads = optimizer.value_and_grad(*arguments)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"bfloat16"}
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    again, _ = optimizer.value_and_grad(workload.loss_fn, state, broken, workload.batch)
    assert loss == again
    # No float32 parameter is read, so none is cast.
    text = str(jax.make_jaxpr(optimizer.value_and_grad, static_argnums=0)(*arguments))
    token = f"{CONFIG.vocabulary},{CONFIG.width}"
    assert f"bf16[{token}] = convert_element_type" not in text.split("let")[1]
    exact, _ = jax.value_and_grad(workload.loss_fn)(params, workload.batch)
    np.testing.assert_allclose(loss, exact, rtol=1e-3)


def test_copies_that_stay_behind_are_found(run):
    """The forward pass of such a step sees the first parameters for ever."""
    right = named(NAMES[0])

    class Stale(Optimizer):
        def update(self, grads, state, params):
            copies = state.compute
            params, state = super().update(grads, state, params)
            return params, state._replace(compute=copies)

    fields = {f.name: getattr(right, f.name) for f in dataclasses.fields(right)}
    results = run(named(right.peer), Stale(**fields))
    assert reasons(results)[right.name].startswith("7 of 8 losses differ")


def test_a_step_that_is_too_long_is_found(run):
    right = named(NAMES[0])
    make = lambda: jfa.fused_adamw(3.3e-4, compute_dtype="bfloat16")  # noqa: E731
    results = run(named(right.peer), dataclasses.replace(right, make=make))
    assert "losses differ from those of optax.adamw" in reasons(results)[right.name]


def test_state_that_the_step_returns_has_the_copies_of_its_parameters(workload):
    stepper = TrainStepper(workload, named(NAMES[0]))
    stepper.start()
    stepper.run(2)
    params, state = stepper._carry
    for copy, param in zip(*map(jax.tree.leaves, (state.compute, params)), strict=True):
        assert copy.dtype == jnp.bfloat16 and param.dtype == jnp.float32
        np.testing.assert_array_equal(copy, param.astype(jnp.bfloat16))
