"""Models and losses of other shapes, as the (loss_fn, init_fn) pair that ``build_train_step`` takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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
    """
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
        if not isinstance(result, Loss):
            raise TypeError(
                f"from_nnx: loss returned {type(result).__name__}; return jaxtrain.step.Loss(total, weight)."
            )
        rest = nnx.to_pure_dict(nnx.split(module, nnx.Param, ...)[2])
        return result._replace(model_state=rest) if result.model_state is None else result

    return loss_fn, init_fn


def nnx_module(make: Callable[[nnx.Rngs], nnx.Module], params: Any, model_state: Any = ()) -> nnx.Module:
    """The module again from a program's parameters and model_state, as for sampling: pure dicts in, a module out."""
    graph, abstract_params, abstract_rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    return nnx.merge(graph, _filled(abstract_params, params), _filled(abstract_rest, model_state or {}))


def _filled(abstract: nnx.State, values: Any) -> nnx.State:
    """A State of the abstract one's structure that holds ``values``, a pure dict."""
    filled = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(filled, values)
    return filled
