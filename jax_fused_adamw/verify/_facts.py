"""What a process with the package says of itself: the proof of what a suite tested.

    python -m jax_fused_adamw.verify._facts FILE

writes it as JSON, and prints it. It starts JAX's default backend.
"""

import hashlib
import importlib
import json
import pathlib
import sys
from typing import Any

import jax

import jax_fused_adamw as jfa


def gather() -> dict[str, Any]:
    """The facts of this process.

    Returns:
      A dictionary that JSON can hold:

      - package: the folder from which jax_fused_adamw was imported;
      - backend, device: JAX's default ones; None where it has none, and then
      - backend_error: why;
      - cpu, cuda: of ``kernel_info()``: loaded and reason;
      - compiler: which CUDA kernels this process takes, or why none, also where no
        driver allows them to run; None without a CUDA module;
      - modules: file and sha256 of the native modules;
      - kernels: all of ``kernel_info()`` in words.
    """
    backend = device = backend_error = None
    try:
        backend, device = jax.default_backend(), jax.devices()[0].device_kind
    except RuntimeError as error:
        backend_error = str(error).splitlines()[0]
    info = jfa.kernel_info()
    return {
        "package": str(pathlib.Path(jfa.__file__).parent),
        "backend": backend,
        "device": device,
        "backend_error": backend_error,
        "cpu": {"loaded": info.cpu.loaded, "reason": info.cpu.reason},
        "cuda": {"loaded": info.cuda.loaded, "reason": info.cuda.reason},
        "compiler": _compiler(info),
        "modules": {name: _file(name) for name in ("_cpu", "_cuda")},
        "kernels": str(info),
    }


def _compiler(info: jfa.KernelInfo) -> str | None:
    if info.cuda.loaded:
        return str(info.cuda.details["compiler"])
    try:
        return importlib.import_module("jax_fused_adamw._cuda").details()["compiler"]
    except ImportError:
        return None


def _file(name: str) -> dict[str, str] | None:
    module = sys.modules.get(f"jax_fused_adamw.{name}")
    if module is None:
        return None
    content = pathlib.Path(module.__file__).read_bytes()
    return {"file": module.__file__, "sha256": hashlib.sha256(content).hexdigest()}


if __name__ == "__main__":
    text = json.dumps(gather(), indent=2)
    pathlib.Path(sys.argv[1]).write_text(text)
    print(text)
