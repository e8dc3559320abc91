"""One process of a small job, for the tests of several: ``process.py COORDINATOR COUNT INDEX DIRECTORY WHAT``.

Trains a few steps on the devices of all processes and saves; prints a JSON line of what it found.
"""

import json
import os
import random
import sys
import time

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from jaxtrain import sharding
from jaxtrain.checkpoint import host_state
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.checkpoint.writer import Writer
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step

KILL_AT, STEPS = 6, 10


def loss(params, model_state, batch, key):
    error = batch["x"] @ params["w"] - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


def make_program():
    init = lambda key: Variables({"w": jax.random.normal(key, (64, 1024))})  # noqa: E731
    mesh, float32 = sharding.make_mesh(fsdp=-1), Precision("float32")
    return build_train_step(loss, init, optax.adam(1e-2), mesh=mesh, precision=float32)


def batch(program, step):
    rng = np.random.default_rng(step)
    whole = {"x": rng.standard_normal((16, 64), np.float32), "y": rng.standard_normal((16, 1024), np.float32)}
    return {
        name: jax.make_array_from_callback(rows.shape, program.batch_sharding, lambda at, rows=rows: rows[at])
        for name, rows in whole.items()
    }


def sabotage(what):
    """Make this process die, or fail, while it describes what it has written."""
    original = Writer._describe_own

    def dying(self):
        if self._begun.step == KILL_AT:
            time.sleep(0.2)
            os.kill(os.getpid(), 9)
        original(self)

    def failing(self):
        raise OSError("disk gone")

    Writer._describe_own = {"die": dying, "fail": failing}[what]


def begin(program, checkpoints, index, said):
    """The state to train from."""
    newest = said["newest"]
    if newest is None:
        host_state.seed_generators(3, index)
        return program.init()
    restored = checkpoints.restore(program, newest)
    said["run"], said["host"] = restored.run, restored.host
    if restored.host:
        host_state.apply(restored.host)
    else:
        host_state.seed_generators(3, index, newest)
    return restored.state


def main(coordinator, count, index, directory, what):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if count > 1:
        jax.distributed.initialize(
            coordinator, count, index, initialization_timeout=60, heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=5,
        )  # fmt: skip
    program = make_program()
    checkpoints = Checkpoints(directory, timeout_s=float(os.environ.get("TIMEOUT_S", "20")), max_failures=1)
    checkpoints.probe()
    said = {"index": index, "newest": checkpoints.latest_verified(), "processes": jax.process_count()}
    state = begin(program, checkpoints, index, said)
    if what != "train" and index == int(os.environ["VICTIM"]):
        sabotage(what)
    said["drawn"] = random.random()
    for step in range(said["newest"] or 0, STEPS):
        state, _ = program.step(state, batch(program, step))
        jax.block_until_ready(state)
        for sentence in checkpoints.poll():
            print(sentence, file=sys.stderr)
        if (step + 1) % 2 == 0:
            snapshot = program.checkpoint_view(state)
            checkpoints.save(step + 1, snapshot, run={"step": step + 1}, host=host_state.capture())
            random.random()
    checkpoints.wait()
    said["steps"] = checkpoints.steps()
    said["problems"] = [checkpoints.problem(step) for step in said["steps"]]
    w = state.params["w"] if count == 1 else multihost_utils.process_allgather(state.params["w"], tiled=True)
    said["w"], said["mean"] = google_crc32c.value(np.asarray(w).tobytes()), float(np.mean(np.asarray(w)))
    checkpoints.close()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
