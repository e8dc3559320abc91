"""Drawing text from a causal language model: one prompt, a key-value cache, and one compiled loop.

Works for any model with ``config.vocab_size``, ``config.max_length``, ``init_cache``, ``decode`` and ``logits`` as
`jaxtrain.models.transformer.Transformer` has them.

Shape suffixes: P length of the prompt after padding, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def sample(model, prompt_tokens, *, max_new_tokens: int, key, temperature: float = 1.0, top_k: int | None = None):
    """Continues a prompt and returns prompt and new tokens together, int32 ``(len(prompt_tokens) + max_new_tokens,)``.

    Compiled once for each (prompt length rounded up to a power of two, ``max_new_tokens``, ``top_k``, greedy or not);
    the temperature and the prompt's exact length are traced.

    Args:
      model: the language model; its parameters' dtype decides the compute dtype.
      prompt_tokens: list or 1-D array of at least one id.
      max_new_tokens: how many to add, always all of them: no id ends the text.
      key: token number i of the new ones is drawn with ``fold_in(key, i)``.
      temperature: divides the logits before the softmax; 0 takes the most likely token (the lowest id of equals).
      top_k: draw only from this many most likely tokens (Fan et al. 2018, arXiv 1805.04833); None draws from all.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, prompt and new tokens that do not fit in
        ``config.max_length``, or a setting out of range.
    """
    prompt = _checked_prompt(prompt_tokens, max_new_tokens, model.config)
    if not temperature >= 0.0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive")
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"top_k={top_k} must be between 1 and vocab_size={model.config.vocab_size}, or None for all")
    padded_length = min(1 << (prompt.size - 1).bit_length(), model.config.max_length)
    new_tokens = _generate(
        model,
        np.pad(prompt, (0, padded_length - prompt.size)),
        np.int32(prompt.size),
        key,
        np.float32(temperature),
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        greedy=temperature == 0.0,
    )
    return jnp.concatenate([jnp.asarray(prompt), new_tokens])


def _checked_prompt(prompt_tokens, max_new_tokens: int, config) -> np.ndarray:
    prompt = np.asarray(prompt_tokens)
    if prompt.size == 0:
        raise ValueError("the prompt is empty; give at least one token, such as the one that starts a document")
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"prompt_tokens is {prompt.dtype} of shape {prompt.shape}; give one list of integer ids")
    if prompt.min() < 0 or prompt.max() >= config.vocab_size:
        raise ValueError(
            f"prompt ids span {prompt.min()} to {prompt.max()}, outside [0, {config.vocab_size}); "
            "use the tokenizer the model was trained with"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if prompt.size + max_new_tokens > config.max_length:
        raise ValueError(
            f"a prompt of {prompt.size} tokens and max_new_tokens={max_new_tokens} make "
            f"{prompt.size + max_new_tokens}, more than max_length={config.max_length}; "
            "shorten the prompt, ask for fewer or raise max_length"
        )
    return prompt.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "top_k", "greedy"))
def _generate(model, prompt_P, prompt_length, key, temperature, *, max_new_tokens, top_k, greedy):
    """The new tokens. The prompt's padding fills slots past ``prompt_length``, each overwritten before it is read."""

    def draw(hidden_11D, index):
        logits_V = model.logits(hidden_11D)[0, 0]
        if greedy:
            return jnp.argmax(logits_V).astype(jnp.int32)
        ids = None
        if top_k is not None:
            logits_V, ids = jax.lax.top_k(logits_V, top_k)
        choice = jax.random.categorical(jax.random.fold_in(key, index), logits_V / temperature)
        return (choice if ids is None else ids[choice]).astype(jnp.int32)

    def step(carry, index):
        token, cache = carry
        hidden_11D, cache = model.decode(token[None, None], cache)
        token = draw(hidden_11D, index)
        return (token, cache), token

    hidden_1PD, cache = model.decode(prompt_P[None], model.init_cache(1, prompt_P.size + max_new_tokens))
    first = draw(jax.lax.dynamic_slice_in_dim(hidden_1PD, prompt_length - 1, 1, axis=1), 0)
    cache = cache._replace(length=prompt_length)
    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(1, max_new_tokens))
    return jnp.concatenate([first[None], rest])
