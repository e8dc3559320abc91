"""The record writers: strict JSON lines that survive a kill, TensorBoard events that vanish after a resume."""

import doctest
import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from jaxtrain import metrics
from jaxtrain.metrics import Callback, CallbackBase, JsonlWriter, TensorBoardWriter, read_jsonl


def strict(line: bytes) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def write(path: Path, steps, resume_step=None) -> None:
    with JsonlWriter(path, resume_step) as writer:
        for step in steps:
            writer.on_log({"step": step, "loss": step / 8})


def test_a_record_is_one_line_of_strict_json(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonlWriter(path, None) as writer:
        writer.on_log({"step": 1, "loss": math.nan, "up": math.inf, "down": -math.inf, "mfu": None, "lr": 3e-4})
        writer.on_eval({"step": np.int64(2), "eval/loss": np.float32(0.5), "tokens": 2**61 + 1})
    first, second = lines_of(path)
    assert strict(first) == {"step": 1, "loss": None, "up": None, "down": None, "mfu": None, "lr": 3e-4}
    assert strict(second) == {"step": 2, "eval/loss": 0.5, "tokens": 2305843009213693953}
    assert second.endswith(b"}\n")


def test_a_line_is_readable_before_the_next_one_is_written(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl", None)
    for step in (1, 2):
        writer.on_log({"step": step})
        assert [r["step"] for r in read_jsonl(tmp_path / "m.jsonl")] == list(range(1, step + 1))
    writer.close()


class DeviceArray:
    def __float__(self):
        raise AssertionError("this would wait for the device")


@pytest.mark.parametrize("make", [JsonlWriter, TensorBoardWriter])
def test_what_is_no_record_is_refused_and_leaves_no_trace(tmp_path, make):
    with make(tmp_path / "x", None) as writer:
        with pytest.raises(TypeError, match=r"record\['loss'\] is a DeviceArray, not a number"):
            writer.on_log({"step": 1, "loss": DeviceArray()})
        for step in (None, 1.0, True, "1"):
            with pytest.raises(ValueError, match="needs an int 'step'"):
                writer.on_eval({"step": step, "loss": 1.0})
    with pytest.raises(ValueError, match="closed"):
        writer.on_log({"step": 2})
    with pytest.raises(ValueError, match="resume_step=-1"):
        make(tmp_path / "y", -1)
    assert not (tmp_path / "y").exists()
    if make is JsonlWriter:
        assert (tmp_path / "x").read_bytes() == b""


def test_a_resume_moves_later_lines_and_keeps_the_bytes_of_the_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1,   "loss":1.50}\n{"step":2, "eval/loss": 1e0}\n'
    moved = b'{"step": 3, "loss": 0.5}\n'
    late_but_kept = b'{"step": 2}\n'
    path.write_bytes(kept + moved + late_but_kept)
    writer = JsonlWriter(path, 2)
    assert path.read_bytes() == kept + late_but_kept
    assert writer.set_aside == tmp_path / "metrics.attempt1.jsonl"
    assert writer.set_aside.read_bytes() == moved
    writer.on_log({"step": 3})
    writer.close()
    assert path.read_bytes() == kept + late_but_kept + b'{"step": 3}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.attempt1.jsonl", "metrics.jsonl"]


def test_each_attempt_gets_the_first_unused_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "metrics.attempt2.jsonl").write_text("mine\n")
    write(path, [1, 2, 3])
    write(path, [3, 4], resume_step=2)
    write(path, [3], resume_step=2)
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3]
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.attempt1.jsonl")] == [3]
    assert (tmp_path / "metrics.attempt2.jsonl").read_text() == "mine\n"
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.attempt3.jsonl")] == [3, 4]


def test_a_fresh_start_moves_everything(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [0, 1])
    before = path.read_bytes()
    JsonlWriter(path, None).close()
    assert path.read_bytes() == b""
    assert (tmp_path / "metrics.attempt1.jsonl").read_bytes() == before


def test_a_resume_at_step_0_keeps_the_windows_that_were_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path, None) as writer:
        for micro_step, step in ((1, 0), (2, 0), (3, 0), (4, 1)):
            writer.on_log({"step": step, "micro_step": micro_step})
    JsonlWriter(path, 0, 2).close()
    assert [r["micro_step"] for r in read_jsonl(path)] == [1, 2]
    assert [r["micro_step"] for r in read_jsonl(tmp_path / "metrics.attempt1.jsonl")] == [3, 4]


def test_nothing_to_move_leaves_the_file_untouched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    inode, content = path.stat().st_ino, path.read_bytes()
    writer = JsonlWriter(path, 2)
    writer.close()
    assert (path.stat().st_ino, path.read_bytes()) == (inode, content)
    assert writer.set_aside is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b'{"step": 2, "loss": "\xc3', b'{"loss": 1.0}\n', b"[2]\n", b'{"step": "2"}\n']
)
def test_lines_without_a_readable_step_are_moved(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    write(path, [2], resume_step=5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2, "loss": 0.25}\n'
    assert (tmp_path / "metrics.attempt1.jsonl").read_bytes() == torn


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    write(path, [3], resume_step=2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.375}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("survived", [0, 1])
def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch, survived):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    lines = lines_of(path)
    done = []

    class Killed(BaseException):
        pass

    def replace(source, target, real=os.replace):
        if len(done) == survived:
            raise Killed
        done.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "replace", replace)
        with pytest.raises(Killed):
            JsonlWriter(path, 2)
    everywhere = set(lines_of(path)).union(*(lines_of(p) for p in tmp_path.glob("*.attempt*.jsonl")))
    assert everywhere == set(lines)
    JsonlWriter(path, 2).close()
    assert lines_of(path) == lines[:2]
    assert lines_of(tmp_path / f"metrics.attempt{survived + 1}.jsonl") == lines[2:]
    assert not list(tmp_path.glob("*.tmp"))


