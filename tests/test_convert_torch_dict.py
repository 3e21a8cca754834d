"""What is no state_dict of PyTorch's AdamW is refused, and told why."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from test_convert_torch import convert, run, state_dict_at

import jax_fused_adamw as jfa

__all__ = ["run"]  # a fixture


def test_other_state_dicts_are_refused(run):
    good = state_dict_at(run, "saved")
    with pytest.raises(ValueError, match="param_groups"):
        convert(run, good["state"])
    with pytest.raises(ValueError, match="of 1 parameters, params has 2"):
        convert(run, good | {"param_groups": run[0][:1]})
    coupled = [group | {"decoupled_weight_decay": False} for group in run[0]]
    with pytest.raises(ValueError, match="torch.optim.Adam, whose"):
        convert(run, good | {"param_groups": coupled})
    half = good["state"] | {1: good["state"][1] | {"step": np.float32(2.0)}}
    with pytest.raises(ValueError, match=r"kernel.* is at step 3.0"):
        convert(run, good | {"state": half})
    with pytest.raises(ValueError, match=r"bias.* is at step None"):
        convert(run, good | {"state": {0: good["state"][0]}})
    without = {i: {"exp_avg": x["exp_avg"]} for i, x in good["state"].items()}
    with pytest.raises(ValueError, match=r"no step of params\['bias'\]"):
        convert(run, good | {"state": without})
    lacking = {i: {"step": x["step"]} for i, x in good["state"].items()}
    with pytest.raises(ValueError, match=r"no exp_avg of params\['bias'\]"):
        convert(run, good | {"state": lacking})


PARAMS = {"b": jnp.ones(2), "w": jnp.ones((3, 2))}
TX = jfa.fused_adamw(1e-3, weight_decay=1e-2)


def good_dict():
    state = {
        i: {"step": np.float32(3), "exp_avg": 0.1 * p, "exp_avg_sq": 0.01 * p}
        for i, p in enumerate((np.ones(2), np.ones((3, 2))))
    }
    group = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    return {"state": state, "param_groups": [group | {"params": [0, 1]}]}


def test_the_good_dict_is_taken():
    state = jfa.from_torch(good_dict(), PARAMS, TX)
    assert state.count == 3
    np.testing.assert_allclose(state.mu["w"], 0.1, rtol=1e-7)
    arrays = good_dict()  # as np.load gives lists
    arrays["param_groups"][0] |= {
        "params": np.arange(2),
        "betas": np.array([0.9, 0.999]),
    }
    assert_same_bits(jfa.from_torch(arrays, PARAMS, TX), state)


def with_entry(**changes):
    def spoil(state_dict):
        state_dict["state"][1].update(changes)

    return spoil


def in_all(**changes):
    def spoil(state_dict):
        for entry in state_dict["state"].values():
            entry.update(changes)

    return spoil


def with_group(**changes):
    return lambda state_dict: state_dict["param_groups"][0].update(changes)


def without(name):
    return lambda state_dict: state_dict["param_groups"][0].pop(name)


def with_string_keys(state_dict):
    state_dict["state"] = {str(k): x for k, x in state_dict["state"].items()}


WRONG = {
    "keys of JSON": (
        with_string_keys,
        r"keys \(2, as '0'\) .*\. PyTorch's .* integers.*int",
    ),
    "a state of nobody": (
        lambda x: x["state"].update({7: x["state"][0]}),
        r"keys \(1, as 7\) that no params of the param_groups has",
    ),
    "state is a list": (
        lambda x: x.update(state=list(x["state"].values())),
        "state must be a dict, got list",
    ),
    "an entry is a list": (
        lambda x: x["state"].update({1: [1, 2]}),
        r"the state of params\['w'\] must be a dict, got list",
    ),
    "groups are a dict": (
        lambda x: x.update(param_groups={0: x["param_groups"][0]}),
        "param_groups must be a list, got dict",
    ),
    "a group is a list": (
        lambda x: x.update(param_groups=[[0, 1]]),
        r"param_groups\[0\] must be a dict, got list",
    ),
    **{
        f"without {name}": (without(name), rf"param_groups\[0\] lacks '{name}'")
        for name in ("params", "lr", "betas", "eps", "weight_decay")
    },
    "params is a number": (with_group(params=2), r"params of param_groups\[0\] is 2"),
    "a parameter twice": (with_group(params=[0, 0]), "the parameter 0 twice"),
    "a list as number": (
        with_group(params=[0, [1]]),
        r"params of param_groups\[0\] has \[1\], expected a number",
    ),
    "a row of numbers": (
        with_group(params=np.arange(2)[:, None]),
        r"params of param_groups\[0\] has array\(\[0\]\)",
    ),
    "complex": (
        with_entry(exp_avg=np.full((3, 2), 1j)),
        r"exp_avg of params\['w'\] \(it is complex\)",
    ),
    "one beta": (with_group(betas=(0.9,)), r"betas .* is \(0.9,\), expected two"),
    "betas None": (with_group(betas=None), r"betas of param_groups\[0\] is None"),
    "lr None": (with_group(lr=None), r"learning_rate of param_groups\[0\] is None"),
    "two lr": (with_group(lr=np.ones(2)), r"learning_rate of .* has shape \(2,\)"),
    "negative lr": (with_group(lr=-1e-3), "learning_rate is -0.001 in .* 0.001 here"),
    "huge lr": (with_group(lr=1e300), r"learning_rate is 1e\+300 in .* 0.001 here"),
    "endless lr": (with_group(lr=10**400), "cannot read learning_rate of param_groups"),
    "NaN as eps": (with_group(eps=np.nan), "eps is nan in .* and 1e-08 here"),
    "large betas": (with_group(betas=(1.9, 2.0)), "b1 is 1.9 in .*; b2 is 2.0 in"),
    "a negative step": (in_all(step=-3.0), "is at step -3.0, expected 0 to 2147483647"),
    "a huge step": (in_all(step=2.0**33), r"at step 8589934592.0, expected 0 to"),
    "half a step": (in_all(step=1.5), "is at step 1.5 .*expected one whole number"),
    "a step of NaN": (in_all(step=np.nan), "is at step nan .*expected one whole"),
    "a step in a list": (
        in_all(step=[3.0]),
        r"step of .* has shape \(1,\), .* a number",
    ),
    "no exp_avg": (
        lambda x: x["state"][1].pop("exp_avg"),
        r"no exp_avg of params\['w'",
    ),
    "exp_avg None": (with_entry(exp_avg=None), r"exp_avg of params\['w'\] is None"),
    "negative squares": (
        with_entry(exp_avg_sq=np.full((3, 2), -0.5)),
        r"exp_avg_sq of params\['w'\] has negative elements, down to -0.5",
    ),
    "of NAdam": (
        with_entry(mu_product=0.9),
        r"the state of params\['w'\] has 'mu_product', .* another optimizer",
    ),
}


@pytest.mark.parametrize(("spoil", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told(spoil, told):
    state_dict = good_dict()
    spoil(state_dict)
    with pytest.raises((TypeError, ValueError), match=f"^from_torch: .*{told}"):
        jfa.from_torch(state_dict, PARAMS, TX)


def test_leaves_of_one_joined_name_need_an_order():
    """With paths, both would be the first of them."""
    params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    state = TX.init(params)
    state = state._replace(mu={"a/b": jnp.full(2, 3.0), "a": {"b": jnp.full(2, 5.0)}})
    told = r"params\['a'\]\['b'\] and params\['a/b'\] are both 'a/b' in paths"
    paths = ["a/b", "a/b"]
    with pytest.raises(ValueError, match=f"^to_torch: {told}"):
        jfa.to_torch(state, params, TX, paths=paths)
    state_dict = jfa.to_torch(state, params, TX)
    got = [state_dict["state"][i]["exp_avg"][0] for i in range(2)]
    assert got == [5.0, 3.0]  # in the order of jax.tree.leaves
    assert_same_bits(jfa.from_torch(state_dict, params, TX).mu, state.mu)
    with pytest.raises(ValueError, match=f"^from_torch: {told}"):
        jfa.from_torch(state_dict, params, TX, paths=paths)


LAYERS = {str(i): jnp.full(2, float(i)) for i in range(12)}  # sorted: 0, 1, 10, 11, 2


def with_names(names, paths=None, params=LAYERS):
    """Moments are the layers' numbers, and PyTorch's order is that of the numbers."""
    state = {
        i: {"step": np.float32(3), "exp_avg": x, "exp_avg_sq": x}
        for i, x in enumerate(np.full(2, float(i)) for i in range(len(names)))
    }
    group = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    numbers = list(range(len(names)))
    half = len(names) // 2
    groups = [
        group | {"params": numbers[part], "param_names": names[part]}
        for part in (slice(half), slice(half, None))
    ]
    state_dict = {"state": state, "param_groups": groups}
    return jfa.from_torch(state_dict, params, TX, paths=paths)


def test_param_names_tell_the_order():
    assert_same_bits(with_names(list(LAYERS)).mu, LAYERS)
    dotted = [f"net.{name}" for name in LAYERS]
    for params in ({"net": LAYERS}, dict(zip(dotted, LAYERS.values()))):
        assert_same_bits(with_names(dotted, params=params).nu, params)


def test_param_names_of_another_spelling():
    others = [f"{name}.weight" for name in LAYERS]
    assert_same_bits(with_names(others, paths=list(LAYERS)).mu, LAYERS)
    as_list = list(LAYERS.values())  # whose order is nobody's but the caller's
    assert_same_bits(with_names(others, params=as_list).mu, as_list)
    alone = {"w": jnp.zeros(2)}
    assert_same_bits(with_names(["0.weight"], params=alone).mu, alone)


@pytest.mark.parametrize(
    "names, paths, told",
    [
        ([f"{i}.weight" for i in range(12)], None, r"'0.weight', .*and more.*paths="),
        (list(LAYERS), sorted(LAYERS), r"paths\[2\] is '10', .* there is '2'"),
        (list(LAYERS), [0, *"abcdefghijk"], r"paths has 0, which is no parameter"),
        ("abcdefghijkl", None, "param_names of param_groups.0. is 'abcdef'"),
    ],
    ids=["others", "another order", "no paths", "a string"],
)
def test_param_names_that_leave_the_order_open(names, paths, told):
    with pytest.raises(ValueError, match=f"^from_torch: .*{told}"):
        with_names(names, paths)


def test_paths_that_swap_layers():
    names = [f"{name}.weight" for name in LAYERS]
    params = dict(zip(names, LAYERS.values()))
    with pytest.raises(ValueError, match=r"paths\[0\] is '11.weight', .*'0.weight'"):
        with_names(names, names[::-1], params)


def test_param_names_of_another_number():
    state_dict = good_dict()
    state_dict["param_groups"][0]["param_names"] = ["b"]
    with pytest.raises(ValueError, match="expected a name of each of its 2 params"):
        jfa.from_torch(state_dict, PARAMS, TX)
    state_dict["param_groups"][0]["param_names"] = ["w", "b"]
    with pytest.raises(ValueError, match=r"exp_avg of params.*b.* has shape \(3, 2\)"):
        jfa.from_torch(state_dict, PARAMS, TX)
