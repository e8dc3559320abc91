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

from jaxtrain import paths
from jaxtrain.checkpoint import manifest, reader
from jaxtrain.checkpoint.errors import CheckpointError, MismatchError, StuckError
from jaxtrain.checkpoint.files import MANIFEST, open_files
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.writer import Flight, Writer, host_file
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
        self._writer = Writer(self.files, timeout_s)
        self._flight: Flight | None = None
        self._deleting: threading.Thread | None = None
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
            try:
                if gather(self.files.exists(f"{step}/{MANIFEST}"))[0]:
                    return False
                if not self._probed:
                    self.probe()
                self._flight = self._writer.begin(Flight(step, about_json, host_json, began, self._clock), snapshot)
            except Exception as error:
                self._failed(step, error)
                if not wait:
                    return False
                continue
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
            self._writer.close()

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
            host = json.loads(self.files.read(f"{self._name(step)}/{host_file(jax.process_index())}"))
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
            raise MismatchError(f"checkpoint {self.files.uri(self._name(step))} holds no {name}.")
        if target is None:
            target = reader.saved_part(self.files.uri(self._name(step)), name)
        return self._read(step, about, {name: target}, allow)[name]

    def _believe(self, step: int) -> dict[str, Any]:
        """What the checkpoint says about itself, once it has been proved whole."""
        if step != self._proved:  # latest_verified has just proved it
            reason = self.problem(step) if step in self._named() else "it is not there"
            if reason is not None:
                raise CheckpointError(f"checkpoint {step} in {self.directory} cannot be restored: {reason}.")
        return json.loads(self.files.read(f"{self._name(step)}/run.json"))

    def _read(self, step: int, about: dict[str, Any], target: Any, allow: Collection[str]) -> Any:
        return reader.read(self.files.uri(self._name(step)), about["tree"], target, allow)

    # Names.

    def _named(self) -> dict[int, str]:
        return {int(name): name for name in self.files.committed()}  # a name may have leading zeros

    def _name(self, step: int) -> str:
        return str(step) if self.files.exists(f"{step}/{MANIFEST}") else self._named().get(step, str(step))

    # What happens behind.

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
            self._flight = None
            self._writer.abandon()
            raise StuckError(
                f"saving checkpoint {flight.step} to {self.directory} has not ended for "
                f"{self._clock() - flight.began_s:.0f} s (timeout {self._timeout_s:g} s); it was given up. What was "
                "verified before is untouched; start again."
            )
        self._flight = None
        if flight.error is not None:
            self._failed(flight.step, flight.error)
            return False
        self._failures, self.times = 0, Times(flight.blocked_s, flight.whole_s)
        if self._primary:
            self._deleting = threading.Thread(target=self._retire, args=(flight.step, self._deleting), daemon=True)
            self._deleting.start()
        return True

    def _failed(self, step: int, error: BaseException) -> None:
        """Count, clear away, tell; raises CheckpointError at the ``max_failures``-th."""
        self._failures += 1
        self._writer.close()
        sentence = f"saving checkpoint {step} to {self.directory} failed: {error}"
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
