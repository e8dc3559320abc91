"""The files of a directory of checkpoints, on a file system (``Disk``) or in Google Cloud Storage (``Bucket``).

Both know what a checkpoint's directory looks like before, after and instead of its commit, because the two kinds of
store commit differently: a disk renames a finished directory, a bucket has no rename and gets a marker object last.
"""

import base64
import concurrent.futures
import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from jaxtrain.checkpoint.errors import CheckpointError
from jaxtrain.workdir import write_whole

MANIFEST = "MANIFEST.json"
MARKER = "commit_success.txt"  # Orbax's, in a bucket
_ASIDE = "DAMAGED"  # what a bucket's manifest and marker are replaced by
_OURS = (MANIFEST, "_CHECKPOINT_METADATA", "state", "host_state")
TEMPORARY_END = ".orbax-checkpoint-tmp"
_TEMPORARY = re.compile(rf"\d+{re.escape(TEMPORARY_END)}(-\d+)?")
_DAMAGED = re.compile(r"\d+\.damaged\d*")
_TRASH = ".deleted"
_CHUNK_BYTES = 1 << 22
_THREADS = 16


class Entry(NamedTuple):
    """Size in bytes and crc32c of a file; the checksum is None where nobody has computed it yet."""

    size: int
    crc32c: int | None


class Files(Protocol):
    """One directory of checkpoints. Paths are relative to it, with slashes; every method may raise OSError."""

    root: str
    keeps_checksums: bool  # whether a listing has them, computed by the store from what it received

    def committed(self) -> list[str]:
        """Names of the directories that claim to be whole checkpoints: decimal numbers."""

    def partial(self) -> list[str]:
        """Names of what unfinished saves and deletions left behind."""

    def set_asides(self) -> list[str]:
        """Names of the directories that hold damaged checkpoints."""

    def unfinished(self, name: str) -> str:
        """Where a save under way writes what will be ``name``."""

    def tree(self, name: str) -> dict[str, Entry]:
        """Every file below ``name``, by its path relative to ``name``."""

    def exists(self, path: str) -> bool:
        """Whether a file is there."""

    def read(self, path: str) -> bytes:
        """A small file."""

    def write(self, path: str, content: bytes) -> None:
        """A small file, whole or not at all, durable when this returns."""

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        """A file of any size, durable when this returns."""

    def delete(self, path: str) -> None:
        """One file."""

    def chunks(self, path: str) -> Iterator[bytes]:
        """A file of any size, in parts."""

    def set_aside(self, name: str, reason: str) -> str:
        """Make a damaged checkpoint no checkpoint, its data kept; returns where it lies now."""

    def remove(self, name: str) -> None:
        """Delete a directory so that a kill at any moment leaves nothing that claims to be whole."""

    def make_way(self, name: str) -> None:
        """Clear ``name`` for a save: move what was set aside there, delete an unfinished save.

        Raises:
            CheckpointError: something that no save made lies there.
        """

    def begin(self, name: str) -> str:
        """A directory to write what will be ``name``, as Orbax would."""

    def commit(self, name: str) -> None:
        """Make what was written since ``begin`` the checkpoint ``name``."""

    def uri(self, path: str = "") -> str:
        """The path as other libraries take it."""


def open_files(directory: str | pathlib.Path) -> Files:
    """The files of a local path or a ``gs://`` address; nothing is made or read yet.

    Raises:
        CheckpointError: another kind of address, or ``gs://`` without the extra ``gcs``.
    """
    text = str(directory)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Disk(text)
    if scheme != "gs":
        raise CheckpointError(
            f"checkpoints: {text} is not a place jaxtrain can commit to: it knows local paths, mounted file systems "
            f"and gs://BUCKET/PATH. Save to one of these, and copy what is finished to {scheme}:// with other tools."
        )
    if not rest.strip("/") or not rest.partition("/")[2].strip("/"):
        raise CheckpointError(f"checkpoints: {text} names no directory in a bucket; write gs://BUCKET/PATH.")
    if importlib.util.find_spec("gcsfs") is None:
        raise CheckpointError(f"checkpoints: {text} needs gcsfs, which is not installed: pip install 'jaxtrain[gcs]'")
    return Bucket(rest)


