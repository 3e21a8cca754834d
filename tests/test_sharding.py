"""Sharded leaves stay where they are: no gather, no copy, the state's placement."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import KINDS, is_placed, make_mesh, place

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._mesh import find_collectives

SHAPES = {"both": (8, 8), "flat": (16,), "half": (8, 2), "last": (3, 8), "whole": (3,)}
VALUES = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
VALUES["half"] = VALUES["half"].astype(jnp.bfloat16)
LAYOUTS = {  # mesh axes, and the spec of each leaf
    "fsdp": (("x",), [P("x"), P("x"), P("x"), P(None, "x"), P()]),
    "fsdp+tp": (("x", "y"), [P("x", "y"), P(("x", "y")), P("x"), P(None, "y"), P()]),
    "3d": (
        ("x", "y", "z"),
        [P("x", ("y", "z")), P(("x", "y", "z")), P("z", "y"), P(None, "x"), P()],
    ),
}
SPECS = dict(zip(SHAPES, LAYOUTS["fsdp+tp"][1]))
ZERO_1 = {**SPECS, "both": P(None, ("x", "y")), "half": P(("x", "y")), "last": P()}
TX = jfa.fused_adamw(0.1, weight_decay=0.1, amsgrad=True)


def step(params, state, grads):
    return jfa.step(TX, grads, state, params)


def is_compiled_once(jitted, mesh) -> bool:
    """Where an axis has size 1, JAX leaves it out of a result's spec: another key."""
    return jitted._cache_size() == 1 or 1 in mesh.shape.values()


