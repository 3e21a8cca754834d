"""Groups: masks, decay_report, one report for several optimizers, frozen leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    HYPERPARAMS,
    WAYS,
    assert_same_bits,
    bits,
    copies,
    make_tx,
    random_like,
    take_step,
)

import jax_fused_adamw as jfa

PARAMS = {
    "body": [{"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, {"w": jnp.ones((3, 3))}],
    "head": {"w": jnp.ones((3, 2)), "b": jnp.ones(2)},
}
PARAMS, GRADS = random_like(PARAMS, 1), random_like(PARAMS, 2)


def only_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


# --- Masks ----------------------------------------------------------------------------

HEAD_ONLY = [False, False, False, True, True]  # by jax.tree.leaves
MASKS = {
    "one bool": (False, [False] * 5),
    "tree": (
        {
            "body": [{"w": True, "b": False}, {"w": True}],
            "head": {"w": True, "b": 0 > 1},
        },
        [False, True, True, False, True],
    ),
    "prefix": ({"body": False, "head": True}, HEAD_ONLY),
    "nested prefix": (
        {"body": [np.bool_(False), {"w": True}], "head": {"w": False, "b": True}},
        [False, False, True, True, False],
    ),
    "callable": (only_matrices, [False, True, True, False, True]),
    "callable that returns a prefix": (
        lambda params: {name: name == "head" for name in params},
        HEAD_ONLY,
    ),
    "callable that returns one bool": (lambda params: False, [False] * 5),
}


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("form", MASKS)
def test_masks(form, implementation):
    mask, decays = MASKS[form]
    options = HYPERPARAMS | dict(weight_decay=3.0, implementation=implementation)

    def leaves(**more):
        tx = jfa.fused_adamw(**options | more)
        after, _ = jfa.step(tx, GRADS, tx.init(PARAMS), PARAMS)
        return jax.tree.leaves(after)

    with_decay, without = leaves(), leaves(weight_decay=0.0)
    for got, *both, decays_leaf in zip(leaves(mask=mask), with_decay, without, decays):
        expected, other = both if decays_leaf else reversed(both)
        assert_same_bits(got, expected)
        assert (got != other).any()


# --- decay_report ---------------------------------------------------------------------

NAMES = {
    "body.b": "params['body'][0]['b']",
    "body.w": "params['body'][0]['w']",
    "body.v": "params['body'][1]['w']",
    "head.b": "params['head']['b']",
    "head.w": "params['head']['w']",
}


def names(*keys):
    return tuple(NAMES[key] for key in keys)


ABSTRACT = jax.eval_shape(lambda: PARAMS)


@pytest.mark.parametrize("params", [PARAMS, ABSTRACT], ids=["arrays", "shapes"])
def test_report_of_one_optimizer(params):
    tx = jfa.fused_adamw(1e-3, mask=only_matrices, lr_scale={"body": 0.1, "head": 1})
    report = jfa.decay_report(tx, params)
    assert report == jfa.DecayReport(
        decayed=names("body.w", "body.v", "head.w"),
        not_decayed=names("body.b", "head.b"),
        others=(),
        lr_scales=dict(zip(NAMES.values(), [0.1, 0.1, 0.1, 1.0, 1.0])),
        num_parameters=dict(zip(NAMES.values(), [3, 12, 9, 2, 6])),
    )


def test_report_is_a_table():
    tx = optax.multi_transform(
        {
            "ours": jfa.fused_adamw(1e-3, mask=only_matrices, lr_scale=0.25),
            "none": optax.set_to_zero(),
        },
        {"body": "none", "head": "ours"},
    )
    assert str(jfa.decay_report(tx, ABSTRACT)) == (
        "leaf                    parameters  decays  lr_scale\n"
        "params['body'][0]['b']           3  -       -\n"
        "params['body'][0]['w']          12  -       -\n"
        "params['body'][1]['w']           9  -       -\n"
        "params['head']['b']              2  no      0.25\n"
        "params['head']['w']              6  yes     0.25\n"
        "decayed: 1 of 5 leaves, 6 parameters\n"
        "not_decayed: 1 of 5 leaves, 2 parameters\n"
        "others: 3 of 5 leaves, 24 parameters"
    )


def injected(**options):
    static = ("mask", "lr_scale")
    return optax.inject_hyperparams(jfa.fused_adamw, static_args=static)(**options)


GROUPS = {"body": "slow", "head": "fast"}
WRAPPERS = {
    "chain": lambda make: optax.chain(optax.clip(1.0), make(learning_rate=1e-3)),
    "injected": lambda make: injected(learning_rate=1e-3, mask=only_matrices),
    "accumulate": lambda make: jfa.accumulate(make(learning_rate=1e-3), 2),
    "MultiSteps": lambda make: optax.MultiSteps(make(learning_rate=1e-3), 2),
    "groups": lambda make: optax.multi_transform(
        {"slow": make(learning_rate=1e-4), "fast": make(learning_rate=1e-3)}, GROUPS
    ),
    "nested": lambda make: optax.chain(
        optax.identity(),
        optax.multi_transform(
            {"slow": injected(learning_rate=1e-3, mask=only_matrices)}
            | {"fast": optax.chain(make(learning_rate=1e-3))},
            GROUPS,
        ),
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_report_through_wrappers(wrapper):
    def make(**options):
        return jfa.fused_adamw(**options, mask=only_matrices)

    tx = WRAPPERS[wrapper](make)
    for _ in range(2):  # nothing of the first one is remembered
        report = jfa.decay_report(tx, ABSTRACT)
        assert report.decayed == names("body.w", "body.v", "head.w")
        assert report.not_decayed == names("body.b", "head.b")
        assert set(report.lr_scales.values()) == {1.0}


def test_report_of_groups_that_differ():
    tx = optax.multi_transform(
        {
            "slow": jfa.fused_adamw(1e-4, weight_decay=0.0, lr_scale=0.5),
            "fast": optax.masked(jfa.fused_adamw(1e-3), only_matrices),
        },
        GROUPS,
    )
    report = jfa.decay_report(tx, ABSTRACT)
    assert report.decayed == names("head.w") and report.others == names("head.b")
    assert report.not_decayed == names("body.b", "body.w", "body.v")
    assert report.lr_scales[NAMES["body.w"]] == 0.5


OURS = jfa.fused_adamw(1e-3)


@pytest.mark.parametrize(
    "tx, error, text",
    [
        (optax.adamw(1e-3), ValueError, "comes to no fused_adamw"),
        (optax.chain(OURS, OURS), ValueError, r"more than one.*\['body'\]\[0\]\['b'\]"),
        (optax.flatten(OURS), ValueError, r"shape \(32,\).*fused_adamw inside"),
        (jfa.fused_adamw(1e-3, mask={"x": True}), ValueError, "mask.*not a prefix"),
    ],
    ids=["none", "two", "flattened", "bad mask"],
)
def test_report_that_cannot_know_says_so(tx, error, text):
    with pytest.raises(error, match=text):
        jfa.decay_report(tx, PARAMS)


def test_nothing_decays_at_a_learning_rate_of_zero():
    """The decay of a step is learning rate times lr_scale times weight_decay."""
    scales = {"body": 0, "head": 0.5}
    for rate in (1e-3, lambda count: 0.0, jnp.float32(1e-3)):
        report = jfa.decay_report(jfa.fused_adamw(rate, lr_scale=scales), ABSTRACT)
        assert report.not_decayed == names("body.b", "body.w", "body.v")
        assert report.decayed == names("head.b", "head.w")
    for tx in (jfa.fused_adamw(0), jfa.fused_adamw(1.0, weight_decay=jnp.zeros(()))):
        assert jfa.decay_report(tx, ABSTRACT).decayed == ()
    assert len(jfa.decay_report(injected(learning_rate=0.0), ABSTRACT).decayed) == 5


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((PARAMS, OURS), "expected an optax transformation as tx, got dict; call"),
        ((3, PARAMS), "expected an optax transformation as tx, got int"),
        ((OURS, {"w": PARAMS["head"]["w"], "act": len}), r"\['act'\] is of type buil"),
        ((OURS, OURS), "expected an array or a jax.ShapeDtypeStruct"),
    ],
    ids=["swapped", "number", "function", "no params"],
)
def test_report_of_wrong_arguments_is_a_clear_error(arguments, text):
    with pytest.raises(TypeError, match=f"^decay_report: .*{text}"):
        jfa.decay_report(*arguments)


def test_report_names_what_the_optimizer_cannot_hold():
    with pytest.raises(TypeError, match=r"params\['n'\].*int32"):
        jfa.decay_report(OURS, {"n": jnp.arange(3)})


# --- Several groups, one report -------------------------------------------------------

SHARED = {"slow": jnp.zeros(1), "fast": jnp.zeros(1), "bare": jnp.zeros(1)}
EXACT = dict(b1=0.0, b2=0.0, eps=1.0, eps_root=0.0, max_grad_norm=1.0)


def shared_groups(way):
    """Each group has a rate and a decay; the first moment is the clipped gradient."""
    groups = {
        "slow": make_tx(way, learning_rate=0.5, weight_decay=0.0, **EXACT),
        "fast": make_tx(way, learning_rate=2.0, weight_decay=0.25, **EXACT),
    }
    return optax.multi_transform(
        groups | {"bare": optax.set_to_zero()}, dict(zip(SHARED, SHARED))
    )


def take_shared(way, grads, params):
    tx = shared_groups(way)

    @jax.jit
    def step(params, state, grads):
        report = jfa.grad_stats({k: grads[k] for k in ("slow", "fast")})
        return take_step(way, tx, grads, state, params, report=report)

    params, state = step(params, tx.init(params), grads)
    return params, {k: state.inner_states[k].inner_state for k in ("slow", "fast")}


@pytest.mark.parametrize("way", WAYS)
def test_shared_report_clips_groups_as_one(way):
    """g = (3, 4), at most 1: (.6, .8), where each alone would have been (1, 1)."""
    grads = {
        "slow": jnp.array([3.0]),
        "fast": jnp.array([4.0]),
        "bare": jnp.array([9.0]),
    }
    start = {name: jnp.ones(1) for name in SHARED}
    params, states = take_shared(way, grads, start)
    clipped = {"slow": np.float32(0.6), "fast": np.float32(0.8)}
    for name, rate, decay in (("slow", 0.5, 0.0), ("fast", 2.0, 0.25)):
        g = clipped[name]
        np.testing.assert_array_equal(states[name].mu[name], [g])
        assert float(states[name].report.norm) == 5.0
        expected = 1.0 - rate * (float(g) / (float(g) + 1.0) + decay)
        np.testing.assert_allclose(params[name], [expected], rtol=1e-6)
    assert_same_bits(params["bare"], start["bare"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", ["slow", "fast"])
def test_shared_report_skips_groups_as_one(bad, way):
    grads = {name: jnp.array([3.0]) for name in SHARED} | {bad: jnp.array([jnp.nan])}
    start = {name: jnp.array([-1.5]) for name in SHARED}
    params, states = take_shared(way, grads, start)
    assert_same_bits(params, start)
    for name, state in states.items():
        assert int(state.count) == 0 and int(state.skipped) == 1
        np.testing.assert_array_equal(state.mu[name], [0.0])


@pytest.mark.parametrize("way", WAYS)
def test_lr_scale_is_groups_in_one_call(way):
    """Rates and decays of groups, as far as lr_scale and mask tell them apart."""
    shared = dict(b2=0.99, eps=1e-3, max_grad_norm=0.5)

    def group(rate, decay):
        return make_tx(way, learning_rate=rate, weight_decay=decay, **shared)

    groups = optax.multi_transform(
        {"slow": group(0.125, 0.0), "fast": group(0.5, 0.25)}, GROUPS
    )
    one = make_tx(
        way,
        learning_rate=0.5,
        weight_decay=0.25,
        lr_scale={"body": 0.25, "head": 1.0},
        mask={"body": False, "head": True},
        **shared,
    )
    report = jfa.grad_stats(GRADS)
    expected, _ = take_step(
        way, groups, GRADS, groups.init(PARAMS), PARAMS, report=report
    )
    params, _ = take_step(way, one, GRADS, one.init(PARAMS), PARAMS)
    assert_same_bits(params, expected)


@pytest.mark.parametrize("labels", ["prefix", "tree"])
def test_groups_take_the_mask_and_scales_of_the_whole_model(labels):
    """Where another group's leaves are, one node stands for all of them."""
    all_labels = GROUPS
    if labels == "tree":
        all_labels = {
            name: jax.tree.map(lambda _, group=GROUPS[name]: group, PARAMS[name])
            for name in PARAMS
        }
    scales = jax.tree.map(lambda p: p.size / 4, PARAMS)
    options = HYPERPARAMS | dict(mask=only_matrices(PARAMS), lr_scale=scales)
    tx = jfa.fused_adamw(**options)
    groups = optax.multi_transform({"slow": tx, "fast": tx}, all_labels)
    expected, _ = jfa.step(tx, GRADS, tx.init(PARAMS), PARAMS)
    params, _ = jfa.step(groups, GRADS, groups.init(PARAMS), PARAMS)
    assert_same_bits(params, expected)
    report = jfa.decay_report(groups, PARAMS)
    assert report == jfa.decay_report(tx, PARAMS)
    assert list(report.lr_scales.values()) == jax.tree.leaves(scales)


