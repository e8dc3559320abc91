"""A config becomes objects, with the numbers worked out by hand; what does not fit together is told in a sentence."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxtrain import assemble, config, sharding
from jaxtrain.config import ConfigError
from jaxtrain.data import text
from jaxtrain.precision import LossScale, Precision
from jaxtrain.step import Contribution
from jaxtrain.tasks import language

TINY = {
    "model.layers": 1, "model.d_model": 16, "model.heads": 2, "model.kv_heads": 1, "model.d_ff": 32,
    "model.max_length": 16, "data.sequence_length": 16, "data.micro_batch_size": 8, "precision.compute": "float32",
    "data.held_out_fraction": 0.3, "steps": 4, "optim.warmup_steps": 2, "optim.learning_rate": 0.1,
    "optim.end_learning_rate": 0.02,
}  # fmt: skip


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    """Eight documents of 100 bytes."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number}abcdefghi" * 10)
    return tmp_path


def build(path: Any, **changes: Any) -> assemble.Experiment:
    c = config.default()
    for name, value in {
        **TINY,
        "data.paths": (str(path),),
        **{k.replace("__", "."): v for k, v in changes.items()},
    }.items():
        config.assign(c, name, value)
    return assemble.assemble(config.resolve(c))


# ---- what is built -----------------------------------------------------------------------------------------------


def test_the_whole_experiment_has_the_numbers_of_its_config(texts):
    e = build(texts, accumulation__k=2, optim__ema=0.5, nonfinite__max_consecutive=7, nonfinite__skip="micro")
    # embedding and head 320 x 16, query and out 16 x 16, key and value 16 x 8, three of 16 x 32, three norms of 16
    parameters = 2 * 5120 + 2 * 256 + 2 * 128 + 3 * 512 + 3 * 16
    assert sum(x.size for x in jax.tree.leaves(e.program.abstract_state.params)) == parameters == 12592
    assert e.task.flops_per_row == 16 * (6 * (5120 + 512 + 256 + 1536) + 12 * 16 * 16)
    assert dict(e.program.mesh.shape) == {"slice": 1, "data": 1, "fsdp": 8, "tensor": 1}
    assert (e.program.accumulation.k, e.program.nonfinite.what, e.program.nonfinite.max_consecutive) == (2, "micro", 7)
    assert e.program.abstract_state.ema is not None
    train, held_out = e.data.train.stream.size, e.data.held_out.stream.size
    assert (train + held_out, held_out % 101) == (8 * 101, 0)
    assert len(e.batches.source) == -(-(train - 1) // 16)
    assert len(e.held_out.source) == -(-(held_out - 1) // 16)
    batch = next(e.batches.at(0))
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (struct.shape, struct.dtype) for name, struct in assemble.example_batch(e.config, e.program.mesh).items()
    }
    lines = "\n".join(e.describe())
    assert "12,592 parameters" in lines
    assert "8 rows x 16 tokens x 2 micro-batches = 256 tokens a step" in lines
    assert "fsdp=8" in lines
    assert e.data.fingerprint[:12] in lines


def test_a_step_uses_the_optimizer_and_schedule_of_the_config(texts):
    e = build(texts, mesh__fsdp=1)
    state, records = e.program.init(), []
    for step in range(4):
        before = jax.device_get(state.params)
        state, metrics = e.program.step(state, next(e.batches.at(8 * step)))
        records.append(metrics.to_host())
        moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), before, jax.device_get(state.params))
        # Adam's first updates are about the rate, for every parameter that has a gradient
        assert max(jax.tree.leaves(moved)) == pytest.approx(records[-1]["learning_rate"], rel=0.6, abs=1e-7)
    # warm-up 0, half, peak; half a cosine of two steps from 0.1 to 0.02
    np.testing.assert_allclose([r["learning_rate"] for r in records], [0, 0.05, 0.1, 0.06], rtol=1e-6)
    assert all(r["grad_norm_clipped"] == pytest.approx(min(r["grad_norm"], 1.0), rel=1e-5) for r in records)
    assert records[0]["loss"] == pytest.approx(np.log(320), rel=0.01)
    assert records[-1]["loss"] < records[0]["loss"]


