"""Where the numbers of a run go: a JSON Lines file, TensorBoard, and any tracker that speaks :class:`Callback`.

A record is a flat mapping from a name to a number: ``{"step": 120, "loss": 2.34, "mfu": None}``. ``step`` counts
applied optimizer updates and is the x axis of everything; ``None`` says "not known". In a job of many processes only
process 0 opens writers.
"""

import itertools
import json
import math
import numbers
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from jaxtrain.workdir import write_whole

Record = Mapping[str, float | int | None]

TENSORBOARD_FLUSH_S = 10  # what a kill may cost; tensorboardX's own default is 120 s
TENSORBOARD_QUEUE = 1000  # events the loop may run ahead of a slow disk; tensorboardX's own default of 10 blocks it


@runtime_checkable
class Callback(Protocol):
    """What the loop tells a tracker, in the loop's thread: a slow callback slows training, an exception ends it.

    Derive from :class:`CallbackBase` to write only the methods that matter:

    >>> class Best(CallbackBase):
    ...     best = float("inf")
    ...
    ...     def on_eval(self, record):
    ...         self.best = min(self.best, record["eval/loss"])
    >>> tracker = Best()
    >>> tracker.on_eval({"step": 10, "eval/loss": 2.5})
    >>> tracker.on_eval({"step": 20, "eval/loss": 2.25})
    >>> tracker.best
    2.25
    """

    def on_log(self, record: Record) -> None:
        """A window's numbers, at the logging cadence; ``record["step"]`` is always there."""

    def on_eval(self, record: Record) -> None:
        """The result of an evaluation: ``step`` and names such as ``eval/loss``."""

    def on_save(self, step: int, path: str | Path) -> None:
        """A checkpoint of ``step`` was handed over for ``path``; an asynchronous save may not be committed yet."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, at the orderly end of a run (also of one stopped by preemption)."""


class CallbackBase:
    """A :class:`Callback` that does nothing."""

    def on_log(self, record: Record) -> None: ...

    def on_eval(self, record: Record) -> None: ...

    def on_save(self, step: int, path: str | Path) -> None: ...

    def on_end(self, summary: Mapping[str, Any]) -> None: ...


