"""Signals become a wish, once; a second Ctrl-C is an order; outside of the block all is as before."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxtrain.preemption import Preemption

SIGNALS = [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]

CHILD = """
import os, sys, time
from jaxtrain.preemption import Preemption
if "no_stderr" in sys.argv:
    os.close(2)
if "broken_stderr" in sys.argv:
    end, begin = os.pipe()
    os.close(end)
    os.dup2(begin, 2)
with Preemption() as preemption:
    print("ready", flush=True)
    limit = time.monotonic() + 60
    while preemption.requested is None and time.monotonic() < limit:
        time.sleep(0.005)
    print(preemption.requested, flush=True)
    if "linger" in sys.argv:
        time.sleep(60)
print("saved", flush=True)
"""


def child(*words: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_PRE_01_a_process_that_is_signalled_finishes_and_saves(number, name):
    process = child()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{name}\nsaved\n")
    more = {"SIGTERM": "Ctrl-C twice", "Ctrl-C": "Ctrl-C again"}[name]
    assert err == f"\n{name}: saving, then stopping ({more}: at once, without a new save)\n"


@pytest.mark.parametrize("stderr", ["no_stderr", "broken_stderr"])
def test_PRE_01_the_wish_is_heard_where_nobody_listens(stderr):
    """A closed terminal, or a reader of the log that has gone, must not cost the checkpoint."""
    process = child(stderr)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "SIGTERM\nsaved\n", "")


def test_a_second_ctrl_c_stops_a_process_at_once_and_a_second_sigterm_does_not():
    process = child("linger")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "Ctrl-C\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # Python's own end of an uncaught KeyboardInterrupt
    assert out == ""
    assert "KeyboardInterrupt" in err


@pytest.fixture(autouse=True)
def handlers_are_restored():
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    yield
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_the_first_signal_is_remembered(number, name, capfd):
    with Preemption() as preemption:
        assert preemption.requested is None
        os.kill(os.getpid(), number)
        assert preemption.requested == name
        os.kill(os.getpid(), signal.SIGTERM)
        preemption.request("something else")
        assert preemption.requested == name
    assert preemption.requested == name
    assert capfd.readouterr().err.startswith(f"\n{name}: saving, then stopping")


def test_a_second_ctrl_c_is_an_interrupt(capfd):
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert preemption.requested == "Ctrl-C"
    assert capfd.readouterr().err.count("saving, then stopping") == 1


def test_a_supervisor_that_sends_both_signals_costs_no_save(capfd):
    """SIGTERM and then one Ctrl-C: still a wish; the second Ctrl-C is the order."""
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "Ctrl-C twice: at once" in capfd.readouterr().err


def test_handlers_come_back_also_after_an_exception_and_in_nesting(capfd):
    seen = []
    mine = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        outer, inner = Preemption(), Preemption()
        with pytest.raises(ZeroDivisionError), outer, inner:  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            raise ZeroDivisionError
        assert (outer.requested, inner.requested) == (None, "SIGTERM")
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == ["mine"]
    finally:
        signal.signal(signal.SIGTERM, mine)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_was_ignored_stays_ignored():
    """Shells' background jobs ignore SIGINT; Python then has SIG_IGN. Ctrl-C is meant for what runs in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGINT)
            assert preemption.requested is None
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_only_request_asks():
    found = []

    def run() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with Preemption() as preemption:
            found.append(signal.getsignal(signal.SIGTERM) is before)
            found.append(preemption.requested)
            preemption.request("maintenance")
            preemption.request("later")
        found.append(preemption.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert found == [True, None, "maintenance"]


def test_it_can_be_entered_again(capfd):
    preemption = Preemption()
    for _ in range(2):
        with preemption:
            pass
    with preemption:
        os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.requested == "SIGTERM"
