"""A model that is a pytree with functions in it, as an Equinox module is; float16 with a dynamic loss scale."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxtrain.adapters import from_pytree, pytree_model
from jaxtrain.losses import classification
from jaxtrain.precision import LossScale
from jaxtrain.sharding import make_mesh
from jaxtrain.step import Precision, build_train_step


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight + self.bias


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MLP:
    layers: list[Layer]
    activation: Callable

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def make(key):
    sizes = [(2, 32), (32, 32), (32, 2)]
    keys = jax.random.split(key, len(sizes))
    layers = [Layer(jax.random.normal(k, s) / s[0] ** 0.5, jnp.zeros(s[1])) for k, s in zip(keys, sizes, strict=True)]
    return MLP(layers, jax.nn.gelu)


def loss(model, batch, key):
    return classification(model(batch["x"].astype(model.layers[0].weight.dtype)), batch["label"])


program = build_train_step(
    *from_pytree(make, loss), optax.adam(0.01), mesh=make_mesh(fsdp=-1), precision=Precision("float16", (), LossScale())
)  # fmt: skip
state = program.init()
for i in range(400):
    x = jax.random.normal(jax.random.key(i), (64, 2))
    batch = {"x": x, "label": (x[:, 0] * x[:, 1] > 0).astype(jnp.int32)}
    state, metrics = program.step(state, batch)
model = pytree_model(make, state.params)
print(int(metrics["step"]), float(jnp.mean(jnp.argmax(model(batch["x"]), 1) == batch["label"])))
