"""State that lies where its parameters do."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fused_adamw._partitioning import unless_all_manual, with_partitioning


def _float32(leaf: Any) -> Any:
    del leaf
    return jnp.float32


def zeros_like(
    tree: Any, dtype_of: Callable[[Any], Any] = _float32, partitioned: bool = True
) -> Any:
    """Zeros with the shapes and the shardings of a tree, each in a buffer of its own.

    Args:
      tree: of arrays.
      dtype_of: the dtype of a leaf's zeros.
      partitioned: False makes plain zeros, which XLA replicates under jit, for where
        custom partitioning does not serve: other platforms, exported programs.
    """
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = tuple(np.dtype(dtype_of(leaf)) for leaf in leaves)
    if partitioned and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # XLA replicates plain zeros, which depend on nothing: a partitioned operation
        # makes them. It cannot be differentiated, and need not be.
        zeros = _placed_zeros(dtypes)(*map(jax.lax.stop_gradient, leaves))
    else:
        zeros = map(jnp.zeros_like, leaves, dtypes)
    return jax.tree.unflatten(treedef, zeros)


@functools.cache
def _placed_zeros(dtypes: tuple[np.dtype, ...]):
    """``(*arrays) -> (*zeros)``, each where its array lies."""

    def zeros(*arrays):
        return tuple(map(jnp.zeros_like, arrays, dtypes))

    partition = functools.partial(_partition, zeros)
    partitioned = with_partitioning(zeros, partition, _sharding_rule)
    # Jitted, because custom_partitioning called eagerly replicates its operands.
    batched = custom_vmap(jax.jit(unless_all_manual(zeros, partitioned)))

    @batched.def_vmap
    def batching_rule(axis_size, in_batched, *arrays):
        del axis_size
        return batched(*arrays), tuple(in_batched)

    return batched


def _sharding_rule(mesh, operands, results):
    del mesh, results
    leaves = tuple(
        ArrayMapping(*(f"leaf{i}_dim{d}" for d in range(x.rank)))
        for i, x in enumerate(operands)
    )
    return SdyShardingRule(leaves, leaves)


def _partition(zeros, mesh, operands, results):
    del results
    placements = tuple(x.sharding for x in operands)

    def of_shards(*shards):
        # Operations of jnp must not see the outer explicit mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return zeros(*shards)

    return mesh, of_shards, placements, placements


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` where ``like`` lies (ZeRO-1: a whole array, and one that is cut).

    Traced on a mesh without explicit axes, types do not tell: XLA decides.
    """
    if not any(isinstance(array, jax.core.Tracer) for array in (x, like)):
        # What is not committed lies where it does by default.
        is_committed = getattr(like, "committed", False)
        return jax.device_put(x, like.sharding) if is_committed else x
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        x = jax.sharding.reshard(x, sharding)
    return x


def state_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """The sharding of every array of an optimizer's state, before there is one.

    What belongs to a parameter (its moments, a gradient accumulator) lies where the
    parameter does; counters and reports are whole on every device. The shardings serve
    as ``out_shardings`` of a jitted ``init``, and to restore a checkpoint into.

    Args:
      tx: any optax transformation.
      params: a tree of arrays, or of ``jax.ShapeDtypeStruct`` with a ``sharding``. For
        moments that lie elsewhere than their parameters (ZeRO-1), with the shardings
        that the moments are to have.

    Returns:
      A tree with the structure of ``tx.init(params)``, its leaves shardings.

    Raises:
      ValueError: a parameter without a sharding, named by its path.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> params = {"w": jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=rows)}
      >>> tx = jfa.fused_adamw(1e-3)
      >>> shardings = jfa.state_shardings(tx, params)
      >>> shardings.mu["w"] == rows, shardings.count.is_fully_replicated
      (True, True)

      What a checkpoint is restored into:

      >>> abstract = jax.tree.map(
      ...   lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      ...   jax.eval_shape(tx.init, params), shardings)
      >>> abstract.nu["w"].sharding == rows
      True
    """
    shardings = jax.tree_util.tree_map_with_path(_sharding_of, params)
    whole = _whole(jax.tree.leaves(shardings))
    return optax.tree.map_params(
        tx,
        lambda x, sharding: x if is_empty(x) else sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: whole,
        is_leaf=is_empty,
    )


def is_empty(x: Any) -> bool:
    """Whether a parameter has nothing there: masked out, or a tree of some only."""
    return x is None or isinstance(x, optax.MaskedNode)


def _sharding_of(path: Any, param: Any) -> jax.sharding.Sharding:
    sharding = getattr(param, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"state_shardings: params{jax.tree_util.keystr(path)} has no sharding; "
            "expected an array on a device, or "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
        )
    return sharding


def _whole(shardings: list[jax.sharding.Sharding]) -> jax.sharding.Sharding | None:
    """That of an array which every device of the parameters holds."""
    if not shardings:
        return None
    if isinstance(shardings[0], NamedSharding):
        return NamedSharding(shardings[0].mesh, PartitionSpec())
    return shardings[0]
