"""MANIFEST.json: path, size and crc32c of every file of a checkpoint: it is proved whole before it is believed."""

import json
import os
import pathlib

import google_crc32c

NAME = "MANIFEST.json"
_OUTSIDE = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}  # written, or written again, after the manifest
_CHUNK_BYTES = 1 << 22


def write(directory: pathlib.Path) -> None:
    """Describe every file below ``directory`` and make the description durable; raises OSError."""
    files = {name: _describe(directory / name) for name in _files(directory)}
    target = directory / NAME
    with open(target, "w") as out:
        json.dump({"files": files}, out)
        out.flush()
        os.fsync(out.fileno())


def problem(directory: pathlib.Path) -> str | None:
    """Why the checkpoint in ``directory`` is not whole, as ``"<file>: <reason>"``; None: every byte is as written."""
    try:
        files = json.loads((directory / NAME).read_text())["files"]
        wanted = {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
    except FileNotFoundError:
        return f"{NAME}: missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME}: unreadable ({error})"
    found = set(_files(directory))
    for name in sorted(found | set(wanted)):
        if name not in found:
            return f"{name}: missing"
        if name not in wanted:
            return f"{name}: not in the manifest"
        try:
            size, crc = _describe(directory / name)
        except OSError as error:
            return f"{name}: unreadable ({error})"
        if size != wanted[name][0]:
            return f"{name}: {size} bytes, {wanted[name][0]} were written"
        if crc != wanted[name][1]:
            return f"{name}: checksum {crc:08x}, {wanted[name][1]:08x} was written"
    return None


def _files(directory: pathlib.Path) -> list[str]:
    every = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in every if name.rsplit("/", 1)[-1] not in _OUTSIDE)


def _describe(path: pathlib.Path) -> list[int]:
    checksum, size = google_crc32c.Checksum(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
            size += len(chunk)
    return [size, int.from_bytes(checksum.digest(), "big")]
