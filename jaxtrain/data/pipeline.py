"""Host micro-batches from any random-access source, addressed by ONE global sample index.

A source has ``__len__`` and ``__getitem__(row) -> dict of arrays``, the same keys, shapes and dtypes for each row; it
is read from several threads at once. It may also have ``read_rows(rows) -> dict of arrays`` with the rows stacked,
which is then used in place of reading row by row.

Sample s of a run belongs to epoch ``s // len(source)``, and each epoch is a permutation of its own: a pure function of
(seed, epoch). So a position is a Python int, whatever the number of processes, threads or prefetched micro-batches, and
a reader is rebuilt at it in constant time; there is no iterator state to save. grain does the shuffle and the reading
threads; there are no worker processes.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import grain
import numpy as np


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Mapping[str, np.ndarray]: ...


class Batches:
    """Endless training micro-batches; see ``at``.

    ``micro_batch_size`` counts the rows of ALL processes; process p of n reads rows ``p*B/n`` to ``(p+1)*B/n`` of each
    micro-batch, so the order of samples does not depend on n. ``threads=0`` reads in the caller's thread, the fastest
    for a source in memory; otherwise up to ``buffer`` micro-batches are read ahead. ``stack=k`` gives k micro-batches
    at a time, a whole window, as leaves (k, B / process_count, ...).

    Raises ValueError: a size or stack below 1, a size not divisible by ``process_count`` or above the number of rows; a
    negative seed.
    """

    def __init__(
        self,
        source: Source,
        micro_batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        threads: int = 2,
        buffer: int = 4,
        stack: int | None = None,
    ):
        self._rows = _process_rows(micro_batch_size, process_index, process_count)
        if stack is not None and stack < 1:
            raise ValueError(f"stack={stack} micro-batches: must be at least 1, or None for no leading dim")
        if len(source) < micro_batch_size:
            raise ValueError(
                f"the source holds {len(source)} rows, fewer than one micro-batch of {micro_batch_size}; "
                "add data, shorten data.sequence_length or lower the micro-batch size"
            )
        if len(source) >= 2**32:
            raise ValueError(f"the source holds {len(source)} rows; grain shuffles up to 2**32 - 1: use longer rows")
        if seed < 0:
            raise ValueError(f"seed={seed}: must not be negative")
        self.source = source
        self.micro_batch_size = micro_batch_size
        self._stack = stack
        self._read_options = _read_options(threads, buffer)
        # grain's own shuffle(seed=s) orders epoch e by s + e, so the runs of neighbouring seeds share their epochs;
        # seed(s) hashes s first.
        order = grain.MapDataset.range(len(source)).seed(seed)
        self._order = (order.shuffle() if shuffle else order).repeat()
        self._order[0]  # grain builds its lazy attributes here, in one thread

    def row_indices(self, sample_index: int) -> list[int]:
        """The rows of the source that this process reads for the micro-batch at a global sample index."""
        if sample_index < 0:
            raise ValueError(f"sample index {sample_index}: must not be negative")
        return [int(self._order[sample_index + row]) for row in self._rows]

    def at(self, sample_index: int) -> Iterator[dict[str, np.ndarray]]:
        """Micro-batches of the samples ``[s, s+B)``, ``[s+B, s+2B)``, ... without end, across epochs.

        Each is a dict of fresh arrays with the rows of this process: leaf (B / process_count, *shape in a row); with
        ``stack=k``, k of them as leaves (k, B / process_count, *shape in a row).
        ``s`` may be any non-negative int. After n micro-batches the position is ``s + n*B``, whatever was read ahead:
        the consumer counts. ``close()`` on the iterator ends its threads; so does dropping it.
        """
        start, size = int(sample_index), self.micro_batch_size
        if start < 0:
            raise ValueError(f"sample index {sample_index}: must not be negative")

        def read(number: int) -> dict[str, np.ndarray]:
            if self._stack is None:
                return _take(self.source, self.row_indices(start + number * size))
            first = number * self._stack
            rows = [row for i in range(self._stack) for row in self.row_indices(start + (first + i) * size)]
            leaves = _take(self.source, rows)
            return {name: leaf.reshape(self._stack, -1, *leaf.shape[1:]) for name, leaf in leaves.items()}

        return _iterate(read, sys.maxsize, self._read_options)


class InOrder:
    """Each row of a source exactly once, in order: what evaluation reads. Iterate it as often as needed.

    Every process gets ``len(self) = ceil(rows / B)`` batches of leaves (B / process_count, *shape in a row).
    Where ``B`` does not divide the rows, the last batch ends in rows of zeros; their leaf ``weights`` is zero too, so
    they count for nothing in a sum over weights.

    ``batch_size`` (of ALL processes), ``process_index``, ``process_count``, ``threads``, ``buffer`` are as in
    ``Batches``. Raises ValueError: an empty source; a size below 1 or not divisible by ``process_count``; padding
    needed but rows without ``weights``.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        process_index: int = 0,
        process_count: int = 1,
        threads: int = 2,
        buffer: int = 4,
    ):
        self._rows = _process_rows(batch_size, process_index, process_count)
        if len(source) == 0:
            raise ValueError("the source holds no rows: there is nothing to evaluate")
        self.source = source
        self.batch_size = batch_size
        self._read_options = _read_options(threads, buffer)
        self._padding = {name: np.zeros_like(leaf) for name, leaf in source[0].items()}
        missing = -len(source) % batch_size
        if missing and "weights" not in self._padding:
            raise ValueError(
                f"{len(source)} rows are padded with {missing} to fill batches of {batch_size}, but the rows have no "
                f"leaf 'weights' to mark them (only {sorted(self._padding)}); add one, or use a batch size that divides"
            )

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return _iterate(self._read, len(self), self._read_options)

    def _read(self, number: int) -> dict[str, np.ndarray]:
        rows = [number * self.batch_size + row for row in self._rows]
        real = [row for row in rows if row < len(self.source)]
        leaves = _take(self.source, real) if real else {name: leaf[None][:0] for name, leaf in self._padding.items()}
        missing = len(rows) - len(real)
        if missing:
            padding = {name: np.zeros((missing, *leaf.shape[1:]), leaf.dtype) for name, leaf in leaves.items()}
            leaves = {name: np.concatenate([leaf, padding[name]]) for name, leaf in leaves.items()}
        return leaves


