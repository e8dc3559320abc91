"""What a person gets when a run has finished: numbers beside simple models, a picture, a sample, what to do next."""

import functools
import pathlib
import shlex
import unicodedata
from typing import TextIO

import jax

from jaxtrain import metrics, plot, progress, rng
from jaxtrain.assemble import Experiment
from jaxtrain.data import text
from jaxtrain.loop import Outcome
from jaxtrain.models.sampling import sample
from jaxtrain.state import View


def finish(
    experiment: Experiment,
    workdir: pathlib.Path,
    outcome: Outcome,
    stream: TextIO | None = None,
    command: str = "jaxtrain",
) -> None:
    """Draw ``loss.png`` and print the end of a run.

    Args:
        workdir: the run's directory, with its ``metrics.jsonl``. stream: stdout by default.
        command: how the user calls ``jaxtrain``.
    """
    say = functools.partial(progress.say, stream=stream)
    config, score = experiment.config, experiment.task.score
    baselines = experiment.data.baselines()
    scores = {"this model": outcome.evaluation[f"eval/{score.name}"], **baselines}
    picture = workdir / "loss.png"
    title = f"{config.model.name}, {outcome.step:,} steps"
    records = metrics.read_jsonl(workdir / "metrics.jsonl")
    plot.loss_curve(records, picture, baselines, title, score.name, score.title, score.per_nat)
    rows = f"{len(experiment.held_out.source):,} held-out rows"
    if config.eval.rows:
        rows += ", spread over the held-out data; the simple models on all of it"
    say(f"\n{score.title} on {rows} ({score.better} is better):")
    width = max(map(len, scores))
    for name, value in scores.items():
        say(f"  {name:<{width}}  {value:.3f}")
    checkpoints = config.checkpoint.directory or workdir / "checkpoints"
    say(f"\nloss curve   {picture}\ncheckpoints  {checkpoints}\ngoodput      {workdir / 'goodput.json'}")
    again = f"--workdir={shlex.quote(str(workdir))}"
    if not experiment.task.continues:
        say(f"\nnext: {command} eval {again}")
        return
    c = config.sample
    if c.tokens:
        tokens = min(c.tokens, room(experiment, c.prompt))
        view = experiment.program.view(outcome.state, copy=False, ema=experiment.program.has_ema)
        shown = sample_text(experiment, view, c.prompt, c.tokens, c.temperature, config.seed)
        say(f"\na sample of up to {tokens} tokens:\n" + "\n".join("  | " + line for line in shown.split("\n")))
    say(f"\nnext: {command} sample {again} --prompt='class '")


def sample_text(experiment: Experiment, view: View, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """``prompt`` and what the model makes of it: up to ``tokens`` more bytes, as many as fit, or the document's end.

    Control characters and changes of the writing direction come as escapes: printing it cannot disturb a terminal.

    Raises:
        ValueError: the prompt alone fills the model's ``max_length``.
    """
    module = experiment.module(view.params, view.model_state)
    ids = [text.DOCUMENT_START, *prompt.encode()]
    key = rng.key(seed, "sample")
    fitting = min(tokens, max(room(experiment, prompt), 1))
    new = sample(module, ids, max_new_tokens=fitting, key=key, temperature=temperature)
    made = jax.device_get(new)[len(ids) :].tolist()
    end = next((i for i, token in enumerate(made) if token >= text.DOCUMENT_START), len(made))
    shown = prompt + bytes(made[:end]).decode(errors="replace")
    return "".join(c.encode("unicode_escape").decode() if _disturbs(c) else c for c in shown)


def _disturbs(character: str) -> bool:
    if character in "\n\t":
        return False
    embeddings_and_isolates = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    kind = unicodedata.category(character)
    return kind in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(character) in embeddings_and_isolates


def room(experiment: Experiment, prompt: str) -> int:
    """How many tokens fit behind a prompt."""
    return experiment.config.model.max_length - 1 - len(prompt.encode())
