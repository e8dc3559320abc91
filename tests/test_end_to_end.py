"""Runs as a person starts them: processes of their own, in a pipe or on a terminal, stopped and started again."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from test_cli import write_config
from test_loop import contents, lines, saved_bits, session_cache, steps_saved, write_corpus

from jaxtrain import cli
from jaxtrain.assemble import assemble
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.workdir import read_config

pytestmark = pytest.mark.xdist_group("end_to_end")  # its fixtures are dear: one worker for the file
LIMIT_S = 120
STEPS = 150


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    base = tmp_path_factory.mktemp("end_to_end")
    changes = {"steps": STEPS, "eval__every_steps": 50, "checkpoint__every_steps": 60}
    return write_config(base / "tiny.py", session_cache(tmp_path_factory), write_corpus(base / "text"), **changes)


def train_line(config_file, workdir, *flags):
    """What comes after ``jaxtrain``."""
    return ["train", f"--config={config_file}", f"--workdir={workdir}", *flags]


@contextlib.contextmanager
def started(argv, **options):
    """A ``jaxtrain`` process that does not outlive the block."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen([sys.executable, "-m", "jaxtrain.cli", *argv], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run(argv, **options):
    """``(exit code, stdout, stderr)`` of a whole process."""
    with started(argv, **options) as process:
        return finish(process)


def finish(process):
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def read_until(process, pattern):
    """The lines of stdout up to the first that matches."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"no line like {pattern!r} in {seen}, {process.stderr and process.stderr.read()}")


def final_bits(workdir):
    """Every byte of the newest checkpoint's state, its counts and its place in the data."""
    experiment = assemble(read_config(workdir))
    with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        restored = checkpoints.restore(experiment.program, checkpoints.latest_verified())
    return saved_bits(experiment, restored.state), restored.run["counts"], restored.run["data"]


