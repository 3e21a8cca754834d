"""adamw_step: one array, and a first step that needs no state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    VARIANTS,
    assert_same_bits,
    mixed_tree,
    name_of,
    random_like,
)

import jax_fused_adamw as jfa


def _first(tx, p, g, **control):
    return jfa.adamw_step(p, g, None, tx, jfa.StepControl(**control))


def _from_zeros(tx, p, g, **control):
    return jfa.step(tx, g, tx.init(p), p, **control)


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_a5_first_step_has_the_bits_of_a_zero_state(options, implementation):
    tx = jfa.fused_adamw(
        0.1, eps=1e-3, weight_decay=0.1, implementation=implementation, **options
    )
    p = {dtype: jnp.zeros((3, 700)) for dtype in DTYPES}
    g = {dtype: random_like(x, seed=2, dtype=dtype) for dtype, x in p.items()}
    p = random_like(p, seed=1)
    for control in ({}, {"gradient_scale": 3.0}, {"skip_update": jnp.array(True)}):
        expected = _from_zeros(tx, p, g, **control)
        assert_same_bits(_first(tx, p, g, **control), expected)


def test_later_steps_continue():
    tx = jfa.fused_adamw(0.1, amsgrad=True)
    p = expected_p = jnp.linspace(-1.0, 1.0, 9)
    state, expected = None, tx.init(p)
    for i in range(4):
        g = jnp.sin(p + i)
        p, state = jfa.adamw_step(p, g, state, tx)
        expected_p, expected = tx.step(g, expected, expected_p)
        assert_same_bits((p, state), (expected_p, expected))


def test_any_tree_and_any_dtype():
    tx = jfa.fused_adamw(0.1, mask={"a": False, "b": True})
    params, grads = mixed_tree()
    params, grads = {"a": params, "b": jnp.ones(0)}, {"a": grads, "b": jnp.ones(0)}
    assert_same_bits(_first(tx, params, grads), _from_zeros(tx, params, grads))


def test_without_options_the_learning_rate_is_that_of_pytorch():
    p = jnp.ones(3)
    assert_same_bits(
        jfa.adamw_step(p, p), jfa.adamw_step(p, p, None, jfa.fused_adamw(1e-3))
    )


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a5_no_zeros_are_written(amsgrad):
    """Neither as operands of the kernel nor as buffers that it writes over."""
    tx = jfa.fused_adamw(0.1, amsgrad=amsgrad)
    p = jax.ShapeDtypeStruct((1000, 100), jnp.float32)

    def first(p, g):
        return jfa.adamw_step(p, g, options=tx)

    compiled = jax.jit(first, donate_argnums=0).lower(p, p).compile()
    assert not re.search(r"= f32\S+ copy\(", compiled.as_text())
    assert "broadcast" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 10_000
    assert memory.alias_size_in_bytes >= 400_000  # the parameter, in place


def test_under_vmap_each_member_has_its_control():
    tx = jfa.fused_adamw(0.1, amsgrad="optax", nesterov=True)
    p = random_like(jnp.zeros((5, 7)), seed=1)
    skip, scale = jnp.arange(5) % 2, jnp.arange(1.0, 6.0)

    def member(step):
        return lambda p, skip, scale: step(
            tx, p, p, skip_update=skip, gradient_scale=scale
        )

    got = jax.vmap(member(_first))(p, skip, scale)
    expected = [member(_from_zeros)(*x) for x in zip(p, skip, scale, strict=True)]
    for i, one in enumerate(expected):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), one)


def test_nothing_given_is_changed_outside_of_jit():
    p, g = jnp.linspace(0.0, 1.0, 5), jnp.ones(5)
    before = np.array(p), np.array(g)
    jfa.adamw_step(p, g, options=jfa.fused_adamw(0.1))
    assert_same_bits((p, g), before)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (dict(options=0.1), TypeError, "made by jfa.fused_adamw, got float"),
        (dict(state=()), TypeError, "state must be a FusedAdamWState"),
        (dict(state=jfa.fused_adamw(0.1)), TypeError, r"adamw_step\(p, g, state, opt"),
        (dict(g=jnp.ones(4)), ValueError, r"shape \(4,\), expected \(3,\)"),
        (dict(p=jnp.ones(3, jnp.int32)), TypeError, "dtype int32"),
        (dict(control=jfa.StepControl("x")), TypeError, "gradient_scale"),
        (dict(control=1.0), TypeError, "control must be a StepControl"),
    ],
)
def test_bad_arguments(arguments, error, text):
    good = dict(p=jnp.ones(3), g=jnp.ones(3), options=jfa.fused_adamw(0.1))
    with pytest.raises(error, match=text):
        jfa.adamw_step(**{**good, **arguments})
    jfa.adamw_step(**good)
