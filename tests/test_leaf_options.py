"""Masks and scales as they are given: trees, prefixes, functions, modules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import HYPERPARAMS, assert_same_bits, random_like
from test_lr_scale import GRADS, LR, PARAMS, SCALES

import jax_fused_adamw as jfa

NESTED = {"body": {"w": PARAMS["a"], "b": PARAMS["b"]}, "head": {"w": PARAMS["c"]}}
FORMS = {
    "tree": {"body": {"w": 0.5, "b": 0.5}, "head": {"w": 3}},
    "prefix": {"body": 0.5, "head": np.int64(3)},
    "callable": lambda params: {
        "body": jax.tree.map(lambda p: 0.5, params["body"]),
        "head": jax.tree.map(lambda p: 3.0, params["head"]),
    },
    "callable that returns a prefix": lambda params: {
        "body": np.float32(0.5),
        "head": {"w": 3.0},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=FORMS[form])
    grads = random_like(NESTED, 5)
    params, _ = jfa.step(tx, grads, tx.init(NESTED), NESTED)
    for name, scale in (("body", 0.5), ("head", 3.0)):
        alone = jfa.fused_adamw(**HYPERPARAMS | dict(learning_rate=LR * scale))
        expected, _ = jfa.step(alone, grads, alone.init(NESTED), NESTED)
        assert_same_bits(params[name], expected[name])


@pytest.mark.parametrize(
    "scale",
    [0.5, lambda params: 0.5, np.float64(0.5)],
    ids=["number", "function", "NumPy"],
)
def test_one_array(scale):
    p, g = PARAMS["a"], GRADS["a"]
    half = jfa.fused_adamw(**HYPERPARAMS | dict(learning_rate=LR / 2))
    tx = jfa.fused_adamw(**HYPERPARAMS, lr_scale=scale)
    assert_same_bits(
        jfa.adamw_step(p, g, options=tx), jfa.adamw_step(p, g, options=half)
    )


BAD_VALUES = [
    (True, TypeError, "lr_scale must be a real number.*a mask"),
    ({"a": np.bool_(True)}, TypeError, r"lr_scale\['a'\].*a mask"),
    ({"a": "x"}, TypeError, r"lr_scale\['a'\] must be a real number"),
    ({"a": [0.5, 1j]}, TypeError, r"lr_scale\['a'\]\[1\] must be a real number"),
    ({"a": -0.5}, ValueError, r"lr_scale\['a'\].*-0.5"),
    ({"a": np.nan}, ValueError, r"lr_scale\['a'\].*nan"),
    ({"a": np.inf}, ValueError, r"lr_scale\['a'\].*inf"),
    ({"a": np.float16("inf")}, ValueError, r"lr_scale\['a'\].*inf"),
    ({"a": np.float16("nan")}, ValueError, r"lr_scale\['a'\].*nan"),
    ({"a": 1e39}, ValueError, r"lr_scale\['a'\].*finite in float32"),
    ({"a": 10**400}, ValueError, r"lr_scale\['a'\].*finite in float32"),
    ({"a": jnp.float32(1)}, TypeError, r"lr_scale\['a'\] is an array.*static_args"),
    ({"a": np.ones(())}, TypeError, "multi_transform"),
]


@pytest.mark.parametrize("values, error, text", BAD_VALUES, ids=lambda x: str(x)[:30])
def test_bad_values_are_named(values, error, text):
    with pytest.raises(error, match=text):
        jfa.fused_adamw(1e-3, lr_scale=values)
    tx = jfa.fused_adamw(1e-3, lr_scale=lambda params: values)
    with pytest.raises(error, match=text):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_a_number_of_float16_is_a_scale():
    rates = jfa.fused_adamw(1e-3, lr_scale=np.float16(65504)).options()["lr_scale"]
    assert rates == {"": 65504.0}


@pytest.mark.parametrize("value", [np.array(True), jnp.array(True)])
def test_a_mask_of_arrays_is_refused(value):
    told = r"mask\['a'\] .* array, .*bool\(x\).* static_args=\(\"mask\",\)"
    with pytest.raises(TypeError, match=told):
        jfa.fused_adamw(1e-3, mask={"a": value})
    jfa.fused_adamw(1e-3, mask={"a": bool(value), "b": np.bool_(True)})


@pytest.mark.parametrize("name", ["lr_scale", "mask"])
def test_a_schedule_is_no_function_of_parameters(name):
    tx = jfa.fused_adamw(1e-3, **{name: optax.cosine_decay_schedule(1.0, 10)})
    told = f"fused_adamw: {name} is a function .* prefix, .* A schedule.*learning_rate"
    with pytest.raises(TypeError, match=told):
        tx.step(GRADS, tx.init(PARAMS), PARAMS)


def test_a_tracer_is_refused():
    @jax.jit
    def step(scale):
        tx = jfa.fused_adamw(1e-3, lr_scale={name: scale for name in PARAMS})
        return jfa.step(tx, GRADS, tx.init(PARAMS), PARAMS)

    with pytest.raises(TypeError, match=r"lr_scale\['a'\] is an array"):
        step(0.5)


OTHER_TREES = {
    "missing": ({"a": 1.0}, r"it has no value for params\['b'\]"),
    "unknown": ({**SCALES, "e": 1.0}, r"lr_scale\['e'\] has no counterpart"),
    "too deep": ({**SCALES, "a": {"w": 1.0}}, r"lr_scale\['a'\]\['w'\] has no count"),
    "None": ({**SCALES, "a": None}, r"it has no value for params\['a'\]"),
    "list": ([1.0] * 4, r"lr_scale\[0\] has no counterpart"),
}


@pytest.mark.parametrize(("scales", "told"), OTHER_TREES.values(), ids=OTHER_TREES)
def test_another_tree_is_refused_by_init_and_step(scales, told):
    """Functions by the step: init may be given other containers, as by Flax nnx."""
    message = f"lr_scale is not a prefix of .*: {told}"
    with pytest.raises(ValueError, match=message):
        jfa.fused_adamw(1e-3, lr_scale=scales).init(PARAMS)
    state = jfa.fused_adamw(1e-3).init(PARAMS)
    for lr_scale in (scales, lambda params: scales):
        tx = jfa.fused_adamw(1e-3, lr_scale=lr_scale)
        with pytest.raises(ValueError, match=message):
            tx.update(GRADS, state, PARAMS)
    mask = jax.tree.map(bool, scales)
    with pytest.raises(ValueError, match=told.replace("lr_scale", "mask")):
        jfa.fused_adamw(1e-3, mask=mask).init(PARAMS)


def test_containers_that_differ_are_told():
    params = {"a": (PARAMS["a"], PARAMS["b"])}
    tx = jfa.fused_adamw(1e-3, mask={"a": [True, False]})
    told = "mask is not .*: the containers differ: mask.'a'. must be a tuple, got a "
    with pytest.raises(ValueError, match=f"{told}list. Give"):
        tx.init(params)
    many = {f"l{i}": {"w": PARAMS["a"], "b": [PARAMS["b"]]} for i in range(300)}
    for other in (
        {**many, "l7": {"w": 0.5, "b": (0.5,)}},
        jax.tree.map(lambda x: 0.5, {**many, "l7": many["l7"] | {"b": (0.5,)}}),
    ):
        mended = jax.tree.map(lambda x: 0.5, other)
        with pytest.raises(ValueError, match=r"'l7'\]\['b'\] must be a list") as error:
            jfa.fused_adamw(1e-3, lr_scale=mended).init(many)
        assert len(str(error.value)) < 300
        with pytest.raises(ValueError, match=r"grads\['l7'\]\['b'\] must be a list"):
            plain = jfa.fused_adamw(1e-3)
            plain.update(other, plain.init(many), many)


def test_a_group_takes_the_tree_of_the_whole_model():
    params, grads = NESTED, random_like(NESTED, 5)
    labels = {"body": "slow", "head": "fast"}

    def groups(lr_scale):
        slow = jfa.fused_adamw(**HYPERPARAMS, lr_scale=lr_scale)
        return optax.multi_transform({"slow": slow, "fast": optax.sgd(0.0)}, labels)

    half = jfa.fused_adamw(**HYPERPARAMS | dict(learning_rate=LR / 2))
    expected, _ = half.step(grads, half.init(params), params)
    for scales in (
        0.5,
        {"body": 0.5, "head": 9.0},
        {"body": {"w": 0.5, "b": 0.5}, "head": {"w": 9.0}},
        {"body": 0.5, "head": optax.MaskedNode()},
        {"body": 0.5, "head": {"w": 9.0}},
        {"body": {"w": 0.5, "b": 0.5}, "head": 9.0},
        {"body": 0.5, "head": [9.0, {"x": 1.0}]},
    ):
        tx = groups(scales)
        got, _ = jfa.step(tx, grads, tx.init(params), params)
        assert_same_bits(got["body"], expected["body"])
    message = r"no value for params\['head'\], which is another group's: .* whole model"
    with pytest.raises(ValueError, match=message):
        groups({"body": 0.5}).init(params)
    with pytest.raises(ValueError, match=r"lr_scale\['b'\] has no counterpart"):
        groups({"w": 0.5, "b": 0.5}).init(params)


class Strict:
    """A node that refuses what is no weight."""

    def __init__(self, w, b):
        assert not isinstance(w, float) and (w is not True or b is not True)
        self.w, self.b = w, b


jax.tree_util.register_pytree_node(
    Strict, lambda x: ((x.w, x.b), None), lambda _, children: Strict(*children)
)


def test_prefixes_leave_the_nodes_of_the_user_alone():
    params = {"l": Strict(PARAMS["a"].reshape(-1, 1), PARAMS["b"]), "s": PARAMS["c"]}
    grads = random_like(params, 3)

    def step(tx):
        return jfa.step(tx, grads, tx.init(params), params)[0]

    for options, same in (
        (dict(lr_scale=0.5), dict(learning_rate=LR / 2)),
        (dict(mask={"l": True, "s": True}), {}),
    ):
        got = step(jfa.fused_adamw(**HYPERPARAMS | options))
        assert_same_bits(got, step(jfa.fused_adamw(**HYPERPARAMS | same)))
    whole = {"l": Strict(True, False), "s": True}
    labels = {"l": "other", "s": "own"}
    own = jfa.fused_adamw(1e-2, weight_decay=0.5, mask=whole)
    tx = optax.multi_transform({"own": own, "other": optax.set_to_zero()}, labels)
    expected = step(jfa.fused_adamw(1e-2, weight_decay=0.5))
    assert_same_bits(step(tx)["s"], expected["s"])


def test_maps_over_a_state_still_find_the_parameters():
    """optax asks init with a placeholder, which has no leaves to suit."""
    tx = jfa.fused_adamw(1e-3, mask=dict.fromkeys(PARAMS, True), lr_scale=SCALES)
    more = optax.tree.map_params(tx, lambda x: x + 1, tx.init(PARAMS))
    assert_same_bits(more.mu["a"], jnp.ones_like(PARAMS["a"]))


@pytest.mark.parametrize("traced", [False, True])
def test_a_product_that_is_infinite_is_refused_by_its_leaf(traced):
    """Where the host sees it; a learning rate on the device is the user's business."""
    scales = SCALES | {"c": 3e38}
    tx = jfa.fused_adamw(jnp.float32(100.0) if traced else 100.0, lr_scale=scales)
    if traced:
        params, _ = tx.step(GRADS, tx.init(PARAMS), PARAMS)
        assert not np.isfinite(np.float32(params["c"])).any()
        return
    message = r"lr_scale of params\['c'\] is 3e\+38, .* learning rate 100 infinite"
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)
    state = jfa.fused_adamw(1.0).init(PARAMS)
    for rate in (100.0, lambda count: 100.0):
        tx = jfa.fused_adamw(rate, lr_scale=lambda params: scales)
        with pytest.raises(ValueError, match=message):
            tx.step(GRADS, state, PARAMS)


