"""Checks of trees, before anything is traced or launched.

Every message names the leaf by its path, what was expected, what came, and what to
do about it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from jax_fused_adamw._primitives import LEAF_DTYPES, LEAF_DTYPES_X64

NO_PARAMS_MESSAGE = (
    "fused_adamw: update needs the current parameters: call "
    "update(grads, state, params). Weight decay and the in-place step read them."
)


@contextlib.contextmanager
def speaking_as(name: str) -> Iterator[None]:
    """Errors of the checks inside begin with the name of another function."""
    ours = "fused_adamw: "
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error)
        if not message.startswith(ours):
            raise
        raise type(error)(f"{name}: {message.removeprefix(ours)}") from error.__cause__


def leaf_name(tree_name: str, path: Any) -> str:
    return tree_name + jax.tree_util.keystr(path)


def check_params(params: Any) -> None:
    """Raises TypeError for a leaf that the optimizer cannot hold."""
    for path, leaf in tree_leaves_with_path(params):
        _check_leaf_dtype("params", path, leaf, _PARAM_REMEDY)


_CONVERT = "convert it with jnp.asarray"
_NO_FLOAT = (
    "keep it out of the optimizer: of Flax nnx pass nnx.state(model, nnx.Param), of an "
    "Equinox module eqx.filter(module, eqx.is_inexact_array), of other trees use "
    "optax.masked or optax.multi_transform"
)
_PARAM_REMEDY = f"cast it to float32, or {_NO_FLOAT}"
_GRAD_REMEDY = "cast the gradient, or take it with respect to float parameters"


def _check_leaf_dtype(tree: str, path: Any, leaf: Any, remedy: str) -> None:
    name = leaf_name(tree, path)
    with_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    allowed = LEAF_DTYPES_X64 if with_x64 else LEAF_DTYPES
    names = ", ".join(np.dtype(dtype).name for dtype in allowed)
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(
            f"fused_adamw: {name} is {leaf!r} of type {type(leaf).__name__}, expected "
            f"an array of {names}; {_NO_FLOAT if callable(leaf) else _CONVERT}"
        )
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended) or (
        np.dtype(leaf.dtype) not in map(np.dtype, allowed)
    ):
        if leaf.dtype == np.float64 and tree == "params":
            remedy = f"set jax_enable_x64 for float64, or {remedy}"
        elif tree == "params" and not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = _NO_FLOAT
        raise TypeError(
            f"fused_adamw: {name} has dtype {leaf.dtype}, expected {names}; {remedy}"
        )


def check_same_tree(name: str, tree: Any, params: Any, remedy: str) -> None:
    """Raises ValueError, naming the first difference, unless the trees match."""
    if jax.tree.structure(tree) == jax.tree.structure(params):  # type: ignore[operator]
        return
    _check_dense(name, tree)
    expected = dict.fromkeys(path for path, _ in tree_leaves_with_path(params))
    got = dict.fromkeys(path for path, _ in tree_leaves_with_path(tree))
    missing = [path for path in expected if path not in got]
    extra = [path for path in got if path not in expected]
    if missing and extra:
        what = (
            f"it has {leaf_name(name, extra[0])} and lacks "
            f"{leaf_name(name, missing[0])} (are its containers the same?)"
        )
    elif missing:
        what = f"{leaf_name(name, missing[0])} is missing"
    elif extra:
        what = f"{leaf_name(name, extra[0])} has no counterpart in params"
    else:
        what = container_difference(name, tree, params)
    raise ValueError(
        f"fused_adamw: the tree of {name} does not match params: {what}. Pass {remedy}"
    )


def container_difference(name: str, tree: Any, params: Any) -> str:
    """The first of the containers that differ, for trees with leaves at same paths."""
    expected = _containers(params)
    for path, (node, level) in _containers(tree).items():
        if path in expected and level != expected[path][1]:
            kinds = [type(x).__name__ for x in (expected[path][0], node)]
            if kinds[0] == kinds[1]:  # what it holds beside its children
                kinds = [str(x) for x in (expected[path][1], level)]
            what = f"{leaf_name(name, path)} must be a {kinds[0]}, got a {kinds[1]}"
            return f"the containers differ: {what}"
    return (  # in empty ones
        f"the containers differ: expected {jax.tree.structure(params)}, got "
        f"{jax.tree.structure(tree)}"
    )


def _containers(tree: Any) -> dict[Any, tuple[Any, Any]]:
    """Every node with children, and its own structure without theirs, by path."""
    found = {}

    def visit(path: Any, node: Any) -> bool:
        children, level = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        if children and children[0] is not node:
            found[path] = node, level
        return False

    jax.tree_util.tree_leaves_with_path(tree, visit, is_leaf_takes_path=True)
    return found


def _check_dense(name: str, tree: Any) -> None:
    from jax.experimental.sparse import JAXSparse

    def is_sparse(node: Any) -> bool:
        return isinstance(node, JAXSparse)

    for path, leaf in tree_leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            raise TypeError(
                f"fused_adamw: {leaf_name(name, path)} is a sparse "
                f"{type(leaf).__name__}; the kernel takes dense arrays: densify it "
                "with .todense()"
            )


def check_grads(grads: Any, params: Any) -> None:
    """Raises unless grads match params leaf by leaf: tree, shape, dtype."""
    check_same_tree("grads", grads, params, "gradients of these very parameters")
    pairs = zip(tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True)
    for (path, grad), param in pairs:
        _check_leaf_dtype("grads", path, grad, _GRAD_REMEDY)
        if grad.dtype == np.float64 and param.dtype != np.float64:
            raise TypeError(
                f"fused_adamw: {leaf_name('grads', path)} has dtype float64, expected "
                f"float32 or below for a parameter of {param.dtype}, whose step is "
                f"float32: cast it with .astype({str(param.dtype)!r})"
            )
        _check_shape("grads", path, grad, param)


def _check_shape(tree: str, path: Any, leaf: Any, param: Any) -> None:
    if leaf.shape != param.shape:
        raise ValueError(
            f"fused_adamw: {leaf_name(tree, path)} has shape {leaf.shape}, expected "
            f"{param.shape}, the parameter's; shapes are never broadcast"
        )


def check_grad_leaves(grads: Any) -> None:
    """Raises TypeError for a gradient that the kernels cannot read."""
    _check_dense("grads", grads)
    for path, grad in tree_leaves_with_path(grads):
        _check_leaf_dtype("grads", path, grad, _GRAD_REMEDY)


def check_shapes(name: str, tree: Any, params: Any) -> None:
    """Raises ValueError unless the leaves of matching trees have the same shapes."""
    pairs = zip(tree_leaves_with_path(tree), jax.tree.leaves(params), strict=True)
    for (path, leaf), param in pairs:
        _check_shape(name, path, leaf, param)


def params_with(name: str, params: Any) -> Any:
    """The parameters that have a leaf in ``state.<name>``, None in place of others."""

    def has_leaf(param: Any) -> bool:
        if not hasattr(param, "dtype"):
            check_params(params)  # says where
        size = np.dtype(param.dtype).itemsize
        return {"master": size < 4, "compute": size == 4}.get(name, True)

    return jax.tree.map(lambda param: param if has_leaf(param) else None, params)


def state_dtype(dtype: str, param: Any) -> np.dtype:
    """Of what a state holds beside a parameter; ``dtype`` is what its options say.

    A float64 parameter has all of its state in float64.
    """
    is_float64 = np.dtype(param.dtype) == np.float64
    return np.dtype(np.float64 if is_float64 else dtype)


def check_state_tree(name: str, tree: Any, params: Any, option: str) -> None:
    """Raises unless ``state.<name>`` has the right leaves: tree, dtype, shapes."""
    params = params_with(name, params)
    name = f"state.{name}"
    check_same_tree(name, tree, params, "the state that init made for them")
    pairs = zip(tree_leaves_with_path(tree), jax.tree.leaves(params), strict=True)
    for (path, leaf), param in pairs:
        dtype = state_dtype(option, param)
        if np.dtype(getattr(leaf, "dtype", object)) != dtype:
            raise TypeError(
                f"fused_adamw: {leaf_name(name, path)} has dtype "
                f"{getattr(leaf, 'dtype', type(leaf).__name__)}, expected {dtype}; "
                "restore the state with the dtypes it was saved with, and use it with "
                "the options it was made with"
            )
        _check_shape(name, path, leaf, param)


def state_trees(state: Any, names: Iterable[str]) -> dict[str, Any]:
    """Trees of the state, by the names that messages call them."""
    return {f"state.{name}": getattr(state, name) for name in names}


def check_concrete(name: str, tree: Any) -> None:
    """Raises TypeError for a shape in the place of an array."""
    for path, leaf in tree_leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"fused_adamw: {leaf_name(name, path)} is a ShapeDtypeStruct, expected "
                "an array, whose values are read; jax.eval_shape makes shapes of all"
            )


_TO_DEVICE = (
    "inside jit, jax.device_put(x, jax.memory.Space.Device) brings it there before the "
    "step, and jax.memory.Space.Host back afterwards"
)


def check_memory(trees: dict[str, Any], advice: str = _TO_DEVICE) -> None:
    """Raises ValueError for a leaf in host memory, where no kernel may reach it."""
    for name, tree in trees.items():
        for path, leaf in tree_leaves_with_path(tree):
            if jax.typeof(leaf).memory_space == jax.memory.Space.Host:
                raise ValueError(
                    f"fused_adamw: {leaf_name(name, path)} lies in host memory, "
                    f"expected device memory: {advice}"
                )


def check_counter(name: str, counter: Any) -> None:
    """Raises unless ``state.<name>`` is an int32 scalar."""
    dtype, shape = getattr(counter, "dtype", None), getattr(counter, "shape", None)
    if dtype != jnp.int32 or shape != ():
        raise TypeError(
            f"fused_adamw: state.{name} must be an int32 scalar array, got "
            f"{counter!r}; pass the state that init or the previous step returned"
        )


IMPLEMENTATIONS = {None: "ffi", "ffi": "ffi", "xla": "xla"}


def choose(name: str, value: Any, choices: dict[Any, str]) -> str:
    """What an option stands for; raises ValueError for one that is not a choice."""
    if isinstance(value, (bool, str, type(None))) and value in choices:
        return choices[value]
    raise ValueError(
        f"fused_adamw: {name} must be one of {list(choices)}, got {value!r}"
    )


MU_DTYPES = ("float32", "bfloat16", "float16")
NU_DTYPES = ("float32", "bfloat16")
COMPUTE_DTYPES = ("bfloat16", "float16")
_WHY_NOT = {
    ("nu_dtype", "float16"): ", whose smallest positive number is 6e-8: the squares of "
    "gradients below 2e-4 would vanish; use bfloat16"
}


def dtype_name(name: str, dtype: Any, allowed: tuple[str, ...]) -> str | None:
    """An option's dtype by name; raises unless it is None or among the allowed."""
    if dtype is None:
        return None
    return needed_dtype_name(name, dtype, allowed, "None or ")


