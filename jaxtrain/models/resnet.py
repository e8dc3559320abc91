"""A residual network for small images, as a Flax NNX module that stores parameters and running statistics only.

The CIFAR form: a 3x3 stem that keeps the size, stages of basic blocks, the width doubled and the size halved at the
start of each stage but the first, the mean over all places, and a linear head::

    stem/kernel (3, 3, I, W)                              stem_norm/{scale, bias} (W,)
    stages/s/b/{conv1, conv2}/kernel (3, 3, in, out)      stages/s/b/{norm1, norm2}/{scale, bias} (out,)
    stages/s/0/shortcut/kernel (1, 1, in, out)            stages/s/0/shortcut_norm/{scale, bias} (out,), for s > 0
    head/kernel (D, V)                                    head/bias (V,)

and ``mean`` and ``var`` of each norm as model_state. Parameters are born float32, and the dtype of ``stem/kernel`` at
call time decides that of the activations, while norms, the mean over places and logits are computed in float32. A
kernel of another dtype computes its own product in that.

Shape suffixes: B batch, H and W height and width (also the width of the first stage, in parameters), I and O channels
in and out, D channels of the last stage, V classes.

Sources: He et al. 2015, "Deep Residual Learning" (arXiv 1512.03385), section 4.2, with projection shortcuts (option B)
where it pads with zeros (A); Goyal et al. 2017 (1706.02677), section 5.1, for the initial values.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.batch_norm import BatchNorm, check_running
from jaxtrain.models.dense import Dense


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes and choices of a `ResNet`.

    Attributes:
      image_shape: height, width, channels. width: channels of the first stage.
      blocks: of each stage. The paper's ResNet-20 is (3, 3, 3): 2 layers a block, stem and head.
      momentum, running: of the running statistics, see `BatchNorm`.

    Raises:
      ValueError: a number out of range, or more stages than the image can be halved for.
    """

    image_shape: tuple[int, int, int]
    classes: int
    width: int = 16
    blocks: tuple[int, ...] = (3, 3, 3)
    momentum: float = 0.9
    running: str = "sequential"

    def __post_init__(self):
        for name in ("image_shape", "blocks"):  # a list from a config file would make the module unhashable
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.image_shape) != 3 or min(self.image_shape) < 1:
            raise ValueError(f"image_shape={self.image_shape} must be (height, width, channels), each at least 1")
        for name, least in (("classes", 2), ("width", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks={self.blocks} must name at least one stage, each of at least 1 block")
        side = min(self.image_shape[:2])
        stages = (side - 1).bit_length() + 1  # 5 pixels, 3, 2, 1: a stride of 2 rounds up
        if len(self.blocks) > stages:
            raise ValueError(
                f"blocks={self.blocks} halves the image {len(self.blocks) - 1} times, but a side of {side} pixels can "
                f"be halved {stages - 1} times; give at most {stages} stages"
            )
        check_running(self.momentum, self.running)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.blocks)))


