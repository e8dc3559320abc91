"""The mesh and the sharding of every leaf, on eight virtual devices and on meshes that nobody has."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import sharding
from jaxtrain.sharding import STACKED, infer, like_params

EDGE = sharding.SMALLEST_SHARDED  # 2**16 elements


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def spec(x: jax.ShapeDtypeStruct, mesh, name: str = "w", **settings) -> P:
    sharded = infer({name: x}, mesh, **settings)[name]
    assert isinstance(sharded, NamedSharding)
    assert sharded.mesh == mesh
    sharded.shard_shape(x.shape)  # raises where it does not divide
    return sharded.spec


# ---- the mesh ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ({}, (1, 1, 1, 1)),
        ({"data": 8}, (1, 8, 1, 1)),
        ({"fsdp": -1}, (1, 1, 8, 1)),
        ({"slice": 2, "data": -1, "tensor": 2}, (2, 2, 1, 2)),
        ({"data": -1, "fsdp": 8}, (1, 1, 8, 1)),
    ],
)
def test_make_mesh(axes, wanted):
    mesh = sharding.make_mesh(**axes)
    assert mesh.axis_names == ("slice", "data", "fsdp", "tensor") == sharding.AXES
    assert tuple(mesh.shape.values()) == wanted
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_takes_the_devices_it_is_given():
    some = jax.devices()[2:6]
    assert set(sharding.make_mesh(fsdp=-1, devices=some).devices.flat) == set(some)
    assert sharding.make_mesh(devices=some).devices.flat[0] == some[0]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"data": 4}, r"slice=1, data=4, fsdp=1, tensor=1 needs 4 devices and 8 are here.*-1"),
        ({"data": 16}, r"needs 16 devices and 8 are here"),
        ({"data": 3, "fsdp": -1}, r"8 devices do not divide by 3"),
        ({"data": 16, "fsdp": -1}, r"8 devices do not divide by 16"),
        ({"data": -1, "fsdp": -1}, r"at most one axis is -1"),
        ({"tensor": 0}, r"tensor=0: sizes are 1 or more"),
        ({"tensor": -2}, r"tensor=-2: sizes are 1 or more"),
    ],
)
def test_make_mesh_errors(axes, text):
    with pytest.raises(ValueError, match=text):
        sharding.make_mesh(**axes)


# ---- defaults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        ((256, 512), P(None, "fsdp")),  # the largest
        ((512, 256), P("fsdp")),
        ((256, 256), P(None, "fsdp")),  # of equal ones the last
        ((8, 256, 256, 4), P(None, None, "fsdp")),
        ((1023, 256), P(None, "fsdp")),  # the largest that divides
        ((1023, 257), P()),  # none divides
        ((EDGE,), P("fsdp")),
        ((EDGE - 8,), P()),  # small: replicated
        ((8, 8), P()),
        ((), P()),
        ((0, EDGE), P()),
    ],
)
def test_default_sharding(make_mesh, dims, wanted):
    assert spec(shape(*dims), make_mesh(fsdp=8)) == wanted


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "tensor": 2}, {}])
def test_without_fsdp_nothing_is_sharded_by_default(make_mesh, axes):
    mesh = make_mesh(**axes) if axes else sharding.make_mesh()
    assert spec(shape(512, 512), mesh) == P()


@pytest.mark.parametrize(
    ("name", "dims", "wanted"),
    [
        ("layers/up", (4096, 64, 64), P(None, None, "fsdp")),  # the stacked dim never, though it is the largest
        ("blocks/up", (24, 256, 64), P(None, "fsdp")),
        ("encoder/layers/up", (24, 256, 64), P(None, "fsdp")),
        ("layers/scale", (EDGE,), P()),
        ("players/up", (4096, 64, 64), P("fsdp")),  # not stacked: only the whole word
    ],
)
def test_stacked_layers(make_mesh, name, dims, wanted):
    assert spec(shape(*dims), make_mesh(fsdp=8), name=name) == wanted


# ---- rules -------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides(make_mesh):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    rules = [("up/kernel$", P("fsdp", "tensor")), ("kernel", P(("data", "fsdp"))), ("free", P()), ("stack", STACKED)]
    tree = {
        "up": {"kernel": shape(4, 4), "bias": shape(4)},
        "down": {"kernel": shape(4, 4)},
        "free": shape(512, 512),
        "stack": shape(512, 256, 8),
    }
    got = jax.tree.map(lambda s: s.spec, infer(tree, mesh, rules))
    assert got == {
        "up": {"kernel": P("fsdp", "tensor"), "bias": P()},
        "down": {"kernel": P(("data", "fsdp"))},
        "free": P(),
        "stack": P(None, "fsdp"),
    }


@pytest.mark.parametrize(
    ("spec_", "text"),
    [
        (
            P("fsdp"),
            "up/kernel: dim 63 of (63, 16) is not divisible by mesh axis 'fsdp'=4 (rule 'up'); pad it or change",
        ),
        (P(("data", "fsdp")), "up/kernel: dim 63 of (63, 16) is not divisible by mesh axis ('data', 'fsdp')=8"),
        (P(None, "model"), "up/kernel: rule 'up' names axis 'model'; the mesh has slice, data, fsdp, tensor"),
        (P(None, None, "fsdp"), "up/kernel: rule 'up' gives 3 dims"),
        ("stacked?", "rule 'up': 'stacked?' is neither a PartitionSpec nor sharding.STACKED"),
    ],
)
def test_rules_that_cannot_hold_are_errors(make_mesh, spec_, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        infer({"up": {"kernel": shape(63, 16)}}, make_mesh(data=2, fsdp=4), [("up", spec_)])


def test_axes_size(make_mesh):
    mesh = make_mesh(data=2, fsdp=4)
    assert [sharding.axes_size(mesh, axes) for axes in (None, "fsdp", ("data", "fsdp"), ())] == [1, 4, 8, 1]


# ---- trees like the parameters -----------------------------------------------------------------------------------

PARAMS = {"embed": {"kernel": shape(512, 256)}, "kernel": shape(128, 1024), "bias": shape(256)}
OPTIMIZERS = {
    "adam": (lambda: optax.adam(1e-3), 4),
    "momentum": (lambda: optax.sgd(1e-3, momentum=0.9), 2),
    "chain": (lambda: optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_adam()), 6),
    "accumulated": (lambda: optax.MultiSteps(optax.adam(1e-3), 4), 6),
}


@pytest.mark.parametrize(("optimizer", "big"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_moments_are_sharded_like_their_parameters(make_mesh, optimizer, big):
    mesh = make_mesh(fsdp=8)
    shardings = infer(PARAMS, mesh)
    assert [s.spec for s in jax.tree.leaves(shardings)] == [
        P(),
        P("fsdp"),
        P(None, "fsdp"),
    ]  # bias, embed/kernel, kernel
    state = jax.eval_shape(optimizer().init, PARAMS)
    got = like_params(state, PARAMS, shardings, mesh)
    by_shape = {(512, 256): P("fsdp"), (128, 1024): P(None, "fsdp")}
    for leaf, sharded in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
        assert sharded.spec == by_shape.get(leaf.shape, P()), leaf
    assert sum(leaf.shape in by_shape for leaf in jax.tree.leaves(state)) == big


def test_adafactors_factors_are_replicated(make_mesh):
    mesh = make_mesh(fsdp=8)
    params = {"w": shape(512, 256), "square": shape(EDGE)}
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    got = like_params(state, params, infer(params, mesh), mesh)
    leaves = list(zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True))
    assert {leaf.shape: s.spec for leaf, s in leaves if leaf.size > 1} == {(512,): P(), (256,): P(), (EDGE,): P("fsdp")}


def test_equal_shapes_do_not_swap_shardings(make_mesh):
    mesh = make_mesh(fsdp=4, tensor=2)
    params = {"up": shape(256, 256), "down": shape(256, 256), "deep": {"up": shape(256, 256)}}
    rules = [("deep/up", P("tensor")), ("up", P("fsdp", "tensor")), ("down", P("tensor", "fsdp"))]
    shardings = infer(params, mesh, rules)
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    got = like_params(state, params, shardings, mesh)
    assert got[0].mu == got[0].nu == shardings


@pytest.mark.parametrize("make", [lambda w: w, lambda w: [w, (w,)]], ids=["bare", "list"])
def test_parameters_of_any_container(make_mesh, make):
    mesh, params = make_mesh(fsdp=8), make(shape(512, 256))
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    got = like_params(state, params, infer(params, mesh), mesh)
    big = [s.spec for leaf, s in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True) if leaf.size > 1]
    assert big == [P("fsdp")] * 2 * len(jax.tree.leaves(params))


def test_with_shardings_keeps_shapes_and_dtypes(make_mesh):
    mesh = make_mesh(fsdp=8)
    tree = {"a": jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    got = sharding.with_shardings(tree, infer(tree, mesh))
    assert [(x.shape, x.dtype, x.sharding.spec) for x in jax.tree.leaves(got)] == [
        ((512, 256), jnp.bfloat16, P("fsdp")),
        ((), jnp.int32, P()),
    ]


def test_a_mesh_of_256_devices_that_nobody_has():
    mesh = AbstractMesh((2, 4, 32, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    assert spec(shape(4096, 1024), mesh) == P("fsdp")
    with pytest.raises(ValueError, match="dim 33"):
        infer({"w": shape(33)}, mesh, [("w", P("fsdp"))])
