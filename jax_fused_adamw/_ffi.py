"""Loads the native modules and registers their handlers with XLA.

Nothing here may break ``import jax_fused_adamw`` or the user's JAX: a module that
is missing, or that was built for other FFI headers than the running jaxlib
accepts, is left unregistered with the reason kept for :func:`kernel_info`. (XLA
takes the whole CPU backend down for a handler newer than itself, and on CUDA
drops it in silence, so the versions are compared before anything is registered.)
"""

import dataclasses
import importlib
import pathlib
import re
import types
from typing import Any

import jax
import jaxlib

from jax_fused_adamw._export import is_for_export

UPDATE_TARGET = "jax_fused_adamw_update_v2"
ANALYZE_TARGET = "jax_fused_adamw_analyze_gradient_v1"
MERGE_TARGET = "jax_fused_adamw_merge_gradient_stats_v1"

# XLA's oldest handler version that current frameworks accept.
_OLDEST_FFI_API = (0, 1)


@dataclasses.dataclass(frozen=True)
class NativeModule:
    """One native module as this process found it.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      loaded: whether its handlers are registered and serve the platform.
      reason: why not, in words; None if loaded.
      ffi_api_version: the FFI version that it was compiled against, if known.
      details: what the module says of itself: instruction sets, compiler, driver.

    Examples:
      >>> import jax_fused_adamw as jfa
      >>> module = jfa.kernel_info().cpu
      >>> module.loaded, module.reason
      (True, None)
    """

    platform: str
    loaded: bool
    reason: str | None = None
    ffi_api_version: tuple[int, int] | None = None
    details: dict[str, object] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        built_for = ""
        if self.ffi_api_version is not None:
            built_for = ", FFI {}.{}".format(*self.ffi_api_version)
        details = "".join(f", {k}: {v}" for k, v in self.details.items())
        if self.loaded:
            return f"{self.platform}: loaded{built_for}{details}"
        return f"{self.platform}: not available{built_for}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """Which native kernels this process can use; see :func:`kernel_info`.

    Attributes:
      cpu: the :class:`NativeModule` of processors.
      cuda: that of NVIDIA GPUs.
      jaxlib_version: of the running jaxlib, such as ``"0.10.2"``.
      jaxlib_ffi_api_version: the FFI version that it accepts handlers up to, if known.

    Examples:
      >>> import jax_fused_adamw as jfa
      >>> info = jfa.kernel_info()
      >>> info.cpu.ffi_api_version <= info.jaxlib_ffi_api_version
      True
      >>> print(info)  # doctest: +ELLIPSIS
      jax_fused_adamw on jaxlib ...
    """

    cpu: NativeModule
    cuda: NativeModule
    jaxlib_version: str
    jaxlib_ffi_api_version: tuple[int, int] | None

    def __str__(self) -> str:
        version = self.jaxlib_ffi_api_version
        ffi = "unknown FFI" if version is None else "FFI {}.{}".format(*version)
        return (
            f"jax_fused_adamw on jaxlib {self.jaxlib_version} ({ffi})\n"
            f"  {self.cpu}\n  {self.cuda}\n"
            "  other platforms: plain JAX (the same as implementation='xla')"
        )


def _running_ffi_api_version() -> tuple[int, int] | None:
    """The FFI version of the running jaxlib, read from the headers it ships."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    parts = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    if len(parts) != 2:
        return None
    return int(parts["MAJOR"]), int(parts["MINOR"])


def _refusal(built: tuple[int, int], running: tuple[int, int] | None) -> str | None:
    """Why a handler built for ``built`` must not be registered, or None."""
    if running is None:
        return (
            "the FFI version of this jaxlib could not be read from its headers in "
            f"{jax.ffi.include_dir()}; reinstall jaxlib"
        )
    if _OLDEST_FFI_API <= built <= running:
        return None
    return (
        "it was built against XLA FFI {}.{}, and this jaxlib accepts {}.{} to {}.{}; "
        "upgrade jax and jaxlib, or rebuild jax_fused_adamw against the installed "
        "one (pip install --no-build-isolation --force-reinstall --no-deps .)"
    ).format(*built, *_OLDEST_FFI_API, *running)


