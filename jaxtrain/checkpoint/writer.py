"""Saves through Orbax, one at a time: the arrays, what describes them, and the commit, behind the loop's back."""

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.files import TEMPORARY_END, Files
from jaxtrain.state import Snapshot


class Flight:
    """A save under way.

    Attributes:
        step: the checkpoint's name. about, host: content of ``run.json`` and of this process's host state.
        began_s: by ``clock``. blocked_s: how long the caller was held up. whole_s: until the end.
        done: set at the end. error: why it failed, or None.
    """

    def __init__(self, step: int, about: bytes, host: bytes, began_s: float, clock: Callable[[], float]) -> None:
        self.step, self.about, self.host, self.began_s, self.clock = step, about, host, began_s, clock
        self.blocked_s = self.whole_s = 0.0
        self.error: BaseException | None = None
        self.done = threading.Event()

    def watch(self, checkpointer: ocp.AsyncCheckpointer) -> None:
        """Note the end, in a thread."""
        self.blocked_s = self.clock() - self.began_s

        def wait() -> None:
            try:
                checkpointer.wait_until_finished()
            except BaseException as error:
                self.error = error
            self.whole_s = self.clock() - self.began_s
            self.done.set()

        threading.Thread(target=wait, name=f"checkpoint {self.step}", daemon=True).start()


class Writer:
    """Every process has one and calls the same methods at the same points."""

    def __init__(self, files: Files, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s
        self._primary = jax.process_index() == 0
        self._begun: Flight | None = None
        self._checkpointer: ocp.AsyncCheckpointer | None = None

    def begin(self, flight: Flight, snapshot: Snapshot) -> Flight:
        """Copy the arrays to the host and go on behind; the flight says when it is over. Raises of many kinds."""
        if self._checkpointer is None:
            self._open()
        if self._primary:
            self._files.make_way(str(flight.step))
        self._begun = flight
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(snapshot))
        self._checkpointer.save(self._files.uri(str(flight.step)), args=arguments)
        flight.watch(self._checkpointer)
        return flight

    def close(self) -> None:
        """End Orbax's threads, once no save is under way; the next ``begin`` makes new ones."""
        checkpointer = self._checkpointer
        self.abandon()
        if checkpointer is not None:
            with contextlib.suppress(Exception):  # every save has been settled; nothing of it can fail here
                checkpointer.close()

    def abandon(self) -> None:
        """Leave a save that does not end to itself."""
        self._checkpointer = None

    def _open(self) -> None:
        """Clear away what killed and failed saves left, and make Orbax's checkpointer."""
        if self._primary:
            for name in self._files.partial():
                self._files.remove(name)
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
        temporary, index = self._files.unfinished(str(self._begun.step)), jax.process_index()
        self._files.write(f"{temporary}/{host_file(index)}", self._begun.host)
        if index and not self._files.keeps_checksums:
            own = [
                path for path in self._files.tree(temporary) if f"process_{index}" in path.replace(".", "/").split("/")
            ]
            described = {  # Orbax has not given the item's directory its name yet
                path.replace(TEMPORARY_END + "/", "/", 1): entry
                for path, entry in manifest.entries(self._files, temporary, own).items()
            }
            self._files.write(f"{temporary}/{_hashes_file(index)}", json.dumps(described).encode())

    def _describe(self) -> None:
        """On the primary, between the last byte and the commit; an error here leaves the step uncommitted."""
        if jax.process_count() == 1:
            self._describe_own()
        temporary = self._files.unfinished(str(self._begun.step))
        self._files.write(f"{temporary}/run.json", self._begun.about)
        described: dict[str, Any] = {}
        if not self._files.keeps_checksums:
            for index in range(1, jax.process_count()):
                described |= json.loads(self._files.read(f"{temporary}/{_hashes_file(index)}"))
                self._files.delete(f"{temporary}/{_hashes_file(index)}")
        rest = [path for path in self._files.tree(temporary) if path not in described]
        manifest.write(self._files, temporary, described | manifest.entries(self._files, temporary, rest))


def host_file(index: int) -> str:
    """Where process ``index`` keeps its host state in a checkpoint."""
    return f"host_state/process_{index}.json"


def _hashes_file(index: int) -> str:
    return f"HASHES.{index}.json"
