"""``Scan(k)`` and ``Scan(k, defer=True)``: a window in one call, equal to ``MultiSteps`` and to the one big batch."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives_text import collectives
from test_step import (
    B,
    D,
    H,
    bits,
    counting,
    distance,
    host,
    mesh_and_rules,
    mlp_params,
    mlp_windows,
    noisy,
    split,
    squares,
    squares_case,
)
from test_step_cases import NAN, close, linear, rows

from jaxtrain import sharding
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import Loss, MultiSteps, Scan, Skip, Variables, build_train_step


def stacked(micro_batches: list[Any]) -> Any:
    """A window: leaves ``[k, B, ...]``."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *micro_batches)


def scan_program(params: Any, accumulation: Scan, loss: Any = linear, model_state: Any = (), **settings: Any) -> Any:
    start = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    settings = {"mesh": sharding.make_mesh(), "precision": Precision("float32")} | settings
    return build_train_step(
        loss, lambda key: Variables(start, model_state), optax.sgd(1.0), accumulation=accumulation, **settings
    )


# ---- one window is the one big batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", ["one", "data8", "fsdp8", "data2-fsdp4", "slice2-data2-fsdp2", "fsdp4-tensor2"])
@pytest.mark.parametrize("defer", [False, True])
def test_a_window_is_the_one_big_batch(mesh, defer, precision):
    up, window, gradient, loss = squares_case()
    program = build_train_step(
        squares, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.sgd(1.0), accumulation=Scan(4, defer),
        precision=Precision(precision), **mesh_and_rules(mesh),
    )  # fmt: skip
    state, metrics = program.step(program.init({"up": up}), stacked(split(window, 4)))
    record = metrics.to_host()
    assert [record[name] for name in ("window_done", "window", "step", "micro_step")] == [1, 1, 1, 4]
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2}[precision]  # a mean of means is wrong by 0.7
    assert distance(up - host(state.params["up"]), gradient) < tolerance
    assert record["loss"] == pytest.approx(loss, rel=tolerance)
    assert record["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=tolerance)
    assert record["weight"] == pytest.approx(np.float64(window["weight"]).sum(), rel=1e-6)


@functools.cache
def noisy_program(accumulation: Any, precision: str = "float32", devices: int = 1, policy: str = "window") -> Any:
    """Dropout, a running mean, clipping, AdamW, EMA; ``poison`` in a batch makes it bad."""
    scale = LossScale(256.0, growth_interval=1)
    return build_train_step(
        noisy, lambda key: Variables(jax.tree.map(jnp.asarray, mlp_params(16, 32)), {"mean": jnp.zeros(16)}),
        optax.adamw(1e-2), accumulation=accumulation, precision=Precision(precision, loss_scale=scale), clip_norm=1.0,
        ema=0.9, mesh=sharding.make_mesh(fsdp=devices), nonfinite=Skip(policy), report={"rate": lambda n: 1e-2},
    )  # fmt: skip


def noisy_batches(count: int, poison: tuple[int, ...]) -> list[Any]:
    batches = mlp_windows(count, b=8, d=16)
    return [b | {"poison": np.full(8, NAN if i in poison else 0.0, np.float32)} for i, b in enumerate(batches)]


@pytest.mark.parametrize("policy", ["window", "micro"])
@pytest.mark.parametrize(("precision", "devices"), [("float32", 1), ("float16", 8)])
def test_five_windows_are_those_of_multisteps(precision, devices, policy):
    """Dropout draws by the micro-batch's number, model_state moves inside a window and is undone with it."""
    batches = noisy_batches(20, (5, 17, 19))
    one, other = (noisy_program(a(4), precision, devices, policy) for a in (MultiSteps, Scan))
    a, b = one.init(), other.init()
    for window in range(5):
        for batch in batches[4 * window : 4 * window + 4]:
            a, told = one.step(a, batch)
        b, metrics = other.step(b, stacked(batches[4 * window : 4 * window + 4]))
        told, metrics = told.to_host(), metrics.to_host()
        counts = ("micro_step", "window", "step", "skipped_in_a_row", "bad_leaf", "window_done", "tokens", "loss_scale")
        assert {name: metrics[name] for name in counts} == {name: told[name] for name in counts}
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(told[name], rel=1e-6, nan_ok=True)
    wanted, got = one.checkpoint_view(a), other.checkpoint_view(b)
    assert jax.tree.structure(wanted) == jax.tree.structure(got)
    for name in ("params", "opt_state", "model_state", "ema"):
        for x, y in zip(jax.tree.leaves(getattr(got, name)), jax.tree.leaves(getattr(wanted, name)), strict=True):
            close(host(x), host(y), atol=1e-5)
    assert int(got.counters.step) == {"window": 3, "micro": 5}[policy]
    assert other.traces["step"] == 1


@pytest.mark.parametrize(
    ("defer", "mesh", "precision"),
    [(False, "one", "float16"), (False, "data2-fsdp4", "bfloat16"), (True, "data2-fsdp4", "float32")],
)
def test_step_is_apply_after_grads_bit_for_bit(defer, mesh, precision):
    program = build_train_step(
        squares, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.adamw(1e-2), accumulation=Scan(4, defer),
        precision=Precision(precision), clip_norm=1.0, **mesh_and_rules(mesh),
    )  # fmt: skip
    window = stacked(split(squares_case()[1], 4))
    fused, parts = program.init(), program.init()
    for i in range(3):
        fused, metrics = program.step(fused, window)
        parts, others = program.apply(parts, program.grads(program.view(parts), window, 4 * i))
        assert bits(fused) == bits(parts)
        assert bits(metrics) == bits(others)
    assert program.traces["step"] == program.traces["grads"] == program.traces["apply"] == 1


def test_a_snapshot_goes_on_under_another_mechanism():
    batches = noisy_batches(8, ())
    programs = [noisy_program(MultiSteps(4)), noisy_program(Scan(4)), noisy_program(Scan(2))]
    ends = []
    for first in programs[:2]:
        for second in programs:
            state = first.init()
            for batch in [stacked(batches[:4])] if first is programs[1] else batches[:4]:
                state, _ = first.step(state, batch)
            state = second.resume(host(first.checkpoint_view(state)))
            k = second.accumulation.k
            rest = batches[4:] if second is programs[0] else [stacked(batches[i : i + k]) for i in range(4, 8, k)]
            for batch in rest:
                state, metrics = second.step(state, batch)
            assert metrics.to_host()["micro_step"] == 8
            ends.append((k, host(state.params)))
    of_4 = [params for k, params in ends if k == 4]
    assert all(distance(params, of_4[0]) < 1e-6 for params in of_4)


# ---- windows that are not whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("defer", [False, True])
def test_ACC_06_a_partial_window_is_divided_by_what_it_holds(defer, as_array):
    """10 micro-batches in windows of 4, 4 and 2, gradient 1 each: -3; divided by 4 the last would make it -2.5."""
    program = scan_program({"w": 0.0}, Scan(4, defer), mesh=sharding.make_mesh(data=2, fsdp=4))
    state = program.init()
    for count in (4, 4, 2):
        window = jax.tree.map(as_array, stacked([rows(*[1.0] * 8)] * count))
        state, metrics = program.step(state, window)
    record = metrics.to_host()
    close(host(state.params["w"]), -3.0)
    assert [record[n] for n in ("micro_step", "window", "step", "tokens", "weight")] == [10, 3, 3, 80, 16.0]
    assert program.traces["step"] == 1


def test_padding_moves_no_model_state_and_no_metric():
    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
        plain = counting(params, model_state, batch, key)
        return plain._replace(metrics={"seen": (plain.weight * 3.0, plain.weight)})

    program = scan_program({"w": 0.0}, Scan(4), loss, {"n": jnp.float32(0)})
    state, metrics = program.step(program.init(), stacked([rows(1.0), rows(3.0)]))
    assert float(state.model_state["n"]) == 2
    assert metrics.to_host()["seen"] == 3.0
    poisoned = stacked([rows(1.0), rows(3.0), rows(NAN)])  # the padding repeats the last one: NaN counts once
    state, metrics = program.step(state, poisoned)
    assert (metrics.to_host()["step"], float(state.model_state["n"])) == (1, 2.0)


def test_flush_finds_nothing_pending():
    program = scan_program({"w": 0.0}, Scan(4))
    state, _ = program.step(program.init(), stacked([rows(1.0)] * 3))
    assert program.flush(state) == (state, None)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (stacked([rows(1.0)] * 5), r"5 micro-batches in a window of Scan\(k=4\); give 1 to 4"),
        ({"c": np.zeros(4), "mask": np.zeros(4)}, r"two leading dims \(k micro-batches, rows\)"),
        ({"c": np.zeros((4, 2)), "mask": np.zeros((4, 3))}, r"two leading dims"),
        (jax.tree.map(lambda x: x[:0], stacked([rows(1.0)])), r"0 micro-batches in a window"),
    ],
)
def test_windows_that_cannot_be(batch, text):
    program = scan_program({"w": 0.0}, Scan(4))
    with pytest.raises(ValueError, match=text):
        program.step(program.init(), batch)


