"""The mesh, and rules (path pattern -> PartitionSpec) that give every leaf of a state its sharding."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import paths

AXES = ("slice", "data", "fsdp", "tensor")
BATCH_AXES = ("slice", "data", "fsdp")  # those that split the rows of a batch
SMALLEST_SHARDED = 2**16  # elements; below it a gather costs more in latency than the memory is worth
STACKED = "stacked"
"""A rule's value: the default sharding, but dim 0 counts layers and is never sharded."""

Rules = Sequence[tuple[str, P | str]]
DEFAULT_RULES: Rules = ((r"(^|/)(layers|blocks)/", STACKED),)


def make_mesh(
    *, slice: int = 1, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over the axes ``slice, data, fsdp, tensor``, whose sharding is inferred by the compiler (Auto axes).

    Args:
        slice: groups of devices joined by DCN only. data: replicas. fsdp: parameter shards. tensor: shards of layers.
            One of them may be -1: as many as the devices allow.
        devices: which devices; all of them by default. Their number must be the product of the axes, except that one
            device of many is taken where every axis is 1.

    Raises:
        ValueError: the axes do not multiply to the number of devices.
    """
    sizes = {"slice": slice, "data": data, "fsdp": fsdp, "tensor": tensor}
    devices = list(jax.devices() if devices is None else devices)
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh {_sizes(sizes)}: sizes are 1 or more, and at most one axis is -1 (as many as fit).")
    if free:
        if len(devices) % fixed:
            raise ValueError(
                f"mesh {_sizes(sizes)}: {len(devices)} devices do not divide by {fixed}, the product of the other axes."
            )
        sizes[free[0]] = len(devices) // fixed
    elif fixed == 1:
        devices = devices[:1]
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"mesh {_sizes(sizes)} needs {math.prod(sizes.values())} devices and {len(devices)} are here; "
            "set one axis to -1 to use them all, or give devices= so many of them."
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def infer(abstract: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """The sharding of each parameter.

    The first rule whose pattern is found in the leaf's name decides; a leaf that none names gets the default: its
    largest dim that divides by ``fsdp`` (of equal ones the last), replicated below ``SMALLEST_SHARDED`` elements.

    Args:
        abstract: pytree of arrays or ``ShapeDtypeStruct``.
        mesh: with any axis names; ``fsdp`` is needed only for the default to shard anything.
        rules: pairs of (``re.search`` pattern, ``PartitionSpec`` or ``STACKED``).

    Returns:
        The same tree with ``NamedSharding`` leaves.

    Raises:
        ValueError: a rule names an axis that the mesh lacks, has more entries than the leaf has dims, or asks for a dim
            to be split that does not divide.
    """
    return jax.tree_util.tree_map_with_path(lambda path, x: _one(paths.name(path), x, mesh, rules), abstract)


def like_params(abstract: Any, params: Mapping | Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for a tree that holds copies of the parameters, as an optimizer's state does.

    A leaf takes the sharding of the parameter whose name its own name ends in, if the shapes are equal (Adam's moments,
    an accumulator); every other leaf is replicated (counts, Adafactor's factors).

    Args:
        abstract: the tree to shard. params, shardings: the parameters and their shardings, trees of one structure.
    """
    known = {
        name: (leaf.shape, sharding)
        for (name, leaf), sharding in zip(paths.named_leaves(params).items(), jax.tree.leaves(shardings), strict=True)
    }

    def one(path: tuple[Any, ...], x: Any) -> NamedSharding:
        parts = paths.name(path).split("/")
        for start in range(len(parts) + 1):  # the last: parameters that are one bare array have the empty name
            shape, sharding = known.get("/".join(parts[start:]), (None, None))
            if shape == x.shape:
                return sharding
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, abstract)


@dataclasses.dataclass(frozen=True)
class Pin:
    """Keeps an activation ``[B, ...]`` split by rows over the batch axes, and whole in every other dim: ``pin(x)``.

    Where parameters are sharded (``fsdp``), the compiler has a choice: gather the parameters, or split the activations
    as the parameters are and send those. A model says which by pinning what flows through it, between its layers.

    Attributes:
        mesh: as the program's. axes: those that split the rows.
    """

    mesh: Mesh
    axes: Sequence[str] = BATCH_AXES

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._spread(x, self.axes)

    def lookup(self, look: Callable[[jax.Array], jax.Array], indices: jax.Array) -> jax.Array:
        """``look(indices)``, pinned: rows ``[B, ..., D]`` of a table ``[V, D]`` that ``fsdp`` splits over D.

        Every shard looks up its columns of all rows of its group, which then change places (an all-to-all): neither
        the table nor its gradient is gathered.
        """
        groups = [axis for axis in self.axes if axis != "fsdp"]
        found = look(self._spread(indices, groups))
        return self(self._spread(found, groups, *[()] * (found.ndim - 2), ["fsdp"]))

    def _spread(self, x: jax.Array, *dims: Sequence[str]) -> jax.Array:
        inside = jax.sharding.get_abstract_mesh()
        manual = set(inside.manual_axes)  # those of a shard_map around: there x holds the rows of one shard
        spec = P(*(tuple(axis for axis in axes if axis in self.mesh.shape and axis not in manual) for axes in dims))
        return jax.lax.with_sharding_constraint(x, NamedSharding(inside if manual else self.mesh, spec))


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """The tree of ``ShapeDtypeStruct`` with a sharding on every leaf."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def _one(name: str, x: Any, mesh: Mesh, rules: Rules) -> NamedSharding:
    for pattern, spec in rules:
        try:
            found = re.search(pattern, name)
        except re.error as error:
            raise ValueError(f"rules: {pattern!r} is no pattern ({error}).") from error
        if found:
            if isinstance(spec, str):
                if spec != STACKED:
                    raise ValueError(f"rule {pattern!r}: {spec!r} is neither a PartitionSpec nor sharding.STACKED.")
                return _default(x, mesh, first_dim=1)
            _check(name, x.shape, spec, mesh, pattern)
            return NamedSharding(mesh, spec)
    return _default(x, mesh, first_dim=0)


def _default(x: Any, mesh: Mesh, first_dim: int) -> NamedSharding:
    shards = mesh.shape.get("fsdp", 1)
    dims = [(x.shape[i], i) for i in range(first_dim, len(x.shape)) if x.shape[i] % shards == 0]
    if shards == 1 or not dims or math.prod(x.shape) < SMALLEST_SHARDED:
        return NamedSharding(mesh, P())
    _, dim = max(dims)
    return NamedSharding(mesh, P(*([None] * dim), "fsdp"))


def _check(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh, pattern: str) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"{name}: rule {pattern!r} gives {len(spec)} dims {spec}, the parameter has {list(shape)}.")
    for dim, axes in enumerate(spec):
        for axis in (axes,) if isinstance(axes, str) else (axes or ()):
            if axis not in mesh.shape:
                raise ValueError(f"{name}: rule {pattern!r} names axis {axis!r}; the mesh has {', '.join(mesh.shape)}.")
        count = axes_size(mesh, axes)
        if shape[dim] % count:
            raise ValueError(
                f"{name}: dim {shape[dim]} of {shape} is not divisible by mesh axis {axes!r}={count} "
                f"(rule {pattern!r}); pad it or change the rule."
            )


def axes_size(mesh: Mesh, axes: str | Sequence[str] | None) -> int:
    """How many shards a dim split over ``axes`` has."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else (axes or ())))


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
