"""A directory belongs to one process at a time and to one experiment for ever."""

import errno
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys

import pytest

from jaxtrain import config, schedules, workdir
from jaxtrain.config import ConfigError
from jaxtrain.workdir import Workdir, read_config

HOLDER = """
import sys, time
from jaxtrain.workdir import Workdir
held = Workdir(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def resolved(**values: object):
    c = config.default()
    for name, value in values.items():
        config.assign(c, name.replace("__", "."), value)
    return config.resolve(c)


@pytest.fixture
def holder(tmp_path: pathlib.Path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


# ---- one process -------------------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused_and_free_again_after_kill_9(holder, tmp_path):
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=rf"^workdir {tmp_path}/run is in use by another process; .*choose another\.$"
        ):
            Workdir(tmp_path / "run")
    Workdir(tmp_path / "other").close()
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    Workdir(tmp_path / "run").close()


def test_a_refused_process_changes_nothing(holder, tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("theirs")
    with pytest.raises(ConfigError):
        Workdir(tmp_path / "run")
    assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.name != ".lock"} == {
        "config.json": "theirs", "metrics.jsonl": "theirs",
    }  # fmt: skip


def read_config_fails(path: pathlib.Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    return str(caught.value)


def test_within_one_process_it_is_claimed_once_too(tmp_path):
    first = Workdir(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        Workdir(tmp_path)
    first.close()
    first.close()
    Workdir(tmp_path).close()


def test_the_directory_is_made_with_its_parents_and_the_home_directory_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    held = Workdir("~/a/b c/é")
    assert held.path == tmp_path / "a" / "b c" / "é"
    assert held.path.is_dir()
    held.close()
    monkeypatch.chdir(tmp_path)
    held = Workdir("relative")
    monkeypatch.chdir("/")
    held.keep(resolved())
    assert read_config("~/relative") == read_config(tmp_path / "relative") == resolved()
    held.close()


def test_a_path_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=rf"^workdir {path} cannot be written: .+; choose another\.$"):
            Workdir(path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_path_that_cannot_be_written(tmp_path, monkeypatch, number):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(
        ConfigError, match=rf"^workdir {tmp_path} cannot be written: {os.strerror(number)}; choose another\.$"
    ):
        Workdir(tmp_path)


# ---- one experiment ----------------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path: pathlib.Path):
    held = Workdir(tmp_path / "run")
    yield held
    held.close()


def test_the_config_comes_back_with_its_types(held):
    c = resolved(data__paths=("a", "é"), optim__learning_rate=1e-3, data__shuffle=False, seed=2**32 - 1)
    held.keep(c)
    back = read_config(held.path)
    assert back == c
    assert {name: type(value) for name, value in config.flat(back).items()} == {
        name: type(value) for name, value in config.flat(c).items()
    }
    assert json.loads((held.path / "config.json").read_text())["optim"]["learning_rate"] == 1e-3


def test_the_same_and_free_keys_may_come_again(held):
    held.keep(resolved(optim__schedule="constant"))
    first = (held.path / "config.json").read_bytes()
    held.keep(resolved(optim__schedule="constant"))
    assert (held.path / "config.json").read_bytes() == first
    free = resolved(optim__schedule="constant", steps=5000, mesh__data=2, eval__rows=7, sample__prompt="x")
    held.keep(free)
    assert read_config(held.path) == free


def test_another_experiment_is_listed_with_the_remedy_and_changes_nothing(held):
    held.keep(resolved())
    first = (held.path / "config.json").read_bytes()
    other = resolved(optim__b1=0.8, data__paths=("x",), steps=500, log_every_steps=3)
    with pytest.raises(ConfigError) as caught:
        held.keep(other)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"workdir {held.path} holds another experiment:"
    assert lines[1:-2] == [
        "  data.paths: ('stdlib',) -> ('x',)", "  optim.schedule_steps: 1000 -> 500", "  optim.b1: 0.9 -> 0.8",
    ]  # fmt: skip
    assert "another --workdir" in lines[-2]
    assert "jaxtrain config show" in lines[-2]
    assert lines[-1] == "if the change is meant, go on with --allow=data.paths,optim.b1,optim.schedule_steps"
    with pytest.raises(ConfigError) as caught:
        held.keep(other, {"optim.b1", "data.paths"})
    assert str(caught.value).splitlines()[1:-2] == ["  optim.schedule_steps: 1000 -> 500"]
    assert str(caught.value).splitlines()[-1] == lines[-1]
    assert (held.path / "config.json").read_bytes() == first
    held.keep(other, {"optim.b1", "data.paths", "optim.schedule_steps"})
    assert (held.path / "config.json").read_bytes() != first


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "this run's rate is 0 after step 1000: to train longer, begin anew in another --workdir"),
        (
            {"optim__end_learning_rate": 1e-5},
            "to go to step 2000 on this run's own schedule, add --config.optim.schedule_steps=1000",
        ),
    ],
)
def test_more_steps_on_a_schedule_that_follows_them(held, changes, advice):
    held.keep(resolved(**changes))
    with pytest.raises(ConfigError) as caught:
        held.check(resolved(steps=2000, **changes))
    assert str(caught.value).splitlines()[-1] == advice
    if changes:
        held.check(resolved(steps=2000, optim__schedule_steps=1000, **changes))
    for others in ({"steps": 2000, "seed": 1}, {"seed": 1}):  # more than the horizon differs, or something else
        with pytest.raises(ConfigError, match=r"--allow=\S+$"):
            held.check(resolved(**others, **changes))


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_the_config_is_replaced_whole_or_not_at_all(held, monkeypatch, where):
    held.keep(resolved(optim__schedule="constant"))
    first = (held.path / "config.json").read_bytes()

    def full(*args: object, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        target = {"fsync": (workdir.os, "fsync"), "replace": (pathlib.Path, "replace")}
        patch.setattr(*target[where], full)
        with pytest.raises((OSError, ConfigError), match="No space left"):
            held.keep(resolved(optim__schedule="constant", steps=7))
    assert (held.path / "config.json").read_bytes() == first
    held.keep(resolved(optim__schedule="constant", steps=7))
    assert read_config(held.path).steps == 7
    assert {path.name for path in held.path.iterdir()} == {".lock", "config.json"}


# ---- reading -----------------------------------------------------------------------------------------------------


def test_a_directory_without_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert read_config_fails(path) == f"{path} holds no run (config.json is not there); give the --workdir of one."
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"steps": 5,}', b"\xff\xfe", b"null", b"3", b'"steps"', b"[]", b"[1]"]
)
def test_a_broken_config_is_named_with_the_remedy(held, content):
    (held.path / "config.json").write_bytes(content)
    message = read_config_fails(held.path)
    assert message.startswith(f"{held.path}/config.json is no")
    assert "another --workdir" in message
    with pytest.raises(ConfigError, match=r"config\.json is no"):
        held.keep(resolved())
    assert (held.path / "config.json").read_bytes() == content  # a person may mend it


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"optim": {"beta1": 0.9}}, r"unknown key optim\.beta1; did you mean optim\.b"),
        ({"steps": "many"}, r"steps='many' is not a number or a length"),
        ({"steps": 0}, r"steps=0 is outside 1 \.\. 2147483647"),
        ({"optim": 3}, r"unknown key optim"),
    ],
)
def test_a_config_that_is_none_of_this_version(held, change, match):
    (held.path / "config.json").write_text(json.dumps(change))
    assert re.search(match, read_config_fails(held.path))


def test_keys_that_were_added_since_have_their_defaults(held):
    old = resolved(optim__b1=0.5).to_dict()
    del old["nonfinite"], old["optim"]["ema"], old["seed"]
    (held.path / "config.json").write_text(json.dumps(old))
    assert read_config(held.path) == resolved(optim__b1=0.5)
    held.keep(resolved(optim__b1=0.5))


def test_the_config_is_readable_by_others(held):
    held.keep(resolved())
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((held.path / "config.json").stat().st_mode) == 0o666 & ~mask


# ---- another horizon ---------------------------------------------------------------------------------------------


def test_SCH_03_a_changed_horizon_is_drift_and_a_longer_run_is_not(held):
    first = resolved(steps=100, optim__schedule_steps=100, optim__schedule="linear", optim__end_learning_rate=1e-5)
    held.keep(first)
    stretched = resolved(steps=200, optim__schedule_steps=200, optim__schedule="linear", optim__end_learning_rate=1e-5)
    with pytest.raises(ConfigError, match=r"optim\.schedule_steps: 100 -> 200"):
        held.keep(stretched)
    longer = resolved(steps=200, optim__schedule_steps=100, optim__schedule="linear", optim__end_learning_rate=1e-5)
    held.keep(longer)
    rates = [schedules.build("linear", peak=1e-3, steps=c.optim.schedule_steps, end=1e-5) for c in (first, longer)]
    assert [float(rates[0](n)) for n in (50, 150)] == [float(rates[1](n)) for n in (50, 150)]
    assert float(rates[1](150)) == pytest.approx(1e-5)
