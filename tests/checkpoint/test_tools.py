"""Looking at checkpoints, copying, deleting and exporting them, on a disk and in a bucket."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
from test_store import HOST, at, bits, save, small, value

from jaxtrain.checkpoint import tools
from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.checkpoint.files import MANIFEST, MARKER, open_files
from jaxtrain.checkpoint.store import Checkpoints


@pytest.fixture
def saved(place):
    checkpoints = Checkpoints(place)
    save(checkpoints, 10, 20)
    checkpoints.close()
    return place


def rows(place, **how):
    return [(row.name, row.step, row.state, row.reason) for row in tools.listing(open_files(place), **how)]


def test_every_state_is_listed_by_step(saved):
    files = open_files(saved)
    state = "verified" if saved.startswith("gs:") else "committed"
    assert rows(saved) == [("10", 10, state, None), ("20", 20, state, None)]
    assert rows(saved, verify=True) == [("10", 10, "verified", None), ("20", 20, "verified", None)]
    (first, _) = tools.listing(files)
    assert first.size_bytes == sum(entry.size for entry in files.tree("10").values()) > 1200
    assert abs(first.saved_unix_s - 1.8e9) < 2e8
    files.write("20/run.json", b"x")
    with pytest.warns(UserWarning, match="checkpoint 20 is damaged"):
        assert Checkpoints(saved).latest_verified() == 10
    files.write(f"{files.begin('30')}/state/x", b"half")
    reason = re.match(r"run.json: 1 bytes, \d+ were written", rows(saved)[1][3])
    assert reason
    assert [(step, found) for _, step, found, _ in rows(saved)] == [(10, state), (20, "damaged"), (30, "partial")]
    files.write("10/run.json", b"y")
    assert rows(saved)[0][2] == "damaged"  # a size is enough to see


@pytest.mark.parametrize("way", ["one", "directory", "workdir"])
def test_a_place_is_found_however_it_is_given(saved, way):
    path = {"one": f"{saved}/20/", "directory": saved, "workdir": saved.rsplit("/", 1)[0]}[way]
    files, name = tools.find(path)
    assert (files.root, name) == (saved, "20" if way == "one" else None)


def test_where_nothing_is_there_is_a_sentence(tmp_path):
    for path in (tmp_path, tmp_path / "7", tmp_path / "no"):
        with pytest.raises(CheckpointError, match=rf"{path} holds no checkpoints; give a directory of checkpoints"):
            tools.find(path)
    with pytest.raises(CheckpointError, match="s3://b/x is not a place"):
        tools.find("s3://b/x/7")


def test_CKPT_06_a_copy_between_stores_stays_verified(saved, tmp_path, gcs):
    told = []
    target = open_files(tmp_path / "there" if saved.startswith("gs:") else "gs://bkt/" + tmp_path.name + "/there")
    tools.copy(open_files(saved), "20", target, on_bytes=told.append)
    tree = open_files(saved).tree("20")
    read = [path for path in tree if path.rsplit("/", 1)[-1] not in (MANIFEST, MARKER, "_CHECKPOINT_METADATA")]
    assert sum(told) == sum(x.size for x in tree.values()) + sum(tree[path].size for path in read)  # copied, and read
    copied = Checkpoints(target.root)
    assert (copied.latest_verified(), value(copied, 20), copied.problem(20, deep=True)) == (20, 20.0, None)
    with pytest.raises(CheckpointError, match="is there already; delete it first"):
        tools.copy(open_files(saved), "20", target)
    open_files(saved).write("10/run.json", b"x")
    with pytest.raises(CheckpointError, match=r"10 is damaged \(run.json: .*\); it is not copied"):
        tools.copy(open_files(saved), "10", target)
    assert target.committed() == ["20"]


def test_a_copy_that_arrives_damaged_is_no_checkpoint(saved, tmp_path, monkeypatch):
    target = open_files(tmp_path / "there")
    whole = target.write_chunks
    monkeypatch.setattr(
        target, "write_chunks", lambda path, chunks: whole(path, (chunk[:-1] + b"!" for chunk in chunks))
    )
    with pytest.raises(CheckpointError, match="what arrived is not what was sent"):
        tools.copy(open_files(saved), "20", target)
    assert (target.committed(), target.partial()) == ([], [])


def test_the_newest_that_is_whole_is_not_deleted_by_mistake(saved):
    files = open_files(saved)
    with pytest.raises(CheckpointError, match=r"/20 is the newest checkpoint that is whole.* Delete it with --force"):
        tools.remove(files, "20")
    files.write("20/run.json", b"x")
    with pytest.raises(CheckpointError, match=r"/10 is the newest checkpoint that is whole"):
        tools.remove(files, "10")
    tools.remove(files, "20", force=True)
    assert files.committed() == ["10"]
    tools.remove(files, "10", force=True)
    assert files.tree("10") == {}


def test_exported_parameters_are_those_of_the_state_under_their_names(saved, tmp_path, monkeypatch):
    params = Checkpoints(saved, read_only=True).restore_params(20)
    assert {name: (x.dtype, x.shape) for name, x in params.items()} == {
        "w": (np.float32, (300,)), "b": (np.float32, ()),
    }  # fmt: skip
    (path,) = tools.export(params, tmp_path / "out", {"step": "20"})
    assert path.name == "model.safetensors"
    np.testing.assert_equal(safetensors.numpy.load_file(path), params)
    monkeypatch.setattr(tools, "SHARD_BYTES", 1000)
    shards = tools.export(params, tmp_path / "shards", {"step": "20"})
    assert [p.name for p in shards] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads(shards[-1].read_text())
    assert index["metadata"] == {"total_size": 1204}
    read = {
        name: safetensors.numpy.load_file(tmp_path / "shards" / file)[name]
        for name, file in index["weight_map"].items()
    }
    np.testing.assert_equal(read, params)


def test_parameters_and_views_alone_are_read_without_the_optimizers_bytes(saved, tmp_path, monkeypatch):
    checkpoints, program = Checkpoints(saved, read_only=True), small()
    state = checkpoints.restore(program, 20).state
    view = checkpoints.restore_view(program, 20)
    assert bits(view) == bits(program.view(state))
    params = checkpoints.restore_params(20, program.abstract_state.params)
    assert bits(params) == bits(state.params)
    with pytest.raises(CheckpointError, match=r"checkpoint .*/20 holds no ema"):
        checkpoints.restore_params(20, ema=True)
    assert checkpoints.run(20) == HOST
    if saved.startswith("gs:"):
        return
    local = shutil.copytree(saved, tmp_path / "grown")
    grown = Checkpoints(local)
    assert grown.save(30, at(30), run=HOST)
    grown.close()
    assert os.path.isdir(local / "30")
