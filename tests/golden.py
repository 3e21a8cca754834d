"""Runs whose checkpoints are kept from release to release.

``fixtures/make_golden.py`` makes them, ``test_golden.py`` goes on with them.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random_like, scaled
from jax.tree_util import keystr, tree_leaves_with_path

import jax_fused_adamw as jfa

FIXTURES = pathlib.Path(__file__).with_name("fixtures")
ARRAYS, OPTIONS = FIXTURES / "golden.npz", FIXTURES / "golden.json"
ORBAX = FIXTURES / "golden_orbax"  # of ORBAX_CASE
ORBAX_CASE = "everything"

COMMON = dict(learning_rate=0.03, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.1)
BFLOAT16 = dict(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=5)
# Options of fused_adamw by case; every_k is that of accumulate.
CASES = {
    "float32": {},
    "bfloat16": BFLOAT16,
    "float16": dict(mu_dtype="float16", stochastic_rounding=False),
    "master": dict(master_weights=True),
    "params": dict(stochastic_rounding="params", seed=6),
    "ema": dict(ema_decay=0.9),
    "compute": dict(compute_dtype="bfloat16"),
    "amsgrad": dict(amsgrad=True),
    "amsgrad_optax": dict(amsgrad="optax", nesterov=True, eps_root=1e-4),
    "mask": dict(mask={"w": True, "h": False}, maximize=True),
    "clip": dict(max_grad_norm=0.5),
    "clip_value": dict(max_grad_value=0.5, skip_nonfinite=True),
    "accumulate": dict(every_k=2),
    "everything": dict(
        BFLOAT16,
        master_weights=True,
        ema_decay=0.9,
        compute_dtype="float16",
        amsgrad=True,
        max_grad_norm=0.5,
        every_k=2,
    ),
}
SAVED, END = 3, 6  # steps


def make(case, implementation=None):
    """The fused_adamw of a case, and the transformation around it."""
    options = dict(CASES[case])
    every_k = options.pop("every_k", None)
    inner = jfa.fused_adamw(**(COMMON | options), implementation=implementation)
    return inner, inner if every_k is None else jfa.accumulate(inner, every_k)


def start(tx):
    like = {"w": jnp.zeros((3, 2)), "h": [jnp.zeros(5, jnp.bfloat16), None]}
    params = random_like(like, seed=1)
    loss_scale = jfa.DynamicLossScale(8.0, growth_interval=1)
    return {"params": params, "state": tx.init(params), "loss_scale": loss_scale}


def gradients(params):
    """Shrinking, so that AMSGrad's maximum stays behind."""
    return [scaled(random_like(params, 10 + i), 0.5**i) for i in range(END)]


def advance(tx, tree, grads):
    @jax.jit
    def step(tree, grads):
        scale = tree["loss_scale"].value
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        report = jfa.grad_stats(grads, scale)
        params, state = jfa.step(
            tx, grads, tree["state"], tree["params"], gradient_scale=scale
        )
        loss_scale = tree["loss_scale"].update(report)
        return {"params": params, "state": state, "loss_scale": loss_scale}

    for grad in grads:
        tree = step(tree, grad)
    return tree


def to_plain(tree):
    """In dicts and lists."""
    state, scale = tree["state"], tree["loss_scale"]
    outer = {}
    if isinstance(state, jfa.AccumulateState):
        outer, state = state._asdict(), state.inner_opt_state
        del outer["inner_opt_state"]
    scale = {"value": scale.value, "finite_steps": scale.finite_steps}
    parts = {"parts": state.into_parts(), "accumulate": outer}
    return {"params": tree["params"], "loss_scale": scale, **parts}


def from_plain(plain, inner, like):
    """A tree like another one, of what :func:`to_plain` made."""
    params = jax.tree.map(jnp.array, plain["params"])
    state = jfa.FusedAdamWState.from_parts(plain["parts"], params, inner)
    if plain["accumulate"]:
        outer = jax.tree.map(jnp.array, plain["accumulate"])
        state = jfa.AccumulateState(**outer, inner_opt_state=state)
    scale = jax.tree.map(jnp.array, plain["loss_scale"])
    loss_scale = like["loss_scale"]._replace(**scale)
    return {"params": params, "state": state, "loss_scale": loss_scale}


def pack(name, tree):
    """Arrays that npz can hold, by path; the dtype of each is in its name."""
    packed = {}
    for path, leaf in tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        words = array.view(f"u{array.itemsize}")
        packed[f"{name}/{keystr(path)}:{array.dtype}"] = words
    return packed


def unpack(name, packed, like):
    """The tree of that name, in the containers of another, leaf by leaf by path."""
    found = {}
    for key, words in packed.items():
        start, _, dtype = key.rpartition(":")
        if start.startswith(f"{name}/"):
            found[start.removeprefix(f"{name}/")] = words.view(jnp.dtype(dtype))
    paths = [keystr(path) for path, _ in tree_leaves_with_path(like)]
    assert sorted(found) == sorted(paths), name
    return jax.tree.structure(like).unflatten([found[path] for path in paths])


def read():
    """The packed arrays and the options of every case."""
    with np.load(ARRAYS) as stored:
        return dict(stored), json.loads(OPTIONS.read_text())
