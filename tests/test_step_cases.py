"""Faults that users of training stacks really met (public case ids in the names), with numbers worked out by hand.

A loss that is linear in the parameters makes any wanted gradient: the total is sum(mask * <w, c>), its gradient is
sum(mask * c).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain import sharding
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import Loss, MultiSteps, NonFiniteError, Program, Skip, Variables, build_train_step

NAN, INF = math.nan, math.inf


def linear(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """Sum over rows of mask * <w, c>, in float32 whatever dtype computes."""
    mask = batch["mask"]
    dots = [
        jnp.sum((w.astype(jnp.float32)[None] * c).reshape(mask.size, -1), axis=1)
        for w, c in zip(jax.tree.leaves(params), jax.tree.leaves(batch["c"]), strict=True)
    ]
    return Loss(jnp.sum(sum(dots[1:], dots[0]) * mask), jnp.sum(mask))


def linear_program(
    params: Any, optimizer: Any, k: Any = 1, precision: Any = "float32", loss: Callable = linear,
    model_state: Any = (), mesh: Any = None, **settings: Any,
) -> Program:  # fmt: skip
    """A program whose parameters start at ``params`` (numbers or lists), on one device unless a mesh is given."""
    start = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    precision = Precision(precision) if isinstance(precision, str) else precision
    return build_train_step(
        loss, lambda key: Variables(start, model_state), optimizer, mesh=mesh or sharding.make_mesh(),
        accumulation=MultiSteps(k), precision=precision, **settings,
    )  # fmt: skip


def rows(*gradients: Any, mask: Sequence[float] | None = None, name: str = "w") -> dict[str, Any]:
    """A micro-batch whose row i has the gradient ``gradients[i]``: a number or list for ``name``, or a dict."""
    trees = [g if isinstance(g, dict) else {name: g} for g in gradients]
    c = {leaf: np.stack([np.asarray(tree[leaf], np.float32) for tree in trees]) for leaf in trees[0]}
    return {"c": c, "mask": np.asarray([1.0] * len(trees) if mask is None else mask, np.float32)}


def run(program: Program, batches: Sequence[Any], state: Any = None) -> tuple[Any, list[dict], list[Any]]:
    """``(state, records, w after each micro-batch)``."""
    state = program.init() if state is None else state
    records, trace = [], []
    for batch in batches:
        state, metrics = program.step(state, batch)
        records.append(metrics.to_host())
        trace.append(jax.device_get(state.params["w"]).tolist())
    return state, records, trace


def closed(records: Sequence[dict]) -> list[dict]:
    """The records of finished windows."""
    return [record for record in records if record["window_done"]]


def close(got: Any, wanted: Any, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=0, atol=atol)


# ---- accumulation ------------------------------------------------------------------------------------------------


def test_ACC_01_the_schedule_counts_applied_updates():
    def rate(step):
        return 0.1 * (step + 1)

    state, records, trace = run(
        linear_program({"w": 0.0}, optax.sgd(rate), k=4, report={"learning_rate": rate}), [rows(1.0)] * 12
    )
    close(trace, [0, 0, 0, -0.1, -0.1, -0.1, -0.1, -0.3, -0.3, -0.3, -0.3, -0.6])
    close([r["learning_rate"] for r in closed(records)], [0.1, 0.2, 0.3])
    assert (int(state.counters.step), int(state.counters.micro_step)) == (3, 12)


TOKENS = [rows(1, 1, 1, 0, mask=[1, 1, 1, 0]), rows(5, 0, 0, 0, mask=[1, 0, 0, 0])]


FP16 = Precision("float16", loss_scale=LossScale(1024.0, dynamic=False))  # a mean gradient below 64 does not overflow


@pytest.mark.parametrize("precision", ["float32", "bfloat16", FP16], ids=["float32", "bfloat16", "float16"])
def test_ACC_03_unequal_token_counts(precision):
    _, records, trace = run(linear_program({"w": 1.0}, optax.sgd(0.1), k=2, precision=precision), TOKENS)
    close(trace, [1.0, 0.8])  # mean of means: 0.7
    close([closed(records)[0][name] for name in ("loss", "weight", "grad_norm")], [2.0, 4.0, 2.0])
    assert records[-1]["tokens"] == 4


def test_ACC_03_one_batch_of_all_tokens_is_the_same():
    both = jax.tree.map(lambda *leaves: np.concatenate(leaves), *TOKENS)
    _, records, trace = run(linear_program({"w": 1.0}, optax.sgd(0.1)), [both])
    close([trace[0], records[0]["loss"]], [0.8, 2.0])


def test_ACC_06_partial_window_at_the_end():
    program = linear_program({"w": 0.0}, optax.sgd(0.1), k=4)
    dropped, _, _ = run(program, [rows(1.0)] * 10)
    close(dropped.params["w"], -0.2)  # drop: simply no flush
    assert int(dropped.counters.step) == 2
    assert int(dropped.opt_state.mini_step) == 2  # dropped micro-batches are known
    carried, _, trace = run(program, [rows(1.0)] * 2, program.resume(_copy(program.checkpoint_view(dropped))))
    close(trace[-1], -0.2)  # a resume begins the window anew
    flushed, metrics = program.flush(carried)
    record = metrics.to_host()
    close(flushed.params["w"], -0.3)  # division by k: -0.25
    assert (record["step"], record["window"], record["window_done"], record["weight"]) == (3, 3, 1, 2.0)
    _, _, trace = run(program, [rows(1.0)] * 12)
    close(trace[-1], -0.3)  # carry: two more fill the window


def test_ACC_08_every_leaf_adds_up():
    program = linear_program(
        {"a": 0.0, "b": [0.0] * 8, "w": 0.0}, optax.sgd(1.0), k=4, mesh=sharding.make_mesh(fsdp=8),
        rules=[("b", P("fsdp"))],
    )  # fmt: skip
    state, _, _ = run(program, [rows(*[{"a": g, "b": [g] * 8, "w": g}] * 8) for g in (1.0, 2.0, 3.0, 10.0)])
    assert state.params["b"].sharding.spec == state.opt_state.acc_grads["grads"]["b"].sharding.spec == P("fsdp")
    for leaf in jax.tree.leaves(jax.device_get(state.params)):
        assert np.all(leaf == -4.0)


@pytest.mark.parametrize(
    ("what", "at_the_windows", "steps", "weights"),
    [("window", [0, -1, -2], 2, [4, 4]), ("micro", [-1, -2, -3], 3, [3, 4, 4])],
)
def test_ACC_10_one_bad_micro_batch_never_freezes_training(what, at_the_windows, steps, weights):
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=4, nonfinite=Skip(what))
    state, records, trace = run(program, [rows(g) for g in [1.0, NAN, *[1.0] * 10]])
    close(trace[3::4], at_the_windows)
    assert (records[-1]["step"], records[-1]["window"], records[-1]["skipped_steps"]) == (steps, 3, 3 - steps)
    assert [r["weight"] for r in closed(records) if math.isfinite(r["loss"])] == weights
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.device_get(state)))


def test_ACC_12_clips_the_mean_of_the_window_once():
    program = linear_program({"w": [0.0, 0.0]}, optax.sgd(1.0), k=2, clip_norm=1.0)
    _, records, trace = run(program, [rows([6.0, 0.0]), rows([0.0, 8.0])])
    close(trace[-1], [-0.6, -0.8])  # clip per micro-batch: [-0.5, -0.5]
    close([records[-1]["grad_norm"], records[-1]["grad_norm_clipped"]], [5.0, 1.0])


def test_ACC_14_average_counts_updates():
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=4, ema=0.9)
    state, _, trace = run(program, [rows(-1.0)] * 4 + [rows(0.0)] * 4)  # w = 1 after both updates
    assert trace[3::4] == [1.0, 1.0]
    close(state.ema["w"], 0.19)  # 1 - 0.9**2; every micro-batch: 0.5695
    before = np.asarray(state.ema["w"]).tobytes()
    state, _, _ = run(program, [rows(g) for g in (1.0, NAN, 1.0, 1.0)], state)
    assert np.asarray(state.ema["w"]).tobytes() == before


@pytest.mark.parametrize(
    ("k", "precision"),
    [(1, "float32"), (4, "bfloat16")]
    + [
        (k, Precision("float16", loss_scale=LossScale(s, dynamic=False)))
        for k, s in ((1, 1.0), (2, 2048.0), (4, 2048.0))
    ],
    ids=["1-float32", "4-bfloat16", "1-float16-1", "2-float16-2048", "4-float16-2048"],
)
def test_ACC_15_metrics_are_unscaled_means_of_the_window(k, precision):
    program = linear_program({"w": 1.0}, optax.sgd(0.1), k=k, precision=precision, clip_norm=0.5)
    data = np.split(np.asarray([1.0, 2.0, 3.0, 6.0]), k)
    _, records, _ = run(program, [rows(*part) for part in data])
    (record,) = closed(records)
    close([record[name] for name in ("loss", "grad_norm", "grad_norm_clipped")], [3.0, 3.0, 0.5])


def test_ACC_16_window_length_by_schedule():
    def k(window):
        return jnp.where(window < 1, 2, 3)

    state, records, trace = run(linear_program({"w": 0.0}, optax.sgd(1.0), k=k), [rows(g) for g in (1, 3, 1, 2, 3, 9)])
    close(trace, [0, -2, -2, -2, -4, -4])
    assert int(state.opt_state.mini_step) == 1
    assert records[-1]["micro_step"] == 6
    assert [MultiSteps(k).micro_batches(window) for window in (0, 1, 5)] == [2, 3, 3]


# ---- precision ---------------------------------------------------------------------------------------------------


def seen(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """The linear loss, and as a metric the value of ``w`` that computes."""
    assert params["w"].dtype == jnp.bfloat16
    return linear(params, model_state, batch, key)._replace(
        metrics={"w": (params["w"].astype(jnp.float32), jnp.float32(1.0))}
    )


def test_MP_01_masters_are_float32():
    program = linear_program({"w": 1.0}, optax.sgd(1e-3), precision="bfloat16", loss=seen)
    state, _, trace = run(program, [rows(1.0)] * 100)
    assert state.params["w"].dtype == jnp.float32
    close(trace[-1], 0.9, atol=1e-5)  # stored in bfloat16 it stays at 1.0
    assert float(program.evaluate(program.view(state), rows(1.0))["w"][0]) == 0.8984375


def test_MP_03_unscales_before_it_clips():
    program = linear_program({"w": [0.0, 0.0]}, optax.sgd(1.0), precision=FP16, clip_norm=1.0)
    _, records, trace = run(program, [rows([0.3, 0.4])])
    close(trace[0], [-0.3, -0.4], atol=2e-4)  # clipped first: [-0.000586, -0.000781]
    close([records[0]["grad_norm"], records[0]["grad_norm_clipped"]], [0.5, 0.5], atol=2e-4)
    assert records[0]["grad_norm"] == records[0]["grad_norm_clipped"]


def test_MP_04_the_scale_stands_still_inside_a_window():
    precision = Precision("float16", loss_scale=LossScale(8.0, growth_interval=2))
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=4, precision=precision)
    state, records, trace = run(program, [rows(1.0)] * 4)
    assert [r["loss_scale"] for r in records] == [8.0] * 4
    close(trace[-1], -1.0)  # doubled in the middle: -0.75
    assert (float(state.scale.value), int(state.scale.good_windows)) == (8.0, 1)
    state, records, trace = run(program, [rows(1.0)] * 4, state)
    assert [r["loss_scale"] for r in records] == [8.0] * 4
    close(trace[-1], -2.0)
    assert (float(state.scale.value), int(state.scale.good_windows)) == (16.0, 0)


def test_MP_06_the_scale_has_a_ceiling_a_floor_and_a_clear_stop():
    precision = Precision("float16", loss_scale=LossScale(2.0**15, growth_interval=1))
    program = linear_program({"w": 0.0}, optax.sgd(0.0), precision=precision, nonfinite=Skip(max_consecutive=50))
    state, records, _ = run(program, [rows(2.0**-12)] * 12)
    assert records[-1]["loss_scale"] == 2.0**24
    state, records, _ = run(program, [rows(INF)] * 75, state)
    program.check(records[49])
    assert records[-1]["loss_scale"] == 1.0
    with pytest.raises(NonFiniteError, match=r"75 windows in a row .*step 12.*'w'.*loss scale at minimum \(1\.0\)"):
        program.check(records[-1])


@pytest.mark.parametrize(
    ("what", "k", "bad"), [("window", 1, {0}), ("window", 4, {0, 1}), ("window", 4, {3}), ("micro", 4, {0, 1, 2, 3})]
)
def test_MP_07_stops_after_too_many_skips_and_names_the_leaf(what, k, bad):
    batches = [rows({"a": 0.0, "w": NAN if i % k in bad else 1.0}) for i in range(3 * k)]
    program = linear_program({"a": 0.0, "w": 0.0}, optax.sgd(1.0), k=k, nonfinite=Skip(what, max_consecutive=2))
    state, records, trace = run(program, batches)
    assert trace == [0.0] * (3 * k)
    first, second, third = closed(records)
    program.check(first)
    program.check(second)
    with pytest.raises(NonFiniteError, match=r"3 windows in a row .*step 0.*'w'"):
        program.check(third)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.device_get(state)))


def test_MP_09_all_shards_agree_on_a_skip():
    precision = Precision("float16", loss_scale=LossScale(1024.0))
    program = linear_program(
        {"w": [0.0] * 4}, optax.sgd(1.0), precision=precision, rules=[("w", P("fsdp"))],
        mesh=sharding.make_mesh(fsdp=4, devices=jax.devices()[:4]),
    )  # fmt: skip
    state, records, _ = run(program, [rows([1.0, 1.0, INF, 1.0], *[[1.0] * 4] * 3)])
    assert [np.asarray(shard.data).tolist() for shard in state.params["w"].addressable_shards] == [[0.0]] * 4
    assert [float(shard.data) for shard in state.scale.value.addressable_shards] == [512.0] * 4
    assert (records[0]["skipped_steps"], records[0]["step"]) == (1, 0)


# ---- schedules, norms, compilation, donation -----------------------------------------------------------------------


@pytest.mark.parametrize(("report", "k"), [(False, 1), (True, 1), (True, 3)])
def test_SCH_06_reporting_a_rate_changes_nothing(report, k):
    def rate(step):
        return 1.0 * step

    program = linear_program({"w": 0.0}, optax.sgd(rate), k=k, report={"learning_rate": rate} if report else None)
    _, records, trace = run(program, [rows(1.0)] * (3 * k))
    close(trace[k - 1 :: k], [0, -1, -3])
    if report:
        assert [r["learning_rate"] for r in closed(records)] == [0.0, 1.0, 2.0]


def test_CLIP_01_norm_over_all_shards_counts_replicas_once():
    program = linear_program(
        {"w": [0.0, 0.0], "b": 0.0}, optax.sgd(1.0), clip_norm=1.3, rules=[("w", P("fsdp"))],
        mesh=sharding.make_mesh(fsdp=2, devices=jax.devices()[:2]),
    )  # fmt: skip
    state, records, trace = run(program, [rows(*[{"w": [3.0, 4.0], "b": 12.0}] * 2)])
    close([records[0]["grad_norm"], records[0]["grad_norm_clipped"]], [13.0, 1.3])
    close(trace[0], [-0.3, -0.4])
    close(state.params["b"], -1.2)
    assert not state.params["w"].is_fully_replicated


RATES = {"python": 0.1, "numpy": np.float32(0.1), "schedule": optax.linear_schedule(0.1, 0.0, 100)}


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
@pytest.mark.parametrize(("inject", "k"), [(False, 4), (True, 1)], ids=["plain-4", "inject-1"])
def test_JAX_01_one_trace_and_one_compile(rate, inject, k):
    optimizer = optax.inject_hyperparams(optax.adamw)(rate) if inject else optax.adamw(rate)
    program = linear_program({"w": 0.0}, optimizer, k=k, precision="float16", ema=0.9)
    state, _, _ = run(program, [rows(NAN if i == 5 else 1.0) for i in range(12)])
    assert (program.traces["step"], program._step._cache_size()) == (1, 1)
    state = program.resume(jax.tree.map(jnp.asarray, jax.device_get(program.checkpoint_view(state))))
    state, _, _ = run(program, [rows(1.0)] * 2, state)
    run(program, [rows(1.0)] * 2, program.init(jax.device_get(state.params)))
    assert (program.traces["step"], program._step._cache_size()) == (1, 1)


def test_JAX_01_weakly_typed_model_state_is_traced_once():
    def loss(params, model_state, batch, key):
        return linear(params, model_state, batch, key)._replace(model_state={"n": model_state["n"] + jnp.float32(1.0)})

    program = linear_program({"w": 0.0}, optax.sgd(0.1), loss=loss, model_state={"n": jnp.asarray(0.5)})
    run(program, [rows(1.0)] * 3)
    assert (program.traces["step"], program._step._cache_size()) == (1, 1)


@pytest.mark.parametrize("k", [1, 4])
def test_JAX_02_the_whole_state_is_donated(k):
    program = linear_program({"w": np.ones((1024, 1024))}, optax.adam(1e-3), k=k, loss=_first_column, ema=0.9)
    example = {"x": np.ones((2, 1024), np.float32)}
    compiled = program.lower(program.batch_struct(example)).compile()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state))
    copies = {1: 4, 4: 5}[k]  # parameters, two moments, average, and the accumulator
    assert copies * 2**22 < state_bytes < copies * 2**22 + 1024
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes
    state = program.init()
    new, _ = program.step(state, example)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def _first_column(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    return Loss(jnp.sum(batch["x"] @ params["w"]), jnp.float32(batch["x"].shape[0]))


def _other_dtype(old: Any, new: Any) -> optax.GradientTransformation:
    """SGD with a state of dtype ``old`` that an update returns in dtype ``new``."""

    def update(grads, state, params=None):
        return grads, {"table": (state["table"] + 1).astype(new), "same": state["same"]}

    def init(params):
        return {"table": jnp.zeros((16,), old), "same": jnp.zeros((1000,), jnp.float32)}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("old", "new"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("int32", "float32")])
def test_JAX_02_an_optimizer_that_changes_a_dtype_is_refused_by_name(k, old, new):
    program = linear_program({"w": 0.0}, _other_dtype(old, new), k=k)
    state = program.init()
    with pytest.raises(ValueError, match=rf"table: expected {old}\[16\], got {new}\[16\]"):
        program.step(state, rows(1.0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_JAX_02_the_refusal_counts_the_bytes_of_the_leaves_that_differ():
    program = linear_program({"w": 0.0}, _other_dtype("bfloat16", "float32"))
    with pytest.raises(ValueError, match=r"so 32 bytes could not be donated"):  # 16 bfloat16, not the whole state
        program.step(program.init(), rows(1.0))


_copy = functools.partial(jax.tree.map, jnp.copy)
