"""jaxtrain.hardware: every number has a source, the numbers agree with arithmetic from outside, MFU never guesses."""

import dataclasses
import datetime
import math
import subprocess
import sys
from collections.abc import Mapping

import pytest

from jaxtrain import hardware

GIB = 2**30


def sourceless_numbers(value, path: str) -> list[str]:
    """Every number under ``value`` that is not a well-sourced Fact, as path: reason."""
    if isinstance(value, hardware.Fact):
        bad = []
        if isinstance(value.value, bool) or not (math.isfinite(value.value) and value.value > 0):
            bad.append(f"{path}: value {value.value}")
        if not value.source.startswith("https://"):
            bad.append(f"{path}: source {value.source!r}")
        try:
            read = datetime.date.fromisoformat(value.read)
        except ValueError:
            bad.append(f"{path}: date {value.read!r}")
        else:
            if read > datetime.datetime.now(datetime.UTC).date():
                bad.append(f"{path}: date {value.read} is in the future")
        if not isinstance(value.confirmed, bool) or not (value.confirmed or value.note):
            bad.append(f"{path}: unconfirmed without a note")
        return bad
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        fields = list(value.items())
    elif isinstance(value, tuple | list):
        fields = list(enumerate(value))
    elif value is None or isinstance(value, str):
        return []
    else:
        return [f"{path}: bare {value!r}"]
    return [bad for key, inner in fields for bad in sourceless_numbers(inner, f"{path}.{key}")]


def test_every_number_has_a_source_and_a_date():
    assert sourceless_numbers(hardware.CHIPS, "CHIPS") == []


GOOD = hardware.Fact(1.0, "https://example.com", "2026-01-01", True)


@pytest.mark.parametrize(
    "bad",
    [
        7,
        1.5,
        dataclasses.replace(GOOD, source=""),
        dataclasses.replace(GOOD, source="a data sheet"),
        dataclasses.replace(GOOD, read="30.11.2026"),
        dataclasses.replace(GOOD, read="2999-01-01"),
        dataclasses.replace(GOOD, value=math.nan),
        dataclasses.replace(GOOD, confirmed=False),
    ],
)
def test_the_source_check_can_fail(bad):
    chip = hardware.chip("v5e")
    assert sourceless_numbers(dataclasses.replace(chip, links=bad), "chip") != []
    assert sourceless_numbers(dataclasses.replace(chip, peak_flops_per_s={"bfloat16": bad}), "chip") != []
    assert sourceless_numbers(dataclasses.replace(chip, links=GOOD), "chip") == []


def test_the_catalogue_is_read_only():
    with pytest.raises(TypeError):
        hardware.CHIPS["x"] = None
    with pytest.raises(TypeError):
        hardware.chip("h100").peak_flops_per_s["bfloat16"] = GOOD
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.chip("h100").hbm_bytes = GOOD


def test_import_loads_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import jaxtrain.hardware; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["jaxtrain"]


# Peaks against the silicon: units x multiply-adds per clock x 2 x clock. Dense: a sparse figure would be off by two.
@pytest.mark.parametrize(
    ("name", "flops_per_s"),
    [
        ("v4", 8 * 128 * 128 * 2 * 1.050e9),  # 2 cores x 4 MXUs of 128 x 128
        ("v5e", 4 * 128 * 128 * 2 * 1.503e9),
        ("v5p", 8 * 128 * 128 * 2 * 1.751e9),
        ("a100-40", 108 * 1024 * 2 * 1.410e9),  # SMs x dense 16-bit multiply-adds per SM
        ("a100-80", 108 * 1024 * 2 * 1.410e9),
        ("h100", 132 * 2048 * 2 * 1.830e9),
        ("h200", 132 * 2048 * 2 * 1.830e9),
        ("b200", 148 * 4096 * 2 * 1.835e9),
    ],
)
def test_bfloat16_peak_is_the_dense_one(name, flops_per_s):
    assert hardware.chip(name).peak("bfloat16").value == pytest.approx(flops_per_s, rel=0.015)


# Totals per chip as the vendors print them: all links, both directions.
@pytest.mark.parametrize(
    ("name", "printed_bytes_per_s"),
    [
        ("v5e", 400e9),
        ("v5p", 1200e9),
        ("v6e", 800e9),
        ("tpu7x", 1200e9),
        ("a100-40", 600e9),
        ("a100-80", 600e9),
        ("h100", 900e9),
        ("h200", 900e9),
        ("b200", 1800e9),
    ],
)
def test_links_are_one_way(name, printed_bytes_per_s):
    assert hardware.chip(name).egress_bytes_per_s == printed_bytes_per_s / 2


def test_the_pcie_card_has_no_link_figure():
    chip = hardware.find("NVIDIA A100-PCIE-40GB")
    assert chip.egress_bytes_per_s is None
    assert chip.peak("bfloat16").value == 312e12


@pytest.mark.parametrize("name", list(hardware.CHIPS))
def test_usable_memory_is_a_little_less_than_the_printed_size(name):
    chip = hardware.CHIPS[name]
    assert chip.name == name
    if chip.hbm_usable_bytes is not None:
        slack = 0.01 if name == "v5p" else 0  # Google rounds v5p down to 95 GiB; the compiler offers 95.74
        assert 0.94 < chip.hbm_usable_bytes.value / chip.hbm_bytes.value < 1 + slack


def test_usable_memory_of_v5e():
    assert hardware.chip("v5e").hbm_usable_bytes.value == 15.75 * GIB


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_find_known_device_kinds(device_kind, name):
    assert hardware.find(device_kind) is hardware.chip(name)


