"""Kills and damage in numbers, by name only: ``pytest -m soak tests/checkpoint/test_soak.py -n 0 -s``."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import time
import warnings

import gcs_server
import lives
import pytest
from test_store import at, bits, save, small

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.files import open_files
from jaxtrain.checkpoint.store import Checkpoints

KILLS = int(os.environ.get("SOAK_KILLS", "160"))  # of each kind of place
FLIPS = int(os.environ.get("SOAK_FLIPS", "600"))
STEPS = 100_000  # of which a killed run never sees the end


def events(log):
    return (
        [json.loads(line) for line in pathlib.Path(log).read_text().splitlines()] if pathlib.Path(log).exists() else []
    )


def begun(files):
    """Whether a save is on its way."""
    return any(name[0].isdigit() for name in files.partial())


class Lives:
    """Starts lives from a server process that has everything imported and no device touched."""

    def __init__(self, tmp_path, directory, environment):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lives"])
        self.directory, self.environment, self.log = directory, environment, tmp_path / "log"
        self.cache = str(tmp_path / "cache")

    def start(self, steps=STEPS):
        arguments = (self.directory, steps, str(self.log), self.environment, self.cache)
        process = self._context.Process(target=lives.live, args=arguments)
        process.start()
        return process


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_soak_kill(tmp_path, kind, record_property):
    """Right choices, nothing verified lost, every save of a step again succeeds, and the end of an unkilled run."""
    rng = random.Random(kind)
    with contextlib.ExitStack() as stack:
        environment = {}
        directory = str(tmp_path / "run")
        if kind == "bucket":
            if gcs_server.missing():
                pytest.skip(f"{gcs_server.missing()} is not installed")
            _, environment = stack.enter_context(gcs_server.serving())
            gcs_server.use(environment)
            directory = "gs://bkt/run"
        files, life = open_files(directory), Lives(tmp_path, directory, environment)
        middle = reached = 0
        for kill in range(KILLS):
            seen = len(events(life.log))
            process = life.start()
            wanted = rng.choice([0, 1, 1, 2, 3])
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.is_alive():
                if sum(event["event"] == "saved" for event in events(life.log)[seen:]) >= wanted:
                    break
                time.sleep(0.002)
            if rng.random() < 0.85:
                while time.monotonic() < deadline and process.is_alive() and not begun(files):
                    time.sleep(0.0005)
                time.sleep(rng.choice([0, 0, rng.uniform(0, 0.02)]))
            else:
                time.sleep(rng.uniform(0, 1.0))
            assert process.is_alive(), (kill, process.exitcode, events(life.log)[-3:])
            process.kill()
            process.join()
            middle += begun(files)
            told = events(life.log)[seen:]
            if told:
                assert told[0] == {"event": "chosen", "step": reached or None}, (kill, told, reached)
            reached = max([reached, *(event["step"] for event in told if event["event"] == "saved")])
            whole = [step for step in map(int, files.committed()) if manifest.problem(files, str(step)) is None]
            assert max(whole, default=0) >= reached, (kill, whole, reached)
            assert len(whole) == len(files.committed()), kill
            reached = max(whole, default=0)  # a save that was committed and not told
        process = life.start(reached + 5)
        process.join(120)
        assert process.exitcode == 0
        unkilled = Lives(tmp_path / "unkilled", str(tmp_path / "unkilled" / "run"), {})
        (tmp_path / "unkilled").mkdir()
        process = unkilled.start(reached + 5)
        process.join(1200)
        assert process.exitcode == 0
        assert events(life.log)[-1] == events(unkilled.log)[-1]
        print(f"\n{kind}: {KILLS} kills, {middle} in the middle of a save, {reached} steps reached, 0 wrong")
        assert middle > KILLS / 2


def fuzzed(directory, tmp_path, count):
    """``(found, harmless)`` of so many damages to a checkpoint, each looked at by a reader of its own."""
    rng, names = (
        random.Random(4),
        [p.relative_to(directory / "20") for p in (directory / "20").rglob("*") if p.is_file()],
    )
    program, wanted = small(), bits(small().checkpoint_view(Checkpoints(directory).restore(small(), 20).state))
    found = harmless = 0
    for number in range(count):
        copy = shutil.copytree(directory, tmp_path / "fuzzed")
        path = copy / "20" / rng.choice(names)
        content = bytearray(path.read_bytes())
        kind = rng.choice(["flip", "flip", "flip", "cut", "delete", "grow", "zero"])
        if kind == "delete" or not content:
            path.unlink()
        else:
            at_byte = rng.randrange(len(content))
            if kind == "flip":
                content[at_byte] ^= 1 << rng.randrange(8)
            elif kind == "cut":
                del content[at_byte:]
            elif kind == "grow":
                content[at_byte:at_byte] = rng.randbytes(rng.randint(1, 40))
            else:
                content[at_byte : at_byte + 64] = bytes(len(content[at_byte : at_byte + 64]))
            path.write_bytes(content)
        same = kind == "zero" and path.read_bytes() == (directory / "20" / path.relative_to(copy / "20")).read_bytes()
        checkpoints = Checkpoints(copy, read_only=True)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            newest = checkpoints.latest_verified()
        if newest == 20:
            assert same or path.name in ("_CHECKPOINT_METADATA", "commit_success.txt"), (number, kind, path)
            state = checkpoints.restore(program, 20).state
            assert bits(program.checkpoint_view(state)) == wanted, (number, kind, path)
            harmless += 1
        else:
            assert newest == 10, (number, kind, path)
            found += 1
        shutil.rmtree(copy)
    return found, harmless


@pytest.fixture
def two(tmp_path):
    checkpoints = Checkpoints(tmp_path / "two")
    save(checkpoints, 10, 20)
    checkpoints.close()
    assert at(10) is not None
    return tmp_path / "two"


def test_fuzz_a_little(two, tmp_path):
    found, harmless = fuzzed(two, tmp_path, 60)
    assert found > harmless > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fuzz_corrupt(two, tmp_path):
    found, harmless = fuzzed(two, tmp_path, FLIPS)
    print(
        f"\n{FLIPS} damages: {found} found, {harmless} harmless (files that nothing reads, values bit-equal), 0 missed"
    )
    assert found + harmless == FLIPS
