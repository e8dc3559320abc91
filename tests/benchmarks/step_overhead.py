"""What our loop costs over a bare hand-written one: ``python tests/benchmarks/step_overhead.py [--pairs 15]``.

Three comparisons, each in one process with segments that alternate, so that a noisy machine is noisy for both:

- at about 10 M parameters, tokens/s of ``loop.train`` with its usual logging against a bare jitted loop over OUR model,
  and against a bare jitted loop over ``plain_transformer``, the fastest model of that architecture we could write;
- at a tiny model, milliseconds a step more than the bare loop;
- seconds from process start to the first finished step, without and with a compilation cache.

A segment is the same number of steps for each side and ends when its last step is finished on the devices. A pair is a
segment of ours and the mean of the rival's segments before and after it, so that a drift of the machine favours
neither; the rivals' order within a pause is drawn anew each time.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
import plain_transformer

from jaxtrain import assemble, config, loop, metrics
from jaxtrain.step import Program
from jaxtrain.workdir import Workdir

MEDIUM = {"model.layers": 6, "model.d_model": 384, "model.heads": 6, "model.kv_heads": 6, "model.d_ff": 1024}
TINY = {"model.layers": 1, "model.d_model": 16, "model.heads": 2, "model.kv_heads": 2, "model.d_ff": 32}


def make_config(sizes: dict, steps: int, rows: int, length: int, log_every: int = 10):
    c = config.default()
    values = sizes | {"steps": steps, "data.micro_batch_size": rows, "data.sequence_length": length}
    values |= {"precision.compute": "float32", "optim.schedule": "constant", "checkpoint.every_steps": 0}
    values |= {"log_every_steps": log_every, "eval.every_steps": 0, "eval.rows": rows, "model.max_length": length}
    for name, value in values.items():
        config.assign(c, name, value)
    return config.resolve(c)


class Bare:
    """A jitted, donated AdamW step over a loss, and a loop that waits for the step before."""

    def __init__(self, loss, params, batches):
        # Copies of the product's own settings: clipping at 1, AdamW with the same constants.
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b1=0.9, b2=0.95))
        self.params, self.state, self.batches, self.number = params, optimizer.init(params), batches, 0

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self.step = step

    def run(self, steps: int) -> float:
        """Seconds of ``steps`` steps."""
        began, before = time.perf_counter(), None
        for _ in range(steps):
            batch = self.batches[self.number % len(self.batches)]
            self.number += 1
            self.params, self.state, value = self.step(self.params, self.state, batch)
            if before is not None:
                before.block_until_ready()
            before = value
        jax.block_until_ready(self.params)
        return time.perf_counter() - began


class Alternate(metrics.CallbackBase):
    """Runs the rivals in the pauses of our loop, which it makes at every ``segment``-th window."""

    def __init__(self, rivals: dict[str, Bare], segment: int):
        self.rivals, self.segment = rivals, segment
        self.seconds = {name: [] for name in ("jaxtrain", *rivals)}
        self.newest = None
        self.resumed = None
        self.random = random.Random(0)

    def on_log(self, record):
        if record["step"] % self.segment:
            return
        jax.block_until_ready(self.newest)  # the step in flight is ours: its time is, too
        now = time.perf_counter()
        warm = self.resumed is not None  # the first segment compiles
        if warm:
            self.seconds["jaxtrain"].append(now - self.resumed)
        for name in self.random.sample(list(self.rivals), len(self.rivals)):
            spent = self.rivals[name].run(self.segment)
            if warm:
                self.seconds[name].append(spent)
        self.resumed = time.perf_counter()


def compare(sizes: dict, rows: int, length: int, segment: int, pairs: int, with_plain: bool) -> dict[str, list[float]]:
    """Seconds of each segment of our loop, and beside each the mean of the rivals' segments before and after it."""
    c = make_config(sizes, segment * (pairs + 3), rows, length, min(10, segment))
    experiment = assemble.assemble(c)
    program: Program = experiment.program
    source = experiment.batches.at(0)
    batches = [jax.device_put(next(source)) for _ in range(8)]
    loss_fn = program._recipe.loss_fn  # ours, as it is: only the loop around it is bare

    def ours(params, batch):
        loss = loss_fn(params, {}, batch, None)
        return loss.total / loss.weight

    rivals = {"bare, our model": Bare(ours, program.init().params, batches)}
    if with_plain:
        m = c.model
        params = plain_transformer.init(
            jax.random.key(0), vocab_size=320, layers=m.layers, d_model=m.d_model, heads=m.heads, d_ff=m.d_ff
        )
        plain = lambda params, b: plain_transformer.loss(params, b["tokens"], b["targets"], heads=m.heads)  # noqa: E731
        rivals["bare, fastest model"] = Bare(plain, params, batches)
    alternate = Alternate(rivals, segment)
    step = program.step

    def watched(state, batch):
        result = step(state, batch)
        alternate.newest = result[1].values
        return result

    program.step = watched
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nowhere:
        workdir = Workdir(directory)
        with contextlib.redirect_stdout(nowhere):
            loop.train(experiment, workdir, callbacks=[alternate], stream=nowhere)
        workdir.close()
    ours = alternate.seconds.pop("jaxtrain")[1 : pairs + 1]
    around = {
        name: [(before + after) / 2 for before, after in itertools.pairwise(seconds[: pairs + 1])]
        for name, seconds in alternate.seconds.items()
    }
    return {"jaxtrain": ours} | around


