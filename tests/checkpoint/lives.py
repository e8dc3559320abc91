"""A run that is killed again and again: one life of it, in a process of its own that has its imports done."""

import json
import os
import pathlib

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import sharding
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step

SHAPES = [(512, 512), (3,), (1 << 19,), (64, 64, 8)]


def loss(params, model_state, batch, key):
    total = sum(jnp.sum((w - batch[0]) ** 2) for w in jax.tree.leaves(params))
    return Loss(total, jnp.float32(batch.shape[0]))


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    return Variables(
        {f"w{i}": jax.random.normal(k, shape) for i, (k, shape) in enumerate(zip(keys, SHAPES, strict=True))}
    )


def final(state):
    """A checksum over all parameters and moments."""
    running = google_crc32c.Checksum()
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        running.update(np.asarray(leaf).tobytes())
    return running.hexdigest().decode()


def live(directory, steps, log, environment, cache):
    """Go on from the newest verified checkpoint to ``steps``, saving each step; ``log`` gets a line for each event."""
    os.environ.update(environment)
    if environment:
        import gcs_server

        gcs_server.use(environment)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    def tell(**what):
        with pathlib.Path(log).open("a") as out:
            out.write(json.dumps(what) + "\n")

    mesh, float32 = sharding.make_mesh(), Precision("float32")
    program = build_train_step(loss, init, optax.adam(1e-2), mesh=mesh, precision=float32)
    checkpoints = Checkpoints(directory, keep=Keep(2), max_failures=1)
    newest = checkpoints.latest_verified()
    tell(event="chosen", step=newest)
    state = program.init() if newest is None else checkpoints.restore(program, newest).state
    for step in range((newest or 0) + 1, steps + 1):
        state, _ = program.step(state, np.full(2, step, np.float32))
        assert int(state.counters.step) == step
        begun = checkpoints.save(step, program.checkpoint_view(state), run={"step": step})
        assert begun, checkpoints.poll()
        checkpoints.wait()
        tell(event="saved", step=step)
    tell(event="finished", final=final(state))
