"""Rotary positions and causal grouped-query attention, as functions of arrays.

Shape suffixes: B batch, L length (of the queries), M length (of the keys), H heads, K key-value heads, G = H / K heads
that share one key, Q = G * L, C channels of a head, c = C / 2. A ``1`` is a dim of size 1, ``b`` is either B or 1.

Sources: Su et al. 2021 (arXiv 2104.09864) for rotary positions; Ainslie et al. 2023 (2305.13245) for grouped queries.
"""

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -1e30  # finite: a difference of two masked scores is 0, not NaN
_QUERY_BLOCK = 128
_MAX_QUERY_BLOCKS = 4


def rows_or_nan(table_VD, index_BL):
    """Rows of a table (B, L, D). An index outside [0, V), negative ones included, gives NaN instead of another row."""
    return jnp.asarray(table_VD).at[index_BL].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def rotary_tables(positions_L, channels: int, theta: float):
    """cos and sin of position times frequency, each fp32 (L, c)."""
    exponents = np.arange(0, channels, 2) / channels
    frequencies_c = jnp.asarray(theta**-exponents, jnp.float32)
    angles_Lc = positions_L[:, None].astype(jnp.float32) * frequencies_c[None]
    return jnp.cos(angles_Lc), jnp.sin(angles_Lc)


def look_up_rotary(positions_bL, rows: int, channels: int, theta: float):
    """cos and sin (b, L, 1, c) out of a table of ``rows`` positions; one outside it gives NaN.

    Computed from the positions instead, XLA's CPU backend repeats the cosines in the rotations of every layer and head:
    it fuses a cosine into its users but not a table, and jax 0.10 also drops the barrier. 4% of a train step.
    """
    tables = rotary_tables(jnp.arange(rows), channels, theta)
    looked_up = tuple(rows_or_nan(table, positions_bL)[:, :, None] for table in tables)
    return jax.lax.optimization_barrier(looked_up)


def rotate(x_BLHC, cos_bL1c, sin_bL1c, scale: float = 1.0):
    """Turns the channel pairs (c, c + C/2) by their angles, in fp32: the pairing of GPT-NeoX and of Llama in HF."""
    first, second = jnp.split(x_BLHC.astype(jnp.float32) * scale, 2, axis=-1)
    turned = (first * cos_bL1c - second * sin_bL1c, second * cos_bL1c + first * sin_bL1c)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHC.dtype)


def visible(query_index_L, key_index_M, segments_BL=None, segments_BM=None):
    """Boolean (b, L, M): the key is not later than the query, by its place in the row, and in the same segment."""
    visible_1LM = (key_index_M[None, :] <= query_index_L[:, None])[None]
    if segments_BL is None:
        return visible_1LM
    return visible_1LM & (segments_BL[:, :, None] == segments_BM[:, None, :])


def attend_block(query_BLHC, key_BMKC, value_BMKC, visible_bLM):
    """Attention of these queries to these keys, with the queries already scaled; (B, L, H, C) in their dtype.

    The softmax divides AFTER the product with the values: one pass fewer over L x M, and its derivative needs no L x M
    reduction either. That was worth 15% of a whole train step on CPU.
    """
    batch, length, heads, channels = query_BLHC.shape
    kv_heads, groups = key_BMKC.shape[2], heads // key_BMKC.shape[2]
    query_BKQC = query_BLHC.reshape(batch, length, kv_heads, groups, channels).transpose(0, 2, 3, 1, 4)
    query_BKQC = query_BKQC.reshape(batch, kv_heads, groups * length, channels)
    visible_b1QM = jnp.tile(visible_bLM, (1, groups, 1))[:, None]
    scores_BKQM = jnp.einsum("bkqc,bmkc->bkqm", query_BKQC, key_BMKC, preferred_element_type=jnp.float32)
    scores_BKQM = jnp.where(visible_b1QM, scores_BKQM, _MASKED)
    largest_BKQ1 = jax.lax.stop_gradient(scores_BKQM.max(axis=-1, keepdims=True))  # cancels: its gradient is 0
    weights_BKQM = jnp.exp(scores_BKQM - largest_BKQ1)
    total_BKQ1 = weights_BKQM.sum(axis=-1, keepdims=True)
    weights_BKQM = weights_BKQM.astype(value_BMKC.dtype)
    sums_BKQC = jnp.einsum("bkqm,bmkc->bkqc", weights_BKQM, value_BMKC, preferred_element_type=jnp.float32)
    out_BKQC = (sums_BKQC / total_BKQ1).astype(query_BLHC.dtype)
    out_BKGLC = out_BKQC.reshape(batch, kv_heads, groups, length, channels)
    return out_BKGLC.transpose(0, 3, 1, 2, 4).reshape(query_BLHC.shape)


def attend_xla(query_BLHC, key_BLKC, value_BLKC, segments_BL):
    """Causal attention in a few blocks of queries, each against only the keys up to its own end.

    Two blocks leave out 1/4 of the products, four 3/8, of the 1/2 that is masked; more save little and compile longer.
    """
    length = query_BLHC.shape[1]
    size = -(-length // min(max(length // _QUERY_BLOCK, 1), _MAX_QUERY_BLOCKS))
    outs = []
    for start in range(0, length, size):
        end = min(start + size, length)
        segments = () if segments_BL is None else (segments_BL[:, start:end], segments_BL[:, :end])
        visible_bLM = visible(jnp.arange(start, end), jnp.arange(end), *segments)
        outs.append(attend_block(query_BLHC[:, start:end], key_BLKC[:, :end], value_BLKC[:, :end], visible_bLM))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def attend_cudnn(query_BLHC, key_BLKC, value_BLKC, segments_BL):
    """The same by cuDNN's fused kernel, which keeps no L x M array; NVIDIA GPUs, bfloat16 or float16."""
    mask = None if segments_BL is None else (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        query_BLHC, key_BLKC, value_BLKC, mask=mask, is_causal=True, scale=1.0, implementation="cudnn"
    )
