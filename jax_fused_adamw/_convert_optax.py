"""State of optax's Adam and AMSGrad as ours, and back."""

from typing import Any

import jax
import optax

from jax_fused_adamw import _checks
from jax_fused_adamw._convert import make_state, tell_what_stays
from jax_fused_adamw._options import Options, options_of
from jax_fused_adamw._state import FusedAdamWState, check_state, check_state_type, copy

_KINDS = {
    "off": optax.ScaleByAdamState,
    "corrected": optax.ScaleByAmsgradState,
}


def from_optax(opt_state: Any, params: Any, tx: Any) -> FusedAdamWState:
    """The state of ``optax.adamw`` or ``optax.amsgrad``, as one of ours.

    The next step of ``tx`` then is the one that optax would have taken, as closely as
    the two agree (``rtol=5e-5``). optax's state does not say with which hyperparameters
    it was made: give ``tx`` the same, a schedule included, which goes on at the same
    count; of a ``chain`` that scales updates leaf by leaf, the scales as ``lr_scale``.
    Weight decay has the same default in both, moments have not:
    ``fused_adamw`` keeps those of low-precision parameters in float32.

    Args:
      opt_state: what ``optax.adamw``, ``nadamw``, ``adam`` or ``amsgrad`` holds, also
        in a ``chain`` with what has no state (clipping). Other state would be lost, and
        is refused: of ``inject_hyperparams``, ``masked`` or ``MultiSteps`` pass
        ``inner_state`` or the like.
      params: the parameters that it belongs to; of ``masked`` and a group of
        ``multi_transform`` all, or those of the group.
      tx: the :func:`fused_adamw` that is to go on. optax's AMSGrad needs
        ``amsgrad="optax"``: its maximum is of corrected moments and cannot be turned
        into PyTorch's (nor does a state say of ``bias_correction_nu=False``, which has
        no equal here).

    Returns:
      A new :class:`FusedAdamWState`, no buffer shared with the old one. Moments are
      rounded to nearest to the dtypes of ``tx``, each sharded as its parameter, where
      that is committed to devices; masters, averages and copies begin as the
      parameters. Call it outside of ``jax.jit``.

    Raises:
      ValueError: no such state, or several; other state beside it; counts that differ;
        another kind of AMSGrad; another tree or shape, by the path of the leaf.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> peer, tx = optax.adamw(0.1), jfa.fused_adamw(0.1)
      >>> updates, opt_state = peer.update(params, peer.init(params), params)
      >>> state = jfa.from_optax(opt_state, params, tx)
      >>> print(state.count, state.mu["w"])
      1 [0.1 0.2]

    .. seealso:: :func:`to_optax`, :func:`from_torch`
    """
    with _checks.speaking_as("from_optax"):
        options = options_of(tx)
        adam = _find(opt_state, _kind(options))
        _checks.check_concrete("opt_state", opt_state)
        moments = {name: getattr(adam, name) for name in adam._fields[1:]}
        params = _of_group(params, adam.mu)
        return make_state(options, params, adam.count, moments)