class JsonlWriter(CallbackBase):
    """Appends one strict JSON object per record to ``path`` (``metrics.jsonl``).

    NaN and infinities, which JSON lacks, are written as ``null``. Each line reaches the operating system before the
    call returns, so ``kill -9`` costs at most the line in flight; lines reach the disk itself at each save and at the
    end. ``on_end`` closes the file and writes no line: a summary has no step.

    On opening, what a former attempt wrote beyond ``resume_step`` moves to ``metrics.attempt<N>.jsonl`` (the first
    unused N, from 1): every line for a fresh start (``None``), and always lines without a readable ``step``, such
    as the torn last line of a killed attempt. ``resume_micro_step`` also moves the lines of windows that were skipped
    after the resumed point, whose ``step`` is the same. Kept lines keep their bytes. A kill in the middle may leave
    lines in both files, never in none.

    Raises TypeError for a value that is not a number (a jax array would mean a hidden wait for the device), ValueError
    for a record without an int ``step``, a negative ``resume_step`` or a closed writer, OSError when the disk refuses.
    """

    def __init__(self, path: str | Path, resume_step: int | None, resume_micro_step: int | None = None):
        self.path = Path(path)
        self.set_aside: Path | None = None  # where this opening moved lines to, if it did
        self.furthest_step = 0  # of all lines found, moved ones too
        self.last_evaluation: dict[str, Any] | None = None  # of the lines kept
        _check_resume_step(resume_step)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._look(resume_step, resume_micro_step)
            self.set_aside = _split_attempt(self.path, resume_step, resume_micro_step)
        self._file = self.path.open("ab")

    def _look(self, resume_step: int | None, resume_micro_step: int | None) -> None:
        with self.path.open("rb") as file:
            for line in file:
                record = _parse(line) or {}
                if isinstance(record.get("step"), int):
                    self.furthest_step = max(self.furthest_step, record["step"])
                if "eval/loss" in record and _within(record, resume_step, resume_micro_step):
                    self.last_evaluation = record

    def on_log(self, record: Record) -> None:
        self._write(record)

    def on_eval(self, record: Record) -> None:
        self._write(record)

    def on_save(self, step: int, path: str | Path) -> None:
        self._refuse_if_closed()
        os.fsync(self._file.fileno())  # losing the whole VM after a save loses no record from before it

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Forces the lines onto the disk and closes the file; a second call does nothing."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        self._refuse_if_closed()
        _step(record)
        line = json.dumps({name: _finite(_number(name, value)) for name, value in record.items()}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def _refuse_if_closed(self) -> None:
        if self._file.closed:
            raise ValueError(f"{self.path}: the writer is closed")


class TensorBoardWriter(CallbackBase):
    """Writes the numbers of each record as TensorBoard scalars under ``directory``, with ``step`` as the x axis.

    A name without a slash goes below ``train/`` (``loss`` -> ``train/loss``), ``eval/loss`` stays. ``None`` is left
    out; NaN and infinities are written, TensorBoard marks them. A kill costs at most the last 10 s of events.

    Opening a directory that holds events hides, in TensorBoard, those beyond ``resume_step`` (all of them for a fresh
    start, ``None``); the files of former attempts stay as they are. ``on_end`` closes the writer.

    Raises as :class:`JsonlWriter` does.
    """

    def __init__(self, directory: str | Path, resume_step: int | None):
        import tensorboardX.proto.summary_pb2  # slow to load (0.2 s, and torch where that is installed)
        import tensorboardX.summary  # as above

        self._summary, self._scalar = tensorboardX.proto.summary_pb2.Summary, tensorboardX.summary.scalar
        _check_resume_step(resume_step)
        self.directory = Path(directory)
        former = len(list(self.directory.glob("*tfevents*")))
        # TensorBoard drops what it read before with step >= purge_step. It reads files in the order of their names, and
        # tensorboardX names them by the second and truncates: the suffix tells two starts within one second apart.
        self._writer: tensorboardX.SummaryWriter | None = tensorboardX.SummaryWriter(
            str(self.directory),
            purge_step=resume_step + 1 if resume_step is not None else (0 if former else None),
            filename_suffix=f".{former:05d}",
            max_queue=TENSORBOARD_QUEUE,
            flush_secs=TENSORBOARD_FLUSH_S,
        )

    def on_log(self, record: Record) -> None:
        self._write(record)

    def on_eval(self, record: Record) -> None:
        self._write(record)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is queued and closes the event file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        if self._writer is None:  # a closed SummaryWriter would open a new file and purge again
            raise ValueError(f"{self.directory}: the writer is closed")
        step, now_s = _step(record), time.time()
        summary = self._summary()  # one for all names: each passes through two queues and threads of tensorboardX
        for name, value in record.items():
            number = _number(name, value)
            if name != "step" and number is not None:
                tag = name if "/" in name else f"train/{name}"
                summary.MergeFrom(self._scalar(tag, number))
        self._writer.file_writer.add_summary(summary, global_step=step, walltime=now_s)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``, in file order; ``null`` comes back as None.

    A torn last line, as a killed or still running job leaves it, is left out. Raises ValueError with the line number
    for any other line that is not a JSON object, FileNotFoundError where there is no file.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for i, line in enumerate(lines):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif i < len(lines) - 1:
            raise ValueError(f"{path}:{i + 1}: not a JSON object: {line[:80]!r}")
    return records


def _split_attempt(path: Path, resume_step: int | None, resume_micro_step: int | None) -> Path | None:
    """Moves the lines beyond the resumed point out of ``path``; returns the file they went to."""
    keep: list[bytes] = []
    move: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            kept = _within(_parse(line) or {}, resume_step, resume_micro_step)
            (keep if kept else move).append(line)
    aside = None
    if move:  # first the copy, then the removal: a kill in between doubles lines and loses none
        aside = next(p for n in itertools.count(1) if not (p := _attempt_path(path, n)).exists())
        write_whole(aside, b"".join(move))
    whole = b"".join(keep)
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"  # killed between an object's last byte and its newline
    elif not move:
        return None
    write_whole(path, whole)
    return aside


def _within(record: Mapping[str, Any], resume_step: int | None, resume_micro_step: int | None) -> bool:
    step, micro_step = record.get("step"), record.get("micro_step", 0)
    if resume_step is None or not (isinstance(step, int) and step <= resume_step):
        return False
    return resume_micro_step is None or (isinstance(micro_step, int) and micro_step <= resume_micro_step)


def _attempt_path(path: Path, n: int) -> Path:
    return path.with_name(f"{path.stem}.attempt{n}{path.suffix}")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) else None


def _check_resume_step(resume_step: int | None) -> None:
    if resume_step is not None and resume_step < 0:
        raise ValueError(f"resume_step={resume_step} is negative; give None for a fresh start")


def _step(record: Record) -> int:
    step = record.get("step")
    if not isinstance(step, numbers.Integral) or isinstance(step, bool):
        raise ValueError(f"a record needs an int 'step', this one has {step!r} among the keys {sorted(record)}")
    return int(step)


def _number(name: str, value: Any) -> float | int | None:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):  # NumPy's scalars
        return float(value)
    raise TypeError(f"record[{name!r}] is a {type(value).__name__}, not a number: read it from the device first")


def _finite(value: float | int | None) -> float | int | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
