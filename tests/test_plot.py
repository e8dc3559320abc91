"""The picture's content against hand-computed values, its layout against the renderer's boxes."""

import math
import struct
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain import plot
from jaxtrain.plot import loss_curve

LN2 = math.log(2)


def png_size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", data[16:24])


def curves(figure, axes: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[axes].lines}


BITS = ("bits_per_byte", "bits per byte", 1 / LN2)
NATS = ("loss", "nats", 1.0)
ACCURACY = ("accuracy", "accuracy", None)


def draw(records, baselines=None, title="", score=BITS):
    return plot._draw(records, baselines or {}, title, *score)


def test_nats_become_bits_per_byte():
    records = [
        {"step": 1, "loss": 8 * LN2, "learning_rate": 0.5},
        {"step": 2, "loss": 3 * LN2, "learning_rate": None},
        {"step": 2, "eval/loss": 4 * LN2},
        {"step": 3, "eval/loss": 99.0, "eval/bits_per_byte": 2.0},
    ]
    figure = draw(records, {"unigram": 4.75})
    shown = curves(figure)
    steps, bits = shown["training"]
    assert steps == [1, 2]
    assert bits == pytest.approx([8, 3], rel=1e-12)
    steps, bits = shown["held-out (last: 2.000)"]
    assert steps == [2, 3]
    assert bits == pytest.approx([4, 2], rel=1e-12)
    assert [4.75, 4.75] in [y for _, y in shown.values()]
    assert [t.get_text() for t in figure.axes[0].texts] == ["unigram 4.75"]
    assert figure.axes[0].get_ylabel() == "loss (bits per byte)"
    assert figure.axes[1].get_xlabel() == "step (optimizer updates)"
    assert figure.axes[1].get_ylabel() == "learning rate"
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[1].lines] == [([1], [0.5])]


def test_without_bytes_the_axis_is_nats_and_bits_are_left_alone():
    figure = draw([{"step": 4, "loss": 2.5, "eval/loss": 2.25, "eval/bits_per_byte": 9.0}], score=NATS)
    assert curves(figure) == {"training": ([4], [2.5]), "held-out (last: 2.250)": ([4], [2.25])}
    assert figure.axes[0].get_ylabel() == "loss (nats)"
    assert len(figure.axes) == 1, "no learning rate, no second panel"
    assert figure.axes[0].get_xlabel() == "step (optimizer updates)"


def test_a_score_that_is_no_loss_has_axes_of_its_own_with_the_baselines():
    records = [
        {"step": 1, "loss": 2.0, "learning_rate": 0.5}, {"step": 2, "eval/loss": 1.5, "eval/accuracy": 0.75},
        {"step": 3, "eval/loss": 1.0},
    ]  # fmt: skip
    figure = draw(records, {"majority": 0.1}, score=ACCURACY)
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)", "accuracy", "learning rate"]
    assert curves(figure) == {"training": ([1], [2.0]), "held-out (last: 1.000)": ([2, 3], [1.5, 1.0])}
    shown = curves(figure, 1)
    assert shown.pop("held-out (last: 0.750)") == ([2], [0.75])
    assert [y for _, y in shown.values()] == [[0.1, 0.1]]
    assert figure.axes[2].get_xlabel() == "step (optimizer updates)"


def test_a_long_run_has_a_light_raw_line_under_a_smoothed_one():
    losses = [1.0, 0.0] * 200
    shown = curves(draw([{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)], score=NATS))
    assert shown["training"][1] == losses
    smoothed = shown["training, smoothed"][1]
    assert shown["training, smoothed"][0] == list(range(1, 401))
    assert smoothed[200] == pytest.approx(5 / 11)  # records 195 to 205, of which the five even ones are 1
    assert max(smoothed[20:]) < 0.6
    assert min(smoothed[20:]) > 0.4


def test_smoothing_by_hand():
    values = np.array([9.0, 3.0, 0.0, np.nan, 6.0, 2.0])
    assert plot._smooth(values).tolist() == [9.0, 4.0, 1.5, 3.0, 4.0, 4.0]
    assert (
        np.isnan(plot._smooth(np.array([1.0, np.nan, np.nan, np.nan, 1.0]))).tolist()
        == [False] * 2 + [True] + [False] * 2
    )


