"""Runs of PyTorch that go on here, and of ours there.

PyTorch's side is recorded; where torch is installed, its optimizer takes our state too.
"""

import json
import math
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, random_like
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import is_placed, make_mesh

import jax_fused_adamw as jfa

RECORDED = pathlib.Path(__file__).with_name("fixtures") / "torch_adamw.npz"
KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# PyTorch's weight is (out, in) and comes first; the kernel here is (in, out).
PATHS = ["kernel", "bias"]
MASK = {"kernel": True, "bias": False}


@pytest.fixture(params=[False, True], ids=["plain", "amsgrad"])
def run(request):
    """The options of a recorded run, and its arrays by name."""
    case = f"resume-{'amsgrad' if request.param else 'plain'}/"
    with np.load(RECORDED) as stored:
        groups = json.loads(str(stored["resume_groups"]))
        arrays = {k.removeprefix(case): stored[k] for k in stored if case in k}
    groups = [group | {"amsgrad": request.param} for group in groups]
    return groups, arrays


def of_kernel(x):
    return x.T if x.ndim > 1 else x


def params_at(run, when):
    return {
        name: jnp.asarray(of_kernel(run[1][f"{i}/{when}/params"]))
        for i, name in enumerate(PATHS)
    }


def grads_at(run, step):
    return {
        name: jnp.asarray(of_kernel(run[1][f"{i}/grads"][step]))
        for i, name in enumerate(PATHS)
    }


def state_dict_at(run, when, layout=of_kernel):
    groups, arrays = run
    state = {
        i: {
            key: layout(arrays[f"{i}/{when}/{key}"])
            for key in KEYS
            if f"{i}/{when}/{key}" in arrays
        }
        for i in range(2)
    }
    return {"state": state, "param_groups": groups}


def make(run, **options):
    group = run[0][0]
    b1, b2 = group["betas"]
    given = dict(
        learning_rate=group["lr"],
        b1=b1,
        b2=b2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        mask=MASK,
        amsgrad=group["amsgrad"],
    )
    return jfa.fused_adamw(**(given | options))


def go_on(run, tx, params, state, steps):
    for step in steps:
        params, state = jax.jit(tx.step)(grads_at(run, step), state, params)
    return params, state


def test_pytorch_goes_on_here(run):
    tx, params = make(run), params_at(run, "saved")
    state = jfa.from_torch(state_dict_at(run, "saved"), params, tx, paths=PATHS)
    assert state.count == 3
    expected = params_at(run, "end")
    got, end = go_on(run, tx, params, state, range(3, 6))
    fresh, _ = go_on(run, tx, params, tx.init(params), range(3, 6))
    for name in PATHS:
        way = np.abs(expected[name] - params[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=5e-5 * way)
        assert np.abs(fresh[name] - expected[name]).max() > 1e-2 * way
    there = jfa.to_torch(end, got, tx, paths=PATHS)
    recorded = state_dict_at(run, "end")
    for i in range(2):
        assert there["state"][i].keys() == recorded["state"][i].keys()
        for key, value in recorded["state"][i].items():
            np.testing.assert_allclose(there["state"][i][key], value, rtol=5e-5)


def test_here_and_back_keeps_every_bit(run):
    tx, params = make(run), params_at(run, "saved")
    state_dict = state_dict_at(run, "saved")
    state = jfa.from_torch(state_dict, params, tx, paths=PATHS)
    back = jfa.to_torch(state, params, tx, paths=PATHS)
    assert_same_bits(back["state"], state_dict["state"])
    for group, recorded in zip(back["param_groups"], run[0], strict=True):
        assert {k: group[k] for k in recorded} == recorded | {
            "betas": tuple(recorded["betas"])
        }
    assert_same_bits(jfa.from_torch(back, params, tx, paths=PATHS), state)


def test_our_state_goes_on_in_pytorch(run):
    torch = pytest.importorskip("torch")
    tx, params = make(run), params_at(run, "saved")
    state = jfa.from_torch(state_dict_at(run, "saved"), params, tx, paths=PATHS)
    params, state = go_on(run, tx, params, state, [3])
    state_dict = jfa.to_torch(state, params, tx, paths=PATHS)
    state_dict["state"] = jax.tree.map(torch.from_numpy, state_dict["state"])
    weights = [torch.nn.Parameter(torch.tensor(np.array(params[x]))) for x in PATHS]
    optimizer = torch.optim.AdamW([{"params": [w]} for w in weights])
    optimizer.load_state_dict(state_dict)
    for step in (4, 5):
        for weight, name in zip(weights, PATHS, strict=True):
            weight.grad = torch.tensor(np.array(grads_at(run, step)[name]))
        optimizer.step()
    expected = params_at(run, "end")
    for weight, name in zip(weights, PATHS, strict=True):
        way = np.abs(expected[name] - params[name]).max()
        got = weight.detach().numpy()
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=5e-5 * way)
    # And what torch says of itself is taken, tensors and all.
    params = {x: jnp.asarray(w.detach().numpy()) for x, w in zip(PATHS, weights)}
    state = jfa.from_torch(optimizer.state_dict(), params, tx, paths=PATHS)
    assert state.count == 6


