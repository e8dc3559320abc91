"""Checkpoints in a bucket: the server program of the tests behind a proxy that throttles, resets, cuts and refuses."""

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
import time
import uuid

import gcs_server
import numpy as np
import pytest
from test_store import HOST, at, entries, save, small, value

from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.checkpoint.files import open_files
from jaxtrain.checkpoint.retention import Keep
from jaxtrain.checkpoint.store import Checkpoints


@pytest.fixture
def bucket(gcs):
    """An empty prefix, without faults when the test ends."""
    yield f"gs://{gcs_server.BUCKET}/{uuid.uuid4().hex}/checkpoints"
    gcs.fault = lambda method, path: None


def store():
    import fsspec

    return fsspec.filesystem("gs", use_listings_cache=False)


def objects(root):
    """``{path relative to root: content}``."""
    bare = root.removeprefix("gs://")
    return {path.removeprefix(bare + "/"): store().cat_file(path) for path in store().find(bare)}


def put(root, path, content):
    store().pipe_file(f"{root.removeprefix('gs://')}/{path}", content)


def drop(root, path):
    store().rm_file(f"{root.removeprefix('gs://')}/{path}")


def upload(source: pathlib.Path, root, *names):
    for name in names:
        for path in sorted((source / name).rglob("*")):
            if path.is_file() and path.name != "commit_success.txt":
                put(root, path.relative_to(source).as_posix(), path.read_bytes())


def test_saved_listed_verified_and_restored(bucket):
    checkpoints = Checkpoints(bucket)
    assert (checkpoints.steps(), checkpoints.latest_verified()) == ([], None)
    save(checkpoints, 5, 10)
    checkpoints.close()
    again = Checkpoints(bucket)
    assert (again.steps(), again.latest_verified(), again.run(10)) == ([5, 10], 10, HOST)
    assert [value(again, step) for step in (5, 10)] == [5.0, 10.0]
    assert [again.problem(step, deep=deep) for step in (5, 10) for deep in (False, True)] == [None] * 4
    assert again.save(10, at(99), run={}) is False
    assert not pathlib.Path("gs:").exists()


def test_CKPT_07_the_marker_is_the_last_object_and_the_manifest_the_last_but_orbaxs_own(bucket, gcs):
    checkpoints = Checkpoints(bucket)
    save(checkpoints, 1)  # probes and looks around once
    gcs.seen.clear()
    checkpoints.save(6, at(6), run={})
    checkpoints.wait()
    written = [path for method, path in gcs.seen if method in ("POST", "PUT") and "upload" in path]
    names = [re.sub(r".*checkpoints(%2F|/)", "", path.split("name=")[-1].split("&")[0]) for path in written]
    names = [name.replace("%2F", "/") for name in names if name]
    last = [name for name in objects(bucket) if name.startswith("6/")]
    info = store().info(f"{bucket.removeprefix('gs://')}/6/commit_success.txt")
    others = [store().info(f"{bucket.removeprefix('gs://')}/{name}") for name in last if "commit_success" not in name]
    assert all(other["updated"] <= info["updated"] for other in others)
    manifest = store().info(f"{bucket.removeprefix('gs://')}/6/MANIFEST.json")
    assert all(x["updated"] <= manifest["updated"] for x in others if not x["name"].endswith("_CHECKPOINT_METADATA"))
    assert names


