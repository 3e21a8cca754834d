"""How the update runs on sharded operands: each leaf where its first moment lies.

Without a rule XLA gathers every sharded operand of a custom call and returns
replicated results, in silence.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from jax_fused_adamw._export import refuse_partitioned_export
from jax_fused_adamw._operands import UpdateConfig, unflatten, value_shapes


def sharding_rule(config: UpdateConfig, mesh, operands, results):
    """Leaf i shards alike in all its buffers; scalars are whole on every device.

    But new parameters lie where those lie that come once more, after the operands, and
    are not computed with: where the moments are sharded and the parameters are not
    (ZeRO-1), the new ones are gathered, and the next step compiles no second time.
    """
    del mesh
    first, n = config.first_leaf, config.num_leaves
    num_leaf_results = config.num_result_kinds * n
    leading = () if config.members is None else ("member",)

    n_operands = first + config.num_operand_kinds * n
    ranks = [len(shape) for shape in value_shapes(config)]

    def scalar(i: int, value_type) -> ArrayMapping:
        value_rank = ranks[i]
        members = leading if value_type.rank > value_rank else ()
        return ArrayMapping(*members, *(f"scalar{i}_dim{d}" for d in range(value_rank)))

    def waited_for(i: int, value_type) -> ArrayMapping:
        return ArrayMapping(*(f"after{i}_dim{d}" for d in range(value_type.rank)))

    def leaf(i: int, value_type, name="leaf") -> ArrayMapping:
        own = (f"{name}{i}_dim{d}" for d in range(len(leading), value_type.rank))
        return ArrayMapping(*leading, *own)

    return SdyShardingRule(
        (
            *(scalar(i, x) for i, x in enumerate(operands[: config.num_scalars])),
            *(
                waited_for(i, x)
                for i, x in enumerate(operands[config.num_scalars : first])
            ),
            *(leaf(i % n, x) for i, x in enumerate(operands[first:n_operands])),
            *(leaf(i, x, "param") for i, x in enumerate(operands[n_operands:])),
        ),
        (
            *(leaf(i, x, "param") for i, x in enumerate(results[:n])),
            *(leaf(i % n, x) for i, x in enumerate(results[n:num_leaf_results])),
            *(scalar(0, x) for x in results[num_leaf_results:]),
        ),
    )


def partition(bind: Callable, config: UpdateConfig, mesh, operands, results):
    """Runs each leaf where its mu lies: the state decides the placement.

    A first step, which has no state yet, runs it where its parameter lies.
    """
    n, first = config.num_leaves, config.first_leaf
    num_leaf_results = config.num_result_kinds * n
    operands, params = operands[:-n], operands[-n:]
    _, after, buffers = unflatten(config, operands)
    placements = [leaf.sharding for leaf in buffers.mu or buffers.params]
    member_spec = None
    if config.members is not None:
        member_spec, placements = align_members(mesh, placements)

    def scalar_sharding(shape: tuple[int, ...], x) -> NamedSharding:
        per_member = len(x.shape) > len(shape)
        spec = PartitionSpec(member_spec) if per_member else PartitionSpec()
        return NamedSharding(mesh, spec)

    def update_shard(*shards):
        local = config
        if config.members is not None:
            local = dataclasses.replace(config, members=shards[first].shape[0])
        # jnp operations of the plain-JAX rule must not see the outer explicit mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tuple(bind(*shards[:-n], config=local))

    return (
        mesh,
        update_shard,
        (
            *(placements[i % n] for i in range(num_leaf_results)),
            *(scalar_sharding((), x) for x in results[num_leaf_results:]),
        ),
        (
            *(
                scalar_sharding(shape, x)
                for shape, x in zip(value_shapes(config), operands)
            ),
            *(x.sharding for x in after),
            *(placements[i % n] for i in range(len(operands) - first)),
            *(x.sharding for x in params),
        ),
    )


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

    def define(decode_shardings: bool):
        partitioned = custom_partitioning(function)
        partitioned.def_partition(
            partition=partition,
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


def align_members(mesh, placements):
    """One sharding of the member axis for all leaves: of the first that has one."""
    specs = [spec_of(placement) for placement in placements]
    member_spec = next((spec[0] for spec in specs if spec and spec[0]), None)
    used = spec_axes(member_spec)

    def free(axes) -> bool:
        return set(used).isdisjoint(spec_axes(axes))

    aligned = [
        NamedSharding(
            mesh, PartitionSpec(member_spec, *(a if free(a) else None for a in s[1:]))
        )
        for s in specs
    ]
    return member_spec, aligned


def spec_of(placement) -> tuple:
    """The mesh axes of each dimension."""
    if hasattr(placement, "spec"):
        return tuple(placement.spec)
    if placement.is_fully_replicated:
        return ()
    raise NotImplementedError(
        "fused_adamw: the sharding of a leaf is hidden inside a shard_map that is "
        "manual over only some mesh axes, and a vmap with a learning rate, count or "
        "skip of each member needs it: make the shard_map manual over all axes"
    )


def spec_axes(entry) -> tuple[str, ...]:
    """The mesh axes of one entry of a ``PartitionSpec``."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def even_sharding(mesh, placement, shape: tuple[int, ...]):
    """The placement, whole along dimensions that it cuts into uneven parts.

    XLA fills the last part up, and what it is filled with must not be counted.
    """
    spec = spec_of(placement)
    even = [
        entry
        if size % math.prod(mesh.shape[a] for a in spec_axes(entry)) == 0
        else None
        for entry, size in zip(spec, shape)
    ]
    if even == list(spec):
        return placement
    return NamedSharding(mesh, PartitionSpec(*even))
