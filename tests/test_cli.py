"""jaxtrain/cli.py: what each command prints, its exit code, and that a refusal is a sentence that costs nothing.

All in this process; ``test_end_to_end.py`` starts real ones.
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import re
import shlex
import shutil
import signal
import sys

import jax
import pytest
from test_loop import (
    LENGTH,
    ROWS,
    TINY,
    Recorder,
    boom,
    contents,
    lines,
    session_cache,
    sigterm,
    steps_saved,
    write_corpus,
)

import jaxtrain.assemble
from jaxtrain import cli, config, loop, report
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.workdir import Workdir

pytestmark = pytest.mark.xdist_group("cli")  # its fixtures are dear: one worker for the file


def write_config(path, cache, corpus, **changes):
    """A config file as a person writes one: keys set one by one on the defaults."""
    values = config.flat(
        config.override(config.default(), TINY | {"data.paths": str(corpus), "compile_cache": str(cache)})
    )
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    sets = "".join(f"    c.{name} = {value!r}\n" for name, value in values.items())
    path.write_text(
        f"from jaxtrain import config\n\n\ndef get_config(arg=''):\n    c = config.default()\n{sets}    return c\n"
    )
    return path


@pytest.fixture(scope="module", autouse=True)
def jax_config():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    base = tmp_path_factory.mktemp("cli")
    changes = {"eval__every_steps": 3, "checkpoint__every_steps": 3}
    return write_config(base / "tiny.py", session_cache(tmp_path_factory), write_corpus(base / "text"), **changes)


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    """``(workdir, what it printed)`` of a run of 6 steps."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["train", f"--config={config_file}", f"--workdir={workdir}"]) == 0
    return workdir, printed.getvalue()


@pytest.fixture
def run(capsys):
    """Runs a command; returns ``(exit code, stdout, stderr)``."""

    def run(*argv):
        capsys.readouterr()
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as exit:  # argparse
            code = exit.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def refused(run):
    """A command that must be refused with a sentence that matches; nothing on stdout that looks like work."""

    def refused(sentence, *argv):
        code, out, err = run(*argv)
        assert code == 2, err
        assert "Traceback" not in err
        assert re.search(sentence, err, re.S), err
        assert err.startswith("jaxtrain: ")
        assert "step 1/" not in out
        return err

    return refused


# -- bad input: 2 ------------------------------------------------------------------------------------------------------

