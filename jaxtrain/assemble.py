"""The one place that turns a resolved config into objects.

What runs them reads from the config its cadences and what it prints, nothing that says what to compute.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import adapters, optim, schedules, sharding
from jaxtrain.config import ConfigError
from jaxtrain.data import text
from jaxtrain.data.pipeline import Batches, InOrder, evenly_spaced
from jaxtrain.losses import Loss, chunked_cross_entropy, cross_entropy
from jaxtrain.models import transformer
from jaxtrain.models.transformer import Transformer, TransformerConfig
from jaxtrain.precision import Precision
from jaxtrain.step import MultiSteps, Program, Scan, Skip, build_train_step

_UNROLLED_LAYERS = 16  # on CPU: unrolled is about 10% faster there, and compiles in time linear in the depth


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a loop needs, built.

    Attributes:
        config: resolved. program: on its mesh. corpus: the text, split.
        batches: endless training micro-batches. held_out: the rows of an evaluation, each once.
        flops_per_sample: of one row, forward and backward.
    """

    config: ConfigDict
    program: Program
    corpus: text.TextCorpus
    batches: Batches
    held_out: InOrder
    flops_per_sample: float

    @property
    def micro_batch_size(self) -> int:
        """Rows of the global micro-batch."""
        return self.config.data.micro_batch_size

    def check_text(self, fingerprint: str, step: int) -> None:
        """Raise ConfigError where checkpoint ``step`` was trained on other text than is here now."""
        if fingerprint != self.corpus.fingerprint:
            raise ConfigError(
                f"the text has changed since checkpoint {step} was saved (fingerprint {fingerprint[:12]} then, "
                f"{self.corpus.fingerprint[:12]} now); put it back, or start in another --workdir."
            )

    def module(self, params: Any, model_state: Any = ()) -> nnx.Module:
        """The model with parameters in the compute dtype: what samples."""
        make = functools.partial(_make_model, model_config(self.config, self.program.mesh))
        return adapters.nnx_module(make, precision(self.config).cast(params), model_state)

    def describe(self) -> list[str]:
        """What will run, in a few lines for a person: model, batch arithmetic, mesh, text."""
        c, mesh = self.config, self.program.mesh
        parameters = sum(x.size for x in jax.tree.leaves(self.program.abstract_state.params))
        rows, k, length = c.data.micro_batch_size, c.accumulation.k, c.data.sequence_length
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
        micro_batches = "1 micro-batch" if k == 1 else f"{k} micro-batches"
        return [
            f"model    {c.model.name}, {parameters:,} parameters, {c.precision.compute} compute",
            f"batch    {rows} rows x {length} tokens x {micro_batches} = {rows * length * k:,} tokens a step",
            f"optim    {optim.report(c.optim.name, self.program.abstract_state.params, c.optim.weight_decay)}",
            f"mesh     {axes} ({mesh.size} x {mesh.devices.flat[0].device_kind})",
            f"text     {self.corpus}",
        ]


def assemble(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Experiment:
    """Build everything for a run.

    Args:
        config: from ``jaxtrain.config.resolve``. devices: all by default.

    Raises:
        ConfigError and ValueError: what does not fit together, in a sentence.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"{jax.process_count()} processes: a run over several processes is not available yet; use one."
        )
    mesh = sharding.make_mesh(**config.mesh.to_dict(), devices=devices)
    program = make_program(config, mesh)
    data = config.data
    length, rows = data.sequence_length, data.micro_batch_size
    program.batch_struct(example_batch(config))  # says now, not after minutes of reading, that the rows do not divide
    corpus = text.load_text(data.paths, held_out_fraction=data.held_out_fraction, skip_non_utf8=data.skip_non_utf8)
    held_out = text.RowTable(corpus.held_out, length)
    if config.eval.rows:
        held_out = evenly_spaced(held_out, config.eval.rows)
    return Experiment(
        config=config,
        program=program,
        corpus=corpus,
        batches=Batches(
            text.RowTable(corpus.train, length), rows, seed=config.seed, shuffle=data.shuffle, threads=0,
            stack=program.accumulation.k if isinstance(program.accumulation, Scan) else None,
        ),
        held_out=InOrder(held_out, rows, threads=0),
        flops_per_sample=length * transformer.flops_per_token(model_config(config, mesh), length),
    )  # fmt: skip


def make_program(config: ConfigDict, mesh: Mesh) -> Program:
    """The training program of a config on a mesh; reads no data."""
    make = functools.partial(_make_model, model_config(config, mesh), pin=sharding.Pin(mesh))
    o = config.optim
    schedule = schedules.build(
        o.schedule, peak=o.learning_rate, steps=o.schedule_steps or config.steps, warmup_steps=o.warmup_steps,
        decay_steps=o.decay_steps, end=o.end_learning_rate,
    )  # fmt: skip
    optimizer = optim.build(
        o.name, schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, momentum=o.momentum
    )
    return build_train_step(
        *adapters.from_nnx(make, language_model_loss(config.loss)),
        optimizer,
        mesh=mesh,
        rules=transformer.SHARDING_RULES,
        accumulation=accumulation(config),
        precision=precision(config),
        clip_norm=o.clip_norm or None,
        ema=o.ema or None,
        nonfinite=Skip(config.nonfinite.skip, config.nonfinite.max_consecutive),
        report={"learning_rate": schedule},
        seed=config.seed,
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


def accumulation(config: ConfigDict) -> MultiSteps | Scan:
    """How a config's windows are summed."""
    k, mechanism = config.accumulation.k, config.accumulation.mechanism
    return MultiSteps(k) if mechanism == "multisteps" else Scan(k, defer=mechanism == "scan_deferred")


def precision(config: ConfigDict) -> Precision:
    """The dtypes of a config."""
    return Precision(config.precision.compute)


def language_model_loss(c: ConfigDict) -> Callable[[Transformer, Any, jax.Array | None], Loss]:
    """Next-token loss of packed rows, see ``text.RowTable``: int32 and float32 leaves ``[B, L]``.

    An evaluation is plain cross-entropy: z-loss and label smoothing are of training only.
    """

    def loss(model: Transformer, batch: Any, key: jax.Array | None) -> Loss:
        terms = {} if key is None else {"z_loss": c.z, "label_smoothing": c.label_smoothing}
        hidden = model.hidden(batch["tokens"], batch["positions"], batch["segment_ids"], key=key)
        wanted = (batch["targets"], batch["weights"])
        if c.vocab_chunks > 1:
            return chunked_cross_entropy(hidden, model.head_kernel, *wanted, chunks=c.vocab_chunks, **terms)
        return cross_entropy(model.logits(hidden), *wanted, **terms)

    return loss


def example_batch(config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what one call of the step takes: a global micro-batch, or a window of them."""
    shape = (config.data.micro_batch_size, config.data.sequence_length)
    if config.accumulation.mechanism != "multisteps":
        shape = (config.accumulation.k, *shape)
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def _make_model(config: TransformerConfig, rngs: nnx.Rngs, **options: Any) -> Transformer:
    return Transformer(config, rngs=rngs, **options)
