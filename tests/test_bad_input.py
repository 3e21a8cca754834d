"""Bad calls: the documented class, the leaf's path, and then a good call works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from jax.experimental import sparse

import jax_fused_adamw as jfa

PARAMS = {"layer": {"w": jnp.ones((4, 3)), "b": jnp.ones((3,))}, "scale": jnp.ones(())}
GRADS = jax.tree.map(lambda p: 0.5 * p, PARAMS)


def with_leaf(tree, path, value):
    head, *rest = path
    return {**tree, head: with_leaf(tree[head], rest, value) if rest else value}


def without_leaf(tree, path):
    head, *rest = path
    if rest:
        return {**tree, head: without_leaf(tree[head], rest)}
    return {key: value for key, value in tree.items() if key != head}


BCOO = sparse.BCOO.fromdense(jnp.eye(4, 3))
STATE = jfa.fused_adamw(1e-3).init(PARAMS)
AMSGRAD_STATE = jfa.fused_adamw(1e-3, amsgrad=True).init(PARAMS)
W, B = ("layer", "w"), ("layer", "b")


def grads_with(path, value):
    return dict(grads=with_leaf(GRADS, path, value))


def params_with(path, value):
    return dict(params=with_leaf(PARAMS, path, value))


def state_with(field, path, value):
    tree = with_leaf(getattr(STATE, field), path, value)
    return dict(state=STATE._replace(**{field: tree}))


# name: (changed arguments, class, text that must appear)
BAD_CALLS = {
    "int gradient": (
        grads_with(W, jnp.ones((4, 3), jnp.int32)),
        TypeError,
        r"grads\['layer'\]\['w'\].*int32",
    ),
    "bool gradient": (grads_with(B, jnp.ones((3,), bool)), TypeError, r"\['b'\].*bool"),
    "complex gradient": (
        grads_with(B, jnp.ones((3,), jnp.complex64)),
        TypeError,
        r"grads\['layer'\]\['b'\].*complex64",
    ),
    "float8 gradient": (
        grads_with(B, jnp.ones((3,), jnp.float8_e4m3fn)),
        TypeError,
        "float8_e4m3fn",
    ),
    "float64 numpy gradient": (grads_with(B, np.ones((3,))), TypeError, "float64"),
    "python float gradient": (grads_with(("scale",), 1.0), TypeError, r"\['scale'\]"),
    "string gradient": (grads_with(("scale",), "x"), TypeError, r"\['scale'\]"),
    "key gradient": (
        grads_with(("scale",), jax.random.key(0)),
        TypeError,
        r"\['scale'\]",
    ),
    "sparse gradient": (grads_with(W, BCOO), TypeError, r"\['w'\].*todense"),
    "broadcast gradient": (
        grads_with(W, jnp.ones((1, 3))),
        ValueError,
        r"grads\['layer'\]\['w'\] has shape \(1, 3\), expected \(4, 3\)",
    ),
    "scalar gradient": (grads_with(B, jnp.ones(())), ValueError, "never broadcast"),
    "transposed gradient": (grads_with(W, jnp.ones((3, 4))), ValueError, r"\(3, 4\)"),
    "gradient leaf missing": (
        dict(grads=without_leaf(GRADS, B)),
        ValueError,
        r"grads\['layer'\]\['b'\] is missing",
    ),
    "gradient leaf too many": (
        grads_with(("more",), jnp.ones(2)),
        ValueError,
        r"grads\['more'\] has no counterpart",
    ),
    "gradient None": (grads_with(B, None), ValueError, r"\['b'\] is missing"),
    "gradients as list": (
        dict(grads=jax.tree.leaves(GRADS)),
        ValueError,
        "tree of grads does not match",
    ),
    "gradients in another container": (
        dict(grads={**GRADS, "layer": tuple(GRADS["layer"].values())}),
        ValueError,
        "grads",
    ),
    "state as gradients": (dict(grads=STATE), ValueError, "grads"),
    "params missing": (dict(params=None), ValueError, "needs the current parameters"),
    "params and state swapped": (
        dict(state=PARAMS, params=STATE),
        TypeError,
        "state must be a FusedAdamWState, got dict",
    ),
    "state of optax": (
        dict(state=optax.adamw(1e-3).init(PARAMS)),
        TypeError,
        "FusedAdamWState",
    ),
    "state with nu_max": (dict(state=AMSGRAD_STATE), ValueError, "amsgrad is False"),
    "state of another tree": (
        dict(state=jfa.fused_adamw(1e-3).init({"other": jnp.ones(2)})),
        ValueError,
        r"state.mu\['layer'\]",
    ),
    "moment of another shape": (
        state_with("nu", W, jnp.zeros((3, 4))),
        ValueError,
        r"state.nu\['layer'\]\['w'\] has shape \(3, 4\)",
    ),
    "moment of another dtype": (
        state_with("mu", B, jnp.zeros((3,), jnp.bfloat16)),
        TypeError,
        r"state.mu\['layer'\]\['b'\] has dtype bfloat16, expected float32",
    ),
    "moment is a number": (state_with("mu", ("scale",), 0.0), TypeError, "state.mu"),
    "state without mu": (
        dict(state=STATE._replace(mu=None)),
        ValueError,
        r"state.mu\['layer'\]\['b'\] is missing",
    ),
    "float count": (
        dict(state=STATE._replace(count=jnp.zeros(()))),
        TypeError,
        "state.count must be an int32",
    ),
    "python count": (dict(state=STATE._replace(count=0)), TypeError, "state.count"),
    "vector count": (
        dict(state=STATE._replace(skipped=jnp.zeros(2, jnp.int32))),
        TypeError,
        "state.skipped",
    ),
    "int params": (
        params_with(B, jnp.ones((3,), jnp.int32)),
        TypeError,
        r"params\['layer'\]\['b'\].*int32.*optax.masked",
    ),
    "python float params": (params_with(("scale",), 1.0), TypeError, "jnp.asarray"),
    "vector skip": (
        dict(skip_update=jnp.zeros(2, bool)),
        ValueError,
        r"skip_update must be a scalar, got an array of shape \(2,\)",
    ),
    "float skip": (dict(skip_update=1.0), TypeError, "skip_update"),
    "float array skip": (dict(skip_update=jnp.ones(())), TypeError, "float32"),
    "None skip": (dict(skip_update=None), TypeError, "skip_update"),
    "vector scale": (dict(gradient_scale=jnp.ones((1,))), ValueError, "gradient_scale"),
    "bool scale": (dict(gradient_scale=jnp.array(True)), TypeError, "gradient_scale"),
    "complex scale": (dict(gradient_scale=1j), TypeError, "gradient_scale"),
    "string scale": (dict(gradient_scale="2"), TypeError, "gradient_scale"),
    "report": (dict(report=object()), TypeError, "report must be a GradReport"),
    "report's dtype": (
        dict(report=jfa.GradReport(jnp.int32(1), jnp.float32(1), jnp.int32(0))),
        TypeError,
        "report.norm must be a float32 scalar",
    ),
}


def good_call(tx):
    return jfa.step(tx, GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("way", ["step", "update"])
def test_bad_call(name, way):
    changed, error, text = BAD_CALLS[name]
    tx = jfa.fused_adamw(1e-3)
    arguments = {"grads": GRADS, "state": STATE, "params": PARAMS, **changed}
    positional = [arguments.pop(name) for name in ("grads", "state", "params")]
    call = tx.step if way == "step" else tx.update
    before = jax.tree.map(np.array, (GRADS, STATE, PARAMS))
    with pytest.raises(error, match=f"(?s){text}"):
        call(*positional, **arguments)
    assert_same_bits(jax.tree.map(np.asarray, (GRADS, STATE, PARAMS)), before)
    assert int(good_call(tx)[1].count) == 1


@pytest.mark.parametrize(
    "name", ["int gradient", "broadcast gradient", "sparse gradient"]
)
def test_bad_call_under_jit(name):
    changed, error, text = BAD_CALLS[name]
    tx = jfa.fused_adamw(1e-3)
    with pytest.raises(error, match=f"(?s){text}"):
        jax.jit(tx.update)(changed["grads"], STATE, PARAMS)


BAD_PARAMS = {
    "int32": jnp.ones((2,), jnp.int32),
    "bool": jnp.ones((2,), bool),
    "complex64": jnp.ones((2,), jnp.complex64),
    "float8_e5m2": jnp.ones((2,), jnp.float8_e5m2),
    "float64": np.ones((2,)),
    "float": 1.0,
    "key<fry>": jax.random.key(0),
}


@pytest.mark.parametrize("dtype", BAD_PARAMS)
def test_init_refuses_other_dtypes_by_path(dtype):
    params = with_leaf(PARAMS, B, BAD_PARAMS[dtype])
    with pytest.raises(TypeError, match=r"params\['layer'\]\['b'\]") as caught:
        jfa.fused_adamw(1e-3).init(params)
    assert dtype in str(caught.value)


def test_update_without_params_is_fine_for_an_empty_tree():
    tx = jfa.fused_adamw(1e-3)
    updates, state = tx.update({}, tx.init({}))
    assert updates == {} and int(state.count) == 1


def test_schedule_result_is_checked():
    tx = jfa.fused_adamw(lambda count: float("nan"))
    with pytest.raises(ValueError, match="learning_rate"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_differentiating_a_step_is_our_own_error():
    tx = jfa.fused_adamw(1e-3)

    def after_step(params):
        return jfa.step(tx, GRADS, STATE, params)[0]["scale"]

    for transform in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(TypeError, match='implementation="xla"'):
            transform(after_step)(PARAMS)
    good_call(tx)


def test_plain_jax_can_be_differentiated():
    tx = jfa.fused_adamw(0.1, implementation="xla", weight_decay=0.5)

    def after_step(scale):
        params = {**PARAMS, "scale": scale}
        return jfa.step(tx, GRADS, STATE, params)[0]["scale"]

    np.testing.assert_allclose(jax.grad(after_step)(jnp.ones(())), 1 - 0.1 * 0.5)


def test_integers_of_any_size_are_scales_and_skips():
    tx = jfa.fused_adamw(1e-3)
    huge = tx.step(GRADS, STATE, PARAMS, gradient_scale=2**100, skip_update=2**70)
    assert int(huge[1].skipped) == 1
    beyond_float64, _ = tx.step(GRADS, STATE, PARAMS, gradient_scale=10**400)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(beyond_float64))


@pytest.mark.parametrize(
    "name, call",
    [
        ("grad_stats", lambda: jfa.grad_stats(jnp.ones(2, jnp.int32))),
        ("grad_stats", lambda: jfa.grad_stats(jnp.ones(2), jnp.ones(2))),
        ("grad_stats", lambda: jfa.grad_stats(jnp.ones(2), implementation="cuda")),
        ("clip_by_global_norm", lambda: jfa.clip_by_global_norm(-1.0)),
        (
            "clip_by_global_norm",
            lambda: jfa.clip_by_global_norm(1.0).update(jnp.ones(2, jnp.int32), None),
        ),
        ("accumulate", lambda: accumulate_once(jnp.ones(3))),
        ("accumulate", lambda: accumulate_once(jnp.ones(2), weight=jnp.ones(2))),
        ("accumulate", lambda: accumulate_once(jnp.ones(2), gradient_scale="a")),
        ("fused_adamw", lambda: accumulate_once(jnp.ones(2), params=None)),
    ],
)
def test_errors_begin_with_the_function_that_was_called(name, call):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: ") as caught:
        call()
    assert ".any()" not in str(caught.value)


@pytest.mark.parametrize(
    "name, call",
    [
        ("compute_params", jfa.compute_params),
        ("master_mismatch", jfa.master_mismatch),
        ("resync", functools.partial(jfa.resync, source="master")),
    ],
)
def test_python_floats_are_no_parameters(name, call):
    state = jfa.fused_adamw(0.1).init(jnp.ones(2))
    with pytest.raises(TypeError, match=rf"^{name}: params\['w'\] is 1.0 of type fl"):
        call(state, {"w": 1.0})


def accumulate_once(grads, params=1.0, **extra):
    tx = jfa.accumulate(jfa.fused_adamw(0.1), 1)
    given = None if params is None else jnp.ones(2)
    return tx.update(grads, tx.init(jnp.ones(2)), given, **extra)


@pytest.mark.parametrize(
    "leaf, remedy",
    [
        (jax.nn.relu, r"keep it out of the optimizer: .*nnx.Param.*eqx.filter"),
        (jnp.ones(2, jnp.uint32), r"dtype uint32.*; keep it out .*optax.masked"),
        (jax.random.key(0), r"dtype key<fry>.*; keep it out"),
        (jnp.ones(2, jnp.float8_e4m3fn), "cast it to float32"),
        (1.0, "convert it with jnp.asarray"),
    ],
    ids=["function", "integers", "key", "float8", "number"],
)
@pytest.mark.parametrize("use", [jfa.fused_adamw(0.1).init, jfa.memory_estimate])
def test_what_is_no_parameter(use, leaf, remedy):
    with pytest.raises(TypeError, match=rf"params\['a'\] .*{remedy}"):
        use({"a": leaf})


def test_of_another_option_or_shape():
    params = {"a": jnp.ones(2)}
    state = jfa.fused_adamw(0.1, compute_dtype=jnp.bfloat16).init(params)
    with pytest.raises(ValueError, match="its parameter is of shape .3,.;"):
        jfa.compute_params(state, {"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="its parameter is a float;"):
        jfa.compute_params(state, {"a": 1.0})
    for amsgrad in (True, "optax"):
        tx = jfa.fused_adamw(0.1, amsgrad=amsgrad, compute_dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match=f"no nu_max, but amsgrad is {amsgrad!r}"):
            jfa.step(tx, params, state, params)


def test_what_is_not_given():
    with pytest.raises(TypeError, match=r"neither .state.report is None without max_"):
        jfa.DynamicLossScale().update(None)
    for dtype in (None, jnp.float32):
        with pytest.raises((TypeError, ValueError), match="must be .*bfloat16"):
            jfa.value_and_grad(jnp.sum, compute_dtype=dtype)
    for dtype in ("foo", jnp.int32):
        with pytest.raises((TypeError, ValueError), match="^memory_estimate: grad_dty"):
            jfa.memory_estimate({"a": jnp.ones(2)}, grad_dtype=dtype)
    wrapper = jfa.accumulate(jfa.fused_adamw(0.1), 2)
    with pytest.raises(TypeError, match="got GradientTransformationExtraArgs; of a"):
        jfa.to_torch(wrapper.init({"a": jnp.ones(2)}), {"a": jnp.ones(2)}, wrapper)