def test_tensors_that_numpy_cannot_read_are_named(run):
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("Got unsupported ScalarType BFloat16")

    state_dict = state_dict_at(run, "saved")
    state_dict["state"][1]["exp_avg"] = Tensor()
    with pytest.raises(TypeError, match=r"exp_avg of params\['bias'\].*BFloat16.*cpu"):
        convert(run, state_dict)


def convert(run, state_dict=None, paths=PATHS, changed=(), **options):
    if state_dict is None:
        state_dict = state_dict_at(run, "saved")
    tx = make(run, **options)
    return jfa.from_torch(
        state_dict, params_at(run, "saved"), tx, paths=paths, changed=changed
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(learning_rate=1e-3), r"learning_rate is 0.03 in .*\[0\] and 0.001 here"),
        (dict(b1=0.9), "b1 is 0.8"),
        (dict(b2=0.999), "b2 is 0.95"),
        (dict(eps=1e-8), "eps is 0.001"),
        (dict(maximize=True), "maximize is False"),
        (dict(nesterov=True), "nesterov is False"),
        (dict(eps_root=1e-8), "eps_root is 0.0"),
        (dict(weight_decay=1e-4), r"weight_decay is 0.1 in .*\[0\]"),
        (dict(mask=None), r"weight_decay is 0.0 in .*\[1\] and 0.1 here"),
        (dict(amsgrad="optax"), "amsgrad is (True|False) .* and 'optax' here"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_other_hyperparameters_are_refused_by_name(run, options, named):
    with pytest.raises(ValueError, match=f"from_torch: .*{named}"):
        convert(run, **options)


def test_what_is_meant_to_differ_may(run):
    state = convert(
        run,
        learning_rate=1e-3,
        mask=None,
        changed=[
            "learning_rate",
            "weight_decay",
        ],
    )
    assert_same_bits(state, convert(run))
    with pytest.raises(ValueError, match=r"changed names \['lr'\]"):
        convert(run, changed="lr")
    with pytest.raises(ValueError, match=r"changed names \['amsgrad'\]"):
        convert(run, amsgrad="optax", changed="amsgrad")


def test_a_schedule_is_compared_at_its_next_value(run):
    """PyTorch's dict has the current value of its scheduler."""
    lr = run[0][0]["lr"]
    late = optax.piecewise_constant_schedule(2 * lr, {2: 0.5})
    state = convert(run, learning_rate=late)
    assert state.count == 3
    with pytest.raises(ValueError, match="learning_rate is 0.03 .* and 0.06"):
        convert(run, learning_rate=optax.constant_schedule(2 * lr))
    params = params_at(run, "saved")
    there = jfa.to_torch(state, params, make(run, learning_rate=late), paths=PATHS)
    assert there["param_groups"][0]["lr"] == np.float32(lr)


# optax's schedules run in float32, PyTorch's schedulers in float64: as there.
SCHEDULES = {
    "cosine": (
        optax.cosine_decay_schedule(1e-3, 1000),
        lambda k: 1e-3 * (1 + math.cos(math.pi * k / 1000)) / 2,
    ),
    "linear": (optax.linear_schedule(1e-3, 0.0, 1000), lambda k: 1e-3 * (1 - k / 1000)),
    "warmup": (
        optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 1000, 0.0),
        lambda k: (
            3e-4
            * (k / 100 if k < 100 else (1 + math.cos(math.pi * (k - 100) / 900)) / 2)
        ),
    ),
    "exponential": (
        optax.exponential_decay(1e-3, 1, 0.99),
        lambda k: 1e-3 * 0.99**k,
    ),
}


