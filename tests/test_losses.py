"""Cross-entropy against float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.losses import BITS_PER_NAT, Loss, cross_entropy


def case(shape: tuple[int, ...], vocabulary: int, size: float = 3.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(*shape, vocabulary)).astype(np.float32) * np.float32(size)
    return logits, draw.integers(0, vocabulary, shape), draw.choice([0.0, 0.5, 1.0], shape).astype(np.float32)


def by_hand(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """``(sum, gradient of the sum)`` in float64."""
    x = np.float64(logits)
    x = x - x.max(-1, keepdims=True)
    p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    hot = np.eye(x.shape[-1])[targets]
    nats = np.log(np.exp(x).sum(-1)) - (x * hot).sum(-1)
    return float((nats * weights).sum()), (p - hot) * np.float64(weights)[..., None]


@pytest.mark.parametrize("shape", [(8,), (3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sum_weight_and_gradient(shape, dtype):
    logits, targets, weights = case(shape, 11)
    given = jnp.asarray(logits).astype(dtype)
    total, grads = jax.value_and_grad(lambda x: cross_entropy(x, jnp.asarray(targets), jnp.asarray(weights)).total)(
        given
    )
    wanted, gradient = by_hand(np.float64(given.astype(jnp.float32)), targets, weights)
    loss = cross_entropy(given, jnp.asarray(targets), jnp.asarray(weights))
    assert (loss.total.dtype, loss.weight.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose([total, loss.total, loss.weight], [wanted, wanted, weights.sum()], rtol=1e-6)
    np.testing.assert_allclose(
        np.float64(grads.astype(jnp.float32)), gradient, atol={"float32": 1e-6, "bfloat16": 4e-3}[dtype]
    )


def test_large_logits_stay_exact():
    loss = cross_entropy(jnp.float32([[1e4, 0, 0], [-1e4, 0, 0]]), jnp.asarray([0, 0]), jnp.ones(2))
    assert float(loss.total) == pytest.approx(1e4 + math.log(2), rel=1e-7)


def test_uniform_logits_cost_the_bits_of_the_vocabulary():
    loss = cross_entropy(jnp.zeros((4, 256), jnp.bfloat16), jnp.arange(4), jnp.ones(4))
    assert float(loss.total / loss.weight) * BITS_PER_NAT == pytest.approx(8.0, rel=1e-6)


def test_nothing_valid_is_zero_over_zero():
    loss = cross_entropy(jnp.ones((4, 3)), jnp.zeros(4, jnp.int32), jnp.zeros(4))
    assert (float(loss.total), float(loss.weight)) == (0.0, 0.0)


def test_a_loss_is_a_sum_a_weight_and_nothing_more_by_default():
    loss = Loss(jnp.float32(1), jnp.float32(2))
    assert (loss.model_state, loss.stats, dict(loss.metrics)) == (None, None, {})
