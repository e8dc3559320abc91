"""What a training program carries between steps, and what of it a checkpoint holds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.precision import ScaleState


class Variables(NamedTuple):
    """What an init function returns: float parameters (a pytree of dicts) and other state, or an empty tuple."""

    params: Any
    model_state: Any = ()


class Counters(NamedTuple):
    """Exact counts since the run began, on device.

    Attributes:
        micro_step: micro-batches seen, int32. window: windows finished, int32. step: updates applied, int32.
        skipped_in_a_row: windows skipped since the last applied one, int32.
        tokens: loss weight seen, uint32[2] as (high, low) words: exact beyond 2**32.
    """

    micro_step: jax.Array
    window: jax.Array
    step: jax.Array
    skipped_in_a_row: jax.Array
    tokens: jax.Array

    @classmethod
    def zero(cls) -> "Counters":
        """The counters of a new run."""
        return cls(*(jnp.int32(0),) * 4, jnp.zeros(2, jnp.uint32))


def add_tokens(tokens: jax.Array, more: jax.Array) -> jax.Array:
    """``tokens`` (uint32[2], high and low word) plus an int32 scalar ``more >= 0``, with the carry."""
    low = tokens[1] + more.astype(jnp.uint32)
    return jnp.stack([tokens[0] + (low < tokens[1]).astype(jnp.uint32), low])


class WindowStart(NamedTuple):
    """What moves inside a window, as it was at the window's start: what a skip or a resume goes back to."""

    counters: Counters
    model_state: Any


class TrainState(NamedTuple):
    """All that a step reads and writes. Every leaf is a sharded array; ``program.step`` donates it.

    Attributes:
        params: float32 masters.
        opt_state: the optimizer's state; inside ``optax.MultiStepsState`` where k is not 1.
        model_state: mutable model state, moves with every micro-batch.
        ema: exponential average of ``params`` in float32, or None.
        scale: the loss scale, constant inside a window.
        counters: see ``Counters``.
        start: what a window began with; None where every micro-batch is a window of its own.
    """

    params: Any
    opt_state: Any
    model_state: Any
    ema: Any
    scale: ScaleState
    counters: Counters
    start: WindowStart | None


class Snapshot(NamedTuple):
    """The state at the START of the current window, without its accumulator: what a checkpoint holds.

    It is the same for every accumulation mechanism and k, so a run may go on with another one.
    """

    params: Any
    opt_state: Any
    model_state: Any
    ema: Any
    scale: ScaleState
    counters: Counters


class View(NamedTuple):
    """What a gradient needs: fp32 masters, model state, loss scale."""

    params: Any
    model_state: Any
    scale: ScaleState
