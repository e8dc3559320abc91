"""Means over all rows, each once: padding, batch size, devices and the order of reading change nothing."""

import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain.evaluate
from jaxtrain import sharding
from jaxtrain.data.pipeline import InOrder
from jaxtrain.evaluate import evaluate
from jaxtrain.losses import Loss
from jaxtrain.precision import Precision
from jaxtrain.step import Program, Variables, build_train_step


class Rows:
    """A source of rows ``{"y": y, "weights": w}``."""

    def __init__(self, y: Any, weights: Any = None):
        self.y = np.asarray(y, np.float32)
        self.weights = np.ones_like(self.y) if weights is None else np.asarray(weights, np.float32)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {"y": self.y[row], "weights": self.weights[row]}


def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """Loss of a row: w * y; accuracy: y itself, over rows; and nothing but the parameters is random."""
    assert key is None, "an evaluation draws nothing"
    w, total = batch["weights"], jnp.sum(batch["weights"])
    moved = None if isinstance(model_state, tuple) else {"n": model_state["n"] + 1}
    return Loss(
        params["w"] * jnp.sum(w * batch["y"]), total, moved,
        metrics={"accuracy": (jnp.sum(w * batch["y"]), total), "rows": (jnp.sum(jnp.sign(w)), jnp.float32(1))},
    )  # fmt: skip


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return sharding.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])


def program_on(mesh: jax.sharding.Mesh, model_state: Any = (), w: float = 2.0) -> Program:
    return build_train_step(
        loss, lambda key: Variables({"w": jnp.float32(w)}, model_state), optax.sgd(0.0), mesh=mesh,
        precision=Precision("float32"),
    )  # fmt: skip


def measured(program: Program, source: Rows, batch: int, **settings: Any) -> dict[str, float] | None:
    return evaluate(program, program.view(program.init()), InOrder(source, batch, threads=0), **settings)


@pytest.mark.parametrize(("devices", "batch"), [(1, 10), (4, 4), (4, 8), (4, 64), (8, 8), (1, 1), (1, 3)])
def test_DATA_12_nine_of_ten_whatever_the_padding(devices, batch):
    result = measured(program_on(mesh_of(data=devices)), Rows([1] * 9 + [0]), batch)
    assert result["eval/accuracy"] == pytest.approx(0.9, abs=1e-7)
    assert (result["eval/tokens"], type(result["eval/tokens"])) == (10, int)
    assert result["eval/loss"] == pytest.approx(1.8, abs=1e-6)
    assert set(result) == {"eval/loss", "eval/tokens", "eval/accuracy", "eval/rows"}


def test_DATA_12_unequal_weights_are_one_mean_and_not_a_mean_of_means():
    rng = np.random.default_rng(0)
    y, weights = rng.standard_normal(37), rng.integers(0, 1000, 37)
    wanted = float(np.sum(np.float32(y).astype(np.float64) * weights) / np.sum(weights))
    for axes, batch in (({}, 5), ({}, 37), ({"data": 2, "fsdp": 4}, 8), ({"data": 2, "fsdp": 4}, 48), ({"fsdp": 2}, 2)):
        result = measured(program_on(mesh_of(**axes)), Rows(y, weights), batch)
        assert result["eval/accuracy"] == pytest.approx(wanted, rel=1e-5)
        assert result["eval/loss"] == pytest.approx(2 * wanted, rel=1e-5)
        assert result["eval/tokens"] == np.sum(weights)


def test_counts_stay_exact_beyond_what_a_float32_holds(make_mesh):
    result = measured(program_on(make_mesh()), Rows([1, 1, 1, 0], [2**24, 2**24, 1, 2**24]), 1)
    assert result["eval/tokens"] == 3 * 2**24 + 1
    assert result["eval/accuracy"] == (2 * 2**24 + 1) / (3 * 2**24 + 1)


def test_a_mean_over_nothing_is_nan(make_mesh):
    for source, batch in ((Rows([1, 2], [0, 0]), 1), (Rows([1], [0]), 8)):
        result = measured(program_on(make_mesh()), source, batch)
        assert result["eval/tokens"] == 0
        assert all(math.isnan(result[f"eval/{name}"]) for name in ("loss", "accuracy"))
    program = program_on(make_mesh())
    result = evaluate(program, program.view(program.init()), [])
    assert result["eval/tokens"] == 0
    assert math.isnan(result["eval/loss"])


def test_nothing_changes_and_one_trace_does_for_all_batches(make_mesh):
    program = program_on(make_mesh(data=2, fsdp=4), {"n": jnp.zeros(8)})
    state = program.init()
    view = program.view(state, copy=False)
    before = jax.device_get(view)
    results = [evaluate(program, view, InOrder(Rows(np.arange(29)), 8, threads=0)) for _ in range(2)]
    assert results[0] == results[1]
    assert program.traces["evaluate"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(view), before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stop_abandons_between_batches_and_closes_the_reader(make_mesh, after):
    program, closed = program_on(make_mesh()), threading.Event()
    read = []

    def batches():
        try:
            for number in range(1000):
                read.append(number)
                yield {"y": np.ones(1, np.float32), "weights": np.ones(1, np.float32)}
        finally:
            closed.set()

    asked = iter([False] * after + [True])
    evaluated = []
    original = program.evaluate
    program.evaluate = lambda *args: evaluated.append(1) or original(*args)
    assert evaluate(program, program.view(program.init()), batches(), stop=lambda: next(asked)) is None
    assert len(evaluated) == after
    assert closed.wait(5)
    assert len(read) <= after + 2  # one ahead


def test_an_error_of_the_reader_is_raised(make_mesh):
    def batches():
        yield {"y": np.ones(1, np.float32), "weights": np.ones(1, np.float32)}
        raise OSError("the disk has gone")

    program = program_on(make_mesh())
    with pytest.raises(OSError, match="the disk has gone"):
        evaluate(program, program.view(program.init()), batches())


def test_sums_are_read_when_the_next_batch_is_running(monkeypatch, make_mesh):
    """The devices never wait for the host: batch n is read after n + 1 has been dispatched."""
    events = []

    class Fake:
        row_sharding = jax.sharding.NamedSharding(make_mesh(), jax.sharding.PartitionSpec())

        def evaluate(self, view: Any, batch: Any) -> dict[str, tuple[int, float]]:
            number = int(batch[0])
            events.append(("run", number))
            return {"loss": (number, 1.0)}

    def device_get(sums: dict) -> dict:
        events.append(("read", sums["loss"][0]))
        return sums

    monkeypatch.setattr(jaxtrain.evaluate.jax, "device_get", device_get)
    result = evaluate(Fake(), None, [np.asarray([n]) for n in range(4)])
    assert events == [
        ("run", 0), ("run", 1), ("read", 0), ("run", 2), ("read", 1), ("run", 3), ("read", 2), ("read", 3),
    ]  # fmt: skip
    assert (result["eval/loss"], result["eval/tokens"]) == (1.5, 4)
