"""The optimizer step of one array, without the optax protocol around it."""

import jax

from jax_fused_adamw._alias import fused_adamw
from jax_fused_adamw._options import StepControl, options_of
from jax_fused_adamw._state import FusedAdamWState
from jax_fused_adamw._transform import FusedAdamW, fused_step


def adamw_step(
    p: jax.Array,
    g: jax.Array,
    state: FusedAdamWState | None = None,
    options: FusedAdamW | None = None,
    control: StepControl | None = None,
) -> tuple[jax.Array, FusedAdamWState]:
    """One step of one array, which needs no state to begin with.

    Without a state the kernel takes both moments (and with AMSGrad the maximum) for
    zero instead of reading zeros that something had to write: 20 bytes of memory
    traffic for a float32 parameter, 24 with AMSGrad, and the same bits as a step from
    ``options.init(p)``. That state is what comes back, so later steps may be taken by
    this function or by ``options``.

    Args:
      p: the parameter, of any shape; a tree of parameters will do as well.
      g: its gradient.
      state: what the previous step returned; None for the first one.
      options: the optimizer, made by :func:`fused_adamw`; None for
        ``fused_adamw(1e-3)``.
      control: gradient scale, skip flag and report (which takes the place of the step's
        own analysis); None for none of them. A skipped first step returns the parameter
        as it is and moments of zeros.

    Returns:
      The new parameter and the new state. Under ``jax.jit``, donate ``p`` and
      ``state`` and they are updated in place; outside of it, nothing given is changed.

    Raises:
      ValueError, TypeError: as ``fused_adamw``'s ``update`` does.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> tx = jfa.fused_adamw(0.1)
      >>> p, g = jnp.ones(3), jnp.array([1.0, -1.0, 0.5])
      >>> p, state = jfa.adamw_step(p, g, options=tx)
      >>> p, state = jfa.adamw_step(p, g, state, tx, jfa.StepControl(skip_update=True))
      >>> print(p.round(4), state.count, state.skipped)
      [0.9 1.1 0.9] 1 1
    """
    if options is None:
        options = fused_adamw(1e-3)
    if not isinstance(options, FusedAdamW):
        raise TypeError(
            "adamw_step: options must be made by jfa.fused_adamw, got "
            f"{type(options).__name__}; jfa.step takes any optax transformation"
        )
    if control is None:
        control = StepControl()
    if not isinstance(control, StepControl):
        raise TypeError(
            f"adamw_step: control must be a StepControl, got {type(control).__name__}"
        )
    if state is not None and not isinstance(state, FusedAdamWState):
        raise TypeError(
            f"adamw_step: state must be a FusedAdamWState or None, got "
            f"{type(state).__name__}; the order is adamw_step(p, g, state, options, "
            "control)"
        )
    return fused_step(options_of(options), g, state, p, control, write_params=True)
