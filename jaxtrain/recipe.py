"""What a train step computes, as pure functions: one micro-batch's contribution, and what a window of them does."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import losses, paths, rng
from jaxtrain.losses import MAX_METRICS, Loss
from jaxtrain.optim import Accumulation, Scan, Skip
from jaxtrain.precision import Precision
from jaxtrain.records import BUILTIN, Contribution, MergeStats, StepMetrics
from jaxtrain.state import Counters, Snapshot, TrainState, Variables, View, WindowStart, add_tokens

_NO_LEAF = -1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything static about a program; its methods are the pure functions that ``Program`` compiles."""

    loss_fn: Callable
    init_fn: Callable
    update: optax.GradientTransformationExtraArgs
    multi: optax.MultiSteps
    accumulation: Accumulation
    precision: Precision
    ema: float | None
    skip: Skip
    report: Mapping[str, optax.Schedule]
    merge_stats: MergeStats | None
    trainable: Any  # tree of bools
    seed: int
    shardings: Any
    mesh: Mesh
    batch_axes: tuple[str, ...]

    @property
    def single(self) -> bool:
        """Whether every call of the step is a window of its own: nothing accumulates between calls."""
        return isinstance(self.accumulation, Scan) or self.accumulation.k == 1

    def trained(self, tree: Any) -> Any:
        """The part of a tree of parameters (or of their shardings) that is trained; None stands for the others."""
        return jax.tree.map(lambda is_trained, x: x if is_trained else None, self.trainable, tree)

    def completed(self, trained: Any, params: Any) -> Any:
        """``params`` with the trained ones replaced."""
        return jax.tree.map(lambda is_trained, new, old: new if is_trained else old, self.trainable, trained, params)

    def fresh(self, variables: Variables) -> Snapshot:
        params = variables.params
        params = self.completed(jax.tree.map(lambda x: x.astype(jnp.float32), self.trained(params)), params)
        with relaxed():
            opt_state = self.update.init({"grads": self.trained(params)})
        ema = None if self.ema is None else params
        scale, zero = self.precision.init_scale(), Counters.zero()
        snapshot = Snapshot(params, opt_state, variables.model_state, ema, scale, zero)
        return jax.tree.map(_strong, snapshot)  # a weakly typed leaf would compile the step twice

    def resume(self, snapshot: Snapshot) -> TrainState:
        params, opt_state, model_state, ema, scale, counters = snapshot
        if self.single:
            return TrainState(params, opt_state, model_state, ema, scale, counters, None)
        zero = jnp.float32(0)
        stats = self.zero_stats(model_state)
        zeros = _sums(jax.tree.map(jnp.zeros_like, self.trained(params)), zero, zero, zero, {}, zero, stats)
        opt_state = optax.MultiStepsState(jnp.int32(0), counters.window, opt_state, zeros)
        start = WindowStart(counters, model_state)
        return TrainState(params, opt_state, model_state, ema, scale, counters, start)

    def zero_stats(self, model_state: Any) -> Any:
        return None if self.merge_stats is None else self.merge_stats.zeros(model_state)

    def loss(self, params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        """The loss in compute dtype. The SHARD is cast, then gathered: fewer bytes on the wire."""
        compute = self.constrained(self.precision.cast(params), self.shardings)
        loss = self.loss_fn(compute, model_state, batch, key)
        losses.check(loss, model_state, {*BUILTIN, *self.report})
        return loss if loss.model_state is not None else loss._replace(model_state=model_state)

    def check_stats(self, stats: Any, model_state: Any) -> None:
        if stats is not None and self.merge_stats is None:
            raise TypeError("loss_fn: Loss.stats are given, but no build_train_step(merge_stats=MergeStats(...)).")
        zeros = jax.eval_shape(self.zero_stats, model_state)
        wrong = paths.differences(zeros, stats)
        if wrong:
            raise TypeError("loss_fn: Loss.stats is unlike MergeStats.zeros:\n  " + "\n  ".join(wrong))

    def constrained(self, tree: Any, shardings: Any) -> Any:
        """Parameters, or gradients, on their shards."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes:  # inside of ``deferred``
            shardings = jax.tree.map(lambda s: NamedSharding(mesh, s.spec), shardings)
        return jax.lax.with_sharding_constraint(tree, shardings)

    def contribution(self, view: View, batch: Any, index: jax.Array, count: jax.Array | None = None) -> Contribution:
        """Of one micro-batch, number ``index``; with ``Scan`` of ``count`` of them, which begin there."""
        if not isinstance(self.accumulation, Scan):
            return self.micro(view, batch, index)
        return (
            self.deferred(view, batch, index, count) if self.deferred_axes else self.window(view, batch, index, count)
        )

    @property
    def deferred_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one replica, where gradients cross them once a window."""
        if not (isinstance(self.accumulation, Scan) and self.accumulation.defer):
            return ()
        return tuple(axis for axis in self.batch_axes if axis in ("slice", "data") and self.mesh.shape[axis] > 1)

    def window(
        self, view: View, batch: Any, index: jax.Array, count: jax.Array, shard: jax.Array | None = None
    ) -> Contribution:
        """The sum over a window: leaves ``[k, B, ...]``, in a loop; from micro-batch ``count`` on it is padding."""

        def add(so_far: Contribution, numbered: tuple[jax.Array, Any]) -> tuple[Contribution, None]:
            i, micro_batch = numbered
            now = view._replace(model_state=so_far.model_state)
            new = self.micro(now, micro_batch, index + i, valid=i < count, shard=shard)
            added = jax.tree.map(jnp.add, so_far._replace(model_state=()), new._replace(model_state=()))
            first = jnp.where(so_far.bad_leaf == _NO_LEAF, new.bad_leaf, so_far.bad_leaf)
            grads = self.constrained(added.grads, self.trained(self.shardings))
            return added._replace(grads=grads, model_state=new.model_state, bad_leaf=first), None

        first = jax.tree.map(lambda x: x[0], batch)
        shapes = jax.eval_shape(functools.partial(self.micro, shard=shard), view, first, index)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes._replace(model_state=()))
        nothing = zeros._replace(
            grads=self.constrained(zeros.grads, self.trained(self.shardings)), model_state=view.model_state,
            bad_leaf=jnp.int32(_NO_LEAF),
        )  # fmt: skip
        return jax.lax.scan(add, nothing, (jnp.arange(self.accumulation.k), batch))[0]

    def deferred(self, view: View, batch: Any, index: jax.Array, count: jax.Array) -> Contribution:
        """``window`` on each replica's rows, reduced once, in float32: manual over the replicas, automatic inside."""
        axes = self.deferred_axes

        def local(view: View, batch: Any, index: jax.Array, count: jax.Array) -> Contribution:
            c = self.window(view, batch, index, count, shard=jax.lax.axis_index(axes))
            return jax.tree.map(lambda x: x[None], c)

        # Without the check of what varies: it would want loss functions written for it (their scans' carries), and
        # the gradient of a replica is local all the same, because it is taken inside.
        over = jax.shard_map(
            local, mesh=self.mesh, in_specs=(P(), P(None, axes), P(), P()), out_specs=P(axes), axis_names=set(axes),
            check_vma=False,
        )  # fmt: skip
        each = over(view, batch, index, count)  # a leading dim of replicas on every leaf
        c = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), each)
        grads = self.constrained(c.grads, self.trained(self.shardings))
        return c._replace(grads=grads, bad_leaf=jnp.max(each.bad_leaf), count=count)

    def micro(
        self, view: View, batch: Any, index: jax.Array, valid: jax.Array | bool = True, shard: jax.Array | None = None
    ) -> Contribution:
        """One micro-batch's; nothing where it is not ``valid``. ``shard``: which replica, if it sees its rows only."""
        key = rng.key(self.seed, "dropout", index)
        if shard is not None:
            key = jax.random.fold_in(key, shard)

        def total(trained: Any) -> tuple[jax.Array, Loss]:
            loss = self.loss(self.completed(trained, view.params), view.model_state, batch, key)
            self.check_stats(loss.stats, view.model_state)
            return loss.total, loss

        _, pull, loss = jax.vjp(total, self.trained(view.params), has_aux=True)
        if self.precision.scaled:
            weight = loss.weight
            if shard is not None:  # the micro-batch's, so that every mechanism overflows at the same scale
                weight = jax.lax.psum(weight, self.deferred_axes)
            seed = self.precision.seed(view.scale, weight)
            grads = jax.tree.map(lambda g: g / seed, pull(seed)[0])
        else:
            grads = pull(jnp.float32(1.0))[0]
        by_leaf = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        sums = jax.tree.leaves((dict(loss.metrics), loss.stats))
        rest = [loss.total, loss.weight, *_floats(loss.model_state), *sums]
        finite = jnp.all(by_leaf) & jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in rest]))
        if shard is not None and self.skip.what == "micro":  # left out of all replicas, or of none
            finite = jax.lax.pmin(finite.astype(jnp.int32), self.deferred_axes) == 1
        good = finite & valid
        counted = good if self.skip.what == "micro" else valid
        clean = functools.partial(jax.tree.map, lambda x: jnp.where(jnp.isfinite(x) & counted, x, 0.0))
        return Contribution(
            grads=jax.tree.map(lambda g: jnp.where(good, g, 0.0), grads),
            weight=clean(loss.weight),
            total=clean(loss.total),
            model_state=jax.tree.map(lambda new, old: jnp.where(good, new, old), loss.model_state, view.model_state),
            stats=clean(loss.stats),
            metrics=clean(dict(loss.metrics)),
            bad=jnp.where(~finite & valid, 1.0, 0.0),
            bad_leaf=jnp.where(jnp.all(by_leaf) | ~jnp.bool_(valid), _NO_LEAF, jnp.argmin(by_leaf).astype(jnp.int32)),
            tokens=jnp.round(jnp.where(jnp.isfinite(loss.weight) & valid, loss.weight, 0.0)).astype(jnp.int32),
            count=jnp.int32(valid),
        )

    def apply(self, state: TrainState, c: Contribution) -> tuple[TrainState, StepMetrics]:
        known = jnp.float32(0) if self.single else state.opt_state.acc_grads["bad_leaf"]
        first_bad = jnp.where(known == 0, (c.bad_leaf + 1).astype(jnp.float32), 0.0)
        sums = _sums(c.grads, c.weight, c.bad, c.total, c.metrics, first_bad, c.stats)
        transform = self.update if self.single else self.multi
        with relaxed():
            out, opt_state = transform.update(sums, state.opt_state, {"grads": self.trained(state.params)})
        done = jnp.bool_(True) if self.single else opt_state.mini_step == 0
        if not self.single:  # optax resets by multiplying with zero, and 0 * inf would poison every later window
            clear = jax.tree.map(lambda x: jnp.where(done, 0.0, x), opt_state.acc_grads)
            opt_state = opt_state._replace(acc_grads=clear)
        counters = state.counters._replace(
            micro_step=state.counters.micro_step + c.count, tokens=add_tokens(state.counters.tokens, c.tokens)
        )
        moved = state._replace(opt_state=opt_state, model_state=c.model_state, counters=counters)
        began = state.model_state if self.single else state.start.model_state
        return self.finish(moved, out, done, sorted(c.metrics), began)

    def step(self, state: TrainState, batch: Any, count: jax.Array | None) -> tuple[TrainState, StepMetrics]:
        view = View(state.params, state.model_state, state.scale)
        contribution = self.contribution(view, batch, state.counters.micro_step, count)
        # step == apply . grads, bit for bit: the barrier keeps the compiler from fusing across, and the layout is that
        # of an array between two calls, so that the norm's sums run in the same order.
        grads = jax.tree.map(_row_major, contribution.grads, self.trained(self.shardings))
        return self.apply(state, jax.lax.optimization_barrier(contribution._replace(grads=grads)))

    def flush(self, state: TrainState, metric_names: Sequence[str]) -> tuple[TrainState, StepMetrics]:
        multi = state.opt_state
        with relaxed():
            trained = {"grads": self.trained(state.params)}
            out, inner = self.update.update(multi.acc_grads, multi.inner_opt_state, trained)
        zeros = jax.tree.map(jnp.zeros_like, multi.acc_grads)
        opt_state = optax.MultiStepsState(jnp.int32(0), multi.gradient_step + 1, inner, zeros)
        state = state._replace(opt_state=opt_state)
        return self.finish(state, out, jnp.bool_(True), metric_names, state.start.model_state)

    def evaluate(self, view: View, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        loss = self.loss(view.params, view.model_state, batch, None)
        return {"loss": (loss.total, loss.weight), **loss.metrics}

    def finish(
        self, state: TrainState, out: Mapping[str, Any], done: jax.Array, names: Sequence[str], began: Any
    ) -> tuple[TrainState, StepMetrics]:
        """Close the window where ``done``: apply or undo, count, and write its record.

        ``began``: the model_state at the window's start.
        """
        applied = done & (out["applied"] > 0)
        pick = functools.partial(jax.tree.map, lambda yes, no: jnp.where(applied, yes, no))
        before = self.trained(state.params)
        trained = pick(jax.tree.map(lambda p, u: p + u.astype(p.dtype), before, out["grads"]), before)
        params, ema = self.completed(trained, state.params), state.ema
        if self.ema is not None:
            before = self.trained(ema)
            moved = pick(jax.tree.map(lambda e, p: self.ema * e + (1 - self.ema) * p, before, trained), before)
            ema = self.completed(moved, ema)
        old = state.counters
        one = applied.astype(jnp.int32)
        skipped = done.astype(jnp.int32) - one
        in_a_row = jnp.where(applied, 0, old.skipped_in_a_row + skipped)
        counters = old._replace(window=old.window + one + skipped, step=old.step + one, skipped_in_a_row=in_a_row)
        overflowed = ~jnp.isfinite(out["norm"])  # a sum of finite gradients can be infinite
        told = done & (applied | (out["bad"] > 0) | overflowed)  # a window without any weight tells the scale nothing
        adjusted = self.precision.adjust(state.scale, (out["bad"] == 0) & ~overflowed)
        scale = jax.tree.map(lambda new, now: jnp.where(told, new, now), adjusted, state.scale)
        record = self.record(state, out, counters, applied, done, names)
        model_state = state.model_state
        if self.merge_stats is not None:
            model_state = pick(self.merge_stats.merge(model_state, out["stats"]), model_state)
        undo = done & ~applied
        model_state = jax.tree.map(lambda was, now: jnp.where(undo, was, now), began, model_state)
        start = state.start
        if start is not None:
            begun = WindowStart(counters, model_state)
            start = jax.tree.map(lambda new, was: jnp.where(done, new, was), begun, start)
        return TrainState(params, state.opt_state, model_state, ema, scale, counters, start), record

    def record(
        self, state: TrainState, out: Mapping[str, Any], counters: Counters, applied: jax.Array, done: jax.Array,
        names: Sequence[str],
    ) -> StepMetrics:  # fmt: skip
        values = {
            "loss": jnp.where(applied, out["total"] / out["weight"], jnp.nan),
            "weight": out["weight"],
            "grad_norm": jnp.where(applied | jnp.isinf(out["norm"]), out["norm"], jnp.nan),
            "grad_norm_clipped": jnp.where(applied, out["clipped_norm"], jnp.nan),
            "loss_scale": state.scale.value,
        }
        with relaxed():
            values |= {name: jnp.asarray(f(state.counters.step), jnp.float32) for name, f in self.report.items()}
        own = out["metrics"][: len(names)]
        values |= dict(zip(names, own[:, 0] / jnp.where(own[:, 1] > 0, own[:, 1], jnp.nan), strict=True))
        counts = {name: getattr(counters, name) for name in ("micro_step", "window", "step", "skipped_in_a_row")}
        high, low = jax.lax.bitcast_convert_type(counters.tokens, jnp.int32)
        bad_leaf = out["bad_leaf"].astype(jnp.int32) - 1
        counts |= {"bad_leaf": bad_leaf, "window_done": done.astype(jnp.int32), "tokens_high": high, "tokens_low": low}
        return StepMetrics(
            jnp.stack(list(values.values())), jnp.stack(list(counts.values())), tuple(values), tuple(counts)
        )


def _sums(
    grads: Any, weight: Any, bad: Any, total: Any, metrics: Mapping[str, tuple[Any, Any]], first_bad: Any, stats: Any
) -> dict[str, Any]:
    """The tree that accumulates over a window; the loss function's metrics as one float32 [MAX_METRICS, 2].

    ``first_bad`` is the index of the window's first bad leaf + 1, given once; 0 adds nothing.
    """
    packed = jnp.zeros((MAX_METRICS, 2), jnp.float32)
    if metrics:
        packed = packed.at[: len(metrics)].set(jnp.stack([jnp.stack(metrics[name]) for name in sorted(metrics)]))
    scalars = {"weight": weight, "bad": bad, "total": total, "bad_leaf": first_bad}
    return scalars | {"grads": grads, "metrics": packed, "stats": stats}


def _strong(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, x.dtype)


def _row_major(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """``x`` with its last dim contiguous, shard by shard: the constraint alone would gather the whole array first."""
    if x.ndim < 2:
        return x
    pin = lambda shard: with_layout_constraint(shard, Layout(tuple(range(shard.ndim))))  # noqa: E731
    return jax.shard_map(pin, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)(x)


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


class relaxed:
    """Standard dtype and rank promotion inside: optax multiplies bools with floats, whatever the caller's own rules."""

    def __enter__(self) -> None:
        self._inner = (jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"))
        for context in self._inner:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._inner):
            context.__exit__(*error)
