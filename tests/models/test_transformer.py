"""The transformer against float64 NumPy with explicit loops, published parameter counts and hand-computed numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain.models import transformer
from jaxtrain.models.dense import dropout
from jaxtrain.models.transformer import (
    SHARDING_RULES,
    Transformer,
    TransformerConfig,
    flops_per_token,
    parameter_count,
)

MULTI_HEAD = TransformerConfig(
    vocab_size=13, layers=2, d_model=12, heads=3, kv_heads=3, d_ff=20, max_length=512, tied_embeddings=False
)
GROUPED = TransformerConfig(
    vocab_size=17, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24, max_length=512, tied_embeddings=True
)


def abstract_params(config: TransformerConfig):
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def make_params(config: TransformerConfig, seed: int = 0):
    """Parameters large enough for attention to be far from uniform and for norms to matter."""
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        draws = generator.standard_normal(leaf.shape)
        if path[-1].key == "scale":
            return jnp.asarray(1.0 + 0.3 * draws, jnp.float32)
        return jnp.asarray(draws * (1.0 if path[-1].key == "embedding" else leaf.shape[-2] ** -0.5), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


@functools.cache
def graph_of(config):
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


@functools.partial(jax.jit, static_argnames="config")
def logits_of(config, params, tokens, positions=None, segments=None, key=None):
    return nnx.merge(graph_of(config), params)(tokens, positions, segments, key=key)


def random_tokens(config, batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length), dtype=np.int32)


def reference_logits(params, config, tokens, positions=None, segments=None, dropout_masks=None):
    """Float64, one row, head and query at a time; ``dropout_masks`` (N, 2, B, L, D) multiply the two branches."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    channels = config.d_model // config.heads

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2) + config.norm_eps) * scale

    def rotate(x, position):
        turned = x.copy()
        for c in range(channels // 2):
            angle = position * config.rope_theta ** (-2.0 * c / channels)
            a, b = x[c], x[c + channels // 2]
            turned[c] = a * np.cos(angle) - b * np.sin(angle)
            turned[c + channels // 2] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    def attention(xs, layer, row_positions, row_segments):
        kernel = {name: p["layers"]["attention"][name]["kernel"][layer] for name in ("query", "key", "value", "out")}
        cut = lambda x: x.reshape(-1, channels)  # noqa: E731
        queries = [[rotate(h, at) for h in cut(x @ kernel["query"])] for x, at in zip(xs, row_positions, strict=True)]
        keys = [[rotate(h, at) for h in cut(x @ kernel["key"])] for x, at in zip(xs, row_positions, strict=True)]
        values = [cut(x @ kernel["value"]) for x in xs]
        outs = []
        for i in range(len(xs)):
            heads = []
            for head in range(config.heads):
                shared = head // (config.heads // config.kv_heads)
                seen = [j for j in range(i + 1) if row_segments[j] == row_segments[i]]
                scores = np.array([queries[i][head] @ keys[j][shared] for j in seen]) / np.sqrt(channels)
                weights = np.exp(scores - scores.max())
                heads.append(sum(w * values[j][shared] for w, j in zip(weights / weights.sum(), seen, strict=True)))
            outs.append(np.concatenate(heads) @ kernel["out"])
        return np.array(outs)

    def mlp(x, layer):
        gate, up, down = (p["layers"]["mlp"][name]["kernel"][layer] for name in ("gate", "up", "down"))
        return ((x @ gate) / (1.0 + np.exp(-(x @ gate))) * (x @ up)) @ down

    batch, length = tokens.shape
    positions = np.tile(np.arange(length), (batch, 1)) if positions is None else positions
    segments = np.zeros((batch, length), int) if segments is None else segments
    masks = np.ones((config.layers, 2, batch, length, 1)) if dropout_masks is None else dropout_masks
    table = p["embedding"]["embedding"]
    logits = []
    for row in range(batch):
        x = table[tokens[row]]
        for layer in range(config.layers):
            scales = p["layers"]["attention_norm"]["scale"][layer], p["layers"]["mlp_norm"]["scale"][layer]
            mixed = attention([norm(t, scales[0]) for t in x], layer, positions[row], segments[row])
            x = x + mixed * masks[layer, 0, row]
            x = x + np.array([mlp(norm(t, scales[1]), layer) for t in x]) * masks[layer, 1, row]
        hidden = np.array([norm(t, p["final_norm"]["scale"]) for t in x])
        logits.append(hidden @ (table.T if config.tied_embeddings else p["head"]["kernel"]))
    return np.array(logits)


def packed(lengths):
    """Positions that restart and segment numbers for documents of these lengths in one row."""
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    return positions, np.repeat(np.arange(1, len(lengths) + 1), lengths)[None].astype(np.int32)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("config", [MULTI_HEAD, GROUPED], ids=["multi_head", "grouped"])
def test_logits_match_float64_numpy(config):
    params = make_params(config)
    tokens = random_tokens(config, 2, 9)
    logits = logits_of(config, params, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference_logits(params, config, tokens), rtol=1e-5, atol=2e-5)


def test_packed_rows_match_float64_numpy():
    params = make_params(GROUPED)
    tokens = random_tokens(GROUPED, 1, 12)
    positions, segments = packed([3, 5, 4])
    expected = reference_logits(params, GROUPED, tokens, positions, segments)
    np.testing.assert_allclose(logits_of(GROUPED, params, tokens, positions, segments), expected, rtol=1e-5, atol=2e-5)
    assert np.abs(expected - reference_logits(params, GROUPED, tokens)).max() > 0.1  # the segments matter


def test_several_query_blocks_match_float64_numpy():
    config = dataclasses.replace(GROUPED, layers=1)
    params = make_params(config)
    tokens = random_tokens(config, 1, 387)  # 3 blocks of 129
    positions, segments = packed([100, 130, 157])
    logits = logits_of(config, params, tokens, positions, segments)
    np.testing.assert_allclose(
        logits, reference_logits(params, config, tokens, positions, segments), rtol=1e-5, atol=2e-5
    )


def test_a_packed_row_gives_each_document_the_logits_it_gets_alone():
    params = make_params(GROUPED)
    lengths = [4, 1, 7]
    tokens = random_tokens(GROUPED, 1, sum(lengths))
    together = logits_of(GROUPED, params, tokens, *packed(lengths))
    alone = [logits_of(GROUPED, params, part) for part in np.split(tokens, np.cumsum(lengths)[:-1], axis=1)]
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [5, 200])
def test_a_later_token_leaves_earlier_logits_bit_equal(change):
    config = GROUPED
    params = make_params(config)
    tokens = random_tokens(config, 1, 260)
    changed = tokens.copy()
    changed[0, change] = (changed[0, change] + 1) % config.vocab_size
    before, after = logits_of(config, params, tokens), logits_of(config, params, changed)
    np.testing.assert_array_equal(before[:, :change], after[:, :change])
    assert np.all(np.abs(before - after)[0, change:].max(axis=-1) > 0)


def test_another_document_leaves_a_document_bit_equal():
    params = make_params(GROUPED)
    tokens = random_tokens(GROUPED, 1, 12)
    changed = tokens.copy()
    changed[0, 2] = (changed[0, 2] + 1) % GROUPED.vocab_size
    before, after = (logits_of(GROUPED, params, t, *packed([5, 7])) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("bad_id", [MULTI_HEAD.vocab_size, -1, -100])
def test_an_id_outside_the_vocabulary_shows_as_nan_in_its_row_only(bad_id):
    params = make_params(MULTI_HEAD)
    tokens = random_tokens(MULTI_HEAD, 2, 6)
    tokens[1, 3] = bad_id
    logits = logits_of(MULTI_HEAD, params, tokens)
    assert np.all(np.isfinite(logits[0]))
    assert np.all(np.isnan(logits[1, 3:]))


@pytest.mark.parametrize("segmented", [False, True])
def test_cudnn_is_asked_for_the_same_attention(monkeypatch, segmented):
    """The kernel needs a GPU: here jax's own XLA implementation answers the call meant for it."""
    called = []

    def answer(*arrays, implementation, **settings):
        called.append(implementation)
        return original(*arrays, implementation="xla", **settings)

    original = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    params = make_params(GROUPED)
    tokens = random_tokens(GROUPED, 1, 12)
    inputs = packed([3, 5, 4]) if segmented else ()
    config = dataclasses.replace(GROUPED, attention="cudnn")
    np.testing.assert_allclose(
        logits_of(config, params, tokens, *inputs), logits_of(GROUPED, params, tokens, *inputs), rtol=1e-5, atol=1e-5
    )
    assert called == ["cudnn"]  # one traced layer, scanned


@pytest.mark.parametrize("bad_position", [GROUPED.max_length, -1])
def test_a_position_outside_max_length_shows_as_nan(bad_position):
    params = make_params(GROUPED)
    positions = np.array([[0, 1, bad_position]], np.int32)
    logits = logits_of(GROUPED, params, random_tokens(GROUPED, 1, 3), positions)
    assert np.all(np.isnan(logits[0, 2]))


def test_bfloat16_parameters_give_float32_logits_close_to_float32():
    params = make_params(GROUPED)
    tokens = random_tokens(GROUPED, 2, 16)
    exact = logits_of(GROUPED, params, tokens)
    half = logits_of(GROUPED, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params), tokens)
    assert half.dtype == jnp.float32
    assert np.abs(half - exact).max() < 0.05 * np.abs(exact).max()  # bfloat16 keeps 8 bits: 0.4% a rounding
    assert np.abs(half - exact).max() > 1e-4 * np.abs(exact).max()  # and it was used


def test_activations_take_the_embeddings_dtype_and_a_float32_parameter_may_stay():
    graph, params = graph_of(MULTI_HEAD), make_params(MULTI_HEAD)
    tokens = random_tokens(MULTI_HEAD, 1, 8)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    mixed = half | {"head": params["head"], "final_norm": params["final_norm"]}

    @jax.jit
    def run(params):
        model = nnx.merge(graph, params)
        hidden = model.hidden(tokens)
        return hidden, model.logits(hidden)

    assert jax.eval_shape(run, half)[0].dtype == jnp.bfloat16
    hidden, logits = run(mixed)
    assert hidden.dtype == jnp.bfloat16
    expected = np.asarray(hidden, np.float64) @ np.asarray(params["head"]["kernel"], np.float64)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- scan, remat, dropout: same function


# These compare graphs, not machine code: without LLVM's optimisations they compile in half the time.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def loss_and_gradient(config, params, tokens, key=None):
    def loss(params):
        logits = logits_of(config, params, tokens[:, :-1], key=key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return jax.value_and_grad(loss)(params)


def assert_same_tree(left, right, tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right)


@pytest.fixture(scope="module")
def baseline():
    """Config, parameters, tokens, key, and loss and gradient of the plain scanned model with dropout."""
    config = dataclasses.replace(GROUPED, dropout=0.3, scan_layers=True)
    params = make_params(config)
    tokens, key = random_tokens(config, 2, 11), jax.random.key(5)
    return config, params, tokens, key, loss_and_gradient(config, params, tokens, key)


@pytest.mark.parametrize("remat", transformer.REMAT_POLICIES)
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unrolled"])
def test_scanned_unrolled_and_rematerialised_layers_agree_in_values_and_gradients(baseline, scan_layers, remat):
    config, params, tokens, key, expected = baseline
    config = dataclasses.replace(config, scan_layers=scan_layers, remat=remat)
    actual = loss_and_gradient(config, params, tokens, key)
    assert_same_tree(actual, expected, 2e-6)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(actual[1]))


def test_the_gradient_is_the_slope_of_the_float64_reference():
    config = dataclasses.replace(GROUPED, layers=1)
    params = make_params(config)
    tokens = random_tokens(config, 1, 6)
    _, gradient = loss_and_gradient(config, params, tokens)
    direction = jax.tree.map(lambda a: np.random.default_rng(a.size).standard_normal(a.shape), params)

    def reference_loss(step):
        moved = jax.tree.map(lambda a, d: np.asarray(a, np.float64) + step * d, params, direction)
        logits = reference_logits(moved, config, tokens[:, :-1])[0]
        log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return -np.mean(log_probability[np.arange(len(logits)), tokens[0, 1:]])

    slope = (reference_loss(1e-5) - reference_loss(-1e-5)) / 2e-5
    along = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    assert along == pytest.approx(slope, rel=1e-4)


def test_each_remat_policy_keeps_less_than_the_one_before():
    def kept(remat):
        config = dataclasses.replace(GROUPED, remat=remat, scan_layers=False)
        graph, params = graph_of(config), make_params(config)
        tokens = jnp.asarray(random_tokens(config, 2, 96))
        pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: nnx.merge(graph, q).hidden(tokens), p)[1], params)
        return [leaf.shape for leaf in jax.tree.leaves(pullback)]

    sizes = {remat: sum(np.prod(shape) for shape in kept(remat)) for remat in transformer.REMAT_POLICIES}
    assert sizes["full"] < sizes["dots"] < sizes["attention"] < sizes["none"]
    assert any(shape[-2:] == (192, 96) for shape in kept("none"))  # scores of 2 grouped queries x 96, by 96 keys
    assert not any(shape[-2:] == (192, 96) for shape in kept("attention"))


