"""Every key of a run, declared once: type, default, meaning, bounds, and whether a resumed run may change it."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jaxtrain.horizon import Batching
from jaxtrain.horizon import parse as parse_length


class ConfigError(ValueError):
    """What is wrong with a configuration, in a sentence with the key, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        default: its value, whose type is the key's type (``int, float, bool, str`` or a tuple of strings).
        help: what it means, with its unit.
        choices: the allowed values, or empty.
        low, high: bounds of a number, both allowed.
        free: True where a resumed run may change it without becoming another experiment.
        length: True where a text in samples, tokens or epochs may stand for a number of windows, see ``horizon``.
        of: the choices of ``_CHOOSE`` that read it, or empty: all.
    """

    default: Any
    help: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    free: bool = False
    length: bool = False
    of: tuple[str, ...] = ()


_MODELS = {"text": ("transformer",), "digits": ("mlp", "resnet")}  # which models know what to do with which data

_CHOOSE = ("data.name", "model.name", "optim.name", "optim.schedule", "precision.compute")  # what other keys depend on

KEYS: dict[str, Key] = {
    "seed": Key(0, "of parameters, dropout and shuffling", low=0, high=2**32 - 1),
    "steps": Key(
        1000,
        "windows to train for, each one optimizer step or a skipped one; or '2 epochs', '10M tokens', '50k samples'",
        low=1,
        high=2**31 - 1,
        free=True,
        length=True,
    ),
    "log_every_steps": Key(10, "windows between two lines of metrics", low=1, free=True),
    "compile_cache": Key("~/.cache/jaxtrain", "directory of JAX's compilation cache; empty: none", free=True),
    "data.name": Key("text", "which data; digits: scikit-learn's", choices=tuple(_MODELS)),
    "data.paths": Key(
        ("stdlib",), "files, globs or directories of UTF-8 text; stdlib: Python's own source", of=("text",)
    ),
    "data.held_out_fraction": Key(0.05, "of the documents or images, never trained on", low=1e-6, high=0.9),
    "data.skip_non_utf8": Key(False, "pass over files that are no UTF-8 instead of stopping", of=("text",)),
    "data.shuffle": Key(True, "a new order of the rows every epoch"),
    "data.micro_batch_size": Key(16, "rows of the GLOBAL micro-batch", low=1),
    "data.sequence_length": Key(256, "tokens a row", low=2, of=("text",)),
    "model.name": Key("transformer", "which model; mlp and resnet: of images", choices=sum(_MODELS.values(), ())),
    "model.layers": Key(4, "blocks; mlp: hidden layers; resnet: blocks a stage", low=1),
    "model.d_model": Key(128, "width of the residual stream; mlp: of each layer; resnet: of the first stage", low=1),
    "model.stages": Key(
        3, "of blocks, each half the size and twice the width of the one before", low=1, of=("resnet",)
    ),
    "model.running_stats": Key(
        "sequential",
        "BatchNorm's, moved by each micro-batch, or pooled: once a window by all its rows",
        choices=("sequential", "pooled"),
        of=("resnet",),
    ),
    "model.heads": Key(4, "query heads", low=1, of=("transformer",)),
    "model.kv_heads": Key(4, "key and value heads; divides heads", low=1, of=("transformer",)),
    "model.d_ff": Key(344, "width of the gated MLP", low=1, of=("transformer",)),
    "model.max_length": Key(256, "longest sequence, tokens", low=2, of=("transformer",)),
    "model.vocab_size": Key(0, "rows of the embedding; 0: the data's", low=0, of=("transformer",)),
    "model.dropout": Key(
        0.0,
        "probability on each residual branch; mlp: after each hidden layer",
        low=0.0,
        high=0.99,
        of=("transformer", "mlp"),
    ),
    "model.rope_theta": Key(10000.0, "base of the rotary frequencies", low=1.0, of=("transformer",)),
    "model.tied_embeddings": Key(False, "one table for input and output", of=("transformer",)),
    "model.remat": Key(
        "none",
        "what the backward pass recomputes",
        choices=("none", "attention", "dots", "full"),
        free=True,
        of=("transformer",),
    ),
    "model.attention": Key("xla", "attention implementation", choices=("xla", "cudnn"), free=True, of=("transformer",)),
    "model.scan_layers": Key(
        "auto",
        "compile one block and loop; auto: no on CPU with up to 16 blocks",
        choices=("auto", "yes", "no"),
        free=True,
        of=("transformer",),
    ),
    "accumulation.mechanism": Key(
        "multisteps", "how a window's gradients are summed", choices=("multisteps", "scan", "scan_deferred"), free=True
    ),
    "accumulation.k": Key(1, "micro-batches a window", low=1, high=2**20),
    "accumulation.warmup": Key(
        (), "batch-size warm-up: 100:1,300:2 takes 1 micro-batch a window until window 100, 2 until 300, then k"
    ),
    "optim.name": Key("adamw", "optimizer", choices=("adamw", "sgd", "lion", "adafactor", "muon")),
    "optim.learning_rate": Key(1e-3, "the schedule's peak", low=0.0, high=1e6),
    "optim.schedule": Key(
        "warmup_cosine",
        "its shape, in steps",
        choices=("constant", "linear", "warmup_cosine", "warmup_stable_decay", "inverse_sqrt"),
    ),
    "optim.schedule_steps": Key(
        0,
        "its horizon, warm-up included, a length as steps; 0: steps (constant, inverse_sqrt: none)",
        low=0,
        length=True,
    ),
    "optim.warmup_steps": Key(0, "steps of linear warm-up, a length as steps", low=0, length=True),
    "optim.decay_steps": Key(
        0,
        "the last steps, that fall, a length as steps; 0: a fifth of the horizon",
        low=0,
        length=True,
        of=("warmup_stable_decay",),
    ),
    "optim.end_learning_rate": Key(0.0, "at the horizon", low=0.0),
    "optim.b1": Key(0.9, "decay of the first moment", low=0.0, high=1 - 1e-6, of=("adamw", "lion", "muon")),
    "optim.b2": Key(0.95, "decay of the second moment", low=0.0, high=1 - 1e-6, of=("adamw", "lion", "muon")),
    "optim.eps": Key(1e-8, "added to the root of the second moment", low=1e-38, of=("adamw", "muon")),
    "optim.weight_decay": Key(0.0, "decoupled, times the rate; not on biases and norm scales; not with sgd", low=0.0),
    "optim.momentum": Key(0.0, "of the gradients; muon: 0 means 0.95", low=0.0, high=1 - 1e-6, of=("sgd", "muon")),
    "optim.clip_norm": Key(1.0, "bound of the global gradient norm; 0: none", low=0.0),
    "optim.ema": Key(
        0.0, "decay, in steps, of a parameter average that is evaluated and sampled; 0: none", low=0.0, high=1 - 1e-6
    ),
    "loss.vocab_chunks": Key(
        1, "parts of the vocabulary, of which one stands as logits at a time", low=1, free=True, of=("text",)
    ),
    "loss.z": Key(0.0, "factor of log(Z)^2, in training", low=0.0, high=1.0, of=("text",)),
    "loss.label_smoothing": Key(0.0, "share of a target spread over the vocabulary, in training", low=0.0, high=0.99),
    "precision.compute": Key(
        "bfloat16", "compute dtype; masters are float32", choices=("bfloat16", "float32", "float16")
    ),
    "precision.overrides": Key((), "patterns of parameters that stay float32 in compute: router/,head/"),
    "precision.loss_scale": Key(
        2.0**15, "of a new run; a power of two keeps it exact", low=1.0, high=2.0**24, of=("float16",)
    ),
    "precision.dynamic": Key(True, "the loss scale doubles after good windows and halves after bad", of=("float16",)),
    "precision.growth_windows": Key(2000, "good windows in a row before it doubles", low=1, of=("float16",)),
    "nonfinite.skip": Key("window", "what a non-finite micro-gradient leaves out", choices=("window", "micro")),
    "nonfinite.max_consecutive": Key(50, "skipped windows in a row before the run stops", low=0, free=True),
    "mesh.slice": Key(1, "groups of devices joined by DCN", low=-1, free=True),
    "mesh.data": Key(1, "replicas", low=-1, free=True),
    "mesh.fsdp": Key(-1, "shards of the parameters; -1: all devices left", low=-1, free=True),
    "mesh.tensor": Key(1, "shards of each layer", low=-1, free=True),
    "init_from": Key(
        "", "parameters of a new run: a checkpoint, or a directory of them, whose newest is taken; empty: random"
    ),
    "checkpoint.directory": Key("", "where checkpoints lie: a path or gs://BUCKET/PATH; empty: in the workdir"),
    "checkpoint.every_steps": Key(100, "windows between two checkpoints; 0: only at the end", low=0, free=True),
    "checkpoint.every_s": Key(
        0.0, "seconds between two checkpoints, beside every_steps; 0: not timed", low=0.0, free=True
    ),
    "checkpoint.auto": Key(
        False, "instead of both: the interval that loses least, from what saves and failures cost", free=True
    ),
    "checkpoint.failures_per_day": Key(
        0.0, "expected, for auto; 0: learned from this run's own restarts", low=0.0, high=1e5, free=True
    ),
    "checkpoint.timeout_s": Key(300.0, "a save that takes longer has failed", low=1.0, high=86400.0, free=True),
    "checkpoint.max_failures": Key(3, "failed saves in a row before the run stops", low=1, free=True),
    "checkpoint.keep_last": Key(3, "how many of the newest are kept", low=1, free=True),
    "checkpoint.keep_every_steps": Key(0, "keeps every checkpoint at a multiple of this; 0: none", low=0, free=True),
    "checkpoint.keep_best": Key(
        0, "how many of the best are kept, too, of those evaluated when saved", low=0, free=True
    ),
    "eval.every_steps": Key(100, "windows between two evaluations; 0: only at the end", low=0, free=True),
    "eval.rows": Key(0, "held-out rows of an evaluation; 0: all", low=0, free=True),
    "sample.tokens": Key(400, "length of the sample at the end; 0: none", low=0, free=True, of=("text",)),
    "sample.prompt": Key("def ", "what it begins with", free=True, of=("text",)),
    "sample.temperature": Key(0.8, "0: always the likeliest token", low=0.0, free=True, of=("text",)),
}


def default() -> ConfigDict:
    """All keys with their defaults, typed and locked: where a config file begins."""
    config = ConfigDict()
    for name, key in KEYS.items():
        *groups, last = name.split(".")
        node = config
        for group in groups:
            if group not in node:
                node[group] = ConfigDict()
            node = node[group]
        node[last] = FieldReference(key.default, field_type=object) if key.length else key.default
    return config.lock()


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"optim.learning_rate": 1e-3, ...}`` of a nested mapping, in its order."""
    items: dict[str, Any] = {}
    for name in config:
        value = config[name]
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping | ConfigDict) else {prefix + name: value}
    return items


