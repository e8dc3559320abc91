"""Losses as sums and weights, so that any number of micro-batches and devices gives the one big batch's mean."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Loss(NamedTuple):
    """What a loss function returns.

    Attributes:
        total: SUM of the loss over valid items, float32 scalar.
        weight: how many valid items, float32 scalar; the step divides by its sum over micro-batches and devices.
        model_state: new mutable state (BatchNorm), of the structure that was given; None: unchanged.
        stats: additive statistics, merged over a window by ``merge_stats``; None: there are none.
        metrics: name -> (sum, weight), float32 scalars; reported as sum over the window / weight over the window.
    """

    total: jax.Array
    weight: jax.Array
    model_state: Any = None
    stats: Any = None
    metrics: Mapping[str, tuple[jax.Array, jax.Array]] = {}


BITS_PER_NAT = 1 / math.log(2)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Loss:
    """Softmax cross-entropy in nats.

    Args:
        logits: float ``[..., V]``; the softmax is computed in float32.
        targets: int ``[...]`` in ``0 .. V-1``.
        weights: float32 ``[...]``: 1 for a valid item, 0 for padding; anything between is a weight.
        z_loss: adds ``z_loss * log(Z)**2`` to each item, which keeps the softmax's normaliser Z near 1 (Chowdhery et
            al. 2022, "PaLM", arXiv 2204.02311, section 5: 1e-4).
        label_smoothing: the share of each target that is spread evenly over the vocabulary (Szegedy et al. 2016, arXiv
            1512.00567, section 7).
    """
    logits = logits.astype(jnp.float32)
    nats = _nats(logits, targets, _Terms(z_loss, label_smoothing))[0]
    return Loss(jnp.sum(nats * weights), jnp.sum(weights))


def chunked_cross_entropy(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, *, chunk: int, z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Loss:  # fmt: skip
    """``cross_entropy(hidden @ kernel, ...)`` of which only ``chunk`` positions of each row stand at a time.

    So [B, L, V] never stands in float32; the backward pass makes the logits again, a third more work for this product,
    and sums the kernel's gradient over the chunks in float32.

    Args:
        hidden: float ``[B, L, D]``. kernel: float ``[D, V]``, whose dtype is that of the product's inputs.
        targets, weights: as for ``cross_entropy``, ``[B, L]``.
        chunk: positions, 1 or more; L need not divide by it.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} positions of a row: must be at least 1.")
    terms = _Terms(z_loss, label_smoothing)
    return Loss(_chunked(terms, min(chunk, hidden.shape[1]), hidden, kernel, targets, weights), jnp.sum(weights))


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array | None = None, *, label_smoothing: float = 0.0
) -> Loss:
    """Cross-entropy of one label a row, with the metric ``accuracy``.

    Args:
        logits: float ``[B, C]``. labels: int ``[B]``. weights: float32 ``[B]``, 0 for padding; by default 1.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    loss = cross_entropy(logits, labels, weights, label_smoothing=label_smoothing)
    right = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return loss._replace(metrics={"accuracy": (jnp.sum(right * weights), loss.weight)})


class _Terms(NamedTuple):
    z_loss: float
    label_smoothing: float


def _nats(logits: jax.Array, targets: jax.Array, terms: _Terms) -> tuple[jax.Array, jax.Array]:
    """The loss of each item, and log Z; from float32 logits ``[..., V]``."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if terms.label_smoothing:
        right = (1 - terms.label_smoothing) * right + terms.label_smoothing * jnp.mean(logits, axis=-1)
    nats = log_z - right
    return (nats + terms.z_loss * log_z**2 if terms.z_loss else nats), log_z


def _in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """``[B, L, ...]`` as ``[chunks, B, chunk, ...]``, filled up with zeros."""
    padded = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _from_chunks(x: jax.Array, length: int) -> jax.Array:
    joined = jnp.moveaxis(x, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def _logits(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """``[B, c, V]`` in float32, as one product over all tokens."""
    flat = hidden.reshape(-1, hidden.shape[-1]).astype(kernel.dtype)
    product = jax.lax.dot(flat, kernel, preferred_element_type=jnp.float32)
    return product.reshape(*hidden.shape[:-1], kernel.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    terms: _Terms, chunk: int, hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    def one(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        h, t, w = part
        return total + jnp.sum(_nats(_logits(h, kernel), t, terms)[0] * w), None

    parts = tuple(_in_chunks(x, chunk) for x in (hidden, targets, weights))
    return jax.lax.scan(one, jnp.float32(0), parts)[0]


def _chunked_forward(terms: _Terms, chunk: int, *given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _chunked(terms, chunk, *given), given


def _chunked_backward(terms: _Terms, chunk: int, given: tuple[jax.Array, ...], g: jax.Array) -> tuple[Any, ...]:
    hidden, kernel, targets, weights = given
    size = kernel.shape[1]

    def one(d_kernel: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        h, t, w = part
        logits = _logits(h, kernel)
        nats, log_z = _nats(logits, t, terms)
        p = jnp.exp(logits - log_z[..., None]) * (1 + 2 * terms.z_loss * log_z)[..., None]
        hot = (t[..., None] == jnp.arange(size)[None, None]).astype(jnp.float32)
        wanted = (1 - terms.label_smoothing) * hot + terms.label_smoothing / size
        d_logits = ((p - wanted) * (w * g)[..., None]).astype(kernel.dtype).reshape(-1, size)
        flat = h.reshape(-1, h.shape[-1]).astype(kernel.dtype)
        d_hidden = jax.lax.dot(d_logits, kernel.T, preferred_element_type=jnp.float32).astype(h.dtype)
        d_kernel += jax.lax.dot(flat.T, d_logits, preferred_element_type=jnp.float32)
        return d_kernel, (d_hidden.reshape(h.shape), nats * g)

    parts = tuple(_in_chunks(x, chunk) for x in (hidden, targets, weights))
    d_kernel, (d_hidden, d_weights) = jax.lax.scan(one, jnp.zeros(kernel.shape, jnp.float32), parts)
    length = hidden.shape[1]
    return _from_chunks(d_hidden, length), d_kernel.astype(kernel.dtype), None, _from_chunks(d_weights, length)


_chunked.defvjp(_chunked_forward, _chunked_backward)
