"""Steps of the transformer as a compiler leaves them: ``python tests/compiled_steps.py``, told what on stdin as JSON.

``{"target": "cpu" | "v5e:2x4", "directory": ..., "cases": {name: [mesh axes, config overrides]}}``; for each case
``directory/name.txt`` is the program: on cpu as XLA's partitioner leaves it (the final one of a CPU computes bfloat16
in float32, also its gathers), on a TPU as it runs. A process of its own, because the flags are read once.
"""

import json
import os
import pathlib
import subprocess
import sys

SIZES = {
    "model.layers": 3, "model.d_model": 256, "model.heads": 4, "model.kv_heads": 4, "model.d_ff": 640,
    "model.max_length": 64, "data.sequence_length": 64, "data.micro_batch_size": 16, "optim.schedule": "constant",
    "model.scan_layers": "yes",
}  # fmt: skip


def compile_steps(target: str, cases: dict, directory: pathlib.Path) -> tuple[dict[str, str], str]:
    """The programs' texts by name, and what the compiler said (with SIZES where a case does not say otherwise)."""
    told = {"target": target, "directory": str(directory), "cases": cases}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    if target == "cpu":
        passes = "--xla_dump_hlo_pass_re=spmd.* --xla_dump_hlo_as_text"
        dump = f"--xla_force_host_platform_device_count=8 --xla_dump_to={directory}/dump {passes}"
        environment |= {"XLA_FLAGS": dump}
    else:
        environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        environment |= {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
    run = subprocess.run(
        [sys.executable, __file__], input=json.dumps(told), capture_output=True, text=True, env=environment
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-4000:])
    return {name: (directory / f"{name}.txt").read_text() for name in cases}, run.stderr


def main() -> None:
    import jax

    from jaxtrain import assemble, config, sharding

    told = json.load(sys.stdin)
    directory = pathlib.Path(told["directory"])
    devices = jax.devices()
    if told["target"] != "cpu":
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(platform="tpu", topology_name=told["target"]).devices
    for name, (axes, overrides) in told["cases"].items():
        c = config.default()
        for key, value in {**SIZES, **overrides}.items():
            config.assign(c, key, value)
        c = config.resolve(c)
        program = assemble.make_program(c, sharding.make_mesh(**axes, devices=devices))
        compiled = program.lower(program.batch_struct(assemble.example_batch(c, program.mesh))).compile()
        text = compiled.as_text()
        if told["target"] == "cpu":
            (dumped,) = (directory / "dump").glob("*jit_step*after_spmd-partitioning*")
            text = dumped.read_text()
            dumped.unlink()
        (directory / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    main()
