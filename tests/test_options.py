"""Every combination of the options, over leaves of every pair of dtypes.

Compiled with donated arguments, each must make the step of the oracle and have the
bits of the same step outside jit, where nothing is aliased.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    HYPERPARAMS,
    VARIANTS,
    WAYS,
    assert_follows_oracle,
    assert_same_bits,
    make_tx,
    mixed_tree,
    name_of,
    state_at,
    take_step,
)

PARAMS, GRADS = mixed_tree(size=19)
MASKS = (None, {name: name.endswith("bfloat16") for name in PARAMS})


def step_of(way, tx):
    """The step, as a function of donated (params, state) and of the gradients."""

    def step(params, state, grads):
        if way == "update":
            return tx.update(grads, state, params)
        return take_step(way, tx, grads, state, params)

    return step


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_combination(variant, way):
    options = HYPERPARAMS | variant
    for mask, alias in itertools.product(MASKS, [True, False]):
        tx = make_tx(way, **options, mask=mask, alias=alias)
        state = state_at(tx, PARAMS, 60)
        step = step_of(way, tx)
        expected = step(PARAMS, state, GRADS)
        donated = jax.tree.map(jnp.array, (PARAMS, state))
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*donated, GRADS).compile()
        assert ("output_to_operand_aliasing" in compiled.as_text()) == alias
        after = compiled(*donated, GRADS)
        assert_same_bits(after, expected)
        assert_follows_oracle(
            options,
            (PARAMS, state),
            GRADS,
            after,
            out="update" if way == "update" else "param",
            decays=None if mask is None else jax.tree.leaves(mask),
        )