DAMAGE = {
    "flip": lambda content: bytes([*content[:-1], content[-1] ^ 4]),
    "cut": lambda content: content[:-1],
    "delete": lambda content: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_CKPT_04_damage_to_any_object_is_found_by_one_listing_and_set_aside(bucket, damage):
    checkpoints = Checkpoints(bucket)
    save(checkpoints, 10, 20)
    whole = {path: content for path, content in objects(bucket).items() if path.startswith("20/")}
    guarded = [path for path in whole if path.rsplit("/")[-1] not in ("_CHECKPOINT_METADATA", "commit_success.txt")]
    assert len(guarded) >= 10
    for path in [*random.Random(1).sample(guarded, 6), "20/MANIFEST.json", "20/run.json"]:
        for other, content in whole.items():
            put(bucket, other, content)
        for left in [other for other in objects(bucket) if "DAMAGED" in other]:
            drop(bucket, left)
        changed = DAMAGE[damage](whole[path])
        put(bucket, path, changed) if changed is not None else drop(bucket, path)
        name = re.escape(path.removeprefix("20/"))
        with pytest.warns(UserWarning, match=rf"checkpoint 20 is damaged \({name}: .*\); set aside as {bucket}/20\."):
            assert checkpoints.latest_verified() == 10
        assert checkpoints.steps() == [10]
        left = objects(bucket)
        assert {other for other in whole if other in left} >= set(whole) - {
            path,
            "20/MANIFEST.json",
            "20/commit_success.txt",
        }
        assert left["20/DAMAGED"].decode().startswith(path.removeprefix("20/"))
        assert checkpoints.files.partial() == []  # exempt from cleaning up
    save(checkpoints, 20)  # the name is free again, and the damaged data lie beside
    assert value(checkpoints, 20) == 20.0
    assert any(other.startswith("20.damaged/state/") for other in objects(bucket))
    assert checkpoints.latest_verified() == 20


def test_content_that_the_store_lost_itself_is_found_by_reading(bucket, monkeypatch):
    """The listing's checksums are the store's word; ``deep`` does not take it."""
    checkpoints = Checkpoints(bucket)
    save(checkpoints, 10)
    honest = checkpoints.files.tree("10")
    path = next(path for path in honest if path.startswith("state/ocdbt.process_0/d/"))
    put(bucket, f"10/{path}", DAMAGE["flip"](objects(bucket)[f"10/{path}"]))
    monkeypatch.setattr(checkpoints.files, "tree", lambda name: honest)
    assert checkpoints.problem(10) is None
    assert checkpoints.problem(10, deep=True).startswith(f"{path}: checksum ")


def test_CKPT_06_copies_are_valid_on_either_side(bucket, tmp_path):
    local = Checkpoints(tmp_path / "a")
    save(local, 7, 8)
    upload(tmp_path / "a", bucket, "7")  # without the marker that a bucket would have
    assert "7/commit_success.txt" not in objects(bucket)
    copied = Checkpoints(bucket)
    assert (copied.latest_verified(), value(copied, 7)) == (7, 7.0)
    save(copied, 9)
    for path, content in objects(bucket).items():
        target = tmp_path / "b" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    back = Checkpoints(tmp_path / "b")
    assert (back.steps(), back.latest_verified(), value(back, 7), value(back, 9)) == ([7, 9], 9, 7.0, 9.0)
    shutil.rmtree(tmp_path / "b" / "9" / "host_state")
    with pytest.warns(UserWarning, match=r"checkpoint 9 is damaged \(host_state/process_0.json: missing\)"):
        assert back.latest_verified() == 7


def test_CKPT_06_a_copy_with_one_object_missing_is_set_aside_and_nothing_is_deleted(bucket, tmp_path):
    local = Checkpoints(tmp_path / "a")
    save(local, 7)
    (tmp_path / "a" / "7" / "run.json").unlink()
    upload(tmp_path / "a", bucket, "7")
    before = objects(bucket)
    with pytest.warns(UserWarning, match=r"checkpoint 7 is damaged \(run.json: missing\)"):
        assert Checkpoints(bucket).latest_verified() is None
    assert set(before) - {"7/MANIFEST.json"} == set(objects(bucket)) - {"7/DAMAGED", "7/DAMAGED.MANIFEST.json"}


def test_foreign_objects_are_left_alone_and_refused_as_a_name(bucket):
    put(bucket, "2024/notes.txt", b"mine")
    put(bucket, "readme", b"mine")
    put(bucket, "12.old/state/x", b"mine")
    checkpoints = Checkpoints(bucket, keep=Keep(1), max_failures=1)
    save(checkpoints, 1, 2)
    assert checkpoints.steps() == [2]
    with pytest.raises(CheckpointError, match=r"/2024 is in the way of a checkpoint and was not made by one"):
        checkpoints.save(2024, at(3), run={})
    assert {"2024/notes.txt", "readme", "12.old/state/x"} <= set(objects(bucket))


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleared_away(bucket):
    checkpoints = Checkpoints(bucket)
    save(checkpoints, 10, 20)
    for path in ("20/MANIFEST.json", "20/commit_success.txt"):
        drop(bucket, path)
    put(bucket, "30/_CHECKPOINT_METADATA", b"{}")
    again = Checkpoints(bucket)
    assert (again.steps(), again.latest_verified()) == ([10], 10)
    assert sorted(again.files.partial()) == ["20", "30"]
    save(again, 20)
    assert (again.steps(), again.files.partial()) == ([10, 20], [])
    assert not any(path.startswith("30/") for path in objects(bucket))


def test_CKPT_08_a_deletion_that_is_cut_short_lists_nothing_without_data(bucket, gcs):
    checkpoints = Checkpoints(bucket, keep=Keep(1))
    save(checkpoints, 1)
    deletions = []

    def fault(method, path):
        if method == "DELETE" and "%2F1%2F" in path:
            deletions.append(path)
            return 403 if len(deletions) > 5 else None
        return None

    gcs.fault = fault
    save(checkpoints, 2)
    gcs.fault = lambda method, path: None
    assert any(path.startswith("1/state/") for path in objects(bucket))
    assert "could not be deleted" in checkpoints.poll()[0]
    again = Checkpoints(bucket, keep=Keep(1))
    assert (again.steps(), again.latest_verified(), again.files.partial()) == ([2], 2, ["1"])
    save(again, 3)
    assert not any(path.startswith(("1/", "2/")) for path in objects(bucket))


# ---- a bad network -----------------------------------------------------------------------------------------------


def once_each(faults):
    """Every n-th request misbehaves once."""
    count = [0]

    def fault(method, path):
        count[0] += 1
        return faults.get(count[0] % 7) if count[0] < 60 else None

    return fault


@pytest.mark.parametrize("faults", [{3: 429, 5: "reset"}, {2: "slow", 5: 503}], ids=str)
def test_CKPT_07_what_passes_is_tried_again(bucket, gcs, faults):
    checkpoints = Checkpoints(bucket, timeout_s=60)
    save(checkpoints, 4)
    gcs.fault = once_each(faults)
    checkpoints.save(5, at(5), run=HOST)
    checkpoints.wait()
    gcs.fault = lambda method, path: None
    assert checkpoints.poll() == []
    assert Checkpoints(bucket).latest_verified() == 5
    gcs.fault = once_each(faults)
    assert value(Checkpoints(bucket), 5) == 5.0


def test_CKPT_07_a_refusal_is_told_at_once_with_path_and_cause(bucket, gcs):
    gcs.fault = lambda method, path: 403 if method in ("POST", "PUT") else None
    checkpoints, began = Checkpoints(bucket), time.monotonic()
    with pytest.raises(CheckpointError, match=rf"checkpoints: {bucket} cannot be written: "):
        checkpoints.probe()
    assert time.monotonic() - began < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # coroutines that Orbax leaves behind
def test_CKPT_07_a_store_that_goes_away_costs_the_save_and_nothing_else(bucket, gcs):
    checkpoints = Checkpoints(bucket, timeout_s=5)
    save(checkpoints, 5)
    gcs.fault = lambda method, path: 403 if method in ("POST", "PUT") else None
    checkpoints.save(6, at(6), run={})
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"saving checkpoint 6 to {bucket} "):
        checkpoints.wait()
    assert time.monotonic() - began < 40
    gcs.fault = lambda method, path: None
    again = Checkpoints(bucket)
    assert (again.steps(), again.latest_verified()) == ([5], 5)
    save(again, 6)
    assert value(again, 6) == 6.0