# --- Frozen and integer leaves --------------------------------------------------------

LORA = {
    "w": np.float32([[-0.0, 1e-40, np.inf]] * 4),
    "table": np.arange(4, dtype=np.int8),
    "steps": np.int32(3),
    "a": np.ones((4, 2), np.float32),
    "b": np.ones((2, 3), jnp.bfloat16),
}
TRAINED = {name: name in ("a", "b") for name in LORA}


def lora_optimizers():
    def frozen(params):
        return {name: not trained for name, trained in TRAINED.items()}

    tx = jfa.fused_adamw(1e-2, max_grad_norm=1.0, master_weights=True)
    return {
        "multi_transform": optax.multi_transform(
            {True: tx, False: optax.set_to_zero()}, TRAINED
        ),
        "masked": optax.chain(
            optax.masked(tx, TRAINED), optax.masked(optax.set_to_zero(), frozen)
        ),
    }


def lora_step(tx):
    def step(params, state, grads):
        # What jax.grad(..., allow_int=True) gives of integers.
        float0 = {
            name: np.zeros(np.shape(x), jax.dtypes.float0)
            for name, x in params.items()
            if not jnp.issubdtype(x.dtype, jnp.floating)
        }
        return jfa.step(tx, grads | float0, state, params)

    return jax.jit(step, donate_argnums=(0, 1))


