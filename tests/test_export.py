"""jax.export: what goes into a file and runs from it, and what is refused."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import assert_same_bits
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, place

import jax_fused_adamw as jfa

pytest.importorskip("flatbuffers", reason="it comes with the test extra")
from jax import export  # noqa: E402

CHECKS = [  # as in the README
    export.DisabledSafetyCheck.custom_call(f"jax_fused_adamw_{name}")
    for name in ("update_v2", "analyze_gradient_v1", "merge_gradient_stats_v1")
]
VALUES = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)}
OPTIONS = [{}, {"max_grad_norm": 1.0}]


def flat_step(tx):
    """The step on flat lists, since export knows no types of ours."""
    treedef = jax.tree.structure(tx.init(VALUES))

    def step(params, leaves, grads):
        params, state = tx.step(grads, treedef.unflatten(leaves), params)
        return params, jax.tree.leaves(state)

    return step


def saved(function, *arguments, **options) -> bytes:
    exported = export.export(jax.jit(function), disabled_checks=CHECKS, **options)
    return exported(*arguments).serialize()


@pytest.mark.parametrize("options", OPTIONS, ids=["", "clip"])
def test_one_device(options):
    tx = jfa.fused_adamw(0.1, **options)
    arguments = VALUES, jax.tree.leaves(tx.init(VALUES)), VALUES
    expected = flat_step(tx)(*arguments)
    platforms = {"cpu", "cuda", jax.default_backend().replace("gpu", "cuda")}
    program = saved(flat_step(tx), *arguments, platforms=sorted(platforms))
    got = jax.jit(export.deserialize(program).call)(*arguments)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


def test_in_another_process(tmp_path):
    """Which needs the package only for the kernels that the program names."""
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0)
    arguments = VALUES, jax.tree.leaves(tx.init(VALUES)), VALUES
    (tmp_path / "program").write_bytes(saved(flat_step(tx), *arguments))
    code = """
import sys, numpy as np, jax, jax_fused_adamw
from jax import export
program = export.deserialize(open(sys.argv[1] + "/program", "rb").read())
zeros = [np.zeros(x.shape, x.dtype) for x in program.in_avals[1:-1]]
w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
params, _ = jax.jit(program.call)({"w": w}, zeros, {"w": w})
np.save(sys.argv[1] + "/w.npy", params["w"])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    expected = flat_step(tx)(*arguments)[0]["w"]
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=["", "clip"])
def test_shard_map(options):
    tx, mesh = jfa.fused_adamw(0.1, **options), make_mesh("x", "y")
    params = place(mesh, VALUES, P("x", "y"))
    leaves = jax.tree.leaves(jax.jit(tx.init)(params))
    specs = [P("x", "y") if leaf.ndim else P() for leaf in leaves]
    inside = jax.shard_map(
        flat_step(tx),
        mesh=mesh,
        in_specs=(P("x", "y"), specs, P("x", "y")),
        out_specs=(P("x", "y"), specs),
    )
    program = saved(inside, params, leaves, params)
    got = jax.jit(export.deserialize(program).call)(params, leaves, params)
    expected = jax.jit(inside)(params, leaves, params)
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@pytest.mark.devices(2)
@pytest.mark.parametrize("what", ["step", "stats", "init"])
def test_a_program_that_xla_partitions_is_refused(mesh, what):
    tx = jfa.fused_adamw(0.1)
    params = place(mesh, VALUES, P("x"))
    function = {
        "step": lambda p: tx.step(p, tx.init(VALUES), p)[0],
        "stats": jfa.grad_stats,
        "init": lambda p: tx.init(p).mu,
    }[what]
    with pytest.raises(NotImplementedError, match="jax.export.*jax.shard_map"):
        saved(function, params)
    jax.jit(function).lower(params).compile()  # which are refused only there


def test_plain_jax_is_saved_for_several_devices(mesh):
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0, implementation="xla")
    params = place(mesh, VALUES, P("x"))
    arguments = params, jax.tree.leaves(jax.jit(tx.init)(params)), params
    saved(lambda p: jax.tree.leaves(tx.init(p)), params)
    program = saved(flat_step(tx), *arguments)
    got = jax.jit(export.deserialize(program).call)(*arguments)
    assert_same_bits(jax.device_get(got), jax.device_get(flat_step(tx)(*arguments)))


def test_state_is_saved_by_its_name():
    """No argument needs flattening, and the program returns our types."""
    tx = jfa.accumulate(jfa.fused_adamw(0.1, max_grad_norm=1.0), 2)
    step = lambda p, s, g: jfa.step(tx, g, s, p)  # noqa: E731
    arguments = VALUES, tx.init(VALUES), VALUES
    got = jax.jit(export.deserialize(saved(step, *arguments)).call)(*arguments)
    assert isinstance(got[1], jfa.AccumulateState)
    assert isinstance(got[1].inner_opt_state.report, jfa.GradReport)
    assert_same_bits(jax.device_get(got), jax.device_get(jax.jit(step)(*arguments)))
