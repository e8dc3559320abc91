"""jaxtrain/journal.py: the one-step-late reader, and what a line says, worked out by hand on an injected clock."""

import io
import json
import types

import pytest

from jaxtrain import journal
from jaxtrain.goodput import Goodput
from jaxtrain.journal import Journal, MetricsReader
from jaxtrain.metrics import CallbackBase, read_jsonl


class Metrics:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def to_host(self):
        self.events.append(self.name)
        return {"name": self.name}


def test_the_reader_waits_for_the_step_before():
    events, reader = [], MetricsReader()
    assert reader.drain() is None
    assert reader.push(Metrics("a", events)) is None
    assert events == []
    assert reader.push(Metrics("b", events)) == {"name": "a"}
    assert reader.push(Metrics("c", events)) == {"name": "b"}
    assert events == ["a", "b"]
    assert reader.drain() == {"name": "c"}
    assert reader.drain() is None
    assert reader.push(Metrics("d", events)) is None
    assert events == ["a", "b", "c"]


FLOPS_PER_SAMPLE = 1e12
START = {"window": 0, "step": 0, "micro_step": 0, "tokens": 0, "sample_index": 0}


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(journal, "time", clock)
    return clock


class Told(CallbackBase):
    def __init__(self):
        self.lines = []

    def on_log(self, record):
        self.lines.append(record)

    def on_eval(self, record):
        self.lines.append(record)


def check(record):
    if record["skipped_in_a_row"] > 2:
        raise FloatingPointError("only skips")


def experiment(log_every=1, device="NVIDIA H200", steps=100):
    """4 rows a micro-batch, two devices of a kind."""
    namespace = types.SimpleNamespace
    config = namespace(
        steps=steps, log_every_steps=log_every, data=namespace(micro_batch_size=4),
        precision=namespace(compute="bfloat16"),
    )  # fmt: skip
    mesh = namespace(size=2, devices=namespace(flat=[namespace(device_kind=device)]))
    program = namespace(mesh=mesh, check=check)
    return namespace(
        config=config, program=program, micro_batch_size=4, task=namespace(flops_per_row=FLOPS_PER_SAMPLE, item="token")
    )


@pytest.fixture
def opened(tmp_path):
    """``opened(experiment, start)`` -> (journal, what its tracker was told, its stream)."""
    journals = []

    def opened(experiment, start=START):
        told, stream = Told(), io.StringIO()
        workdir = types.SimpleNamespace(path=tmp_path)
        new = Journal(experiment, workdir, Goodput(tmp_path / "goodput.json"), start, [told], stream)
        journals.append(new)
        return new, told.lines, stream

    yield opened
    for new in journals:
        new.__exit__(None, None, None)


def record(window, k=1, tokens=100, done=1, in_a_row=0, skipped=0, loss=2.5):
    return {
        "loss": loss, "weight": 100.0, "grad_norm": 1.0, "grad_norm_clipped": 1.0, "loss_scale": 1.0,
        "learning_rate": 0.1, "micro_step": k * window, "window": window, "step": window - skipped,
        "skipped_in_a_row": in_a_row, "skipped_steps": skipped, "tokens": tokens * window,
        "bad_leaf": -1, "window_done": done,
    }  # fmt: skip


def compiled(journal, clock):
    with journal.dispatch():
        clock.now += 30  # the compiler's half minute is in no line


def test_rates_leave_out_compilation_and_evaluation(opened, clock):
    one, lines, _ = opened(experiment(log_every=2))
    clock.now += 5
    compiled(one, clock)
    for window in (1, 2):
        clock.now += 1
        one.waited(0.25)
        one.log(record(window, k=3))
    with one.paused():
        clock.now += 60
    for window in (3, 4):
        clock.now += 2
        one.log(record(window, k=3))
    first, second = lines
    assert (first["step"], first["micro_step"], first["samples"], first["tokens"]) == (2, 6, 24, 200)
    assert (first["step_s"], first["tokens_per_s"], first["input_wait_s"]) == (1.0, 100.0, 0.25)
    assert first["mfu"] == pytest.approx(
        24 * FLOPS_PER_SAMPLE / 2 / (2 * 989.5e12), rel=1e-3
    )  # of H200, dense bfloat16
    assert first["time_s"] == pytest.approx(37.0, abs=0.5)  # from when goodput was opened, on its own clock
    assert (second["step_s"], second["tokens_per_s"], second["input_wait_s"]) == (2.0, 50.0, 0.0)
    assert second["mfu"] == pytest.approx(first["mfu"] / 2)
    assert second["time_s"] == pytest.approx(first["time_s"] + 60 + 4)


