"""What an optimizer was told, saved as JSON and compared at restore."""

import collections
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fused_adamw as jfa

# What changes no number, and what is not built.
NOT_RECORDED = {"alias", "in_place", "bucket_bytes", "implementation"}
NOT_RECORDED |= {"packed_state"}
# Of every recorded option a value that is not its default.
OTHER = {
    "learning_rate": 2e-3,
    "b1": 0.8,
    "b2": 0.99,
    "eps": 1e-6,
    "eps_root": 1e-7,
    "mu_dtype": "float16",
    "weight_decay": 0.1,
    "mask": {"w": True, "b": False},
    "lr_scale": {"w": 0.5, "b": 1.0},
    "nesterov": True,
    "amsgrad": True,
    "maximize": True,
    "nu_dtype": "bfloat16",
    "master_weights": True,
    "stochastic_rounding": "params",
    "seed": 7,
    "max_grad_norm": 1.0,
    "max_grad_value": 2.0,
    "skip_nonfinite": True,
    "ema_decay": 0.9,
    "compute_dtype": "bfloat16",
}
IMPLIED = {
    "max_grad_norm": ["skip_nonfinite"],
    "mu_dtype": ["stochastic_rounding", "seed"],
    "nu_dtype": ["stochastic_rounding", "seed"],
    "stochastic_rounding": ["seed"],
}


def make(**options):
    return jfa.fused_adamw(**({"learning_rate": 1e-3} | options))


def saved(**options):
    return json.loads(json.dumps(make(**options).options(), allow_nan=False))


def test_every_argument_is_recorded_or_decides_nothing():
    arguments = set(inspect.signature(jfa.fused_adamw).parameters)
    assert set(saved()) - {"version"} == arguments - NOT_RECORDED == set(OTHER)
    for options in (dict(alias=False), dict(in_place=True), dict(bucket_bytes=1)):
        assert make(**options).options() == make().options()


@pytest.mark.parametrize("name", OTHER)
def test_each_option_round_trips_and_a_change_is_refused_by_name(name):
    # A seed is recorded where something is rounded by it.
    base = dict(stochastic_rounding="params") if name == "seed" else {}
    tx = make(**base, **{name: OTHER[name]})
    record = saved(**base, **{name: OTHER[name]})
    value = OTHER[name]
    if isinstance(value, dict):
        value = {f"[{key!r}]": value[key] for key in sorted(value)}
    assert record == tx.options() and record[name] == value
    assert tx.check_options(record) == ()
    for refuses, given in ((tx, saved(**base)), (make(**base), record)):
        with pytest.raises(ValueError, match=rf"differ:.*\b{name} was") as error:
            refuses.check_options(given)
        assert repr(value) in str(error.value)
    changed = [name, *IMPLIED.get(name, [])]
    if name != "amsgrad":
        assert tx.check_options(saved(**base), changed=changed) == ()


def test_what_acts_is_recorded():
    assert saved(max_grad_norm=1.0)["skip_nonfinite"] is True
    assert saved()["stochastic_rounding"] is False  # of float32 moments
    assert saved(seed=5)["seed"] is None
    rounded = dict(mu_dtype=jnp.bfloat16)
    assert saved(**rounded)["stochastic_rounding"] is True
    assert saved(**rounded, stochastic_rounding=False)["stochastic_rounding"] is False
    assert saved(**rounded, seed=jnp.uint32(5))["seed"] == 5
    assert saved(amsgrad="optax")["amsgrad"] == "optax"
    assert saved(learning_rate=1) == saved(learning_rate=jnp.float32(1.0))
    assert saved(learning_rate=np.float32(0.1))["learning_rate"] == float(
        np.float32(0.1)
    )
    assert saved(max_grad_norm=np.inf)["max_grad_norm"] == "inf"


def test_the_two_kinds_of_amsgrad_differ():
    with pytest.raises(ValueError, match="amsgrad was True and is 'optax'"):
        make(amsgrad="optax").check_options(saved(amsgrad=True))
    with pytest.raises(ValueError, match="changed names 'amsgrad'"):
        make(amsgrad="optax").check_options(saved(amsgrad=True), changed="amsgrad")


