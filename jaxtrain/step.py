"""The train step as a value: ``build_train_step`` gives a ``Program`` of pure, sharded, compiled functions.

Nothing here knows a config, a loop, a file or a model library; ``jaxtrain.adapters`` brings models in.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import checks, optim, paths, rng, sharding
from jaxtrain.intake import Intake
from jaxtrain.losses import Loss
from jaxtrain.optim import Accumulation, MultiSteps, Scan, Skip
from jaxtrain.precision import Precision
from jaxtrain.recipe import Recipe, relaxed
from jaxtrain.records import BUILTIN, Contribution, MergeStats, StepMetrics
from jaxtrain.sharding import DEFAULT_RULES, Rules
from jaxtrain.state import Snapshot, TrainState, Variables, View

__all__ = [
    "Contribution", "Loss", "MergeStats", "MultiSteps", "NonFiniteError", "Precision", "Program", "Scan", "Skip",
    "StepMetrics", "Variables", "build_train_step",
]  # fmt: skip


class NonFiniteError(FloatingPointError):
    """More windows in a row than allowed held a non-finite gradient; parameters are those of the last good step."""


def build_train_step(
    loss_fn: Callable[[Any, Any, Any, jax.Array | None], Loss],
    init_fn: Callable[[jax.Array], Variables],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    batch_axes: Sequence[str] = sharding.BATCH_AXES,
    accumulation: Accumulation = MultiSteps(1),  # noqa: B008, a frozen value
    precision: Precision = Precision(),  # noqa: B008, a frozen value
    clip_norm: float | None = None,
    ema: float | None = None,
    trainable: str | Sequence[str] | Callable[[str], bool] | None = None,
    merge_stats: MergeStats | None = None,
    nonfinite: Skip = Skip(),  # noqa: B008, a frozen value
    report: Mapping[str, optax.Schedule] | None = None,
    seed: int = 0,
) -> "Program":
    """A training program: sharded, donated, compiled once; one call per micro-batch, or per window with ``Scan``.

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
        accumulation: ``MultiSteps(k)``, ``Scan(k)`` or ``Scan(k, defer=True)``: three ways to the same step.
        precision: compute dtype; the masters are float32.
        clip_norm: bound of the global norm of the mean gradient, or None.
        ema: decay of an exponential average of the parameters, counted in steps, or None.
        trainable: which parameters are trained: patterns (``re.search``) for names such as ``layers/mlp/up/kernel``, or
            a function of the name; None: all. Others keep their dtype and have neither gradient nor optimizer state.
        merge_stats: turns ``Loss.stats``, summed over a window, into model_state.
        nonfinite: what a non-finite micro-gradient does.
        report: name -> schedule of steps, reported in the metrics as applied.
        seed: of parameters and of every key that ``loss_fn`` gets.

    Raises:
        ValueError: parameters that are not float32 (under their name), rules that the mesh or a shape cannot hold.
        TypeError: an argument of another kind; ``loss_fn`` returns something else than ``Loss`` of float32 scalars
            (raised at the first trace).
    """
    if isinstance(batch_axes, str):
        raise ValueError(f"batch_axes={batch_axes!r}: give a sequence of axis names, ({batch_axes!r},).")
    checks.kinds({"optimizer": optimizer, "mesh": mesh, "accumulation": accumulation, "precision": precision,
                  "nonfinite": nonfinite, "rules": rules, "report": report, "loss_fn": loss_fn, "init_fn": init_fn,
                  "batch_axes": batch_axes, "clip_norm": clip_norm, "ema": ema, "seed": seed})  # fmt: skip
    with relaxed():
        variables = jax.eval_shape(init_fn, jax.eval_shape(lambda: rng.key(seed, "params")))
    if not isinstance(variables, Variables):
        raise TypeError(
            f"init_fn returned {type(variables).__name__}; return jaxtrain.step.Variables(params, model_state)."
        )
    if not jax.tree.leaves(variables.params):
        raise ValueError("init_fn gives no parameters: there is nothing to train.")
    is_trained = checks.trained_by(trainable, list(paths.named_leaves(variables.params)))
    for name, leaf in paths.named_leaves(variables.params).items():
        if is_trained[name] and leaf.dtype != jnp.float32:
            raise ValueError(f"{name}: parameters are float32 masters, got {leaf.dtype}; other state is model_state.")
    clash = sorted(set(BUILTIN) & set(report or ()))
    if clash:
        raise ValueError(f"report: {', '.join(clash)} are the step's own names; choose others.")
    paths.chosen("precision: overrides", precision.overrides, list(is_trained))
    update = optim.window_update(optimizer, clip_norm, nonfinite)
    recipe = Recipe(
        loss_fn=loss_fn, init_fn=init_fn, update=update, accumulation=accumulation,
        multi=optax.MultiSteps(update, accumulation.k, use_grad_mean=False),
        precision=precision, ema=ema, skip=nonfinite, report=dict(report or {}), merge_stats=merge_stats, seed=seed,
        trainable=jax.tree_util.tree_map_with_path(lambda path, _: is_trained[paths.name(path)], variables.params),
        shardings=sharding.infer(variables.params, mesh, rules), mesh=mesh,
        batch_axes=tuple(axis for axis in batch_axes if axis in mesh.shape),
    )  # fmt: skip
    if isinstance(accumulation, Scan) and accumulation.defer and jax.tree.leaves(variables.model_state):
        held = ", ".join(list(paths.named_leaves(variables.model_state))[:4])
        raise ValueError(
            f"accumulation: Scan(defer=True) with a model_state ({held}): each replica would see its own rows only and "
            "their statistics part; use Scan or MultiSteps, or a model without such state."
        )
    program = Program(recipe, variables)
    checks.accumulates_once(program.abstract_snapshot.opt_state)
    return program


class Program:
    """A compiled training program on one mesh. Its functions are pure; ``state`` goes in and comes out.

    Attributes:
        mesh, accumulation, nonfinite: as given to ``build_train_step``.
        abstract_state: ``TrainState`` of ``ShapeDtypeStruct`` with shardings.
        abstract_snapshot: ``Snapshot`` of the same: the target that a checkpoint is restored to.
        leaf_names: of the parameters, in the order of ``jax.tree.leaves``.
        traces: how often each function was traced; a step that is traced twice is compiled twice.
    """

    def __init__(self, recipe: Recipe, variables: Variables) -> None:
        """Use ``build_train_step``."""
        self.mesh, self.accumulation, self.nonfinite = recipe.mesh, recipe.accumulation, recipe.skip
        self.traces: dict[str, int] = {}
        self._traced: Any = None  # the step's arguments, as shapes
        self._recipe, self._intake = recipe, Intake(recipe.mesh, recipe.batch_axes, recipe.accumulation)
        self._metric_names: tuple[str, ...] = ()
        with relaxed():
            snapshot = jax.eval_shape(recipe.fresh, variables)
        state = jax.eval_shape(recipe.resume, snapshot)
        place = functools.partial(
            sharding.like_params, params=variables.params, shardings=recipe.shardings, mesh=self.mesh
        )
        self.abstract_snapshot: Snapshot = sharding.with_shardings(snapshot, place(snapshot))
        self.abstract_state: TrainState = sharding.with_shardings(state, place(state))
        self.leaf_names = tuple(paths.named_leaves(variables.params))
        self._trained_names = tuple(paths.named_leaves(recipe.trained(variables.params)))
        self._compile(place(state))

    def _compile(self, states: Any) -> None:
        recipe, batches, whole = self._recipe, self.batch_sharding, NamedSharding(self.mesh, P())
        views = View(states.params, states.model_state, states.scale)
        models = states.model_state
        contributions = Contribution(
            recipe.trained(states.params), whole, whole, models, whole, whole, whole, whole, whole, whole
        )
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
            count("step", self._with_names(recipe.step)),
            in_shardings=(states, batches, whole), out_shardings=(states, whole), donate_argnums=0,
        )  # fmt: skip
        self._grads = jit(
            count("grads", recipe.contribution), in_shardings=(views, batches, whole, whole),
            out_shardings=contributions,
        )  # fmt: skip
        self._apply = jit(
            count("apply", self._with_names(recipe.apply)),
            in_shardings=(states, contributions), out_shardings=(states, whole), donate_argnums=0,
        )  # fmt: skip
        self._flush = jit(
            count("flush", recipe.flush), static_argnums=1, in_shardings=(states,), out_shardings=(states, whole),
            donate_argnums=0,
        )  # fmt: skip
        self._evaluate = jit(
            count("evaluate", recipe.evaluate), in_shardings=(views, self.row_sharding), out_shardings=whole
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
            with relaxed():
                return self._init(key)
        wrong = paths.differences(self.abstract_state.params, params)
        if wrong:
            raise ValueError("init: the given parameters do not fit:\n  " + "\n  ".join(wrong))
        named = paths.named_leaves(params)  # containers may be others than init_fn's
        params = jax.tree.unflatten(
            jax.tree.structure(self.abstract_state.params), [named[name] for name in self.leaf_names]
        )
        placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state.params))
        with relaxed():
            model_state = jax.jit(lambda k: self._recipe.init_fn(k).model_state)(key)
            return self._init_from(Variables(placed, model_state))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        """One micro-batch forward and backward; at a window's end the update. ``state`` is donated.

        Args:
            batch: pytree of arrays, every leaf ``[B, ...]`` with the GLOBAL micro-batch size ``B``, and ``[k, B, ...]``
                with ``Scan(k)``: one call is a window. A last window of fewer micro-batches is divided by what it
                holds, in the same compiled program. ``batch_struct`` gives the sharding; NumPy arrays are put on the
                devices (one process only).

        Raises:
            ValueError: ``B`` does not divide by the devices that split it, or there are more than k micro-batches;
                ``state`` was given to an earlier call.
        """
        checks.alive("step", state)
        placed, count = self._intake.window(batch)
        with checks.explained("step", ("the state", self.abstract_state, state)):
            return self._step(state, placed, count)

    def grads(self, view: View, batch: Any, index: jax.typing.ArrayLike) -> Contribution:
        """What micro-batch number ``index`` (int) adds to its window; nothing is donated.

        With ``Scan`` the batch is a window, as ``step`` takes it, whose first micro-batch has that number.
        """
        checks.alive("grads", view, View)
        placed, count = self._intake.window(batch)
        return self._grads(view, placed, jnp.int32(index), count)

    def apply(self, state: TrainState, contribution: Contribution) -> tuple[TrainState, StepMetrics]:
        """Take a contribution in; ``step(state, batch)`` is ``apply(state, grads(view, batch, micro_step))``, exactly.

        ``state`` is donated.
        """
        checks.alive("apply", state)
        if not isinstance(contribution, Contribution):
            raise TypeError(
                f"apply: got {type(contribution).__name__}; give the Contribution that program.grads returned."
            )
        grads = self._recipe.trained(self.abstract_state.params)
        pairs = ("the state", self.abstract_state, state), ("the gradient", grads, contribution.grads)
        with checks.explained("apply", *pairs):
            return self._apply(state, contribution)

    def flush(self, state: TrainState) -> tuple[TrainState, StepMetrics | None]:
        """Close a partial window: divide by what was accumulated and update. ``state`` is donated.

        Returns ``(state, None)`` where nothing is pending. ``drop`` leaves them out instead.
        """
        checks.alive("flush", state)
        if self._recipe.single or int(state.opt_state.mini_step) == 0:
            return state, None
        return self._flush(state, self._metric_names)

    def drop(self, state: TrainState) -> tuple[TrainState, int]:
        """Leave out a partial window, the other way to end: the state at its start, and how many micro-batches it lost.

        They stay counted in ``micro_step``, so that the data goes on behind them. ``state`` is donated.
        """
        checks.alive("drop", state)
        pending = 0 if self._recipe.single else int(state.opt_state.mini_step)
        if not pending:
            return state, 0
        start = state.start.counters
        seen = start._replace(micro_step=state.counters.micro_step, tokens=state.counters.tokens)
        return self.resume(self.checkpoint_view(state)._replace(counters=seen)), pending

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
        checks.alive("view", state)
        view = View(state.ema if ema else state.params, state.model_state, state.scale)
        return self._copy(view) if copy else view

    def evaluate(self, view: View, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        """``{"loss": (sum, weight), metric: (sum, weight)}`` of a batch, float32 scalars; no dropout, nothing changes.

        ``batch`` has leaves ``[B, ...]``, whatever the accumulation.
        Add the pairs of all batches, then divide: padding rows of weight 0 count for nothing.
        """
        checks.alive("evaluate", view, View)
        return self._evaluate(view, self._intake.rows(batch))

    def check(self, record: Mapping[str, Any]) -> None:
        """Stop a run that only skips. ``record`` is ``StepMetrics.to_host()``.

        Raises:
            NonFiniteError: more windows in a row were skipped than ``nonfinite.max_consecutive``.
        """
        count, allowed = record["skipped_in_a_row"], self.nonfinite.max_consecutive
        if count > allowed:
            leaf = record["bad_leaf"]
            if leaf >= 0:
                why = f"not finite in the gradient of {self._trained_names[leaf]!r}"
            elif record["weight"] == 0:
                why = "every weight was zero"
            elif math.isinf(record["grad_norm"]):
                why = f"the gradients are finite and their global norm is {record['grad_norm']}"
            else:
                why = "not finite in the loss, its metrics or its new model_state"
            scale = record["loss_scale"]
            low = self._recipe.precision.scaled and scale <= self._recipe.precision.loss_scale.minimum
            raise NonFiniteError(
                f"{count} windows in a row were skipped (allowed: {allowed}) after step {record['step']}, window "
                f"{record['window']}: {why}"
                + (f"; loss scale at minimum ({scale})" if low else "")
                + ". Parameters are those of the last good step; lower the learning rate or look at the data."
            )

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint_view(self, state: TrainState) -> Snapshot:
        """What to save: the start of the current window; nothing is computed.

        It shares its arrays with ``state``: save it, or copy it to the host, before the next step takes them over.
        """
        if self._recipe.single:
            return Snapshot(*state[:6])
        start = state.start
        return Snapshot(
            state.params, state.opt_state.inner_opt_state, start.model_state, state.ema, state.scale, start.counters
        )

    def resume(self, snapshot: Snapshot) -> TrainState:
        """The state that a snapshot stands for, ready for its window's first micro-batch: its counters say which.

        Args:
            snapshot: as ``checkpoint_view`` gave it, under any mechanism, k and mesh; arrays on the host or on devices.
                It is donated.

        Raises:
            ValueError: names, shapes or dtypes differ from this program's, each is listed; or an array is gone.
        """
        snapshot = checks.fitting("resume: the snapshot", self.abstract_snapshot, snapshot)
        seen: set[int] = set()

        def own(x: Any) -> Any:  # a buffer under two names cannot be donated twice
            if id(x) in seen:
                return jnp.copy(x)
            seen.add(id(x))
            return x

        return self._resume(jax.tree.map(own, snapshot))

    # ---- shapes -------------------------------------------------------------------------------------------------

    @property
    def has_ema(self) -> bool:
        """Whether there is an exponential average of the parameters to evaluate."""
        return self._recipe.ema is not None

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of every leaf of a batch that ``step`` takes: the rows of its micro-batches over the batch axes."""
        return self._intake.batch_sharding

    @property
    def row_sharding(self) -> NamedSharding:
        """Of every leaf ``[B, ...]`` of a batch that ``evaluate`` takes: its leading dim over the batch axes."""
        return self._intake.row_sharding

    def batch_struct(self, example: Any) -> Any:
        """``ShapeDtypeStruct`` with shardings for a batch like ``example`` (arrays or structs of GLOBAL shapes)."""
        return self._intake.struct(example)

    def lower(self, batch_struct: Any) -> jax.stages.Lowered:
        """The step lowered for its abstract state and a batch: for planning and inspection, without any array."""
        count = jax.ShapeDtypeStruct((), jnp.int32) if isinstance(self.accumulation, Scan) else None
        return self._step.lower(self.abstract_state, batch_struct, count)

    # ---- traces -------------------------------------------------------------------------------------------------

    def _counted(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            result = function(*args)
            if name == "step":
                self._tell_changes(args)  # of a trace that was one: a batch that fails it is not what is expected
            return result

        return counted

    def _tell_changes(self, args: Any) -> None:
        """Warn at a second trace of the step: it compiles again, which a user's loop would not notice."""
        shapes = jax.tree.map(jax.typeof, args)
        if self._traced is not None:
            changes = [line.removeprefix("1/") for line in paths.differences(self._traced, shapes)]
            what = "\n  ".join(changes) or "the same shapes and dtypes with another sharding, weak type or structure"
            warnings.warn(
                f"step is compiled a second time; keep its arguments alike:\n  {what}", RuntimeWarning, stacklevel=2
            )
        self._traced = shapes

    def _with_names(self, function: Callable) -> Callable:
        """Note, at the trace, which metrics are the loss function's: ``flush`` has no loss to ask."""

        @functools.wraps(function)
        def noted(*args: Any) -> tuple[TrainState, StepMetrics]:
            new, metrics = function(*args)
            known = (*BUILTIN, *self._recipe.report)
            self._metric_names = tuple(name for name in metrics.value_names if name not in known)
            return new, metrics

        return noted
