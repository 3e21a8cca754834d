"""A run saved whole and resumed: the bits of one that was never stopped."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, random_like

import jax_fused_adamw as jfa

ocp = pytest.importorskip("orbax.checkpoint", reason="it comes with the test extra")

PARAMS = random_like(
    {
        "w": jnp.zeros((8, 3)),
        "h": [jnp.zeros(5, jnp.bfloat16), None, jnp.zeros((), jnp.float16)],
    },
    seed=1,
)
OPTIONS = {
    "plain": {},
    "bfloat16": dict(mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16, seed=3),
    "kept": dict(
        master_weights=True, ema_decay=0.9, compute_dtype=jnp.bfloat16, amsgrad=True
    ),
    "clip": dict(max_grad_norm=0.5, learning_rate=optax.linear_schedule(0.1, 0.0, 9)),
}


def make(**options):
    return jfa.fused_adamw(**({"learning_rate": 0.1} | options))


def start(tx, params=PARAMS):
    params = jax.tree.map(jnp.array, params)
    return {
        "params": params,
        "state": tx.init(params),
        "loss_scale": jfa.DynamicLossScale(8.0, growth_interval=2),
        "user": {"seen": np.arange(2), "epoch": 0, "key": jax.random.key(3)},
    }


def train(tx, tree, num_steps):
    """Steps on gradients of the caller's key, with everything donated."""

    @jax.jit(donate_argnums=(0, 1, 2))
    def step(params, state, loss_scale, key):
        keys = jax.random.split(key, len(jax.tree.leaves(params)))
        keys = jax.tree.structure(params).unflatten(keys)
        grads = jax.tree.map(
            lambda p, k: jax.random.normal(k, p.shape, p.dtype), params, keys
        )
        scale = loss_scale.value
        report = jfa.grad_stats(grads, scale)
        params, state = jfa.step(tx, grads, state, params, gradient_scale=scale)
        return params, state, loss_scale.update(report)

    names = ("params", "state", "loss_scale", "user")
    params, state, loss_scale, user = (tree[name] for name in names)
    for _ in range(num_steps):
        key, user = jax.random.fold_in(user["key"], user["epoch"]), dict(user)
        params, state, loss_scale = step(params, state, loss_scale, key)
        user |= {"epoch": user["epoch"] + 1, "seen": user["seen"] + 2}
    return dict(zip(names, (params, state, loss_scale, user), strict=True))


def with_key_data(tree):
    user = tree["user"] | {"key": jax.random.key_data(tree["user"]["key"])}
    return tree | {"user": jax.tree.map(np.asarray, user)}


