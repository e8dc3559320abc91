"""A decoder-only language model in the style of Llama, as a Flax NNX module that stores parameters and nothing else.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional tied embeddings, dropout with keys passed at call
time, and packed documents. The parameters of all layers are stacked along a leading dim, in ONE tree whether the layers
are scanned or unrolled::

    embedding/embedding (V, D)
    layers/attention_norm/scale (N, D)      layers/attention/{query, key, value, out}/kernel (N, in, out)
    layers/mlp_norm/scale (N, D)            layers/mlp/{gate, up, down}/kernel (N, in, out)
    final_norm/scale (D,)                   head/kernel (D, V), absent with tied embeddings

Parameters are born float32, and their dtype at call time decides the compute dtype: cast them to bfloat16 and the
activations are bfloat16, while norm statistics, rotations, softmax and logits stay float32. A parameter left float32
among bfloat16 ones computes its own product in float32.

Shape suffixes: B batch, L length, M slots of the cache, T = B * L tokens, D model width, H heads, K key-value heads,
C = D / H channels of a head, c = C / 2, F width of the MLP, V vocabulary, N layers, I and O the inputs and outputs of a
product. A ``1`` in a suffix is a dim of size 1.

Sources: Touvron et al. 2023, "LLaMA" (arXiv 2302.13971) for the whole; Zhang and Sennrich 2019 (1910.07467) for
RMSNorm; Shazeer 2020 (2002.05202) for SwiGLU; rotary positions and grouped queries in `jaxtrain.models.attention`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtrain.models.attention import (
    attend_block,
    attend_cudnn,
    attend_xla,
    look_up_rotary,
    rotary_tables,
    rotate,
    rows_or_nan,
    visible,
)
from jaxtrain.models.dense import dropout

REMAT_POLICIES = ("none", "attention", "dots", "full")
ATTENTIONS = {"xla": attend_xla, "cudnn": attend_cudnn}

SHARDING_RULES = (
    (r"(^|/)embedding/embedding$", PartitionSpec("tensor", "fsdp")),
    (r"(^|/)layers/attention/(query|key|value)/kernel$", PartitionSpec(None, "fsdp", "tensor")),
    (r"(^|/)layers/attention/out/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (r"(^|/)layers/mlp/(gate|up)/kernel$", PartitionSpec(None, "fsdp", "tensor")),
    (r"(^|/)layers/mlp/down/kernel$", PartitionSpec(None, "tensor", "fsdp")),
    (r"(^|/)head/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"(^|/)(attention_norm|mlp_norm|final_norm)/scale$", PartitionSpec()),
)
"""(path regex, PartitionSpec) for every parameter; the stacked layer dim is never sharded.

