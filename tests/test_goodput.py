"""Every second in exactly one phase, across restarts; all against a clock that the test turns."""

import json
import math
import subprocess
import sys
import time

import pytest

from jaxtrain import goodput as module
from jaxtrain.goodput import Goodput, Phase


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "work" / "goodput.json"


def spent(seconds: dict[Phase, float]) -> dict[str, float]:
    return {str(phase): s for phase, s in seconds.items() if s}


def test_the_phases_are_the_closed_list_of_the_design():
    assert " ".join(Phase) == "compile input step eval checkpoint restore rework idle"


def test_time_outside_of_phases_is_idle_and_the_sum_is_the_wall_time(path, clock):
    g = Goodput(path, clock)
    clock.passes(1)
    with g.phase(Phase.COMPILE):
        clock.passes(20)
    clock.passes(2)
    for _ in range(3):
        with g.phase(Phase.INPUT):
            clock.passes(0.5)
        with g.phase(Phase.STEP):
            clock.passes(10)
    with g.phase(Phase.CHECKPOINT):
        clock.passes(4)
    assert spent(g.attempt_seconds()) == {"idle": 3, "compile": 20, "input": 1.5, "step": 30, "checkpoint": 4}
    assert sum(g.attempt_seconds().values()) == clock.now_s - 1000
    assert set(g.attempt_seconds()) == set(Phase)
    g.save()
    assert json.loads(path.read_text())["goodput"] == 30 / 58.5


def test_an_inner_phase_interrupts_the_outer_one_also_itself(path, clock):
    g = Goodput(path, clock)
    with g.phase(Phase.EVAL):
        clock.passes(1)
        with g.phase(Phase.COMPILE):
            clock.passes(2)
            with g.phase(Phase.INPUT):
                clock.passes(4)
            clock.passes(8)
        with g.phase(Phase.EVAL):
            clock.passes(16)
        clock.passes(32)
    clock.passes(64)
    assert spent(g.attempt_seconds()) == {"eval": 1 + 16 + 32, "compile": 2 + 8, "input": 4, "idle": 64}


def test_an_exception_leaves_the_phase(path, clock):
    g = Goodput(path, clock)

    def fails_after(seconds):
        with g.phase(Phase.STEP), g.phase(Phase.INPUT):
            clock.passes(seconds)
            raise KeyError

    with pytest.raises(KeyError):
        fails_after(3)
    clock.passes(5)
    assert spent(g.attempt_seconds()) == {"input": 3, "idle": 5}


def test_an_open_phase_is_counted_up_to_now(path, clock):
    g = Goodput(path, clock)
    with g.phase(Phase.STEP):
        clock.passes(3)
        assert spent(g.attempt_seconds()) == {"step": 3}
        g.save()
        assert json.loads(path.read_text())["attempts"][0]["seconds"]["step"] == 3
        clock.passes(4)
    assert spent(g.attempt_seconds()) == {"step": 7}


def test_restarts_add_up_and_unsaved_and_down_time_is_not_counted(path, clock):
    g = Goodput(path, clock)
    with g.phase(Phase.STEP):
        clock.passes(100)
    g.reached(10)
    g.save()
    with g.phase(Phase.STEP):
        clock.passes(7)  # then killed: not saved
    clock.passes(3600)  # down

    g = Goodput(path, clock)
    assert (g.attempts, g.furthest_step) == (2, 10)
    with g.phase(Phase.RESTORE):
        clock.passes(20)
    g.reached(10)
    with g.phase(Phase.STEP):
        clock.passes(30)
    g.save()
    assert spent(g.attempt_seconds()) == {"restore": 20, "step": 30}
    assert spent(g.total_seconds()) == {"restore": 20, "step": 130}
    content = json.loads(path.read_text())
    assert [spent(a["seconds"]) for a in content["attempts"]] == [{"step": 100}, {"restore": 20, "step": 30}]
    assert [a["last_step"] for a in content["attempts"]] == [10, 10]
    assert (content["furthest_step"], content["goodput"]) == (10, 130 / 150)
    assert spent(content["total_seconds"]) == {"restore": 20, "step": 130}


def test_an_attempt_killed_at_once_is_an_attempt(path, clock):
    for n in (1, 2, 3):
        assert Goodput(path, clock).attempts == n


def run_steps(g: Goodput, clock: Clock, first: int, last: int, seconds: float) -> None:
    for step in range(first, last + 1):
        with g.phase(Phase.STEP):
            clock.passes(seconds)
        g.reached(step)


