"""The train step against float64 NumPy, plain optax, and itself taken apart (``apply`` after ``grads``)."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_step_cases import INF, NAN, close, linear, linear_program, rows, run

from jaxtrain import rng, sharding
from jaxtrain.precision import LossScale, Precision
from jaxtrain.state import Snapshot
from jaxtrain.step import Loss, MultiSteps, Skip, Variables, build_train_step

MESHES = {
    "one": {},
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
    "slice2-data2-fsdp2": {"slice": 2, "data": 2, "fsdp": 2},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
}
TENSOR_RULES = [("up", P("fsdp", "tensor")), ("down", P("tensor"))]
B, D, H = 32, 256, 512  # rows of a window, features, hidden: D * H is twice what is sharded by default
assert D * H > sharding.SMALLEST_SHARDED


def mesh_and_rules(name: str) -> dict[str, Any]:
    axes = MESHES[name]
    rules = {"rules": TENSOR_RULES} if "tensor" in axes else {}
    return {"mesh": sharding.make_mesh(**axes)} | rules


def host(tree: Any) -> Any:
    return jax.device_get(tree)


def bits(tree: Any) -> dict[str, bytes]:
    """Every leaf's bytes by name: equal means equal bit for bit, NaN and sign of zero included."""
    leaves = jax.tree_util.tree_leaves_with_path(host(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def distance(got: Any, wanted: Any) -> float:
    """|got - wanted| / |wanted| over a whole tree, in float64."""
    pairs = list(zip(jax.tree.leaves(host(got)), jax.tree.leaves(host(wanted)), strict=True))
    square = sum(np.sum((np.float64(a) - np.float64(b)) ** 2) for a, b in pairs)
    return math.sqrt(square / sum(np.sum(np.float64(b) ** 2) for _, b in pairs))


def split(batch: Any, k: int) -> list[Any]:
    """A window's batch as k micro-batches."""
    return [jax.tree.map(lambda x, i=i: np.split(x, k)[i], batch) for i in range(k)]


# ---- one window is the one big batch -----------------------------------------------------------------------------


def squares(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """Weighted squares of a linear map; the weights are any numbers, their sums differ between micro-batches."""
    up = params["up"]
    error = (batch["x"].astype(up.dtype) @ up).astype(jnp.float32) - batch["y"]
    return Loss(jnp.sum(jnp.sum(error**2, axis=1) * batch["weight"]) / 2, jnp.sum(batch["weight"]))


@functools.cache
def squares_case() -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, float]:
    """``(parameters, window, gradient, loss)``: the last two by hand in float64."""
    draw = np.random.default_rng(0)
    up = draw.normal(size=(D, H)).astype(np.float32) / 16
    window = {"x": draw.normal(size=(B, D)), "y": draw.normal(size=(B, H)), "weight": np.geomspace(8, 0.1, B)}
    window["weight"][-4:] = 0
    window = {name: x.astype(np.float32) for name, x in window.items()}
    x, y, weight = (np.float64(window[name]) for name in ("x", "y", "weight"))
    error = x @ np.float64(up) - y
    gradient = x.T @ (error * weight[:, None]) / weight.sum()
    return up, window, gradient, float((error**2).sum(1) @ weight / 2 / weight.sum())


@pytest.mark.parametrize(
    ("mesh", "k", "precision"),
    [(mesh, 4, "float32") for mesh in MESHES]
    + [("one", 1, "float32"), ("data2-fsdp4", 1, "float32"), ("slice2-data2-fsdp2", 2, "float32")]
    + [("data2-fsdp4", 1, "bfloat16"), ("one", 2, "bfloat16"), ("data2-fsdp4", 4, "bfloat16")],
)
def test_a_window_is_the_one_big_batch(mesh, k, precision):
    up, window, gradient, loss = squares_case()
    program = build_train_step(
        squares, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.sgd(1.0), accumulation=MultiSteps(k),
        precision=Precision(precision), **mesh_and_rules(mesh),
    )  # fmt: skip
    state = program.init({"up": up})
    for micro_batch in split(window, k):
        state, metrics = program.step(state, micro_batch)
    record = metrics.to_host()
    assert record["window_done"] == record["step"] == 1
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}[precision]  # a mean of means is wrong by 0.7
    assert distance(up - host(state.params["up"]), gradient) < tolerance
    assert record["loss"] == pytest.approx(loss, rel=tolerance)
    assert record["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=tolerance)
    assert record["weight"] == pytest.approx(np.float64(window["weight"]).sum(), rel=1e-6)


def test_the_mean_of_means_would_be_seen():
    up, window, gradient, _ = squares_case()
    means = []
    for part in split(window, 4):
        x, y, weight = (np.float64(part[name]) for name in ("x", "y", "weight"))
        means.append(x.T @ ((x @ np.float64(up) - y) * weight[:, None]) / weight.sum())
    assert distance(np.mean(means, axis=0), gradient) > 0.5


@pytest.mark.parametrize("k", [1, 4])
def test_fsdp_gathers_parameters_for_the_forward_pass_and_nothing_else(k):
    """One gather a parameter and step: gradients and the optimizer's state stay on their shards."""
    program = build_train_step(
        squares, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.adam(1.0), accumulation=MultiSteps(k),
        clip_norm=1.0, ema=0.9, **mesh_and_rules("fsdp8"),
    )  # fmt: skip
    text = program.lower(program.batch_struct(squares_case()[1])).compile().as_text()
    gathers = re.findall(r" all-gather(?:-start)?\(.*op_name=\"([^\"]*)\"", text)
    assert len(gathers) == 1
    assert "jvp()" in gathers[0]


# ---- 20 steps on one and on eight devices ------------------------------------------------------------------------


def mlp(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    up, down = params["up"], params["down"]
    hidden = jax.nn.gelu(batch["x"].astype(up.dtype) @ up)
    error = jnp.sum(((hidden @ down).astype(jnp.float32) - batch["y"]) ** 2, axis=1)
    weight = jnp.sum(batch["weight"])
    return Loss(
        jnp.sum(error * batch["weight"]), weight, metrics={"root": (jnp.sum(jnp.sqrt(error)), jnp.float32(B / 2))}
    )


def mlp_params(d: int = D, h: int = H) -> Any:
    draw = np.random.default_rng(1)
    return {"up": np.float32(draw.normal(size=(d, h)) / d**0.5), "down": np.float32(draw.normal(size=(h, 4)) / h**0.5)}


def mlp_windows(count: int, b: int = B, d: int = D) -> list[Any]:
    draw = np.random.default_rng(2)
    return [
        {
            "x": np.float32(draw.normal(size=(b, d))),
            "y": np.float32(draw.normal(size=(b, 4))),
            "weight": np.float32(draw.integers(0, 4, size=b)),
        }
        for _ in range(count)
    ]


RATE = optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 5, 20, 1e-4)
OPTIMIZERS = {"adamw": lambda: optax.adamw(RATE, weight_decay=0.1), "sgd": lambda: optax.sgd(lambda n: 10 * RATE(n))}
TOLERANCES = {"adamw": 1e-5, "sgd": 1e-6}  # of parameters after 20 steps, relative norm


@functools.cache
def plain_optax(optimizer: str) -> tuple[Any, list[float], Any]:
    """``(parameters, losses, average)`` after 20 big batches, by optax alone on one device."""
    transform = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZERS[optimizer]())

    @jax.jit
    def step(params, opt_state, ema, batch):
        def mean(params):
            loss = mlp(params, (), batch, None)
            return loss.total / loss.weight

        loss, grads = jax.value_and_grad(mean)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = transform.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params), loss

    params = ema = jax.tree.map(jnp.asarray, mlp_params())
    opt_state, losses = transform.init(params), []
    for batch in mlp_windows(20):
        params, opt_state, ema, loss = step(params, opt_state, ema, batch)
        losses.append(float(loss))
    return host(params), losses, host(ema)


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [(mesh, "adamw") for mesh in MESHES] + [(mesh, "sgd") for mesh in ("one", "data2-fsdp4")],
)
def test_20_steps_on_any_mesh_are_those_of_plain_optax(mesh, optimizer):
    program = build_train_step(
        mlp, lambda key: Variables(jax.tree.map(jnp.zeros_like, mlp_params())), OPTIMIZERS[optimizer](), clip_norm=1.0,
        accumulation=MultiSteps(2), precision=Precision("float32"), ema=0.9, **mesh_and_rules(mesh),
    )  # fmt: skip
    state, losses = program.init(mlp_params()), []
    for window in mlp_windows(20):
        for micro_batch in split(window, 2):
            state, metrics = program.step(state, micro_batch)
        losses.append(float(metrics["loss"]))
    params, wanted, ema = plain_optax(optimizer)
    np.testing.assert_allclose(losses, wanted, rtol=5e-6)
    assert distance(state.params, params) < TOLERANCES[optimizer]
    assert distance(state.ema, ema) < TOLERANCES[optimizer]

    spec = {"one": P(), "data8": P(), "fsdp4-tensor2": P("fsdp", "tensor")}.get(mesh, P(None, "fsdp"))
    shards = {"one": (D, H), "data8": (D, H), "fsdp8": (D, H // 8), "data2-fsdp4": (D, H // 4)}
    shard = shards.get(mesh, (D // 4, H // 2) if "tensor" in mesh else (D, H // 2))
    inner = state.opt_state.inner_opt_state
    moments = [inner[0].mu, inner[0].nu] if optimizer == "adamw" else []
    for tree in (state.params, state.ema, state.opt_state.acc_grads["grads"], *moments):
        assert tree["up"].sharding.spec == spec
        assert tree["up"].sharding.shard_shape((D, H)) == tree["up"].addressable_shards[0].data.shape == shard
        assert tree["down"].sharding.spec == (P("tensor") if "tensor" in mesh else P())


# ---- step == apply . grads ---------------------------------------------------------------------------------------


def noisy(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """A small network with dropout, a moving mean and a metric; ``batch["poison"]`` goes into every gradient."""
    up = params["up"]
    x = batch["x"].astype(up.dtype) - model_state["mean"].astype(up.dtype)[None]
    keep = jax.random.bernoulli(key, 0.5, (x.shape[0], up.shape[1])) if key is not None else True
    hidden = jnp.where(keep, jax.nn.gelu(x @ up), 0)
    error = (hidden @ params["down"]).astype(jnp.float32) - batch["y"] + batch["poison"][:, None]
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch["x"], axis=0)
    return Loss(
        jnp.sum(jnp.sum(error**2, axis=1) * batch["weight"]), jnp.sum(batch["weight"]), {"mean": mean},
        metrics={"error": (jnp.sum(jnp.abs(error)), jnp.float32(error.size)), "b": (jnp.float32(1), jnp.float32(2))},
    )  # fmt: skip


@functools.cache
def noisy_program(k: Any, precision: str = "float32", devices: int = 1) -> Any:
    precision = {"float16": Precision("float16", loss_scale=LossScale(256.0, growth_interval=1))}.get(
        precision, Precision(precision)
    )
    return build_train_step(
        noisy, lambda key: Variables(jax.tree.map(jnp.asarray, mlp_params(16, 32)), {"mean": jnp.zeros(16)}),
        optax.adamw(lambda n: 1e-2 / (n + 1.0)), accumulation=MultiSteps(k), precision=precision, clip_norm=1.0,
        ema=0.9, mesh=sharding.make_mesh(fsdp=devices), rules=[("up", P(None, "fsdp")), ("down", P("fsdp"))],
        report={"rate": lambda n: 1e-2 / (n + 1.0)},
    )  # fmt: skip


def noisy_batches(count: int, poison: dict[int, float]) -> list[Any]:
    batches = mlp_windows(count, b=8, d=16)
    return [b | {"poison": np.full(8, poison.get(i, 0.0), np.float32)} for i, b in enumerate(batches)]


@pytest.mark.parametrize(
    ("precision", "k", "devices"),
    [(p, *rest) for p in ("float32", "float16") for rest in ((1, 1), (4, 8))]
    + [("bfloat16", 1, 8), ("bfloat16", 4, 1)],
)
def test_step_is_apply_after_grads_bit_for_bit(precision, k, devices):
    program = noisy_program(k, precision, devices)
    fused, parts = program.init(), program.init()
    assert bits(fused) == bits(parts)
    for i, batch in enumerate(noisy_batches(10, {1: NAN, 9: INF})):
        fused, metrics = program.step(fused, batch)
        contribution = program.grads(program.view(parts), batch, i)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(host(contribution)))
        parts, others = program.apply(parts, contribution)
        assert bits(fused) == bits(parts), i
        assert bits(metrics) == bits(others), i
    assert all(program.traces[name] == 1 for name in ("init", "step", "grads", "apply"))
    assert int(fused.counters.step) == {1: 8, 4: 1}[k]
    wanted = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, parts, wanted)))


