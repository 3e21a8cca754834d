"""What is public, and the README's Python, which runs."""

import inspect
import pathlib
import re

import jax

import jax_fused_adamw as jfa

README = pathlib.Path(__file__).parent.parent / "README.md"
PUBLIC = {name: getattr(jfa, name) for name in dir(jfa) if not name.startswith("_")}
PUBLIC = {name: x for name, x in PUBLIC.items() if not inspect.ismodule(x)}


def test_public_names_are_the_documented_ones():
    assert set(PUBLIC) == {
        "ClipByGlobalNormState",
        "AccumulateState",
        "DecayReport",
        "DynamicLossScale",
        "FusedAdamW",
        "FusedAdamWState",
        "GradReport",
        "InPlaceUpdate",
        "KernelInfo",
        "MemoryEstimate",
        "NativeModule",
        "Restored",
        "StatsPlan",
        "StepControl",
        "TrainingRecord",
        "accumulate",
        "adamw_step",
        "clip_by_global_norm",
        "compute_params",
        "decay_report",
        "from_optax",
        "from_torch",
        "fused_adamw",
        "grad_stats",
        "kernel_info",
        "master_mismatch",
        "memory_estimate",
        "resync",
        "state_shardings",
        "step",
        "to_optax",
        "to_torch",
        "value_and_grad",
    }


def test_readme_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 3
    namespace = {}
    with jax.numpy_rank_promotion("allow"):  # a reader's code is not ours
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)
    assert namespace["state"].count == 1
