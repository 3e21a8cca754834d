"""Everything that a run needs to go on, in one checkpoint of orbax."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jax_fused_adamw._loss_scale import DynamicLossScale
from jax_fused_adamw._transform import FusedAdamW

_VERSION = 1


class Restored(NamedTuple):
    """What :meth:`TrainingRecord.restore` returns.

    Attributes:
      step: the number that it was saved under.
      tree: as it was saved.
      not_compared: options that may differ, as schedules and mask functions.

    Examples:
      >>> import tempfile
      >>> import jax_fused_adamw as jfa
      >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
      ...   saved = record.save(1, {"epoch": 3})
      ...   record.restore({"epoch": 0})
      Restored(step=1, tree={'epoch': 3}, not_compared=())
    """

    step: int
    tree: Any
    not_compared: tuple[str, ...]


class TrainingRecord:
    """Saves and restores a whole training run, as one checkpoint.

    Parameters, the optimizer's state (with the count that its schedule reads, and the
    pending window of :func:`accumulate`), a loss scale and whatever else the caller
    needs (a data position, a PRNG key, numbers) are one tree, saved together under the
    number of a step: either all of it is there, or the step is not. A run that goes on
    from it has the bits of one that was never stopped.

    With the tree go the options of the optimizer, those of each
    :class:`DynamicLossScale` and the dtype and shape of every leaf, and a restore
    compares them: orbax by itself would cast to another dtype without a word.

    A thin layer over ``orbax.checkpoint.CheckpointManager``, which writes in the
    background, makes a checkpoint visible only when it is complete, finds the latest
    and deletes old ones. It is the attribute ``manager``, for everything that is not
    here. Install it with ``pip install "jax_fused_adamw[checkpoints]"``.

    Args:
      directory: of the run; made if it is not there.
      tx: the :func:`fused_adamw` whose options are saved and compared; of a wrapper
        (``accumulate``, ``chain``) the one inside; of several
        (``optax.multi_transform``) a dict of them by name. None compares nothing. The
        ``every_k`` of :func:`accumulate` is not compared.
      manager_options: an ``orbax.checkpoint.CheckpointManagerOptions``, for example
        with ``max_to_keep``.

    Raises:
      ImportError: orbax is not installed.
      TypeError: a ``tx`` that ``fused_adamw`` has not made.

    Examples:
      >>> import tempfile, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx, params = jfa.fused_adamw(0.1), {"w": jnp.ones(2)}
      >>> tree = {"params": params, "state": tx.init(params), "epoch": 3}
      >>> with jfa.TrainingRecord(tempfile.mkdtemp(), tx) as record:
      ...   saved = record.save(100, tree)  # returns before it is on disk
      ...   step, restored, _ = record.restore(tree)
      >>> print(step, restored["epoch"], restored["params"]["w"])
      100 3 [1. 1.]
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        tx: FusedAdamW | Mapping[str, FusedAdamW] | None = None,
        manager_options: Any = None,
    ):
        is_one = not isinstance(tx, Mapping)
        named: Mapping[str, Any] = {} if tx is None else {"tx": tx}
        if isinstance(tx, Mapping):
            named = tx
        for name, optimizer in named.items():
            if not isinstance(optimizer, FusedAdamW):
                where = "tx" if is_one else f"tx[{name!r}]"
                raise TypeError(
                    f"TrainingRecord: expected {where} as jfa.fused_adamw made it, got "
                    f"{type(optimizer).__name__}; of a wrapper (accumulate, chain) "
                    "pass the one inside"
                )
        self._optimizers = dict(named)
        # Of the names of their options.
        self._prefixes = {name: "" if is_one else f"{name}." for name in named}
        path = os.fspath(directory)
        # orbax takes absolute paths only; a bucket's address is one already.
        path = path if "://" in path else os.path.abspath(path)
        self.manager = _orbax().CheckpointManager(path, options=manager_options)

    def save(self, step: int, tree: Any, *, force: bool = False) -> bool:
        """Saves a tree; returns when its arrays may be donated, before it is written.

        Args:
          step: a number above those of earlier checkpoints, for example that of
            completed updates.
          tree: containers with arrays, Python numbers and PRNG keys for leaves.
          force: save at a step that ``manager_options`` would leave out.

        Returns:
          Whether it is saved. Not where ``manager_options`` leave the step out, and
          without ``force`` not at or below the latest step: to go back, remove the
          later ones first, by ``manager.delete``.

        Examples:
          >>> import tempfile, jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
          ...   record.save(10, {"w": jnp.ones(2)})
          True
        """
        args = _orbax().args
        items = args.Composite(
            tree=args.StandardSave(jax.tree.map(_storable, tree)),
            about=args.JsonSave(self._about(tree)),
        )
        return self.manager.save(step, args=items, force=force)

    def restore(
        self, like: Any, step: int | None = None, *, changed: Iterable[str] = ()
    ) -> Restored:
        """What was saved, in the places of ``like``.

        Args:
          like: a tree with the structure, shapes and dtypes of the saved one, as a new
            run has it: arrays, or :class:`jax.ShapeDtypeStruct` with the shardings of
            :func:`state_shardings`. The values of its arrays are not read. Static data
            in it (the options of a loss scale) is taken over.
          step: the number of a checkpoint; None is the latest complete one.
          changed: options that are meant to differ, by name, as for
            :meth:`FusedAdamW.check_options`; of several optimizers ``"name.option"``.

        Returns:
          A :class:`Restored`. An array lies where that of ``like`` does; where ``like``
          is not committed to a device, or tells no sharding, on the default device,
          free to be moved.

        Raises:
          FileNotFoundError: no complete checkpoint.
          ValueError: options, paths of leaves, shapes or dtypes that differ,
            by name, with what was saved and what is expected.

        Examples:
          >>> import tempfile, jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
          ...   saved = record.save(10, {"w": jnp.ones(2)})
          ...   step, tree, _ = record.restore(like={"w": jnp.zeros(2)})
          >>> print(step, tree["w"])
          10 [1. 1.]
        """
        self.wait()
        step = self.latest_step() if step is None else step
        if step is None or step not in self.manager.all_steps():
            raise FileNotFoundError(
                f"TrainingRecord: {self.manager.directory} has no complete checkpoint"
                f"{'' if step is None else f' of step {step}'}; there are those of "
                f"steps {list(self.manager.all_steps())}"
            )
        args = _orbax().args
        about = self._read_about(step)
        not_compared = self._check(about, like, changed)
        target = jax.tree.map(_target, like)
        items = args.Composite(tree=args.StandardRestore(target))
        tree = self.manager.restore(step, args=items)["tree"]
        return Restored(step, jax.tree.map(_placed, tree, like), not_compared)

    def latest_step(self) -> int | None:
        """The latest complete checkpoint.

        Returns:
          Its number; None without one.

        Examples:
          >>> import tempfile
          >>> import jax_fused_adamw as jfa
          >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
          ...   saved = [record.save(step, {"epoch": step}) for step in (1, 2)]
          ...   record.wait()
          ...   record.latest_step()
          2
        """
        return self.manager.latest_step()

    def wait(self) -> None:
        """Waits until all that is saved is on disk.

        Returns:
          Nothing.

        Examples:
          >>> import tempfile
          >>> import jax_fused_adamw as jfa
          >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
          ...   saved = record.save(1, {"epoch": 3})
          ...   record.wait()
        """
        self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads of orbax; so does leaving a ``with`` block.

        Returns:
          Nothing.

        Examples:
          >>> import tempfile
          >>> import jax_fused_adamw as jfa
          >>> jfa.TrainingRecord(tempfile.mkdtemp()).close()
        """
        self.wait()
        self.manager.close()

    def __enter__(self) -> "TrainingRecord":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _about(self, tree: Any) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "options": {name: tx.options() for name, tx in self._optimizers.items()},
            "loss_scales": _loss_scales(tree),
            "leaves": _leaves(tree),
        }

    def _read_about(self, step: int) -> Mapping[str, Any]:
        args = _orbax().args
        items = args.Composite(about=args.JsonRestore())
        try:
            return self.manager.restore(step, args=items)["about"]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"TrainingRecord: the checkpoint of step {step} in "
                f"{self.manager.directory} is damaged, or was not saved by a "
                f"TrainingRecord ({error}); record.manager restores others"
            ) from error

    def _check(
        self, about: Mapping[str, Any], like: Any, changed: Iterable[str]
    ) -> tuple[str, ...]:
        """Raises for what differs; returns what could not be compared."""
        if about["version"] != _VERSION:
            raise ValueError(
                f"TrainingRecord: the checkpoint has version {about['version']}, this "
                f"release knows {_VERSION}; restore with the release that saved it"
            )
        changed = (changed,) if isinstance(changed, str) else tuple(changed)
        _compare_keys("optimizer", about["options"], self._optimizers)
        not_compared = []
        for name, tx in self._optimizers.items():
            start = self._prefixes[name]
            own = [x.removeprefix(start) for x in changed if x.startswith(start)]
            try:
                found = tx.check_options(about["options"][name], own)
            except ValueError as error:
                raise ValueError(
                    f"TrainingRecord: optimizer {name!r}: {error}"
                ) from None
            not_compared += [start + option for option in found]
        _compare("leaf", about["leaves"], _leaves(like), "dtype and shape")
        scales = _loss_scales(like)
        _compare("loss scale", about["loss_scales"], scales, "options")
        return tuple(not_compared)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"jax_fused_adamw.TrainingRecord needs orbax ({error}): pip install "
            "'jax_fused_adamw[checkpoints]' or orbax-checkpoint"
        ) from error
    return ocp


def _storable(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _is_free(leaf: Any) -> bool:
    """Whether nothing says on which devices the array is to be."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is None
    return isinstance(leaf, jax.Array) and not leaf.committed


