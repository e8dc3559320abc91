"""The multilayer perceptron against float64 NumPy, and counts worked out by hand."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain import paths
from jaxtrain.losses import classification
from jaxtrain.models.dense import Dense, dropout
from jaxtrain.models.mlp import MLP, MLPConfig, flops_per_sample

SMALL = MLPConfig(inputs=6, width=5, layers=2, classes=3)


def made(config=SMALL, dtype=jnp.float32, seed=0):
    """A model with biases that are not 0."""
    model = MLP(config, rngs=nnx.Rngs(seed))
    generator = np.random.default_rng(seed)
    for layer in (*model.hidden, model.head):
        layer.bias.set_value(jnp.asarray(generator.standard_normal(layer.bias.shape), dtype))
        layer.kernel.set_value(layer.kernel[...].astype(dtype))
    return model


def params_of(model):
    return {name: np.asarray(leaf, np.float64) for name, leaf in paths.named_leaves(pure(model)).items()}


def pure(model):
    return nnx.to_pure_dict(nnx.state(model))


def samples(rows=4, shape=(6,), seed=1):
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype(np.float32)


def reference(p, x, factors=None):
    """Logits in float64; ``factors`` multiply the outputs of hidden layer i."""
    x = x.reshape(len(x), -1).astype(np.float64)
    layer = 0
    while f"hidden/{layer}/kernel" in p:
        x = x @ p[f"hidden/{layer}/kernel"] + p[f"hidden/{layer}/bias"]
        x = np.where(x > 0, x, 0) * (1 if factors is None else factors[layer])
        layer += 1
    return x @ p["head/kernel"] + p["head/bias"]


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_logits_match_float64_numpy(layers):
    model = made(dataclasses.replace(SMALL, layers=layers))
    logits = model(samples())
    assert (logits.shape, logits.dtype) == ((4, 3), jnp.float32)
    np.testing.assert_allclose(logits, reference(params_of(model), samples()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_samples_of_any_shape(shape):
    x = samples()
    np.testing.assert_array_equal(made()(x.reshape(4, *shape)), made()(x))


@pytest.mark.parametrize("layers", [0, 2])
def test_bfloat16_parameters_give_float32_logits(layers):
    model = made(dataclasses.replace(SMALL, layers=layers), jnp.bfloat16)
    x = np.asarray(jnp.asarray(samples(), jnp.bfloat16), np.float32)
    logits = model(x)
    assert logits.dtype == jnp.float32
    wanted = reference(params_of(model), x)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 if layers == 0 else 0.05)  # no activation to round
    if layers:
        assert np.abs(logits - wanted).max() > 1e-4
        for layer in model.hidden:
            assert layer(jnp.ones((1, layer.kernel.shape[0]), jnp.bfloat16)).dtype == jnp.bfloat16


# ---- parameters --------------------------------------------------------------------------------------------------


def test_parameters_by_name_and_shape():
    params = pure(MLP(SMALL, rngs=nnx.Rngs(0)))
    assert {name: leaf.shape for name, leaf in paths.named_leaves(params).items()} == {
        "hidden/0/kernel": (6, 5), "hidden/0/bias": (5,), "hidden/1/kernel": (5, 5), "hidden/1/bias": (5,),
        "head/kernel": (5, 3), "head/bias": (3,),
    }  # fmt: skip
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_without_hidden_layers_it_is_softmax_regression():
    config = MLPConfig(inputs=6, width=5, layers=0, classes=3)
    assert config.sizes == (6, 3)
    params = pure(MLP(config, rngs=nnx.Rngs(0)))
    assert {name: leaf.shape for name, leaf in paths.named_leaves(params).items()} == {
        "head/kernel": (6, 3), "head/bias": (3,),
    }  # fmt: skip


def test_initial_values():
    """std sqrt(2 / inputs) before a ReLU, sqrt(1 / inputs) before the logits."""
    model = MLP(MLPConfig(inputs=128, width=72, layers=2, classes=50), rngs=nnx.Rngs(0))
    wanted = [(model.hidden[0], 0.125), (model.hidden[1], 1 / 6), (model.head, 72**-0.5)]
    for layer, std in wanted:
        assert float(jnp.std(layer.kernel[...])) == pytest.approx(std, rel=0.05)
        assert not np.any(layer.bias[...])
    again, other = (MLP(SMALL, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    first = MLP(SMALL, rngs=nnx.Rngs(0))
    assert np.array_equal(first.head.kernel[...], again.head.kernel[...])
    assert not np.array_equal(first.head.kernel[...], other.head.kernel[...])


def test_every_parameter_has_a_gradient():
    graph, params = nnx.split(made())

    def loss(params):
        return classification(nnx.merge(graph, params)(samples()), np.array([0, 1, 2, 0])).total

    found = paths.named_leaves(nnx.to_pure_dict(jax.grad(loss)(params)))
    assert len(found) == 6
    assert not [name for name, leaf in found.items() if np.abs(leaf).max() < 1e-4]


# ---- dropout -----------------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_the_key():
    model, x = made(dataclasses.replace(SMALL, width=40, dropout=0.5)), samples()
    one, again, other = (model(x, key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_without_a_key_there_is_no_dropout():
    model, x = made(dataclasses.replace(SMALL, dropout=0.5)), samples()
    np.testing.assert_allclose(model(x), reference(params_of(model), x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [0, 2])
def test_without_a_rate_a_key_changes_nothing(layers):
    """And where there is no hidden layer there is nothing to zero."""
    model = made(dataclasses.replace(SMALL, layers=layers, dropout=0.0 if layers else 0.5))
    assert np.array_equal(model(samples(), key=jax.random.key(0)), model(samples()))


def test_dropout_zeroes_hidden_outputs_and_scales_the_others():
    """Layer i keeps what ``bernoulli(fold_in(key, i), 1 - rate)`` says, four times as large with a rate of 3/4."""
    config = dataclasses.replace(SMALL, width=20, dropout=0.75)
    model, x, key = made(config), samples(), jax.random.key(7)
    kept = [np.asarray(jax.random.bernoulli(jax.random.fold_in(key, i), 0.25, (4, 20))) for i in range(2)]
    assert 0 < kept[0].sum() < 80
    assert not np.array_equal(*kept)
    wanted = reference(params_of(model), x, [4.0 * mask for mask in kept])
    np.testing.assert_allclose(model(x, key=key), wanted, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_mean_and_the_dtype():
    x = jnp.ones((200, 200), jnp.bfloat16)
    out = dropout(x, 0.2, jax.random.key(0))
    assert out.dtype == jnp.bfloat16
    assert set(np.unique(np.asarray(out, np.float32))) == {0.0, 1.25}
    assert float(jnp.mean(out.astype(jnp.float32))) == pytest.approx(1.0, abs=0.01)  # its deviation is 0.0025
    assert dropout(x, 0.2, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


# ---- the product -------------------------------------------------------------------------------------------------


def test_a_product_sums_in_the_dtype_it_returns():
    """2^-9 survives in float32, not in a bfloat16 beside 1."""
    dense = Dense(2, 1, 1.0, rngs=nnx.Rngs(0))
    dense.kernel.set_value(jnp.array([[1.0], [2.0**-9]], jnp.bfloat16))
    x = jnp.ones((1, 2), jnp.bfloat16)
    wide, narrow = dense(x, jnp.float32), dense(x)
    assert (wide.dtype, float(wide[0, 0])) == (jnp.float32, 1 + 2.0**-9)
    assert (narrow.dtype, float(narrow[0, 0])) == (jnp.bfloat16, 1.0)
    dense.bias.set_value(jnp.array([0.5]))  # a float32 bias beside a bfloat16 product
    assert (dense(x).dtype, float(dense(x)[0, 0])) == (jnp.bfloat16, 1.5)


# ---- floating-point operations and errors --------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "products"), [(0, 6 * 3), (1, 30 + 15), (2, 30 + 25 + 15), (4, 30 + 75 + 15)])
def test_flops_by_hand(layers, products):
    assert flops_per_sample(dataclasses.replace(SMALL, layers=layers)) == 6 * products


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"inputs": 0}, "inputs=0 must be at least 1"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"layers": -1}, "layers=-1 must be at least 0"),
        ({"classes": 1}, "classes=1 must be at least 2"),
        ({"dropout": 1.0}, "dropout=1.0 must be a probability in [0, 1); 0 turns it off"),
        ({"dropout": -0.1}, "dropout=-0.1 must be a probability in [0, 1); 0 turns it off"),
    ],
)
def test_a_config_out_of_range_is_refused(settings, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        dataclasses.replace(SMALL, **settings)


@pytest.mark.parametrize(("shape", "count"), [((5,), 5), ((2, 4), 8), ((), 1)])
def test_samples_of_another_size_are_refused(shape, count):
    text = f"samples of shape {shape} hold {count} numbers, not inputs=6"
    with pytest.raises(ValueError, match=re.escape(text)):
        MLP(SMALL, rngs=nnx.Rngs(0))(samples(shape=shape))
