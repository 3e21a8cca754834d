"""Inside shard_map: over all mesh axes, over some, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, count_ops
from jax.sharding import PartitionSpec as P
from meshes import KINDS, is_placed, make_mesh, place

import jax_fused_adamw as jfa

VALUES = {
    "w": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=8).astype(np.float32),
}


def steps(tx, params, grads):
    state = tx.init(params)
    for _ in range(2):
        params, state = jfa.step(tx, grads, state, params)
    return params, state


def mesh_of(axes: str, kind: str) -> jax.sharding.Mesh:
    """``"x1"`` is an axis x, and one of a single device beside it."""
    if not axes.endswith("1"):
        return make_mesh(*axes, kind=kind)
    kinds = (getattr(jax.sharding.AxisType, kind),) * 2
    return jax.make_mesh((jax.device_count(), 1), (axes[0], "one"), axis_types=kinds)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["", "clip"])
@pytest.mark.parametrize(
    "axes, manual", [("x", "x"), ("xy", "xy"), ("xy", "x"), ("xy", "y"), ("x1", "x")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_step(kind, axes, manual, options):
    """State made inside; leaves are cut over axes that are manual, and over others."""
    is_hidden = axes != "x1" and set(manual) < set(axes)
    if is_hidden and kind == "Explicit" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX 0.10 gathers what is sharded over the other, explicit axes")
    tx = jfa.fused_adamw(0.1, weight_decay=0.1, **options)
    expected, end = steps(tx, VALUES, VALUES)
    mesh = mesh_of(axes, kind)
    specs = {"w": P(*axes.replace("1", "")), "b": P(None)}
    inner = {"w": P(*(a if a in manual else None for a in specs["w"])), "b": P()}

    def local(params, grads):
        params, state = steps(tx, params, grads)
        return params, state.report, state.count

    inside = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(inner, inner),
            out_specs=(inner, P(), P()),
            axis_names=set(manual),
        )
    )
    arguments = place(mesh, VALUES, specs), place(mesh, VALUES, specs)
    got, report, count = inside(*arguments)
    assert count_ops(inside.lower(*arguments).compile(), "all-gather") == 0
    assert count == 2 and all(is_placed(got[k], mesh, specs[k]) for k in got)
    if not options:
        assert_same_bits(jax.device_get(got), jax.device_get(expected))
    else:  # the norm is 2 ulp off at most
        np.testing.assert_array_max_ulp(report.norm, end.report.norm, 2)
        jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, 1e-5), got, expected)


@pytest.mark.filterwarnings("ignore:.with mesh.:DeprecationWarning")
@pytest.mark.parametrize("way", ["set_mesh", "with"])
def test_over_some_axes_with_a_mesh_in_use(way):
    mesh, tx = make_mesh("x", "y"), jfa.fused_adamw(0.1)
    context = jax.set_mesh(mesh) if way == "set_mesh" else mesh
    params = place(mesh, VALUES, {"w": P("x", "y"), "b": P()})
    expected, _ = steps(tx, VALUES, VALUES)
    specs = {"w": P(None, "y"), "b": P()}
    with context:
        inside = jax.shard_map(
            lambda p, g: steps(tx, p, g)[0],
            mesh=mesh,
            in_specs=(specs, specs),
            out_specs=specs,
            axis_names={"y"},
        )
        got = jax.jit(inside)(params, params)
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
@pytest.mark.parametrize("manual", ["xy", "x"])
def test_operands_must_vary_alike(varying, text, manual):
    """Otherwise a parameter declared the same on all devices would stop being so."""
    tx = jfa.fused_adamw(0.1)

    def local(w, other):
        other = other[0]
        grad = other if varying == "grad" else w
        state = tx.init({"w": w})
        if varying == "mu":
            state = state._replace(mu={"w": other})
        extra = dict(skip_update=other[0] > 0) if varying == "skip" else {}
        extra |= dict(gradient_scale=other[0]) if varying == "scale" else {}
        return jfa.step(tx, {"w": grad}, state, {"w": w}, **extra)[0]["w"]

    sharded = jax.shard_map(
        local,
        mesh=make_mesh("x", "y"),
        in_specs=(P(), P("x")),
        out_specs=P(),
        axis_names=set(manual),
    )
    with pytest.raises(TypeError, match=text):
        jax.jit(sharded)(jnp.ones(8), jnp.ones((8, 8)))


COUNTERS = ("count", "skipped", "consecutive")


def _skip_on_one_device(manual, decide, own=()):
    """A step of sharded leaves, and each device's count.

    Args:
      manual: axes of the shard_map.
      decide: makes keywords of the step of each device's number.
      own: the counters that each device has for itself.
    """
    mesh, tx = make_mesh("x", "y"), jfa.fused_adamw(0.1, skip_nonfinite=True)
    num_parts = mesh.shape["x"]

    def local(w, number):
        state = tx.init({"w": w})
        vary = {x: jax.lax.pcast(getattr(state, x), "x", to="varying") for x in own}
        state = state._replace(**vary)
        _, state = jfa.step(tx, {"w": w}, state, {"w": w}, **decide(number[0]))
        return state.count.reshape((1,) if own else ())

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x") if own else P(),
        axis_names=set(manual),
    )
    specs = {"w": P("x"), "number": P("x")}
    values = {"w": jnp.ones(8 * num_parts), "number": jnp.arange(num_parts)}
    return jax.jit(sharded)(*place(mesh, values, specs).values())


def _own_skip(number):
    return {"skip_update": number == 0}


def _own_report(number):
    nonfinite = jnp.where(number == 0, 1, 0).astype(jnp.int32)
    return {"report": jfa.GradReport(jnp.float32(1), jnp.float32(1), nonfinite)}


@pytest.mark.parametrize("manual", ["xy", "x"])
@pytest.mark.parametrize("decide", [_own_skip, _own_report])
def test_no_device_skips_alone(decide, manual):
    """Its count, declared the same on all of them, would silently stop being so."""
    with pytest.raises(
        TypeError, match=r"varies over .*'x'.*state.count over \(\).*pmax"
    ):
        _skip_on_one_device(manual, decide)


@pytest.mark.parametrize("shared", COUNTERS)
def test_every_counter_must_be_each_ones_own(shared):
    own = [name for name in COUNTERS if name != shared]
    with pytest.raises(TypeError, match=rf"state.{shared} over \(\).*pcast"):
        _skip_on_one_device("xy", _own_skip, own)


@pytest.mark.parametrize("manual", ["xy", "x"])
@pytest.mark.parametrize(
    "decision",
    [
        {"skip_update": lambda x: x == 0},
        {"weight": lambda x: x},
        {"gradient_scale": lambda x: x + 1},
        {"report": lambda x: _own_report(x)["report"]},
    ],
    ids=list,
)
def test_a_window_is_one_for_all_devices(decision, manual):
    """Of its lax.cond, devices that do not take it would leave the others waiting."""
    tx, mesh = jfa.accumulate(jfa.fused_adamw(0.1), 1), make_mesh("x", "y")
    ((name, of_number),) = decision.items()

    def local(w, number):
        extra = {name: of_number(number[0])}
        return jfa.step(tx, {"w": w}, tx.init({"w": w}), {"w": w}, **extra)[0]["w"]

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
        axis_names=set(manual),
    )
    num_parts = mesh.shape["x"]
    with pytest.raises(TypeError, match=f"^accumulate: {name} varies over .*mini_step"):
        jax.jit(sharded)(jnp.ones(8 * num_parts), jnp.arange(num_parts))


@pytest.mark.parametrize("manual", ["xy", "x"])
def test_all_devices_skip_where_one_would(manual):
    count = _skip_on_one_device(
        manual, lambda number: {"skip_update": jax.lax.pmax(number == 0, ("x",))}
    )
    assert [int(shard.data) for shard in count.addressable_shards] == [
        0
    ] * jax.device_count()


@pytest.mark.parametrize("manual", ["xy", "x"])
def test_each_device_counts_its_own_training(manual):
    counts = _skip_on_one_device(manual, _own_skip, COUNTERS)
    assert counts.tolist() == [0] + [1] * (len(counts) - 1)


@pytest.mark.parametrize("manual", ["xy", "x"])
def test_summed_gradients(manual):
    tx, mesh = jfa.fused_adamw(0.1), make_mesh("x", "y")
    num_parts = mesh.shape["x"]

    def local(w, grad):
        grad = jax.lax.psum(grad[0], "x")
        return jfa.step(tx, {"w": grad}, tx.init({"w": w}), {"w": w})[0]["w"]

    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
        axis_names=set(manual),
    )
    got = jax.jit(sharded)(jnp.ones(4), jnp.ones((num_parts, 4)))
    params = {"w": jnp.ones(4)}
    grads = {"w": jnp.full(4, float(num_parts))}
    expected, _ = tx.step(grads, tx.init(params), params)
    assert_same_bits(jax.device_get(got), jax.device_get(expected["w"]))


@pytest.mark.devices(2)
def test_without_vma_each_device_decides_alone():
    mesh, tx = make_mesh("x"), jfa.fused_adamw(0.1, max_grad_norm=1.0)
    grads = np.ones(jax.device_count() * 2, np.float32)
    grads[0] = np.nan

    def local(params, grads):
        params, state = tx.step(grads, tx.init(params), params)
        return params, state.skipped[None]

    inside = jax.shard_map(
        local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    _, skipped = jax.jit(inside)(np.ones_like(grads), grads)
    assert skipped.tolist() == [1] + [0] * (jax.device_count() - 1)


@pytest.mark.devices(4)
def test_members_with_scalars_of_their_own_need_to_see_their_shardings():
    """What the rest of the mesh does with a leaf is hidden from the rule."""
    mesh = make_mesh("x", "y")

    def member(w, rate):
        tx = jfa.fused_adamw(rate)
        return tx.step(w, tx.init(w), w)[0]

    def run(manual, spec):
        inside = jax.shard_map(
            jax.vmap(member),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=spec,
            axis_names=set(manual),
        )
        values = place(mesh, {"w": VALUES["w"], "rate": VALUES["w"][:, 0]}, P("x"))
        return jax.jit(inside)(values["w"], values["rate"])

    expected = jax.vmap(member)(VALUES["w"], VALUES["w"][:, 0])
    for manual in ("xy", "x"):
        assert_same_bits(*jax.device_get((run(manual, P("x")), expected)))
    with pytest.raises(Exception, match="make the shard_map manual over all axes"):
        run("y", P())