def assign(config: ConfigDict, name: str, value: Any) -> None:
    """Set one key by its dotted name; raises ConfigError for an unknown one. ``resolve`` checks the value."""
    _known(name)
    *groups, last = name.split(".")
    for group in groups:
        config = config[group]
    with config.ignore_type():
        config[last] = value


def override(config: ConfigDict, overrides: Mapping[str, str]) -> ConfigDict:
    """A copy with values given as text, as on the command line.

    Args:
        overrides: dotted name -> text; a tuple is written with commas, a bool as true or false.

    Raises:
        ConfigError: an unknown key (with the nearest) or a text that is no value of the key's type.
    """
    config = config.copy_and_resolve_references()
    for name, text in overrides.items():
        _known(name)
        assign(config, name, _parse(name, text))
    return config


def resolve(config: ConfigDict) -> ConfigDict:
    """A checked, completed, frozen copy: every key present, of its type, within bounds, derived ones filled in.

    Raises:
        ConfigError: the first thing that is wrong, with key, value and remedy.
    """
    values = flat(config)
    for name in values:
        _known(name)
    missing = [name for name in KEYS if name not in values]
    if missing:
        raise ConfigError(f"config: {', '.join(missing)} missing; start from jaxtrain.config.default().")
    resolved = default()
    for name in KEYS:
        assign(resolved, name, _checked(name, values[name]))
    if resolved.optim.schedule_steps == 0 and resolved.optim.schedule not in _ENDLESS:
        resolved.optim.schedule_steps = resolved.steps
    for check in _CROSS_CHECKS:
        check(resolved)
    return resolved.lock()


