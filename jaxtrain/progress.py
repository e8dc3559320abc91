"""What a person sees of a run: one bar on a terminal, plain lines in a pipe, a log file or CI.

Nothing here can stop a run: a reader that went away (``jaxtrain train | head``) makes it quiet.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from jaxtrain.metrics import Record

if TYPE_CHECKING:
    from rich.live import Live

REFRESH_PER_SECOND = 4  # of a terminal
_BAR_WIDTHS = (10, 40)  # smallest and largest, in characters


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a line to ``stream`` (stdout unless given); a reader that went away or a narrow encoding is no error."""
    _Stream(stream).line(text)


class Progress:
    """Shows how far a run of ``total`` windows is, from window ``initial`` (the restored one) on.

    ``stream`` is stdout unless given. A terminal gets one bar with step, time left, loss, tokens/s, MFU and the last
    evaluation, redrawn at most 4 times a second by a thread, and a line above it for each evaluation; the bar appears
    at the first :meth:`update`. Any other stream gets one line per record. Names it knows: ``step`` (applied updates),
    ``window`` (those done, skipped ones too; ``step`` where it is not given), ``loss``, ``learning_rate``,
    ``grad_norm``, ``tokens_per_s``, ``mfu`` (a fraction of 1), ``skipped_steps``, ``eval/<anything>``; a record of
    ``step`` and ``window`` alone moves the bar and prints no line. The time left counts the speed since the first
    update of this run, evaluations and saves included and the first compilation not. ``item``: what a token is called.
    ``clock`` gives seconds.

    Raises ValueError unless 0 <= initial <= total and total >= 1.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        stream: TextIO | None = None,
        *,
        item: str = "token",
        clock: Callable[[], float] = time.monotonic,
    ):
        if not (total >= 1 and 0 <= initial <= total):
            raise ValueError(f"cannot show step {initial} of {total} steps")
        self._total, self._window, self._step = total, initial, initial
        self._stream = _Stream(stream)
        self._clock = clock
        self._show = _PLAIN | {"tokens_per_s": lambda v: f"{_or_dash(v, ',.0f')} {item}s/s"}
        self._first: tuple[int, float] | None = None  # window and second of this run's first update
        self._last_s = 0.0
        self._shown: dict[str, float | int | None] = {}  # the newest value of each name
        self._status: tuple[str, float] | None = None
        self._live: Live | None = None
        self._closed = False

    def update(self, record: Record) -> None:
        """Takes the numbers of one window or evaluation; unknown names are ignored. A closed one takes nothing."""
        if self._closed:
            return
        self._last_s = self._clock()
        if (step := record.get("step")) is not None:
            self._step, self._window = int(step), int(record.get("window", step))
        if self._first is None:
            self._first = (self._window, self._last_s)
        if self._stream.terminal:
            self._shown.update(record)
            if self._live is None:
                self._live = _start_live(self._stream, self._render)
            if any(name.startswith("eval/") for name in record):
                self.message(self._plain(record))
        elif record.keys() - {"step", "window"}:
            self._stream.line(self._plain(record))

    def message(self, text: str) -> None:
        """Prints a line of text, above the bar where there is one."""
        if self._live is None:
            self._stream.line(text)
        else:
            from rich.text import Text  # only terminals need rich

            self._live.console.print(Text(text), soft_wrap=True)

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Says what a long wait is for: in the bar where there is one, else as :class:`Status` does."""
        if self._live is None:
            with Status(text, self._stream.wrapped, clock=self._clock):
                yield
            return
        self._status = (text, self._clock())
        try:
            yield
        finally:
            self._status = None

    def close(self) -> None:
        """Leaves the bar as it is and gives the terminal back; a second call does nothing."""
        self._closed = True
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _eta_s(self) -> float | None:
        """Seconds left at the speed of this run, None before there is one."""
        if self._first is None or self._window <= self._first[0]:
            return None
        seconds_per_window = (self._last_s - self._first[1]) / (self._window - self._first[0])
        return max(0.0, (self._total - self._window) * seconds_per_window - (self._clock() - self._last_s))

    def _plain(self, record: Record) -> str:
        parts = [f"step {self._step}/{self._total}"]
        for name, show in self._show.items():
            if name in record and (name != "mfu" or record[name] is not None):  # most chips at hand have none
                parts.append(show(record[name]))
        if skipped := record.get("skipped_steps"):
            parts.append(f"skipped {skipped}")
        for name, value in record.items():
            if name.startswith("eval/"):
                label = name.removeprefix("eval/").replace("bits_per_byte", "bits/byte").replace("_", " ")
                parts.append(f"eval {label} {_or_dash(value, '.4f' if isinstance(value, float) else '')}")
        if "loss" in record:
            parts.append(f"eta {_duration(self._eta_s())}")
        return "  ".join(parts)

    def _parts(self, width: int) -> tuple[str, int, str]:
        """(text before the bar, width of the bar, text after it) for a terminal of ``width`` characters."""
        before = f"{self._step}/{self._total}"
        if (status := self._status) is not None:  # read once: the drawing thread runs this too
            text, since_s = status
            before = f"{text} {self._clock() - since_s:.0f}s  {before}"
        after = {"eta": f"eta {_duration(self._eta_s())}"}
        for name in ("loss", "tokens_per_s", "mfu"):
            if self._shown.get(name) is not None:
                after[name] = self._show[name](self._shown[name])
        for name, spec in _SCORES.items():
            if (value := self._shown.get(f"eval/{name}")) is not None:
                after["eval"] = f"eval {value:{spec[0]}}{spec[1]}"
                break
        for least_missed in ("mfu", "tokens_per_s", "eval", "loss", "eta"):
            room = width - len(before) - len("  ".join(after.values())) - 2
            if room >= _BAR_WIDTHS[0]:
                break
            after.pop(least_missed, None)
        room = width - len(before) - len("  ".join(after.values())) - 2
        return before, max(1, min(room, _BAR_WIDTHS[1])), "  ".join(after.values())

    def _render(self, width: int) -> Any:
        from rich.progress_bar import ProgressBar  # only terminals need rich
        from rich.table import Table  # only terminals need rich
        from rich.text import Text  # only terminals need rich

        before, bar_width, after = self._parts(width)
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        grid.add_row(Text(before), ProgressBar(total=self._total, completed=self._window, width=bar_width), Text(after))
        return grid


