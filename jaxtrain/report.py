"""What a person gets when a run has finished: numbers beside simple models, a picture, a sample, what to do next."""

import pathlib
import shlex
import sys
from typing import TextIO

import jax

from jaxtrain import metrics, plot, rng
from jaxtrain.assemble import Experiment
from jaxtrain.data import ngram, text
from jaxtrain.loop import Outcome
from jaxtrain.models.sampling import sample
from jaxtrain.state import TrainState


def finish(experiment: Experiment, workdir: pathlib.Path, outcome: Outcome, stream: TextIO | None = None) -> None:
    """Draw ``loss.png`` and print the end of a run.

    Args:
        workdir: the run's directory, with its ``metrics.jsonl``. stream: stdout by default.
    """
    say = lambda line="": print(line, file=stream or sys.stdout, flush=True)  # noqa: E731
    corpus, config = experiment.corpus, experiment.config
    bits = {
        "this model": outcome.evaluation["eval/bits_per_byte"],
        "bigram model": ngram.bigram_bits_per_byte(corpus.train, corpus.held_out),
        "unigram model": ngram.unigram_bits_per_byte(corpus.train, corpus.held_out),
    }
    baselines = {name: value for name, value in bits.items() if name != "this model"}
    picture = workdir / "loss.png"
    title = f"{config.model.name}, {outcome.step:,} steps"
    plot.loss_curve(metrics.read_jsonl(workdir / "metrics.jsonl"), picture, baselines, title)
    rows = f"{len(experiment.held_out.source):,} held-out rows"
    say(f"\nbits per byte on {rows} (lower is better):")
    width = max(map(len, bits))
    for name, value in bits.items():
        say(f"  {name:<{width}}  {value:.3f}")
    say(f"\nloss curve   {picture}\ncheckpoints  {workdir / 'checkpoints'}\ngoodput      {workdir / 'goodput.json'}")
    c = config.sample
    if c.tokens:
        shown = sample_text(experiment, outcome.state, c.prompt, c.tokens, c.temperature, config.seed)
        say(f"\na sample of {c.tokens} tokens:\n" + "\n".join("  | " + line for line in shown.splitlines()))
    say(f"\nnext: jaxtrain sample --workdir={shlex.quote(str(workdir))} --prompt='class '")


def sample_text(
    experiment: Experiment, state: TrainState, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """``prompt`` and what the model makes of it, up to ``tokens`` more bytes or the end of the document.

    Raises:
        ValueError: prompt and tokens are longer than the model's ``max_length``.
    """
    view = experiment.program.view(state, copy=False, ema=state.ema is not None)
    module = experiment.module(view.params, view.model_state)
    ids = [text.DOCUMENT_START, *prompt.encode()]
    key = rng.key(seed, "sample")
    longest = experiment.config.model.max_length - len(ids)
    new = sample(module, ids, max_new_tokens=min(tokens, max(longest, 1)), key=key, temperature=temperature)
    made = jax.device_get(new)[len(ids) :].tolist()
    end = next((i for i, token in enumerate(made) if token >= text.DOCUMENT_START), len(made))
    return prompt + bytes(made[:end]).decode(errors="replace")