ROUNDED = ["learning_rate", "eps", "eps_root", "weight_decay"]
ROUNDED += ["max_grad_norm", "max_grad_value"]
EXACT = ["b1", "b2", "ema_decay", "lr_scale"]


@pytest.mark.parametrize("name", ROUNDED + EXACT)
def test_numbers_are_compared_as_steps_use_them(name):
    """And steps do use them so: the same parameters, or others."""
    number = 0.999 if name in ("b1", "b2", "ema_decay") else 0.1
    values = {"one": number, "rounded": np.float32(number), "other": number + 1e-7}

    def params_after(value):
        tx = make(**dict(learning_rate=0.3, eps=1e-3) | {name: value})
        params = {"w": jnp.linspace(-1.0, 1.0, 1001)}
        state = tx.init(params)
        for _ in range(3):
            params, state = tx.step({"w": 0.3 * params["w"]}, state, params)
        return params["w"], state.ema["w"] if state.ema else params["w"]

    one, rounded, other = (params_after(x) for x in values.values())
    acts_the_same = all(map(np.array_equal, one, rounded))
    assert acts_the_same == (name in ROUNDED)
    assert not all(map(np.array_equal, one, other))
    for now, then in (("one", "rounded"), ("rounded", "one")):
        tx, record = make(**{name: values[now]}), saved(**{name: values[then]})
        if name in ROUNDED:
            assert tx.check_options(record) == ()
            with jax.enable_x64(True), pytest.raises(ValueError, match=f"{name} was"):
                tx.check_options(record)
        else:
            with pytest.raises(ValueError, match=f"{name} was .*{number}"):
                tx.check_options(record)
    with pytest.raises(ValueError, match=f"{name} was"):
        make(**{name: values["other"]}).check_options(saved(**{name: values["one"]}))


def test_a_scaled_learning_rate_is_compared_exactly():
    """What a leaf uses is the product, rounded once."""
    record = saved(learning_rate=0.1, lr_scale=0.3)
    assert np.float32(0.1 * 0.3) != np.float32(float(np.float32(0.1)) * 0.3)
    with pytest.raises(
        ValueError, match="learning_rate was 0.1 and is 0.1000000014901"
    ):
        make(learning_rate=np.float32(0.1), lr_scale=0.3).check_options(record)


def test_numbers_beyond_float32_are_one_infinity():
    assert make(max_grad_norm=1e300).check_options(saved(max_grad_norm=1e200)) == ()


@pytest.mark.parametrize(
    "given, told",
    [
        (json.dumps(saved()), "got str; json.loads makes one of it"),
        (b"{}", "got bytes; json.loads"),
        ([saved()], "got list; pass None where there are none"),
        (3, "got int"),
    ],
    ids=["str", "bytes", "list", "number"],
)
def test_what_is_no_dict_is_refused(given, told):
    with pytest.raises(TypeError, match=f"saved options must be a dict.*{told}"):
        make().check_options(given)


def test_what_cannot_be_compared_is_told():
    schedule = optax.linear_schedule(1e-3, 0.0, 10)
    tx = make(learning_rate=schedule, mask=lambda params: params)
    record = saved(learning_rate=schedule, mask=lambda params: params)
    assert record["learning_rate"] == "schedule" and record["mask"] == "function"
    assert tx.check_options(record) == ("learning_rate", "mask")
    assert tx.check_options(record, changed=["mask"]) == ("learning_rate",)
    assert make(learning_rate=schedule, mask={"w": True, "b": False}).check_options(
        record
    ) == ("learning_rate", "mask")
    with pytest.raises(ValueError, match="learning_rate was 'schedule' and is 0.001"):
        make(mask=lambda params: params).check_options(record)
    with pytest.raises(ValueError, match="mask was 'function' and is None"):
        make(learning_rate=schedule).check_options(record)


def test_traced_values_cannot_be_compared():
    told = []

    @jax.jit
    def trace(b1):
        told.append(make(b1=b1).options()["b1"])
        told.append(make(b1=b1).check_options(saved()))
        return b1

    trace(0.9)
    assert told == ["traced", ("b1",)]


