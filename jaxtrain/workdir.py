"""A run's directory: one process at a time, one experiment for ever, files that are whole."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxtrain import config as config_lib
from jaxtrain.config import ConfigError


class Workdir:
    """``path`` made, claimed for this process until it ends, and checked to be writable.

    Raises:
        ConfigError: it cannot be made or written, or another live process holds it.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        if "://" in str(path):
            raise ConfigError(
                f"workdir {path} is in an object store; give a directory, and for checkpoints "
                "--config.checkpoint.directory=gs://BUCKET/PATH."
            )
        self.path = pathlib.Path(path).expanduser().absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115, held until the process ends
        except OSError as error:
            raise ConfigError(f"workdir {self.path} cannot be written: {error.strerror}; choose another.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"workdir {self.path} is in use by another process; wait for it or choose another."
            ) from None

    def check(self, config: ConfigDict, allow: Collection[str] = ()) -> None:
        """Hold ``config`` (resolved) against the ``config.json`` that is there, if there is one; writes nothing.

        Args:
            allow: keys that may differ.

        Raises:
            ConfigError: the directory holds another experiment; each key that differs is listed.
        """
        if (self.path / "config.json").exists():
            config_lib.refuse_drift(read_config(self.path), config, f"workdir {self.path}", allow)

    def keep(self, config: ConfigDict, allow: Collection[str] = ()) -> None:
        """Write ``config.json``, after the same ``check``."""
        self.check(config, allow)
        write_whole(self.path / "config.json", json.dumps(config.to_dict(), indent=2).encode() + b"\n")

    def close(self) -> None:
        """Give the directory free."""
        with contextlib.suppress(OSError):
            self._lock.close()


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Put ``content`` on the disk under ``path``: all of it, or ``path`` stays as it was. Waits for the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some network file systems cannot sync a directory; the rename stands
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read_config(path: str | pathlib.Path) -> ConfigDict:
    """The resolved config of a run's directory; keys that were added since have their defaults.

    Raises:
        ConfigError: there is none, or it is no config of this version.
    """
    file = pathlib.Path(path).expanduser() / "config.json"
    try:
        values: Mapping[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{file.parent} holds no run (config.json is not there); give the --workdir of one."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); put it back, or use another --workdir.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is no config but {type(values).__name__}; put it back, or use another --workdir.")
    config = config_lib.default()
    for name, value in config_lib.flat(values).items():
        config_lib.assign(config, name, tuple(value) if isinstance(value, list) else value)
    return config_lib.resolve(config)