def counts_epochs(config: ConfigDict) -> bool:
    """Whether a length of a resolved config is in epochs, so that ``in_steps`` needs the size of the data."""
    given = flat(config)
    texts = (given[name] for name, key in KEYS.items() if key.length and isinstance(given[name], str))
    return any(parse_length(text)[1] == "epochs" for text in texts)


def in_steps(config: ConfigDict, batching: Batching) -> ConfigDict:
    """``config`` (resolved) with every length in windows, counted from the first (``decay_steps``: from the last).

    Raises:
        ConfigError: a length that is less than a window, or one in epochs where the batching knows no data.
    """
    given = flat(config)
    converted = config.copy_and_resolve_references()
    for name, key in KEYS.items():
        if key.length and isinstance(given[name], str):
            at_the_end = dataclasses.replace(batching, warmup=())
            try:
                assign(converted, name, (at_the_end if name == "optim.decay_steps" else batching).windows(given[name]))
            except ValueError as error:
                raise ConfigError(f"config: {name}={error}") from None
    return resolve(converted)


def warmup_stages(config: ConfigDict) -> tuple[tuple[int, int], ...]:
    """``accumulation.warmup`` of a resolved config: pairs (until which window, micro-batches a window)."""
    return tuple((int(until), int(k)) for until, k in (stage.split(":") for stage in config.accumulation.warmup))


