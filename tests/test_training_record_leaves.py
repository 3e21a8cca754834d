"""What may be a leaf of a record, saved and restored, and what is refused by its path.

A test's number is that of its case.
"""

import json
import os
import subprocess
import sys
import time

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_within_ulp, plain_tx

import jax_fused_adamw as jfa
import jax_fused_adamw.flax

ocp = pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")


def round_trip(folder, tree, like=None, tx=None):
    with jfa.TrainingRecord(folder, tx) as record:
        assert record.save(1, tree)
    with jfa.TrainingRecord(folder, tx) as record:
        return record.restore(tree if like is None else like).tree


DTYPES = "bool int4 uint8 int16 int32 float8_e4m3fn float16 bfloat16 float32 complex64"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype_comes_back(dtype, tmp_path):
    array = (jnp.arange(6).reshape(2, 3) % 4).astype(dtype)
    tree = {"device": array, "host": np.asarray(array), "empty": array[:, :0]}
    restored = round_trip(tmp_path, tree)
    assert_same_bits(restored, tree)
    assert type(restored["host"]) is np.ndarray


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_arrays_of_the_host_come_back(dtype, tmp_path):
    tree = {"host": np.arange(3).astype(dtype) / np.array(3, dtype) * 2**50}
    tree["host"] = tree["host"].astype(dtype)
    restored = round_trip(tmp_path, tree)["host"]
    assert restored.dtype == dtype and restored.tobytes() == tree["host"].tobytes()


@pytest.mark.parametrize(
    "tree",
    [{}, [], {"a": {}}, {"a": None, "b": ({}, [])}, {"a": np.zeros((0, 3))}],
    ids=str,
)
def test_trees_without_any_element(tree, tmp_path):
    restored = round_trip(tmp_path, tree)
    assert_same_bits(restored, tree)


def test_containers_and_names(tmp_path):
    tree = {"a/b": 1, "é": [2, (3, {})], "c.d": {"": jnp.ones(2)}, "x" * 300: (4,)}
    tree["0"] = {0: 5, 10: 6, 2: {"b": None, "a": 7}}
    restored = round_trip(tmp_path, tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for got, expected in zip(*map(jax.tree.leaves, (restored, tree)), strict=True):
        assert type(got) is type(expected) and np.array_equal(got, expected)


def test_b12_empty_leaves_among_others_train_on(tmp_path):
    """The seed's case, stopped after the first of two steps."""
    tx = plain_tx(amsgrad=True)
    params = {"a": jnp.ones(4), "b": jnp.ones((0, 3)), "c": jnp.ones((2, 0))}
    state = tx.init(params)
    step = jax.jit(lambda params, state: tx.step(grads, state, params))
    grads = jax.tree.map(jnp.ones_like, params)
    expected = step(*step(params, state))
    first, state = step(params, state)
    tree = {"params": first, "state": state}
    assert_within_ulp(first["a"], np.full(4, 0.99900000001), 1)
    like = jax.tree.map(jnp.zeros_like, tree)
    restored = round_trip(tmp_path, tree, like, tx)
    assert_same_bits(restored, tree)
    assert int(restored["state"].count) == 1
    assert_same_bits(step(restored["params"], restored["state"]), expected)


def test_b14_a_thousand_empty_leaves(tmp_path):
    tx = plain_tx()
    params = {i: jnp.zeros((0,)) for i in range(1000)}
    params, state = jax.jit(tx.step)(params, tx.init(params), params)
    tree = {"params": params, "state": state}
    restored = round_trip(tmp_path, tree, tx=tx)
    assert_same_bits(restored, tree)
    assert int(restored["state"].count) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_empty_leaves_lie_where_like_tells(committed, tmp_path):
    device = jax.devices()[-1]
    sharding = jax.sharding.SingleDeviceSharding(device) if committed else None
    keys = jax.random.split(jax.random.key(0), 1)[:0]
    tree = {"a": jnp.zeros((0, 3), jnp.bfloat16), "k": keys}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
    restored = round_trip(tmp_path, tree, like)
    for name, leaf in restored.items():
        assert leaf.shape == tree[name].shape and leaf.dtype == tree[name].dtype
        assert leaf.committed == committed
        assert not committed or leaf.devices() == {device}
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match=r"\['a'\] was saved .*\[0, 3\]"):
            record.restore(tree | {"a": jnp.zeros((3, 0), jnp.bfloat16)})


