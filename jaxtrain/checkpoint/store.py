"""Checkpoints in one directory or bucket prefix: save, choose, verify, restore; Orbax behind a small interface.

Layout: ``<step>/{state/, host_state/process_<i>.json, run.json, MANIFEST.json}`` beside Orbax's own small files. Orbax
writes the arrays and commits: by a rename on a disk, by a marker object in a bucket. The manifest is written before
that. A checkpoint is listed when it is committed, and believed when its manifest proves every file.
"""

import contextlib
import json
import pathlib
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain import paths
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.errors import CheckpointError, MismatchError, StuckError
from jaxtrain.checkpoint.files import MANIFEST, TEMPORARY_END, open_files
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.distributed import gather
from jaxtrain.state import Snapshot, TrainState, View
from jaxtrain.step import Program

Reading = Callable[[int, int], contextlib.AbstractContextManager[Callable[[int], None]]]

_DELETE_S = 5.0  # how long ``wait`` waits for a deletion, which may be cut short at any moment


class Restored(NamedTuple):
    """``state``: ready for its first micro-batch; ``run``: as given to ``save``; ``host``: this process's, or None
    where another number of processes saved it."""

    state: TrainState
    run: dict[str, Any]
    host: dict[str, Any] | None


class Times(NamedTuple):
    """Seconds that the last save held its caller up, and from its begin to its commit."""

    blocked_s: float
    whole_s: float


