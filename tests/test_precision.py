"""Dtypes and the loss scale, against exact powers of two."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from test_step_cases import linear, linear_program, rows, run

from jaxtrain import sharding
from jaxtrain.precision import LossScale, Precision, ScaleState


def walk(precision: Precision, windows: list[bool], scale: ScaleState | None = None) -> list[tuple[float, int]]:
    """``(value, good windows)`` after each window, by the compiled ``adjust``."""
    adjust, scale, seen = jax.jit(precision.adjust), scale or precision.init_scale(), []
    for good in windows:
        scale = adjust(scale, jnp.bool_(good))
        seen.append((float(scale.value), int(scale.good_windows)))
    return seen


def test_MP_06_scale_is_bounded_and_comes_back():
    seen = walk(Precision("float16", loss_scale=LossScale(2.0**15, growth_interval=1)), [True] * 300 + [False] * 300)
    assert seen[299] == (16777216.0, 0)
    assert seen[-1] == (1.0, 0)
    assert seen[300 + 23] == (1.0, 0)  # 24 halvings of 2**24


def test_the_scale_doubles_after_good_windows_in_a_row_only():
    precision = Precision("float16", loss_scale=LossScale(8.0, growth_interval=3))
    assert walk(precision, [True, True, False, True, True, True, True]) == [
        (8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1),
    ]  # fmt: skip
    assert LossScale() == LossScale(2.0**15, True, 2000, 1.0, 2.0**24)


@pytest.mark.parametrize(
    "precision", [Precision("float16", loss_scale=LossScale(64.0, dynamic=False)), Precision(), Precision("float32")]
)
def test_a_static_scale_never_moves(precision):
    start = 64.0 if precision.scaled else 1.0
    assert walk(precision, [True] * 3 + [False] * 3) == [(start, 0)] * 6
    assert precision.scaled == (precision.compute == "float16")


@pytest.mark.parametrize(
    "numbers",
    [
        {"initial": 0.0},
        {"initial": 0.5},
        {"initial": 2.0**25},
        {"minimum": 0.0},
        {"minimum": -1.0},
        {"initial": math.nan},
    ],
)
def test_impossible_scales_are_refused(numbers):
    with pytest.raises(ValueError, match="0 < minimum <= initial <= maximum"):
        LossScale(**numbers)


def test_unknown_compute_dtypes_are_refused():
    with pytest.raises(ValueError, match="'float64' is not one of bfloat16, float32, float16"):
        Precision("float64")


def test_cast_keeps_what_is_named():
    params = {"router": {"kernel": jnp.ones(2)}, "mlp": {"kernel": jnp.full((2,), 1 + 2.0**-10)}}
    cast = Precision("bfloat16", overrides=("router/",)).cast(params)
    assert [cast["router"]["kernel"].dtype, cast["mlp"]["kernel"].dtype] == [jnp.float32, jnp.bfloat16]
    assert cast["mlp"]["kernel"].astype(jnp.float32).tolist() == [1.0, 1.0]
    assert jax.tree.structure(cast) == jax.tree.structure(params)


def test_overrides_reach_the_loss_and_their_gradients_are_exact():
    dtypes = {}

    def loss(params, model_state, batch, key):
        dtypes.update({name: w.dtype for name, w in params.items()})
        return linear(params, model_state, batch, key)

    third = np.float32(1 / 3)
    program = linear_program(
        {"w": 0.0, "router": 0.0}, optax.sgd(1.0), loss=loss, precision=Precision("bfloat16", overrides=("router",))
    )
    state, _, _ = run(program, [rows({"w": third, "router": third})])
    assert dtypes == {"w": jnp.bfloat16, "router": jnp.float32}
    assert float(state.params["router"]) == -third
    assert float(state.params["w"]) == -float(jnp.float32(third).astype(jnp.bfloat16)) != -third


@pytest.mark.parametrize(
    ("compute", "x", "bits"),
    [
        # sign 1, exponent 8, fraction 23
        ("float32", 1.0, 0x3F800000), ("float32", -2.0, 0xC0000000), ("float32", 2.0**-126, 0x00800000),
        # sign 1, exponent 5, fraction 10: the largest is 65504, the smallest subnormal 2**-24; ties go to even
        ("float16", 1.0, 0x3C00), ("float16", -2.0, 0xC000), ("float16", 65504.0, 0x7BFF), ("float16", 65519.0, 0x7BFF),
        ("float16", 65520.0, 0x7C00), ("float16", 2.0**-14, 0x0400), ("float16", 2.0**-24, 0x0001),
        ("float16", 2.0**-25, 0x0000), ("float16", 1.5 * 2.0**-24, 0x0002), ("float16", 1 + 2.0**-10, 0x3C01),
        ("float16", 1 + 2.0**-11, 0x3C00), ("float16", 1 + 3 * 2.0**-11, 0x3C02),
        # sign 1, exponent 8, fraction 7: float32's range, three digits
        ("bfloat16", 1.0, 0x3F80), ("bfloat16", -2.0, 0xC000), ("bfloat16", 65520.0, 0x4780),
        ("bfloat16", 2.0**-126, 0x0080), ("bfloat16", 1 + 2.0**-7, 0x3F81), ("bfloat16", 1 + 2.0**-8, 0x3F80),
        ("bfloat16", 1 + 3 * 2.0**-8, 0x3F82), ("bfloat16", 3.3895e38, 0x7F7F), ("bfloat16", 3.4e38, 0x7F80),
    ],
)  # fmt: skip
def test_the_bits_of_the_compute_dtypes(compute, x, bits):
    """IEEE 754 binary32 and binary16, and bfloat16, as a compiled cast of a float32 master gives them."""
    got = np.asarray(jax.jit(Precision(compute).cast)({"w": jnp.float32(x)})["w"])
    assert int(got.view(f"uint{8 * got.itemsize}")) == bits


def test_an_overflow_halves_the_scale_and_changes_nothing_else_on_all_shards():
    """One row of one micro-batch of a window overflows: parameters, optimizer, average, mutable state are as before."""

    def loss(params, model_state, batch, key):
        return linear(params, model_state, batch, key)._replace(model_state={"seen": model_state["seen"] + 1})

    program = linear_program(
        {"w": [0.5] * 8}, optax.adam(0.1), k=2, loss=loss, model_state={"seen": jnp.zeros(8)}, ema=0.9, clip_norm=1.0,
        precision=Precision("float16", loss_scale=LossScale(2.0**15, growth_interval=2)), rules=[("w", P("fsdp"))],
        mesh=sharding.make_mesh(data=2, fsdp=4),
    )  # fmt: skip

    def held(state):
        snapshot = program.checkpoint_view(state)
        assert snapshot.model_state["seen"].tolist() == state.model_state["seen"].tolist()
        return [
            np.asarray(x)
            for x in jax.tree.leaves((snapshot.params, snapshot.opt_state, snapshot.model_state, snapshot.ema))
        ]

    good, bad = rows(*[[0.25] * 8] * 8), rows(*[[0.25] * 8] * 7, [0.25] * 7 + [30000.0])
    state, records, _ = run(program, [good, good])
    before = held(state)
    assert (records[-1]["step"], float(state.scale.value), int(state.scale.good_windows)) == (1, 2.0**15, 1)
    state, records, _ = run(program, [good, bad], state)
    after = held(state)
    assert all(was.tobytes() == now.tobytes() for was, now in zip(before, after, strict=True))
    assert {float(shard.data) for shard in state.scale.value.addressable_shards} == {2.0**14}
    assert int(state.scale.good_windows) == 0
    last = records[-1]
    assert (last["window"], last["step"], last["skipped_in_a_row"], last["micro_step"]) == (2, 1, 1, 4)
    state, records, _ = run(program, [good, good], state)
    assert (records[-1]["step"], records[-1]["loss_scale"], records[-1]["skipped_in_a_row"]) == (2, 2.0**14, 0)


def test_an_override_that_names_nothing_is_refused():
    for pattern, match in (("rooter", r"precision: overrides: 'rooter' chooses none of the 1 parameters: w\.$"),
                           ("([", r"precision: overrides: '\(\[' is no pattern")):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            linear_program({"w": 0.0}, optax.sgd(1.0), precision=Precision("bfloat16", overrides=("w", pattern)))


WEIGHTS = sorted(
    {*range(1, 70), *(2**i + d for i in range(1, 24) for d in (-1, 0, 1)), 3 * 2**20, 5000, 16000, 100_000}
)


def test_the_seed_is_an_exact_power_of_two_at_or_below_scale_over_weight():
    scale, precision = 2.0**15, Precision("float16")
    seed = jax.jit(jax.vmap(lambda w: precision.seed(precision.init_scale(), w)))(jnp.float32(WEIGHTS))
    wanted = [scale * 2.0 ** -((w - 1).bit_length()) for w in WEIGHTS]  # ceil(log2(w)) in integers
    wrong = [(w, float(got), want) for w, got, want in zip(WEIGHTS, seed, wanted, strict=True) if float(got) != want]
    assert not wrong


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_seed_of_a_small_weight_is_the_scale(weight):
    precision = Precision("float16", loss_scale=LossScale(256.0))
    assert float(precision.seed(precision.init_scale(), jnp.float32(weight))) == 256.0


def gradient(c: float, scale: float, count: int = 1) -> tuple[float, dict]:
    """The float16 gradient of ``count`` rows of ``w * c``, as the optimizer gets it, and the record."""
    precision = Precision("float16", loss_scale=LossScale(scale, dynamic=False))
    _, records, trace = run(linear_program({"w": 0.0}, optax.sgd(1.0), precision=precision), [rows(*[c] * count)])
    return -trace[0], records[0]


@pytest.mark.parametrize(
    ("c", "scale", "wanted", "relative"),
    [
        (1e-8, 1.0, 0.0, 0),  # below half of float16's smallest subnormal, 2**-24
        (1e-8, 1024.0, 1e-8, 2e-3),  # 1.024e-5 is subnormal: spacing 2**-24
        (2.0**-27, 1.0, 0.0, 0),
        (2.0**-27, 1024.0, 2.0**-27, 0),
    ],
)
def test_small_gradients_come_back_through_the_scale(c, scale, wanted, relative):
    assert gradient(c, scale)[0] == pytest.approx(wanted, rel=relative, abs=0)


@pytest.mark.parametrize("count", [1, 4096, 4097, 16000])
def test_the_sum_over_many_rows_does_not_overflow(count):
    got, record = gradient(1.5, 2.0**15, count)
    assert record["step"] == 1
    assert got == pytest.approx(1.5, rel=1e-3)
