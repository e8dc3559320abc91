"""jaxtrain/report.py: the end of a run on stdout, and a sample's bytes as text."""

import dataclasses
import io
import json
import math
import re
import types

import jax
import pytest

from jaxtrain import report
from jaxtrain.data import ngram
from jaxtrain.data.text import token_stream
from jaxtrain.tasks.task import Score

START = 256


@dataclasses.dataclass
class State:
    ema: object = None


class Experiment:
    """All that a report takes from one; the model makes up ``tokens``, whatever it is asked."""

    def __init__(self, monkeypatch, tokens=(), max_length=16, prompt="ab", wanted=8):
        namespace = types.SimpleNamespace
        self.tokens, self.asked, self.views = list(tokens), [], []
        self.config = namespace(
            seed=5, model=namespace(name="transformer", max_length=max_length),
            eval=namespace(rows=0), checkpoint=namespace(directory=""),
            sample=namespace(prompt=prompt, tokens=wanted, temperature=0.5),
        )  # fmt: skip
        self.program = namespace(view=self.view, has_ema=False)
        train, held_out = token_stream([b"aab" * 50]), token_stream([b"aab" * 4])
        self.task = namespace(
            score=Score("bits_per_byte", "bits per byte", "lower", per_nat=1 / math.log(2)), continues=True
        )
        self.data = namespace(
            baselines=lambda: {
                "bigram model": ngram.bigram_bits_per_byte(train, held_out),
                "unigram model": ngram.unigram_bits_per_byte(train, held_out),
            }
        )
        self.held_out = namespace(source=range(1234))
        monkeypatch.setattr(report, "sample", self.sample)

    def view(self, state, *, copy, ema):
        self.views.append((copy, ema))
        return VIEW

    def module(self, params, model_state):
        assert (params, model_state) == ("params", "model_state")
        return "module"

    def sample(self, module, prompt_tokens, *, max_new_tokens, key, temperature):
        assert module == "module"
        self.asked.append((list(prompt_tokens), max_new_tokens, key, temperature))
        return jax.numpy.asarray([*prompt_tokens, *self.tokens[:max_new_tokens]], "int32")


VIEW = types.SimpleNamespace(params="params", model_state="model_state")


def text(experiment, prompt="ab", tokens=8, seed=5):
    return report.sample_text(experiment, VIEW, prompt, tokens, 0.5, seed)


def test_a_sample_is_the_prompt_and_what_follows(monkeypatch):
    experiment = Experiment(monkeypatch, b"cdefghijklmnop")
    assert text(experiment) == "abcdefghij"
    ((ids, new, _, temperature),) = experiment.asked
    assert (ids, new, temperature) == ([START, 97, 98], 8, 0.5)


def test_a_sample_ends_where_the_document_does(monkeypatch):
    assert text(Experiment(monkeypatch, [99, START, 100])) == "abc"
    assert text(Experiment(monkeypatch, [99, 319, 100])) == "abc"  # an id that no text has
    assert text(Experiment(monkeypatch, [START])) == "ab"


def test_a_sample_is_text_whatever_the_bytes(monkeypatch):
    assert text(Experiment(monkeypatch, "é€".encode()), tokens=5) == "abé€"
    assert text(Experiment(monkeypatch, [0xC3, 0x28, 0xFF]), tokens=3) == "ab\ufffd(\ufffd"
    assert text(Experiment(monkeypatch, [0xA9]), prompt="\u00e9", tokens=1) == "\u00e9\ufffd"


def test_a_prompt_counts_in_bytes(monkeypatch):
    """The longest text is 16 tokens: a start, 9 bytes of prompt, 6 more."""
    experiment = Experiment(monkeypatch, b"x" * 16)
    assert text(experiment, prompt="€€€", tokens=400) == "€€€xxxxxx"
    assert experiment.asked[0][1] == 6


