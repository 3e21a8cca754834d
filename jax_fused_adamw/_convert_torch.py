"""State of PyTorch's AdamW as ours, and back."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw import _checks
from jax_fused_adamw._convert import make_state, tell_what_stays
from jax_fused_adamw._convert_torch_dict import (
    MOMENTS,
    ONLY_OURS,
    count_of,
    entries_of,
    groups_of,
    hyperparams_of,
    moment,
    names_of,
)
from jax_fused_adamw._hyperparams import current_learning_rate
from jax_fused_adamw._leaf_options import resolve_lr_scale, resolve_mask
from jax_fused_adamw._options import Options, options_of
from jax_fused_adamw._saved_options import advice_on_changed, recorded
from jax_fused_adamw._state import FusedAdamWState, check_state, check_state_type


def from_torch(
    state_dict: Mapping[str, Any],
    params: Any,
    tx: Any,
    *,
    paths: Sequence[str] | None = None,
    changed: Iterable[str] = (),
) -> FusedAdamWState:
    """The ``state_dict()`` of a ``torch.optim.AdamW``, as a state of ours.

    Moments take the layout of their parameters: whatever you do to a weight on its way
    from PyTorch (``torch.nn.Linear`` keeps (out, in), a Flax kernel is (in, out)), do
    to ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq`` too. A square matrix that is
    not transposed cannot be noticed.

    The hyperparameters of the ``param_groups`` are compared with those of ``tx``,
    rounded to float32: lr, betas, eps, amsgrad, maximize and, for each parameter,
    weight_decay, which must be 0 where the ``mask`` of ``tx`` excludes it. A schedule
    is compared at its value for the next step, with a tolerance, since it runs in
    float32 and PyTorch's in float64: 1e-4 of the value and 1e-6 of the largest that it
    had so far. ``tx`` must be without ``nesterov`` and ``eps_root``, which PyTorch does
    not have. Its defaults are lr 1e-3 and weight_decay 1e-2, ours is weight_decay 1e-4;
    betas and eps are the same.

    Args:
      state_dict: with NumPy arrays, or what ``numpy.asarray`` takes: CPU tensors of
        float32 or float64. Of ``torch.optim.Adam`` only without weight decay; of
        apex's ``FusedAdam`` only with its defaults ``adam_w_mode`` and
        ``bias_correction``, of which the dict does not have the first.
      params: the parameters, as they are to be trained on here.
      tx: the :func:`fused_adamw` that is to go on. ``amsgrad=True`` is PyTorch's.
      paths: the parameter of each of PyTorch's numbers, in the order of its
        ``param_groups``: the keys on the way to a leaf of ``params``, joined by "/", as
        in ``"dense/kernel"``. None takes the order of ``jax.tree.leaves(params)``,
        which sorts the keys of dicts: PyTorch's order rarely is. Where the dict has
        ``param_names`` and they are our paths, with dots or "/" between keys, they give
        the order, and ``paths`` must not have another; where they are others, ``paths``
        is needed, but for ``params`` that are a list.
      changed: names of hyperparameters of ``fused_adamw`` that are meant to differ;
        never ``amsgrad``.

    Returns:
      A new :class:`FusedAdamWState`: moments rounded to nearest to the dtypes of
      ``tx``, each sharded as its parameter, where that is committed to devices;
      masters, averages and copies begin as the parameters.

    Raises:
      ValueError: hyperparameters that differ, by name, with both values; a parameter
        without state, of another step, shape or path; state that belongs to no
        parameter or not to AdamW; groups without a hyperparameter; two leaves that
        ``paths`` cannot tell apart.
      TypeError: a tensor that NumPy cannot read; what is no dict or list.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> import jax_fused_adamw as jfa
      >>> moments = {"exp_avg": np.full(2, 0.1), "exp_avg_sq": np.full(2, 0.001)}
      >>> state_dict = {
      ...   "state": {0: {"step": np.array(1.0), **moments}},
      ...   "param_groups": [{"params": [0], "lr": 1e-3, "betas": (0.9, 0.999),
      ...     "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False}]}
      >>> tx = jfa.fused_adamw(1e-3, weight_decay=1e-2)
      >>> state = jfa.from_torch(state_dict, {"w": jnp.ones(2)}, tx, paths=["w"])
      >>> print(state.count, state.mu["w"])
      1 [0.1 0.1]

    .. seealso:: :func:`to_torch`, :func:`from_optax`
    """
    with _checks.speaking_as("from_torch"):
        options = options_of(tx)
        _checks.check_params(params)
        groups = list(groups_of(state_dict, len(jax.tree.leaves(params))))
        order = _order_of(params, paths, names_of(groups))
        entries = entries_of(state_dict["state"], groups, params, order)
        count = count_of(entries)
        of_leaves = _of_leaves(_hyperparams(options, count), options, params)
        of_names = dict(zip(entries, of_leaves, strict=True))
        names = [list(entries)[leaf] for leaf in order]
        _compare(groups, {x: of_names[x] for x in names}, changed)
        leaves, treedef = jax.tree.flatten(params)
        moments = {
            ours: jax.tree.unflatten(
                treedef,
                [
                    moment(name, entry, theirs, leaf)
                    for (name, entry), leaf in zip(entries.items(), leaves, strict=True)
                ],
            )
            for ours, theirs in MOMENTS.items()
            if ours in options.state_dtypes
        }
        return make_state(options, params, count, moments)


def to_torch(
    state: FusedAdamWState,
    params: Any,
    tx: Any,
    *,
    paths: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Our state as a ``state_dict`` of ``torch.optim.AdamW``, with NumPy arrays.

    ``load_state_dict`` wants tensors and, where there is a ``mask`` or ``lr_scale``, an
    optimizer with the same groups: consecutive parameters of ``paths`` with one decay
    and learning rate are one, those with others the next. Moments have the layout of
    ``params``: see :func:`from_torch`. ::

      state_dict = jfa.to_torch(state, params, tx, paths=paths)
      state_dict["state"] = jax.tree.map(torch.from_numpy, state_dict["state"])
      optimizer.load_state_dict(state_dict)

    Args:
      state: of ``tx``. Masters and averages stay behind, with a warning (take
        ``state.master`` as float32 parameters), and so do copies, the counts of skipped
        steps and the report.
      params: the parameters that it belongs to.
      tx: the :func:`fused_adamw` that made ``state``.
      paths: as for :func:`from_torch`.

    Returns:
      A dict as ``torch.optim.AdamW.state_dict()`` makes it: moments float32, of float64
      parameters float64; of a schedule the value for the next step.

    Raises:
      ValueError: ``amsgrad="optax"``, ``nesterov`` or ``eps_root``, which PyTorch does
        not have; a state of other options or parameters; another path.
      TypeError: a ``state`` that is none of ours, as that of a wrapper.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(1e-3, weight_decay=1e-2)
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> state_dict = jfa.to_torch(state, params, tx)
      >>> state_dict["state"][0]["exp_avg"], state_dict["param_groups"][0]["betas"]
      (array([0.1, 0.1], dtype=float32), (0.9, 0.999))
    """
    with _checks.speaking_as("to_torch"):
        options = options_of(tx)
        check_state_type(state)
        check_state(options, state, params)
        order = _order_of(params, paths)
        ours = _hyperparams(options, state.count)
        _check_has_equal(ours)
    tell_what_stays("to_torch", state)
    leaves = {
        theirs: [_as_float(x) for x in jax.tree.leaves(getattr(state, name))]
        for name, theirs in MOMENTS.items()
    }
    kept = {name: arrays for name, arrays in leaves.items() if arrays}
    of_leaves = _of_leaves(ours, options, params)
    step = np.float32(state.count)
    shared = {
        "betas": (ours["b1"], ours["b2"]),
        "eps": ours["eps"],
        "amsgrad": ours["amsgrad"],
        "maximize": ours["maximize"],
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
    return {
        "state": {
            number: {"step": np.array(step)} | {n: x[leaf] for n, x in kept.items()}
            for number, leaf in enumerate(order)
        },
        "param_groups": [
            shared | {"lr": lr, "weight_decay": decay, "params": list(group)}
            for (lr, decay), group in itertools.groupby(
                range(len(order)), lambda number: _rates(of_leaves[order[number]])
            )
        ],
    }


def _check_has_equal(ours: Mapping[str, Any]) -> None:
    """Raises ValueError for a rule that PyTorch does not have."""
    wrong = [name for name, theirs in ONLY_OURS.items() if ours[name] != theirs]
    wrong += ["amsgrad"] if ours["amsgrad"] == "optax" else []
    if wrong:
        told = ", ".join(f"{name}={ours[name]!r}" for name in wrong)
        reason = ", whose maxima of corrected moments have no equal there"
        raise ValueError(
            f"fused_adamw: PyTorch's AdamW cannot go on with {told}"
            f"{reason if 'amsgrad' in wrong else ''}"
        )


def _as_float(x: jax.Array) -> np.ndarray:
    return np.array(x, np.promote_types(x.dtype, np.float32))


def _order_of(
    params: Any, paths: Sequence[str] | None, names: Sequence[str] | None = None
) -> list[int]:
    """The number among our leaves of each of PyTorch's parameters, by its names."""
    known = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    named = None if names is None else _paths_of(names, known)
    if paths is None:
        if names is not None and named is None and not _has_order(params):
            raise ValueError(
                f"fused_adamw: state_dict has the param_names {_some(names)}, params "
                f"has the paths {_some(known)}: which belongs to which? Give paths=, "
                "the path of each name in the order of the names"
            )
        return (
            list(range(len(known))) if named is None else list(map(known.index, named))
        )
    _check_names(params, known)
    paths = list(paths)
    unknown = [path for path in paths if path not in known]
    missing = [path for path in known if path not in paths]
    if unknown or missing or len(paths) != len(known):
        what = f"lacks {missing[0]!r}" if missing else "names a parameter twice"
        if unknown:
            what = f"has {unknown[0]!r}, which is no parameter"
        raise ValueError(
            f"fused_adamw: paths {what}; expected each of {known} once, in PyTorch's "
            "order"
        )
    if named is not None and paths != named:
        at = next(i for i, path in enumerate(paths) if path != named[i])
        raise ValueError(
            f"fused_adamw: paths[{at}] is {paths[at]!r}, and PyTorch's parameter there "
            f"is {named[at]!r}, by param_names: leave paths out, or put it in this "
            "order"
        )
    return list(map(known.index, paths))


def _paths_of(names: Sequence[str], known: Sequence[str]) -> list[str] | None:
    """The path that each of PyTorch's names is, if each of them is one."""

    def spelt(name: str) -> str:
        return name.replace(".", "/")

    paths = {spelt(path): path for path in known}
    if len(paths) < len(known) or sorted(map(spelt, names)) != sorted(paths):
        return None
    return [paths[spelt(name)] for name in names]


def _has_order(params: Any) -> bool:
    """Whether its leaves are as they were given, not sorted."""
    is_list = isinstance(params, list | tuple) and jax.tree_util.all_leaves(params)
    return is_list or len(jax.tree.leaves(params)) == 1


def _some(names: Sequence[str]) -> str:
    return f"{list(names[:4])}" + (" and more" if len(names) > 4 else "")


def _check_names(params: Any, known: Sequence[str]) -> None:
    """Raises ValueError for two leaves of one joined name, which paths cannot tell."""
    named: dict[str, str] = {}
    for joined, (path, _) in zip(
        known, jax.tree_util.tree_leaves_with_path(params), strict=True
    ):
        name = _checks.leaf_name("params", path)
        if joined in named:
            raise ValueError(
                f"fused_adamw: {named[joined]} and {name} are both {joined!r} in "
                "paths; leave paths out, where PyTorch's order is that of "
                "jax.tree.leaves(params), or rename a key"
            )
        named[joined] = name


def _hyperparams(options: Options, count: Any) -> dict[str, Any]:
    """By our names, a schedule at its value for the next step.

    ``tolerance`` is how far PyTorch's learning rate may be from it.
    """
    ours = recorded(options) | {"tolerance": 0.0}
    if ours["learning_rate"] == "schedule":
        # Where it goes down to zero, float32 has lost most digits of the value.
        *_, rate = rates = [
            float(current_learning_rate(options.learning_rate, jnp.int32(at)))
            for at in np.linspace(0, int(count), 9)
        ]
        ours["learning_rate"] = rate
        ours["tolerance"] = 1e-4 * abs(rate) + 1e-6 * max(map(abs, rates))
    return ours


def _of_leaves(
    ours: Mapping[str, Any], options: Options, params: Any
) -> list[dict[str, Any]]:
    """The hyperparameters of each leaf, as a group of PyTorch has them."""
    rate, tolerance = ours["learning_rate"], ours["tolerance"]
    decay = ours["weight_decay"]
    decayed = resolve_mask(options.mask, params)
    scales = resolve_lr_scale(options.lr_scale, params)
    return [
        dict(ours)
        | {"learning_rate": rate if scale == 1 else rate * scale}
        | {"tolerance": tolerance * scale}
        | {"weight_decay": decay if decays else 0.0}
        for decays, scale in zip(decayed, scales, strict=True)
    ]


def _rates(of_leaf: Mapping[str, Any]) -> tuple[Any, Any]:
    """What may differ from one leaf to the next."""
    return of_leaf["learning_rate"], of_leaf["weight_decay"]


def _compare(
    groups: Sequence[Mapping[str, Any]],
    of_names: Mapping[str, Mapping[str, Any]],
    changed: Iterable[str],
) -> None:
    """Raises ValueError for hyperparameters that differ.

    Args:
      groups: PyTorch's.
      of_names: ours by the names of parameters, in PyTorch's order.
    """
    changed = {changed} if isinstance(changed, str) else set(changed)
    told, names = [], iter(of_names)
    for number, group in enumerate(groups):
        theirs = hyperparams_of(f"param_groups[{number}]", group)
        may_change = theirs.keys() - {"amsgrad"}  # whose maxima cannot be converted
        if changed - may_change:
            raise ValueError(
                f"fused_adamw: changed names {sorted(changed - may_change)}, expected "
                f"some of {sorted(may_change)}"
            )
        own = list(itertools.islice(names, len(group["params"])))
        for option in theirs.keys() - changed:
            there = f"{theirs[option]!r} in param_groups[{number}]"
            wrong = {
                name: of_names[name][option]
                for name in own
                if not _same(option, theirs[option], of_names[name])
            }
            if len(wrong) == len(own) and len(set(wrong.values())) == 1:
                told.append(f"{option} is {there} and {wrong[own[0]]!r} here")
            else:
                told += [
                    f"{option} of {name} is {there} and {x!r} here"
                    for name, x in wrong.items()
                ]
    if told:
        raise ValueError(
            f"fused_adamw: hyperparameters differ: {'; '.join(sorted(told))}. Make the "
            f"optimizer with PyTorch's{advice_on_changed(x.split()[0] for x in told)}"
        )


def _same(option: str, value: Any, of_leaf: Mapping[str, Any]) -> bool:
    ours = of_leaf[option]
    if isinstance(value, bool) or isinstance(ours, str):
        return value is ours
    if option == "learning_rate" and abs(value - ours) <= of_leaf["tolerance"]:
        return True
    with np.errstate(over="ignore"):
        return bool(np.float32(value) == np.float32(ours))
