"""NVRTC, the oldest and the newest, compiles every CUDA kernel: no GPU needed."""

import ctypes
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def _library_folders():
    """The folders of NVRTC in the wheels that jax[cuda13] and jax[cuda12] install."""
    spec = importlib.util.find_spec("nvidia")
    folders = {}
    for place in spec.submodule_search_locations if spec else ():
        for name, folder in {"13": "cu13/lib", "12": "cuda_nvrtc/lib"}.items():
            if list(pathlib.Path(place, folder).glob("libnvrtc.so.*")):
                folders.setdefault(name, pathlib.Path(place, folder))
    return folders


@pytest.fixture(scope="module", params=["12", "13"])
def nvrtc(request):
    folder = _library_folders().get(request.param)
    if folder is None:
        pytest.skip(
            "this NVRTC is not installed; it comes with the test extra on Linux"
        )
    for builtins in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(next(folder.glob("libnvrtc.so.*")))


def _supported_architectures(nvrtc):
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    architectures = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(architectures)
    return list(architectures)


def _options():
    """What cc/cuda/nvrtc.cc passes beside the architecture and the macros."""
    text = (ROOT / "cc" / "cuda" / "nvrtc.cc").read_text()
    options = re.search(r"options = \{(.*?)\};", text, re.S)[1]
    return re.findall(r'"(-[^"]*)",?', options.split(",", 1)[1])


def _embedded_headers():
    """The headers that the build gives NVRTC along with the kernel."""
    text = (ROOT / "cmake" / "cuda.cmake").read_text()
    return re.search(r"set\(JFA_CUDA_HEADERS\s+(.*?)\)", text, re.S)[1].split()


def _compile(nvrtc, source, architecture, *options):
    if architecture not in _supported_architectures(nvrtc):
        pytest.skip("this NVRTC does not know the architecture")
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
    options = [f"-arch=sm_{architecture}", *_options(), *options]
    arguments = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    assert not log.value, log.value.decode()  # no warnings either


# By the value of jfa::cuda::LeafClass, without an analysis, and the class that has one.
KERNELS = [*((leaf_class, 0) for leaf_class in range(7)), (0, 1)]


@pytest.mark.parametrize("rule", range(6))
@pytest.mark.parametrize("leaf_class, analyzing", KERNELS)
def test_every_kernel(nvrtc, rule, leaf_class, analyzing):
    _compile(
        nvrtc,
        "cuda/update_kernel.cu",
        80,
        f"-DJFA_ONLY_RULE={rule}",
        f"-DJFA_ONLY_CLASS={leaf_class}",
        f"-DJFA_ONLY_ANALYZING={analyzing}",
    )


ARCHITECTURES = pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])


@ARCHITECTURES
@pytest.mark.parametrize("leaf_class, analyzing", [(0, 0), (0, 1), (3, 0), (5, 0), (6, 0)])
def test_every_architecture(nvrtc, architecture, leaf_class, analyzing):
    options = ["-DJFA_ONLY_RULE=0", f"-DJFA_ONLY_CLASS={leaf_class}"]
    options.append(f"-DJFA_ONLY_ANALYZING={analyzing}")
    _compile(nvrtc, "cuda/update_kernel.cu", architecture, *options)


@ARCHITECTURES
@pytest.mark.parametrize("source", ["cuda/stats_kernel.cu", "ladder/ladder_kernel.cu"])
def test_other_sources_on_every_architecture(nvrtc, source, architecture):
    _compile(nvrtc, source, architecture)


def test_options_are_those_of_the_source():
    assert {"-std=c++17", "--fmad=false"} <= set(_options())
