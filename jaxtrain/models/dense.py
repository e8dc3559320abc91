"""A product with a bias, and dropout with a key passed at call time: what several models share."""

import jax
import jax.numpy as jnp
from flax import nnx


def dropout(x, rate: float, key) -> jax.Array:
    """``x`` with each element zeroed with probability ``rate`` and the others divided by ``1 - rate``; ``key`` None: x.

    Source: Srivastava et al. 2014, "Dropout", JMLR 15, section 10 (the scaling at training time).
    """
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), jnp.zeros_like(x))


class Dense(nnx.Module):
    """``x @ kernel + bias``: ``kernel`` (I, O) normal with the given std, ``bias`` (O,) zero, both float32."""

    def __init__(self, inputs: int, outputs: int, std: float, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x_BI, out_dtype=None) -> jax.Array:
        """(B, O), multiplied in the kernel's dtype, summed and returned in ``out_dtype``, by default x's."""
        kernel_IO = self.kernel[...]
        y_BO = jax.lax.dot(x_BI.astype(kernel_IO.dtype), kernel_IO, preferred_element_type=out_dtype)
        y_BO = y_BO.astype(out_dtype or x_BI.dtype)
        return y_BO + self.bias[...].astype(y_BO.dtype)[None]
