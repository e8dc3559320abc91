"""Keys as a pure function of (seed, stream, index): nothing is carried, so nothing can be lost or drawn twice."""

import zlib

import jax

_MAX_SEED = 2**32


def key(seed: int, stream: str, index: jax.typing.ArrayLike = 0) -> jax.Array:
    """The key of draw number ``index`` in a named stream.

    Args:
        seed: the run's seed, ``0 <= seed < 2**32``.
        stream: what the draws are for, as ``"params"`` or ``"dropout"``; two streams never share a key.
        index: which draw, a Python int or an integer scalar (also traced); the train step passes ``micro_step``.

    Returns:
        A typed scalar key (threefry, whatever the process's default is: a resumed run must draw the same).

    Raises:
        ValueError: the seed is outside its range.
    """
    if not 0 <= seed < _MAX_SEED:
        raise ValueError(f"seed {seed} is outside 0 .. {_MAX_SEED - 1}; choose one inside.")
    base = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(base, zlib.crc32(stream.encode())), index)