def test_seed_precision_clipping_and_average_reach_the_program(texts, monkeypatch):
    given: dict[str, Any] = {}
    names = ("seed", "clip_norm", "ema", "precision")
    original = assemble.build_train_step
    monkeypatch.setattr(assemble, "build_train_step", lambda *a, **k: given.update(k) or original(*a, **k))
    first = build(texts)
    assert [given[name] for name in names] == [0, 1.0, None, Precision("float32")]
    other = build(texts, seed=1, optim__clip_norm=0.0, optim__ema=0.5, precision__compute="bfloat16")
    assert (given["seed"], given["clip_norm"], given["ema"], given["precision"]) == (
        1,
        None,
        0.5,
        Precision("bfloat16"),
    )
    assert first.batches.row_indices(0) != other.batches.row_indices(0)  # the shuffle has the seed too
    in_order = build(texts, data__shuffle=False).batches
    assert (in_order.row_indices(0), in_order.row_indices(8)) == ([*range(8)], [*range(8, 16)])


def test_the_precision_of_the_config_reaches_the_program(texts):
    keys = {"precision__compute": "float16", "precision__overrides": ("head/",), "precision__loss_scale": 64.0,
            "precision__dynamic": False, "precision__growth_windows": 7}  # fmt: skip
    assert assemble.precision(build(texts, **keys).config) == Precision(
        "float16", overrides=("head/",), loss_scale=LossScale(64.0, dynamic=False, growth_interval=7)
    )
    e = build(texts, **keys)
    assert float(e.program.init().scale.value) == 64.0
    with pytest.raises(ValueError, match="precision: overrides: 'haed/' chooses none of the 12 parameters"):
        build(texts, precision__overrides=("haed/",))


def test_sgd_without_clipping_and_average(texts):
    """Gradient sums of 3 over a weight of 2, rate 0.1: every parameter moves by -0.15."""
    e = build(texts, optim__name="sgd", optim__clip_norm=0.0, optim__schedule="constant", optim__warmup_steps=0,
              mesh__fsdp=1)  # fmt: skip
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), e.program.abstract_state)
    assert zeros.ema is None
    one, zero = jnp.float32(1), jnp.int32(0)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), zeros.params)
    state, metrics = e.program.apply(
        zeros, Contribution(grads, 2 * one, one, zeros.model_state, None, {}, 0 * one, zero, zero, zero)
    )
    assert {float(x) for leaf in jax.tree.leaves(state.params) for x in np.unique(leaf)} == {float(np.float32(-0.15))}
    record = metrics.to_host()
    assert record["grad_norm"] == record["grad_norm_clipped"] == pytest.approx(1.5 * np.sqrt(12592), rel=1e-5)
    assert record["loss"] == 0.5


def test_eval_rows_bounds_the_held_out_rows_and_module_is_the_model(texts):
    e = build(texts, eval__rows=3, precision__compute="bfloat16")
    assert (len(e.held_out.source), len(e.held_out)) == (3, 1)
    module = e.module(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), e.program.abstract_state.params))
    assert module.head.kernel.dtype == jnp.bfloat16
    logits = jax.eval_shape(lambda tokens: module(tokens), jnp.full((1, 5), text.DOCUMENT_START))
    assert (logits.shape, logits.dtype) == ((1, 5, 320), jnp.float32)


def test_devices_can_be_given(texts):
    c = config.default()
    for name, value in {**TINY, "data.paths": (str(texts),)}.items():
        config.assign(c, name, value)
    e = assemble.assemble(config.resolve(c), jax.devices()[2:4])
    assert [*e.program.mesh.devices.flat] == jax.devices()[2:4]


