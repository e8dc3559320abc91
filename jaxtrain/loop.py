"""The synchronous training loop, in order of time.

It waits for nothing but the step before the one it has just dispatched: metrics are read one step late, through one
``MetricsReader``, and batches are on the devices before they are asked for.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TextIO

import jax

from jaxtrain import assemble, metrics
from jaxtrain.assemble import Experiment
from jaxtrain.cadence import Cadence, Failures
from jaxtrain.checkpoint import host_state
from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.config import ConfigError
from jaxtrain.distributed import gather
from jaxtrain.evaluate import evaluate
from jaxtrain.goodput import Goodput, Phase
from jaxtrain.journal import Journal, MetricsReader
from jaxtrain.preemption import Preemption
from jaxtrain.prefetch import DevicePrefetch, to_devices
from jaxtrain.progress import Transfer
from jaxtrain.state import TrainState
from jaxtrain.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of ``train`` ended.

    Attributes:
        state: the last state. step: updates applied. saved: whether that step has a checkpoint.
        finished: False where it was asked to stop (``stopped_by``).
        evaluation: of the last step, see ``evaluate``; None where the run did not finish.
    """

    state: TrainState
    step: int
    saved: bool
    finished: bool
    stopped_by: str | None
    evaluation: dict[str, float] | None


def train(
    experiment: Experiment,
    workdir: Workdir,
    *,
    callbacks: Sequence[metrics.Callback] = (),
    stream: TextIO | None = None,
    preemption: Preemption | None = None,
    allow: Collection[str] = (),
) -> Outcome:
    """Train until ``config.steps`` windows are done, from the workdir's newest verified checkpoint if there is one.

    Args:
        callbacks: told of logs, evaluations, saves and the end, beside ``metrics.jsonl`` and TensorBoard.
        stream: where progress goes; stdout by default.
        preemption: who else may ask the run to save and stop, before or during it; not entered yet.
        allow: what may differ from what the checkpoint was saved with: config keys, ``data``, ``dtype``.

    Raises:
        NonFiniteError: too many windows in a row were skipped. CheckpointError: a save failed.
        ConfigError: the newest checkpoint was made from other data.
    """
    config, program = experiment.config, experiment.program
    workdir.check(config, allow)
    with contextlib.ExitStack() as stack:
        preemption = preemption or Preemption()
        stack.push(preemption)  # left last; entered when there is something to save
        checkpoints = assemble.checkpoints(config, workdir.path, experiment.task.score)
        stack.push(lambda kind, *_: _quietly(checkpoints.close, kind))
        began = time.monotonic()
        newest = checkpoints.latest_verified(
            lambda step, total: Transfer(f"verifying checkpoint {step:,}", total, stream)
        )
        changes: list[str] = []
        if newest is not None:  # the last refusal: from here on the workdir is written
            changes = experiment.check(checkpoints.run(newest), allow)
        try:
            checkpoints.probe()
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        workdir.keep(config, allow)
        goodput = Goodput(workdir.path / "goodput.json", before={Phase.RESTORE: time.monotonic() - began})
        stack.push(lambda kind, *_: _quietly(goodput.save, kind))
        with goodput.phase(Phase.COMPILE if newest is None else Phase.RESTORE):
            state, start, platform_changes = _start(experiment, checkpoints, newest, allow, stream)
        journal = stack.enter_context(Journal(experiment, workdir, goodput, start, callbacks, stream))
        if start["window"]:
            journal.say(f"restored step {start['step']}: row {start['sample_index']:,} of the data is next")
            if start["window"] >= config.steps:
                journal.say(f"all {config.steps} steps are done already: nothing to train")
            for change in changes:
                journal.say(f"changed, as allowed: {change}")
            for change in platform_changes:
                journal.say(f"not bit for bit as before: {change}")
        position = start["sample_index"]
        preemption.__enter__()
        cadence = _cadence(experiment, goodput)
        put = lambda batch: to_devices(batch, program.batch_sharding)  # noqa: E731
        feed = stack.enter_context(DevicePrefetch(experiment.batches.at(position), put))
        reader = MetricsReader()
        stack.push(lambda kind, *_: journal.log_last(reader) if kind not in (None, KeyboardInterrupt) else None)

        def save(wait: bool) -> None:
            if journal.window == start["window"]:
                return  # nothing was done since the checkpoint that was restored
            cadence.began()
            with goodput.phase(Phase.CHECKPOINT), journal.paused():
                saved = checkpoints.save(
                    journal.step, program.checkpoint_view(state), run=_run(journal),
                    host={"generators": host_state.capture()},
                    metrics=evaluation if journal.is_evaluated() else None, wait=wait,
                )  # fmt: skip
            if saved:
                journal.saved(checkpoints.files.uri(str(journal.step)))

        def look_behind() -> None:
            nonlocal times
            with goodput.phase(Phase.CHECKPOINT):
                for sentence in checkpoints.poll():
                    journal.say(sentence)
            if checkpoints.times is not times:
                times = checkpoints.times
                if sentence := cadence.measured(times.blocked_s, times.whole_s):
                    journal.say(sentence)

        def run_evaluation() -> dict[str, float] | None:
            with goodput.phase(Phase.EVAL), journal.paused():
                view = program.view(state, copy=False, ema=program.has_ema)
                return evaluate(program, view, experiment.held_out, stop=lambda: preemption.requested is not None)

        times = evaluation = None
        if start["window"] and _due(start["window"], config.eval.every_steps) and not journal.is_evaluated():
            evaluation = run_evaluation()  # it was due when the attempt before was stopped
            journal.evaluated(evaluation)
        for window in range(start["window"], config.steps):
            for _ in range(program.accumulation.calls(window)):
                with goodput.phase(Phase.INPUT):
                    taken = feed.take(lambda: preemption.requested is not None)
                if taken is None or preemption.requested:
                    break
                batch, waited_s = taken
                journal.waited(waited_s)
                with journal.dispatch():
                    state, step_metrics = program.step(state, batch)
                    feed.ahead()
                    record = reader.push(step_metrics)
                journal.log(record)
                if preemption.requested:
                    break
            look_behind()
            done, stop = window + 1, preemption.requested is not None
            last, save_now = done == config.steps, cadence.due(done)
            if stop or last or save_now or _due(done, config.eval.every_steps):
                with goodput.phase(Phase.STEP):
                    record = reader.drain()
                journal.log(record, always=last or stop)
            if not stop and (last or _due(done, config.eval.every_steps)):
                evaluation = run_evaluation()
                journal.evaluated(evaluation)
                stop = preemption.requested is not None
            if stop or last or save_now:
                save(wait=stop or last)
            if stop:
                break
        done = journal.window >= config.steps
        if done and evaluation is None and preemption.requested is None:  # all was done before this call
            evaluation = run_evaluation()
            journal.evaluated(evaluation)
        finished = done and evaluation is not None and preemption.requested is None
        saved = journal.step in checkpoints.steps()
        if saved:
            goodput.ended()
        journal.end(finished)
        return Outcome(
            state,
            journal.step,
            saved,
            finished,
            None if finished else preemption.requested,
            evaluation if finished else None,
        )


