"""Comparisons, trees and compiled-text queries that several test files share."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_leaves_with_path
from oracle import LeafState, Oracle

import jax_fused_adamw as jfa

# Bounds against float64, in ulp of the largest term that was added.
ULP_BOUNDS = {"mu": 2, "nu": 3, "nu_max": 3, "update": 16, "param": 10}


def bits(x) -> np.ndarray:
    """The array's bit pattern, so that NaN and -0.0 compare as what they are."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize])


def assert_same_bits(actual, expected) -> None:
    """Equal trees: structure, dtype, shape and every bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    )
    for (path, a), e in pairs:
        name = jax.tree_util.keystr(path)
        assert a.dtype == e.dtype and a.shape == e.shape, name
        np.testing.assert_array_equal(bits(a), bits(e), err_msg=name)


def assert_within_ulp(actual, expected, bound, largest_term=None, name="") -> None:
    """|actual - expected| <= bound ulp (float32) of ``largest_term``."""
    expected = np.asarray(expected, np.float64)
    scale = np.abs(expected if largest_term is None else largest_term)
    scale = np.maximum(scale, np.abs(expected)).astype(np.float32)
    ulp = np.spacing(np.maximum(scale, np.float32(2.0**-126))).astype(np.float64)
    error = np.abs(np.asarray(actual, np.float64) - expected) / ulp
    worst = error.max() if error.size else 0.0
    assert worst <= bound, f"{name}: {worst:.2f} ulp, at most {bound} allowed"


def random_like(tree, seed=0, scale=1.0, dtype=None):
    """Normal values with the tree, shapes and dtypes of ``tree``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, dtype or x.dtype), tree
    )


def scaled(tree, factor: float):
    """Every leaf times ``factor``, in its own dtype."""
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def copies(compiled) -> int:
    """Copy instructions in a compiled program's text."""
    return len(re.findall(r"= \S+ copy\(", compiled.as_text()))


def count_ops(compiled, op: str) -> int:
    """Of an asynchronous one, as on a GPU, its start."""
    return len(re.findall(rf"= \S.* {op}(?:-start)?\(", compiled.as_text()))


# Far from the defaults and from each other, so that leaving any one out shows.
HYPERPARAMS = {
    "learning_rate": 3e-2,
    "b1": 0.99,
    "b2": 0.999,
    "eps": 1e-3,
    "eps_root": 1e-4,
    "weight_decay": 0.1,
}
WAYS = ("step", "in_place", "update")
DTYPES = ("float32", "bfloat16", "float16")
VARIANTS = [
    dict(amsgrad=amsgrad, nesterov=nesterov, maximize=maximize)
    for amsgrad in (False, True, "optax")
    for nesterov in (False, True)
    for maximize in (False, True)
]


def name_of(options) -> str:
    """A short test id."""
    on = [f"{key}={value}" for key, value in options.items() if value is not False]
    return ",".join(on) or "plain"


def mixed_tree(size=67):
    """A leaf for every pair (parameter dtype, gradient dtype), and the gradients."""
    pairs = [(p, g) for p in DTYPES for g in DTYPES]
    params = {f"{p}-{g}": jnp.zeros(size, p) for p, g in pairs}
    grads = {f"{p}-{g}": jnp.zeros(size, g) for p, g in pairs}
    return random_like(params, seed=3), random_like(grads, seed=4)


def make_tx(way="step", **options):
    """A transformation for :func:`take_step` by one of :data:`WAYS`."""
    return jfa.fused_adamw(**options, in_place=way == "in_place")


