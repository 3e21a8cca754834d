"""How the update runs on sharded operands: each leaf where its first moment lies.

Without a rule XLA gathers every sharded operand of a custom call and returns
replicated results, in silence.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw._export import refuse_partitioned_export
from jax_fused_adamw._operands import UpdateConfig, unflatten, value_shapes
from jax_fused_adamw._sharded_noise import Shard, at_their_places
from jax_fused_adamw._specs import align_members


def sharding_rule(config: UpdateConfig, mesh, operands, results):
    """Leaf i shards alike in all its buffers; scalars are whole on every device.

    But new parameters and copies lie where those lie that come once more, after the
    operands, and are not computed with: where the moments are sharded and the
    parameters are not (ZeRO-1), the new ones are gathered, and the next step compiles
    no second time.
    """
    del mesh
    n = config.num_leaves
    scalars, others = _cut(operands, config.num_scalars)
    after, others = _cut(others, config.num_after)
    leaves, places = _cut(others, config.num_leaf_operands)
    leaf_results, counters = _cut(results, config.num_leaf_results)
    scalar_ranks = [len(shape) for shape in value_shapes(config)]
    is_batched = config.members is not None

    def scalar(i: int, x) -> ArrayMapping:
        return _mapping(f"scalar{i}", x, scalar_ranks[i])

    def leaf(name: str, i: int, x) -> ArrayMapping:
        return _mapping(f"{name}{i % n}", x, x.rank - is_batched)

    # Operand kinds share the place of their leaf, the last ones have their own.
    place_of = {"out": "param", "copies": "copy"}
    result_names = [place_of.get(kind, "leaf") for kind in config.result_kinds]
    return SdyShardingRule(
        (
            *(scalar(i, x) for i, x in enumerate(scalars)),
            *(_mapping(f"after{i}", x, x.rank) for i, x in enumerate(after)),
            *(leaf("leaf", i, x) for i, x in enumerate(leaves)),
            *(leaf(("param", "copy")[i // n], i, x) for i, x in enumerate(places)),
        ),
        (
            *(leaf(result_names[i // n], i, x) for i, x in enumerate(leaf_results)),
            *(scalar(0, x) for x in counters),
        ),
    )


def _mapping(name: str, x, own_rank: int) -> ArrayMapping:
    """Dimensions of its own, after that of the members where there is one."""
    members = ("member",) * (x.rank - own_rank)
    return ArrayMapping(*members, *(f"{name}_dim{d}" for d in range(own_rank)))


def partition(bind: Callable, config: UpdateConfig, mesh, operands, results):
    """Runs each leaf where its mu lies: the state decides the placement.

    A first step, which has no state yet, runs it where its parameter lies.
    """
    n = config.num_leaves
    operands, places = _cut(operands, config.first_leaf + config.num_leaf_operands)
    _, after, buffers = unflatten(config, operands)
    placements = [leaf.sharding for leaf in buffers.mu or buffers.params]
    member_spec = None
    if config.members is not None:
        member_spec, placements = align_members(mesh, placements)
    shards = [
        Shard.of(i, config, mesh, placement, param.shape)
        for i, (placement, param) in enumerate(zip(placements, buffers.params))
        if config.has_noise
    ]

    def scalar_sharding(shape: tuple[int, ...], x) -> NamedSharding:
        per_member = len(x.shape) > len(shape)
        spec = PartitionSpec(member_spec) if per_member else PartitionSpec()
        return NamedSharding(mesh, spec)

    leaf_results, counters = _cut(results, config.num_leaf_results)
    return (
        mesh,
        functools.partial(_update_shards, bind, config, shards),
        (
            *(placements[i % n] for i in range(len(leaf_results))),
            *(scalar_sharding((), x) for x in counters),
        ),
        (
            *(
                scalar_sharding(shape, x)
                for shape, x in zip(value_shapes(config), operands)
            ),
            *(x.sharding for x in after),
            *(placements[i % n] for i in range(config.num_leaf_operands)),
            *(x.sharding for x in places),
        ),
    )


def _update_shards(
    bind: Callable, config: UpdateConfig, shards: Sequence[Shard], *operands
) -> tuple:
    """What one device runs, on its part of every operand."""
    first = config.first_leaf
    kept, _ = _cut(operands, first + config.num_leaf_operands)
    if config.members is not None:
        config = dataclasses.replace(config, members=kept[first].shape[0])
    # jnp operations of the plain-JAX rule must not see the outer explicit mesh.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        if config.has_noise:
            config, kept = at_their_places(config, shards, kept)
        return tuple(bind(*kept, config=config))


def _cut(flat: Sequence, n: int) -> tuple[Sequence, Sequence]:
    return flat[:n], flat[n:]


def manual_axes() -> frozenset[str]:
    """The mesh axes of the shard_maps around what is traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def is_all_manual() -> bool:
    """Inside a ``shard_map`` that leaves XLA nothing to partition.

    It is manual over all mesh axes, or all but some of one device. With such an axis
    custom_partitioning would end in an assertion of JAX's.
    """
    shape, manual = jax.sharding.get_abstract_mesh().shape, manual_axes()
    return bool(manual) and all(n == 1 or a in manual for a, n in shape.items())


def with_partitioning(
    function: Callable, partition: Callable, sharding_rule: Callable
) -> Callable:
    """``custom_partitioning`` of a function of flat operands."""

    def partition_x64(mesh, operands, results):
        mesh, of_shards, *shardings = partition(mesh, operands, results)
        has_float64 = any(x.dtype == np.float64 for x in (*operands, *results))

        def of_shards_x64(*shards):
            # A thread of XLA's runs this, which the caller's jax.enable_x64 misses.
            is_on = jax.config.jax_enable_x64  # type: ignore[attr-defined]
            with jax.enable_x64(has_float64 or is_on):
                return of_shards(*shards)

        return mesh, of_shards_x64, *shardings

    def define(decode_shardings: bool):
        partitioned = custom_partitioning(function)
        partitioned.def_partition(
            partition=partition_x64,
            sharding_rule=sharding_rule,
            decode_shardings=decode_shardings,
        )
        return partitioned

    # Inside a shard_map over some mesh axes JAX cannot tell a spec, and fails to where
    # there is a context mesh.
    visible, hidden = define(True), define(False)

    def partitioned(*operands):
        return (hidden if manual_axes() else visible)(*operands)

    return partitioned


def unless_all_manual(plain: Callable, partitioned: Callable) -> Callable:
    """``partitioned``, or where XLA has nothing to partition the plain function."""

    def call(first, *others):
        if is_all_manual():
            return plain(first, *others)
        return partitioned(refuse_partitioned_export(first), *others)

    return call


def _partition_identity(mesh, operands, results):
    del operands, results
    whole = NamedSharding(mesh, PartitionSpec())
    return mesh, lambda x: (x,), (whole,), (whole,)


_partitioned_identity = with_partitioning(
    lambda x: (x,),
    _partition_identity,
    lambda *_: SdyShardingRule((ArrayMapping(),), (ArrayMapping(),)),
)


@jax.custom_jvp
def _reveal_devices(x):
    return _partitioned_identity(x)[0]


@_reveal_devices.defjvp
def _jvp(primals, tangents):
    return primals[0], tangents[0]


@custom_vmap
def reveal_devices(x):
    """A scalar as it is, in a program that knows its devices.

    JAX tells lowering rules the devices where it sees a custom_partitioning before it
    lowers, and ends in an assertion where one comes out of a rule.
    """
    return _reveal_devices(x)


@reveal_devices.def_vmap
def _batching_rule(axis_size, in_batched, x):
    del axis_size
    return x, in_batched[0]
