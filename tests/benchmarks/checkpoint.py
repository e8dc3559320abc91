"""What a checkpoint costs beside plain copies, writes and reads of the same bytes, and beside Orbax as it comes.

    python tests/benchmarks/checkpoint.py [--mib 1024] [--rounds 5] [--place DIR|bucket] [--many] | --start

All sides take turns in one run, and what is printed is the median of ratios within a round: this is for noisy machines.
``--many``: 2,000 arrays instead of 16. ``--place=bucket`` uses the GCS server program of the tests. "read" is reading
the same bytes into memory that keeps them. ``--start``: seconds from process start to the end of the first step of
``jaxtrain train`` at 10 M parameters with a compilation cache, of a fresh run and of one that restores a checkpoint.
"""

import argparse
import contextlib
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import gcs_server
import step_overhead

from jaxtrain import sharding
from jaxtrain.checkpoint.files import open_files
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step


def make_program(mib: int, arrays: int):
    rows = mib * 2**20 // 4 // arrays // 256
    init = lambda key: Variables({f"a{i:05d}": jnp.zeros((rows, 256)) for i in range(arrays)})  # noqa: E731
    loss = lambda params, state, batch, key: Loss(jnp.float32(0), jnp.float32(1))  # noqa: E731
    mesh, float32 = sharding.make_mesh(), Precision("float32")
    return build_train_step(loss, init, optax.sgd(0.1), mesh=mesh, precision=float32)


def random_params(program):
    """Bytes that do not compress, drawn outside of the compiler, which takes minutes for 2,000 generators."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), program.abstract_state.params)


def timed(function):
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def forget(directory: pathlib.Path) -> None:
    """Take the files out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plain(place: str, content: list[np.ndarray]) -> None:
    """The same bytes: one file with fsync, or one object."""
    if place.startswith("gs://"):
        import fsspec

        fsspec.filesystem("gs").pipe_file(f"{place[5:]}/plain", b"".join(x.tobytes() for x in content))
        return
    pathlib.Path(place).mkdir(parents=True, exist_ok=True)
    with open(f"{place}/plain", "wb") as file:
        for array in content:
            file.write(memoryview(array).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def read_plain(place: str) -> int:
    if place.startswith("gs://"):
        import fsspec

        return len(fsspec.filesystem("gs").cat_file(f"{place[5:]}/plain"))
    return len(pathlib.Path(f"{place}/plain").read_bytes())


def round_of(program, state, root: str, local: bool) -> dict[str, float]:
    """Seconds of everything, once."""
    snapshot = program.checkpoint_view(state)
    leaves = jax.tree.leaves(snapshot.params)
    found: dict[str, float] = {}
    found["copy"], content = timed(lambda: [np.array(leaf, copy=True) for leaf in leaves])
    found["write"], _ = timed(lambda: write_plain(f"{root}/plain", content))

    ours = Checkpoints(f"{root}/ours", keep=Keep(1), timeout_s=1200)
    ours.probe()
    began = time.perf_counter()
    assert ours.save(1, snapshot, run={})
    found["ours blocked"] = time.perf_counter() - began
    ours.wait()
    found["ours save"] = time.perf_counter() - began
    ours.close()

    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
    with ocp.CheckpointManager(f"{root}/orbax", options=options) as manager:
        began = time.perf_counter()
        manager.save(1, args=ocp.args.StandardSave(snapshot))
        found["orbax blocked"] = time.perf_counter() - began
        manager.wait_until_finished()
        found["orbax save"] = time.perf_counter() - began

    def restore_ours():
        checkpoints = Checkpoints(f"{root}/ours", read_only=True)
        restored = checkpoints.restore(program, checkpoints.latest_verified())
        return jax.block_until_ready(restored.state)

    def restore_orbax():
        with ocp.CheckpointManager(f"{root}/orbax") as manager:
            target = program.abstract_snapshot
            return jax.block_until_ready(manager.restore(1, args=ocp.args.StandardRestore(target)))

    for label, function in (
        ("read", lambda: read_plain(f"{root}/plain")),
        ("ours", restore_ours),
        ("orbax", restore_orbax),
    ):
        if local:
            forget(pathlib.Path(root))
            found[f"{label} cold"], _ = timed(function)
        function()
        found[f"{label} warm"], _ = timed(function)
    return found


def starts(rounds: int) -> None:
    """Fresh and resumed, in turns."""
    found: dict[str, list[float]] = {"fresh": [], "resumed": []}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds + 1):
            with tempfile.TemporaryDirectory() as directory:
                fresh = step_overhead.first_step(cache, directory, until_saved=True)
                resumed = step_overhead.first_step(cache, directory)
            if number:  # the first one fills the cache
                found["fresh"].append(fresh)
                found["resumed"].append(resumed)
    for name, seconds in found.items():
        print(f"process start to first step, s, with a compilation cache, {name}: {step_overhead.spread(seconds)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", default=tempfile.gettempdir())
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--start", action="store_true")
    arguments = parser.parse_args()
    if arguments.start:
        starts(arguments.rounds)
        return
    arrays = 2000 if arguments.many else 16
    with contextlib.ExitStack() as stack:
        place, local = arguments.place, arguments.place != "bucket"
        if not local:
            _, environment = stack.enter_context(gcs_server.serving())
            gcs_server.use(environment)
            place = "gs://bkt"
        program = make_program(arguments.mib, arrays)
        state = program.init(random_params(program))
        rounds = []
        for number in range(arguments.rounds + 1):
            root = f"{place}/{uuid.uuid4().hex}"
            found = round_of(program, state, root, local)
            if number:  # the first one warms up
                rounds.append(found)
            if local:
                shutil.rmtree(root)
            else:
                files = open_files(root + "/x")
                files._store.rm(root.removeprefix("gs://"), recursive=True)
        print(
            f"{arguments.mib} MiB in {arrays} arrays, {'disk' if local else 'GCS server program'}, {len(rounds)} rounds"
        )
        ratios = [
            ("blocked / copy", "blocked", "copy"),
            ("save / write+fsync" if local else "save / upload", "save", "write"),
            ("verified restore / read, warm", "warm", "read warm"),
        ]  # fmt: skip
        ratios += [("verified restore / read, cold", "cold", "read cold")] if local else []
        print(f"{'':32}{'jaxtrain':>22}{'Orbax, defaults':>22}{'jaxtrain / Orbax':>22}")
        for label, mine, base in ratios:
            cells = []
            for numerator, denominator in (
                (f"ours {mine}", base),
                (f"orbax {mine}", base),
                (f"ours {mine}", f"orbax {mine}"),
            ):
                values = sorted(found[numerator] / found[denominator] for found in rounds)
                cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f}..{values[-1]:.2f})")
            print(f"{label:32}" + "".join(f"{cell:>22}" for cell in cells))
        for name in (
            "copy",
            "write",
            "read warm",
            *(["read cold"] if local else []),
            "ours blocked",
            "ours save",
            "ours warm",
        ):
            print(f"  {name:14} {statistics.median(found[name] for found in rounds):7.3f} s")


if __name__ == "__main__":
    main()