@pytest.mark.parametrize(
    ("layers", "scan", "platform", "wanted"),
    [(16, "auto", "cpu", False), (17, "auto", "cpu", True), (1, "auto", "abstract", True), (17, "no", "cpu", False),
     (1, "yes", "cpu", True), (1, "no", "abstract", False)],
)  # fmt: skip
def test_layers_are_scanned_unless_few_on_a_cpu(layers, scan, platform, wanted):
    c = config.default()
    c.model.layers, c.model.scan_layers = layers, scan
    abstract = AbstractMesh((1,) * 4, sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    mesh = abstract if platform == "abstract" else sharding.make_mesh()
    assert language.model_config(config.resolve(c), mesh).scan_layers is wanted


def test_every_model_key_reaches_the_model():
    c = config.default()
    wanted = {
        "layers": 3, "d_model": 24, "heads": 6, "kv_heads": 2, "d_ff": 40, "max_length": 512, "dropout": 0.25,
        "rope_theta": 5e5, "tied_embeddings": True, "remat": "dots", "attention": "cudnn", "vocab_size": 384,
    }  # fmt: skip
    assert {f"model.{name}" for name in wanted} | {"model.name", "model.scan_layers"} == {
        name for name, key in config.KEYS.items() if name.startswith("model.") and "resnet" not in key.of
    }
    for name, value in wanted.items():
        config.assign(c, f"model.{name}", value)
    with pytest.raises(
        config.ConfigError, match=r"attention=cudnn needs NVIDIA GPUs, and the devices are cpu; use xla"
    ):
        language.model_config(config.resolve(c), sharding.make_mesh())
    abstract = AbstractMesh((1,) * 4, sharding.AXES, axis_types=(AxisType.Auto,) * 4)
    made = language.model_config(config.resolve(c), abstract)
    assert {name: getattr(made, name) for name in wanted} == wanted
    c.model.vocab_size, c.model.attention = 0, "xla"
    assert language.model_config(config.resolve(c), sharding.make_mesh()).vocab_size == 320


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data.micro_batch_size": 6}, r"6 rows do not divide by the 8 devices .*fsdp=8; use 8 rows"),
        ({"data.micro_batch_size": 20}, r"20 rows do not divide by the 8 devices .*use 16 or 24 rows"),
        ({"model.vocab_size": 100}, r"model\.vocab_size=100 is below the data's 320; raise it or set 0"),
        ({"data.sequence_length": 17}, r"data\.sequence_length=17 .*model\.max_length=16; shorten"),
        ({"model.heads": 3, "model.kv_heads": 3}, r"d_model=16 is not divisible by heads=3; .*15 and 18"),
        ({"model.heads": 4, "model.kv_heads": 3}, r"heads=4 is not divisible by kv_heads=3; .*\[1, 2, 4\]"),
        ({"model.heads": 16, "model.kv_heads": 16}, r"head_dim=1, which is odd.*multiple of 32"),
        ({"model.d_ff": 33, "mesh.tensor": 2}, r"layers/mlp/\S+/kernel: dim 33 .*'tensor'=2.*pad it or change"),
        ({"model.d_model": 20}, r"/\S+: dim 20 of .* not divisible by mesh axis 'fsdp'=8.*pad it or change"),
        ({"mesh.data": 3}, r"data=3.*8 devices do not divide by 3"),
        ({"mesh.data": 2, "mesh.fsdp": 2}, r"data=2, fsdp=2.* needs 4 devices and 8 are here; set one axis to -1"),
        ({"mesh.fsdp": 16}, r"fsdp=16.* needs 16 devices and 8 are here"),
        (
            {"optim.name": "sgd", "optim.weight_decay": 0.1},
            r"sgd takes no weight decay.*0\.1; use adamw or",
        ),
        ({"data.paths": ()}, r"data\.paths is empty; name a file"),
        ({"data.paths": ("/nowhere/*.txt",)}, r"data\.paths: '/nowhere/\*\.txt' matches no file .*correct it"),
        ({"data.micro_batch_size": 4096}, r"holds \d+ rows, fewer than one micro-batch of 4096; add data, .*lower"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_a_sentence_with_names_numbers_and_a_remedy(texts, changes, match):
    with pytest.raises(ValueError, match=match):
        build(texts, **changes)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({}, r"matches no file .*\.txt.*correct it"),
        ({"a.txt": b"", "b.txt": b""}, r"no text found .*name at least one file with text"),
        (
            {"a.txt": b"ok", "b.txt": b"caf\xe9"},
            r"b\.txt: not UTF-8 at byte offset 3 \(byte 0xe9\); .*skip_non_utf8",
        ),
        ({"a.txt": b"x" * 500}, r"one document \(a\.txt\).*add a second file"),
        ({"a.bin": b"x" * 500}, r"matches no file"),
    ],
    ids=["nothing", "empty", "latin-1", "one document", "other suffix"],
)
def test_text_that_cannot_be_used_is_a_sentence(tmp_path, content, match):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=match):
        build(tmp_path)


def test_the_remedies_help(texts):
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    assert "1 files not UTF-8" in build(texts, data__skip_non_utf8=True).data.about


def test_the_remedy_for_one_document_helps(tmp_path):
    """What the sentence advises must not end in another sentence that advises the opposite."""
    (tmp_path / "a.txt").write_bytes(b"x" * 500)
    with pytest.raises(ValueError, match="one document") as caught:
        build(tmp_path)
    if "held_out_fraction=0" in str(caught.value):
        assert build(tmp_path, data__held_out_fraction=0.0).data.train.stream.size == 501
    (tmp_path / "b.txt").write_bytes(b"y" * 500)
    assert "held out 1 documents" in build(tmp_path).data.about


def test_a_batch_that_does_not_divide_is_told_before_any_text_is_read(monkeypatch, texts):
    monkeypatch.setattr(text, "load_text", lambda *_, **__: pytest.fail("the text was read"))
    with pytest.raises(ValueError, match="6 rows do not divide"):
        build(texts, data__micro_batch_size=6)


def test_several_processes_are_refused(monkeypatch, texts):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"2 processes: .* not available yet; use one"):
        build(texts)
