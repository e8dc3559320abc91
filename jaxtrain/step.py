"""The train step as a value: ``build_train_step`` gives a ``Program`` of pure, sharded, compiled functions.

Nothing here knows a config, a loop, a file or a model library; ``jaxtrain.adapters`` brings models in.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import optim, paths, rng, sharding
from jaxtrain.losses import Loss
from jaxtrain.optim import MultiSteps, Skip
from jaxtrain.precision import Precision
from jaxtrain.sharding import DEFAULT_RULES, Rules
from jaxtrain.state import Counters, Snapshot, TrainState, Variables, View, WindowStart, add_tokens

__all__ = [
    "Contribution", "Loss", "MultiSteps", "NonFiniteError", "Precision", "Program", "Skip", "StepMetrics", "Variables",
    "build_train_step",
]  # fmt: skip

_NO_LEAF = -1
_MAX_METRICS = 32  # of a loss function's own; fixed, so that a state can be born before any batch was seen


class NonFiniteError(FloatingPointError):
    """More windows in a row than allowed held a non-finite gradient; parameters are those of the last good step."""


class Contribution(NamedTuple):
    """What one micro-batch adds to its window; everything is finite (a bad micro-gradient arrives as zeros and ``bad``).

    Attributes:
        grads: gradient of the loss SUM, float32, shaped and sharded like the parameters.
        weight, total: sums over the micro-batch, float32 scalars.
        model_state: new mutable state of the model.
        metrics: name -> (sum, weight), float32 scalars.
        bad: 1 where something was not finite, else 0, float32 scalar, the same on all shards.
        bad_leaf: int32: index of the first parameter (order of ``jax.tree.leaves``) with a non-finite gradient, or -1.
        tokens: the weight rounded to int32.
    """

    grads: Any
    weight: jax.Array
    total: jax.Array
    model_state: Any
    metrics: Mapping[str, tuple[jax.Array, jax.Array]]
    bad: jax.Array
    bad_leaf: jax.Array
    tokens: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "counts"], meta_fields=["value_names", "count_names"]
)
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One window's record as two small arrays, so that reading it is one transfer.

    ``values`` float32: ``loss`` (mean over the window's weight, unscaled; NaN where the window was skipped), ``weight``,
    ``grad_norm`` (global, before clipping), ``grad_norm_clipped``, ``loss_scale``, what ``report`` names as applied,
    the loss function's metrics. ``counts`` int32: ``micro_step``, ``window``, ``step``, ``skipped_in_a_row``,
    ``bad_leaf``, ``window_done`` (0 inside a window: the values are not a record then), two words of ``tokens``.
    """

    values: jax.Array
    counts: jax.Array
    value_names: tuple[str, ...]
    count_names: tuple[str, ...]

    def __getitem__(self, name: str) -> jax.Array:
        """One entry as a device scalar."""
        if name in self.value_names:
            return self.values[self.value_names.index(name)]
        return self.counts[self.count_names.index(name)]

    def to_host(self) -> dict[str, float | int]:
        """All entries as Python numbers, with ``tokens`` and ``skipped_steps`` exact; waits for the step."""
        values, counts = jax.device_get((self.values, self.counts))
        record = dict(zip(self.value_names, values.tolist(), strict=True))
        record |= dict(zip(self.count_names, counts.tolist(), strict=True))
        high, low = record.pop("tokens_high") % 2**32, record.pop("tokens_low") % 2**32
        return record | {"tokens": high * 2**32 + low, "skipped_steps": record["window"] - record["step"]}