def two_steps(params, grads):
    params, state = step(params, TX.init(params), grads)
    return step(params, state, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
def test_step_gathers_nothing_copies_nothing_and_has_the_bits_of_one_device(
    kind, layout, donate
):
    axes, specs = LAYOUTS[layout]
    specs = dict(zip(SHAPES, specs))
    expected = jax.device_get(two_steps(VALUES, VALUES))
    mesh = make_mesh(*axes, kind=kind)
    with jax.set_mesh(mesh):
        params, grads = place(mesh, VALUES, specs), place(mesh, VALUES, specs)
        state = jax.jit(TX.init)(params)
        donated = (0, 1) if donate else ()
        jitted = jax.jit(lambda *arguments: step(*arguments), donate_argnums=donated)
        compiled = jitted.lower(params, state, grads).compile()
        first = jitted(params, state, grads)
        second = jitted(*jax.tree.map(jnp.copy, first), grads)
    assert count_ops(compiled, "all-gather") == count_ops(compiled, "all-reduce") == 0
    assert count_ops(compiled, "all-to-all") == 0
    assert copies(compiled) == 0 or not donate
    if not donate:
        assert_same_bits(jax.device_get(params), VALUES)
    new_params, new_state = second
    for tree in (new_params, new_state.mu, new_state.nu, new_state.nu_max):
        assert all(is_placed(leaf, mesh, specs[k]) for k, leaf in tree.items())
    assert_same_bits(jax.device_get(second), expected)
    assert is_compiled_once(jitted, mesh)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_zero_1_gathers_each_new_parameter_once(mesh, amsgrad):
    """Whole parameters and gradients, moments cut along one dimension."""
    tx = jfa.fused_adamw(0.1, weight_decay=0.1, amsgrad=amsgrad)
    params, grads = place(mesh, VALUES, P()), place(mesh, VALUES, P())
    shardings = jfa.state_shardings(tx, place(mesh, VALUES, ZERO_1))
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    jitted = jax.jit(lambda p, s, g: tx.step(g, s, p), donate_argnums=(0, 1))
    compiled = jitted.lower(params, state, grads).compile()
    cut = [VALUES[k] for k, spec in ZERO_1.items() if spec != P() and mesh.size > 1]
    found = find_collectives(compiled.as_text()).get("all-gather", {})
    # XLA:CPU gathers bfloat16 as float32.
    least, most = sum(x.nbytes for x in cut), sum(4 * x.size for x in cut)
    assert least <= found.get("bytes", 0) <= most
    # XLA packs several leaves into one on a GPU.
    assert found.get("count", 0) == len(cut) or jax.default_backend() == "gpu"
    assert count_ops(compiled, "all-reduce") == count_ops(compiled, "all-to-all") == 0
    for _ in range(3):
        params, state = jitted(params, state, grads)
    assert is_compiled_once(jitted, mesh)
    assert all(is_placed(leaf, mesh, P()) for leaf in params.values())
    for moments in (state.mu, state.nu):
        assert all(is_placed(leaf, mesh, ZERO_1[k]) for k, leaf in moments.items())
    expected, end = VALUES, tx.init(VALUES)
    for _ in range(3):
        expected, end = tx.step(VALUES, end, expected)
    assert_same_bits(jax.device_get((params, state)), jax.device_get((expected, end)))


def test_zero_1_accumulates_where_its_moments_are(mesh):
    tx = jfa.accumulate(jfa.fused_adamw(0.1, max_grad_norm=1.0), 2)
    params, grads = place(mesh, VALUES, P()), place(mesh, VALUES, P())
    shardings = jfa.state_shardings(tx, place(mesh, VALUES, ZERO_1))
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    expected, end = VALUES, tx.init(VALUES)
    for _ in range(2):
        params, state = jax.jit(lambda p, s, g: jfa.step(tx, g, s, p))(
            params, state, grads
        )
        expected, end = jfa.step(tx, VALUES, end, expected)
    sums = state.acc_grads
    assert all(is_placed(sums[k], mesh, spec) for k, spec in ZERO_1.items())
    for name, leaf in params.items():
        np.testing.assert_allclose(
            np.float32(leaf), np.float32(expected[name]), rtol=1e-6, atol=1e-6
        )


def test_updates_of_the_protocol_come_as_the_parameters_do(mesh):
    """So that optax.apply_updates keeps the parameters where they are."""
    params, grads = place(mesh, VALUES, P()), place(mesh, VALUES, P())
    state = TX.init(place(mesh, VALUES, SPECS))
    updates, _ = jax.jit(TX.update)(grads, state, params)
    assert all(is_placed(leaf, mesh, P()) for leaf in updates.values())


def test_moments_of_a_restored_state_follow_the_parameters():
    """Arrays of the host, which belong to no device yet."""
    mesh = make_mesh("x", "y")
    params, grads = place(mesh, VALUES, SPECS), place(mesh, VALUES, SPECS)
    state = jax.device_get(TX.init(params))
    jitted = jax.jit(step)
    assert count_ops(jitted.lower(params, state, grads).compile(), "all-gather") == 0
    _, new_state = jitted(params, state, grads)
    assert all(is_placed(leaf, mesh, SPECS[k]) for k, leaf in new_state.mu.items())


def test_leaves_of_uneven_parts():
    """XLA may cut 37 elements into 8 parts of 5, the last one filled up."""
    mesh = make_mesh("x")
    values = np.random.default_rng(0).normal(size=40).astype(np.float32)
    expected, _ = two_steps({"w": values[:37]}, {"w": values[:37]})

    def of_slice(params, grads):
        return two_steps({"w": params[:37]}, {"w": grads[:37]})[0]

    leaf = jax.device_put(values, NamedSharding(mesh, P("x")))
    got = jax.jit(of_slice)(leaf, leaf)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@pytest.mark.devices(2)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_state_on_another_device_is_an_error_of_jax(wrap):
    first, second = jax.devices()[:2]
    params = jax.device_put(VALUES, first)
    state = TX.init(jax.device_put(VALUES, second))
    with pytest.raises(ValueError, match="incompatible devices"):
        wrap(step)(params, state, params)
    moved = jax.device_put(state, jfa.state_shardings(TX, params))
    expected = step(params, TX.init(params), params)
    assert_same_bits(wrap(step)(params, moved, params), expected)


def test_state_of_another_mesh_is_an_error_of_jax():
    """A program with custom partitioning has one mesh."""
    values = {"w": VALUES["flat"]}
    params = place(make_mesh("x", "y"), values, P("x"))
    state = TX.init(place(make_mesh("z"), values, P("z")))
    with pytest.raises(ValueError, match="mesh should be the same"):
        step(params, state, params)
    moved = jax.device_put(state, jfa.state_shardings(TX, params))
    expected = step(params, TX.init(params), params)
    assert_same_bits(step(params, moved, params), expected)


@pytest.mark.platform("cpu")
def test_512_leaves_compile_in_five_seconds():
    mesh, tx = make_mesh("x"), jfa.fused_adamw(0.1, max_grad_norm=1.0)
    ones = {f"leaf{i}": np.ones(8, np.float32) for i in range(512)}
    params = place(mesh, ones, P("x"))
    state = jax.jit(tx.init)(params)
    start = time.process_time()
    compiled = jax.jit(tx.step).lower(params, state, params).compile()
    # Processor time: what else runs on the machine must not decide this.
    assert time.process_time() - start < 2 * 5.0
    assert count_ops(compiled, "all-gather") == 0


# --- vmap -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_of_arrays_made_before_the_mesh(kind):
    """Such arrays reach the partitioner without a spec, replicated."""
    tx = jfa.fused_adamw(0.1)
    params = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
    state = jax.vmap(tx.init)(params)
    expected = jax.vmap(lambda p, s: tx.step(p, s, p))(params, state)
    with jax.set_mesh(make_mesh("m", kind=kind)):
        got = jax.jit(jax.vmap(lambda p, s: tx.step(p, s, p)))(params, state)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


def test_members_of_a_vmap_shard_with_their_scalars():
    mesh = make_mesh("x", "y")
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
    assert is_placed(got, mesh, P("x", "y"))
    assert_same_bits(jax.device_get(got), jax.device_get(expected))