def take_step(way, tx, grads, state, params, **extra):
    """New parameters and state."""
    if way == "step":
        return jfa.step(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def plain_tx(way="step", learning_rate=1e-3, **options):
    """The defaults of the bug-report cases: no decay."""
    options.setdefault("weight_decay", 0.0)
    return make_tx(way, learning_rate=learning_rate, **options)


def walk(way, tx, grads, params, **extra):
    """Parameters and state after each step from zero."""
    state = tx.init(params)
    for grad in grads:
        params, state = take_step(way, tx, grad, state, params, **extra)
        yield params, state


def state_at(tx, params, count, seed=100):
    """A state after ``count`` steps, with moments where AMSGrad's maximum matters.

    It exceeds the new second moment in about half of the elements.
    """
    state = tx.init(params)
    if count == 0:
        return state
    mu = random_like(state.mu, seed, scale=0.3)
    nu = jax.tree.map(lambda x: x * x, random_like(state.nu, seed + 1, scale=0.5))
    wide = jax.tree.map(jnp.exp, random_like(state.nu, seed + 2))
    return state._replace(
        count=jnp.int32(count),
        mu=mu,
        nu=nu,
        nu_max=None if state.nu_max is None else jax.tree.map(jnp.multiply, nu, wide),
    )


def oracle_of(options) -> Oracle:
    names = {field.name for field in dataclasses.fields(Oracle)} & options.keys()
    return Oracle(**{name: options[name] for name in names})


def assert_follows_oracle(
    options,
    before,
    grads,
    after,
    *,
    out,
    decays=None,
    lr_scales=None,
    gradient_scale=1.0,
) -> None:
    """One step from (params, state) ``before``, leaf by leaf, within ULP_BOUNDS.

    ``out`` says what the first half of ``after`` is: "param" or "update". What is
    stored below float32 may be off by its own rounding, and that only once.
    """
    oracle = oracle_of(options)
    (params, old), (result, new) = before, after
    step = int(new.count)
    assert step == int(old.count) + 1
    names = [jax.tree_util.keystr(path) for path, _ in tree_leaves_with_path(params)]
    trees = (params, grads, old.mu, old.nu, result, new.mu, new.nu)
    columns = [jax.tree.leaves(tree) for tree in trees]
    maxima = [
        [None] * len(names) if state.nu_max is None else jax.tree.leaves(state.nu_max)
        for state in (old, new)
    ]
    oracles = [
        dataclasses.replace(
            oracle,
            learning_rate=oracle.learning_rate * lr_scale,
            weight_decay=oracle.weight_decay if decays_leaf else 0.0,
        )
        for decays_leaf, lr_scale in zip(
            decays or [True] * len(names), lr_scales or [1.0] * len(names), strict=True
        )
    ]
    for leaf in zip(names, oracles, *columns, *maxima, strict=True):
        name, leaf_oracle, p, g, mu, nu, got, got_mu, got_nu, nu_max, got_max = leaf
        p, g, mu, nu = (np.asarray(x, np.float64) for x in (p, g, mu, nu))
        nu_max = np.zeros_like(nu) if nu_max is None else np.asarray(nu_max, np.float64)
        start = LeafState(mu, nu, nu_max)
        update, end = leaf_oracle.update(p, g, start, step, gradient_scale)
        largest = _largest_terms(leaf_oracle, p, g / gradient_scale, start, end, step)
        assert_within_ulp(got_mu, end.mu, ULP_BOUNDS["mu"], largest["mu"], f"mu{name}")
        assert_within_ulp(got_nu, end.nu, ULP_BOUNDS["nu"], largest["nu"], f"nu{name}")
        if got_max is not None:
            # With "optax" it is the corrected nu: two roundings more.
            bound = ULP_BOUNDS["nu_max"] + 2 * (oracle.amsgrad == "optax")
            scale = largest["nu_max"]
            assert_within_ulp(got_max, end.nu_max, bound, scale, f"nu_max{name}")
        assert_stored_within_ulp(
            got,
            p + update if out == "param" else update,
            ULP_BOUNDS[out],
            largest[out],
            f"{out}{name}",
        )


def assert_stored_within_ulp(actual, expected, bound, largest_term, name="") -> None:
    """assert_within_ulp, plus half a unit of a storage dtype below float32."""
    if actual.dtype == np.float32:
        return assert_within_ulp(actual, expected, bound, largest_term, name)
    unit = np.spacing(np.abs(expected).astype(actual.dtype)).astype(np.float64)
    error = np.abs(np.asarray(actual, np.float64) - expected) - unit / 2
    within = np.where(error > 0, expected + error, expected)
    assert_within_ulp(within, expected, bound, largest_term, name)


def _largest_terms(oracle, param, grad, start, end, step) -> dict[str, np.ndarray]:
    """Of each quantity, the largest term that was added to make it."""
    b1, b2 = oracle.b1, oracle.b2
    mu = np.maximum(np.abs(b1 * start.mu), np.abs((1 - b1) * grad))
    nu = np.maximum(b2 * start.nu, (1 - b2) * grad**2)
    correction = 1 - b2**step
    if oracle.amsgrad == "optax":
        nu_max, nu_hat = np.maximum(start.nu_max, nu / correction), end.nu_max
    else:
        nu_max = np.maximum(start.nu_max, nu)
        nu_hat = (end.nu_max if oracle.amsgrad else end.nu) / correction
    if oracle.nesterov:
        ahead = b1 * mu / (1 - b1 ** (step + 1))
        mu_hat = np.maximum(ahead, np.abs((1 - b1) * grad / (1 - b1**step)))
    else:
        mu_hat = mu / (1 - b1**step)
    denominator = np.sqrt(nu_hat + oracle.eps_root) + oracle.eps
    with np.errstate(divide="ignore", invalid="ignore"):
        direction = np.where(mu_hat == 0, 0.0, mu_hat / denominator)
    decay = np.abs(oracle.weight_decay * param)
    update = abs(oracle.learning_rate) * np.maximum(direction, decay)
    param = np.maximum(np.abs(param), update)
    return {"mu": mu, "nu": nu, "nu_max": nu_max, "update": update, "param": param}
