"""jaxtrain/loop.py (with assemble, evaluate, workdir): what a run reads, logs, saves, resumes; the case ids are public.

Right answers come from ``by_hand``: a plain ``for`` over ``program.step``, without loop, journal, prefetch or files.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest

from jaxtrain import config as config_lib
from jaxtrain import evaluate, loop, metrics, rng
from jaxtrain.assemble import assemble
from jaxtrain.cadence import Cadence
from jaxtrain.checkpoint import host_state, manifest
from jaxtrain.checkpoint.store import CheckpointError, Checkpoints
from jaxtrain.config import ConfigError
from jaxtrain.data import text
from jaxtrain.data.pipeline import Batches, InOrder
from jaxtrain.data.text import RowTable
from jaxtrain.goodput import Goodput, Phase
from jaxtrain.metrics import CallbackBase
from jaxtrain.prefetch import DevicePrefetch
from jaxtrain.step import NonFiniteError
from jaxtrain.workdir import Workdir

pytestmark = pytest.mark.xdist_group("loop")  # its fixtures are dear: one worker for the file
ROWS, LENGTH = 4, 32
TINY = {
    "steps": "6", "log_every_steps": "1", "data.held_out_fraction": "0.3", "data.micro_batch_size": str(ROWS),
    "data.sequence_length": str(LENGTH), "model.layers": "1", "model.d_model": "16", "model.heads": "2",
    "model.kv_heads": "2", "model.d_ff": "32", "model.max_length": str(LENGTH), "model.dropout": "0.1",
    "optim.learning_rate": "1e-2", "optim.schedule": "linear", "optim.schedule_steps": "200", "optim.ema": "0.9",
    "precision.compute": "float32", "mesh.fsdp": "1", "checkpoint.every_steps": "0", "eval.every_steps": "0",
    "sample.tokens": "8", "sample.prompt": "line ", "seed": "3",
}  # fmt: skip


def write_corpus(directory, documents=4, lines=120):
    """Files of ASCII text in which no two rows of 32 bytes are alike."""
    directory.mkdir()
    for d in range(documents):
        words = np.random.RandomState(d).randint(1000, 9999, lines)
        (directory / f"{d}.txt").write_text("".join(f"line {d}.{i} holds {w}\n" for i, w in enumerate(words)))
    return directory


def tiny_config(corpus, **changes):
    """``TINY`` on a corpus; ``a__b=1`` changes the key ``a.b``."""
    changes = {name.replace("__", "."): str(value) for name, value in changes.items()}
    return config_lib.resolve(
        config_lib.override(config_lib.default(), TINY | {"data.paths": str(corpus)} | changes),
    )


def session_cache(tmp_path_factory):
    """One compilation cache for all workers of this test session."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "jax-cache"


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    wanted = {
        "jax_compilation_cache_dir": str(session_cache(tmp_path_factory)),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def base(corpus):
    return assemble(tiny_config(corpus))


@pytest.fixture(scope="module")
def windows_of_4(corpus):
    """k=4 micro-batches of 2 rows, in the order of the text."""
    return assemble(tiny_config(corpus, accumulation__k=4, data__micro_batch_size=2, data__shuffle="false"))


def change(experiment, program=None, batches=None, held_out=None, **keys):
    """The experiment with other parts, or other keys that only the loop reads; its program stays as compiled."""
    config = experiment.config.copy_and_resolve_references()
    for name, value in keys.items():
        config_lib.assign(config, name.replace("__", "."), value)
    parts = {"program": program, "batches": batches, "held_out": held_out}
    return dataclasses.replace(experiment, config=config, **{k: v for k, v in parts.items() if v is not None})


def train(experiment, path, *callbacks, stream=None):
    with contextlib.closing(Workdir(path)) as workdir:
        return loop.train(experiment, workdir, callbacks=callbacks, stream=stream or io.StringIO())


def by_hand(experiment, windows):
    """``(state, [record of each window])`` of a plain loop."""
    program, state, records = experiment.program, experiment.program.init(), []
    feed = experiment.batches.at(0)
    while len(records) < windows:
        state, step_metrics = program.step(state, jax.device_put(next(feed), program.batch_sharding))
        record = step_metrics.to_host()
        if record["window_done"]:
            records.append(record)
    feed.close()
    return state, records


def bits(tree):
    return [
        (np.asarray(leaf).dtype, np.asarray(leaf).shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)
    ]


def saved_bits(experiment, state):
    """All that a checkpoint would hold."""
    return bits(experiment.program.checkpoint_view(state))


def restore(experiment, path, step):
    with contextlib.closing(Checkpoints(path / "checkpoints")) as checkpoints:
        return checkpoints.restore(experiment.program, step)


def steps_saved(path):
    return Checkpoints(path / "checkpoints").steps()


def lines(path, kind="loss"):
    return [record for record in metrics.read_jsonl(path / "metrics.jsonl") if kind in record]


def steps_logged(path):
    return [line["step"] for line in lines(path)]


def contents(directory):
    """Every file below, but the lock."""
    files = (p for p in directory.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


class Wrapped:
    """A program with some functions replaced."""

    def __init__(self, program):
        self.inner = program

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Recorder(Wrapped):
    """Notes which rows of the source each step consumed; ``at[n]()`` is called before step call n (from 1)."""

    def __init__(self, experiment, at=None):
        super().__init__(experiment.program)
        source = experiment.batches.source
        self.known = {source[i]["tokens"].tobytes(): i for i in range(len(source))}
        assert len(self.known) == len(source)
        self.rows, self.calls, self.at = [], 0, at or {}

    def step(self, state, batch):
        self.calls += 1
        self.at.get(self.calls, lambda: None)()
        self.rows += [self.known[row.tobytes()] for row in np.asarray(batch["tokens"])]
        return self.inner.step(state, batch)


class At(CallbackBase):
    """Calls ``action`` when told of ``what`` at ``step``."""

    def __init__(self, what, step, action):
        def told(found, *_):
            if (found["step"] if isinstance(found, dict) else found) == step:
                action()

        setattr(self, f"on_{what}", told)


class Boom(Exception):
    pass


def boom():
    raise Boom("boom")


def sigterm():
    signal.raise_signal(signal.SIGTERM)


class Source:
    """Rows of a source, changed by ``edit(number, row)``."""

    def __init__(self, source, edit):
        self.source, self.edit = source, edit

    def __len__(self):
        return len(self.source)

    def __getitem__(self, number):
        return self.edit(number, self.source[number])


class Feed:
    """``batches`` that call ``action()``, in the reading thread, before micro-batch ``number`` (from 0) of the run."""

    def __init__(self, batches, number, action):
        self.batches, self.number, self.action = batches, number, action
        self.source = batches.source

    def at(self, sample_index):
        first = sample_index // self.batches.micro_batch_size
        for number, batch in enumerate(self.batches.at(sample_index), first):
            if number == self.number:
                self.action()
            yield batch


# -- what the loop may read (JAX_03, design 9) -------------------------------------------------------------------------


def sealed(value, note):
    """A stand-in that notes and refuses every read."""

    def refuse(self, *args):
        reader = sys._getframe(1).f_code
        note(f"read of {args[0] if args else 'a value'} in {reader.co_filename}: {reader.co_qualname}")
        raise AssertionError("the loop read what it may only pass on")

    reads = ("getattribute", "getitem", "iter", "len", "bool", "array", "float", "int", "index", "eq", "jax_array")
    kind = type("Sealed", (), {f"__{name}__": refuse for name in reads} | {"__hash__": object.__hash__})
    stand_in = kind()
    _SEALED[id(stand_in)] = (stand_in, value)
    return stand_in


_SEALED = {}


def opened(stand_in):
    return _SEALED[id(stand_in)][1]


class SealedMetrics:
    """Metrics of which only ``to_host`` may be read, once, and only by the ``MetricsReader``."""

    def __init__(self, value, number, events):
        object.__setattr__(self, "parts", (value, number, events))

    def __getattribute__(self, name):
        value, number, events = object.__getattribute__(self, "parts")
        reader = sys._getframe(1).f_code
        allowed = name == "to_host" and reader.co_qualname.startswith("MetricsReader.")
        events.append(("read", number) if allowed else (f"{name} in {reader.co_qualname}", number))
        return value.to_host


class SealedProgram(Wrapped):
    def __init__(self, program):
        super().__init__(program)
        self.events, self.number = [], 0

    def seal(self, state):
        return sealed(state, lambda what: self.events.append((what, self.number)))

    def init(self, params=None):
        return self.seal(self.inner.init(params))

    def resume(self, snapshot):
        return self.seal(self.inner.resume(snapshot))

    def view(self, state, **options):
        return self.inner.view(opened(state), **options)

    def checkpoint_view(self, state):
        return self.inner.checkpoint_view(opened(state))

    def step(self, state, batch):
        self.number += 1
        state, step_metrics = self.inner.step(opened(state), batch)
        self.events.append(("dispatch", self.number))
        return self.seal(state), SealedMetrics(step_metrics, self.number, self.events)


@pytest.mark.parametrize("experiment", ["base", "windows_of_4"])
def test_JAX_03_only_metrics_are_read_and_one_step_late(experiment, request, tmp_path):
    experiment = request.getfixturevalue(experiment)
    calls = 5 * experiment.config.accumulation.k
    program = SealedProgram(experiment.program)
    train(change(experiment, program, steps=5), tmp_path / "run")
    want = [("dispatch", 1)]
    for n in range(2, calls + 1):
        want += [("dispatch", n), ("read", n - 1)]
    assert program.events == [*want, ("read", calls)]


def test_JAX_03_cadences_and_a_resume_read_nothing_else(base, tmp_path, monkeypatch):
    """Whatever is due: each step is read once, in order, and never are two dispatched steps unread when one follows."""
    monkeypatch.setattr(jax, "block_until_ready", lambda *_: pytest.fail("a wait for the device"))
    events = []
    for steps in (7, 12):
        program = SealedProgram(base.program)
        keys = {"steps": steps, "checkpoint__every_steps": 2, "eval__every_steps": 3, "log_every_steps": 2}
        train(change(base, program, **keys), tmp_path / "run")
        assert {what for what, _ in program.events} == {"dispatch", "read"}
        events.append(program.events)
    assert [len(e) for e in events] == [14, 10]
    for some in events:
        unread = 0
        for what, _ in some:
            assert what == "read" or unread <= 1
            unread += 1 if what == "dispatch" else -1
            assert 0 <= unread <= 2
        reads = [n for what, n in some if what == "read"]
        assert reads == list(range(1, len(some) // 2 + 1))


def test_sealed_notices_reads():
    notes = []
    state = sealed(1.0, notes.append)
    for read in (
        lambda: state.params,
        lambda: float(state),
        lambda: state[0],
        lambda: bool(state),
        lambda: list(state),
    ):
        with pytest.raises(AssertionError):
            read()
    assert len(notes) == 5
    assert opened(state) == 1.0


def test_JAX_03_logged_steps_and_losses(base, tmp_path):
    train(change(base, steps=100, log_every_steps=10), tmp_path / "ten")
    train(change(base, steps=100), tmp_path / "one")
    assert steps_logged(tmp_path / "ten") == list(range(10, 101, 10))
    assert steps_logged(tmp_path / "one") == list(range(1, 101))
    _, records = by_hand(base, 100)
    exact = {"loss", "grad_norm", "grad_norm_clipped", "learning_rate", "tokens", "micro_step"}
    for name in ("ten", "one"):
        for line in lines(tmp_path / name):
            assert {key: line[key] for key in exact} == {key: records[line["step"] - 1][key] for key in exact}


def test_JAX_03_the_last_step_is_logged_whatever_the_cadence(base, tmp_path):
    train(change(base, steps=3, log_every_steps=1000), tmp_path)
    assert steps_logged(tmp_path) == [3]


@pytest.mark.parametrize("every", [1, 10])
def test_JAX_03_the_last_record_survives_an_exception(base, tmp_path, every):
    batches = Feed(base.batches, 97, boom)
    with pytest.raises(Boom):
        train(change(base, batches=batches, steps=100, log_every_steps=every), tmp_path)
    assert steps_logged(tmp_path) == [*range(every, 97, every), 97]


class Unreadable:
    """Held-out rows whose reading fails."""

    def __init__(self, held_out):
        self.source = held_out.source

    def __iter__(self):
        boom()


@pytest.mark.parametrize("where", ["eval", "save", "callback"])
def test_JAX_03_the_last_record_survives_an_exception_elsewhere(base, tmp_path, where, monkeypatch):
    """Step 5 was read early, for the evaluation or the save that then fails: it is the last line all the same."""
    experiment = change(base, steps=9, log_every_steps=3, checkpoint__every_steps=5)
    if where == "eval":
        experiment = change(experiment, held_out=Unreadable(base.held_out), eval__every_steps=5)
    if where == "save":
        monkeypatch.setattr(host_state, "capture", boom)
    with pytest.raises(Boom):
        train(experiment, tmp_path, *([At("save", 5, boom)] if where == "callback" else []))
    assert steps_logged(tmp_path) == [3, 5]


def test_an_exception_is_not_replaced_by_its_echo(base, tmp_path):
    """A tracker that fails at every line: the FIRST failure comes out, though the last record is logged on the way."""

    class Broken(CallbackBase):
        def on_log(self, record):
            raise Boom(f"at step {record['step']}")

    with pytest.raises(Boom, match=r"^at step 1$"):
        train(base, tmp_path, Broken())
    assert steps_logged(tmp_path) == [1, 2]


# -- other mechanisms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["scan", "scan_deferred"])
def test_a_run_goes_on_under_another_mechanism(corpus, windows_of_4, tmp_path, mechanism):
    """Three windows with ``multisteps``, three with another: the run of one within float error, and its counts."""
    other = assemble(
        tiny_config(
            corpus,
            accumulation__k=4,
            data__micro_batch_size=2,
            data__shuffle="false",
            accumulation__mechanism=mechanism,
        )
    )
    whole = train(windows_of_4, tmp_path / "whole")
    train(change(windows_of_4, steps=3), tmp_path / "run")
    outcome = train(other, tmp_path / "run")
    assert outcome.finished
    for got, wanted in zip(jax.tree.leaves(outcome.state.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    exact = ("step", "micro_step", "samples", "tokens", "learning_rate")
    numbers = [[[line[key] for key in exact] for line in lines(tmp_path / name)] for name in ("whole", "run")]
    assert numbers[0] == numbers[1]
    assert outcome.evaluation["eval/loss"] == pytest.approx(whole.evaluation["eval/loss"], rel=1e-5)
    assert other.program.traces["step"] == 1


@pytest.mark.parametrize("mechanism", ["scan", "scan_deferred"])
def test_a_mechanism_on_eight_devices_evaluates_and_saves(corpus, tmp_path, mechanism):
    """Batches of training are stacked, those of evaluation are not, and each has its own sharding."""
    sizes = {"data__micro_batch_size": 8, "data__sequence_length": 16, "accumulation__k": 2, "model__dropout": 0.0}
    sizes |= {"mesh__data": 2, "mesh__fsdp": 4, "steps": 4, "eval__every_steps": 2, "checkpoint__every_steps": 2}
    ends = {}
    for name in ("multisteps", mechanism):
        outcome = train(assemble(tiny_config(corpus, accumulation__mechanism=name, **sizes)), tmp_path / name)
        ends[name] = [line["eval/loss"] for line in lines(tmp_path / name, "eval/loss")]
        assert (outcome.finished, len(ends[name])) == (True, 2)
    assert ends[mechanism] == pytest.approx(ends["multisteps"], rel=1e-5)


# -- what is logged ----------------------------------------------------------------------------------------------------


def test_a_line_holds_the_numbers_of_its_window(windows_of_4, tmp_path):
    train(change(windows_of_4, steps=4, eval__every_steps=2), tmp_path)
    wanted = {
        "step", "micro_step", "samples", "tokens", "loss", "learning_rate", "grad_norm", "grad_norm_clipped",
        "loss_scale", "skipped_steps", "tokens_per_s", "step_s", "input_wait_s", "mfu", "time_s",
    }  # fmt: skip
    source, tokens = windows_of_4.batches.source, 0
    for n, line in enumerate(lines(tmp_path), 1):
        tokens += round(sum(source[row]["weights"].sum() for row in range(8 * n - 8, 8 * n)))
        assert wanted <= set(line)
        assert (line["step"], line["micro_step"], line["samples"], line["tokens"]) == (n, 4 * n, 8 * n, tokens)
        assert line["learning_rate"] == pytest.approx(1e-2 * (1 - (n - 1) / 200), rel=1e-6)
        assert (line["loss_scale"], line["skipped_steps"], line["mfu"]) == (1.0, 0, None)
        assert line["grad_norm_clipped"] == pytest.approx(min(line["grad_norm"], 1.0), rel=1e-6)
        assert line["tokens_per_s"] > 0
        assert line["step_s"] > 0
        assert 0 <= line["input_wait_s"] <= line["step_s"]
    assert lines(tmp_path)[0]["loss"] == pytest.approx(math.log(text.VOCAB_SIZE), rel=0.01)
    times = [record["time_s"] for record in metrics.read_jsonl(tmp_path / "metrics.jsonl")]
    assert times == sorted(times)
    for line in lines(tmp_path, "eval/loss"):
        held_out = windows_of_4.data.held_out.stream
        assert line["eval/tokens"] == (held_out != text.DOCUMENT_START).sum()  # every byte once, padding for nothing
        assert line["eval/bits_per_byte"] == pytest.approx(line["eval/loss"] / math.log(2), rel=1e-6)
    assert [line["step"] for line in lines(tmp_path, "eval/loss")] == [2, 4]


def test_an_evaluation_is_that_of_the_final_parameters(base, tmp_path):
    """Sums over each held-out row, one row at a time, against the loop's padded batches."""
    outcome = train(base, tmp_path)
    view, total, weight = base.program.view(outcome.state, ema=base.config.optim.ema > 0), 0.0, 0.0
    for batch in InOrder(base.held_out.source, 1):
        one = base.program.evaluate(view, batch)["loss"]
        total, weight = total + float(one[0]), weight + float(one[1])
    assert outcome.evaluation["eval/loss"] == pytest.approx(total / weight, rel=1e-6)
    assert outcome.evaluation == {k: v for k, v in lines(tmp_path, "eval/loss")[-1].items() if k.startswith("eval/")}


def test_callbacks_are_told_in_order_of_time(base, tmp_path):
    told = []

    class Tracker(CallbackBase):
        def on_log(self, record):
            told.append(("log", record["step"]))

        def on_eval(self, record):
            told.append(("eval", record["step"]))

        def on_save(self, step, path):
            told.append(("save", step))
            assert path == str(tmp_path / "checkpoints" / str(step))

        def on_end(self, summary):
            told.append(("end", summary["step"]))
            assert summary == {"step": 6, "window": 6, "tokens": lines(tmp_path)[-1]["tokens"], "finished": True}

    experiment = change(base, log_every_steps=2, eval__every_steps=3, checkpoint__every_steps=2)
    train(experiment, tmp_path, Tracker())
    assert told == [
        ("log", 2), ("save", 2), ("eval", 3), ("log", 4), ("save", 4), ("log", 6), ("eval", 6), ("save", 6), ("end", 6),
    ]  # fmt: skip
    assert steps_saved(tmp_path) == [2, 4, 6]


def test_files_of_a_run(base, tmp_path):
    experiment = change(base, steps=4, checkpoint__every_steps=1, checkpoint__keep_last=2)
    train(experiment, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "goodput.json"}
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(experiment.config.to_dict()))
    assert steps_saved(tmp_path) == [3, 4]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]  # nothing is left lying about


# -- resume ------------------------------------------------------------------------------------------------------------


def test_CKPT_19_the_name_is_the_number_of_updates_inside(base, tmp_path):
    whole = Recorder(base)
    straight = train(change(base, whole, steps=10, checkpoint__every_steps=5), tmp_path)
    at_5, at_10 = restore(base, tmp_path, 5), restore(base, tmp_path, 10)
    adam = [s for s in jax.tree.leaves(at_5.state.opt_state, is_leaf=is_adam) if is_adam(s)]
    assert [int(s.count) for s in adam] == [5]
    assert int(at_5.state.counters.step) == int(at_5.state.counters.window) == 5
    assert at_5.run["counts"] == {
        "window": 5,
        "step": 5,
        "micro_step": 5,
        "tokens": lines(tmp_path)[4]["tokens"],
    }
    assert (at_5.run["data"]["sample_index"], at_10.run["data"]["sample_index"]) == (5 * ROWS, 10 * ROWS)
    assert saved_bits(base, at_5.state) == saved_bits(base, by_hand(base, 5)[0])

    shutil.rmtree(tmp_path / "checkpoints" / "10")
    rest = Recorder(base)
    resumed = train(change(base, rest, steps=10, checkpoint__every_steps=5), tmp_path)
    assert rest.rows == whole.rows[5 * ROWS :]  # batches 5..9
    assert saved_bits(base, resumed.state) == saved_bits(base, straight.state) == saved_bits(base, at_10.state)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_lines_beyond_the_checkpoint_are_set_aside(base, tmp_path):
    experiment = change(base, steps=9, checkpoint__every_steps=3, eval__every_steps=4)
    for _ in range(2):  # it dies before its sixth step call: after step 5, then after step 8
        with pytest.raises(Boom):
            train(change(experiment, Recorder(base, at={6: boom})), tmp_path)
    train(experiment, tmp_path)
    _, records = by_hand(base, 9)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(r["step"], r["loss"]) for r in records]
    assert [line["step"] for line in lines(tmp_path, "eval/loss")] == [4, 8, 9]
    aside = [metrics.read_jsonl(tmp_path / f"metrics.attempt{n}.jsonl") for n in (1, 2)]
    assert [[line["step"] for line in attempt] for attempt in aside] == [[4, 4, 5], [7, 8, 8]]


def test_a_damaged_metrics_file_does_not_stop_a_run(base, tmp_path):
    """Its unreadable lines are set aside, with what is beyond the checkpoint."""
    train(change(base, steps=3), tmp_path)
    path = tmp_path / "metrics.jsonl"
    kept = path.read_bytes()
    first, rest = kept.split(b"\n", 1)
    path.write_bytes(first + b"\n" + b"\0" * 9 + b"\n" + b'{"note": 1}\n' + rest + b'{"step": 4, "lo')
    train(base, tmp_path)
    assert steps_logged(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert path.read_bytes().startswith(kept)


@pytest.mark.parametrize("k", [1, 4])
def test_RNG_02_resume_draws_what_the_unbroken_run_draws(base, windows_of_4, tmp_path, k):
    """Dropout, shuffling, EMA; the second half starts from nothing but the workdir, as another process does."""
    first = base if k == 1 else windows_of_4
    train(change(first, steps=3), tmp_path)
    again = assemble(config_lib.resolve(first.config.copy_and_resolve_references()))
    resumed = train(again, tmp_path)
    assert resumed.step == 6
    state, records = by_hand(first, 6)
    assert saved_bits(again, resumed.state) == saved_bits(first, state)
    assert [line["loss"] for line in lines(tmp_path)] == [record["loss"] for record in records]
    assert again.program.traces["step"] == 1


@pytest.mark.parametrize("exit_by", ["crash after a save", "SIGTERM"])
def test_DATA_01_each_row_once_whatever_happens(base, tmp_path, exit_by):
    source = RowTable(base.data.train.stream[: 40 * LENGTH + 1], LENGTH)
    forty = change(base, batches=Batches(source, ROWS, seed=3), steps=10, checkpoint__every_steps=4)
    straight, before, after = (Recorder(forty) for _ in range(3))
    train(change(forty, straight), tmp_path / "straight")
    assert sorted(straight.rows) == list(range(40))
    assert straight.rows != list(range(40))

    path = tmp_path / "broken"
    if exit_by == "SIGTERM":
        before.at = {4: sigterm}
        outcome = train(change(forty, before, checkpoint__every_steps=0), path)
        assert (outcome.finished, outcome.step, outcome.stopped_by) == (False, 4, "SIGTERM")
        assert outcome.evaluation is None
    else:
        with pytest.raises(Boom):
            train(change(forty, before), path, At("save", 4, boom))
    assert steps_saved(path) == [4]
    assert restore(base, path, 4).run["data"]["sample_index"] == 16
    train(change(forty, after), path)
    assert before.rows + after.rows == straight.rows
    assert steps_logged(path) == list(range(1, 11))
    assert (
        lines(path)[-1]["tokens"] == (base.data.train.stream[1 : 40 * LENGTH + 1] != text.DOCUMENT_START).sum()
    )  # every byte once


def test_DATA_02_updates_micro_batches_and_samples(windows_of_4, tmp_path):
    train(change(windows_of_4, steps=10), tmp_path)
    saved = restore(windows_of_4, tmp_path, 10)
    assert (saved.run["counts"]["step"], saved.run["counts"]["micro_step"]) == (10, 40)
    assert saved.run["data"]["sample_index"] == 80
    recorder, stream = Recorder(windows_of_4), io.StringIO()
    train(change(windows_of_4, recorder, steps=11), tmp_path, stream=stream)
    assert recorder.rows == list(range(80, 88))
    assert "step 10" in stream.getvalue().splitlines()[0]
    assert "step 11/11" in stream.getvalue()
    assert "40" not in stream.getvalue().splitlines()[0]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_DATA_04_what_was_read_ahead_is_read_again(base, tmp_path, monkeypatch, depth):
    """At the save the reader is well ahead of the step; the position is that of the step."""
    monkeypatch.setattr(loop, "DevicePrefetch", functools.partial(DevicePrefetch, depth=depth))
    ahead, recorder = [], Recorder(base)

    def note(number, row):
        ahead.append(number)
        return row

    def wait():
        deadline = time.monotonic() + 10
        while len(ahead) < (3 + depth) * ROWS and time.monotonic() < deadline:
            time.sleep(0.01)

    batches = Batches(Source(base.batches.source, note), ROWS, seed=3)
    ahead.clear()
    recorder.at = {3: wait}
    train(change(base, recorder, batches, steps=3, eval__rows=4), tmp_path)
    assert len(ahead) >= (3 + depth) * ROWS
    assert restore(base, tmp_path, 3).run["data"]["sample_index"] == 3 * ROWS
    after = Recorder(base)
    train(change(base, after, steps=6), tmp_path)
    assert recorder.rows + after.rows == [row for n in range(6) for row in base.batches.row_indices(n * ROWS)]


def test_DATA_04_the_next_batch_is_made_while_the_step_runs(base, tmp_path, monkeypatch):
    """Made before the loop waits for the devices, and one only: the position counts what was consumed."""
    made, seen = [], []

    class Told:
        def at(self, sample_index):
            for batch in base.batches.at(sample_index):
                made.append(None)
                yield batch

    class Reader(loop.MetricsReader):
        def push(self, new):
            deadline = time.monotonic() + 20
            while len(made) < len(seen) + 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            seen.append(len(made))
            return super().push(new)

    monkeypatch.setattr(loop, "MetricsReader", Reader)
    train(change(base, batches=Told(), steps=3, checkpoint__every_steps=0, eval__every_steps=0), tmp_path)
    assert seen == [2, 3, 4]


RNG_05 = {
    "eval": {"eval__every_steps": 1},
    "save": {"checkpoint__every_steps": 1},
    "log seldom": {"log_every_steps": 5},
    "all": {"eval__every_steps": 2, "checkpoint__every_steps": 3, "log_every_steps": 4, "eval__rows": 5},
    "prefetch 0": {},
    "prefetch 8": {},
    "sampling": {},
    "noise": {},
    "compiled before": {},
}


@pytest.mark.parametrize("what", RNG_05)
def test_RNG_05_side_work_changes_nothing(base, tmp_path, monkeypatch, what):
    program = base.program
    callbacks = []
    if what.startswith("prefetch"):
        prefetch = functools.partial(DevicePrefetch, depth=int(what[-1]))
        monkeypatch.setattr(loop, "DevicePrefetch", prefetch)
        monkeypatch.setattr(evaluate, "DevicePrefetch", prefetch)
    if what == "sampling":
        from jaxtrain.report import sample_text  # loads matplotlib

        class Sampling(Wrapped):
            def step(self, state, batch):
                assert sample_text(base, state, "line ", 5, 1.0, seed=0).startswith("line ")
                return self.inner.step(state, batch)

        program = Sampling(program)
    if what == "compiled before":
        program.lower(program.batch_struct(next(base.batches.at(0)))).compile()
    if what == "noise":

        class Noise(CallbackBase):
            def on_log(self, record):
                random.random(), np.random.random(), jax.random.normal(rng.key(3, "dropout", record["step"]))
                random.seed(0), np.random.seed(0)

        callbacks.append(Noise())
    outcome = train(change(base, program, **RNG_05[what]), tmp_path, *callbacks)
    state, records = by_hand(base, 6)
    assert saved_bits(base, outcome.state) == saved_bits(base, state)
    assert [line["loss"] for line in lines(tmp_path)] == [records[line["step"] - 1]["loss"] for line in lines(tmp_path)]


def test_JAX_01_one_trace_and_one_compilation_of_the_step(corpus, tmp_path):
    """In a whole run with evaluations, saves, padding and a resume; and a second such run compiles nothing at all."""
    compiled = collections.Counter()

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled[fun_name] += 1

    experiment = assemble(tiny_config(corpus, checkpoint__every_steps=2, eval__every_steps=2, eval__rows=7))
    assert len(experiment.held_out.source) % ROWS  # so the last evaluation batch is padded
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for path in (tmp_path / "a", tmp_path / "b"):
            for steps in (3, 6):
                train(change(experiment, steps=steps), path)
            if path.name == "a":
                assert (compiled["jit(step)"], compiled["jit(evaluate)"], compiled["jit(resume)"]) == (1, 1, 1)
                compiled.clear()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert experiment.program.traces == {"init": 1, "step": 1, "evaluate": 1, "resume": 1}


def test_a_finished_run_does_no_step_again(base, tmp_path):
    first = train(base, tmp_path)
    before = contents(tmp_path / "checkpoints") | {"metrics": (tmp_path / "metrics.jsonl").read_bytes()}
    second = train(change(base, Recorder(base, at={1: boom})), tmp_path)
    assert contents(tmp_path / "checkpoints") | {"metrics": (tmp_path / "metrics.jsonl").read_bytes()} == before
    assert (second.finished, second.step, second.evaluation) == (True, 6, first.evaluation)
    assert saved_bits(base, second.state) == saved_bits(base, first.state)
    fewer = train(change(base, Recorder(base, at={1: boom}), steps=4), tmp_path)
    assert (fewer.finished, fewer.step) == (True, 6)


def test_another_text_is_refused_and_nothing_is_touched(base, tmp_path):
    train(change(base, steps=2), tmp_path / "run")
    other = assemble(tiny_config(write_corpus(tmp_path / "other", documents=5)))
    before = contents(tmp_path / "run")
    config = base.config  # the same paths, other bytes in them
    with pytest.raises(ConfigError, match=r"data has changed since checkpoint 2 .* another --workdir"):
        train(dataclasses.replace(other, config=config), tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_another_platform_is_told(base, tmp_path, monkeypatch, recwarn):
    """Design 7: bit for bit holds for the same cores and versions; a resume elsewhere says so."""
    train(change(base, steps=2), tmp_path)
    was = host_state.platform_fingerprint()
    monkeypatch.setattr(host_state, "platform_fingerprint", lambda: was | {"cores": 1024})
    stream = io.StringIO()
    with contextlib.suppress(Warning):
        train(change(base, steps=3), tmp_path, stream=stream)
    told = stream.getvalue() + " ".join(str(w.message) for w in recwarn)
    assert "1024" in told
    assert str(was["cores"]) in told


# -- preemption (PRE_01) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [5, 8, 10])  # a window's first micro-batch, its last, one in the middle
def test_PRE_01_in_the_middle_of_a_window(windows_of_4, tmp_path, call):
    recorder = Recorder(windows_of_4, at={call: sigterm})
    outcome = train(change(windows_of_4, recorder), tmp_path)
    done = call // 4
    assert (outcome.finished, outcome.step) == (False, done)
    assert steps_saved(tmp_path) == [done]
    assert restore(windows_of_4, tmp_path, done).run["data"]["sample_index"] == 8 * done
    assert recorder.rows == list(range(2 * call))
    after = Recorder(windows_of_4)
    resumed = train(change(windows_of_4, after), tmp_path)
    assert after.rows == list(range(8 * done, 48))  # the window is recomputed from its start
    assert saved_bits(windows_of_4, resumed.state) == saved_bits(windows_of_4, by_hand(windows_of_4, 6)[0])
    assert steps_logged(tmp_path) == list(range(1, 7))


@pytest.mark.parametrize("call", [10, 12])  # in the middle of the third window, at its end
def test_PRE_01_the_last_window_has_its_line_whatever_the_cadence(windows_of_4, tmp_path, call):
    program = Recorder(windows_of_4, at={call: sigterm})
    outcome = train(change(windows_of_4, program, log_every_steps=1000), tmp_path)
    assert steps_logged(tmp_path) == [outcome.step] == [call // 4]
    assert train(change(windows_of_4, log_every_steps=1000), tmp_path).finished
    assert steps_logged(tmp_path) == [call // 4, 6]


def test_PRE_01_before_the_first_window_is_done_nothing_is_written(windows_of_4, tmp_path):
    outcome = train(change(windows_of_4, Recorder(windows_of_4, at={2: sigterm})), tmp_path)
    assert (outcome.finished, outcome.step, outcome.stopped_by) == (False, 0, "SIGTERM")
    assert steps_saved(tmp_path) == []
    assert train(windows_of_4, tmp_path).finished


class SignalsInEvaluation(Wrapped):
    """SIGTERM at the second batch of evaluation number ``n`` (from 1)."""

    def __init__(self, program, n, batches):
        super().__init__(program)
        self.at, self.calls = (n - 1) * batches + 2, 0

    def evaluate(self, view, batch):
        self.calls += 1
        if self.calls == self.at:
            sigterm()
        return self.inner.evaluate(view, batch)


@pytest.mark.parametrize("where", ["compile", "evaluation", "last evaluation", "save", "last save", "end"])
def test_PRE_01_wherever_the_signal_comes(base, tmp_path, where):
    """The newest checkpoint is the last completed update, the same line goes on, and it ends as if nothing had been."""
    done = {"compile": 1, "evaluation": 2, "save": 2}.get(where, 6)
    program, callbacks = Wrapped(base.program), []
    if where == "compile":
        program = Recorder(base, at={1: sigterm})
    elif "evaluation" in where:
        program = SignalsInEvaluation(base.program, 1 if where == "evaluation" else 3, len(base.held_out))
    else:
        what = "end" if where == "end" else "save"
        callbacks = [At(what, 2 if where == "save" else 6, sigterm)]
    experiment = change(base, eval__every_steps=2, checkpoint__every_steps=2)
    outcome = train(change(experiment, program), tmp_path, *callbacks)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert outcome.step == steps_saved(tmp_path)[-1] == done
    assert outcome.finished == (where == "end")
    assert outcome.stopped_by == (None if where == "end" else "SIGTERM")
    last = train(experiment, tmp_path)
    assert last.finished
    assert saved_bits(base, last.state) == saved_bits(base, by_hand(base, 6)[0])
    assert steps_logged(tmp_path) == list(range(1, 7))
    assert lines(tmp_path, "eval/loss")[-1]["step"] == 6  # the result of the run is in its file
    assert lines(tmp_path, "eval/loss")[-1]["eval/loss"] == last.evaluation["eval/loss"]


def test_PRE_01_in_the_evaluation_of_a_finished_run(base, tmp_path):
    train(base, tmp_path)
    program = SignalsInEvaluation(base.program, 1, len(base.held_out))
    outcome = train(change(base, program), tmp_path)
    assert not outcome.finished or outcome.evaluation is not None  # the report of a finished run needs one
    assert outcome.stopped_by == (None if outcome.finished else "SIGTERM")


def test_PRE_01_while_the_loop_waits_for_data(base, tmp_path):
    """A source that hangs (a dead file server) must not cost the work since the last save."""
    waiting, release, timed_out = threading.Event(), threading.Event(), []

    def hang():
        waiting.set()
        timed_out.append(not release.wait(12))

    def signal_the_loop():
        waiting.wait(60)
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    helper = threading.Thread(target=signal_the_loop)
    helper.start()
    outcome = train(change(base, batches=Feed(base.batches, 3, hang)), tmp_path)
    seen_in_time = not timed_out
    release.set()
    helper.join()
    assert seen_in_time, "the signal was seen only when the data came"
    assert (outcome.finished, outcome.step) == (False, 3)
    assert steps_saved(tmp_path) == [3]


@contextlib.contextmanager
def nobody_reads_stderr():
    read, write = os.pipe()
    os.close(read)
    kept = os.dup(2)
    os.dup2(write, 2)
    os.close(write)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_PRE_01_where_nobody_reads_stderr(base, tmp_path):
    """``jaxtrain train 2>&1 | tee log`` whose tee has died: the signal's note cannot be written, the save must be."""
    with nobody_reads_stderr():
        outcome = train(change(base, Recorder(base, at={4: sigterm})), tmp_path)
    assert (outcome.finished, outcome.step) == (False, 4)
    assert steps_saved(tmp_path) == [4]


def test_an_exception_is_no_preemption(base, tmp_path):
    """Also where a signal came before it: the exception comes out."""
    with pytest.raises(Boom):
        train(change(base, Recorder(base, at={3: lambda: (sigterm(), boom())})), tmp_path)
    assert steps_logged(tmp_path) == [1, 2]


def test_a_second_ctrl_c_stops_at_once(base, tmp_path):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(change(base, Recorder(base, at={4: twice}), checkpoint__every_steps=2), tmp_path)
    assert steps_saved(tmp_path) == [2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert saved_bits(base, train(base, tmp_path).state) == saved_bits(base, by_hand(base, 6)[0])


# -- windows that are skipped ------------------------------------------------------------------------------------------


def poisoned(experiment, *windows):
    """The experiment with a NaN in the first row of these windows (from 0), k = 1."""
    bad = {experiment.batches.row_indices(window * ROWS)[0] for window in windows}

    def edit(number, row):
        return row | {"weights": row["weights"] * np.float32(math.nan)} if number in bad else row

    return change(experiment, batches=Batches(Source(experiment.batches.source, edit), ROWS, seed=3))


def test_a_skipped_window_is_logged_and_counted(base, tmp_path):
    experiment = poisoned(base, 2)
    outcome = train(change(experiment, log_every_steps=2, checkpoint__every_steps=3), tmp_path)
    assert outcome.step == 5
    told = {line["micro_step"]: line for line in lines(tmp_path)}
    assert list(told) == [2, 3, 4, 6]  # window 3 out of turn
    assert [told[n]["step"] for n in told] == [2, 2, 3, 5]
    assert [told[n]["skipped_steps"] for n in told] == [0, 1, 1, 1]
    assert told[3]["loss"] is None
    assert all(math.isfinite(told[n]["loss"]) for n in (2, 4, 6))
    rates = [told[n]["learning_rate"] for n in told]  # of updates 2, 3 (not applied), 3, 5
    assert rates == pytest.approx([1e-2 * (1 - n / 200) for n in (1, 2, 2, 4)], rel=1e-6)
    assert steps_saved(tmp_path) == [2, 5]  # named by updates, at windows 3 and 6
    assert restore(base, tmp_path, 2).run["data"]["sample_index"] == 3 * ROWS
    assert saved_bits(base, outcome.state) == saved_bits(base, by_hand(experiment, 6)[0])


def test_skipped_windows_after_a_save_are_logged_once(base, tmp_path):
    """Steps 2 to 2: the lines of windows 3 and 4 are beyond the checkpoint of step 2 though their step is not."""
    experiment = change(poisoned(base, 2, 3), checkpoint__every_steps=2)
    with pytest.raises(Boom):
        train(change(experiment, Recorder(base, at={5: boom})), tmp_path)
    assert steps_saved(tmp_path) == [2]
    resumed = train(experiment, tmp_path)
    assert saved_bits(base, resumed.state) == saved_bits(base, by_hand(experiment, 6)[0])
    assert [line["micro_step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("exit_by", ["crash", "SIGTERM"])
def test_DATA_01_a_skipped_window_is_passed_over_once(base, tmp_path, exit_by):
    """Saved or recomputed after the exit in window 4, what follows is the unbroken run."""
    experiment = poisoned(base, 2, 3)
    recorder = Recorder(base, at={5: boom if exit_by == "crash" else sigterm})
    with pytest.raises(Boom) if exit_by == "crash" else contextlib.nullcontext():
        train(change(experiment, recorder, checkpoint__every_steps=3), tmp_path)
    resumed = train(experiment, tmp_path)
    assert saved_bits(base, resumed.state) == saved_bits(base, by_hand(experiment, 6)[0])


def test_a_run_that_only_skips_ends(base, tmp_path):
    program = copy_with_limit(base.program, 2)
    experiment = change(poisoned(base, *range(5, 40)), program, steps=40, log_every_steps=10, checkpoint__every_steps=5)
    for _ in range(2):  # the same again from the checkpoint
        with pytest.raises(NonFiniteError, match=r"^3 windows in a row .* after step 5, window 8"):
            train(experiment, tmp_path)
        assert steps_saved(tmp_path) == [5]
        assert lines(tmp_path)[-1]["skipped_steps"] in (3, 4)  # the window that was dispatched meanwhile
        assert lines(tmp_path)[-1]["loss"] is None
    state = restore(base, tmp_path, 5).state
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state.params))
    assert saved_bits(base, state) == saved_bits(base, by_hand(base, 5)[0])


def copy_with_limit(program, max_consecutive):
    class Limited(Wrapped):
        def check(self, record):
            return type(program).check(self, record)

    limited = Limited(program)
    limited.nonfinite = dataclasses.replace(program.nonfinite, max_consecutive=max_consecutive)
    return limited


# -- saves that fail ---------------------------------------------------------------------------------------------------


def fail_at(monkeypatch, step, before=lambda: None):
    write = manifest.write

    def fail(files, name, entries):
        if name.startswith(f"{step}."):
            before()
            raise OSError("disk gone")
        write(files, name, entries)

    monkeypatch.setattr(manifest, "write", fail)


def test_CKPT_01_a_failing_save_is_told_and_the_run_goes_on(base, tmp_path, monkeypatch):
    fail_at(monkeypatch, 4)
    slow, out = Recorder(base, at={n: lambda: time.sleep(0.5) for n in (5,)}), io.StringIO()
    state = train(change(base, slow, checkpoint__every_steps=2), tmp_path, stream=out).state
    assert steps_saved(tmp_path) == [2, 6]
    told = f"saving checkpoint 4 to {tmp_path}/checkpoints failed: disk gone; the next save tries again (1 of 3)"
    assert told in out.getvalue()
    assert saved_bits(base, state) == saved_bits(base, by_hand(base, 6)[0])


def test_CKPT_01_a_last_save_that_fails_ends_the_run(base, tmp_path, monkeypatch):
    fail_at(monkeypatch, 6)
    with pytest.raises(CheckpointError, match=r"checkpoint 6 .*disk gone \(3 saves in a row failed\)"):
        train(change(base, checkpoint__every_steps=2), tmp_path)
    assert steps_saved(tmp_path) == [2, 4]
    assert steps_logged(tmp_path)[-1] == 6
    monkeypatch.undo()
    resumed = train(change(base, checkpoint__every_steps=2), tmp_path)
    assert saved_bits(base, resumed.state) == saved_bits(base, by_hand(base, 6)[0])
    assert steps_saved(tmp_path) == [2, 4, 6]


def test_CKPT_01_saves_that_always_fail_stop_the_run(base, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(manifest, "write", fail)
    with pytest.raises(CheckpointError, match=r"saving checkpoint 2 .*disk gone \(2 saves in a row failed\)"):
        train(change(base, checkpoint__every_steps=1, checkpoint__max_failures=2, steps=50), tmp_path)
    assert steps_saved(tmp_path) == []


def test_CKPT_01_a_failing_save_does_not_mask_the_exception_on_its_way_out(base, tmp_path, monkeypatch):
    gone = threading.Event()
    fail_at(monkeypatch, 4, before=lambda: gone.wait(10))

    def leave():
        threading.Timer(0.5, gone.set).start()
        boom()

    with pytest.raises(Boom):
        train(change(base, Recorder(base, at={5: leave}), checkpoint__every_steps=2), tmp_path)
    assert steps_saved(tmp_path) == [2]
    assert steps_logged(tmp_path) == [1, 2, 3, 4]


# -- cadence, other starts ---------------------------------------------------------------------------------------------


def test_saves_by_the_clock_stand_beside_those_by_steps(base, tmp_path):
    slow = Recorder(base, at={n: lambda: time.sleep(0.3) for n in (2, 3)})
    train(change(base, slow, checkpoint__every_steps=0, checkpoint__every_s=0.25), tmp_path)
    assert steps_saved(tmp_path)[0] in (2, 3)
    assert steps_saved(tmp_path)[-1] == 6


def test_auto_tells_what_it_chose(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Cadence, "FIRST_S", 0.0)
    slow, out = Recorder(base, at={n: lambda: time.sleep(0.5) for n in (3, 5)}), io.StringIO()
    train(change(base, slow, checkpoint__auto=True, checkpoint__failures_per_day=24.0), tmp_path, stream=out)
    said = [line for line in out.getvalue().splitlines() if line.startswith("checkpoints every ")]
    assert said
    assert "a failure is expected every 1.0 h" in said[0]
    assert re.search(r"\d+\.\d+% of the time is lost to saves and failures$", said[0])


def test_failures_are_learned_from_attempts_that_did_not_end(base, tmp_path):
    with pytest.raises(Boom):
        train(change(base, Recorder(base, at={5: boom}), checkpoint__every_steps=2), tmp_path)
    train(change(base, Recorder(base, at={2: sigterm}), checkpoint__every_steps=2), tmp_path)
    train(change(base, checkpoint__every_steps=2), tmp_path)
    assert [attempt["ended"] for attempt in goodput(tmp_path)["attempts"]] == [False, True, True]
    assert Goodput(tmp_path / "goodput.json").failures()[0] == 1


def test_a_new_run_begins_with_the_parameters_of_another(base, tmp_path):
    first = train(base, tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "checkpoints", tmp_path / "a" / "checkpoints" / "6"):
        started = []
        seen = Recorder(base)
        seen.init = lambda params=None, started=started: started.append(params) or base.program.init(params)
        train(change(base, seen, init_from=str(path), steps=1), tmp_path / f"from {path.name}")
        (params,) = started
        assert bits(params) == bits(first.state.params)
    with pytest.raises(CheckpointError, match=r"nowhere holds no checkpoints"):
        train(change(base, init_from=str(tmp_path / "nowhere")), tmp_path / "b")


def test_best_are_kept_by_the_tasks_score(base, tmp_path):
    every = {
        "eval__every_steps": 1,
        "checkpoint__every_steps": 1,
        "checkpoint__keep_last": 1,
        "checkpoint__keep_best": 1,
    }
    train(change(base, **every), tmp_path)
    scores = {line["step"]: line["eval/bits_per_byte"] for line in lines(tmp_path, "eval/loss")}
    assert steps_saved(tmp_path) == sorted({6, min(scores, key=scores.get)})


def test_a_place_that_cannot_be_written_is_told_before_the_first_step(base, tmp_path):
    (tmp_path / "file").write_text("kept")
    seen = Recorder(base)
    with pytest.raises(ConfigError, match=r"checkpoints: .*/file/x cannot be written: "):
        train(change(base, seen, checkpoint__directory=str(tmp_path / "file" / "x")), tmp_path / "run")
    assert seen.calls == 0


def test_checkpoints_lie_where_the_config_says(base, tmp_path):
    elsewhere = change(base, checkpoint__directory=str(tmp_path / "there"))
    train(change(elsewhere, steps=3), tmp_path / "run")
    assert Checkpoints(tmp_path / "there").steps() == [3]
    assert not (tmp_path / "run" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "run")  # another machine: only the bucket is left
    out = io.StringIO()
    outcome = train(elsewhere, tmp_path / "run", stream=out)
    assert "restored step 3" in out.getvalue()
    assert saved_bits(base, outcome.state) == saved_bits(base, by_hand(base, 6)[0])
    other = change(elsewhere, optim__b1=0.5)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoint 6 holds another experiment:\n  optim.b1: 0.9 -> 0.5"):
        train(other, tmp_path / "run")


# -- time --------------------------------------------------------------------------------------------------------------


def goodput(path):
    return json.loads((path / "goodput.json").read_text())


def test_goodput_adds_up_and_counts_rework(base, tmp_path, monkeypatch):
    opened_s, saved_s = [], []

    class Timed(Goodput):
        def __init__(self, path, before):
            opened_s.append(time.monotonic() - sum(before.values()))
            super().__init__(path, before=before)

        def attempt_seconds(self):
            saved_s.append(time.monotonic())
            return super().attempt_seconds()

    monkeypatch.setattr(loop, "Goodput", Timed)
    experiment = change(base, steps=20, checkpoint__every_steps=5, eval__every_steps=10)
    wall_s = []
    for at in (14, 21):
        slow = dict.fromkeys(range(2, at), lambda: time.sleep(0.1))
        attempt = change(experiment, Recorder(base, at=slow | {at: boom}))
        with pytest.raises(Boom) if at == 14 else contextlib.nullcontext():
            train(attempt, tmp_path)
        wall_s.append(saved_s[-1] - opened_s[-1])
    first, second = goodput(tmp_path)["attempts"]
    for attempt, wall in zip((first, second), wall_s, strict=True):
        assert sum(attempt["seconds"].values()) == pytest.approx(wall, rel=0.05)
    assert goodput(tmp_path)["furthest_step"] == 20
    assert first["seconds"]["rework"] == 0
    assert 0.2 < second["seconds"]["rework"] < 0.8  # steps 12 and 13; 11 is the compile phase
    assert {phase for phase, s in second["seconds"].items() if s > 0} == set(Phase)


def test_goodput_counts_the_proof_of_the_checkpoint(base, tmp_path, monkeypatch):
    """Reading every byte of a big checkpoint takes minutes: they belong to the restore, and to the wall time."""
    train(change(base, steps=2), tmp_path)
    problem = manifest.problem

    def slow(*arguments, **options):
        time.sleep(1)
        return problem(*arguments, **options)

    monkeypatch.setattr(manifest, "problem", slow)
    train(change(base, steps=3), tmp_path)
    assert goodput(tmp_path)["attempts"][1]["seconds"]["restore"] >= 1


def test_goodput_counts_the_wait_for_a_step_as_step(base, tmp_path):
    """Also where the step is waited for because an evaluation or a save is due."""

    class Slow(Wrapped):
        def step(self, state, batch):
            state, found = self.inner.step(state, batch)
            return state, SlowMetrics(found)

    class SlowMetrics(Wrapped):
        def to_host(self):
            time.sleep(0.1)
            return self.inner.to_host()

    train(change(base, Slow(base.program), checkpoint__every_steps=1, eval__every_steps=2), tmp_path)
    seconds = goodput(tmp_path)["attempts"][0]["seconds"]
    assert seconds["step"] + seconds["compile"] >= 6 * 0.1


# -- the mesh ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_device(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("one")
    experiment = assemble(tiny_config(corpus, steps=20, data__micro_batch_size=8))
    return train(change(experiment, checkpoint__every_steps=10), path), path


@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 8}, {"tensor": 2, "fsdp": 4}], ids=str)
def test_eight_devices_follow_one(corpus, one_device, tmp_path, mesh):
    """The whole run, and the second half of one that was begun on one device."""
    reference, path = one_device
    keys = {"mesh__fsdp": 1} | {f"mesh__{axis}": size for axis, size in mesh.items()}
    experiment = assemble(tiny_config(corpus, steps=20, data__micro_batch_size=8, **keys))
    assert experiment.program.mesh.size == 8
    whole = train(experiment, tmp_path / "whole")
    shutil.copytree(path, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "20")
    half = train(experiment, tmp_path / "half")
    split = [not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(whole.state.params)]
    assert any(split) == (mesh != {"data": 8})
    for outcome, run in ((whole, "whole"), (half, "half")):
        assert outcome.step == 20
        losses = [[line["loss"] for line in lines(p)] for p in (path, tmp_path / run)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=5e-6)
        assert outcome.evaluation["eval/loss"] == pytest.approx(reference.evaluation["eval/loss"], rel=5e-6)
        assert distance(outcome.state.params, reference.state.params) < 1e-5
    assert experiment.program.traces["step"] == 1


def distance(found, wanted):
    found, wanted = (np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(t)]) for t in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
