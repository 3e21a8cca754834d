"""Sharded leaves stay where they are: no gather, no copy, the state's placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa

pytestmark = pytest.mark.devices(8)

SPECS = {"both": P("x", "y"), "flat": P(("x", "y")), "whole": P(), "last": P(None, "y")}
SHAPES = {"both": (8, 4), "flat": (16,), "whole": (3,), "last": (3, 4)}
VALUES = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
TX = jfa.fused_adamw(0.1, weight_decay=0.1, amsgrad=True)


def step(params, state, grads):
    return jfa.step(TX, grads, state, params)


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    kind = getattr(AxisType, request.param)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        yield mesh


def place(mesh, tree):
    return {
        name: jax.device_put(np.array(leaf), NamedSharding(mesh, SPECS[name]))
        for name, leaf in tree.items()
    }


def test_sharded_step_gathers_nothing_copies_nothing(mesh):
    params, grads = place(mesh, VALUES), place(mesh, VALUES)
    state = TX.init(params)
    assert all(state.mu[k].sharding == params[k].sharding for k in params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(params, state, grads).compile()
    assert count_ops(compiled, "all-gather") == 0
    assert count_ops(compiled, "all-reduce") == 0
    assert copies(compiled) == 0
    shardings = {name: leaf.sharding for name, leaf in params.items()}
    new_params, new_state = jitted(params, state, grads)
    for tree in (new_params, new_state.mu, new_state.nu, new_state.nu_max):
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim)


def test_sharded_bits_equal_one_device():
    expected = step(VALUES, TX.init(VALUES), VALUES)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        params = place(mesh, VALUES)
        got = jax.jit(step)(params, TX.init(params), place(mesh, VALUES))
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    values = np.linspace(-1.0, 1.0, 64, dtype=np.float32)
    state = TX.init({"w": values})
    expected, _ = step({"w": values}, state, {"w": values})

    def local(w, mu, nu, nu_max, grad):
        shard = state._replace(mu={"w": mu}, nu={"w": nu}, nu_max={"w": nu_max})
        return step({"w": w}, shard, {"w": grad})[0]["w"]

    sharded = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P("x"),) * 5, out_specs=P("x"))
    )
    moments = (state.mu["w"], state.nu["w"], state.nu_max["w"])
    assert_same_bits(
        jax.device_get(sharded(values, *moments, values)),
        jax.device_get(expected["w"]),
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_vmap_of_arrays_made_before_the_mesh(kind):
    """Such arrays reach the partitioner without a spec, replicated."""
    tx = jfa.fused_adamw(0.1)
    params = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
    state = jax.vmap(tx.init)(params)
    expected = jax.vmap(lambda p, s: tx.step(p, s, p))(params, state)
    kinds = (getattr(AxisType, kind),)
    with jax.set_mesh(jax.make_mesh((8,), ("m",), axis_types=kinds)):
        got = jax.jit(jax.vmap(lambda p, s: tx.step(p, s, p)))(params, state)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


def test_members_of_a_vmap_shard_with_their_scalars():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rates, skips = jnp.linspace(0.1, 0.8, 8), jnp.arange(8) % 2
    values = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)

    def member(w, mu, nu, grad, rate, skip):
        tx = jfa.fused_adamw(rate)
        state = tx.init({"w": w})._replace(mu={"w": mu}, nu={"w": nu})
        return jfa.step(tx, {"w": grad}, state, {"w": w}, skip_update=skip)[0]["w"]

    moments = (values, np.square(values))
    expected = jnp.stack(
        [
            member(
                values[i], moments[0][i], moments[1][i], values[i], rates[i], skips[i]
            )
            for i in range(8)
        ]
    )
    with jax.set_mesh(mesh):
        put = NamedSharding(mesh, P("x", "y"))
        w, mu, nu = (jax.device_put(x, put) for x in (values, *moments))
        jitted = jax.jit(jax.vmap(member))
        compiled = jitted.lower(w, mu, nu, w, rates, skips).compile()
        got = jitted(w, mu, nu, w, rates, skips)
    assert count_ops(compiled, "all-gather") == 0
    assert got.sharding.spec == P("x", "y")
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize(
    "varying, text",
    [
        ("grad", "grads.*psum your gradients over .'x'."),
        ("mu", "state.mu.*same in_specs"),
        ("skip", "scalar.*reduce the scalar"),
        ("scale", "scalar.*reduce the scalar"),
    ],
)
def test_shard_map_operands_must_vary_alike(varying, text):
    """Otherwise a parameter declared the same on all devices would stop being so."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = jfa.fused_adamw(0.1)
    whole, split = jnp.ones(8), jnp.ones((8, 8))

    def local(w, other):
        other = other[0]
        grad = other if varying == "grad" else w
        state = tx.init({"w": w})
        if varying == "mu":
            state = state._replace(mu={"w": other})
        extra = dict(skip_update=other[0] > 0) if varying == "skip" else {}
        extra |= dict(gradient_scale=other[0]) if varying == "scale" else {}
        return jfa.step(tx, {"w": grad}, state, {"w": w}, **extra)[0]["w"]

    in_specs = (P(), P("x"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P())
    with pytest.raises(TypeError, match=text):
        jax.jit(sharded)(whole, split)


def test_shard_map_with_summed_gradients():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = jfa.fused_adamw(0.1)

    def local(w, grad):
        grad = jax.lax.psum(grad[0], "x")
        return jfa.step(tx, {"w": grad}, tx.init({"w": w}), {"w": w})[0]["w"]

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    got = jax.jit(sharded)(jnp.ones(4), jnp.ones((8, 4)))
    params = {"w": jnp.ones(4)}
    expected, _ = tx.step({"w": 8 * jnp.ones(4)}, tx.init(params), params)
    assert_same_bits(jax.device_get(got), jax.device_get(expected["w"]))
