"""AdamW and AMSGrad in NumPy, written from the papers' equations.

The oracle of every numeric test, in float64, or for float64 parameters in long double.
It shares nothing with the package: no jax, no reciprocal corrections, no float32.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass
class LeafState:
    mu: np.ndarray
    nu: np.ndarray
    nu_max: np.ndarray

    @classmethod
    def zeros(cls, shape, real: Any = np.float64) -> "LeafState":
        return cls(*(np.zeros(shape, real) for _ in range(3)))


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One leaf's optimizer. ``amsgrad`` is False, True or "optax"."""

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 1e-4
    nesterov: bool = False
    amsgrad: bool | str = False
    maximize: bool = False
    real: Any = np.float64

    def update(self, param, grad, state, step, gradient_scale=1.0):
        """The update (not the new parameter) and the new state; ``step`` from 1."""
        p = np.asarray(param, self.real)
        g = np.asarray(grad, self.real) / gradient_scale
        b1, b2 = self.real(self.b1), self.real(self.b2)
        if self.maximize:
            g = -g
        mu = b1 * state.mu + (1 - b1) * g
        nu = b2 * state.nu + (1 - b2) * g**2
        if self.nesterov:
            ahead = mu / (1 - b1 ** (step + 1))
            mu_hat = b1 * ahead + (1 - b1) * g / (1 - b1**step)
        else:
            mu_hat = mu / (1 - b1**step)
        correction = 1 - b2**step
        if self.amsgrad == "optax":
            nu_max = np.maximum(state.nu_max, nu / correction)
            nu_hat = nu_max
        elif self.amsgrad:
            nu_max = np.maximum(state.nu_max, nu)
            nu_hat = nu_max / correction
        else:
            nu_max, nu_hat = state.nu_max, nu / correction
        direction = mu_hat / (np.sqrt(nu_hat + self.eps_root) + self.eps)
        update = -self.learning_rate * (direction + self.weight_decay * p)
        return update, LeafState(mu, nu, nu_max)
