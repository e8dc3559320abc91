"""The picture of a run: loss and learning rate over steps, as a PNG."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.workdir import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN, _EVAL, _BASELINE = "#4c78a8", "#d1495b", "#6b6b6b"


def loss_curve(
    records: Iterable[Mapping[str, Any]],
    path: str | Path,
    baselines: Mapping[str, float] | None = None,
    title: str = "",
    bytes_unit: bool = True,
) -> None:
    """Draws training loss, evaluations and learning rate of ``records`` over ``step`` into the PNG file ``path``.

    A record holds ``step`` and any of ``loss`` (nats per token), ``eval/loss`` (nats per token), ``eval/bits_per_byte``
    and ``learning_rate``; missing, None and non-finite values leave gaps. With ``bytes_unit`` the axis is bits per
    byte: a token is one byte, nats are divided by ln 2, and ``eval/bits_per_byte`` is preferred where it is given.
    Without it the axis is nats per token. ``baselines`` (name -> loss, in the unit of the axis) become dashed lines.

    The file is replaced as a whole. Nothing of matplotlib's global state is read or changed, no display is used.
    """
    path = Path(path)
    figure = _draw(sorted(records, key=lambda r: r["step"]), baselines or {}, title, bytes_unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(path, drawn.getvalue())


def _draw(
    records: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], title: str, bytes_unit: bool
) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load, only the end of a run draws
    from matplotlib.figure import Figure  # slow to load, only the end of a run draws

    per_nat = 1 / math.log(2) if bytes_unit else 1.0
    steps, losses = _series(records, "loss")
    eval_steps, evals = _evaluations(records, per_nat, bytes_unit)
    rate_steps, rates = _series(records, "learning_rate")

    figure = Figure(figsize=(8, 5.2 if rates.size else 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    if rates.size:
        axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        rate_axes.plot(rate_steps, rates, color="#3a7d44", lw=1.4, marker="." if rates.size == 1 else None)
        rate_axes.set_ylabel("learning rate")
        rate_axes.set_ylim(bottom=0)
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        _style(rate_axes)
        last_axes = rate_axes
    else:
        axes = last_axes = figure.subplots()
    _draw_loss(axes, steps, losses * per_nat, eval_steps, evals)
    _draw_baselines(axes, baselines)
    axes.set_ylabel("loss (bits per byte)" if bytes_unit else "loss (nats per token)")
    axes.set_xlim(0, 1.01 * max([1.0, *steps, *eval_steps, *rate_steps]))  # linear: a log axis hides the last half
    last_axes.xaxis.get_major_locator().set_params(integer=True)
    last_axes.set_xlabel("step (optimizer updates)")
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    return figure


def _draw_loss(axes: "Axes", steps: Any, losses: Any, eval_steps: Any, evals: Any) -> None:
    few = losses.size < 20
    if losses.size:
        axes.plot(
            steps,
            losses,
            color=_TRAIN,
            lw=1.2 if few else 0.7,
            alpha=1.0 if few else 0.35,
            marker="." if few else None,
            label="training",
        )
    if not few:
        axes.plot(steps, _smooth(losses), color=_TRAIN, lw=1.8, label="training, smoothed")
    if evals.size:
        label = f"held-out (last: {evals[-1]:.3f})"
        axes.plot(eval_steps, evals, color=_EVAL, lw=1.4, marker="o", ms=4, label=label, zorder=3)
    _style(axes)
    if axes.get_lines():  # above the axes, where no curve can run under it
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)


def _draw_baselines(axes: "Axes", baselines: Mapping[str, float]) -> None:
    """Dashed lines with their names to the right of the axes, pushed apart where they would touch."""
    values = sorted((v, name) for name, v in baselines.items())
    for value, _ in values:
        axes.axhline(value, color=_BASELINE, ls="--", lw=1, zorder=1)
    low, high = axes.get_ylim()
    gap = (high - low) * 0.05  # a line of text
    at = -math.inf
    for value, name in values:
        at = max(value, at + gap)
        axes.annotate(
            f"{name} {value:.2f}",
            xy=(1, at),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_BASELINE,
            annotation_clip=False,
            parse_math=False,
        )


def _style(axes: "Axes") -> None:
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[Any, Any]:
    """(steps, values) of the records that hold a number under ``name``; non-finite values stay, as gaps."""
    pairs = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def _evaluations(records: Sequence[Mapping[str, Any]], per_nat: float, bytes_unit: bool) -> tuple[Any, Any]:
    """(steps, values in the unit of the axis), one per record that holds an evaluation."""
    pairs = []
    for r in records:
        value = r.get("eval/bits_per_byte") if bytes_unit else None
        if value is None and r.get("eval/loss") is not None:
            value = r["eval/loss"] * per_nat
        if value is not None and math.isfinite(value):
            pairs.append((r["step"], value))
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def _smooth(values: Any) -> Any:
    """A moving average over about a fortieth of the curve; NaN are left out.

    Towards the steep start the window shrinks on both sides, which keeps the curve in place; at the flat end only its
    missing side goes, which keeps the last point calm.
    """
    n = values.size
    at = np.arange(n)
    half = np.minimum(max(1, n // 80), at)
    good = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    first, last = at - half, np.minimum(at + half + 1, n)
    in_window = count[last] - count[first]
    return np.where(in_window > 0, (total[last] - total[first]) / np.maximum(in_window, 1), np.nan)
