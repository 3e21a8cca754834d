"""Several processes: training together, and children that are forked or spawned."""

import os
import subprocess
import sys

import fsdp_process
import jax
import numpy as np
import pytest
from helpers import assert_same_bits
from two_processes import run_in_two_processes

import jax_fused_adamw as jfa


def test_two_processes_of_four_devices_take_fsdp_steps(tmp_path):
    run_in_two_processes("fsdp_process.py", tmp_path)
    parts = [np.load(tmp_path / f"{i}.npz") for i in "01"]
    assert [part["devices"].tolist() for part in parts] == [[8, 4], [8, 4]]
    assert_same_bits(parts[0]["norms"], parts[1]["norms"])
    params = fsdp_process.whole(0)
    state = fsdp_process.TX.init(params)
    for i, norm in enumerate(parts[0]["norms"]):
        grads = fsdp_process.whole(1 + i)
        report = jfa.grad_stats(grads)
        np.testing.assert_array_max_ulp(norm, report.norm, 2)
        report = report._replace(norm=norm)
        params, state = jfa.step(fsdp_process.TX, grads, state, params, report=report)
    for name, leaf in params.items():
        rows = {
            int(key.split(":")[1]): part[key]
            for part in parts
            for key in part.files
            if key.startswith(f"{name}:")
        }
        assert len(rows) == 8
        got = np.concatenate([rows[start] for start in sorted(rows)])
        assert_same_bits(got, jax.device_get(leaf))


_CHILD = """
import multiprocessing, sys
import numpy as np

def take_a_step():
    import jax_fused_adamw as jfa
    assert jfa.kernel_info().cpu.loaded
    tx = jfa.fused_adamw(0.1, max_grad_norm=1.0)
    ones = {"w": np.ones(3, np.float32)}
    params, state = tx.step(ones, tx.init(ones), ones)
    assert np.asarray(params["w"]).max() < 0.91 and state.count == 1

if __name__ == "__main__":
    method, imported = sys.argv[1:]
    if imported == "before":
        import jax_fused_adamw
    child = multiprocessing.get_context(method).Process(target=take_a_step, daemon=True)
    child.start()
    child.join(100)
    sys.exit(0 if child.exitcode == 0 else 1)
"""


@pytest.mark.parametrize("imported", ["before", "inside"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_takes_a_step(tmp_path, method, imported):
    """A fork works as long as JAX has not started its threads in the parent."""
    script = tmp_path / "parent.py"
    script.write_text(_CHILD)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, script, method, imported]
    subprocess.run(command, env=environment, check=True, timeout=120)
