"""What the transformer's step sends between devices, and in which dtype: read from compiled programs' texts."""

import importlib.util
import re

import pytest
from collectives_text import BYTES, Collective, collectives
from compiled_steps import SIZES, compile_steps

CASES = {
    "fsdp": [{"fsdp": 8}, {}],
    "unrolled": [{"fsdp": 8}, {"model.scan_layers": "no", "model.tied_embeddings": True}],
    "both": [{"data": 2, "fsdp": 4}, {}],
    "slices": [{"slice": 2, "data": 2, "fsdp": 2}, {}],
    "tensor": [{"fsdp": 2, "tensor": 4}, {}],
    "chunks": [{"data": 2, "fsdp": 4}, {"loss.vocab_chunks": 4}],
    "deferred": [{"data": 2, "fsdp": 4}, {"accumulation.mechanism": "scan_deferred", "accumulation.k": 4}],
    "muon": [{"fsdp": 8}, {"optim.name": "muon"}],
}
LAYERS, WIDTH, FF, VOCABULARY = SIZES["model.layers"], SIZES["model.d_model"], SIZES["model.d_ff"], 320
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * FF  # parameters of a layer's kernels
SMALL = 2**14  # bytes: norms' scales, scalars, token ids, one number a token


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return compile_steps("cpu", CASES, tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def on_tpu(tmp_path_factory):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jaxtrain[plan]'")
    cases = {name: CASES[name] for name in ("fsdp", "both", "deferred")}
    return compile_steps("v5e:2x4", cases, tmp_path_factory.mktemp("tpu"))


def dtypes(collective: Collective) -> set[str]:
    """Of what it moves."""
    result = collective.line[collective.line.index("=") : collective.line.index("replica_groups")]
    return {dtype for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", result) if dtype in BYTES}


def big(text: str, where: str = "") -> list[Collective]:
    found = collectives(text)
    return [c for place in found if where in place for c in found[place] if c.result_bytes > SMALL]


@pytest.mark.parametrize("name", CASES)
def test_the_partitioner_never_gives_up(on_cpu, name):
    """ "Involuntary full rematerialization": an array made whole on every device, because no better way was found."""
    assert "nvoluntary" not in on_cpu[1]
    assert big(on_cpu[0][name])


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("deferred", "muon")])
def test_parameters_are_gathered_and_gradients_reduced_in_the_compute_dtype(on_cpu, name):
    for collective in big(on_cpu[0][name]):
        assert dtypes(collective) == {"bf16"}, collective.line


@pytest.mark.parametrize("name", ["fsdp", "both", "slices"])
def test_fsdp_gathers_each_parameter_for_each_pass_and_no_state_of_the_optimizer(on_cpu, name):
    shards = CASES[name][0]["fsdp"]
    found = collectives(on_cpu[0][name])
    gathered = sum(c.result_bytes for c in found["loop"] if c.kind == "all-gather" and c.result_bytes > SMALL)
    assert gathered == 2 * LAYER * 2  # forward and backward, 2 bytes each
    once = [c for c in found["once"] if c.kind == "all-gather" and c.result_bytes > SMALL]
    assert [(c.result_bytes, c.group) for c in once] == [(2 * WIDTH * VOCABULARY, shards)]  # the head's kernel


@pytest.mark.parametrize("name", ["fsdp", "both", "slices"])
def test_what_a_step_sends_is_what_the_parameters_weigh(on_cpu, name):
    """Two gathers and one reduction (here an all-reduce, twice a reduce-scatter) over fsdp, another over the rest."""
    found = collectives(on_cpu[0][name])
    sent = sum(c.wire_bytes for c in found["once"]) + LAYERS * sum(c.wire_bytes for c in found["loop"])
    axes = CASES[name][0]
    shards, replicas = axes["fsdp"], axes.get("data", 1) * axes.get("slice", 1)
    parameters = 2 * (LAYERS * LAYER + 2 * WIDTH * VOCABULARY)  # bytes, in bfloat16
    over_fsdp = (2 + 2) * parameters * (shards - 1) / shards
    over_rest = 2 * parameters / shards * (replicas - 1) / replicas
    assert 0.9 < sent / (over_fsdp + over_rest) < 1.1


def test_the_embedding_changes_places_instead_of_being_gathered(on_cpu):
    for name in ("fsdp", "both", "slices"):
        moved = [c for c in big(on_cpu[0][name], "once") if c.kind == "all-to-all"]
        assert len(moved) == 2, name  # forward and backward
        assert not [c for c in big(on_cpu[0][name]) if c.kind == "all-gather" and f"[{VOCABULARY}," in c.line]


def test_a_chunk_of_the_vocabulary_is_gathered_and_reduced_alone(on_cpu):
    chunk = 2 * WIDTH * VOCABULARY // 4
    moved = [c for c in collectives(on_cpu[0]["chunks"])["loop"] if f"bf16[{WIDTH},{VOCABULARY // 4}]" in c.line]
    assert sorted((c.kind, c.result_bytes) for c in moved) == [("all-gather", chunk)] * 2 + [("all-reduce", chunk)]
    assert not [c for c in big(on_cpu[0]["chunks"]) if f"[{WIDTH},{VOCABULARY}]" in c.line]


@pytest.mark.parametrize("compiler", ["on_cpu", "on_tpu"])
def test_defer_reduces_over_data_once_a_window_and_in_float32(request, compiler):
    found = collectives(request.getfixturevalue(compiler)[0]["deferred"])
    over_data = {place: [c for c in found[place] if c.group == 2 and c.result_bytes > SMALL] for place in found}
    assert over_data["loop"] == []
    assert {dtype for c in over_data["once"] for dtype in dtypes(c)} == {"f32"}
    shards = 4 * (LAYERS * LAYER + 2 * WIDTH * VOCABULARY) // 4  # float32, of 4 fsdp shards
    assert 1.0 <= sum(c.result_bytes for c in over_data["once"]) / shards < 1.1
    over_fsdp = [c for c in found["loop"] if c.group == 4 and c.result_bytes > SMALL]
    assert {dtype for c in over_fsdp for dtype in dtypes(c)} == {"bf16"}


def test_muon_gathers_its_momentum_and_is_alone_in_that(on_cpu):
    """Its orthogonalisation is a product of whole matrices; the float32 it moves is a step's, not a micro-batch's."""
    float32 = [c for c in big(on_cpu[0]["muon"]) if "f32" in dtypes(c)]
    assert float32
    assert not [c for c in float32 if "jvp" in c.line]


@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_on_a_tpu_gradients_are_scattered_as_they_are_reduced(on_tpu, name):
    moved = big(on_tpu[0][name])
    assert {dtype for c in moved for dtype in dtypes(c)} == {"bf16"}
    over_fsdp = [c for c in moved if c.group == CASES[name][0]["fsdp"]]
    assert {c.kind for c in over_fsdp} == {"all-gather", "reduce-scatter", "all-to-all"}
