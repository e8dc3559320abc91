"""The command line: parse, call, print.

Exit codes: 0 done; 1 a checkpoint that was looked at is damaged; 2 bad input, told in a sentence (with
JAXTRAIN_DEBUG=1 in the environment: with its trace back); 70 an exception; 75 stopped by SIGTERM or Ctrl-C, what was
finished is saved and the same line goes on; 130 interrupted at once by Ctrl-C.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import pathlib
import shlex
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxtrain import checkpoint_commands
from jaxtrain import config as config_lib
from jaxtrain.config import ConfigError
from jaxtrain.preemption import Preemption
from jaxtrain.progress import say
from jaxtrain.workdir import Workdir, read_config

DONE, BAD_INPUT, FAILED, STOPPED, INTERRUPTED = 0, 2, 70, 75, 130
_FLAG = "--config."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``argv`` without the program's name; ``sys.argv`` by default."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser, arguments = _parser(), None
    try:
        overrides, rest = _split(argv)
        arguments, unknown = parser.parse_known_args(rest)
        if unknown:
            raise ConfigError(_unknown(unknown[0], rest[0]))
        arguments.line = shlex.join([_command(), *argv])
        with _plain_warnings():
            return arguments.run(arguments, overrides)
    except ConfigError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return BAD_INPUT
    except _Terminated:
        print(f"jaxtrain: SIGTERM: stopped. Go on with the same line:\n  {arguments.line}", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("jaxtrain: interrupted; what the newest checkpoint holds is safe.", file=sys.stderr)
        if arguments is not None and arguments.run is _train:
            print(f"Go on with the same line:\n  {arguments.line}", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings are sentences for the user: shown without the line of code they come from."""
    former = warnings.showwarning

    def show(message: Any, category: type[Warning], filename: str, *rest: Any) -> None:
        if category is UserWarning and f"{os.sep}jaxtrain{os.sep}" in filename:
            print(f"jaxtrain: {message}", file=sys.stderr)
        else:
            former(message, category, filename, *rest)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = former


class _Terminated(BaseException):
    """SIGTERM outside of the loop, which has its own way to stop: while a run starts, or draws its end."""


@contextlib.contextmanager
def _terminable(preemption: Preemption) -> Iterator[None]:
    def terminate(number: int, frame: Any) -> None:
        preemption.request("SIGTERM")  # Python drops what is raised in a destructor or a callback of the collector
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # Python allows no handlers there
        yield
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)


def _command() -> str:
    """How this program was called, so that a line we print can be pasted: ``.venv/bin/jaxtrain`` or ``jaxtrain``."""
    called = sys.argv[0]
    on_path = shutil.which("jaxtrain")
    if os.path.basename(called) != "jaxtrain" or (on_path and os.path.realpath(on_path) == os.path.realpath(called)):
        return "jaxtrain"
    return called


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxtrain", description="Train models, and look at what came of it.")
    parser.add_argument("--version", action="version", version=f"jaxtrain {importlib.metadata.version('jaxtrain')}")
    commands = parser.add_subparsers(required=True, metavar="train|eval|sample|ckpt|config|version")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "Train, from the newest checkpoint in the workdir if there is one.")
    train.epilog = "Any key is overridden with --config.a.b=value; jaxtrain config show lists them."
    train.add_argument("--config", required=True, metavar="FILE[:ARG]", help="a file with get_config(arg)")
    train.add_argument("--workdir", required=True, metavar="DIR", help="the run's directory, made if need be")
    train.add_argument(
        "--allow", default="", metavar="WHAT,...",
        help="go on although these differ from what was saved: config keys, data (other data), dtype (casts arrays)",
    )  # fmt: skip
    evaluation = command("eval", _eval, "Evaluate a checkpoint on the held-out data.")
    sample = command("sample", _sample, "Generate text from a checkpoint of a language model.")
    for sub in (evaluation, sample):
        sub.add_argument("--workdir", required=True, metavar="DIR", help="the directory of a run")
        sub.add_argument("--step", type=int, help="which checkpoint; by default the newest verified one")
    evaluation.add_argument("--json", action="store_true", help="as JSON")
    sample.add_argument("--prompt", help="what the text begins with; by default the config's sample.prompt")
    sample.add_argument("--tokens", type=int, help="how many to generate; by default the config's sample.tokens")
    sample.add_argument("--temperature", type=float, help="0: always the likeliest")
    sample.add_argument("--seed", type=int, default=0, help="another seed draws another text")
    checkpoint_commands.add(commands)
    show = command("config", _show, "Print a config with all overrides applied: jaxtrain config show --config=FILE")
    show.add_argument("action", nargs="?", default="show", choices=["show"])
    show.add_argument("--config", metavar="FILE[:ARG]", help="without it: the defaults")
    show.add_argument("--json", action="store_true", help="as JSON")
    command("version", _version, "Print the versions that results depend on.")
    return parser


