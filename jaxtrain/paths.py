"""Names of a tree's leaves: ``layers/mlp/up/kernel``. Rules, overrides, masks and error texts all use these."""

import re
from collections.abc import Sequence
from typing import Any

import jax


def name(path: tuple[Any, ...]) -> str:
    """A key path of ``jax.tree_util`` as one string, its parts joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """``{name: leaf}`` of a pytree, in the order of ``jax.tree.leaves``; raises ValueError where two share a name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if name(path) in named:
            raise ValueError(f"two leaves of the tree are named {name(path)!r}; rename one.")
        named[name(path)] = leaf
    return named


def differences(wanted: Any, given: Any) -> list[str]:
    """How two trees of arrays (or of shapes) differ in names, shapes and dtypes, one sentence each.

    Args:
        wanted, given: pytrees whose leaves have ``shape`` and ``dtype``.

    Returns:
        An empty list where both agree. Containers are compared by the names they give, not by type.
    """
    left, right = named_leaves(wanted), named_leaves(given)
    lines = [f"{key}: missing (expected {_text(left[key])})" for key in left if key not in right]
    lines += [f"{key}: not expected (got {_text(right[key])})" for key in right if key not in left]
    for key in left:
        if key in right and _text(left[key]) != _text(right[key]):
            lines.append(f"{key}: expected {_text(left[key])}, got {_text(right[key])}")
    return lines


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"{type(leaf).__name__}, not an array"


def chosen(what: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that at least one pattern finds (``re.search``).

    Args:
        what: these patterns are called in an error.

    Raises:
        ValueError: no pattern at all for ``re``, or one that finds none of the names.
    """
    found: set[str] = set()
    for pattern in patterns:
        try:
            new = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"{what}: {pattern!r} is no pattern ({error}).") from error
        if not new:
            raise ValueError(f"{what}: {pattern!r} chooses none of the {len(names)} parameters: {some(names)}.")
        found |= new
    return found


def some(names: Sequence[str]) -> str:
    """The first few of many names, for a sentence."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
