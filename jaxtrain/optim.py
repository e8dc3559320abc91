"""The optimizer's side of a step: which optax transformation, clipping, and what one window of sums does to it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import paths

NAMES = ("adamw", "sgd", "lion", "adafactor", "muon")
NO_DECAY = r"(?i)(^|/)(bias|scale|gamma|beta)$|(^|/)(ln([_\d][^/]*)?|[^/]*norm[^/]*)/weight$"
"""Names of parameters that weight decay spares: biases, and the scales of norms under any of their usual names."""
NOT_HIDDEN = r"(^|/)(embedding|embed|head|lm_head|output)(/|$)"
"""Names of matrices that Muon leaves to Adam: what tokens come in and go out by."""


def build(
    name: str,
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> optax.GradientTransformation:
    """An optimizer by name. Its schedule counts optimizer steps; clipping belongs to the train step.

    Weight decay is decoupled and follows the rate: a step takes ``rate * weight_decay`` of a parameter, except of
    biases and the scales of norms (``NO_DECAY``).

    Args:
        name: ``adamw`` (b1, b2, eps); ``sgd`` (momentum; no weight decay); ``lion`` (b1, b2; Chen et al. 2023, arXiv
            2302.06675: a rate 3 to 10 times below AdamW's); ``adafactor`` (b1 and b2 unused; Shazeer and Stern 2018,
            arXiv 1804.04235, updates relative to the parameter's own size); ``muon`` for hidden matrices (momentum,
            0.95 where it is 0), scaled so that one rate suits both (Liu et al. 2025, arXiv 2502.16982, section 2.2),
            and Adam with Nesterov momentum (b1, b2, eps) for the rest, see ``muon_dimensions``.
        learning_rate: a rate or a schedule.

    Raises:
        ValueError: the name is unknown, or sgd with a weight decay.
    """
    if name == "adamw":
        return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)
    if name == "lion":
        return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask)
    if name == "adafactor":
        return _decayed(optax.adafactor(learning_rate), learning_rate, weight_decay)
    if name == "muon":
        muon = optax.contrib.muon(
            learning_rate, beta=momentum or 0.95, adam_b1=b1, adam_b2=b2, eps=eps, consistent_rms=0.2,
            muon_weight_dimension_numbers=muon_dimensions,
        )  # fmt: skip
        return _decayed(muon, learning_rate, weight_decay)
    if name == "sgd":
        if weight_decay:
            raise ValueError(f"optimizer sgd takes no weight decay here, got {weight_decay}; use adamw or set it to 0.")
        return optax.sgd(learning_rate, momentum=momentum or None)
    raise ValueError(f"optimizer {name!r} is not one of {', '.join(NAMES)}.")


def _decayed(
    optimizer: optax.GradientTransformation, learning_rate: float | optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    """Decoupled weight decay for an optimizer whose own knows no rate (Adafactor) or no mask (Muon's Adam)."""
    if not weight_decay:
        return optimizer
    rate = learning_rate if callable(learning_rate) else lambda step: learning_rate
    return optax.chain(optimizer, optax.add_decayed_weights(lambda step: -weight_decay * rate(step), mask=decay_mask))


def decay_mask(params: Any) -> Any:
    """True for each parameter that weight decay applies to, by its role (its last name), never by its rank."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not re.search(NO_DECAY, paths.name(path)), params)


def muon_dimensions(params: Any) -> Any:
    """For each parameter its ``MuonDimensionNumbers``, or None where Adam takes it.

    By role: a hidden matrix is named ``kernel`` or ``weight`` and is ``[in, out]``, or ``[layers, in, out]`` where they
    are stacked. optax's own rule (what has two dims) sends stacked kernels to Adam and the embedding to Muon.
    """

    def one(path: tuple[Any, ...], x: Any) -> optax.contrib.MuonDimensionNumbers | None:
        name = paths.name(path)
        hidden = re.search(r"(^|/)(kernel|weight)$", name) and not re.search(NOT_HIDDEN, name)
        if not hidden or re.search(NO_DECAY, name) or x.ndim not in (2, 3):
            return None
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(one, params)


def report(name: str, params: Any, weight_decay: float) -> str:
    """What the optimizer does to which parameters, as a sentence for a person to read before training.

    Args:
        params: arrays or their shapes.
    """
    named = paths.named_leaves(params)
    text = f"{name}, {_share({n for n in named if not re.search(NO_DECAY, n)}, named)} decayed by {weight_decay:g}"
    if name == "muon":
        is_dimensions = lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers)  # noqa: E731
        dimensions = jax.tree_util.tree_leaves_with_path(muon_dimensions(params), is_leaf=is_dimensions)
        text += f"; muon for {_share({paths.name(path) for path, _ in dimensions}, named)}, adam for the rest"
    return text


def _share(chosen: set[str], named: dict[str, Any]) -> str:
    values = sum(x.size for n, x in named.items() if n in chosen)
    return f"{len(chosen)} of {len(named)} parameters ({values:,} of {sum(x.size for x in named.values()):,} values)"


@dataclasses.dataclass(frozen=True)
class MultiSteps:
    """Accumulate over ``k`` micro-batches with ``optax.MultiSteps``: one call of the step each.

    Attributes:
        k: micro-batches a window; or a function of the number of finished windows, for batch-size warm-up. It is called
            with a Python int by the loop and with a traced int32 scalar by the step, so write it with ``jnp.where``.
    """

    k: int | Callable[[Any], Any] = 1

    def __post_init__(self) -> None:
        if callable(self.k):
            return
        if not isinstance(self.k, int | np.integer) or self.k < 1:
            raise ValueError(f"accumulation: k={self.k} micro-batches a window; it is a whole number, 1 or more.")
        object.__setattr__(self, "k", int(self.k))

    def micro_batches(self, window: int) -> int:
        """How many micro-batches window number ``window`` takes."""
        return int(self.k(window)) if callable(self.k) else self.k

    def calls(self, window: int) -> int:
        """How many calls of the step window number ``window`` takes."""
        return self.micro_batches(window)


def stepwise(stages: Sequence[tuple[int, int]], k: int) -> Callable[[Any], Any]:
    """``MultiSteps``' k for batch-size warm-up: ``stepwise([(100, 1), (300, 2)], 4)`` is 1 until window 100, 2 until
    window 300, then 4."""

    def of(window: Any) -> Any:
        if isinstance(window, int):
            return next((size for until, size in stages if window < until), k)
        bounds = jnp.asarray([until for until, _ in stages], jnp.int32)
        return jnp.asarray([size for _, size in stages] + [k], jnp.int32)[jnp.sum(window >= bounds)]

    return of


@dataclasses.dataclass(frozen=True)
class Scan:
    """Accumulate over ``k`` micro-batches inside ONE call of the step, with ``lax.scan``.

    A batch has leaves ``[k, B, ...]``; fewer than k micro-batches make a partial window. No accumulator lives between
    calls (4 bytes a parameter less), and the optimizer runs once a window.

    Attributes:
        k: micro-batches a window.
        defer: True reduces gradients over the mesh axes ``slice`` and ``data`` once a window, in float32, instead of
            once a micro-batch. The loss function then sees the rows of ONE replica: its dropout masks are drawn for
            each replica, and what it computes over a batch, as BatchNorm does, spans one replica only, so that a
            model_state is refused.
    """

    k: int
    defer: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.k, int | np.integer) or isinstance(self.k, bool) or self.k < 1:
            raise ValueError(
                f"accumulation: Scan(k={self.k}): the number of micro-batches is a whole number, 1 or more."
            )
        if not isinstance(self.defer, bool):
            raise ValueError(f"accumulation: Scan(defer={self.defer!r}): give True or False.")
        object.__setattr__(self, "k", int(self.k))

    def micro_batches(self, window: int) -> int:
        """How many micro-batches window number ``window`` takes."""
        return self.k

    def calls(self, window: int) -> int:
        """How many calls of the step window number ``window`` takes."""
        return 1


Accumulation = MultiSteps | Scan


@dataclasses.dataclass(frozen=True)
class Skip:
    """What a non-finite micro-gradient does.

    Attributes:
        what: ``window``: the whole window changes nothing; ``micro``: that micro-batch is left out, with its weight.
        max_consecutive: more skipped windows than this in a row are an error (parameters stay finite).
    """

    what: str = "window"
    max_consecutive: int = 50

    def __post_init__(self) -> None:
        if self.what not in ("window", "micro"):
            raise ValueError(f"nonfinite: Skip({self.what!r}) is neither Skip('window') nor Skip('micro').")
        if self.max_consecutive < 0:
            raise ValueError(
                f"nonfinite: max_consecutive={self.max_consecutive} skipped windows; it must be 0 or more."
            )


def window_update(
    optimizer: optax.GradientTransformation, clip_norm: float | None, skip: Skip
) -> optax.GradientTransformationExtraArgs:
    """What the sums of one window do: divide, check, clip, update; the transformation that accumulation wraps.

    It transforms ``{"grads": sums, "weight", "bad", ...}`` (float32; the rest of the scalars pass through) into
    ``{"grads": parameter updates, "norm", "clipped_norm", "applied", ...}``; its state is the optimizer's own. Where
    the window is skipped the updates are zero and the state is as before, bit for bit. What an optimizer makes of
    finite gradients is not checked: undoing it would cost a second copy of its state.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(sums: dict[str, Any]) -> Any:
        return optimizer.init(sums["grads"])

    def update(sums: dict[str, Any], state: Any, params: dict[str, Any], **extra: Any) -> tuple[dict[str, Any], Any]:
        usable = sums["weight"] > 0
        if skip.what == "window":
            usable &= sums["bad"] == 0
        inverse = 1.0 / jnp.where(usable, sums["weight"], 1.0)
        grads = jax.tree.map(lambda g: g * inverse, sums["grads"])
        norm = optax.tree.norm(grads)
        applied = usable & jnp.isfinite(norm)
        factor = jnp.float32(1.0)
        if clip_norm is not None:
            factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
        grads = jax.tree.map(lambda g: jnp.where(applied, g * factor, 0.0), grads)
        updates, new_state = optimizer.update(grads, state, params["grads"], **extra)
        _check_same(state, new_state)
        new_state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new_state, state)
        passed = {name: value for name, value in sums.items() if name != "grads"}
        out = passed | {
            "grads": updates,
            "norm": norm,
            "clipped_norm": norm * factor,
            "applied": applied.astype(jnp.float32),
        }
        return out, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_same(old: Any, new: Any) -> None:
    """Refuse, at the trace, an optimizer whose new state has other shapes or dtypes: it could not be donated."""
    wrong = paths.differences(old, new)
    if wrong:
        before, after = paths.named_leaves(old), paths.named_leaves(new)
        lost = sum(
            leaf.size * leaf.dtype.itemsize
            for name, leaf in before.items()
            if name not in after or (after[name].shape, after[name].dtype) != (leaf.shape, leaf.dtype)
        )
        raise ValueError(
            f"the optimizer changes its state's shapes or dtypes, so {lost} bytes could not be donated:\n  "
            + "\n  ".join(wrong)
        )
