"""Plain functions and NNX modules as programs, against optax alone and NumPy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from test_step_cases import close

from jaxtrain import adapters, rng, sharding
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, MultiSteps, build_train_step

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"x": X, "y": X.sum(1)}


def program(pair, optimizer=None, k=1, precision="float32", devices=1):
    loss_fn, init_fn = pair
    return build_train_step(
        loss_fn, init_fn, optimizer or optax.sgd(0.1), mesh=sharding.make_mesh(data=devices),
        accumulation=MultiSteps(k), precision=Precision(precision),
    )  # fmt: skip


# ---- plain functions ---------------------------------------------------------------------------------------------


def mean_square(params, batch, key):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def zeros(key):
    return {"w": jnp.zeros(4), "b": jnp.zeros(())}


def test_plain_is_value_and_grad_and_optax():
    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(mean_square)(params, BATCH, None)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = opt.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params, opt = zeros(None), optax.adam(0.1)
    state, losses = opt.init(params), []
    for _ in range(5):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    ours = program(adapters.plain(mean_square, zeros), optax.adam(0.1), devices=8)
    state, seen = ours.init(), []
    for _ in range(5):
        state, metrics = ours.step(state, BATCH)
        seen.append(float(metrics["loss"]))
    np.testing.assert_allclose(seen, losses, rtol=1e-6)
    close(state.params["w"], params["w"], atol=2e-6)
    total, weight = ours.evaluate(ours.view(state), BATCH)["loss"]
    assert float(total / weight) == pytest.approx(float(mean_square(params, BATCH, None)), rel=1e-4)


def test_plain_weighs_by_rows():
    loss_fn, init_fn = adapters.plain(mean_square, zeros)
    loss = loss_fn(zeros(None), (), BATCH, None)
    close([loss.total, loss.weight], [np.sum(BATCH["y"] ** 2), 8], atol=1e-4)
    assert init_fn(rng.key(0, "params")).model_state == ()


def test_plain_passes_the_key_and_none_in_evaluation():
    keys = []
    ours = program(adapters.plain(lambda p, b, key: (keys.append(key), mean_square(p, b, key))[1], zeros))
    state, _ = ours.step(ours.init(), BATCH)
    ours.evaluate(ours.view(state), BATCH)
    assert jnp.issubdtype(keys[0].dtype, jax.dtypes.prng_key)
    assert keys[1] is None


def test_plain_refuses_a_loss_per_row():
    ours = program(adapters.plain(lambda p, b, key: (b["x"] @ p["w"]) ** 2, zeros))
    with pytest.raises(TypeError, match=r"plain: the loss has shape \(8,\)"):
        ours.step(ours.init(), BATCH)


# ---- NNX ---------------------------------------------------------------------------------------------------------


class Table(nnx.Variable):
    """A kind of state that no library knows."""


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 16, rngs=rngs, dtype=None) for _ in range(1)])
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5)
        self.out = nnx.Linear(16, 1, rngs=rngs)
        self.table = Table(jnp.arange(5))

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = self.norm(self.layers[0](x), use_running_average=key is None)
        return self.out(self.drop(x, rngs=key, deterministic=key is None))[:, 0]


def net_loss(module, batch, key):
    error = module(batch["x"], key).astype(jnp.float32) - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(batch["y"].shape[0]))


def test_nnx_paths_have_no_value():
    ours = program(adapters.from_nnx(Net, net_loss))
    assert ours.leaf_names == (
        "layers/0/bias", "layers/0/kernel", "norm/bias", "norm/scale", "out/bias", "out/kernel",
    )  # fmt: skip
    state = ours.init()
    assert type(state.params) is dict
    assert sorted(state.model_state) == ["norm", "table"]
    module = Net(nnx.Rngs(rng.key(0, "params")))
    np.testing.assert_array_equal(state.params["out"]["kernel"], module.out.kernel[...])


def test_nnx_statistics_move_once_a_micro_batch_and_by_the_batch_of_all_devices():
    ours = program(adapters.from_nnx(Net, net_loss), optax.sgd(0.0), devices=8)
    state = ours.init()
    hidden = X @ np.asarray(state.params["layers"][0]["kernel"]) + np.asarray(state.params["layers"][0]["bias"])
    for shrink in (0.5, 0.25):
        state, _ = ours.step(state, BATCH)
        close(state.model_state["norm"]["mean"], hidden.mean(0) * (1 - shrink), atol=1e-6)
        close(state.model_state["norm"]["var"], shrink + hidden.var(0) * (1 - shrink), atol=1e-6)
    assert state.model_state["table"].tolist() == [0, 1, 2, 3, 4]
    before = jax.device_get(state.model_state)
    ours.evaluate(ours.view(state), BATCH)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.model_state))


def test_RNG_02_nnx_resumes_bit_for_bit():
    ours = program(adapters.from_nnx(Net, net_loss), optax.adam(0.1), k=2)
    state, snapshot = ours.init(), None
    for i in range(6):
        state, _ = ours.step(state, BATCH)
        if i == 2:
            snapshot = jax.device_get(ours.checkpoint_view(state))
    again = ours.resume(snapshot)
    for _ in range(int(snapshot.counters.micro_step), 6):
        again, _ = ours.step(again, BATCH)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), jax.device_get(state))
    assert ours.traces["step"] == 1


def test_nnx_dropout_draws_by_key_and_not_in_evaluation():
    drawn = []

    def loss(module, batch, key):
        x = module.drop(jnp.ones((8, 4)), rngs=key, deterministic=key is None)
        drawn.append(key)
        return Loss(jnp.sum(module.out(x)[:, 0]), jnp.float32(8), metrics={"ones": (jnp.sum(x), jnp.float32(32))})

    def make(rngs):
        net = nnx.Module()
        net.drop, net.out = nnx.Dropout(0.5), nnx.Linear(4, 1, rngs=rngs)
        return net

    ours = program(adapters.from_nnx(make, loss), optax.sgd(0.0))
    state, sums = ours.init(), []
    for i in range(4):
        state, metrics = ours.step(state, BATCH)
        keep = jax.random.bernoulli(rng.key(0, "dropout", i), 0.5, (8, 4))
        assert float(metrics["ones"]) == float(keep.sum()) * 2 / 32
        sums.append(float(metrics["ones"]))
    assert len(set(sums)) > 1
    assert ours.evaluate(ours.view(state), BATCH)["ones"][0] == 32.0
    assert drawn[-1] is None


def test_nnx_stored_random_state_is_refused():
    def make(rngs):
        net = nnx.Module()
        net.drop, net.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        return net

    with pytest.raises(ValueError, match=r"stores random state \(drop/rngs.*rngs=key"):
        adapters.from_nnx(make, net_loss)


def test_nnx_computes_in_the_compute_dtype():
    seen = {}

    def loss(module, batch, key):
        seen.update(
            kernel=module.out.kernel[...].dtype, scale=module.norm.scale[...].dtype, mean=module.norm.mean[...].dtype
        )
        return net_loss(module, batch | {"x": batch["x"].astype(module.out.kernel[...].dtype)}, key)

    ours = program(adapters.from_nnx(Net, loss), precision="bfloat16")
    with jax.numpy_dtype_promotion("standard"):  # flax's BatchNorm mixes its own dtypes
        state, _ = ours.step(ours.init(), BATCH)
    assert seen == {"kernel": jnp.bfloat16, "scale": jnp.bfloat16, "mean": jnp.float32}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_nnx_wrong_return():
    ours = program(adapters.from_nnx(Net, lambda module, batch, key: jnp.float32(0)))
    with pytest.raises(TypeError, match=r"from_nnx: loss returned .*return jaxtrain\.step\.Loss"):
        ours.step(ours.init(), BATCH)


def test_nnx_module_round_trip():
    ours = program(adapters.from_nnx(Net, net_loss), optax.adam(0.1))
    state, _ = ours.step(ours.init(), BATCH)
    module = adapters.nnx_module(Net, state.params, state.model_state)
    total, weight = ours.evaluate(ours.view(state), BATCH)["loss"]
    error = np.asarray(module(jnp.asarray(X), None)) - BATCH["y"]
    assert float(total / weight) == pytest.approx(float(np.mean(error**2)), rel=1e-5)
    back = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.structure(back) == jax.tree.structure(state.params)
    jax.tree.map(np.testing.assert_array_equal, back, state.params)
    np.testing.assert_array_equal(module.table[...], np.arange(5))


def test_nnx_module_without_other_state():
    def make(rngs):
        return nnx.Linear(4, 1, rngs=rngs)

    ours = program(adapters.from_nnx(make, lambda m, b, key: Loss(jnp.sum(m(b["x"])), jnp.float32(8))))
    state, _ = ours.step(ours.init(), BATCH)
    for module in (adapters.nnx_module(make, state.params), adapters.nnx_module(make, state.params, state.model_state)):
        np.testing.assert_array_equal(module.kernel[...], state.params["kernel"])


# ---- Flax Linen --------------------------------------------------------------------------------------------------


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(3)(x))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1)(x)[:, 0]


def linen_loss(apply, batch, key):
    error = apply(batch["x"], train=key is not None) - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


@pytest.fixture
def linen_rules():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # flax's own layers need them
        yield


def test_linen_is_value_and_grad_and_optax(linen_rules):
    """Five steps of Linen by hand, with dropout drawn from the adapter's keys and the statistics carried along."""
    module, opt = LinenNet(), optax.sgd(0.05)  # adam would blow up the noise of a gradient that is zero
    ours = program(adapters.from_linen(module, linen_loss, X, train=False), opt)
    state = ours.init()
    params, batch_stats = jax.device_get((state.params, state.model_state["batch_stats"]))
    variables = module.init(rng.key(0, "params"), X, train=False)
    jax.tree.map(np.testing.assert_array_equal, params, variables["params"])
    moments, losses, seen = opt.init(params), [], []
    for i in range(5):
        key = jax.random.fold_in(jax.random.fold_in(rng.key(0, "dropout", i), 0), 0)

        def mean(params, batch_stats=batch_stats, key=key):
            out, moved = module.apply(
                {"params": params, "batch_stats": batch_stats}, X, train=True, rngs={"dropout": key},
                mutable=["batch_stats"],
            )  # fmt: skip
            return jnp.mean((out - BATCH["y"]) ** 2), moved["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, moments = opt.update(grads, moments)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        state, metrics = ours.step(state, BATCH)
        seen.append(float(metrics["loss"]))
    np.testing.assert_allclose(seen, losses, rtol=2e-5)
    for got, wanted in ((state.params, params), (state.model_state["batch_stats"], batch_stats)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)
    total, weight = ours.evaluate(ours.view(state), BATCH)["loss"]
    out = module.apply({"params": params, "batch_stats": batch_stats}, X, train=False)
    assert float(total / weight) == pytest.approx(float(np.mean((out - BATCH["y"]) ** 2)), rel=1e-4)


def test_linen_draws_anew_for_every_call(linen_rules):
    drawn = []

    class Noise(linen.Module):
        @linen.compact
        def __call__(self, x):
            scale = self.param("scale", linen.initializers.ones, ())
            return scale * jax.random.normal(self.make_rng("noise"), x.shape)

    def loss(apply, batch, key):
        drawn.extend(jnp.sum(apply(batch["x"])) for _ in range(2))
        return Loss(drawn[-1] - drawn[-2], jnp.float32(8))

    pair = adapters.from_linen(Noise(), loss, X, streams=("noise",))
    ours = program(pair)
    state, metrics = ours.step(ours.init(), BATCH)
    assert float(metrics["loss"]) != 0
    assert state.model_state == ()


def test_linen_wrong_return(linen_rules):
    ours = program(adapters.from_linen(LinenNet(), lambda apply, batch, key: jnp.float32(0), X, train=False))
    with pytest.raises(TypeError, match=r"from_linen: loss returned .*return jaxtrain\.step\.Loss"):
        ours.step(ours.init(), BATCH)


# ---- pytrees -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tree:
    """Arrays, a function, a number and an integer array, all leaves, as in an Equinox module."""

    layers: list
    activation: Callable
    power: int
    table: jax.Array

    def __call__(self, x):
        for w in self.layers:
            x = self.activation(x @ w)
        return x[:, 0] ** self.power


def make_tree(key):
    keys = jax.random.split(key)
    return Tree([jax.random.normal(keys[0], (4, 3)), jax.random.normal(keys[1], (3, 1))], jnp.tanh, 2, jnp.arange(5))


def tree_loss(tree, batch, key):
    assert (tree.power, tree.activation) == (2, jnp.tanh)
    error = tree(batch["x"]) - batch["y"]
    return Loss(jnp.sum(error**2), jnp.float32(error.size))


def test_pytree_is_value_and_grad_and_optax():
    ours = program(adapters.from_pytree(make_tree, tree_loss), optax.sgd(0.1))
    state = ours.init()
    assert sorted(state.params) == ["layers/0", "layers/1"]
    np.testing.assert_array_equal(state.model_state["table"], np.arange(5))
    tree = make_tree(rng.key(0, "params"))
    layers = tree.layers
    for _ in range(3):
        mean = lambda layers: jnp.mean((dataclasses.replace(tree, layers=layers)(X) - BATCH["y"]) ** 2)  # noqa: E731
        layers = jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(mean)(layers))
        state, _ = ours.step(state, BATCH)
    for i, w in enumerate(layers):
        np.testing.assert_allclose(state.params[f"layers/{i}"], w, atol=1e-6)
    model = adapters.pytree_model(make_tree, state.params, state.model_state)
    assert isinstance(model, Tree)
    np.testing.assert_allclose(model(X), dataclasses.replace(tree, layers=layers)(X), atol=1e-5)


def test_pytree_is_sharded_by_its_paths():
    pair = adapters.from_pytree(make_tree, tree_loss)
    with pytest.raises(ValueError, match=r"layers/0: dim 3 of \(4, 3\) is not divisible by mesh axis 'fsdp'=8"):
        build_train_step(*pair, optax.sgd(0.1), mesh=sharding.make_mesh(fsdp=8), rules=[("layers/0", P(None, "fsdp"))])


def test_pytree_wrong_return():
    ours = program(adapters.from_pytree(make_tree, lambda tree, batch, key: jnp.float32(0)))
    with pytest.raises(TypeError, match=r"from_pytree: loss returned"):
        ours.step(ours.init(), BATCH)