BAD_FLAGS = {
    "unknown key": (["optim.learning_rat=1"], r"unknown key optim.learning_rat; did you mean optim.learning_rate\?"),
    "unknown key of a known group": (["mesh.banana=1"], r"unknown key mesh.banana; .*mesh.data"),
    "key without a group": (["dropout=0.1"], r"unknown key dropout; did you mean model.dropout\?"),
    "word for a number": (["log_every_steps=many"], r"steps='many' is not a whole number"),
    "fraction for a whole number": (["eval.rows=1.5"], r"rows='1.5' is not a whole number"),
    "empty for a number": (["eval.rows="], r"eval.rows='' is not a whole number"),
    "no length": (["steps=many"], r"steps='many' is not a number or a length: write '300', '2 epochs', '50k samples'"),
    "less than a window": (["steps=1 sample"], r"steps='1 sample' is 0 micro-batches of \d+ rows, and a window takes"),
    "word for a switch": (["data.shuffle=maybe"], r"data.shuffle='maybe' is not true or false"),
    "not one of the choices": (["precision.compute=float64"], r"precision.compute='float64' is not one of bfloat16"),
    "out of bounds": (["model.dropout=1.5"], r"model.dropout=1.5 is outside 0 .. 0.99"),
    "not a number": (["optim.learning_rate=nan"], r"optim.learning_rate=nan"),
    "sequence longer than the model": (
        ["data.sequence_length=64"],
        r"sequence_length=64 is longer than model.max_length=32",
    ),
    "warm-up longer than the schedule": (
        ["optim.warmup_steps=200"],
        r"warmup_steps=200 must be less than the horizon of 200 steps",
    ),
    "no file": (["data.paths=nowhere/at/all"], r"'nowhere/at/all' matches no file"),
    "fewer rows than a batch": (["data.micro_batch_size=100000"], r"fewer than one micro-batch of 100000"),
    "batch over the mesh": (["mesh.data=8"], r"4 rows do not divide by the 8 devices .* use 8 rows"),
    "dim over the mesh": (
        ["mesh.fsdp=8", "model.d_model=20", "data.micro_batch_size=8"],
        r"embedding: dim 20 of \(320, 20\) is not divisible by mesh axis 'fsdp'=8",
    ),
    "heads": (["model.heads=3"], r"d_model=16 is not divisible by heads=3"),
    "more devices than there are": (["mesh.data=3"], r"needs 3 devices and 8 are here"),
    "two free axes": (["mesh.data=-1", "mesh.fsdp=-1"], r"at most one is -1"),
    "no place for compiled programs": (["compile_cache=/proc/nothing"], r"compile_cache=/proc/nothing cannot be made"),
    "prompt that is no text": (["sample.prompt=\udcff"], r"sample.prompt"),  # how Python passes a byte 0xff in argv
    "object store": (["data.paths=gs://bucket/text"], r"gs://bucket/text"),
    "sample's prompt too long for the model": (["sample.prompt=" + "x" * 40], r"sample.prompt"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags(refused, config_file, tmp_path, name):
    """And the workdir is not claimed: with the flag put right, the same line must run."""
    flags, sentence = BAD_FLAGS[name]
    workdir = tmp_path / "run"
    refused(sentence, "train", f"--config={config_file}", f"--workdir={workdir}", *[f"--config.{f}" for f in flags])
    assert not workdir.exists() or contents(workdir) == {}


SETS = "from jaxtrain import config\n\ndef get_config(arg=''):\n    c = config.default()\n    {}\n    return c\n"
BAD_FILES = {
    "no get_config": ("c = 1\n", r"tiny.py has no get_config"),
    "syntax error": ("def get_config(arg='')\n    return 1\n", r"tiny.py.*line 1"),
    "returns nothing": ("def get_config(arg=''):\n    pass\n", r"tiny.py.*get_config"),
    "returns a dict": ("def get_config(arg=''):\n    return {'steps': 3}\n", r"tiny.py.*get_config"),
    "takes no argument": ("def get_config():\n    return None\n", r"tiny.py.*get_config\(\) takes 0"),
    "unknown key": (SETS.format("c.optim.learning_rat = 1"), r"line 5: c.optim.learning_rat = 1: .*learning_rate"),
    "mistyped value": (SETS.format("c.eval.rows = 'ten'"), r"line 5: c.eval.rows = 'ten': .*str"),
}  # fmt: skip


def test_a_config_that_is_no_python_file(refused, copy, tmp_path):
    path = copy / "config.json"
    refused(rf"{path} is no Python file with get_config", "train", f"--config={path}", f"--workdir={tmp_path / 'run'}")


def test_a_compile_cache_on_gcs_needs_its_extra(refused, config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    cache = "--config.compile_cache=gs://bucket/cache"
    refused(r"needs gcsfs; install it with: pip install 'jaxtrain\[gcs\]'", "train", f"--config={config_file}",
            f"--workdir={tmp_path / 'run'}", cache)  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_config_files(refused, tmp_path, name):
    content, sentence = BAD_FILES[name]
    (tmp_path / "tiny.py").write_text(content)
    refused(sentence, "train", f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_a_config_file_that_is_not_there(refused, config_file, tmp_path):
    near = config_file.with_name("tinny.py")
    refused(rf"{near} is no file; there is {config_file}", "train", f"--config={near}", f"--workdir={tmp_path / 'run'}")
    refused(r"nowhere/x.py is no file", "train", "--config=nowhere/x.py", f"--workdir={tmp_path / 'run'}")
    refused(r"is no file", "train", f"--config={tmp_path}", f"--workdir={tmp_path / 'run'}")


TEXTS = {
    "empty files": ({"a.txt": b"", "b.txt": b""}, r"no text found"),
    "no text files": ({"a.bin": b"x"}, r"matches no file .*\.txt"),
    "not UTF-8": ({"a.txt": b"good text", "b.txt": b"ok \xff\xfe"}, r"b.txt: not UTF-8 at byte offset 3 \(byte 0xff\)"),
    "one document": ({"a.txt": b"0123456789" * 99}, r"one document \(a.txt\).*add a second file"),
    "too short": ({"a.txt": b"x" * 40, "b.txt": b"y" * 40}, r"holds \d rows, fewer than one micro-batch of 4"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_texts(refused, config_file, tmp_path, name):
    files, sentence = TEXTS[name]
    (tmp_path / "text").mkdir()
    for file, content in files.items():
        (tmp_path / "text" / file).write_bytes(content)
    train = ["train", f"--config={config_file}", f"--config.data.paths={tmp_path / 'text'}"]
    refused(sentence, *train, f"--workdir={tmp_path / 'run'}")
    assert contents(tmp_path / "run") == {}


@pytest.mark.parametrize(
    "argv", [[], ["trian"], ["train"], ["train", "--config=x.py"], ["eval"], ["config", "sow"], ["eval", "--step=x"]]
)
def test_a_line_that_is_no_command(run, argv):
    code, out, err = run(*argv)
    assert code == 2
    assert err.startswith("usage: jaxtrain")
    assert out == ""


def test_a_flag_without_a_value(refused, config_file):
    refused(
        r"--config.steps has no value; write --config.steps=VALUE", "train", f"--config={config_file}", "--config.steps"
    )


# -- a workdir that exists: refused, and nothing in it is touched ------------------------------------------------------


@pytest.mark.parametrize("where", ["start", "verify", "restore", "end"])
def test_PRE_01_sigterm_outside_of_the_loop(run, config_file, copy, monkeypatch, where):
    """While the text is read, or the picture drawn: the same exit code, the same advice, and the same line ends it."""
    target = {
        "start": (jaxtrain.assemble, "assemble"), "verify": (manifest, "problem"), "restore": (Checkpoints, "restore"),
        "end": (report, "finish"),
    }[where]  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(*target, lambda *_, **__: sigterm())
        code, _, err = run("train", f"--config={config_file}", f"--workdir={copy}")
    assert (code, signal.getsignal(signal.SIGTERM)) == (75, before)
    assert err.splitlines()[0] == "jaxtrain: SIGTERM: stopped. Go on with the same line:"
    assert shlex.split(err.splitlines()[1])[1] == "train"
    assert run("train", f"--config={config_file}", f"--workdir={copy}")[0] == 0


def test_PRE_01_sigterm_that_python_drops_is_not_forgotten(run, config_file, tmp_path, monkeypatch):
    """Raised in a destructor while a run starts, as in jax's callback of the collector: the loop stops all the same."""

    class Dies:
        def __del__(self):
            sigterm()

    real = jaxtrain.assemble.assemble

    def assemble(config):
        dies = Dies()
        del dies
        return real(config)

    monkeypatch.setattr(jaxtrain.assemble, "assemble", assemble)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    code, out, err = run("train", f"--config={config_file}", f"--workdir={tmp_path / 'run'}")
    assert code == 75, err
    assert "SIGTERM: stopped before a step was finished" in out


def test_a_compile_cache_in_an_object_store_is_left_to_jax(run, config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxtrain.assemble, "assemble", boom)
    cache = "--config.compile_cache=s3://bucket/cache"
    assert run("train", f"--config={config_file}", "--workdir=run", cache)[0] == 70
    assert jax.config.jax_compilation_cache_dir == "s3://bucket/cache"
    assert list(tmp_path.iterdir()) == []


DRIFT = ["model.dropout=0.2", "optim.b1=0.8", "seed=4", "data.micro_batch_size=8", "optim.schedule_steps=100"]
REFUSED_LATER = {  # these keys may change, so only assembling finds that the values cannot work
    "mesh of 3": (["mesh.data=3", "steps=9"], r"needs 3 devices and 8 are here"),
    "batch over the mesh": (["mesh.data=8", "steps=9"], r"4 rows do not divide by the 8 devices"),
}


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "copy")


@pytest.mark.parametrize("flag", DRIFT)
def test_another_experiment(refused, config_file, copy, flag):
    before = contents(copy)
    name = flag.split("=")[0]
    text = refused(
        rf"{copy} holds another experiment:\n  {name}: \S+ -> {flag.split('=')[1]}\nuse another --workdir",
        "train", f"--config={config_file}", f"--workdir={copy}", f"--config.{flag}",
    )  # fmt: skip
    assert text.count("->") == 1
    assert contents(copy) == before


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_a_refusal_leaves_a_run_as_it_was(refused, run, config_file, copy, name):
    flags, sentence = REFUSED_LATER[name]
    before = contents(copy)
    refused(sentence, "train", f"--config={config_file}", f"--workdir={copy}", *[f"--config.{flag}" for flag in flags])
    assert contents(copy) == before
    assert run("eval", f"--workdir={copy}")[0] == 0


def test_another_text(refused, config_file, copy, tmp_path):
    """The same paths, other bytes in them."""
    moved = write_corpus(tmp_path / "text")
    changed = write_config(
        tmp_path / "tiny.py", config_file.parent, moved, eval__every_steps=3, checkpoint__every_steps=3
    )
    run_config = json.loads((copy / "config.json").read_text())
    run_config["data"]["paths"] = [str(moved)]
    (copy / "config.json").write_text(json.dumps(run_config))
    train = [
        "train",
        f"--config={changed}",
        f"--workdir={copy}",
        f"--config.compile_cache={run_config['compile_cache']}",
    ]
    (moved / "0.txt").write_text("other text\n" * 200)
    before = contents(copy)
    train.append("--config.steps=9")
    refused(r"checkpoint 6 holds another experiment:\n  data.paths: .*\nif .* go on with --allow=data.paths", *train)
    refused(
        r"the data has changed since checkpoint 6 was saved.* go on .* --allow=data\.", *train, "--allow=data.paths"
    )
    refused(r"--allow=steps: this key may change when a run goes on; leave it out", *train, "--allow=steps")
    refused(r"unknown key dato", *train, "--allow=dato")
    assert contents(copy) == before


def test_a_workdir_that_cannot_be(refused, config_file, tmp_path):
    (tmp_path / "file").write_text("kept")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        refused(
            rf"workdir {workdir} cannot be written: .*choose another",
            "train",
            f"--config={config_file}",
            f"--workdir={workdir}",
        )
    assert (tmp_path / "file").read_text() == "kept"


def test_a_workdir_in_an_object_store(refused, config_file, tmp_path, monkeypatch):
    """Not available yet, and then not a directory of the name ``gs:`` either, which nobody looks for."""
    monkeypatch.chdir(tmp_path)
    refused(r"gs://bucket/run", "train", f"--config={config_file}", "--workdir=gs://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_in_use(refused, config_file, copy):
    before = contents(copy)
    with contextlib.closing(Workdir(copy)):
        refused(rf"{copy} is in use by another process", "train", f"--config={config_file}", f"--workdir={copy}")
    assert contents(copy) == before


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"steps": "many"}', '{"stepz": 3}'])
def test_a_config_json_that_is_none(refused, config_file, copy, content):
    (copy / "config.json").write_text(content)
    before = contents(copy)
    refused("", "train", f"--config={config_file}", f"--workdir={copy}")
    refused("", "eval", f"--workdir={copy}")
    assert contents(copy) == before


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_no_checkpoint_to_read(refused, config_file, copy, tmp_path, command):
    refused(rf"{tmp_path / 'none'} holds no run", command, f"--workdir={tmp_path / 'none'}")
    refused(rf"{tmp_path} holds no run", command, f"--workdir={tmp_path}")
    assert not (tmp_path / "none").exists()
    refused(r"has no checkpoint 4; there is 3, 6\.", command, f"--workdir={copy}", "--step=4")
    refused(r"has no checkpoint -1; there is 3, 6\.", command, f"--workdir={copy}", "--step=-1")
    refused(r"unknown key eval.row", command, f"--workdir={copy}", "--config.eval.row=4")
    refused(r"embedding.*-> float32\[320, 32\]", command, f"--workdir={copy}", "--config.model.d_model=32")
    shutil.rmtree(copy / "checkpoints")
    refused(r"has no checkpoint\b.*there is none\.", command, f"--workdir={copy}")
    assert not (copy / "checkpoints").exists()


def test_a_damaged_checkpoint_asked_for_by_name(refused, run, copy):
    data = max((copy / "checkpoints" / "6" / "state").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data.write_bytes(data.read_bytes()[:-1])
    before = contents(copy)
    refused(rf"checkpoint 6 .*{data.name}", "eval", f"--workdir={copy}", "--step=6")
    assert contents(copy) == before
    assert json.loads(run("eval", f"--workdir={copy}", "--step=3", "--json")[1])["step"] == 3


# -- an exception: 70 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_an_exception_is_70_with_its_trace_back(run, config_file, tmp_path, monkeypatch, error):
    def train(*_, **__):
        raise error("out of luck")

    monkeypatch.setattr(loop, "train", train)
    code, _, err = run("train", f"--config={config_file}", f"--workdir={tmp_path / 'run'}")
    assert code == 70
    assert err.startswith("Traceback")
    assert err.rstrip().endswith(f"{error.__name__}: out of luck")


def with_program(monkeypatch, at):
    """From here on a run calls ``at[n]()`` before its step n."""
    assemble = jaxtrain.assemble.assemble

    def changed(*args):
        experiment = assemble(*args)
        return dataclasses.replace(experiment, program=Recorder(experiment, at))

    monkeypatch.setattr(jaxtrain.assemble, "assemble", changed)


def test_an_exception_after_a_signal_is_no_preemption(run, config_file, tmp_path, monkeypatch):
    with_program(monkeypatch, {4: lambda: (sigterm(), boom())})
    code, _, err = run("train", f"--config={config_file}", f"--workdir={tmp_path / 'run'}")
    assert code == 70
    assert err.rstrip().endswith("Boom: boom")
    assert steps_saved(tmp_path / "run") == [3]


# -- stopped: 75 -------------------------------------------------------------------------------------------------------


def test_stopped_names_the_line_that_goes_on(run, config_file, tmp_path, monkeypatch):
    argv = ["train", f"--config={config_file}", f"--workdir={tmp_path / 'a run'}", "--config.sample.prompt=say 'x'"]
    with monkeypatch.context() as patched:
        with_program(patched, {4: sigterm})
        code, out, err = run(*argv)
    assert code == 75
    assert "stopped at step 4" in out
    again = out.rstrip().splitlines()[-1].strip()
    assert shlex.split(again) == ["jaxtrain", *argv]  # also where main was given its argv
    assert "Traceback" not in err
    assert steps_saved(tmp_path / "a run") == [3, 4]
    code, out, err = run(*shlex.split(again)[1:])
    assert code == 0, err
    assert "restored step 4" in out


def test_stopped_says_saved_only_of_what_is_saved(run, config_file, tmp_path, monkeypatch):
    with_program(monkeypatch, {2: sigterm})  # within the first window of four
    flags = ["--config.accumulation.k=4", "--config.data.micro_batch_size=2"]
    code, out, _ = run("train", f"--config={config_file}", f"--workdir={tmp_path / 'r'}", *flags)
    assert code == 75
    assert steps_saved(tmp_path / "r") == []
    assert "which is saved" not in out


def test_a_second_ctrl_c_is_130(run, config_file, tmp_path, monkeypatch):
    """At once and unsaved, in a sentence; what was saved before stays."""

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with_program(monkeypatch, {5: twice})
    code, _, err = run("train", f"--config={config_file}", f"--workdir={tmp_path / 'run'}")
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert steps_saved(tmp_path / "run") == [3]


# -- what the commands print -------------------------------------------------------------------------------------------


def test_train_tells_what_it_will_run(finished, config_file):
    out = finished[1]
    parameters = 2 * 320 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16
    assert f"{parameters:,} parameters, float32 compute" in out
    assert f"{ROWS} rows x {LENGTH} tokens x 1 micro-batch = {ROWS * LENGTH} tokens a step" in out
    assert "one device (1 x cpu)" in out
    assert re.search(r"training \d documents, .* held out \d documents", out)


@pytest.mark.parametrize("step", [None, 3, 6])
def test_eval_prints_the_evaluation_of_the_run(run, finished, step):
    workdir = finished[0]
    before = contents(workdir)
    code, out, err = run("eval", f"--workdir={workdir}", "--json", *([] if step is None else [f"--step={step}"]))
    assert code == 0, err
    (wanted,) = [line for line in lines(workdir, "eval/loss") if line["step"] == (step or 6)]
    del wanted["time_s"]
    assert json.loads(out) == wanted
    assert contents(workdir) == before
    shown = dict(
        re.split("  +", row) for row in run("eval", f"--workdir={workdir}", f"--step={step or 6}")[1].splitlines()
    )
    assert shown.keys() == wanted.keys()
    assert float(shown["eval/bits_per_byte"]) == pytest.approx(wanted["eval/bits_per_byte"], abs=5e-5)


def test_reading_disturbs_no_running_save(run, copy):
    """A trainer may be at work in the directory: what it has half written is not ours to clean up."""
    half_written = copy / "checkpoints" / "9.orbax-checkpoint-tmp-1"
    half_written.mkdir()
    (half_written / "data").write_text("half")
    before = contents(copy)
    for command in (["eval"], ["sample", "--tokens=3"]):
        assert run(command[0], f"--workdir={copy}", *command[1:])[0] == 0
    assert contents(copy) == before


def test_sample(run, finished):
    workdir, printed = finished
    before = contents(workdir)

    def sample(*flags):
        code, out, err = run("sample", f"--workdir={workdir}", *flags)
        assert code == 0, err
        return out

    hot = ["--prompt=abc ", "--tokens=20", "--temperature=1.0"]
    first = sample(*hot)
    assert first.startswith("abc ")
    assert sample(*hot) == first
    assert sample(*hot, "--seed=0") == first
    assert len({sample(*hot, f"--seed={seed}") for seed in range(4)}) > 1
    cold = {sample("--temperature=0", f"--seed={seed}") for seed in range(2)}
    assert len(cold) == 1
    assert cold.pop().startswith(TINY["sample.prompt"])  # the config's prompt
    at_the_end = printed.split("a sample of up to 8 tokens:\n")[1].split("\nnext: ")[0]
    shown = "\n".join(f"  | {line}" for line in sample(f"--seed={TINY['seed']}")[:-1].splitlines())
    assert at_the_end.rstrip("\n") == shown.rstrip("\n")  # train shows what the command gives for the run's seed
    assert contents(workdir) == before


def test_sample_stops_at_the_models_longest_text(run, refused, finished):
    """With ``tokens`` more than fit it makes what fits, and does not call that more than it is."""
    code, out, _ = run("sample", f"--workdir={finished[0]}", "--prompt=ab", "--tokens=1000", "--temperature=0")
    assert code == 0
    assert len(out.rstrip("\n")) < LENGTH
    refused(r"\b4\d\b.*\b32\b", "sample", f"--workdir={finished[0]}", "--prompt=" + "x" * 40)


@pytest.mark.parametrize(
    "flag", ["--tokens=-1", "--temperature=-1", "--temperature=nan", "--seed=-1", "--seed=4294967296"]
)
def test_sample_refuses(refused, finished, flag):
    refused(flag.strip("-").partition("=")[0], "sample", f"--workdir={finished[0]}", flag)


def test_config_show(run, config_file, finished):
    code, out, _ = run("config", "show", f"--config={config_file}", "--json", "--config.steps=7")
    assert code == 0
    shown = json.loads(out)
    assert shown.pop("steps") == 7
    kept = json.loads((finished[0] / "config.json").read_text())
    del kept["steps"]
    assert shown == kept
    code, out, _ = run("config", "show", f"--config={config_file}", "--config.steps=7")
    assert code == 0
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert table["steps"][:2] == ["7", "*"]
    assert table["model.d_model"][:2] == ["16", "width"]
    assert set(table) == {*config.KEYS, "*"}
    assert json.loads(run("config", "show", "--json")[1])["steps"] == config.KEYS["steps"].default


def test_config_alone_shows(run):
    assert run("config") == run("config", "show")
    assert re.search(r"^sample\.prompt +'def ' ", run("config")[1], re.M)  # a trailing space is seen


def test_version_either_way(run):
    assert run("--version")[1].split()[1] == importlib.metadata.version("jaxtrain")


@pytest.mark.parametrize(
    ("word", "hint"), [("--steps=10", "steps"), ("--optim.b1", "optim.b1"), ("--b1=0.9", "optim.b1")]
)
def test_a_key_without_its_prefix(refused, config_file, tmp_path, word, hint):
    train = ["train", f"--config={config_file}", f"--workdir={tmp_path / 'run'}"]
    refused(rf"unknown option {word}; a config key is given as --config\.{hint}=", *train, word)


def test_an_unknown_option(refused, copy):
    refused(r"unknown option --speed=1; see: jaxtrain eval --help", "eval", f"--workdir={copy}", "--speed=1")


def test_a_sample_that_does_not_fit_says_so(run, copy):
    code, out, err = run("sample", f"--workdir={copy}", "--prompt=ab", "--tokens=500")
    assert code == 0
    assert (
        err == f"jaxtrain: 500 tokens do not fit: model.max_length={LENGTH} leaves {LENGTH - 3} behind this prompt.\n"
    )
    assert out.startswith("ab")


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_sample_of_nothing(refused, copy, tokens):
    refused(rf"--tokens={tokens}: give 1 or more", "sample", f"--workdir={copy}", f"--tokens={tokens}")


def test_config_show_suggests(refused, config_file):
    refused(r"unknown key model.layer; did you mean model.layers\?", "config", "show", "--config.model.layer=2")
    refused(
        r"unknown key step; did you mean steps\?", "config", "show", f"--config={config_file}", "--config.step", "2"
    )


def test_both_ways_to_write_an_override(run, config_file):
    shown = [
        json.loads(run("config", "show", "--json", *words)[1])
        for words in (
            ["--config.steps=7"],
            ["--config.steps", "7"],
            ["--config", str(config_file), "--config.steps", "7"],
        )
    ]
    assert [s["steps"] for s in shown] == [7, 7, 7]
    assert shown[0] == shown[1] != shown[2]


def test_version(run):
    code, out, err = run("version")
    assert (code, err) == (0, "")
    told = dict(line.split(" ", 1) for line in out.splitlines())
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtrain"):
        assert told[name] == importlib.metadata.version(name)
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_free_key_may_change(run, config_file, copy):
    """``steps`` goes on where it was; the new value is kept."""
    argv = [
        "train",
        f"--config={config_file}",
        f"--workdir={copy}",
        "--config.steps=8",
        "--config.checkpoint.keep_last=9",
    ]
    code, out, err = run(*argv)
    assert code == 0, err
    assert "restored step 6" in out
    assert steps_saved(copy) == [3, 6, 8]
    assert [line["step"] for line in lines(copy)] == list(range(1, 9))
    assert json.loads((copy / "config.json").read_text())["steps"] == 8
    assert all(Checkpoints(copy / "checkpoints").problem(step) is None for step in (3, 6, 8))
