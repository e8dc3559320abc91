"""SIGTERM and Ctrl-C as a wish the loop can see: it finishes what it does, saves, and goes."""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Self


class Preemption:
    """While entered, the first SIGTERM or SIGINT sets ``requested``; a second Ctrl-C interrupts at once.

    A signal that is ignored stays ignored, as a shell wants it for Ctrl-C and what it runs in the background. Outside
    of the main thread Python allows no handlers: ``requested`` then changes only by ``request``.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._interrupted = False
        self._former: dict[int, object] = {}

    def request(self, why: str) -> None:
        """Ask the loop to save and stop; ``why`` is told to the user."""
        self.requested = self.requested or why

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.request("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
        more = "Ctrl-C again" if self._interrupted else "Ctrl-C twice"
        note = f"\n{self.requested}: saving, then stopping ({more}: at once, without a new save)\n"
        with contextlib.suppress(OSError):  # nobody listens: a closed terminal must not cost the checkpoint
            os.write(2, note.encode())  # print is not safe inside a handler