class Checkpoints:
    """The checkpoints of one run; one job at a time writes them.

    With several processes every process makes one and calls the same methods at the same points.

    Args:
        directory: a path or ``gs://BUCKET/PATH``; holds one directory a step; made at the first save.
        keep: which ones stay.
        timeout_s: a save that takes longer has failed.
        max_failures: so many failed saves in a row are an error; fewer are told by ``poll``, and the next save tries.
        read_only: for another process than those that train: damaged checkpoints are passed over where they lie.

    Raises:
        CheckpointError: a place that cannot be used.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: Keep = Keep(),  # noqa: B008, a frozen value
        timeout_s: float = 300.0,
        max_failures: int = 3,
        read_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = open_files(directory)
        self.directory = self.files.root
        self.times: Times | None = None  # of the last save that was committed
        self._keep, self._timeout_s, self._max_failures = keep, timeout_s, max_failures
        self._read_only, self._clock = read_only, clock
        self._failures, self._told = 0, list[str]()
        self._proved: int | None = None
        self._flight: _Flight | None = None
        self._begun: _Flight | None = None  # the one begun last, which an interrupted ``wait`` leaves behind
        self._deleting: threading.Thread | None = None
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._primary = jax.process_index() == 0
        self._probed = False

    # What is there.

    def steps(self) -> list[int]:
        """Steps whose commit is complete, ascending: a fresh look at the store, process 0's on every process."""
        return gather(sorted(self._named()))[0]

    def latest_verified(self, reading: Reading | None = None) -> int | None:
        """The newest step that proves whole, or None; the processes share the reading and agree.

        Args:
            reading: ``(step, bytes in all)`` -> a context around the reading, whose value is told of bytes read.

        A damaged one on the way is set aside, its data kept, with a warning that names file and reason.

        Raises:
            MismatchError: the newest has a format of another version.
        """
        for step in reversed(self.steps()):
            with contextlib.ExitStack() as stack:
                told = None
                if reading is not None:
                    total = sum(entry.size for entry in self.files.tree(self._name(step)).values())
                    told = stack.enter_context(reading(step, total))
                reason = self.problem(step, on_bytes=told)
            if reason is None:
                self._proved = step
                return step
            if not gather(step in self._named())[0]:
                continue  # retired meanwhile by the job that trains
            if self._read_only:
                warnings.warn(f"checkpoint {step} in {self.directory} is passed over: {reason}.", stacklevel=2)
                continue
            aside = gather(self.files.set_aside(self._name(step), reason) if self._primary else "")[0]
            warnings.warn(f"checkpoint {step} is damaged ({reason}); set aside as {aside}.", stacklevel=2)
        return None

    def problem(self, step: int, *, deep: bool = False, on_bytes: manifest.OnBytes = None) -> str | None:
        """Why checkpoint ``step`` is not whole, as ``"<file>: <reason>"``, or None.

        On a disk it reads every byte. In a bucket it compares with the checksums that the store computed from the
        bytes it received, which takes one listing; ``deep`` reads every byte there, too.
        """
        share = (jax.process_index(), jax.process_count())
        found = gather(
            manifest.problem(self.files, self._name(step), read=True if deep else None, share=share, on_bytes=on_bytes)
        )
        return next((reason for reason in found if reason is not None), None)

    def run(self, step: int) -> dict[str, Any]:
        """What ``save`` was given as ``run``, without reading the arrays; raises CheckpointError."""
        try:
            return json.loads(self.files.read(f"{self._name(step)}/run.json"))["run"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {step} in {self.directory} cannot be read: {error}") from error

    # Saving.

    def probe(self) -> None:
        """Try that the directory can be written and is the same for all processes: before anything depends on it.

        Raises:
            CheckpointError: it cannot or is not.
        """
        path = gather(f".probe-{uuid.uuid4().hex}")[0]
        failure = None
        if self._primary:
            try:
                self.files.write(path, b"all processes must see this file\n")
            except Exception as error:  # of many kinds, from many libraries
                failure = f"checkpoints: {self.directory} cannot be written: {error}"
        failure = gather(failure)[0]
        if failure is not None:
            raise CheckpointError(failure)
        seen = gather(self.files.exists(path))
        if self._primary:
            self.files.delete(path)
        if not all(seen):
            blind = ", ".join(str(index) for index, found in enumerate(seen) if not found)
            raise CheckpointError(
                f"checkpoints: {self.directory} is not shared: process {blind} of {len(seen)} does not see what "
                "process 0 writes there; give a network file system or gs://, the same for all."
            )
        self._probed = True

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        *,
        run: Mapping[str, Any],
        host: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> bool:
        """Begin to save; returns when the arrays are copied to the host, the rest goes on behind.

        A save before that is still under way is waited for.

        Args:
            step: the checkpoint's name: applied optimizer steps.
            snapshot: ``program.checkpoint_view(state)``; may be donated once this returns.
            run: JSON values, the same on all processes. host: JSON values of this process.
            metrics: of an evaluation of this very state, for ``Keep.best`` and for whoever looks.
            wait: until it is committed; a failure is tried again, up to ``max_failures`` in a row.

        Returns:
            False where the step is there already, or where the save failed at once, which ``poll`` tells.

        Raises:
            CheckpointError: the ``max_failures``-th failure in a row.
        """
        if self._read_only:
            raise CheckpointError(f"checkpoints in {self.directory} were opened read-only; nothing is saved.")
        began = self._clock()
        self._settle()
        tree = {name: f"{x.dtype}{list(x.shape)}" for name, x in paths.named_leaves(snapshot).items()}
        about = {"step": step, "saved_unix_s": time.time(), "metrics": dict(metrics or {}), "tree": tree,
                 "processes": jax.process_count(), "run": dict(run)}  # fmt: skip
        about_json, host_json = (json.dumps(x, allow_nan=True).encode() for x in (about, dict(host or {})))
        while True:
            flight = _Flight(step, about_json, host_json, began)
            try:
                if gather(self.files.exists(f"{step}/{MANIFEST}"))[0]:
                    return False
                self._open()
                if self._primary:
                    self.files.make_way(str(step))
                self._begun = flight
                arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(snapshot))
                self._checkpointer.save(self.files.uri(str(step)), args=arguments)
            except Exception as error:
                self._failed(flight, error)
                if not wait:
                    return False
                continue
            flight.blocked_s = self._clock() - began
            self._flight = flight
            flight.watch(self._checkpointer, self._clock)
            if not wait or self._settle():
                return True

    def poll(self) -> list[str]:
        """Sentences about saves that failed since the last call; cheap, for every step.

        Raises:
            CheckpointError: the ``max_failures``-th in a row. StuckError: a save neither ends nor fails.
        """
        flight = self._flight
        if flight is not None and (flight.done.is_set() or self._clock() - flight.began_s > self._timeout_s):
            self._settle()
        told, self._told = self._told, []
        return told

    def wait(self) -> None:
        """Until the save behind is committed and what it retires is deleted; raises CheckpointError where it failed."""
        if not self._settle():
            raise CheckpointError(self._told.pop())
        if self._deleting is not None:
            self._deleting.join(_DELETE_S)

    def close(self) -> None:
        """Wait for the last save and end Orbax's threads; raises CheckpointError where that save failed."""
        try:
            self.wait()
        finally:
            self._close()

    # Restoring.

    def restore(self, program: Program, step: int, *, allow: Collection[str] = ()) -> Restored:
        """The state of ``step`` on the program's mesh, whatever mesh wrote it; each process reads its own shards.

        Args:
            allow: ``"dtype"``: arrays saved in another dtype are cast.

        Raises:
            MismatchError: names, shapes, dtypes or the format differ. CheckpointError: it is damaged or missing.
        """
        about = self._believe(step)
        snapshot = self._read(step, about, program.abstract_snapshot, allow)
        host = None
        if about["processes"] == jax.process_count():
            host = json.loads(self.files.read(f"{self._name(step)}/{_host_file(jax.process_index())}"))
        return Restored(program.resume(snapshot), about["run"], host)

    def restore_view(self, program: Program, step: int, *, ema: bool = False) -> View:
        """Parameters (or their average), model state and loss scale of ``step``: what evaluation and sampling need.

        The optimizer's state is not read. Raises as ``restore``.
        """
        about, target = self._believe(step), program.abstract_snapshot
        name = "ema" if ema else "params"
        parts = {name: getattr(target, name), "model_state": target.model_state, "scale": target.scale}
        read = self._read(step, about, parts, ())
        return View(read[name], read["model_state"], read["scale"])

    def restore_params(self, step: int, target: Any = None, *, ema: bool = False, allow: Collection[str] = ()) -> Any:
        """The parameters of ``step`` alone, for another program or project.

        Args:
            target: a pytree of ``jax.ShapeDtypeStruct`` with shardings, as ``program.abstract_state.params``; None: all
                of them, as NumPy arrays in nested dicts.
            ema: their exponential average instead. allow: as ``restore``.

        Raises:
            MismatchError, CheckpointError: as ``restore``.
        """
        about, name = self._believe(step), "ema" if ema else "params"
        if not any(path.split("/")[0] == name for path in about["tree"]):
            raise MismatchError(f"checkpoint {self._where(step)} holds no {name}.")
        if target is not None:
            return self._read(step, about, {name: target}, allow)[name]
        handler = ocp.PyTreeCheckpointHandler()
        saved = handler.metadata(self._path(step)).tree[name]
        wanted = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
        return self._read(step, about, {name: wanted}, allow)[name]

    def _believe(self, step: int) -> dict[str, Any]:
        """What the checkpoint says about itself, once it has been proved whole."""
        if step != self._proved:  # latest_verified has just proved it
            reason = self.problem(step) if step in self._named() else "it is not there"
            if reason is not None:
                raise CheckpointError(f"checkpoint {step} in {self.directory} cannot be restored: {reason}.")
        return json.loads(self.files.read(f"{self._name(step)}/run.json"))

    def _read(self, step: int, about: dict[str, Any], target: Any, allow: Collection[str]) -> Any:
        """Those parts of the saved tree that ``target`` has, in its shapes, dtypes and shardings."""
        whole = isinstance(target, Snapshot)
        parts = target._fields if whole else tuple(target)
        wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in paths.named_leaves(target).items()}
        saved = {name: text for name, text in about["tree"].items() if name.split("/")[0] in parts}
        wrong = [(name, saved.get(name, "not there"), wanted.get(name, "not there"))
                 for name in sorted({*wanted, *saved}) if wanted.get(name) != saved.get(name)]  # fmt: skip
        only_dtypes = all(was.partition("[")[2] == now.partition("[")[2] and "[" in was for _, was, now in wrong)
        if wrong and not ("dtype" in allow and only_dtypes):
            lines = "\n  ".join(f"{name}: {was} -> {now}" for name, was, now in wrong)
            advice = "\nallow the conversion with allow='dtype'" if only_dtypes else ""
            raise MismatchError(
                f"checkpoint {self._where(step)} holds another state (saved -> wanted):\n  {lines}{advice}"
            )
        arguments = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=not whole
        )
        try:
            return ocp.PyTreeCheckpointHandler().restore(self._path(step), args=arguments)
        except ValueError as error:
            raise MismatchError(f"checkpoint {self._where(step)} holds another state: {error}") from error
        except Exception as error:
            raise CheckpointError(f"checkpoint {self._where(step)} could not be restored: {error}") from error

    # Names.

    def _named(self) -> dict[int, str]:
        return {int(name): name for name in self.files.committed()}  # a name may have leading zeros

    def _name(self, step: int) -> str:
        return str(step) if self.files.exists(f"{step}/{MANIFEST}") else self._named().get(step, str(step))

    def _where(self, step: int) -> str:
        return self.files.uri(self._name(step))

    def _path(self, step: int) -> Any:
        return epath.Path(self.files.uri(f"{self._name(step)}/state"))

    # What happens behind.

    def _open(self) -> None:
        """Orbax's checkpointer; at the first time, what killed saves left is cleared away."""
        if self._checkpointer is not None:
            return
        if not self._probed:
            self.probe()
        if self._primary:
            for name in self.files.partial():
                self.files.remove(name)
        own = ocp.AsyncOptions(
            timeout_secs=max(1, int(self._timeout_s)),
            barrier_sync_fn=self._barrier,
            post_finalization_callback=self._describe,
        )
        # Orbax's default compresses, which takes longer than writing what little it saves (7.6% of random float32).
        arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(state=arrays), async_options=own)

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier between processes, in its thread: before the first, each has written all its arrays."""
        if "async_write_complete" in key:
            self._describe_own()
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _describe_own(self) -> None:
        """What only this process can say: its host state, and the checksums of what it has written."""
        temporary, index = self.files.unfinished(str(self._begun.step)), jax.process_index()
        self.files.write(f"{temporary}/{_host_file(index)}", self._begun.host)
        if index and not self.files.keeps_checksums:
            own = [
                path for path in self.files.tree(temporary) if f"process_{index}" in path.replace(".", "/").split("/")
            ]
            described = {  # Orbax has not given the item's directory its name yet
                path.replace(TEMPORARY_END + "/", "/", 1): entry
                for path, entry in manifest.entries(self.files, temporary, own).items()
            }
            self.files.write(f"{temporary}/{_hashes_file(index)}", json.dumps(described).encode())

    def _describe(self) -> None:
        """On the primary, between the last byte and the commit; an error here leaves the step uncommitted."""
        if jax.process_count() == 1:
            self._describe_own()
        temporary = self.files.unfinished(str(self._begun.step))
        self.files.write(f"{temporary}/run.json", self._begun.about)
        described: dict[str, Any] = {}
        if not self.files.keeps_checksums:
            for index in range(1, jax.process_count()):
                described |= json.loads(self.files.read(f"{temporary}/{_hashes_file(index)}"))
                self.files.delete(f"{temporary}/{_hashes_file(index)}")
        rest = [path for path in self.files.tree(temporary) if path not in described]
        manifest.write(self.files, temporary, described | manifest.entries(self.files, temporary, rest))

    def _settle(self) -> bool:
        """Wait for the save behind, if there is one, and take account of it; False where it failed.

        Raises:
            CheckpointError: the ``max_failures``-th failure in a row. StuckError.
        """
        flight = self._flight
        if flight is None:
            return True
        left_s = self._timeout_s * 1.1 + 1 - (self._clock() - flight.began_s)
        if not flight.done.wait(max(0.0, left_s)):
            self._flight, self._checkpointer = None, None
            raise StuckError(
                f"saving checkpoint {flight.step} to {self.directory} has not ended for "
                f"{self._clock() - flight.began_s:.0f} s (timeout {self._timeout_s:g} s); it was given up. What was "
                "verified before is untouched; start again."
            )
        self._flight = None
        if flight.error is not None:
            self._failed(flight, flight.error)
            return False
        self._failures, self.times = 0, Times(flight.blocked_s, flight.whole_s)
        if self._primary:
            self._deleting = threading.Thread(target=self._retire, args=(flight.step, self._deleting), daemon=True)
            self._deleting.start()
        return True

    def _failed(self, flight: "_Flight", error: BaseException) -> None:
        """Count, clear away, tell; raises CheckpointError at the ``max_failures``-th."""
        self._failures += 1
        self._close()
        sentence = f"saving checkpoint {flight.step} to {self.directory} failed: {error}"
        if self._failures >= self._max_failures:
            times = "" if self._failures == 1 else f" ({self._failures} saves in a row failed)"
            raise CheckpointError(sentence + times) from error
        self._told.append(f"{sentence}; the next save tries again ({self._failures} of {self._max_failures})")

    def _retire(self, newest: int, before: threading.Thread | None) -> None:
        """Delete what is not kept, behind the loop; never unless the newest is whole as far as a listing tells."""
        if before is not None:
            before.join()
        try:
            named = self._named()
            reason = manifest.problem(self.files, named.get(newest, str(newest)), read=False)
            if reason is not None:
                self._told.append(f"checkpoint {newest} in {self.directory} is damaged ({reason}); nothing is deleted")
                return
            for step in self._keep.retired(list(named), self._metrics(named) if self._keep.best else {}):
                self.files.remove(named[step])
        except Exception as error:  # a deletion that fails costs space, nothing else
            self._told.append(f"old checkpoints in {self.directory} could not be deleted: {error}")

    def _metrics(self, named: Mapping[int, str]) -> dict[int, float]:
        found = {}
        for step, name in named.items():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found[step] = float(json.loads(self.files.read(f"{name}/run.json"))["metrics"][self._keep.metric])
        return found

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            with contextlib.suppress(Exception):  # every save has been settled; nothing of it can fail here
                checkpointer.close()


class _Flight:
    """A save under way, and a thread that waits for its end."""

    def __init__(self, step: int, about: bytes, host: bytes, began_s: float) -> None:
        self.step, self.about, self.host, self.began_s = step, about, host, began_s
        self.blocked_s = self.whole_s = 0.0
        self.error: BaseException | None = None
        self.done = threading.Event()

    def watch(self, checkpointer: ocp.AsyncCheckpointer, clock: Callable[[], float]) -> None:
        def wait() -> None:
            try:
                checkpointer.wait_until_finished()
            except BaseException as error:
                self.error = error
            self.whole_s = clock() - self.began_s
            self.done.set()

        threading.Thread(target=wait, name=f"checkpoint {self.step}", daemon=True).start()


def _host_file(index: int) -> str:
    return f"host_state/process_{index}.json"


def _hashes_file(index: int) -> str:
    return f"HASHES.{index}.json"
