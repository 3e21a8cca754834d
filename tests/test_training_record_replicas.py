"""Arrays whose replicas differ: a checkpoint would hold a part of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fused_adamw as jfa

pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")

AXES = (jax.sharding.AxisType.Auto,)


def one_value_a_device(spec, shape):
    """An array of the mesh whose device number i holds i everywhere."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=2 * AXES)
    sharding = jax.NamedSharding(mesh, spec)
    local = sharding.shard_shape(shape)
    shards = [
        jax.device_put(np.full(local, i, np.float32), device)
        for i, device in enumerate(mesh.devices.flat)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("spec", "shape"),
    [(jax.P(), (8,)), (jax.P(), ()), (jax.P("x"), (8, 3)), (jax.P(None, "y"), (3, 8))],
    ids=str,
)
def test_replicas_that_differ_are_refused_by_path(spec, shape, tmp_path):
    tree = {"good": jnp.ones(3), "bad": one_value_a_device(spec, shape)}
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match=r"leaf \['bad'\] should be the same on"):
            record.save(1, tree)
        assert record.latest_step() is None
        # Every element is there once, whatever it is.
        whole = one_value_a_device(jax.P(("x", "y")), (8, 3))
        assert record.save(1, tree | {"bad": whole})
        assert record.restore(tree | {"bad": whole}).step == 1


@pytest.mark.devices(8)
def test_parameters_that_a_step_has_parted(tmp_path):
    """Each device clips by a norm of its own, and shard_map is told not to look."""
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0)
    mesh = jax.make_mesh((8,), ("d",), axis_types=AXES)
    params = {"w": jnp.ones((16, 3)), "b": jnp.ones(16)}
    specs = {"w": jax.P("d"), "b": jax.P()}
    state = tx.init(params)
    of_state = jax.tree.map(lambda x: jax.P(), state)._replace(mu=specs, nu=specs)

    @jax.jit
    def step(params, state, grads):
        return jax.shard_map(
            lambda params, state, grads: jfa.step(tx, grads, state, params),
            mesh=mesh,
            in_specs=(specs, of_state, specs),
            out_specs=(specs, of_state),
            check_vma=False,
        )(params, state, grads)

    for seed in (0, 1):  # the first update is the sign of a gradient, clipped or not
        w = jax.random.normal(jax.random.key(seed), (16, 3)) * (1 + 8 * seed)
        params, state = step(params, state, {"w": w, "b": jnp.ones(16)})
    with jfa.TrainingRecord(tmp_path, tx) as record:
        with pytest.raises(ValueError, match=r"\['params'\]\['b'\].*psum the grad"):
            record.save(1, {"params": params, "state": state})
