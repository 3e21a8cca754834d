"""The chain of trust, one test a link.

PyTorch's recorded steps <-> the float64 oracle <-> plain JAX and the native kernel;
plain JAX <-> optax, which is a peer to agree with and not an oracle. The links that
hold by bits are in ``test_bits.py``.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    DTYPES,
    HYPERPARAMS,
    ULP_BOUNDS,
    VARIANTS,
    WAYS,
    assert_follows_oracle,
    assert_within_ulp,
    make_tx,
    mixed_tree,
    name_of,
    random_like,
    scaled,
    state_at,
    take_step,
)
from oracle import LeafState, Oracle

import jax_fused_adamw as jfa

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=name_of)


# --- PyTorch <-> oracle, native -------------------------------------------------------

TORCH_PATH = pathlib.Path(__file__).with_name("fixtures") / "torch_adamw.npz"


@dataclasses.dataclass(frozen=True)
class TorchCase:
    options: dict
    params: np.ndarray
    grads: np.ndarray  # in their own dtype, a row for each step
    steps: dict  # PyTorch's name of a quantity -> float32[steps, n]

    def after(self, step: int) -> tuple[np.ndarray, LeafState]:
        """PyTorch's parameter and moments after ``step`` steps."""
        if step == 0:
            return self.params, LeafState.zeros(self.params.shape)
        zeros = np.zeros_like(self.steps["params"])
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        moments = (self.steps.get(name, zeros)[step - 1] for name in names)
        return self.steps["params"][step - 1], LeafState(*moments)


@pytest.fixture(params=[False, True], ids=["minimize", "maximize"])
def maximize(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "amsgrad"])
def amsgrad(request):
    return request.param


@pytest.fixture(params=DTYPES)
def torch_case(request, amsgrad, maximize) -> TorchCase:
    case = "-".join(
        (
            request.param,
            "amsgrad" if amsgrad else "plain",
            "maximize" if maximize else "minimize",
        )
    )
    with np.load(TORCH_PATH) as stored:
        hyperparams = json.loads(str(stored["hyperparams"]))
        keys = [key for key in stored if key.startswith(case + "/")]
        b1, b2 = hyperparams["betas"]
        return TorchCase(
            options=dict(
                learning_rate=hyperparams["lr"],
                b1=b1,
                b2=b2,
                eps=hyperparams["eps"],
                weight_decay=hyperparams["weight_decay"],
                amsgrad=amsgrad,
                maximize=maximize,
            ),
            params=stored["params"],
            grads=stored[f"grads/{request.param}"].view(jnp.dtype(request.param)),
            steps={key.partition("/")[2]: stored[key] for key in keys},
        )


def test_oracle_makes_each_step_of_torch(torch_case):
    """From PyTorch's own float32 state, so that only one step's rounding counts."""
    oracle = Oracle(**torch_case.options)
    for step, grad in enumerate(torch_case.grads, start=1):
        param, start = torch_case.after(step - 1)
        update, end = oracle.update(param, grad, start, step)
        expected, state = torch_case.after(step)
        scale = np.maximum(np.abs(param), np.abs(update))
        assert_within_ulp(expected, param + update, ULP_BOUNDS["param"], scale, "param")
        largest = np.maximum(np.abs(start.mu), np.abs(grad.astype(np.float64)))
        assert_within_ulp(state.mu, end.mu, ULP_BOUNDS["mu"], largest, "exp_avg")
        assert_within_ulp(state.nu, end.nu, ULP_BOUNDS["nu"], name="exp_avg_sq")
        if oracle.amsgrad:
            bound = ULP_BOUNDS["nu_max"]
            assert_within_ulp(state.nu_max, end.nu_max, bound, name="max_exp_avg_sq")


def test_torch_cases_tell_amsgrad_and_maximize_apart(torch_case):
    """Otherwise the link above would hold without either option."""
    for other in (
        dict(amsgrad=not torch_case.options["amsgrad"]),
        dict(maximize=not torch_case.options["maximize"]),
    ):
        oracle = Oracle(**{**torch_case.options, **other})
        param, state = torch_case.after(0)
        for step, grad in enumerate(torch_case.grads, start=1):
            update, state = oracle.update(param, grad, state, step)
            param = param + update
        assert np.abs(param - torch_case.after(step)[0]).max() > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_native_kernel_walks_with_torch(torch_case, way):
    tx = make_tx(way, **torch_case.options)
    params = jnp.asarray(torch_case.params)
    state = tx.init(params)
    for step, grad in enumerate(torch_case.grads, start=1):
        params, state = take_step(way, tx, jnp.asarray(grad), state, params)
        expected, moments = torch_case.after(step)
        np.testing.assert_allclose(params, expected, rtol=3e-6, atol=3e-7)
        np.testing.assert_allclose(state.mu, moments.mu, rtol=3e-6, atol=3e-8)
        np.testing.assert_allclose(state.nu, moments.nu, rtol=3e-6, atol=1e-10)
        if torch_case.options["amsgrad"]:
            np.testing.assert_allclose(state.nu_max, moments.nu_max, rtol=3e-6)