def lora_arguments(tx):
    params = jax.tree.map(jnp.array, LORA)
    grads = {name: jnp.ones_like(params[name]) for name in ("w", "a", "b")}
    return params, tx.init(params), grads


@pytest.mark.parametrize("name", ["multi_transform", "masked"])
def test_frozen_leaves_have_no_state_and_keep_their_bits(name):
    tx = lora_optimizers()[name]
    params, state, grads = lora_arguments(tx)
    (ours,) = [
        x
        for x in jax.tree.leaves(state, is_leaf=is_state)
        if isinstance(x, jfa.FusedAdamWState)
    ]
    sizes = {x.size for x in jax.tree.leaves(ours)}
    assert sizes == {1, 8, 6}  # of scalars and of what is trained
    params, state = lora_step(tx)(params, state, grads)
    for leaf, trained in TRAINED.items():
        same = bits(params[leaf]) == bits(LORA[leaf])
        assert same.all() if not trained else not same.any()


def is_state(node):
    return isinstance(node, jfa.FusedAdamWState)


@pytest.mark.parametrize("name", ["multi_transform", "masked"])
def test_frozen_leaves_are_not_in_the_call_and_cost_nothing(name):
    tx = lora_optimizers()[name]
    arguments = lora_arguments(tx)
    step = lora_step(tx).lower(*arguments)
    compiled = step.compile()
    assert copies(compiled) == 0
    assert "add(" not in compiled.as_text()
    # The same call as of the trained leaves alone.
    alone = jfa.fused_adamw(1e-2, max_grad_norm=1.0, master_weights=True)
    params, _, grads = (
        {k: x[k] for k in "ab"} if isinstance(x, dict) else x for x in arguments
    )
    of_alone = jax.jit(lambda p, s, g: jfa.step(alone, g, s, p)).lower(
        params, alone.init(params), grads
    )
    assert num_operands(step) == num_operands(of_alone) != []


def num_operands(lowered):
    """Of each update call."""
    lines = [x for x in lowered.as_text().splitlines() if "adamw_update_v2" in x]
    return [x.split("(")[1].split(")")[0].count("%") for x in lines]


def test_float0_of_a_trained_leaf_is_refused():
    params = {"w": jnp.ones(2)}
    grads = {"w": np.zeros(2, jax.dtypes.float0)}
    with pytest.raises(TypeError, match=r"grads\['w'\].*float0"):
        jfa.step(OURS, grads, OURS.init(params), params)
