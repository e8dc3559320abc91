"""Looking at checkpoints, copying, deleting and exporting them, from any machine: nothing here touches a device."""

import contextlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.checkpoint.files import MANIFEST, MARKER, Files, open_files

SHARD_BYTES = 5 * 10**9  # of an exported file, as other tools cut them
_STEP = re.compile(r"(?P<step>\d+)(\.damaged\d*)?")


class Listed(NamedTuple):
    """One directory.

    Attributes:
        name: its name. step: what it is a checkpoint of. saved_unix_s: when its save began, or None.
        size_bytes: of all files. state: ``verified``, ``committed`` (not read), ``partial`` or ``damaged``.
        reason: why it is damaged, or None.
    """

    name: str
    step: int
    saved_unix_s: float | None
    size_bytes: int
    state: str
    reason: str | None


def find(path: str | pathlib.Path) -> tuple[Files, str | None]:
    """The directory of checkpoints that ``path`` means, and a name in it.

    Args:
        path: one checkpoint (``.../checkpoints/500``), a directory of them, or a run's workdir.

    Returns:
        The name is None where ``path`` is no single checkpoint.

    Raises:
        CheckpointError: a place that cannot be used, or nothing of the kind is there.
    """
    text = str(path).rstrip("/")
    head, _, last = text.rpartition("/")
    if _STEP.fullmatch(last) and "://" + last not in text:
        files = open_files(head or ("." if not text.startswith("/") else "/"))
        if files.tree(last):
            return files, last
    for place in (text, f"{text}/checkpoints"):
        files = open_files(place)
        if files.committed() or files.set_asides() or files.partial():
            return files, None
    raise CheckpointError(f"{text} holds no checkpoints; give a directory of checkpoints, one of them, or a workdir.")


def listing(files: Files, *, verify: bool = False) -> Iterator[Listed]:
    """Every checkpoint, whole or not, by step; ``verify`` reads those on a disk, in a bucket a listing is enough."""
    found = [(name, "") for name in files.committed()]
    found += [(name, "partial") for name in files.partial() if _step(name) is not None]
    found += [(name, "damaged") for name in files.set_asides()]
    for name, state in sorted(found, key=lambda item: (_step(item[0]), item[0])):
        tree, reason = files.tree(name), None
        if state == "damaged":
            reason = files.read(f"{name}/DAMAGED").decode().strip() if files.exists(f"{name}/DAMAGED") else None
        elif not state:
            reason = manifest.problem(files, name, read=None if verify else False)
            proved = verify or files.keeps_checksums
            state = "damaged" if reason else "verified" if proved else "committed"
        saved = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one may say anything
            saved = float(_about(files, name)["saved_unix_s"])
        yield Listed(name, _step(name), saved, sum(entry.size for entry in tree.values()), state, reason)


def about(files: Files, name: str) -> dict[str, Any]:
    """What a checkpoint says about itself; raises CheckpointError."""
    try:
        return _about(files, name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{files.uri(name)} cannot be read: {error}") from error


def copy(source: Files, name: str, target: Files, *, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Copy a checkpoint between places; what arrives is verified, and is no checkpoint before all of it has arrived.

    Args:
        on_bytes: told of bytes that were copied, and of those read to verify them where a store keeps no checksums.

    Raises:
        CheckpointError: the source is damaged, the target has one of that name, or what arrived is not what was sent.
    """
    reason = manifest.problem(source, name, on_bytes=on_bytes)
    if reason is not None:
        raise CheckpointError(f"{source.uri(name)} is damaged ({reason}); it is not copied.")
    if target.exists(f"{name}/{MANIFEST}"):
        raise CheckpointError(f"{target.uri(name)} is there already; delete it first, or choose another place.")
    target.make_way(name)
    under_way = target.begin(name)
    last = [MANIFEST, MARKER]
    for path in [*(path for path in source.tree(name) if path not in last), *last]:
        if source.exists(f"{name}/{path}"):
            target.write_chunks(f"{under_way}/{path}", _counted(source.chunks(f"{name}/{path}"), on_bytes))
    reason = manifest.problem(target, under_way, on_bytes=on_bytes)
    if reason is not None:
        target.remove(under_way)
        raise CheckpointError(f"{target.uri(name)}: what arrived is not what was sent ({reason}); it was deleted.")
    target.commit(name)


def remove(files: Files, name: str, *, force: bool = False) -> None:
    """Delete a checkpoint, or what is left of one.

    Raises:
        CheckpointError: it is the newest that is whole, and not ``force``.
    """
    if name in files.committed() and not force:
        newer = [other for other in files.committed() if _step(other) > _step(name)]
        if not any(manifest.problem(files, other) is None for other in newer):
            raise CheckpointError(
                f"{files.uri(name)} is the newest checkpoint that is whole: a run could go on from nothing newer. "
                "Delete it with --force if that is what you want."
            )
    files.remove(name)


def export(params: dict[str, np.ndarray], directory: pathlib.Path, metadata: dict[str, str]) -> list[pathlib.Path]:
    """Write arrays as safetensors: one file, or shards with an index, as other projects read them.

    Args:
        params: by name. metadata: kept in the files.

    Returns:
        What was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in params.items():
        if shards[-1] and size + array.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(array).reshape(array.shape)
        size += array.nbytes
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    written = [directory / name for name in names]
    for path, shard in zip(written, shards, strict=True):
        safetensors.numpy.save_file(shard, path, metadata=metadata)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(array.nbytes for array in params.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        written.append(directory / "model.safetensors.index.json")
        written[-1].write_text(json.dumps(index, indent=2))
    return written


def _counted(chunks: Iterator[bytes], on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        on_bytes(len(chunk))


def _about(files: Files, name: str) -> dict[str, Any]:
    return json.loads(files.read(f"{name}/run.json"))


def _step(name: str) -> int | None:
    match = re.match(r"\d+", name)
    return int(match.group()) if match else None
