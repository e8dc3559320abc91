"""When a checkpoint is due, and how often one should be: what a failure loses against what saves cost.

Young (CACM 17(9), 1974) and Daly (Future Generation Computer Systems 22(3), 2006): with a save that holds the run up
for ``d`` seconds and a failure every ``M`` seconds on average, the time between saves that loses least is about
``sqrt(2 d M)``. Here a save goes on behind the run until it is whole, and only then can a restart use it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

_AGREE_WINDOWS = 10  # several processes ask each other so often whether it is time


class Costs(NamedTuple):
    """Seconds.

    Attributes:
        blocked_s: that a save holds the run up. whole_s: from a save's begin until it is committed.
        restart_s: from a failure to the first new step.
    """

    blocked_s: float
    whole_s: float
    restart_s: float


def optimum_s(costs: Costs, mtbf_s: float) -> float:
    """The time between two saves that loses least, in seconds; never less than a save takes to be whole.

    Args:
        mtbf_s: mean time between failures.
    """
    d = costs.blocked_s
    if d >= 2 * mtbf_s:
        interval = mtbf_s  # Daly: nothing better is left
    else:
        x = d / (2 * mtbf_s)
        interval = math.sqrt(2 * d * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - d
    return max(interval, costs.whole_s)


def lost_share(interval_s: float, costs: Costs, mtbf_s: float) -> float:
    """The share of wall time that is expected to be lost: to saves, to work done twice and to restarts.

    First order: a failure finds the run half an interval behind the last save, on average, and that save is only of use
    once it is whole.
    """
    saves = costs.blocked_s / (interval_s + costs.blocked_s)
    failures = (interval_s / 2 + costs.whole_s + costs.restart_s) / mtbf_s
    return min(1.0, saves + failures)


class Failures(NamedTuple):
    """What is known about failures: ``count`` of them in ``run_s`` seconds, of all attempts together."""

    count: int
    run_s: float

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures as estimated: one failure a day is assumed to have been seen before."""
        day_s = 86400.0
        return (self.run_s + day_s) / (self.count + 1)


class Cadence:
    """Says after which windows to save.

    Args:
        every_steps: windows between two saves; 0: not counted.
        every_s: seconds between two saves; 0: not timed.
        auto: the optimum from what is measured, instead of both.
        mtbf_s: mean time between failures, for ``auto``.
        restart_s: see ``Costs``.
        processes: how many must agree; with more than one, times are looked at every few windows only.
        agree: process 0's answer on every process; called at the same windows by all.
        clock: seconds that never go backwards.
    """

    FIRST_S = 60.0  # auto saves a first time after this, to measure

    def __init__(
        self,
        *,
        every_steps: int = 0,
        every_s: float = 0.0,
        auto: bool = False,
        mtbf_s: float = math.inf,
        restart_s: float = 0.0,
        processes: int = 1,
        agree: Callable[[bool], bool] = bool,
        clock: Callable[[], float],
    ) -> None:
        self._every_steps, self._auto, self._mtbf_s, self._restart_s = every_steps, auto, mtbf_s, restart_s
        self._interval_s = self.FIRST_S if auto else every_s or None
        self._processes, self._agree, self._clock = processes, agree, clock
        self._last_s, self._told_s = clock(), 0.0

    def due(self, done: int) -> bool:
        """Whether to save after ``done`` windows."""
        if not self._auto and self._every_steps and done % self._every_steps == 0:
            return True
        if self._interval_s is None or (self._processes > 1 and done % _AGREE_WINDOWS):
            return False
        return self._agree(self._clock() - self._last_s >= self._interval_s)

    def began(self) -> None:
        """A save begins now, for whatever reason."""
        self._last_s = self._clock()

    def measured(self, blocked_s: float, whole_s: float) -> str | None:
        """What the last save took, for ``auto``: a sentence where the interval changes by a quarter or more."""
        if not self._auto:
            return None
        costs = Costs(blocked_s, whole_s, self._restart_s)
        self._interval_s = optimum_s(costs, self._mtbf_s)
        if self._told_s and 0.8 < self._interval_s / self._told_s < 1.25:
            return None
        self._told_s = self._interval_s
        share = lost_share(self._interval_s, costs, self._mtbf_s)
        return (
            f"checkpoints every {self._interval_s:,.0f} s from now on: a save holds the run up for {blocked_s:.2f} s "
            f"and is whole after {whole_s:.1f} s, a failure is expected every {self._mtbf_s / 3600:.1f} h and a "
            f"restart takes {self._restart_s:.0f} s: {share:.2%} of the time is lost to saves and failures"
        )