def flops_per_sample(config: ResNetConfig) -> int:
    """Floating-point operations per trained image, forward and backward, counted as for MFU.

    6 for each multiply-add of the forward pass: 2 there, and twice as much in the backward pass (the convention of
    Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B). Convolutions and head count, also where a kernel
    reaches over the border; norms, additions and ReLU do not.
    """
    height, width, inputs = config.image_shape
    products = height * width * 9 * inputs * config.width
    inputs = config.width
    for stage, (outputs, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
        if stage:
            height, width = -(-height // 2), -(-width // 2)
        first = 9 * inputs * outputs + (inputs * outputs if stage else 0)
        products += height * width * (first + (2 * blocks - 1) * 9 * outputs**2)
        inputs = outputs
    return 6 * (products + inputs * config.classes)


class Conv(nnx.Module):
    """A convolution without bias, (B, H, W, I) to (B, ceil(H / stride), ceil(W / stride), O).

    ``kernel`` float32 (size, size, I, O), size odd, is normal with std sqrt(2 / (size * size * I)): He et al. 2015,
    "Delving Deep into Rectifiers" (arXiv 1502.01852), equation 10. Both sides are padded by size // 2, so that 3x3 and
    1x1 kernels of one stride stand on the same places.
    """

    def __init__(self, size: int, inputs: int, outputs: int, stride: int = 1, *, rngs: nnx.Rngs):
        shape, std = (size, size, inputs, outputs), math.sqrt(2 / (size * size * inputs))
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.stride, self.padding = stride, size // 2

    def __call__(self, x_BHWI) -> jax.Array:
        """Computed in the kernel's dtype, returned in x's."""
        kernel = self.kernel[...]
        y_BHWO = jax.lax.conv_general_dilated(
            x_BHWI.astype(kernel.dtype), kernel, (self.stride,) * 2, ((self.padding,) * 2,) * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return y_BHWO.astype(x_BHWI.dtype)


class Block(nnx.Module):
    """``relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x))``, the shortcut a projection where the shape changes.

    The scale of ``norm2`` starts at 0: each block starts as its shortcut (Goyal et al. 2017, 1706.02677, section 5.1).
    """

    def __init__(self, inputs: int, outputs: int, stride: int, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.conv1 = Conv(3, inputs, outputs, stride, rngs=rngs)
        self.norm1 = _norm(outputs, config)
        self.conv2 = Conv(3, outputs, outputs, rngs=rngs)
        self.norm2 = _norm(outputs, config, scale=0.0)
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.shortcut = Conv(1, inputs, outputs, stride, rngs=rngs)
            self.shortcut_norm = _norm(outputs, config)

    def __call__(self, x_BHWI, weights_B, train: bool) -> jax.Array:
        y_BHWO = jax.nn.relu(self.norm1(self.conv1(x_BHWI), weights_B, train=train))
        y_BHWO = self.norm2(self.conv2(y_BHWO), weights_B, train=train)
        if self.projects:
            x_BHWI = self.shortcut_norm(self.shortcut(x_BHWI), weights_B, train=train)
        return jax.nn.relu(y_BHWO + x_BHWI)


def _norm(channels: int, config: ResNetConfig, scale: float = 1.0) -> BatchNorm:
    return BatchNorm(channels, momentum=config.momentum, running=config.running, scale=scale)


class ResNet(nnx.Module):
    """A classifier of images; its ``nnx.Param`` are as listed above, its ``nnx.BatchStat`` the running statistics.

    Args:
      config: sizes and choices.
      rngs: gives the ``params`` key for the initial values: kernels as in `Conv`, scales 1 but for `Block`'s 0, head
        normal with std 0.01 (Goyal et al. 2017, section 5.1), biases 0.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = Conv(3, config.image_shape[2], config.width, rngs=rngs)
        self.stem_norm = _norm(config.width, config)
        stages, inputs = [], config.width
        for stage, (outputs, blocks) in enumerate(zip(config.widths, config.blocks, strict=True)):
            first = Block(inputs, outputs, 2 if stage else 1, config, rngs=rngs)
            rest = [Block(outputs, outputs, 1, config, rngs=rngs) for _ in range(blocks - 1)]
            stages.append(nnx.List([first, *rest]))
            inputs = outputs
        self.stages = nnx.List(stages)
        self.head = Dense(inputs, config.classes, 0.01, rngs=rngs)

    def __call__(self, images_BHWI, weights_B=None, *, train: bool) -> jax.Array:
        """Logits (B, V), float32.

        Args:
          images_BHWI: (B, *image_shape), any float dtype.
          weights_B: how much each row counts in batch statistics: 0 for padding; by default 1. Only for training.
          train: True normalises with the batch and observes it, see `BatchNorm`; False uses the running statistics.

        Raises:
          ValueError: images of another shape, or weights that are not one a row.
        """
        if images_BHWI.shape[1:] != self.config.image_shape:
            raise ValueError(
                f"images have shape {images_BHWI.shape}; give (batch, *image_shape) with "
                f"image_shape={self.config.image_shape}"
            )
        x_BHWO = self.stem(images_BHWI.astype(self.stem.kernel.dtype))
        x_BHWO = jax.nn.relu(self.stem_norm(x_BHWO, weights_B, train=train))
        for stage in self.stages:
            for block in stage:
                x_BHWO = block(x_BHWO, weights_B, train)
        return self.head(jnp.mean(x_BHWO.astype(jnp.float32), axis=(1, 2)), jnp.float32)
