"""MANIFEST.json: path, size and crc32c of every file of a checkpoint: it is proved whole before it is believed."""

import concurrent.futures
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import google_crc32c

from jaxtrain.checkpoint.errors import MismatchError
from jaxtrain.checkpoint.files import MANIFEST, MARKER, Entry, Files

FORMAT = 2
_HEAD, _BLANK = b'{"crc32c": "', b"00000000"  # of the manifest itself, as it reads with zeros here; in every format
_OUTSIDE = {
    MANIFEST,
    "_CHECKPOINT_METADATA",
    MARKER,
}  # written, or written again, after the manifest; nothing reads them
_THREADS = 8

OnBytes = Callable[[int], None] | None


def write(files: Files, name: str, entries: Mapping[str, Entry]) -> None:
    """Describe the checkpoint in directory ``name``, durably; raises OSError."""
    listed = {path: list(entry) for path, entry in sorted(entries.items())}
    body = json.dumps({"crc32c": _BLANK.decode(), "format": FORMAT, "files": listed}).encode()
    own = f"{google_crc32c.value(body):08x}".encode()
    files.write(f"{name}/{MANIFEST}", _HEAD + own + body[len(_HEAD) + len(_BLANK) :])


def entries(files: Files, name: str, paths: Iterable[str] | None = None) -> dict[str, Entry]:
    """Sizes and checksums of the files below ``name`` (of ``paths`` only), from the store or by reading them."""
    tree = {path: entry for path, entry in files.tree(name).items() if path.rsplit("/", 1)[-1] not in _OUTSIDE}
    wanted = tree if paths is None else {path: tree[path] for path in paths if path in tree}
    read = [path for path, entry in wanted.items() if entry.crc32c is None]
    return wanted | dict(zip(read, _read(files, name, read), strict=True))


def problem(
    files: Files, name: str, *, read: bool | None = None, share: tuple[int, int] = (0, 1), on_bytes: OnBytes = None
) -> str | None:
    """Why the checkpoint in ``name`` is not whole, as ``"<file>: <reason>"``; None: every byte is as written.

    Args:
        read: every byte; None: where the store keeps no checksums of its own; False: never, sizes must do there.
        share: ``(i, n)``: look at every n-th file only, from the i-th on, where n processes share the work.
        on_bytes: told, from several threads, how many more bytes were read.

    Raises:
        MismatchError: another format.
    """
    try:
        content = _parse(files.read(f"{name}/{MANIFEST}"))
        number = content["format"]
        if number == FORMAT:
            written = {path: Entry(int(size), int(crc)) for path, (size, crc) in content["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: unreadable ({error})"
    if number != FORMAT:
        raise MismatchError(
            f"checkpoint {files.uri(name)} has format {number} and this version of jaxtrain reads {FORMAT}; read it "
            "with the version that wrote it, or start in another directory."
        )
    found = {path: entry for path, entry in files.tree(name).items() if path.rsplit("/", 1)[-1] not in _OUTSIDE}
    for path in sorted({*found} | {*written}):
        if path not in found:
            return f"{path}: missing"
        if path not in written:
            return f"{path}: not in the manifest"
        if found[path].size != written[path].size:
            return f"{path}: {found[path].size} bytes, {written[path].size} were written"
    mine = sorted(written)[share[0] :: share[1]]
    unknown = [path for path in mine if read or (read is None and found[path].crc32c is None)]
    try:
        seen = dict(zip(unknown, _read(files, name, unknown, on_bytes), strict=True))
    except OSError as error:
        return f"a file is unreadable ({error})"
    for path in mine:
        now = seen.get(path, found[path])
        if now.size != written[path].size:
            return f"{path}: {now.size} bytes could be read, {written[path].size} were written"
        if now.crc32c is not None and now.crc32c != written[path].crc32c:
            return f"{path}: checksum {now.crc32c:08x}, {written[path].crc32c:08x} was written"
    return None


def _parse(text: bytes) -> dict[str, Any]:
    """Raises ValueError and its like where the text is not as some version of this module wrote it."""
    if not text.startswith(_HEAD):
        old = json.loads(text)
        if set(old) != {"files"} or not all(len(entry) == 2 for entry in old["files"].values()):
            raise ValueError("not as it was written")
        return {"format": 1}
    own, rest = text[len(_HEAD) :][: len(_BLANK)], text[len(_HEAD) + len(_BLANK) :]
    if int(own, 16) != google_crc32c.value(_HEAD + _BLANK + rest) or own != own.lower():
        raise ValueError("its own checksum is another")
    return json.loads(text)


def _read(files: Files, name: str, paths: list[str], on_bytes: OnBytes = None) -> list[Entry]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda path: _checksum(files, f"{name}/{path}", on_bytes), paths))


def _checksum(files: Files, path: str, on_bytes: OnBytes) -> Entry:
    running, size = google_crc32c.Checksum(), 0
    for chunk in files.chunks(path):
        running.update(chunk)
        size += len(chunk)
        if on_bytes is not None:
            on_bytes(len(chunk))
    return Entry(size, int.from_bytes(running.digest(), "big"))