def test_dropout_matches_numpy_with_the_documented_masks():
    config = dataclasses.replace(GROUPED, dropout=0.4)
    params = make_params(config)
    tokens, key = random_tokens(config, 2, 7), jax.random.key(3)
    keys = [jax.random.split(jax.random.fold_in(key, layer)) for layer in range(config.layers)]
    keep = [[jax.random.bernoulli(k, 0.6, (2, 7, config.d_model)) for k in pair] for pair in keys]
    expected = reference_logits(params, config, tokens, dropout_masks=np.array(keep) / 0.6)
    np.testing.assert_allclose(logits_of(config, params, tokens, key=key), expected, rtol=1e-5, atol=5e-5)


def test_dropout_draws_by_key_and_is_off_without_one():
    config = dataclasses.replace(GROUPED, dropout=0.4)
    params = make_params(config)
    tokens = random_tokens(config, 2, 7)
    run = lambda config=config, key=None: np.asarray(logits_of(config, params, tokens, key=key))  # noqa: E731
    np.testing.assert_array_equal(run(key=jax.random.key(1)), run(key=jax.random.key(1)))
    assert np.abs(run(key=jax.random.key(1)) - run(key=jax.random.key(2))).max() > 0.01
    np.testing.assert_array_equal(run(), run(config=GROUPED))
    np.testing.assert_array_equal(run(config=GROUPED, key=jax.random.key(1)), run(config=GROUPED))


