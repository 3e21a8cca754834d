"""What an optimizer was told when it was made, and what a step may be told."""

import dataclasses
from typing import Any, NamedTuple

from jax_fused_adamw._hyperparams import ScalarOrSchedule
from jax_fused_adamw._stats import GradReport

# What an option is called inside, by what it is given as.
AMSGRAD: dict[bool | str, str] = {
    False: "off",
    True: "uncorrected",
    "optax": "corrected",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of ``fused_adamw``."""

    learning_rate: ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    weight_decay: Any
    mask: Any
    lr_scale: Any
    nesterov: bool
    amsgrad: str  # one of _operands.AMSGRAD_KINDS
    clip: str  # one of _operands.CLIP_KINDS
    max_grad: Any  # what it limits; infinite without
    skip_nonfinite: bool
    maximize: bool
    mu_dtype: str
    nu_dtype: str
    master_weights: bool
    stochastic_moments: bool  # and some moments are below float32
    stochastic_params: bool
    seed: Any
    ema_decay: Any  # None without an average
    compute_dtype: str | None
    alias: bool
    in_place: bool
    bucket_bytes: int
    implementation: str

    @property
    def given_amsgrad(self) -> bool | str:
        """The argument of ``fused_adamw``."""
        return {kind: given for given, kind in AMSGRAD.items()}[self.amsgrad]

    @property
    def analyses(self) -> bool:
        """Whether a step needs statistics of its gradients."""
        return self.clip == "norm" or self.skip_nonfinite

    @property
    def state_dtypes(self) -> dict[str, str]:
        """The trees of the state that have leaves for parameters, and their dtypes.

        But for float64 parameters: see :func:`._checks.state_dtype`.
        """
        dtypes = {
            "mu": self.mu_dtype,
            "nu": self.nu_dtype,
            "nu_max": None if self.amsgrad == "off" else self.nu_dtype,
            "master": "float32" if self.master_weights else None,
            "ema": None if self.ema_decay is None else "float32",
            "compute": self.compute_dtype,
        }
        return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def options_of(tx: Any) -> Options:
    """Those of a transformation that ``fused_adamw`` has made.

    Raises:
      TypeError: any other transformation.
    """
    given = getattr(getattr(tx, "update", None), "args", ())  # of its partial
    if not (given and isinstance(given[0], Options)):
        raise TypeError(
            f"fused_adamw: expected tx as jfa.fused_adamw made it, got "
            f"{type(tx).__name__}; of a wrapper (chain, accumulate) pass the one "
            "inside, of inject_hyperparams one with its options"
        )
    return given[0]


class StepControl(NamedTuple):
    """What a step may be told besides its gradients: data, on the device or not.

    As the arguments of the same names of ``update`` and :func:`step`.

    Attributes:
      gradient_scale: a scalar; the gradients are divided by it once.
      skip_update: a bool or integer scalar; non-zero skips the step.
      report: a :class:`GradReport` that takes the place of the step's own analysis.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_fused_adamw as jfa
      >>> control = jfa.StepControl(gradient_scale=1024.0, skip_update=jnp.array(True))
      >>> p, state = jfa.adamw_step(jnp.ones(2), jnp.ones(2), control=control)
      >>> print(p, state.count, state.skipped)
      [1. 1.] 0 1
    """

    gradient_scale: Any = 1.0
    skip_update: Any = False
    report: GradReport | None = None
