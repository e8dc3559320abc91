"""How long a run is: lengths in epochs, samples and tokens, and batch-size warm-up, from config to last step."""

import io
import json

import jax
import numpy as np
import pytest
from test_loop import LENGTH, At, Boom, boom, change, lines, restore, saved_bits, steps_logged, tiny_config, train

from jaxtrain import assemble as assemble_lib
from jaxtrain import sharding
from jaxtrain.assemble import assemble
from jaxtrain.config import ConfigError

EPOCH = 5  # rows


@pytest.fixture(scope="module")
def five_rows(tmp_path_factory):
    """Two documents of five rows, one of them held out."""
    directory = tmp_path_factory.mktemp("five")
    for name in "ab":
        words = np.random.RandomState(ord(name)).randint(1000, 9999, 100)
        (directory / f"{name}.txt").write_text(" ".join(map(str, words))[: EPOCH * LENGTH])
    return directory


def built(corpus, **keys):
    keys = {"data__micro_batch_size": 1, "optim__schedule_steps": 0, "optim__ema": 0.0, **keys}
    return assemble(tiny_config(corpus, **keys))


def test_ACC_07_a_window_longer_than_an_epoch_goes_on_into_the_next(five_rows, tmp_path):
    """20 micro-batches in windows of 8: two are planned, two are done, four rows are left out; and it is said."""
    e = built(five_rows, accumulation__k=8, steps="4 epochs", optim__schedule="linear", optim__learning_rate=1.0)
    assert len(e.data.train) == EPOCH
    assert (e.config.steps, e.config.optim.schedule_steps) == (2, 2)
    told = "\n".join(e.describe())
    assert "MORE than an epoch of 5 rows: a step takes each row 1.6 times" in told
    assert "length   steps=4 epochs is 2 steps\n" in told
    assert "length   4 micro-batches of 1 rows at the end make no whole step and are left out" in told
    outcome = train(e, tmp_path)
    assert (outcome.step, steps_logged(tmp_path)) == (2, [1, 2])
    assert lines(tmp_path)[-1]["learning_rate"] == 0.5  # of step plan - 1, from 1 to 0 in two
    saved = restore(e, tmp_path, 2)
    assert (saved.run["counts"]["micro_step"], saved.run["data"]["sample_index"]) == (16, 16)


def test_ACC_16_warm_up_of_the_batch_through_the_loop_and_a_resume(five_rows, tmp_path):
    """k = 1, 1, 2, 2, 3: rows, tokens and windows by hand, and the same bits when it is cut in the middle."""
    e = built(five_rows, accumulation__k=3, accumulation__warmup="2:1,4:2", steps="9 samples", optim__warmup_steps=1)
    assert e.config.steps == 5
    assert "(k is 1 until window 2, 2 until window 4); an epoch is 5 rows, 1.7 steps" in e.describe()[1]
    whole = train(e, tmp_path / "whole")
    found = [(line["step"], line["micro_step"], line["samples"]) for line in lines(tmp_path / "whole")]
    assert found == [(1, 1, 1), (2, 2, 2), (3, 4, 4), (4, 6, 6), (5, 9, 9)]
    with pytest.raises(Boom):
        train(change(e, checkpoint__every_steps=3), tmp_path / "cut", At("save", 3, boom))
    resumed = train(e, tmp_path / "cut")
    assert saved_bits(e, resumed.state) == saved_bits(e, whole.state)
    numbers = [[(line["loss"], line["micro_step"]) for line in lines(tmp_path / name)] for name in ("whole", "cut")]
    assert numbers[0] == numbers[1]
    assert e.program.traces["step"] == 1  # one program for all stages


def test_the_directory_of_a_run_keeps_steps(five_rows, tmp_path):
    """What was planned stays planned: another reading of the same text is the same run, and a longer one goes on."""
    train(built(five_rows, steps="2 epochs", optim__schedule="constant"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 10
    again = train(built(five_rows, steps=10, optim__schedule="constant"), tmp_path)
    assert again.step == 10
    assert train(built(five_rows, steps="3 epochs", optim__schedule="constant"), tmp_path).step == 15
    with pytest.raises(ConfigError, match=r"optim\.schedule_steps: 0 -> 10"):
        train(built(five_rows, steps="2 epochs"), tmp_path)


def test_a_program_without_data_cannot_count_epochs(five_rows):
    c = tiny_config(five_rows, steps="2 epochs")
    with pytest.raises(ConfigError, match="steps='2 epochs' needs the data to be counted"):
        assemble_lib.make_program(c, sharding.make_mesh(devices=jax.devices()[:1]))
    samples = tiny_config(five_rows, steps="64 tokens", data__micro_batch_size=1, optim__schedule_steps=0)
    program = assemble_lib.make_program(samples, sharding.make_mesh(devices=jax.devices()[:1]))
    assert program.abstract_state is not None


def test_a_finished_run_says_so_in_windows(five_rows, tmp_path):
    e, stream = built(five_rows, steps="1 epoch"), io.StringIO()
    train(e, tmp_path)
    train(e, tmp_path, stream=stream)
    assert "all 5 steps are done already" in stream.getvalue()
