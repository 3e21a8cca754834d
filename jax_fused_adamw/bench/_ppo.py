"""The minibatch updates of proximal policy optimization: tiny networks, many steps.

Everything is on the device already, as in training loops that JAX compiles whole, so
the optimizer's launches are a large part of an update.
"""

import jax
import jax.numpy as jnp

Layers = list[dict[str, jax.Array]]
OBSERVATION, ACTIONS, HIDDEN = 8, 4, 64
MINIBATCHES, MINIBATCH = 32, 256
_CLIP, _VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.2, 0.5, 0.01


def init() -> dict[str, Layers]:
    """The same 12 leaves at every call, in new buffers that may be donated."""
    policy, value = jax.random.split(jax.random.key(0))
    return {"policy": _init_mlp(policy, ACTIONS), "value": _init_mlp(value, 1)}


def _init_mlp(key: jax.Array, outputs: int) -> Layers:
    sizes = (OBSERVATION, HIDDEN, HIDDEN, outputs)
    return [
        {
            "kernel": jax.random.normal(key, (n_in, n_out)) * n_in**-0.5,
            "bias": jnp.zeros(n_out),
        }
        for key, n_in, n_out in zip(jax.random.split(key, 3), sizes, sizes[1:])
    ]


def rollout() -> dict[str, jax.Array]:
    """What a policy might have met: every array is [minibatches, minibatch, ...]."""
    observation_key, action_key, noise_key = jax.random.split(jax.random.key(1), 3)
    shape = (MINIBATCHES, MINIBATCH)
    observations = jax.random.normal(observation_key, (*shape, OBSERVATION))
    returns = 2.0 + observations[..., 0] * observations[..., 1]
    return {
        "observations": observations,
        "actions": jax.random.randint(action_key, shape, 0, ACTIONS),
        "old_log_probs": jnp.full(shape, -jnp.log(float(ACTIONS))),
        "advantages": returns - 2.0 + jax.random.normal(noise_key, shape),
        "returns": returns,
    }


def loss_fn(params: dict[str, Layers], minibatch: dict[str, jax.Array]) -> jax.Array:
    """Clipped surrogate, value loss and entropy bonus of a minibatch."""
    log_probs = jax.nn.log_softmax(_mlp(params["policy"], minibatch["observations"]))
    actions = minibatch["actions"][:, None]
    taken = jnp.take_along_axis(log_probs, actions, axis=-1)[:, 0]
    ratio = jnp.exp(taken - minibatch["old_log_probs"])
    clipped = jnp.clip(ratio, 1 - _CLIP, 1 + _CLIP)
    advantages = minibatch["advantages"]
    surrogate = jnp.minimum(ratio * advantages, clipped * advantages).mean()
    values = _mlp(params["value"], minibatch["observations"])[:, 0]
    value_loss = jnp.square(values - minibatch["returns"]).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return _VALUE_WEIGHT * value_loss - surrogate - _ENTROPY_WEIGHT * entropy


def _mlp(layers: Layers, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"][None]
