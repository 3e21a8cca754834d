"""Loading native modules: a bad one must cost nothing but itself."""

import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest

import jax_fused_adamw as jfa
from jax_fused_adamw import _ffi


def run_python(source: str) -> str:
    """Runs a fresh interpreter on the CPU, where nothing is registered yet."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What every broken installation must still do, after a first block has broken it.
SURVIVES = """
import jax, jax.numpy as jnp
import jax_fused_adamw as jfa

assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0, "JAX itself must work"
info = jfa.kernel_info()
assert not info.cpu.loaded
params = {"w": jnp.ones(3)}
tx = jfa.fused_adamw(0.1)
try:
    tx.step(params, tx.init(params), params)
except RuntimeError as error:
    assert 'implementation="xla"' in str(error), error
    assert info.cpu.reason in str(error), error
else:
    raise AssertionError("a missing kernel must not be replaced in silence")
plain = jfa.fused_adamw(0.1, implementation="xla")
assert float(plain.step(params, plain.init(params), params)[0]["w"][0]) < 1.0
print(info)
"""


def broken(first: str) -> str:
    return run_python(textwrap.dedent(first) + SURVIVES)


def test_missing_module():
    report = broken("""
        import sys
        sys.modules["jax_fused_adamw._cpu"] = None
    """)
    assert "cpu: not available" in report and "pip install" in report


def test_module_that_fails_to_import():
    report = broken("""
        import importlib.abc, sys

        class Broken(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "jax_fused_adamw._cpu":
                    raise ImportError("undefined symbol: xyz")

        sys.meta_path.insert(0, Broken())
    """)
    assert "undefined symbol: xyz" in report


FAKE_MODULE = """
    import sys, types
    fake = types.ModuleType("jax_fused_adamw._cpu")
    fake.ffi_api_version = {version}
    fake.registrations = {registrations}
    fake.details = dict
    fake.unavailable_reason = str
    sys.modules["jax_fused_adamw._cpu"] = fake
"""


def test_module_of_newer_headers_is_never_registered():
    report = broken(
        FAKE_MODULE.format(
            version="(0, 999)", registrations="lambda: sys.exit('registered')"
        )
    )
    assert "FFI 0.999" in report and "rebuild" in report


def test_registration_that_fails():
    report = broken(
        FAKE_MODULE.format(version="(0, 1)", registrations="lambda: {}['no handler']")
    )
    assert "loading _cpu failed: KeyError" in report


def test_unknown_instruction_set_is_not_ignored():
    report = broken("""
        import os
        os.environ["JAX_FUSED_ADAMW_CPU_ISA"] = "avx-2"
    """)
    assert "JAX_FUSED_ADAMW_CPU_ISA" in report


def test_stray_nvidia_module_does_not_break_the_import():
    run_python("""
        import sys, types
        sys.modules["nvidia"] = types.ModuleType("nvidia")
        import jax_fused_adamw as jfa
        assert jfa.kernel_info().cpu.loaded
    """)


@pytest.mark.parametrize(
    "built, running, accepted",
    [
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 5), True),
        ((0, 1), (0, 3), True),
        ((0, 4), (0, 3), False),
        ((0, 0), (0, 3), False),
        ((1, 0), (0, 5), False),
        ((0, 3), None, False),
    ],
)
def test_version_rule(built, running, accepted):
    assert (_ffi._refusal(built, running) is None) == accepted


def test_this_build_serves_this_jaxlib():
    info = jfa.kernel_info()
    assert info.cpu.loaded, str(info)
    assert info.cpu.ffi_api_version <= info.jaxlib_ffi_api_version
    assert info.cpu.details["instruction_set"] in info.cpu.details["supported"]
    assert info.cpu.details["supported"][-1] == "portable"
    assert "cpu: loaded" in str(info) and "cuda" in str(info)


def test_import_starts_no_backend():
    run_python("""
        import jax_fused_adamw
        from jax._src import xla_bridge
        assert not xla_bridge._backends
    """)


def test_missing_cuda_module_raises_when_lowering_for_cuda():
    if jfa.kernel_info().cuda.loaded:
        pytest.skip("the CUDA module is loaded here")
    import jax

    params = {"w": jnp.ones(3)}
    tx = jfa.fused_adamw(0.1)
    traced = jax.jit(tx.step).trace(params, tx.init(params), params)
    with pytest.raises(RuntimeError, match='implementation="xla"'):
        traced.lower(lowering_platforms=("cuda",))
    plain = jfa.fused_adamw(0.1, implementation="xla")
    traced = jax.jit(plain.step).trace(params, plain.init(params), params)
    assert "sqrt" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_handler_checks_what_reaches_it():
    """The C++ side guards memory even if Python's checks were bypassed."""
    import jax
    import numpy as np

    def call(
        count_dtype=jnp.int32,
        moments=3,
        traced=(0,) * 9,
        members=1,
        num_after=0,
        clip=0,
        analyze=False,
        size=3,
        rows=1,
    ):
        leaf = jnp.ones(size)
        float32, words = jnp.float32, jnp.uint32
        results = [((size,), float32)] * 3
        if analyze:
            results += [((), float32)] * 3
            results += [((), jnp.int32), ((1, 3), words), ((rows, 3), words)]
        return jax.ffi.ffi_call(
            _ffi.UPDATE_TARGET, [jax.ShapeDtypeStruct(*result) for result in results]
        )(
            jnp.ones((), count_dtype),
            jnp.array(False),
            jnp.zeros((9, 2), jnp.uint32),
            *([jnp.float32(1.0)] if analyze else []),
            leaf,
            leaf,
            jnp.ones(size if moments == 3 else moments),
            leaf,
            analyze=np.bool_(analyze),
            amsgrad=np.int64(0),
            clip=np.int64(clip),
            count_step=np.bool_(False),
            decays=np.ones(1, np.uint8),
            has_copies=np.bool_(False),
            has_ema=np.bool_(False),
            leaf_ids=np.zeros(1, np.int64),
            maximize=np.bool_(False),
            members=np.int64(members),
            nesterov=np.bool_(False),
            num_after=np.int64(num_after),
            shard_strides=np.zeros(6, np.int64),
            skip_nonfinite=np.bool_(False),
            stochastic_moments=np.bool_(False),
            stochastic_params=np.bool_(False),
            traced=np.array(traced, np.uint8),
            write_params=np.bool_(True),
            zero_moments=np.bool_(False),
        )

    jax.block_until_ready(call())
    assert jax.block_until_ready(call(analyze=True, clip=1))[5] == 1.0  # max_abs
    for arguments, text in (
        (dict(analyze=True, rows=2), "rows: expected 3 elements, got 6"),
        (dict(analyze=True, members=3), "expected one member"),
        (dict(analyze=True, size=1024 * 4096 + 1, rows=1025), "one merge"),
        (dict(count_dtype=jnp.float32), "count"),
        (dict(moments=4), "mu of leaf 0: expected 3 elements, got 4"),
        (dict(traced=(1,) + (0,) * 8), "operands"),
        (dict(traced=(0,) * 8), "traced"),
        (dict(members=0), "members"),
        (dict(members=2), "not divisible"),
        (dict(num_after=1), "expected 8 operands"),
        (dict(num_after=-1), "num_after"),
        (dict(clip=1), "expected 9 operands"),
        (dict(clip=3), "clip"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(call(**arguments))


def test_statistics_check_what_reaches_them():
    import jax
    import numpy as np

    def call(dtype=jnp.float32, rows=2, chunk=4096, members=1, num_rows=(2,)):
        float32, words = jnp.float32, jnp.uint32
        results = [((1,), float32)] * 3 + [((1,), jnp.int32), ((1, 3), words)]
        results += [((0, 3), words), ((rows, 3), words)]
        return jax.ffi.ffi_call(
            _ffi.ANALYZE_TARGET, [jax.ShapeDtypeStruct(*result) for result in results]
        )(
            jnp.ones((), jnp.float32),
            jnp.ones(5000, dtype),
            members=np.int64(members),
            chunk_elements=np.int64(chunk),
            first_rows=np.zeros(1, np.int64),
            num_rows=np.array(num_rows, np.int64),
        )

    assert jax.block_until_ready(call())[0] == np.float32(np.sqrt(5000))
    for arguments, text in (
        (dict(dtype=jnp.int32), "gradient of leaf 0"),
        (dict(rows=1), "rows: expected 6 elements, got 3"),
        (dict(chunk=100), "chunk_elements"),
        (dict(members=0), "members"),
        (dict(members=3), "not divisible"),
        (dict(num_rows=(3,)), "segment 0 is outside"),
        (dict(num_rows=(-1,)), "segment 0 is outside"),
        (dict(num_rows=(2, 2)), "one entry for each segment"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(call(**arguments))
