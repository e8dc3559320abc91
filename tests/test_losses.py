"""Cross-entropy against float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.losses import BITS_PER_NAT, Loss, chunked_cross_entropy, classification, cross_entropy


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


# ---- more terms --------------------------------------------------------------------------------------------------


def with_terms(logits, targets, weights, z_loss, smoothing):
    """``(sum, gradient of the sum)`` of cross-entropy, z-loss and label smoothing in float64."""
    x = np.float64(logits)
    log_z = x.max(-1) + np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))
    p = np.exp(x - log_z[..., None])
    wanted = (1 - smoothing) * np.eye(x.shape[-1])[targets] + smoothing / x.shape[-1]
    items = log_z - (x * wanted).sum(-1) + z_loss * log_z**2
    gradient = p * (1 + 2 * z_loss * log_z)[..., None] - wanted
    return float((items * weights).sum()), gradient * np.float64(weights)[..., None]


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.3)])
def test_z_loss_and_label_smoothing(z_loss, smoothing):
    logits, targets, weights = case((3, 5), 11)
    wanted, gradient = with_terms(logits, targets, weights, z_loss, smoothing)

    def total(x):
        return cross_entropy(
            x, jnp.asarray(targets), jnp.asarray(weights), z_loss=z_loss, label_smoothing=smoothing
        ).total

    got, grads = jax.value_and_grad(total)(jnp.asarray(logits))
    assert float(got) == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(grads, gradient, atol=1e-6)


# ---- in chunks ---------------------------------------------------------------------------------------------------


def head_case(dtype="float32", length=12, vocabulary=36):
    draw = np.random.default_rng(1)
    hidden = draw.normal(size=(3, length, 8)).astype(np.float32)
    kernel = draw.normal(size=(8, vocabulary)).astype(np.float32)
    targets = draw.integers(0, vocabulary, (3, length))
    weights = draw.choice([0.0, 0.5, 1.0], (3, length)).astype(np.float32)
    return jnp.asarray(hidden, dtype), jnp.asarray(kernel, dtype), jnp.asarray(targets), jnp.asarray(weights)


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (1e-2, 0.3)])
@pytest.mark.parametrize("chunks", [1, 2, 9, 36])
def test_chunks_are_the_whole_in_value_and_gradients(chunks, z_loss, smoothing):
    hidden, kernel, targets, weights = head_case()
    x, w = np.float64(hidden), np.float64(kernel)
    wanted, d_logits = with_terms(x @ w, np.asarray(targets), np.asarray(weights), z_loss, smoothing)

    def total(hidden, kernel):
        loss = chunked_cross_entropy(
            hidden, kernel, targets, weights, chunks=chunks, z_loss=z_loss, label_smoothing=smoothing
        )
        return loss.total * 2.0, loss

    (_, loss), (d_hidden, d_kernel) = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, kernel)
    assert (float(loss.total), float(loss.weight)) == (
        pytest.approx(wanted, rel=1e-6), pytest.approx(float(np.asarray(weights).sum())),
    )  # fmt: skip
    np.testing.assert_allclose(d_hidden, 2 * d_logits @ w.T, atol=2e-5)
    np.testing.assert_allclose(d_kernel, 2 * np.einsum("bld,blv->dv", x, d_logits), atol=2e-5)


def test_chunks_know_the_gradient_of_the_weights():
    hidden, kernel, targets, weights = head_case()
    logits = jnp.einsum("bld,dv->blv", hidden, kernel)
    whole = jax.grad(lambda w: cross_entropy(logits, targets, w).total)(weights)
    parts = jax.grad(lambda w: chunked_cross_entropy(hidden, kernel, targets, w, chunks=4).total)(weights)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


def test_chunks_sum_the_gradient_of_bfloat16_hidden_states_in_float32():
    """1024 chunks of equal gradients: a bfloat16 sum would stop growing at 256 of them."""
    hidden, kernel = jnp.zeros((1, 1, 1), jnp.bfloat16), jnp.ones((1, 1024), jnp.bfloat16)
    one = (jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 1024.0))
    grads = jax.grad(lambda h: chunked_cross_entropy(h, kernel * 1.0, *one, chunks=1024, z_loss=0.5).total)(hidden)
    # d/dh of 1024 * (z_loss * log(Z)^2 - h): the softmax' own part is 0, as all logits are equal
    np.testing.assert_allclose(float(grads[0, 0, 0]), 1024 * math.log(1024), rtol=2**-8)
    assert grads.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_chunks_bear_logits_that_exp_does_not(size):
    hidden, kernel, targets, weights = head_case()
    logits = np.float64(hidden * size) @ np.float64(kernel)
    wanted, _ = with_terms(logits, np.asarray(targets), np.asarray(weights), 0.0, 0.0)
    loss = chunked_cross_entropy(hidden * size, kernel, targets, weights, chunks=4)
    assert float(loss.total) == pytest.approx(wanted, rel=1e-5)


def test_chunks_never_hold_all_logits():
    """Of the shapes in the compiled program, forward and backward, none has all positions times the vocabulary."""
    hidden, kernel, targets, weights = head_case(length=64, vocabulary=1000)

    def compiled(loss):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, kernel).compile()

    chunked = compiled(lambda h, k: chunked_cross_entropy(h, k, targets, weights, chunks=10).total)
    whole = compiled(lambda h, k: cross_entropy(jnp.einsum("bld,dv->blv", h, k), targets, weights).total)
    big = [shape for shape in ("f32[3,64,1000]", "f32[192,1000]") if shape in chunked.as_text()]
    assert not big
    assert any(shape in whole.as_text() for shape in ("f32[3,64,1000]", "f32[192,1000]"))
    assert chunked.memory_analysis().temp_size_in_bytes < whole.memory_analysis().temp_size_in_bytes / 3


@pytest.mark.parametrize(("chunks", "near"), [(0, "1, 2, 3"), (5, "3, 4, 6"), (100, "12, 18, 36")])
def test_chunks_divide_the_vocabulary(chunks, near):
    with pytest.raises(ValueError, match=f"chunks={chunks} does not divide the vocabulary of 36 tokens; use {near}"):
        chunked_cross_entropy(*head_case(), chunks=chunks)


# ---- classes -----------------------------------------------------------------------------------------------------


def test_classification_counts_what_is_right_and_valid():
    logits = jnp.float32([[2, 0, 0], [0, 2, 0], [0, 0, 2], [2, 0, 0]])
    labels, weights = jnp.asarray([0, 2, 2, 1]), jnp.float32([1, 1, 1, 0])
    loss = classification(logits, labels, weights)
    wanted, _ = by_hand(np.asarray(logits), np.asarray(labels), np.asarray(weights))
    assert (float(loss.total), float(loss.weight)) == (pytest.approx(wanted, rel=1e-6), 3.0)
    assert [float(x) for x in loss.metrics["accuracy"]] == [2.0, 3.0]
    assert [float(x) for x in classification(logits, labels).metrics["accuracy"]] == [2.0, 4.0]
