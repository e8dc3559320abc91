"""BatchNorm with numbers worked out by hand, alone and through the real step.

A window of three micro-batches of unequal size, in one channel:

    A  2, 4         mean 3     variance 1
    B  0, 6, 6, 8   mean 5     variance (25 + 1 + 1 + 9) / 4 = 9
    C  10, 10       mean 10    variance 0
    all 8 values    mean 46 / 8 = 5.75    variance 356 / 8 - 5.75^2 = 11.4375
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain import adapters, paths, sharding
from jaxtrain.models.batch_norm import BatchNorm, pooled_merge, pooled_zeros, pop_sums
from jaxtrain.models.dense import Dense
from jaxtrain.step import Loss, MergeStats, MultiSteps, Precision, Scan, Skip, build_train_step

WINDOW = ((2, 4), (0, 6, 6, 8), (10, 10))
RUNNING = ("sequential", "pooled")
MERGE = MergeStats(pooled_zeros, pooled_merge)


def column(*values, dtype=jnp.float32):
    """A batch of one channel, (B, 1)."""
    return jnp.asarray(values, dtype)[:, None]


def running_of(norm):
    return {name: np.asarray(getattr(norm, name)[...]) for name in ("mean", "var")}


def moved_together(norm):
    """What `pooled_merge` makes of a norm's running statistics and of what it saw."""
    return jax.device_get(pooled_merge(running_of(norm), pop_sums(norm)))