@pytest.mark.parametrize(("schedule", "in_float64"), SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_ordinary_schedules_are_those_of_pytorch(schedule, in_float64, scale):
    params = {"w": jnp.ones(2)}
    tx = jfa.fused_adamw(schedule, lr_scale=scale)
    state_dict = jfa.to_torch(tx.init(params), params, tx)
    (group,) = state_dict["param_groups"]

    def at(count, lr):
        state_dict["state"][0]["step"] = np.float32(count)
        group["lr"] = lr * scale
        return jfa.from_torch(state_dict, params, tx)

    for count in (0, 1, 38, 99, 100, 101, 500, 630, 963, 990, 999, 1000):
        lr = in_float64(count)
        assert at(count, lr).count == count
        for other in (1.0002 * lr + 1e-8, 0.9998 * lr - 1e-8):
            with pytest.raises(ValueError, match="learning_rate is"):
                at(count, other)


def test_a_constant_learning_rate_is_compared_exactly():
    params, tx = {"w": jnp.ones(2)}, jfa.fused_adamw(1e-3)
    state_dict = jfa.to_torch(tx.init(params), params, tx)
    state_dict["param_groups"][0]["lr"] = float(np.float32(1e-3))
    jfa.from_torch(state_dict, params, tx)
    state_dict["param_groups"][0]["lr"] = 1e-3 * (1 + 1e-6)
    with pytest.raises(ValueError, match="learning_rate is 0.001000001"):
        jfa.from_torch(state_dict, params, tx)


def test_the_other_kind_of_amsgrad_is_refused_both_ways(run):
    groups = [group | {"amsgrad": True} for group in run[0]]
    state_dict = state_dict_at(run, "saved") | {"param_groups": groups}
    with pytest.raises(ValueError, match="amsgrad is True .* 'optax' here") as error:
        convert(run, state_dict, amsgrad="optax")
    assert "changed=" not in str(error.value)
    tx, params = make(run, amsgrad="optax"), params_at(run, "saved")
    with pytest.raises(ValueError, match="to_torch: .*amsgrad='optax', whose maxima"):
        jfa.to_torch(tx.init(params), params, tx)
    for options in (dict(nesterov=True), dict(eps_root=1e-8)):
        tx = make(run, **options)
        with pytest.raises(ValueError, match=f"go on with {next(iter(options))}"):
            jfa.to_torch(tx.init(params), params, tx)


def test_weights_that_were_not_transposed_are_refused(run):
    plain = state_dict_at(run, "saved", layout=lambda x: x)
    named = r"exp_avg of params\['kernel'\] has shape \(4, 3\).*\(3, 4\).*transpose"
    with pytest.raises(ValueError, match=named):
        convert(run, plain)


def test_the_order_of_leaves_is_the_default(run):
    """Which sorts names: bias comes first."""
    with pytest.raises(ValueError, match=r"of params\['bias'\]"):
        convert(run, paths=None, changed=["weight_decay"])
    groups = run[0]
    state = state_dict_at(run, "saved")["state"]
    turned = {
        "state": {0: state[1], 1: state[0]},
        "param_groups": [groups[1] | {"params": [0]}, groups[0] | {"params": [1]}],
    }
    assert_same_bits(convert(run, turned, paths=None), convert(run))


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["kernel"], "lacks 'bias'"),
        (["kernel", "weight"], "has 'weight'"),
        (["kernel", "bias", "bias"], "names a parameter twice"),
    ],
)
def test_other_paths_are_refused(run, paths, named):
    with pytest.raises(ValueError, match=f"paths {named}"):
        convert(run, paths=paths)


def test_an_optimizer_that_has_taken_no_step(run):
    fresh = state_dict_at(run, "saved") | {"state": {}}
    params = params_at(run, "saved")
    assert_same_bits(convert(run, fresh), make(run).init(params))


def test_apex_keeps_the_step_in_its_groups(run):
    good = state_dict_at(run, "saved")
    state = {i: {k: x[k] for k in x if k != "step"} for i, x in good["state"].items()}
    groups = [group | {"step": 3, "bias_correction": True} for group in run[0]]
    apex = {"state": state, "param_groups": groups}
    assert_same_bits(convert(run, apex), convert(run))
    groups[1]["bias_correction"] = False
    with pytest.raises(ValueError, match=r"param_groups\[1\] has bias_correction"):
        convert(run, apex)


