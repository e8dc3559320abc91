"""``jaxtrain ckpt``: look at checkpoints, prove, copy, delete and export them, on any machine."""

import argparse
import datetime
import json
import pathlib
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.progress import Transfer, say, size

DAMAGED = 1  # exit code: something that was looked at is not whole


def add(commands: Any) -> None:
    """Add the command to the program's subparsers."""
    text = "Look at checkpoints, prove, copy, delete and export them."
    actions = commands.add_parser("ckpt", help=text, description=text, allow_abbrev=False).add_subparsers(
        required=True, metavar="ls|show|verify|rm|cp|export"
    )

    def action(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=lambda arguments, overrides: _told(run, arguments))
        return sub

    where = "a checkpoint, a directory of them or a workdir: a path or gs://BUCKET/PATH"
    one = "one checkpoint, as runs/a/checkpoints/500"
    ls = action("ls", _ls, "List every checkpoint with its step, time, size and state.")
    ls.add_argument("place", metavar="PLACE", help=where)
    ls.add_argument("--verify", action="store_true", help="read those on a disk, too; exit code 1 where one is damaged")
    ls.add_argument("--json", action="store_true", help="as JSON, a line each")
    show = action("show", _show, "Print what a checkpoint says about itself.")
    show.add_argument("place", metavar="CHECKPOINT", help=one)
    show.add_argument("--json", action="store_true", help="all of it, as JSON")
    verify = action("verify", _verify, "Prove checkpoints whole; exit code 1 where one is damaged.")
    verify.add_argument("place", metavar="PLACE", help=where)
    verify.add_argument("--deep", action="store_true", help="in a bucket, read every byte instead of one listing")
    rm = action("rm", _rm, "Delete checkpoints.")
    rm.add_argument("places", metavar="CHECKPOINT", nargs="+", help=one)
    rm.add_argument("--force", action="store_true", help="also the newest one that is whole")
    cp = action("cp", _cp, "Copy a checkpoint to another directory of checkpoints; what arrives is verified.")
    cp.add_argument("place", metavar="CHECKPOINT", help=one)
    cp.add_argument("target", metavar="DIRECTORY", help="of checkpoints: a path or gs://BUCKET/PATH")
    export = action("export", _export, "Write the parameters of a checkpoint as safetensors.")
    export.add_argument("place", metavar="CHECKPOINT", help=one)
    export.add_argument("target", metavar="DIRECTORY", help="where model.safetensors goes")
    export.add_argument("--ema", action="store_true", help="their exponential average instead")


def _told(run: Any, arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint.errors import CheckpointError  # with the rest of what only these commands load

    try:
        return run(arguments)
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def _ls(arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint import tools  # heavy

    files, name = tools.find(arguments.place)
    rows = [row for row in tools.listing(files, verify=arguments.verify) if name in (None, row.name)]
    if arguments.json:
        for row in rows:
            say(json.dumps(row._asdict()))
    else:
        say(f"{'step':>12}  {'saved':<19}  {'size':>10}  state")
        for row in rows:
            saved = "-" if row.saved_unix_s is None else f"{_when(row.saved_unix_s):%Y-%m-%d %H:%M:%S}"
            also = "" if row.name == str(row.step) else f" as {row.name}"
            reason = f": {row.reason}" if row.reason else ""
            say(f"{row.step:>12,}  {saved:<19}  {size(row.size_bytes):>10}  {row.state}{also}{reason}")
        if any(row.state == "committed" for row in rows):
            say("committed: not read; prove them with --verify")
    new = [row for row in rows if row.state == "damaged" and row.name == str(row.step)]
    return DAMAGED if new else 0


def _show(arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint import tools  # heavy

    files, name = _one(arguments.place)
    about = tools.about(files, name)
    if arguments.json:
        say(json.dumps(about, indent=2))
        return 0
    run = about.get("run", {})
    rows: list[tuple[str, Any]] = [
        ("place", files.uri(name)),
        ("step", f"{about['step']:,}"),
        ("saved", f"{_when(about['saved_unix_s']):%Y-%m-%d %H:%M:%S}"),
        ("size", size(sum(entry.size for entry in files.tree(name).values()))),
        ("processes", about["processes"]),
        *((f"counts.{key}", f"{value:,}") for key, value in run.get("counts", {}).items()),
        *((f"data.{key}", value) for key, value in run.get("data", {}).items()),
        *((key, f"{value:.6g}") for key, value in about["metrics"].items()),
        *((f"tree.{key}", value) for key, value in _tree(about["tree"]).items()),
        *((f"platform.{key}", value) for key, value in run.get("platform", {}).items()),
    ]
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        say(f"{key:<{width}}  {value}")
    return 0


def _tree(tree: dict[str, str]) -> dict[str, str]:
    """Leaves and dtypes of each part of a state."""
    parts: dict[str, dict[str, int]] = {}
    for name, text in tree.items():
        dtypes = parts.setdefault(name.split("/")[0], {})
        dtype = text.split("[")[0]
        dtypes[dtype] = dtypes.get(dtype, 0) + 1
    return {part: ", ".join(f"{count} x {dtype}" for dtype, count in found.items()) for part, found in parts.items()}


def _verify(arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint import manifest, tools  # heavy

    files, name = tools.find(arguments.place)
    names = [name] if name else sorted(files.committed(), key=int)
    worst = 0
    for each in names:
        total = sum(entry.size for entry in files.tree(each).values())
        with Transfer(f"verifying {each}", total) as told:
            reason = manifest.problem(files, each, read=True if arguments.deep else None, on_bytes=told)
        say(f"{files.uri(each)}: {'verified' if reason is None else f'damaged: {reason}'}")
        worst = worst if reason is None else DAMAGED
    return worst


def _rm(arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint import tools  # heavy

    for files, name in [_one(place) for place in arguments.places]:
        tools.remove(files, name, force=arguments.force)
        say(f"deleted {files.uri(name)}")
    return 0


def _cp(arguments: argparse.Namespace) -> int:
    from jaxtrain.checkpoint import tools  # heavy
    from jaxtrain.checkpoint.files import open_files  # as above

    files, name = _one(arguments.place)
    target = open_files(arguments.target)
    passes = 1 + (not files.keeps_checksums) + (not target.keeps_checksums)
    total = passes * sum(entry.size for entry in files.tree(name).values())
    with Transfer(f"copying and verifying {name}", total) as told:
        tools.copy(files, name, target, on_bytes=told)
    say(f"copied and verified: {target.uri(name)}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from jaxtrain import paths  # heavy
    from jaxtrain.checkpoint import tools  # as above
    from jaxtrain.checkpoint.store import Checkpoints  # as above

    files, name = _one(arguments.place)
    if not name.isdecimal():
        raise ConfigError(f"{files.uri(name)} was set aside as damaged; nothing is exported from it.")
    checkpoints, directory = Checkpoints(files.root, read_only=True), pathlib.Path(arguments.target).expanduser()
    with Transfer(f"exporting {files.uri(name)}"):
        params = checkpoints.restore_params(int(name), ema=arguments.ema)
        written = tools.export(paths.named_leaves(params), directory, {"step": name, "source": files.uri(name)})
    for path in written:
        say(f"wrote {path}")
    return 0


def _one(place: str) -> tuple[Any, str]:
    from jaxtrain.checkpoint import tools  # heavy

    files, name = tools.find(place)
    if name is None:
        there = ", ".join(sorted(files.committed(), key=int))
        raise ConfigError(f"{place} is no single checkpoint; give one of {there or 'none'} in {files.root}.")
    return files, name


def _when(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s)
