"""A plain function: parameters in, mean loss out. Linear regression with micro-batches."""

import jax
import jax.numpy as jnp
import optax

from jaxtrain.adapters import plain
from jaxtrain.sharding import make_mesh
from jaxtrain.step import MultiSteps, Precision, build_train_step


def init(key):
    return {"w": jax.random.normal(key, (8,)), "b": jnp.zeros(())}


def mean_square(params, batch, key):
    guess = batch["x"].astype(params["w"].dtype) @ params["w"] + params["b"]
    return jnp.mean((guess.astype(jnp.float32) - batch["y"]) ** 2)


program = build_train_step(
    *plain(mean_square, init),
    optax.adam(0.05),
    mesh=make_mesh(fsdp=-1),  # all devices
    accumulation=MultiSteps(2),
    precision=Precision("bfloat16"),
)
state = program.init()
for i in range(400):
    x = jax.random.normal(jax.random.key(i), (16, 8))
    state, metrics = program.step(state, {"x": x, "y": x.sum(axis=1) + 1.0})
print(int(metrics["step"]), float(metrics["loss"]))
