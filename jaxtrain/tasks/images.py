"""Classifiers of images: handwritten digits, by a multilayer perceptron or a residual network."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import adapters
from jaxtrain.data import digits
from jaxtrain.losses import Loss, classification
from jaxtrain.models import mlp, resnet
from jaxtrain.models.batch_norm import pooled_merge, pooled_zeros, pop_sums
from jaxtrain.step import MergeStats
from jaxtrain.tasks.task import Dataset, Score, Task


def task(config: ConfigDict, mesh: Mesh) -> Task:
    """``model.name`` mlp or resnet on scikit-learn's digits; nothing in it depends on the mesh."""
    make, apply, flops = (_mlp if config.model.name == "mlp" else _resnet)(config.model)
    pooled = config.model.name == "resnet" and config.model.running_stats == "pooled"
    return Task(
        make=make,
        functions=adapters.from_nnx(make, classification_loss(apply, config.loss.label_smoothing)),
        row={
            "images": jax.ShapeDtypeStruct(digits.IMAGE_SHAPE, jnp.float32),
            "labels": jax.ShapeDtypeStruct((), jnp.int32),
            "weights": jax.ShapeDtypeStruct((), jnp.float32),
        },
        weight_per_row=1,
        item="image",
        flops_per_row=flops,
        load=functools.partial(_load, config.data.held_out_fraction),
        score=Score("accuracy", "accuracy", "higher"),
        merge_stats=MergeStats(pooled_zeros, pooled_merge) if pooled else None,
    )


def classification_loss(
    apply: Callable[[Any, Any, jax.Array | None], jax.Array], label_smoothing: float
) -> Callable[[Any, Any, jax.Array | None], Loss]:
    """Cross-entropy of ``images`` float32 ``[B, H, W, C]``, ``labels`` int32 ``[B]``, ``weights`` float32 ``[B]``.

    ``apply(model, batch, key)`` gives logits ``[B, V]``. An evaluation has no label smoothing.
    """

    def loss(model: Any, batch: Any, key: jax.Array | None) -> Loss:
        logits, smoothing = apply(model, batch, key), 0.0 if key is None else label_smoothing
        found = classification(logits, batch["labels"], batch["weights"], label_smoothing=smoothing)
        return found._replace(stats=pop_sums(model))

    return loss


def _mlp(m: ConfigDict) -> tuple[Callable[..., Any], Callable[..., Any], float]:
    sizes = mlp.MLPConfig(math.prod(digits.IMAGE_SHAPE), m.d_model, m.layers, digits.CLASSES, dropout=m.dropout)
    return (
        lambda rngs: mlp.MLP(sizes, rngs=rngs),
        lambda model, batch, key: model(batch["images"], key=key),
        mlp.flops_per_sample(sizes),
    )


def _resnet(m: ConfigDict) -> tuple[Callable[..., Any], Callable[..., Any], float]:
    sizes = resnet.ResNetConfig(
        digits.IMAGE_SHAPE, digits.CLASSES, m.d_model, (m.layers,) * m.stages, running=m.running_stats
    )
    return (
        lambda rngs: resnet.ResNet(sizes, rngs=rngs),
        lambda model, batch, key: model(batch["images"], batch["weights"], train=key is not None),
        resnet.flops_per_sample(sizes),
    )


def _load(held_out_fraction: float) -> Dataset:
    data = digits.load_digits(held_out_fraction)
    return Dataset(
        train=data.train,
        held_out=data.held_out,
        fingerprint=data.fingerprint,
        about=str(data),
        baselines=lambda: {
            "nearest centroid": digits.nearest_centroid_accuracy(data),
            "majority class": digits.majority_accuracy(data),
        },
    )
