"""The accumulation mechanisms against the big batch: ``python tests/benchmarks/accumulation.py [--pairs 15]``.

A transformer of about 1.7 M parameters on 8 virtual CPU devices, its layers unrolled (so that the only loop is the
mechanism's), k = 4 micro-batches of 8 rows against one batch of 32: seconds a step (interleaved, as a ratio to the big
batch's in the same round), bytes of the compiled program that live on a device, and bytes that each device sends in a
step, read from the compiled program's text (a collective inside of the loop counts k times). Eight devices share the
cores here, so the seconds tell what the mechanism costs to run and nothing of a network; the bytes are what a network
would carry.
"""

import argparse
import os
import pathlib
import platform
import random
import statistics
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from collectives_text import collectives

from jaxtrain import assemble, config, sharding

K, ROWS, LENGTH = 4, 8, 64
SIZES = {"layers": 2, "d_model": 256, "heads": 4, "kv_heads": 4, "d_ff": 688, "max_length": LENGTH, "scan_layers": "no"}
MECHANISMS = {
    "the big batch": ("multisteps", 1),
    "MultiSteps(4)": ("multisteps", K),
    "Scan(4)": ("scan", K),
    "Scan(4, defer=True)": ("scan_deferred", K),
}


class Side:
    """One mechanism: a program, its state, a window of batches, and what its compiled step holds and sends."""

    def __init__(self, mechanism: str, k: int, axes: dict[str, int]):
        c = config.default()
        values = {f"model.{name}": value for name, value in SIZES.items()}
        values |= {"accumulation.mechanism": mechanism, "accumulation.k": k, "data.sequence_length": LENGTH}
        values |= {"data.micro_batch_size": ROWS * K // k, "optim.schedule": "constant", "precision.compute": "float32"}
        for name, value in values.items():
            config.assign(c, name, value)
        self.program = assemble.make_program(config.resolve(c), sharding.make_mesh(**axes))
        struct = self.program.batch_struct(assemble.example_batch(config.resolve(c), self.program.mesh))
        draw = np.random.default_rng(0)
        one = {
            "tokens": draw.integers(0, 256, (ROWS * K, LENGTH)), "targets": draw.integers(0, 256, (ROWS * K, LENGTH)),
            "positions": np.tile(np.arange(LENGTH), (ROWS * K, 1)), "segment_ids": np.ones((ROWS * K, LENGTH)),
            "weights": np.ones((ROWS * K, LENGTH)),
        }  # fmt: skip
        calls = self.program.accumulation.calls(0)
        leaves = {name: x.astype(struct[name].dtype).reshape(calls, *struct[name].shape) for name, x in one.items()}
        shards = self.program.batch_sharding
        self.window = [jax.device_put({name: x[i] for name, x in leaves.items()}, shards) for i in range(calls)]
        compiled = self.program.lower(struct).compile()
        found, times = collectives(compiled.as_text()), {"once": calls, "loop": K if mechanism != "multisteps" else 1}
        times["loop"] *= calls
        self.wire = sum(c.wire_bytes * times[where] for where, all_ in found.items() for c in all_)
        memory = compiled.memory_analysis()
        self.argument, self.temp = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        self.state = self.program.init()

    def run(self) -> float:
        """Seconds of one window."""
        began = time.perf_counter()
        for batch in self.window:
            self.state, metrics = self.program.step(self.state, batch)
        metrics.to_host()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}")
    for axes in ({"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 8}):
        sides = {name: Side(*mechanism, axes) for name, mechanism in MECHANISMS.items()}
        for side in sides.values():
            side.run()  # compiles
        order, seconds = random.Random(0), {name: [] for name in sides}
        for _ in range(pairs):
            for name in order.sample(list(sides), len(sides)):
                seconds[name].append(sides[name].run())
        parameters = sum(x.size for x in jax.tree.leaves(sides["Scan(4)"].program.abstract_state.params))
        print(f"\n{', '.join(f'{a}={n}' for a, n in axes.items())}; {parameters:,} parameters, {pairs} rounds")
        print("| mechanism | time over the big batch (min..max) | arguments, MiB | temporary, MiB | sent, MiB |")
        print("|---|---|---|---|---|")
        for name, side in sides.items():
            ratio = [a / b for a, b in zip(seconds[name], seconds["the big batch"], strict=True)]
            spread = f"{statistics.median(ratio):.2f} ({min(ratio):.2f}..{max(ratio):.2f})"
            mib = [f"{x / 2**20:.1f}" for x in (side.argument, side.temp, side.wire)]
            print(f"| {name} | {spread} | {' | '.join(mib)} |", flush=True)


if __name__ == "__main__":
    main()
