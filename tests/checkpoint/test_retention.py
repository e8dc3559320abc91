"""Which checkpoints are kept: lists worked out by hand."""

import math

import pytest

from jaxtrain.checkpoint.retention import Keep


@pytest.mark.parametrize(
    ("keep", "steps", "metrics", "retired"),
    [
        (Keep(2), [1, 2, 3], {}, [1]),
        (Keep(2), [3, 1, 2], {}, [1]),
        (Keep(3), [1, 2], {}, []),
        (Keep(1), [5], {}, []),
        (Keep(1), [], {}, []),
        (Keep(0), [5, 6], {}, [5]),  # the newest always stays
        (Keep(1, every_steps=100), [50, 100, 150, 200, 250], {}, [50, 150]),
        (Keep(1, best=1), [1, 2, 3], {1: 5.0, 2: 4.0, 3: 6.0}, [1]),
        (Keep(1, best=2), [1, 2, 3, 4], {1: 5.0, 2: 4.0, 3: 6.0}, [3]),
        (Keep(1, best=1, largest=True), [1, 2, 3], {1: 5.0, 2: 4.0, 3: 1.0}, [2]),
        (Keep(1, best=1), [1, 2, 3], {1: math.nan, 2: 4.0, 3: math.nan}, [1]),
        (Keep(1, best=1), [1, 2, 3], {}, [1, 2]),
        (Keep(1, best=1), [1, 2, 3, 4], {1: 4.0, 2: 4.0, 3: 7.0}, [1, 3]),  # of equals the newer
        (Keep(2, best=1), [100, 200, 300, 400, 500], {100: 1.0, 200: 2.0, 300: 3.0, 400: math.nan, 500: 5.0},
         [200, 300]),  # CKPT-08
        (Keep(1, every_steps=10, best=1), [5, 10, 15, 20, 25], {5: 1.0, 15: 2.0}, [15]),
    ],
)  # fmt: skip
def test_CKPT_08_what_is_retired(keep, steps, metrics, retired):
    assert keep.retired(steps, metrics) == retired
