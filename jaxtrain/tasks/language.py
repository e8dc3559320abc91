"""Language models on text: bytes as tokens, packed rows, next-token loss, n-gram models to compare with."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import adapters, sharding
from jaxtrain.config import ConfigError
from jaxtrain.data import ngram, text
from jaxtrain.losses import BITS_PER_NAT, Loss, chunked_cross_entropy, cross_entropy
from jaxtrain.models import transformer
from jaxtrain.models.transformer import Transformer, TransformerConfig
from jaxtrain.tasks.task import Dataset, Score, Task

_UNROLLED_LAYERS = 16  # on CPU: unrolled is about 10% faster there, and compiles in time linear in the depth


def task(config: ConfigDict, mesh: Mesh) -> Task:
    """A transformer on ``data.paths``."""
    length = config.data.sequence_length
    model = model_config(config, mesh)
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}
    return Task(
        make=functools.partial(_make, model),
        functions=adapters.from_nnx(
            functools.partial(_make, model, pin=sharding.Pin(mesh)), language_model_loss(config.loss)
        ),
        row={name: jax.ShapeDtypeStruct((length,), dtype) for name, dtype in dtypes.items()},
        weight_per_row=length,
        item="token",
        flops_per_row=length * transformer.flops_per_token(model, length),
        load=functools.partial(_load, config.data),
        score=Score("bits_per_byte", "bits per byte", "lower", per_nat=BITS_PER_NAT),
        rules=transformer.SHARDING_RULES,
        continues=True,
    )


def model_config(config: ConfigDict, mesh: Mesh) -> TransformerConfig:
    """The model of a config; ``scan_layers=auto`` is decided by depth and platform."""
    m = config.model
    if 0 < m.vocab_size < text.VOCAB_SIZE:
        raise ConfigError(
            f"config: model.vocab_size={m.vocab_size} is below the data's {text.VOCAB_SIZE}; raise it or set 0."
        )
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None  # an abstract mesh has no devices
    if m.attention == "cudnn" and platform not in ("gpu", None):
        raise ConfigError(f"config: model.attention=cudnn needs NVIDIA GPUs, and the devices are {platform}; use xla.")
    scan = {"yes": True, "no": False, "auto": not (platform == "cpu" and m.layers <= _UNROLLED_LAYERS)}[m.scan_layers]
    same = ("layers", "d_model", "heads", "kv_heads", "d_ff", "max_length", "dropout", "rope_theta", "tied_embeddings")
    return TransformerConfig(
        vocab_size=m.vocab_size or text.VOCAB_SIZE, scan_layers=scan, remat=m.remat, attention=m.attention,
        **{name: m[name] for name in same},
    )  # fmt: skip


def language_model_loss(c: ConfigDict) -> Callable[[Transformer, Any, jax.Array | None], Loss]:
    """Next-token loss of packed rows, see ``text.RowTable``: int32 and float32 leaves ``[B, L]``.

    An evaluation is plain cross-entropy, with ``bits_per_byte`` beside it (a token is a byte): z-loss and label
    smoothing are of training only.
    """

    def loss(model: Transformer, batch: Any, key: jax.Array | None) -> Loss:
        terms = {} if key is None else {"z_loss": c.z, "label_smoothing": c.label_smoothing}
        hidden = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], key=key)
        wanted = (batch["targets"], batch["weights"])
        if c.vocab_chunks > 1:
            found = chunked_cross_entropy(hidden, model.head_kernel, *wanted, chunks=c.vocab_chunks, **terms)
        else:
            found = cross_entropy(model.logits(hidden), *wanted, **terms)
        if key is not None:
            return found
        return found._replace(metrics={**found.metrics, "bits_per_byte": (found.total * BITS_PER_NAT, found.weight)})

    return loss


def _make(config: TransformerConfig, rngs: nnx.Rngs, **options: Any) -> Transformer:
    return Transformer(config, rngs=rngs, **options)


def _load(data: ConfigDict) -> Dataset:
    corpus = text.load_text(data.paths, held_out_fraction=data.held_out_fraction, skip_non_utf8=data.skip_non_utf8)
    return Dataset(
        train=text.RowTable(corpus.train, data.sequence_length),
        held_out=text.RowTable(corpus.held_out, data.sequence_length),
        fingerprint=corpus.fingerprint,
        about=str(corpus),
        baselines=lambda: {
            "bigram model": ngram.bigram_bits_per_byte(corpus.train, corpus.held_out),
            "unigram model": ngram.unigram_bits_per_byte(corpus.train, corpus.held_out),
        },
    )