def close(got, mean, var, rtol=1e-6):
    np.testing.assert_allclose(got["mean"], mean, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(got["var"], var, rtol=rtol, atol=1e-6)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def set_running(norm, mean, var):
    norm.mean[...], norm.var[...] = (jnp.full(norm.mean.shape, x, jnp.float32) for x in (mean, var))


# ---- one call ----------------------------------------------------------------------------------------------------

X = [[1, 5], [3, 7], [5, 11], [7, 17]]  # means 4 and 10; variances (9+1+1+9)/4 = 5 and (25+9+1+49)/4 = 21


@pytest.mark.parametrize("running", RUNNING)
def test_BN_output_by_hand(running):
    norm = BatchNorm(2, eps=4.0, running=running)  # deviations sqrt(5 + 4) = 3 and sqrt(21 + 4) = 5
    norm.scale[...], norm.bias[...] = jnp.array([3.0, 10.0]), jnp.array([1.0, 2.0])
    out = norm(jnp.asarray(X, jnp.float32), train=True)
    np.testing.assert_allclose(out, [[-2, -8], [0, -4], [2, 4], [4, 16]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("padding", [0, 2])
def test_BN_gradient_by_hand(running, padding):
    """Of the first output: (c - mean(c) - d * mean(c * d) / 9) / 3 with c = 1, 0, 0, 0 and deviations d = -3, -1, 1, 3.

    Mean and variance move with the inputs; held fixed, the gradient is c / 3.
    """
    weights = jnp.array([1.0] * 4 + [0.0] * padding)

    def first_output(x):
        return BatchNorm(1, eps=4.0, running=running)(x, weights, train=True)[0, 0]

    found = jax.grad(first_output)(column(1, 3, 5, 7, *[50] * padding))
    np.testing.assert_allclose(found[:, 0], [1 / 6, -1 / 9, -1 / 18, 0, *[0] * padding], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("momentum", "mean", "var"),
    [(0.9, [0.4, 1.0], [1.4, 3.0]), (0.5, [2, 5], [3, 11]), (0.0, [4, 10], [5, 21])],
)
@pytest.mark.parametrize("running", RUNNING)
def test_BN_one_move_by_hand(running, momentum, mean, var):
    """From mean 0 and variance 1; the variance is the biased one (unbiased: 20 / 3 and 28)."""
    norm = BatchNorm(2, momentum=momentum, running=running)
    norm(jnp.asarray(X, jnp.float32), train=True)
    if running == "sequential":
        close(running_of(norm), mean, var)
    else:
        close(running_of(norm), 0.0, 1.0)  # it moves at the window's end
        close(moved_together(norm), mean, var)


def test_BN_all_dims_but_the_last_are_one_population():
    norm = BatchNorm(2, momentum=0.0)
    x = jnp.asarray(X, jnp.float32).reshape(2, 1, 2, 2)
    out = norm(x, train=True)
    assert out.shape == x.shape
    close(running_of(norm), [4, 10], [5, 21])


@pytest.mark.parametrize("shape", [(3, 1), (3, 1, 2, 1)])
@pytest.mark.parametrize("running", RUNNING)
def test_BN_rows_count_as_their_weights_say(running, shape):
    """2 once, 6 three times: mean 5, variance (9 + 3 * 1) / 4 = 3; a row of weight 0 holds anything."""
    norm = BatchNorm(1, momentum=0.0, running=running)
    x = jnp.broadcast_to(jnp.array([2.0, 6.0, -1e6]).reshape(3, *(1,) * (len(shape) - 1)), shape)
    out = norm(x, jnp.array([1.0, 3.0, 0.0]), train=True)
    close(running_of(norm) if running == "sequential" else moved_together(norm), 5.0, 3.0)
    std = math.sqrt(3 + 1e-5)
    np.testing.assert_allclose(out[:2].reshape(2, -1)[:, 0], [-3 / std, 1 / std], rtol=1e-5)


def test_BN_a_population_is_rows_times_places():
    """A row of four places counts four times as much as a row of one, over micro-batches of other sizes."""
    norm = BatchNorm(1, momentum=0.0, running="pooled")
    norm(jnp.full((1, 2, 2, 1), 1.0), train=True)
    norm(jnp.full((1, 1, 1, 1), 6.0), train=True)
    close(moved_together(norm), 2.0, 4.0)  # 1 four times, 6 once: (4 * 1 + 16) / 5


@pytest.mark.parametrize("running", RUNNING)
def test_BN_without_any_weight_nothing_moves(running):
    norm = BatchNorm(3, running=running)
    set_running(norm, 0.1, 1.7)
    before = bits(running_of(norm))
    out = norm(jnp.full((4, 3), 5.0), jnp.zeros(4), train=True)
    assert np.all(np.isfinite(out))
    if running == "pooled":
        assert bits(moved_together(norm)) == before
    assert bits(running_of(norm)) == before


@pytest.mark.parametrize("running", RUNNING)
def test_BN_evaluation_uses_the_running_statistics_and_moves_nothing(running):
    norm = BatchNorm(1, running=running, eps=1.0)
    set_running(norm, 5.0, 8.0)  # sqrt(8 + 1) = 3
    before = bits(running_of(norm))
    np.testing.assert_allclose(norm(column(5, 8, -1), train=False), column(0, 1, -2), rtol=1e-6, atol=1e-6)
    assert bits(running_of(norm)) == before
    assert pop_sums(norm) is None


@pytest.mark.parametrize("running", RUNNING)
def test_BN_bfloat16_is_float32_inside(running):
    """257 has no bfloat16: it lies between 256 and 258."""
    norm = BatchNorm(1, momentum=0.0, running=running, scale=2.0)
    norm.scale.set_value(norm.scale[...].astype(jnp.bfloat16))
    norm.bias.set_value(norm.bias[...].astype(jnp.bfloat16))
    out = norm(column(256, 258, 256, 258, dtype=jnp.bfloat16), train=True)
    assert out.dtype == jnp.bfloat16
    assert out.astype(jnp.float32)[:, 0].tolist() == [-2, 2, -2, 2]
    found = running_of(norm) if running == "sequential" else moved_together(norm)
    assert (found["mean"].tolist(), found["var"].tolist()) == ([257.0], [1.0])
    assert found["var"].dtype == np.float32


@pytest.mark.parametrize("running", RUNNING)
def test_BN_a_large_mean_keeps_the_variance(running):
    """mean(x^2) - mean(x)^2 is off by 0.06 here in float32. Sums are about the running mean, which is near already."""
    x = 1000 + np.random.default_rng(0).standard_normal((256, 4))
    x = x.astype(np.float32)
    wanted = x.astype(np.float64)
    norm = BatchNorm(4, momentum=0.0, running=running, eps=1e-12)
    set_running(norm, 999.0, 1.0)
    out = norm(jnp.asarray(x), train=True)
    np.testing.assert_allclose(out, (wanted - wanted.mean(0)) / wanted.std(0), rtol=0, atol=1e-3)
    found = running_of(norm) if running == "sequential" else moved_together(norm)
    close(found, wanted.mean(0), wanted.var(0), rtol=1e-5)


# ---- several calls -----------------------------------------------------------------------------------------------

# mean 0 -> 0.3 -> 0.77 -> 1.693 and variance 1 -> 1 -> 1.8 -> 1.62 with 0.9; 1.5, 3.25, 6.625 and 1, 5, 2.5 with 0.5
BY_HAND = {
    ("sequential", 0.9): (1.693, 1.62),
    ("sequential", 0.5): (6.625, 2.5),
    ("pooled", 0.9): (0.575, 2.04375),  # 0.1 * 5.75 and 0.9 + 0.1 * 11.4375
    ("pooled", 0.5): (2.875, 6.21875),
}


@pytest.mark.parametrize(("kind", "wanted"), BY_HAND.items(), ids=[f"{r}-{m}" for r, m in BY_HAND])
def test_BN_three_micro_batches_by_hand(kind, wanted):
    norm = BatchNorm(1, running=kind[0], momentum=kind[1])
    for values in WINDOW:
        norm(column(*values), train=True)
    close(running_of(norm) if kind[0] == "sequential" else moved_together(norm), *wanted)


@pytest.mark.parametrize("momentum", [0.9, 0.25])
def test_BN_pooled_micro_batches_are_one_big_batch(momentum):
    """Of different sizes, some rows padding, from running statistics that are not the first."""
    generator = np.random.default_rng(1)
    x = generator.normal(3, 2, (29, 2, 3, 5)).astype(np.float32)
    weights = generator.integers(0, 2, 29).astype(np.float32)
    parts = np.split(x, [4, 5, 20]), np.split(weights, [4, 5, 20])
    pooled, single = (BatchNorm(5, momentum=momentum, running=running) for running in ("pooled", "sequential"))
    for norm in (pooled, single):
        set_running(norm, 2.0, 3.0)
    for x_part, weights_part in zip(*parts, strict=True):
        pooled(jnp.asarray(x_part), jnp.asarray(weights_part), train=True)
    single(jnp.asarray(x), jnp.asarray(weights), train=True)
    close(moved_together(pooled), **running_of(single), rtol=1e-5)
    kept = x[weights > 0].reshape(-1, 5).astype(np.float64)
    mean, var = momentum * 2 + (1 - momentum) * kept.mean(0), momentum * 3 + (1 - momentum) * kept.var(0)
    close(running_of(single), mean, var, rtol=1e-5)


def test_BN_sums_are_taken_once():
    norm = BatchNorm(1, running="pooled")
    norm(column(2, 4), train=True)
    assert pop_sums(norm)["sums"]["count"] == 2
    assert pop_sums(norm) is None
    norm(column(0, 6, 6, 8), train=True)
    assert pop_sums(norm)["sums"]["count"] == 4


# ---- structure ---------------------------------------------------------------------------------------------------


class Tower(nnx.Module):
    """Norms at several depths, and model_state that is no norm's."""

    def __init__(self, running, rngs):
        self.first = BatchNorm(2, running=running)
        self.blocks = nnx.List([nnx.Dict(norm=BatchNorm(2, running=running)) for _ in range(2)])
        self.dense = Dense(2, 1, 1.0, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, weights=None, *, train):
        x = self.first(x, weights, train=train)
        for block in self.blocks:
            x = block["norm"](x * x, weights, train=train)
        return self.dense(x)[:, 0]


def state_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))


def test_BN_sums_zeros_and_model_state_have_one_structure():
    tower = Tower("pooled", nnx.Rngs(0))
    tower(jnp.asarray(X, jnp.float32), train=True)
    state = state_of(tower)
    zeros, sums = pooled_zeros(state), pop_sums(tower)
    names = [f"{at}/sums/{name}" for at in ("blocks/0/norm", "blocks/1/norm", "first")
             for name in ("count", "momentum", "squares", "sum")]  # fmt: skip
    assert sorted(paths.named_leaves(zeros)) == sorted(names)
    assert not paths.differences(zeros, sums)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zeros))
    assert {name: leaf.shape for name, leaf in paths.named_leaves(sums["first"]).items()} == {
        "sums/count": (), "sums/momentum": (), "sums/squares": (2,), "sums/sum": (2,),
    }  # fmt: skip
    merged = pooled_merge(state, sums)
    assert not paths.differences(state, merged)
    close(merged["first"], [0.4, 1.0], [1.4, 3.0])
    assert merged["calls"] is state["calls"]
    inner = merged["blocks"][0]["norm"]["mean"]  # of squares of normalised numbers: their mean is var / (var + eps)
    np.testing.assert_allclose(inner, 0.1, rtol=1e-4)
    assert bits(pooled_merge(state, zeros)) == bits(state)