def _target(leaf: Any) -> Any:
    """What orbax is to restore a leaf as."""
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        return leaf
    if _is_free(leaf):
        # By orbax it would be committed to a device, and no jit would take it together
        # with arrays of a mesh. This one has its shape in no memory.
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return _storable(leaf)


def _placed(leaf: Any, like: Any) -> Any:
    if not _is_free(like):
        return leaf
    if isinstance(leaf, np.ndarray):
        return jnp.array(leaf)
    data = np.asarray(jax.random.key_data(leaf))
    return jax.random.wrap_key_data(jnp.array(data), impl=jax.random.key_impl(leaf))


def _leaves(tree: Any) -> dict[str, Any]:
    """Dtype and shape of every leaf, by its path."""

    def describe(leaf: Any) -> list[Any]:
        if hasattr(leaf, "dtype"):
            return [str(leaf.dtype), list(leaf.shape)]
        return [type(leaf).__name__, []]

    return {keystr(path): describe(leaf) for path, leaf in tree_leaves_with_path(tree)}


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
    kind: str, saved: Mapping[str, Any], now: Mapping[str, Any], what: str
) -> None:
    """Raises for the first difference between dicts by path."""
    _compare_keys(kind, saved, now)
    for name, expected in now.items():
        if saved[name] != expected:
            raise ValueError(
                f"TrainingRecord: {kind} {name} was saved with {what} {saved[name]}, "
                f"and here has {expected}: restore into what was saved, and convert "
                "then"
            )