# --- Trees that can be called ---------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """As a module of Equinox is: a tree of arrays with a forward pass."""

    w: jax.Array
    b: jax.Array

    def __call__(self, x):
        raise AssertionError("a mask was called for a forward pass")


MODEL = Model(PARAMS["a"], PARAMS["b"])
MODEL_GRADS = Model(GRADS["a"], GRADS["b"])


def test_a_module_as_mask_is_its_tree():
    options = HYPERPARAMS | dict(weight_decay=0.5, eps_root=0.0)
    mask, scales = Model(True, False), Model(0.5, 2.0)
    tx = jfa.fused_adamw(**options, mask=mask, lr_scale=scales)
    params, state = tx.step(MODEL_GRADS, tx.init(MODEL), MODEL)
    for name, decay, scale in (("w", 0.5, 0.5), ("b", 0.0, 2.0)):
        own = dict(weight_decay=decay, learning_rate=LR * scale)
        alone = jfa.fused_adamw(**options | own)
        expected, _ = alone.step(MODEL_GRADS, alone.init(MODEL), MODEL)
        assert_same_bits(getattr(params, name), getattr(expected, name))
    assert tx.options()["mask"] == {".w": True, ".b": False}
    assert tx.options()["lr_scale"] == {".w": 0.5, ".b": 2.0}
    report = jfa.decay_report(tx, MODEL)
    assert report.decayed == ("params.w",) and report.not_decayed == ("params.b",)
    assert report.lr_scales == {"params.w": 0.5, "params.b": 2.0}
    back = jfa.to_torch(state, params, tx)["param_groups"]
    assert [x["weight_decay"] for x in back] == [0.5, 0.0]


