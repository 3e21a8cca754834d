"""The step of a small tree that clips or skips is one call, with the bits of two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, copies, count_ops

import jax_fused_adamw as jfa
from jax_fused_adamw import _transform

SIZES = (1, 5, 4095, 4096, 4097, 9000)
OPTIONS = {
    "clip": {"max_grad_norm": 0.5},
    "skip": {"skip_nonfinite": True},
    "clip, no skip": {"max_grad_norm": 0.5, "skip_nonfinite": False},
    "value, skip": {"max_grad_value": 0.01, "skip_nonfinite": True},
}


def make_tree(sizes=SIZES, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=n), dtype) for n in sizes]


def step(tx, params, state, grads, **extra_args):
    return jfa.step(tx, grads, state, params, **extra_args)


def jitted_step(tx):
    return jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))


def num_calls(tx, params):
    compiled = jitted_step(tx).lower(params, tx.init(params), params).compile()
    assert copies(compiled) == 0
    return count_ops(compiled, "custom-call")


@pytest.fixture
def two_calls(monkeypatch):
    """Makes what is traced inside of it analyse first, and then update."""

    def run(function, *operands, **extra_args):
        with monkeypatch.context() as patch:
            patch.setattr(_transform, "suits_one_call", lambda *_: False)
            return jax.jit(lambda *x: function(*x, **extra_args))(*operands)

    return run


@pytest.mark.parametrize("amsgrad", [False, True, "optax"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_of_two_calls(options, amsgrad, two_calls):
    tx = jfa.fused_adamw(0.1, amsgrad=amsgrad, weight_decay=0.1, **options)
    params, grads = make_tree(), make_tree()
    one = functools.partial(step, tx)
    got = expected = (params, tx.init(params))
    for factor in (1.0, np.inf, 1e-3, np.nan):
        scaled = [grads[0] * factor, *grads[1:]]
        got = jax.jit(one)(*got, scaled)
        expected = two_calls(one, *expected, scaled)
    assert_same_bits(got, expected)
    assert int(got[1].skipped) == 2 * tx_skips(options)


def tx_skips(options):
    return options.get("skip_nonfinite", True)


@pytest.mark.parametrize("grad_dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_bits_of_two_calls_with_low_precision(param_dtype, grad_dtype, two_calls):
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params, grads = make_tree(dtype=param_dtype), make_tree(dtype=grad_dtype)
    one = functools.partial(step, tx)
    operands = (params, tx.init(params), grads)
    extra = {"gradient_scale": jnp.float32(3.0), "skip_update": np.bool_(False)}
    got = jax.jit(functools.partial(one, **extra))(*operands)
    assert_same_bits(got, two_calls(one, *operands, **extra))


def test_one_call_up_to_a_size_and_a_number_of_leaves():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    limit = 2**20
    assert num_calls(tx, make_tree()) == 1
    assert num_calls(tx, [jnp.ones(limit - 1), jnp.ones(1)]) == 1
    assert num_calls(tx, [jnp.ones(limit), jnp.ones(1)]) == 2
    assert num_calls(tx, [jnp.ones(3)] * 64) == 1
    assert num_calls(tx, [jnp.ones(3)] * 65) > 1


def test_a_given_report_is_read_and_nothing_analysed():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = make_tree()
    report = jfa.GradReport(jnp.float32(5.0), jnp.float32(1.0), jnp.int32(0))
    lowered = jax.jit(functools.partial(step, tx)).lower(
        params, tx.init(params), params, report=report
    )
    assert "analyze = false" in lowered.as_text()
    assert "analyze = true" not in lowered.as_text()


def test_eager_step_and_disabled_jit():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = make_tree()
    operands = (params, tx.init(params), params)
    expected = jax.jit(functools.partial(step, tx))(*operands)
    assert_same_bits(step(tx, *operands), expected)
    with jax.disable_jit():
        assert_same_bits(step(tx, *operands), expected)


def test_members_of_a_vmap():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = [jnp.stack([x, 2 * x, x * jnp.nan]) for x in make_tree()]
    state = jax.vmap(tx.init)(params)
    one = functools.partial(step, tx)
    batched = jax.jit(jax.vmap(one))(params, state, params)
    for i in range(3):
        member = jax.tree.map(lambda x: x[i], (params, state, params))  # noqa: B023
        expected = one(*member)
        assert_same_bits(jax.tree.map(lambda x: x[i], batched), expected)  # noqa: B023
    np.testing.assert_array_equal(batched[1].skipped, [0, 0, 1])


def test_what_members_share_stays_one():
    """Counters and report do not depend on a learning rate of each member."""
    params = make_tree()
    state = jfa.fused_adamw(0.1, max_grad_norm=0.5).init(params)

    def one(rate, grads):
        return step(jfa.fused_adamw(rate, max_grad_norm=0.5), params, state, grads)[1]

    rates = jnp.array([0.1, 0.2])
    count, report = jax.vmap(
        lambda rate: (one(rate, params).count, one(rate, params).report), out_axes=None
    )(rates)
    assert_same_bits((count, report), (one(0.1, params).count, one(0.1, params).report))
    grads = [jnp.stack([x, x * jnp.nan]) for x in params]
    assert jax.vmap(one)(rates, grads).skipped.tolist() == [0, 1]
    assert jax.vmap(one, (0, None))(rates[:0], params).skipped.shape == (0,)
    # A clip alone does not count members apart.
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5, skip_nonfinite=False)
    after = jax.vmap(
        lambda grads: step(tx, params, state, grads)[1].count, out_axes=None
    )(grads)
    assert after == 1


def test_inside_scan_and_cond():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = make_tree()

    @jax.jit
    def many(params, state):
        def body(carry, on):
            take = functools.partial(step, tx, grads=make_tree())
            return jax.lax.cond(on, take, lambda p, s: (p, s), *carry), None

        return jax.lax.scan(body, (params, state), jnp.array([True, False, True]))[0]

    expected = (params, tx.init(params))
    for _ in range(2):
        expected = jax.jit(functools.partial(step, tx))(*expected, make_tree())
    assert_same_bits(many(params, tx.init(params)), expected)


def test_it_cannot_be_differentiated():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = make_tree()

    def loss(grads):
        return step(tx, params, tx.init(params), grads)[0][0].sum()

    with pytest.raises(TypeError, match="cannot be differentiated"):
        jax.grad(loss)(params)


@pytest.mark.devices(8)
@pytest.mark.parametrize("given", ["arrays", "in_shardings", "out_shardings"])
def test_on_a_mesh_it_is_two_calls_and_one_all_reduce(given):
    """However the program is told of the mesh: by types, or by the lowering alone."""
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = [jnp.linspace(-1.0, 1.0, n) for n in (64, 4096)]
    expected = jax.jit(functools.partial(step, tx))(params, tx.init(params), params)
    shardings = jfa.state_shardings(tx, jax.device_put(params, rows))
    options = {}
    if given == "arrays":
        params = jax.device_put(params, rows)
    else:
        options = {"out_shardings": ([rows] * 2, shardings)}
        if given == "in_shardings":
            options = {"in_shardings": (rows, shardings, rows)}
    jitted = jax.jit(functools.partial(step, tx), **options)
    operands = (params, tx.init(params), params)
    compiled = jitted.lower(*operands).compile()
    if given != "out_shardings":  # which says nothing of the gradients
        assert count_ops(compiled, "all-reduce") == 1
    assert count_ops(compiled, "all-gather") == 0
    norms = jitted(*operands)[1].report.norm, expected[1].report.norm
    np.testing.assert_array_max_ulp(*map(np.asarray, norms), maxulp=2)


@pytest.mark.parametrize("platforms", [["tpu"], ["rocm"], ["cpu", "tpu"]], ids=str)
def test_other_platforms_get_plain_jax(platforms):
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    params = make_tree()
    traced = jax.jit(functools.partial(step, tx)).trace(params, tx.init(params), params)
    text = traced.lower(lowering_platforms=tuple(platforms)).as_text()
    assert ("jax_fused_adamw_update" in text) == ("cpu" in platforms)


@pytest.mark.devices(1)
def test_a_mesh_of_one_device_is_one_call():
    tx = jfa.fused_adamw(0.1, max_grad_norm=0.5)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert num_calls(tx, jax.device_put(make_tree(), rows)) == 1