@pytest.mark.parametrize(
    "device_kind",
    [
        "",
        "cpu",
        "Foo 9000",
        "TPU v3",
        "TPU v4 lite",
        "TPU v50",
        "NVIDIA H100",
        "nvidia h200",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
    ],
)
def test_find_never_guesses(device_kind):
    assert hardware.find(device_kind) is None
    assert hardware.mfu(1e12, device_kind) is None


def test_no_device_kind_names_two_chips():
    kinds = [kind for chip in hardware.CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_unknown_chip_name_suggests_and_lists():
    with pytest.raises(ValueError, match=r"'H100', did you mean 'h100'\?.*v4, v5e, v5p, v6e, tpu7x, a100-40"):
        hardware.chip("H100")
    with pytest.raises(ValueError, match="known chips: v4, v5e"):
        hardware.chip("zzz")


def test_PLAN_02_mfu_uses_the_dense_peak_of_the_right_chip():
    assert hardware.mfu(420e12, "NVIDIA H200", "bfloat16") == pytest.approx(0.4245, abs=5e-5)
    assert hardware.mfu(6 * 7e9 * 9600, "NVIDIA H100 80GB HBM3", "bfloat16") == pytest.approx(0.4075, abs=5e-5)


def test_PLAN_02_mfu_of_an_unknown_chip_is_none_unless_a_peak_is_given():
    assert hardware.mfu(420e12, "Foo 9000", "bfloat16") is None
    assert hardware.mfu(420e12, "Foo 9000", "bfloat16", devices=2, peak_flops_per_s=300e12) == 0.7


def test_PLAN_02_mfu_above_one_is_an_error_with_numbers():
    with pytest.raises(ValueError, match=r"MFU 1\.0611 is above 1: 1\.05e\+15 .* 1 x 'NVIDIA H200' .* 9\.895e\+14"):
        hardware.mfu(1050e12, "NVIDIA H200")
    assert hardware.mfu(989.5e12, "NVIDIA H200") == 1.0


def test_mfu_counts_devices_and_takes_the_peak_of_the_dtype():
    assert hardware.mfu(8 * 420e12, "NVIDIA H200", devices=8) == hardware.mfu(420e12, "NVIDIA H200")
    assert hardware.mfu(78e12, "NVIDIA A100-SXM4-80GB", "float32") == 0.5  # TF32, 156e12
    assert hardware.mfu(156e12, "NVIDIA A100-SXM4-80GB", "float16") == 0.5
    assert hardware.mfu(2250e12, "NVIDIA B200", "float8_e4m3fn") == 0.5
    assert hardware.mfu(0.0, "TPU v6 lite") == 0.0
    assert hardware.mfu(420e12, "NVIDIA H200", peak_flops_per_s=840e12) == 0.5  # a given peak replaces the catalogue's


@pytest.mark.parametrize("device_kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tpu_has_no_peak_for_float32_and_float16(device_kind, dtype):
    assert hardware.mfu(1e12, device_kind, dtype) is None


def test_mfu_is_per_jax_device_where_a_chip_shows_two():
    # One tpu7x chip is two devices: 2307e12 / 2 each.
    assert hardware.mfu(2307e12 / 4, "TPU7x") == 0.5
    assert hardware.mfu(2307e12 / 2, "TPU7x", devices=2) == 0.5
    assert hardware.mfu(2307e12 / 4, "TPU7x", cores_per_device=1) == 0.5
    # A v4 chip is one device on a slice (megacore, 2 cores) and two (1 core) in libtpu's default topology.
    assert hardware.mfu(275e12 / 2, "TPU v4") == 0.5
    assert hardware.mfu(275e12 / 2, "TPU v4", cores_per_device=2) == 0.5
    assert hardware.mfu(275e12 / 2, "TPU v4", devices=2, cores_per_device=1) == 0.5


def test_per_device_memory():
    tpu7x, v4, h100 = hardware.chip("tpu7x"), hardware.chip("v4"), hardware.chip("h100")
    assert tpu7x.per_device(tpu7x.hbm_bytes) == 96 * GIB
    assert tpu7x.per_device(tpu7x.hbm_usable_bytes) == 94.75 * GIB
    assert tpu7x.per_device(tpu7x.hbm_bytes_per_s) == 3690e9
    assert tpu7x.per_device(tpu7x.pcie_bytes_per_s) is None
    assert v4.per_device(v4.hbm_bytes) == 32 * GIB
    assert v4.per_device(v4.hbm_bytes, cores_per_device=1) == 16 * GIB
    assert h100.per_device(h100.hbm_bytes) == 84_942_979_072
    with pytest.raises(ValueError, match="v5e: cores_per_device=2 does not divide 1 cores"):
        hardware.chip("v5e").per_device(GOOD, cores_per_device=2)
    with pytest.raises(ValueError, match="cores_per_device=0"):
        v4.per_device(GOOD, cores_per_device=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"flops_per_s": math.nan}, "flops_per_s must be finite and at least 0, got nan"),
        ({"flops_per_s": math.inf}, "flops_per_s must be finite"),
        ({"flops_per_s": -1.0}, "flops_per_s must be finite and at least 0, got -1.0"),
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"devices": -4}, "devices must be at least 1, got -4"),
        ({"devices": math.nan}, "devices must be at least 1, got nan"),
        ({"peak_flops_per_s": 0.0}, "peak_flops_per_s must be finite and above 0, got 0.0"),
        ({"peak_flops_per_s": math.inf}, "peak_flops_per_s must be finite and above 0, got inf"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16', did you mean 'bfloat16'"),
    ],
)
@pytest.mark.parametrize("device_kind", ["NVIDIA H200", "Foo 9000"])
def test_mfu_rejects_bad_inputs_for_known_and_unknown_chips(kwargs, message, device_kind):
    with pytest.raises(ValueError, match=message):
        hardware.mfu(**({"flops_per_s": 1e12, "device_kind": device_kind} | kwargs))