@pytest.mark.parametrize("k", [0, -1, 2.0, True, "4", None, lambda n: 2])
def test_k_is_a_whole_number(k):
    with pytest.raises(ValueError, match=r"Scan\(k=.*whole number, 1 or more"):
        Scan(k)


def test_evaluation_takes_rows_whatever_the_mechanism():
    program = scan_program({"w": 2.0}, Scan(4), mesh=sharding.make_mesh(data=2, devices=jax.devices()[:2]))
    total, weight = program.evaluate(program.view(program.init()), rows(1.0, 4.0))["loss"]
    close([total, weight], [10.0, 2.0])


# ---- once across the replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("defer", "policy"), [(False, "window"), (True, "window"), (True, "micro")])
def test_defer_crosses_the_replicas_once_a_window(defer, policy):
    """On a mesh of replicas only: with ``defer`` the loop holds no gradient on its way, and what leaves is float32."""
    program = build_train_step(
        squares, lambda key: Variables({"up": jnp.zeros((D, H))}), optax.adam(1.0), accumulation=Scan(4, defer),
        nonfinite=Skip(policy), **mesh_and_rules("data8"),
    )  # fmt: skip
    window = stacked(split(squares_case()[1], 4))
    found = collectives(program.lower(program.batch_struct(window)).compile().as_text())
    gradient = rf"\w+\[({D},{H}|{H},{D})\]"
    in_loop, once = ([c.line for c in found[where] if re.search(gradient, c.line)] for where in ("loop", "once"))
    assert (len(in_loop), len(once)) == ((0, 1) if defer else (1, 0))
    if defer:
        assert re.search(gradient, once[0])[0].startswith("f32[")
        assert len(found["loop"]) == {"window": 0, "micro": 1}[policy]  # whether the micro-batch is good: one flag


