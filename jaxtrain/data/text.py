"""Text files to token streams to packed rows: the byte-level data of a language model.

Tokens are bytes, 0..255, and one marker: ``DOCUMENT_START`` stands before the first byte of each document. The 257
tokens in use are padded to ``VOCAB_SIZE`` = 320, a multiple of 64, so that an embedding splits over 2, 4, 8, 16, 32 or
64 tensor-parallel shards and fills whole tiles of the matrix unit; tokens 257..319 never occur.

A split of the corpus is one STREAM, uint16: ``[START, bytes of document 0..., START, bytes of document 1..., ...]``.
``RowTable`` cuts a stream into rows of equal length, by index, with nothing to carry from row to row.
"""

import glob
import hashlib
import operator
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

DOCUMENT_START = 256
VOCAB_SIZE = 320
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
STDLIB = "stdlib"

# Left out of "stdlib": other people's packages, tests (half of the bytes, and where the files that are not UTF-8 lie),
# and what a build writes for its own machine, so that one Python version gives the same corpus everywhere.
_STDLIB_SKIPPED_DIRS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


class TextCorpus(NamedTuple):
    """A corpus, split by document. ``train`` and ``held_out`` are streams, uint16, read-only, in order of name."""

    train: np.ndarray
    held_out: np.ndarray
    train_documents: tuple[str, ...]
    held_out_documents: tuple[str, ...]
    skipped: tuple[str, ...]  # files that are not UTF-8
    duplicates: tuple[str, ...]  # files with the very bytes of an earlier one
    fingerprint: str  # hex sha256; changes with any name, byte or side of a document

    def __str__(self) -> str:
        sides = [(self.train_documents, self.train), (self.held_out_documents, self.held_out)]
        train, held_out = (
            f"{len(names)} documents, {(stream.size - len(names)) / 1e6:.2f} MB" for names, stream in sides
        )
        left_out = f"{len(self.skipped)} files not UTF-8 and {len(self.duplicates)} copies left out"
        return f"training {train}; held out {held_out}; {left_out}; {self.fingerprint[:12]}"


