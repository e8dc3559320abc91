"""What an experiment needs to know of its kind of data, as values."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxtrain.data.pipeline import Source
from jaxtrain.sharding import DEFAULT_RULES, Rules
from jaxtrain.step import Loss, MergeStats


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows to train on and rows held out.

    Attributes:
        train, held_out: random access. fingerprint: of all that is in them. about: one line for a person.
        baselines: computes name -> score, see ``Task.score``, of simple models.
    """

    train: Source
    held_out: Source
    fingerprint: str
    about: str
    baselines: Callable[[], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Score:
    """The number of an evaluation that a run is judged by.

    Attributes:
        name: as an evaluation calls it, without ``eval/``. title: what it is, with its unit.
        better: ``lower`` or ``higher``. per_nat: what one nat of loss is in it, or None where it is no loss.
    """

    name: str
    title: str
    better: str
    per_nat: float | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A model for a kind of data.

    Attributes:
        make: the model for ``nnx.Rngs``, to use on one device. functions: ``(loss_fn, init_fn)`` to train it on the
            task's mesh, as ``build_train_step`` takes them.
        row: shapes of a row, without a leading dim. weight_per_row: loss weight of a full row.
        item: what a unit of loss weight is. flops_per_row: forward and backward.
        load: reads the data. score: what a run is judged by.
        rules: of the parameters' sharding. merge_stats: as ``build_train_step`` takes it.
        continues: whether the model continues a text, see ``jaxtrain.models.sampling``.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    functions: tuple[Callable[..., Loss], Callable[..., Any]]
    row: Mapping[str, jax.ShapeDtypeStruct]
    weight_per_row: int
    item: str
    flops_per_row: float
    load: Callable[[], Dataset]
    score: Score
    rules: Rules = DEFAULT_RULES
    merge_stats: MergeStats | None = None
    continues: bool = False
