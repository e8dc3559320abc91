"""How batches come to the devices of a step: their shardings, what is refused, what fills a partial window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import paths, sharding
from jaxtrain.optim import Accumulation, Scan


class Intake:
    """Batches for one mesh and one way to accumulate; leaves ``[B, ...]``, and ``[k, B, ...]`` with ``Scan(k)``.

    Attributes:
        batch_sharding: of every leaf of a batch that a step takes. row_sharding: of every leaf ``[B, ...]``.
    """

    def __init__(self, mesh: Mesh, batch_axes: tuple[str, ...], accumulation: Accumulation) -> None:
        self._mesh, self._axes, self._accumulation = mesh, batch_axes, accumulation
        self._stacked = isinstance(accumulation, Scan)
        self.row_sharding = NamedSharding(mesh, P(batch_axes))
        self.batch_sharding = NamedSharding(mesh, P(None, batch_axes)) if self._stacked else self.row_sharding
        self._known: set[tuple] = set()

    def struct(self, example: Any) -> Any:
        """``ShapeDtypeStruct`` with shardings for a batch like ``example``."""
        self._check(example, self.batch_sharding)
        dtype = jax.dtypes.canonicalize_dtype  # NumPy's int64 and float64 arrive as 32 bits
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x.dtype), sharding=self.batch_sharding), example
        )

    def window(self, batch: Any) -> tuple[Any, np.int32 | None]:
        """The batch on its devices; with ``Scan`` filled up to k micro-batches, and how many of them count."""
        if not self._stacked:
            return self.rows(batch), None
        self._check(batch, self.batch_sharding)
        count, k = jnp.shape(jax.tree.leaves(batch)[0])[0], self._accumulation.k

        def fill(x: Any) -> Any:
            numpy = np if isinstance(x, np.ndarray) else jnp
            return numpy.concatenate([x, numpy.repeat(x[-1:], k - count, axis=0)])

        if count < k:
            batch = jax.tree.map(fill, batch)
        return self._placed(batch, self.batch_sharding), np.int32(count)

    def rows(self, batch: Any) -> Any:
        """A batch of leaves ``[B, ...]`` on its devices."""
        return self._placed(batch, self.row_sharding)

    def _placed(self, batch: Any, target: NamedSharding) -> Any:
        """The batch on its devices: host arrays are put there, so that both kinds share one compilation."""
        self._check(batch, target)

        def put(x: Any) -> Any:
            there = isinstance(x, jax.core.Tracer) or getattr(x, "committed", False)
            return x if there else jax.device_put(x, target)

        return jax.tree.map(put, batch)

    def _might_be_a_window(self, shapes: tuple[tuple[int, ...], ...], shards: int) -> bool:
        second = {shape[1] if len(shape) > 1 else 0 for shape in shapes}
        return not self._stacked and len(second) == 1 and second != {0} and not second.pop() % shards

    def _check(self, batch: Any, target: NamedSharding) -> None:
        leaves = jax.tree.leaves(batch)
        shapes = tuple(jnp.shape(leaf) for leaf in leaves)
        if (shapes, target.spec) in self._known:
            return
        shards, leading = sharding.axes_size(self._mesh, self._axes), len(target.spec)
        sizes = {shape[:leading] if len(shape) >= leading else None for shape in shapes}
        odd = [leaf for leaf in leaves if not isinstance(leaf, int | float | str) and not _is_numeric(leaf)]
        if odd:
            held = ", ".join(sorted({f"{getattr(x, 'dtype', type(x).__name__)}" for x in odd}))
            raise ValueError(f"batch: it holds {held}, which no device takes; give arrays of numbers.")
        numbers = [leaf for leaf in leaves if isinstance(leaf, int | float | str)]
        if numbers or not leaves:
            held = (
                f"{len(numbers)} leaves are Python numbers or texts, as lists of them give" if leaves else "it is empty"
            )
            raise ValueError(f"batch: {held}; give a pytree of arrays, each beginning with the rows.")
        if len(sizes) != 1 or None in sizes:
            dims = (
                "leading dim (rows of the micro-batch)" if leading == 1 else "two leading dims (k micro-batches, rows)"
            )
            got = ", ".join(f"{name}: {jnp.shape(x)}" for name, x in paths.named_leaves(batch).items())
            raise ValueError(f"batch: every leaf needs the same {dims}, got {got}.")
        *stacked, rows = sizes.pop()
        if stacked and not 1 <= stacked[0] <= self._accumulation.k:
            raise ValueError(
                f"batch: {stacked[0]} micro-batches in a window of Scan(k={self._accumulation.k}); give 1 to "
                f"{self._accumulation.k}, as leaves [k, rows, ...]."
            )
        if rows == 0 or rows % shards:
            below = rows // shards * shards
            near = f"{below} or {below + shards}" if below else f"{shards}"
            raise ValueError(
                f"batch: {rows} rows do not divide by the {shards} devices of mesh axes "
                f"{', '.join(f'{a}={self._mesh.shape[a]}' for a in self._axes)}; use {near} rows."
                + (" Windows [k, rows, ...] are for Scan(k)." if self._might_be_a_window(shapes, shards) else "")
            )
        self._known.add((shapes, target.spec))


def _is_numeric(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
                                  or jnp.issubdtype(dtype, jax.dtypes.extended))  # fmt: skip
