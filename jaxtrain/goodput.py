"""Where the wall time of a run went, across restarts: a closed list of phases that adds up to the whole.

The goodput of a run is the share of its wall time that went into steps nobody had done before.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from jaxtrain.workdir import write_whole

FORMAT = 1


class Phase(StrEnum):
    """What the loop's thread is doing. Every second belongs to exactly one phase."""

    COMPILE = "compile"
    INPUT = "input"  # waiting for a batch
    STEP = "step"  # the only phase that counts as good
    EVAL = "eval"
    CHECKPOINT = "checkpoint"  # blocked by a save; what the save does in the background costs nothing here
    RESTORE = "restore"
    REWORK = "rework"  # steps that a former attempt had done and a kill threw away
    IDLE = "idle"  # everything else


_PHASES = tuple(Phase)
_INDEX = {phase: i for i, phase in enumerate(_PHASES)}
_STEP, _REWORK, _IDLE = _INDEX[Phase.STEP], _INDEX[Phase.REWORK], _INDEX[Phase.IDLE]


class Goodput:
    """Counts the seconds of each phase of this attempt and keeps them, with those of former attempts, in ``path``.

    Opening counts a new attempt and writes the file, so that one killed while it compiles is counted too. Afterwards
    the file is as old as the last :meth:`save`: what a killed attempt did after that, and the time until the next one
    starts, is not known and not counted. Only the loop's thread, and in a job of many processes only process 0,
    may use it. ``clock`` gives seconds that never go backwards; ``before`` has seconds of this attempt that passed
    before the opening.

    A file that cannot be understood is kept as ``<path>.bad``, with a RuntimeWarning, and counting starts anew.
    """

    def __init__(
        self, path: str | Path, clock: Callable[[], float] = time.monotonic, before: Mapping[Phase, float] | None = None
    ):
        self.path = Path(path)
        self._clock = clock
        former, self._furthest = _load(self.path)
        self._former: list[dict[str, Any]] = former
        self._rework_until = self._furthest
        self._step, self._ended = 0, False
        self._seconds = [float((before or {}).get(phase, 0.0)) for phase in _PHASES]
        self._stack: list[int] = []
        self._current = _IDLE
        self._last_s = clock()
        self._spans = {phase: _Span(self, i) for phase, i in _INDEX.items()}
        self.save()

    def phase(self, phase: Phase) -> "_Span":
        """A context whose time counts as ``phase``; a phase inside it interrupts it, so no second counts twice."""
        return self._spans[phase]

    def reached(self, step: int) -> None:
        """The run stands at ``step`` applied updates: call it after a restore and after each step."""
        self._step = step
        if step > self._furthest:
            self._furthest = step

    def rework(self, steps_redone_until: int) -> None:
        """Step time counts as ``rework`` for all steps up to and including this one.

        The furthest step that a former attempt saved here is known without a call. Call it where more is known: a
        killed attempt's last line in ``metrics.jsonl`` is often younger than its last :meth:`save`.
        """
        self._rework_until = max(self._rework_until, steps_redone_until)
        self._furthest = max(self._furthest, steps_redone_until)

    @property
    def attempts(self) -> int:
        """How many times the run was started, this one included."""
        return len(self._former) + 1

    @property
    def furthest_step(self) -> int:
        """The furthest step that any attempt is known to have reached."""
        return self._furthest

    def attempt_seconds(self) -> dict[Phase, float]:
        """Seconds of each phase of this attempt until now; their sum is the wall time since the opening."""
        self._settle()
        return dict(zip(_PHASES, self._seconds, strict=True))

    def total_seconds(self) -> dict[Phase, float]:
        """Seconds of each phase over all attempts until now."""
        attempts = [a["seconds"] for a in self._former] + [self.attempt_seconds()]
        return {phase: math.fsum(a[phase] for a in attempts) for phase in _PHASES}

    def ended(self) -> None:
        """This attempt ends in order, with what it has done saved; one that never says so counts as a failure."""
        self._ended = True

    def failures(self) -> tuple[int, float]:
        """How many former attempts did not end in order, and the seconds that all of them ran."""
        ran_s = math.fsum(s for attempt in self._former for s in attempt["seconds"].values())
        return sum(not attempt["ended"] for attempt in self._former), ran_s

    def restart_s(self) -> float:
        """Seconds that former attempts took, on average, to restore and compile; 0 where there was none."""
        spent = [a["seconds"][Phase.COMPILE] + a["seconds"][Phase.RESTORE] for a in self._former]
        return math.fsum(spent) / len(spent) if spent else 0.0

    def save(self) -> None:
        """Writes the file, whole or not at all. It waits for the disk: milliseconds, so at the logging cadence."""
        this = {"seconds": self.attempt_seconds(), "last_step": self._step, "ended": self._ended}
        total = self.total_seconds()
        content = {
            "format": FORMAT,
            "attempts": [*self._former, this],
            "furthest_step": self._furthest,
            "total_seconds": total,  # for the reader's eye, as is the next: a restart adds up the attempts
            "goodput": _fraction(total),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1).encode())

    def _settle(self) -> None:
        now_s = self._clock()
        self._seconds[self._current] += now_s - self._last_s
        self._last_s = now_s


class _Span:
    """One per phase and without state of its own, so it nests in itself; a few microseconds a step."""

    __slots__ = ("_goodput", "_index")

    def __init__(self, goodput: Goodput, index: int):
        self._goodput = goodput
        self._index = index

    def __enter__(self) -> None:
        goodput = self._goodput
        goodput._settle()
        goodput._stack.append(goodput._current)
        redone = self._index == _STEP and goodput._step < goodput._rework_until
        goodput._current = _REWORK if redone else self._index

    def __exit__(self, *exc: object) -> None:
        goodput = self._goodput
        goodput._settle()
        goodput._current = goodput._stack.pop()


def _fraction(seconds: dict[Phase, float]) -> float:
    wall_s = math.fsum(seconds.values())
    return seconds[Phase.STEP] / wall_s if wall_s > 0 else 0.0


def _load(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(attempts, furthest step) of the file; nothing where there is none or none that can be understood."""
    try:
        return _understand(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return [], 0
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        bad = path.with_name(path.name + ".bad")
        os.replace(path, bad)
        warnings.warn(
            f"{path} is not a goodput file ({type(error).__name__}: {error}); kept as {bad.name}, counting starts anew",
            RuntimeWarning,
            stacklevel=3,
        )
        return [], 0


def _understand(content: Any) -> tuple[list[dict[str, Any]], int]:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
    attempts = []
    for attempt in content["attempts"]:
        seconds = {Phase(name): float(s) for name, s in attempt["seconds"].items()}
        if set(seconds) != set(Phase) or not all(math.isfinite(s) and s >= 0 for s in seconds.values()):
            raise ValueError(f"the seconds of attempt {len(attempts) + 1} are {attempt['seconds']}")
        ended = bool(attempt.get("ended", True))  # files of before this was written down
        attempts.append({"seconds": seconds, "last_step": int(attempt["last_step"]), "ended": ended})
    return attempts, int(content["furthest_step"])
