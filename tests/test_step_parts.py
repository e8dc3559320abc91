"""Frozen parameters, statistics that are merged once a window, and partial windows that are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step import bits, host
from test_step_cases import NAN, close, linear, linear_program, rows, run
from test_step_scan import scan_program, stacked

from jaxtrain import optim, sharding
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, MergeStats, MultiSteps, Scan, Skip, Variables, build_train_step

# ---- trainable ---------------------------------------------------------------------------------------------------


def adapter(params, model_state, batch, key):
    """A frozen table in bfloat16 times a trained scale and a trained bias."""
    table, scale, bias = params["table"], params["head"]["scale"], params["head"]["bias"]
    out = (batch["x"] @ table.astype(jnp.float32)) * scale[None] + bias[None]
    return Loss(jnp.sum((out - batch["y"]) ** 2), jnp.float32(batch["y"].size))


def adapter_program(trainable=("^head/",), k=1, **settings):
    start = {"table": jnp.ones((8, 4), jnp.bfloat16), "head": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}
    return build_train_step(
        adapter, lambda key: Variables(start), optax.adamw(0.1), mesh=sharding.make_mesh(), trainable=trainable,
        accumulation=MultiSteps(k), precision=Precision("float32"), **settings,
    )  # fmt: skip


BATCH = {"x": np.ones((2, 8), np.float32), "y": np.full((2, 4), 3.0, np.float32)}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("trainable", [("^head/",), "head", lambda name: name.startswith("head")])
def test_frozen_parameters_have_no_gradient_no_state_and_no_change(trainable, k):
    program = adapter_program(trainable, k, ema=0.5, clip_norm=1.0)
    state = program.init()
    before = bits(state.params["table"])
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (8, 4)]
    assert moments == []
    assert program.grads(program.view(state), BATCH, 0).grads["table"] is None
    for _ in range(2 * k):
        state, _ = program.step(state, BATCH)
    assert bits(state.params["table"]) == bits(state.ema["table"]) == before
    assert state.params["table"].dtype == jnp.bfloat16
    assert np.all(host(state.params["head"]["bias"]) != 0)
    assert np.all(host(state.ema["head"]["bias"]) != host(state.params["head"]["bias"]))
    # For each of 4 outputs, 2 rows, divided by 8 items: d / d scale = 8 * 2 * (8 - 3), d / d bias = 2 * (8 - 3).
    gradient = np.array([8 * 10.0, 10.0]) * 2 / 8
    first = adapter_program(trainable, 1).step(adapter_program(trainable, 1).init(), BATCH)[1]
    assert float(first["grad_norm"]) == pytest.approx(2 * np.linalg.norm(gradient), rel=1e-6)
    resumed = program.resume(host(program.checkpoint_view(state)))
    assert bits(resumed.params) == bits(state.params)


def test_a_bad_gradient_is_named_among_the_trained_ones():
    program = adapter_program(nonfinite=Skip(max_consecutive=0))
    _, metrics = program.step(program.init(), BATCH | {"y": np.full((2, 4), NAN, np.float32)})
    with pytest.raises(FloatingPointError, match="the gradient of 'head/bias'"):
        program.check(metrics.to_host())


def test_init_takes_pretrained_weights_for_the_frozen_part():
    program = adapter_program()
    given = {"table": np.full((8, 4), 2.0, jnp.bfloat16), "head": {"scale": np.ones(4, "f"), "bias": np.zeros(4, "f")}}
    state, _ = program.step(program.init(given), BATCH)
    assert np.all(np.float32(host(state.params["table"])) == 2.0)


def test_trainable_that_chooses_nothing_lists_the_names():
    with pytest.raises(ValueError, match=r"'haed' chooses none of the 3 parameters: head/bias, head/scale, table"):
        adapter_program(["head", "haed"])
    with pytest.raises(ValueError, match=r"'\(\[' is no pattern"):
        adapter_program("([")
    for nothing in ((), lambda name: False):
        with pytest.raises(ValueError, match="chooses none of the 3 parameters"):
            adapter_program(nothing)


def test_a_trained_parameter_is_a_float32_master():
    with pytest.raises(ValueError, match=r"table: parameters are float32 masters, got bfloat16"):
        adapter_program(None)


# ---- every optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optim.NAMES)
@pytest.mark.parametrize("accumulation", [MultiSteps(2), Scan(2)])
def test_every_optimizer_trains_sharded_with_one_trace_and_resumes(name, accumulation):
    """On 8 devices the parameters of one device, whatever shapes the optimizer's state has; part of them frozen."""

    def loss(params, model_state, batch, key):
        hidden = jax.nn.relu(batch["x"] @ params["layers"]["up"]["kernel"][0]) @ params["head"]["kernel"]
        return Loss(jnp.sum((hidden + params["frozen"][None] - batch["y"]) ** 2), jnp.float32(batch["x"].shape[0]))

    def init(key):
        up, head = jax.random.split(key)
        return Variables({
            "layers": {"up": {"kernel": jax.random.normal(up, (1, 256, 512)) / 16}},
            "head": {"kernel": jax.random.normal(head, (512, 8)) / 16}, "frozen": jnp.ones(8),
        })  # fmt: skip

    draw = np.random.default_rng(0)
    micro_batches = [
        {"x": draw.normal(size=(8, 256)).astype("f"), "y": draw.normal(size=(8, 8)).astype("f")} for _ in range(8)
    ]
    batches = micro_batches
    if isinstance(accumulation, Scan):
        batches = [stacked(micro_batches[i : i + 2]) for i in range(0, 8, 2)]
    decay = 0.0 if name == "sgd" else 0.1
    ends = []
    for mesh in (sharding.make_mesh(), sharding.make_mesh(fsdp=8)):
        program = build_train_step(
            loss, init, optim.build(name, lambda n: 1e-3 / (n + 1), weight_decay=decay, momentum=0.9), mesh=mesh,
            accumulation=accumulation, precision=Precision("float32"), clip_norm=1.0, trainable=("kernel",),
        )  # fmt: skip
        state = program.init()
        start = host(state.params)
        for batch in batches:
            state, metrics = program.step(state, batch)
        assert program.traces["step"] == 1
        assert metrics.to_host()["step"] == 4
        ends.append(host(state.params))
        assert bits(ends[-1]["frozen"]) == bits(start["frozen"])
        assert np.all(ends[-1]["head"]["kernel"] != start["head"]["kernel"])
        again = program.resume(host(program.checkpoint_view(state)))
        again, _ = program.step(again, batches[0])
        state, _ = program.step(state, batches[0])
        assert bits(again.params) == bits(state.params)
    for one, eight in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        np.testing.assert_allclose(eight, one, rtol=0, atol={"lion": 2e-3}.get(name, 2e-5))  # lion: a sign may flip


