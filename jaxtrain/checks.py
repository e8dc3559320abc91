"""What the step builder and its program refuse at once, in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxtrain import paths
from jaxtrain.optim import MultiSteps, Scan, Skip
from jaxtrain.precision import Precision
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
        if not isinstance(given[name], kind):
            raise TypeError(f"{name} is {given[name]!r}; give one like {example}.")
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


def trained_by(trainable: Any, names: Sequence[str]) -> dict[str, bool]:
    """For each name whether ``trainable``, as ``build_train_step`` takes it, chooses it."""
    if trainable is None:
        return dict.fromkeys(names, True)
    if callable(trainable):
        chosen = {name for name in names if trainable(name)}
    else:
        chosen = paths.chosen("trainable", [trainable] if isinstance(trainable, str) else trainable, names)
    if not chosen:
        raise ValueError(f"trainable: chooses none of the {len(names)} parameters: {paths.some(names)}.")
    return {name: name in chosen for name in names}
