"""Checkpoints of small programs: saved behind a running loop, damaged in every way, chosen, restored."""

import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain import paths, sharding
from jaxtrain.checkpoint import files as files_lib
from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.errors import CheckpointError, MismatchError, StuckError
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.store import Checkpoints
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import Loss, MultiSteps, Program, Variables, build_train_step

HOST, DATA = {"counts": {"step": 3}, "text": "é\n", "n": [1, 2.5, None]}, {"sample_index": 2**40}
ROWS = np.ones(8, np.float32)


def constant_gradient(params: Any, model_state: Any, batch: Any, key: Any) -> Loss:
    """Each row's gradient of each parameter is the row's value; integer-free model state counts the micro-batches."""
    total = sum(jnp.sum(w.astype(jnp.float32)) for w in jax.tree.leaves(params))
    if isinstance(model_state, dict) and "seen" in model_state:
        model_state = model_state | {"seen": model_state["seen"] + 1}
    return Loss(total * jnp.sum(batch), jnp.float32(batch.shape[0]), model_state)


def program_of(params: Any, k: int = 1, optimizer: Any = None, model_state: Any = (), **settings: Any) -> Program:
    """SGD that goes UP by the gradient: with batches of ones every parameter is the number of updates."""
    settings = {"mesh": sharding.make_mesh(), "precision": Precision("float32")} | settings
    return build_train_step(
        constant_gradient, lambda key: Variables(params, model_state), optimizer or optax.sgd(-1.0),
        accumulation=MultiSteps(k), **settings,
    )  # fmt: skip


@functools.cache
def small() -> Program:
    return program_of({"w": jnp.zeros(300), "b": jnp.zeros(())})


def at(step: int, program: Program | None = None) -> Any:
    """The snapshot after ``step`` updates."""
    program = program or small()
    state = program.init(jax.tree.map(lambda x: np.full(x.shape, step, x.dtype), program.abstract_state.params))
    return program.checkpoint_view(state)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        assert checkpoints.save(step, at(step), run=HOST, host=DATA)
    checkpoints.wait()


def value(checkpoints: Checkpoints, step: int) -> float:
    (number,) = set(np.asarray(checkpoints.restore(small(), step).state.params["w"]).tolist())
    return number


def entries(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def bits(tree: Any) -> dict[str, bytes]:
    data = {
        name: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for name, x in paths.named_leaves(tree).items()
    }
    return {name: x.tobytes() for name, x in jax.device_get(data).items()}


def any_bits(program: Program) -> Any:
    """A snapshot of random bytes: NaN with payloads, infinities, subnormals, -0.0 (the first floats by name)."""
    rng = np.random.default_rng(0)

    def one(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
            shape = jax.eval_shape(jax.random.key_data, struct).shape
            made = rng.integers(0, 2**32, shape, np.uint32)
            impl = {"key<fry>": "threefry2x32", "key<rbg>": "rbg"}[str(struct.dtype)]
            return jax.device_put(jax.random.wrap_key_data(made, impl=impl), struct.sharding)
        if struct.dtype == bool:
            return jax.device_put(rng.integers(0, 2, struct.shape).astype(bool), struct.sharding)
        made = np.frombuffer(rng.bytes(int(np.prod(struct.shape)) * struct.dtype.itemsize), struct.dtype).copy()
        if jnp.issubdtype(struct.dtype, jnp.floating):
            made[:5] = np.asarray([np.nan, -0.0, np.inf, -np.inf, 1e-40], struct.dtype)[: made.size]
        return jax.device_put(made.reshape(struct.shape), struct.sharding)

    return jax.tree.map(one, program.abstract_snapshot)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the checkpoints 10 and 20; copy it."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two") / "checkpoints")
    save(checkpoints, 10, 20)
    checkpoints.close()
    return pathlib.Path(checkpoints.directory)


@pytest.fixture
def run_dir(two_steps: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


# ---- what is saved comes back ------------------------------------------------------------------------------------


def everything(k: int, **settings: Any) -> Program:
    """Every kind of leaf and container that a state may hold."""
    params = {
        "layers": {0: jnp.ones((2, 3)), 1: jnp.zeros(7), 10: jnp.zeros(())}, "list": [jnp.ones(5), (jnp.zeros(2),)],
        "empty": {}, "none": None, "nothing": (),
    }  # fmt: skip
    model_state = {
        "seen": jnp.float32(0), "half": jnp.zeros(9, jnp.bfloat16), "f16": jnp.zeros(6, jnp.float16),
        "table": jnp.arange(5), "empty": [{}, ()], "bool": jnp.array([True, False]), "fry": jax.random.key(7),
        "rbg": jax.random.key(7, impl="rbg"), "none": None,
        "many": jax.random.split(jax.random.key(1), 4), "raw": jax.random.key_data(jax.random.key(3)),
    }  # fmt: skip
    adam = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0.0, 50))
    labels = params | {"layers": {0: "on", 1: "off", 10: "on"}, "list": ["on", ("off",)]}
    optimizer = adam if k == 1 else optax.multi_transform({"on": optax.adam(1e-3), "off": optax.set_to_zero()}, labels)
    precision = Precision("float16", loss_scale=LossScale(64.0, growth_interval=3))
    return program_of(params, k, optimizer, model_state, ema=0.9, precision=precision, **settings)