def test_dropout_preserves_the_expected_value():
    dropped = np.asarray(dropout(jnp.ones((400, 500)), 0.2, jax.random.key(0)))
    assert set(np.unique(dropped)) == {np.float32(0.0), np.float32(1.25)}
    assert dropped.mean() == pytest.approx(1.0, abs=4 * 0.5 / np.sqrt(dropped.size))  # std of one element is 0.5


# -------------------------------------------------------------------------------- parameters, counts, rules, errors

PATHS = {
    "embedding/embedding": (17, 16),
    "layers/attention_norm/scale": (2, 16),
    "layers/attention/query/kernel": (2, 16, 16),
    "layers/attention/key/kernel": (2, 16, 8),
    "layers/attention/value/kernel": (2, 16, 8),
    "layers/attention/out/kernel": (2, 16, 16),
    "layers/mlp_norm/scale": (2, 16),
    "layers/mlp/gate/kernel": (2, 16, 24),
    "layers/mlp/up/kernel": (2, 16, 24),
    "layers/mlp/down/kernel": (2, 24, 16),
    "final_norm/scale": (16,),
    "head/kernel": (16, 17),
}


def by_path(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_tree_has_the_documented_paths_and_shapes(scan_layers):
    untied = dataclasses.replace(GROUPED, tied_embeddings=False, scan_layers=scan_layers)
    leaves = by_path(abstract_params(untied))
    assert {path: leaf.shape for path, leaf in leaves.items()} == PATHS
    assert all(leaf.dtype == jnp.float32 for leaf in leaves.values())
    assert set(PATHS) - set(by_path(abstract_params(GROUPED))) == {"head/kernel"}


def test_the_module_stores_parameters_and_nothing_else():
    model = nnx.eval_shape(lambda: Transformer(dataclasses.replace(GROUPED, dropout=0.1), rngs=nnx.Rngs(0)))
    assert len(jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))) == 0
    assert len(jax.tree.leaves(nnx.state(model))) == len(PATHS) - 1