class Status:
    """A context for a long wait, such as a compilation: ``with Status("compiling the step"): ...``.

    A terminal sees the text with the seconds so far, and at the end how long it took; any other stream gets one line
    at the start. Not inside a :class:`Progress` that shows its bar: its :meth:`Progress.status` is for that.
    """

    def __init__(self, text: str, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._text = text
        self._stream = _Stream(stream)
        self._clock = clock
        self._since_s = 0.0
        self._spinner: Any = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._since_s = self._clock()
        if self._stream.terminal:
            from rich.spinner import Spinner  # only terminals need rich

            self._spinner = Spinner("dots" if self._stream.encoding.lower().startswith("utf") else "line")
            self._live = _start_live(self._stream, self._render)
        else:
            self._stream.line(f"{self._text} ...")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._spinner = None
            self._live.stop()

    def _render(self, width: int) -> Any:
        from rich.text import Text  # only terminals need rich

        text = Text(f"{self._text}  {self._clock() - self._since_s:.0f}s")
        spinner = self._spinner
        if spinner is None:
            return text
        spinner.update(text=text)
        return spinner


class Transfer:
    """A context for bytes that are read or copied: ``with Transfer("verifying", total) as told: read(on_bytes=told)``.

    Nothing is shown in the first two seconds. Then a terminal sees a bar with the time that is left, and any other
    stream gets one line.

    Args:
        total_bytes: how many there will be; None: nobody tells, and a terminal sees the seconds so far.
    """

    SILENT_S = 2.0

    def __init__(self, text: str, total_bytes: int | None = None, stream: TextIO | None = None) -> None:
        self._text, self._total, self._done = text, total_bytes, 0
        self._stream, self._since_s = _Stream(stream), time.monotonic()
        self._lock, self._over = threading.Lock(), False
        self._live: Live | None = None
        self._timer = threading.Timer(self.SILENT_S, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __call__(self, count: int) -> None:
        """So many bytes more; from any thread."""
        with self._lock:
            self._done += count

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._live is not None:
            self._live.stop()

    def _begin(self) -> None:
        with self._lock:
            if self._over:
                return
            if self._stream.terminal:
                self._live = _start_live(self._stream, self._render)
            else:
                self._stream.line(self._text + (f", {size(self._total)}" if self._total else "") + " ...")

    def _render(self, width: int) -> Any:
        from rich.progress_bar import ProgressBar  # only terminals need rich
        from rich.table import Table  # as above
        from rich.text import Text  # as above

        done, passed_s = self._done, max(time.monotonic() - self._since_s, 1e-9)
        if self._total is None:
            return Text(f"{self._text}  {passed_s:.0f}s")
        eta_s = (self._total - done) * passed_s / done if done else None
        after = f"{size(done)} of {size(self._total)}  {size(done / passed_s)}/s  {_duration(eta_s)} left"
        bar = ProgressBar(total=self._total or None, completed=done, width=max(8, min(30, width - 70)))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text(self._text), bar, Text(after))
        return grid


class _Stream:
    """A text stream that is safe to write to: when the reader is gone or the stream is closed it goes quiet."""

    def __init__(self, stream: TextIO | None):
        self.wrapped = sys.stdout if stream is None else stream
        self.encoding = getattr(self.wrapped, "encoding", None) or "utf-8"  # rich asks
        self._quiet = self.wrapped is None or getattr(
            self.wrapped, "closed", False
        )  # pythonw and some daemons have no stdout
        self.terminal = not self._quiet and self.wrapped.isatty() and os.environ.get("TERM") != "dumb"

    def line(self, text: str) -> None:
        self.write(text + "\n")
        self.flush()

    def write(self, text: str) -> int:
        try:
            if not self._quiet:
                self.wrapped.write(text)
        except UnicodeEncodeError:  # a ValueError too, but of the text
            self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError) as error:
            self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            if not self._quiet:
                self.wrapped.flush()
        except (OSError, ValueError) as error:
            self._fall_silent(error)

    def isatty(self) -> bool:
        return self.terminal

    def _fall_silent(self, error: Exception) -> None:
        self._quiet = not isinstance(error, OSError) or isinstance(error, BrokenPipeError)  # a full disk may recover
        if isinstance(error, BrokenPipeError) and self.wrapped in (sys.__stdout__, sys.__stderr__):
            # Python flushes what is left at exit, fails again and makes the exit status 120, see
            # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.wrapped.fileno())
            os.close(devnull)


