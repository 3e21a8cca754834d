"""What ``jax.export`` can and cannot save.

A custom call is saved by its name, and found again where the program runs. How XLA is
to partition one is a Python function of this process, which cannot be saved: such a
program is refused here, where JAX would complain of host callbacks.
"""

from typing import Any

from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir


def saved_by_name(cls: type) -> type:
    """A decorator of a NamedTuple: a program with such arguments can be serialized."""
    export.register_namedtuple_serialization(
        cls, serialized_name=f"jax_fused_adamw.{cls.__name__}"
    )
    return cls


def is_for_export(ctx: Any) -> bool:
    """Whether a lowering rule with this context lowers for ``jax.export``."""
    parameters = getattr(ctx.module_context, "lowering_parameters", None)
    return getattr(parameters, "for_export", False)


_guard_p = Primitive("fused_adamw_refuse_partitioned_export")


def refuse_partitioned_export(x: Any) -> Any:
    """``x``, unless a program of several devices is lowered for export.

    For an operand of every call that goes through custom_partitioning.
    """
    return _guard_p.bind(x)


@_guard_p.def_impl
def _impl(x):
    return x


@_guard_p.def_abstract_eval
def _shape_rule(aval):
    return aval


def _lowering(ctx, x):
    context = ctx.module_context.axis_context
    num_devices = getattr(context, "num_devices", None) or context.mesh.size
    if is_for_export(ctx) and num_devices > 1:
        raise NotImplementedError(
            "fused_adamw: jax.export cannot save a program that XLA partitions over "
            f"{num_devices} devices, since the rule for it is a Python function. Put "
            "the step into a jax.shard_map that is manual over all mesh axes, call "
            'init outside of the program or with implementation="xla", or export a '
            "program of one device"
        )
    return [x]


mlir.register_lowering(_guard_p, _lowering)
