"""Classifiers of digits, from the config to the report: what a second kind of data needs of everything."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from test_loop import bits, by_hand, change, lines, train

from jaxtrain import cli
from jaxtrain.assemble import assemble
from jaxtrain.config import ConfigError
from jaxtrain.data import digits

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "digits_resnet.py"
SMALL = {
    "steps": "4", "data.micro_batch_size": "8", "model.d_model": "4", "model.stages": "1", "mesh.fsdp": "1",
    "optim.warmup_steps": "0", "log_every_steps": "1", "checkpoint.every_steps": "0", "eval.every_steps": "0",
    "eval.rows": "30",
}  # fmt: skip
MLP = {"model.name": "mlp", "model.stages": "3", "model.running_stats": "sequential", "model.d_model": "16"}


def built(devices=None, **keys):
    given = SMALL | (MLP if keys.get("model__name") == "mlp" else {})
    given |= {name.replace("__", "."): str(value) for name, value in keys.items()}
    return assemble(cli.load_config(str(CONFIG), given), devices)


def test_the_digits_config_reaches_97_percent(tmp_path, capsys):
    """The whole command: set up, train, checkpoint, evaluate, report."""
    line = ["train", f"--config={CONFIG}", f"--workdir={tmp_path}", "--config.compile_cache=", "--config.mesh.fsdp=1"]
    assert cli.main(line) == cli.DONE
    out = capsys.readouterr().out
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["steps"], told["optim"]["schedule_steps"], told["optim"]["warmup_steps"]) == (224, 224, 22)
    accuracy = lines(tmp_path, "eval/accuracy")[-1]["eval/accuracy"]
    assert accuracy >= 0.97
    assert "accuracy on 359 held-out rows (higher is better):" in out
    assert f"  this model        {accuracy:.3f}\n  nearest centroid  0.880\n  majority class    0.100\n" in out
    assert "images/s" in out
    assert "a sample of" not in out
    assert out.rstrip().splitlines()[-1].startswith("next: jaxtrain eval --workdir=")
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert cli.main(["eval", f"--workdir={tmp_path}", "--json"]) == cli.DONE
    evaluated = json.loads(capsys.readouterr().out)
    assert (evaluated["step"], evaluated["eval/accuracy"], evaluated["eval/tokens"]) == (224, accuracy, 359)
    assert cli.main(["sample", f"--workdir={tmp_path}"]) == cli.BAD_INPUT
    assert "holds a resnet on digits, which writes no text; see it with: jaxtrain eval." in capsys.readouterr().err


@pytest.mark.parametrize("running", ["sequential", "pooled"])
def test_BN_eight_devices_train_as_one(running):
    """Statistics are those of all rows of a micro-batch, wherever they lie."""
    one, eight = (
        built(devices, model__running_stats=running, mesh__fsdp=fsdp, mesh__data=data)
        for devices, data, fsdp in ((jax.devices()[:1], 1, 1), (jax.devices(), 4, 2))
    )
    (state, records), (state8, records8) = (by_hand(e, 3) for e in (one, eight))
    np.testing.assert_allclose([r["loss"] for r in records], [r["loss"] for r in records8], rtol=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(s.model_state) for s in (state, state8)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_BN_the_config_chooses_how_statistics_move():
    """With one micro-batch a window both are one move; with two, sequential statistics make two."""
    moved = {
        (running, k): by_hand(built(jax.devices()[:1], model__running_stats=running, accumulation__k=k), 1)[0]
        for running in ("sequential", "pooled") for k in (1, 2)
    }  # fmt: skip
    var = {how: np.asarray(state.model_state["stem_norm"]["var"]) for how, state in moved.items()}
    np.testing.assert_allclose(var["sequential", 1], var["pooled", 1], rtol=1e-5)
    assert np.abs(var["sequential", 2] - 1).min() > 1.5 * np.abs(var["pooled", 2] - 1).min()


@pytest.mark.parametrize(
    "keys", [{}, {"model__name": "mlp", "model__dropout": 0.5}, {"accumulation__mechanism": "scan"}]
)
def test_a_resumed_classifier_is_the_unbroken_one(tmp_path, keys):
    """Running statistics and dropout too."""
    e = built(jax.devices()[:1], **keys)
    train(change(e, steps=2), tmp_path)
    again = built(jax.devices()[:1], **keys)
    resumed = train(again, tmp_path)
    assert bits(again.program.checkpoint_view(resumed.state)) == bits(e.program.checkpoint_view(by_hand(e, 4)[0]))
    assert set(lines(tmp_path, "eval/loss")[-1]) >= {"eval/accuracy", "eval/tokens"}


def test_smoothing_is_of_training_only():
    plain, smooth = (built(jax.devices()[:1], model__name="mlp", loss__label_smoothing=s) for s in (0.0, 0.5))
    (state, records), (_, smoothed) = by_hand(plain, 2), by_hand(smooth, 2)
    assert smoothed[1]["loss"] != records[1]["loss"]
    sums = [
        jax.device_get(e.program.evaluate(e.program.view(state), next(iter(e.held_out))))["loss"]
        for e in (plain, smooth)
    ]
    assert sums[0] == sums[1]


def test_what_will_run_is_described():
    told = "\n".join(built(jax.devices()[:1], steps="2 epochs").describe())
    assert "batch    8 rows x 2 micro-batches = 16 images a step; an epoch is 1,438 rows, 89.9 steps" in told
    assert "length   steps=2 epochs is 179 steps" in told
    assert "1 micro-batches of 8 rows at the end make no whole step" in told
    assert "data     training 1438 images; held out 359; " in told


def test_deferred_accumulation_has_no_running_statistics():
    with pytest.raises(ValueError, match=r"Scan\(defer=True\) with a model_state"):
        built(accumulation__mechanism="scan_deferred")
    built(accumulation__mechanism="scan_deferred", model__name="mlp")


def test_without_scikit_learn_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"needs scikit-learn; install it with: pip install 'jaxtrain\[examples\]'"):
        cli._assembled(cli.load_config(str(CONFIG), SMALL))


def test_rows_that_do_not_divide_are_told_before_the_data_is_read(monkeypatch):
    monkeypatch.setattr(digits, "load_digits", lambda *_: pytest.fail("the digits were read"))
    c = cli.load_config(str(CONFIG), SMALL | {"data.micro_batch_size": "6", "mesh.fsdp": "4"})
    with pytest.raises(ValueError, match="6 rows do not divide"):
        assemble(c, jax.devices()[:4])
