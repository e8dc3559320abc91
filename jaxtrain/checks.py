"""What the step builder and its program refuse at once, in a sentence."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtrain import paths
from jaxtrain.optim import MultiSteps, Scan, Skip
from jaxtrain.precision import Precision
from jaxtrain.sharding import AXES
from jaxtrain.state import TrainState, View


def kinds(given: Mapping[str, Any]) -> None:
    """The mistakes of a first call: 4 for ``MultiSteps(4)``, a name for a ``Precision``."""
    for name, kind, example in (
        ("optimizer", optax.GradientTransformation, "optax.adamw(1e-3)"),
        ("mesh", (Mesh, AbstractMesh), "jaxtrain.sharding.make_mesh()"),
        ("accumulation", (MultiSteps, Scan), "MultiSteps(4)"),
        ("precision", Precision, 'Precision("bfloat16")'),
        ("nonfinite", Skip, 'Skip("window")'),
        ("rules", (list, tuple), '[("head/kernel$", PartitionSpec(None, "fsdp"))]'),
    ):
        if name == "optimizer" and isinstance(given[name], optax.MultiSteps):
            raise TypeError(
                "optimizer is an optax.MultiSteps; give the optimizer inside, and accumulation=MultiSteps(k)."
            )
        if not isinstance(given[name], kind):
            raise TypeError(f"{name} is {given[name]!r}; give one like {example}.")
    if not callable(given["init_fn"]) or not callable(given["loss_fn"]):
        name = "loss_fn" if not callable(given["loss_fn"]) else "init_fn"
        raise TypeError(f"{name} is {given[name]!r}; give a function, see build_train_step.")
    mesh = given["mesh"]
    explicit = [repr(a) for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]
    if explicit:
        raise ValueError(
            f"mesh: axis {', '.join(explicit)} is not Auto, and the step leaves the layout of what it computes to the "
            "compiler; use jaxtrain.sharding.make_mesh(), or axis_types=(jax.sharding.AxisType.Auto, ...)."
        )
    unknown = [repr(axis) for axis in given["batch_axes"] if axis not in (*mesh.axis_names, *AXES)]
    if unknown:
        raise ValueError(
            f"batch_axes: {', '.join(unknown)} is no axis of the mesh ({', '.join(mesh.axis_names)}); give those that "
            "split the rows."
        )
    for name, low, high, what in (
        ("clip_norm", 0, math.inf, "give a positive bound, or None for no clipping"),
        ("ema", -1, 1, "the decay of the average is at least 0 and below 1"),
    ):
        value = given[name]
        if value is not None and not (isinstance(value, int | float) and low < value < high and value >= 0):
            raise ValueError(f"{name}={value!r}: {what}.")
    if not isinstance(given["seed"], int | np.integer):
        raise TypeError(f"seed is {given['seed']!r}; give a whole number, from which all keys are made.")
    for name, schedule in (given["report"] or {}).items():
        if not callable(schedule):
            raise TypeError(f"report: {name} is {schedule!r}; give a schedule, a function of the step.")


def alive(what: str, given: Any, kind: type = TrainState) -> None:
    """Refuse a state or view whose arrays are gone: jax may end the process over it (0.10, several CPU devices)."""
    if not isinstance(given, kind):
        raise TypeError(
            f"{what}: got {type(given).__name__}; give the {kind.__name__} that program."
            f"{'view(state)' if kind is View else 'init() or an earlier call'} returned."
        )
    leaf = given.scale.value
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise ValueError(
            f"{what}: this {kind.__name__} is gone: an earlier call took its arrays over (it was donated). Go on with "
            "the state that the call returned; what must outlive it is program.view(state), a copy."
        )


def fitting(what: str, wanted: Any, given: Any) -> Any:
    """``given`` in the containers of ``wanted``, whose names, shapes and dtypes it must have.

    Raises:
        ValueError: each difference is listed; or an array is gone.
    """
    wrong = paths.differences(wanted, given)
    if wrong:
        raise ValueError(f"{what} does not fit this program:\n  " + "\n  ".join(wrong))
    named = paths.named_leaves(given)
    gone = [name for name, x in named.items() if isinstance(x, jax.Array) and x.is_deleted()]
    if gone:
        raise ValueError(
            f"{what}: {paths.some(gone)} is gone: an earlier call took it over (it was donated). A checkpoint_view "
            "lives until the next step, and a snapshot until it is resumed; copy what must live longer."
        )
    return jax.tree.unflatten(jax.tree.structure(wanted), [named[name] for name in paths.named_leaves(wanted)])


@contextlib.contextmanager
def explained(what: str, *pairs: tuple[str, Any, Any]) -> Iterator[None]:
    """Around a compiled call: where it fails over arguments that do not fit, say which ones.

    Args:
        pairs: name, wanted and given trees.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        for name, wanted, given in pairs:
            wrong = paths.differences(wanted, given)
            if wrong:
                raise ValueError(f"{what}: {name} does not fit this program:\n  " + "\n  ".join(wrong)) from error
        raise


def accumulates_once(opt_state: Any) -> None:
    """Refuse an optimizer that gathers micro-batches itself."""
    nested = lambda x: isinstance(x, optax.MultiStepsState)  # noqa: E731
    if any(map(nested, jax.tree.leaves(opt_state, is_leaf=nested))):
        raise TypeError("optimizer holds an optax.MultiSteps; give the one inside, and accumulation=MultiSteps(k).")


def trained_by(trainable: Any, names: Sequence[str]) -> dict[str, bool]:
    """For each name whether ``trainable``, as ``build_train_step`` takes it, chooses it."""
    if isinstance(trainable, Mapping):
        raise TypeError("trainable is a dict; give patterns for names, or a function of the name.")
    if trainable is None:
        return dict.fromkeys(names, True)
    if callable(trainable):
        chosen = {name for name in names if trainable(name)}
    else:
        chosen = paths.chosen("trainable", [trainable] if isinstance(trainable, str) else trainable, names)
    if not chosen:
        raise ValueError(f"trainable: chooses none of the {len(names)} parameters: {paths.some(names)}.")
    return {name: name in chosen for name in names}