KILLED = """
    import os, sys
    sys.path[:0] = {paths!r}
    import jax
    import test_store
    from jaxtrain.checkpoint import manifest
    from jaxtrain.checkpoint.store import Checkpoints

    checkpoints = Checkpoints(sys.argv[1])
    test_store.save(checkpoints, 5)
    if sys.argv[2] == "manifest":
        original = manifest.write
        manifest.write = lambda *a: (original(*a), os.kill(os.getpid(), 9))
    checkpoints.save(6, test_store.at(6), run={{}})
    if sys.argv[2] == "begin":
        os.kill(os.getpid(), 9)
    checkpoints.wait()
"""


@pytest.mark.parametrize("moment", ["begin", "manifest"])
def test_CKPT_03_killed_in_the_middle_of_a_save(bucket, moment):
    """With the manifest written every object is there: such a checkpoint is whole, marker or not."""
    here = pathlib.Path(__file__).parent
    code = textwrap.dedent(KILLED).format(paths=[str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code, bucket, moment], timeout=120, check=False, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    checkpoints = Checkpoints(bucket)
    newest = 6 if moment == "manifest" else 5
    assert checkpoints.latest_verified() == newest
    assert value(checkpoints, newest) == float(newest)
    save(checkpoints, 7)
    assert checkpoints.latest_verified() == 7
    assert checkpoints.files.partial() == []


def test_two_kinds_of_places_look_alike(bucket, tmp_path):
    """The same saves leave the same files, but for what each kind of store needs to commit."""
    for root in (bucket, tmp_path / "c"):
        checkpoints = Checkpoints(root)
        save(checkpoints, 3)
    local, there = (set(open_files(root).tree("3")) for root in (tmp_path / "c", bucket))
    shape = lambda paths: {re.sub(r"/d/[0-9a-f]+$", "/d/*", path) for path in paths}  # noqa: E731
    assert shape(there) == shape(local)
    assert entries(tmp_path / "c") == {"3"}
    assert json.loads((tmp_path / "c" / "3" / "run.json").read_text())["run"] == HOST
    assert os.sep == "/"
    restored = Checkpoints(bucket).restore_params(3)
    np.testing.assert_array_equal(restored["w"], np.full(300, 3, np.float32))
    assert small().abstract_state.params["w"].shape == restored["w"].shape