def test_kill_9_loses_at_most_the_line_in_flight(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from jaxtrain.metrics import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1], None)\n"
        "for step in range(10**9):\n"
        "    w.on_log({'step': step, 'loss': 1 / (step + 1)})\n"
        "    print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    for _ in range(500):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    acknowledged = 500 + len(child.stdout.read().splitlines())
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    steps = [r["step"] for r in read_jsonl(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) in (acknowledged, acknowledged + 1)


def test_a_save_forces_the_lines_to_the_disk(tmp_path, monkeypatch):
    synced = []
    writer = JsonlWriter(tmp_path / "m.jsonl", None)
    monkeypatch.setattr(metrics.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    writer.on_log({"step": 1})
    assert synced == []
    writer.on_save(1, tmp_path / "checkpoints" / "1")
    assert synced == [len(b'{"step": 1}\n')]
    writer.on_end({"reason": "done"})
    writer.close()
    assert synced == [12, 12]
    with pytest.raises(ValueError, match="closed"):
        writer.on_save(2, "2")


def test_read_jsonl_forgives_only_a_torn_last_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "loss": null}\n{"step": 2}\n{"st')
    assert read_jsonl(path) == [{"step": 1, "loss": None}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: not a JSON object"):
        read_jsonl(path)
    path.write_bytes(b"")
    assert read_jsonl(path) == []
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none")


# TensorBoard. The reader below is written from the TFRecord format (length, masked crc32c of it, data, masked crc32c
# of that: https://www.tensorflow.org/tutorials/load_data/tfrecord) and from TensorBoard's rules: files in the order of
# their names, and a SessionLog.START drops what came before with step >= its own
# (EventAccumulator._CheckForRestartAndMaybePurge). TensorBoard itself, read once by hand, showed the same.


def masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events_of(path: Path):
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(data[at : at + 8]),)
        assert struct.unpack_from("<I", data, at + 12 + size) == (masked_crc(body),)
        yield Event.FromString(body)
        at += 16 + size


def shown(directory: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value, as TensorBoard would show it."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(directory.iterdir()):
        for event in events_of(path):
            if event.session_log.status == event.session_log.START:
                curves = {tag: {s: v for s, v in curve.items() if s < event.step} for tag, curve in curves.items()}
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: curve for tag, curve in curves.items() if curve}


def test_tensorboard_gets_scalars_over_steps(tmp_path):
    with TensorBoardWriter(tmp_path / "tb", None) as writer:
        writer.on_log({"step": 10, "loss": 0.5, "mfu": None, "tokens": 3, "grad_norm": math.nan})
        writer.on_eval({"step": 10, "eval/loss": 0.25})
        writer.on_save(10, "checkpoints/10")
        writer.on_log({"step": np.int64(20), "loss": np.float32(0.125)})
        writer.on_end({})
    curves = shown(tmp_path / "tb")
    assert math.isnan(curves.pop("train/grad_norm")[10])
    assert curves == {"train/loss": {10: 0.5, 20: 0.125}, "train/tokens": {10: 3.0}, "eval/loss": {10: 0.25}}
    (path,) = (tmp_path / "tb").iterdir()
    assert [len(event.summary.value) for event in events_of(path)] == [0, 3, 1, 1]  # one event for a whole line


def test_events_beyond_the_restored_step_vanish_even_within_one_second(tmp_path):
    def attempt(steps, value, resume_step):
        with TensorBoardWriter(tmp_path, resume_step) as writer:
            for step in steps:
                writer.on_log({"step": step, "loss": value})

    attempt([0, 1, 2, 3, 4, 5], 1.0, None)
    attempt([3], 2.0, 2)
    assert shown(tmp_path) == {"train/loss": {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}}
    attempt([4], 3.0, 3)
    assert shown(tmp_path) == {"train/loss": {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0}}
    attempt([1], 4.0, None)
    assert shown(tmp_path) == {"train/loss": {1: 4.0}}
    attempt([0], 5.0, None)
    assert shown(tmp_path) == {"train/loss": {0: 5.0}}
    attempt([1], 6.0, 0)  # restored after windows that were all skipped
    assert shown(tmp_path) == {"train/loss": {0: 5.0, 1: 6.0}}
    assert len(list(tmp_path.iterdir())) == 6


def test_a_first_start_purges_nothing(tmp_path):
    TensorBoardWriter(tmp_path, None).close()
    (path,) = tmp_path.iterdir()
    assert [e.file_version for e in events_of(path)] == ["brain.Event:2"]


def test_writers_and_a_users_own_tracker_are_callbacks(tmp_path):
    seen = []

    class Mine(CallbackBase):
        def on_eval(self, record):
            seen.append(record["eval/loss"])

    callbacks = [JsonlWriter(tmp_path / "m.jsonl", None), TensorBoardWriter(tmp_path / "tb", None), Mine()]
    for callback in callbacks:
        assert isinstance(callback, Callback)
        callback.on_log({"step": 1, "loss": 2.0})
        callback.on_eval({"step": 1, "eval/loss": 3.0})
        callback.on_save(1, tmp_path)
        callback.on_end({"steps": 1})
    assert seen == [3.0]
    assert len(read_jsonl(tmp_path / "m.jsonl")) == 2
    assert not isinstance(object(), Callback)


def test_the_example_in_the_docstring_runs():
    result = doctest.testmod(metrics)
    assert (result.attempted, result.failed) == (5, 0)


def test_importing_loads_nothing_heavy():
    code = "import sys, jaxtrain.metrics; print({'jax', 'numpy', 'tensorboardX', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
