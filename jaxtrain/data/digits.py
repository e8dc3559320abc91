"""The 1,797 handwritten digits that come with scikit-learn: 8x8 pixels in 17 greys, as a table of rows.

The data set lists one group of writers after another, so its last part holds other people's hands than its first. The
split here is by a hash of each image, which mixes the writers: it measures digits by writers that training saw too, and
is easier than a split by writer.

Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits", UCI (doi 10.24432/C50P49), of which these
are the test part; ``sklearn.datasets.load_digits``.
"""

import hashlib
import operator
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
_WHITE = 16  # grey levels are 0..16


class DigitsTable:
    """Random access to images with labels.

    ``table[i]`` is a dict of fresh arrays of one row, ``table.read_rows(rows)`` of n:

    - ``images`` float32 (n, 8, 8, 1), 0 is paper and 1 the darkest ink
    - ``labels`` int32 (n,), 0..9
    - ``weights`` float32 (n,), 1

    Raises IndexError outside ``0 <= i < len(table)``.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray):
        """``pixels`` uint8 (N, 8, 8) in 0..16, ``labels`` integers (N,)."""
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: leaf[0] for name, leaf in self.read_rows([row]).items()}

    def read_rows(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        rows = [operator.index(row) for row in rows]
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of a table of {len(self)} rows")
        return {
            "images": self.pixels[rows][..., None].astype(np.float32) / _WHITE,
            "labels": self.labels[rows].astype(np.int32),
            "weights": np.ones(len(rows), np.float32),
        }


class DigitsData(NamedTuple):
    """The digits, split; each side in the data set's order."""

    train: DigitsTable
    held_out: DigitsTable
    fingerprint: str  # hex sha256; changes with any pixel, label or side of an image

    def __str__(self) -> str:
        sizes = f"training {len(self.train)} images; held out {len(self.held_out)}"
        return f"{sizes}; 8x8 handwritten digits of {CLASSES} classes; {self.fingerprint[:12]}"


def load_digits(held_out_fraction: float = 0.2) -> DigitsData:
    """Read scikit-learn's digits and split them.

    Of each class the images with the smallest crc32 are held out, as many as make up the fraction, at least one and not
    all: the same on every machine, and whatever the order. Images with the same pixels are on the same side.

    Raises:
        ValueError: a fraction outside (0, 1).
        ImportError: scikit-learn is not installed.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"data.held_out_fraction={held_out_fraction}: must be above 0 and below 1; 0.2 is usual")
    try:
        from sklearn import datasets  # an extra, and slow to load
    except ImportError as error:
        raise ImportError(
            "data.name=digits needs scikit-learn; install it with: pip install 'jaxtrain[examples]'"
        ) from error
    bunch = datasets.load_digits()
    pixels, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int32)
    out = _held_out(pixels, labels, held_out_fraction)
    digest = hashlib.sha256(pixels.tobytes() + labels.astype("<i4").tobytes() + out.tobytes())
    return DigitsData(
        DigitsTable(pixels[~out], labels[~out]), DigitsTable(pixels[out], labels[out]), digest.hexdigest()
    )


def _held_out(pixels: np.ndarray, labels: np.ndarray, fraction: float) -> np.ndarray:
    """bool (N,): which images are held out. Copies count as one, of the class that the first of them has."""
    first: dict[bytes, int] = {}  # in order of appearance
    for image, label in zip(pixels, labels, strict=True):
        first.setdefault(image.tobytes(), int(label))
    chosen: set[bytes] = set()
    for label in sorted(set(first.values())):
        images = sorted((image for image in first if first[image] == label), key=lambda b: (zlib.crc32(b), b))
        chosen.update(images[: min(max(round(fraction * len(images)), 1), len(images) - 1)])
    return np.array([image.tobytes() in chosen for image in pixels])


def majority_accuracy(data: DigitsData) -> float:
    """The share of held-out images that are of the most frequent training class (of equal ones the smallest)."""
    return float(np.mean(data.held_out.labels == np.bincount(data.train.labels).argmax()))


def nearest_centroid_accuracy(data: DigitsData) -> float:
    """The share of held-out images nearest, by Euclidean distance, to the mean training image of their class."""
    train, held_out = (side.pixels.reshape(len(side), -1).astype(np.float64) for side in (data.train, data.held_out))
    classes = np.unique(data.train.labels)
    centroids = np.stack([train[data.train.labels == c].mean(0) for c in classes])
    distances = ((held_out[:, None] - centroids[None]) ** 2).sum(-1)
    return float(np.mean(classes[distances.argmin(1)] == data.held_out.labels))
