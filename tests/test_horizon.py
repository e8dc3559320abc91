"""Lengths of training: each unit by hand, whole windows only, and what is left over."""

from fractions import Fraction

import pytest

from jaxtrain import horizon, optim
from jaxtrain.horizon import Batching


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("300 steps", 300, "steps"), ("1 step", 1, "steps"), ("2 epochs", 2, "epochs"),
        ("0.5 epoch", Fraction(1, 2), "epochs"), ("1.5B tokens", 1_500_000_000, "tokens"),
        ("1.5Btokens", 1_500_000_000, "tokens"), ("1_000 samples", 1000, "samples"), ("50k samples", 50_000, "samples"),
        (" 10 M  tokens ", 10_000_000, "tokens"), ("2T tokens", 2 * 10**12, "tokens"),
        ("1e9 tokens", 10**9, "tokens"), ("0.1 epochs", Fraction(1, 10), "epochs"),
        ("123456789012345678901 tokens", 123456789012345678901, "tokens"),
    ],
)  # fmt: skip
def test_a_length_is_read_exactly(text, amount, unit):
    assert horizon.parse(text) == (amount, unit)


@pytest.mark.parametrize(
    "text", ["", "3", "epochs", "-1 epochs", "1,000 tokens", "2 weeks", "1e400 tokens", "1.5 K tokens"]
)
def test_what_is_no_length_is_told(text):
    with pytest.raises(ValueError, match=r"is not a number or a length: write '300', '2 epochs', '50k samples' or"):
        horizon.parse(text)


def test_each_unit_by_hand():
    """Windows of 3 x 4 = 12 rows, 16 tokens each: 192 tokens; an epoch of 100 rows."""
    of = Batching(rows=4, k=3, weight_per_row=16, epoch_rows=100)
    assert (of.windows(7), of.windows("7 steps")) == (7, 7)
    assert (of.windows("24 samples"), of.windows("35 samples"), of.windows("36 samples")) == (2, 2, 3)
    assert (of.windows("384 tokens"), of.windows("575 tokens"), of.windows("576 tokens")) == (2, 2, 3)
    assert (of.windows("1 epoch"), of.windows("3 epochs"), of.windows("0.5 epochs")) == (8, 25, 4)
    assert (of.micro_batches("1 epoch"), of.left_over("1 epoch"), of.left_over("3 epochs")) == (25, 1, 0)
    assert (of.micro_batches(7), of.left_over(7), of.left_over("7 steps"), of.windows(0)) == (21, 0, 0, 0)


def test_ACC_16_six_micro_batches_under_a_schedule_of_two_then_three():
    """Rows one at a time, k = 2 in the first window and 3 after: windows of 2 and 3, one micro-batch left."""
    of = Batching(rows=1, k=3, warmup=((1, 2),))
    assert (of.micro_batches("6 samples"), of.windows("6 samples"), of.left_over("6 samples")) == (6, 2, 1)
    assert (of.windows("8 samples"), of.left_over("8 samples")) == (3, 0)


def test_a_warm_up_is_counted_as_it_runs():
    """Against one window after the other, k as ``MultiSteps`` would ask for it."""
    warmup, k = ((3, 1), (5, 4), (9, 2)), 7
    of, schedule = Batching(rows=2, k=k, warmup=warmup), optim.MultiSteps(optim.stepwise(warmup, k))
    for samples in range(2, 200, 2):
        used = windows = 0
        while used + schedule.micro_batches(windows) <= samples // 2:
            used += schedule.micro_batches(windows)
            windows += 1
        assert (of.windows(f"{samples} samples"), of.left_over(f"{samples} samples")) == (windows, samples // 2 - used)
        assert of.micro_batches(windows) == used


def test_a_long_warm_up_is_counted_at_once():
    of = Batching(rows=1, k=2, warmup=((10**12, 1),))
    assert of.windows("3T samples") == 2 * 10**12


@pytest.mark.parametrize(
    ("length", "match"),
    [
        ("7 samples", r"'7 samples' is 1 micro-batches of 4 rows, and a window takes 2; give '8 samples' or more"),
        ("0 epochs", r"'0 epochs' is 0 micro-batches of 4 rows, and a window takes 2"),
        ("1.5 steps", r"'1.5 steps': give a whole number of steps"),
        ("soon", r"'soon' is not a number or a length"),
    ],
)  # fmt: skip
def test_what_makes_no_window_is_told(length, match):
    with pytest.raises(ValueError, match=match):
        Batching(rows=4, k=2, epoch_rows=10).windows(length)


def test_epochs_need_the_data():
    with pytest.raises(ValueError, match="'2 epochs' needs the data to be counted; give a number of steps, samples or"):
        Batching(rows=4).windows("2 epochs")