def deleted():
    array = jnp.ones(2)
    array.delete()
    return array


REFUSED = {
    "str": lambda: "text",
    "bytes": lambda: b"text",
    "complex": lambda: 1j,
    "object": object,
    "function": lambda: len,
    "ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "array of <U1": lambda: np.array(["a"]),
    "array of object": lambda: np.array([None]),
    "array of datetime64": lambda: np.zeros(2, "datetime64[s]"),
    "array of >f4": lambda: np.zeros(2, ">f4"),
    "array of float128": lambda: np.zeros(2, np.longdouble),
    "array of uint4": lambda: jnp.zeros(2, jnp.uint4),
    "float0": lambda: np.zeros(2, jax.dtypes.float0),
    "donated or deleted": deleted,
    "64 bits": lambda: 2**63,
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_no_checkpoint_holds_is_refused_at_once(named, tmp_path):
    """By its path, with nothing left behind, and the next save is good."""
    if named == "array of float128" and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("here it is float64")
    start = time.monotonic()
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises((TypeError, ValueError), match=r"leaf \['a'\]\[1\] ") as e:
            record.save(1, {"a": [1, REFUSED[named]()]})
        assert named in str(e.value) or named == "function"
        assert record.latest_step() is None
        assert record.save(1, {"a": [1, 2]})
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("committed", [False, True])
def test_with_a_guard_of_transfers(committed, tmp_path):
    """Which orbax alone passes, too."""
    device = jax.devices()[0] if committed else None
    tree = {"w": jnp.ones(3), "key": jax.random.key(1)}
    tree = jax.device_put(tree, device) | {"epoch": 1, "host": np.arange(4.0)}
    tree["step"] = jax.device_put(7, device)
    like = tree | {"epoch": jax.device_put(0, device), "step": 0}
    with jax.transfer_guard("disallow"):
        round_trip(tmp_path / "other", tree, like)
        restored = round_trip(tmp_path / "same", tree)
    for name in ("epoch", "key"):
        assert restored.pop(name) == tree.pop(name)
    assert_same_bits(restored, tree)


def test_traced_leaves_are_refused(tmp_path):
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(TypeError, match=r"\['a'\] is traced: save outside of jit"):
            jax.jit(lambda x: record.save(1, {"a": x}))(1.0)


def test_a_bare_array_is_refused(tmp_path):
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match="put it into a dict"):
            record.save(1, jnp.ones(3))


def test_leaves_of_one_name_are_refused(tmp_path):
    """One would be restored as the other."""
    with jfa.TrainingRecord(tmp_path) as record:
        named = r"\['a'\]\['b'\] and \['a.b'\] have one name"
        with pytest.raises(ValueError, match=named):
            record.save(1, {"a.b": 1, "a": {"b": 2}})


def committed(x):
    return jax.device_put(x, jax.devices()[0])


def shape(sharding=None):
    return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


# Kinds of scalars: of a value and a dtype.
KINDS = {
    "python": lambda value, dtype: value,
    "numpy": lambda value, dtype: dtype(value),
    "host": lambda value, dtype: np.array(value, dtype),
    "device": lambda value, dtype: jnp.array(value, dtype),
    "weak": lambda value, dtype: jnp.asarray(value),
    "committed": lambda value, dtype: committed(jnp.array(value, dtype)),
    "committed weak": lambda value, dtype: committed(jnp.asarray(value)),
}


