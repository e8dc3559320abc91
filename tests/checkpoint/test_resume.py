"""A run that is saved and restored goes on as if it had not stopped, bit for bit."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import adapters, paths
from jaxtrain.cadence import Cadence
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.losses import Loss
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import MultiSteps, Program, build_train_step


class Table(nnx.Variable):
    """Something of the user's own."""


class Mask(nnx.Variable):
    """The dropout mask of the last micro-batch, so that a test can see it."""


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=False)
        self.second = nnx.Linear(16, 1, rngs=rngs)
        self.table = Table(jnp.arange(5))
        self.mask = Mask(jnp.zeros((16, 16)))

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = self.norm(self.first(x), use_running_average=key is None)
        if key is not None:
            self.mask[...] = self.dropout(jnp.ones(x.shape, jnp.float32), rngs=key)
            x = x * self.mask[...].astype(x.dtype)
        return self.second(x)


def loss(model: Model, batch: Any, key: Any) -> Loss:
    error = model(batch["x"], key)[:, 0].astype(jnp.float32) - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


def program_of(mesh: jax.sharding.Mesh, k: int, compute: str) -> Program:
    return build_train_step(
        *adapters.from_nnx(Model, loss), optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), mesh=mesh,
        accumulation=MultiSteps(k), clip_norm=1.0, ema=0.9, seed=3,
        precision=Precision(compute, loss_scale=LossScale(256.0, growth_interval=2)),
    )  # fmt: skip


def batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.standard_normal((16, 8), np.float32), "y": rng.standard_normal(16, np.float32)} for _ in range(count)
    ]


@pytest.mark.parametrize(("k", "compute"), [(1, "bfloat16"), (3, "float16")])
def test_RNG_02_six_steps_are_three_and_three(tmp_path, make_mesh, k, compute):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # flax's BatchNorm needs both
        program = program_of(make_mesh(data=2, fsdp=4), k, compute)
        checkpoints = Checkpoints(tmp_path / "c")
        data = batches(6 * k)

        def run(state: Any, begin: int, end: int) -> tuple[Any, list[bytes], list[dict]]:
            masks, records = [], []
            for i in range(begin, end):
                state, metrics = program.step(state, data[i])
                masks.append(np.asarray(state.model_state["mask"]).tobytes())
                records.append(metrics.to_host())
                if i == 3 * k - 1 and begin == 0:
                    checkpoints.save(3, program.checkpoint_view(state), run={})
            return state, masks, records

        whole, masks, records = run(program.init(), 0, 6 * k)
        checkpoints.close()
        half = Checkpoints(tmp_path / "c").restore(program_of(program.mesh, k, compute), 3).state
        assert int(half.counters.step) == 3
        again, masks_again, records_again = run(half, 3 * k, 6 * k)
    bits = {name: np.asarray(x).tobytes() for name, x in paths.named_leaves(whole).items()}
    assert bits == {name: np.asarray(x).tobytes() for name, x in paths.named_leaves(again).items()}
    assert masks_again == masks[3 * k :]
    assert len(set(masks)) == 6 * k  # and no stream begins again
    np.testing.assert_equal(records_again, records[3 * k :])
    assert whole.model_state["table"].tolist() == [0, 1, 2, 3, 4]
    assert np.all(np.asarray(whole.model_state["norm"]["mean"]) != 0)  # it did move


def test_CKPT_19_the_name_the_counters_and_adams_count_agree(tmp_path, make_mesh):
    """Adam's first update after a resume at step 5 corrects its bias with 1 - 0.9**6 = 0.468559."""
    params = {"w": jnp.zeros(())}
    program = build_train_step(
        lambda params, state, batch, key: Loss(params["w"] * jnp.sum(batch), jnp.float32(batch.shape[0])),
        lambda key: adapters.Variables(params), optax.adam(1.0, b1=0.9), mesh=make_mesh(),
        precision=Precision("float32"),
    )  # fmt: skip
    state, batch = program.init(), np.ones(4, np.float32)
    checkpoints = Checkpoints(tmp_path)
    for _ in range(5):
        state, metrics = program.step(state, batch)
    step = metrics.to_host()["step"]
    checkpoints.save(step, program.checkpoint_view(state), run={})
    checkpoints.close()
    state = checkpoints.restore(program, 5).state
    adam = state.opt_state[0]
    assert (step, int(state.counters.step), int(adam.count)) == (5, 5, 5)
    np.testing.assert_allclose(state.params["w"], -5.0, rtol=1e-5)
    np.testing.assert_allclose(adam.mu["w"], 1 - 0.9**5, rtol=1e-6)
    state, _ = program.step(state, batch)
    np.testing.assert_allclose(state.opt_state[0].mu["w"], 0.468559, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], -6.0, rtol=1e-5)  # another correction would not give exactly -1 more


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_worked_example_of_the_mission(tmp_path, make_mesh, interrupted):
    """Saves every 1,000 steps, failure at 45,231: go on from 45,000 and do 231 steps again; or from 44,000 where the
    upload of 45,000 was interrupted."""
    program = build_train_step(
        lambda params, state, batch, key: Loss(params["w"] * jnp.sum(batch), jnp.float32(batch.shape[0])),
        lambda key: adapters.Variables({"w": jnp.zeros(())}), optax.sgd(1.0), mesh=make_mesh(),
        precision=Precision("float32"),
    )  # fmt: skip
    checkpoints, cadence = Checkpoints(tmp_path), Cadence(every_steps=1000, clock=time.monotonic)
    batch, state = jax.device_put(np.ones(1, np.float32), program.batch_sharding), program.init()
    for step in range(1, 45_231 + 1):
        state, _ = program.step(state, batch)
        if step % 64 == 0:
            jax.block_until_ready(state)
        if cadence.due(step):
            checkpoints.save(step, program.checkpoint_view(state), run={"next_row": step})
    checkpoints.close()
    if interrupted:  # as a kill leaves it
        (tmp_path / "45000").rename(tmp_path / "45000.orbax-checkpoint-tmp")
    again = Checkpoints(tmp_path)
    newest = again.latest_verified()
    assert newest == (44_000 if interrupted else 45_000)
    restored = again.restore(program, newest)
    assert (int(restored.state.counters.step), restored.run["next_row"]) == (newest, newest)
    state, redone = restored.state, 0
    while int(state.counters.step) < 45_231:
        state, _ = program.step(state, batch)
        redone += 1
    assert redone == (1231 if interrupted else 231)
    assert float(state.params["w"]) == -45_231.0