def build_train_step(
    loss_fn: Callable[[Any, Any, Any, jax.Array | None], Loss],
    init_fn: Callable[[jax.Array], Variables],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    batch_axes: Sequence[str] = ("slice", "data", "fsdp"),
    accumulation: MultiSteps = MultiSteps(1),  # noqa: B008, a frozen value
    precision: Precision = Precision(),  # noqa: B008, a frozen value
    clip_norm: float | None = None,
    ema: float | None = None,
    trainable: Any = None,
    merge_stats: Callable | None = None,
    nonfinite: Skip = Skip(),  # noqa: B008, a frozen value
    report: Mapping[str, optax.Schedule] | None = None,
    seed: int = 0,
) -> "Program":
    """A training program: sharded, donated, compiled once; one call per micro-batch.

    The gradient of a step is that of (sum of ``Loss.total``) / (sum of ``Loss.weight``), both over all devices and all
    micro-batches of the window: unequal numbers of valid items give the same step as the one big batch.

    Args:
        loss_fn: ``(params, model_state, batch, key) -> Loss``. ``params`` come in the compute dtype; ``key`` is a typed
            key, a function of (seed, micro-batch index), or None in evaluation: then no dropout and no random draws.
        init_fn: ``key -> Variables(params, model_state)``; only its shapes are computed outside of jit.
        optimizer: an optax transformation for ONE step, without clipping or accumulation; its schedules count steps.
        mesh: from ``sharding.make_mesh`` or any mesh with Auto axes.
        rules: sharding of the parameters, see ``sharding.infer``.
        batch_axes: mesh axes that split the leading dim of every leaf of a batch; axes the mesh lacks are left out.
        accumulation: ``MultiSteps(k)``.
        precision: compute dtype; the masters are float32.
        clip_norm: bound of the global norm of the mean gradient, or None.
        ema: decay of an exponential average of the parameters, counted in steps, or None.
        nonfinite: what a non-finite micro-gradient does.
        report: name -> schedule of steps, reported in the metrics as applied.
        seed: of parameters and of every key that ``loss_fn`` gets.

    Raises:
        ValueError: parameters that are not float32 (under their name), rules that the mesh or a shape cannot hold.
        TypeError: ``loss_fn`` returns something else than ``Loss`` of float32 scalars (raised at the first trace).
    """
    for name, value, cure in (
        ("trainable", trainable, "freeze parameters in the optimizer, as with optax.multi_transform"),
        ("merge_stats", merge_stats, "return the running statistics as Loss.model_state"),
    ):
        if value is not None:
            raise NotImplementedError(f"build_train_step: {name} is not available yet; {cure}.")
    with _relaxed():
        variables = jax.eval_shape(init_fn, jax.eval_shape(lambda: rng.key(seed, "params")))
    for name, leaf in paths.named_leaves(variables.params).items():
        if leaf.dtype != jnp.float32:
            raise ValueError(f"{name}: parameters are float32 masters, got {leaf.dtype}; other state is model_state.")
    update = optim.window_update(optimizer, clip_norm, nonfinite)
    recipe = _Recipe(
        loss_fn=loss_fn, init_fn=init_fn, update=update, single=accumulation.k == 1,
        multi=optax.MultiSteps(update, accumulation.k, use_grad_mean=False),
        precision=precision, ema=ema, skip=nonfinite, report=dict(report or {}), seed=seed,
        shardings=sharding.infer(variables.params, mesh, rules),
    )  # fmt: skip
    axes = tuple(axis for axis in batch_axes if axis in mesh.shape)
    return Program(recipe, variables, mesh, axes, accumulation)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """Everything static about a program; its methods are the pure functions that ``Program`` compiles."""

    loss_fn: Callable
    init_fn: Callable
    update: optax.GradientTransformationExtraArgs
    multi: optax.MultiSteps
    single: bool
    precision: Precision
    ema: float | None
    skip: Skip
    report: Mapping[str, optax.Schedule]
    seed: int
    shardings: Any

    def fresh(self, variables: Variables) -> Snapshot:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), variables.params)
        with _relaxed():
            opt_state = self.update.init({"grads": params})
        ema = None if self.ema is None else params
        return Snapshot(params, opt_state, variables.model_state, ema, self.precision.init_scale(), Counters.zero())

    def resume(self, snapshot: Snapshot) -> TrainState:
        params, opt_state, model_state, ema, scale, counters = snapshot
        if self.single:
            return TrainState(params, opt_state, model_state, ema, scale, counters, None)
        zero = jnp.float32(0)
        zeros = _sums(jax.tree.map(jnp.zeros_like, params), zero, zero, zero, {})
        opt_state = optax.MultiStepsState(jnp.int32(0), counters.window, opt_state, zeros)
        start = WindowStart(counters, model_state)
        return TrainState(params, opt_state, model_state, ema, scale, counters, start)

    def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        """The loss in compute dtype. The SHARD is cast, then gathered: fewer bytes on the wire."""
        compute = jax.lax.with_sharding_constraint(self.precision.cast(params), self.shardings)
        loss = self.loss_fn(compute, model_state, batch, key)
        _check_loss(loss, model_state)
        return loss if loss.model_state is not None else loss._replace(model_state=model_state)

    def contribution(self, view: View, batch: Any, index: jax.Array) -> Contribution:
        key = rng.key(self.seed, "dropout", index)

        def total(params: Any) -> tuple[jax.Array, Loss]:
            loss = self.loss(params, view.model_state, batch, key)
            return loss.total, loss

        _, pull, loss = jax.vjp(total, view.params, has_aux=True)
        if self.precision.scaled:
            seed = self.precision.seed(view.scale, loss.weight)
            grads = jax.tree.map(lambda g: g / seed, pull(seed)[0])
        else:
            grads = pull(jnp.float32(1.0))[0]
        by_leaf = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        rest = [loss.total, loss.weight, *_floats(loss.model_state), *jax.tree.leaves(dict(loss.metrics))]
        good = jnp.all(by_leaf) & jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in rest]))
        counted = good if self.skip.what == "micro" else True
        clean = functools.partial(jax.tree.map, lambda x: jnp.where(jnp.isfinite(x) & counted, x, 0.0))
        return Contribution(
            grads=jax.tree.map(lambda g: jnp.where(good, g, 0.0), grads),
            weight=clean(loss.weight),
            total=clean(loss.total),
            model_state=jax.tree.map(lambda new, old: jnp.where(good, new, old), loss.model_state, view.model_state),
            metrics=clean(dict(loss.metrics)),
            bad=1.0 - good.astype(jnp.float32),
            bad_leaf=jnp.where(jnp.all(by_leaf), _NO_LEAF, jnp.argmin(by_leaf).astype(jnp.int32)),
            tokens=jnp.round(jnp.where(jnp.isfinite(loss.weight), loss.weight, 0.0)).astype(jnp.int32),
        )

    def apply(self, state: TrainState, c: Contribution) -> tuple[TrainState, StepMetrics]:
        sums = _sums(c.grads, c.weight, c.bad, c.total, c.metrics)
        transform = self.update if self.single else self.multi
        with _relaxed():
            out, opt_state = transform.update(sums, state.opt_state, {"grads": state.params})
        done = jnp.bool_(True) if self.single else opt_state.mini_step == 0
        if not self.single:  # optax resets by multiplying with zero, and 0 * inf would poison every later window
            clear = jax.tree.map(lambda x: jnp.where(done, 0.0, x), opt_state.acc_grads)
            opt_state = opt_state._replace(acc_grads=clear)
        counters = state.counters._replace(
            micro_step=state.counters.micro_step + 1, tokens=add_tokens(state.counters.tokens, c.tokens)
        )
        moved = state._replace(opt_state=opt_state, model_state=c.model_state, counters=counters)
        return self.finish(moved, out, done, c.bad_leaf, sorted(c.metrics))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        view = View(state.params, state.model_state, state.scale)
        contribution = self.contribution(view, batch, state.counters.micro_step)
        # The barrier keeps the compiler from fusing across: step == apply . grads, bit for bit.
        return self.apply(state, jax.lax.optimization_barrier(contribution))

    def flush(self, state: TrainState, metric_names: Sequence[str]) -> tuple[TrainState, StepMetrics]:
        multi = state.opt_state
        with _relaxed():
            out, inner = self.update.update(multi.acc_grads, multi.inner_opt_state, {"grads": state.params})
        zeros = jax.tree.map(jnp.zeros_like, multi.acc_grads)
        opt_state = optax.MultiStepsState(jnp.int32(0), multi.gradient_step + 1, inner, zeros)
        return self.finish(state._replace(opt_state=opt_state), out, jnp.bool_(True), jnp.int32(_NO_LEAF), metric_names)

    def evaluate(self, view: View, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        loss = self.loss(view.params, view.model_state, batch, None)
        return {"loss": (loss.total, loss.weight), **loss.metrics}

    def finish(
        self, state: TrainState, out: Mapping[str, Any], done: jax.Array, bad_leaf: jax.Array, names: Sequence[str]
    ) -> tuple[TrainState, StepMetrics]:
        """Close the window where ``done``: apply or undo, count, and write its record."""
        applied = done & (out["applied"] > 0)
        pick = functools.partial(jax.tree.map, lambda yes, no: jnp.where(applied, yes, no))
        params = pick(jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, out["grads"]), state.params)
        ema = state.ema
        if self.ema is not None:
            ema = pick(jax.tree.map(lambda e, p: self.ema * e + (1 - self.ema) * p, ema, params), ema)
        old = state.counters
        one = applied.astype(jnp.int32)
        skipped = done.astype(jnp.int32) - one
        in_a_row = jnp.where(applied, 0, old.skipped_in_a_row + skipped)
        counters = old._replace(window=old.window + one + skipped, step=old.step + one, skipped_in_a_row=in_a_row)
        scale = jax.tree.map(
            lambda new, now: jnp.where(done, new, now), self.precision.adjust(state.scale, out["bad"] == 0), state.scale
        )
        record = self.record(state, out, counters, applied, done, bad_leaf, names)
        model_state, start = state.model_state, state.start
        if start is not None:
            undo = done & ~applied
            model_state = jax.tree.map(lambda was, now: jnp.where(undo, was, now), start.model_state, model_state)
            begun = WindowStart(counters, model_state)
            start = jax.tree.map(lambda new, was: jnp.where(done, new, was), begun, start)
        return TrainState(params, state.opt_state, model_state, ema, scale, counters, start), record

    def record(
        self, state: TrainState, out: Mapping[str, Any], counters: Counters, applied: jax.Array, done: jax.Array,
        bad_leaf: jax.Array, names: Sequence[str],
    ) -> StepMetrics:  # fmt: skip
        values = {
            "loss": jnp.where(applied, out["total"] / out["weight"], jnp.nan),
            "weight": out["weight"],
            "grad_norm": out["norm"],
            "grad_norm_clipped": out["clipped_norm"],
            "loss_scale": state.scale.value,
        }
        with _relaxed():
            values |= {name: jnp.asarray(f(state.counters.step), jnp.float32) for name, f in self.report.items()}
        own = out["metrics"][: len(names)]
        values |= dict(zip(names, own[:, 0] / jnp.where(own[:, 1] > 0, own[:, 1], jnp.nan), strict=True))
        counts = {name: getattr(counters, name) for name in ("micro_step", "window", "step", "skipped_in_a_row")}
        high, low = jax.lax.bitcast_convert_type(counters.tokens, jnp.int32)
        counts |= {"bad_leaf": bad_leaf, "window_done": done.astype(jnp.int32), "tokens_high": high, "tokens_low": low}
        return StepMetrics(
            jnp.stack(list(values.values())), jnp.stack(list(counts.values())), tuple(values), tuple(counts)
        )


