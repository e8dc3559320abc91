"""Models and losses of other shapes, as the (loss_fn, init_fn) pair that ``build_train_step`` takes."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxtrain import paths
from jaxtrain.losses import Loss
from jaxtrain.state import Variables

Pair = tuple[Callable[..., Loss], Callable[[jax.Array], Variables]]


def plain(loss: Callable[[Any, Any, jax.Array | None], jax.Array], init: Callable[[jax.Array], Any]) -> Pair:
    """A function that returns the MEAN loss over a batch's rows.

    Args:
        loss: ``(params, batch, key) -> scalar``, the mean over the leading dim of the batch's leaves; ``key`` is None
            in evaluation. For anything that masks items return ``Loss(total, weight)``: a mean hides its weight.
        init: ``key -> params``, a pytree of float32 arrays.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        mean = loss(params, batch, key)
        if jnp.shape(mean) != ():
            raise TypeError(f"plain: the loss has shape {jnp.shape(mean)}; return the mean over the batch, a scalar.")
        rows = jnp.float32(jax.tree.leaves(batch)[0].shape[0])
        return Loss(mean.astype(jnp.float32) * rows, rows)

    return loss_fn, lambda key: Variables(init(key))


def from_nnx(make: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[Any, Any, jax.Array | None], Loss]) -> Pair:
    """A Flax NNX module.

    Args:
        make: ``rngs -> module``. Its ``nnx.Param`` become the parameters, a pure dict of float32 arrays whose paths
            have no ``/value``; every other variable (``nnx.BatchStat``) becomes model_state and may change in the loss.
        loss: ``(module, batch, key) -> Loss``; the module holds compute-dtype parameters. In evaluation ``key`` is
            None: call the module without dropout and with running statistics. A new model_state is read off the module.

    Raises:
        ValueError: the module stores random state, as ``nnx.Dropout(rngs=...)`` does: keys are passed at call time
            here, so that a resumed run draws what the unbroken one would have.
        TypeError: a module where a function that makes one is wanted.
    """
    if isinstance(make, nnx.Module):
        raise TypeError("from_nnx: got a module; give a function that makes one, as lambda rngs: Model(rngs=rngs).")
    graph, abstract_params, abstract_rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    kept = sorted(
        {"/".join(map(str, path)) for path, v in nnx.to_flat_state(abstract_rest) if isinstance(v, nnx.RngState)}
    )
    if kept:
        raise ValueError(
            f"from_nnx: the module stores random state ({', '.join(kept)}); build its dropout without rngs and pass "
            "rngs=key at call time, as in dropout(x, rngs=key)."
        )

    def init_fn(key: jax.Array) -> Variables:
        _, params, rest = nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(rest))

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        module = nnx.merge(graph, _filled(abstract_params, params), _filled(abstract_rest, model_state))
        result = loss(module, batch, key)
        _check_returned("from_nnx", result)
        rest = nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])
        return result._replace(model_state=rest) if result.model_state is None else result

    return loss_fn, init_fn


def from_linen(
    module: linen.Module,
    loss: Callable[[Callable[..., Any], Any, jax.Array | None], Loss],
    *example: Any,
    streams: Sequence[str] = ("dropout",),
    **options: Any,
) -> Pair:
    """A Flax Linen module.

    Args:
        module: its ``params`` become the parameters; its other collections (``batch_stats``) become model_state and may
            change in the loss.
        loss: ``(apply, batch, key) -> Loss``; ``apply(*inputs, **options)`` is the module on compute-dtype parameters.
            Outside of evaluation, where ``key`` is None, it draws from ``key`` for every stream, another number each
            call, and moves the model_state.
        example: inputs of any batch size that ``module.init`` is called with, arrays or ``ShapeDtypeStruct``.
        streams: names of the random streams that the module asks for.
        options: keyword arguments for ``module.init``, such as ``train=False``.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)

    def init_fn(key: jax.Array) -> Variables:
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        variables = dict(module.init(key, *inputs, **options))
        params = variables.pop("params")
        variables.pop("intermediates", None)
        return Variables(params, variables or ())

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        state = dict(model_state) if model_state else {}
        calls = itertools.count()

        def apply(*inputs: Any, **options: Any) -> Any:
            variables = {"params": params, **state}
            if key is None:
                return module.apply(variables, *inputs, **options)
            call = jax.random.fold_in(key, next(calls))
            keys = {name: jax.random.fold_in(call, number) for number, name in enumerate(streams)}
            out, moved = module.apply(variables, *inputs, rngs=keys, mutable=list(state), **options)
            state.update(moved)
            return out

        result = loss(apply, batch, key)
        _check_returned("from_linen", result)
        return result._replace(model_state=state) if state and result.model_state is None else result

    return loss_fn, init_fn


def from_pytree(make: Callable[[jax.Array], Any], loss: Callable[[Any, Any, jax.Array | None], Loss]) -> Pair:
    """A model that is a pytree, as an Equinox module is.

    Args:
        make: ``key -> model``. Its float arrays become the parameters, a dict by their paths (``layers/0/weight``); its
            other arrays become model_state; what is no array (activation functions, sizes) stays as ``make`` gave it.
        loss: ``(model, batch, key) -> Loss``; the model holds compute-dtype parameters. New state is returned as
            ``Loss.model_state``, a dict by path.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array | None) -> Loss:
        result = loss(pytree_model(make, params, model_state), batch, key)
        _check_returned("from_pytree", result)
        return result

    return loss_fn, lambda key: _parted(make(key))


def pytree_model(make: Callable[[jax.Array], Any], params: Any, model_state: Any = ()) -> Any:
    """The model again from a program's parameters and model_state."""
    kept: list[Any] = []

    def look(key: jax.Array) -> Variables:  # shapes only: nothing is drawn or allocated
        kept.append(make(key))
        return _parted(kept[0])

    jax.eval_shape(look, jax.eval_shape(lambda: jax.random.key(0)))
    arrays = {**params, **(model_state or {})}
    return jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.get(paths.name(path), leaf), kept[0])


def _parted(model: Any) -> Variables:
    named = {name: x for name, x in paths.named_leaves(model).items() if isinstance(x, jax.Array | np.ndarray)}
    floats = {name for name, x in named.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in named.items() if name not in floats}
    return Variables({name: named[name] for name in named if name in floats}, others or ())


def _check_returned(adapter: str, result: Any) -> None:
    if not isinstance(result, Loss):
        raise TypeError(f"{adapter}: loss returned {type(result).__name__}; return jaxtrain.step.Loss(total, weight).")


def nnx_module(make: Callable[[nnx.Rngs], nnx.Module], params: Any, model_state: Any = ()) -> nnx.Module:
    """The module again from a program's parameters and model_state, as for sampling: pure dicts in, a module out."""
    graph, abstract_params, abstract_rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    return nnx.merge(graph, _filled(abstract_params, params), _filled(abstract_rest, model_state or {}))


def _filled(abstract: nnx.State, values: Any) -> nnx.State:
    """A State of the abstract one's structure that holds ``values``, a pure dict."""
    filled = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(filled, values)
    return filled
