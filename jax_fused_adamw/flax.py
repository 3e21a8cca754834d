"""Flax's train state, with the step's data and parameters in place.

``flax.nnx.Optimizer`` needs nothing from here: its ``update(model, grads, **kwargs)``
passes ``skip_update``, ``gradient_scale`` and ``report`` on to the transformation, and
works in place with ``fused_adamw(..., in_place=True)``.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_fused_adamw._in_place import step
from jax_fused_adamw._stats import GradReport

try:
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ImportError as error:
    raise ImportError(
        f"jax_fused_adamw.flax needs Flax ({error}): pip install flax"
    ) from error


class TrainState(train_state.TrainState):
    """Flax's ``TrainState`` whose :meth:`apply_gradients` can skip and unscale.

    Everything else is Flax's: ``create``, the fields, subclasses with more fields. The
    optimizer may be any optax transformation; a ``fused_adamw`` in it writes the
    parameters in place when the state is donated, without ``in_place=True``.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> import jax_fused_adamw.flax
      >>> state = jfa.flax.TrainState.create(
      ...   apply_fn=None, params={"w": jnp.ones(2)}, tx=jfa.fused_adamw(0.1))
      >>> @jax.jit  # in a training loop: jax.jit(..., donate_argnums=0)
      ... def train_step(state, finite):
      ...   grads = jax.grad(lambda p: 8.0 * p["w"].sum())(state.params)
      ...   return state.apply_gradients(
      ...     grads=grads, skip_update=~finite, gradient_scale=8.0)
      >>> for finite in (True, False):
      ...   state = train_step(state, jnp.array(finite))
      >>> print(state.params["w"].round(4), state.step, state.opt_state.count)
      [0.9 0.9] 2 1
    """

    def apply_gradients(
        self,
        *,
        grads: Any,
        skip_update: Any = None,
        gradient_scale: Any = None,
        report: GradReport | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """One call of :func:`jax_fused_adamw.step` on ``params`` and ``opt_state``.

        The collection ``OVERWRITE_WITH_GRADIENT`` takes its gradients as its new
        values, as in Flax, but for a step that ``skip_update`` skips; a skip that the
        optimizer decides on its own is not seen here.

        Args:
          grads: gradients, with the tree of ``params``.
          skip_update: a bool or integer scalar; non-zero skips the step.
          gradient_scale: the loss scale that the gradients carry.
          report: statistics of the gradients, in place of the optimizer's own.
          extra_args: further arguments of ``tx.update``, by name. Those that nobody
            in ``tx`` knows are ignored, as optax does.
          **kwargs: fields to replace, such as ``batch_stats``.

        Returns:
          The new state. ``step`` is one higher, as in Flax: it counts calls, skipped
          ones too; ``opt_state.count`` counts applied steps.

        Raises:
          ValueError, TypeError: as :func:`jax_fused_adamw.step` does.

        Examples:
          >>> import jax.numpy as jnp
          >>> import jax_fused_adamw as jfa
          >>> import jax_fused_adamw.flax
          >>> params = {"w": jnp.ones(2)}
          >>> state = jfa.flax.TrainState.create(
          ...   apply_fn=None, params=params, tx=jfa.fused_adamw(0.1))
          >>> state = state.apply_gradients(grads=params)
          >>> state = state.apply_gradients(grads=params, skip_update=True)
          >>> print(state.params["w"].round(4), state.step, state.opt_state.count)
          [0.9 0.9] 2 1
        """
        given = {
            "skip_update": skip_update,
            "gradient_scale": gradient_scale,
            "report": report,
        }
        extra_args = {
            **(extra_args or {}),
            **{name: value for name, value in given.items() if value is not None},
        }
        overwrites = OVERWRITE_WITH_GRADIENT in grads
        params, opt_state = step(
            self.tx,
            grads["params"] if overwrites else grads,
            self.opt_state,
            self.params["params"] if overwrites else self.params,
            **extra_args,
        )
        if overwrites:
            overwritten = grads[OVERWRITE_WITH_GRADIENT]
            if skip_update is not None:
                skips = jnp.asarray(skip_update) != 0
                overwritten = jax.tree.map(
                    lambda new, old: jnp.where(skips, old, new),
                    overwritten,
                    self.params[OVERWRITE_WITH_GRADIENT],
                )
            params = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
