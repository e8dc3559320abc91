"""A Flax NNX module with dropout, an average of its parameters, and one part that stays frozen."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.adapters import from_nnx, nnx_module
from jaxtrain.sharding import make_mesh
from jaxtrain.step import Loss, Precision, Scan, build_train_step


class Net(nnx.Module):
    def __init__(self, rngs):
        self.features = nnx.Linear(4, 64, rngs=rngs)  # random features, never trained
        self.head = nnx.Linear(64, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.05)  # without rngs: keys come at call time

    def __call__(self, x, key=None):
        hidden = nnx.relu(self.features(x))
        hidden = self.dropout(hidden, deterministic=key is None, rngs=key)
        return self.head(hidden)[:, 0]


def loss(model, batch, key):
    error = model(batch["x"], key).astype(jnp.float32) - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


def window(i, k=4):
    x = jax.random.normal(jax.random.key(i), (k, 16, 4))
    return {"x": x, "y": jnp.abs(x).sum(axis=-1)}


program = build_train_step(
    *from_nnx(Net, loss),
    optax.adam(0.01),
    mesh=make_mesh(fsdp=-1),
    accumulation=Scan(4),  # a window of four micro-batches in one call
    precision=Precision("float32"),
    trainable="^head/",
    ema=0.99,
)
state = program.init()
for i in range(400):
    state, metrics = program.step(state, window(i))
model = nnx_module(Net, program.view(state, ema=True).params)
batch = jax.tree.map(lambda x: x[0], window(10_000))
print(int(metrics["step"]), float(jnp.mean((model(batch["x"]) - batch["y"]) ** 2)))