@pytest.mark.parametrize(
    ("value", "dtype"), [(7, np.int32), (0.625, np.float32), (True, np.bool_)]
)
@pytest.mark.parametrize("saved", ["python", "numpy", "host", "device"])
def test_a_number_comes_back_as_like_has_it(value, dtype, saved, tmp_path):
    """And an array as a Python number: a new TrainState has one, a stepped one not."""
    likes = {kind: make(type(value)(0), dtype) for kind, make in KINDS.items()}
    for kind, x in [("shape", likes["device"]), ("placed shape", likes["committed"])]:
        likes[kind] = shape(x.sharding if kind == "placed shape" else None)(x)
    with jfa.TrainingRecord(tmp_path) as record:
        record.save(1, {"a": KINDS[saved](value, dtype)})
        for kind, like in likes.items():
            restored = record.restore({"a": like}).tree["a"]
            assert restored == value, kind
            if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
                assert restored.dtype == like.dtype and isinstance(restored, jax.Array)
                is_committed = kind in ("committed", "committed weak", "placed shape")
                assert restored.committed == is_committed, kind
                assert restored.weak_type == getattr(like, "weak_type", False), kind
            else:
                assert type(restored) is type(like), kind
                assert getattr(restored, "dtype", None) == getattr(like, "dtype", None)


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (7, 7.0),
        (7, True),
        (7, jnp.float32(0)),
        (0.5, 0),
        (0.5, jnp.int32(0)),
        (True, 1),
        (7, jnp.zeros(1, jnp.int32)),
        (jnp.int32(7), jnp.uint32(7)),
        (jnp.float32(7), jnp.bfloat16(7)),
        (7, jax.random.key(0)),
    ],
)
def test_numbers_of_other_kinds_are_refused(saved, like, tmp_path):
    with pytest.raises(ValueError, match=r"leaf \['a'\] was saved with dtype and shap"):
        round_trip(tmp_path, {"a": saved}, {"a": like})


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    with jfa.TrainingRecord(tmp_path) as record:
        for step, (number, like) in enumerate(
            [(2**31, jnp.int32(0)), (-1, jnp.uint8(0)), (1e39, jnp.float32(0))]
        ):
            record.save(step, {"a": number})
            with pytest.raises(ValueError, match=r"leaf \['a'\] was saved as .*large"):
                record.restore({"a": like})
            assert record.restore({"a": type(number)(0)}).tree["a"] == number
        record.save(9, {"a": 0.1, "b": float("inf"), "c": float("nan")})
        like = dict.fromkeys("abc", jnp.bfloat16(0))
        restored = record.restore(like).tree
    assert restored["a"] == jnp.bfloat16(0.1) and restored["b"] == np.inf
    assert jnp.isnan(restored["c"])


def test_a_new_train_state_takes_a_stepped_one_and_is_not_compiled_again(tmp_path):
    model, tx = flax.linen.Dense(2), jfa.fused_adamw(0.1)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]

    def create():
        return jfa.flax.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=state.params)

    stepped = step(create())
    assert isinstance(stepped.step, jax.Array)
    expected, compiled = step(stepped), step._cache_size()
    with jfa.TrainingRecord(tmp_path, tx) as record:
        record.save(1, stepped)
        for like in (create(), stepped, jax.eval_shape(create)):
            restored = record.restore(like).tree
            assert type(restored.step) is int or isinstance(restored.step, jax.Array)
            assert int(restored.step) == 1
            assert_same_bits(step(restored), expected)
    assert step._cache_size() == compiled


