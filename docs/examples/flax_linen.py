"""A Flax Linen module with dropout and BatchNorm, whose statistics survive in the state; two classes of points."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxtrain.adapters import from_linen
from jaxtrain.losses import classification
from jaxtrain.sharding import make_mesh
from jaxtrain.step import MultiSteps, Precision, build_train_step


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


def loss(apply, batch, key):
    logits = apply(batch["x"], train=key is not None)  # no key: evaluation
    return classification(logits.astype(jnp.float32), batch["label"])


def points(i):
    x = jax.random.normal(jax.random.key(i), (32, 2))
    return {"x": x, "label": (x[:, 0] * x[:, 1] > 0).astype(jnp.int32)}


program = build_train_step(
    *from_linen(Net(), loss, points(0)["x"], train=False),
    optax.adam(0.01),
    mesh=make_mesh(data=-1),
    accumulation=MultiSteps(2),
    precision=Precision("float32"),
)
state = program.init()
for i in range(600):
    state, metrics = program.step(state, points(i))
right, rows = program.evaluate(program.view(state), points(10_000))["accuracy"]
print(int(metrics["step"]), float(right / rows))
