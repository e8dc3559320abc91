"""One life for test_memory.py: start fresh and save, or restore; then a step. Prints the peak of its own memory in MiB.

python memory.py fresh|restored DIRECTORY
"""

import pathlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import sharding
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step

MIB = 96  # of parameters; Adam's moments come on top


def anonymous_mib() -> float:
    """Memory of this process that no file is behind."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) / 1024


def main(what: str, directory: str) -> None:
    rows = MIB * 2**20 // 4 // 256 // 8
    init = lambda key: Variables(  # noqa: E731
        {f"a{i}": jax.random.normal(jax.random.fold_in(key, i), (rows, 256)) for i in range(8)}
    )
    loss = lambda params, state, batch, key: Loss(  # noqa: E731
        sum(jnp.sum(leaf[0] * batch) for leaf in params.values()), jnp.float32(1)
    )
    program = build_train_step(loss, init, optax.adam(0.1), mesh=sharding.make_mesh(), precision=Precision("float32"))
    checkpoints, peak_mib, over = Checkpoints(directory), 0.0, threading.Event()
    before_mib = anonymous_mib()

    def look() -> None:
        nonlocal peak_mib
        while not over.is_set():
            peak_mib = max(peak_mib, anonymous_mib())
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    state = program.init() if what == "fresh" else checkpoints.restore(program, checkpoints.latest_verified()).state
    state, _ = program.step(state, np.ones((1, 256), np.float32))
    jax.block_until_ready(state)
    over.set()
    thread.join()
    if what == "fresh":
        checkpoints.save(1, program.checkpoint_view(state), run={}, wait=True)
        checkpoints.close()
    print(peak_mib - before_mib)


if __name__ == "__main__":
    main(*sys.argv[1:])