def test_BN_a_norm_alone_is_a_model_too():
    norm = BatchNorm(3, running="pooled")
    assert not paths.differences(state_of(norm), {"mean": jnp.zeros(3), "var": jnp.ones(3)})
    norm(jnp.ones((2, 3)), train=True)
    assert not paths.differences(pooled_zeros(state_of(norm)), pop_sums(norm))


def test_BN_sequential_statistics_have_no_sums():
    tower = Tower("sequential", nnx.Rngs(0))
    tower(jnp.asarray(X, jnp.float32), train=True)
    assert pop_sums(tower) is None


@pytest.mark.parametrize("state", [{}, {"calls": np.float32(0)}, {"a": {"mean": np.zeros(2)}}, ()])
def test_BN_zeros_of_no_norm_is_an_error(state):
    with pytest.raises(ValueError, match="no running mean and var; leave merge_stats=None"):
        pooled_zeros(state)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"eps": 0.0}, "eps=0.0 must be positive"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum=-0.1 must be at least 0 and below 1"),
        ({"momentum": math.nan}, "momentum=nan must be at least 0 and below 1"),
        ({"running": "mean"}, "running='mean' is unknown; choose one of sequential, pooled"),
    ],
)
def test_BN_settings_out_of_range(settings, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        BatchNorm(**({"channels": 2} | settings))


@pytest.mark.parametrize("shape", [(3,), (4, 1), (4, 2), ()])
def test_BN_weights_are_one_a_row(shape):
    with pytest.raises(ValueError, match=re.escape(f"weights_B has shape {shape} but x (4, 2); give one weight for")):
        BatchNorm(2)(jnp.zeros((4, 2)), jnp.ones(shape), train=True)


# ---- through the step --------------------------------------------------------------------------------------------


class Line(nnx.Module):
    """A norm on the inputs, so that what it sees does not depend on the parameters, and a product."""

    def __init__(self, running, momentum, rngs):
        self.norm = BatchNorm(1, running=running, momentum=momentum)
        self.dense = Dense(1, 1, 1.0, rngs=rngs)

    def __call__(self, x, weights, *, train):
        return self.dense(self.norm(x, weights, train=train))[:, 0]


def squares(model, batch, key):
    errors = model(batch["x"], batch["weights"], train=key is not None).astype(jnp.float32) - batch["y"]
    weights = batch["weights"]
    return Loss(jnp.sum(weights * errors * errors), jnp.sum(weights), stats=pop_sums(model))


@functools.cache
def program_of(running, accumulation, devices=1, momentum=0.5, skip="window", make=Line, precision="float32"):
    made = functools.partial(make, running, momentum) if make is Line else functools.partial(make, running)
    return build_train_step(
        *adapters.from_nnx(lambda rngs: made(rngs=rngs), squares), optax.sgd(0.1),
        mesh=sharding.make_mesh(data=devices, devices=jax.devices()[:devices]), accumulation=accumulation,
        precision=Precision(precision), merge_stats=MERGE if running == "pooled" else None, nonfinite=Skip(skip),
    )  # fmt: skip


def micro_batch(*values):
    """Eight rows, one a device of eight; those behind the values are padding that would be seen."""
    missing = 8 - len(values)
    x = np.array([*values, *[100.0] * missing], np.float32)[:, None]
    weights = np.array([1.0] * len(values) + [0.0] * missing, np.float32)
    return {"x": x, "y": np.arange(8, dtype=np.float32), "weights": weights}


def run(program, state, window):
    """A whole window, by either mechanism: the state and the record of its end."""
    batches = [micro_batch(*values) for values in window]
    if isinstance(program.accumulation, Scan):
        state, metrics = program.step(state, jax.tree.map(lambda *leaves: np.stack(leaves), *batches))
    else:
        for batch in batches:
            state, metrics = program.step(state, batch)
    return state, metrics.to_host()


BOTH = pytest.mark.parametrize("accumulation", [MultiSteps(3), Scan(3)], ids=["MultiSteps", "Scan"])
KINDS = pytest.mark.parametrize("running", RUNNING)


@pytest.mark.parametrize("devices", [1, 8])
@KINDS
@BOTH
def test_BN_two_windows_by_hand(accumulation, running, devices):
    """Every device sees one row: on its own its variance is 0."""
    program = program_of(running, accumulation, devices)
    state, record = run(program, program.init(), WINDOW)
    assert (record["window_done"], record["step"], record["weight"]) == (1, 1, 8.0)
    close(state.model_state["norm"], *BY_HAND[running, 0.5])
    state, _ = run(program, state, WINDOW)
    second = {
        # 6.625 -> 4.8125 -> 4.90625 -> 7.453125 and 2.5 -> 1.75 -> 5.375 -> 2.6875
        "sequential": (7.453125, 2.6875),
        "pooled": (4.3125, 8.828125),  # (2.875 + 5.75) / 2 and (6.21875 + 11.4375) / 2
    }
    close(state.model_state["norm"], *second[running])
    assert program.traces["step"] == 1


@KINDS
def test_BN_inside_a_window_only_sequential_statistics_move(running):
    program = program_of(running, MultiSteps(3))
    state, _ = program.step(program.init(), micro_batch(2, 4))
    close(state.model_state["norm"], *{"sequential": (1.5, 1.0), "pooled": (0.0, 1.0)}[running])
    close(program.checkpoint_view(state).model_state["norm"], 0.0, 1.0)
    state, lost = program.drop(state)
    assert lost == 1
    close(state.model_state["norm"], 0.0, 1.0)
    state, _ = run(program, state, WINDOW)  # and the sums of what was dropped are gone
    close(state.model_state["norm"], *BY_HAND[running, 0.5])


@KINDS
@BOTH
def test_BN_a_partial_window_counts_what_it_holds(accumulation, running):
    """A and B: mean 26 / 6, variance 156 / 6 - (26 / 6)^2 = 65 / 9."""
    program = program_of(running, accumulation)
    state, _ = run(program, program.init(), WINDOW[:2])
    if isinstance(accumulation, MultiSteps):
        state, _ = program.flush(state)
    assert int(state.counters.step) == 1
    close(state.model_state["norm"], *{"sequential": (3.25, 5.0), "pooled": (13 / 6, 0.5 + 65 / 18)}[running])


@KINDS
@BOTH
def test_BN_a_micro_batch_of_padding_counts_for_nothing(accumulation, running):
    program = program_of(running, accumulation)
    state, record = run(program, program.init(), [WINDOW[0], (), WINDOW[1]])
    assert (record["step"], record["weight"]) == (1, 6.0)
    close(state.model_state["norm"], *{"sequential": (3.25, 5.0), "pooled": (13 / 6, 0.5 + 65 / 18)}[running])
    before = bits(state.model_state)
    state, record = run(program, state, [(), (), ()])
    assert (record["step"], record["window"]) == (1, 2)
    assert bits(state.model_state) == before


@pytest.mark.parametrize("bad", [0, 1, 2])
@KINDS
@BOTH
def test_BN_a_skipped_window_leaves_the_statistics_bit_for_bit(accumulation, running, bad):
    program = program_of(running, accumulation, momentum=0.9)
    state, _ = run(program, program.init(), WINDOW)
    before = bits(state.model_state)
    poisoned = [(*values, math.nan) if i == bad else values for i, values in enumerate(WINDOW)]
    state, record = run(program, state, poisoned)
    assert (record["window_done"], record["window"], record["step"], record["skipped_in_a_row"]) == (1, 2, 1, 1)
    assert bits(state.model_state) == before
    state, record = run(program, state, WINDOW)
    once = program.init()
    for _ in range(2):
        once, _ = run(program, once, WINDOW)
    assert bits(state.model_state) == bits(once.model_state)  # as if the bad window had never been
    assert bits(state.model_state) != before


@KINDS
@BOTH
def test_BN_a_skipped_micro_batch_is_left_out(accumulation, running):
    """A and C: 2, 4, 10, 10: mean 6.5, variance 220 / 4 - 6.5^2 = 12.75; one by one 1.5, 5.75 and 1, 0.5."""
    program = program_of(running, accumulation, skip="micro")
    state, record = run(program, program.init(), [WINDOW[0], (0, math.nan, 6, 8), WINDOW[2]])
    assert (record["step"], record["weight"]) == (1, 4.0)
    close(state.model_state["norm"], *{"sequential": (5.75, 0.5), "pooled": (3.25, 6.875)}[running])


@KINDS
def test_BN_evaluation_of_a_program_uses_the_running_statistics(running):
    program = program_of(running, MultiSteps(3))
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    state = program.init({"norm": {"scale": one, "bias": zero}, "dense": {"kernel": one[None], "bias": zero}})
    before = bits(state.model_state)
    total, weight = program.evaluate(program.view(state), micro_batch(3, 5, 2))["loss"]  # y is 0, 1, 2
    assert float(weight) == 3.0
    assert float(total) == pytest.approx(9 + 16 + 0, rel=1e-4)  # mean 0, variance 1 + 1e-5
    assert bits(state.model_state) == before


def tower_windows():
    x = np.sort(np.random.default_rng(2).normal(1, 2, (2, 3, 16, 2)), axis=2).astype(np.float32)  # unlike on a device
    weights = np.ones((2, 3, 16), np.float32)
    weights[:, 1, 11:] = 0
    return [{"x": x[i], "y": x[i].sum(-1), "weights": weights[i]} for i in range(2)]


def tower_run(program):
    state = program.init()
    for window in tower_windows():
        if isinstance(program.accumulation, Scan):
            state, _ = program.step(state, window)
            continue
        for i in range(3):
            state, _ = program.step(state, jax.tree.map(lambda leaf, i=i: leaf[i], window))
    return jax.device_get((state.params, state.model_state))


@KINDS
@BOTH
def test_BN_eight_devices_are_one(accumulation, running):
    """Norms on norms: the gradient goes through the statistics of all devices, the next step sees it."""
    one, eight = (tower_run(program_of(running, accumulation, devices, make=Tower)) for devices in (1, 8))
    for name, leaf in paths.named_leaves(one).items():
        np.testing.assert_allclose(paths.named_leaves(eight)[name], leaf, rtol=1e-5, atol=1e-5, err_msg=name)


@KINDS
def test_BN_scan_is_multisteps(running):
    ours, theirs = (tower_run(program_of(running, a(3), 8, make=Tower)) for a in (MultiSteps, Scan))
    for name, leaf in paths.named_leaves(ours).items():
        np.testing.assert_allclose(paths.named_leaves(theirs)[name], leaf, rtol=1e-5, atol=1e-5, err_msg=name)


@KINDS
def test_BN_first_statistics_match_float64(running):
    """Over eight devices, by a second implementation."""
    _, state = tower_run(program_of(running, MultiSteps(3), 8, make=Tower))
    mean, var = np.zeros(2), np.ones(2)
    for window in tower_windows():
        parts = [x[w > 0].astype(np.float64) for x, w in zip(window["x"], window["weights"], strict=True)]
        for part in parts if running == "sequential" else [np.concatenate(parts)]:
            mean, var = 0.9 * mean + 0.1 * part.mean(0), 0.9 * var + 0.1 * part.var(0)
    close(state["first"], mean, var, rtol=1e-5)


@KINDS
def test_BN_statistics_are_float32_when_bfloat16_computes(running):
    program = program_of(running, MultiSteps(3), precision="bfloat16")
    state, _ = run(program, program.init(), WINDOW)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.model_state)} == {jnp.dtype("float32")}
    close(state.model_state["norm"], *BY_HAND[running, 0.5])


def faulty(loss=squares, running="pooled", merge_stats=MERGE):
    program = build_train_step(
        *adapters.from_nnx(lambda rngs: Line(running, 0.9, rngs=rngs), loss), optax.sgd(0.1), mesh=sharding.make_mesh(),
        precision=Precision("float32"), merge_stats=merge_stats,
    )  # fmt: skip
    return program.step(program.init(), micro_batch(1, 2))


def test_BN_wrongly_wired_statistics_are_told_at_the_trace():
    with pytest.raises(TypeError, match=r"Loss.stats are given, but no build_train_step\(merge_stats="):
        faulty(merge_stats=None)
    with pytest.raises(TypeError, match=r"Loss.stats is unlike MergeStats.zeros:\n  norm/sums/count"):
        faulty(running="sequential")

    def forgets(model, batch, key):
        model(batch["x"], batch["weights"], train=True)
        return Loss(jnp.float32(0), jnp.float32(1))

    with pytest.raises(TypeError, match=r"new model_state is unlike the one given:\n  norm/sums/count"):
        faulty(forgets)
