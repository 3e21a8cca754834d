"""AdamW and AMSGrad in float64 NumPy, written from the papers' equations.

The oracle of every numeric test. It shares nothing with the package: no jax, no
reciprocal corrections, no float32.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class LeafState:
    mu: np.ndarray
    nu: np.ndarray
    nu_max: np.ndarray

    @classmethod
    def zeros(cls, shape) -> "LeafState":
        return cls(*(np.zeros(shape, np.float64) for _ in range(3)))


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

    def update(self, param, grad, state, step, gradient_scale=1.0):
        """The update (not the new parameter) and the new state; ``step`` from 1."""
        p = np.asarray(param, np.float64)
        g = np.asarray(grad, np.float64) / gradient_scale
        if self.maximize:
            g = -g
        mu = self.b1 * state.mu + (1 - self.b1) * g
        nu = self.b2 * state.nu + (1 - self.b2) * g**2
        if self.nesterov:
            ahead = mu / (1 - self.b1 ** (step + 1))
            mu_hat = self.b1 * ahead + (1 - self.b1) * g / (1 - self.b1**step)
        else:
            mu_hat = mu / (1 - self.b1**step)
        correction = 1 - self.b2**step
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
