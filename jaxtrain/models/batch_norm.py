"""Batch normalisation over all devices of a micro-batch, weighted by row, with two kinds of running statistics.

Under ``jit`` a batch is one array, however it is sharded, so its mean and variance are those of ALL devices. The
running statistics of a window of several micro-batches are either ``sequential``, moved by each of them, or ``pooled``:
the module hands out sums that add up over the window, and these move the running statistics once. A loss function
returns what it finds, and so works for both::

    logits = model(batch["images"], batch["weights"], train=key is not None)
    return classification(logits, batch["labels"], batch["weights"])._replace(stats=pop_sums(model))

    build_train_step(..., merge_stats=MergeStats(pooled_zeros, pooled_merge))  # for pooled; None for sequential

Shape suffixes: B batch, C channels.

Source: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv 1502.03167). Unlike there, the running variance is the
biased one, as in Flax: the window's micro-batches may differ in size, and then no one ``m / (m - 1)`` is right.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

RUNNING = ("sequential", "pooled")


class BatchSums(nnx.Variable):
    """What a pooled `BatchNorm` saw since `pop_sums`: a dict of float32 sums, of the structure of `pooled_zeros`."""


class BatchNorm(nnx.Module):
    """``(x - mean) / sqrt(var + eps) * scale + bias`` for each channel, computed in float32 and returned in x's dtype.

    ``nnx.Param`` ``scale`` and ``bias``, ``nnx.BatchStat`` ``mean`` and ``var``, all float32 (C,).

    Args:
      channels: C, the size of the last dim.
      momentum: what the running statistics keep in one move: ``new = momentum * old + (1 - momentum) * batch``.
      running: "sequential": every training call moves them; "pooled": none does, and ``sums`` appears on the module, a
        `BatchSums` that the loss function must take off with `pop_sums`. Called more than once, the sums add up.
      scale: the first value of ``scale``.

    Raises:
      ValueError: a number out of range, or an unknown ``running``.
    """

    def __init__(
        self,
        channels: int,
        *,
        momentum: float = 0.9,
        running: str = "sequential",
        eps: float = 1e-5,
        scale: float = 1.0,
    ):
        check_running(momentum, running)
        if channels < 1:
            raise ValueError(f"channels={channels} must be at least 1")
        if eps <= 0.0:
            raise ValueError(f"eps={eps} must be positive")
        self.scale = nnx.Param(jnp.full((channels,), scale, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((channels,), jnp.float32))
        self.var = nnx.BatchStat(jnp.ones((channels,), jnp.float32))
        self.momentum, self.running, self.eps = momentum, running, eps

    def __call__(self, x, weights_B=None, *, train: bool) -> jax.Array:
        """The shape and dtype of ``x``, (B, ..., C).

        Args:
          weights_B: how much each row counts in the batch's mean and (biased) variance: 0 for padding; by default 1.
            Where all are 0 the running statistics stay, and the output is finite but means nothing.
          train: True normalises with the batch, False with the running statistics.

        Raises:
          ValueError: ``weights_B`` is not one number a row.
        """
        x32 = x.astype(jnp.float32)
        if train:
            mean_C, var_C, count = _moments(x32, weights_B)
            self._observe(mean_C, var_C, count)
        else:
            mean_C, var_C = self.mean[...], self.var[...]
        factor_C = jax.lax.rsqrt(var_C + self.eps) * self.scale[...].astype(jnp.float32)
        bias_C = self.bias[...].astype(jnp.float32)
        return ((x32 - _wide(mean_C, x)) * _wide(factor_C, x) + _wide(bias_C, x)).astype(x.dtype)

    def _observe(self, mean_C, var_C, count):
        old_mean_C, old_var_C = self.mean[...], self.var[...]
        if self.running == "sequential":
            kept = jnp.where(count > 0, self.momentum, 1.0)
            self.mean[...] = kept * old_mean_C + (1 - kept) * mean_C
            self.var[...] = kept * old_var_C + (1 - kept) * var_C
            return
        shift_C = mean_C - old_mean_C  # sums about the running mean: far from 0, squares about 0 would cancel
        sums = {
            "count": count,
            "momentum": count * self.momentum,  # weighted like all that is added, so that the merge finds it again
            "sum": count * shift_C,
            "squares": count * (var_C + shift_C * shift_C),
        }
        if hasattr(self, "sums"):
            sums = jax.tree.map(jnp.add, self.sums.get_value(), sums)
        self.sums = BatchSums(sums)


def _moments(x32, weights_B):
    """Mean (C,), biased variance (C,) and summed weight () of float32 (B, ..., C) over all dims but the last.

    The variance is that of the centred x: mean(x^2) - mean(x)^2 cancels where the mean is large.
    """
    axes = tuple(range(x32.ndim - 1))
    if weights_B is None:
        weights_B = jnp.ones(x32.shape[:1], jnp.float32)
    if weights_B.shape != x32.shape[:1]:
        raise ValueError(f"weights_B has shape {weights_B.shape} but x {x32.shape}; give one weight for each row")
    weights = weights_B.astype(jnp.float32).reshape(-1, *(1,) * (x32.ndim - 1))
    count = jnp.sum(weights) * math.prod(x32.shape[1:-1])
    divisor = jnp.where(count > 0, count, 1.0)
    mean_C = jnp.sum(weights * x32, axis=axes) / divisor
    centred = x32 - _wide(mean_C, x32)
    return mean_C, jnp.sum(weights * centred * centred, axis=axes) / divisor, count


def _wide(values_C, x):
    return values_C.reshape((1,) * (x.ndim - 1) + (-1,))


def pop_sums(module: nnx.Module) -> Any:
    """Take the sums of all pooled `BatchNorm` off a module: a pure dict for ``Loss.stats``; None where there are none.

    None is what a module with sequential statistics gives, and any module in evaluation.
    """
    return nnx.to_pure_dict(nnx.pop(module, BatchSums)) or None


def pooled_zeros(model_state: Any) -> Any:
    """The sums of nothing, for a model_state whose `BatchNorm` are all pooled: ``zeros`` of ``MergeStats``.

    Each dict with ``mean`` and ``var`` gives ``sums``: ``count`` and ``momentum`` (), ``sum`` and ``squares`` (C,).

    Raises:
      ValueError: there is no such dict.
    """
    stats = _zeros(model_state)
    if not stats:
        raise ValueError("pooled_zeros: model_state holds no running mean and var; leave merge_stats=None")
    return stats


def _zeros(state):
    if not isinstance(state, dict):
        return {}
    if _is_norm(state):
        zero, zeros_C = jnp.float32(0), jnp.zeros(state["mean"].shape, jnp.float32)
        return {"sums": {"count": zero, "momentum": zero, "sum": zeros_C, "squares": zeros_C}}
    below = {name: _zeros(part) for name, part in state.items()}
    return {name: part for name, part in below.items() if part}


def _is_norm(state):
    return {"mean", "var"} <= state.keys()


def pooled_merge(model_state: Any, stats: Any) -> Any:
    """The model_state after a window: ``merge`` of ``MergeStats``.

    The running statistics make ONE move, towards mean and variance of all the window's rows together. Sums of no rows
    leave them as they are, bit for bit. In float32 the variance is good to ``1e-7 * (mean - running mean)^2``, so while
    the running mean is still far from data whose mean is a thousand times its deviation, it is not.
    """
    if not _is_norm(model_state):
        return {name: pooled_merge(part, stats[name]) if name in stats else part for name, part in model_state.items()}
    sums = stats["sums"]
    some = sums["count"] > 0
    count = jnp.where(some, sums["count"], 1.0)
    kept = jnp.where(some, sums["momentum"] / count, 1.0)
    shift_C = sums["sum"] / count
    var_C = jnp.maximum(sums["squares"] / count - shift_C * shift_C, 0.0)
    mean_C = model_state["mean"] + (1 - kept) * shift_C
    return model_state | {"mean": mean_C, "var": kept * model_state["var"] + (1 - kept) * var_C}


def check_running(momentum: float, running: str) -> None:
    """ValueError for what `BatchNorm` cannot take."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum} must be at least 0 and below 1; 0.9 keeps nine tenths in each move")
    if running not in RUNNING:
        raise ValueError(f"running={running!r} is unknown; choose one of {', '.join(RUNNING)}")