@pytest.mark.parametrize("k", [1, 4])
def test_CKPT_15_RNG_01_every_bit_and_container_comes_back(tmp_path, k):
    program = everything(k)
    snapshot = any_bits(program)
    wanted, structure = bits(snapshot), jax.tree.structure(snapshot)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(3, snapshot, run=HOST, host=DATA)
    checkpoints.close()
    restored = Checkpoints(tmp_path / "c").restore(program, 3)
    again = program.checkpoint_view(restored.state)
    assert bits(again) == wanted
    assert jax.tree.structure(again) == structure
    assert all(
        (got.dtype, got.shape) == (struct.dtype, struct.shape)
        and got.sharding.is_equivalent_to(struct.sharding, got.ndim)
        for got, struct in zip(jax.tree.leaves(again), jax.tree.leaves(program.abstract_snapshot), strict=True)
    )
    assert restored.run == HOST
    assert restored.host == DATA


def test_CKPT_18_a_restored_state_trains_like_a_new_one(tmp_path):
    program = everything(1)
    fresh = program.init()
    fresh, _ = program.step(fresh, ROWS)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, program.checkpoint_view(fresh), run={})
    checkpoints.close()
    fresh, fresh_metrics = program.step(fresh, ROWS)
    state = checkpoints.restore(program, 1).state
    before = jax.tree.leaves(state)
    state, metrics = program.step(state, ROWS)
    assert bits(state) == bits(fresh)
    np.testing.assert_equal(metrics.to_host(), fresh_metrics.to_host())
    assert all(leaf.is_deleted() for leaf in before)
    assert program.traces["step"] == program._step._cache_size() == 1


@pytest.mark.parametrize(("size", "shards"), [(1, 1), (1 << 16, 8), (1 << 20, 1), (1 << 22, 8)])
def test_CKPT_12_a_save_in_flight_does_not_see_later_steps(tmp_path, make_mesh, size, shards):
    mesh = make_mesh(fsdp=shards)
    rules = [("w", P("fsdp") if size >= 1 << 16 and shards > 1 else P())]
    program = program_of({"w": jnp.zeros(size)}, optimizer=optax.sgd(-1.0, momentum=0.0), mesh=mesh, rules=rules)
    checkpoints = Checkpoints(tmp_path / "c", keep=Keep(100))
    state, batch = program.init(), jax.device_put(ROWS, program.batch_sharding)
    steps = range(1, 61)
    for step in steps:
        state, _ = program.step(state, batch)
        if step % 6 == 0:
            checkpoints.save(step, program.checkpoint_view(state), run={})
    assert set(np.unique(state.params["w"])) == {60.0}
    checkpoints.close()
    assert checkpoints.steps() == [*steps[5::6]]
    for step in checkpoints.steps():
        restored = checkpoints.restore(program, step).state
        assert set(np.unique(restored.params["w"])) == {float(step)}
        assert int(restored.counters.step) == step