def test_values_of_a_module_are_checked_at_once():
    with pytest.raises(TypeError, match=r"mask.w must be a Python bool, got 1"):
        jfa.fused_adamw(1e-3, mask=Model(1, False))
    with pytest.raises(ValueError, match=r"lr_scale.b must be a scale >= 0 .* -2.0"):
        jfa.fused_adamw(1e-3, lr_scale=Model(1.0, -2.0))


def test_a_module_of_equinox_is_a_mask_as_in_optax():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    grads = random_like(params, 3)
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    options = dict(learning_rate=0.1, weight_decay=0.5, mask=mask)
    updates = []
    for make in (jfa.fused_adamw, optax.adamw):
        tx = make(**options)
        updates.append(jax.tree.leaves(tx.update(grads, tx.init(params), params)[0]))
    for ours, theirs in zip(*updates, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-5)


def test_inject_hyperparams_wants_it_static():
    """It makes arrays of numbers, and takes a function for a schedule of its count."""

    def init(scale, *static):
        inject = optax.inject_hyperparams(jfa.fused_adamw, static_args=static)
        return inject(1e-3, lr_scale=scale).init({"w": jnp.ones(3)})

    def rates(params):
        return jax.tree.map(lambda p: 2, params)

    for scale in (0.5, rates):
        with pytest.raises(TypeError, match=r'static_args=\("lr_scale",\)'):
            init(scale)
        init(scale, "lr_scale")
    init({"w": 0.5})
    with pytest.raises(TypeError, match=r"write 2\.0"):
        init(2, "lr_scale")
