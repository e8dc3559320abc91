"""Losses as sums and weights, so that any number of micro-batches and devices gives the one big batch's mean."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain import paths


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
MAX_METRICS = 32
"""Of a loss function's own; fixed, so that a state can be born before any batch was seen."""


def check(loss: Any, model_state: Any, taken: set[str]) -> None:
    """Refuse, at the trace, what a step cannot add up: ``taken`` are metric names that are the step's own.

    Raises:
        TypeError: not a ``Loss`` of float32 scalars, or a model_state unlike the one given. ValueError: a taken name.
    """
    if not isinstance(loss, Loss):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; return jaxtrain.step.Loss(total, weight), or wrap a function "
            "that returns a scalar with jaxtrain.adapters.plain."
        )
    for name, pair in loss.metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"loss_fn: metrics[{name!r}] is {type(pair).__name__}; give a pair (sum, weight).")
    scalars = {"total": loss.total, "weight": loss.weight}
    scalars |= {f"metrics[{n!r}][{i}]": pair[i] for n, pair in loss.metrics.items() for i in (0, 1)}
    for name, x in scalars.items():
        if jnp.shape(x) != () or jnp.asarray(x).dtype != jnp.float32:
            raise TypeError(
                f"loss_fn: {name} is {jnp.asarray(x).dtype}{list(jnp.shape(x))}; it must be a float32 scalar: the "
                "SUM over valid items (weight: how many)."
            )
    clash = sorted(taken & set(loss.metrics))
    if clash:
        raise ValueError(f"loss_fn: metrics named {', '.join(clash)} are the step's own; choose other names.")
    if len(loss.metrics) > MAX_METRICS:
        raise TypeError(f"loss_fn: {len(loss.metrics)} metrics; at most {MAX_METRICS} are carried.")
    if loss.model_state is not None:
        wrong = paths.differences(model_state, loss.model_state)
        if wrong:
            raise TypeError("loss_fn: the new model_state is unlike the one given:\n  " + "\n  ".join(wrong))


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
    nats = _nats(logits, targets, _Terms(z_loss, label_smoothing))
    return Loss(jnp.sum(nats * weights), jnp.sum(weights))


