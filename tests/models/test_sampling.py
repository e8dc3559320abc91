"""Sampling against the uncached forward pass and against the softmax it should follow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models.sampling import sample
from jaxtrain.models.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=11, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24, max_length=24, scan_layers=True
)
PROMPT = [3, 1, 4, 1, 5]


def make_model(config=CONFIG, model_class=Transformer):
    """A model with weights large enough for its choices to depend on the whole prompt."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0))))
    generator = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(generator.standard_normal(a.shape) * 0.4, jnp.float32)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(fill, nnx.to_pure_dict(state)))


@pytest.fixture(scope="module")
def model():
    return make_model()


@jax.jit
def padded_logits(model, tokens):
    return model(tokens)


def next_logits(model, tokens):
    """Uncached, of the token after these; padding to one length compiles once and cannot reach them."""
    padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, CONFIG.max_length - len(tokens))))
    return np.asarray(padded_logits(model, padded))[0, len(tokens) - 1]


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("prefill", [1, 6])
def test_cached_logits_equal_the_full_forward_pass_at_every_position(scan_layers, prefill):
    model = make_model(dataclasses.replace(CONFIG, scan_layers=scan_layers))
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 16), dtype=np.int32)

    @jax.jit
    def decode(tokens, cache):
        hidden, cache = model.decode(tokens, cache)
        return model.logits(hidden), cache

    first, cache = decode(tokens[:, :prefill], model.init_cache(2, 20))
    logits = [first]
    for place in range(prefill, 16):
        following, cache = decode(tokens[:, place : place + 1], cache)
        logits.append(following)
    assert int(cache.length) == 16
    np.testing.assert_allclose(np.concatenate(logits, axis=1), padded_logits(model, tokens), rtol=1e-5, atol=1e-5)


def test_greedy_sampling_follows_the_argmax_of_the_uncached_model(model):
    tokens = list(PROMPT)
    for _ in range(10):
        tokens.append(int(np.argmax(next_logits(model, tokens))))
    result = sample(model, PROMPT, max_new_tokens=10, key=jax.random.key(0), temperature=0.0)
    assert result.dtype == jnp.int32
    assert result.tolist() == tokens
    assert len(set(tokens[5:])) > 2  # not one token for ever
    again = sample(model, np.array(PROMPT), max_new_tokens=10, key=jax.random.key(9), temperature=0.0)
    assert again.tolist() == tokens
    best = sample(model, PROMPT, max_new_tokens=10, key=jax.random.key(0), temperature=3.0, top_k=1)
    assert best.tolist() == tokens


@pytest.mark.parametrize("top_k", [None, 3])
def test_draws_follow_the_tempered_softmax(model, top_k):
    draws = [
        sample(model, PROMPT, max_new_tokens=2, key=jax.random.key(seed), temperature=2.0, top_k=top_k).tolist()
        for seed in range(300)
    ]
    for place in (5, 6):  # the second new token given the most frequent first
        if place == 6:
            first = max({d[5] for d in draws}, key=[d[5] for d in draws].count)
            draws = [d for d in draws if d[5] == first]
        logits = next_logits(model, draws[0][:place]).astype(np.float64) / 2.0
        if top_k is not None:
            logits[np.argsort(logits)[:-top_k]] = -np.inf
        expected = np.exp(logits - logits.max())
        expected /= expected.sum()
        frequencies = np.bincount([d[place] for d in draws], minlength=CONFIG.vocab_size) / len(draws)
        assert np.all(frequencies[expected == 0] == 0)
        assert np.all(np.abs(frequencies - expected) < 4 * np.sqrt(expected * (1 - expected) / len(draws)) + 1e-9)


def test_the_key_decides(model):
    run = lambda seed: sample(model, PROMPT, max_new_tokens=15, key=jax.random.key(seed), temperature=2.0).tolist()  # noqa: E731
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_prompt_and_new_tokens_may_fill_max_length_exactly(model):
    prompt = [1] * 20
    tokens = list(prompt)
    for _ in range(4):
        tokens.append(int(np.argmax(next_logits(model, tokens))))
    assert sample(model, prompt, max_new_tokens=4, key=jax.random.key(0), temperature=0.0).tolist() == tokens


def test_bfloat16_parameters_sample(model):
    graph, state = nnx.split(model)
    half = nnx.merge(graph, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.to_pure_dict(state)))
    assert half.init_cache(1, 4).key.dtype == jnp.bfloat16
    assert sample(half, PROMPT, max_new_tokens=3, key=jax.random.key(0)).shape == (8,)


def test_prompt_length_and_temperature_do_not_recompile():
    traces = []

    class Counted(Transformer):
        def logits(self, hidden):
            traces.append(hidden.shape)
            return super().logits(hidden)

    model = make_model(model_class=Counted)
    seen = []
    for prompt, temperature in ((PROMPT, 1.0), ([*PROMPT, 2], 0.5), ([*PROMPT, 9, 2, 6], 0.5)):
        sample(model, prompt, max_new_tokens=3, key=jax.random.key(0), temperature=temperature)
        seen.append(len(traces))
    assert seen[0] > 0
    assert seen == [seen[0]] * 3


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([[1, 2]], {}, r"int64 of shape \(1, 2\); give one list of integer ids"),
        ([1.5], {}, "float64 of shape"),
        ([1, 11], {}, r"prompt ids span 1 to 11, outside \[0, 11\)"),
        ([-1, 3], {}, r"prompt ids span -1 to 3, outside \[0, 11\)"),
        ([1] * 30, {}, "a prompt of 30 tokens and max_new_tokens=4 make 34, more than max_length=24; shorten"),
        ([1] * 21, {}, "a prompt of 21 tokens and max_new_tokens=4 make 25, more than max_length=24"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([1], {"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ([1], {"temperature": float("nan")}, "temperature=nan must be 0"),
        ([1], {"top_k": 0}, "top_k=0 must be between 1 and vocab_size=11"),
        ([1], {"top_k": 12}, "top_k=12 must be between 1 and vocab_size=11"),
    ],
)
def test_a_request_that_cannot_work_says_so(model, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        sample(model, prompt, **({"max_new_tokens": 4, "key": jax.random.key(0)} | settings))
