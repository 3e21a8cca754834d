"""Random trees, and trees of every size at which the kernel's loops change."""

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    DTYPES,
    HYPERPARAMS,
    assert_follows_oracle,
    assert_same_bits,
    make_tx,
    random_like,
    state_at,
    take_step,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jax_fused_adamw as jfa

# --- Random trees ---------------------------------------------------------------------

shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=6).map(tuple)
# One leaf is (shape, parameter dtype, gradient dtype, whether it decays).
leaves = st.tuples(
    shapes, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans()
).map(lambda fields: {"leaf": fields})
trees = st.recursive(
    leaves | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=12,
)
options = st.fixed_dictionaries(
    {
        "learning_rate": st.sampled_from([1e-3, 0.5, 0.0]),
        "b1": st.sampled_from([0.0, 0.5, 0.9]),
        "b2": st.sampled_from([0.0, 0.95, 0.999]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "eps_root": st.sampled_from([0.0, 1e-4]),
        "weight_decay": st.sampled_from([0.0, 0.1, 2.0]),
        "amsgrad": st.sampled_from([False, True, "optax"]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
)


def is_leaf(node) -> bool:
    return isinstance(node, dict) and "leaf" in node


def fill(tree, field: int):
    """``tree`` with each description turned into an array of its dtype ``field``."""
    zeros = jax.tree.map(
        lambda node: jnp.zeros(node["leaf"][0], node["leaf"][field]),
        tree,
        is_leaf=is_leaf,
    )
    return random_like(zeros, seed=field)


@given(
    tree=trees,
    options=options,
    way=st.sampled_from(["step", "in_place", "update only"]),
    count=st.sampled_from([0, 1, 999]),
    scale=st.sampled_from([1.0, 0.5, 3.0]),
)
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture
    ],  # conftest's, stateless
)
def test_random_tree_follows_oracle(tree, options, way, count, scale):
    mask = jax.tree.map(lambda node: node["leaf"][3], tree, is_leaf=is_leaf)
    params, grads = fill(tree, 1), fill(tree, 2)
    tx = make_tx(way, **options, mask=mask)
    state = state_at(tx, params, count)
    if way == "update only":
        new, after = tx.update(grads, state, params, gradient_scale=scale)
    else:
        new, after = take_step(way, tx, grads, state, params, gradient_scale=scale)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert_follows_oracle(
        options,
        (params, state),
        grads,
        (new, after),
        out="update" if way == "update only" else "param",
        decays=jax.tree.leaves(mask),
        gradient_scale=scale,
    )


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("tree", [None, {}, [None, {"a": ()}]], ids=str)
def test_tree_without_leaves_still_counts(tree, amsgrad):
    tx = jfa.fused_adamw(1e-3, amsgrad=amsgrad)
    state = tx.init(tree)
    new, after = tx.step(tree, state, tree)
    assert new == tree
    assert_same_bits(after, state._replace(count=jnp.int32(1)))


# --- Shapes and sizes -----------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_every_rank_and_every_empty_axis(implementation):
    full = [(2, 3, 1, 2, 1, 3)[:rank] for rank in range(7)]
    empty = [
        tuple(0 if axis == zero else 2 for axis in range(rank))
        for rank in range(1, 7)
        for zero in range(rank)
    ]
    params = random_like([jnp.zeros(shape) for shape in [*empty, *full, *empty]])
    grads = random_like(params, seed=1)
    tx = jfa.fused_adamw(**HYPERPARAMS, amsgrad=True, implementation=implementation)
    state = state_at(tx, params, 3)
    after = tx.step(grads, state, params)
    assert [leaf.shape for leaf in after[0]] == [*empty, *full, *empty]
    assert_follows_oracle(
        HYPERPARAMS | dict(amsgrad=True), (params, state), grads, after, out="param"
    )


VECTOR, TILE, BLOCK = 16, 1024, 64 * 1024
SIZES = [0, 1, 2**20 + 1]
SIZES += [n + d for n in (VECTOR, TILE, 32 * 1024, BLOCK) for d in (-1, 0, 1)]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", DTYPES)
def test_sizes_around_vectors_tiles_and_blocks(param_dtype, grad_dtype):
    """Each leaf against the oracle, alone and beside the others."""
    params = random_like([jnp.zeros(n, param_dtype) for n in SIZES])
    grads = random_like([jnp.zeros(n, grad_dtype) for n in SIZES], seed=1)
    tx = jfa.fused_adamw(**HYPERPARAMS, amsgrad=True)
    state = state_at(tx, params, 12)
    after = tx.step(grads, state, params, gradient_scale=4.0)
    assert_follows_oracle(
        HYPERPARAMS | dict(amsgrad=True),
        (params, state),
        grads,
        after,
        out="param",
        gradient_scale=4.0,
    )
    for i in range(len(SIZES)):
        assert_same_bits(
            single_step(tx, params, grads, state, i, gradient_scale=4.0),
            leaf_of(after, i),
        )


def leaf_of(after, i):
    new, state = after
    nu_max = None if state.nu_max is None else state.nu_max[i]
    return new[i], state._replace(mu=state.mu[i], nu=state.nu[i], nu_max=nu_max)


def single_step(tx, params, grads, state, i, **extra):
    """The step of leaf ``i`` as the only one of its tree."""
    param, one = leaf_of((params, state), i)
    return tx.step(grads[i], one, param, **extra)


# --- Numbers of leaves ----------------------------------------------------------------


@pytest.mark.parametrize("empty_at", ["first", "middle", "last"])
@pytest.mark.parametrize("num_leaves", [0, 1, 63, 64, 65, 1000])
def test_leaf_counts(num_leaves, empty_at):
    """As many as one native call holds, one less and more: each leaf as if alone.

    Every third leaf does not decay, so that a call's cut through the list shows.
    """
    full = num_leaves - num_leaves // 8
    cut = {"first": 0, "middle": full // 2, "last": full}[empty_at]
    sizes = [3] * cut + [0] * (num_leaves - full) + [3] * (full - cut)
    params = random_like([jnp.zeros(n) for n in sizes])
    grads = random_like(params, seed=1)
    decays = [i % 3 != 0 for i in range(num_leaves)]
    tx = jfa.fused_adamw(**HYPERPARAMS, mask=decays)
    state = state_at(tx, params, 5)
    after = tx.step(grads, state, params)
    assert int(after[1].count) == 6
    singles = {
        decay: jfa.fused_adamw(**HYPERPARAMS, mask=decay) for decay in (True, False)
    }
    for i in range(num_leaves):
        one = single_step(singles[decays[i]], params, grads, state, i)
        assert_same_bits(one, leaf_of(after, i))