def drift(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Keys that make ``new`` another experiment than ``old`` (both resolved): ``"optim.b1: 0.9 -> 0.8"``."""
    before, after = flat(old), flat(new)
    lines = []
    for name, key in KEYS.items():
        was, now = before.get(name, key.default), after.get(name, key.default)
        was, now = (tuple(x) if isinstance(x, list) else x for x in (was, now))
        if was != now and not key.free:
            lines.append(f"{name}: {was} -> {now}")
    return lines


def allowed(text: str) -> frozenset[str]:
    """``--allow``'s list: keys whose change makes another experiment, ``data`` and ``dtype``.

    Raises:
        ConfigError: something else, or a key that may change anyway.
    """
    names = frozenset(name for name in text.split(",") if name)
    for name in names - {"data", "dtype"}:
        _known(name)
        if KEYS[name].free:
            raise ConfigError(f"--allow={name}: this key may change when a run goes on; leave it out.")
    return names


def refuse_drift(old: Mapping[str, Any], new: ConfigDict, where: str, allow: Collection[str] = ()) -> list[str]:
    """Raise ConfigError where ``new`` is another experiment than ``old``, found in ``where``; differences are listed.

    Returns:
        The differences that ``allow`` names, which are let pass.
    """
    lines = drift(old, new)
    refused = [line for line in lines if line.split(":")[0] not in allow]
    if refused:
        flag = ",".join(sorted({line.split(":")[0] for line in lines} | {*allow} - {"data", "dtype"}))
        raise ConfigError(
            f"{where} holds another experiment:\n  " + "\n  ".join(refused) + "\nuse another --workdir, or put these "
            "values back; what a run may change in mid-course is marked in: jaxtrain config show\nif the change is "
            f"meant, go on with --allow={flag}" + about_the_horizon(old, new)
        )
    return lines


def about_the_horizon(old: Mapping[str, Any], new: ConfigDict) -> str:
    """A line of advice where ``new`` is ``old`` (both resolved) with another horizon and nothing else; or nothing.

    The schedule follows ``steps`` where it is not told otherwise: to raise them alone makes another experiment.
    """
    horizon = old["optim"]["schedule_steps"]
    if len(drift(old, new)) != 1 or new.optim.schedule_steps in (horizon, 0) or new.optim.schedule_steps != new.steps:
        return ""
    if new.steps > horizon and new.optim.end_learning_rate == 0:
        return f"\nthis run's rate is 0 after step {horizon}: to train longer, begin anew in another --workdir"
    return f"\nto go to step {new.steps} on this run's own schedule, add --config.optim.schedule_steps={horizon}"


def _known(name: str) -> None:
    if name in KEYS:
        return
    last = [key for key in KEYS if key.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    near = last or difflib.get_close_matches(name, KEYS, n=1, cutoff=0.7)
    group = [key for key in KEYS if "." in name and key.startswith(name.split(".")[0] + ".")]
    hint = "see them all with: jaxtrain config show"
    if near:
        hint = f"did you mean {near[0]}?"
    elif group:
        hint = f"there are {', '.join(group)}."
    raise ConfigError(f"config: unknown key {name}; {hint}")


def _parse(name: str, text: str) -> Any:
    kind = type(KEYS[name].default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind is tuple:
            return tuple(part for part in text.split(",") if part)
        if kind is int and float(text) == int(float(text)) and "." not in text:
            return int(float(text)) if "e" in text.lower() else int(text)
        return kind(text)
    except (ValueError, KeyError, OverflowError):
        if KEYS[name].length:
            return _checked(name, text)
        raise ConfigError(f"config: {name}={text!r} is not {_kind(name)}: {KEYS[name].help}.") from None


def _checked(name: str, value: Any) -> Any:
    key = KEYS[name]
    kind = type(key.default)
    if key.length and isinstance(value, str):
        try:
            parse_length(value)
        except ValueError as error:
            raise ConfigError(f"config: {name}={error}") from None
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is tuple and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        value = tuple(value)
    if type(value) is not kind or (kind is tuple and not all(isinstance(part, str) for part in value)):
        raise ConfigError(f"config: {name}={value!r} is {type(value).__name__}, not {_kind(name)}: {key.help}.")
    if key.choices and value not in key.choices:
        near = difflib.get_close_matches(value, key.choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"config: {name}={value!r} is not one of {', '.join(key.choices)}{hint}")
    if kind in (int, float) and not (key.low <= value <= key.high and math.isfinite(value)):
        raise ConfigError(f"config: {name}={value} is outside {_bounds(key)}: {key.help}.")
    return value


def _kind(name: str) -> str:
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return kinds.get(type(KEYS[name].default), "a list of texts, with commas")


def _bounds(key: Key) -> str:
    return f"{key.low:.10g} or more" if key.high == math.inf else f"{key.low:.10g} .. {key.high:.10g}"


def _model_suits_the_data(c: ConfigDict) -> None:
    suits = _MODELS[c.data.name]
    if c.model.name not in suits:
        raise ConfigError(
            f"config: model.name={c.model.name} does not read data.name={c.data.name}; choose {' or '.join(suits)}."
        )


def _every_key_is_read(c: ConfigDict) -> None:
    given = flat(c)
    for name, value in given.items():
        key = KEYS[name]
        if key.of and value != key.default and not {given[choice] for choice in _CHOOSE} & {*key.of}:
            choice = next(choice for choice in _CHOOSE if key.of[0] in KEYS[choice].choices)
            raise ConfigError(
                f"config: {name}={value} would do nothing with {choice}={given[choice]}, only with "
                f"{' and '.join(key.of)}; leave it at {key.default!r}."
            )


def _sequence_fits(c: ConfigDict) -> None:
    if c.data.sequence_length > c.model.max_length:
        raise ConfigError(
            f"config: data.sequence_length={c.data.sequence_length} is longer than model.max_length="
            f"{c.model.max_length}; shorten the one or raise the other."
        )


_ENDLESS = ("constant", "inverse_sqrt")  # schedules that have no horizon


def _schedule_fits(c: ConfigDict) -> None:
    lengths = (c.steps, c.optim.schedule_steps, c.optim.warmup_steps, c.optim.decay_steps)
    if any(isinstance(length, str) for length in lengths):  # checked again when they are counted, see in_steps
        return
    horizon = c.optim.schedule_steps or c.steps
    if c.optim.warmup_steps >= horizon:
        raise ConfigError(
            f"config: optim.warmup_steps={c.optim.warmup_steps} must be less than the horizon of {horizon} "
            f"steps; give --config.optim.warmup_steps={horizon // 10} or more steps."
        )
    if c.optim.schedule not in _ENDLESS and horizon < c.steps and c.optim.end_learning_rate == 0:
        raise ConfigError(
            f"config: the schedule reaches 0 after optim.schedule_steps={horizon} and the run goes on to "
            f"steps={c.steps}; raise the horizon, or give an optim.end_learning_rate to go on with."
        )


def _one_free_axis(c: ConfigDict) -> None:
    sizes = dict(c.mesh)
    if any(size == 0 for size in sizes.values()) or sum(size == -1 for size in sizes.values()) > 1:
        text = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(f"config: {text}: sizes are 1 or more, and at most one is -1 (all devices left).")


def _prompt_fits(c: ConfigDict) -> None:
    room = c.model.max_length - 2  # the document's start before the prompt, one new token behind it
    try:
        size = len(c.sample.prompt.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"config: sample.prompt={c.sample.prompt!r} is no text ({error.reason}).") from None
    if c.sample.tokens and size > room:
        raise ConfigError(
            f"config: sample.prompt has {size} bytes; with model.max_length="
            f"{c.model.max_length} there is room for {room}; shorten it, or set sample.tokens=0."
        )


def _warm_up_rises(c: ConfigDict) -> None:
    if not c.accumulation.warmup:
        return
    shown = ",".join(c.accumulation.warmup)
    try:
        found = warmup_stages(c)
    except ValueError:
        raise ConfigError(
            f"config: accumulation.warmup={shown} is no list of WINDOW:K; 100:1,300:2 takes 1 micro-batch a window "
            "until window 100 and 2 until window 300."
        ) from None
    windows, sizes = [until for until, _ in found], [k for _, k in found]
    rising = sorted({*windows, 0}) == [0, *windows] and windows[-1] < 2**31
    if not rising or not all(1 <= k <= 2**20 for k in sizes):
        raise ConfigError(
            f"config: accumulation.warmup={shown}: windows rise from stage to stage, up to {2**31 - 1}, and each takes "
            f"1 to {2**20} micro-batches."
        )
    if c.accumulation.mechanism != "multisteps":
        raise ConfigError(
            f"config: accumulation.warmup={shown} needs accumulation.mechanism=multisteps: {c.accumulation.mechanism} "
            "compiles a window of one length."
        )


def _one_cadence(c: ConfigDict) -> None:
    if c.checkpoint.auto and c.checkpoint.every_s:
        raise ConfigError(
            f"config: checkpoint.auto chooses the interval, and checkpoint.every_s={c.checkpoint.every_s:g} fixes it; "
            "leave one out."
        )
    if c.checkpoint.failures_per_day and not c.checkpoint.auto:
        raise ConfigError(
            f"config: checkpoint.failures_per_day={c.checkpoint.failures_per_day:g} would do nothing without "
            "checkpoint.auto=true."
        )


def _attention_computes(c: ConfigDict) -> None:
    if c.model.attention == "cudnn" and c.precision.compute == "float32":
        raise ConfigError(
            "config: model.attention=cudnn computes in bfloat16 or float16 and precision.compute=float32; change one."
        )


_CROSS_CHECKS: Sequence[Callable[[ConfigDict], None]] = (
    _model_suits_the_data, _every_key_is_read, _sequence_fits, _schedule_fits, _one_free_axis, _prompt_fits,
    _attention_computes, _warm_up_rises, _one_cadence,
)  # fmt: skip