def first_step(cache: str, directory: str | None = None, *, until_saved: bool = False) -> float:
    """Seconds from the start of a ``jaxtrain train`` process to the end of its first step; then it is killed.

    ``directory``: a workdir that stays, so that the next call resumes. ``until_saved``: let it live to its checkpoint.
    """
    with contextlib.ExitStack() as stack:
        directory = directory or stack.enter_context(tempfile.TemporaryDirectory())
        c = make_config(MEDIUM, 1000, 16, 256)
        overrides = [f"--config.{n}={v}" for n, v in config.flat(c).items() if n in MEDIUM]
        overrides += [f"--config.compile_cache={cache}", "--config.log_every_steps=1", "--config.eval.every_steps=0"]
        overrides += ["--config.checkpoint.every_steps=2"]
        root = pathlib.Path(__file__).parents[2]
        began = time.perf_counter()
        command = [sys.executable, "-m", "jaxtrain.cli", "train", "--config=configs/quickstart.py"]
        p = subprocess.Popen(
            [*command, f"--workdir={directory}", *overrides], cwd=root, stdout=subprocess.PIPE, text=True
        )
        stack.callback(p.wait)
        stack.callback(p.kill)
        for line in p.stdout:
            if line.startswith("step "):
                break
        else:
            raise RuntimeError(f"jaxtrain train ended with {p.wait()} before its first step")
        seconds = time.perf_counter() - began
        while until_saved and not (pathlib.Path(directory) / "checkpoints" / "2").exists():
            time.sleep(0.01)
        record = json.loads((pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()[-1])
        return seconds - record["step_s"]  # the line of a step comes when the next one is finished


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"median {middle:.3f} (min {low:.3f}, max {high:.3f}, {len(values)} pairs)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--segment", type=int, default=3, help="steps a segment at 10 M parameters")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}")

    ours_first = compare(TINY, 4, 32, 500, arguments.pairs, with_plain=False)
    extra = [(a - b) / 500 * 1e3 for a, b in zip(ours_first["jaxtrain"], ours_first["bare, our model"], strict=True)]
    bare = [b / 500 * 1e3 for b in ours_first["bare, our model"]]
    print(f"tiny model, ms a step: bare {spread(bare)}\n  added by our loop: {spread(extra)}  goal <= 0.3")

    seconds = compare(MEDIUM, 16, 256, arguments.segment, arguments.pairs, with_plain=True)
    tokens = 16 * 256 * arguments.segment
    print(f"10 M parameters, tokens/s: ours {spread([tokens / s for s in seconds['jaxtrain']])}")
    for rival, goal in (("bare, our model", 0.98), ("bare, fastest model", 0.95)):
        ratio = [b / a for a, b in zip(seconds["jaxtrain"], seconds[rival], strict=True)]
        print(f"  over {rival}: {spread(ratio)}  goal >= {goal}")

    with tempfile.TemporaryDirectory() as cache:
        both = [
            (first_step(os.path.join(cache, str(i))), first_step(os.path.join(cache, str(i))))
            for i in range(arguments.pairs)
        ]
    colds, warms = zip(*both, strict=True)
    print(
        f"process start to first step, s: cold {spread(colds)}  goal <= 10\n  with a compilation cache {spread(warms)}"
    )


if __name__ == "__main__":
    print = functools.partial(print, flush=True)
    jnp.zeros(())  # start the backend before anything is timed
    main()
