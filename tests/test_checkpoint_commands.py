"""``jaxtrain ckpt`` on small checkpoints: what is printed and the exit codes."""

import json
import os
import pathlib
import sys

import pytest
import safetensors.numpy

sys.path.insert(0, str(pathlib.Path(__file__).parent / "checkpoint"))
from test_store import at, save

from jaxtrain import cli
from jaxtrain.checkpoint.store import Checkpoints


@pytest.fixture
def workdir(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    save(checkpoints, 1000)
    checkpoints.save(2000, at(2000), run={"counts": {"step": 2000, "tokens": 2**33}, "data": {"sample_index": 7},
                     "platform": {"cores": 2}}, metrics={"eval/loss": 1.25})  # fmt: skip
    checkpoints.close()
    return tmp_path / "run"


@pytest.fixture
def ckpt(capsys):
    def run(*argv):
        code = cli.main(["ckpt", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_ls(ckpt, workdir):
    code, out, err = ckpt("ls", workdir)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err, lines[0]) == (0, "", ["step", "saved", "size", "state"])
    assert [(line[0], line[-1]) for line in lines[1:3]] == [("1,000", "committed"), ("2,000", "committed")]
    assert out.splitlines()[-1] == "committed: not read; prove them with --verify"
    code, out, _ = ckpt("ls", workdir / "checkpoints", "--verify", "--json")
    assert [(row["step"], row["state"]) for row in map(json.loads, out.splitlines())] == [
        (1000, "verified"),
        (2000, "verified"),
    ]
    assert code == 0


def test_damage_is_shown_and_makes_the_exit_code_1(ckpt, workdir):
    run_json = workdir / "checkpoints" / "1000" / "run.json"
    run_json.write_bytes(run_json.read_bytes().replace(b"step", b"stop", 1))
    assert ckpt("ls", workdir)[0] == 0  # nobody read it
    code, out, _ = ckpt("ls", workdir, "--verify")
    assert code == 1
    assert "damaged: run.json: checksum " in out
    code, out, _ = ckpt("verify", workdir)
    assert code == 1
    assert out.splitlines()[0].startswith(f"{workdir}/checkpoints/1000: damaged: run.json: checksum ")
    assert out.splitlines()[1] == f"{workdir}/checkpoints/2000: verified"
    assert ckpt("verify", "--deep", workdir / "checkpoints" / "2000")[:2] == (0, out.splitlines()[1] + "\n")


def test_show(ckpt, workdir):
    code, out, _ = ckpt("show", workdir / "checkpoints" / "2000")
    found = dict(line.split(None, 1) for line in out.splitlines())
    assert code == 0
    wanted = {"step": "2,000", "counts.tokens": "8,589,934,592", "eval/loss": "1.25", "tree.params": "2 x float32",
              "data.sample_index": "7", "platform.cores": "2", "processes": "1"}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    whole = json.loads(ckpt("show", "--json", workdir / "checkpoints" / "2000")[1])
    assert whole["tree"]["params/w"] == "float32[300]"


def test_cp_export_and_rm(ckpt, workdir, tmp_path):
    one = workdir / "checkpoints" / "1000"
    assert ckpt("cp", one, tmp_path / "there")[:2] == (0, f"copied and verified: {tmp_path}/there/1000\n")
    code, out, _ = ckpt("export", tmp_path / "there" / "1000", tmp_path / "out")
    assert (code, out) == (0, f"wrote {tmp_path}/out/model.safetensors\n")
    assert set(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")["w"].tolist()) == {1000.0}
    assert ckpt("rm", one)[:2] == (0, f"deleted {one}\n")
    assert os.listdir(workdir / "checkpoints") == ["2000"]
    code, out, err = ckpt("rm", workdir / "checkpoints" / "2000")
    assert (code, out) == (2, "")
    assert "is the newest checkpoint that is whole" in err
    assert ckpt("rm", "--force", workdir / "checkpoints" / "2000")[0] == 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [(["ls", "{0}/nowhere"], "{0}/nowhere holds no checkpoints; give a directory of checkpoints, one of them, or a "),
     (["show", "{0}"], "{0} is no single checkpoint; give one of 1000, 2000 in {0}/checkpoints."),
     (["cp", "{0}/checkpoints/1000", "s3://bucket/x"], "s3://bucket/x is not a place jaxtrain can commit to"),
     (["export", "{0}/checkpoints/1000", "{0}/out", "--ema"], "checkpoint {0}/checkpoints/1000 holds no ema")],
)  # fmt: skip
def test_mistakes_are_sentences(ckpt, workdir, argv, sentence):
    code, out, err = ckpt(*(word.format(workdir) for word in argv))
    assert (code, out) == (2, "")
    assert err.startswith("jaxtrain: ")
    assert sentence.format(workdir) in err
    assert err.count("\n") == 1