# ---- statistics of a window --------------------------------------------------------------------------------------

MOMENTUM = 0.9


def batch_norm(params, model_state, batch, key):
    """Running mean and variance of x; ``pooled`` hands out sums, else they move with every micro-batch."""
    x = batch["x"]
    mean, var = jnp.mean(x), jnp.var(x)
    loss = Loss(jnp.sum(params["w"] * x) + 0.0 * mean, jnp.float32(x.shape[0]))
    moved = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "var": 0.9 * model_state["var"] + 0.1 * var}
    return loss._replace(model_state=moved)


def pooled_batch_norm(params, model_state, batch, key):
    x = batch["x"]
    return batch_norm(params, model_state, batch, key)._replace(
        model_state=None, stats={"n": jnp.float32(x.shape[0]), "sum": jnp.sum(x), "squares": jnp.sum(x * x)}
    )


def merged(model_state, stats):
    mean = stats["sum"] / stats["n"]
    var = stats["squares"] / stats["n"] - mean**2
    return {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "var": 0.9 * model_state["var"] + 0.1 * var}


POOLED = MergeStats(lambda model_state: {name: jnp.float32(0) for name in ("n", "sum", "squares")}, merged)
X = [[0.0, 2.0], [4.0, 10.0]]  # means 1 and 7, variances 1 and 9; pooled: mean 4, variance 14


