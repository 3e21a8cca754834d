"""The optimizer's state: made, checked, and found inside other states."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fused_adamw import _checks
from jax_fused_adamw._export import saved_by_name
from jax_fused_adamw._options import Options, options_of
from jax_fused_adamw._shardings import is_empty, zeros_like
from jax_fused_adamw._stats import GradReport, no_report


@saved_by_name
class FusedAdamWState(NamedTuple):
    """State of :func:`fused_adamw`; what an option does not need is None.

    The names are optax's, so ``optax.tree.get(state, "mu")`` works. :meth:`into_parts`
    and :meth:`from_parts` are for checkpoints that know no NamedTuple. ``master`` and
    ``compute`` have None in the place of a parameter that needs none: JAX's own empty
    node, which jit, checkpoints and ``jax.export`` know. Leaves of ``mu``, ``nu``,
    ``nu_max`` and ``ema`` beside a float64 parameter are float64.

    Of a tree of several dtypes, ``master`` and ``compute`` therefore lack leaves that
    ``params`` has: map over both with ``is_leaf=lambda x: x is None``
    (``optax.tree.map_params`` likewise), or use :func:`state_shardings`.

    Attributes:
      count: int32[], applied steps, saturating.
      mu: the first moment, leaves of ``mu_dtype`` in the parameters' shapes.
      nu: the second moment, leaves of ``nu_dtype``.
      nu_max: with ``amsgrad`` its running maximum, leaves of ``nu_dtype``.
      master: with ``master_weights`` the float32 masters of low-precision parameters.
      ema: with ``ema_decay`` the average of the parameters, float32 leaves.
      skipped: int32[], skipped steps, saturating.
      consecutive: int32[], steps skipped since the last applied one.
      report: the :class:`GradReport` of the last step, where gradients are analysed.
      compute: with ``compute_dtype`` the copies of float32 parameters.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(0.1, mu_dtype=jnp.bfloat16, ema_decay=0.99)
      >>> state = tx.init({"w": jnp.ones(2)})
      >>> state.mu["w"].dtype, state.nu["w"].dtype, state.nu_max
      (dtype(bfloat16), dtype('float32'), None)
      >>> print(state.count, optax.tree.get(state, "ema")["w"])
      0 [1. 1.]
      >>> import jax
      >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
      >>> parts = jax.device_get(tx.init(params).into_parts())
      >>> sorted(parts)
      ['consecutive', 'count', 'mu', 'nu', 'skipped']
      >>> state = jfa.FusedAdamWState.from_parts(parts, params, tx)
      >>> parts["nu"]["w"] = parts["nu"]["w"].astype("float16")
      >>> jfa.FusedAdamWState.from_parts(parts, params, tx)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      TypeError: from_parts: state.nu['w'] has dtype float16, expected float32; ...
    """

    count: jax.Array  # type: ignore[assignment] # hides tuple.count
    mu: Any
    nu: Any
    nu_max: Any
    master: Any
    ema: Any
    skipped: jax.Array
    consecutive: jax.Array
    report: Any
    compute: Any

    def into_parts(self) -> dict[str, Any]:
        """The state as a plain dict, for a checkpoint of one's own.

        Save :meth:`FusedAdamW.options` and the parameters beside it.

        Returns:
          The fields that are not None by their names, ``report`` as a dict too. Arrays
          are those of the state, not copies.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> parts = jfa.fused_adamw(0.1).init({"w": jnp.ones(2)}).into_parts()
          >>> sorted(parts), parts["mu"]["w"].dtype
          (['consecutive', 'count', 'mu', 'nu', 'skipped'], dtype('float32'))
        """
        parts = {name: x for name, x in self._asdict().items() if x is not None}
        if "report" in parts:
            parts["report"] = parts["report"]._asdict()
        return parts

    @classmethod
    def from_parts(
        cls, parts: Mapping[str, Any], params: Any, tx: Any
    ) -> "FusedAdamWState":
        """The state that :meth:`into_parts` has taken apart, checked.

        Args:
          parts: arrays and trees by name, of JAX or of NumPy. NumPy arrays are copied
            to the default device; ``jax.device_put`` with :func:`state_shardings` moves
            them to where cut parameters lie. A JAX array in a buffer that is there
            twice, or in ``params``, is copied: a buffer cannot be donated twice.
          params: the parameters that the state belongs to, or their shapes and dtypes
            (:class:`jax.ShapeDtypeStruct`).
          tx: the :func:`fused_adamw` that is to use the state. The state does not say
            what ``tx`` must be beyond that: compare its options, too
            (:meth:`FusedAdamW.check_options`).

        Raises:
          ValueError: parts that are missing or unknown, that ``tx`` does not have or
            has, another tree or shape, a negative count.
          TypeError: another dtype; a report that is no dict; a shape for an array.

        Each names the part and the path of the leaf.

        Returns:
          The state, ready for ``tx.update`` or :func:`step`.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
          >>> parts = tx.init(params).into_parts() | {"count": jnp.int32(7)}
          >>> print(jfa.FusedAdamWState.from_parts(parts, params, tx).count)
          7
        """
        with _checks.speaking_as("from_parts"):
            options = options_of(tx)
            state = cls(**_fields_of(parts))
            _checks.check_concrete("state", state)
            check_state(options, state, params)
            check_counts(state)
        taken = set(map(_buffer_of, jax.tree.leaves(params)))

        def own(x: Any) -> jax.Array:
            """An array of JAX, in a buffer that nothing else in a step has."""
            if isinstance(x, jax.Array) and _buffer_of(x) not in taken:
                taken.add(_buffer_of(x))
                return x
            return jnp.array(x)

        return jax.tree.map(own, state)


def _buffer_of(x: Any) -> Any:
    """What is the same for arrays in one buffer, as far as the host can see."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if not is_array or x.is_deleted():
        return id(x)
    shards = x.addressable_shards  # none, where all are of other processes
    pointers = [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
    return tuple(pointers) or id(x)


_ALWAYS = ("count", "mu", "nu", "skipped", "consecutive")


def _fields_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of FusedAdamWState: every field, the report as it was."""
    if not isinstance(parts, Mapping):
        raise TypeError(
            "fused_adamw: parts must be a dict, as state.into_parts() returns, got "
            f"{type(parts).__name__}"
        )
    known = FusedAdamWState._fields
    optional = [name for name in known if name not in _ALWAYS]
    _check_names("parts", parts, _ALWAYS, optional)
    fields = dict.fromkeys(known) | dict(parts)
    if fields["report"] is not None:
        if not isinstance(fields["report"], Mapping):
            raise TypeError(
                "fused_adamw: parts['report'] must be a dict, as state.into_parts() "
                f"returns, got {type(fields['report']).__name__}"
            )
        _check_names("parts['report']", fields["report"], GradReport._fields)
        report = GradReport(**fields["report"])
        for name, value, like in zip(report._fields, report, no_report(), strict=True):
            if getattr(value, "dtype", None) != like.dtype or value.shape != ():
                raise TypeError(
                    f"fused_adamw: parts['report'][{name!r}] must be a {like.dtype} "
                    f"scalar array, got {value!r}"
                )
        fields["report"] = report
    return fields


def _check_names(
    what: str, given: Mapping[str, Any], expected: Any, optional: Any = ()
) -> None:
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in (*expected, *optional)]
    if missing or unknown:
        lacks = [f"lacks {name!r}" for name in missing]
        has = [f"has {name!r}, which is unknown" for name in unknown]
        allowed = f" and some of {list(optional)}" if optional else ""
        raise ValueError(
            f"fused_adamw: {what} {' and '.join(lacks + has)}; expected "
            f"{list(expected)}{allowed}"
        )


def init_state(options: Options, params: Any) -> FusedAdamWState:
    """The state before the first step; for params None, that of no parameters."""
    _checks.check_params(params)
    try:
        return _new_state(options, params)
    except ValueError:
        # Outside of jit, JAX makes zeros elsewhere than it looks for them then.
        advice = "jax.jit(tx.init)(params) makes the state in device memory"
        _checks.check_memory({"params": params}, advice)
        raise


def _new_state(options: Options, params: Any) -> FusedAdamWState:
    def zeros(dtype: str) -> Any:
        # One buffer a leaf: donating the state must never donate a buffer twice.
        return zeros_like(
            params,
            functools.partial(_checks.state_dtype, dtype),
            partitioned=options.implementation == "ffi",
        )

    dtypes = options.state_dtypes
    return FusedAdamWState(
        count=jnp.zeros((), jnp.int32),
        mu=zeros(options.mu_dtype),
        nu=zeros(options.nu_dtype),
        nu_max=zeros(options.nu_dtype) if "nu_max" in dtypes else None,
        skipped=jnp.zeros((), jnp.int32),
        consecutive=jnp.zeros((), jnp.int32),
        report=no_report() if options.analyses else None,
        **copies_of(options, params),
    )


def copies_of(options: Options, params: Any) -> dict[str, Any]:
    """The trees of a state that hold the parameters themselves, in other dtypes."""
    dtypes = options.state_dtypes
    if dtypes.keys() & {"master", "ema", "compute"}:
        _checks.check_concrete("params", params)
    return {
        name: _copies(_checks.params_with(name, params), dtypes[name])
        if name in dtypes
        else None
        for name in ("master", "ema", "compute")
    }


def _copies(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: copy(x, _checks.state_dtype(dtype, x)), params)


def copy(x: Any, dtype: Any) -> jax.Array:
    """Rounded to nearest, in a buffer of its own."""
    return jnp.array(x, dtype, copy=True)


def check_state(options: Options, state: FusedAdamWState, params: Any) -> None:
    """Raises unless ``state`` is one of these options for these parameters."""
    dtypes = options.state_dtypes
    told = {
        "nu_max": f"amsgrad is {options.given_amsgrad!r}",
        "master": f"master_weights is {options.master_weights}",
        "ema": f"ema_decay is {options.ema_decay}",
        "compute": f"compute_dtype is {options.compute_dtype}",
    }
    for name, option in told.items():
        tree = getattr(state, name)
        # Of no leaves, a tree may be an empty None.
        has_leaves = bool(jax.tree.leaves(_checks.params_with(name, params)))
        if has_leaves and (tree is not None) != (name in dtypes):
            article = "no" if tree is None else "an" if name == "ema" else "a"
            raise ValueError(
                f"fused_adamw: the state has {article} {name}, but {option}; use the "
                "state with the options it was made with"
            )
    if (state.report is not None) != options.analyses:
        has = "has no" if state.report is None else "has a"
        wants = "analyses" if options.analyses else "does not analyse"
        raise ValueError(
            f"fused_adamw: the state {has} report, but the optimizer {wants} gradients "
            "(max_grad_norm, skip_nonfinite); use the state with the options it was "
            "made with"
        )
    for name, dtype in dtypes.items():
        if getattr(state, name) is not None or name in ("mu", "nu"):
            _checks.check_state_tree(name, getattr(state, name), params, dtype)
    for name in ("count", "skipped", "consecutive"):
        _checks.check_counter(name, getattr(state, name))


def check_counts(state: FusedAdamWState) -> None:
    """Raises ValueError for a negative count, where the host can see it."""
    for name in ("count", "skipped", "consecutive"):
        counter = getattr(state, name)
        if isinstance(counter, jax.core.Tracer):
            continue
        if getattr(counter, "is_fully_addressable", True) and counter < 0:
            raise ValueError(
                f"fused_adamw: state.{name} is {int(counter)}, expected a number of "
                "steps >= 0; is the file damaged?"
            )


def check_state_type(state: Any) -> None:
    """Raises TypeError for what is no state of ours."""
    if not is_ours(state):
        raise TypeError(
            f"fused_adamw: state must be a FusedAdamWState, got "
            f"{type(state).__name__}; pass what init or the previous step returned, of "
            "a chain the one inside; the order is update(grads, state, params)"
        )


def is_ours(node: Any) -> bool:
    return isinstance(node, FusedAdamWState)


def states_in(opt_state: Any) -> list[FusedAdamWState]:
    """Every state of ours inside one of any optax transformation."""
    return [
        node for node in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(node)
    ]


def follows_params(opt_state: Any) -> bool:
    """Whether it holds masters, averages or copies of the new parameters."""
    kept = [(ours.master, ours.ema, ours.compute) for ours in states_in(opt_state)]
    return bool(jax.tree.leaves(kept))


def map_states(
    function: Callable[[FusedAdamWState], FusedAdamWState], opt_state: Any
) -> Any:
    """An optimizer's state with every state of ours in it replaced."""
    return jax.tree.map(
        lambda node: function(node) if is_ours(node) else node,
        opt_state,
        is_leaf=is_ours,
    )


def map_beside(
    name: str, function: Callable[[Any, Any, Any], Any], tree: Any, params: Any
) -> Any:
    """Maps a tree of a state of ours together with all parameters of the optimizer.

    Where the tree has nothing (None, or ``optax.MaskedNode`` for what is not in this
    optimizer's group), nor has the result.

    Args:
      name: of the tree, for messages.
      function: of a path, a leaf of the tree and its parameter.
      tree: of :class:`FusedAdamWState`.
      params: of the whole optimizer.
    """

    def call(path: Any, leaf: Any, param: Any) -> Any:
        if is_empty(leaf):
            return leaf
        shape = getattr(param, "shape", None)
        if shape != leaf.shape:
            kind = type(param).__name__
            its = f"a {kind}" if shape is None else f"of shape {shape}"
            raise ValueError(
                f"fused_adamw: {_checks.leaf_name(f'state.{name}', path)} has shape "
                f"{leaf.shape}, its parameter is {its}; pass the parameters that the "
                "state belongs to"
            )
        return function(path, leaf, param)

    try:
        jax.tree.map(lambda *_: None, tree, params, is_leaf=is_empty)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"fused_adamw: the tree of state.{name} does not match params: {error}\n"
            "Pass the parameters that the state belongs to; of Flax nnx, "
            "nnx.as_pure(optimizer.opt_state) and nnx.as_pure(nnx.state(model, "
            "nnx.Param))"
        ) from error
    return jax.tree_util.tree_map_with_path(call, tree, params, is_leaf=is_empty)


def beside_params(
    name: str, function: Callable[[Any, Any], Any], tree: Any, params: Any
) -> Any:
    """The parameters, those with a leaf in the tree replaced.

    Args:
      name: as for :func:`map_beside`, like ``tree`` and ``params``.
      function: of a leaf of the tree and its parameter.
    """
    new = map_beside(name, lambda _, leaf, param: function(leaf, param), tree, params)
    return jax.tree.map(
        lambda leaf, param: param if is_empty(leaf) else leaf,
        new,
        params,
        is_leaf=is_empty,
    )
