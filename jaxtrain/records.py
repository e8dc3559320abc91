"""What passes between the parts of a step: a call's contribution, a window's record, how statistics are merged."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

BUILTIN = (
    "loss", "weight", "grad_norm", "grad_norm_clipped", "loss_scale", "micro_step", "window", "step",
    "skipped_in_a_row", "skipped_steps", "bad_leaf", "window_done", "tokens", "tokens_high", "tokens_low",
)  # fmt: skip


class MergeStats(NamedTuple):
    """How the additive statistics of a window (``Loss.stats``) become model_state, once, at its end.

    So BatchNorm's running statistics take one step a window from what all its micro-batches sum up to, where a
    ``Loss.model_state`` moves with each of them.

    Attributes:
        zeros: ``model_state -> stats``: statistics of nothing, a pytree of float32 zeros.
        merge: ``(model_state, stats summed over the window) -> model_state``; not used for a window that is skipped.
    """

    zeros: Callable[[Any], Any]
    merge: Callable[[Any, Any], Any]


class Contribution(NamedTuple):
    """What one call of the step adds to its window; all finite (a bad micro-gradient arrives as zeros and ``bad``).

    Attributes:
        grads: gradient of the loss SUM, float32, shaped and sharded like the parameters; None for a frozen one.
        weight, total: sums over the call's micro-batches, float32 scalars.
        model_state: new mutable state of the model.
        stats: sums of the loss function's additive statistics, float32, or None.
        metrics: name -> (sum, weight), float32 scalars.
        bad: how many micro-batches were not finite, float32 scalar, the same on all shards.
        bad_leaf: int32: index of the first parameter (order of ``jax.tree.leaves``) with a non-finite gradient, or -1.
        tokens: the weight rounded to int32.
        count: micro-batches, int32: 1, or those of the window with ``Scan``.
    """

    grads: Any
    weight: jax.Array
    total: jax.Array
    model_state: Any
    stats: Any
    metrics: Mapping[str, tuple[jax.Array, jax.Array]]
    bad: jax.Array
    bad_leaf: jax.Array
    tokens: jax.Array
    count: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "counts"], meta_fields=["value_names", "count_names"]
)
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One window's record as two small arrays, so that reading it is one transfer.

    ``values`` float32: ``loss`` (mean over the window's weight, unscaled; NaN where it was skipped), ``weight``,
    ``grad_norm`` (global, before clipping; NaN where it was skipped, or the infinity it was skipped for),
    ``grad_norm_clipped``, ``loss_scale``, what ``report`` names as applied,
    the loss function's metrics. ``counts`` int32: ``micro_step``, ``window``, ``step``, ``skipped_in_a_row``,
    ``bad_leaf``, ``window_done`` (0 inside a window: the values are not a record then), two words of ``tokens``.
    """

    values: jax.Array
    counts: jax.Array
    value_names: tuple[str, ...]
    count_names: tuple[str, ...]

    def __getitem__(self, name: str) -> jax.Array:
        """One entry as a device scalar; raises KeyError, with the names that there are."""
        if name in self.value_names:
            return self.values[self.value_names.index(name)]
        if name not in self.count_names:
            host = " (to_host() has tokens and skipped_steps)" if name in ("tokens", "skipped_steps") else ""
            raise KeyError(f"no metric {name!r}{host}; there are {', '.join((*self.value_names, *self.count_names))}")
        return self.counts[self.count_names.index(name)]

    def to_host(self) -> dict[str, float | int]:
        """All entries as Python numbers, with ``tokens`` and ``skipped_steps`` exact; waits for the step."""
        values, counts = jax.device_get((self.values, self.counts))
        record = dict(zip(self.value_names, values.tolist(), strict=True))
        record |= dict(zip(self.count_names, counts.tolist(), strict=True))
        high, low = record.pop("tokens_high") % 2**32, record.pop("tokens_low") % 2**32
        return record | {"tokens": high * 2**32 + low, "skipped_steps": record["window"] - record["step"]}