def load_text(
    paths: str | os.PathLike | Sequence[str | os.PathLike] = STDLIB,
    *,
    held_out_fraction: float = 0.05,
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    skip_non_utf8: bool = False,
) -> TextCorpus:
    """Read UTF-8 files into memory (2 bytes per byte of text) and split them by document.

    ``paths``: one or more of a file; a glob (``**`` crosses directories); a directory, searched recursively for files
    that end in one of ``suffixes`` (hidden ones are passed over); or ``"stdlib"``, the ``*.py`` files of the running
    Python's standard library without its tests (a directory of that name is ``./stdlib``).

    A document is named by its path relative to its root (the directory, the fixed part of the glob, the file's own
    directory). It is held out if ``crc32(name) / 2**32 < held_out_fraction``: the same on every machine, and unmoved
    when other documents come or go. Where that would leave a side empty, the document nearest to the boundary changes
    sides. A file found twice, and a file with the bytes of an earlier one, is read once, so no held-out document is a
    copy of a training document.

    Raises ValueError: a pattern that matches nothing; no text at all; a file that is not UTF-8 (unless
    ``skip_non_utf8``; always skipped in ``stdlib``); one document to split; a fraction outside [0, 1).
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"data.held_out_fraction={held_out_fraction}: must be at least 0 and below 1")
    patterns = [os.fspath(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    documents, skipped, duplicates = _read(patterns, tuple(suffixes), skip_non_utf8)
    if not documents:
        raise ValueError(
            f"data.paths={patterns}: no text found ({len(skipped)} files are not UTF-8, all others are empty); "
            "name at least one file with text"
        )
    names = [name for name, _ in documents]
    held_out = _held_out(names, held_out_fraction)
    return TextCorpus(
        train=token_stream(text for (_, text), out in zip(documents, held_out, strict=True) if not out),
        held_out=token_stream(text for (_, text), out in zip(documents, held_out, strict=True) if out),
        train_documents=tuple(name for name, out in zip(names, held_out, strict=True) if not out),
        held_out_documents=tuple(name for name, out in zip(names, held_out, strict=True) if out),
        skipped=tuple(skipped),
        duplicates=tuple(duplicates),
        fingerprint=_fingerprint(documents, held_out),
    )


def token_stream(texts: Iterable[bytes]) -> np.ndarray:
    """``[START, bytes..., START, bytes...]``, uint16, read-only; a text without bytes adds nothing."""
    texts = [text for text in texts if text]
    stream = np.empty(sum(map(len, texts)) + len(texts), np.uint16)
    at = 0
    for text in texts:
        stream[at] = DOCUMENT_START
        stream[at + 1 : at + 1 + len(text)] = np.frombuffer(text, np.uint8)
        at += 1 + len(text)
    stream.flags.writeable = False
    return stream


class RowTable:
    """Random access to a stream's rows of L tokens: row i reads ``stream[i*L : (i+1)*L]`` and predicts the next token.

    ``table[i]`` is a dict of fresh arrays (L,), ``table.read_rows(rows)`` cuts several at once, (len(rows), L):

    - ``tokens`` int32 - ``stream[i*L : (i+1)*L]``
    - ``targets`` int32 - ``stream[i*L+1 : (i+1)*L+1]``
    - ``positions`` int32 - from 0; restart at each document start and at the row's start
    - ``segment_ids`` int32 - from 1; a new one at each document start; 0 is padding
    - ``weights`` float32 - 1 where the target is a byte of the SAME document, 0 at a document's end and in padding

    The last row is padded with ``DOCUMENT_START``. The weights of a whole table sum to the number of bytes in the
    stream: each byte is predicted exactly once, a document's first byte from its ``DOCUMENT_START``.

    Raises ValueError for a stream that is empty or does not begin with ``DOCUMENT_START``, and for L < 1; IndexError
    outside ``0 <= i < len(table)``.
    """

    def __init__(self, stream: np.ndarray, sequence_length: int):
        if sequence_length < 1:
            raise ValueError(f"data.sequence_length={sequence_length}: must be at least 1")
        self.stream = as_stream(stream)
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-(self.stream.size - 1) // self.sequence_length)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: leaf[0] for name, leaf in self.read_rows([row]).items()}

    def read_rows(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        length = self.sequence_length
        tokens, targets = (np.full((len(rows), length), DOCUMENT_START, np.int32) for _ in range(2))
        filled = np.empty((len(rows), 1), np.int64)
        for i, row in enumerate(map(operator.index, rows)):
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of a table of {len(self)} rows")
            chunk = self.stream[row * length : (row + 1) * length + 1]
            filled[i] = chunk.size - 1
            tokens[i, : chunk.size - 1] = chunk[:-1]
            targets[i, : chunk.size - 1] = chunk[1:]

        starts = tokens == DOCUMENT_START
        indices = np.arange(length, dtype=np.int32)
        positions = indices - np.maximum.accumulate(np.where(starts, indices, np.int32(0)), axis=1)
        segment_ids = np.cumsum(starts, axis=1, dtype=np.int32) + ~starts[:, :1]
        segment_ids[indices >= filled] = 0
        return {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "segment_ids": segment_ids,
            "weights": (targets != DOCUMENT_START).astype(np.float32),
        }


def as_stream(stream: np.ndarray) -> np.ndarray:
    """The stream itself, or a ValueError that says why it is none."""
    stream = np.asarray(stream)
    if stream.ndim != 1 or not np.issubdtype(stream.dtype, np.integer):
        raise ValueError(f"a token stream is a 1-D integer array, not {stream.dtype} of shape {stream.shape}")
    if stream.size < 2:
        raise ValueError(
            "the token stream is empty: this side of the corpus holds no text; set data.held_out_fraction > 0"
        )
    if stream[0] != DOCUMENT_START:
        raise ValueError(
            f"a token stream begins with DOCUMENT_START={DOCUMENT_START}, not {stream[0]}; use token_stream()"
        )
    return stream


def _read(
    patterns: Sequence[str], suffixes: tuple[str, ...], skip_non_utf8: bool
) -> tuple[list[tuple[str, bytes]], list[str], list[str]]:
    """(name, bytes) of each non-empty document in order of name; names of files not UTF-8; names of copies."""
    if not patterns:
        raise ValueError('data.paths is empty; name a file, a glob or a directory, or use "stdlib"')
    found: dict[str, tuple[str, int, str, bool]] = {}  # real path -> name, index of the pattern, path, may be skipped
    for number, pattern in enumerate(patterns):
        root, files = _matches(pattern, suffixes)
        if not files:
            hint = (
                f"directories are searched for {', '.join(suffixes)}" if os.path.isdir(root) else f"no directory {root}"
            )
            raise ValueError(
                f"data.paths: {pattern!r} matches no file ({hint}); correct it or leave it out of {patterns}"
            )
        for path in files:
            name = os.path.relpath(path, root).replace(os.sep, "/")
            found.setdefault(os.path.realpath(path), (name, number, path, skip_non_utf8 or pattern == STDLIB))

    documents, skipped, duplicates, seen = [], [], [], set()
    for name, _, path, may_skip in sorted(found.values()):
        with open(path, "rb") as file:
            text = file.read()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            if not may_skip:
                raise ValueError(
                    f"{path}: not UTF-8 at byte offset {error.start} (byte 0x{text[error.start]:02x}); convert it, "
                    "or drop it from data.paths / set data.skip_non_utf8=True to skip it"
                ) from None
            skipped.append(name)
            continue
        digest = hashlib.sha256(text).digest()
        if text and digest in seen:
            duplicates.append(name)
        elif text:
            seen.add(digest)
            documents.append((name, text))
    return documents, skipped, duplicates


def _matches(pattern: str, suffixes: tuple[str, ...]) -> tuple[str, list[str]]:
    """The root that names are relative to, and the files."""
    if pattern == STDLIB:
        root = sysconfig.get_path("stdlib")
        return root, list(_walk(root, (".py",), _STDLIB_SKIPPED_DIRS, _STDLIB_SKIPPED_PREFIXES))
    path = os.path.expanduser(pattern)
    if os.path.isdir(path):
        return path, list(_walk(path, suffixes, {"__pycache__"}, (".",)))
    if os.path.isfile(path):
        return os.path.dirname(path) or ".", [path]
    root = os.path.dirname(path)
    while glob.has_magic(root):
        root = os.path.dirname(root)
    return root or ".", [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]


def _walk(root: str, suffixes: tuple[str, ...], skipped: set[str], skipped_prefixes: tuple[str, ...]) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        raise ValueError(f"data.paths: directory {error.filename} cannot be read ({error.strerror}).") from error

    for directory, directories, files in os.walk(root, onerror=unreadable):
        directories[:] = [d for d in directories if d not in skipped and not d.startswith(skipped_prefixes)]
        for file in files:
            path = os.path.join(directory, file)
            if file.endswith(suffixes) and not file.startswith(skipped_prefixes) and os.path.isfile(path):
                yield path


def _held_out(names: Sequence[str], fraction: float) -> list[bool]:
    """For each name, whether it is held out; neither side is empty, unless ``fraction`` is 0."""
    if fraction == 0:
        return [False] * len(names)
    if len(names) < 2:
        raise ValueError(
            f"the corpus is one document ({names[0]}), which cannot be split by document: "
            "add a second file to data.paths, or cut this one in two"
        )
    hashes = [zlib.crc32(os.fsencode(name)) for name in names]
    held_out = [value < fraction * 2**32 for value in hashes]
    if not any(held_out):
        held_out[hashes.index(min(hashes))] = True
    elif all(held_out):
        held_out[hashes.index(max(hashes))] = False
    return held_out


def _fingerprint(documents: Sequence[tuple[str, bytes]], held_out: Sequence[bool]) -> str:
    digest = hashlib.sha256()
    for (name, text), out in zip(documents, held_out, strict=True):
        encoded = os.fsencode(name)
        digest.update(f"{len(encoded)} {len(text)} {int(out)}\n".encode() + encoded)
        digest.update(text)
    return digest.hexdigest()
