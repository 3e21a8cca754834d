"""The build suite: the package from source, in a folder of its own, and its steps."""

import os
import pathlib
import re
import shlex
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from typing import Any

from jax_fused_adamw._machine import version
from jax_fused_adamw.verify._job import Job
from jax_fused_adamw.verify._results import BLOCKED, FAILED, PASSED, Finding, Stop

_CPU_STEP = """
import jax.numpy as jnp, numpy as np, jax_fused_adamw as jfa
params = {"w": jnp.linspace(1.0, 2.0, 1001)}
def step(implementation):
    tx = jfa.fused_adamw(0.1, implementation=implementation)
    return tx.step(params, tx.init(params), params)[0]["w"]
np.testing.assert_allclose(step("ffi"), step("xla"), rtol=1e-6)
"""
_CUDA_OPTION = {"nvcc": "ON", "nvrtc": "OFF"}


def build(job: Job, compiler: str) -> Finding:
    """Builds the source, imports what was built, and takes steps with it.

    Args:
      job: of the suite.
      compiler: ``"nvcc"`` compiles the CUDA kernels now; with ``"nvrtc"`` they are
        compiled at run time.
    """
    source = job.source()
    _require_tools(source, compiler, job.options.offline)
    target = job.folder / compiler
    argv = [sys.executable, "-m", "pip", "install", "-v", "--no-deps"]
    argv += ["--disable-pip-version-check", "--target", target]
    argv += ["-C", f"build-dir={job.folder / f'build-{compiler}'}"]
    argv += ["-C", f"cmake.define.JAX_FUSED_ADAMW_CUDA={_CUDA_OPTION[compiler]}"]
    if job.options.offline:
        argv += ["--no-build-isolation", "--no-index"]
    status = job.run([*argv, source], {})
    if status != 0:
        hint = "" if job.options.offline else ", or --offline where there is no network"
        reason = f"pip could not build it (exit status {status}); see the log{hint}"
        raise Stop(FAILED, reason)
    return _prove(job, compiler, target)


def _prove(job: Job, compiler: str, target: pathlib.Path) -> Finding:
    # -S leaves out .pth files, so that an editable install of the package cannot come
    # before the one that was built.
    python = (sys.executable, "-S")
    paths = [str(target), *(path for path in sys.path if os.path.isdir(path))]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_FUSED_ADAMW_CUDA_COMPILER": compiler,
        "JAX_FUSED_ADAMW_CACHE_DIR": str(job.folder / "cache"),
    }
    on_cpu = environment | {"JAX_PLATFORMS": "cpu"}
    facts = job.facts(on_cpu, python)
    _check_built(facts, target)
    status = job.run([*python, "-c", _CPU_STEP], on_cpu)
    if status != 0:
        raise Stop(FAILED, f"a step on the CPU ended with {status}; see the log")
    if not str(facts["compiler"]).startswith(compiler):
        reason = f"built, and right on the CPU, but {facts['compiler']}"
        # Without the library nvrtc cannot be proven; nvcc was asked for and has run.
        raise Stop(BLOCKED if compiler == "nvrtc" else FAILED, reason)
    on_gpu = environment | {"JAX_PLATFORMS": "cuda,cpu"}
    device = job.facts(on_gpu, python)
    if device["backend"] != "gpu":
        reason = "built, and right on the CPU; no CUDA device to take a step on"
        return Finding(PASSED, reason, facts=facts)
    smoke = job.source() / "tests" / "gpu_smoke.py"
    status = job.run([*python, smoke, compiler], on_gpu)
    if status != 0:
        raise Stop(FAILED, f"a step on {device['device']} ended with {status}")
    reason = f"built, right on the CPU, and the same bits on {device['device']}"
    return Finding(PASSED, reason, facts=device)


def _check_built(facts: Mapping[str, Any], target: pathlib.Path) -> None:
    if pathlib.Path(facts["package"]) != target / "jax_fused_adamw":
        reason = f"expected the package in {target}, imported {facts['package']}"
        raise Stop(FAILED, reason)
    if not facts["cpu"]["loaded"]:
        reason = f"the built CPU module does not load: {facts['cpu']['reason']}"
        raise Stop(FAILED, reason)


def _require_tools(source: pathlib.Path, compiler: str, offline: bool) -> None:
    missing = []
    if version("pip") is None:
        missing.append("pip (python -m ensurepip)")
    if not _find("CXX", "c++", "g++", "clang++"):
        missing.append("a C++ compiler (g++ or clang)")
    if compiler == "nvcc" and not _find("CUDACXX", "nvcc"):
        missing.append("nvcc (put it on the PATH, or set CUDACXX)")
    if offline:
        names = [name for name in _build_requirements(source) if version(name) is None]
        if not _find("", "cmake"):
            names.append("cmake")
        if not _find("", "ninja", "make"):
            names.append("ninja")
        if names:
            missing.append(f"{', '.join(names)} (pip install {' '.join(names)})")
    if missing:
        raise Stop(BLOCKED, f"not found: {'; '.join(missing)}")


def _build_requirements(source: pathlib.Path) -> list[str]:
    project = tomllib.loads((source / "pyproject.toml").read_text())
    lines = project["build-system"]["requires"]
    return [re.match(r"[\w.-]+", line)[0] for line in lines]


def _find(variable: str, *names: str) -> bool:
    """Whether the tool is where CMake looks: the variable's, else one by name."""
    if os.environ.get(variable):
        names = tuple(shlex.split(os.environ[variable])[:1])
    folders = [os.environ.get("PATH", ""), sysconfig.get_path("scripts")]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            folders.append(os.path.join(os.environ[name], "bin"))
    places = os.pathsep.join([*folders, "/usr/local/cuda/bin"])
    return any(shutil.which(name, path=places) for name in names)
