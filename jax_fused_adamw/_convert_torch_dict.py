"""A ``state_dict`` of PyTorch's AdamW, read with care: it may come from anywhere."""

import collections
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_fused_adamw import _checks

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"}

# What our options say where they are PyTorch's rule, whatever its dict says.
ONLY_OURS = {"eps_root": 0.0, "nesterov": False}

_NEEDED = ("params", "lr", "betas", "eps", "weight_decay")
_SCALAR = jax.ShapeDtypeStruct((), np.float32)
_MAX_COUNT = np.iinfo(np.int32).max


def groups_of(state_dict: Any, num_params: int) -> Iterator[Mapping[str, Any]]:
    """The ``param_groups``, checked."""
    if not isinstance(state_dict, Mapping) or not (
        {"state", "param_groups"} <= state_dict.keys()
    ):
        raise ValueError(
            "fused_adamw: expected what torch.optim.AdamW.state_dict() returns, with "
            "'state' and 'param_groups'"
        )
    groups = state_dict["param_groups"]
    if not isinstance(groups, Sequence):
        raise TypeError(
            f"fused_adamw: param_groups must be a list, got {type(groups).__name__}"
        )
    for number, group in enumerate(groups):
        _check_group(f"param_groups[{number}]", group)
    given = [number for group in groups for number in group["params"]]
    twice = [x for x, times in collections.Counter(given).items() if times > 1]
    if twice:
        raise ValueError(
            f"fused_adamw: the param_groups have the parameter {twice[0]!r} twice; "
            "expected each number once"
        )
    if len(given) != num_params:
        raise ValueError(
            f"fused_adamw: state_dict is of {len(given)} parameters, params has "
            f"{num_params} leaves; a tied weight is one parameter there, and what the "
            "optimizer did not get is none"
        )
    _check_numbers(state_dict["state"], given)
    yield from groups


def _check_group(name: str, group: Any) -> None:
    if not isinstance(group, Mapping):
        raise TypeError(
            f"fused_adamw: {name} must be a dict, got {type(group).__name__}"
        )
    missing = [key for key in _NEEDED if key not in group]
    if missing:
        raise ValueError(
            f"fused_adamw: {name} lacks {missing[0]!r}; expected what "
            f"torch.optim.AdamW.state_dict() has, {list(_NEEDED)} and more"
        )
    params, betas = group["params"], group["betas"]
    if not isinstance(params, (Sequence, np.ndarray)) or isinstance(params, str):
        raise TypeError(
            f"fused_adamw: params of {name} is {params!r}, expected a list of numbers"
        )
    for number in params:
        if not isinstance(number, (numbers.Integral, str)):
            raise TypeError(
                f"fused_adamw: params of {name} has {number!r}, expected a number, as "
                "state_dict() makes of each parameter"
            )
    if _array(betas, f"betas of {name}").shape != (2,):
        raise ValueError(
            f"fused_adamw: betas of {name} is {betas!r}, expected two numbers"
        )
    is_coupled = group.get("decoupled_weight_decay", True) is False
    if is_coupled and group["weight_decay"] != 0:
        raise ValueError(
            f"fused_adamw: {name} is of torch.optim.Adam, whose weight decay is added "
            "to the gradient; expected torch.optim.AdamW"
        )
    if not group.get("bias_correction", True):
        raise ValueError(
            f"fused_adamw: {name} has bias_correction=False, which has no equal here"
        )


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """PyTorch's names of the parameters, where it was told of them.

    Its optimizers save ``param_names`` if made from ``named_parameters()``, since 2.6.
    """
    if not all(group.get("param_names") is not None for group in groups):
        return None
    names: list[str] = []
    for number, group in enumerate(groups):
        given = group["param_names"]
        is_list = isinstance(given, (Sequence, np.ndarray))
        if not is_list or isinstance(given, str) or len(given) != len(group["params"]):
            raise ValueError(
                f"fused_adamw: param_names of param_groups[{number}] is {given!r}, "
                f"expected a name of each of its {len(group['params'])} params"
            )
        names += map(str, given)
    return names