def test_missing_and_non_finite_values_are_gaps():
    records = [
        {"step": 1, "loss": 1.0, "eval/loss": None},
        {"step": 2, "loss": None},
        {"step": 3, "loss": math.inf, "eval/loss": math.nan},
        {"step": 4, "mfu": 0.5},
        {"step": 5, "loss": 2.0},
    ]
    shown = curves(draw(records, score=NATS))
    assert list(shown) == ["training"]
    assert shown["training"][0] == [1, 3, 5]
    np.testing.assert_array_equal(shown["training"][1], [1.0, np.nan, 2.0])


@pytest.mark.parametrize("records", [[], [{"step": 0}], [{"step": 5, "loss": 2.0}], [{"step": 5, "eval/loss": 2.0}]])
@pytest.mark.parametrize(("score", "height"), [(BITS, 660), (NATS, 660), (ACCURACY, 1020)])
def test_few_or_no_records_make_a_picture(tmp_path, records, score, height):
    path = tmp_path / "new" / "loss.png"
    loss_curve(iter(records), path, None, "", *score)
    assert png_size(path) == (1200, height)
    assert list(path.parent.iterdir()) == [path]


def test_records_come_in_any_order(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plot, "_draw", lambda records, *rest, real=plot._draw: seen.extend(records) or real([], *rest))
    loss_curve([{"step": 3}, {"step": 1}, {"step": 2}], tmp_path / "a.png")
    assert [r["step"] for r in seen] == [1, 2, 3]


def big_picture():
    records = [
        {"step": s, "loss": LN2 * (1.5 + 6.5 / (1 + s / 20)), "learning_rate": 1e-3 * min(1, s / 50)}
        for s in range(1, 501)
    ]
    records += [{"step": s, "eval/bits_per_byte": 1.6 + 6.5 / (1 + s / 20)} for s in range(0, 501, 100)]
    baselines = {"unigram": 4.78, "bigram": 3.55, "gzip -9": 3.5, "xz": 3.49, "$cost_{$": 8.0}
    return draw(records, baselines, title="price $5_{$")


def test_no_text_lies_on_another_or_outside_the_picture():
    figure = big_picture()
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    loss_axes, rate_axes = figure.axes
    texts = [*loss_axes.texts, *loss_axes.get_legend().get_texts(), loss_axes.yaxis.label, figure._suptitle]
    texts += [rate_axes.xaxis.label, rate_axes.yaxis.label, rate_axes.yaxis.get_offset_text()]
    texts += [t for a in figure.axes for t in a.get_yticklabels() if t.get_window_extent(renderer).height]
    boxes = {t.get_text() + f" #{i}": t.get_window_extent(renderer) for i, t in enumerate(texts) if t.get_text()}
    assert len(boxes) >= 5 + 3 + 5
    for a, box in boxes.items():
        assert box.x0 >= 0
        assert box.y0 >= -1, a
        assert box.x1 <= figure.bbox.x1 + 1, a
        assert box.y1 <= figure.bbox.y1 + 1, a
        for b, other in boxes.items():
            assert a == b or not box.overlaps(other), (a, b)
    legend = loss_axes.get_legend().get_window_extent(renderer)
    assert legend.y0 >= loss_axes.get_window_extent(renderer).y1, "the legend lies above the curves"


def test_baseline_names_stay_near_their_lines():
    axes = big_picture().axes[0]
    for text in axes.texts:
        name, value = text.get_text().rsplit(" ", 1)
        assert text.xy[1] == pytest.approx(float(value), abs=0.15 * (axes.get_ylim()[1] - axes.get_ylim()[0])), name


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def fails(source, target):
        assert png_size(source) == (1200, 660)
        assert target == path
        raise OSError("disk")

    monkeypatch.setattr(type(path), "replace", fails)
    with pytest.raises(OSError, match="disk"):
        loss_curve([{"step": 1, "loss": 1.0}], path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_neither_a_display_nor_pyplot_nor_global_state_is_touched(tmp_path):
    code = (
        "import sys, jaxtrain.plot\n"
        "print({'jax', 'matplotlib'} & set(sys.modules))\n"
        "import matplotlib\n"
        "before = dict.copy(matplotlib.rcParams)\n"
        "jaxtrain.plot.loss_curve([{'step': 1, 'loss': 1.0}], sys.argv[1], {'b': 2.0}, 'title')\n"
        "print(dict.copy(matplotlib.rcParams) == before, 'matplotlib.pyplot' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "a.png")],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin", "HOME": str(tmp_path), "DISPLAY": ":77", "MPLBACKEND": "tkagg"},
    )
    assert run.stdout.splitlines() == ["set()", "True False"]
