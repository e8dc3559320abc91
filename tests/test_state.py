"""Counters that stay exact, and the fields that snapshots share with states."""

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.state import Counters, Snapshot, TrainState, add_tokens


def exact(words: jax.Array) -> int:
    high, low = words.tolist()
    return high * 2**32 + low


@pytest.mark.parametrize("start", [0, 2**31 - 1, 2**32 - 1, 2**32, 2**33 - 5, 2**63 + 2**32 - 2])
@pytest.mark.parametrize("more", [0, 1, 5, 2**31 - 1])
def test_tokens_carry(start, more):
    words = jnp.asarray([start >> 32, start % 2**32], jnp.uint32)
    total = jax.jit(add_tokens)(words, jnp.int32(more))
    assert (total.dtype, total.shape) == (jnp.uint32, (2,))
    assert exact(total) == start + more


def test_tokens_add_up_over_many_steps():
    words, add = Counters.zero().tokens, jax.jit(add_tokens)
    for _ in range(9):
        words = add(words, jnp.int32(2**31 - 1))
    assert exact(words) == 9 * (2**31 - 1)


def test_a_new_run_counts_from_zero():
    zero = Counters.zero()
    assert [(int(x), x.dtype, x.weak_type) for x in zero[:4]] == [(0, jnp.int32, False)] * 4
    assert (exact(zero.tokens), zero.tokens.dtype) == (0, jnp.uint32)


def test_a_snapshot_is_a_state_without_its_window():
    assert TrainState._fields == (*Snapshot._fields, "start")