def test_initial_values_have_the_documented_spread():
    config = dataclasses.replace(GROUPED, d_model=64, d_ff=128, tied_embeddings=False, vocab_size=256)
    init = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(0)))))
    params = init()
    for name, leaf in by_path(params).items():
        if name.endswith("scale"):
            np.testing.assert_array_equal(leaf, 1.0)
        else:
            residual = re.search(r"(out|down)/kernel", name)
            assert np.std(leaf) == pytest.approx(0.02 / (2.0 if residual else 1.0), rel=0.06), name
    first, second = params["layers"]["mlp"]["gate"]["kernel"]
    assert np.abs(first - second).max() > 0.01  # layers do not start alike


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        # https://huggingface.co/meta-llama/Llama-3.2-1B and .../Meta-Llama-3-8B, "total parameters" of the safetensors
        (1_235_814_400, (128_256, 16, 2048, 32, 8, 8192, 2048, True)),
        (8_030_261_248, (128_256, 32, 4096, 32, 8, 14_336, 2048, False)),
    ],
)
def test_parameter_count_is_the_published_one_and_the_trees(count, sizes):
    names = ("vocab_size", "layers", "d_model", "heads", "kv_heads", "d_ff", "max_length", "tied_embeddings")
    config = TransformerConfig(**dict(zip(names, sizes, strict=True)))
    assert parameter_count(config) == count
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config))) == count


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_is_the_hand_computed_number(tied):
    config = TransformerConfig(
        vocab_size=10, layers=2, d_model=4, heads=2, kv_heads=1, d_ff=6, max_length=8, tied_embeddings=tied
    )
    # a layer: query 16, key 8, value 8, out 16, gate, up and down 24 each: 120; the output projection 40
    # 6 * (2 * 120 + 40) = 1680; attention 12 * 2 layers * 4 * 8 = 768
    assert flops_per_token(config, 8) == 2448