Within a layer ``tensor`` splits what the first product of a pair puts out and the second takes in, so each pair needs
one reduction (Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053)."""

_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a `Transformer`.

    Attributes:
      max_length: longest sequence in tokens, prompt and new tokens together when sampling.
      dropout: probability of zeroing an element of what attention and MLP add to the residual stream.
      scan_layers: True compiles one layer and loops over it; False unrolls, which compiles longer and runs about 10%
        faster on CPU. Same parameters, same numbers.
      remat: what the backward pass recomputes, so what the forward pass need not keep. "none": nothing; "attention":
        the L x L scores; "dots": all but products with parameters
        (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`); "full": each whole layer.
      attention: "xla", or "cudnn" for the fused kernel (NVIDIA GPUs, bfloat16 or float16 parameters).

    Raises:
      ValueError: sizes that do not fit together, or an unknown name.
    """

    vocab_size: int
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    max_length: int
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    scan_layers: bool = True
    remat: str = "none"
    attention: str = "xla"

    def __post_init__(self):
        for name in ("vocab_size", "layers", "d_model", "heads", "kv_heads", "d_ff", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.d_model % self.heads:
            raise ValueError(
                f"d_model={self.d_model} is not divisible by heads={self.heads}; "
                f"the nearest widths that fit are {_nearest_multiples(self.d_model, self.heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"d_model={self.d_model} over heads={self.heads} gives head_dim={self.head_dim}, which is odd, but "
                f"rotary positions turn pairs of channels; choose d_model as a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            divisors = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; kv_heads may be one of {divisors}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be a probability in [0, 1); 0 turns it off")
        for name in ("rope_theta", "norm_eps"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name, known in (("remat", REMAT_POLICIES), ("attention", ATTENTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(known)}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def _nearest_multiples(value: int, of: int) -> str:
    below = value - value % of
    return " and ".join(str(n) for n in (below, below + of) if n)


def _matmul_parameters(config: TransformerConfig) -> int:
    """Parameters that multiply every token: all kernels of the layers and the output projection."""
    attention = 2 * config.d_model * (config.d_model + config.kv_heads * config.head_dim)
    mlp = 3 * config.d_model * config.d_ff
    return config.layers * (attention + mlp) + config.vocab_size * config.d_model


def parameter_count(config: TransformerConfig) -> int:
    """How many numbers the model holds: tied embeddings count once, norm scales are included."""
    norms = (2 * config.layers + 1) * config.d_model
    lookup = 0 if config.tied_embeddings else config.vocab_size * config.d_model
    return _matmul_parameters(config) + norms + lookup


def flops_per_token(config: TransformerConfig, sequence_length: int) -> int:
    """Floating-point operations per trained token, forward and backward, counted as papers count them for MFU.

    ``6 * N + 12 * layers * d_attention * L``, with N the parameters in matrix products: the output projection counts,
    also when tied, the embedding lookup and the norms do not. By this convention the full L x L attention counts
    although half of it is masked, and what remat recomputes does not. Source: Chowdhery et al. 2022, "PaLM" (arXiv
    2204.02311), appendix B.
    """
    d_attention = config.heads * config.head_dim
    return 6 * _matmul_parameters(config) + 12 * config.layers * d_attention * sequence_length


class KVCache(NamedTuple):
    """Keys and values of the tokens decoded so far; slots from ``length`` on are not read.

    ``key`` and ``value`` are (N, B, M, K, C) with M slots, in the parameters' dtype; ``length`` is an int32 scalar.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array


def _project(x_BLI, kernel_IO):
    """``x @ kernel`` in the kernel's dtype, as ONE 2-D product over all tokens (17% faster than 3-D on CPU)."""
    return (_flat(x_BLI, kernel_IO) @ kernel_IO).reshape(*x_BLI.shape[:-1], -1).astype(x_BLI.dtype)


def _flat(x_BLI, kernel_IO):
    return x_BLI.reshape(-1, x_BLI.shape[-1]).astype(kernel_IO.dtype)


@jax.custom_vjp
def _logits(x_BLD, kernel_DV):
    """``x @ kernel`` from inputs of the kernel's dtype, accumulated and returned in float32.

    Going back, the logits' gradient is rounded to the kernel's dtype like that of every other product: else both its
    products would be float32 ones, and under fsdp the kernel would be gathered again, in float32.
    """
    logits_TV = jax.lax.dot(_flat(x_BLD, kernel_DV), kernel_DV, preferred_element_type=jnp.float32)
    return logits_TV.reshape(*x_BLD.shape[:-1], -1)


def _logits_backward(given, g_BLV):
    x_BLD, kernel_DV = given
    x_TD, g_TV = _flat(x_BLD, kernel_DV), _flat(g_BLV, kernel_DV)
    d_x_TD = jax.lax.dot_general(g_TV, kernel_DV, (((1,), (1,)), ((), ())))
    d_kernel_DV = jax.lax.dot_general(x_TD, g_TV, (((0,), (0,)), ((), ())))
    return d_x_TD.reshape(x_BLD.shape).astype(x_BLD.dtype), d_kernel_DV


_logits.defvjp(lambda x_BLD, kernel_DV: (_logits(x_BLD, kernel_DV), (x_BLD, kernel_DV)), _logits_backward)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last dim, computed in fp32 and returned in x's dtype."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))
        self.eps = eps

    def __call__(self, x_BLD):
        x32_BLD = x_BLD.astype(jnp.float32)
        inverse_BL1 = jax.lax.rsqrt(jnp.mean(x32_BLD * x32_BLD, axis=-1, keepdims=True) + self.eps)
        scale_11D = self.scale[...].astype(jnp.float32)[None, None]
        return (x32_BLD * inverse_BL1 * scale_11D).astype(x_BLD.dtype)


class Linear(nnx.Module):
    """A product with a normally initialised kernel, no bias."""

    def __init__(self, shape: tuple[int, ...], std: float, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, x_BLI):
        return _project(x_BLI, self.kernel[...])


class Embedding(nnx.Module):
    """A table of token vectors. An id outside the vocabulary gives NaN instead of some other token's vector."""

    def __init__(self, vocab_size: int, d_model: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(_INIT_STD * jax.random.normal(rngs.params(), (vocab_size, d_model), jnp.float32))

    def __call__(self, tokens_BL):
        return rows_or_nan(self.embedding[...], tokens_BL)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width, kv_width = config.d_model, config.kv_heads * config.head_dim
        self.query = Linear((config.layers, width, width), _INIT_STD, rngs=rngs)
        self.key = Linear((config.layers, width, kv_width), _INIT_STD, rngs=rngs)
        self.value = Linear((config.layers, width, kv_width), _INIT_STD, rngs=rngs)
        self.out = Linear((config.layers, width, width), _residual_std(config), rngs=rngs)
        self.config = config

    def __call__(self, x_BLD, rotary, segments_BL, cache):
        """Returns (B, L, D) and the cache; ``cache`` is None or this layer's (key, value, length)."""
        batch, length, width = x_BLD.shape
        heads_shape = (batch, length, -1, self.config.head_dim)
        query_BLHC = rotate(self.query(x_BLD).reshape(heads_shape), *rotary, scale=self.config.head_dim**-0.5)
        key_BLKC = rotate(self.key(x_BLD).reshape(heads_shape), *rotary)
        value_BLKC = self.value(x_BLD).reshape(heads_shape)
        if cache is None:
            attend = ATTENTIONS[self.config.attention]
            if self.config.remat == "attention":
                attend = jax.checkpoint(attend)
            out_BLHC = attend(query_BLHC, key_BLKC, value_BLKC, segments_BL)
        else:
            key_BMKC, value_BMKC, start = cache
            key_BMKC = jax.lax.dynamic_update_slice_in_dim(key_BMKC, key_BLKC, start, axis=1)
            value_BMKC = jax.lax.dynamic_update_slice_in_dim(value_BMKC, value_BLKC, start, axis=1)
            visible_1LM = visible(start + jnp.arange(length), jnp.arange(key_BMKC.shape[1]))
            out_BLHC = attend_block(query_BLHC, key_BMKC, value_BMKC, visible_1LM)
            cache = (key_BMKC, value_BMKC, start)
        return self.out(out_BLHC.reshape(batch, length, width)), cache


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = Linear((config.layers, config.d_model, config.d_ff), _INIT_STD, rngs=rngs)
        self.up = Linear((config.layers, config.d_model, config.d_ff), _INIT_STD, rngs=rngs)
        self.down = Linear((config.layers, config.d_ff, config.d_model), _residual_std(config), rngs=rngs)

    def __call__(self, x_BLD):
        return self.down(jax.nn.silu(self.gate(x_BLD)) * self.up(x_BLD))


def _residual_std(config: TransformerConfig) -> float:
    """std of what writes to the residual stream: 2 * layers terms then add up to the variance of one.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3; 0.02 is the
    std of the GPT-2 code.
    """
    return _INIT_STD / math.sqrt(2 * config.layers)


class Block(nnx.Module):
    """A layer: attention and MLP, each on a normalised copy of the residual stream that it adds to.

    As built it holds the stack of ALL layers; called, it must hold one (`_unstack`, or a slice in `lax.scan`).
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm((config.layers, config.d_model), config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm((config.layers, config.d_model), config.norm_eps)
        self.mlp = SwiGLU(config, rngs=rngs)
        self.rate = config.dropout

    def __call__(self, x_BLD, rotary, segments_BL, key, cache):
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        out_BLD, cache = self.attention(self.attention_norm(x_BLD), rotary, segments_BL, cache)
        x_BLD = x_BLD + dropout(out_BLD, self.rate, attention_key)
        x_BLD = x_BLD + dropout(self.mlp(self.mlp_norm(x_BLD)), self.rate, mlp_key)
        return x_BLD, cache


def _unstack(tree, count: int) -> list:
    """The ``count`` slices of every leaf's leading dim.

    By `lax.split`, whose transpose is one concatenate; that of ``leaf[i]`` pads and adds a whole stack for every layer.
    """
    leaves, structure = jax.tree.flatten(tree)
    slices = [[part.reshape(part.shape[1:]) for part in jax.lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [structure.unflatten(parts) for parts in zip(*slices, strict=True)]


class Transformer(nnx.Module):
    """A causal language model over token ids; ``nnx.state(model)`` is its parameters and nothing more.

    Args:
      config: sizes and choices.
      rngs: gives the ``params`` key for the initial values: norms 1, kernels and embedding normal with std 0.02, the
        two projections that write to the residual stream smaller by sqrt(2 * layers) (GPT-2).
      pin: `jaxtrain.sharding.Pin`, or None on one device: keeps the residual stream split by rows. Left to itself, XLA
        splits it as the parameters are and sends activations instead of parameters.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, pin: Any = None):
        self.config = config
        self.pin = pin
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.layers = Block(config, rngs=rngs)
        self.final_norm = RMSNorm((config.d_model,), config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear((config.d_model, config.vocab_size), _INIT_STD, rngs=rngs)

    def __call__(self, tokens_BL, positions_BL=None, segment_ids_BL=None, *, key=None) -> jax.Array:
        """Logits (B, L, V), float32, of the token after each one. Arguments as for `hidden`."""
        return self.logits(self.hidden(tokens_BL, positions_BL, segment_ids_BL, key=key))

    @property
    def head_kernel(self) -> jax.Array:
        """(D, V) in the compute dtype: ``logits(hidden)`` is ``hidden @ head_kernel``."""
        return self.embedding.embedding[...].T if self.config.tied_embeddings else self.head.kernel[...]

    def logits(self, hidden_BLD) -> jax.Array:
        """(B, L, V) from the outputs of `hidden`, accumulated and returned in float32 whatever the compute dtype."""
        return _logits(hidden_BLD, self.head_kernel)

    def hidden(self, tokens_BL, positions_BL=None, segment_ids_BL=None, *, key=None) -> jax.Array:
        """The residual stream after the final norm, (B, L, D) in the embedding's dtype.

        Args:
          tokens_BL: integer ids; one outside [0, vocab_size) makes its row NaN.
          positions_BL: integer place of each token in its document, restarting at document starts; default 0, 1, 2...
            One outside [0, max_length) makes its row NaN.
          segment_ids_BL: integer document numbers in a packed row. A token sees only earlier tokens of its own segment;
            with positions that restart, each document gets the outputs it would get alone. Default: one document a row.
          key: dropout's key; None means evaluation, without dropout. Layer i draws from ``fold_in(key, i)``.

        Raises:
          ValueError: shapes that are not (B, L), or L > max_length.
        """
        length = tokens_BL.shape[-1]
        for name, given in (("positions_BL", positions_BL), ("segment_ids_BL", segment_ids_BL)):
            if given is not None and given.shape != tokens_BL.shape:
                raise ValueError(f"{name} has shape {given.shape} but the tokens {tokens_BL.shape}; one for each token")
        if positions_BL is None:
            positions_BL = jnp.arange(length)[None]
        config = self.config
        rotary = look_up_rotary(positions_BL, config.max_length, config.head_dim, config.rope_theta)
        return self._run(tokens_BL, rotary, segment_ids_BL, key, None)[0]

    def init_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for ``slots`` tokens in each of ``batch`` rows."""
        shape = (self.config.layers, batch, slots, self.config.kv_heads, self.config.head_dim)
        dtype = self.embedding.embedding.dtype
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def decode(self, tokens_BL, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """`hidden` of tokens that continue those in the cache, without dropout, and the cache with them added.

        The caller sees to it that ``cache.length + L`` does not pass the cache's slots: the length is a traced number.
        """
        positions_L = cache.length + jnp.arange(tokens_BL.shape[-1], dtype=jnp.int32)
        tables_Lc = rotary_tables(positions_L, self.config.head_dim, self.config.rope_theta)
        rotary = tuple(table_Lc[None, :, None] for table_Lc in tables_Lc)
        return self._run(tokens_BL, rotary, None, None, cache)

    def _run(self, tokens_BL, rotary, segments_BL, key, cache: KVCache | None):
        config = self.config
        if tokens_BL.ndim != 2:
            raise ValueError(
                f"tokens have shape {tokens_BL.shape}; give (batch, length), tokens[None] for one sequence"
            )
        if tokens_BL.shape[1] > config.max_length:
            raise ValueError(
                f"sequences of {tokens_BL.shape[1]} tokens are longer than max_length={config.max_length}; "
                "shorten them or raise max_length"
            )

        def layer(x_BLD, layer_inputs):
            index, block, keys_and_values = layer_inputs
            layer_key = None if key is None or config.dropout == 0.0 else jax.random.fold_in(key, index)
            layer_cache = None if cache is None else (*keys_and_values, cache.length)
            x_BLD, layer_cache = block(x_BLD, rotary, segments_BL, layer_key, layer_cache)
            return self.pin(x_BLD) if self.pin else x_BLD, None if layer_cache is None else layer_cache[:2]

        if config.remat in ("dots", "full"):
            saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None
            layer = jax.checkpoint(layer, policy=saved, prevent_cse=not config.scan_layers)

        x_BLD = self.pin.lookup(self.embedding, tokens_BL) if self.pin else self.embedding(tokens_BL)
        indices = jnp.arange(config.layers)
        stacks = (self.layers, None if cache is None else cache[:2])
        if config.scan_layers:
            x_BLD, keys_and_values = jax.lax.scan(layer, x_BLD, (indices, *stacks))
        else:
            outs = []
            for index, (block, layer_cache) in enumerate(_unstack(stacks, config.layers)):
                x_BLD, out = layer(x_BLD, (index, block, layer_cache))
                outs.append(out)
            keys_and_values = jax.tree.map(lambda *parts: jnp.stack(parts), *outs)
        if cache is not None:
            cache = KVCache(*keys_and_values, cache.length + tokens_BL.shape[1])
        return self.final_norm(x_BLD), cache
