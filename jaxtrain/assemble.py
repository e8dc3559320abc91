"""The one place that turns a resolved config into objects.

What runs them reads from the config its cadences and what it prints, nothing that says what to compute.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxtrain import adapters, optim, schedules, sharding
from jaxtrain import config as config_lib
from jaxtrain.checkpoint import tools
from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.config import ConfigError
from jaxtrain.data.pipeline import Batches, InOrder, evenly_spaced
from jaxtrain.horizon import Batching
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import MultiSteps, Program, Scan, Skip, build_train_step
from jaxtrain.tasks import images, language
from jaxtrain.tasks.task import Dataset, Score, Task

_TASKS = {"text": language.task, "digits": images.task}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a loop needs, built.

    Attributes:
        config: resolved, with every length in steps. program: on its mesh. task: the kind of data. data: its rows.
        batches: endless training micro-batches. held_out: the rows of an evaluation, each once.
        lengths: lines for a person about lengths that were given otherwise than in steps.
    """

    config: ConfigDict
    program: Program
    task: Task
    data: Dataset
    batches: Batches
    held_out: InOrder
    lengths: Sequence[str] = ()

    @property
    def micro_batch_size(self) -> int:
        """Rows of the global micro-batch."""
        return self.config.data.micro_batch_size

    def check(self, run: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """Raise ConfigError where a checkpoint was saved by another experiment, or on other data than is here now.

        Args:
            run: what the checkpoint says about it, see ``Checkpoints.run``. allow: what may differ.

        Returns:
            What differs and is allowed, a line each.
        """
        step = run["counts"]["step"]
        lines = config_lib.refuse_drift(run["config"], self.config, f"checkpoint {step}", allow)
        if "data" not in allow:
            self.check_data(run["data"]["fingerprint"], step)
        elif run["data"]["fingerprint"] != self.data.fingerprint:
            lines.append("other data than before")
        return lines

    def check_data(self, fingerprint: str, step: int) -> None:
        """Raise ConfigError where checkpoint ``step`` was trained on other data than is here now."""
        if fingerprint != self.data.fingerprint:
            raise ConfigError(
                f"the data has changed since checkpoint {step} was saved (fingerprint {fingerprint[:12]} then, "
                f"{self.data.fingerprint[:12]} now); put it back, start in another --workdir, or go on all the same "
                "with --allow=data."
            )

    def module(self, params: Any, model_state: Any = ()) -> nnx.Module:
        """The model with parameters in the compute dtype: what samples."""
        return adapters.nnx_module(self.task.make, precision(self.config).cast(params), model_state)

    def describe(self) -> list[str]:
        """What will run, in a few lines for a person: model, batch arithmetic, mesh, data."""
        c, mesh = self.config, self.program.mesh
        parameters = sum(x.size for x in jax.tree.leaves(self.program.abstract_state.params))
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
        return [
            f"model    {c.model.name}, {parameters:,} parameters, {c.precision.compute} compute",
            f"batch    {self._batch()}",
            *(f"length   {line}" for line in self.lengths),
            f"optim    {optim.report(c.optim.name, self.program.abstract_state.params, c.optim.weight_decay)}",
            f"mesh     {axes} ({mesh.size} x {mesh.devices.flat[0].device_kind})",
            f"data     {self.data.about}",
        ]

    def _batch(self) -> str:
        rows, k, each = self.micro_batch_size, self.config.accumulation.k, self.task.weight_per_row
        row = f"{rows} rows" if each == 1 else f"{rows} rows x {each} {self.task.item}s"
        micro_batches = "1 micro-batch" if k == 1 else f"{k} micro-batches"
        line = f"{row} x {micro_batches} = {rows * k * each:,} {self.task.item}s a step"
        if self.config.accumulation.warmup:
            stages = config_lib.warmup_stages(self.config)
            line += f" (k is {', '.join(f'{size} until window {until:,}' for until, size in stages)})"
        epoch = len(self.data.train)
        if rows * k > epoch:
            return f"{line}, MORE than an epoch of {epoch:,} rows: a step takes each row {rows * k / epoch:.1f} times"
        return f"{line}; an epoch is {epoch:,} rows, {epoch / (rows * k):,.1f} steps"


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
    task = make_task(config, mesh)
    data = task.load() if config_lib.counts_epochs(config) else None
    batching = _batching(config, task, data)
    counted = config_lib.in_steps(config, batching)
    program = _program(counted, task, mesh)
    program.batch_struct(_batch_of(config, task))  # says now, not after minutes of reading, that rows do not divide
    data = data or task.load()
    rows = config.data.micro_batch_size
    return Experiment(
        config=counted,
        program=program,
        task=task,
        data=data,
        batches=Batches(
            data.train, rows, seed=config.seed, shuffle=config.data.shuffle, threads=0,
            stack=program.accumulation.k if isinstance(program.accumulation, Scan) else None,
        ),
        held_out=InOrder(
            evenly_spaced(data.held_out, config.eval.rows) if config.eval.rows else data.held_out, rows, threads=0
        ),
        lengths=_lengths(config, counted, batching),
    )  # fmt: skip


def checkpoints(
    config: ConfigDict, workdir: pathlib.Path, score: Score | None = None, *, read_only: bool = False
) -> Checkpoints:
    """The checkpoints of a run in ``workdir``, where its config says; ``score``: what makes one the best.

    Raises:
        CheckpointError: a place that cannot be used.
    """
    c = config.checkpoint
    keep = Keep(c.keep_last, c.keep_every_steps, c.keep_best)
    if score is not None:
        keep = dataclasses.replace(keep, metric=f"eval/{score.name}", largest=score.better == "higher")
    return Checkpoints(
        c.directory or workdir / "checkpoints", keep=keep, timeout_s=c.timeout_s, max_failures=c.max_failures,
        read_only=read_only,
    )  # fmt: skip


def checkpoint_at(path: str) -> tuple[Checkpoints, int]:
    """The checkpoint at ``path``, or the newest whole one of a directory of them or a workdir, to read from.

    Raises:
        CheckpointError: there is none.
    """
    files, name = tools.find(path)
    if name is not None and not name.isdecimal():
        raise CheckpointError(f"{path} was set aside as damaged; give another checkpoint.")
    checkpoints = Checkpoints(files.root, read_only=True)
    step = checkpoints.latest_verified() if name is None else int(name)
    if step is None:
        raise CheckpointError(f"{path} holds no checkpoint that is whole; give another.")
    return checkpoints, step


def make_task(config: ConfigDict, mesh: Mesh) -> Task:
    """The kind of data of a config, with its model; reads no data."""
    return _TASKS[config.data.name](config, mesh)


def make_program(config: ConfigDict, mesh: Mesh) -> Program:
    """The training program of a config on a mesh; reads no data, and so refuses lengths in epochs."""
    task = make_task(config, mesh)
    return _program(config_lib.in_steps(config, _batching(config, task, None)), task, mesh)


def example_batch(config: ConfigDict, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what one call of the step takes: a global micro-batch, or a window of them."""
    return _batch_of(config, make_task(config, mesh))


def _program(config: ConfigDict, task: Task, mesh: Mesh) -> Program:
    o = config.optim
    schedule = schedules.build(
        o.schedule, peak=o.learning_rate, steps=o.schedule_steps or config.steps, warmup_steps=o.warmup_steps,
        decay_steps=o.decay_steps, end=o.end_learning_rate,
    )  # fmt: skip
    optimizer = optim.build(
        o.name, schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, momentum=o.momentum
    )
    return build_train_step(
        *task.functions,
        optimizer,
        mesh=mesh,
        rules=task.rules,
        accumulation=accumulation(config),
        precision=precision(config),
        clip_norm=o.clip_norm or None,
        ema=o.ema or None,
        nonfinite=Skip(config.nonfinite.skip, config.nonfinite.max_consecutive),
        merge_stats=task.merge_stats,
        report={"learning_rate": schedule},
        seed=config.seed,
    )


def _batch_of(config: ConfigDict, task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    shape: tuple[int, ...] = (config.data.micro_batch_size,)
    if config.accumulation.mechanism != "multisteps":
        shape = (config.accumulation.k, *shape)
    return {name: jax.ShapeDtypeStruct((*shape, *row.shape), row.dtype) for name, row in task.row.items()}


def _batching(config: ConfigDict, task: Task, data: Dataset | None) -> Batching:
    return Batching(
        rows=config.data.micro_batch_size,
        k=config.accumulation.k,
        warmup=config_lib.warmup_stages(config),
        weight_per_row=task.weight_per_row,
        epoch_rows=None if data is None else len(data.train),
    )


def _lengths(given: ConfigDict, counted: ConfigDict, batching: Batching) -> list[str]:
    horizon = ("optim.schedule_steps", given.steps)  # as it is by default
    lines = [
        f"{name}={value} is {config_lib.flat(counted)[name]:,} steps"
        for name, value in config_lib.flat(given).items()
        if config_lib.KEYS[name].length and isinstance(value, str) and (name, value) != horizon
    ]
    if isinstance(given.steps, str) and (left := batching.left_over(given.steps)):
        lines.append(f"{left} micro-batches of {batching.rows} rows at the end make no whole step and are left out")
    return lines


def accumulation(config: ConfigDict) -> MultiSteps | Scan:
    """How a config's windows are summed."""
    k, mechanism = config.accumulation.k, config.accumulation.mechanism
    if config.accumulation.warmup:
        return MultiSteps(optim.stepwise(config_lib.warmup_stages(config), k))
    return MultiSteps(k) if mechanism == "multisteps" else Scan(k, defer=mechanism == "scan_deferred")


def precision(config: ConfigDict) -> Precision:
    """The dtypes of a config."""
    p = config.precision
    scale = LossScale(p.loss_scale, p.dynamic, p.growth_windows)
    return Precision(p.compute, overrides=p.overrides, loss_scale=scale)