@pytest.mark.parametrize("has_ema", [False, True])
def test_the_average_is_what_samples(monkeypatch, tmp_path, has_ema):
    experiment = Experiment(monkeypatch, b"x" * 8)
    experiment.program.has_ema = has_ema
    finished(experiment, tmp_path / "run")
    assert experiment.views == [(False, has_ema)]


def test_a_seed_is_a_key(monkeypatch):
    experiment = Experiment(monkeypatch, b"x" * 8)
    for seed in (5, 5, 6):
        text(experiment, seed=seed)
    keys = [jax.random.key_data(asked[2]).tolist() for asked in experiment.asked]
    assert keys[0] == keys[1] != keys[2]


def finished(experiment, workdir, step=20):
    workdir.mkdir(exist_ok=True)
    lines = [
        {"step": 10, "loss": 2.0},
        {"step": 20, "loss": 1.0},
        {"step": 20, "eval/loss": 1.1, "eval/bits_per_byte": 1.587},
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = types.SimpleNamespace(state=State(), step=step, evaluation={"eval/bits_per_byte": 1.587})
    stream = io.StringIO()
    report.finish(experiment, workdir, outcome, stream)
    return stream.getvalue()


def test_the_end_of_a_run(monkeypatch, tmp_path):
    out = finished(Experiment(monkeypatch, b"c\nd" + b"x" * 9), tmp_path / "a run")
    assert "bits per byte on 1,234 held-out rows (lower is better):" in out
    numbers = dict(re.findall(r"^  (\w+ model) +(\d\.\d{3})$", out, re.M))
    assert list(numbers) == ["this model", "bigram model", "unigram model"]
    unigram = -(8 * math.log2((100 + 1) / (150 + 256)) + 4 * math.log2((50 + 1) / (150 + 256))) / 12
    assert float(numbers["unigram model"]) == pytest.approx(unigram, abs=5e-4)
    assert numbers["this model"] == "1.587"
    for name in ("loss.png", "checkpoints", "goodput.json"):
        assert str(tmp_path / "a run" / name) in out
    assert (tmp_path / "a run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a sample of up to 8 tokens:\n  | abc\n  | dxxxxx\n" in out
    assert out.rstrip().splitlines()[-1] == f"next: jaxtrain sample --workdir='{tmp_path / 'a run'}' --prompt='class '"


def test_no_sample_where_none_is_wanted(monkeypatch, tmp_path):
    experiment = Experiment(monkeypatch, wanted=0)
    out = finished(experiment, tmp_path / "run")
    assert "sample of" not in out
    assert experiment.asked == []
    assert "next: jaxtrain sample" in out


def test_a_sample_is_called_no_longer_than_it_is(monkeypatch, tmp_path):
    """13 of the 400 wanted fit into the model."""
    out = finished(Experiment(monkeypatch, b"x" * 99, wanted=400), tmp_path / "run")
    assert f"  | ab{'x' * 13}\n" in out
    assert "400 tokens" not in out


def test_a_sample_cannot_write_to_the_terminal(monkeypatch, tmp_path):
    """An untrained model says escape sequences as readily as letters: they are shown, not sent."""
    out = finished(Experiment(monkeypatch, b"\x1b[2J\x07\x00\r"), tmp_path / "run")
    assert not {"\x1b", "\x07", "\x00", "\r"} & set(out)
    for disturbing in ("\x85", "\u2028", "\u202e", "\u2066"):  # C1, a line separator, changes of direction
        assert text(Experiment(monkeypatch, disturbing.encode())) == "ab" + disturbing.encode("unicode_escape").decode()


def test_a_sample_shows_what_people_write(monkeypatch):
    """No-break and ideographic spaces, a soft hyphen, an emoji family with its joiners, Arabic letters."""
    for written in ("a\u00a0b", "\u3000", "\u00ad", "\U0001f468\u200d\U0001f469", "\u0633\u0644"):
        made = text(Experiment(monkeypatch, written.encode()), tokens=len(written.encode()))
        assert made == "ab" + written
