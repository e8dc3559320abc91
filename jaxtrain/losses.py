"""Losses as sums and weights, so that any number of micro-batches and devices gives the one big batch's mean."""

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


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> Loss:
    """Softmax cross-entropy in nats.

    Args:
        logits: float ``[..., V]``; the softmax is computed in float32.
        targets: int ``[...]`` in ``0 .. V-1``.
        weights: float32 ``[...]``: 1 for a valid item, 0 for padding; anything between is a weight.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Loss(jnp.sum((log_z - picked) * weights), jnp.sum(weights))