def to_optax(state: FusedAdamWState, params: Any, tx: Any, optax_tx: Any) -> Any:
    """Our state as one of ``optax.adamw`` or ``optax.amsgrad``.

    Args:
      state: of ``tx``. What optax's has no place for stays behind: masters and the
        average (with a warning; take ``state.master`` as float32 parameters), copies,
        the counts of skipped steps, the report.
      params: as for :func:`from_optax`.
      tx: the :func:`fused_adamw` that made ``state``.
      optax_tx: the transformation that is to go on, made with the same
        hyperparameters: ``optax.adamw``, or ``optax.amsgrad`` with
        ``amsgrad="optax"``, also in a ``chain`` with what has no state. optax has no
        ``lr_scale``, and a state does not say that ``tx`` had one: scale the updates
        behind ``optax.adamw``, by an ``optax.stateless`` in the ``chain``.

    Returns:
      A tree as ``optax_tx.init(params)`` makes it, no buffer shared with ``state``;
      moments rounded to nearest to its dtypes, which for low-precision parameters are
      theirs unless ``mu_dtype`` says otherwise.

    Raises:
      ValueError: a state of other options or parameters; another kind of AMSGrad
        (``amsgrad=True``, PyTorch's, has no equal in optax); an ``optax_tx`` with other
        state.
      TypeError: a ``state`` or an ``optax_tx`` that is none, as that of a wrapper.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> import jax_fused_adamw as jfa
      >>> params, tx = {"w": jnp.array([1.0, 2.0])}, jfa.fused_adamw(0.1)
      >>> params, state = tx.step(params, tx.init(params), params)
      >>> opt_state = jfa.to_optax(state, params, tx, optax.adamw(0.1))
      >>> print(opt_state[0].count, opt_state[0].mu["w"])
      1 [0.1 0.2]
    """
    with _checks.speaking_as("to_optax"):
        options = options_of(tx)
        check_state_type(state)
        if not callable(getattr(optax_tx, "init", None)):
            raise TypeError(
                "fused_adamw: optax_tx must be the transformation that is to go on, "
                "as optax.adamw(learning_rate) is, got a value of type "
                f"{type(optax_tx).__name__}; its state is made here"
            )
        params = _of_group(params, state.mu)
        check_state(options, state, params)
        like = optax_tx.init(params)
        adam = _find(like, _kind(options))
        for name in adam._fields[1:]:
            remedy = "an optax_tx for these parameters"
            _checks.check_same_tree(
                f"optax_tx.{name}", getattr(adam, name), params, remedy
            )
    tell_what_stays("to_optax", state)

    def convert(node: Any) -> Any:
        if not _is_known(node):
            return node
        fields = {"count": copy(state.count, node.count.dtype)}
        for name in node._fields[1:]:
            old = getattr(node, name)
            ours = getattr(state, name)
            fields[name] = jax.tree.map(lambda x, y: copy(x, y.dtype), ours, old)
        return node._replace(**fields)

    return jax.tree.map(convert, like, is_leaf=_is_known)


def _of_group(params: Any, mu: Any) -> Any:
    """The parameters that have moments, ``MaskedNode`` in the place of others."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        return jax.tree.map(
            lambda m, param: m if is_masked(m) else param, mu, params, is_leaf=is_masked
        )
    except ValueError:  # of another tree: the checks that follow tell how
        return params


def _kind(options: Options) -> type:
    if options.amsgrad == "uncorrected":
        raise ValueError(
            "fused_adamw: amsgrad=True keeps the maximum of uncorrected moments, as "
            "PyTorch does, optax that of corrected ones, and neither can be turned "
            'into the other; make the optimizer with amsgrad="optax"'
        )
    return _KINDS[options.amsgrad]


def _is_known(node: Any) -> bool:
    return isinstance(node, (*_KINDS.values(), optax.ScaleByScheduleState))


def _find(opt_state: Any, kind: type[Any]) -> Any:
    """The one Adam state in there; raises if another array would be lost."""
    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_known)
    found: list[Any] = [x for _, x in nodes]
    schedules = [x for x in found if isinstance(x, optax.ScaleByScheduleState)]
    adams = [x for x in found if type(x) in _KINDS.values()]
    for path, node in nodes:
        if not _is_known(node):
            raise ValueError(
                "fused_adamw: expected the state of optax.adamw or optax.amsgrad and "
                f"nothing else, got also {_checks.leaf_name('opt_state', path)}, which "
                "has no place in the other; pass the state inside of the wrapper"
            )
    if len(adams) != 1:
        raise ValueError(
            "fused_adamw: expected one state of optax.adamw or optax.amsgrad in "
            f"opt_state, found {len(adams)}"
        )
    (adam,) = adams
    if not isinstance(adam, kind):
        raise ValueError(
            f"fused_adamw: opt_state has a {type(adam).__name__}, the optimizer needs "
            f'a {kind.__name__}: amsgrad="optax" is optax.amsgrad, amsgrad=False '
            "optax.adamw, and no other pair has the same state"
        )
    for schedule in schedules:
        if int(schedule.count) != int(adam.count):
            raise ValueError(
                f"fused_adamw: the schedule in opt_state is at count {schedule.count}, "
                f"Adam at {adam.count}; fused_adamw has one count for both"
            )
    return adam