# --- Oracle <-> plain JAX, native -----------------------------------------------------


def small_tree():
    """What is enough for plain JAX, whose compilation is slow."""
    params, grads = mixed_tree()
    names = ("float32-float32", "bfloat16-float16", "float16-bfloat16")
    return {n: params[n] for n in names}, {n: grads[n] for n in names}


def check_against_oracle(implementation, out, count, options, scale=1.0, traced=()):
    params, grads = mixed_tree() if implementation == "ffi" else small_tree()
    grads = scaled(grads, min(scale, 1024.0))
    given = {k: jnp.float32(v) if k in traced else v for k, v in options.items()}
    tx = jfa.fused_adamw(**given, implementation=implementation)
    state = state_at(tx, params, count)
    step = tx.step if out == "param" else tx.update
    extra = {} if scale == 1.0 else {"gradient_scale": scale}
    result, new = step(grads, state, params, **extra)
    seen = {k: float(np.float32(v)) if k in traced else v for k, v in options.items()}
    assert_follows_oracle(
        seen,
        (params, state),
        grads,
        (result, new),
        out=out,
        gradient_scale=scale,
    )


@pytest.mark.parametrize("count", [0, 999])
@pytest.mark.parametrize("out", ["update", "param"])
@every_variant
def test_native_kernel_follows_oracle(variant, out, count):
    check_against_oracle("ffi", out, count, HYPERPARAMS | variant)


@pytest.mark.parametrize("out", ["update", "param"])
@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v["maximize"] == v["nesterov"]], ids=name_of
)
def test_plain_jax_follows_oracle(variant, out):
    for count in (0, 999):
        check_against_oracle("xla", out, count, HYPERPARAMS | variant)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("count", [0, 999])
@pytest.mark.parametrize(
    "change",
    [dict(b1=0.0), dict(b2=0.0), dict(b1=0.0, nesterov=True), dict(weight_decay=0)],
    ids=name_of,
)
def test_extreme_hyperparameters_follow_oracle(change, count, implementation):
    check_against_oracle(implementation, "param", count, HYPERPARAMS | change)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-3, 3.0, 1000.0])
def test_gradient_scale_follows_oracle(scale, implementation):
    """Powers of two take the kernel's multiplication, others its division."""
    options = HYPERPARAMS | dict(maximize=True)
    check_against_oracle(implementation, "param", 7, options, scale=scale)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("traced", [("learning_rate",), tuple(HYPERPARAMS)])
def test_traced_hyperparameters_follow_oracle(traced, implementation):
    """They are float32 widened: the oracle gets the rounded value."""
    options = HYPERPARAMS | dict(nesterov=True, amsgrad=True)
    for out in ("update", "param"):
        check_against_oracle(implementation, out, 999, options, traced=traced)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_mask_follows_oracle(implementation):
    params, grads = small_tree()
    decays = {name: name.startswith("bfloat16") for name in params}
    options = HYPERPARAMS | dict(weight_decay=3.0)
    tx = jfa.fused_adamw(**options, mask=decays, implementation=implementation)
    state = state_at(tx, params, 4)
    after = tx.step(grads, state, params)
    assert_follows_oracle(
        options,
        (params, state),
        grads,
        after,
        out="param",
        decays=jax.tree.leaves(decays),
    )


# --- Plain JAX <-> optax --------------------------------------------------------------


def optax_amsgrad(learning_rate, weight_decay, **moments):
    """``optax.amsgrad`` has no decoupled decay of its own."""
    return optax.chain(
        optax.scale_by_amsgrad(**moments),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


@pytest.mark.parametrize("count", [0, 999])
@pytest.mark.parametrize(
    "ours, theirs",
    [
        ({}, optax.adamw(**HYPERPARAMS)),
        (dict(nesterov=True), optax.adamw(**HYPERPARAMS, nesterov=True)),
        (dict(amsgrad="optax"), optax_amsgrad(**HYPERPARAMS)),
    ],
    ids=["adamw", "nesterov", "amsgrad"],
)
def test_plain_jax_agrees_with_optax(ours, theirs, count):
    params = random_like(jnp.zeros(200), seed=5)
    tx = jfa.fused_adamw(**HYPERPARAMS, **ours, implementation="xla")
    state = state_at(tx, params, count)
    names = ["count", "mu", "nu"] + ["nu_max"] * ("amsgrad" in ours)
    values = {name: getattr(state, name) for name in names}
    their_state = optax.tree.set(theirs.init(params), **values)
    # Walks on for some shrinking steps, so that AMSGrad's maximum stays behind.
    for seed, scale in enumerate([1.0, 0.3, 0.1]):
        grads = random_like(params, seed=6 + seed, scale=scale)
        updates, state = tx.update(grads, state, params)
        their_updates, their_state = theirs.update(grads, their_state, params)
        np.testing.assert_allclose(updates, their_updates, rtol=5e-5, atol=1e-7)
        params = optax.apply_updates(params, updates)
        for name in names:
            np.testing.assert_allclose(
                getattr(state, name), optax.tree.get(their_state, name), rtol=5e-5
            )
