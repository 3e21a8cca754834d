"""Bad options: the documented class, and the option's name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_bad_input import GRADS, PARAMS

import jax_fused_adamw as jfa

BAD_OPTIONS = [
    (dict(b1=1.0), ValueError, "0 <= b1 < 1"),
    (dict(b1=-0.1), ValueError, "b1"),
    (dict(b2=1.0), ValueError, "0 <= b2 < 1"),
    (dict(b2=float("nan")), ValueError, "b2"),
    (dict(eps=-1e-8), ValueError, "eps"),
    (dict(eps=float("inf")), ValueError, "eps"),
    (dict(eps_root=-1.0), ValueError, "eps_root"),
    (dict(weight_decay=-1e-4), ValueError, "weight_decay"),
    (dict(learning_rate=float("nan")), ValueError, "learning_rate"),
    (dict(learning_rate=float("inf")), ValueError, "learning_rate"),
    (dict(learning_rate=np.float32("nan")), ValueError, "learning_rate"),
    (dict(learning_rate=10**400), ValueError, "learning_rate"),
    (dict(learning_rate=1e39), ValueError, "float32"),
    (dict(weight_decay=1e300), ValueError, "weight_decay"),
    (dict(mask="x"), TypeError, "mask must be a Python bool"),
    (dict(mask={"w": 1}), TypeError, r"mask\['w'\]"),
    (dict(learning_rate="1e-3"), TypeError, "learning_rate"),
    (dict(learning_rate=None), TypeError, "learning_rate"),
    (dict(learning_rate=True), TypeError, "learning_rate"),
    (dict(learning_rate=1j), TypeError, "learning_rate"),
    (dict(learning_rate=np.ones(2)), ValueError, r"shape \(2,\)"),
    (dict(learning_rate=jnp.ones((1,))), ValueError, r"shape \(1,\)"),
    (dict(learning_rate=jnp.array(1j)), TypeError, "complex64"),
    (dict(b1=lambda count: 0.9), TypeError, "inject_hyperparams"),
    (dict(b2=jnp.array(0.999, jnp.bfloat16)), TypeError, "hyperparam_dtype"),
    (dict(b1=jnp.array(0.9, jnp.float16)), TypeError, "hyperparam_dtype"),
    (dict(eps=jnp.array(1e-8, jnp.bfloat16)), TypeError, "hyperparam_dtype"),
    (dict(mask=jnp.array(True)), TypeError, "static_args"),
    (dict(mu_dtype=jnp.array(0)), TypeError, "static_args"),
    (dict(nu_dtype=np.array(0)), TypeError, "static_args"),
    (dict(amsgrad="torch"), ValueError, "amsgrad"),
    (dict(amsgrad=2), ValueError, "amsgrad"),
    (dict(amsgrad=jnp.array(True)), ValueError, "amsgrad"),
    (dict(nesterov="yes"), TypeError, "nesterov"),
    (dict(maximize=1), TypeError, "maximize"),
    (dict(alias=None), TypeError, "alias"),
    (dict(in_place=0), TypeError, "in_place"),
    (dict(implementation="cuda"), ValueError, "implementation"),
    (dict(seed=0.5), TypeError, "seed"),
    (dict(seed=True), TypeError, "seed"),
    (dict(seed=jax.random.key(0)), TypeError, r"jax\.random\.bits"),
    (dict(seed=2**64), ValueError, "64 bits"),
    (dict(seed=jnp.zeros(2, jnp.int32)), ValueError, "seed must be a scalar"),
    (dict(mu_dtype="bf17"), TypeError, "mu_dtype"),
    (dict(mu_dtype=np.float64), ValueError, "mu_dtype"),
    (dict(mu_dtype=jnp.int8), ValueError, "mu_dtype"),
    (dict(nu_dtype=jnp.float16), ValueError, "smallest positive number is 6e-8"),
    (dict(nu_dtype="float64"), ValueError, "nu_dtype"),
    (dict(nu_dtype="int8"), ValueError, r"of \['float32', 'bfloat16'\], got int8$"),
    (dict(compute_dtype=jnp.float32), ValueError, "compute_dtype"),
    (dict(compute_dtype=jnp.array(0)), TypeError, "static_args"),
    (dict(stochastic_rounding="moments"), ValueError, "stochastic_rounding"),
    (dict(stochastic_rounding=1), ValueError, "stochastic_rounding"),
    (dict(master_weights=1), TypeError, "master_weights"),
    (dict(ema_decay=1.0), ValueError, "ema_decay"),
    (dict(ema_decay=-0.1), ValueError, "ema_decay"),
    (dict(ema_decay=True), TypeError, "ema_decay"),
    (dict(ema_decay=jnp.array(0.9, jnp.bfloat16)), TypeError, "hyperparam_dtype"),
    (dict(max_grad_norm=-1.0), ValueError, "max_grad_norm"),
    (dict(max_grad_norm=np.nan), ValueError, "max_grad_norm"),
    (dict(max_grad_norm="1"), TypeError, "max_grad_norm"),
    (dict(max_grad_norm=jnp.ones(2)), ValueError, "max_grad_norm"),
    (dict(max_grad_value=-0.5), ValueError, "max_grad_value"),
    (dict(skip_nonfinite=1), TypeError, "skip_nonfinite"),
]

NOT_BUILT = [
    dict(packed_state=True),
]


def option_id(case):
    options = case[0] if isinstance(case, tuple) else case
    ((name, value),) = options.items()
    return f"{name}={getattr(value, '__name__', value)}"[:40]


@pytest.mark.parametrize("case", BAD_OPTIONS, ids=option_id)
def test_bad_option(case):
    options, error, text = case
    with pytest.raises(error, match=text):
        jfa.fused_adamw(**{"learning_rate": 1e-3, **options})


@pytest.mark.parametrize("options", NOT_BUILT, ids=option_id)
def test_option_that_is_not_built_says_its_name(options):
    (name,) = options
    with pytest.raises(NotImplementedError, match=name):
        jfa.fused_adamw(1e-3, **options)


def test_integers_and_numpy_numbers_are_hyperparameters():
    for value in (0, np.int64(0), np.float64(0), np.float32(0), np.zeros(())):
        jfa.fused_adamw(value, b1=value, eps=value, eps_root=value, weight_decay=value)


BAD_MASKS = {
    "not a prefix": ({"layer": {"w": True}, "scale": True}, ValueError, "mask"),
    "callable that returns an array": (
        lambda params: jnp.array(True),
        TypeError,
        "static_args",
    ),
    "too deep": (
        {"layer": {"w": {"x": True}, "b": True}, "scale": True},
        ValueError,
        "mask",
    ),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_bad_mask(name):
    mask, error, text = BAD_MASKS[name]
    tx = jfa.fused_adamw(1e-3, mask=mask)
    with pytest.raises(error, match=text):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_inject_hyperparams_on_bfloat16_params_names_the_remedy():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(TypeError, match="hyperparam_dtype=jnp.float32"):
        optax.inject_hyperparams(jfa.fused_adamw)(1e-3).init(params)
    tx = optax.inject_hyperparams(jfa.fused_adamw, hyperparam_dtype=jnp.float32)(1e-3)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["scale"].dtype == jnp.bfloat16


def test_inject_hyperparams_with_a_callable_mask_names_static_args():
    """inject_hyperparams takes any callable for a schedule of its count."""
    tx = optax.inject_hyperparams(jfa.fused_adamw)(
        1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    )
    with pytest.raises(TypeError, match="static_args"):
        tx.init(PARAMS)


def test_inject_hyperparams_with_a_seed_beyond_int32():
    inject = functools.partial(optax.inject_hyperparams, jfa.fused_adamw)
    params = jnp.ones(2, jnp.bfloat16)
    options = {"stochastic_rounding": "params", "seed": 2**40}
    tx = inject(static_args=("seed",), hyperparam_dtype=jnp.float32)(0.1, **options)
    got, _ = jfa.step(tx, params, tx.init(params), params)
    tx = jfa.fused_adamw(0.1, **options)
    np.testing.assert_array_equal(got, tx.step(params, tx.init(params), params)[0])
