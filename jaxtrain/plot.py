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
    score: str = "loss",
    label: str = "nats",
    per_nat: float | None = 1.0,
) -> None:
    """Draws training loss, evaluations and learning rate of ``records`` over ``step`` into the PNG file ``path``.

    A record holds ``step`` and any of ``loss`` (nats), ``eval/loss`` (nats), ``eval/<score>`` and ``learning_rate``;
    missing, None and non-finite values leave gaps. ``score`` is what a run is judged by, called ``label``. Where it is
    a loss, ``per_nat`` turns nats into it (1 / ln 2 for bits), and it is the axis of all losses; where it is none
    (``per_nat`` None: an accuracy), it has axes of its own. ``baselines`` (name -> score) become dashed lines.

    The file is replaced as a whole. Nothing of matplotlib's global state is read or changed, no display is used.
    """
    path = Path(path)
    figure = _draw(sorted(records, key=lambda r: r["step"]), baselines or {}, title, score, label, per_nat)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(path, drawn.getvalue())


def _draw(
    records: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], title: str, score: str, label: str,
    per_nat: float | None,
) -> "Figure":  # fmt: skip
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load, only the end of a run draws
    from matplotlib.figure import Figure  # slow to load, only the end of a run draws

    is_loss = per_nat is not None
    factor = per_nat if is_loss else 1.0
    steps, losses = _series(records, "loss")
    eval_steps, evals = _evaluations(records, score if is_loss else "loss", factor)
    rate_steps, rates = _series(records, "learning_rate")

    ratios = [4] + [3] * (not is_loss) + [1] * bool(rates.size)
    figure = Figure(figsize=(8, 1.2 + 0.8 * sum(ratios)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0])
    axes, last_axes = panels[0], panels[-1]
    if rates.size:
        last_axes.plot(rate_steps, rates, color="#3a7d44", lw=1.4, marker="." if rates.size == 1 else None)
        last_axes.set_ylabel("learning rate")
        last_axes.set_ylim(bottom=0)
        last_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        _style(last_axes)
    _draw_loss(axes, steps, losses * factor, eval_steps, evals)
    axes.set_ylabel(f"loss ({label})" if is_loss else "loss (nats)")
    if not is_loss:
        _draw_loss(panels[1], *np.zeros((2, 0)), *_evaluations(records, score, None))
        panels[1].set_ylabel(label)
    _draw_baselines(axes if is_loss else panels[1], baselines)
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


def _evaluations(records: Sequence[Mapping[str, Any]], score: str, per_nat: float | None) -> tuple[Any, Any]:
    """(steps, scores), one per record that holds an evaluation; ``per_nat`` makes one of ``eval/loss`` if need be."""
    pairs = []
    for r in records:
        value = r.get(f"eval/{score}")
        if per_nat is not None and r.get("eval/loss") is not None and (value is None or score == "loss"):
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
