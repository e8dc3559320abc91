"""The residual network against float64 NumPy with explicit loops, and counts and shapes worked out by hand."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain import paths
from jaxtrain.losses import classification
from jaxtrain.models.batch_norm import pooled_merge, pooled_zeros, pop_sums
from jaxtrain.models.resnet import Block, Conv, ResNet, ResNetConfig, flops_per_sample

SMALL = ResNetConfig(image_shape=(5, 6, 2), classes=3, width=4, blocks=(1, 2))
POOLED = dataclasses.replace(SMALL, running="pooled")


@functools.cache
def split(config):
    """Graph and abstract state."""
    return nnx.split(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))), nnx.Param, ...)


def fresh(config, seed=0):
    _, params, rest = nnx.split(ResNet(config, rngs=nnx.Rngs(seed)), nnx.Param, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


@functools.cache
def drawn(config, seed=0):
    """Parameters and running statistics of which none is special, as NumPy float32."""
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        draws = generator.standard_normal(leaf.shape)
        if path[-1].key == "kernel":
            draws /= np.sqrt(np.prod(leaf.shape[:-1]) / 2)
        if path[-1].key == "scale":
            draws = 1 + 0.3 * draws
        if path[-1].key == "var":
            draws = np.exp(0.5 * draws)
        return draws.astype(np.float32)

    _, params, rest = split(config)
    return jax.tree_util.tree_map_with_path(fill, (nnx.to_pure_dict(params), nnx.to_pure_dict(rest)))


@functools.partial(jax.jit, static_argnames=("config", "train"))
def forward(config, params, state, images, weights=None, train=False):
    """``(logits, model_state, stats)``."""
    graph, abstract_params, abstract_state = split(config)
    parts = jax.tree.map(lambda leaf: leaf, (abstract_params, abstract_state))
    for part, values in zip(parts, (params, state), strict=True):
        nnx.replace_by_pure_dict(part, values)
    model = nnx.merge(graph, *parts)
    logits = model(images, weights, train=train)
    stats = pop_sums(model)
    return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), stats


def images_of(config, rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, *config.image_shape)).astype(np.float32)


# ---- a second implementation -------------------------------------------------------------------------------------


def reference_conv(x, kernel, stride):
    """By the definition: out[i, j] is the patch around (stride * i, stride * j) times the kernel; 0 outside."""
    around = kernel.shape[0] // 2
    batch, height, width, _ = x.shape
    out = np.zeros((batch, -(-height // stride), -(-width // stride), kernel.shape[-1]))
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            for di in range(-around, around + 1):
                for dj in range(-around, around + 1):
                    row, col = stride * i + di, stride * j + dj
                    if 0 <= row < height and 0 <= col < width:
                        out[:, i, j] += x[:, row, col] @ kernel[around + di, around + dj]
    return out


def reference(params, state, images, weights=None, train=False, momentum=0.9):
    """``(logits, running statistics by path after one sequential move)`` in float64."""
    p = {name: leaf.astype(np.float64) for name, leaf in paths.named_leaves(params).items()}
    running = {name: leaf.astype(np.float64) for name, leaf in paths.named_leaves(state).items()}
    rows = np.arange(len(images)) if weights is None else np.repeat(np.arange(len(images)), weights.astype(int))

    def norm(x, at):
        mean, var = running[f"{at}/mean"], running[f"{at}/var"]
        if train:
            seen = x[rows].reshape(-1, x.shape[-1])
            mean, var = seen.mean(0), seen.var(0)
            for name, found in (("mean", mean), ("var", var)):
                running[f"{at}/{name}"] = momentum * running[f"{at}/{name}"] + (1 - momentum) * found
        return (x - mean) / np.sqrt(var + 1e-5) * p[f"{at}/scale"] + p[f"{at}/bias"]

    def relu(x):
        return np.where(x > 0, x, 0)

    x = relu(norm(reference_conv(images.astype(np.float64), p["stem/kernel"], 1), "stem_norm"))
    stage = 0
    while f"stages/{stage}/0/conv1/kernel" in p:
        block = 0
        while f"stages/{stage}/{block}/conv1/kernel" in p:
            at, stride = f"stages/{stage}/{block}", 2 if stage and not block else 1
            y = relu(norm(reference_conv(x, p[f"{at}/conv1/kernel"], stride), f"{at}/norm1"))
            y = norm(reference_conv(y, p[f"{at}/conv2/kernel"], 1), f"{at}/norm2")
            if stride == 2:
                x = norm(reference_conv(x, p[f"{at}/shortcut/kernel"], 2), f"{at}/shortcut_norm")
            x, block = relu(x + y), block + 1
        stage += 1
    return x.mean(axis=(1, 2)) @ p["head/kernel"] + p["head/bias"], running


THREE = ResNetConfig(image_shape=(7, 4, 1), classes=5, width=3, blocks=(2, 1, 1), momentum=0.6)
WEIGHTS = np.array([1, 0, 2, 1, 1, 0], np.float32)


@pytest.mark.parametrize("config", [SMALL, THREE], ids=["two_stages", "three_stages"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all", "weighted"])
@pytest.mark.parametrize("train", [False, True], ids=["evaluate", "train"])
def test_logits_and_statistics_match_float64_numpy(config, weights, train):
    params, state = drawn(config)
    images = images_of(config, 6)
    logits, moved, stats = forward(config, params, state, images, weights, train)
    wanted, running = reference(params, state, images, weights, train, config.momentum)
    assert stats is None
    assert (logits.shape, logits.dtype) == ((6, config.classes), jnp.float32)
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    assert np.ptp(wanted, axis=0).max() > 0.1  # the images matter
    for name, leaf in paths.named_leaves(moved).items():
        np.testing.assert_allclose(leaf, running[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_pooled_statistics_of_two_micro_batches_match_float64_numpy():
    """Without padding each norm's sums are those of what it saw: the mean of means, and of variances about it."""
    params, state = drawn(SMALL)
    images = images_of(SMALL, 8)
    halves = [forward(POOLED, params, state, part, None, True) for part in np.split(images, 2)]
    for _, kept, _ in halves:
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True))
    merged = pooled_merge(state, jax.tree.map(jnp.add, halves[0][2], halves[1][2]))
    seen = [reference(params, state, part, None, True, momentum=0.0)[1] for part in np.split(images, 2)]
    running = paths.named_leaves(state)
    for name, leaf in paths.named_leaves(merged).items():
        mean = [found[name.removesuffix("var").removesuffix("mean") + "mean"] for found in seen]
        wanted = sum(found[name] for found in seen) / 2
        if name.endswith("var"):
            wanted = wanted + (mean[0] - mean[1]) ** 2 / 4
        np.testing.assert_allclose(leaf, 0.9 * running[name] + 0.1 * wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("running", ["sequential", "pooled"])
def test_padding_rows_change_nothing_for_the_others(running):
    config = dataclasses.replace(SMALL, running=running)
    params, state = drawn(config)
    images = images_of(config, 6)
    images[4:] *= 50
    weights = np.array([1, 1, 1, 1, 0, 0], np.float32)
    padded, alone = (forward(config, params, state, images[:n], weights[:n], True) for n in (6, 4))
    np.testing.assert_allclose(padded[0][:4], alone[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(padded[1:]), jax.tree.leaves(alone[1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    unweighted = forward(config, params, state, images, None, True)[0]
    assert np.abs(unweighted[:4] - alone[0]).max() > 0.1


# ---- dtypes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_bfloat16_parameters_give_float32_logits(train):
    params, state = drawn(SMALL)
    low = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    images = images_of(SMALL, 6)
    logits, moved, _ = forward(SMALL, low, state, images, None, train)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {np.dtype("float32")}
    wanted, _ = reference(jax.tree.map(lambda p: np.asarray(p, np.float32), low), state, images, None, train)
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=0.1)
    assert np.abs(logits - wanted).max() > 1e-4  # the activations were bfloat16
    assert np.all(logits != logits.astype(jnp.bfloat16).astype(jnp.float32))  # and the logits never
    wide, _, _ = forward(SMALL, low, state, jnp.asarray(images, jnp.bfloat16), None, train)
    np.testing.assert_allclose(wide, logits, rtol=0, atol=0.05)  # whatever the images' dtype


def test_a_kernel_computes_in_its_own_dtype_and_returns_the_inputs():
    """1 - (1 + 2^-9): bfloat16 has no 1 + 2^-9."""
    conv = Conv(1, 2, 1, rngs=nnx.Rngs(0))
    conv.kernel.set_value(jnp.array([1 + 2.0**-9, -1]).reshape(1, 1, 2, 1))
    x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    assert (conv(x).dtype, float(conv(x)[0, 0, 0, 0])) == (jnp.bfloat16, 2.0**-9)
    conv.kernel.set_value(conv.kernel[...].astype(jnp.bfloat16))
    assert float(conv(x)[0, 0, 0, 0]) == 0.0


# ---- parameters --------------------------------------------------------------------------------------------------


def test_parameters_by_name_and_shape():
    params, state = fresh(SMALL)
    norms = {"stem_norm": 4, "stages/0/0/norm1": 4, "stages/0/0/norm2": 4}
    norms |= {f"stages/1/{at}": 8 for at in ("0/norm1", "0/norm2", "0/shortcut_norm", "1/norm1", "1/norm2")}
    kernels = {
        "stem": (3, 3, 2, 4), "stages/0/0/conv1": (3, 3, 4, 4), "stages/0/0/conv2": (3, 3, 4, 4),
        "stages/1/0/conv1": (3, 3, 4, 8), "stages/1/0/conv2": (3, 3, 8, 8), "stages/1/0/shortcut": (1, 1, 4, 8),
        "stages/1/1/conv1": (3, 3, 8, 8), "stages/1/1/conv2": (3, 3, 8, 8), "head": (8, 3),
    }  # fmt: skip
    wanted = {f"{at}/kernel": shape for at, shape in kernels.items()} | {"head/bias": (3,)}
    wanted |= {f"{at}/{name}": (size,) for at, size in norms.items() for name in ("scale", "bias")}
    named = paths.named_leaves(params)
    assert {name: leaf.shape for name, leaf in named.items()} == wanted
    running = {f"{at}/{name}": (size,) for at, size in norms.items() for name in ("mean", "var")}
    assert {name: leaf.shape for name, leaf in paths.named_leaves(state).items()} == running
    assert {leaf.dtype for leaf in jax.tree.leaves((params, state))} == {jnp.dtype("float32")}
    # stem 72 + 8; stage 0: 2 * 144 + 16; stage 1: 288 + 576 + 32 + shortcut 32 + 16, then 2 * 576 + 32; head 24 + 3
    assert sum(leaf.size for leaf in named.values()) == 80 + 304 + 944 + 1184 + 27


def test_initial_values():
    config = ResNetConfig(image_shape=(8, 8, 3), classes=10, width=32, blocks=(1, 1))
    params, state = fresh(config)
    for name, leaf in paths.named_leaves(params).items():
        if name == "head/kernel":
            assert float(jnp.std(leaf)) == pytest.approx(0.01, rel=0.15)  # 640 draws
        elif name.endswith("kernel"):
            size, _, inputs, _ = leaf.shape
            assert float(jnp.std(leaf)) == pytest.approx((2 / (size * size * inputs)) ** 0.5, rel=0.15)
            assert abs(float(jnp.mean(leaf))) < 0.2 * float(jnp.std(leaf))
        else:
            assert np.all(leaf == (1.0 if name.endswith("scale") and "norm2" not in name else 0.0)), name
    for name, leaf in paths.named_leaves(state).items():
        assert np.all(leaf == (1.0 if name.endswith("var") else 0.0)), name
    kernels = [bytes(np.asarray(leaf)) for name, leaf in paths.named_leaves(params).items() if "kernel" in name]
    assert len(set(kernels)) == len(kernels)  # each has a key of its own


def test_resnet20_has_the_papers_size():
    """0.27 M in table 6 of arXiv 1512.03385, there with shortcuts that have no parameters (here 2,752 and norms)."""
    config = ResNetConfig(image_shape=(32, 32, 3), classes=10)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.to_pure_dict(split(config)[1])))
    shortcuts = 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert count - shortcuts == 269_722
    assert config.widths == (16, 32, 64)


# ---- shapes, strides, shortcuts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(1, 1), (2, 3), (5, 5), (6, 7)])
def test_a_stride_of_two_halves_rounding_up_and_keeps_the_even_places(sides):
    """Kernels of one tap in the middle, of either size, stand on the places 0, 2, 4, ..."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, *sides, 1)), jnp.float32)
    for size in (1, 3):
        conv = Conv(size, 1, 1, 2, rngs=nnx.Rngs(0))
        middle = np.zeros((size, size, 1, 1), np.float32)
        middle[size // 2, size // 2] = 1.0
        conv.kernel.set_value(jnp.asarray(middle))
        assert conv(x).shape == (2, (sides[0] + 1) // 2, (sides[1] + 1) // 2, 1)
        assert np.array_equal(conv(x), x[:, ::2, ::2])


@pytest.mark.parametrize(
    ("image_shape", "stages"), [((1, 1, 1), 1), ((8, 8, 1), 4), ((5, 9, 1), 4), ((3, 3, 1), 3), ((2, 64, 1), 2)]
)
def test_as_many_stages_as_the_smaller_side_can_be_halved(image_shape, stages):
    """5 -> 3 -> 2 -> 1 is three halvings."""
    config = ResNetConfig(image_shape, classes=2, width=1, blocks=(1,) * stages)
    logits = nnx.eval_shape(
        lambda: ResNet(config, rngs=nnx.Rngs(0))(jnp.zeros((3, *image_shape)), train=False)
    )  # fmt: skip
    assert logits.shape == (3, 2)
    with pytest.raises(
        ValueError, match=rf"halves the image {stages} times, .* can be halved {stages - 1} times; give"
    ):
        dataclasses.replace(config, blocks=(1,) * (stages + 1))


@pytest.mark.parametrize("train", [False, True])
def test_a_block_starts_as_its_shortcut(train):
    x = jax.nn.relu(jnp.asarray(images_of(SMALL, 4)))  # the shortcut ends in a ReLU
    same = Block(2, 2, 1, SMALL, rngs=nnx.Rngs(0))
    assert not same.projects
    assert np.array_equal(same(x, None, train), x)
    for outputs, stride, shape in ((3, 1, (4, 5, 6, 3)), (2, 2, (4, 3, 3, 2)), (4, 2, (4, 3, 3, 4))):
        other = Block(2, outputs, stride, SMALL, rngs=nnx.Rngs(0))
        out = other(x, None, train)
        assert out.shape == shape
        assert np.array_equal(out, jax.nn.relu(other.shortcut_norm(other.shortcut(x), train=train)))
        assert np.any(out > 0)


def gradients(config, params, state):
    images, labels = images_of(config, 6), np.array([0, 1, 2, 0, 1, 2])

    def loss(params):
        return classification(forward(config, params, state, images, None, True)[0], labels).total

    return {name: np.asarray(leaf) for name, leaf in paths.named_leaves(jax.jit(jax.grad(loss))(params)).items()}


@pytest.mark.parametrize("running", ["sequential", "pooled"])
def test_every_parameter_has_a_gradient(running):
    config = dataclasses.replace(SMALL, running=running)
    found = gradients(config, *drawn(config))
    assert not [name for name, leaf in found.items() if np.abs(leaf).max() < 1e-4]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all", "weighted"])
def test_gradient_matches_float64_finite_differences(weights):
    """Along a random direction, a different one for each parameter; statistics of the batch move too."""
    params, state = drawn(SMALL)
    images, labels = images_of(SMALL, 6), np.array([0, 1, 2, 0, 1, 2])

    def loss(params):
        return classification(forward(SMALL, params, state, images, weights, True)[0], labels, weights).total

    def wanted(params):
        logits, _ = reference(params, state, images, weights, train=True)
        nats = np.log(np.exp(logits).sum(1)) - logits[np.arange(6), labels]
        return nats.sum() if weights is None else weights @ nats

    found = paths.named_leaves(jax.jit(jax.grad(loss))(params))
    generator, step = np.random.default_rng(3), 1e-5
    named = {name: leaf.astype(np.float64) for name, leaf in paths.named_leaves(params).items()}
    for name, leaf in named.items():
        direction = generator.standard_normal(leaf.shape)
        there, back = (wanted(named | {name: leaf + side * step * direction}) for side in (1, -1))
        slope = (there - back) / (2 * step)
        assert float(np.sum(found[name] * direction)) == pytest.approx(slope, rel=1e-3, abs=1e-3), name


def test_at_the_start_what_the_zero_scale_hides_has_no_gradient():
    found = gradients(SMALL, *fresh(SMALL))
    hidden = {name for name in found if re.search(r"conv|norm1", name)}
    assert {name for name, leaf in found.items() if not np.any(leaf)} == hidden
    assert len(hidden) == 3 * 4
    assert all(np.any(found[name]) for name in found if name.endswith("norm2/scale"))


# ---- floating-point operations -----------------------------------------------------------------------------------


def test_flops_by_hand():
    """30 places, then 3 x 3 = 9.

    stem 30 * 9 * 2 * 4 = 2,160; stage 0: 2 * 30 * 9 * 4 * 4 = 8,640; stage 1: 9 * (288 + 576 + 32 + 2 * 576) = 18,432;
    head 24.
    """
    assert flops_per_sample(SMALL) == 6 * (2_160 + 8_640 + 18_432 + 24)


def test_flops_of_resnet20():
    """40.55 M multiply-adds in stem, blocks and head, and 2 * 131,072 in the shortcuts that the paper does not have.

    stem 1024 * 432; each stage's six 3x3 layers 1024 * 2304, of which the first of a later stage is half of that.
    """
    full, layer = 1024 * 432, 1024 * 2304
    products = full + 6 * layer + 2 * (layer // 2 + 5 * layer) + 2 * 131_072 + 640
    assert flops_per_sample(ResNetConfig(image_shape=(32, 32, 3), classes=10)) == 6 * products


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"image_shape": (8, 8)}, "image_shape=(8, 8) must be (height, width, channels), each at least 1"),
        ({"image_shape": (8, 0, 1)}, "image_shape=(8, 0, 1) must be (height, width, channels), each at least 1"),
        ({"classes": 1}, "classes=1 must be at least 2"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"blocks": ()}, "blocks=() must name at least one stage, each of at least 1 block"),
        ({"blocks": (1, 0)}, "blocks=(1, 0) must name at least one stage, each of at least 1 block"),
        (
            {"image_shape": (16, 4, 1), "blocks": (1, 1, 1, 1)},
            "blocks=(1, 1, 1, 1) halves the image 3 times, but a side of 4 pixels can be halved 2 times; give at most "
            "3 stages",
        ),
        ({"momentum": 1.5}, "momentum=1.5 must be at least 0 and below 1"),
        ({"running": "both"}, "running='both' is unknown; choose one of sequential, pooled"),
    ],
)
def test_a_config_out_of_range_is_refused(settings, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        dataclasses.replace(SMALL, **settings)


def test_lists_from_a_config_file_are_taken():
    config = ResNetConfig([5, 6, 2], 3, 4, [1, 2])
    assert config == SMALL
    assert hash(config) == hash(SMALL)


def test_images_of_another_shape_are_refused():
    model = ResNet(SMALL, rngs=nnx.Rngs(0))
    for shape in ((4, 6, 5, 2), (5, 6, 2)):
        text = f"images have shape {shape}; give (batch, *image_shape) with image_shape=(5, 6, 2)"
        with pytest.raises(ValueError, match=re.escape(text)):
            model(jnp.zeros(shape), train=False)
    with pytest.raises(ValueError, match="give one weight for each row"):
        model(jnp.zeros((4, 5, 6, 2)), jnp.ones(3), train=True)


def test_zeros_fit_what_the_model_sees():
    params, state = fresh(POOLED)
    _, _, stats = forward(POOLED, params, state, images_of(POOLED, 2), None, True)
    assert not paths.differences(pooled_zeros(state), stats)
    assert int(stats["stem_norm"]["sums"]["count"]) == 2 * 30
    assert int(stats["stages"][1][1]["norm2"]["sums"]["count"]) == 2 * 9
    assert forward(POOLED, params, state, images_of(POOLED, 2), None, False)[2] is None