@pytest.fixture(scope="module")
def whole(config_file, tmp_path_factory):
    """``(workdir, stdout, stderr)`` of a whole run in a pipe."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    code, out, err = run(train_line(config_file, workdir))
    assert code == 0, err
    return workdir, out, err


def test_a_whole_run_in_a_pipe(whole):
    workdir, out, err = whole
    assert err == ""
    assert "\x1b" not in out
    assert "\r" not in out
    told = out.splitlines()
    assert [line.split()[0] for line in told[:5]] == ["model", "batch", "optim", "mesh", "data"]
    steps = [line for line in told if re.match(rf"step \d+/{STEPS}  loss", line)]
    assert len(steps) == STEPS
    assert all(re.search(r"loss \d\.\d{4}  lr \S+  grad \S+  [\d,]+ tokens/s  eta ", line) for line in steps)
    assert len([line for line in told if re.match(rf"step \d+/{STEPS}  eval loss", line)]) == 3
    bits = dict(re.findall(r"^  (\w+ model) +(\d+\.\d{3})$", out, re.M))
    assert set(bits) == {"this model", "bigram model", "unigram model"}
    assert float(bits["this model"]) == round(lines(workdir, "eval/loss")[-1]["eval/bits_per_byte"], 3)
    assert 0 < float(bits["bigram model"]) < float(bits["unigram model"]) < 8
    assert re.search(r"a sample of up to 8 tokens:\n  \| line .+", out)
    assert told[-1].startswith("next: jaxtrain sample --workdir=")


def test_the_files_of_a_whole_run(whole):
    workdir = whole[0]
    names = {path.name for path in workdir.iterdir()} - {".lock"}
    assert names == {"config.json", "metrics.jsonl", "tensorboard", "checkpoints", "goodput.json", "loss.png"}
    png = (workdir / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 400
    assert steps_saved(workdir) == [60, 120, 150]
    assert [line["step"] for line in lines(workdir)] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines(workdir, "eval/loss")] == [50, 100, 150]
    assert any("tfevents" in path.name for path in (workdir / "tensorboard").iterdir())
    goodput = json.loads((workdir / "goodput.json").read_text())
    assert (len(goodput["attempts"]), goodput["furthest_step"]) == (1, STEPS)


def test_the_next_command_works(whole, capsys):
    words = shlex.split(whole[1].splitlines()[-1].removeprefix("next: "))
    assert words[0] == "jaxtrain"
    assert cli.main(words[1:]) == 0
    assert capsys.readouterr().out.startswith("class ")


# -- stopped, and started with the same line ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_PRE_01_the_same_line_goes_on(config_file, whole, tmp_path, number):
    """To the very bits of the unbroken run, with the compiled step taken from the cache (by jax's own log of it)."""
    workdir = tmp_path / "a run"
    argv = train_line(config_file, workdir)
    with started(argv) as process:
        before = "".join(read_until(process, r"^step 5/"))
        process.send_signal(number)
        code, out, err = finish(process)
    assert code == 75, err
    saved = steps_saved(workdir)[-1]
    assert 5 <= saved < STEPS
    assert {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[number] in out
    assert f"stopped at step {saved}, which is saved" in out
    again = out.rstrip().splitlines()[-1].strip()
    assert shlex.split(again) == ["jaxtrain", *argv]
    assert "Traceback" not in before + out + err
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {str(saved)}

    code, out, err = run(shlex.split(again)[1:], env=os.environ | {"JAX_DEBUG_LOG_MODULES": "jax._src.compiler"})
    assert code == 0, err
    assert f"restored step {saved}" in out
    assert "jit_step" in re.findall(r"[Cc]ache hit for '(\w+)'", err), err[-3000:]
    assert not re.search(r"cache miss for 'jit_step'", err, re.I)
    assert final_bits(workdir) == final_bits(whole[0])
    exact = {"loss", "grad_norm", "step", "micro_step", "tokens", "learning_rate"}
    first, second = ([{k: line[k] for k in exact} for line in lines(path)] for path in (whole[0], workdir))
    assert first == second
    final = [lines(path, "eval/loss")[-1] for path in (whole[0], workdir)]
    assert final[0] | {"time_s": 0} == final[1] | {"time_s": 0}


def test_PRE_01_during_the_first_compilation(config_file, tmp_path):
    """The signal waits for the compiler, the first window is done and saved, the code says so."""
    with started(train_line(config_file, tmp_path / "run")) as process:
        read_until(process, r"^compiling the step")
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    assert code == 75, err
    assert "stopped at step 1, which is saved" in out
    assert steps_saved(tmp_path / "run") == [1]


def test_PRE_01_before_there_is_anything_to_save(config_file, tmp_path):
    """A signal may end the process as it likes; nothing is left behind."""
    with started(train_line(config_file, tmp_path / "run")) as process:
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    assert code in (75, -signal.SIGTERM), err
    assert not (tmp_path / "run").exists()


# -- who reads ---------------------------------------------------------------------------------------------------------


def test_a_reader_that_went_away_does_not_stop_a_run(config_file, tmp_path):
    """``jaxtrain train ... | head -0``"""
    read, write = os.pipe()
    os.close(read)
    with started(train_line(config_file, tmp_path / "run", "--config.steps=20"), stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    assert steps_saved(tmp_path / "run") == [20]
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_pipe_that_knows_only_ascii(config_file, tmp_path):
    """What a model says may be any bytes; the report of a finished run must not fail on them."""
    flags = ["--config.steps=1", "--config.sample.prompt=é"]
    code, out, err = run(
        train_line(config_file, tmp_path / "run", *flags), env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert code == 0, err
    assert out.rstrip().splitlines()[-1].startswith("next: ")


def test_on_a_terminal_there_is_a_bar(config_file, tmp_path):
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (30, 110))
    env = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    shown = b""
    with started(
        train_line(config_file, tmp_path / "run"), stdin=child, stdout=child, stderr=child, env=env
    ) as process:
        os.close(child)
        with contextlib.suppress(OSError):  # EIO: the other side has closed
            while chunk := os.read(parent, 65536):
                shown += chunk
        os.close(parent)
        assert process.wait(LIMIT_S) == 0, shown.decode(errors="replace")
    text = shown.decode()
    assert "Traceback" not in text
    assert "compiling the step" in text
    assert "━" in text
    assert re.search(rf"\d+/{STEPS} .*eta \d+s", text)
    assert re.search(r"eval \d\.\d+ bits/byte", text)
    assert not re.search(r"step \d+/\d+  loss", text)  # no plain lines beside the bar
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor is given back
    assert "bits per byte on" in text
    assert re.search(r"\n *next: jaxtrain sample", text)


# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["version"], 0, ""),
        (["eval", "--workdir=nowhere"], 2, r"^jaxtrain: nowhere holds no run \(config.json is not there\)"),
        (["frain"], 2, r"^usage: jaxtrain"),
    ],
)
def test_exit_codes_of_a_process(argv, code, sentence):
    found, _, err = run(argv)
    assert found == code
    assert re.search(sentence, err)
    assert "Traceback" not in err


def test_70_where_a_save_fails(config_file, tmp_path):
    """A disk that fills up is no bad input: trace back and 70, with what was committed intact."""
    (tmp_path / "sitecustomize.py").write_text(
        "from jaxtrain.checkpoint import manifest\nwrite = manifest.write\n"
        "def fail(files, name, entries):\n"
        "    if not name.startswith('3.'):\n        raise OSError(28, 'No space left')\n"
        "    write(files, name, entries)\nmanifest.write = fail\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    workdir = tmp_path / "run"
    code, out, err = run(train_line(config_file, workdir, "--config.checkpoint.every_steps=3"), env=env)
    assert code == 70, err
    assert "saving checkpoint 6" in out  # told when it happens, in the course of the run
    assert re.search(r"CheckpointError: saving checkpoint \d+ .*No space left.* \(3 saves in a row failed\)", err)
    assert "next:" not in out
    assert steps_saved(workdir) == [3]
    assert Checkpoints(workdir / "checkpoints").problem(3) is None
    assert not any(name.startswith("checkpoints/6/") for name in contents(workdir))
