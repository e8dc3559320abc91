"""The state of a process outside of the devices: generators and versions, as JSON that round-trips exactly."""

import importlib.metadata
import os
import platform
import random
from typing import Any

import numpy as np

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "jaxtrain")


def capture() -> dict[str, Any]:
    """Python's and NumPy's global generators, now."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    inner = {name: np.asarray(value).tolist() for name, value in numpy_state["state"].items()}
    return {"python": [version, list(internal), gauss], "numpy": numpy_state | {"state": inner}}


def apply(saved: dict[str, Any]) -> None:
    """Put the generators back as ``capture`` found them."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    state = dict(saved["numpy"])
    state["state"] = state["state"] | {"key": np.asarray(state["state"]["key"], np.uint32)}
    np.random.set_state(state)


def seed_generators(seed: int, process_index: int = 0, step: int = 0) -> None:
    """Seed both global generators: another stream for each process, and for each step where new ones begin.

    A run that goes on with another number of processes begins new streams; no two of them are equal.
    """
    words = np.random.SeedSequence([seed, process_index, step] if step else [seed, process_index]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))


def platform_fingerprint() -> dict[str, Any]:
    """What "bit for bit" depends on beside the checkpoint: versions and the number of cores."""
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
