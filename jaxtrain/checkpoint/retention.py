"""Which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Keep:
    """What is kept is the union of these; the newest is always kept.

    Attributes:
        last: how many of the newest. every_steps: each whose step is a multiple of this, for ever; 0: none.
        best: how many of the best by ``metric``, of those that were evaluated when they were saved.
        metric: a name of an evaluation, as ``eval/loss``. largest: whether larger is better.
    """

    last: int = 3
    every_steps: int = 0
    best: int = 0
    metric: str = "eval/loss"
    largest: bool = False

    def retired(self, steps: Sequence[int], metrics: Mapping[int, float]) -> list[int]:
        """Those of ``steps`` that are not kept, oldest first; a NaN is never among the best."""
        ordered = sorted(steps)
        kept = {*ordered[-max(self.last, 1) :]}
        if self.every_steps:
            kept |= {step for step in ordered if step % self.every_steps == 0}
        ranked = sorted(
            (step for step in ordered if not math.isnan(metrics.get(step, math.nan))),
            key=lambda step: (metrics[step], step) if self.largest else (-metrics[step], step),
            reverse=True,
        )
        kept |= {*ranked[: self.best]}
        return [step for step in ordered if step not in kept]
