"""jaxtrain/data/digits.py: which images, which side, which rows. (tests/test_digits.py trains on them.)"""

import sys
import zlib

import numpy as np
import pytest
from sklearn import datasets

from jaxtrain.data import digits
from jaxtrain.data.digits import DigitsData, DigitsTable, load_digits, majority_accuracy, nearest_centroid_accuracy


@pytest.fixture(scope="module")
def data():
    return load_digits()


@pytest.fixture(scope="module")
def original():
    """``(pixels, labels)`` as scikit-learn has them."""
    bunch = datasets.load_digits()
    return bunch.images, bunch.target


@pytest.fixture
def given(monkeypatch):
    """``given(pixels, labels)``: what the data set is from now on."""

    def give(pixels, labels):
        bunch = type("Bunch", (), {"images": np.asarray(pixels, np.float64), "target": np.asarray(labels)})
        monkeypatch.setattr(datasets, "load_digits", lambda: bunch)

    return give


def image(*ink):
    """An 8x8 image whose first pixels are these."""
    pixels = np.zeros(64, np.uint8)
    pixels[: len(ink)] = ink
    return pixels.reshape(8, 8)


def images_of(table):
    return [pixels.tobytes() for pixels in table.pixels]


# -- which side ----------------------------------------------------------------------------------------------------


def test_every_image_is_on_one_side_in_the_data_sets_order(data, original):
    """1,797 images, by the data set's own page."""
    held_out = set(images_of(data.held_out))
    assert not held_out & set(images_of(data.train))
    assert len(data.train) + len(data.held_out) == len(original[1]) == 1797
    out = np.array([pixels.astype(np.uint8).tobytes() in held_out for pixels in original[0]])
    for side, chosen in ((data.held_out, out), (data.train, ~out)):
        assert np.array_equal(side.pixels, original[0][chosen])
        assert np.array_equal(side.labels, original[1][chosen])


def test_held_out_are_the_smallest_crc32_of_each_class(data, original):
    assert len({pixels.tobytes() for pixels in original[0]}) == 1797  # no copies, so that each image counts
    for label in range(10):
        sums = sorted(zlib.crc32(p.astype(np.uint8).tobytes()) for p in original[0][original[1] == label])
        found = sorted(zlib.crc32(p.tobytes()) for p in data.held_out.pixels[data.held_out.labels == label])
        assert found == sums[: round(0.2 * len(sums))]


def test_the_split_is_the_same_each_time_and_in_any_order(data, original, given):
    again = load_digits()
    assert again.fingerprint == data.fingerprint
    assert np.array_equal(again.train.pixels, data.train.pixels)
    order = np.random.default_rng(0).permutation(1797)
    given(original[0][order], original[1][order])
    shuffled = load_digits()
    assert sorted(images_of(shuffled.held_out)) == sorted(images_of(data.held_out))
    assert images_of(shuffled.held_out) != images_of(data.held_out)
    assert shuffled.fingerprint != data.fingerprint


def test_this_split_is_that_of_any_machine(data):
    """Classes of 178, 182, 177, 183, 181, 182, 181, 179, 174, 180 images, a fifth of each, rounded."""
    assert np.bincount(data.held_out.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert np.bincount(data.train.labels).tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert str(data) == (
        f"training 1438 images; held out 359; 8x8 handwritten digits of 10 classes; {data.fingerprint[:12]}"
    )


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.75])
def test_the_fraction_is_that_of_each_class(fraction, original):
    split = load_digits(fraction)
    totals = np.bincount(original[1])
    assert np.bincount(split.held_out.labels).tolist() == [round(fraction * n) for n in totals.tolist()]


@pytest.mark.parametrize(("fraction", "held_out"), [(1e-9, 10), (1 - 1e-9, 1797 - 10)])
def test_each_class_is_on_both_sides(fraction, held_out):
    split = load_digits(fraction)
    assert len(split.held_out) == held_out
    for side in (split.train, split.held_out):
        assert set(side.labels.tolist()) == set(range(10))


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=rf"data.held_out_fraction={fraction}: must be above 0 and below 1; 0.2 is"):
        load_digits(fraction)


def test_copies_are_on_one_side_and_count_once(given):
    """Four images of one class, each three times: half of four are two, with all their copies."""
    pixels = [image(n, 16 - n) for n in (1, 2, 3, 4)] * 3 + [image(0, 0, 5), image(0, 0, 6)]
    given(pixels, [0] * 12 + [1, 1])
    split = load_digits(0.5)
    assert np.bincount(split.held_out.labels).tolist() == [6, 1]
    assert np.bincount(split.train.labels).tolist() == [6, 1]
    assert not set(images_of(split.train)) & set(images_of(split.held_out))


def test_a_copy_with_another_label_goes_where_the_first_goes(given):
    """Two images of class 1, of which one is held out; their copies under class 0 leave that class a single image."""
    given([image(7), image(8), image(1), image(7), image(8)], [1, 1, 0, 0, 0])
    split = load_digits(0.5)
    assert sorted(split.held_out.labels.tolist()) == [0, 1]
    assert len(set(images_of(split.held_out))) == 1
    assert image(1).tobytes() in images_of(split.train)
    assert len(split.train) == 3