def chunked_cross_entropy(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, *, chunks: int, z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Loss:  # fmt: skip
    """``cross_entropy(hidden @ kernel, ...)`` of which only ``V / chunks`` tokens of the vocabulary stand at a time.

    So [B, L, V] never stands in float32; the backward pass makes the logits again, a third more work for this product.
    By vocabulary and not by position: every chunk's part of the kernel is gathered, and its gradient reduced over
    devices, once. Chunk j holds the tokens ``j, j + chunks, ...``, so that a vocabulary split over ``tensor`` stays so.

    Args:
        hidden: float ``[B, L, D]``. kernel: float ``[D, V]``, whose dtype is that of the products' inputs.
        targets, weights: as for ``cross_entropy``, ``[B, L]``.
        chunks: a divisor of V.

    Raises:
        ValueError: ``chunks`` does not divide V.
    """
    size = kernel.shape[1]
    if chunks < 1 or size % chunks:
        near = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(sorted(near, key=lambda n: abs(n - chunks))[:3])
        raise ValueError(
            f"chunks={chunks} does not divide the vocabulary of {size} tokens; use {', '.join(map(str, near))}."
        )
    terms = _Terms(z_loss, label_smoothing)
    return Loss(_chunked(terms, chunks, hidden, kernel, targets, weights), jnp.sum(weights))


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


def _nats(logits: jax.Array, targets: jax.Array, terms: _Terms) -> jax.Array:
    """The loss of each item, from float32 logits ``[..., V]``."""
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    mean = jnp.mean(logits, axis=-1) if terms.label_smoothing else jnp.zeros_like(right)
    return _nats_of(jax.nn.logsumexp(logits, axis=-1), right, mean, terms)


def _nats_of(log_z: jax.Array, right: jax.Array, mean: jax.Array, terms: _Terms) -> jax.Array:
    """From log Z, the target's logit, and the mean of all logits."""
    if terms.label_smoothing:
        right = (1 - terms.label_smoothing) * right + terms.label_smoothing * mean
    nats = log_z - right
    return nats + terms.z_loss * log_z**2 if terms.z_loss else nats


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    terms: _Terms, chunks: int, hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    return _chunked_forward(terms, chunks, hidden, kernel, targets, weights)[0]


def _chunked_forward(
    terms: _Terms, chunks: int, hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    tokens, (which, place) = _flat(hidden, kernel), _places(targets, chunks)

    def one(carry: tuple[jax.Array, ...], part: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        highest, scaled, right, total = carry  # of each token: max, sum of exp(logit - max), the target's, sum
        j, columns = part
        logits = jax.lax.dot(tokens, columns, preferred_element_type=jnp.float32)
        above = jnp.maximum(highest, jnp.max(logits, axis=-1))
        scaled = scaled * jnp.exp(highest - above) + jnp.sum(jnp.exp(logits - above[:, None]), axis=-1)
        here = jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]
        return (above, scaled, jnp.where(which == j, here, right), total + jnp.sum(logits, axis=-1)), None

    zeros = jnp.zeros(tokens.shape[:1], jnp.float32)
    start = (jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros, zeros, zeros)
    (highest, scaled, right, total), _ = jax.lax.scan(one, start, (jnp.arange(chunks), _columns(kernel, chunks)))
    log_z = highest + jnp.log(scaled)
    nats = _nats_of(log_z, right, total / kernel.shape[1], terms)
    kept = (hidden, kernel, targets, weights, nats, log_z)
    return jnp.sum(nats * weights.reshape(-1)), kept


def _chunked_backward(terms: _Terms, chunks: int, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[Any, ...]:
    hidden, kernel, targets, weights, nats, log_z = kept
    tokens, (which, place) = _flat(hidden, kernel), _places(targets, chunks)
    size = kernel.shape[1]
    weight = (weights.reshape(-1) * g)[:, None]
    slope = (1 + 2 * terms.z_loss * log_z)[:, None]

    def one(d_tokens: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        j, columns = part
        logits = jax.lax.dot(tokens, columns, preferred_element_type=jnp.float32)
        at = jnp.where(which == j, place, -1)
        hot = (at[:, None] == jnp.arange(size // chunks)[None]).astype(jnp.float32)
        wanted = (1 - terms.label_smoothing) * hot + terms.label_smoothing / size
        d_logits = ((jnp.exp(logits - log_z[:, None]) * slope - wanted) * weight).astype(kernel.dtype)
        back = jax.lax.dot_general(d_logits, columns, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return d_tokens + back, jax.lax.dot_general(tokens, d_logits, (((0,), (0,)), ((), ())))

    start = jnp.zeros(tokens.shape, jnp.float32)
    d_tokens, d_columns = jax.lax.scan(one, start, (jnp.arange(chunks), _columns(kernel, chunks)))
    d_hidden = d_tokens.reshape(hidden.shape).astype(hidden.dtype)
    d_kernel = jnp.moveaxis(d_columns, 0, 2).reshape(kernel.shape)
    return d_hidden, d_kernel, None, nats.reshape(weights.shape) * g


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _flat(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """``[B * L, D]`` in the kernel's dtype."""
    return hidden.reshape(-1, hidden.shape[-1]).astype(kernel.dtype)


def _columns(kernel: jax.Array, chunks: int) -> jax.Array:
    """``[chunks, D, V / chunks]``: token t is in chunk ``t % chunks``, at ``t // chunks``."""
    return jnp.moveaxis(kernel.reshape(kernel.shape[0], -1, chunks), 2, 0)


def _places(targets: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    flat = targets.reshape(-1)
    return flat % chunks, flat // chunks