def _check_numbers(state: Any, given: Sequence[Any]) -> None:
    """Raises ValueError for state that belongs to no parameter, and would be lost."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"fused_adamw: state must be a dict, got {type(state).__name__}"
        )
    known = set(given)
    unknown = [key for key in state if key not in known]
    if unknown:
        raise ValueError(
            f"fused_adamw: state has keys ({len(unknown)}, as {unknown[0]!r}) that "
            "no params of the param_groups has. PyTorch's keys are integers, of "
            "which JSON makes strings: state_dict['state'] = {int(key): x for key, x "
            "in state_dict['state'].items()} makes integers again. Remove what is of "
            "no parameter"
        )


def entries_of(
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    params: Any,
    order: list[int],
) -> dict[str, Any]:
    """PyTorch's state of each parameter, or None, by our names and in our order."""
    entries = []
    for group in groups:
        step = {"step": group["step"]} if "step" in group else {}  # apex keeps it here
        found = map(state.get, group["params"])
        entries += [None if entry is None else (step, entry) for entry in found]
    of_leaf = dict(zip(order, entries, strict=True))
    paths_and_params = jax.tree_util.tree_leaves_with_path(params)
    names = [_checks.leaf_name("params", path) for path, _ in paths_and_params]
    return {name: _entry(name, of_leaf[leaf]) for leaf, name in enumerate(names)}


def _entry(name: str, found: tuple[dict[str, Any], Any] | None) -> Any:
    if found is None:
        return None
    step, entry = found
    if not isinstance(entry, Mapping):
        raise TypeError(
            f"fused_adamw: the state of {name} must be a dict, got "
            f"{type(entry).__name__}"
        )
    known = ("step", *MOMENTS.values())
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise ValueError(
            f"fused_adamw: the state of {name} has {unknown[0]!r}, which AdamW's has "
            f"not and which would be lost; expected {list(known)}: is it of another "
            "optimizer?"
        )
    return step | dict(entry)


def count_of(entries: Mapping[str, Any]) -> int:
    """The step that all parameters are at; 0 where none has a state yet."""
    steps = {
        name: None if entry is None else float(moment(name, entry, "step", _SCALAR))
        for name, entry in entries.items()
    }
    if set(steps.values()) <= {None}:
        return 0
    told = {x: f"{name} is at step {x}" for name, x in steps.items()}
    (step, *others) = told
    if others or step is None or not step.is_integer():
        raise ValueError(
            f"fused_adamw: {', '.join(told.values())} (None: PyTorch has no state of "
            "it); expected one whole number, since fused_adamw has one count for all "
            "parameters. Keep those that were not trained out of both optimizers"
        )
    if not 0 <= step <= _MAX_COUNT:
        raise ValueError(
            f"fused_adamw: {told[step]}, expected 0 to {_MAX_COUNT}, as count is int32"
        )
    return int(step)


def moment(name: str, entry: Any, key: str, param: Any) -> np.ndarray:
    """An array of a parameter's state; zeros where there is none."""
    if entry is None:
        return np.zeros(param.shape, np.float32)
    if key not in entry:
        raise ValueError(f"fused_adamw: state_dict has no {key} of {name}")
    array = _array(entry[key], f"{key} of {name}")
    if array.shape != param.shape:
        advice = (
            ", a number"
            if key == "step"
            else ", the parameter's: transpose it as you did the weight, or give "
            "PyTorch's order of parameters in paths="
        )
        raise ValueError(
            f"fused_adamw: {key} of {name} has shape {array.shape}, expected "
            f"{param.shape}{advice}"
        )
    if key in (MOMENTS["nu"], MOMENTS["nu_max"]) and (array < 0).any():
        raise ValueError(
            f"fused_adamw: {key} of {name} has negative elements, down to "
            f"{array.min()}; a mean of squares has none: is it another array?"
        )
    return array


def _array(value: Any, what: str) -> np.ndarray:
    """Of float32 or float64: the former is not copied, as moments are large."""
    if value is None:  # of which NumPy makes a NaN
        raise TypeError(f"fused_adamw: {what} is None, expected numbers")
    try:
        array = np.asarray(value)
        if np.iscomplexobj(array):
            raise TypeError("it is complex")
        return array if array.dtype == np.float32 else np.asarray(array, np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"fused_adamw: NumPy cannot read {what} ({error}); pass "
            "tensor.detach().float().cpu()"
        ) from error


def hyperparams_of(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a checked group, by our names."""
    values = dict(zip(("b1", "b2"), group["betas"], strict=True)) | {
        "learning_rate": group["lr"],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }
    values = {key: _number(f"{key} of {name}", x) for key, x in values.items()}
    flags = {key: bool(group.get(key, False)) for key in ("amsgrad", "maximize")}
    return values | flags | ONLY_OURS


def _number(what: str, value: Any) -> float:
    array = _array(value, what)
    if array.shape != ():
        raise ValueError(
            f"fused_adamw: {what} has shape {array.shape}, expected a number"
        )
    return float(array)