def test_steps_that_a_former_attempt_had_done_are_rework(path, clock):
    g = Goodput(path, clock)
    run_steps(g, clock, 1, 10, seconds=2)
    g.save()
    g = Goodput(path, clock)
    g.reached(6)  # restored
    run_steps(g, clock, 7, 13, seconds=3)
    assert spent(g.attempt_seconds()) == {"rework": 4 * 3, "step": 3 * 3}
    assert g.furthest_step == 13
    g.save()
    assert json.loads(path.read_text())["goodput"] == (20 + 9) / (20 + 21)
    g = Goodput(path, clock)
    g.reached(13)
    run_steps(g, clock, 14, 14, seconds=5)
    assert spent(g.attempt_seconds()) == {"step": 5}


def test_a_fresh_start_over_an_old_file_is_all_rework_up_to_the_old_end(path, clock):
    g = Goodput(path, clock)
    run_steps(g, clock, 1, 3, seconds=1)
    g.save()
    g = Goodput(path, clock)
    run_steps(g, clock, 1, 4, seconds=1)
    assert spent(g.attempt_seconds()) == {"rework": 3, "step": 1}


def test_rework_can_be_told_of_steps_that_were_never_saved(path, clock):
    g = Goodput(path, clock)
    run_steps(g, clock, 1, 10, seconds=1)
    g.save()
    g = Goodput(path, clock)
    g.reached(8)
    g.rework(12)
    g.rework(3)  # less than what is known changes nothing
    run_steps(g, clock, 9, 14, seconds=1)
    assert spent(g.attempt_seconds()) == {"rework": 4, "step": 2}
    g.save()
    assert Goodput(path, clock).furthest_step == 14


def test_what_is_told_to_rework_survives_a_kill_before_it_is_reached(path, clock):
    g = Goodput(path, clock)
    g.rework(12)
    g.save()
    g = Goodput(path, clock)
    g.reached(11)
    run_steps(g, clock, 12, 13, seconds=1)
    assert spent(g.attempt_seconds()) == {"rework": 1, "step": 1}


def test_save_leaves_the_old_file_when_it_fails(path, clock, monkeypatch):
    g = Goodput(path, clock)
    before = path.read_bytes()
    clock.passes(5)

    def fails(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        g.save()
    assert path.read_bytes() == before


GOOD = {"format": 1, "attempts": [{"seconds": dict.fromkeys(Phase, 1.0), "last_step": 2}], "furthest_step": 2}


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        json.dumps(GOOD | {"format": 2}).encode(),
        json.dumps(GOOD | {"furthest_step": None}).encode(),
        json.dumps(GOOD | {"furthest_step": math.inf}).encode(),
        json.dumps(GOOD | {"attempts": [{"seconds": {"step": 1.0}, "last_step": 2}]}).encode(),
        json.dumps(GOOD | {"attempts": [{"seconds": dict.fromkeys(Phase, -1.0), "last_step": 2}]}).encode(),
        json.dumps(GOOD | {"attempts": [{"seconds": {"lunch": 1.0}, "last_step": 2}]}).encode(),
        json.dumps(GOOD | {"attempts": ["step"]}).encode(),
    ],
)
def test_a_broken_file_is_kept_aside_with_one_warning(path, clock, broken):
    path.parent.mkdir()
    path.write_bytes(broken)
    with pytest.warns(
        RuntimeWarning, match=r"goodput\.json is not a goodput file .* kept as goodput\.json\.bad"
    ) as seen:
        g = Goodput(path, clock)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert path.with_name("goodput.json.bad").read_bytes() == broken
    assert (g.attempts, g.furthest_step) == (1, 0)
    assert Goodput(path, clock).attempts == 2


def test_the_good_form_of_the_broken_files_is_read(path, clock):
    path.parent.mkdir()
    path.write_text(json.dumps(GOOD))
    g = Goodput(path, clock)
    assert (g.attempts, g.furthest_step, sum(g.total_seconds().values())) == (2, 2, 8.0)


def test_before_any_time_has_passed_there_is_no_goodput_and_no_error(path, clock):
    Goodput(path, clock).save()
    assert json.loads(path.read_text())["goodput"] == 0.0


def test_the_real_clock_agrees_with_the_wall_time(path):
    start_s = time.perf_counter()
    g = Goodput(path)
    with g.phase(Phase.EVAL):
        time.sleep(0.05)
    seconds = g.attempt_seconds()
    assert seconds[Phase.EVAL] >= 0.05
    assert seconds[Phase.EVAL] <= sum(seconds.values()) <= time.perf_counter() - start_s + 1e-6


def test_importing_loads_nothing_heavy():
    code = "import sys, jaxtrain.goodput; print({'jax', 'numpy', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
