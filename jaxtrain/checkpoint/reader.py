"""Arrays of a checkpoint that has been proved whole, compared with what is wanted before any is read."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxtrain import paths
from jaxtrain.checkpoint.errors import CheckpointError, MismatchError
from jaxtrain.state import Snapshot

_INDEX_BYTES = 10**8  # of the tables that say where arrays lie, kept while reading; Orbax's own choice


def read(uri: str, tree: Mapping[str, str], target: Any, allow: Collection[str] = ()) -> Any:
    """Those parts of the saved tree that ``target`` has, in its shapes, dtypes and shardings, read in parallel.

    Args:
        uri: of the checkpoint. tree: ``path -> "dtype[shape]"`` as saved.
        target: a ``Snapshot``, for all of it, or a dict of some of its parts. allow: ``"dtype"``: cast.

    Raises:
        MismatchError: each difference. CheckpointError: it could not be read.
    """
    whole = isinstance(target, Snapshot)
    parts = target._fields if whole else tuple(target)
    wanted = {name: f"{x.dtype}{list(x.shape)}" for name, x in paths.named_leaves(target).items()}
    saved = {name: text for name, text in tree.items() if name.split("/")[0] in parts}
    wrong = [(name, saved.get(name, "not there"), wanted.get(name, "not there"))
             for name in sorted({*wanted, *saved}) if wanted.get(name) != saved.get(name)]  # fmt: skip
    only_dtypes = all(was.partition("[")[2] == now.partition("[")[2] and "[" in was for _, was, now in wrong)
    if wrong and not ("dtype" in allow and only_dtypes):
        lines = "\n  ".join(f"{name}: {was} -> {now}" for name, was, now in wrong)
        advice = "\nallow the conversion with allow='dtype'" if only_dtypes else ""
        raise MismatchError(f"checkpoint {uri} holds another state (saved -> wanted):\n  {lines}{advice}")
    arguments = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=not whole
    )
    try:
        return _handler(uri).restore(_arrays(uri), args=arguments)
    except ValueError as error:
        raise MismatchError(f"checkpoint {uri} holds another state: {error}") from error
    except Exception as error:
        raise CheckpointError(f"checkpoint {uri} could not be restored: {error}") from error


def saved_part(uri: str, name: str) -> Any:
    """One part of the saved tree, ``"params"`` or another, as NumPy arrays to read into, in nested dicts."""
    saved = _handler(uri).metadata(_arrays(uri)).tree[name]
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)


class _Mapped:
    """Orbax's handler of a kind of array, which maps files instead of copying them into buffers first.

    They have just been verified, so the page cache has them.
    """

    def __init__(self, kind: type) -> None:
        vars(self).update(vars(ocp.type_handlers.get_type_handler(kind)))

    async def deserialize(
        self, infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.type_handlers.RestoreArgs] | None = None
    ) -> Sequence[Any]:
        context = ts.Context(
            {"file_io_mode": {"mode": "memmap"}, "cache_pool#ocdbt": {"total_bytes_limit": _INDEX_BYTES}}
        )
        for info in infos:  # made for this one call
            info.ts_context = context
        return await super().deserialize(infos, args)


class _MappedJax(_Mapped, ocp.type_handlers.ArrayHandler):
    pass


class _MappedNumPy(_Mapped, ocp.type_handlers.NumpyHandler):
    pass


def _handler(uri: str) -> ocp.PyTreeCheckpointHandler:
    if uri.startswith("gs://"):
        return ocp.PyTreeCheckpointHandler()
    kinds = ((jax.Array, _MappedJax(jax.Array)), (np.ndarray, _MappedNumPy(np.ndarray)))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=ocp.type_handlers.create_type_handler_registry(*kinds))


def _arrays(uri: str) -> epath.Path:
    return epath.Path(uri) / "state"