def test_a_class_of_one_image_is_trained_on(given):
    given([image(1), image(2), image(3)], [0, 0, 1])
    split = load_digits(0.9)
    assert (split.held_out.labels.tolist(), sorted(split.train.labels.tolist())) == ([0], [0, 1])


def test_the_fingerprint_sees_side_pixel_and_label(original, given):
    pixels, labels = original[0].copy(), original[1].copy()
    seen = {load_digits(fraction).fingerprint for fraction in (0.2, 0.21)}
    pixels[3, 4, 4] += 1
    given(pixels, labels)
    seen.add(load_digits().fingerprint)
    pixels[3, 4, 4] -= 1
    labels[3] = (labels[3] + 1) % 10
    given(pixels, labels)
    seen.add(load_digits().fingerprint)
    given(*original)
    assert load_digits().fingerprint in seen
    assert len(seen) == 4
    assert {len(fingerprint) for fingerprint in seen} == {64}


# -- rows ----------------------------------------------------------------------------------------------------------

TABLE = DigitsTable(np.stack([image(16, 0, 8), image(4), image(1)]), np.array([7, 0, 9]))


def test_a_row_is_float32_ink_with_a_label_and_a_weight():
    row = TABLE[0]
    assert {name: (leaf.dtype.name, leaf.shape) for name, leaf in row.items()} == {
        "images": ("float32", (8, 8, 1)), "labels": ("int32", ()), "weights": ("float32", ()),
    }  # fmt: skip
    assert row["images"][0, :4, 0].tolist() == [1.0, 0.0, 0.5, 0.0]
    assert (row["labels"], row["weights"]) == (7, 1.0)


def test_rows_are_stacked_in_the_order_asked_for():
    rows = TABLE.read_rows([2, np.int64(0), 2])
    assert {name: (leaf.dtype.name, leaf.shape) for name, leaf in rows.items()} == {
        "images": ("float32", (3, 8, 8, 1)), "labels": ("int32", (3,)), "weights": ("float32", (3,)),
    }  # fmt: skip
    assert rows["labels"].tolist() == [9, 7, 9]
    assert rows["images"][:, 0, 0, 0].tolist() == [1 / 16, 1.0, 1 / 16]
    assert {name: leaf.shape for name, leaf in TABLE.read_rows([]).items()} == {
        "images": (0, 8, 8, 1), "labels": (0,), "weights": (0,),
    }  # fmt: skip


def test_rows_are_fresh_arrays():
    for name in ("images", "labels", "weights"):
        rows = TABLE.read_rows([0, 1])
        rows[name][:] = 3
        assert not np.any(TABLE.read_rows([0, 1])[name] == 3)


@pytest.mark.parametrize("row", [-1, 3, 100])
def test_rows_outside_are_an_index_error(row):
    assert len(TABLE) == 3
    with pytest.raises(IndexError, match=f"row {row} of a table of 3 rows"):
        TABLE[row]
    with pytest.raises(IndexError, match=f"row {row} of a table of 3 rows"):
        TABLE.read_rows([0, row])
    with pytest.raises(TypeError):
        TABLE[1.0]


def test_ink_fills_the_range(data):
    images = data.train.read_rows(range(len(data.train)))["images"]
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert len(np.unique(images)) == 17


# -- baselines -----------------------------------------------------------------------------------------------------


def tiny(train, held_out):
    """Sides of (ink of the first pixels, label)."""
    sides = [
        DigitsTable(np.stack([image(*ink) for ink, _ in side]), np.array([label for _, label in side]))
        for side in (train, held_out)
    ]
    return DigitsData(*sides, "")


def test_majority_by_hand():
    """Class 5 twice in training; one of three held out is a 5."""
    train = [((0,), 5), ((0,), 2), ((0,), 5)]
    assert majority_accuracy(tiny(train, [((0,), 5), ((0,), 2), ((0,), 2)])) == pytest.approx(1 / 3)
    assert majority_accuracy(tiny(train[:2], [((0,), 5), ((0,), 2), ((0,), 2)])) == pytest.approx(2 / 3)  # a tie: 2


def test_nearest_centroid_by_hand():
    """Centroids (1, 0) of class 3 and (5, 4) of class 8; their midpoint is (3, 2).

    (0, 0) is a 3 and (6, 4) an 8; (1, 3) is 9 from the first and 17 from the second, squared: a 3; (4, 2) 13 and 5.
    """
    train = [((0, 0), 3), ((2, 0), 3), ((4, 4), 8), ((6, 4), 8)]
    held_out = [((0, 0), 3), ((6, 4), 8), ((1, 3), 8), ((4, 2), 8)]
    assert nearest_centroid_accuracy(tiny(train, held_out)) == 0.75


def test_baselines_of_the_digits(data):
    """The most frequent training class has 146 images: 1, 3 and 5. The smallest is 1, of which 36 are held out."""
    assert majority_accuracy(data) == 36 / 359
    assert 0.85 < nearest_centroid_accuracy(data) < 0.95


# -- without scikit-learn ------------------------------------------------------------------------------------------


def test_without_scikit_learn_the_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ImportError, match=r"^data.name=digits needs scikit-learn; install it with: pip install 'jaxtrain\[examples\]'$"
    ):
        digits.load_digits()
    with pytest.raises(ValueError, match="held_out_fraction=2"):  # what costs nothing to check comes first
        digits.load_digits(2)
