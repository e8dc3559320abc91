"""Jobs of two and four processes: one directory, one choice, each process's own state, and a process that dies."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from jaxtrain.checkpoint.store import Checkpoints

SCRIPT = pathlib.Path(__file__).with_name("process.py")
pytestmark = pytest.mark.xdist_group("processes")


def job(count, directory, what="train", timeout_s=60, directories=None, **environment):
    """``[(exit code, what it said or None, stderr)]`` of every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    places = directories or [directory] * count
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), coordinator, str(count), str(index), str(places[index]), what],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env | environment,
        )
        for index in range(count)
    ]  # fmt: skip
    results, deadline = [], time.monotonic() + timeout_s
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            said = next((json.loads(line) for line in out.splitlines() if line.startswith("{")), None)
            results.append((process.returncode, said, err))
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
    return results


def finished(results):
    for code, _, err in results:
        assert code == 0, err[-3000:]
    return [said for _, said, _ in results]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A job of one process that nobody disturbed."""
    (said,) = finished(job(1, tmp_path_factory.mktemp("alone") / "c"))
    return said


@pytest.mark.parametrize("count", [2, 4])
def test_processes_save_one_checkpoint_and_go_on_from_it(tmp_path, count, alone):
    directory = tmp_path / "c"
    first = finished(job(count, directory))
    assert {tuple(said["steps"]) for said in first} == {(6, 8, 10)}
    assert {tuple(said["problems"]) for said in first} == {(None, None, None)}
    assert len({said["w"] for said in first}) == 1
    assert first[0]["mean"] == pytest.approx(alone["mean"], abs=1e-5)
    files = {path.relative_to(directory / "8").as_posix() for path in (directory / "8").rglob("*")}
    assert {f"host_state/process_{index}.json" for index in range(count)} <= files
    assert {f"state/ocdbt.process_{index}" for index in range(count)} <= files
    assert not any("HASHES" in name for name in files)
    # RNG-04: the host streams of each process go on, and differ pairwise
    for step in ("10", "8"):
        (directory / step).rename(directory / f"{step}.mine")
    again = finished(job(count, directory))
    assert {said["newest"] for said in again} == {6}
    assert len({said["drawn"] for said in again}) == count
    assert {said["w"] for said in again} == {first[0]["w"]}  # bit for bit
    assert [said["host"] is not None for said in again] == [True] * count


def test_CKPT_13_RNG_04_another_number_of_processes_gets_the_same_bits_and_new_streams(tmp_path):
    directory = tmp_path / "c"
    finished(job(2, directory))
    two = Checkpoints(directory, read_only=True).restore_params(10)
    for count in (1, 4):
        said = finished(job(count, directory))
        assert {(each["newest"], each["processes"]) for each in said} == {(10, count)}
        assert [each["host"] for each in said] == [None] * count
        assert len({each["drawn"] for each in said}) == count
        assert len({each["w"] for each in said}) == 1
    import google_crc32c

    assert said[0]["w"] == google_crc32c.value(two["w"].tobytes())


@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0), (4, 2)])
def test_a_process_that_dies_in_the_middle_of_a_save_ends_the_others_and_the_restart_resumes(
    tmp_path, count, victim, alone
):
    directory = tmp_path / "c"
    began = time.monotonic()
    results = job(count, directory, "die", VICTIM=str(victim))
    assert time.monotonic() - began < 120
    assert results[victim][0] == -9
    for index, (code, _, err) in enumerate(results):
        if index != victim:
            assert code != 0
            assert err.strip()
    assert 6 not in Checkpoints(directory, read_only=True).steps()
    again = finished(job(count, directory))
    assert {said["newest"] for said in again} == {4}
    assert {tuple(said["steps"]) for said in again} == {(6, 8, 10)}
    assert {tuple(said["problems"]) for said in again} == {(None, None, None)}
    assert again[0]["mean"] == pytest.approx(alone["mean"], abs=1e-5)


def test_a_process_whose_disk_is_gone_is_told_by_all_in_bounded_time(tmp_path):
    results = job(2, tmp_path / "c", "fail", VICTIM="1", TIMEOUT_S="5")
    assert "saving checkpoint 2 to" in results[1][2]
    assert "disk gone" in results[1][2]
    assert all(code != 0 for code, _, _ in results)
    assert Checkpoints(tmp_path / "c", read_only=True).latest_verified() is None


def test_LOC_directories_that_are_not_shared_are_found_out_before_the_first_step(tmp_path):
    results = job(2, None, directories=[tmp_path / "a", tmp_path / "b"])
    for code, _, err in results:
        assert code != 0
        assert "is not shared: process 1 of 2 does not see what process 0 writes there" in err
    assert not list(tmp_path.rglob("*.orbax-checkpoint-tmp"))
