"""A multilayer perceptron, as a Flax NNX module that stores parameters and nothing else.

ReLU after each hidden layer, dropout with keys passed at call time::

    hidden/0/kernel (I, W)    hidden/0/bias (W,)    then hidden/1/... of (W, W)
    head/kernel (W, V)        head/bias (V,)

Parameters are born float32, and the dtype of the first kernel at call time decides that of the activations; logits are
float32.

Shape suffixes: B batch, I inputs, W width, V classes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.dense import Dense, dropout


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Sizes of an `MLP`.

    Attributes:
      inputs: numbers in a sample, over all its dims. layers: hidden layers; 0 is softmax regression.
      dropout: probability of zeroing an output of a hidden layer.

    Raises:
      ValueError: a number out of range.
    """

    inputs: int
    width: int
    layers: int
    classes: int
    dropout: float = 0.0

    def __post_init__(self):
        for name, least in (("inputs", 1), ("width", 1), ("layers", 0), ("classes", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be a probability in [0, 1); 0 turns it off")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the activations, from the input to the logits."""
        return (self.inputs, *(self.width,) * self.layers, self.classes)


def flops_per_sample(config: MLPConfig) -> int:
    """Floating-point operations per trained sample, forward and backward: 6 for each kernel element, see `resnet`."""
    return 6 * sum(i * o for i, o in zip(config.sizes[:-1], config.sizes[1:], strict=True))


class MLP(nnx.Module):
    """A classifier of samples of any shape; ``nnx.state(model)`` is its parameters and nothing more.

    Args:
      config: sizes.
      rngs: gives the ``params`` key for the initial values: kernels normal with std sqrt(2 / inputs) before a ReLU (He
        et al. 2015, arXiv 1502.01852, equation 10), sqrt(1 / inputs) before the logits, biases 0.
    """

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        self.config = config
        *before, last = config.sizes[:-1]
        widths = zip(before, config.sizes[1:-1], strict=True)
        self.hidden = nnx.List([Dense(i, o, math.sqrt(2 / i), rngs=rngs) for i, o in widths])
        self.head = Dense(last, config.classes, math.sqrt(1 / last), rngs=rngs)

    def __call__(self, x, *, key=None) -> jax.Array:
        """Logits (B, V), float32.

        Args:
          x: (B, ...) with ``config.inputs`` numbers in each sample.
          key: dropout's key; None means evaluation, without dropout. Hidden layer i draws from ``fold_in(key, i)``.

        Raises:
          ValueError: another number of numbers in a sample.
        """
        if math.prod(x.shape[1:]) != self.config.inputs:
            raise ValueError(
                f"samples of shape {x.shape[1:]} hold {math.prod(x.shape[1:])} numbers, not inputs={self.config.inputs}"
            )
        x_BI = x.reshape(x.shape[0], -1).astype((*self.hidden, self.head)[0].kernel.dtype)
        for index, layer in enumerate(self.hidden):
            x_BI = jax.nn.relu(layer(x_BI))
            if key is not None:
                x_BI = dropout(x_BI, self.config.dropout, jax.random.fold_in(key, index))
        return self.head(x_BI, jnp.float32)
