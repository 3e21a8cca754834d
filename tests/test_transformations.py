"""The step inside of JAX's transformations, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, count_ops
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from meshes import is_placed, make_mesh, place

import jax_fused_adamw as jfa

VALUES = {
    "w": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=8).astype(np.float32),
}
SPECS = {"w": P("x", "y"), "b": P("y")}
TX = jfa.fused_adamw(0.1, weight_decay=0.1, max_grad_norm=1.0)


def loss(params):
    return jnp.square(jnp.tanh(params["w"]) @ params["b"]).sum()


def train_step(params, state):
    return TX.step(jax.grad(loss)(params), state, params)


def two_steps(step):
    return lambda params, state: step(*step(params, state))


def scanned(params, state):
    body = lambda carry, _: (train_step(*carry), None)  # noqa: E731
    return lax.scan(body, (params, state), length=2)[0]


def in_while_loop(params, state):
    carry = params, state
    return lax.while_loop(lambda c: c[1].count < 2, lambda c: train_step(*c), carry)


def conditional(params, state):
    def step(params, state):
        is_first = state.count < 2
        return lax.cond(is_first, train_step, lambda *c: c, params, state)

    return step(*two_steps(step)(params, state))


def ahead_of_time(params, state):
    compiled = jax.jit(train_step).lower(params, state).compile()
    return two_steps(compiled)(params, state)


IN_JIT = {
    "plain": two_steps(train_step),
    "nested": two_steps(jax.jit(jax.jit(train_step))),
    "checkpoint": two_steps(jax.checkpoint(train_step)),
    "scan": scanned,
    "while": in_while_loop,
    "cond": conditional,
}


@pytest.mark.parametrize("name", [*IN_JIT, "ahead_of_time"])
@pytest.mark.parametrize("where", ["one device", "mesh"])
def test_two_steps(name, where):
    """With the bits of two jitted steps, and no gather but those of the loss."""
    params = dict(VALUES)
    mesh = make_mesh("x", "y")
    if where == "mesh":
        params = place(mesh, VALUES, SPECS)
    state = jax.jit(TX.init)(params)
    expected = two_steps(jax.jit(train_step))(params, state)
    if name == "ahead_of_time":
        got = ahead_of_time(params, state)
    else:
        got = jax.jit(IN_JIT[name])(params, state)
    assert got[1].count == 2
    assert_same_bits(jax.device_get(got), jax.device_get(expected))
    if where == "mesh":
        for tree in (got[0], got[1].mu):
            assert all(is_placed(leaf, mesh, SPECS[k]) for k, leaf in tree.items())


@pytest.mark.parametrize("layout", ["fsdp", "zero-1"])
def test_a_train_step_communicates_what_its_gradients_do(layout):
    """And for the norm, once for each set of axes; with ZeRO-1 each parameter, once."""
    mesh = make_mesh("x", "y")
    cut = place(mesh, VALUES, {"w": P("x"), "b": P("y")})
    params = cut if layout == "fsdp" else place(mesh, VALUES, P())
    shardings = jfa.state_shardings(TX, cut)
    state = jax.jit(TX.init, out_shardings=shardings)(params)
    # The gradients where the step wants them, which is where the moments are.
    gradients = jax.jit(jax.grad(loss), out_shardings=shardings.mu)
    gradients = gradients.lower(params).compile()
    step = jax.jit(train_step, donate_argnums=(0, 1)).lower(params, state).compile()
    num_cut = sum(mesh.shape[axis] > 1 for axis in "xy")
    more = dict.fromkeys(("all-to-all", "collective-permute"), 0)
    more |= {"all-gather": num_cut if layout == "zero-1" else 0, "all-reduce": num_cut}
    for op, number in more.items():
        assert count_ops(step, op) == count_ops(gradients, op) + number, op


# --- Host memory ----------------------------------------------------------------------


def _to(space, tree):
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)


@pytest.fixture
def offloaded():
    """Parameters on the device, and a state in the host's memory."""
    device = jax.devices()[0]
    if "pinned_host" not in [m.kind for m in device.addressable_memories()]:
        pytest.skip("this device knows no pinned_host memory")
    if jax.__version_info__ < (0, 10, 2):
        pytest.skip("JAX 0.10.0 aborts the process, with optax.adamw too")
    params = jax.device_put(VALUES, device)
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    return params, _to(host, TX.init(params))


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_state_in_host_memory_is_brought_for_the_step(offloaded, donate):
    def step(params, state, grads):
        params, state = TX.step(grads, _to(jax.memory.Space.Device, state), params)
        return params, _to(jax.memory.Space.Host, state)

    expected = TX.step(VALUES, TX.init(VALUES), VALUES)
    got = jax.jit(step, donate_argnums=donate)(*offloaded, VALUES)
    assert got[1].nu["w"].sharding.memory_kind == "pinned_host"
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_in_host_memory_are_refused(offloaded, wrap):
    params, state = offloaded
    text = r"state.mu\['b'\] lies in host memory.*jax.memory.Space.Device"
    with pytest.raises(ValueError, match=text):
        wrap(TX.step)(params, state, params)
    grads = {"g": state.mu["w"]}
    with pytest.raises(ValueError, match=r"grad_stats: grads\['g'\] lies in host"):
        wrap(jfa.grad_stats)(grads)


def test_host_memory_where_state_is_made_or_kept(offloaded):
    _, state = offloaded
    on_host, advice = state.mu, r"jax.jit\(tx.init\)\(params\)"
    with pytest.raises(ValueError, match=rf"params\['b'\] lies in host.*{advice}"):
        TX.init(on_host)
    made = jax.jit(TX.init)(on_host)
    inside = jax.jit(lambda: TX.init(on_host))()  # which closes over them
    for state in (made, inside):
        assert state.mu["w"].sharding.memory_kind == "device"
    tx = jfa.accumulate(TX, 2)
    with pytest.raises(ValueError, match=r"accumulate: grads\['b'\] lies in host"):
        jfa.step(tx, on_host, tx.init(VALUES), VALUES)
