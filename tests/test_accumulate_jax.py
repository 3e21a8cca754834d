"""`jfa.accumulate` next to JAX and optax: compiled text, wrappers, saves, devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, bits, copies, random_like, take_step
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_accumulate import MICRO, PARAMS, last, ours, times, walk, windows, with_step
from test_cases_checkpoints import RESTORES

import jax_fused_adamw as jfa

# --- What it compiles to --------------------------------------------------------------

LARGE = {"w": jnp.ones((96, 40)), "b": jnp.ones(96)}
LARGE_BYTES = 4 * (96 * 40 + 96)


def compile_train_step(way, tx):
    def train_step(params, state, x):
        grads = jax.grad(
            lambda p: jnp.square(jnp.tanh(x @ p["w"])).sum() + (p["b"] ** 2).sum()
        )(params)
        return take_step(way, tx, grads, state, params)

    x = jnp.ones((2, 96))
    lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(LARGE, tx.init(LARGE), x)
    return lowered.compile()


def large_inner(name, way):
    make = {
        "ours": lambda **options: jfa.fused_adamw(1e-2, **options),
        "injected": lambda **options: optax.inject_hyperparams(
            jfa.fused_adamw, static_args="in_place"
        )(learning_rate=1e-2, **options),
        "masked": lambda **options: optax.masked(
            jfa.fused_adamw(1e-2, **options), {"w": True, "b": True}
        ),
    }[name]
    return make(in_place=way == "in_place")


@pytest.mark.parametrize("way", ["step", "in_place"])
@pytest.mark.parametrize("name", ["ours", "injected", "masked"])
def test_donated_micro_batch_copies_no_leaf(name, way):
    """Parameters, moments and accumulators in place, on either branch."""
    compiled = compile_train_step(way, jfa.accumulate(large_inner(name, way), 2))
    text = compiled.as_text()
    assert "jax_fused_adamw_update" in text and "conditional(" in text
    assert copies(compiled) <= 2
    assert "f32[96,40]{1,0} copy(" not in text and "f32[96]{0} copy(" not in text
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * LARGE_BYTES
    # The gradients, or the mean in their place.
    assert memory.temp_size_in_bytes <= 1.2 * LARGE_BYTES


def branches(compiled):
    """The text of every computation that a conditional may run."""
    computations = {}
    for block in compiled.as_text().split("\n\n"):
        name = block.strip().removeprefix("ENTRY ").split(" ")[0]
        computations[name] = block
    conditionals = [x for x in compiled.as_text().splitlines() if " conditional(" in x]
    names = []
    for line in conditionals:
        # Of an index, or of a predicate.
        names += re.findall(r"(?:true|false)_computation=([^,\s]+)", line)
        for listed in re.findall(r"branch_computations=\{(.*?)\}", line):
            names += listed.split(", ")
    return [computations[name] for name in names]


@pytest.mark.parametrize("way", ["step", "in_place"])
def test_micro_batch_without_a_step_touches_no_parameter(way):
    """Its branches only hand their arguments on."""
    tx = jfa.accumulate(large_inner("ours", way), 2)
    bodies = branches(compile_train_step(way, tx))
    busy = [body for body in bodies if re.search("custom-call|conditional", body)]
    idle = [body for body in bodies if body not in busy]
    assert len(busy) == len(idle) == 2  # is it the end, and is the mean finite
    for body in idle:
        operations = set(re.findall(r" = .*?([a-z-]+)\(", body))
        handing_on = {"parameter", "get-tuple-element", "tuple", "constant", "copy"}
        assert operations <= handing_on
        assert "f32[96,40]{1,0} copy(" not in body


def test_scan_over_micro_batches_copies_no_leaf():
    tx = jfa.accumulate(ours(), 2)

    def train(params, state, xs):
        def body(carry, x):
            params, state = carry
            grads = jax.tree.map(lambda p: x * p, params)
            return jfa.step(tx, grads, state, params), None

        return jax.lax.scan(body, (params, state), xs)[0]

    xs = jnp.linspace(0.5, 1.0, 6)
    jitted = jax.jit(train, donate_argnums=(0, 1))
    text = jitted.lower(LARGE, tx.init(LARGE), xs).compile().as_text()
    assert "f32[96,40]{1,0} copy(" not in text and "f32[96]{0} copy(" not in text
    params, state = LARGE, tx.init(LARGE)
    got = jax.jit(train)(params, state, xs)
    step = jax.jit(lambda p, s, x: jfa.step(tx, times(p, x), s, p))
    for x in xs:
        params, state = step(params, state, x)
    assert int(state.inner_opt_state.count) == 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[0], params
    )


def test_one_compilation_and_no_host_reads():
    tx = jfa.accumulate(ours(), 2)
    step = jax.jit(with_step(tx)[1].__wrapped__, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    extras = [
        dict(
            weight=jnp.float32(w),
            skip_update=jnp.array(s),
            gradient_scale=jnp.float32(c),
        )
        for w, s, c in [(1, False, 1), (2, False, 4), (1, True, 2), (3, False, 1)]
    ]
    avals = jax.tree.map(jax.typeof, state)
    assert "callback" not in step.lower(params, state, MICRO[0], extras[0]).as_text()
    with jax.transfer_guard("disallow"):
        for grads, extra in zip(MICRO, extras, strict=False):
            params, state = step(params, state, grads, extra)
    assert step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == avals
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    counts = (state.inner_opt_state.count, state.inner_opt_state.skipped)
    assert [int(c) for c in counts] == [1, 1]


# --- Around it ------------------------------------------------------------------------


@pytest.mark.parametrize("restore", RESTORES, ids=lambda f: f.__name__)
def test_pending_window_survives_a_restore(restore, tmp_path):
    half = last(walk(windows(4), MICRO[:2]))
    assert int(half[1].mini_step) == 2
    restored = restore(half, tmp_path)
    assert isinstance(restored[1], jfa.AccumulateState)
    assert_same_bits(restored, half)
    resumed = last(walk(windows(4), MICRO[2:6], restored[0], state=restored[1]))
    assert_same_bits(resumed, last(walk(windows(4), MICRO[:6])))
    assert int(resumed[1].inner_opt_state.count) == 1


@pytest.mark.parametrize("way", ["step", "in_place"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.masked(tx, {"w": True, "h": True, "b": True}),
        lambda tx: optax.multi_transform(
            {"all": tx}, {"w": "all", "h": "all", "b": "all"}
        ),
    ],
    ids=["chain", "masked", "multi_transform"],
)
def test_wrapped_by_optax(way, wrap):
    tx = jfa.accumulate(ours(way), 2)
    extras = [{"weight": jnp.float32(w)} for w in (1, 3)]
    got = last(walk(with_step(wrap(tx), way), MICRO[:2], extras=extras))
    expected = last(walk(windows(2, ours, way), MICRO[:2], extras=extras))
    assert_same_bits(got[0], expected[0])


def test_wrapper_that_needs_plain_updates():
    tx = optax.chain(jfa.accumulate(ours(), 1), optax.scale_by_trust_ratio())
    with pytest.warns(UserWarning, match="cannot take in-place updates"):
        got = last(walk(with_step(tx), MICRO[:1]))
    plain = last(walk(with_step(tx, "update"), MICRO[:1]))
    assert_same_bits(got, plain)


def test_members_of_a_vmap_have_their_own_windows():
    tx = jfa.accumulate(ours(), 2)
    stack = jax.tree.map(lambda *x: jnp.stack(x), *MICRO[:3])
    grads = [stack, {**stack, "w": stack["w"].at[1].set(jnp.nan)}]
    params = jax.tree.map(lambda p: jnp.stack([p] * 3), PARAMS)
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(lambda p, s, g: jfa.step(tx, g, s, p)))
    for grad in grads:
        params, state = step(params, state, grad)
    assert state.skipped_windows.tolist() == [0, 1, 0]
    assert state.inner_opt_state.skipped.tolist() == [0, 1, 0]
    for i in range(3):
        member = [jax.tree.map(lambda x, i=i: x[i], g) for g in grads]
        expected = last(walk(windows(2), member))
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], params), expected[0])


@pytest.mark.devices(4)
@pytest.mark.parametrize("way", ["step", "update"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_leaves_stay_where_they_are(way, axis_type):
    mesh = jax.make_mesh((4,), ("x",), (axis_type,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P("x"))
    grads = [random_like(jnp.zeros((16, 3)), seed) for seed in (1, 2)]
    expected = last(walk(windows(2, ours, way), grads, jnp.ones((16, 3))))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((16, 3)), sharding)
        grads = jax.device_put(grads, sharding)
        tx, step = with_step(jfa.accumulate(ours(way), 2), way)
        text = step.lower(params, tx.init(params), grads[0], {}).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text
        params, state = last(walk((tx, step), grads, params))
        assert state.acc_grads.sharding.is_equivalent_to(sharding, 2)
        assert params.sharding.is_equivalent_to(sharding, 2)
    assert_same_bits(jax.device_get((params, state)), jax.device_get(expected))


@pytest.mark.devices(4)
@pytest.mark.parametrize("way", ["step", "update"])
def test_shards_of_a_shard_map_skip_together(way):
    """A NaN on one device alone."""
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    tx = jfa.accumulate(ours(way), 1)
    params = jnp.ones((8, 3))
    state = tx.init(params)
    specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
    step = jax.jit(
        jax.shard_map(
            lambda p, s, g: take_step(way, tx, g, s, p),
            mesh=mesh,
            in_specs=(P("x"), specs, P("x")),
            out_specs=(P("x"), specs),
        )
    )
    for bad in (True, False):
        grads = params.at[5, 1].set(jnp.nan if bad else 1.0)
        before = params
        params, state = step(params, state, grads)
        assert (bits(params) == bits(before)).all() == bad
    assert int(state.skipped_windows) == int(state.inner_opt_state.count) == 1


def test_inner_transformation_without_params():
    """sgd reads none; its extra arguments are those of the last micro-batch."""
    tx = jfa.accumulate(optax.sgd(0.5), 2)
    state = tx.init(jnp.ones(2))
    updates, state = tx.update(jnp.array([1.0, 2.0]), state)
    assert_same_bits(updates, jnp.full(2, -0.0))
    updates, state = tx.update(jnp.array([3.0, 2.0]), state)
    assert_same_bits(updates, jnp.array([-1.0, -1.0]))

    def update(updates, state, params=None, *, value, **extra_args):
        assert not extra_args
        return updates, value

    last_value = optax.GradientTransformationExtraArgs(lambda p: jnp.float32(0), update)
    tx = jfa.accumulate(last_value, 2)
    state = tx.init(jnp.ones(2))
    for value in (5.0, 7.0):
        _, state = tx.update(
            jnp.ones(2), state, value=jnp.float32(value), skip_update=False, weight=2
        )
    assert float(state.inner_opt_state) == 7.0


def test_smaller_every_k_ends_a_restored_window():
    half = last(walk(windows(4), MICRO[:3]))
    params, state = last(walk(windows(2), MICRO[3:4], half[0], state=half[1]))
    assert (int(state.mini_step), int(state.inner_opt_state.count)) == (0, 1)
    assert_same_bits(params, last(walk(windows(4), MICRO[:4]))[0])


def test_random_keys_in_the_state():
    tx = optax.chain(optax.add_noise(0.1, 0.5, 3), ours())
    steps = list(walk(with_step(jfa.accumulate(tx, 2)), MICRO[:2]))
    assert_same_bits(steps[0][0], PARAMS)
    assert (bits(steps[1][0]["w"]) != bits(PARAMS["w"])).all()


def test_init_shares_no_buffers():
    tx = jfa.accumulate(ours(), 2)
    leaves = jax.tree.leaves((PARAMS, tx.init(PARAMS)))
    pointers = [x.unsafe_buffer_pointer() for x in leaves]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("every_k", [2.0, True, jnp.int32(2), lambda step: 2, None])
def test_every_k_must_be_an_integer(every_k):
    with pytest.raises(TypeError, match="every_k.*integer"):
        jfa.accumulate(ours(), every_k)
    with pytest.raises(ValueError, match="every_k"):
        jfa.accumulate(ours(), 0)


def test_bad_input_is_named():
    tx = jfa.accumulate(ours(), 2)
    state = tx.init(PARAMS)
    good = MICRO[0]
    for kind, match, grads, extra in [
        (ValueError, r"grads\['w'\].*shape", {**good, "w": jnp.ones((1, 1))}, {}),
        (ValueError, r"grads\['w'\] is missing", {"h": good["h"], "b": good["b"]}, {}),
        (ValueError, "weight", good, {"weight": -1.0}),
        (ValueError, "weight", good, {"weight": float("nan")}),
        (ValueError, "weight", good, {"weight": jnp.ones(2)}),
        (TypeError, "weight", good, {"weight": "3"}),
        (TypeError, "skip_update", good, {"skip_update": 0.5}),
        (TypeError, "GradReport", good, {"report": jnp.int32(0)}),
        (
            ValueError,
            "report.*whole",
            good,
            {"report": jfa.GradReport(*[jnp.ones(2)] * 3)},
        ),
        (TypeError, "gradient_scale", good, {"gradient_scale": "2"}),
    ]:
        with pytest.raises(kind, match=match):
            jfa.step(tx, grads, state, PARAMS, **extra)
    with pytest.raises(TypeError, match="AccumulateState"):
        jfa.step(tx, good, ours().init(PARAMS), PARAMS)
    new, _ = jfa.step(tx, good, state, PARAMS)
    assert_same_bits(new, PARAMS)
