"""The sharded step on all devices of the default backend: GPUs over NCCL, or CPUs.

The files about sharding need eight devices, which a CPU pretends to have. These run on
two as well as on eight, so that the same bodies prove the step where the devices are
real.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa
from jax_fused_adamw.bench._mesh import find_collectives

pytestmark = pytest.mark.devices(2)

STEPS = 3
CLIPPED = dict(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)
# A row of 12 bytes of each device in its slot: "Across devices" of the statistics.
REPORT_BYTES = 12


def num_devices():
    return jax.device_count()


def values(seed):
    """Leaves with a dimension of every device's, one of them bfloat16, and others."""
    rng, n = np.random.default_rng(seed), num_devices()
    shapes = {"wide": (3, 40 * n), "tall": (130 * n, 33), "flat": (4099 * n,)}
    shapes |= {"low": (8 * n, 16), "whole": (7,), "scalar": ()}
    tree = {k: np.asarray(rng.normal(size=s), np.float32) for k, s in shapes.items()}
    return tree | {"low": tree["low"].astype(jnp.bfloat16)}


FSDP = {"wide": P(None, "x"), "tall": P("x"), "flat": P("x"), "low": P("x")}
TWO_AXES = {
    "wide": P(None, ("x", "y")),
    "tall": P("x"),
    "flat": P(("y", "x")),
    "low": P("x", "y"),
    "whole": P(),
}
LAYOUTS = {
    "fsdp": (FSDP, FSDP),
    "zero1": ({}, FSDP),
    "two_axes": (TWO_AXES, TWO_AXES),
}


class Layout:
    """A mesh of all devices; where parameters lie on it, and where all else does."""

    def __init__(self, name):
        self.is_zero1 = name == "zero1"
        self._param_specs, self._specs = LAYOUTS[name]
        n = num_devices()
        shape, axes = (n,), ("x",)
        if name == "two_axes":
            if n < 4 or n % 2:
                pytest.skip(f"a mesh of two axes needs 4 devices, here are {n}")
            shape, axes = (n // 2, 2), ("x", "y")
        kinds = (AxisType.Auto,) * len(axes)
        self.mesh = jax.make_mesh(shape, axes, axis_types=kinds)

    def placements(self, tree, specs):
        return {k: NamedSharding(self.mesh, specs.get(k, P())) for k in tree}

    def place(self, tree):
        """As gradients and moments lie."""
        return jax.device_put(tree, self.placements(tree, self._specs))

    def place_params(self, tree):
        return jax.device_put(tree, self.placements(tree, self._param_specs))

    def start(self, tx):
        """Parameters, and a state that lies as the gradients do."""
        return self.place_params(values(0)), tx.init(self.place(values(0)))

    def jit(self, tx):
        """A donated step that leaves parameters where they were."""
        placements = self.placements(values(0), self._param_specs)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, grads, report=None):
            params, state = jfa.step(tx, grads, state, params, report=report)
            return jax.lax.with_sharding_constraint(params, placements), state

        return step


@pytest.fixture(params=list(LAYOUTS))
def layout(request):
    return Layout(request.param)