# ---- the table of events -----------------------------------------------------------------------------------------


def counting(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    return linear(params, model_state, batch, key)._replace(model_state={"n": model_state["n"] + 1.0})


G, BAD = rows(1.0), rows(NAN)
EVENTS = {
    # policy: [(event, (micro_step, window, step, skipped in a row, schedule count, scale, good windows, n))], k = 2
    "window": [
        (G, (1, 0, 0, 0, 0, 8, 0, 1)),
        (G, (2, 1, 1, 0, 1, 8, 1, 2)),
        (BAD, (3, 1, 1, 0, 1, 8, 1, 2)),
        (G, (4, 2, 1, 1, 1, 4, 0, 2)),
        (G, (5, 2, 1, 1, 1, 4, 0, 3)),
        (BAD, (6, 3, 1, 2, 1, 2, 0, 2)),
        (BAD, (7, 3, 1, 2, 1, 2, 0, 2)),
        (BAD, (8, 4, 1, 3, 1, 1, 0, 2)),  # two bad micro-batches back off once
        (G, (9, 4, 1, 3, 1, 1, 0, 3)),
        (G, (10, 5, 2, 0, 2, 1, 1, 4)),
        (G, (11, 5, 2, 0, 2, 1, 1, 5)),
        (G, (12, 6, 3, 0, 3, 2, 0, 6)),
        (G, (13, 6, 3, 0, 3, 2, 0, 7)),
        ("flush", (13, 7, 4, 0, 4, 2, 1, 7)),
        (BAD, (14, 7, 4, 0, 4, 2, 1, 7)),
        ("flush", (14, 8, 4, 1, 4, 1, 0, 7)),
    ],
    "micro": [
        (G, (1, 0, 0, 0, 0, 8, 0, 1)),
        (BAD, (2, 1, 1, 0, 1, 4, 0, 1)),  # applied with half the weight, and the scale backs off once
        (BAD, (3, 1, 1, 0, 1, 4, 0, 1)),
        (G, (4, 2, 2, 0, 2, 2, 0, 2)),
        (G, (5, 2, 2, 0, 2, 2, 0, 3)),
        (G, (6, 3, 3, 0, 3, 2, 1, 4)),
        (BAD, (7, 3, 3, 0, 3, 2, 1, 4)),
        (BAD, (8, 4, 3, 1, 3, 1, 0, 4)),  # nothing is left of it
        (G, (9, 4, 3, 1, 3, 1, 0, 5)),
        ("flush", (9, 5, 4, 0, 4, 1, 1, 5)),
    ],
}


@pytest.mark.parametrize("policy", EVENTS)
def test_table_of_events(policy):
    precision = Precision("float16", loss_scale=LossScale(8.0, growth_interval=2))
    program = linear_program(
        {"w": 0.0}, optax.sgd(lambda n: 1.0 + 0 * n), k=2, precision=precision, loss=counting,
        model_state={"n": jnp.float32(0)}, nonfinite=Skip(policy),
    )  # fmt: skip
    state, updates = program.init(), 0
    for i, (event, wanted) in enumerate(EVENTS[policy]):
        state, metrics = program.flush(state) if event == "flush" else program.step(state, event)
        record, scale = metrics.to_host(), state.scale
        counters = [record[name] for name in ("micro_step", "window", "step", "skipped_in_a_row")]
        count = int(optax.tree_utils.tree_get(state.opt_state, "count"))
        n = int(state.model_state["n"])
        assert (*counters, count, float(scale.value), int(scale.good_windows), n) == wanted, i
        assert counters == [int(x) for x in state.counters[:4]]
        assert record["skipped_steps"] == wanted[1] - wanted[2]
        assert float(state.params["w"]) == -wanted[2]  # every applied update has the mean gradient 1
        assert record["window_done"] == (wanted[1] > updates)
        updates = wanted[1]


@pytest.mark.parametrize(("k", "bad", "devices"), [(1, 0, 1), (4, 0, 8), (4, 2, 8), (4, 3, 8)])
def test_a_skipped_window_changes_nothing_but_counters(k, bad, devices):
    program = noisy_program(k, devices=devices)
    state = program.init()
    for i, batch in enumerate(noisy_batches(2 * k, {k + bad: NAN})):
        if i == k:
            before = bits(program.checkpoint_view(state)._replace(counters=()))
        state, metrics = program.step(state, batch)
    assert metrics.to_host()["skipped_steps"] == 1
    assert bits(program.checkpoint_view(state)._replace(counters=())) == before
    if k > 1:
        assert not any(np.any(x) for x in jax.tree.leaves(host(state.opt_state.acc_grads)))
        assert bits(state.model_state) == bits(state.start.model_state)


# ---- not finite, place by place ----------------------------------------------------------------------------------


@jax.custom_vjp
def _poisoned(w: jax.Array, p: jax.Array) -> jax.Array:
    """``w``, whose gradient has ``p`` added: nothing else sees ``p``."""
    return w


_poisoned.defvjp(lambda w, p: (w, p), lambda p, g: (g + p, jnp.zeros_like(p)))
PLACES = ("gradient", "total", "weight", "model_state", "metric", "metric_weight")


def fragile(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    p = {place: jnp.sum(batch[place]) for place in PLACES}
    loss = linear({"a": params["a"], "w": _poisoned(params["w"], p["gradient"])}, (), batch, key)
    return Loss(
        loss.total + p["total"], loss.weight + p["weight"], {"n": model_state["n"] + 1.0 + p["model_state"]},
        metrics={"m": (3.0 * loss.weight + p["metric"], loss.weight + p["metric_weight"])},
    )  # fmt: skip


@functools.cache
def fragile_program(policy: str, k: int) -> Any:
    return linear_program(
        {"a": 0.0, "w": 0.0},
        optax.adam(0.1),
        k=k,
        loss=fragile,
        model_state={"n": jnp.float32(0)},
        nonfinite=Skip(policy),
    )


def fragile_batch(place: str | None = None, value: float = 0.0) -> Any:
    return rows({"a": 2.0, "w": 1.0}) | {p: np.float32([value if p == place else 0]) for p in PLACES}


@pytest.mark.parametrize("policy", ["window", "micro"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_not_finite_in_any_place(place, k, policy):
    program = fragile_program(policy, k)
    good, bad = fragile_batch(), fragile_batch(place, NAN if k == 1 else -INF)
    state, _, _ = run(program, [good] * k)
    before = bits(program.checkpoint_view(state)._replace(counters=()))
    state, records, _ = run(program, [bad] + [good] * (k - 1), state)
    record = records[-1]
    skipped = policy == "window" or k == 1
    if skipped:
        assert record["bad_leaf"] == (1 if place == "gradient" else -1)
    assert (record["skipped_steps"], record["step"], record["window"]) == (int(skipped), 2 - skipped, 2)
    assert (bits(program.checkpoint_view(state)._replace(counters=())) == before) == skipped
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(host(state)))
    if not skipped:
        close(
            [record["loss"], record["weight"], record["m"], record["grad_norm"]], [-0.3, k - 1, 3.0, 5**0.5], atol=1e-2
        )
        assert float(state.model_state["n"]) == 2 * k - 1
    state, records, _ = run(program, [good] * k, state)  # and on it goes
    assert (records[-1]["step"], records[-1]["skipped_in_a_row"], records[-1]["m"]) == (3 - skipped, 0, 3.0)


@pytest.mark.parametrize("policy", ["window", "micro"])
def test_an_infinite_sum_of_finite_gradients_poisons_one_window_only(policy):
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=2, nonfinite=Skip(policy))
    state, records, trace = run(program, [rows(g) for g in (1.0, 1.0, 3e38, 3e38, 1.0, 1.0, -3e38, -3e38, 2.0, 2.0)])
    assert trace[1::2] == [-1.0, -1.0, -2.0, -2.0, -4.0]
    assert (records[-1]["step"], records[-1]["window"]) == (3, 5)
    state, _, _ = run(program, [rows(3e38)], state)
    state, _ = program.flush(state)
    _, _, trace = run(program, [rows(1.0), rows(1.0)], state)
    assert trace[-1] == -5.0


@pytest.mark.parametrize("k", [1, 2])
def test_a_window_without_any_weight_is_skipped(k):
    precision = Precision("float16", loss_scale=LossScale(8.0, growth_interval=2))
    program = linear_program(
        {"w": 1.0}, optax.adam(0.1), k=k, ema=0.5, precision=precision, loss=counting,
        model_state={"n": jnp.float32(0)}, nonfinite=Skip(max_consecutive=0),
    )  # fmt: skip
    state, _, _ = run(program, [rows(1.0)] * k)
    before = bits(program.checkpoint_view(state)._replace(counters=()))
    state, records, _ = run(program, [rows(1.0, mask=[0.0])] * k, state)
    assert bits(program.checkpoint_view(state)._replace(counters=())) == before
    assert (records[-1]["skipped_steps"], records[-1]["weight"], records[-1]["tokens"]) == (1, 0.0, k)
    with pytest.raises(FloatingPointError, match=r"window 2: every weight was zero"):
        program.check(records[-1])


@pytest.mark.parametrize("k", [1, 2])
def test_a_norm_that_overflows_is_a_skip_with_its_own_name(k):
    """Finite gradients of 1e25 have an infinite norm in float32: nothing moves."""
    program = linear_program(
        {"w": [0.0, 0.0]}, optax.sgd(1.0), k=k, loss=counting, model_state={"n": jnp.float32(0)},
        nonfinite=Skip(max_consecutive=0),
    )  # fmt: skip
    state, records, trace = run(program, [rows([1e25, 1e25])] * k)
    assert (trace[-1], float(state.model_state["n"])) == ([0.0, 0.0], 0.0)
    assert (records[-1]["skipped_steps"], records[-1]["bad_leaf"]) == (1, -1)
    with pytest.raises(FloatingPointError, match=r"the gradients are finite and their global norm is inf"):
        program.check(records[-1])


def test_padding_micro_batches_change_no_mean():
    _, records, trace = run(
        linear_program({"w": 1.0}, optax.sgd(1.0), k=3), [rows(4.0), rows(9.0, mask=[0.0]), rows(2.0)]
    )
    close([trace[-1], records[-1]["loss"], records[-1]["weight"]], [-2.0, 3.0, 2.0])


# ---- flush -------------------------------------------------------------------------------------------------------


def test_flush_where_nothing_is_pending():
    for k in (1, 2):
        program = linear_program({"w": 0.0}, optax.sgd(1.0), k=k)
        state = program.init()
        same, metrics = program.flush(state)
        assert (same is state, metrics) == (True, None)
        state, _, _ = run(program, [rows(1.0)] * k, state)
        same, metrics = program.flush(state)
        assert (same is state, metrics) == (True, None)


def test_flush_divides_by_what_came_and_windows_go_on():
    program = linear_program(
        {"w": 0.0}, optax.sgd(1.0), k=lambda window: jnp.where(window < 1, 3, 2), loss=_two_metrics
    )
    state, _, _ = run(program, [rows(1.0, 9.0, mask=[1, 0]), rows(3.0, 5.0)])
    old = state
    state, metrics = program.flush(state)
    assert old.params["w"].is_deleted()
    record = metrics.to_host()
    close([record[name] for name in ("weight", "grad_norm", "first", "second")], [3.0, 3.0, 7.0, 5.0])
    assert (record["window"], record["step"], record["micro_step"], record["tokens"]) == (1, 1, 2, 3)
    state, records, trace = run(program, [rows(1.0, 1.0)] * 4, state)  # k is 2 from the second window on
    close(trace, [-3, -4, -4, -5])
    assert (records[-1]["window"], records[-1]["step"], program.traces["step"]) == (3, 3, 1)


def _two_metrics(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    loss = linear(params, model_state, batch, key)
    return loss._replace(
        metrics={"second": (5.0 * loss.weight, loss.weight), "first": (7.0 * loss.weight, loss.weight)}
    )


def test_flush_of_a_bad_window_skips_it_and_names_the_leaf():
    program = linear_program({"a": 0.0, "w": 0.0}, optax.sgd(1.0), k=3, nonfinite=Skip(max_consecutive=0))
    state, _, _ = run(program, [rows({"a": 1.0, "w": NAN}), rows({"a": 1.0, "w": 1.0})])
    state, metrics = program.flush(state)
    record = metrics.to_host()
    assert (record["window"], record["step"]) == (1, 0)
    assert host(state.params) == {"a": 0.0, "w": 0.0}
    with pytest.raises(FloatingPointError, match="'w'"):
        program.check(record)


# ---- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "devices", "fresh"), [(1, 1, False), (4, 8, True)])
def test_resume_and_replay_is_the_unbroken_run_bit_for_bit(k, devices, fresh):
    program, batches = noisy_program(k, devices=devices), noisy_batches(12, {2: NAN, 9: NAN})
    state, snapshots = program.init(), []
    for batch in batches:
        state, _ = program.step(state, batch)
        snapshots.append(host(program.checkpoint_view(state)))
    again = noisy_program.__wrapped__(k, devices=devices) if fresh else program  # a new process builds it anew
    for at in (0, 2, 5, 10):
        snapshot = snapshots[at]
        assert snapshot.counters.micro_step == (at + 1) // k * k
        resumed = again.resume(snapshot)
        for batch in batches[snapshot.counters.micro_step :]:
            resumed, _ = again.step(resumed, batch)
        assert bits(resumed) == bits(state), at
    assert (again.traces["step"], again.traces["resume"], again._step._cache_size()) == (1, 1, 1)


def test_resume_finds_its_place_in_a_schedule_of_window_lengths():
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=lambda window: jnp.where(window < 1, 2, 3))
    state, _, _ = run(program, [rows(g) for g in (1, 3, 1, 2, 3, 50)])
    state = program.resume(host(program.checkpoint_view(state)))
    assert int(state.counters.micro_step) == 5
    _, _, trace = run(program, [rows(g) for g in (9, 1, 2)], state)
    close(trace, [-4, -4, -8])


@pytest.mark.parametrize("k", [4, 1])
def test_a_snapshot_goes_on_under_another_k(k):
    first = linear_program(
        {"w": 0.0}, optax.sgd(1.0, momentum=0.5), k=4, loss=counting, model_state={"n": jnp.float32(0)}
    )
    state, _, _ = run(first, [rows(g) for g in (1.0, 2.0, 3.0, 2.0, 100.0, 100.0)])  # two of them in an open window
    snapshot = host(first.checkpoint_view(state))
    assert isinstance(snapshot, Snapshot)
    close([snapshot.params["w"], snapshot.model_state["n"], snapshot.counters.micro_step], [-2.0, 4.0, 4.0])
    other = linear_program(
        {"w": 0.0}, optax.sgd(1.0, momentum=0.5), k={4: 2, 1: 1}[k], loss=counting, model_state={"n": jnp.float32(0)}
    )
    assert jax.tree.structure(other.abstract_snapshot) == jax.tree.structure(first.abstract_snapshot)
    state, records, trace = run(other, [rows(4.0), rows(6.0)], other.resume(snapshot))
    if k == 4:  # one window: momentum 0.5 * 2 + 5
        close(trace, [-2.0, -8.0])
    else:  # two steps: 0.5 * 2 + 4 = 5, 0.5 * 5 + 6 = 8.5
        close(trace, [-7.0, -15.5])
    assert (records[-1]["window"], records[-1]["micro_step"], records[-1]["tokens"]) == ({4: 2, 1: 3}[k], 6, 6)
    back = first.resume(host(other.checkpoint_view(state)))
    _, records, _ = run(first, [rows(1.0)] * 4, back)
    assert records[-1]["window"] == {4: 3, 1: 4}[k]


def test_checkpoint_view_shares_and_resume_donates():
    program = linear_program({"w": 0.0}, optax.adam(0.1), k=2)
    state, _, _ = run(program, [rows(1.0)])
    snapshot = program.checkpoint_view(state)
    assert snapshot.params["w"] is state.params["w"]
    assert jax.tree.structure(snapshot) == jax.tree.structure(program.abstract_snapshot)
    resumed = program.resume(snapshot)
    assert state.params["w"].is_deleted()
    assert int(resumed.opt_state.mini_step) == 0
    assert int(resumed.counters.micro_step) == 0


# ---- types, traces, batches --------------------------------------------------------------------------------------


def test_every_leaf_is_strongly_typed_and_where_it_should_be():
    program = noisy_program(4, devices=8)
    state = program.init()
    states = [state := program.step(state, batch)[0] for batch in noisy_batches(5, {})][-1:]
    state = states[0]
    states += [
        program.resume(host(program.checkpoint_view(state))),
        program.init(host(state.params)),
        program.flush(state)[0],
    ]
    for i, each in enumerate(states[1:]):
        for leaf, wanted in zip(jax.tree.leaves(each), jax.tree.leaves(program.abstract_state), strict=True):
            assert (leaf.weak_type, leaf.sharding, leaf.shape, leaf.dtype) == (
                False, wanted.sharding, wanted.shape, wanted.dtype
            ), i  # fmt: skip


def test_batches_from_numpy_and_from_the_device_are_one_trace():
    program = linear_program({"w": 0.0}, optax.sgd(1.0), mesh=sharding.make_mesh(data=8))
    batch = rows(*[1.0] * 8)
    placed = jax.device_put(batch, program.batch_sharding)
    assert placed["mask"].sharding.shard_shape((8,)) == (1,)
    doubles = jax.tree.map(np.float64, batch)
    _, _, trace = run(program, [batch, placed, doubles, jax.tree.map(jnp.asarray, batch)])
    assert trace == [-1.0, -2.0, -3.0, -4.0]
    assert program.traces["step"] == 1


def test_JAX_01_a_second_compilation_says_which_leaf_changed():
    program = linear_program({"w": 0.0}, optax.sgd(1.0))
    state, _, _ = run(program, [rows(1.0)])
    with pytest.warns(
        RuntimeWarning, match=r"step is compiled a second time.*\n  c/w: expected float32\[1\], got float32\[2\]"
    ):
        program.step(state, rows(1.0, 2.0))


def test_CKPT_12_tied_leaves_are_not_donated_twice():
    """The same array under two names, given, resumed and trained: each name has a buffer of its own."""
    program = linear_program({"tied": 0.0, "w": 0.0}, optax.sgd(-1.0))
    shared = jnp.float32(0)
    state = program.init({"w": shared, "tied": shared})
    batch = rows({"tied": 1.0, "w": 1.0})
    for _ in range(2):
        state, _ = program.step(state, batch)
    snapshot = host(program.checkpoint_view(state))
    both = jnp.asarray(snapshot.params["w"])
    state = program.resume(snapshot._replace(params={"w": both, "tied": both}))
    for _ in range(3):
        state, _ = program.step(state, batch)
    assert host(state.params) == {"tied": 5.0, "w": 5.0}
    assert (float(shared), float(snapshot.params["w"])) == (0.0, 2.0)


def test_batch_struct_is_what_the_step_sees():
    program = linear_program({"w": 0.0}, optax.sgd(1.0), mesh=sharding.make_mesh(data=8), loss=_with_index)
    batch = rows(*[1.0] * 8) | {"index": np.arange(8)}  # int64, as NumPy makes it
    struct = program.batch_struct(batch)
    assert struct["index"].sharding == NamedSharding(program.mesh, P(("slice", "data", "fsdp")))
    assert struct["index"].dtype == jnp.int32  # what a step gets
    program.lower(struct)
    program.step(program.init(), jax.device_put(batch, program.batch_sharding))
    assert program.traces["step"] == 1


def _with_index(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    return linear(params, model_state, {"c": batch["c"], "mask": batch["mask"]}, key)


@pytest.mark.parametrize("weight", [5.0, 1.0])
def test_tokens_are_exact_beyond_32_bits(weight):
    program = linear_program({"w": 0.0}, optax.sgd(0.0), k=2)
    snapshot = host(program.checkpoint_view(program.init()))
    start = 2**40 + 2**32 - 3  # the low word is about to run over
    tokens = np.asarray([start >> 32, start % 2**32], np.uint32)
    state = program.resume(snapshot._replace(counters=snapshot.counters._replace(tokens=tokens)))
    _, records, _ = run(program, [rows(1.0, mask=[weight])] * 6, state)
    assert [r["tokens"] for r in records] == [start + int(weight) * (i + 1) for i in range(6)]


BAD_BATCHES = {
    "12 rows": (rows(*[1.0] * 12), r"12 rows do not divide by the 8 devices .*data=2, fsdp=4.* 8 or 16 rows"),
    "3 rows": (rows(*[1.0] * 3), r"3 rows do not divide by the 8 devices .* 8 rows"),
    "0 rows": ({"c": {"w": np.zeros(0, np.float32)}, "mask": np.zeros(0, np.float32)}, r"0 rows"),
    "unequal": (rows(*[1.0] * 8) | {"mask": np.ones(16, np.float32)}, r"same leading dim .*\(8,\), mask: \(16,\)"),
    "array scalar": (rows(*[1.0] * 8) | {"t": np.float32(1)}, r"same leading dim .*\(\)"),
    "python scalar": (
        rows(*[1.0] * 8) | {"t": 1.0},
        r"1 leaves are Python numbers or texts, .*give a pytree of arrays",
    ),
    "a list": (rows(*[1.0] * 8) | {"t": [1.0] * 8}, r"8 leaves are Python numbers or texts, as lists of them give"),
    "empty": ({}, r"batch: it is empty; give a pytree of arrays, each beginning with the rows"),
}


@pytest.mark.parametrize(("batch", "text"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_batch_errors_say_what_and_what_to_do(batch, text):
    program = linear_program({"w": 0.0}, optax.sgd(1.0), mesh=sharding.make_mesh(data=2, fsdp=4))
    state = program.init()
    for call in (program.step, lambda state, batch: program.grads(program.view(state), batch, 0)):
        with pytest.raises(ValueError, match=text):
            call(state, batch)
    with pytest.raises(ValueError, match=text):
        program.evaluate(program.view(state), batch)
    with pytest.raises(ValueError, match=text):
        program.batch_struct(batch)
    assert "step" not in program.traces


# ---- errors at build and at the first trace ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_masters_are_float32(dtype):
    variables = Variables({"layer": {"ok": jnp.zeros(2), "bad": jnp.zeros(2, dtype)}})
    with pytest.raises(ValueError, match=rf"layer/bad: .*float32.*got {dtype}"):
        build_train_step(linear, lambda key: variables, optax.sgd(1.0), mesh=sharding.make_mesh())


ONE = np.float32(1)
RETURNS = {
    "scalar": (lambda total, weight: total, TypeError, "returned .*Loss.*adapters.plain"),
    "tuple": (lambda total, weight: (total, weight), TypeError, "returned tuple"),
    "vector total": (lambda total, weight: Loss(total[None], weight), TypeError, r"total is float32\[1\].*SUM"),
    "bf16 total": (lambda total, weight: Loss(total.astype(jnp.bfloat16), weight), TypeError, r"total is bfloat16\[\]"),
    "int weight": (lambda total, weight: Loss(total, jnp.int32(1)), TypeError, r"weight is int32\[\]"),
    "vector metric": (
        lambda total, weight: Loss(total, weight, metrics={"m": (total, weight[None])}), TypeError,
        r"metrics\['m'\]\[1\] is float32\[1\]",
    ),
    "metric no pair": (lambda total, weight: Loss(total, weight, metrics={"m": total}), TypeError, r"metrics\['m'\]"),
    "metric of one": (lambda total, weight: Loss(total, weight, metrics={"m": (total,)}), TypeError, r"metrics\['m'\]"),
    "metric of three": (
        lambda total, weight: Loss(total, weight, metrics={"m": (total, weight, total)}), TypeError, r"metrics\['m'\]",
    ),
    "33 metrics": (
        lambda total, weight: Loss(total, weight, metrics={f"m{i}": (total, weight) for i in range(33)}), TypeError,
        "33 metrics; at most 32",
    ),
    "stats": (lambda total, weight: Loss(total, weight, stats=total), TypeError, r"no build_train_step\(merge_stats="),
    "model_state dtype": (
        lambda total, weight: Loss(total, weight, {"n": jnp.bfloat16(0)}), TypeError,
        r"n: expected float32\[\], got bfloat16\[\]",
    ),
    "model_state shape": (
        lambda total, weight: Loss(total, weight, {"n": total[None]}), TypeError,
        r"n: expected float32\[\], got float32\[1\]",
    ),
    "model_state name": (
        lambda total, weight: Loss(total, weight, {"o": total}), TypeError, r"n: missing(.|\n)*o: not expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("returns", "error", "text"), RETURNS.values(), ids=RETURNS)
def test_wrong_returns_of_a_loss_are_named(returns, error, text):
    def loss(params, model_state, batch, key):
        right = linear(params, model_state, batch, key)
        return returns(right.total, right.weight)

    program = linear_program({"w": 0.0}, optax.sgd(1.0), loss=loss, model_state={"n": jnp.float32(0)})
    state = program.init()
    with pytest.raises(error, match=text):
        program.step(state, rows(1.0))
    assert not state.params["w"].is_deleted()


@pytest.mark.parametrize("name", ["loss", "grad_norm_clipped", "step", "rate"])
def test_a_metric_never_takes_the_place_of_a_builtin_one(name):
    def loss(params, model_state, batch, key):
        return linear(params, model_state, batch, key)._replace(metrics={name: (jnp.float32(77), jnp.float32(1))})

    program = linear_program({"w": 1.0}, optax.sgd(1.0), loss=loss, report={"rate": lambda n: 1.0})
    with pytest.raises((TypeError, ValueError), match=rf"metric.*{name}"):
        program.step(program.init(), rows(2.0))


def test_a_reported_rate_never_takes_the_place_of_a_builtin_metric():
    with pytest.raises(ValueError, match="loss"):
        linear_program({"w": 1.0}, optax.sgd(1.0), report={"loss": lambda n: 1.0})


SENSELESS = {
    "clip_norm < 0 climbs": {"clip_norm": -1.0},
    "clip_norm 0 freezes": {"clip_norm": 0.0},
    "ema > 1": {"ema": 1.5},
    "ema < 0": {"ema": -0.1},
    "batch_axes of letters": {"batch_axes": "data"},
    "seed": {"seed": -1},
}


@pytest.mark.parametrize("settings", SENSELESS.values(), ids=SENSELESS)
def test_senseless_settings_are_refused_at_build(settings):
    with pytest.raises((ValueError, TypeError)):
        linear_program({"w": 0.0}, optax.sgd(1.0), **settings)


def test_rules_are_checked_at_build(make_mesh):
    with pytest.raises(ValueError, match=r"w: dim 63 of \(63,\) is not divisible by mesh axis 'fsdp'=8"):
        linear_program({"w": np.zeros(63)}, optax.sgd(1.0), mesh=make_mesh(fsdp=8), rules=[("w", P("fsdp"))])


# ---- init --------------------------------------------------------------------------------------------------------


def test_init_from_given_parameters_leaves_them_alone():
    program = linear_program({"w": 0.0}, optax.sgd(1.0), ema=0.5, k=2)
    given = jax.device_put(
        {"w": jnp.float32(5)}, jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.params)
    )
    state, _, trace = run(program, [rows(1.0)] * 2, program.init(given))
    assert (trace[-1], float(given["w"]), float(state.ema["w"])) == (4.0, 5.0, 4.5)


GIVEN = {
    "dtype": ({"w": jnp.bfloat16(0), "b": jnp.zeros(2)}, r"w: expected float32\[\], got bfloat16\[\]"),
    "shape": ({"w": jnp.float32(0), "b": jnp.zeros(3)}, r"b: expected float32\[2\], got float32\[3\]"),
    "names": ({"w": jnp.float32(0), "c": jnp.zeros(2)}, r"b: missing .*\n  c: not expected"),
    "python": ({"w": 0.0, "b": jnp.zeros(2)}, r"w: "),
    "container": ([jnp.zeros(2), jnp.float32(0)], r"b: missing"),
}


@pytest.mark.parametrize(("given", "text"), GIVEN.values(), ids=GIVEN)
def test_init_lists_what_does_not_fit(given, text):
    program = linear_program({"w": 0.0, "b": [0.0, 0.0]}, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"the given parameters do not fit:\n  (.|\n)*" + text):
        program.init(given)


def test_init_takes_other_containers_of_the_same_names():
    variables = Variables({"layers": [jnp.float32(1), jnp.float32(2)]})
    program = build_train_step(linear, lambda key: variables, optax.sgd(1.0), mesh=sharding.make_mesh())
    state = program.init({"layers": (jnp.float32(3), jnp.float32(4))})
    assert host(state.params) == {"layers": [3.0, 4.0]}


@pytest.mark.parametrize(
    "make", [lambda w: w, lambda w: [w, w], lambda w: (w, {"x": w})], ids=["bare", "list", "tuple"]
)
def test_parameters_of_any_container_are_sharded(make):
    def loss(params, model_state, batch, key):
        total = sum(jnp.sum(batch["x"] @ w) for w in jax.tree.leaves(params))
        return Loss(total, jnp.float32(8))

    program = build_train_step(
        loss, lambda key: Variables(make(jnp.zeros((D, H)))), optax.adam(1.0), mesh=sharding.make_mesh(fsdp=8),
        precision=Precision("float32"), accumulation=MultiSteps(2),
    )  # fmt: skip
    big = [leaf for leaf in jax.tree.leaves(program.abstract_state) if leaf.shape == (D, H)]
    assert len(big) == 4 * len(jax.tree.leaves(program.abstract_state.params))
    assert [leaf.sharding.spec for leaf in big] == [P(None, "fsdp")] * len(big)


# ---- views, evaluation, reports, keys ----------------------------------------------------------------------------


def test_views_and_donation():
    program = linear_program({"w": 1.0}, optax.sgd(1.0), ema=0.5)
    state = program.init()
    kept, shared = program.view(state), program.view(state, copy=False)
    assert shared.params["w"] is state.params["w"]
    state, _ = program.step(state, rows(2.0))
    assert shared.params["w"].is_deleted()
    assert float(kept.params["w"]) == 1.0
    close(program.view(state).params["w"], -1.0)
    close(program.view(state, ema=True).params["w"], 0.0)  # half of 1, half of -1
    close(program.evaluate(program.view(state, ema=True), rows(3.0, 5.0))["loss"], [0.0, 2.0])
    close(program.evaluate(program.view(state), rows(3.0, 5.0))["loss"], [-8.0, 2.0])
    plain = linear_program({"w": 1.0}, optax.sgd(1.0))
    with pytest.raises(ValueError, match="average"):
        plain.view(plain.init(), ema=True)


def test_a_state_that_is_gone_is_refused_by_every_function():
    """jax 0.10 ends the process over a donated buffer on several CPU devices."""
    program = linear_program({"w": 1.0}, optax.sgd(1.0), k=2, mesh=sharding.make_mesh(fsdp=8))
    batch, gone = rows(*[1.0] * 8), program.init()
    shared, contribution = program.view(gone, copy=False), program.grads(program.view(gone), rows(*[1.0] * 8), 0)
    state, _ = program.step(gone, batch)
    for name, call in {
        "step": lambda: program.step(gone, batch), "apply": lambda: program.apply(gone, contribution),
        "flush": lambda: program.flush(gone), "drop": lambda: program.drop(gone), "view": lambda: program.view(gone),
        "grads": lambda: program.grads(shared, batch, 0), "evaluate": lambda: program.evaluate(shared, batch),
    }.items():  # fmt: skip
        what = "View" if name in ("grads", "evaluate") else "TrainState"
        with pytest.raises(ValueError, match=rf"^{name}: this {what} is gone: .*donated.* Go on with the state"):
            call()
    state, metrics = program.step(state, batch)
    assert metrics.to_host()["step"] == 1


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("optimizer", 0.1, r"optimizer is 0\.1; give one like optax\.adamw"),
        ("mesh", None, "mesh is None; give one like"),
        ("accumulation", 4, r"accumulation is 4; give one like MultiSteps\(4\)"),
        ("precision", "float16", r"precision is 'float16'; give one like Precision\("),
        ("nonfinite", "micro", r"nonfinite is 'micro'; give one like Skip"),
        ("rules", {"w": P()}, r"rules is \{.*; give one like \[\("),
        ("report", {"rate": 0.1}, r"report: rate is 0\.1; give a schedule, a function of the step"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind(name, value, match):
    given = {"optimizer": optax.sgd(1.0), "mesh": sharding.make_mesh(), name: value}
    with pytest.raises(TypeError, match=rf"^{match}"):
        build_train_step(squares, lambda key: Variables({"w": jnp.float32(1)}), given.pop("optimizer"), **given)


def test_a_state_for_a_view_and_a_view_for_a_state():
    program = linear_program({"w": 1.0}, optax.sgd(1.0))
    state = program.init()
    with pytest.raises(
        TypeError, match=r"evaluate: got TrainState; give the View that program\.view\(state\) returned"
    ):
        program.evaluate(state, rows(1.0))
    with pytest.raises(
        TypeError, match=r"step: got View; give the TrainState that program\.init\(\) or an earlier call"
    ):
        program.step(program.view(state), rows(1.0))


def test_what_init_fn_must_give():
    for init, error, match in (
        (lambda key: {"w": jnp.float32(1)}, TypeError, r"init_fn returned dict; return jaxtrain\.step\.Variables"),
        (lambda key: Variables({}), ValueError, "init_fn gives no parameters: there is nothing to train"),
    ):
        with pytest.raises(error, match=match):
            build_train_step(squares, init, optax.sgd(1.0), mesh=sharding.make_mesh())


@pytest.mark.parametrize("mesh", ["one", "data2-fsdp4"])
def test_evaluation_adds_up_over_batches_draws_nothing_and_changes_nothing(mesh):
    keys = []

    def loss(params, model_state, batch, key):
        keys.append(key)
        return squares(params, model_state, batch, key)._replace(
            metrics={"rows": (jnp.sum(batch["x"][:, 0]), jnp.float32(8))}
        )

    up, window, _, wanted = squares_case()
    program = build_train_step(
        loss, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.sgd(1.0), precision=Precision("float32"),
        **mesh_and_rules(mesh),
    )  # fmt: skip
    state = program.init({"up": up})
    before, view = bits(state), program.view(state)
    sums = [program.evaluate(view, part) for part in split(window, 4)]
    total, weight = np.sum([np.float64(s["loss"]) for s in sums], axis=0)
    assert total / weight == pytest.approx(wanted, rel=1e-6)
    close(np.sum([np.float64(s["rows"]) for s in sums], axis=0), [np.float64(window["x"][:, 0]).sum(), 32], atol=1e-4)
    assert keys == [None]
    assert bits(state) == before
    assert program.traces["evaluate"] == 1


@pytest.mark.parametrize("k", [1, 3])
def test_the_reported_rate_is_the_one_applied(k):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 3, 8, 0.1)
    program = linear_program({"w": 0.0}, optax.sgd(schedule), k=k, report={"learning_rate": schedule})
    batches = [rows(NAN if i == 2 * k else 1.0) for i in range(8 * k)]
    state, records, trace = run(program, batches[: 5 * k + k // 2])
    state = program.resume(host(program.checkpoint_view(state)))  # in the middle of a window, if it has a middle
    state, more, rest = run(program, batches[int(state.counters.micro_step) :], state)
    w = [0.0, *trace[k - 1 : 5 * k : k], *rest[k - 1 :: k]]
    reported = [r["learning_rate"] for r in (records + more) if r["window_done"]]
    rates = [float(schedule(n)) for n in (0, 1, None, 2, 3, 4, 5, 6) if n is not None]
    close(np.delete(-np.diff(w), 2), rates)  # gradient 1: the delta is the rate; the third window was skipped
    assert np.diff(w)[2] == 0
    close(np.delete(reported, 2), rates)


def test_RNG_02_RNG_06_a_key_depends_on_the_seed_and_the_micro_step_only():
    def loss(params, model_state, batch, key):
        drawn = model_state["key"] if key is None else jax.random.key_data(key)
        return linear(params, model_state, batch, key)._replace(
            model_state={"key": drawn, "table": model_state["table"]}
        )

    def keys(k, seed, disturbed, resumed=False):
        program = linear_program(
            {"w": 0.0}, optax.sgd(1.0), k=k, loss=loss, seed=seed,
            model_state={"key": jnp.zeros(2, jnp.uint32), "table": jnp.arange(5)},
        )  # fmt: skip
        state, drawn = program.init(), []
        for i in range(6):
            if resumed and i == 4:
                state = program.resume(host(program.checkpoint_view(state)))
            if disturbed:
                program.evaluate(program.view(state), rows(1.0))
                program.grads(program.view(state), rows(1.0), 3)
            state, metrics = program.step(state, rows(NAN if disturbed == "bad" and i == 1 else 1.0))
            if disturbed:
                metrics.to_host()
            drawn.append(host(state.model_state["key"]).tolist())
        assert host(state.model_state["table"]).tolist() == [0, 1, 2, 3, 4]
        return drawn

    wanted, others = ([jax.random.key_data(rng.key(seed, "dropout", i)).tolist() for i in range(6)] for seed in (7, 8))
    assert keys(1, 7, None) == keys(4, 7, "eval", resumed=True) == wanted
    assert keys(1, 8, "bad")[2:] == others[2:]  # a bad micro-batch moves no model state, and shifts no later key
    assert len({tuple(key) for key in wanted + others}) == 12


# ---- other topologies --------------------------------------------------------------------------------------------


def test_a_program_for_64_devices_that_nobody_has():
    mesh = AbstractMesh((1, 8, 8, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    program = build_train_step(
        mlp, lambda key: Variables(jax.tree.map(jnp.asarray, mlp_params())), optax.adam(1e-3), mesh=mesh,
        accumulation=MultiSteps(2), ema=0.9,
    )  # fmt: skip
    assert program.abstract_state.params["up"].sharding.spec == P(None, "fsdp")
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype), mlp_windows(1)[0])
    with pytest.raises(ValueError, match="32 rows do not divide by the 64 devices"):
        program.batch_struct(mlp_windows(1)[0])
    traced = program._step.trace(program.abstract_state, program.batch_struct(batch), None)
    state, _ = traced.out_info
    assert state.params["up"].shape == (D, H)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert re.search(r"num_partitions = 64", text)
