"""``kill -9`` at any moment, then the same line again: the end is that of a run that nobody disturbed, bit for bit."""

import json
import os
import random
import re
import time

import pytest
from test_cli import write_config
from test_end_to_end import final_bits, run, started, train_line
from test_loop import lines, session_cache, steps_saved, write_corpus

from jaxtrain.checkpoint.store import Checkpoints

pytestmark = pytest.mark.xdist_group("kill")  # its fixtures are dear: one worker for the file
STEPS, SAVE, EVAL = 60, 5, 7


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    base = tmp_path_factory.mktemp("kill")
    changes = {"steps": STEPS, "checkpoint__every_steps": SAVE, "eval__every_steps": EVAL, "sample__tokens": 0}
    changes |= {"accumulation__k": 2}  # so that a kill falls into the middle of windows, too
    return write_config(base / "tiny.py", session_cache(tmp_path_factory), write_corpus(base / "text"), **changes)


@pytest.fixture(scope="module")
def unkilled(config_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unkilled") / "run"
    code, _, err = run(train_line(config_file, workdir))
    assert code == 0, err
    return workdir


def half_written(workdir):
    """Waits, for a while, until a save is on its way."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
        time.sleep(0.0005)


def check_intact(workdir):
    """All that claims to be a checkpoint is one."""
    checkpoints = Checkpoints(workdir / "checkpoints")
    assert [checkpoints.problem(step) for step in checkpoints.steps()] == [None] * len(checkpoints.steps())
    assert not list(workdir.glob("checkpoints/*.damaged*"))


def check_finished(workdir, unkilled):
    assert final_bits(workdir) == final_bits(unkilled)
    check_intact(workdir)
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["50", "55", "60"]
    exact = ("step", "micro_step", "tokens", "loss", "grad_norm", "learning_rate", "skipped_steps")
    found, wanted = ([[line[key] for key in exact] for line in lines(path)] for path in (workdir, unkilled))
    assert found == wanted  # each step once, in order, with the numbers of the unbroken run
    assert [line[0] for line in found] == list(range(1, STEPS + 1))
    evaluations = [[(r["step"], r["eval/loss"]) for r in lines(path, "eval/loss")] for path in (workdir, unkilled)]
    assert evaluations[0] == evaluations[1]
    assert [step for step, _ in evaluations[0]] == [*range(EVAL, STEPS, EVAL), STEPS]


DIES = """
import os, time
where, _, step = os.environ.get("DIES", "").partition(" ")
if where:
    from jaxtrain import metrics
    from jaxtrain.checkpoint import manifest

    def dying(function, is_there):
        def dies(*args):
            result = function(*args)
            if is_there(*args):
                time.sleep(1)  # what goes on behind gets on with it
                os.kill(os.getpid(), 9)
            return result
        return dies

    if where == "log":
        metrics.JsonlWriter.on_log = dying(metrics.JsonlWriter.on_log, lambda _, line: line["step"] == int(step))
    if where == "save":
        manifest.write = dying(manifest.write, lambda files, name, entries: name.startswith(step + "."))
"""


@pytest.fixture(scope="module")
def killed_twice(config_file, tmp_path_factory):
    """``(workdir, what the last attempt said)``: killed 3 steps after a save, then just before a commit."""
    base = tmp_path_factory.mktemp("killed")
    (base / "sitecustomize.py").write_text(DIES)
    argv, env = train_line(config_file, base / "run"), os.environ | {"PYTHONPATH": str(base)}
    for where, saved in (("log 13", 10), ("save 20", 15)):
        code, _, err = run(argv, env=env | {"DIES": where})
        assert code == -9, err
        assert steps_saved(base / "run")[-1] == saved
        check_intact(base / "run")
    code, out, err = run(argv)
    assert (code, err) == (0, "")
    return base / "run", out


def test_killed_twice(killed_twice, unkilled):
    workdir, out = killed_twice
    assert "restored step 15" in out
    check_finished(workdir, unkilled)


def test_rework_is_counted(killed_twice):
    """What a killed attempt did beyond its last save is in metrics.jsonl, though not in goodput.json."""
    content = json.loads((killed_twice[0] / "goodput.json").read_text())
    rework_s = [attempt["seconds"]["rework"] for attempt in content["attempts"]]
    assert rework_s[0] == 0
    assert rework_s[1] > 0  # steps 12 and 13; the first step after a restore counts as compilation
    assert rework_s[2] > 0  # from step 17 on
    assert content["attempts"][-1]["last_step"] == STEPS


MOMENTS = {
    "start": (None, lambda rng, workdir: time.sleep(rng.uniform(0, 3))),
    "assembling": (r"^model", lambda rng, workdir: time.sleep(rng.uniform(0, 0.3))),
    "compile": (r"^compiling", lambda rng, workdir: time.sleep(rng.uniform(0, 1))),
    "first steps": (r"^step \d+/\d+  loss", lambda rng, workdir: time.sleep(rng.uniform(0, 0.02))),
    "steps": (r"^step \d+[2-46-9]/\d+  loss", lambda rng, workdir: time.sleep(rng.uniform(0, 0.05))),
    "eval": (r"^step (7|14|21|28|35|42|49|56)/\d+  loss", lambda rng, workdir: time.sleep(rng.uniform(0, 0.05))),
    "after eval": (r"^step \d+/\d+  eval", lambda rng, workdir: time.sleep(rng.uniform(0, 0.01))),
    "save": (r"^step \d+[49]/\d+  loss", lambda rng, workdir: half_written(workdir)),
    "late in a save": (
        r"^step \d+[49]/",
        lambda rng, workdir: (half_written(workdir), time.sleep(rng.uniform(0, 0.06))),
    ),
    "end": (rf"^step {STEPS}/\d+  eval", lambda rng, workdir: time.sleep(rng.uniform(0, 1.5))),
}


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_ten_moments(config_file, unkilled, tmp_path, seed):
    """One moment of each kind, in an order and at times drawn from the seed; the end of a run is the last."""
    rng, workdir = random.Random(seed), tmp_path / "run"
    moments = [name for name in MOMENTS if name != "end"]
    rng.shuffle(moments)
    for name in [*moments, "end"]:
        told, then = MOMENTS[name]
        with started(train_line(config_file, workdir)) as process:
            if told is not None:
                for line in process.stdout:
                    if re.search(told, line):
                        break
            then(rng, workdir)
            process.kill()
            err = process.stderr.read()
        assert "Traceback" not in err, (name, err)
        assert "damaged" not in err, (name, err)
        if (workdir / "checkpoints").exists():
            check_intact(workdir)
        if (workdir / "metrics.jsonl").exists():
            steps = [line["step"] for line in lines(workdir)]
            assert steps == list(range(1, len(steps) + 1)), name
    code, _, err = run(train_line(config_file, workdir))
    assert code == 0, err
    check_finished(workdir, unkilled)
    assert len(json.loads((workdir / "goodput.json").read_text())["attempts"]) <= 11