def test_a_line_holds_no_bookkeeping(opened, clock, tmp_path):
    one, lines, _ = opened(experiment())
    compiled(one, clock)
    clock.now += 1
    one.log(record(1))
    assert set(lines[0]) == {
        "step", "micro_step", "samples", "tokens", "loss", "learning_rate", "grad_norm", "grad_norm_clipped",
        "loss_scale", "skipped_steps", "tokens_per_s", "step_s", "input_wait_s", "mfu", "time_s",
    }  # fmt: skip
    assert read_jsonl(tmp_path / "metrics.jsonl") == lines


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1.0), ("NVIDIA H200", 1e-6)])
def test_no_mfu_where_it_says_nothing(opened, clock, device, seconds):
    """An unknown device, and two lines so close together that it would be above 1."""
    one, lines, _ = opened(experiment(device=device))
    compiled(one, clock)
    clock.now += seconds
    one.log(record(1))
    assert lines[0]["mfu"] is None


def test_what_came_before_the_first_step_is_in_no_line(opened, clock):
    """An evaluation that was due, a cold first batch: neither changes the first line's rates."""
    one, lines, _ = opened(experiment())
    with one.paused():
        clock.now += 60
    one.waited(5.0)
    compiled(one, clock)
    clock.now += 2
    one.log(record(1))
    assert (lines[0]["tokens_per_s"], lines[0]["step_s"], lines[0]["input_wait_s"]) == (50.0, 2.0, 0.0)


def test_no_time_at_all_divides_by_nothing(opened, clock):
    one, lines, _ = opened(experiment())
    with one.dispatch():
        pass
    one.log(record(1))
    assert lines[0]["tokens_per_s"] > 0


def test_records_inside_a_window_are_none(opened, clock):
    one, lines, _ = opened(experiment())
    compiled(one, clock)
    one.log(None)
    one.log(record(1, done=0, in_a_row=9))  # not a record: nothing is checked
    assert lines == []
    assert (one.window, one.step, one.micro_step, one.tokens) == (0, 0, 0, 0)
    one.log(record(1, k=4))
    assert (one.window, one.step, one.micro_step, one.tokens) == (1, 1, 4, 100)


def test_the_cadence_counts_windows(opened, clock):
    """Also after a resume and with windows skipped: a skipped one is told at once."""
    one, lines, _ = opened(
        experiment(log_every=5), START | {"window": 13, "step": 12, "micro_step": 13, "tokens": 1300}
    )
    compiled(one, clock)
    for window in range(14, 21):
        clock.now += 1
        skipped = 2 if window >= 17 else 1
        one.log(record(window, skipped=skipped, in_a_row=int(window == 17), loss=float("nan") if window == 17 else 2.0))
    one.log(record(21, skipped=2), always=True)
    assert [line["micro_step"] for line in lines] == [15, 17, 20, 21]
    assert [line["step"] for line in lines] == [14, 15, 18, 19]
    assert lines[0]["tokens_per_s"] == 100.0
    assert lines[0]["step_s"] == 1.0


def test_a_run_that_only_skips_is_stopped_after_its_line(opened, clock):
    one, lines, _ = opened(experiment(log_every=100))
    compiled(one, clock)
    with pytest.raises(FloatingPointError):
        one.log(record(3, skipped=3, in_a_row=3))
    assert [line["micro_step"] for line in lines] == [3]
    one.log_last(
        types.SimpleNamespace(drain=lambda: record(4, skipped=4, in_a_row=4))
    )  # on the way out: told, and no second exception
    assert [line["micro_step"] for line in lines] == [3, 4]


def test_an_evaluation_has_the_step_and_the_time(opened, clock):
    one, lines, stream = opened(experiment(), START | {"window": 7, "step": 6})
    one.evaluated(None)
    assert lines == []
    clock.now += 3
    one.evaluated({"eval/loss": 2.0, "eval/bits_per_byte": 2.885, "eval/tokens": 10})
    assert lines[0].pop("time_s") == pytest.approx(3.0, abs=0.5)
    assert lines == [
        {"step": 6, "micro_step": START["micro_step"], "eval/loss": 2.0, "eval/bits_per_byte": 2.885, "eval/tokens": 10}
    ]
    assert "eval bits/byte 2.8850" in stream.getvalue()


def test_time_goes_on_from_the_attempt_before(tmp_path, opened, clock):
    seconds = dict.fromkeys(("compile", "input", "eval", "checkpoint", "restore", "rework", "idle"), 1.0) | {
        "step": 993.0
    }
    former = {"format": 1, "furthest_step": 0, "attempts": [{"last_step": 0, "seconds": seconds}]}
    (tmp_path / "goodput.json").write_text(json.dumps(former))
    one, lines, _ = opened(experiment())
    compiled(one, clock)
    one.log(record(1))
    assert lines[0]["time_s"] == pytest.approx(1030.0, abs=0.5)