def needed_dtype_name(
    name: str, dtype: Any, allowed: tuple[str, ...], also: str = ""
) -> str:
    """The name of one of the allowed dtypes; ``also`` is told before them."""
    if dtype is None:  # of which NumPy makes float64
        raise TypeError(f"fused_adamw: {name} must be one of {list(allowed)}, got None")
    try:
        got = np.dtype(dtype).name
    except TypeError as error:
        raise TypeError(f"fused_adamw: {name} is not a dtype: {dtype!r}") from error
    if got not in allowed:
        reason = _WHY_NOT.get((name, got), "")
        raise ValueError(
            f"fused_adamw: {name} must be {also}one of {list(allowed)}, got {got}"
            f"{reason}"
        )
    return got


def not_static_message(name: str) -> str:
    return (
        f"fused_adamw: {name} must be static, and arrived as a value that "
        "optax.inject_hyperparams (or a caller) computed. "
        f"{static_advice(name)}"
    )


def static_advice(name: str) -> str:
    return (
        f"Under optax.inject_hyperparams, name {name} in static_args=, as in "
        f'inject_hyperparams(fused_adamw, static_args=("{name}",))'
    )


def check_static(name: str, value: Any) -> None:
    """Raises TypeError for an array where only a static value makes sense."""
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(not_static_message(name))