@pytest.mark.parametrize("target", [{}, {"fsdp": 4}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_CKPT_13_another_mesh_gets_the_same_bits_in_its_own_sharding(tmp_path_factory, target, make_mesh):
    rules = [("w", P("fsdp", "tensor")), ("v", P(None, "fsdp"))]

    def program(mesh: jax.sharding.Mesh) -> Program:
        params = {"w": jnp.zeros((16, 6)), "v": jnp.zeros((3, 8)), "b": jnp.zeros(5)}
        return program_of(params, optimizer=optax.adam(1e-3), mesh=mesh, rules=rules, ema=0.9)

    saved = any_bits(program(make_mesh(fsdp=8)))
    assert len({s.device for s in saved.params["w"].addressable_shards}) == 8
    checkpoints = Checkpoints(tmp_path_factory.mktemp("mesh"))
    checkpoints.save(1, saved, run={})
    checkpoints.close()
    count = int(np.prod([*target.values()]))
    other = program(sharding.make_mesh(**target, devices=jax.devices()[:count]))
    state = checkpoints.restore(other, 1).state
    assert bits(other.checkpoint_view(state)) == bits(saved)
    for tree in (state.params, state.ema, state.opt_state[0].mu, state.opt_state[0].nu):
        assert {name: x.sharding for name, x in paths.named_leaves(tree).items()} == {
            name: jax.sharding.NamedSharding(other.mesh, spec)
            for name, spec in {"w": P("fsdp", "tensor"), "v": P(None, "fsdp"), "b": P()}.items()
        }
        shape = (16 // target.get("fsdp", 1), 6 // target.get("tensor", 1))
        assert {s.data.shape for s in tree["w"].addressable_shards} == {shape}
    other.step(other.resume(jax.tree.map(jnp.copy, at(1, other))), ROWS)


def test_a_save_inside_a_window_holds_its_start_and_any_k_goes_on(tmp_path):
    """Gradients 1, 2, ... , mean over the window, w goes up by it: k = 4 gives 2.5, then 9.0."""
    four = program_of({"w": jnp.zeros(4)}, k=4, model_state={"seen": jnp.float32(0)})
    state = four.init()
    batches = [ROWS * (i + 1) for i in range(8)]
    checkpoints = Checkpoints(tmp_path / "c")
    for i, batch in enumerate(batches):
        state, _ = four.step(state, batch)
        if i == 5:
            checkpoints.save(1, four.checkpoint_view(state), run={})
    unbroken = bits(state)
    assert set(np.asarray(state.params["w"]).tolist()) == {9.0}
    checkpoints.close()
    for k, wanted in ((1, 2.5 + 5 + 6 + 7 + 8), (2, 2.5 + 5.5 + 7.5), (4, 9.0)):
        program = program_of({"w": jnp.zeros(4)}, k=k, model_state={"seen": jnp.float32(0)})
        state = checkpoints.restore(program, 1).state
        assert [int(x) for x in state.counters[:4]] == [4, 1, 1, 0]
        assert float(state.model_state["seen"]) == 4.0
        for batch in batches[4:]:
            state, _ = program.step(state, batch)
        assert set(np.asarray(state.params["w"]).tolist()) == {wanted}
        assert float(state.model_state["seen"]) == 8.0
        assert k != 4 or bits(state) == unbroken


# ---- which one is the newest -------------------------------------------------------------------------------------


def test_CKPT_10_steps_are_numbers_and_foreign_entries_are_ignored(two_steps, tmp_path):
    directory = tmp_path / "c"
    assert (Checkpoints(directory).steps(), Checkpoints(directory).latest_verified()) == ([], None)
    for step in (2500, 500, 100000, 900000):
        shutil.copytree(two_steps / "10", directory / str(step))
    os.utime(directory / "500")
    for name in ("handpicked", "900001.orbax-checkpoint-tmp", "900002.damaged", ".deleted", "-5", "1e6", "12 ", "v2"):
        shutil.copytree(two_steps / "10", directory / name)
    (directory / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(directory, keep=Keep(2))
    assert checkpoints.steps() == [500, 2500, 100000, 900000]
    assert checkpoints.latest_verified() == 900000
    shutil.rmtree(directory / "900000")  # a fresh look every time
    assert checkpoints.latest_verified() == 100000
    save(checkpoints, 100001)
    assert checkpoints.steps() == [100000, 100001]
    assert {"handpicked", "900002.damaged", "-5", "1e6", "12 ", "v2", "notes.txt"} < entries(directory)


def test_CKPT_10_a_zero_padded_name_is_a_step_like_any_other(two_steps, tmp_path):
    for name in ("500", "0900000"):
        shutil.copytree(two_steps / "10", tmp_path / name)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [500, 900000]
    assert checkpoints.latest_verified() == 900000
    assert value(checkpoints, 900000) == 10.0
    assert checkpoints.run(900000) == HOST


def test_an_empty_directory_with_a_number_is_no_checkpoint_and_in_nobodys_way(run_dir):
    for name in ("15", "30", "99"):
        (run_dir / name).mkdir()
    checkpoints = Checkpoints(run_dir, keep=Keep(2))
    assert checkpoints.steps() == [10, 20]
    assert checkpoints.latest_verified() == 20
    save(checkpoints, 25)
    assert checkpoints.steps() == [20, 25]  # an empty one counts for nothing in retention either
    save(checkpoints, 30)
    assert value(checkpoints, 30) == 30.0


def test_a_file_with_a_number_for_a_name_is_no_checkpoint(run_dir):
    (run_dir / "30").write_text("a log?")
    checkpoints = Checkpoints(run_dir)
    assert checkpoints.steps() == [10, 20]
    assert checkpoints.latest_verified() == 20


def test_what_is_not_there_is_an_error_with_a_name(tmp_path, run_dir):
    for directory in (run_dir, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"checkpoint 30 in .* cannot be restored: it is not there"):
            Checkpoints(directory).restore(small(), 30)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("url", ["s3://bucket/run", "az://bucket/run", "http://host/run", "GS://bucket/run"])
def test_CKPT_07_what_nobody_can_commit_to_is_refused_and_not_made_a_local_directory(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{url} is not a place jaxtrain can commit to: .* gs://BUCKET/PATH"):
        Checkpoints(url)
    assert entries(tmp_path) == set()


@pytest.mark.parametrize("url", ["gs://", "gs://bucket", "gs://bucket/"])
def test_a_bucket_without_a_directory_is_refused(url):
    with pytest.raises(CheckpointError, match=rf"{url} names no directory in a bucket; write gs://BUCKET/PATH"):
        Checkpoints(url)


def test_a_bucket_without_its_library_names_what_to_install(monkeypatch):
    monkeypatch.setattr(files_lib.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs gcsfs, which is not installed: pip install 'jaxtrain\[gcs\]'"):
        Checkpoints("gs://bucket/run")


# ---- damage ------------------------------------------------------------------------------------------------------


def files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    bit = random.Random(len(content)).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


DAMAGE = {
    "flip": (flip, r"checksum \w{8}, \w{8} was written"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), r"\d+ bytes, \d+ were written"),
    "empty": (lambda path: os.truncate(path, 0), r"0 bytes, \d+ were written"),
    "delete": (pathlib.Path.unlink, "missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_CKPT_04_damage_to_any_file_is_found_and_the_step_before_is_taken(two_steps, tmp_path, damage):
    apply, reason = DAMAGE[damage]
    names = [path.relative_to(two_steps / "20") for path in files(two_steps / "20")]
    guarded = [name for name in names if name.name not in ("_CHECKPOINT_METADATA", "commit_success.txt")]
    assert len(guarded) >= 10
    assert {"state", "host_state", "run.json", "MANIFEST.json"} == {name.parts[0] for name in guarded}
    for number, name in enumerate(guarded):
        directory = shutil.copytree(two_steps, tmp_path / str(number))
        apply(directory / "20" / name)
        checkpoints = Checkpoints(directory)
        if name.name == "MANIFEST.json" and damage != "delete":
            reason = r".*"  # of a damaged list of files any one can be the first that does not fit
        where = r".*" if reason == r".*" else f"{name}: {reason}"
        if number % 4 == 0:  # by number it is an error, never another step's data
            with pytest.raises(CheckpointError, match=rf"checkpoint 20 in .* cannot be restored: {where}\."):
                checkpoints.restore(small(), 20)
        with pytest.warns(UserWarning, match=rf"checkpoint 20 is damaged \({where}\); set aside as .*/20\.damaged\."):
            assert checkpoints.latest_verified() == 10
        assert checkpoints.steps() == [10]
        assert (directory / "20.damaged" / name).exists() == (damage != "delete")  # nothing is thrown away
        if number % 4 == 0:
            assert value(checkpoints, 10) == 10.0
        checkpoints.close()
        reason = DAMAGE[damage][1]


def test_CKPT_04_a_stranger_a_lost_item_and_an_empty_copy_are_damage(two_steps, tmp_path):
    def stranger(path: pathlib.Path) -> None:
        (path / "state" / "d" / "ffff").write_bytes(b"")

    for number, (change, reason) in enumerate({
        stranger: r"state/d/ffff: not in the manifest",
        lambda path: shutil.rmtree(path / "state"): r"state/\S+: missing",
        lambda path: (path / "run.json").unlink(): r"run.json: missing",
        lambda path: [file.unlink() for file in files(path)]: r"MANIFEST.json: missing",
        lambda path: [shutil.rmtree(path), (path / "state").mkdir(parents=True)]: r"MANIFEST.json: missing",
    }.items()):  # fmt: skip
        directory = shutil.copytree(two_steps, tmp_path / str(number))
        change(directory / "20")
        with pytest.warns(UserWarning, match=rf"checkpoint 20 is damaged \({reason}\)"):
            assert Checkpoints(directory).latest_verified() == 10


def test_orbax_metadata_outside_of_the_manifest_is_not_needed(two_steps, tmp_path):
    for number, change in enumerate(
        (pathlib.Path.unlink, lambda path: path.write_text("{gar"), lambda path: path.write_text(""))
    ):
        directory = shutil.copytree(two_steps, tmp_path / str(number))
        for path in files(directory / "20"):
            if path.name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
                change(path)
        checkpoints = Checkpoints(directory)
        assert checkpoints.latest_verified() == 20
        assert value(checkpoints, 20) == 20.0


def test_two_damaged_ones_and_an_older_name_in_the_way(run_dir):
    checkpoints = Checkpoints(run_dir)
    save(checkpoints, 30)
    for attempt in ("30.damaged", "30.damaged2", "30.damaged3"):
        flip(run_dir / "30" / "MANIFEST.json")
        with pytest.warns(UserWarning, match=rf"set aside as \S+/{attempt}\.$"):
            assert checkpoints.latest_verified() == 20
        assert attempt in entries(run_dir)
        save(checkpoints, 30)
    for step in (20, 30):
        os.truncate(run_dir / str(step) / "run.json", 0)
    with pytest.warns(UserWarning) as caught:  # noqa: PT030, both texts are looked at
        assert checkpoints.latest_verified() == 10
    assert [str(w.message).split(" (")[0] for w in caught] == [f"checkpoint {n} is damaged" for n in (30, 20)]
    os.truncate(run_dir / "10" / "run.json", 0)
    with pytest.warns(UserWarning, match="checkpoint 10 is damaged"):
        assert checkpoints.latest_verified() is None
    assert checkpoints.steps() == []


@pytest.mark.parametrize("same_object", [True, False])
def test_CKPT_03_after_walking_back_saves_below_and_at_the_bad_step_work(run_dir, same_object):
    checkpoints = Checkpoints(run_dir, keep=Keep(10))
    save(checkpoints, 1600, 1620)
    if not same_object:
        checkpoints.close()
        checkpoints = Checkpoints(run_dir, keep=Keep(10))
    flip(run_dir / "1620" / "host_state" / "process_0.json")
    with pytest.warns(UserWarning, match=r"checkpoint 1620 is damaged \(host_state/process_0.json: "):
        assert checkpoints.latest_verified() == 1600
    assert value(checkpoints, 1600) == 1600.0
    for step in (1610, 1620):
        save(checkpoints, step)
        assert checkpoints.latest_verified() == step
        assert value(checkpoints, step) == step
    assert checkpoints.steps() == [10, 20, 1600, 1610, 1620]


def test_a_step_that_is_there_is_left_alone(run_dir):
    before = {path: path.read_bytes() for path in files(run_dir)}
    checkpoints = Checkpoints(run_dir)
    for step in (10, 20):
        assert checkpoints.save(step, at(99), run={}) is False
    checkpoints.close()
    assert {path: path.read_bytes() for path in files(run_dir)} == before
    assert checkpoints.save(15, at(15), run={}) is True  # below the newest, and not there
    checkpoints.close()
    assert Checkpoints(run_dir).steps() == [10, 15, 20]


# ---- another program's state -------------------------------------------------------------------------------------


ANOTHER = {
    "shape": ({"w": jnp.zeros(301), "b": jnp.zeros(())}, {}, [r"params/w: float32\[300\] -> float32\[301\]"]),
    "extra": (
        {"w": jnp.zeros(300), "b": jnp.zeros(()), "c": jnp.zeros(2)}, {}, [r"params/c: not there -> float32\[2\]"],
    ),
    "missing": ({"w": jnp.zeros(300)}, {}, [r"params/b: float32\[\] -> not there"]),
    "dtype": (
        {"w": jnp.zeros(300), "b": jnp.zeros(())}, {"model_state": {"n": jnp.zeros(3, jnp.bfloat16)}},
        [r"model_state/n: not there -> bfloat16\[3\]"],
    ),
    "optimizer": (
        {"w": jnp.zeros(300), "b": jnp.zeros(())}, {"optimizer": optax.adam(1.0), "ema": 0.5},
        [r"ema/b: not there -> float32\[\]", r"opt_state/0/count: not there -> ", r"opt_state/0/mu/w: not there -> "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", ANOTHER)
def test_a_mismatch_lists_every_difference_and_never_falls_back(run_dir, which):
    params, settings, lines = ANOTHER[which]
    checkpoints = Checkpoints(run_dir)
    assert checkpoints.latest_verified() == 20
    with pytest.raises(MismatchError, match=r"checkpoint .*/20 holds another state \(saved -> wanted\):\n  ") as caught:
        checkpoints.restore(program_of(params, **settings), 20)
    for line in lines:
        assert any(re.match(line, got.strip()) for got in str(caught.value).splitlines()[1:]), line
    assert checkpoints.steps() == [10, 20]
    assert entries(run_dir) == {"10", "20"}


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [(jnp.zeros(3), jnp.zeros(3, jnp.bfloat16)), (jnp.zeros(3, jnp.int32), jnp.zeros(3)),
     (jax.random.key(7, impl="rbg"), jax.random.key(7)), (jax.random.key_data(jax.random.key(7)), jax.random.key(7))],
    ids=["float32-bfloat16", "int32-float32", "rbg-threefry", "raw-typed"],
)  # fmt: skip
def test_RNG_01_a_dtype_or_generator_is_never_converted_silently(tmp_path, saved, wanted):
    checkpoints = Checkpoints(tmp_path)
    program = program_of({"w": jnp.zeros(3)}, model_state={"x": saved})
    checkpoints.save(1, program.checkpoint_view(program.init()), run={})
    checkpoints.close()
    with pytest.raises(MismatchError) as caught:
        checkpoints.restore(program_of({"w": jnp.zeros(3)}, model_state={"x": wanted}), 1)
    text = [f"{x.dtype}{list(x.shape)}" for x in (saved, wanted)]
    lines = str(caught.value).splitlines()[1:]
    assert lines[0] == f"  model_state/x: {text[0]} -> {text[1]}"
    castable = saved.shape == wanted.shape
    assert lines[1:] == (["allow the conversion with allow='dtype'"] if castable else [])


def test_another_precision_is_cast_on_request_and_only_then(tmp_path):
    values = jnp.float32([1 + 2**-9, -0.0, 3e38, 1e-40])
    saved = program_of({"w": values}, model_state={"mean": values})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved.checkpoint_view(saved.init()), run={})
    checkpoints.close()
    other = program_of({"w": values}, model_state={"mean": values.astype(jnp.bfloat16)})
    half = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=other.abstract_state.params["w"].sharding)}
    with pytest.raises(MismatchError, match=r"model_state/mean: float32\[4\] -> bfloat16\[4\]\nallow the conversion"):
        checkpoints.restore(other, 1)
    with pytest.raises(MismatchError, match=r"params/w: float32\[4\] -> bfloat16\[4\]\nallow the conversion"):
        checkpoints.restore_params(1, half)
    mean = checkpoints.restore(other, 1, allow={"dtype"}).state.model_state["mean"]
    weights = checkpoints.restore_params(1, half, allow={"dtype"})["w"]
    expected = np.asarray(values).astype(jnp.bfloat16).view(np.uint16)
    for got in (mean, weights):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), expected)


def test_a_difference_in_structure_alone_is_restored_or_a_mismatch(tmp_path):
    """The same leaves under the same names, in a longer chain of transformations."""
    adam = optax.adam(1e-3)
    program = program_of({"w": jnp.zeros(3)}, optimizer=optax.chain(adam))
    saved = any_bits(program)
    wanted = bits(saved)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, saved, run={})
    checkpoints.close()
    longer = program_of({"w": jnp.zeros(3)}, optimizer=optax.chain(adam, optax.identity()))
    try:
        state = checkpoints.restore(longer, 1).state
    except MismatchError as error:
        assert "opt_state" in str(error)  # noqa: PT017, one of two right answers
    else:
        assert bits(longer.checkpoint_view(state)) == wanted


def test_another_format_is_refused_with_a_sentence_and_stays_where_it_is(run_dir, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    checkpoints = Checkpoints(run_dir)
    for look in (checkpoints.latest_verified, lambda: checkpoints.restore(small(), 20)):
        with pytest.raises(MismatchError, match=r"checkpoint .*/20 has format 2 and this version of jaxtrain reads 3"):
            look()
    assert checkpoints.steps() == [10, 20]


def test_what_the_caller_saves_beside_cannot_replace_what_the_store_needs(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    own = {"format": 99, "tree": {"mine": 1}, "run": 3, "processes": 7}
    checkpoints.save(1, at(1), run=own, host=own)
    checkpoints.close()
    assert value(checkpoints, 1) == 1.0
    assert checkpoints.restore(small(), 1)[1:] == (own, own)


# ---- commit, failures, retention ---------------------------------------------------------------------------------


def test_the_manifest_is_written_after_the_last_byte_and_before_the_name(tmp_path, monkeypatch):
    """Pins Orbax: post_finalization_callback runs between finalizing and the rename."""
    seen = []

    def write(where: Any, name: str, described: Any) -> None:
        directory = tmp_path / name
        seen.append((entries(tmp_path), {f.relative_to(directory): f.read_bytes() for f in files(directory)}))
        original(where, name, described)

    original = manifest.write
    monkeypatch.setattr(manifest, "write", write)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 7)
    ((names, content),) = seen
    assert names == {"7.orbax-checkpoint-tmp"}
    assert entries(tmp_path) == {"7"}
    after = {f.relative_to(tmp_path / "7"): f.read_bytes() for f in files(tmp_path / "7")}
    later = {name for name in after if name.name in ("MANIFEST.json", "_CHECKPOINT_METADATA", "commit_success.txt")}
    assert {name: x for name, x in after.items() if name not in later} == {
        name: x for name, x in content.items() if name not in later
    }
    assert checkpoints.problem(7) is None


@pytest.fixture
def failing(monkeypatch):
    """Context: saves inside it fail behind, after ``save`` has returned."""

    class Failing:
        def __init__(self) -> None:
            self.done = threading.Event()

        def __enter__(self) -> "Failing":
            monkeypatch.setattr(manifest, "write", self.fail)
            return self

        def __exit__(self, *error: object) -> None:
            assert self.done.wait(10)
            monkeypatch.undo()

        def fail(self, *_: Any) -> None:
            self.done.set()
            raise OSError("disk gone")

    return Failing


def polled(checkpoints: Checkpoints) -> list[str]:
    """What a loop does: ``poll`` at every step, for up to five seconds."""
    for _ in range(500):
        if told := checkpoints.poll():
            return told
        time.sleep(0.01)
    raise AssertionError("nothing was told")


@pytest.mark.parametrize("by", ["poll", "wait", "save", "close"])
def test_CKPT_01_a_failure_behind_is_told_with_step_path_and_cause(run_dir, failing, by):
    checkpoints = Checkpoints(run_dir, keep=Keep(2))
    with failing():
        checkpoints.save(30, at(30), run={})
    sentence = rf"^saving checkpoint 30 to {run_dir} failed: .*disk gone; the next save tries again \(1 of 3\)$"
    if by == "poll":
        (told,) = polled(checkpoints)
        assert re.match(sentence, told)
        assert checkpoints.poll() == []  # told once
    elif by == "save":
        assert checkpoints.save(40, at(40), run={})  # the run goes on
        (told,) = checkpoints.poll()
        assert re.match(sentence, told)
        checkpoints.wait()
        assert checkpoints.steps() == [20, 40]
        return
    else:
        with pytest.raises(CheckpointError, match=sentence):
            getattr(checkpoints, by)()
    assert checkpoints.steps() == [10, 20]  # and nothing was retired for it
    assert checkpoints.latest_verified() == 20
    checkpoints.wait()
    save(checkpoints, 30)  # the name is free
    assert checkpoints.steps() == [20, 30]
    assert value(checkpoints, 30) == 30.0
    assert entries(run_dir) == {"20", "30"}
    checkpoints.close()


def test_CKPT_01_so_many_failures_in_a_row_are_an_error_and_a_success_begins_anew(run_dir, failing):
    checkpoints = Checkpoints(run_dir, max_failures=2)
    with failing():
        checkpoints.save(30, at(30), run={})
    save(checkpoints, 40)
    assert len(checkpoints.poll()) == 1
    with failing():
        checkpoints.save(50, at(50), run={})
        with pytest.raises(CheckpointError, match="disk gone; the next save tries again"):
            checkpoints.wait()
        checkpoints.save(60, at(60), run={})
        with pytest.raises(CheckpointError, match=r"saving checkpoint 60 .* disk gone \(2 saves in a row failed\)$"):
            checkpoints.wait()
    assert checkpoints.latest_verified() == 40


def test_CKPT_01_a_save_that_waits_tries_again(run_dir, monkeypatch):
    checkpoints, tries = Checkpoints(run_dir), []

    def write(*arguments: Any) -> None:
        tries.append(arguments)
        if len(tries) < 3:
            raise OSError("busy")
        original(*arguments)

    original = manifest.write
    monkeypatch.setattr(manifest, "write", write)
    assert checkpoints.save(30, at(30), run={}, wait=True)
    assert (len(tries), len(checkpoints.poll()), checkpoints.latest_verified()) == (3, 2, 30)
    tries.clear()
    monkeypatch.setattr(manifest, "write", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(CheckpointError, match=r"saving checkpoint 31 .* gone \(3 saves in a row failed\)$"):
        checkpoints.save(31, at(31), run={}, wait=True)


def test_a_save_that_hangs_is_noticed_by_its_age(run_dir, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(manifest, "write", lambda *_: go.wait(60))
    checkpoints = Checkpoints(run_dir, timeout_s=1)
    checkpoints.save(30, at(30), run={})
    assert checkpoints.poll() == []
    with pytest.raises(StuckError, match=rf"saving checkpoint 30 to {run_dir} has not ended for \d s \(timeout 1 s\)"):
        polled(checkpoints)
    checkpoints.close()  # does not wait for it
    go.set()
    assert Checkpoints(run_dir).latest_verified() == 20


def test_a_directory_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints", max_failures=2)
    assert checkpoints.latest_verified() is None
    assert checkpoints.save(1, at(1), run={}) is False
    (told,) = checkpoints.poll()
    assert re.match(
        rf"saving checkpoint 1 to {tmp_path}/file/checkpoints failed: .* cannot be written: .*Not a dir", told
    )
    with pytest.raises(CheckpointError, match=rf"saving checkpoint 2 to {tmp_path}/file/checkpoints failed: "):
        checkpoints.save(2, at(2), run={})


def test_CKPT_08_the_newest_are_kept(place):
    checkpoints = Checkpoints(place, keep=Keep(2))
    for step, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (10, [3, 10]), (100, [10, 100])):
        save(checkpoints, step)
        assert checkpoints.steps() == kept
        assert sorted(map(int, checkpoints.files.committed())) == kept
        assert checkpoints.files.partial() == []
    assert [value(checkpoints, step) for step in (10, 100)] == [10.0, 100.0]
    checkpoints.close()
    save(Checkpoints(place, keep=Keep(1)), 101)
    assert checkpoints.steps() == [101]


def test_CKPT_08_the_best_and_the_newest_are_two_things(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=Keep(last=2, best=1, metric="err"))
    for step, error in ((100, 1.0), (200, 2.0), (300, 3.0), (400, float("nan")), (500, 5.0)):
        checkpoints.save(step, at(step), run={}, metrics={"err": error})
        checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.latest_verified()) == ([100, 400, 500], 500)
    save(checkpoints, 600)  # without a metric
    assert checkpoints.steps() == [100, 500, 600]


def test_nothing_is_deleted_where_the_newest_is_damaged(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=Keep(1))
    save(checkpoints, 1)
    settled = checkpoints._retire

    def lose(newest: int, before: Any) -> None:
        os.truncate(tmp_path / "2" / "run.json", 3)
        settled(newest, before)

    monkeypatch.setattr(checkpoints, "_retire", lose)
    save(checkpoints, 2)
    assert checkpoints.steps() == [1, 2]
    assert re.search(r"checkpoint 2 in .* is damaged \(run.json: 3 bytes, \d+ were written\); nothing is deleted",
                     checkpoints.poll()[0])  # fmt: skip
    with pytest.warns(UserWarning, match="checkpoint 2 is damaged"):
        assert checkpoints.latest_verified() == 1


def test_checkpoints_that_a_user_deleted_meanwhile_are_no_error(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=Keep(2))
    save(checkpoints, 1, 2)
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    save(checkpoints, 3, 4, 5)
    assert checkpoints.steps() == [4, 5]


def test_CKPT_03_a_kill_between_retiring_and_deleting_lists_nothing_without_data(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=Keep(1))
    with monkeypatch.context() as patch:
        patch.setattr(files_lib.shutil, "rmtree", lambda *_, **__: None)  # killed before this line
        save(checkpoints, 1, 2)
    assert files(tmp_path / ".deleted")
    again = Checkpoints(tmp_path, keep=Keep(1))
    assert (again.steps(), again.latest_verified()) == ([2], 2)
    save(again, 1)  # also under the very name that was retired
    assert again.steps() == [2]  # and it is retired at once
    save(again, 3)
    assert (again.steps(), entries(tmp_path)) == ([3], {"3"})


KILLED = """
    import os, resource, signal, sys
    import jax, jax.numpy as jnp, optax
    from jaxtrain import sharding
    from jaxtrain.checkpoint import manifest
    from jaxtrain.checkpoint.retention import Keep
    from jaxtrain.checkpoint.store import CheckpointError, Checkpoints
    from jaxtrain.precision import Precision
    from jaxtrain.step import Loss, Variables, build_train_step

    def snapshot(size, noise):
        loss = lambda params, state, batch, key: Loss(jnp.sum(params["w"]) + params["b"], jnp.float32(1))
        init = lambda key: Variables({"w": 10 + noise * jax.random.normal(key, (size,)), "b": jnp.zeros(())})
        mesh, fp32 = sharding.make_mesh(), Precision("float32")
        program = build_train_step(loss, init, optax.sgd(1.0), mesh=mesh, precision=fp32)
        return program.checkpoint_view(program.init())

    def resident_mb():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

    leaking, after = Checkpoints(sys.argv[1] + "-many", keep=Keep(1)), []
    many = snapshot(1 << 20, 1.0)  # 4 MiB
    for step in range(100):
        leaking.save(step, many, run={})
        leaking.wait()
        after.append(resident_mb())
    leaking.close()
    print(max(after[20:]) - after[19], flush=True)  # 320 where every save leaves its copy

    checkpoints = Checkpoints(sys.argv[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, hard))  # writes beyond it fail, as on a full disk
    try:
        checkpoints.save(5, snapshot(1 << 20, 1.0), run={})
        checkpoints.wait()
    except CheckpointError as error:
        print(checkpoints.steps(), str(error)[:200], flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.save(10, snapshot(300, 0.0), run={})
    checkpoints.wait()
    manifest.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(20, snapshot(300, 0.0), run={})
    checkpoints.wait()
"""


def test_CKPT_17_CKPT_01_CKPT_03_many_saves_then_a_full_disk_then_a_kill_in_the_middle_of_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "c")], timeout=120, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},  # glibc's own hoard, an arena a thread, is no leak
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    growth_mb, failure = done.stdout.splitlines()[:2]
    assert float(growth_mb) < 50
    assert failure.startswith(f"[] saving checkpoint 5 to {tmp_path}/c failed: ")
    assert entries(tmp_path / "c") == {"10", "20.orbax-checkpoint-tmp"}  # what the full disk left is gone
    checkpoints = Checkpoints(tmp_path / "c")
    assert (checkpoints.steps(), checkpoints.latest_verified()) == ([10], 10)
    assert value(checkpoints, 10) == 10.0
    save(checkpoints, 15, 20)
    assert entries(tmp_path / "c") == {"10", "15", "20"}
    assert [value(checkpoints, step) for step in (15, 20)] == [15.0, 20.0]


# ---- a second process looks on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("item", ["restore", "data"])
def test_a_reader_leaves_a_save_in_flight_alone(run_dir, monkeypatch, item):
    """``jaxtrain eval`` and ``sample`` open the directory of a run that is training."""
    reached, go = threading.Event(), threading.Event()

    def write(*arguments: Any) -> None:
        reached.set()
        assert go.wait(30)
        original(*arguments)

    original = manifest.write
    monkeypatch.setattr(manifest, "write", write)
    trainer, reader = Checkpoints(run_dir), Checkpoints(run_dir)
    trainer.save(30, at(30), run=HOST, host=DATA)
    assert reached.wait(30)
    before = {path.name: {f.relative_to(path) for f in files(path)} for path in run_dir.iterdir()}
    try:
        assert (reader.steps(), reader.latest_verified()) == ([10, 20], 20)
        if item == "restore":
            assert value(reader, 20) == 20.0
        else:
            assert reader.run(20) == HOST
        reader.close()
        assert {path.name: {f.relative_to(path) for f in files(path)} for path in run_dir.iterdir()} == before
    finally:
        go.set()
    trainer.wait()
    assert trainer.latest_verified() == 30
    assert value(trainer, 30) == 30.0


def test_a_checkpoint_that_is_retired_while_a_reader_looks_at_it_is_passed_over(run_dir, monkeypatch):
    """Neither damage, which would warn, nor a crash: with ``keep_last=1`` and a busy reader it happens every minute."""

    def problem(where: Any, name: str, **how: Any) -> str | None:
        if name == "20":  # the trainer is faster
            (run_dir / ".deleted").mkdir()
            (run_dir / name).rename(run_dir / ".deleted" / "20")
        return original(where, name, **how)

    original = manifest.problem
    monkeypatch.setattr(manifest, "problem", problem)
    assert Checkpoints(run_dir).latest_verified() == 10
    assert entries(run_dir) == {".deleted", "10"}


def test_nothing_warns_in_the_life_of_a_good_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = Checkpoints(tmp_path, keep=Keep(1))
        save(first, 1, 2)
        first.poll()
        first.close()
        first.close()
        second = Checkpoints(tmp_path, keep=Keep(1))
        assert value(second, second.latest_verified()) == 2.0
        save(second, 3)
        second.close()
    assert json.loads((tmp_path / "3" / "run.json").read_text())["run"] == HOST
