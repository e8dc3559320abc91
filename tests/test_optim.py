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


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [("lion", {}, "'lion' is not one of adamw, sgd"), ("sgd", {"weight_decay": 0.1}, "no weight decay here, got 0.1")],
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
