"""Checkpoints in one directory: save, choose, verify, restore; Orbax's CheckpointManager behind a small interface.

Layout: ``<step>/{state, host_state, data, MANIFEST.json, _CHECKPOINT_METADATA}``. A checkpoint is visible when its
directory has its final name (Orbax's rename), and believed when its manifest proves every file.
"""

import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxtrain import paths
from jaxtrain.checkpoint import manifest
from jaxtrain.state import Snapshot, TrainState
from jaxtrain.step import Program

FORMAT = 1
_DELETED = ".deleted"
_DAMAGED = ".damaged"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the sentence names step, path and cause."""


class MismatchError(CheckpointError):
    """A checkpoint is whole but holds another program's state; each difference is listed."""


class Restored(NamedTuple):
    """``state``: ready for its first micro-batch; ``host_state`` and ``data``: as given to ``save``."""

    state: TrainState
    host_state: dict[str, Any]
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, on a local or shared file system.

    Args:
        directory: holds one subdirectory a step; made at the first save.
        keep_last: how many of the newest are kept.
        read_only: for another process than the one that trains: damaged checkpoints are passed over where they lie.
    """

    def __init__(self, directory: str | pathlib.Path, *, keep_last: int = 3, read_only: bool = False) -> None:
        if "://" in str(directory):
            raise CheckpointError(f"checkpoints: {directory} is not a local path; object stores are not available yet.")
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last, self._read_only = keep_last, read_only
        self._saving = self._newest = None  # the step whose save may have failed; the one begun last
        self._proved: int | None = None
        self._manager: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """Steps whose commit is complete, ascending: a fresh look at the directory."""
        return sorted(int(path.name) for path in self._listed() if _filled(path))

    def latest_verified(self) -> int | None:
        """The newest step that proves whole, or None.

        A damaged one on the way is set aside (renamed, its data kept) with a warning that names file and reason.
        """
        for step in reversed(self.steps()):
            reason = self.problem(step)
            if reason is None:
                self._proved = step
                return step
            if not self._path(step).is_dir():
                continue  # retired meanwhile by the process that trains
            if self._read_only:
                warnings.warn(f"checkpoint {step} in {self.directory} is passed over: {reason}.", stacklevel=2)
                continue
            aside = self._path(step).with_name(f"{step}{_DAMAGED}")
            number = 1
            while aside.exists():
                number += 1
                aside = aside.with_name(f"{step}{_DAMAGED}{number}")
            self._path(step).rename(aside)
            self._close_manager()
            warnings.warn(f"checkpoint {step} is damaged ({reason}); set aside as {aside}.", stacklevel=2)
        return None

    def problem(self, step: int) -> str | None:
        """Why checkpoint ``step`` is not whole, or None; reads every byte of it."""
        return manifest.problem(self._path(step))

    def save(self, step: int, snapshot: Snapshot, *, host_state: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
        """Begin to save; returns when the arrays are copied to the host, the rest goes on behind.

        Args:
            step: the checkpoint's name: applied optimizer steps.
            snapshot: ``program.checkpoint_view(state)``; may be donated once this returns.
            host_state, data: JSON values.

        Returns:
            False where the step is there already: nothing is written.

        Raises:
            CheckpointError: this save could not begin, or the one before failed.
        """
        if self._read_only:
            raise CheckpointError(f"checkpoints in {self.directory} were opened read-only; nothing is saved.")
        self.wait()
        if step in self.steps():
            return False
        tree = {name: f"{x.dtype}{list(x.shape)}" for name, x in paths.named_leaves(snapshot).items()}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(snapshot),
            host_state=ocp.args.JsonSave({**host_state, "format": FORMAT, "tree": tree}),
            data=ocp.args.JsonSave(dict(data)),
        )
        self._saving = self._newest = step
        try:
            if not self._open().save(step, args=args, force=True):
                raise OSError("Orbax refused it without a reason")
        except Exception as error:
            raise self._failed(error) from error
        return True

    def check(self) -> None:
        """Raise CheckpointError where the save behind has failed; cheap, for every step."""
        if self._manager is not None and self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()  # Orbax's check_for_errors never raises: its own thread takes the error first

    def wait(self) -> None:
        """Until the save behind is committed; raises CheckpointError where it failed."""
        if self._manager is None or self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None
        self._sweep()

    def restore(self, program: Program, step: int) -> Restored:
        """The state of ``step`` on the program's mesh, whatever mesh wrote it.

        Raises:
            MismatchError: names, shapes, dtypes or the format differ. CheckpointError: it is damaged or missing.
        """
        path = self._path(step)
        reason = None
        if step != self._proved:  # latest_verified has just read all of it
            reason = self.problem(step) if path.is_dir() else "no such directory"
        if reason is not None:
            raise CheckpointError(f"checkpoint {step} in {self.directory} cannot be restored: {reason}.")
        host_state = self._json(step, "host_state")
        if host_state["format"] != FORMAT:
            raise MismatchError(f"checkpoint {path} has format {host_state['format']}; this version reads {FORMAT}.")
        target = program.abstract_snapshot
        wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in paths.named_leaves(target).items()}
        saved = host_state["tree"]
        wrong = [f"{n}: {saved.get(n, 'not there')} -> {wanted.get(n, 'not there')}" for n in sorted({*wanted, *saved})
                 if wanted.get(n) != saved.get(n)]  # fmt: skip
        if wrong:
            raise MismatchError(f"checkpoint {path} holds another state (saved -> wanted):\n  " + "\n  ".join(wrong))
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                snapshot = reader.restore(path / "state", args=ocp.args.StandardRestore(target))
        except ValueError as error:
            raise MismatchError(f"checkpoint {path} holds another state: {error}") from error
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} could not be restored: {error}") from error
        return Restored(program.resume(snapshot), host_state, self._json(step, "data"))

    def data(self, step: int) -> dict[str, Any]:
        """What ``save`` was given as ``data``, without reading the arrays."""
        return self._json(step, "data")

    def close(self) -> None:
        """Wait for the last save and end Orbax's threads; raises CheckpointError where that save failed."""
        try:
            self.wait()
        finally:
            self._close_manager()

    def _path(self, step: int) -> pathlib.Path:
        named = [path for path in self._listed() if int(path.name) == step]  # a name may have leading zeros
        return named[0] if named else self.directory / str(step)

    def _listed(self) -> list[pathlib.Path]:
        """Directories named like steps."""
        try:
            return [path for path in self.directory.iterdir() if path.name.isdecimal() and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _json(self, step: int, item: str) -> dict[str, Any]:
        return json.loads((self._path(step) / item / "metadata").read_text())

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self._listed():
                if not _filled(path):  # Orbax would count it as a step
                    path.rmdir()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.LatestN(self._keep_last),
                cleanup_tmp_directories=True,
                todelete_subdir=_DELETED,
                lightweight_initialize=True,
                async_options=ocp.AsyncOptions(timeout_secs=300, post_finalization_callback=self._describe),
            )
            registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
            for item, handler, saved, wanted in (
                ("state", ocp.StandardCheckpointHandler(), ocp.args.StandardSave, ocp.args.StandardRestore),
                ("host_state", ocp.JsonCheckpointHandler(), ocp.args.JsonSave, ocp.args.JsonRestore),
                ("data", ocp.JsonCheckpointHandler(), ocp.args.JsonSave, ocp.args.JsonRestore),
            ):
                registry.add(item, saved, handler)
                registry.add(item, wanted, handler)
            self._manager = ocp.CheckpointManager(self.directory, options=options, handler_registry=registry)
            self._sweep()
        return self._manager

    def _describe(self) -> None:
        """Orbax's hook between the last byte and the commit; an error here leaves the step uncommitted.

        In Orbax's thread, which an interrupted ``wait`` leaves behind: it goes by the save begun last.
        """
        (temporary,) = self.directory.glob(f"{self._newest}.orbax-checkpoint-tmp*")
        manifest.write(temporary)

    def _sweep(self) -> None:
        """Delete what retention moved aside; a kill half-way leaves no listed step without data."""
        shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    def _failed(self, error: Exception) -> CheckpointError:
        step, self._saving = self._saving, None
        self._close_manager()
        return CheckpointError(f"saving checkpoint {step} to {self.directory} failed: {error}")

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception as error:  # the save's own error was or will be raised; this one must not mask it
                warnings.warn(f"closing the checkpoints in {self.directory}: {error}", stacklevel=2)


def _filled(path: pathlib.Path) -> bool:
    try:
        return bool(os.listdir(path))
    except FileNotFoundError:  # retired between two looks
        return False
