"""What a checkpoint tells of itself, in JSON, and what of it differs from a new run."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.tree_util import keystr, tree_leaves_with_path

from jax_fused_adamw._checksum import checksum
from jax_fused_adamw._loss_scale import DynamicLossScale
from jax_fused_adamw._record_leaves import (
    by_path,
    description,
    is_empty,
    is_same_number,
)
from jax_fused_adamw._state import states_in
from jax_fused_adamw._transform import FusedAdamW

_VERSION = 1
_PARTS = {"version": int, "options": dict, "loss_scales": dict, "leaves": dict}


def optimizers(tx: Any) -> dict[str, FusedAdamW]:
    """Those of a record by name; of one alone, ``tx``."""
    named = tx if isinstance(tx, Mapping) else {} if tx is None else {"tx": tx}
    for name, optimizer in named.items():
        where = f"tx[{name!r}]" if isinstance(tx, Mapping) else "tx"
        if not isinstance(name, str):
            raise TypeError(
                f"TrainingRecord: expected names of optimizers as strings, got {where}"
            )
        if not isinstance(optimizer, FusedAdamW):
            raise TypeError(
                f"TrainingRecord: expected {where} as jfa.fused_adamw made it, got "
                f"{type(optimizer).__name__}; of a wrapper (accumulate, chain) "
                "pass the one inside, of inject_hyperparams one with its options"
            )
    return dict(named)


def check_states(named: Mapping[str, FusedAdamW], tree: Any) -> None:
    """Raises where the options of optimizers would stand beside no state of theirs."""
    found = len(states_in(tree))
    if found < len(named):
        raise ValueError(
            f"TrainingRecord: expected the state of each optimizer of tx, "
            f"{list(named)}, and the tree has {found} FusedAdamWState: save what "
            "tx.init and the step returned with the rest (of Flax nnx, "
            "optimizer.opt_state), or make the record without tx"
        )


def check_writable(folder: str) -> None:
    """Raises PermissionError for a folder that is there and cannot be written to.

    orbax finds out in the background, and keeps the process for minutes more.
    """
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise PermissionError(
            f"TrainingRecord: {folder} cannot be written to: mount it for writing, or "
            "make a record in another folder"
        )


def about(named: Mapping[str, FusedAdamW], tree: Any) -> dict[str, Any]:
    """All that is saved beside a tree."""
    return {
        "version": _VERSION,
        "options": {name: tx.options() for name, tx in named.items()},
        "loss_scales": _loss_scales(tree),
        "leaves": _leaves(tree),
        "checksums": checksums(by_path(tree)),
    }


def checksums(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Of all that are not empty; raises where the replicas of one differ."""
    found = {name: checksum(x) for name, x in leaves.items() if not is_empty(x)}
    numbers = jax.device_get({name: _of_devices(x) for name, x in found.items()})
    unique = {name: {*map(int, of_devices)} for name, of_devices in numbers.items()}
    differing = [name for name, its_numbers in unique.items() if len(its_numbers) > 1]
    first = {name: min(its_numbers) for name, its_numbers in unique.items()}
    differing += _differ_between_processes(first, leaves)
    if differing:
        raise ValueError(
            f"TrainingRecord: leaf {differing[0]} should be the same on all of its "
            "devices, by its sharding, and is not, so that no checkpoint can hold it. "
            "Inside of shard_map psum the gradients; with check_vma=True it finds "
            "what differs"
        )
    return first


def _of_devices(number: Any) -> list[Any]:
    """What each device of this process has found."""
    if not isinstance(number, jax.Array):
        return [number]
    return [shard.data for shard in number.addressable_shards]


def _differ_between_processes(
    numbers: Mapping[str, int], leaves: Mapping[str, Any]
) -> list[str]:
    shared = [name for name in numbers if _is_on_all_processes(leaves[name])]
    if not shared:
        return []
    mine = np.array([numbers[name] for name in shared], np.uint32)
    everyones = multihost_utils.process_allgather(mine)
    differ = (everyones != everyones[:1]).any(axis=0)
    return [name for name, differs in zip(shared, differ, strict=True) if differs]


