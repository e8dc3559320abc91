"""Keys against threefry written out in NumPy: a run resumed under another version must draw the same."""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import rng


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3."""
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    a, b = ((c + k) % 2**32 for c, k in zip(counter, key, strict=True))
    for block, rotations in enumerate([(13, 15, 26, 6), (17, 29, 16, 24)] * 2 + [(13, 15, 26, 6)]):
        for rotation in rotations:
            a = (a + b) % 2**32
            b = ((b << rotation | b >> 32 - rotation) % 2**32) ^ a
        a = (a + schedule[(block + 1) % 3]) % 2**32
        b = (b + schedule[(block + 2) % 3] + block + 1) % 2**32
    return a, b


def by_hand(seed: int, stream: str, index: int) -> list[int]:
    return list(threefry(threefry((0, seed), (0, zlib.crc32(stream.encode()))), (0, index)))


def data(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


def test_threefry_by_hand_is_right():
    assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (
        0xC4923A9C,
        0x483DF7A0,
    )  # Random123's vector


@pytest.mark.parametrize(
    ("seed", "stream", "index"),
    [(0, "params", 0), (7, "dropout", 3), (2**31, "dropout", 2**31 - 1), (2**32 - 1, "ä", 2**32 - 1)],
)
def test_keys_are_threefry_of_seed_stream_and_index(seed, stream, index):
    assert data(rng.key(seed, stream, index)) == by_hand(seed, stream, index)


def test_no_two_of_seed_stream_and_index_share_a_key():
    draws = list(itertools.product((0, 1, 2**31, 2**32 - 1), ("params", "dropout", "sample"), (0, 1, 2, 1000)))
    assert len({tuple(data(rng.key(*draw))) for draw in draws}) == len(draws)


@pytest.mark.parametrize("index", [3, np.int64(3), np.uint32(3), jnp.int32(3)])
def test_any_kind_of_index_and_a_traced_one_give_one_key(index):
    wanted = by_hand(1, "dropout", 3)
    assert data(rng.key(1, "dropout", index)) == wanted
    assert data(jax.jit(lambda i: rng.key(1, "dropout", i))(index)) == wanted


def test_the_default_index_is_0():
    assert data(rng.key(5, "params")) == by_hand(5, "params", 0)


def test_the_default_implementation_of_the_process_does_not_matter():
    before = rng.key(1, "dropout", 2)
    with jax.default_prng_impl("rbg"):
        after = rng.key(1, "dropout", 2)
    assert before.dtype == after.dtype
    assert (data(after), after.shape) == (by_hand(1, "dropout", 2), ())


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed {seed} is outside 0 \.\. 4294967295"):
        rng.key(seed, "params")
