"""Dtypes of a run, and the loss scale that float16 needs."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain import paths

COMPUTE_DTYPES = ("bfloat16", "float32", "float16")


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the loss is scaled before the backward pass, and how the scale moves.

    Attributes:
        initial: scale of the first window; a power of two keeps scaling exact.
        dynamic: False keeps ``initial`` for ever; True doubles it after ``growth_interval`` good windows and halves it
            after a window with a non-finite micro-gradient. Source: Micikevicius et al. 2018, "Mixed precision
            training", section 3.2.
        growth_interval: good windows in a row before the scale doubles.
        minimum, maximum: bounds of a dynamic scale.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                "loss scale: need 0 < minimum <= initial <= maximum, got "
                f"{self.minimum}, {self.initial}, {self.maximum}."
            )


class ScaleState(NamedTuple):
    """The scale now: ``value`` float32 scalar; ``good_windows`` int32 scalar, since the last change."""

    value: jax.Array
    good_windows: jax.Array


@dataclasses.dataclass(frozen=True)
class Precision:
    """Which dtype computes; the optimizer's parameters are always float32 masters.

    Attributes:
        compute: ``bfloat16``, ``float32`` or ``float16``: parameters are cast to it inside the differentiated function,
            so gradients reach the optimizer in float32.
        overrides: path patterns (``re.search``) of parameters that stay float32 in compute, as a router's.
        loss_scale: used with float16 only; for the others the scale is 1 and nothing is multiplied.
    """

    compute: str = "bfloat16"
    overrides: tuple[str, ...] = ()
    loss_scale: LossScale = LossScale()

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE_DTYPES:
            raise ValueError(f"precision: compute {self.compute!r} is not one of {', '.join(COMPUTE_DTYPES)}.")

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: only float16's narrow exponent needs it."""
        return self.compute == "float16"

    def init_scale(self) -> ScaleState:
        """The scale of a new run."""
        return ScaleState(jnp.float32(self.loss_scale.initial if self.scaled else 1.0), jnp.int32(0))

    def adjust(self, scale: ScaleState, good: jax.Array) -> ScaleState:
        """The scale after a window; ``good`` is a bool scalar: no micro-gradient of it was non-finite."""
        rule = self.loss_scale
        if not (self.scaled and rule.dynamic):
            return scale
        count = jnp.where(good, scale.good_windows + 1, 0)
        grow = count >= rule.growth_interval
        grown = jnp.where(grow, jnp.minimum(scale.value * 2, rule.maximum), scale.value)
        value = jnp.where(good, grown, jnp.maximum(scale.value / 2, rule.minimum))
        return ScaleState(value, jnp.where(grow, 0, count))

    def cast(self, params: Any) -> Any:
        """Compute parameters from float32 masters; same tree, ``overrides`` left float32."""

        def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            keep = any(re.search(pattern, paths.name(path)) for pattern in self.overrides)
            return x if keep else x.astype(self.compute)

        return jax.tree_util.tree_map_with_path(one, params)

    def seed(self, scale: ScaleState, weight: jax.Array) -> jax.Array:
        """The cotangent of the loss SUM: float32 scalar, ``scale * 2**-ceil(log2(weight))``.

        A sum over thousands of rows would overflow float16 at any useful scale; dividing by a power of two at or above
        the weight is exact, keeps the cotangent near ``scale``, and is undone in float32.
        """
        # By the bits: exp2 and log2 of XLA are off by an ulp for some weights, and the seed must be exact.
        bits = jax.lax.bitcast_convert_type(jnp.maximum(weight, 1.0), jnp.int32)
        exponent = (bits + (2**23 - 1)) // 2**23 - 127
        return scale.value * jax.lax.bitcast_convert_type((127 - exponent) * 2**23, jnp.float32)
