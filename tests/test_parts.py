"""A state taken apart, through npz and JSON, and put together again."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, random_like

import jax_fused_adamw as jfa

PARAMS = random_like(
    {"w": jnp.zeros((3, 2)), "h": [jnp.zeros(5, jnp.bfloat16), None, jnp.zeros(())]},
    seed=1,
)
OPTIONS = {
    "plain": {},
    "amsgrad": dict(amsgrad=True),
    "bfloat16": dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, seed=3),
    "kept": dict(master_weights=True, ema_decay=0.9, compute_dtype=jnp.float16),
    "clip": dict(max_grad_norm=0.5),
}
every_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def walk(tx, params, state, num_steps):
    for _ in range(num_steps):
        params, state = jax.jit(tx.step)(params, state, params)
    return params, state


def through_a_file(parts):
    """Arrays as npz, which knows no bfloat16: words, and dtypes as JSON."""
    leaves, treedef = jax.tree.flatten(parts)
    leaves = [np.asarray(x) for x in leaves]
    dtypes = json.loads(json.dumps([x.dtype.name for x in leaves]))
    file = io.BytesIO()
    np.savez(file, *(x.view(f"u{x.itemsize}") for x in leaves))
    file.seek(0)
    with np.load(file) as stored:
        arrays = [stored[f"arr_{i}"].view(jnp.dtype(d)) for i, d in enumerate(dtypes)]
    return treedef.unflatten(arrays)


@every_options
def test_parts_are_plain_and_restore_every_bit(options):
    tx = jfa.fused_adamw(0.1, **options)
    params, state = walk(tx, PARAMS, tx.init(PARAMS), 3)
    parts = state.into_parts()
    assert type(parts) is dict and None not in parts.values()
    assert type(parts.get("report", {})) is dict
    restored = jfa.FusedAdamWState.from_parts(through_a_file(parts), params, tx)
    assert_same_bits(restored, state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))
    assert_same_bits(walk(tx, params, restored, 3), walk(tx, params, state, 3))


def test_shapes_serve_as_params_and_arrays_of_jax_are_not_copied():
    tx = jfa.fused_adamw(0.1)
    state = tx.init(PARAMS)
    shapes = jax.eval_shape(lambda: PARAMS)
    restored = jfa.FusedAdamWState.from_parts(state.into_parts(), shapes, tx)
    assert restored.mu["w"] is state.mu["w"]


def test_arrays_that_are_there_twice_can_be_donated():
    """As those of a tool that keeps one buffer for equal leaves."""
    tx = jfa.fused_adamw(0.1, ema_decay=0.9)
    params = {"w": jnp.ones(2), "b": jnp.zeros(2)}
    zeros = dict.fromkeys(params, jnp.zeros(2))
    parts = tx.init(params).into_parts()
    zero = parts["count"]
    parts |= {"mu": zeros, "nu": zeros, "ema": params}
    parts |= {"skipped": zero, "consecutive": zero}
    state = jfa.FusedAdamWState.from_parts(parts, params, tx)
    assert_same_bits(state, tx.init(params))
    step = jax.jit(tx.step, donate_argnums=(1, 2))
    grads = dict.fromkeys(params, jnp.ones(2))
    expected = tx.step(grads, tx.init(params), params)
    assert_same_bits(step(grads, state, params), expected)


@pytest.mark.devices(2)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_other_arrays_of_one_buffer_are_copied(num_devices):
    """As a tool makes them that puts arrays together from their shards."""
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
    rows = jax.NamedSharding(mesh, jax.P("x"))
    tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(4)}
    params = jax.device_put(params, rows)

    def twin(x):
        data = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, data)

    mu = jax.device_put(jnp.full(4, 0.5), rows)
    parts = tx.init(params).into_parts()
    parts |= {"mu": {"w": mu}, "nu": {"w": twin(mu)}}
    for state in (
        jfa.FusedAdamWState.from_parts(parts, params, tx),
        jfa.FusedAdamWState.from_parts(parts, {"w": twin(mu)}, tx),
    ):
        pointers = {
            shard.data.unsafe_buffer_pointer()
            for x in (state.mu["w"], state.nu["w"])
            for shard in x.addressable_shards
        }
        assert len(pointers) == 2 * num_devices
        assert_same_bits((state.mu, state.nu), (parts["mu"], parts["nu"]))
    assert state.mu["w"] is not mu


def with_leaf(parts, name, change):
    parts[name]["w"] = change(np.asarray(parts[name]["w"]))


BAD = {
    "unknown": (lambda parts: parts.update(step=1), ValueError, "'step'"),
    "missing": (lambda parts: parts.pop("nu"), ValueError, "'nu'"),
    "maximum": (lambda parts: parts.pop("nu_max"), ValueError, "nu_max.*amsgrad"),
    "master": (
        lambda parts: parts.update(master=PARAMS),
        ValueError,
        "master.*master_weights",
    ),
    "report": (
        lambda parts: parts.update(report={"norm": 0.0}),
        ValueError,
        "report.*max_abs",
    ),
    "report dtype": (
        lambda parts: parts.update(
            report={n: np.zeros(()) for n in jfa.GradReport._fields}
        ),
        TypeError,
        "report.*norm.*float32",
    ),
    "dtype": (
        lambda parts: with_leaf(parts, "nu", lambda x: x.astype(np.float64)),
        TypeError,
        r"state.nu\['w'\].*float64.*float32",
    ),
    "shape": (
        lambda parts: with_leaf(parts, "mu", np.transpose),
        ValueError,
        r"state.mu\['w'\].*\(2, 3\).*\(3, 2\)",
    ),
    "tree": (
        lambda parts: parts["nu_max"].pop("w"),
        ValueError,
        r"state.nu_max\['w'\] is missing",
    ),
    "count": (lambda parts: parts.update(count=3), TypeError, "state.count.*int32"),
    "shape as count": (
        lambda parts: parts.update(count=jax.ShapeDtypeStruct((), jnp.int32)),
        TypeError,
        "state.count is a ShapeDtypeStruct, expected an array",
    ),
    "shapes": (
        lambda parts: parts.update(nu=jax.eval_shape(lambda: parts["nu"])),
        TypeError,
        r"state.nu\['h'\]\[0\] is a ShapeDtypeStruct",
    ),
    "negative count": (
        lambda parts: parts.update(count=np.int32(-5)),
        ValueError,
        "state.count is -5, expected a number of steps >= 0",
    ),
    "negative skips": (
        lambda parts: parts.update(consecutive=jnp.int32(-1)),
        ValueError,
        "state.consecutive is -1",
    ),
    "report is a number": (
        lambda parts: parts.update(report=3),
        TypeError,
        r"parts\['report'\] must be a dict, .* got int",
    ),
    "report is a tuple": (
        lambda parts: parts.update(report=REPORT),
        TypeError,
        r"parts\['report'\] must be a dict, .* got GradReport",
    ),
}
REPORT = jfa.GradReport(jnp.float32(0), jnp.float32(0), jnp.int32(0))


@pytest.mark.parametrize(("spoil", "error", "named"), BAD.values(), ids=BAD)
def test_bad_parts_are_refused_by_name(spoil, error, named):
    tx = jfa.fused_adamw(0.1, amsgrad=True)
    parts = jax.tree.map(lambda x: x, tx.init(PARAMS).into_parts())
    spoil(parts)
    with pytest.raises(error, match=f"from_parts: .*{named}"):
        jfa.FusedAdamWState.from_parts(parts, PARAMS, tx)


def test_other_arguments_are_refused():
    tx = jfa.fused_adamw(0.1)
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match="parts must be a dict"):
        jfa.FusedAdamWState.from_parts(state, PARAMS, tx)
    with pytest.raises(TypeError, match="the one inside"):
        wrapped = jfa.accumulate(tx, 2)
        jfa.FusedAdamWState.from_parts(state.into_parts(), PARAMS, wrapped)