def _is_on_all_processes(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return False
    devices: Any = leaf.sharding.device_set
    processes = {device.process_index for device in devices}
    return len(processes) == jax.process_count()


def check_bits(saved: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raises for leaves with other bits than were saved, where it has checksums."""
    expected = saved.get("checksums")
    if expected is None:
        return
    found = checksums(leaves)
    if expected.keys() != found.keys():
        raise ValueError("its checksums are not those of its leaves")
    for name, number in found.items():
        if number != expected[name]:
            raise ValueError(
                f"the bits of leaf {name} are not those that were saved, by its "
                "checksum"
            )


def check_parts(saved: Any) -> None:
    """Raises for what :func:`about` has not returned."""
    if saved.get("version", _VERSION) != _VERSION:
        return  # of which nothing else is known
    for name, kind in _PARTS.items():
        if not isinstance(saved.get(name), kind):
            raise ValueError(f"it has no {name!r}")
    unknown = saved.keys() - _PARTS.keys() - {"checksums"}
    if unknown:
        raise ValueError(f"it has {min(unknown)!r}, which this version does not know")


def check(
    saved: Mapping[str, Any],
    named: Mapping[str, FusedAdamW],
    is_one: bool,
    like: Any,
    changed: Iterable[str],
) -> tuple[str, ...]:
    """Raises for what differs; returns what could not be compared."""
    if saved["version"] != _VERSION:
        raise ValueError(
            f"TrainingRecord: the checkpoint has version {saved['version']}, this "
            f"release knows {_VERSION}; restore with the release that saved it"
        )
    prefixes = {name: "" if is_one else f"{name}." for name in named}
    by_prefix = _by_prefix(changed, prefixes.values())
    _compare_keys("optimizer", saved["options"], named)
    not_compared = []
    for name, prefix in prefixes.items():
        options = saved["options"][name]
        try:
            found = named[name].check_options(options, by_prefix[prefix])
        except ValueError as error:
            raise ValueError(f"TrainingRecord: optimizer {name!r}: {error}") from None
        not_compared += [prefix + option for option in found]
    _compare("leaf", saved["leaves"], _leaves(like), "dtype and shape", is_same_number)
    scales = _loss_scales(like)
    _compare("loss scale", saved["loss_scales"], scales, "options")
    return tuple(not_compared)


def _by_prefix(changed: Iterable[str], known: Iterable[str]) -> dict[str, list[str]]:
    """Names of options by what stands before them, that of an optimizer and a dot."""
    found: dict[str, list[str]] = {prefix: [] for prefix in known}
    for name in (changed,) if isinstance(changed, str) else tuple(changed):
        option = name.rpartition(".")[2]
        prefix = name.removesuffix(option)
        if prefix not in found:
            raise ValueError(
                f"TrainingRecord: changed names {name!r}; expected an option's name "
                f"after one of {list(found)}, as this record's tx is"
            )
        found[prefix].append(option)
    return found


def _leaves(tree: Any) -> dict[str, Any]:
    """Dtype and shape of every leaf, by its path."""
    return {name: description(leaf) for name, leaf in by_path(tree).items()}


def _loss_scales(tree: Any) -> dict[str, Any]:
    """The static options of every loss scale in a tree, by its path."""

    def is_scale(node: Any) -> bool:
        return isinstance(node, DynamicLossScale)

    found = tree_leaves_with_path(tree, is_leaf=is_scale)
    return {keystr(path): x.static_options() for path, x in found if is_scale(x)}


def _compare_keys(kind: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    missing = [name for name in now if name not in saved]
    extra = [name for name in saved if name not in now]
    if missing or extra:
        told = (
            f"has no {kind} {missing[0]!r}" if missing else f"has {kind} {extra[0]!r}"
        )
        also = "this run has" if missing else "this run has not"
        raise ValueError(
            f"TrainingRecord: the checkpoint {told}, which {also}: restore into the "
            "structure and configuration that were saved"
        )


def _compare(
    kind: str,
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    what: str,
    also_same: Callable[[Any, Any], bool] = lambda old, new: False,
) -> None:
    """Raises for the first difference between dicts by path."""
    _compare_keys(kind, saved, now)
    for name, expected in now.items():
        if saved[name] != expected and not also_same(saved[name], expected):
            raise ValueError(
                f"TrainingRecord: {kind} {name} was saved with {what} {saved[name]}, "
                f"and here has {expected}: restore into what was saved, and convert "
                "then"
            )
