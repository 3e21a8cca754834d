"""Forward and backward passes in low precision, on copies that the step has written."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fused_adamw import _checks
from jax_fused_adamw._state import beside_params, states_in


def compute_params(state: Any, params: Any) -> Any:
    """The parameters as the next forward pass reads them.

    With ``fused_adamw(..., compute_dtype=jnp.bfloat16)`` the step that writes a float32
    parameter writes its rounded copy in the same pass and keeps it in the state, where
    it travels with the parameters through any optax wrapper, ``jax.jit`` and donation.
    This finds it there. It reads nothing: the arrays are those of the state. They are
    copies of ``params`` only where ``fused_adamw`` is the last transformation that
    changes updates and is given the parameters themselves: see :func:`step`. Whoever
    writes parameters outside the step makes them anew by :func:`resync`.

    Args:
      state: the state of any optax transformation with a ``fused_adamw`` inside:
        ``chain``, ``masked``, ``multi_transform``, ``inject_hyperparams``,
        :func:`accumulate`.
      params: the parameters that it belongs to.

    Returns:
      A tree like ``params``, its float32 leaves replaced by their copies; a leaf
      without a copy, of low precision or of no ``fused_adamw``, is that of ``params``.

    Raises:
      ValueError: a state without copies, or one of other parameters.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(0.1, compute_dtype=jnp.bfloat16)
      >>> params = {"w": jnp.ones(2)}
      >>> state = tx.init(params)
      >>> jfa.compute_params(state, params)["w"].dtype
      dtype(bfloat16)

    .. seealso:: :func:`jax_fused_adamw.value_and_grad`
    """
    with _checks.speaking_as("compute_params"):
        trees = [ours.compute for ours in states_in(state)]
        trees = [tree for tree in trees if tree is not None]
        if not trees and jax.tree.leaves(_checks.params_with("compute", params)):
            raise ValueError(
                "fused_adamw: the state holds no copies of float32 parameters: make "
                "the optimizer with fused_adamw(..., compute_dtype=jnp.bfloat16)"
            )
        for tree in trees:
            params = beside_params("compute", lambda copy, _: copy, tree, params)
    return params


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compute_dtype: Any,
) -> Callable[..., Any]:
    """:func:`jax.value_and_grad` with respect to low-precision parameters.

    The float32 leaves of the parameters are rounded once, to nearest, and ``fun`` and
    its gradients see the rounded ones: gradients have half the bytes, which
    :func:`step` takes as they are. Where the step has written the rounded parameters
    already, pass them as ``compute_params`` and nothing is rounded at all: the forward
    pass then does not read the float32 parameters. The parameters are positional
    arguments.

    Args:
      fun: a function of parameters (and more) with a scalar result.
      argnums: which positional arguments are parameters, as in JAX.
      has_aux: whether ``fun`` returns a pair, of which the second is passed on.
      compute_dtype: bfloat16 or float16.

    Returns:
      A function of the arguments of ``fun`` that returns the value and the gradients,
      in the dtypes of the rounded parameters. Its keyword ``compute_params`` takes what
      :func:`compute_params` returned; with several ``argnums`` a tuple of them.

    Raises:
      TypeError: a ``compute_dtype`` that is not a dtype; ``compute_params`` of another
        dtype, or that are no tuple of one for each of several ``argnums``; parameters
        that are no positional arguments.
      ValueError: another ``compute_dtype``, or ``compute_params`` of another tree or
        shape than the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(0.1, compute_dtype=jnp.bfloat16)
      >>> params = {"w": jnp.ones(2)}
      >>> loss = lambda params, x: (params["w"] * x).sum()
      >>> value_and_grad = jfa.value_and_grad(loss, compute_dtype=jnp.bfloat16)
      >>> @jax.jit  # in a training loop: jax.jit(..., donate_argnums=(0, 1))
      ... def train_step(params, state, x):
      ...   loss, grads = value_and_grad(
      ...     params, x, compute_params=jfa.compute_params(state, params))
      ...   params, state = jfa.step(tx, grads, state, params)
      ...   return params, state, loss
      >>> x = jnp.array([1.0, -1.0], jnp.bfloat16)
      >>> params, state, loss = train_step(params, tx.init(params), x)
      >>> print(params["w"].round(4), state.compute["w"])
      [0.9 1.1] [0.898438 1.10156]
    """
    with _checks.speaking_as("value_and_grad"):
        _checks.check_static("compute_dtype", compute_dtype)
        dtype = _checks.needed_dtype_name(
            "compute_dtype", compute_dtype, _checks.COMPUTE_DTYPES
        )
    differentiated = jax.value_and_grad(fun, argnums, has_aux)
    is_single = np.ndim(argnums) == 0
    places = tuple(np.ravel(argnums).tolist())

    @functools.wraps(fun)
    def value_and_grad_of_rounded(*given_args, compute_params: Any = None, **kwargs):
        args = list(given_args)
        _check_positional(args, places)
        if is_single or compute_params is None:
            given = (compute_params,) * len(places)
        else:
            given = compute_params
            _check_tuple(given, places)
        for place, replaced in zip(places, given, strict=True):
            if replaced is not None:
                _check_alike(replaced, args[place], dtype)
                args[place] = replaced
            args[place] = _rounded(args[place], dtype)
        return differentiated(*args, **kwargs)

    return value_and_grad_of_rounded


def _check_tuple(compute_params: Any, argnums: tuple[int, ...]) -> None:
    is_tuple = isinstance(compute_params, (tuple, list))
    if not is_tuple or len(compute_params) != len(argnums):
        got = len(compute_params) if is_tuple else type(compute_params).__name__
        raise TypeError(
            f"value_and_grad: compute_params must be a tuple of {len(argnums)}, one "
            f"(or None) for each of argnums={argnums}, got {got}"
        )


def _check_positional(args: list[Any], argnums: tuple[int, ...]) -> None:
    if any(not -len(args) <= place < len(args) for place in argnums):
        raise TypeError(
            f"value_and_grad: expected the parameters (argnums={argnums}) among the "
            f"positional arguments, of which there are {len(args)}"
        )


def _check_alike(compute_params: Any, params: Any, dtype: str) -> None:
    with _checks.speaking_as("value_and_grad"):
        remedy = "what jfa.compute_params(state, params) returned"
        _checks.check_same_tree("compute_params", compute_params, params, remedy)
        _checks.check_shapes("compute_params", compute_params, params)

    def check_dtype(path: Any, replaced: Any, param: Any) -> None:
        expected = dtype if _is_float32(param) else jnp.result_type(param).name
        got = jnp.result_type(replaced).name
        if got != expected:
            leaf = _checks.leaf_name("compute_params", path)
            raise TypeError(
                f"value_and_grad: {leaf}: expected {expected}, got {got}; the "
                "compute_dtype of fused_adamw and of value_and_grad must be the same"
            )

    jax.tree_util.tree_map_with_path(check_dtype, compute_params, params)


def _rounded(params: Any, dtype: str) -> Any:
    """Every float32 leaf in the compute dtype; others as they are."""

    def rounded(param: Any) -> Any:
        return jnp.asarray(param, dtype) if _is_float32(param) else param

    return jax.tree.map(rounded, params)


def _is_float32(param: Any) -> bool:
    return jnp.result_type(param) == jnp.float32
