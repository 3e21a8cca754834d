"""State lies where its parameters do: made under jit, described, restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, count_ops
from jax.sharding import PartitionSpec as P
from meshes import is_placed, make_mesh, place

import jax_fused_adamw as jfa

VALUES = {"w": np.ones((8, 4), np.float32), "b": np.ones(8, jnp.bfloat16)}
SPECS = {"w": P("x", "y"), "b": P("x")}
FUSED = jfa.fused_adamw(0.1, amsgrad=True, max_grad_norm=1.0)
TRANSFORMATIONS = {
    "bare": FUSED,
    "chain": optax.chain(jfa.clip_by_global_norm(1.0), FUSED),
    "accumulate": jfa.accumulate(FUSED, 2),
    "masked": optax.masked(FUSED, {"w": True, "b": False}),
    "groups": optax.multi_transform(
        {"ours": FUSED, "adam": optax.adam(0.1)}, {"w": "ours", "b": "adam"}
    ),
    "inject": optax.inject_hyperparams(jfa.fused_adamw)(0.1),
}


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", [n for n in TRANSFORMATIONS if n != "groups"])
def test_init_under_jit(mesh, name):
    """optax's own zeros, of the group with Adam, would be replicated."""
    tx = TRANSFORMATIONS[name]
    params = place(mesh, VALUES, SPECS)
    init = jax.jit(tx.init)
    assert count_ops(init.lower(params).compile(), "all-gather") == 0
    state = init(params)
    assert shapes(state) == shapes(tx.init(VALUES))
    moments = optax.tree.get_all_with_path(state, "mu")
    assert moments
    for _, mu in moments:
        assert is_placed(mu["w"], mesh, SPECS["w"]) and not mu["w"].any()


def test_buffers_of_a_state_made_under_jit_are_apart(mesh):
    """Donating it donates no buffer twice."""
    params = place(mesh, VALUES, SPECS)
    state = jax.jit(FUSED.init)(params)

    def pointers(tree):
        return [
            shard.data.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
        ]

    assert len(set(pointers(state))) == len(pointers(state))
    # Copies of a parameter may share the host's memory, which device_put took over.
    assert set(pointers(state)).isdisjoint(pointers(params))


def test_accumulator_made_under_jit(mesh):
    state = jax.jit(jfa.accumulate(FUSED, 2).init)(place(mesh, VALUES, SPECS))
    for name, leaf in state.acc_grads.items():
        assert is_placed(leaf, mesh, SPECS[name]) and leaf.dtype == jnp.float32


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_init_of_members(wrap):
    mesh = make_mesh("x", "y")
    params = place(mesh, VALUES, SPECS)
    state = wrap(jax.vmap(FUSED.init))(params)
    assert state.count.shape == (8,)
    for name, leaf in state.nu_max.items():
        assert leaf.shape == VALUES[name].shape and is_placed(leaf, mesh, SPECS[name])


def test_init_is_a_constant_to_derivatives():
    tx = jfa.fused_adamw(0.1, implementation="xla", eps_root=1e-3)

    def end(params):
        params, _ = tx.step({"w": params["w"] ** 2}, tx.init(params), params)
        return params["w"].sum()

    params, step = {"w": jnp.array([0.5, 2.0])}, 1e-2
    got = jax.jit(jax.grad(end))(params)["w"]
    for i, direction in enumerate(jnp.eye(2)):
        ahead, behind = (
            end({"w": params["w"] + jnp.float32(s) * direction}) for s in (step, -step)
        )
        np.testing.assert_allclose(got[i], (ahead - behind) / (2 * step), rtol=1e-2)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("abstract", [False, True])
def test_state_shardings(mesh, name, abstract):
    tx = TRANSFORMATIONS[name]
    params = place(mesh, VALUES, SPECS)
    given = params
    if abstract:
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            params,
        )
    shardings = jfa.state_shardings(tx, given)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(VALUES))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings)):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        spec = {(8, 4): SPECS["w"], (8,): SPECS["b"], (): P()}[leaf.shape]
        assert is_placed(leaf, mesh, spec)


def test_state_shardings_on_one_device():
    params = jax.device_put(VALUES, jax.devices()[-1])
    shardings = jfa.state_shardings(FUSED, params)
    expected = params["w"].sharding
    assert all(sharding == expected for sharding in jax.tree.leaves(shardings))


def test_state_shardings_need_those_of_the_parameters():
    params = {"a": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(ValueError, match=r"params\['a'\]\['w'\] has no sharding"):
        jfa.state_shardings(FUSED, params)


def test_checkpoint_restored_into_shardings(tmp_path):
    """Each device reads its own part; the next step gathers nothing."""
    ocp = pytest.importorskip("orbax.checkpoint")
    mesh = make_mesh("x", "y")
    grads = place(mesh, VALUES, SPECS)
    params, state = FUSED.step(grads, FUSED.init(grads), grads)
    shardings = jfa.state_shardings(FUSED, params)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(FUSED.init, params),
        shardings,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_same_bits(jax.device_get(restored), jax.device_get(state))
    assert all(is_placed(leaf, mesh, SPECS[k]) for k, leaf in restored.mu.items())
    step = jax.jit(FUSED.step).lower(grads, restored, params).compile()
    assert count_ops(step, "all-gather") == 0


def test_compiled_ahead_of_time_from_shapes(mesh):
    """Before there are any arrays, as for a model too large for one host."""
    params = place(mesh, VALUES, SPECS)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        (params, jax.eval_shape(FUSED.init, params)),
        (
            jax.tree.map(lambda x: x.sharding, params),
            jfa.state_shardings(FUSED, params),
        ),
    )

    def step(params, state, grads):
        return FUSED.step(grads, state, params)

    compiled = jax.jit(step).lower(*abstract, abstract[0]).compile()
    shardings = jfa.state_shardings(FUSED, params)
    state = jax.jit(FUSED.init, out_shardings=shardings)(params)
    got = compiled(params, state, params)
    expected = jax.jit(step)(params, state, params)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))
