"""Learning-rate schedules: functions of the number of optimizer steps already applied (optax's, horizons checked)."""

import jax.numpy as jnp
import optax

NAMES = ("constant", "linear", "warmup_cosine", "warmup_stable_decay", "inverse_sqrt")


def build(
    name: str, *, peak: float, steps: int, warmup_steps: int = 0, decay_steps: int = 0, end: float = 0.0
) -> optax.Schedule:
    """A schedule by name: ``schedule(n)`` is the rate of the update that follows ``n`` applied ones.

    Args:
        name: ``constant`` (``peak`` after the warm-up); ``linear`` or ``warmup_cosine`` (both reach ``end``);
            ``warmup_stable_decay`` (``peak`` until the last ``decay_steps``, which fall linearly to ``end``: Hägele et
            al. 2024, arXiv 2405.18392); ``inverse_sqrt`` (``peak * sqrt(w / n)`` from step w = ``warmup_steps`` on, 1
            without a warm-up; no end: Vaswani et al. 2017, arXiv 1706.03762, section 5.3).
        peak: the highest rate, reached after ``warmup_steps`` steps that rise linearly from 0.
        steps: the horizon in optimizer steps, warm-up INCLUDED; beyond it the rate stays ``end``.
        warmup_steps: 0 starts at ``peak``.
        decay_steps: of ``warmup_stable_decay``; 0 is a fifth of the horizon.
        end: the last rate.

    Raises:
        ValueError: the name is unknown, or warm-up and decay do not fit into the horizon.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(NAMES)}.")
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"schedule: warm-up of {warmup_steps} steps must be shorter than its horizon of {steps} steps."
        )
    rest, falling = steps - warmup_steps, decay_steps or max(steps // 5, 1)
    if name == "warmup_stable_decay" and not 0 < falling <= rest:
        raise ValueError(
            f"schedule: a decay of {falling} steps does not fit behind a warm-up of {warmup_steps} steps into a "
            f"horizon of {steps} steps; lower decay_steps (0 means a fifth of the horizon) or warmup_steps."
        )
    flat = max(warmup_steps, 1)
    decay = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "warmup_cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=end / peak if peak else 0.0),
        "warmup_stable_decay": lambda: optax.linear_schedule(peak, end, falling, transition_begin=rest - falling),
        "inverse_sqrt": lambda: lambda n: peak * jnp.sqrt(flat / jnp.maximum(n + warmup_steps, flat)),
    }[name]()
    if not warmup_steps:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])
