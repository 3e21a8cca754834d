"""lr_scale: a learning rate of its own for each leaf, in one call for all."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    HYPERPARAMS,
    VARIANTS,
    WAYS,
    assert_follows_oracle,
    assert_same_bits,
    assert_within_ulp,
    make_tx,
    mixed_tree,
    name_of,
    random_like,
    state_at,
    take_step,
)
from jax.sharding import PartitionSpec as P
from meshes import is_placed, make_mesh, place
from update_call import call

import jax_fused_adamw as jfa

LR = HYPERPARAMS["learning_rate"]
SCALES = {"a": 1 / 3, "b": 0.0, "c": 1.0, "d": 2.0}
PARAMS = {
    "a": jnp.ones((4, 16)),
    "b": jnp.ones(8),
    "c": jnp.ones((8, 2), jnp.bfloat16),
    "d": jnp.ones((16, 4), jnp.bfloat16),
}
PARAMS, GRADS = random_like(PARAMS, 1), random_like(PARAMS, 2)
UPDATE_CALL = "stablehlo.custom_call @jax_fused_adamw_update_v2"


def two_steps(way, tx, params=PARAMS, grads=GRADS, **extra):
    state = tx.init(params)
    for _ in range(2):
        params, state = take_step(way, tx, grads, state, params, **extra)
    return params, state


def assert_scaled(run, scales=SCALES, lr=LR):
    """``run(lr, lr_scale)`` gives each leaf what it has at a rate of its own."""
    params, state = run(lr, scales)
    for name, scale in scales.items():
        alone, alone_state = run(lr * scale, None)
        assert_same_bits(params[name], alone[name])
        # Moments do not depend on the learning rate.
        assert_same_bits((state.mu, state.nu), (alone_state.mu, alone_state.nu))
    unscaled, _ = run(lr, None)
    differ = {name: bool((params[name] != unscaled[name]).any()) for name in scales}
    assert differ == {name: scale != 1 for name, scale in scales.items()}


# --- What it computes -----------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=name_of)
def test_follows_oracle(variant, traced, implementation):
    params, grads = mixed_tree()
    scales = [1 / 3, 1.0, 2.0, 0.0, 1e-3, 0.7, 10.0, 1.0, 1 / 7]
    options = HYPERPARAMS | variant
    lr = jnp.float32(LR) if traced else LR
    options["learning_rate"] = float(lr)
    tx = jfa.fused_adamw(
        **options | dict(learning_rate=lr),
        lr_scale=dict(zip(params, scales)),
        implementation=implementation,
    )
    state = state_at(tx, params, 7)
    for out, after in {
        "param": jfa.step(tx, grads, state, params),
        "update": tx.update(grads, state, params),
    }.items():
        before = (params, state)
        assert_follows_oracle(options, before, grads, after, out=out, lr_scales=scales)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("traced", [False, True])
def test_the_product_is_rounded_once(traced, implementation):
    """The updates are minus the learning rate: no moment, decay or epsilon."""
    rng = np.random.default_rng(0)
    rates, scales = rng.uniform(1e-4, 1.0, 20), rng.uniform(0.0, 3.0, 20)
    early = np.float32(rates) * np.float32(scales)
    grads = [jnp.ones(1)] * len(scales)
    bound = 0 if implementation == "ffi" else 1
    for rate, count in zip(rates, range(len(rates))):
        lr = jnp.float32(rate) if traced else rate
        tx = jfa.fused_adamw(
            lr,
            0.0,
            0.0,
            0.0,
            weight_decay=0.0,
            lr_scale=list(scales),
            implementation=implementation,
        )
        updates, _ = tx.update(grads, tx.init(grads), grads)
        exact = np.float32(-float(lr) * scales)
        assert_within_ulp(np.concatenate(updates), exact, bound)
        early[count] = (np.float32(-lr) * np.float32(scales) != exact).sum()
    assert early.sum() > 20  # so that an earlier rounding would show


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=name_of)
def test_bits_of_a_multi_transform_of_scaled_optimizers(variant, way):
    options = HYPERPARAMS | variant

    def group(scale):
        return make_tx(way, **options | dict(learning_rate=LR * scale))

    groups = optax.multi_transform(
        {name: group(scale) for name, scale in SCALES.items()},
        dict.fromkeys(SCALES) | {name: name for name in SCALES},
    )
    one = make_tx(way, **options, lr_scale=SCALES)
    params, state = two_steps(way, one)
    expected, states = two_steps(way, groups)
    assert_same_bits(params, expected)
    for name in SCALES:
        inner = states.inner_states[name].inner_state
        assert_same_bits(state.nu[name], inner.nu[name])


def test_zero_freezes_the_parameter_and_moves_its_moments():
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale={"a": 0, "b": 1, "c": 0, "d": 0.0})
    params, state = two_steps("step", tx)
    frozen = ("a", "c", "d")
    assert_same_bits([params[k] for k in frozen], [PARAMS[k] for k in frozen])
    assert all(bool((state.mu[k] != 0).all()) for k in PARAMS)
    assert bool((params["b"] != PARAMS["b"]).all())


ONES = [1, 1.0, np.float32(1), dict.fromkeys(PARAMS, 1), lambda params: 1.0]


def name_of_scales(scales):
    """Without an address, which would differ from one worker process to the next."""
    return "callable" if callable(scales) else str(scales)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("ones", ONES, ids=name_of_scales)
def test_ones_are_the_program_without_scales(ones, implementation):
    def lowered(lr_scale):
        tx = jfa.fused_adamw(
            **HYPERPARAMS, lr_scale=lr_scale, implementation=implementation
        )

        def step(params, state):
            return jfa.step(tx, GRADS, state, params)

        return jax.jit(step).lower(PARAMS, tx.init(PARAMS)).as_text()

    assert lowered(ones) == lowered(None)
    assert "lr_scales" not in lowered(None)
    assert lowered(SCALES) != lowered(None)


# --- One call, with everything else ---------------------------------------------------


def test_one_call_for_all_scales_and_no_operand_more():
    def lowered(lr_scale):
        tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=lr_scale)
        arguments = (PARAMS, tx.init(PARAMS))
        step = jax.jit(lambda p, s: jfa.step(tx, GRADS, s, p))
        text = step.lower(*arguments).as_text()
        (line,) = [x for x in text.splitlines() if UPDATE_CALL in x]
        return line

    def operands(line):
        return line.split("(")[1].split(")")[0]

    assert len(operands(lowered(SCALES))) == len(operands(lowered(None)))


def test_another_learning_rate_does_not_compile_again():
    @jax.jit
    def step(params, state, lr):
        tx = jfa.fused_adamw(lr, lr_scale=SCALES)
        return jfa.step(tx, GRADS, state, params)

    params, state = PARAMS, jfa.fused_adamw(1.0).init(PARAMS)
    for lr in (0.1, 0.2, 1e-5):
        params, state = step(params, state, jnp.float32(lr))
    assert step._cache_size() == 1 and int(state.count) == 3


def test_schedule():
    def run(lr, lr_scale):
        tx = jfa.fused_adamw(lambda count: lr / (1.0 + count), lr_scale=lr_scale)
        return two_steps("step", tx)

    # Powers of two: the schedule's own rounding is then the same.
    assert_scaled(run, {"a": 0.5, "b": 0.0, "c": 1.0, "d": 2.0})


OPTIONS = {
    "amsgrad": dict(amsgrad=True),
    "masters": dict(master_weights=True, ema_decay=0.9),
    "moments in bfloat16": dict(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=3),
    "rounded parameters": dict(stochastic_rounding="params"),
    "copies": dict(compute_dtype="bfloat16"),
    "clip": dict(max_grad_norm=0.5),
    "clip values": dict(max_grad_value=0.5, skip_nonfinite=True),
    "mask": dict(mask={"a": True, "b": False, "c": False, "d": True}),
    "out of place": dict(alias=False),
}


@pytest.mark.parametrize(
    "name, way, implementation",
    [
        *((name, way, "ffi") for name in OPTIONS for way in WAYS),
        ("clip", "step", "xla"),
    ],
)
def test_with_other_options(name, way, implementation):
    options = HYPERPARAMS | OPTIONS[name] | dict(implementation=implementation)

    def run(lr, lr_scale):
        options["learning_rate"] = lr
        tx = make_tx(way, **options, lr_scale=lr_scale)
        return jax.jit(lambda p, g: two_steps(way, tx, p, g))(PARAMS, GRADS)

    # Powers of two, where one product more in plain JAX rounds nothing.
    assert_scaled(
        run,
        {"a": 0.5, "b": 0.0, "c": 1.0, "d": 2.0} if implementation == "xla" else SCALES,
    )


def test_float64_leaves_beside_others():
    with jax.enable_x64(True):
        params = {
            k: x.astype(jnp.float64) if k in "ad" else x for k, x in PARAMS.items()
        }
        params, grads = random_like(params, 8), random_like(params, 9)

        def run(lr, lr_scale):
            tx = jfa.fused_adamw(
                **HYPERPARAMS | dict(learning_rate=lr), lr_scale=lr_scale
            )
            return two_steps("step", tx, params, grads)

        assert_scaled(run)


def test_more_leaves_than_a_call_takes():
    names = [f"p{i:03}" for i in range(300)]
    params = {name: jnp.full(3, i, jnp.float32) for i, name in enumerate(names)}
    scales = {name: i % 5 / 4 for i, name in enumerate(names)}
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=scales)
    after, _ = jfa.step(tx, params, tx.init(params), params)
    for scale in set(scales.values()):
        alone = jfa.fused_adamw(**HYPERPARAMS | dict(learning_rate=LR * scale))
        expected, _ = jfa.step(alone, params, alone.init(params), params)
        for name in names:
            if scales[name] == scale:
                assert_same_bits(after[name], expected[name])


def test_accumulate():
    def run(lr, lr_scale):
        tx = jfa.fused_adamw(**HYPERPARAMS | dict(learning_rate=lr), lr_scale=lr_scale)
        params, state = two_steps("step", jfa.accumulate(tx, 2))
        return params, state.inner_opt_state

    assert_scaled(run)


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_vmap_over_leaves_and_learning_rates(implementation):
    rates = jnp.array([0.1, 0.2, 0.4])
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), PARAMS)

    def member(rate, params):
        tx = jfa.fused_adamw(rate, lr_scale=SCALES, implementation=implementation)
        return jfa.step(tx, GRADS, tx.init(params), params)

    batched = jax.vmap(member)(rates, members)
    for i, rate in enumerate(rates):
        one, params = jax.tree.map(operator.itemgetter(i), (batched, members))
        alone = member(rate, params)
        if implementation == "ffi":
            assert_same_bits(one, alone)
        else:  # XLA fuses the two differently
            jax.tree.map(assert_close, one, alone)


def assert_close(x, y):
    np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=0.5)], ids=str)
def test_sharded(options, kind):
    specs = {"a": P(None, "x"), "b": P("x"), "c": P("x"), "d": P("x")}
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=SCALES, **options)
    report = jfa.grad_stats(GRADS) if options else None
    extra = dict(report=report) if options else {}
    expected = jax.device_get(two_steps("step", tx, **extra))
    mesh = make_mesh("x", kind=kind)
    with jax.set_mesh(mesh):
        params, grads = place(mesh, PARAMS, specs), place(mesh, GRADS, specs)
        step = jax.jit(lambda p, g: two_steps("step", tx, p, g, **extra))
        after = step(params, grads)
    assert all(is_placed(after[0][k], mesh, specs[k]) for k in specs)
    assert_same_bits(jax.device_get(after), expected)


def test_shard_map():
    specs = {"a": P(None, "x"), "b": P("x"), "c": P("x"), "d": P("x")}
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=SCALES)
    expected, _ = two_steps("step", tx)
    mesh = make_mesh("x")
    step = jax.shard_map(
        lambda p, g: two_steps("step", tx, p, g)[0],
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=specs,
    )
    after = jax.jit(step)(place(mesh, PARAMS, specs), place(mesh, GRADS, specs))
    assert_same_bits(jax.device_get(after), jax.device_get(expected))


def test_exported_program_keeps_the_scales():
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=SCALES)
    step = jax.jit(lambda params: two_steps("step", tx, params))
    check = jax.export.DisabledSafetyCheck.custom_call("jax_fused_adamw_update_v2")
    exported = jax.export.export(step, disabled_checks=[check])(PARAMS)
    restored = jax.export.deserialize(exported.serialize())
    assert_same_bits(restored.call(PARAMS), step(PARAMS))


# --- The native handler ---------------------------------------------------------------


def test_handler_scales():
    update, *_ = call(write_params=False)
    half, *_ = call(write_params=False, lr_scales=[0.5])
    assert_same_bits(2 * half, update)


@pytest.mark.parametrize(
    "scales, text",
    [
        ([1.0, 1.0], "one entry for each leaf"),
        ([-1.0], "not negative"),
        ([np.nan], "finite"),
        ([np.inf], "finite"),
        ([1], "missing or of another type"),
    ],
    ids=str,
)
def test_handler_refuses(scales, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(call(lr_scales=scales))
