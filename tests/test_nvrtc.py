"""NVRTC compiles every CUDA kernel for every supported architecture: no GPU needed."""

import ctypes
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def _library_folder():
    """The folder of NVRTC's libraries in the wheels of jax[cuda13] or jax[cuda12]."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        for folder in ("cu13/lib", "cuda_nvrtc/lib"):
            if list(pathlib.Path(place, folder).glob("libnvrtc.so.*")):
                return pathlib.Path(place, folder)
    return None


@pytest.fixture(scope="module")
def nvrtc():
    folder = _library_folder()
    if folder is None:
        pytest.skip("NVRTC is not installed; it comes with the test extra on Linux")
    for builtins in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(next(folder.glob("libnvrtc.so.*")))


def _embedded_headers():
    """The headers that the build gives NVRTC along with the kernel."""
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    return re.search(r"set\(JFA_CUDA_HEADERS\s+(.*?)\)", text, re.S)[1].split()


def _compile(nvrtc, source, *options):
    names = _embedded_headers()
    texts = [(ROOT / "cc" / name).read_bytes() for name in names]
    strings = ctypes.c_char_p * len(names)
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        (ROOT / "cc" / source).read_bytes(),
        source.encode(),
        len(names),
        strings(*texts),
        strings(*(name.encode() for name in names)),
    )
    assert created == 0
    options = ["-std=c++17", "--fmad=false", *options]
    arguments = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    assert not log.value, log.value.decode()  # no warnings either


@pytest.mark.parametrize("rule", range(6))
@pytest.mark.parametrize("leaf_class, analyzing", [(0, 0), (0, 1), (1, 0), (2, 0)])
def test_every_kernel(nvrtc, rule, leaf_class, analyzing):
    _compile(
        nvrtc,
        "cuda/update_kernel.cu",
        "-arch=sm_80",
        f"-DJFA_ONLY_RULE={rule}",
        f"-DJFA_ONLY_CLASS={leaf_class}",
        f"-DJFA_ONLY_ANALYZING={analyzing}",
    )


ARCHITECTURES = pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])


@ARCHITECTURES
@pytest.mark.parametrize("analyzing", [0, 1])
def test_every_architecture(nvrtc, architecture, analyzing):
    options = ["-DJFA_ONLY_RULE=0", "-DJFA_ONLY_CLASS=0"]
    options.append(f"-DJFA_ONLY_ANALYZING={analyzing}")
    target = f"-arch=sm_{architecture}"
    _compile(nvrtc, "cuda/update_kernel.cu", target, *options)


@ARCHITECTURES
@pytest.mark.parametrize("source", ["cuda/stats_kernel.cu", "ladder/ladder_kernel.cu"])
def test_other_sources_on_every_architecture(nvrtc, source, architecture):
    _compile(nvrtc, source, f"-arch=sm_{architecture}")
