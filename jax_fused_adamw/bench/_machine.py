"""What a number depends on besides the code: machine, versions, load, command."""

import os
from typing import Any

import jax

import jax_fused_adamw as jfa
from jax_fused_adamw._machine import describe_process, query_gpus

_ENVIRONMENT = (
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "OMP_WAIT_POLICY",
    "NCCL_NVLS_ENABLE",
)
_GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
)


def describe_machine() -> dict[str, Any]:
    """Everything that does not change while the bench runs, for the JSON."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        **describe_process(),
        "kernels": str(jfa.kernel_info()),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def describe_load() -> dict[str, Any]:
    """What does change: taken before and after the measurement."""
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {"load_average": load, "gpus": query_gpus(_GPU_FIELDS)}
