"""Byte n-gram models: what a language model must beat before it has learned anything of interest.

Counts with add-one (Laplace) smoothing over the 256 bytes: p(b | c) = (count(c, b) + 1) / (count(c) + 256). The
expected numbers on the standard library's source are about 4.85 bits per byte (unigram) and 3.56 (bigram).
Source: Jurafsky and Martin, "Speech and Language Processing" (3rd ed. draft), chapter 3, "N-gram language models".
"""

import numpy as np

from jaxtrain.data.text import DOCUMENT_START, as_stream

_BYTES = 256
_CONTEXTS = 257  # a byte, or DOCUMENT_START


def unigram_bits_per_byte(train_stream: np.ndarray, held_out_stream: np.ndarray) -> float:
    """Bits per held-out byte under the byte frequencies of the training stream.

    Both are streams as in ``jaxtrain.data.text`` (1-D, integer); document starts are neither counted nor predicted.
    Raises ValueError if either holds no text.
    """
    return _bits_per_byte(_pairs(train_stream).sum(0), _pairs(held_out_stream).sum(0))


def bigram_bits_per_byte(train_stream: np.ndarray, held_out_stream: np.ndarray) -> float:
    """Bits per held-out byte given the byte before it; a document's first byte is given its document start.

    Both are streams as in ``jaxtrain.data.text`` (1-D, integer). Raises ValueError if either holds no text.
    """
    return _bits_per_byte(_pairs(train_stream), _pairs(held_out_stream))


def _pairs(stream: np.ndarray) -> np.ndarray:
    """How often byte b follows context c, int64 (257, 256)."""
    stream = as_stream(stream).astype(np.int32)
    context, target = stream[:-1], stream[1:]
    code = (context * _BYTES + target)[target != DOCUMENT_START]
    return np.bincount(code, minlength=_CONTEXTS * _BYTES).reshape(_CONTEXTS, _BYTES)


def _bits_per_byte(train: np.ndarray, held_out: np.ndarray) -> float:
    """Counts (..., 256) of both sides -> mean of -log2 p over the held-out bytes."""
    bits = np.log2(train.sum(-1, keepdims=True) + _BYTES) - np.log2(train + 1)
    return float((held_out * bits).sum() / held_out.sum())