class Disk:
    """A local or mounted file system: a save is written beside and gets its name by a rename."""

    keeps_checksums = False

    def __init__(self, root: str) -> None:
        self._root = pathlib.Path(root).expanduser().absolute()
        self.root = str(self._root)

    def committed(self) -> list[str]:
        return [path.name for path in self._children() if path.name.isdecimal() and _is_ours(_inside(path))]

    def partial(self) -> list[str]:
        unfinished = [path for path in self._children() if _TEMPORARY.fullmatch(path.name)]
        return [path.name for path in unfinished] + ([_TRASH] if (self._root / _TRASH).is_dir() else [])

    def set_asides(self) -> list[str]:
        return [path.name for path in self._children() if _DAMAGED.fullmatch(path.name)]

    def unfinished(self, name: str) -> str:
        (found,) = self._root.glob(f"{name}.orbax-checkpoint-tmp*")
        return found.name

    def tree(self, name: str) -> dict[str, Entry]:
        base = self._root / name
        return {
            path.relative_to(base).as_posix(): Entry(path.stat().st_size, None)
            for path in base.rglob("*")
            if path.is_file()
        }

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, content: bytes) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._root / path, content)

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        with open(self._root / path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def delete(self, path: str) -> None:
        (self._root / path).unlink()

    def chunks(self, path: str) -> Iterator[bytes]:
        with open(self._root / path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def set_aside(self, name: str, reason: str) -> str:
        aside, number = self._root / f"{name}.damaged", 1
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{name}.damaged{number}")
        (self._root / name).rename(aside)
        with contextlib.suppress(OSError):  # the rename is what counts
            (aside / _ASIDE).write_text(reason + "\n")
        return str(aside)

    def remove(self, name: str) -> None:
        if name != _TRASH:
            (self._root / _TRASH).mkdir(exist_ok=True)
            target = self._root / _TRASH / name
            if target.exists():
                shutil.rmtree(target)
            (self._root / name).rename(target)
        shutil.rmtree(self._root / _TRASH, ignore_errors=True)

    def make_way(self, name: str) -> None:
        path = self._root / name
        if path.exists():
            try:
                path.rmdir()
            except OSError:
                raise CheckpointError(_in_the_way(str(path))) from None

    def begin(self, name: str) -> str:
        under_way = f"{name}{TEMPORARY_END}"
        if (self._root / under_way).exists():
            shutil.rmtree(self._root / under_way)
        return under_way

    def commit(self, name: str) -> None:
        (self._root / f"{name}{TEMPORARY_END}").rename(self._root / name)

    def uri(self, path: str = "") -> str:
        return str(self._root / path) if path else self.root

    def _children(self) -> list[pathlib.Path]:
        try:
            return [path for path in self._root.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []


class Bucket:
    """A prefix in Google Cloud Storage: a save is written in place, its manifest and then Orbax's marker last.

    The store computes each object's crc32c from the bytes it received, and a listing returns them all.
    """

    keeps_checksums = True

    def __init__(self, rest: str) -> None:
        self._prefix = rest.rstrip("/")
        self.root = f"gs://{self._prefix}"

    def committed(self) -> list[str]:
        return [name for name, inside in self._numbered().items() if {MANIFEST, MARKER} & inside]

    def partial(self) -> list[str]:
        numbered = self._numbered().items()
        return [name for name, inside in numbered if not {MANIFEST, MARKER, _ASIDE} & inside and _is_ours(inside)]

    def set_asides(self) -> list[str]:
        in_place = [name for name, inside in self._numbered().items() if _ASIDE in inside]
        return in_place + [name for name in self._names("") if _DAMAGED.fullmatch(name)]

    def unfinished(self, name: str) -> str:
        return name

    def tree(self, name: str) -> dict[str, Entry]:
        base = f"{self._prefix}/{name}/"
        found = self._store.find(base, detail=True)
        return {
            path.removeprefix(base): Entry(int(info["size"]), _from_base64(info.get("crc32c")))
            for path, info in found.items()
            if path.startswith(base) and path != base
        }

    def exists(self, path: str) -> bool:
        return self._store.isfile(f"{self._prefix}/{path}")

    def read(self, path: str) -> bytes:
        return self._store.cat_file(f"{self._prefix}/{path}")

    def write(self, path: str, content: bytes) -> None:
        self._store.pipe_file(f"{self._prefix}/{path}", content)

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        with self._store.open(f"{self._prefix}/{path}", "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def delete(self, path: str) -> None:
        self._store.rm_file(f"{self._prefix}/{path}")

    def chunks(self, path: str) -> Iterator[bytes]:
        with self._store.open(f"{self._prefix}/{path}", "rb", block_size=_CHUNK_BYTES, cache_type="readahead") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def set_aside(self, name: str, reason: str) -> str:
        self.write(f"{name}/{_ASIDE}", (reason + "\n").encode())
        with contextlib.suppress(FileNotFoundError):
            self._store.cp_file(f"{self._prefix}/{name}/{MANIFEST}", f"{self._prefix}/{name}/{_ASIDE}.{MANIFEST}")
        self._unmark(name)
        return self.uri(name)

    def remove(self, name: str) -> None:
        self._unmark(name)
        paths = [f"{self._prefix}/{name}/{path}" for path in self.tree(name)]
        if paths:
            self._store.rm(paths)

    def make_way(self, name: str) -> None:
        inside = self._names(name)
        if not inside:
            return
        if not _is_ours(inside):
            raise CheckpointError(_in_the_way(self.uri(name)))
        if _ASIDE in inside:
            aside, number = f"{name}.damaged", 1
            while self._names(aside):
                number += 1
                aside = f"{name}.damaged{number}"
            for path in self.tree(name):
                self._store.cp_file(f"{self._prefix}/{name}/{path}", f"{self._prefix}/{aside}/{path}")
        self.remove(name)

    def begin(self, name: str) -> str:
        return name

    def commit(self, name: str) -> None:
        self.write(f"{name}/{MARKER}", b"committed by jaxtrain\n")

    def uri(self, path: str = "") -> str:
        return f"{self.root}/{path}" if path else self.root

    def _unmark(self, name: str) -> None:
        for last in (MARKER, MANIFEST):
            with contextlib.suppress(FileNotFoundError):
                self._store.rm_file(f"{self._prefix}/{name}/{last}")

    def _numbered(self) -> dict[str, set[str]]:
        """Directories named by numbers, and what lies directly in each."""
        names = [name for name in self._names("") if name.isdecimal()]
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            return dict(zip(names, pool.map(self._names, names), strict=True))

    def _names(self, directory: str) -> set[str]:
        try:
            found = self._store.ls(f"{self._prefix}/{directory}".rstrip("/"), detail=False, refresh=True)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rsplit("/", 1)[-1] for path in found}

    @property
    def _store(self) -> Any:
        import fsspec  # an extra

        return fsspec.filesystem("gs", use_listings_cache=False)


def _is_ours(names: Iterable[str]) -> bool:
    """Whether a directory named by a number was made by a save; others belong to somebody else."""
    return any(name in _OURS for name in names)


def _inside(path: pathlib.Path) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:  # retired between two looks
        return []


def _in_the_way(path: str) -> str:
    return f"{path} is in the way of a checkpoint and was not made by one; move it, or choose another directory."


def _from_base64(text: str | None) -> int | None:
    return None if text is None else int.from_bytes(base64.b64decode(text), "big")
