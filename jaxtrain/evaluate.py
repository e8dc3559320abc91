"""Evaluation: exact sums over held-out rows, so that padding, batch size and devices never change the result."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxtrain.prefetch import DevicePrefetch, to_devices
from jaxtrain.state import View
from jaxtrain.step import Program


def evaluate(
    program: Program, view: View, batches: Iterable[Any], *, stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Means over all rows of ``batches``.

    Args:
        view: ``program.view(state)``.
        batches: host batches of this process, of equal shapes; padding rows have weight 0.
        stop: asked between batches; True abandons the evaluation.

    Returns:
        ``eval/loss`` in nats, ``eval/tokens`` (the loss weight), ``eval/<metric>`` for each of the loss function's;
        None where it was abandoned. A mean over no weight at all is NaN.
    """
    totals: dict[str, tuple[float, float]] = {}

    def add(sums: dict[str, tuple[jax.Array, jax.Array]]) -> None:
        for name, (total, weight) in jax.device_get(sums).items():
            was = totals.get(name, (0.0, 0.0))
            totals[name] = (was[0] + float(total), was[1] + float(weight))

    last = None
    with DevicePrefetch(batches, lambda batch: to_devices(batch, program.row_sharding)) as feed:
        for batch, _ in feed:
            if stop():
                return None
            sums = program.evaluate(view, batch)
            if last is not None:
                add(last)  # one batch late: the next one is running already
            last = sums
    if last is not None:
        add(last)
    means = {name: total / weight if weight else float("nan") for name, (total, weight) in totals.items()}
    loss = means.pop("loss", float("nan"))
    tokens = round(totals.get("loss", (0.0, 0.0))[1])
    return {"eval/loss": loss, **{f"eval/{name}": value for name, value in means.items()}, "eval/tokens": tokens}