def test_an_older_record_has_newer_options_off():
    record = saved()
    for name in ("max_grad_norm", "max_grad_value", "skip_nonfinite"):
        del record[name]
    record["version"] = 1
    assert make().check_options(record) == ()
    with pytest.raises(ValueError, match="max_grad_norm was None and is 1.0"):
        make(max_grad_norm=1.0).check_options(record)
    with pytest.raises(ValueError, match="skip_nonfinite was False and is True"):
        make(skip_nonfinite=True).check_options(record)


def test_without_a_record_everything_optional_is_off():
    unknown = ("learning_rate", "b1", "b2", "eps", "weight_decay")
    assert make(b2=0.5).check_options(None) == unknown
    with pytest.raises(ValueError, match="ema_decay was None and is 0.5"):
        make(ema_decay=0.5).check_options(None)


@pytest.mark.parametrize("version", [3, 0, "2", None, True, 1.5, 3.0])
def test_other_versions_are_refused(version):
    with pytest.raises(ValueError, match=f"version {version!r}"):
        make().check_options(saved() | {"version": version})


@pytest.mark.parametrize("version", [2.0, np.int64(2), np.float32(1)])
def test_versions_may_be_numbers_of_other_types(version):
    assert make().check_options(saved() | {"version": version}) == ()


FULL = {"body": {"w": True, "wide": True}, "head": [False]}
ALIKE = {
    "mask is for all": (dict(mask=True), {}),
    "all of a mask": (dict(mask={"a": True, "b": [True]}), {}),
    "scale is one": (dict(lr_scale=1.0), {}),
    "scales are one": (dict(lr_scale={"a": 1, "b": [1.0]}), {}),
    "prefix": (dict(mask={"body": True, "head": False}), dict(mask=FULL)),
    "mixed": (
        dict(mask={"body": {"w": True, "wide": True}, "head": False}),
        dict(mask={"body": True, "head": [False]}),
    ),
}
UNLIKE = {
    "no decay": (dict(mask=False), {}),
    "one without": (dict(mask={"a": True, "b": [False]}), {}),
    "scale": (dict(lr_scale={"a": 1.0, "b": 0.5}), {}),
    "another prefix": (dict(mask={"body": True, "head": True}), dict(mask=FULL)),
    "part of a prefix": (dict(mask={"body": False, "head": False}), dict(mask=FULL)),
    "lacking": (dict(mask={"body": True}), dict(mask=FULL)),
    "other paths": (dict(mask={"a": True}), dict(mask={"b": True})),
    "half of a name": (
        dict(mask=collections.namedtuple("T", ["w"])(True)),
        dict(mask=collections.namedtuple("T", ["wide"])(True)),
    ),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_trees_of_one_effect_are_the_same(one, other):
    assert make(**one).check_options(saved(**other)) == ()
    assert make(**other).check_options(saved(**one)) == ()


@pytest.mark.parametrize(("one", "other"), UNLIKE.values(), ids=UNLIKE)
def test_trees_of_other_effects_are_refused(one, other):
    for now, then in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=f"{next(iter(one))} was"):
            make(**now).check_options(saved(**then))


def test_no_remedy_is_named_that_is_refused():
    with pytest.raises(ValueError, match="amsgrad was") as error:
        make(amsgrad="optax").check_options(saved(amsgrad=True))
    assert "changed=" not in str(error.value)
    with pytest.raises(ValueError, match="to differ, which amsgrad never may"):
        make(amsgrad="optax", b1=0.5).check_options(saved(amsgrad=True))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="saved options name 'momentum'"):
        make().check_options(saved() | {"momentum": 1})
    with pytest.raises(ValueError, match="changed names 'lr'"):
        make().check_options(saved(), changed=["lr"])
    assert make(b1=0.5).check_options(saved(), changed="b1") == ()


def test_options_of_another_state_are_refused_by_the_step():
    """`changed` lets an option differ, not a state that does not fit."""
    params = {"w": jnp.ones(2)}
    tx = make(ema_decay=0.5)
    assert tx.check_options(saved(), changed=["ema_decay"]) == ()
    with pytest.raises(ValueError, match="no ema"):
        tx.step(params, make().init(params), params)
