"""Optimizers and the update of a window against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import optim
from jaxtrain.optim import MultiSteps, Skip, window_update

PARAMS = {"mlp": {"kernel": [1.0, -2.0], "bias": [0.5]}, "norm": {"scale": [1.0]}, "scale_net": {"kernel": [3.0]}}


def arrays(tree, dtype=np.float32):
    return jax.tree.map(lambda x: np.asarray(x, dtype), tree, is_leaf=lambda x: isinstance(x, list))


def steps(optimizer, gradients):
    """The parameters after each gradient."""

    @jax.jit
    def step(params, state, g):
        updates, state = optimizer.update(jax.tree.map(lambda p: jnp.full_like(p, g), params), state, params)
        return optax.apply_updates(params, updates), state

    params, seen = arrays(PARAMS), []
    state = jax.tree.map(jnp.asarray, optimizer.init(params))
    with jax.numpy_dtype_promotion("standard"):
        for g in gradients:
            params, state = step(params, state, jnp.float32(g))
            seen.append(jax.device_get(params))
    return seen


def adamw_by_hand(start, gradients, rates, b1, b2, eps, decay):
    """Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2, in float64."""
    p, m, v = np.float64(start), 0.0, 0.0
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
    return p


def test_adamw_decays_kernels_only():
    gradients, rates = [1.0, -0.5, 2.0, 0.1], [0.1, 0.2, 0.05, 0.4]
    schedule = lambda n: jnp.asarray(rates)[n]  # noqa: E731
    last = steps(optim.build("adamw", schedule, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3), gradients)[-1]
    for name, decay in {"mlp/kernel": 0.3, "mlp/bias": 0, "norm/scale": 0, "scale_net/kernel": 0.3}.items():
        group, leaf = name.split("/")
        wanted = adamw_by_hand(PARAMS[group][leaf], gradients, rates, 0.8, 0.9, 1e-6, decay)
        np.testing.assert_allclose(last[group][leaf], wanted, rtol=2e-6)


def test_adamw_defaults():
    gradients = [1.0, -0.5, 2.0]
    last = steps(optim.build("adamw", 0.1), gradients)[-1]
    wanted = adamw_by_hand(PARAMS["mlp"]["kernel"], gradients, [0.1] * 3, 0.9, 0.95, 1e-8, 0)
    np.testing.assert_allclose(last["mlp"]["kernel"], wanted, rtol=2e-6)


@pytest.mark.parametrize(("momentum", "moves"), [(0.0, [1, 2, 3]), (0.5, [1, 2.5, 4.25])])
def test_sgd(momentum, moves):
    optimizer = optim.build("sgd", 0.1, momentum=momentum)
    seen = [p["mlp"]["kernel"][0] for p in steps(optimizer, [1.0, 1.0, 1.0])]
    np.testing.assert_allclose(seen, 1 - 0.1 * np.asarray(moves), rtol=1e-6)
    assert bool(jax.tree.leaves(optimizer.init(arrays(PARAMS)))) == bool(momentum)  # without momentum nothing is kept


@pytest.mark.parametrize("stacked", [(), (12,)])
def test_the_mask_is_by_role_and_never_by_rank(stacked):
    ones = lambda *dims: jnp.ones((*stacked, *dims))  # noqa: E731
    params = {
        "ln": {"scale": ones(4)},
        "dense": {"kernel": ones(4, 4), "bias": ones(4)},
        "bias_net": {"kernel": ones(4)},
    }
    assert optim.decay_mask(params) == {
        "ln": {"scale": False}, "dense": {"kernel": True, "bias": False}, "bias_net": {"kernel": True},
    }  # fmt: skip


def test_lion():
    """Chen et al. 2023, algorithm 2, by hand: the sign of a mix, then the momentum with another decay."""
    gradients, rates, p, m = [1.0, -0.5, -2.0, 0.1], [0.1, 0.2, 0.05, 0.4], 1.0, 0.0
    for g, rate in zip(gradients, rates, strict=True):
        p -= rate * (np.sign(0.9 * m + 0.1 * g) + 0.3 * p)
        m = 0.99 * m + 0.01 * g
    schedule = lambda n: jnp.asarray(rates)[n]  # noqa: E731
    last = steps(optim.build("lion", schedule, b1=0.9, b2=0.99, weight_decay=0.3), gradients)[-1]
    np.testing.assert_allclose(last["mlp"]["kernel"][0], p, rtol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_SCH_04_decay_goes_by_role(name):
    """A rate of 1 and gradients of zero: a step leaves 1 - 0.1 of what is decayed, and all of the rest."""
    params = {
        "blocks": {
            "ln": {"scale": jnp.ones((12, 64))},
            "dense": {"kernel": jnp.ones((12, 64, 64)), "bias": jnp.ones((12, 64))},
        },
        "final_norm": {"weight": jnp.ones(64)},
    }
    optimizer = optim.build(name, lambda n: 1.0 + 0 * n, weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["blocks"]["dense"]["kernel"], 0.9, rtol=1e-6)
    for spared in (new["blocks"]["ln"]["scale"], new["blocks"]["dense"]["bias"], new["final_norm"]["weight"]):
        assert np.all(np.asarray(spared) == 1.0)
    assert optim.report(name, params, 0.1).startswith(
        f"{name}, 1 of 4 parameters (49,152 of 50,752 values) decayed by 0.1"
    )


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("ln_f/weight", True), ("ln/weight", True), ("ln1/weight", True), ("LayerNorm_0/weight", True),
        ("q_norm/weight", True), ("dense/weight", False), ("lnet/weight", False), ("BatchNorm/beta", True),
        ("normed/kernel", False), ("a/bias", True), ("biased/kernel", False), ("scale", True),
    ],
)  # fmt: skip
def test_names_of_norms(name, spared):
    *groups, last = name.split("/")
    tree = {last: jnp.ones(2)}
    for group in groups:
        tree = {group: tree}
    assert jax.tree.leaves(optim.decay_mask(tree)) == [not spared]


def test_muon_takes_hidden_matrices_stacked_or_not_and_nothing_else():
    shapes = {
        "embedding": {"embedding": (320, 8)}, "head": {"kernel": (8, 320)},
        "layers": {"up": {"kernel": (3, 8, 16)}, "norm": {"scale": (3, 8)}, "up2": {"bias": (3, 16)}},
        "one": {"kernel": (8, 16)}, "conv": {"kernel": (3, 3, 8, 16)},
    }  # fmt: skip
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    found = optim.muon_dimensions(params)
    numbers = optax.contrib.MuonDimensionNumbers
    assert found["layers"]["up"]["kernel"] == numbers(1, 2)
    assert found["one"]["kernel"] == numbers(0, 1)
    rest = (found["embedding"]["embedding"], found["head"]["kernel"], found["layers"]["norm"]["scale"])
    assert (*rest, found["layers"]["up2"]["bias"], found["conv"]["kernel"]) == (None,) * 5
    assert "muon for 2 of 7 parameters (512 of " in optim.report("muon", params, 0.0)


def test_muon_orthogonalises_each_layer_of_a_stack():
    """The update of a stacked kernel is that of each layer alone, and its singular values are near each other."""
    draw = np.random.default_rng(0).normal(size=(3, 16, 32)).astype(np.float32)
    optimizer = optim.build("muon", 1.0)

    def update(grads):
        params = jax.tree.map(jnp.zeros_like, grads)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.update(grads, optimizer.init(params), params)[0]

    stacked = update({"layers": {"up": {"kernel": jnp.asarray(draw)}}})["layers"]["up"]["kernel"]
    for layer in range(3):
        alone = update({"up": {"kernel": jnp.asarray(draw[layer])}})["up"]["kernel"]
        np.testing.assert_allclose(stacked[layer], alone, rtol=0, atol=1e-5)
        singular = np.linalg.svd(np.asarray(stacked[layer]), compute_uv=False)
        assert singular.max() / singular.min() < 2 < np.divide(*np.linalg.svd(draw[layer])[1][[0, -1]])


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("lamb", {}, "'lamb' is not one of adamw, sgd, lion, adafactor, muon"),
        ("sgd", {"weight_decay": 0.1}, "no weight decay here, got 0.1"),
    ],
)
def test_build_errors(name, settings, text):
    with pytest.raises(ValueError, match=text):
        optim.build(name, 0.1, **settings)


@pytest.mark.parametrize("k", [0, -1, 2.5])
def test_impossible_windows_are_refused(k):
    with pytest.raises((ValueError, TypeError), match="k="):
        MultiSteps(k)


def test_micro_batches_of_a_window():
    assert [MultiSteps(3).micro_batches(window) for window in (0, 7)] == [3, 3]
    assert [MultiSteps(lambda n: 2 * n + 1).micro_batches(window) for window in (0, 7)] == [1, 15]
    assert MultiSteps().k == 1


def test_numpy_integers_are_integers():
    assert type(MultiSteps(np.int64(3)).k) is int  # optax calls anything that is not an int


def test_skip_errors():
    with pytest.raises(ValueError, match="max_consecutive"):
        Skip(max_consecutive=-1)  # would stop a run that skips nothing
    with pytest.raises(ValueError, match=r"Skip\('batch'\) is neither"):
        Skip("batch")
    assert Skip() == Skip("window", 50)


# ---- one window's sums -------------------------------------------------------------------------------------------


def sums(grads, weight=4.0, bad=0.0, **others):
    leaves = {"grads": arrays(grads), "weight": weight, "bad": bad, **others}
    return jax.tree.map(np.float32, leaves)


@functools.cache
def transform(clip, skip, optimizer):
    made = window_update({"sgd": optax.sgd, "adam": optax.adam}[optimizer](1.0), clip, Skip(skip))
    return made.init, jax.jit(made.update)


def update(grads, clip=None, skip="window", optimizer="sgd", state=None, **others):
    """``(what goes out, state after, state before)`` of one window."""
    init, jitted = transform(clip, skip, optimizer)
    params = jax.tree.map(np.zeros_like, arrays(grads))
    state = jax.tree.map(jnp.asarray, init({"grads": params})) if state is None else state
    with jax.numpy_dtype_promotion("standard"):
        out, new_state = jitted(sums(grads, **others), state, {"grads": params})
    return jax.device_get(out), new_state, state


@pytest.mark.parametrize(("clip", "factor"), [(None, 1.0), (13.0, 1.0), (14.0, 1.0), (6.5, 0.5), (1.3, 0.1)])
def test_divides_then_norms_then_clips(clip, factor):
    out, _, _ = update({"a": [12.0, 16.0], "b": [48.0]}, clip=clip, total=20.0)  # the mean is 3, 4, 12
    np.testing.assert_allclose(out["grads"]["a"], np.asarray([-3.0, -4.0]) * factor, rtol=1e-6)
    np.testing.assert_allclose([out["norm"], out["clipped_norm"]], [13.0, 13.0 * factor], rtol=1e-6)
    assert (out["applied"], out["weight"], out["total"]) == (1, 4, 20)


SKIPPED = {
    "bad": ({"a": [1.0, 2.0]}, {"bad": 1.0}, "window"),
    "no weight": ({"a": [1.0, 2.0]}, {"weight": 0.0}, "window"),
    "no weight left": ({"a": [0.0, 0.0]}, {"weight": 0.0, "bad": 3.0}, "micro"),
    "negative weight": ({"a": [1.0, 2.0]}, {"weight": -1.0}, "window"),
    "infinite sum": ({"a": [np.inf, 2.0]}, {}, "window"),
    "nan": ({"a": [np.nan, 2.0]}, {}, "micro"),
}


@pytest.mark.parametrize(("grads", "others", "skip"), SKIPPED.values(), ids=SKIPPED)
def test_a_skipped_window_keeps_the_state_bit_for_bit(grads, others, skip):
    _, before, _ = update({"a": [1.0, 2.0]}, optimizer="adam")
    out, after, _ = update(grads, skip=skip, optimizer="adam", state=before, **others)
    assert out["applied"] == 0
    assert np.all(np.isfinite(out["grads"]["a"]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_a_bad_micro_batch_is_left_out_where_that_is_the_policy():
    out, _, _ = update({"a": [6.0, 9.0]}, skip="micro", bad=1.0, weight=3.0)
    np.testing.assert_allclose(out["grads"]["a"], [-2.0, -3.0], rtol=1e-6)
    assert out["applied"] == 1


def test_extra_arguments_reach_the_optimizer():
    seen = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda u, s, p=None, *, value: (jax.tree.map(lambda x: x * value, u), s)
    )
    transform = window_update(seen, None, Skip())
    out, _ = transform.update(sums({"a": [4.0]}), (), {"grads": {"a": jnp.zeros(1)}}, value=jnp.float32(3))
    assert out["grads"]["a"].tolist() == [3.0]