def _start_live(stream: _Stream, render: Callable[[int], Any]) -> "Live":
    """A region at the bottom of the terminal that shows ``render(width in characters)``."""
    from rich.console import Console  # only terminals need rich
    from rich.live import Live  # only terminals need rich

    console = Console(file=stream, force_terminal=True)  # type: ignore[arg-type]
    live = Live(
        get_renderable=lambda: render(console.width),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
        redirect_stdout=_is_terminal(sys.stdout),  # prints go above the bar, unless they go to a file
        redirect_stderr=_is_terminal(sys.stderr),
    )
    live.start(refresh=True)
    return live


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _or_dash(value: float | int | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def size(count: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _duration(seconds: float | None) -> str:
    """``45s``, ``1m23s``, ``2h05m``, ``3d04h``; a dash for None."""
    if seconds is None:
        return "-"
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


_PLAIN: dict[str, Callable[[float | int | None], str]] = {
    "loss": lambda v: f"loss {_or_dash(v, '.4f')}",
    "learning_rate": lambda v: f"lr {_or_dash(v, '.1e')}",
    "grad_norm": lambda v: f"grad {_or_dash(v, '.2f')}",
    "tokens_per_s": lambda v: f"{_or_dash(v, ',.0f')} tokens/s",
    "mfu": lambda v: f"mfu {_or_dash(v, '.1%')}",
}
_SCORES = {  # the first that an evaluation has is what the bar shows
    "bits_per_byte": (".3f", " bits/byte"),
    "accuracy": (".1%", " accuracy"),
    "loss": (".4f", ""),
}
