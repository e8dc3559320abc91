"""The rival of `jaxtrain.models.transformer` in the benchmark ``step_overhead``: the same architecture by hand.

Plain JAX, float32, one document a row, no options: one dict of parameters per layer, no stacking, no modules, no casts,
everything written for speed on CPU. Same initial distribution and same loss as the product's model at the sizes below.

Shape suffixes: B batch, L length, T = B * L tokens, D width, H heads, C channels of a head, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # queries that attend together, to the keys up to their end


def init(key, *, vocab_size=256, layers=6, d_model=384, heads=6, d_ff=1024):
    """Parameters as a dict; ``heads`` is only checked, `loss` takes it again."""
    if d_model % heads:
        raise ValueError(f"d_model={d_model} is not divisible by heads={heads}")
    keys = iter(jax.random.split(key, 7 * layers + 2))

    def normal(*shape, scale=1.0):
        return 0.02 * scale * jax.random.normal(next(keys), shape)

    def layer():
        residual = (2 * layers) ** -0.5
        return {
            "attention_norm": jnp.ones(d_model),
            "query": normal(d_model, d_model),
            "key": normal(d_model, d_model),
            "value": normal(d_model, d_model),
            "out": normal(d_model, d_model, scale=residual),
            "mlp_norm": jnp.ones(d_model),
            "gate": normal(d_model, d_ff),
            "up": normal(d_model, d_ff),
            "down": normal(d_ff, d_model, scale=residual),
        }

    return {
        "embedding": normal(vocab_size, d_model),
        "layers": [layer() for _ in range(layers)],
        "final_norm": jnp.ones(d_model),
        "head": normal(d_model, vocab_size),
    }


def loss(params, tokens_BL, targets_BL, *, heads=6):
    """Mean cross-entropy in nats of the targets, a scalar."""
    batch, length = tokens_BL.shape
    x_TD = params["embedding"][tokens_BL.reshape(-1)]
    channels = x_TD.shape[1] // heads
    angles_Lc = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, channels, 2) / channels)
    rotary = [jnp.asarray(f(angles_Lc)[None, :, None], jnp.float32) for f in (np.cos, np.sin)]
    for layer in params["layers"]:
        h_TD = _norm(x_TD, layer["attention_norm"])
        q, k, v = ((h_TD @ layer[n]).reshape(batch, length, heads, channels) for n in ("query", "key", "value"))
        mixed_BLHC = _attention(_rotate(q * channels**-0.5, *rotary), _rotate(k, *rotary), v)
        x_TD = x_TD + mixed_BLHC.reshape(x_TD.shape) @ layer["out"]
        h_TD = _norm(x_TD, layer["mlp_norm"])
        x_TD = x_TD + (jax.nn.silu(h_TD @ layer["gate"]) * (h_TD @ layer["up"])) @ layer["down"]
    logits_TV = _norm(x_TD, params["final_norm"]) @ params["head"]
    chosen_T1 = jnp.take_along_axis(logits_TV, targets_BL.reshape(-1, 1), axis=1)
    return jnp.mean(jax.nn.logsumexp(logits_TV, axis=1) - chosen_T1[:, 0])


def _norm(x_TD, scale_D):
    return x_TD * jax.lax.rsqrt(jnp.mean(x_TD * x_TD, axis=-1, keepdims=True) + 1e-5) * scale_D[None]


def _rotate(x_BLHC, cos_1L1c, sin_1L1c):
    first, second = jnp.split(x_BLHC, 2, axis=-1)
    return jnp.concatenate(
        [first * cos_1L1c - second * sin_1L1c, second * cos_1L1c + first * sin_1L1c],
        axis=-1,
    )


def _attention(q_BLHC, k_BLHC, v_BLHC):
    length = q_BLHC.shape[1]
    outs = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        seen = np.arange(end)[None] <= np.arange(start, end)[:, None]
        scores = jnp.einsum("blhc,bmhc->bhlm", q_BLHC[:, start:end], k_BLHC[:, :end])
        scores = jnp.where(seen[None, None], scores, -1e30)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        sums = jnp.einsum("bhlm,bmhc->bhlc", weights, v_BLHC[:, :end])
        outs.append((sums / weights.sum(-1, keepdims=True)).transpose(0, 2, 1, 3))
    return jnp.concatenate(outs, axis=1)