def evenly_spaced(source: Source, rows: int) -> Source:
    """At most ``rows`` rows of the source, spread evenly over it (row i is row ``i * len(source) // rows`` of it).

    For an evaluation of bounded length that still sees the whole of the held-out data. ValueError for ``rows`` < 1.
    """
    if rows < 1:
        raise ValueError(f"{rows} rows of a source: must be at least 1")
    return source if rows >= len(source) else _EverySoOften(source, rows)


class _EverySoOften:
    def __init__(self, source: Source, rows: int):
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Mapping[str, np.ndarray]:
        return self._source[self._row(row)]

    def read_rows(self, rows: Sequence[int]) -> Mapping[str, np.ndarray]:
        return _take(self._source, [self._row(row) for row in rows])

    def _row(self, row: int) -> int:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        return row * len(self._source) // self._rows


class _Reader:
    """What grain's threads index: whole micro-batches, so that one task of a thread is one micro-batch."""

    def __init__(self, read: Callable[[int], dict[str, np.ndarray]], length: int):
        self._read = read
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self._read(number)


def _iterate(
    read: Callable[[int], dict[str, np.ndarray]], length: int, options: grain.ReadOptions
) -> Iterator[dict[str, np.ndarray]]:
    if options.num_threads == 0:
        yield from map(read, range(length))
        return
    iterator = iter(grain.MapDataset.source(_Reader(read, length)).to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()


def _process_rows(size: int, process_index: int, process_count: int) -> range:
    """The rows of a batch that belong to a process."""
    if size < 1:
        raise ValueError(f"batch size {size}: must be at least 1")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process {process_index} of {process_count}: the index must be in 0..{process_count - 1}")
    if size % process_count:
        below = size // process_count * process_count
        nearest = " or ".join(str(n) for n in (below, below + process_count) if n)
        raise ValueError(
            f"a batch of {size} rows is not divisible by {process_count} processes; the nearest is {nearest}"
        )
    per_process = size // process_count
    return range(process_index * per_process, (process_index + 1) * per_process)


def _read_options(threads: int, buffer: int) -> grain.ReadOptions:
    if threads < 0 or buffer < 1:
        raise ValueError(f"threads={threads}, buffer={buffer}: at least 0 (the caller's own thread) and at least 1")
    return grain.ReadOptions(num_threads=min(threads, buffer), prefetch_buffer_size=buffer if threads else 0)


def _take(source: Source, rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Rows of the source as one dict of leaves (len(rows), ...)."""
    if hasattr(source, "read_rows"):
        leaves = {name: np.asarray(leaf) for name, leaf in source.read_rows(rows).items()}
        for name, leaf in leaves.items():
            if leaf.shape[:1] != (len(rows),):
                raise ValueError(
                    f"leaf {name!r} of the source's read_rows({len(rows)} rows) has the shape {leaf.shape}; its "
                    "leading dim must be the rows"
                )
        return leaves
    parts = [source[row] for row in rows]
    first = {name: np.asarray(leaf) for name, leaf in parts[0].items()}
    for row, part in zip(rows, parts, strict=True):
        if part.keys() != first.keys():
            raise ValueError(
                f"row {row} of the source has the leaves {sorted(part)}, row {rows[0]} has {sorted(first)}"
            )
        for name, leaf in part.items():
            leaf = np.asarray(leaf)
            if (leaf.shape, leaf.dtype) != (first[name].shape, first[name].dtype):
                raise ValueError(
                    f"leaf {name!r} is {leaf.dtype} {leaf.shape} in row {row} of the source, but "
                    f"{first[name].dtype} {first[name].shape} in row {rows[0]}; rows must agree"
                )
    return {name: np.stack([part[name] for part in parts]) for name in first}