def test_every_parameter_has_one_rule_that_leaves_the_layer_dim_whole():
    for path, shape in PATHS.items():
        specs = [spec for pattern, spec in SHARDING_RULES if re.search(pattern, path)]
        assert len(specs) == 1, path
        assert len(specs[0]) in (0, len(shape)), path
        if "norm" not in path:
            assert set(specs[0]) - {None} == {"fsdp", "tensor"}, path
        if path.startswith("layers/"):
            assert tuple(specs[0])[:1] in ((), (None,)), path
    used = {pattern for pattern, _ in SHARDING_RULES if any(re.search(pattern, path) for path in PATHS)}
    assert len(used) == len(SHARDING_RULES)


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unrolled"])
def test_sharded_by_its_rules_the_model_computes_the_same(scan_layers):
    config = dataclasses.replace(GROUPED, vocab_size=16, tied_embeddings=False, scan_layers=scan_layers)
    params = make_params(config)
    tokens = random_tokens(config, 4, 10)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=auto, devices=jax.devices()[:8])

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next(spec for pattern, spec in SHARDING_RULES if re.search(pattern, name))
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    sharded = jax.tree_util.tree_map_with_path(place, params)
    assert sharded["layers"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape == (2, 4, 12)
    rows = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp")))
    np.testing.assert_allclose(
        logits_of(config, sharded, rows), logits_of(config, params, tokens), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"heads": 3}, "d_model=16 is not divisible by heads=3; the nearest widths that fit are 15 and 18"),
        ({"heads": 16, "kv_heads": 16}, "head_dim=1, which is odd.*multiple of 32"),
        ({"kv_heads": 3}, r"heads=4 is not divisible by kv_heads=3; kv_heads may be one of \[1, 2, 4\]"),
        ({"dropout": 1.0}, r"dropout=1.0 must be a probability in \[0, 1\)"),
        ({"dropout": float("nan")}, "dropout=nan must be"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
        ({"remat": "fulll"}, "remat='fulll' is unknown; choose one of none, attention, dots, full"),
        ({"attention": "flash"}, "attention='flash' is unknown; choose one of xla, cudnn"),
    ],
)
def test_a_config_that_cannot_work_says_so(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPED, **change)


def test_inputs_that_cannot_work_are_refused():
    model = nnx.eval_shape(lambda: Transformer(dataclasses.replace(GROUPED, max_length=8), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="sequences of 9 tokens are longer than max_length=8"):
        model(jnp.zeros((1, 9), jnp.int32))
    with pytest.raises(ValueError, match=r"tokens have shape \(5,\); give \(batch, length\)"):
        model(jnp.zeros(5, jnp.int32))
    with pytest.raises(ValueError, match=r"segment_ids_BL has shape \(1, 4\) but the tokens \(1, 5\)"):
        model(jnp.zeros((1, 5), jnp.int32), segment_ids_BL=jnp.zeros((1, 4), jnp.int32))


def test_twenty_steps_learn_a_short_sequence():
    config = dataclasses.replace(GROUPED, tied_embeddings=False)
    graph = graph_of(config)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(0)))))()
    tokens = random_tokens(config, 1, 12)
    optimizer = optax.adam(0.02)

    @jax.jit
    def step(params, moments):
        def loss(p):
            logits = nnx.merge(graph, p)(tokens[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

        value, gradient = jax.value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an int32 power
            updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(params, updates), moments, value

    moments, losses = optimizer.init(params), []
    for _ in range(20):
        params, moments, value = step(params, moments)
        losses.append(float(value))
    assert losses[0] == pytest.approx(np.log(config.vocab_size), abs=0.1)  # near uniform at the start
    assert losses[-1] < 0.2 * losses[0]
