"""docs/examples: each runs as it stands, learns, and is short."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "docs" / "examples").glob("*.py"))
ENDS = {  # the last step, and what its number must be
    "plain_function": (200, lambda loss: loss < 1e-3),
    "flax_linen": (300, lambda accuracy: accuracy >= 0.85),
    "flax_nnx": (400, lambda error: error < 0.5),  # the variance of the target is 1.45
    "pytree_module": (400, lambda accuracy: accuracy >= 0.95),
}


def test_every_example_is_known():
    assert {path.stem for path in EXAMPLES} == set(ENDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    assert len(path.read_text().splitlines()) < 60
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    step, number = done.stdout.split()
    wanted, is_good = ENDS[path.stem]
    assert int(step) == wanted
    assert is_good(float(number)), number
