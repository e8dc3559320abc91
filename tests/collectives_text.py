"""Collectives in the text of a compiled program: which, inside of a loop or not, and how many bytes they move."""

import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
KIND = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


class Collective(NamedTuple):
    """``result_bytes``: of what each device holds afterwards. ``group``: how many devices take part, 0 if not told."""

    kind: str
    result_bytes: int
    group: int
    line: str

    @property
    def wire_bytes(self) -> float:
        """Sent by each device in a ring: 2 (n-1)/n of an all-reduce, (n-1)/n of the whole of a gather or scatter."""
        n = max(self.group, 1)
        whole = self.result_bytes * (n if self.kind == "reduce-scatter" else 1)
        return whole * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> dict[str, list[Collective]]:
    """``{"loop": ..., "once": ...}`` of an HLO text: those reachable from a while loop's body, and the others.

    A TPU's ``all-reduce-scatter`` fusion, written as an all-reduce and a slice, is the reduce-scatter that it runs as;
    a gather that is fused step by step into what runs beside it stands there many times, under one channel.
    """
    computations: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = header[1]
        computations.setdefault(name, []).append(line)
    todo, inside = re.findall(r"body=%?([\w.\-]+)", text), set()
    while todo:
        if (name := todo.pop()) not in inside:
            inside.add(name)
            todo += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", "\n".join(computations[name]))
    found: dict[str, list[Collective]] = {"loop": [], "once": []}
    channels: set[str] = set()
    for name, lines in computations.items():
        for line in lines:
            channel = re.search(r"channel_id=\d+", line)
            if match := re.search(KIND, line):
                if channel and channel[0] in channels:
                    continue
                channels.add(channel[0] if channel else "")
                result = line[line.index("=") + 1 : match.start()]
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
                size = sum(BYTES[dtype] * _product(dims) for dtype, dims in shapes if dtype in BYTES)
                where, kind, group = "loop" if name in inside else "once", match[1], _group(line)
                if name.startswith("all-reduce-scatter"):
                    kind, size = "reduce-scatter", size // group
                found[where].append(Collective(kind, size, group, line.strip()))
    return found


def _product(dims: str) -> int:
    product = 1
    for dim in filter(None, dims.split(",")):
        product *= int(dim)
    return product


def _group(line: str) -> int:
    """Devices of a group, in any of the ways XLA writes them."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return _product(",".join(sizes[axis] for axis in re.findall(r"'(\w+)'", match[2])))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]", line):
        return _product(",".join(re.findall(r"=(\d+)", match[1])))
    return 0
