"""What a person sees: exact lines in a pipe, one bar on a terminal, silence when nobody listens."""

import errno
import io
import re
import subprocess
import sys
import time

import pytest

from jaxtrain import progress as module
from jaxtrain.progress import Progress, Status, Transfer

RECORD = {
    "step": 120,
    "loss": 2.34119,
    "learning_rate": 3e-4,
    "grad_norm": 0.8129,
    "tokens_per_s": 12345.4,
    "mfu": None,
    "grad_norm_clipped": 0.5,
}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    encoding = "utf-8"

    def __init__(self):
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)

    def lines(self) -> list[str]:
        """What was drawn, frame after frame, without the codes that move the cursor and colour."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_a_pipe_gets_one_plain_line_per_record():
    out, clock = io.StringIO(), Clock()
    with Progress(1000, 0, out, clock=clock) as p:
        p.update(RECORD | {"step": 110})
        clock.now_s = 1.0
        p.update(RECORD)
        clock.now_s = 2.0
        p.update(RECORD | {"step": 130, "loss": float("nan"), "mfu": 0.4123, "skipped_steps": 2})
    assert out.getvalue().splitlines() == [
        "step 110/1000  loss 2.3412  lr 3.0e-04  grad 0.81  12,345 tokens/s  eta -",
        "step 120/1000  loss 2.3412  lr 3.0e-04  grad 0.81  12,345 tokens/s  eta 1m28s",
        "step 130/1000  loss nan  lr 3.0e-04  grad 0.81  12,345 tokens/s  mfu 41.2%  skipped 2  eta 1m27s",
    ]


def test_an_evaluation_is_a_line_of_its_own_and_a_bare_step_is_none():
    out = io.StringIO()
    p = Progress(50, 0, out)
    p.update({"step": 7})
    assert out.getvalue() == ""
    p.update({"step": 8, "eval/loss": 2.25, "eval/bits_per_byte": None, "eval/tokens": 2**40, "eval/top_1": 0.5})
    p.update({"eval/loss": 2.0})
    assert out.getvalue().splitlines() == [
        "step 8/50  eval loss 2.2500  eval bits/byte -  eval tokens 1099511627776  eval top 1 0.5000",
        "step 8/50  eval loss 2.0000",
    ]


def test_after_a_resume_the_time_left_counts_only_this_runs_speed():
    out, clock = io.StringIO(), Clock()
    p = Progress(1000, 900, out, clock=clock)
    clock.now_s = 5000.0  # restore and compilation
    p.update({"step": 901, "loss": 1.0})
    clock.now_s = 5040.0
    p.update({"step": 921, "loss": 1.0})  # 2 s a step, 79 to go
    assert out.getvalue().splitlines() == ["step 901/1000  loss 1.0000  eta -", "step 921/1000  loss 1.0000  eta 2m38s"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (83, "1m23s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86399.9, "1d00h"),
        (273600, "3d04h"),
    ],
)
def test_durations(seconds, text):
    assert module._duration(seconds) == text


@pytest.mark.parametrize(("total", "initial"), [(0, 0), (10, 11), (10, -1)])
def test_impossible_runs_are_refused(total, initial):
    with pytest.raises(ValueError, match=f"step {initial} of {total}"):
        Progress(total, initial, io.StringIO())


def test_messages_and_waits_are_plain_lines_in_a_pipe():
    out = io.StringIO()
    with Progress(10, 0, out) as p:
        p.message("hello [bold]")
        with p.status("compiling"):
            assert out.getvalue() == "hello [bold]\ncompiling ...\n"
    with Status("restoring step 5", out):
        pass
    assert out.getvalue() == "hello [bold]\ncompiling ...\nrestoring step 5 ...\n"


def test_lines_reach_the_pipe_at_once():
    raw = io.BytesIO()
    p = Progress(10, 0, io.TextIOWrapper(raw, encoding="utf-8", write_through=False))
    p.update({"step": 1, "loss": 1.0})
    assert raw.getvalue() == b"step 1/10  loss 1.0000  eta -\n"


def test_a_dumb_terminal_is_a_pipe(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Progress(10, 0, terminal) as p:
        p.update({"step": 1, "loss": 1.0})
    assert terminal.getvalue() == "step 1/10  loss 1.0000  eta -\n"


def test_a_closed_stream_makes_it_quiet_for_good():
    out = io.StringIO()
    p = Progress(10, 0, out)
    out.close()
    p.update({"step": 1, "loss": 1.0})
    p.message("nobody hears")
    p.close()
    with Progress(10, 0, out) as p, p.status("closed from the start"):
        p.update({"step": 1, "loss": 1.0})


def test_a_broken_pipe_makes_it_quiet_and_is_not_tried_again():
    class Broken(io.StringIO):
        tries = 0

        def write(self, text):
            self.tries += 1
            raise BrokenPipeError

    out = Broken()
    p = Progress(10, 0, out)
    for step in range(1, 5):
        p.update({"step": step, "loss": 1.0})
    assert out.tries == 1


def test_a_full_disk_costs_lines_only_while_it_is_full():
    class Disk(io.StringIO):
        full = True

        def write(self, text):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    out = Disk()
    p = Progress(10, 0, out)
    p.message("lost")
    out.full = False
    p.message("kept")
    assert out.getvalue() == "kept\n"


def test_a_stream_that_cannot_spell_gets_escapes():
    raw = io.BytesIO()
    p = Progress(10, 0, io.TextIOWrapper(raw, encoding="ascii"))
    p.message("Zürich")
    assert raw.getvalue() == b"Z\\xfcrich\n"


def test_a_reader_that_goes_away_changes_neither_the_run_nor_its_exit_status():
    code = (
        "from jaxtrain.progress import Progress\n"
        "with Progress(10**6) as p:\n"
        "    for step in range(1, 20000): p.update({'step': step, 'loss': 1.0})\n"
        "    import sys; print('alive', file=sys.stderr); print('lost')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "step 1/1000000  loss 1.0000  eta -\n"
    child.stdout.close()
    assert child.stderr.read() == "alive\n"
    child.stderr.close()
    assert child.wait() == 0


def test_a_pipe_needs_no_rich():
    code = (
        "import sys; from jaxtrain.progress import Progress, Status\n"
        "with Progress(9) as p, Status('x'): p.update({'step': 1, 'loss': 1.0}); p.message('m')\n"
        "print({'rich', 'jax', 'numpy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["x ...", "step 1/9  loss 1.0000  eta -", "m", "set()"]


def test_a_terminal_gets_one_bar_from_the_restored_step_on(terminal):
    clock = Clock()
    with Progress(1000, 500, terminal, clock=clock) as p:
        p.update(RECORD | {"step": 501, "mfu": 0.4123})
        clock.now_s = 10.0
        p.update({"step": 511, "loss": 1.5, "tokens_per_s": 2e6})
        p.update({"step": 511, "eval/loss": 1.0, "eval/bits_per_byte": 1.4427})
    first, last = terminal.lines()[0], terminal.lines()[-1]
    assert re.fullmatch(r"501/1000 [━╸╺]{40} eta -  loss 2.3412  12,345 tokens/s  mfu 41.2%", first)
    assert re.fullmatch(
        r"511/1000 [━╸╺]+ eta 8m09s  loss 1.5000  2,000,000 tokens/s  mfu 41.2%  eval 1.443 bits/byte", last
    )
    assert "\x1b[?25l" in terminal.getvalue(), "the cursor is hidden"
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "and comes back"


def test_a_classifier_is_shown_in_its_own_words(terminal):
    with Progress(10, 0, terminal, item="image") as p:
        p.update({"step": 1, "loss": 2.0, "tokens_per_s": 1234.0})
        p.update({"step": 2, "eval/loss": 0.5, "eval/accuracy": 0.975, "eval/tokens": 359})
    assert "1,234 images/s  eval 97.5% accuracy" in terminal.lines()[-1]
    out = io.StringIO()
    with Progress(10, 0, out, item="image") as p:
        p.update({"step": 1, "loss": 2.0, "tokens_per_s": 1234.0})
    assert "loss 2.0000  1,234 images/s  eta -" in out.getvalue()


def test_the_time_left_runs_down_between_updates(terminal):
    clock = Clock()
    p = Progress(100, 0, terminal, clock=clock)
    p._first, p._window, p._last_s = (10, 0.0), 20, 10.0  # one second a step, 80 to go at second 10
    clock.now_s = 10.0
    assert p._eta_s() == 80.0
    clock.now_s = 35.0
    assert p._eta_s() == 55.0
    clock.now_s = 1000.0
    assert p._eta_s() == 0.0


def test_evaluations_stay_above_the_bar_and_the_last_one_in_it(terminal):
    with Progress(10, 0, terminal) as p:
        for step, bits in ((1, 3.0), (2, 2.5)):
            p.update({"step": step, "loss": 2.0})
            p.update({"step": step, "eval/bits_per_byte": bits})
    shown = terminal.lines()
    for line in ("step 1/10  eval bits/byte 3.0000", "step 2/10  eval bits/byte 2.5000"):
        assert shown.count(line) == 1
    assert shown[-1].endswith("loss 2.0000  eval 2.500 bits/byte")


def test_skipped_windows_move_the_bar_and_are_no_steps(terminal):
    """Of 10 windows 8 are done, 3 of them skipped: 5 steps, and 2 windows of a second each are left."""
    clock, out = Clock(), io.StringIO()
    with Progress(10, 0, terminal, clock=clock) as bar, Progress(10, 0, out, clock=clock) as pipe:
        for window in range(1, 9):
            clock.now_s = float(window)
            record = {"step": min(window, 5), "window": window, "loss": 1.0, "skipped_steps": max(window - 5, 0)}
            bar.update(record)
            pipe.update(record)
    assert terminal.lines()[-1].startswith("5/10 ")
    assert "eta 2s" in terminal.lines()[-1]
    assert out.getvalue().splitlines()[-1] == "step 5/10  loss 1.0000  skipped 3  eta 2s"


def test_an_evaluation_in_nats_is_shown_where_there_are_no_bits(terminal):
    with Progress(10, 0, terminal) as p:
        p.update({"step": 1, "eval/loss": 2.0})
    assert terminal.lines()[-1].endswith("eta -  eval 2.0000")


@pytest.mark.parametrize(
    ("width", "after"),
    [
        (200, "eta -  loss 2.3412  12,345 tokens/s  mfu 41.2%  eval 1.000 bits/byte"),
        (88, "eta -  loss 2.3412  12,345 tokens/s  mfu 41.2%  eval 1.000 bits/byte"),
        (80, "eta -  loss 2.3412  12,345 tokens/s  eval 1.000 bits/byte"),
        (60, "eta -  loss 2.3412  eval 1.000 bits/byte"),
        (50, "eta -  loss 2.3412"),
        (30, "eta -"),
        (20, ""),
    ],
)
def test_a_narrow_terminal_loses_the_least_missed_part_first(terminal, monkeypatch, width, after):
    monkeypatch.setenv("COLUMNS", str(width))
    with Progress(1000, 0, terminal) as p:
        p.update(RECORD | {"mfu": 0.4123, "eval/bits_per_byte": 1.0})
    bars = [line for line in terminal.lines() if line.startswith("120/1000 ")]
    assert bars
    for line in bars:
        assert len(line) <= width
        assert re.fullmatch(rf"120/1000 [━╸╺]+ ?{re.escape(after)}", line)


def test_a_terminal_is_drawn_at_most_4_times_a_second(terminal):
    start_s = time.monotonic()
    updates = 0
    with Progress(10**9, 0, terminal) as p:
        while time.monotonic() - start_s < 0.8:
            updates += 1
            p.update({"step": updates, "loss": 1.0})
    frames = sum("eta" in line for line in terminal.lines())
    assert 3 <= frames <= 2 + 4 * (time.monotonic() - start_s)
    assert updates > 100 * frames
    assert terminal.lines()[-1].startswith(f"{updates}/1000000000 ")


def test_messages_and_prints_go_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    to_a_file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", to_a_file)
    long = "x" * 150 + " [red]not markup[/red]"
    with Progress(10, 0, terminal) as p:
        p.message("before the bar")
        p.update({"step": 1})
        p.message(long)
        print("a print")
        print("for the file", file=sys.stderr)
    assert sys.stdout is terminal
    p.message("after the bar")
    lines = terminal.lines()
    bar = next(line for line in lines if line.startswith("1/10 "))
    assert [line for line in lines if line != bar] == ["before the bar", long, "a print", "after the bar"]
    assert lines[-2] == bar
    assert to_a_file.getvalue() == "for the file\n"


def test_a_wait_inside_a_run_is_shown_in_the_bar(terminal):
    clock = Clock()
    with Progress(10, 0, terminal, clock=clock) as p:
        p.update({"step": 1})

        def fails():
            with p.status("evaluating [/all]"):
                clock.now_s = 7.0
                p._live.refresh()
                raise KeyError

        with pytest.raises(KeyError):
            fails()
    assert any(line.startswith("evaluating [/all] 7s  1/10 ") for line in terminal.lines())
    assert terminal.lines()[-1].startswith("1/10 ")


def test_a_wait_before_the_run_shows_the_seconds(terminal):
    clock = Clock()
    with Progress(10, 0, terminal, clock=clock) as p:
        with p.status("compiling [/step]"):
            clock.now_s = 31.0
        p.update({"step": 1})
    assert re.fullmatch(r"\S compiling \[/step\]  0s", terminal.lines()[0])
    assert "compiling [/step]  31s" in terminal.lines()
    assert terminal.lines()[-1].startswith("1/10 ")


def test_a_terminal_that_goes_away_is_no_error(terminal):
    p = Progress(10, 0, terminal)
    p.update({"step": 1})
    terminal.close()
    p.update({"step": 2})
    p.message("gone")
    time.sleep(0.3)  # the drawing thread comes by; its error would fail the test
    p.close()
    p.close()
    p.update({"step": 3})
    assert p._step == 2, "closed"


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_a_short_transfer_says_nothing(terminal):
    out = io.StringIO()
    for stream in (out, terminal):
        with Transfer("verifying 500", 100, stream) as told:
            told(100)
        assert stream.getvalue() == ""


def test_a_long_transfer_is_one_line_in_a_pipe(monkeypatch):
    monkeypatch.setattr(Transfer, "SILENT_S", 0.0)
    for total, line in ((3 * 2**30, "verifying 500, 3.0 GiB ...\n"), (None, "verifying 500 ...\n")):
        out = io.StringIO()
        with Transfer("verifying 500", total, out) as told:
            until(lambda out=out: out.getvalue())
            told(2**28)
        assert out.getvalue() == line


def test_a_long_transfer_is_a_bar_with_the_time_left_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setattr(Transfer, "SILENT_S", 0.0)
    with Transfer("verifying 500", 4 * 2**30, terminal) as told:
        told(2**30)
        until(lambda: "1.0 GiB of 4.0 GiB" in terminal.getvalue())
    assert re.search(r"verifying 500 .* 1\.0 GiB of 4\.0 GiB  \S+ \w+/s  \d+s left", terminal.lines()[-1])


def test_where_nobody_tells_a_terminal_sees_the_seconds(terminal, monkeypatch):
    monkeypatch.setattr(Transfer, "SILENT_S", 0.0)
    with Transfer("reading checkpoint 500", None, terminal):
        until(terminal.getvalue)
    assert re.fullmatch(r"reading checkpoint 500  \d+s", terminal.lines()[-1])


def until(true):
    """Wait for a thread."""
    late = time.monotonic() + 30
    while not true():
        assert time.monotonic() < late
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes(count, text):
    assert module.size(count) == text
