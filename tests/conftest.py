"""Eight virtual CPU devices and strict JAX for every test; nothing here touches a device at import."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

import signal

import jax
import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit SIG_IGN
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def make_mesh():
    """``make_mesh(data=2, fsdp=4)`` -> Mesh over ``slice, data, fsdp, tensor`` of that many of the 8 CPU devices."""
    from jaxtrain import sharding

    def make(**axes: int) -> jax.sharding.Mesh:
        sizes = {"slice": 1, "data": 1, "fsdp": 1, "tensor": 1} | axes
        return sharding.make_mesh(**sizes, devices=jax.devices())

    return make
