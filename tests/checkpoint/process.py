"""One process of a small job, for the tests of several: ``process.py COORDINATOR COUNT INDEX DIRECTORY WHAT``.

Trains a few steps on the devices of all processes and saves; prints a JSON line of what it found.
"""

import json
import os
import random
import sys
import time

coordinator, count, index, directory, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6]

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
if count > 1:
    jax.distributed.initialize(
        coordinator, count, index, initialization_timeout=60, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5
    )

import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import sharding
from jaxtrain.checkpoint import host_state, manifest
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step

KILL_AT = 6


def loss(params, model_state, batch, key):
    error = batch["x"] @ params["w"] - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


program = build_train_step(
    loss,
    lambda key: Variables({"w": jax.random.normal(key, (64, 1024))}),
    optax.adam(1e-2),
    mesh=sharding.make_mesh(fsdp=-1),
    precision=Precision("float32"),
)


def batch(step):
    rng = np.random.default_rng(step)
    whole = {"x": rng.standard_normal((16, 64), np.float32), "y": rng.standard_normal((16, 1024), np.float32)}
    return {
        name: jax.make_array_from_callback(rows.shape, program.batch_sharding, lambda at, rows=rows: rows[at])
        for name, rows in whole.items()
    }


checkpoints = Checkpoints(directory, timeout_s=float(os.environ.get("TIMEOUT_S", "20")), max_failures=1)
checkpoints.probe()
newest = checkpoints.latest_verified()
said = {"index": index, "newest": newest, "processes": jax.process_count()}
if newest is None:
    state = program.init()
    host_state.seed_generators(3, index)
else:
    restored = checkpoints.restore(program, newest)
    state, said["run"], said["host"] = restored.state, restored.run, restored.host
    if restored.host:
        host_state.apply(restored.host)
    else:
        host_state.seed_generators(3, index, newest)
if what == "die" and index == int(os.environ["VICTIM"]):
    original = Checkpoints._describe_own

    def dying(self):
        if self._begun.step == KILL_AT:
            time.sleep(0.2)
            os.kill(os.getpid(), 9)
        original(self)

    Checkpoints._describe_own = dying
if what == "fail" and index == int(os.environ["VICTIM"]):

    def failing(self):
        raise OSError("disk gone")

    Checkpoints._describe_own = failing
said["drawn"] = random.random()
for step in range(newest or 0, 10):
    state, _ = program.step(state, batch(step))
    jax.block_until_ready(state)
    for sentence in checkpoints.poll():
        print(sentence, file=sys.stderr)
    if (step + 1) % 2 == 0:
        checkpoints.save(step + 1, program.checkpoint_view(state), run={"step": step + 1}, host=host_state.capture())
        random.random()
checkpoints.wait()
said["steps"] = checkpoints.steps()
said["problems"] = [checkpoints.problem(step) for step in said["steps"]]
from jax.experimental import multihost_utils

w = state.params["w"] if count == 1 else multihost_utils.process_allgather(state.params["w"], tiled=True)
said["w"] = manifest.google_crc32c.value(np.asarray(w).tobytes())
said["mean"] = float(np.mean(np.asarray(w)))
checkpoints.close()
print(json.dumps(said), flush=True)
