"""Primitives outside of any trace."""

import functools

import jax
from jax.extend.core import Primitive


def run_eagerly(primitive: Primitive) -> None:
    """Lets a primitive outside of a trace compile and run as a program of its own."""

    @functools.cache
    def jitted(**params):
        def bind(*operands):
            return primitive.bind(*operands, **params)

        bind.__name__ = bind.__qualname__ = primitive.name
        # What finds a NaN under jax.debug_nans calls a jitted function's operations one
        # by one, but for the functions that JAX marks so for its own primitives (an
        # attribute of no public interface). This one would be called again by its only
        # operation, for ever.
        bind._apply_primitive = True  # type: ignore[attr-defined]
        return jax.jit(bind)

    @primitive.def_impl
    def impl(*operands, **params):
        # Under jax.disable_jit a jitted bind would come back here, for ever.
        with jax.disable_jit(False):
            return jitted(**params)(*operands)
