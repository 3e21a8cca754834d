"""A small GPT over bytes: learned positions, causal self-attention, pre-norm."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

BYTES = 256

# No linear layer has a bias. That of the keys cannot change the softmax: its gradient
# is rounding noise, which Adam scales up to full steps, different in every program.
_linear = functools.partial(nnx.Linear, use_bias=False)
_SMALL = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """Attention, then a two-layer network, each added to what it reads."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query_key_value = _linear(width, 3 * width, rngs=rngs)
        self.mix = _linear(width, width, kernel_init=_SMALL, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = _linear(width, 4 * width, rngs=rngs)
        self.down = _linear(4 * width, width, kernel_init=_SMALL, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))

    def attend(self, x: jax.Array) -> jax.Array:
        """Each position reads from itself and from those before it."""
        batch, length, width = x.shape
        size = width // self.heads
        projected = self.query_key_value(x).reshape(batch, length, 3, self.heads, size)
        query, key, value = jnp.moveaxis(projected, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * size**-0.5
        seen = jnp.tril(jnp.ones((1, 1, length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.mix(mixed.reshape(batch, length, width))


class GPT(nnx.Module):
    """Bytes, int [batch, length], to logits of each next byte [batch, length, 256].

    Args:
      context: the greatest length.
      width: features of a position; a multiple of ``heads``.
      heads: attention heads of a block.
      num_blocks: how many blocks.
      rngs: for the initial parameters.
    """

    def __init__(
        self,
        context: int,
        width: int = 96,
        heads: int = 4,
        num_blocks: int = 2,
        *,
        rngs: nnx.Rngs,
    ):
        self.byte = nnx.Embed(BYTES, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.Sequential(
            *(Block(width, heads, rngs=rngs) for _ in range(num_blocks))
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = _linear(width, BYTES, kernel_init=_SMALL, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        positions = jnp.arange(text.shape[1])[None]
        x = self.byte(text) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


def loss_fn(params: nnx.State, graphdef: nnx.GraphDef, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next byte, in nats.

    Args:
      params: what ``nnx.split`` of a :class:`GPT` returns second.
      graphdef: what it returns first.
      batch: uint8 [batch, length + 1].

    Returns:
      A float32 scalar.
    """
    text = batch.astype(jnp.int32)
    logits = nnx.merge(graphdef, params)(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


@functools.partial(jax.jit, static_argnames=("graphdef", "length"))
def sample(
    params: nnx.State,
    graphdef: nnx.GraphDef,
    prompt: jax.Array,
    key: jax.Array,
    length: int,
    temperature: float = 0.8,
) -> jax.Array:
    """Continues ``prompt``, uint8 [context], by ``length`` bytes, uint8 [length]."""
    model = nnx.merge(graphdef, params)

    def next_byte(window, key):
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    window = prompt.astype(jnp.int32)
    _, text = jax.lax.scan(next_byte, window, jax.random.split(key, length))
    return text.astype(jnp.uint8)