def _unknown(word: str, command: str) -> str:
    name = word.lstrip("-").partition("=")[0]
    near = [key for key in config_lib.KEYS if key == name or key.endswith("." + name)]
    hint = f"a config key is given as --config.{near[0]}=VALUE" if near else f"see: jaxtrain {command} --help"
    return f"unknown option {word}; {hint}."


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take ``--config.a.b=v`` and ``--config.a.b v`` out of the arguments."""
    overrides: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(_FLAG):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(_FLAG).partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"config: {word} has no value; write {word}=VALUE.")
        overrides[name] = value
    return overrides, rest


def load_config(spec: str | None, overrides: dict[str, str]) -> ConfigDict:
    """A config file (``path`` or ``path:arg``) with overrides, resolved.

    Raises:
        ConfigError: no such file, no ``get_config``, an unknown key or a bad value in it.
    """
    if spec is None:
        return config_lib.resolve(config_lib.override(config_lib.default(), overrides))
    name, _, argument = spec.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        beside = [str(p) for p in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), beside, n=1) or beside
        hint = f"; there is {', '.join(near)}" if near else ""
        raise ConfigError(f"config: {path} is no file{hint}.")
    module_spec = importlib.util.spec_from_file_location("jaxtrain_config_file", path)
    if module_spec is None:
        raise ConfigError(f"config: {path} is no Python file with get_config(arg); give one that ends in .py.")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError(f"config: {path} has no get_config(arg).")
        config = module.get_config(argument)
        if not isinstance(config, ConfigDict):
            raise ConfigError(f"config: {path}: get_config returned {type(config).__name__}; return the config.")
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's file does wrong is told with its line
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f", line {f.lineno}: {f.line}" for f in reversed(frames) if f.filename == str(path)), "")
        locked = isinstance(error, AttributeError | KeyError | TypeError)  # what a locked, typed ConfigDict raises
        text = str(error.args[0] if error.args and locked else error).replace("\\n", "\n").replace("\\'", "'")
        text = text if locked else f"{type(error).__name__}: {text}"
        reason = text.split("Other fields present")[0].split("Did you mean")[0].strip(" '\"\n")
        did_you_mean = text.partition("Did you mean")[2].partition("\n")[0]
        hint = f" Did you mean{did_you_mean.strip(chr(39) + chr(34))}" if did_you_mean else ""
        raise ConfigError(f"config: {path}{where}: {reason}{hint}") from error
    return config_lib.resolve(config_lib.override(config, overrides))


def _train(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    preemption = Preemption()
    with _terminable(preemption):
        config = load_config(arguments.config, overrides)
        _set_up_jax(config)
        experiment = _assembled(config)  # before the workdir is made: a refused command leaves nothing behind
        workdir = Workdir(arguments.workdir)
        try:
            allow = config_lib.allowed(arguments.allow)
            workdir.check(experiment.config, allow)
            return _train_in(workdir, experiment, arguments.line, preemption, allow)
        finally:
            workdir.close()


def _train_in(workdir: Workdir, experiment: Any, line: str, preemption: Preemption, allow: frozenset[str]) -> int:
    from jaxtrain import loop, report  # heavy: only commands that compute load jax
    from jaxtrain.checkpoint.errors import MismatchError, StuckError  # as above

    for text in experiment.describe():
        say(text)
    try:
        outcome = loop.train(experiment, workdir, preemption=preemption, allow=allow)
    except MismatchError as error:
        raise ConfigError(str(error)) from error
    except StuckError:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(FAILED)  # the interpreter would wait for the thread that is stuck
    if not outcome.finished:
        where = f"at step {outcome.step}, which is saved" if outcome.saved else "before a step was finished"
        say(f"{outcome.stopped_by}: stopped {where}. Go on with the same line:\n  {line}")
        return STOPPED
    report.finish(experiment, workdir.path, outcome, command=_command())
    return DONE


def _eval(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    experiment, view, run = _restored(arguments, overrides)
    from jaxtrain.evaluate import evaluate  # heavy: only commands that compute load jax

    counts = run["counts"]
    experiment.check_data(run["data"]["fingerprint"], counts["step"])
    result = evaluate(experiment.program, view, experiment.held_out)
    numbers = {name: value if math.isfinite(value) else None for name, value in result.items()}  # JSON has no NaN
    line = {"step": counts["step"], "micro_step": counts["micro_step"], **numbers}
    if arguments.json:
        say(json.dumps(line))
        return DONE
    width = max(map(len, line))
    for name, value in line.items():
        say(f"{name:<{width}}  {value:,.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    return DONE


def _sample(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    experiment, view, _ = _restored(arguments, overrides)
    from jaxtrain import report  # heavy: only commands that compute load jax

    if not experiment.task.continues:
        model, data = experiment.config.model.name, experiment.config.data.name
        raise ConfigError(
            f"{arguments.workdir} holds a {model} on {data}, which writes no text; see it with: jaxtrain eval."
        )
    c = experiment.config.sample
    prompt = c.prompt if arguments.prompt is None else arguments.prompt
    tokens = c.tokens if arguments.tokens is None else arguments.tokens
    temperature = c.temperature if arguments.temperature is None else arguments.temperature
    if tokens < 1:
        raise ConfigError(f"--tokens={tokens}: give 1 or more.")
    room = report.room(experiment, prompt)
    if 0 < room < tokens:
        length = experiment.config.model.max_length
        note = f"jaxtrain: {tokens} tokens do not fit: model.max_length={length} leaves {room} behind this prompt."
        print(note, file=sys.stderr)
    try:
        say(report.sample_text(experiment, view, prompt, tokens, temperature, arguments.seed))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return DONE


def _restored(arguments: argparse.Namespace, overrides: dict[str, str]) -> tuple[Any, Any, dict[str, Any]]:
    """The experiment of a workdir, what evaluation needs of a checkpoint, and what that says about its run."""
    from jaxtrain.assemble import checkpoints as checkpoints_of  # heavy: only commands that compute load jax
    from jaxtrain.checkpoint.errors import CheckpointError  # as above

    config = config_lib.resolve(config_lib.override(read_config(arguments.workdir), overrides))
    _set_up_jax(config)
    try:
        checkpoints = checkpoints_of(config, pathlib.Path(arguments.workdir).expanduser(), read_only=True)
        step = arguments.step if arguments.step is not None else checkpoints.latest_verified()
        if step is None or step not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            wanted = "no checkpoint that is whole" if step is None else f"no checkpoint {step}"
            raise ConfigError(f"{checkpoints.directory} has {wanted}; there is {there}.")
        experiment = _assembled(config)
        program = experiment.program
        return experiment, checkpoints.restore_view(program, step, ema=program.has_ema), checkpoints.run(step)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _assembled(config: ConfigDict) -> Any:
    from jaxtrain.assemble import assemble  # heavy: only commands that compute load jax

    try:
        return assemble(config)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("JAXTRAIN_DEBUG"):
            raise
        raise ConfigError(str(error)) from error


def _set_up_jax(config: ConfigDict) -> None:
    import jax  # heavy: only commands that compute load jax

    if not os.environ.get("JAXTRAIN_DEBUG"):
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's: what fails there is told by us, in a sentence

    if config.compile_cache:
        directory = config.compile_cache
        if "://" not in directory:  # an object store is JAX's to open
            directory = pathlib.Path(directory).expanduser().absolute()
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"config: compile_cache={directory} cannot be made: {error.strerror}; give another directory, or "
                    "--config.compile_cache= for none."
                ) from error
        elif directory.startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
            raise ConfigError(
                f"config: compile_cache={directory} needs gcsfs; install it with: pip install 'jaxtrain[gcs]'"
            )
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _show(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    config = load_config(arguments.config, overrides)
    if arguments.json:
        say(json.dumps(config.to_dict(), indent=2))
        return DONE
    values = config_lib.flat(config)
    rows = [(name, repr(values[name]), "*" if key.free else " ", key.help) for name, key in config_lib.KEYS.items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, value, free, text in rows:
        say(f"{name:<{widths[0]}}  {value:<{widths[1]}} {free} {text}")
    say("* may change when a run goes on")
    return DONE


def _version(arguments: argparse.Namespace, overrides: dict[str, str]) -> int:
    from jaxtrain.checkpoint.host_state import platform_fingerprint  # heavy: loads NumPy

    for name, value in platform_fingerprint().items():
        say(f"{name} {value}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
