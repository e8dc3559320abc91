"""Names of leaves, and how two trees differ."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import paths

Point = collections.namedtuple("Point", ["x", "y"])
TREE = {"layers": {"mlp": {"up": {"kernel": 1}}}, "a": [2, (3,)], "point": Point(4, 5), "none": None, 7: 6}


def test_names_of_dicts_sequences_and_fields():
    tree = {key: value for key, value in TREE.items() if key != 7}
    assert paths.named_leaves(tree) == {"a/0": 2, "a/1/0": 3, "layers/mlp/up/kernel": 1, "point/x": 4, "point/y": 5}
    assert paths.named_leaves({7: {0: 6}}) == {"7/0": 6}
    assert paths.named_leaves(6) == {"": 6}


def test_the_order_is_that_of_jax_tree_leaves():
    tree = {"z": 1, "a": {"10": 2, "9": 3}, "B": [4, 5]}
    assert list(paths.named_leaves(tree).values()) == jax.tree.leaves(tree) == [4, 5, 2, 3, 1]


@pytest.mark.parametrize(
    "right", [{"a": np.zeros((2, 3), np.float32), "b": [np.int32(1)]}, {"a": jnp.ones((2, 3)), "b": (jnp.int32(9),)}]
)
def test_no_differences(right):
    left = {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": [jax.ShapeDtypeStruct((), jnp.int32)]}
    assert paths.differences(left, right) == []


def test_every_difference_is_a_sentence():
    wanted = {
        "gone": np.zeros(2, np.float32),
        "dtype": np.zeros(3, np.float32),
        "shape": jnp.zeros((4, 1)),
        "same": jnp.int32(0),
    }
    given = {
        "new": jnp.zeros(5, jnp.bfloat16),
        "dtype": jnp.zeros(3, jnp.bfloat16),
        "shape": np.zeros((1, 4), np.float32),
        "same": jnp.int32(1),
    }
    assert sorted(paths.differences(wanted, given)) == [
        "dtype: expected float32[3], got bfloat16[3]",
        "gone: missing (expected float32[2])",
        "new: not expected (got bfloat16[5])",
        "shape: expected float32[4, 1], got float32[1, 4]",
    ]


def test_two_leaves_of_one_name_are_not_lost():
    with pytest.raises(ValueError, match="a/b"):
        paths.named_leaves({"a/b": 1, "a": {"b": 2}})