@pytest.mark.devices(2)
def test_keys_without_a_sharding_come_to_the_default_device(tmp_path):
    """Though they were saved on a mesh, which a new run need not have."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), rows)
    like = {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype)}
    restored = round_trip(tmp_path, {"keys": keys}, like)["keys"]
    assert not restored.committed and restored.devices() == {jax.devices()[0]}
    assert_same_bits(*(np.asarray(jax.random.key_data(x)) for x in (restored, keys)))
    like = {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows)}
    with jfa.TrainingRecord(tmp_path) as record:
        assert record.restore(like).tree["keys"].sharding == rows


@pytest.mark.devices(2)
@pytest.mark.parametrize("is_key", [False, True], ids=["array", "key"])
def test_from_more_devices_than_there_are(is_key, tmp_path):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    leaf = jax.random.split(jax.random.key(3), 4) if is_key else jnp.arange(4.0)
    leaf = jax.device_put(leaf, jax.NamedSharding(mesh, jax.P("x")))
    with jfa.TrainingRecord(tmp_path) as record:
        record.save(1, {"a": leaf})
    code = (
        "import sys, jax, jax_fused_adamw as jfa\n"
        "assert jax.device_count() == 1\n"
        "dtype = jax.random.key(0).dtype if sys.argv[2] == 'True' else 'float32'\n"
        "like = {'a': jax.ShapeDtypeStruct((4,), dtype)}\n"
        "with jfa.TrainingRecord(sys.argv[1]) as record:\n"
        "  leaf = record.restore(like).tree['a']\n"
        "leaf = jax.random.key_data(leaf) if sys.argv[2] == 'True' else leaf\n"
        "print(leaf.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, str(is_key)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = jax.random.key_data(leaf) if is_key else leaf
    assert json.loads(done.stdout) == expected.tolist()


def test_a_state_saved_with_fewer_fields_is_restored(tmp_path):
    """A field that is None now was not there; one that was None then is no more."""
    array = jnp.arange(3.0)
    old = {"state": {"mu": array, "gone": None}, "list": [array, None]}
    new = {"state": {"mu": array, "report": None}, "list": [array, None]}
    assert_same_bits(round_trip(tmp_path, old, new), new)


class _Node:
    """A container of its own kind: children, and the keys that it gives them."""

    def __init__(self, children, keys):
        self.children, self.keys = tuple(children), tuple(keys)


jax.tree_util.register_pytree_with_keys(
    _Node,
    lambda node: (list(zip(node.keys, node.children)), node.keys),
    lambda keys, children: _Node(children, keys),
)


class _Pair(dict):
    """Of a class that JAX knows, and that takes nothing else for a child."""


def _pair_of(_, children):
    assert not any(type(child) is dict for child in children)
    return _Pair(zip("ab", children))


jax.tree_util.register_pytree_with_keys(
    _Pair,
    lambda pair: ([(jax.tree_util.DictKey(x), pair[x]) for x in "ab"], None),
    _pair_of,
)
NUMBERS = [jax.tree_util.SequenceKey(i) for i in range(2)]
NAMES = [jax.tree_util.GetAttrKey(name) for name in ("about", "child", "child")]
ONE, TWO = jnp.full(2, 1.0), jnp.full(2, 2.0)


@pytest.mark.parametrize(
    "node",
    [
        _Node([ONE, {"b": np.zeros((0, 3))}, ()], [*NUMBERS, NAMES[0]]),
        _Node([ONE, [TWO, None], ONE], [*NUMBERS, NAMES[0]]),
        _Node([{"x": ONE}, {"y": TWO}], NAMES[1:]),
        _Pair(a=ONE, b=_Node([TWO], NUMBERS[:1])),
    ],
    ids=["nothing by name", "an array by name", "one name twice", "own dict"],
)
def test_containers_of_other_kinds(node, tmp_path):
    """Orbax saves names beside numbers, and does not find its way back."""
    tree = {"model": node, "list": [ONE, (TWO, {"c": ONE})]}
    restored = round_trip(tmp_path, tree)
    assert_same_bits(jax.tree.leaves(restored), jax.tree.leaves(tree))
    assert jax.tree.structure(restored) == jax.tree.structure(tree)


def test_flax_nnx(tmp_path):
    """The module itself, or its state; and the optimizer goes on."""

    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])

    tx = jfa.fused_adamw(0.1, in_place=True)

    def start(seed):
        model = Model(seed)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def tree_of(model, optimizer):
        state = nnx.state(model)
        return {"model": state, "optimizer": optimizer.opt_state, "module": model}

    (model, optimizer), (other, other_optimizer) = start(0), start(1)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    like = tree_of(other, other_optimizer)
    tree = round_trip(tmp_path, tree_of(model, optimizer), like, tx)
    assert_same_bits(jax.tree.leaves(tree["module"]), jax.tree.leaves(model))
    nnx.update(other, tree["model"])
    other_optimizer.opt_state = tree["optimizer"]
    for each, its in ((model, optimizer), (other, other_optimizer)):
        its.update(each, grads)
    expected, got = nnx.state(model), nnx.state(other)
    assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(expected))
    assert other_optimizer.opt_state.count[...] == 2


def test_the_state_of_nnx_without_ours_in_it(tmp_path):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tx = jfa.fused_adamw(0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with jfa.TrainingRecord(tmp_path, tx) as record:
        with pytest.raises(ValueError, match="of Flax nnx, optimizer.opt_state"):
            record.save(1, {"optimizer": nnx.state(optimizer)})


def test_orbax_alone_restores_into_the_tree(tmp_path):
    tx, params = jfa.fused_adamw(0.1), {"list": [ONE, (TWO, {"c": ONE})]}
    tree = {"params": params, "state": tx.init(params)}
    round_trip(tmp_path, tree, tx=tx)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "1" / "tree", tree)
    assert_same_bits(restored, tree)