def _cadence(experiment: Experiment, goodput: Goodput) -> Cadence:
    c = experiment.config.checkpoint
    failures, run_s = goodput.failures()
    mtbf_s = 86400 / c.failures_per_day if c.failures_per_day else Failures(failures, run_s).mtbf_s
    return Cadence(
        every_steps=c.every_steps, every_s=c.every_s, auto=c.auto, mtbf_s=mtbf_s, restart_s=goodput.restart_s(),
        processes=jax.process_count(), agree=lambda now: gather(now)[0], clock=time.monotonic,
    )  # fmt: skip


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _start(
    experiment: Experiment, checkpoints: Checkpoints, newest: int | None, allow: Collection[str], stream: TextIO | None
) -> tuple[TrainState, dict[str, int], list[str]]:
    """The newest verified state, or a new one; the host's counts at that point; what is another platform than then."""
    program, config = experiment.program, experiment.config
    if newest is None:
        host_state.seed_generators(config.seed)
        params = None
        if config.init_from:
            source, step = assemble.checkpoint_at(config.init_from)
            with Transfer(f"reading {config.init_from}", stream=stream):
                params = source.restore_params(step, program.abstract_state.params, allow=allow)
        return program.init(params), {"window": 0, "step": 0, "micro_step": 0, "tokens": 0, "sample_index": 0}, []
    with Transfer(f"reading checkpoint {newest:,}", stream=stream):
        restored = checkpoints.restore(program, newest, allow=allow)
    changes = []
    if restored.host is not None:
        host_state.apply(restored.host["generators"])
    else:
        host_state.seed_generators(config.seed, jax.process_index(), newest)
        changes.append("another number of processes: each has new streams of Python's and NumPy's generators")
    counts = restored.run["counts"] | {"sample_index": restored.run["data"]["sample_index"]}
    was, now = restored.run["platform"], _platform(experiment)
    changes += [f"{name} was {was.get(name)}, is {now[name]}" for name in now if was.get(name) != now[name]]
    return restored.state, counts, changes


def _run(journal: Journal) -> dict[str, Any]:
    """Beside the arrays, the same on all processes."""
    experiment = journal.experiment
    return {
        "counts": {name: getattr(journal, name) for name in ("window", "step", "micro_step", "tokens")},
        "data": {
            "sample_index": journal.micro_step * experiment.micro_batch_size,
            "fingerprint": experiment.data.fingerprint,
        },
        "config": experiment.config.to_dict(),
        "platform": _platform(experiment),
    }


def _platform(experiment: Experiment) -> dict[str, Any]:
    """What "bit for bit" depends on: versions, cores, devices and their mesh."""
    mesh = experiment.program.mesh
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    kernels = ", ".join(f"{name} {experiment.config.model[name]}" for name in ("attention", "remat", "scan_layers"))
    return host_state.platform_fingerprint() | {"devices": devices, "mesh": str(dict(mesh.shape)), "kernels": kernels}


def _quietly(clean_up: Callable[[], None], failed: type | None) -> None:
    """Clean up; while an exception is on its way out, another one (a full disk, a failed save) must not mask it."""
    try:
        clean_up()
    except Exception:
        if failed is None:
            raise