def test_defer_refuses_a_model_state():
    with pytest.raises(
        ValueError, match=r"defer=True\) with a model_state \(n\): each replica .* use Scan or MultiSteps"
    ):
        scan_program({"w": 0.0}, Scan(2, True), counting, {"n": jnp.float32(0)})


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"slice": 2, "data": 2, "fsdp": 2}])
@pytest.mark.parametrize(("policy", "wanted", "step"), [("window", [0.0, -2.0], 1), ("micro", [-1.0, -3.0], 2)])
def test_defer_skips_on_all_replicas_or_none(mesh, policy, wanted, step):
    """Windows of gradients 1, bad (in ONE row of eight), 1 and then 1, 2, 3."""
    program = scan_program({"w": 0.0}, Scan(3, True), nonfinite=Skip(policy), mesh=sharding.make_mesh(**mesh))
    state, trace = program.init(), []
    for window in ([[1.0] * 8, [*[5.0] * 7, NAN], [1.0] * 8], [[1.0] * 8, [2.0] * 8, [3.0] * 8]):
        state, metrics = program.step(state, stacked([rows(*gradients) for gradients in window]))
        trace.append(float(state.params["w"]))
    close(trace, wanted)
    record = metrics.to_host()
    assert [record[n] for n in ("window", "step", "micro_step", "skipped_steps")] == [2, step, 6, 2 - step]


@pytest.mark.parametrize("policy", ["window", "micro"])
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2}])
def test_defer_overflows_float16_where_the_others_do(mesh, policy):
    """Replicas of unequal weight: the cotangent is scaled by the micro-batch's weight, not by a replica's."""
    precision = Precision("float16", loss_scale=LossScale(2.0**15, growth_interval=100))
    gradients = [[3.0] + [0.5] * 7, [2.0] * 8]
    windows = [[rows(*g, mask=[1.0] + [0.0] * 7) for g in gradients], [rows(*g) for g in gradients]]
    told = []
    for defer in (False, True):
        program = scan_program(
            {"w": 0.0}, Scan(2, defer), _half, precision=precision, nonfinite=Skip(policy),
            mesh=sharding.make_mesh(**mesh),
        )  # fmt: skip
        state, records = program.init(), []
        for window in windows * 3:
            state, metrics = program.step(state, stacked(window))
            records.append(metrics.to_host())
        names = ("step", "window", "loss_scale", "skipped_in_a_row")
        told.append([[record[name] for name in names] for record in records])
    assert told[0] == told[1]
    assert told[0][-1][0] > 0


def _half(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """Linear, with the products in the compute dtype: large gradients overflow float16."""
    rows = (params["w"][None] * batch["c"]["w"].astype(params["w"].dtype)).astype(jnp.float32)
    return Loss(jnp.sum(rows * batch["mask"]), jnp.sum(batch["mask"]))


def test_defer_draws_a_mask_for_each_replica():
    def drawn(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
        rows = jax.random.uniform(key, batch["x"].shape)
        return Loss(jnp.sum(params["w"] * rows * batch["x"]), jnp.float32(batch["x"].shape[0]))

    first = [np.eye(8, dtype=np.float32)[[i]] for i in (0, 4)]  # row 0 is of replica 0, row 4 of replica 1
    draws = {}
    for defer in (False, True):
        program = scan_program(
            {"w": 0.0}, Scan(1, defer), drawn, mesh=sharding.make_mesh(data=2, devices=jax.devices()[:2])
        )
        for row, x in enumerate(first):
            state, _ = program.step(program.init(), {"x": x})
            draws[defer, row] = -8 * float(state.params["w"])
    assert len(set(draws.values())) == 4  # for a defer that drew the same for both, rows 0 and 4 would agree
    again = scan_program({"w": 0.0}, Scan(1, True), drawn, mesh=sharding.make_mesh(data=2, devices=jax.devices()[:2]))
    state, _ = again.step(again.init(), {"x": first[1]})
    assert -8 * float(state.params["w"]) == draws[True, 1]  # a function of seed, number and replica


assert B % 4 == 0
