"""What a process holds outside of the devices comes back exactly, through JSON, and differs between processes."""

import importlib.metadata
import json
import os
import platform
import random

import numpy as np
import pytest

from jaxtrain.checkpoint import host_state


@pytest.fixture(autouse=True)
def keep_generators():
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def draws() -> list[float]:
    """Of every kind; both ``gauss`` keep a second value for the next call."""
    return [
        random.random(), random.gauss(0, 1), random.getrandbits(70), random.choice(range(1000)),
        np.random.standard_normal(), np.random.randint(1 << 30), np.random.random(), *np.random.permutation(5).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("before", [0, 1, 2, 623, 624])
def test_RNG_04_generators_round_trip_through_json(before):
    host_state.seed_generators(5)
    for _ in range(before):
        random.random()
        np.random.random()
    random.gauss(0, 1)  # an odd number of normals: the other half of the pair is part of the state
    np.random.standard_normal()
    assert random.getstate()[2] is not None
    assert np.random.get_state()[3] == 1
    saved = json.loads(json.dumps(host_state.capture()))
    wanted = [draws() for _ in range(3)]
    host_state.seed_generators(99)
    random.gauss(0, 1)
    assert [draws() for _ in range(3)] != wanted
    for _ in range(2):  # applying does not use it up
        host_state.apply(saved)
        assert [draws() for _ in range(3)] == wanted


def test_capturing_and_applying_draw_nothing():
    host_state.seed_generators(5)
    wanted = draws()
    host_state.seed_generators(5)
    saved = host_state.capture()
    host_state.platform_fingerprint()
    host_state.apply(saved)
    assert host_state.capture() == saved
    assert draws() == wanted


def test_RNG_04_seeds_and_processes_differ_pairwise():
    streams = {}
    for seed in (0, 1, 2**32 - 1):
        for process in range(4):
            host_state.seed_generators(seed, process)
            streams[seed, process] = (random.random(), random.random()), tuple(np.random.random(2))
    for kind in (0, 1):
        assert len({stream[kind] for stream in streams.values()}) == len(streams) == 12
    host_state.seed_generators(1)  # process 0 by default, and the same every time
    assert ((random.random(), random.random()), tuple(np.random.random(2))) == streams[1, 0]


def test_python_and_numpy_do_not_share_a_stream():
    host_state.seed_generators(3)
    assert random.getstate()[1][:624] != tuple(np.random.get_state()[1].tolist())


def test_the_fingerprint_names_what_bit_for_bit_depends_on():
    found = host_state.platform_fingerprint()
    assert found["python"] == platform.python_version()
    assert found["cores"] == os.cpu_count()
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtrain"):
        assert found[name] == importlib.metadata.version(name)
    assert json.loads(json.dumps(found)) == found
