"""Leaves on their way into a checkpoint of orbax and back."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

_PYTHON = (bool, int, float)  # in this order: True is an int, too
_Shape = jax.ShapeDtypeStruct
_INT64 = np.iinfo(np.int64)
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, tuple)
# By orbax written in the background, where a failure comes late or never.
_NOT_IN_ZARR = ("float128", "complex256", "uint2", "uint4")


def check_storable(tree: Any) -> None:
    """Raises TypeError or ValueError with the path of what no checkpoint can hold."""
    files: dict[str, str] = {}
    for path, leaf in tree_leaves_with_path(tree):
        name = keystr(path)
        if not path:
            raise ValueError(
                f"TrainingRecord: expected a tree of containers, got one "
                f"{type(leaf).__name__}: put it into a dict"
            )
        other = files.setdefault(".".join(names(path)), name)
        if other != name:
            raise ValueError(
                f"TrainingRecord: leaves {other} and {name} have one name in a "
                "checkpoint of orbax, which puts dots between keys: rename one"
            )
        _check_leaf(name, leaf)


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"TrainingRecord: leaf {name} is traced: save outside of jit")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"TrainingRecord: leaf {name} was donated or deleted: save what the step "
            "returned"
        )
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        is_storable, kind = _has_stored_dtype(leaf.dtype), f"array of {leaf.dtype}"
    else:
        is_storable, kind = isinstance(leaf, _PYTHON), type(leaf).__name__
    if not is_storable:
        raise TypeError(
            f"TrainingRecord: leaf {name} is of type {kind}; expected arrays of "
            "numbers or bools, Python's bool, int and float, and PRNG keys: leave it "
            "out, or encode it (text, for one, as an array of its bytes)"
        )
    if isinstance(leaf, int) and not _INT64.min <= leaf <= _INT64.max:
        raise ValueError(
            f"TrainingRecord: leaf {name} is {leaf}, and an integer in a checkpoint "
            "has 64 bits: keep a larger one in parts"
        )


def _has_stored_dtype(dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return is_number and dtype.isnative and dtype.name not in _NOT_IN_ZARR


def description(leaf: Any) -> list[Any]:
    """Dtype and shape as JSON has them; for a Python number, its type."""
    if hasattr(leaf, "dtype"):
        return [str(leaf.dtype), list(leaf.shape)]
    found = [kind.__name__ for kind in _PYTHON if isinstance(leaf, kind)]
    return [found[0] if found else type(leaf).__name__, []]


def is_same_number(saved: list[Any], now: list[Any]) -> bool:
    """Whether two descriptions are those of a Python number and an array of its kind.

    ``TrainState.create`` of Flax begins with a Python number, which a jitted step
    makes an array.
    """
    if saved[1] or now[1]:
        return False
    python = {saved[0], now[0]} & {"int", "float"}
    others = {saved[0], now[0]} - python
    if len(python) != 1 or len(others) != 1:
        return False
    kind = {"int": np.integer, "float": np.floating}[python.pop()]
    try:
        return jnp.issubdtype(jnp.dtype(others.pop()), kind)
    except TypeError:  # a PRNG key, or no dtype at all
        return False


def is_empty(leaf: Any) -> bool:
    """Whether it has no elements, which orbax refuses to save."""
    return hasattr(leaf, "shape") and 0 in leaf.shape


def as_stored(tree: Any) -> Any:
    """The tree that orbax is given: of the leaves' names, in containers that it reads.

    Those are as they were, so that orbax alone can restore into the tree. Of a node of
    another type the leaves are in dicts: orbax would save what else there is, as the
    bookkeeping in a list of Flax nnx, and not find its way back past a name beside
    numbers.
    """
    keyed, level = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    if keyed and keyed[0][1] is tree:
        return _stored_leaf(tree)
    if tree is None or _is_plain(tree):
        return jax.tree.unflatten(level, [as_stored(child) for _, child in keyed])
    stored: dict[str, Any] = {}
    for path, leaf in tree_leaves_with_path(tree):
        *parents, last = names(path)
        node = stored
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _stored_leaf(leaf)
    return stored


def _is_plain(node: Any) -> bool:
    """Whether JAX rebuilds it of any children: subclasses may have their own way."""
    is_named_tuple = isinstance(node, tuple) and hasattr(node, "_fields")
    return is_named_tuple or type(node) in _CONTAINERS


def _stored_leaf(leaf: Any) -> Any:
    if is_empty(leaf):
        return None
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def target(like: Any, saved: str) -> Any:
    """What orbax is to restore a leaf as that was saved with that dtype or type."""
    python = {"int": 0, "float": 0.0}
    if saved in python:
        return python[saved]
    if _is_key(like):
        return empty(like)  # older releases of orbax want keys, whatever their values
    if not hasattr(like, "dtype"):
        return np.empty((), jnp.dtype(saved))
    if _is_free(like) or isinstance(like, np.ndarray | np.generic):
        # By orbax a free one would be committed to a device, and no jit would take it
        # together with arrays of a mesh. This one has its shape in no memory.
        return np.broadcast_to(np.empty((), like.dtype), like.shape)
    return _Shape(like.shape, like.dtype, sharding=like.sharding)


def placed(leaf: Any, like: Any) -> Any:
    """What orbax has restored, with the same bits, where it is to be."""
    if isinstance(leaf, np.ndarray) and isinstance(like, jax.Array | _Shape):
        # Explicitly, for those who guard transfers.
        where = None if _is_free(like) else like.sharding
        return jax.device_put(leaf, where, may_alias=False)
    if _is_free(like) and _is_key(leaf):
        data = jax.device_get(jax.random.key_data(leaf))
        impl = jax.random.key_impl(leaf)
        data = jax.device_put(data, may_alias=False)
        return jax.random.wrap_key_data(data, impl=impl)
    return leaf


def converted(leaf: Any, like: Any, name: str) -> Any:
    """A placed leaf as the kind of scalar that ``like`` is, where it is another."""
    if not hasattr(like, "dtype"):
        return type(like)(jax.device_get(leaf))
    if not hasattr(leaf, "dtype"):
        leaf = placed(_array_of(leaf, like.dtype, name), like)
    if isinstance(like, np.generic):
        return leaf[()]
    if like.shape == () and getattr(like, "weak_type", False):
        where = None if _is_free(like) else like.sharding
        # A number, else a step would be compiled again.
        return jax.device_put(jax.device_get(leaf).item(), where)
    return leaf


def _array_of(number: int | float, dtype: Any, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.array(number).astype(dtype)
    if isinstance(number, int):
        fits = array == number
    else:  # which may be rounded
        fits = np.isinf(array) == np.isinf(number)
    if not fits:
        raise ValueError(
            f"TrainingRecord: leaf {name} was saved as {number}, too large for the "
            f"{dtype} that it has here: restore into a Python number"
        )
    return array


def empty(like: Any) -> Any:
    """A leaf as ``like`` tells of it, with whatever elements."""
    if isinstance(like, np.ndarray):
        return np.empty(like.shape, like.dtype)
    where = None if _is_free(like) else like.sharding
    # By a program, so that it is on devices of other processes, too.
    make = jax.jit(jnp.empty, static_argnums=(0, 1), out_shardings=where)
    return make(like.shape, like.dtype)


def by_path(tree: Any) -> dict[str, Any]:
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def names(path: Iterable[Any]) -> tuple[str, ...]:
    """A leaf's path as orbax has it, which knows no types of containers."""
    return tuple(keystr((key,), simple=True) for key in path)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def _is_free(leaf: Any) -> bool:
    """Whether nothing says on which devices the array is to be."""
    if isinstance(leaf, _Shape):
        return leaf.sharding is None
    return isinstance(leaf, jax.Array) and not leaf.committed
