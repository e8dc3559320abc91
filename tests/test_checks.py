"""jaxtrain/checks.py: what a first-time user does wrong is refused at once, in a sentence that says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain import adapters, sharding
from jaxtrain.optim import MultiSteps, Scan
from jaxtrain.precision import Precision
from jaxtrain.step import Loss, Variables, build_train_step


def loss(params, model_state, batch, key):
    y = batch["x"].astype(params["w"].dtype) @ params["w"] + params["b"][None, :]
    return Loss(jnp.sum(y.astype(jnp.float32) ** 2 * batch["m"][:, None]), jnp.sum(batch["m"]))


def init(key):
    return Variables({"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)})


def built(optimizer=None, **settings):
    settings = {"mesh": sharding.make_mesh(fsdp=-1), "loss_fn": loss, "init_fn": init} | settings
    return build_train_step(settings.pop("loss_fn"), settings.pop("init_fn"), optimizer or optax.adam(1e-2), **settings)


def rows(*shape):
    return {"x": np.ones((*shape, 4), np.float32), "m": np.ones(shape, np.float32)}


@pytest.fixture(scope="module")
def averaged():
    return built(ema=0.9, accumulation=MultiSteps(4))


@pytest.fixture(scope="module")
def plain():
    return built(optax.sgd(0.1))


def on_host(program, state=None):
    return jax.device_get(program.checkpoint_view(program.init() if state is None else state))


# ---- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_is_resumed_once(averaged):
    """jax 0.10.2 ended the process on 8 CPU devices when the second call reused what the first had taken."""
    placed = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), on_host(averaged), averaged.abstract_snapshot)
    averaged.resume(placed)
    with pytest.raises(ValueError, match=r"^resume: the snapshot: params/b, .* is gone: an earlier call took it over"):
        averaged.resume(placed)


def test_a_checkpoint_view_dies_with_the_next_step(averaged):
    state = averaged.init()
    view = averaged.checkpoint_view(state)
    averaged.step(state, rows(16))
    with pytest.raises(
        ValueError, match=r"is gone.* A checkpoint_view lives until the next step.* copy what must live longer"
    ):
        averaged.resume(view)


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda s: s._replace(params={"w": np.ones((4, 7), np.float32), "b": s.params["b"]}),
         ["params/w: expected float32[4, 3], got float32[4, 7]"]),
        (lambda s: s._replace(params=jax.tree.map(lambda x: x.astype(np.float16), s.params)),
         ["params/b: expected float32[3], got float16[3]", "params/w: expected float32[4, 3], got float16[4, 3]"]),
        (lambda s: s._replace(ema=None),
         ["ema/b: missing (expected float32[3])", "ema/w: missing (expected float32[4, 3])"]),
    ],
    ids=["shape", "dtype", "no average"],
)  # fmt: skip
def test_a_snapshot_that_does_not_fit_is_refused_by_name(averaged, change, lines):
    with pytest.raises(ValueError, match=r"^resume: the snapshot does not fit this program:\n  ") as caught:
        averaged.resume(change(on_host(averaged)))
    assert str(caught.value).splitlines()[1:] == [f"  {line}" for line in lines]


def test_an_average_that_the_program_does_not_keep_is_refused(averaged):
    with pytest.raises(ValueError, match=r"ema/b: not expected \(got float32\[3\]\)"):
        built().resume(on_host(averaged))


def test_containers_may_be_others_than_the_programs(averaged):
    """As a restore without a template gives them: dicts and lists for named tuples and tuples."""
    snapshot = on_host(averaged)
    as_dicts = snapshot._asdict() | {
        "opt_state": [snapshot.opt_state[0]._asdict(), {}], "scale": snapshot.scale._asdict(),
        "counters": snapshot.counters._asdict(),
    }  # fmt: skip
    state = averaged.resume(as_dicts)
    assert jax.tree.structure(state) == jax.tree.structure(averaged.abstract_state)


# ---- states and contributions of another program -----------------------------------------------------------------


def test_a_state_of_another_program_is_told_by_name(averaged, plain):
    with pytest.raises(ValueError, match=r"^step: the state does not fit this program:\n  opt_state/") as caught:
        plain.step(averaged.init(), rows(16))
    assert "\n  ema/w: not expected (got float32[4, 3])" in str(caught.value)


def test_what_is_no_contribution_of_the_program_is_refused(plain):
    contribution = plain.grads(plain.view(plain.init()), rows(16), 0)
    with pytest.raises(TypeError, match=r"^apply: got dict; give the Contribution that .*grads returned"):
        plain.apply(plain.init(), {})
    with pytest.raises(ValueError, match=r"^apply: the gradient does not fit this program:\n  b: missing"):
        plain.apply(plain.init(), contribution._replace(grads={"w": contribution.grads["w"]}))


# ---- arguments of the builder ------------------------------------------------------------------------------------


def explicit_mesh():
    return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (lambda: {"mesh": explicit_mesh()}, r"mesh: axis 'fsdp' is not Auto.* use jaxtrain\.sharding\.make_mesh\(\)"),
        (lambda: {"init_fn": 3}, "init_fn is 3; give a function"),
        (lambda: {"loss_fn": None}, "loss_fn is None; give a function"),
        (lambda: {"clip_norm": "1"}, "clip_norm='1': give a positive bound"),
        (lambda: {"clip_norm": float("nan")}, "clip_norm=nan: give a positive bound"),
        (lambda: {"ema": "x"}, "ema='x': the decay of the average"),
        (lambda: {"seed": None}, "seed is None; give a whole number"),
        (lambda: {"seed": jax.random.key(0)}, "seed is Array"),
        (lambda: {"rules": [("(", P("fsdp"))]}, r"rules: '\(' is no pattern"),
        (lambda: {"optimizer": optax.MultiSteps(optax.adam(1e-3), 2)},
         r"optimizer is an optax\.MultiSteps; .* accumulation="),
        (lambda: {"optimizer": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()},
         r"optimizer holds an optax\.MultiSteps; .* accumulation="),
        (lambda: {"batch_axes": ("dta",)}, r"batch_axes: 'dta' is no axis of the mesh \(slice, data, fsdp, tensor\)"),
        (lambda: {"trainable": {"b": False}}, "trainable is a dict; give patterns"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_a_sentence(settings, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}"):
        built(**settings())


def test_axes_that_a_small_mesh_lacks_are_no_mistake():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert built(mesh=mesh, rules=()).batch_sharding.spec == P(("data",))
    assert built(seed=np.int64(3)).abstract_state.params["w"].shape == (4, 3)


def test_a_module_where_a_function_is_wanted():
    with pytest.raises(TypeError, match=r"from_nnx: got a module; give a function that makes one, as lambda rngs: "):
        adapters.from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), None)


def test_a_mesh_of_some_devices_says_how():
    with pytest.raises(ValueError, match=r"needs 4 devices and 8 are here; set one axis to -1 .*, or give devices="):
        sharding.make_mesh(data=4)


# ---- batches and metrics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (rows(2, 16), r"2 rows do not divide by the 8 devices .* Windows \[k, rows, \.\.\.\] are for Scan\(k\)\.$"),
        (rows(12), r"12 rows do not divide by the 8 devices .*; use 8 or 16 rows\.$"),
        (rows(16) | {"m": np.ones(8, np.float32)},
         r"every leaf needs the same leading dim .*, got m: \(8,\), x: \(16, 4\)\.$"),
        ({"x": np.array(["a"] * 16)}, r"it holds <U1, which no device takes"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_is_told_with_its_leaf(plain, batch, sentence):
    with pytest.raises(ValueError, match=f"^batch: {sentence}"):
        plain.step(plain.init(), batch)


def test_the_batch_that_failed_is_not_the_one_that_is_expected():
    """A trace that ends in an error is no compilation: the next, right call warns of nothing (warnings are errors)."""
    program = built()
    with pytest.raises(TypeError, match="contracting dimensions"):
        program.step(program.init(), {"x": np.ones((16, 5), np.float32), "m": np.ones(16, np.float32)})
    program.step(program.init(), rows(16))


def test_a_metric_that_is_not_there_lists_those_that_are(plain):
    _, metrics = plain.step(plain.init(), rows(16))
    with pytest.raises(KeyError, match="no metric 'lr'; there are loss, weight, grad_norm"):
        metrics["lr"]
    with pytest.raises(KeyError, match=re.escape("'skipped_steps' (to_host() has tokens and skipped_steps)")):
        metrics["skipped_steps"]


@pytest.mark.parametrize("accumulation", [MultiSteps(2), Scan(2), Scan(2, defer=True)], ids=str)
def test_a_skipped_window_has_no_norm_that_looks_real(accumulation):
    program = built(accumulation=accumulation, precision=Precision("float32"))
    bad = rows(16)
    bad["x"] = bad["x"] * np.nan
    state = program.init()
    if isinstance(accumulation, Scan):
        _, metrics = program.step(state, {name: np.stack([rows(16)[name], bad[name]]) for name in bad})
    else:
        state, _ = program.step(state, rows(16))
        _, metrics = program.step(state, bad)
    record = metrics.to_host()
    assert record["skipped_steps"] == 1
    assert np.isnan([record["loss"], record["grad_norm"], record["grad_norm_clipped"]]).all()