def test_moments_in_other_dtypes(run):
    tx = make(run, nu_dtype=jnp.bfloat16, master_weights=True)
    low = random_like(params_at(run, "saved"), dtype=jnp.bfloat16)
    state = jfa.from_torch(state_dict_at(run, "saved"), low, tx, paths=PATHS)
    expected = of_kernel(run[1]["0/saved/exp_avg_sq"])
    np.testing.assert_array_equal(state.nu["kernel"], expected.astype(jnp.bfloat16))
    with pytest.warns(UserWarning, match="to_torch: leaves behind state.master"):
        back = jfa.to_torch(state, low, tx, paths=PATHS)
    assert back["state"][0]["exp_avg_sq"].dtype == np.float32


def test_scales_of_the_learning_rate_are_groups():
    params = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(())}
    tx = jfa.fused_adamw(0.1, lr_scale={"a": 1.0, "b": 0.5, "c": 0.5})
    params, state = tx.step(params, tx.init(params), params)
    state_dict = jfa.to_torch(state, params, tx)
    groups = state_dict["param_groups"]
    assert [(x["lr"], x["params"]) for x in groups] == [(0.1, [0]), (0.05, [1, 2])]
    back = jfa.from_torch(state_dict, params, tx)
    assert_same_bits((back.mu, back.nu), (state.mu, state.nu))
    message = r"learning_rate is 0.05 in param_groups\[1\] and 0.1 here"
    with pytest.raises(ValueError, match=message):
        jfa.from_torch(state_dict, params, jfa.fused_adamw(0.1))


def sharded():
    """Parameters on a mesh, one that lies nowhere in particular, and None."""
    mesh = make_mesh("x", "y")
    specs = {"rows": P("x"), "both": P("y", "x"), "whole": P()}
    host = random_like(dict.fromkeys(specs, jnp.zeros((8, 8))), seed=2)
    params = {x: jax.device_put(host[x], NamedSharding(mesh, specs[x])) for x in specs}
    free = random_like({"free": jnp.zeros(3), "none": None}, seed=3)
    return mesh, specs, params | free


@pytest.mark.devices(4)
def test_moments_lie_where_their_parameters_do():
    mesh, specs, params = sharded()
    tx, peer = jfa.fused_adamw(1e-3), optax.adamw(1e-3)
    host = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
    _, state = tx.step(host, tx.init(host), host)
    state_dict = jfa.to_torch(state, host, tx)
    opt_state = jfa.to_optax(state, host, tx, peer)

    def shape(x):
        sharding = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    for like in (params, jax.tree.map(shape, params)):
        for new in (
            jfa.from_torch(state_dict, like, tx),
            jfa.from_optax(opt_state, like, tx),
            jfa.from_optax(jax.device_get(opt_state), like, tx),
        ):
            assert_same_bits(jax.device_get(new), jax.device_get(state))
            for tree in (new.mu, new.nu):
                assert not tree["free"].committed
                for name, spec in specs.items():
                    assert is_placed(tree[name], mesh, spec)


@pytest.mark.devices(4)
def test_sharded_moments_are_copies_that_can_be_donated():
    _, specs, params = sharded()
    params = {name: params[name] for name in specs}
    tx = jfa.fused_adamw(1e-3)
    state_dict = jfa.to_torch(tx.step(params, tx.init(params), params)[1], params, tx)
    before = jax.tree.map(np.copy, state_dict["state"])
    state = jfa.from_torch(state_dict, params, tx)
    kept = jax.device_get(jax.jit(tx.step)(params, state, params))
    given = jax.jit(tx.step, donate_argnums=1)(params, state, params)
    assert_same_bits(jax.device_get(given), kept)
    assert_same_bits(state_dict["state"], before)


def test_one_moment_after_the_other_is_copied_on_the_host():
    """tracemalloc counts NumPy's arrays, and not JAX's.

    Those that happen to be aligned become JAX's without a copy on a CPU: what is left
    at the end is the state itself.
    """
    size, num = 100_000, 16
    params = {f"l{i:02}": jnp.ones(size) for i in range(num)}
    tx = jfa.fused_adamw(1e-3)
    state_dict = jfa.to_torch(tx.init(params), params, tx)
    tracemalloc.start()
    try:
        state = jfa.from_torch(state_dict, params, tx)
        of_state, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - of_state < 4 * 4 * size  # of 2 * num arrays
    assert len(jax.tree.leaves((state.mu, state.nu))) == 2 * num
