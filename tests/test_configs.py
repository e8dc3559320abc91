"""The config files: each resolves to its golden, and what its docstring says of numbers is true of its numbers.

To change a golden on purpose: ``jaxtrain config show --json --config=configs/NAME.py > tests/golden/NAME.json``.
"""

import ast
import json
import math
import pathlib
import re
import shlex

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxtrain import assemble, cli, config, paths, sharding
from jaxtrain.horizon import Batching

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "configs").glob("*.py"))
NAMES = [path.stem for path in FILES]
LLAMA_8B = (
    8.03e9  # parameters; Llama Team 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and the model card
)
EPOCH_ROWS = 1438  # of the digits' training side
NUMBER = r"([\d,]*\.?\d+)"
UNITS = {"M": 1e6, "G": 1e9}


def loaded(name: str):
    return cli.load_config(str(ROOT / "configs" / f"{name}.py"), {})


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.fixture(scope="module")
def programs():
    """name -> (config, program on an abstract mesh of the config's sizes, a free axis as 1)."""
    made = {}

    def make(name: str):
        if name not in made:
            c = loaded(name)
            sizes = tuple(max(c.mesh[axis], 1) for axis in sharding.AXES)
            mesh = AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sizes))
            task = assemble.make_task(c, mesh)
            batching = Batching(c.data.micro_batch_size, c.accumulation.k, (), task.weight_per_row, EPOCH_ROWS)
            made[name] = c, assemble.make_program(config.in_steps(c, batching), mesh)
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_a_config_resolves_to_its_golden(name):
    again = f"jaxtrain config show --json --config=configs/{name}.py > tests/golden/{name}.json"
    golden = ROOT / "tests" / "golden" / f"{name}.json"
    assert golden.exists(), f"no golden; look at the config and write one: {again}"
    wanted = json.loads(golden.read_text())
    got = json.loads(json.dumps(loaded(name).to_dict()))
    changed = {
        key: (config.flat(wanted).get(key), value) for key, value in config.flat(got).items()
        if config.flat(wanted).get(key) != value
    }  # fmt: skip
    assert got == wanted, f"golden -> now: {changed}; if that is meant: {again}"


def test_every_golden_has_a_config():
    assert {path.stem for path in (ROOT / "tests" / "golden").glob("*.json")} == set(NAMES)
    assert {"quickstart", "lm_small", "llama_8b_gpu", "llama_8b_tpu"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_gives_command_hardware_batch_and_result(name):
    lines = docstring(name).splitlines()
    assert lines[0].endswith(".")
    assert lines[1] == ""
    heads = [line.split(":")[0] for line in lines[2:] if not line.startswith(" ")]
    assert heads == ["Command", "Hardware", "Batch", "Reached"]
    words = shlex.split(next(line for line in lines if line.startswith("Command:")).removeprefix("Command:"))
    assert words[:2] == ["jaxtrain", "train"]
    spec = next(word for word in words if word.startswith("--config=")).removeprefix("--config=")
    assert spec.partition(":")[0] == f"configs/{name}.py"
    assert any(word.startswith("--workdir=") for word in words)
    given = spec.partition(":")[2]
    assert cli.load_config(str(ROOT / spec), {}).data.paths == ((given,) if given else ("stdlib",))


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_arithmetic_is_right_and_the_configs(name):
    c, text = loaded(name), docstring(name)
    item = {"text": f"{NUMBER} tokens x ", "digits": ""}[c.data.name]
    match = re.search(rf"{NUMBER} rows x {item}{NUMBER} micro-batch(?:es)? = {NUMBER} (?:token|image)s a step", text)
    rows, *length, k, tokens = map(number, match.groups())
    assert (rows, k) == (c.data.micro_batch_size, c.accumulation.k)
    assert length == [c.data.sequence_length] * (c.data.name == "text")
    assert tokens == rows * math.prod(length) * k
    for steps, total, unit in re.findall(rf"{NUMBER} steps = {NUMBER} ([MG])", text):
        assert number(steps) == c.steps
        assert number(total) == pytest.approx(c.steps * tokens / UNITS[unit], abs=0.051)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_arithmetic_is_right_and_the_programs(name, programs):
    c, program = programs(name)
    parameters = sum(x.size for x in jax.tree.leaves(program.abstract_state.params))
    sums = re.findall(rf"(\d+) B x {NUMBER} ([MG])(?: / (\d+))? = {NUMBER} GB", docstring(name))
    assert sums or name in ("quickstart", "digits_resnet")
    for each, count, unit, shards, total in sums:
        assert number(count) * UNITS[unit] == pytest.approx(parameters, rel=0.01)
        assert int(shards or 1) == max(c.mesh.fsdp, 1)
        assert number(total) == pytest.approx(int(each) * parameters / int(shards or 1) / 1e9, abs=0.051)
    if name.startswith("llama_8b"):
        assert parameters == pytest.approx(LLAMA_8B, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_traced_on_the_configs_mesh_without_any_device(name, programs):
    """Shapes, shardings and divisibility hold on a mesh that nobody has here."""
    c, program = programs(name)
    batch = program.batch_struct(assemble.example_batch(c, program.mesh))
    state, metrics = jax.eval_shape(program.step, program.abstract_state, batch)
    assert not paths.differences(program.abstract_state, state)
    assert {"loss", "grad_norm", "learning_rate"} <= set(metrics.value_names)
    leaf = batch["weights"]
    rows = leaf.sharding.shard_shape(leaf.shape)[0]
    assert rows * max(c.mesh.slice, 1) * max(c.mesh.data, 1) * max(c.mesh.fsdp, 1) == c.data.micro_batch_size


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits_resnet"])
def test_the_state_is_spread_evenly_over_the_shards(name, programs):
    """fp32 masters and two moments: 12 bytes a parameter, 16 with the accumulator of ``MultiSteps``."""
    c, program = programs(name)
    shards = max(c.mesh.fsdp, 1) * max(c.mesh.tensor, 1)
    leaves = paths.named_leaves(program.abstract_state)
    parameters = sum(x.size for x in jax.tree.leaves(program.abstract_state.params))
    each = 12 + 4 * (c.accumulation.k > 1) + 4 * (c.optim.ema > 0)
    assert sum(map(shard_bytes, leaves.values())) == pytest.approx(each * parameters / shards, rel=0.02)
    matrices = {name: x for name, x in leaves.items() if re.search(r"/(kernel|embedding)$", name)}
    assert len(matrices) == 9 * each // 4  # seven kernels a layer, stacked; embedding; head
    assert not [name for name, x in matrices.items() if shard_bytes(x) * shards != x.size * x.dtype.itemsize]


def test_the_sharded_configs_are_among_them():
    assert {name: max(loaded(name).mesh.fsdp, 1) for name in NAMES if name.startswith("llama")} == {
        "llama_8b_gpu": 8, "llama_8b_tpu": 64,
    }  # fmt: skip
