"""Everything that a run needs to go on, in one checkpoint of orbax."""

import contextlib
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jax_fused_adamw import _record_checks, _record_leaves
from jax_fused_adamw._transform import FusedAdamW


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
    compares them: orbax by itself would cast to another dtype without a word. So does
    it with a checksum of every leaf's bits, of which orbax by itself may return others
    when the disk has lost some. A checksum reads each array once, where it lies, before
    ``save`` returns; none is gathered or copied to the host for it.

    A thin layer over ``orbax.checkpoint.CheckpointManager``, which writes in the
    background, makes a checkpoint visible only when it is complete, finds the latest
    and deletes old ones. It is the attribute ``manager``, for everything that is not
    here; the items of a checkpoint are ``tree`` and ``about``. Install it with
    ``pip install "jax_fused_adamw[checkpoints]"``.

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
        self._optimizers = _record_checks.optimizers(tx)
        self._is_one = not isinstance(tx, Mapping)
        self._is_read_only = bool(getattr(manager_options, "read_only", False))
        self._keeps_one = getattr(manager_options, "max_to_keep", None) == 1
        path = os.fspath(directory)
        # orbax takes absolute paths only; a bucket's address is one already.
        path = path if "://" in path else os.path.abspath(path)
        ocp = _orbax()
        handlers = {
            "tree": ocp.StandardCheckpointHandler(),
            "about": ocp.JsonCheckpointHandler(),
        }
        self.manager = ocp.CheckpointManager(
            path, options=manager_options, item_handlers=handlers
        )

    def save(self, step: int, tree: Any, *, force: bool = False) -> bool:
        """Saves a tree; returns when its arrays may be donated, before it is written.

        Args:
          step: an integer above those of earlier checkpoints, for example the number
            of completed updates; one of NumPy's or a scalar on the device will do.
          tree: containers with arrays, Python numbers and PRNG keys for leaves.
          force: save at a step that ``manager_options`` would leave out, or below the
            latest, which a restore goes on taking; below it, it returns when all is on
            disk.

        Returns:
          Whether it is saved: not where ``manager_options`` leave the step out.

        Raises:
          ValueError: a step at or below the latest one. To go back, first remove those
            after it: ``record.wait()``, then ``record.manager.delete(step)`` for each.
          PermissionError: a folder that cannot be written to.
          ValueError, TypeError: a leaf that no checkpoint can hold, by its path, as one
            whose replicas differ; a tree without the optimizer's state; a step that is
            no integer.

        Examples:
          >>> import tempfile, jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> with jfa.TrainingRecord(tempfile.mkdtemp()) as record:
          ...   record.save(10, {"w": jnp.ones(2)})
          True
        """
        step = _step_number(step)
        if self._is_read_only:
            return False
        self._check_later(step, force)
        if not force and not self.manager.should_save(step):
            return False
        _record_checks.check_writable(str(self.manager.directory))
        _record_leaves.check_storable(tree)
        _record_checks.check_states(self._optimizers, tree)
        args = _orbax().args
        about = _record_checks.about(self._optimizers, tree)
        items = {"about": args.JsonSave(about)}
        stored = _record_leaves.as_stored(tree)
        if jax.tree.leaves(stored):  # orbax takes no tree without any
            items["tree"] = args.StandardSave(stored)
        is_latest = step > (self.latest_step() or -1)
        saved = self.manager.save(step, args=args.Composite(**items), force=True)
        if not is_latest:
            # orbax has it behind the others, and would delete those first.
            self.wait()
            self.manager.reload()
        return saved

    def restore(
        self, like: Any, step: int | None = None, *, changed: Iterable[str] = ()
    ) -> Restored:
        """What was saved, in the places of ``like``.

        Every leaf's bits are compared with its checksum: damage on the disk is an
        error.

        Args:
          like: a tree with the structure, shapes and dtypes of the saved one, as a new
            run has it: arrays, or :class:`jax.ShapeDtypeStruct` with the shardings of
            :func:`state_shardings`. The values of its arrays are not read. Static data
            in it (the options of a loss scale) is taken over. A Python number may
            stand for a scalar array of its kind, and an array for it.
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
          ValueError: a checkpoint that cannot be read, or whose bits are others than
            were saved, with the steps of the others.

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
        step = self._complete_step(step)
        with self._reading(step):
            about = self._read(step, about=_orbax().args.JsonRestore())
            _record_checks.check_parts(about)
        not_compared = _record_checks.check(
            about, self._optimizers, self._is_one, like, changed
        )
        with self._reading(step):
            found = self._read_leaves(step, about["leaves"], like)
            _record_checks.check_bits(about, found)
        leaves = [
            _record_leaves.converted(found[name], leaf, name)
            if name in found
            else _record_leaves.empty(leaf)
            for name, leaf in _record_leaves.by_path(like).items()
        ]
        tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Restored(step, tree, not_compared)

    def latest_step(self) -> int | None:
        """The latest checkpoint, which is complete after :meth:`wait`.

        A record that only reads (``manager_options`` with ``read_only=True``) looks
        anew, for what another process has saved.

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
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        if self._is_read_only:
            self.manager.reload()
        return list(self.manager.all_steps())

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

    def _check_later(self, step: int, force: bool) -> None:
        latest = self.latest_step()
        if latest is None or step > latest:
            return
        if not force or step in self._steps():
            raise ValueError(
                f"TrainingRecord: expected a step above the latest in "
                f"{self.manager.directory}, {latest}, got {step}; to go back, first "
                f"remove those after it: record.wait(), then "
                f"record.manager.delete(step) for each"
            )
        if self._keeps_one:
            raise ValueError(
                f"TrainingRecord: saving step {step} would delete the latest in "
                f"{self.manager.directory}, {latest}: max_to_keep is 1"
            )

    def _complete_step(self, step: int | None) -> int:
        step = self.latest_step() if step is None else _step_number(step)
        steps = self._steps()
        if step is None or step not in steps:
            raise FileNotFoundError(
                f"TrainingRecord: {self.manager.directory} has no complete checkpoint"
                f"{'' if step is None else f' of step {step}'}; there are those of "
                f"steps {steps}"
            )
        return step

    def _read(self, step: int, **items: Any) -> Any:
        composite = _orbax().args.Composite(**items)
        (found,) = self.manager.restore(step, args=composite).values()
        return found

    def _read_leaves(
        self, step: int, saved: Mapping[str, Any], like: Any
    ) -> dict[str, Any]:
        """Leaves as they were saved, placed as those of ``like`` are, by path.

        In the structure that orbax has saved: there may be a None where there is none
        now, as in a state that had fewer fields.
        """
        likes = {
            _record_leaves.names(path): (keystr(path), leaf)
            for path, leaf in tree_leaves_with_path(like)
            if not _record_leaves.is_empty(leaf)
        }
        if not likes:
            return {}

        def target(path: Any, _: Any) -> Any:
            name, leaf = likes[_record_leaves.names(path)]
            return _record_leaves.target(leaf, saved[name][0])

        structure = self.manager.item_metadata(step)["tree"].tree
        targets = tree_map_with_path(target, structure)
        tree = self._read(step, tree=_orbax().args.StandardRestore(targets))
        found = {_record_leaves.names(p): x for p, x in tree_leaves_with_path(tree)}
        del tree  # so that of what is copied only one leaf is there twice
        return {
            name: _record_leaves.placed(found.pop(names), leaf)
            for names, (name, leaf) in likes.items()
        }

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Makes one kind of error of the many that a damaged checkpoint leads to."""
        try:
            yield
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # which say nothing of the checkpoint
        except Exception as error:
            others = [other for other in self._steps() if other != step]
            told = "there is no other"
            if others:
                told = f"restore(like, step=...) may have one of {others}"
            if others and step > max(others) and not self._is_read_only:
                told += (
                    f", and to go on from there, first remove all after it, by "
                    f"record.manager.delete({step}) and so on: save refuses lower steps"
                )
            raise ValueError(
                f"TrainingRecord: the checkpoint of step {step} in "
                f"{self.manager.directory} is damaged, or was not saved by a "
                f"TrainingRecord; {told} ({type(error).__name__}: {error})"
            ) from error


def _step_number(step: Any) -> int:
    try:
        number = operator.index(jax.device_get(step))
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(
            f"TrainingRecord: expected step as an integer, got {step!r}, a "
            f"{type(step).__name__}"
        )
    if number < 0:
        raise ValueError(f"TrainingRecord: expected a step of 0 or more, got {step}")
    return number


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"jax_fused_adamw.TrainingRecord needs orbax ({error}): pip install "
            "'jax_fused_adamw[checkpoints]' or orbax-checkpoint"
        ) from error
    return ocp
