"""Learning-rate schedules: functions of the number of optimizer steps already applied (optax's, horizons checked)."""

import optax

NAMES = ("constant", "linear", "warmup_cosine")


def build(name: str, *, peak: float, steps: int, warmup_steps: int = 0, end: float = 0.0) -> optax.Schedule:
    """A schedule by name: ``schedule(n)`` is the rate of the update that follows ``n`` applied ones.

    Args:
        name: ``constant`` (``peak`` after the warm-up), ``linear`` or ``warmup_cosine`` (both reach ``end``).
        peak: the highest rate, reached after ``warmup_steps`` steps that rise linearly from 0.
        steps: the horizon in optimizer steps, warm-up INCLUDED; beyond it the rate stays ``end``.
        warmup_steps: 0 starts at ``peak``.
        end: the last rate.

    Raises:
        ValueError: the name is unknown or the warm-up does not end before the horizon.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(NAMES)}.")
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"schedule: warm-up of {warmup_steps} steps must be shorter than its horizon of {steps} steps."
        )
    rest = steps - warmup_steps
    decay = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "warmup_cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=end / peak if peak else 0.0),
    }[name]()
    if not warmup_steps:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])