def num_bytes(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def on_every_device(tree):
    """The tree as each device holds it: lists of its shards."""
    return jax.tree.map(
        lambda x: [np.asarray(shard.data) for shard in x.addressable_shards], tree
    )


def compile_step(layout, tx):
    params, state = layout.start(tx)
    return layout.jit(tx).lower(params, state, layout.place(values(1))).compile()


def assert_gathers_only_what_zero1_must(layout, found):
    gathered = found.pop("all-gather", {"bytes": 0})["bytes"]
    if not layout.is_zero1:
        assert gathered == 0
        return
    cut = {k: v for k, v in values(0).items() if k in FSDP}
    # XLA:CPU sends bfloat16 as float32.
    widened = {k: v.astype(np.float32) for k, v in cut.items()}
    assert num_bytes(cut) <= gathered <= num_bytes(widened)


def test_only_the_norm_is_communicated(layout):
    compiled = compile_step(layout, jfa.fused_adamw(**CLIPPED))
    found = find_collectives(compiled.as_text())
    assert_gathers_only_what_zero1_must(layout, found)
    # A sum for each set of axes over which leaves are cut.
    assert found.pop("all-reduce")["bytes"] <= 3 * REPORT_BYTES * num_devices()
    assert found == {}


@pytest.mark.parametrize("bucket_bytes", [None, 1024], ids=["one", "several"])
def test_nothing_is_communicated_without_a_norm(layout, bucket_bytes):
    """In one kernel call, and in several that wait for each other."""
    tx = jfa.fused_adamw(1e-2, bucket_bytes=bucket_bytes)
    compiled = compile_step(layout, tx)
    found = find_collectives(compiled.as_text())
    assert_gathers_only_what_zero1_must(layout, found)
    assert found == {}


@pytest.mark.parametrize("name", ["fsdp", "two_axes"])
def test_donated_leaves_are_not_copied(name):
    compiled = compile_step(Layout(name), jfa.fused_adamw(**CLIPPED))
    copied = re.findall(r"= (\S+) copy\(", compiled.as_text())
    assert [of for of in copied if "[]" not in of] == []


@pytest.mark.parametrize("amsgrad", [False, True])
def test_bits_are_those_of_one_device_given_the_same_norm(layout, amsgrad):
    tx = jfa.fused_adamw(**CLIPPED, amsgrad=amsgrad)
    step, single = layout.jit(tx), jax.jit(tx.step)
    params, state = layout.start(tx)
    expected = values(0), tx.init(values(0))
    for i in range(STEPS):
        grads = values(1 + i)
        params, state = step(params, state, layout.place(grads))
        report = jax.device_get(state.report)
        np.testing.assert_allclose(report.norm, norm_of(grads), rtol=3e-7)
        expected = single(grads, expected[1], expected[0], report=report)
        assert_same_bits(jax.device_get((params, state)), jax.device_get(expected))
    assert state.count == STEPS and state.skipped == 0


def norm_of(tree):
    squares = [np.sum(np.square(np.asarray(x, np.float64))) for x in tree.values()]
    return np.sqrt(sum(squares))


def test_results_lie_where_their_arguments_did(layout):
    tx = jfa.fused_adamw(**CLIPPED)
    params, state = layout.start(tx)
    before = jax.tree.map(lambda x: x.sharding, (params, state.mu, state.nu))
    params, state = layout.jit(tx)(params, state, layout.place(values(1)))
    after = params, state.mu, state.nu
    for leaf, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert leaf.sharding.is_equivalent_to(old, leaf.ndim)
    scalars = jax.tree.leaves(state._replace(mu=None, nu=None))
    assert all(len(x.addressable_shards) == num_devices() for x in scalars)
    for scalar in scalars:
        held = {bits(shard.data).item() for shard in scalar.addressable_shards}
        assert len(held) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("owner", ["first", "last"])
def test_value_that_is_not_finite_skips_on_every_device(layout, owner, value):
    tx = jfa.fused_adamw(**CLIPPED)
    step = layout.jit(tx)
    state_and_params = layout.start(tx)
    params, state = step(*state_and_params, layout.place(values(1)))
    before = on_every_device((params, state.mu, state.nu, state.count))
    bad = values(2)
    bad["flat"][0 if owner == "first" else -1] = value
    params, state = step(params, state, layout.place(bad))
    after = on_every_device((params, state.mu, state.nu, state.count))
    assert_same_bits(after, before)
    assert on_every_device(state.skipped) == [1] * num_devices()
    assert on_every_device(state.report.nonfinite) == [1] * num_devices()
    # The next good step is taken, everywhere.
    params, state = step(params, state, layout.place(values(3)))
    assert on_every_device(state.count) == [2] * num_devices()


def test_inside_shard_map():
    """Each device has its own part by hand; the norm is still that of all."""
    layout, tx = Layout("fsdp"), jfa.fused_adamw(**CLIPPED)
    params, state = layout.start(tx)
    grads = layout.place(values(1))
    specs = {k: FSDP.get(k, P()) for k in params}
    state_specs = jax.tree.map(lambda _: P(), state)._replace(mu=specs, nu=specs)
    step = jax.jit(
        jax.shard_map(
            lambda p, s, g: jfa.step(tx, g, s, p),
            mesh=layout.mesh,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
        )
    )
    got = step(params, state, grads)
    expected = layout.jit(tx)(params, state, grads)
    np.testing.assert_allclose(got[1].report.norm, expected[1].report.norm, rtol=2e-7)
    report = jax.device_get(got[1].report)
    start = values(0), tx.init(values(0))
    expected = jax.jit(tx.step)(values(1), start[1], start[0], report=report)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@jax.default_matmul_precision("highest")
def test_training_follows_one_device():
    """Gradients of a batch that is cut, parameters that are: the same losses."""
    layout, tx = Layout("fsdp"), jfa.fused_adamw(**CLIPPED)
    rng, n = np.random.default_rng(0), num_devices()
    x = rng.normal(size=(8 * n, 16)).astype(np.float32)
    y = np.sin(x.sum(1))
    start = {
        "wide": rng.normal(size=(16, 8 * n)).astype(np.float32) / 4,
        "tall": rng.normal(size=(8 * n, 1)).astype(np.float32) / 4,
    }

    def loss_fn(params, x, y):
        hidden = jnp.tanh(x @ params["wide"])
        return jnp.square((hidden @ params["tall"])[:, 0] - y).mean()

    @jax.jit
    def train_step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        params, state = jfa.step(tx, grads, state, params)
        return params, state, loss

    def train(params, x, y):
        state, losses = tx.init(params), []
        for _ in range(20):
            params, state, loss = train_step(params, state, x, y)
            losses.append(float(loss))
        return losses, params

    expected, _ = train(start, x, y)
    split = NamedSharding(layout.mesh, P("x"))
    losses, params = train(layout.place(start), *jax.device_put((x, y), split))
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert params["tall"].sharding.spec == P("x")