@pytest.mark.parametrize("every_k", [None, 3], ids=["step", "window"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resuming_equals_not_stopping(options, every_k, tmp_path):
    """In the middle of a window too; the save goes on while the arrays are donated."""
    inner = make(**options)
    tx = inner if every_k is None else jfa.accumulate(inner, every_k)
    uninterrupted = train(tx, start(tx), 9)
    with jfa.TrainingRecord(tmp_path, inner) as record:
        tree = train(tx, start(tx), 4)
        assert record.save(4, tree)
        train(tx, tree, 3)
    with jfa.TrainingRecord(tmp_path, inner) as record:
        step, tree, not_compared = record.restore(start(tx))
    assert step == 4 and type(tree["user"]["epoch"]) is int
    assert not_compared == (("learning_rate",) if "learning_rate" in options else ())
    if every_k is not None:
        assert tree["state"].mini_step == 1
    resumed = train(tx, tree, 5)
    assert_same_bits(with_key_data(resumed), with_key_data(uninterrupted))


def saved(folder, tx=None, steps=(1,), **options):
    tree = start(make())
    if isinstance(tx, dict):
        tree["state"] = dict.fromkeys(tx, tree["state"])
    with jfa.TrainingRecord(folder, tx, **options) as record:
        for step in steps:
            record.save(step, tree | {"user": {"step": step}})
    return tree | {"user": {"step": 0}}


def test_the_latest_or_a_chosen_step(tmp_path):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    like = saved(tmp_path, steps=range(2, 9), manager_options=options)
    with jfa.TrainingRecord(str(tmp_path)) as record:
        assert record.latest_step() == 8 and record.manager.all_steps() == [6, 8]
        assert record.restore(like).tree["user"]["step"] == 8
        assert record.restore(like, 6).tree["user"]["step"] == 6
        with pytest.raises(FileNotFoundError, match=r"of step 4; .* \[6, 8\]"):
            record.restore(like, 4)


@pytest.mark.parametrize("step", [4, 3, np.int64(0)])
def test_a_step_that_is_not_above_the_latest_is_refused(step, tmp_path):
    like = saved(tmp_path, steps=(2, 4))
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match=rf"latest in .*, 4, got {step}; .*delete"):
            record.save(step, like)
        record.wait()
        assert record.restore(like).tree["user"]["step"] == 4


def test_going_back(tmp_path):
    """As the error tells it: what was saved since is the latest, in a new run too."""
    like = saved(tmp_path, steps=(2, 4, 6))
    with jfa.TrainingRecord(tmp_path) as record:
        for step in (4, 6):
            record.manager.delete(step)
        assert record.save(3, like | {"user": {"step": 30}})
        assert record.restore(like).tree["user"]["step"] == 30
    with jfa.TrainingRecord(tmp_path) as record:
        assert record.manager.all_steps() == [2, 3] and record.latest_step() == 3


def test_force_saves_below_the_latest_which_remains_it(tmp_path):
    like = saved(tmp_path, steps=(2, 4))
    with jfa.TrainingRecord(tmp_path) as record:
        assert record.save(3, like | {"user": {"step": 30}}, force=True)
        assert record.latest_step() == 4
        assert record.restore(like, 3).tree["user"]["step"] == 30
        with pytest.raises(ValueError, match="latest in .*, 4, got 2"):
            record.save(2, like, force=True)


def test_force_below_the_latest_does_not_delete_it(tmp_path):
    """What max_to_keep deletes are the lowest steps, in whatever order they came."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    like = saved(tmp_path, steps=(10, 20, 30), manager_options=options)
    with jfa.TrainingRecord(tmp_path, manager_options=options) as record:
        assert record.save(25, like, force=True)
        assert record.manager.all_steps() == [25, 30]
        assert record.save(40, like)
        record.wait()
        assert record.manager.all_steps() == [30, 40]
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with jfa.TrainingRecord(tmp_path, manager_options=options) as record:
        with pytest.raises(ValueError, match="25 would delete the latest in .*, 40"):
            record.save(25, like, force=True)
        assert record.latest_step() == 40


def test_a_reader_sees_what_another_record_saves(tmp_path):
    like = saved(tmp_path, steps=(1,))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with jfa.TrainingRecord(tmp_path, manager_options=options) as reader:
        assert reader.latest_step() == 1
        saved(tmp_path, steps=(2,))
        assert reader.restore(like, 2).step == reader.latest_step() == 2
        with jfa.TrainingRecord(tmp_path) as record:
            record.manager.delete(2)
        assert reader.restore(like).step == 1


def test_steps_that_the_options_leave_out(tmp_path):
    """No error, and force is what saves them."""
    like = saved(tmp_path, steps=(2,))
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with jfa.TrainingRecord(tmp_path, manager_options=options) as record:
        assert record.save(3, like) is False
        assert record.save(3, like, force=True) is True
    options = ocp.CheckpointManagerOptions(read_only=True)
    with jfa.TrainingRecord(tmp_path, manager_options=options) as record:
        assert record.save(2, like) is False and record.save(4, like) is False
        assert record.save(4, like, force=True) is False
        assert record.manager.all_steps() == [2, 3]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (7.0, TypeError),
        (np.float32(7), TypeError),
        (True, TypeError),
        (np.True_, TypeError),
        (jnp.array(True), TypeError),
        ("7", TypeError),
        (jnp.ones(2, jnp.int32), TypeError),
        (None, TypeError),
        (-1, ValueError),
    ],
)
def test_what_is_no_step(step, error, tmp_path):
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(error, match="expected .*step"):
            record.save(step, {"epoch": 1})
        if step is not None:  # which is the latest
            with pytest.raises(error, match="expected .*step"):
                record.restore({"epoch": 1}, step)
        assert record.latest_step() is None


@pytest.mark.parametrize("step", [7, np.uint8(7), jnp.int32(7), np.array(7)])
def test_steps_of_every_integer_type(step, tmp_path):
    with jfa.TrainingRecord(tmp_path) as record:
        assert record.save(step, {"epoch": 1})
        restored = record.restore({"epoch": 0}, step)
    assert restored == (7, {"epoch": 1}, ()) and type(restored.step) is int


def test_a_tree_without_the_state_is_refused(tmp_path):
    """It would be recorded beside the options of an optimizer that it is not of."""
    tx, sgd = make(), optax.sgd(0.1, momentum=0.9)
    with jfa.TrainingRecord(tmp_path, tx) as record:
        for state in (None, sgd.init(PARAMS)):
            with pytest.raises(ValueError, match=r"\['tx'\], .* has 0 FusedAdamWState"):
                record.save(1, {"params": PARAMS, "state": state})
    groups = {"body": tx, "head": tx}
    with jfa.TrainingRecord(tmp_path, groups) as record:
        with pytest.raises(ValueError, match=r"\['body', 'head'\], .* has 1 Fused"):
            record.save(1, {"state": tx.init(PARAMS)})
    with jfa.TrainingRecord(tmp_path) as record:
        assert record.save(1, {"params": PARAMS, "state": sgd.init(PARAMS)})


def test_a_directory_without_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jfa.TrainingRecord("new") as record:
        assert record.latest_step() is None
        with pytest.raises(FileNotFoundError, match="new has no complete checkpoint"):
            record.restore({})
    assert (tmp_path / "new").is_dir()


def test_other_options_are_refused_by_name(tmp_path):
    like = saved(tmp_path, make(b2=0.95))
    with jfa.TrainingRecord(tmp_path, make(b1=0.5)) as record:
        named = "optimizer 'tx': .*b1 was 0.9 and is 0.5; b2 was 0.95 and is 0.999"
        with pytest.raises(ValueError, match=named):
            record.restore(like)
        with pytest.raises(ValueError, match="differ: b1 was 0.9 and is 0.5"):
            record.restore(like, changed="b2")
        assert record.restore(like, changed=["b1", "b2"]).step == 1
        with pytest.raises(ValueError, match=r"'tx.b1'; .* one of \[''\]"):
            record.restore(like, changed=["b2", "tx.b1"])
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(
            ValueError, match="has optimizer 'tx', which this run has not"
        ):
            record.restore(like)


def test_options_of_several_optimizers(tmp_path):
    first = {"body": make(), "head": make(learning_rate=0.2)}
    like = saved(tmp_path, first)
    with jfa.TrainingRecord(tmp_path, first) as record:
        assert record.restore(like).not_compared == ()
    late = make(learning_rate=optax.constant_schedule(0.2))
    with jfa.TrainingRecord(tmp_path, {"body": make(), "head": late}) as record:
        with pytest.raises(ValueError, match="'head': .*learning_rate was 0.2"):
            record.restore(like)
        with pytest.raises(ValueError, match="'head': .*learning_rate was 0.2"):
            record.restore(like, changed="body.learning_rate")
        assert record.restore(like, changed="head.learning_rate").step == 1
        for name in ("learning_rate", "tail.learning_rate", "head"):
            after = rf"'{name}'; .* one of \['body.', 'head.'\]"
            with pytest.raises(ValueError, match=after):
                record.restore(like, changed=["head.learning_rate", name])
    with jfa.TrainingRecord(tmp_path, {"body": make()}) as record:
        with pytest.raises(ValueError, match="has optimizer 'head'"):
            record.restore(like)


def other_leaf(tree):
    tree["params"]["w"] = tree["params"]["w"].T


def other_dtype(tree):
    nu = tree["state"].nu | {"w": tree["state"].nu["w"].astype(jnp.bfloat16)}
    tree["state"] = tree["state"]._replace(nu=nu)


def more(tree):
    tree["state"] = tree["state"]._replace(ema=tree["state"].mu)


def less(tree):
    del tree["loss_scale"]


def other_scale(tree):
    tree["loss_scale"] = jfa.DynamicLossScale(8.0, growth_interval=9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_leaf, r"\['params'\]\['w'\] .*float32', \[8, 3\].*\[3, 8\]"),
        (other_dtype, r"\['state'\].nu\['w'\] .*float32.*bfloat16"),
        (more, r"has no leaf \"\['state'\].ema"),
        (less, r"has leaf \"\['loss_scale'\]\."),
        (other_scale, r"loss scale \['loss_scale'\] .*'growth_interval': 2.*: 9"),
    ],
)
def test_other_trees_are_refused_by_path(change, named, tmp_path):
    like = saved(tmp_path)
    like["params"] = dict(like["params"])
    change(like)
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match=named):
            record.restore(like)


@pytest.mark.devices(2)
def test_into_shardings_and_back(tmp_path):
    tx = make(master_weights=True)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.NamedSharding(mesh, jax.P("x")), jax.NamedSharding(mesh, jax.P())
    tree = train(tx, start(tx), 2)
    with jfa.TrainingRecord(tmp_path, tx) as record:
        record.save(2, tree)

        def cut(x):
            sharding = rows if x.shape[:1] == (8,) else whole
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        params = jax.tree.map(cut, tree["params"])
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(tx.init, params),
            jfa.state_shardings(tx, params),
        )
        # The loss scale of a new run lies on one device, free to be moved.
        like = start(tx) | {"params": params, "state": state}
        _, sharded, _ = record.restore(like)
        assert sharded["state"].mu["w"].sharding == rows
        assert not sharded["loss_scale"].value.committed
        assert not sharded["user"]["key"].committed
        assert_same_bits(with_key_data(sharded), with_key_data(tree))
        assert record.save(3, train(tx, sharded, 1))
        _, one, _ = record.restore(start(tx))
        assert len(one["params"]["w"].devices()) == 1
    expected = train(tx, tree, 1)
    assert_same_bits(with_key_data(one), with_key_data(expected))


def test_shapes_without_shardings_come_to_the_default_device(tmp_path):
    like = saved(tmp_path)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like["params"]
    )
    with jfa.TrainingRecord(tmp_path) as record:
        params = record.restore(like | {"params": shapes}).tree["params"]
    assert_same_bits(params, like["params"])
    assert not params["w"].committed


@pytest.mark.parametrize("named", [False, True])
def test_another_checkpoint_of_orbax_is_told_apart(named, tmp_path):
    items = ocp.args.StandardSave(PARAMS)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(tree=items) if named else items)
    with jfa.TrainingRecord(tmp_path) as record:
        with pytest.raises(ValueError, match="not saved by a TrainingRecord"):
            record.restore(PARAMS)


def test_what_it_cannot_take_is_refused(tmp_path):
    with pytest.raises(TypeError, match="expected tx as .*; of a wrapper"):
        jfa.TrainingRecord(tmp_path, jfa.accumulate(make(), 2))
    with pytest.raises(TypeError, match=r"expected tx\['head'\]"):
        jfa.TrainingRecord(tmp_path, {"head": optax.adamw(0.1)})
    with pytest.raises(TypeError, match=r"as strings, got tx\[0\]"):
        jfa.TrainingRecord(tmp_path, {0: make()})


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"jax_fused_adamw\[checkpoints\]"):
        jfa.TrainingRecord(tmp_path)


def test_b54_killed_at_any_moment_it_resumes_from_a_complete_step(tmp_path):
    """Twenty kills of a loop that does little but save, at moments from a seed."""
    script = pathlib.Path(__file__).with_name("saving_process.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run", "20"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    steps, statuses, half_written = zip(*ends, strict=True)
    assert statuses == (signal.SIGKILL,) * 20 + (0,), done.stderr
    # Nothing that was complete is lost: each child had saved a step before its end.
    assert steps[0] == 0 and list(steps) == sorted(set(steps))
    assert sum(map(bool, half_written)) >= 3
    assert not half_written[-1]
    with jfa.TrainingRecord(tmp_path / "run") as record:
        assert record.latest_step() == steps[-1] + 1


def test_orbax_is_imported_on_demand():
    code = "import jax_fused_adamw, sys; sys.exit('orbax.checkpoint' in sys.modules)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