class Program:
    """A compiled training program on one mesh. Its functions are pure; ``state`` goes in and comes out.

    Attributes:
        mesh, accumulation, nonfinite: as given to ``build_train_step``.
        abstract_state: ``TrainState`` of ``ShapeDtypeStruct`` with shardings.
        abstract_snapshot: ``Snapshot`` of the same: the target that a checkpoint is restored to.
        leaf_names: of the parameters, in the order of ``jax.tree.leaves``.
        traces: how often each function was traced; a step that is traced twice is compiled twice.
    """

    def __init__(
        self, recipe: _Recipe, variables: Variables, mesh: Mesh, batch_axes: tuple[str, ...], accumulation: MultiSteps
    ) -> None:
        """Use ``build_train_step``."""
        self.mesh, self.accumulation, self.nonfinite = mesh, accumulation, recipe.skip
        self.traces: dict[str, int] = {}
        self._recipe, self._batch_axes = recipe, batch_axes
        self._known_batches: set[tuple] = set()
        self._metric_names: tuple[str, ...] = ()
        with _relaxed():
            snapshot = jax.eval_shape(recipe.fresh, variables)
        state = jax.eval_shape(recipe.resume, snapshot)
        place = functools.partial(sharding.like_params, params=variables.params, shardings=recipe.shardings, mesh=mesh)
        self.abstract_snapshot: Snapshot = sharding.with_shardings(snapshot, place(snapshot))
        self.abstract_state: TrainState = sharding.with_shardings(state, place(state))
        self.leaf_names = tuple(paths.named_leaves(variables.params))
        self._compile(place(state))

    def _compile(self, states: Any) -> None:
        recipe, batches, whole = self._recipe, self.batch_sharding, NamedSharding(self.mesh, P())
        views = View(states.params, states.model_state, states.scale)
        models = states.model_state
        contributions = Contribution(states.params, whole, whole, models, whole, whole, whole, whole)
        variables = Variables(states.params, models)
        jit, count = jax.jit, self._counted
        init = lambda key: recipe.resume(recipe.fresh(recipe.init_fn(key)))  # noqa: E731
        given = lambda variables: recipe.resume(recipe.fresh(variables))  # noqa: E731
        snapshots = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_snapshot)
        self._init = jit(count("init", init), out_shardings=states)
        self._init_from = jit(count("init", given), in_shardings=(variables,), out_shardings=states)
        self._resume = jit(
            count("resume", recipe.resume), in_shardings=(snapshots,), out_shardings=states, donate_argnums=0
        )
        self._step = jit(
            count("step", self._same_state(recipe.step)),
            in_shardings=(states, batches), out_shardings=(states, whole), donate_argnums=0,
        )  # fmt: skip
        self._grads = jit(
            count("grads", recipe.contribution), in_shardings=(views, batches, whole), out_shardings=contributions
        )
        self._apply = jit(
            count("apply", self._same_state(recipe.apply)),
            in_shardings=(states, contributions), out_shardings=(states, whole), donate_argnums=0,
        )  # fmt: skip
        self._flush = jit(
            count("flush", recipe.flush), static_argnums=1, in_shardings=(states,), out_shardings=(states, whole),
            donate_argnums=0,
        )  # fmt: skip
        self._evaluate = jit(
            count("evaluate", recipe.evaluate), in_shardings=(views, batches), out_shardings=whole
        )
        self._copy = jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=views)

    # ---- training -----------------------------------------------------------------------------------------------

    def init(self, params: Any = None) -> TrainState:
        """A new run's state, born sharded on the mesh; no device or host ever holds a full copy.

        Args:
            params: float32 parameters to start from (any arrays, host or device); by default ``init_fn``'s.

        Raises:
            ValueError: their names, shapes or dtypes differ from the program's; each difference is listed.
        """
        key = rng.key(self._recipe.seed, "params")
        if params is None:
            with _relaxed():
                return self._init(key)
        wrong = paths.differences(self.abstract_state.params, params)
        if wrong:
            raise ValueError("init: the given parameters do not fit:\n  " + "\n  ".join(wrong))
        placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state.params))
        with _relaxed():
            model_state = jax.jit(lambda k: self._recipe.init_fn(k).model_state)(key)
            return self._init_from(Variables(placed, model_state))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        """One micro-batch forward and backward; at a window's end the update. ``state`` is donated.

        Args:
            batch: pytree of arrays, every leaf ``[B, ...]`` with the GLOBAL micro-batch size ``B``; see
                ``batch_struct`` for its sharding. NumPy arrays are placed by jit (one process only).

        Raises:
            ValueError: ``B`` does not divide by the devices that split it.
        """
        self._check_batch(batch)
        return self._step(state, batch)

    def grads(self, view: View, batch: Any, index: jax.typing.ArrayLike) -> Contribution:
        """What micro-batch number ``index`` (int) adds to its window; nothing is donated."""
        self._check_batch(batch)
        return self._grads(view, batch, jnp.int32(index))

    def apply(self, state: TrainState, contribution: Contribution) -> tuple[TrainState, StepMetrics]:
        """Take a contribution in; ``step(state, batch)`` is ``apply(state, grads(view, batch, micro_step))``, exactly.

        ``state`` is donated.
        """
        return self._apply(state, contribution)

    def flush(self, state: TrainState) -> tuple[TrainState, StepMetrics | None]:
        """Close a partial window: divide by what was accumulated and update. ``state`` is donated.

        Returns ``(state, None)`` where nothing is pending. Not calling it at the end drops the pending micro-batches.
        """
        if self._recipe.single or int(state.opt_state.mini_step) == 0:
            return state, None
        return self._flush(state, self._metric_names)

    def view(self, state: TrainState, *, copy: bool = True, ema: bool = False) -> View:
        """What gradients and evaluation need.

        Args:
            copy: True survives the donation of ``state``; False costs no memory and dies with ``state``.
            ema: take the exponential average instead of the parameters.

        Raises:
            ValueError: ``ema`` without an average in the program.
        """
        if ema and state.ema is None:
            raise ValueError("view: this program keeps no average; build it with ema=decay.")
        view = View(state.ema if ema else state.params, state.model_state, state.scale)
        return self._copy(view) if copy else view

    def evaluate(self, view: View, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        """``{"loss": (sum, weight), metric: (sum, weight)}`` of a batch, float32 scalars; no dropout, nothing changes.

        Add the pairs of all batches, then divide: padding rows of weight 0 count for nothing.
        """
        self._check_batch(batch)
        return self._evaluate(view, batch)

    def check(self, record: Mapping[str, Any]) -> None:
        """Stop a run that only skips. ``record`` is ``StepMetrics.to_host()``.

        Raises:
            NonFiniteError: more windows in a row were skipped than ``nonfinite.max_consecutive``.
        """
        count, allowed = record["skipped_in_a_row"], self.nonfinite.max_consecutive
        if count > allowed:
            leaf = record["bad_leaf"]
            where = f"the gradient of {self.leaf_names[leaf]!r}" if leaf >= 0 else "the loss, or every weight was zero"
            scale = record["loss_scale"]
            low = self._recipe.precision.scaled and scale <= self._recipe.precision.loss_scale.minimum
            raise NonFiniteError(
                f"{count} windows in a row were skipped (allowed: {allowed}) after step {record['step']}, window "
                f"{record['window']}: not finite in {where}"
                + (f"; loss scale at minimum ({scale})" if low else "")
                + ". Parameters are those of the last good step; lower the learning rate or look at the data."
            )

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint_view(self, state: TrainState) -> Snapshot:
        """What to save: the start of the current window. Shares its arrays with ``state``; nothing is computed."""
        if self._recipe.single:
            return Snapshot(*state[:6])
        start = state.start
        return Snapshot(
            state.params, state.opt_state.inner_opt_state, start.model_state, state.ema, state.scale, start.counters
        )

    def resume(self, snapshot: Snapshot) -> TrainState:
        """The state that a snapshot stands for, ready for its window's first micro-batch. ``snapshot`` is donated."""
        return self._resume(snapshot)

    # ---- shapes -------------------------------------------------------------------------------------------------

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of every leaf of a batch: its leading dim over the batch axes."""
        return NamedSharding(self.mesh, P(self._batch_axes))

    def batch_struct(self, example: Any) -> Any:
        """``ShapeDtypeStruct`` with shardings for a batch like ``example`` (arrays or structs of GLOBAL shapes)."""
        self._check_batch(example)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), example)

    def lower(self, batch_struct: Any) -> jax.stages.Lowered:
        """The step lowered for its abstract state and a batch: for planning and inspection, without any array."""
        return self._step.lower(self.abstract_state, batch_struct)

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check_batch(self, batch: Any) -> None:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes in self._known_batches:
            return
        shards = sharding.axes_size(self.mesh, self._batch_axes)
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or None in sizes:
            raise ValueError(f"batch: every leaf needs the same leading dim (rows of the micro-batch), got {shapes}.")
        (rows,) = sizes
        if rows == 0 or rows % shards:
            below = rows // shards * shards
            near = f"{below} or {below + shards}" if below else f"{shards}"
            raise ValueError(
                f"batch: {rows} rows do not divide by the {shards} devices of mesh axes "
                f"{', '.join(f'{a}={self.mesh.shape[a]}' for a in self._batch_axes)}; use {near} rows."
            )
        self._known_batches.add(shapes)

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args)

        return counted

    def _same_state(self, function: Callable) -> Callable:
        """Refuse, at the trace, an update whose state has other shapes or dtypes: it could not be donated."""

        @functools.wraps(function)
        def same(state: TrainState, other: Any) -> tuple[TrainState, StepMetrics]:
            new, metrics = function(state, other)
            wrong = paths.differences(state, new)
            if wrong:
                lost = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
                raise ValueError(
                    f"the optimizer changes the state's shapes or dtypes, so {lost} bytes could not be donated:\n  "
                    + "\n  ".join(wrong)
                )
            known = ("loss", "weight", "grad_norm", "grad_norm_clipped", "loss_scale", *self._recipe.report)
            self._metric_names = tuple(name for name in metrics.value_names if name not in known)
            return new, metrics

        return same


def _sums(grads: Any, weight: Any, bad: Any, total: Any, metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The tree that accumulates over a window; the loss function's metrics as one float32 [_MAX_METRICS, 2]."""
    packed = jnp.zeros((_MAX_METRICS, 2), jnp.float32)
    if metrics:
        packed = packed.at[: len(metrics)].set(jnp.stack([jnp.stack(metrics[name]) for name in sorted(metrics)]))
    return {"grads": grads, "weight": weight, "bad": bad, "total": total, "metrics": packed}


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def _check_loss(loss: Any, model_state: Any) -> None:
    if not isinstance(loss, Loss):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; return jaxtrain.step.Loss(total, weight), or wrap a function that "
            "returns a scalar with jaxtrain.adapters.plain."
        )
    scalars = {"total": loss.total, "weight": loss.weight}
    scalars |= {f"metrics[{n!r}][{i}]": pair[i] for n, pair in loss.metrics.items() for i in (0, 1)}
    for name, x in scalars.items():
        if jnp.shape(x) != () or jnp.asarray(x).dtype != jnp.float32:
            raise TypeError(
                f"loss_fn: {name} is {jnp.asarray(x).dtype}{list(jnp.shape(x))}; it must be a float32 scalar: the SUM over "
                "valid items (weight: how many)."
            )
    if len(loss.metrics) > _MAX_METRICS:
        raise TypeError(f"loss_fn: {len(loss.metrics)} metrics; at most {_MAX_METRICS} are carried.")
    if loss.stats is not None:
        raise NotImplementedError("loss_fn: Loss.stats is not available yet; return new statistics as model_state.")
    if loss.model_state is not None:
        wrong = paths.differences(model_state, loss.model_state)
        if wrong:
            raise TypeError("loss_fn: the new model_state is unlike the one given:\n  " + "\n  ".join(wrong))


class _relaxed:
    """Standard dtype and rank promotion inside: optax multiplies bools with floats, whatever the caller's own rules."""

    def __enter__(self) -> None:
        self._inner = (jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"))
        for context in self._inner:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._inner):
            context.__exit__(*error)
