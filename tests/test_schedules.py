"""Schedules against numbers worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import schedules

COSINE = {"peak": 1e-3, "end": 1e-4, "warmup_steps": 10, "steps": 100}


def values(schedule, steps) -> list[float]:
    return [float(schedule(step)) for step in steps]


def test_SCH_01_warmup_is_included_and_counted_once():
    schedule = schedules.build("warmup_cosine", **COSINE)
    wanted = [0, 5e-4, 1e-3, 5.5e-4, 1.06837e-4, 1e-4, 1e-4]
    np.testing.assert_allclose(values(schedule, (0, 5, 10, 55, 95, 100, 120)), wanted, rtol=6e-6, atol=1e-12)
    assert 1e-4 < float(schedule(99)) < 1.06837e-4
    cosine = [1e-4 + 9e-4 * (1 + math.cos(math.pi * (t - 10) / 90)) / 2 for t in range(10, 101)]
    np.testing.assert_allclose(values(schedule, range(10, 101)), cosine, rtol=3e-6)


def test_linear_reaches_its_end_at_the_horizon():
    schedule = schedules.build("linear", peak=1.0, end=0.2, warmup_steps=2, steps=10)
    np.testing.assert_allclose(
        values(schedule, range(12)), [0, 0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2], rtol=1e-6
    )


def test_constant_after_its_warmup():
    schedule = schedules.build("constant", peak=0.3, warmup_steps=3, steps=10)
    np.testing.assert_allclose(values(schedule, (0, 1, 2, 3, 9, 99)), [0, 0.1, 0.2, 0.3, 0.3, 0.3], rtol=1e-6)


def test_warmup_stable_decay():
    schedule = schedules.build("warmup_stable_decay", peak=1.0, end=0.2, warmup_steps=2, decay_steps=4, steps=10)
    wanted = [0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    np.testing.assert_allclose(values(schedule, range(12)), wanted, rtol=1e-6)
    a_fifth = schedules.build("warmup_stable_decay", peak=1.0, steps=10)
    np.testing.assert_allclose(values(a_fifth, (0, 8, 9, 10)), [1, 1, 0.5, 0], rtol=1e-6)


def test_inverse_sqrt_has_no_horizon():
    schedule = schedules.build("inverse_sqrt", peak=0.1, warmup_steps=4, steps=10)
    wanted = [0, 0.025, 0.05, 0.075, 0.1, 0.1 * (4 / 5) ** 0.5, 0.05, 0.01]
    np.testing.assert_allclose(values(schedule, (0, 1, 2, 3, 4, 5, 16, 400)), wanted, rtol=1e-6)
    at_once = schedules.build("inverse_sqrt", peak=0.1, steps=10)
    np.testing.assert_allclose(values(at_once, (0, 1, 4, 100)), [0.1, 0.1, 0.05, 0.01], rtol=1e-6)


@pytest.mark.parametrize("decay_steps", [9, 100])
def test_a_decay_that_does_not_fit(decay_steps):
    with pytest.raises(ValueError, match=rf"a decay of {decay_steps} steps does not fit behind a warm-up of 2 steps"):
        schedules.build("warmup_stable_decay", peak=1.0, steps=10, warmup_steps=2, decay_steps=decay_steps)


@pytest.mark.parametrize(("name", "at_5"), [("constant", 1.0), ("linear", 0.5), ("warmup_cosine", 0.5)])
def test_without_a_warmup_it_starts_at_the_peak(name, at_5):
    schedule = schedules.build(name, peak=1.0, steps=10)
    np.testing.assert_allclose(values(schedule, (0, 5)), [1.0, at_5], rtol=1e-6)


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_traced_and_host_values_agree(name, warmup_steps):
    schedule = schedules.build(name, peak=0.1, end=0.01, warmup_steps=warmup_steps, steps=20)
    with jax.numpy_dtype_promotion("standard"):  # as the train step calls it
        traced = jax.jit(lambda steps: jnp.stack([jnp.asarray(schedule(s), jnp.float32) for s in steps]))
        got = traced([jnp.int32(s) for s in range(0, 25, 4)])
    np.testing.assert_allclose(got, values(schedule, range(0, 25, 4)), rtol=1e-6, atol=1e-9)


def test_a_peak_of_zero_is_zero():
    assert values(schedules.build("warmup_cosine", peak=0.0, steps=10), (0, 5, 10)) == [0, 0, 0]


BAD = [
    ({"name": "cosine"}, "schedule 'cosine' is not one of constant, linear, warmup_cosine"),
    ({"warmup_steps": 100}, "warm-up of 100 steps must be shorter than its horizon of 100 steps"),
    ({"warmup_steps": -1}, "warm-up of -1 steps"),
    ({"steps": 0, "warmup_steps": 0}, "horizon of 0 steps"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text[:20] for _, text in BAD])
def test_errors(change, text):
    with pytest.raises(ValueError, match=text):
        schedules.build(**({"name": "warmup_cosine"} | COSINE | change))