@pytest.mark.parametrize("mechanism", ["multisteps", "scan"])
@pytest.mark.parametrize(
    ("policy", "wanted"),
    # 0.9 * (0.9 * 0 + 0.1 * 1) + 0.1 * 7 and 0.9 * (0.9 * 1 + 0.1 * 1) + 0.1 * 9; 0.1 * 4 and 0.9 * 1 + 0.1 * 14
    [("sequential", (0.79, 1.8)), ("pooled", (0.4, 2.3))],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_BN_running_statistics_of_a_window(devices, policy, wanted, mechanism):
    pooled = policy == "pooled"
    program = build_train_step(
        pooled_batch_norm if pooled else batch_norm,
        lambda key: Variables({"w": jnp.float32(0)}, {"mean": jnp.float32(0), "var": jnp.float32(1)}),
        optax.sgd(1.0), mesh=sharding.make_mesh(data=devices, devices=jax.devices()[:devices]),
        accumulation={"multisteps": MultiSteps, "scan": Scan}[mechanism](2), merge_stats=POOLED if pooled else None,
        precision=Precision("float32"),
    )  # fmt: skip
    windows = [[{"x": np.asarray(x, np.float32)} for x in X] for _ in range(2)]
    windows[1][1]["x"][0] = NAN
    state = program.init()
    for window in windows:  # the second is skipped and leaves the statistics as the first one made them
        for batch in window if mechanism == "multisteps" else [stacked(window)]:
            state, metrics = program.step(state, batch)
        close([state.model_state["mean"], state.model_state["var"]], wanted)
    assert (metrics.to_host()["window"], metrics.to_host()["step"]) == (2, 1)
    assert program.traces["step"] == 1


def test_BN_statistics_leave_out_the_bad_micro_batch_where_that_is_the_policy():
    start = {"mean": jnp.float32(0), "var": jnp.float32(1)}
    program = linear_program(
        {"w": 0.0}, optax.sgd(1.0), k=2, loss=pooled_batch_norm, model_state=start, merge_stats=POOLED,
        nonfinite=Skip("micro"),
    )  # fmt: skip
    state = program.init()
    for x in ([4.0, 10.0], [NAN, 2.0]):
        state, _ = program.step(state, {"x": np.asarray(x, np.float32)})
    close([state.model_state["mean"], state.model_state["var"]], (0.7, 1.8))


def test_BN_a_flushed_window_merges_what_came():
    start = {"mean": jnp.float32(0), "var": jnp.float32(1)}
    program = linear_program(
        {"w": 0.0}, optax.sgd(1.0), k=3, loss=pooled_batch_norm, model_state=start, merge_stats=POOLED
    )
    state, _ = program.step(program.init(), {"x": np.asarray([4.0, 10.0], np.float32)})
    state, _ = program.flush(state)
    close([state.model_state["mean"], state.model_state["var"]], (0.7, 1.8))


def test_stats_must_be_those_of_zeros():
    program = linear_program(
        {"w": 0.0}, optax.sgd(1.0), loss=batch_norm, model_state={"mean": jnp.float32(0), "var": jnp.float32(1)},
        merge_stats=POOLED,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"unlike MergeStats.zeros:\n  n: missing \(expected float32\[\]\)"):
        program.step(program.init(), {"x": np.ones(2, np.float32)})


# ---- windows that are left out -----------------------------------------------------------------------------------


def test_ACC_06_a_partial_window_is_dropped():
    """10 micro-batches of gradient 1 in windows of 4: -2, two dropped, and the data goes on behind them."""
    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=4)
    state, _, _ = run(program, [rows(1.0)] * 10)
    state, dropped = program.drop(state)
    assert (dropped, float(state.params["w"])) == (2, -2.0)
    assert [int(n) for n in (state.counters.micro_step, state.counters.window, state.counters.step)] == [10, 2, 2]
    state, records, _ = run(program, [rows(3.0)] * 4, state)
    assert (float(state.params["w"]), records[-1]["micro_step"], records[-1]["tokens"]) == (-5.0, 14, 14)
    assert program.drop(state) == (state, 0)


def test_ACC_06_dropping_puts_the_model_state_back():
    def counting(params, model_state, batch, key):
        return linear(params, model_state, batch, key)._replace(model_state={"n": model_state["n"] + 1.0})

    program = linear_program({"w": 0.0}, optax.sgd(1.0), k=2, loss=counting, model_state={"n": jnp.float32(0)})
    state, _, _ = run(program, [rows(1.0)] * 3)
    state, dropped = program.drop(state)
    assert (dropped, float(state.model_state["n"])) == (1, 2.0)


def test_nothing_is_pending_where_a_call_is_a_window():
    program = scan_program({"w": 0.0}, Scan(2))
    state, _ = program.step(program.init(), stacked([rows(1.0)]))
    assert program.drop(state) == (state, 0)


# ---- more cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "lion"])
def test_ACC_09_a_long_window_of_bfloat16_gradients_is_summed_in_float32(name):
    """1024 gradients of 1: the mean is exactly 1, where a bfloat16 sum sticks at 256 and gives 0.25."""

    def loss(params, model_state, batch, key):
        assert params["w"].dtype == jnp.bfloat16
        return Loss(jnp.sum(params["w"] * batch["c"]).astype(jnp.float32), jnp.float32(1))

    program = build_train_step(
        loss, lambda key: Variables({"w": jnp.float32(0)}), optim.build(name, 1.0), mesh=sharding.make_mesh(),
        accumulation=MultiSteps(1024), precision=Precision("bfloat16"),
    )  # fmt: skip
    state, batch = program.init(), {"c": jnp.ones(1, jnp.bfloat16)}
    assert state.opt_state.acc_grads["grads"]["w"].dtype == jnp.float32
    for _ in range(1024):
        state, metrics = program.step(state, batch)
    assert (float(metrics["grad_norm"]), int(metrics["step"]), program.traces["step"]) == (1.0, 1, 1)


def test_SCH_02_a_resume_goes_on_where_the_schedule_was():
    """Rates of updates 5, 6 and 7, from the parameter's moves with gradient 1, and as told; to the bits of one run."""
    rate = optax.linear_schedule(0.1, 0.0, 10)

    def program():
        return linear_program({"w": 0.0}, optax.sgd(rate), k=2, report={"learning_rate": rate})

    whole, _, _ = run(program(), [rows(1.0)] * 16)
    first = program()
    state, _, _ = run(first, [rows(1.0)] * 10)
    second = program()
    state, records, trace = run(second, [rows(1.0)] * 6, second.resume(host(first.checkpoint_view(state))))
    ends = [host(first.checkpoint_view(first.resume(host(first.checkpoint_view(whole))))).params["w"], trace[-1]]
    assert ends[0] == ends[1]
    before = trace[0]  # after the first micro-batch of a window nothing has moved yet
    moves = -np.diff([before, *trace[1::2]])
    close(moves, [0.05, 0.04, 0.03])
    close([record["learning_rate"] for record in records[1::2]], [0.05, 0.04, 0.03])
