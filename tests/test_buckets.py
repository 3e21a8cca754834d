"""Buckets: gradients die early, nothing is copied, and the bits stay the same."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, count_ops, mixed_tree
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fused_adamw as jfa
from jax_fused_adamw._buckets import make_buckets

LAYERS, WIDTH = 24, 512
MEBI = 2**20
ORDERS = {
    "forward": list(range(LAYERS)),
    "backward": list(range(LAYERS))[::-1],
    "as sorted names": sorted(range(LAYERS), key=str),
    "shuffled": [(7 * i + 3) % LAYERS for i in range(LAYERS)],
}


def _mlp(order):
    """Parameters in the order of `order`, and their loss in the order of the layers."""
    layer = {"w": jnp.full((WIDTH, WIDTH), 0.01), "b": jnp.zeros(WIDTH)}
    place = {layer: i for i, layer in enumerate(order)}

    def loss(params, x):
        for i in range(LAYERS):
            x = jnp.tanh(x @ params[place[i]]["w"] + params[place[i]]["b"][None])
        return jnp.square(x).mean()

    return [layer] * LAYERS, loss


def _compile(tx, params, loss, *batch, step=jfa.step, gradient=None):
    gradient = gradient or jax.grad(loss)

    def train_step(params, state, *batch):
        return step(tx, gradient(params, *batch), state, params)

    shapes = jax.eval_shape(lambda p: (p, tx.init(p)), params)
    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    return jitted.lower(*shapes, *batch).compile()


def _optax_step(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _temp(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def _copies(compiled):
    """Copies of whole matrices; XLA also copies some of its own few bytes."""
    text = compiled.as_text()
    return re.findall(rf"= f32\[{WIDTH},{WIDTH}\]\S* copy\(.*", text)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bucket_bytes", [MEBI, 4 * MEBI, 8 * MEBI])
def test_temporary_memory_is_that_of_xla_and_one_bucket(order, bucket_bytes):
    params, loss = _mlp(ORDERS[order])
    x = jnp.ones((8, WIDTH))
    forward, forward_loss = _mlp(ORDERS["forward"])
    xla = _compile(optax.adamw(1e-3), forward, forward_loss, x, step=_optax_step)
    ours = _compile(jfa.fused_adamw(1e-3, bucket_bytes=bucket_bytes), params, loss, x)
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)  # a bucket closes at the end of a leaf
    assert _temp(ours) <= _temp(xla) + bucket_bytes + layer_bytes
    assert not _copies(ours)
    one_call = _compile(jfa.fused_adamw(1e-3), params, loss, x)
    assert _temp(one_call) > 3 * _temp(ours) or bucket_bytes == 8 * MEBI
    assert not _copies(one_call)


def test_large_trees_go_in_buckets_by_default():
    leaf = jax.ShapeDtypeStruct((256 * MEBI // 4,), jnp.float32)
    params = [leaf, leaf, leaf]

    def loss(params):
        return jnp.sum(params[2] * jnp.sin(params[1] * jnp.sin(params[0])))

    compiled = _compile(jfa.fused_adamw(1e-3), params, loss)
    assert compiled.as_text().count("jax_fused_adamw_update") == 2


# --- Models whose dataflow is not a chain ---------------------------------------------

SHAPE = (WIDTH, WIDTH)


def _weights(n):
    return {f"w{i}": jnp.full(SHAPE, 0.01) for i in range(n)}


def _residual(params, x):
    for i in range(0, 8, 2):
        x = x + jnp.tanh(x @ params[f"w{i}"]) @ params[f"w{i + 1}"]
    return jnp.square(x).mean()


def _tied(params, x):
    x = x @ params["w0"]
    for i in range(1, 8):
        x = jnp.tanh(x @ params[f"w{i}"])
    return jnp.square(x @ params["w0"].T).mean()


def _encoder_and_decoder(params, x):
    """Named so that neither order of the names is that of the layers."""
    for i in (4, 5, 6):
        x = jnp.tanh(x @ params[f"w{i}"])
    y = x
    for i in (0, 1, 2, 3):
        y = jnp.tanh(y @ params[f"w{i}"]) + x @ params["w7"]
    return jnp.square(y).mean()


def _remat(params, x):
    layer = jax.checkpoint(lambda x, v, w: x + jnp.tanh(x @ v) @ w)
    for i in range(0, 8, 2):
        x = layer(x, params[f"w{i}"], params[f"w{i + 1}"])
    return jnp.square(x).mean()


def _nested_jit(params, x):
    layer = jax.jit(lambda x, v, w: jnp.tanh(x @ v) @ w)
    for i in range(0, 8, 2):
        x = layer(x, params[f"w{i}"], params[f"w{i + 1}"])
    return jnp.square(x).mean()


def _bfloat16_compute(params, x):
    x = x.astype(jnp.bfloat16)
    for i in range(8):
        x = jnp.tanh(x @ params[f"w{i}"].astype(jnp.bfloat16))
    return jnp.square(x.astype(jnp.float32)).mean()


def _one_leaf_unused(params, x):
    return jnp.square(jnp.tanh(x @ params["w0"]) @ params["w5"]).mean()


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(12):  # Dense_10 sorts before Dense_2
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return x


def _linen(params, x):
    return jnp.square(_Linen().apply(params, x)).mean()


MODELS = {
    "residual": _residual,
    "tied": _tied,
    "encoder and decoder": _encoder_and_decoder,
    "remat": _remat,
    "nested jit": _nested_jit,
    "bfloat16 compute": _bfloat16_compute,
    "one leaf unused": _one_leaf_unused,
    "linen": _linen,
}


def _params_of(model):
    if model == "linen":
        return _Linen().init(jax.random.key(0), jnp.ones((2, WIDTH)))
    return _weights(8)


@pytest.mark.parametrize("bucket_bytes", [MEBI, 3 * MEBI])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_copied(model, bucket_bytes):
    params, x = _params_of(model), jnp.ones((8, WIDTH))
    tx = jfa.fused_adamw(1e-3, bucket_bytes=bucket_bytes)
    compiled = _compile(tx, params, MODELS[model], x)
    assert compiled.as_text().count("jax_fused_adamw_update") > 1
    # What else there is are transposed gradients, which one call needs as well.
    one_call = _compile(jfa.fused_adamw(1e-3), params, MODELS[model], x)
    assert len(_copies(compiled)) == len(_copies(one_call))
    assert not [line for line in _copies(compiled) if "transpose" not in line]


def _dot(x, w):
    return jnp.tanh(x @ w)


# What stands between a weight and the loss, and must not hide its last reader.
LAYER_KINDS = {
    "plain": _dot,
    "transposed": lambda x, w: _dot(x, w.T),
    "reshaped": lambda x, w: _dot(x, w.reshape(-1).reshape(SHAPE)),
    "indexed": lambda x, w: _dot(x, w[None][0]),
    "scaled": lambda x, w: _dot(x, w * 0.5),
    "named": lambda x, w: _dot(x, checkpoint_name(w, "w")),
    "barrier": lambda x, w: _dot(x, jax.lax.optimization_barrier(w)),
    "barrier of two": lambda x, w: _dot(*jax.lax.optimization_barrier((x, w))),
    "einsum": lambda x, w: jnp.tanh(jnp.einsum("bi,oi->bo", x, w)),
    "checkpoint": jax.checkpoint(_dot),
    "jit": jax.jit(_dot),
    "checkpoint of jit": jax.checkpoint(jax.jit(lambda x, w: _dot(x, w.T))),
}


@pytest.mark.parametrize("whole", ["", "jitted loss", "jitted gradient"])
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_memory_whatever_wraps_a_layer(kind, whole):
    weights, x = [jnp.full(SHAPE, 0.01)] * 12, jnp.ones((8, WIDTH))

    def loss(weights, x):
        for w in weights:
            x = LAYER_KINDS[kind](x, w)
        return jnp.square(x).mean()

    loss = jax.jit(loss) if whole == "jitted loss" else loss
    gradient = jax.jit(jax.grad(loss)) if whole == "jitted gradient" else None
    xla = _compile(optax.adamw(1e-3), weights, loss, x, step=_optax_step)
    tx = jfa.fused_adamw(1e-3, bucket_bytes=MEBI)
    ours = _compile(tx, weights, loss, x, gradient=gradient)
    assert not _copies(ours)
    assert _temp(ours) <= _temp(xla) + 2 * MEBI


def test_one_equation_of_many_gradients_makes_one_call():
    """Nothing in it is ready before the rest, so nothing is gained by waiting."""
    weights, x = [jnp.full(SHAPE, 0.01)] * 6, jnp.ones((3, 8, WIDTH))

    def loss(weights, batches):
        def add(total, batch):
            for w in weights:
                batch = _dot(batch, w)
            return total + jnp.square(batch).mean(), None

        return jax.lax.scan(add, 0.0, batches)[0]

    compiled = _compile(jfa.fused_adamw(1e-3, bucket_bytes=1), weights, loss, x)
    assert compiled.as_text().count("jax_fused_adamw_update") == 1


# --- Bits and composition -------------------------------------------------------------


def _exact_loss(params):
    """Gradients p / 2, one power of two away: no compiler can round them otherwise."""
    leaves = jax.tree.leaves(params)
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) / 4 for leaf in leaves)


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"in_place": True}], ids=str
)
def test_bits_do_not_depend_on_buckets(options):
    params, _ = mixed_tree()
    mask = {name: i % 2 == 0 for i, name in enumerate(params)}
    lr_scale = {name: i / 4 for i, name in enumerate(params)}

    def steps(bucket_bytes):
        tx = jfa.fused_adamw(
            0.1,
            weight_decay=0.1,
            mask=mask,
            lr_scale=lr_scale,
            bucket_bytes=bucket_bytes,
            **options,
        )

        @jax.jit
        def train_step(params, state):
            grads = jax.grad(_exact_loss)(params)
            updates, state = tx.update(
                grads, state, params, gradient_scale=3.0, skip_update=state.count == 2
            )
            return optax.apply_updates(params, updates), state

        new, state = params, tx.init(params)
        for _ in range(4):
            new, state = train_step(new, state)
        return new, state

    expected = steps(None)
    assert int(expected[1].count) == 2
    for bucket_bytes in (1, 300, 500):
        assert_same_bits(steps(bucket_bytes), expected)


def test_buckets_under_vmap_and_in_scan():
    members = {"a": jnp.linspace(0.0, 1.0, 12).reshape(3, 4), "b": jnp.ones((3, 2))}

    def train(bucket_bytes):
        tx = jfa.fused_adamw(0.1, bucket_bytes=bucket_bytes)

        def body(carry, _):
            params, state = carry
            grads = jax.grad(_exact_loss)(params)
            return jfa.step(tx, grads, state, params), None

        def member(params):
            return jax.lax.scan(body, (params, tx.init(params)), length=3)[0]

        return jax.jit(jax.vmap(member))(members)

    assert_same_bits(train(1), train(None))


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_buckets_gather_nothing(kind):
    kinds = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    specs = {"w0": P("x", "y"), "w1": P("y"), "w2": P(None, "x"), "w3": P()}
    values = {name: np.linspace(-1, 1, 64, dtype=np.float32) for name in specs}
    values = {name: value.reshape(8, 8) for name, value in values.items()}
    txs = [jfa.fused_adamw(0.1, bucket_bytes=size) for size in (1, None)]

    def train_step(tx, params, state):
        return jfa.step(tx, jax.grad(_exact_loss)(params), state, params)

    with jax.set_mesh(mesh):
        params = {
            name: jax.device_put(value, NamedSharding(mesh, specs[name]))
            for name, value in values.items()
        }
        compiled = [
            jax.jit(functools.partial(train_step, tx))
            .lower(params, tx.init(params))
            .compile()
            for tx in txs
        ]
        results = [c(params, tx.init(params)) for c, tx in zip(compiled, txs)]
    assert compiled[0].as_text().count("jax_fused_adamw_update") == 4
    assert count_ops(compiled[0], "all-gather") == 0
    assert_same_bits(*map(jax.device_get, results))


# --- The plan -------------------------------------------------------------------------


def _plan(params, loss, bucket_bytes):
    plans = []

    def trace(params):
        grads = jax.grad(loss)(params)
        leaves = map(jax.tree.leaves, (params, grads))
        plans.append(make_buckets(*leaves, bucket_bytes))

    jax.make_jaxpr(trace)(params)
    return plans[0]


def test_a_bucket_waits_for_the_layer_before_it():
    params = [jnp.ones((2, 2))] * 4

    def chain(params):
        x = jnp.ones(2)
        for w in params:
            x = jnp.tanh(w @ x)
        return x.sum()

    last_two_are_one = ([0, 1], [])  # the one would wait for the other anyway
    assert _plan(params, chain, 1) == [([3], [2]), ([2], [1]), last_two_are_one]
    assert _plan(params, chain, 20) == [([2, 3], [1]), ([0, 1], [])]
    assert _plan(params, chain, 64) == [([0, 1, 2, 3], [])]


def test_a_bucket_waits_for_every_reader_of_its_parameters():
    """Two branches read w0: both must be done before it is written."""
    params = [jnp.ones(()) * i for i in (1.0, 2.0, 3.0)]

    def loss(params):
        w, a, b = params
        return w * jnp.sin(w * jnp.sin(a)) + jnp.cos(w * jnp.cos(b))

    earlier = set()
    for leaves, after in _plan(params, loss, 1):
        if leaves == [0]:
            assert earlier | set(after) == {1, 2}
        earlier |= set(leaves)


def test_leaves_of_a_plan_are_a_partition():
    plan = _plan(_weights(8), lambda p: _residual(p, jnp.ones((8, WIDTH))), 2 * MEBI)
    assert sorted(i for bucket in plan for i in bucket.leaves) == list(range(8))
    assert all(not set(b.leaves) & set(b.after) for b in plan)


def test_outside_of_a_trace_there_is_one_bucket():
    leaves = [jnp.ones(3), jnp.ones(4)]
    assert make_buckets(leaves, leaves, 1) == [([0, 1], [])]


def test_gradients_that_are_arguments_make_one_bucket():
    plans = []
    jax.make_jaxpr(lambda p, g: plans.append(make_buckets(p, g, 1)))([1.0], [1.0])
    assert plans == [[([0], [])]]


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, jnp.int32(4)])
def test_bad_bucket_bytes(value):
    with pytest.raises((TypeError, ValueError), match="bucket_bytes"):
        jfa.fused_adamw(1e-3, bucket_bytes=value)
