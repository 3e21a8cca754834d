"""GPT-2: float32 parameters, bfloat16 activations, in plain JAX.

The demo's GPT is another model: without biases, with a head of its own. This one has
GPT-2's 148 leaves, and where the vocabulary is read and predicted by one matrix.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
ACTIVATIONS = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a GPT.

    Attributes:
      vocabulary: how many tokens there are.
      context: tokens of a sequence.
      width: features of a position; a multiple of ``heads``.
      heads: attention heads of a block.
      num_blocks: how many blocks.
    """

    vocabulary: int
    context: int
    width: int
    heads: int
    num_blocks: int


GPT2 = Config(vocabulary=50257, context=1024, width=768, heads=12, num_blocks=12)
TINY = Config(vocabulary=512, context=32, width=64, heads=4, num_blocks=2)


def init(config: Config) -> Params:
    """The same first parameters at every call, in new buffers that may be donated."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * config.num_blocks + 2))
    width = config.width

    def matrix(rows: int, columns: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), (rows, columns))

    def linear(rows: int, columns: int) -> Params:
        return {"kernel": matrix(rows, columns), "bias": jnp.zeros(columns)}

    def norm() -> Params:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> Params:
        return {
            "attention_norm": norm(),
            "query_key_value": linear(width, 3 * width),
            "mix": linear(width, width),
            "mlp_norm": norm(),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
        }

    return {
        "token": matrix(config.vocabulary, width),
        "position": matrix(config.context, width),
        "blocks": [block() for _ in range(config.num_blocks)],
        "norm": norm(),
    }


def tokens(config: Config, batch: int) -> jax.Array:
    """Random tokens, int32 [batch, context + 1]: the last ones are only predicted."""
    shape = (batch, config.context + 1)
    return jax.random.randint(jax.random.key(1), shape, 0, config.vocabulary)


def loss_fn(
    params: Params, tokens: jax.Array, *, heads: int, attention: str
) -> jax.Array:
    """Mean cross-entropy of each next token, in nats, a float32 scalar.

    Args:
      params: of :func:`init`.
      tokens: of :func:`tokens`.
      heads: attention heads of a block.
      attention: ``"cudnn"`` or ``"xla"``, of :func:`choose_attention`.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    embedded = params["token"][inputs] + params["position"][None]
    x = embedded.astype(ACTIVATIONS)
    for block in params["blocks"]:
        x = x + _attend(block, x, heads, attention)
        hidden = jax.nn.gelu(_linear(block["up"], _norm(block["mlp_norm"], x)))
        x = x + _linear(block["down"], hidden)
    logits = jnp.einsum(
        "btd,vd->btv",
        _norm(params["norm"], x),
        params["token"].astype(ACTIVATIONS),
        preferred_element_type=jnp.float32,
    )
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - target_logits).mean()


def _attend(block: Params, x: jax.Array, heads: int, attention: str) -> jax.Array:
    batch, length, width = x.shape
    projected = _linear(block["query_key_value"], _norm(block["attention_norm"], x))
    projected = projected.reshape(batch, length, 3, heads, width // heads)
    query, key, value = jnp.moveaxis(projected, 2, 0)
    mixed = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=attention
    )
    return _linear(block["mix"], mixed.reshape(x.shape))


def _linear(params: Params, x: jax.Array) -> jax.Array:
    product = x @ params["kernel"].astype(ACTIVATIONS)
    return product + params["bias"].astype(ACTIVATIONS)[None, None]


def _norm(params: Params, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    normed = x * params["scale"][None, None] + params["bias"][None, None]
    return normed.astype(ACTIVATIONS)


def choose_attention(config: Config) -> str:
    """``"cudnn"`` where that compiles, forward and backward, else ``"xla"``."""
    if jax.default_backend() != "gpu":
        return "xla"
    shape = (1, config.context, config.heads, config.width // config.heads)

    def total(query: jax.Array) -> jax.Array:
        mixed = jax.nn.dot_product_attention(
            query, query, query, is_causal=True, implementation="cudnn"
        )
        return mixed.astype(jnp.float32).sum()

    try:
        query = jax.ShapeDtypeStruct(shape, ACTIVATIONS)
        jax.jit(jax.grad(total)).lower(query).compile()
    except Exception:  # each of JAX, XLA and cuDNN refuses with an error of its own
        return "xla"
    return "cudnn"
