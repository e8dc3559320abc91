"""How often to save: Young's and Daly's numbers, a simulation that knows no formula, and the clock's decisions."""

import math
import random

import pytest

from jaxtrain.cadence import Cadence, Costs, Failures, lost_share, optimum_s


def test_young_and_daly():
    """Daly (2006), eq. 37, for d = 5 min and M = 24 h: sqrt(2 * 300 * 86400) = 7200 s, corrected 7200 * (1 +
    sqrt(300 / 172800) / 3 + 300 / 172800 / 9) - 300 = 7001.4 s."""
    assert optimum_s(Costs(300, 300, 0), 86400) == pytest.approx(7200 * (1 + 1 / 72 + 1 / 5184) - 300)
    assert optimum_s(Costs(300, 300, 0), 86400) == pytest.approx(7001.4, abs=0.1)
    assert optimum_s(Costs(1.0, 1.0, 0), 1e6) == pytest.approx(math.sqrt(2e6), rel=2e-3)
    assert optimum_s(Costs(300, 300, 0), 100) == 300  # more failures than saves: all that is left is the time of a save


def test_never_more_often_than_a_save_takes_to_be_whole():
    assert optimum_s(Costs(0.01, 90, 0), 3600) == 90
    assert optimum_s(Costs(0.0, 2.0, 0), 3600) == 2


def simulated_loss(interval_s, costs, mtbf_s, rng, steps_s=2e5):
    """The share of wall time that was no new work, in a run with failures drawn from an exponential law.

    Work is saved as it is when a save begins; the save holds the run up for ``blocked_s`` and is of use from
    ``whole_s`` on. No formula of the library is used.
    """
    now, done, safe = 0.0, 0.0, 0.0
    pending: list[tuple[float, float]] = []  # (when it is whole, work in it)
    failure = rng.expovariate(1 / mtbf_s)
    while done < steps_s:
        step_end = now + interval_s
        if failure < step_end + costs.blocked_s:
            ready = [work for when, work in pending if when <= failure]
            safe = max([safe, *ready])
            now, done, pending = failure + costs.restart_s, safe, []
            failure = now + rng.expovariate(1 / mtbf_s)
            continue
        done += interval_s
        now = step_end + costs.blocked_s
        pending.append((step_end + costs.whole_s, done))
        safe = max([safe, *(work for when, work in pending if when <= now)])
        pending = [(when, work) for when, work in pending if when > now]
    return 1 - done / now


@pytest.mark.parametrize("mtbf_s", [1800.0, 7200.0, 36000.0])
def test_the_optimum_loses_less_than_half_and_double_the_interval(mtbf_s):
    costs = Costs(blocked_s=20.0, whole_s=25.0, restart_s=60.0)
    best = optimum_s(costs, mtbf_s)

    def mean_loss(interval_s):
        rng = random.Random(7)
        return sum(simulated_loss(interval_s, costs, mtbf_s, rng) for _ in range(60)) / 60

    losses = {factor: mean_loss(best * factor) for factor in (0.5, 1.0, 2.0)}
    assert losses[1.0] < losses[0.5], losses
    assert losses[1.0] < losses[2.0], losses
    assert lost_share(best, costs, mtbf_s) == pytest.approx(losses[1.0], rel=0.2)


def test_failures_are_learned_with_one_a_day_assumed():
    assert Failures(0, 0.0).mtbf_s == 86400
    assert Failures(3, 4 * 3600.0).mtbf_s == (4 * 3600 + 86400) / 4
    assert Failures(100, 1e6).mtbf_s == pytest.approx(1e4, rel=0.1)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def due(cadence, clock, windows, window_s=1.0):
    """After which windows a save was due; each window takes a second."""
    found = []
    for done in range(1, windows + 1):
        clock.now += window_s
        if cadence.due(done):
            found.append(done)
            cadence.began()
    return found


def test_steps_and_seconds_are_counted_side_by_side():
    clock = Clock()
    assert due(Cadence(every_steps=4, clock=clock), clock, 13) == [4, 8, 12]
    assert due(Cadence(clock=clock), clock, 50) == []
    assert due(Cadence(every_s=5.0, clock=clock), clock, 13) == [5, 10]
    assert due(Cadence(every_steps=7, every_s=3.0, clock=clock), clock, 12) == [3, 6, 7, 10]


def test_auto_measures_first_then_takes_the_optimum_and_says_why():
    clock = Clock()
    cadence = Cadence(every_steps=3, auto=True, mtbf_s=3600.0, restart_s=40.0, clock=clock)
    assert due(cadence, clock, 60) == [60]
    sentence = cadence.measured(2.0, 10.0)
    best = optimum_s(Costs(2.0, 10.0, 40.0), 3600.0)
    assert 110 < best < 125
    assert sentence.startswith(
        f"checkpoints every {best:.0f} s from now on: a save holds the run up for 2.00 s and is "
    )
    assert "a failure is expected every 1.0 h and a restart takes 40 s" in sentence
    assert f"{lost_share(best, Costs(2.0, 10.0, 40.0), 3600.0):.2%} of the time is lost" in sentence
    assert due(cadence, clock, 250) == [math.ceil(best), 2 * math.ceil(best)]
    assert cadence.measured(2.1, 10.0) is None  # nearly the same
    assert "every 600 s" in cadence.measured(2.0, 600.0)
    assert Cadence(every_s=3.0, clock=clock).measured(2.0, 600.0) is None


def test_several_processes_look_at_the_clock_together():
    """Each asks at the same windows, and takes process 0's answer."""
    clock, asked = Clock(), []
    agree = lambda now: asked.append(now) or len(asked) == 3  # noqa: E731
    cadence = Cadence(every_s=1.0, processes=2, agree=agree, clock=clock)
    assert due(cadence, clock, 45) == [30]
    assert asked == [True] * 4
