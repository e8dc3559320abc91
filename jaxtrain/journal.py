"""What the loop knows of itself on the host, and who is told: the only reader of the devices, exact counts, times."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from jaxtrain import hardware, metrics
from jaxtrain.assemble import Experiment
from jaxtrain.goodput import Goodput, Phase
from jaxtrain.progress import Progress
from jaxtrain.step import StepMetrics
from jaxtrain.workdir import Workdir

_GOODPUT_EVERY_S = 10.0


class MetricsReader:
    """The only way from the devices to the loop: each step's metrics, when the next step is running."""

    def __init__(self) -> None:
        self._pending: StepMetrics | None = None

    def push(self, new: StepMetrics) -> dict[str, float | int] | None:
        """Take the metrics of the step just dispatched; wait for the one before and return its record."""
        before, self._pending = self._pending, new
        return None if before is None else before.to_host()

    def drain(self) -> dict[str, float | int] | None:
        """Wait for the last step and return its record, once."""
        last, self._pending = self._pending, None
        return None if last is None else last.to_host()


class Journal:
    """What the loop knows of itself on the host: exact counts of the last finished window, and who is told."""

    def __init__(
        self, experiment: Experiment, workdir: Workdir, goodput: Goodput, start: dict[str, int],
        callbacks: Sequence[metrics.Callback], stream: TextIO | None,
    ) -> None:  # fmt: skip
        self.experiment = experiment
        self.window, self.step = start["window"], start["step"]
        self.micro_step, self.tokens = start["micro_step"], start["tokens"]
        self._goodput, self._config = goodput, experiment.config
        resumed = self.step if self.window else None
        lines = metrics.JsonlWriter(workdir.path / "metrics.jsonl", resumed, self.micro_step)
        goodput.rework(lines.furthest_step)  # younger than what goodput.json knows
        told = lines.last_evaluation or {}
        self._evaluated, self._told_tokens = (told.get("step"), told.get("micro_step")), told.get("eval/tokens")
        self._trackers: list[metrics.Callback] = [
            lines,
            metrics.TensorBoardWriter(workdir.path / "tensorboard", resumed),
            *callbacks,
        ]
        goodput.reached(self.step)
        self._before_s = math.fsum(goodput.total_seconds().values())
        self._progress = Progress(
            self._config.steps, min(self.window, self._config.steps), stream, item=experiment.task.item
        )
        self._opened_s = self._saved_goodput_s = time.perf_counter()
        self._since: tuple[float, int, int, int] | None = None  # time, window, micro_step, tokens of the last line
        self._paused_s = self._waited_s = 0.0
        device = experiment.program.mesh.devices.flat[0]
        self._device_kind, self._devices = device.device_kind, experiment.program.mesh.size
        self._compiled = self._doubted = False
        self._newest: dict[str, Any] | None = None
        self._written = True

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self._progress.close()
        with contextlib.ExitStack() as stack:  # all of them, and what is on its way out stays what comes out
            if kind is not None:
                stack.enter_context(contextlib.suppress(Exception))
            for tracker in self._trackers[:2]:
                stack.callback(tracker.close)

    def say(self, text: str) -> None:
        self._progress.message(text)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with self._goodput.phase(Phase.COMPILE), self._progress.status("compiling the step"):
            yield
        self._compiled = True
        self._since = (time.perf_counter(), self.window, self.micro_step, self.tokens)
        self._paused_s = self._waited_s = 0.0

    def dispatch(self) -> contextlib.AbstractContextManager:
        """Around a step: the first one compiles."""
        return self._goodput.phase(Phase.STEP) if self._compiled else self._compiling()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training and must not count in tokens/s."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def log(self, record: dict[str, Any] | None, always: bool = False) -> None:
        """Take a record, write a line at the cadence (or ``always``), stop a run that only skips.

        Raises NonFiniteError, see ``Program.check``.
        """
        if self._take(record, always):
            self.experiment.program.check(record)

    def log_last(self, reader: MetricsReader) -> None:
        """The last record of a run that ends by an exception, which nothing that happens here may replace."""
        with contextlib.suppress(Exception):
            self._take(reader.drain(), always=True)

    def _take(self, record: dict[str, Any] | None, always: bool) -> bool:
        """Whether the record completes a window; ``always`` also writes one taken before that has no line yet."""
        if record is None or not record["window_done"]:
            if always and not self._written:
                self._write(self._newest)
            return False
        self.window, self.step = record["window"], record["step"]
        self.micro_step, self.tokens = record["micro_step"], record["tokens"]
        self._goodput.reached(self.step)
        self._newest, self._written = record, False
        self._progress.update({"step": self.step, "window": self.window})  # moves the bar; a pipe sees lines only
        if always or self.window % self._config.log_every_steps == 0 or record["skipped_in_a_row"]:
            self._write(record)
        return True

    def _write(self, record: dict[str, Any]) -> None:
        line = self._line(record)
        self._written = True
        for tracker in self._trackers:
            tracker.on_log(line)
        self._progress.update(line | {"window": self.window})

    def _line(self, record: dict[str, Any]) -> dict[str, Any]:
        now = time.perf_counter()
        began, window, micro_step, tokens = self._since
        windows = max(self.window - window, 1)
        spent_s = max(now - began - self._paused_s, 1e-9)
        samples = (self.micro_step - micro_step) * self.experiment.micro_batch_size
        hidden = ("window", "window_done", "skipped_in_a_row", "bad_leaf", "weight")
        line = {name: value for name, value in record.items() if name not in hidden}
        line |= {
            "samples": self.micro_step * self.experiment.micro_batch_size,
            "tokens_per_s": (self.tokens - tokens) / spent_s,
            "step_s": spent_s / windows,
            "input_wait_s": self._waited_s / windows,
            "mfu": self._mfu(samples * self.experiment.task.flops_per_row / spent_s),
            "time_s": self._before_s + now - self._opened_s,
        }
        self._since = (now, self.window, self.micro_step, self.tokens)
        self._paused_s = self._waited_s = 0.0
        if now - self._saved_goodput_s > _GOODPUT_EVERY_S:
            self._goodput.save()
            self._saved_goodput_s = now
        return line

    def _mfu(self, flops_per_s: float) -> float | None:
        try:
            return hardware.mfu(flops_per_s, self._device_kind, self._config.precision.compute, self._devices)
        except ValueError as error:  # above 1: a wrong catalogue, or two lines so close that the clock says nothing
            if not self._doubted:
                self.say(f"mfu is not known: {error}")
            self._doubted = True
            return None

    def is_evaluated(self) -> bool:
        """Whether the state as it is has a line of evaluation."""
        return self._evaluated == (self.step, self.micro_step)

    def evaluated(self, evaluation: dict[str, float] | None) -> None:
        """Tell an evaluation of the state as it is; None (abandoned) and one that is told already are not."""
        told = self.is_evaluated() and evaluation is not None and evaluation["eval/tokens"] == self._told_tokens
        if evaluation is None or told:
            return
        self._told_tokens = evaluation["eval/tokens"]
        self._evaluated = (self.step, self.micro_step)
        line = {
            "step": self.step,
            "micro_step": self.micro_step,
            **evaluation,
            "time_s": self._before_s + time.perf_counter() - self._opened_s,
        }
        for tracker in self._trackers:
            tracker.on_eval(line)
        self._progress.update(line | {"window": self.window})

    def saved(self, path: Any) -> None:
        for tracker in self._trackers:
            tracker.on_save(self.step, path)
        self._goodput.save()

    def end(self, finished: bool) -> None:
        summary = {"step": self.step, "window": self.window, "tokens": self.tokens, "finished": finished}
        for tracker in self._trackers:
            tracker.on_end(summary)