def _load_native_module(platform: str, running: tuple[int, int] | None) -> NativeModule:
    """Imports ``_cpu`` or ``_cuda``, compares versions, registers the handlers."""
    built = None
    try:
        module = importlib.import_module(f"jax_fused_adamw._{platform}")
        built = tuple(module.ffi_api_version)
        reason = _refusal(built, running) or _unavailable_reason(platform, module)
        if reason is None:
            for name, handler in module.registrations().items():
                jax.ffi.register_ffi_target(
                    name, handler, platform={"cpu": "cpu", "cuda": "CUDA"}[platform]
                )
            return NativeModule(platform, True, None, built, module.details())
    except Exception as error:  # import of this package must go on
        reason = _failure(platform, error)
    return NativeModule(platform, False, reason, built)


def _unavailable_reason(platform: str, module: types.ModuleType) -> str | None:
    if platform == "cuda":
        module.set_nvrtc_libraries(_nvrtc_libraries())
    return module.unavailable_reason() or None


def _nvrtc_libraries() -> list[str]:
    """NVRTC as ``jax[cuda12]`` and ``jax[cuda13]`` install it, its builtins first."""
    try:
        folders = list(importlib.import_module("nvidia").__path__)
    except (ImportError, AttributeError):
        return []
    libraries = [
        library
        for folder in folders
        for library in pathlib.Path(folder).glob("*/lib/libnvrtc*.so.*")
        if ".alt." not in library.name
    ]

    def order(library: pathlib.Path) -> tuple[bool, bool]:
        older_cuda = library.parts[-3] == "cuda_nvrtc"
        opened_by_name = library.name.startswith("libnvrtc-builtins")
        return older_cuda, not opened_by_name

    return [str(library) for library in sorted(libraries, key=order)]


def _failure(platform: str, error: Exception) -> str:
    name = f"_{platform}"
    if not isinstance(error, ModuleNotFoundError):
        return f"loading {name} failed: {error!r}"
    if platform == "cuda":
        return "this installation holds no CUDA module (only Linux has one)"
    return (
        f"there is no compiled module {name} beside {pathlib.Path(__file__).parent}; "
        "install the package with pip (python -m pip install .) rather than importing "
        "the source folder"
    )


_RUNNING_FFI_API = _running_ffi_api_version()
_INFO = KernelInfo(
    cpu=_load_native_module("cpu", _RUNNING_FFI_API),
    cuda=_load_native_module("cuda", _RUNNING_FFI_API),
    jaxlib_version=jaxlib.__version__,
    jaxlib_ffi_api_version=_RUNNING_FFI_API,
)


def kernel_info() -> KernelInfo:
    """Says which native kernels are loaded, and why one is not.

    Printing the result gives a short report; its fields are for programs. The
    answer is about this process and does not start a JAX backend.

    Returns:
      A :class:`KernelInfo` with one :class:`NativeModule` for each of ``cpu`` and
      ``cuda``.

    Examples:
      >>> import jax_fused_adamw as jfa
      >>> jfa.kernel_info().cpu.platform
      'cpu'
    """
    return _INFO


def require_module(platform: str, ctx: Any) -> None:
    """Raises where the native module of ``platform`` cannot serve.

    An exported program may be for another machine, where its custom calls are looked
    up by name.

    Args:
      platform: ``"cpu"`` or ``"cuda"``.
      ctx: of the lowering rule.

    Raises:
      RuntimeError: with the reason, the whole report, and the way out.
    """
    module = getattr(kernel_info(), platform)
    if not module.loaded and not is_for_export(ctx):
        raise RuntimeError(
            f"fused_adamw has no native kernel for {platform}: {module.reason}. "
            'Pass implementation="xla" to use plain JAX on this platform.\n'
            f"{kernel_info()}"
        )
