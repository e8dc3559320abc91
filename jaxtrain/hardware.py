"""Facts about chips, each with its source, and model flops utilisation (MFU).

Standard library only; importing this module loads no jax and touches no device. Every number is a ``Fact``: its value,
the URL it comes from, the day it was read, and whether the vendor's own publication says so. "Read" means a stored copy
of the page (none was opened live) or, where the source is libtpu, what Google's TPU compiler said when run that day.

Conventions, the same for every chip:

* Figures are per CHIP unless the name says device. ``Chip.per_device`` turns one into the figure per ``jax.Device``.
* Peaks are DENSE. NVIDIA's product pages print twice that, "with sparsity".
* A link figure is ONE WAY. Google prints ICI per chip, NVIDIA prints NVLink per GPU, both as the sum over all links and
  both directions; ``link_bytes_per_s`` is that total / 2 / ``links``, and ``egress_bytes_per_s`` is their product.
* Bytes/s and flop/s are decimal (1 GB/s = 1e9). Memory is in bytes; a page's "GB" that means GiB is read as GiB.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType


@dataclass(frozen=True)
class Fact:
    """A number and where it comes from. ``read`` is an ISO date.

    ``confirmed`` is True only if the vendor's own publication, source code or compiler gave the figure, or figures that
    give it by the arithmetic in ``note``. Where it is False, ``note`` says why the number is believed.
    """

    value: float
    source: str
    read: str
    confirmed: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator chip. ``None`` means not published or not found, never zero.

    ``device_kinds`` are the exact ``jax.Device.device_kind`` strings. ``cores`` counts the TensorCores of a TPU chip (1
    for a GPU), ``devices_per_chip`` what ``jax.devices()`` shows on a running slice. ``peak_flops_per_s`` maps a jax
    dtype ("float8" for every 8-bit float) to the dense matmul peak; a GPU's "float32" is its TF32 rate, which jax's
    default float32 precision runs there (``jax.lax.Precision``), and a TPU has none: see ``mfu``. ``hbm_bytes`` is the
    size printed or reported, ``hbm_usable_bytes`` what the compiler lets programs use. ``pcie_bytes_per_s`` (to the
    host) is one way; ``dcn_bytes_per_s`` is as Google prints it, no direction named.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    cores: Fact
    devices_per_chip: Fact
    peak_flops_per_s: Mapping[str, Fact]
    hbm_bytes: Fact
    hbm_bytes_per_s: Fact
    hbm_usable_bytes: Fact | None = None
    links: Fact | None = None
    link_bytes_per_s: Fact | None = None
    pcie_bytes_per_s: Fact | None = None
    dcn_bytes_per_s: Fact | None = None

    @property
    def egress_bytes_per_s(self) -> float | None:
        """One-way bytes/s over all ICI or NVLink links of the chip, shared by its devices; None if unknown."""
        if self.links is None or self.link_bytes_per_s is None:
            return None
        return self.links.value * self.link_bytes_per_s.value

    def peak(self, dtype: str) -> Fact | None:
        """Dense matmul peak in flop/s of the whole chip for a jax dtype name; None if none is published.

        Raises ValueError for a name that is not one of jax's ("bf16"): a typo must not read as "unknown chip".
        """
        return self.peak_flops_per_s.get(_dtype_key(dtype))

    def per_device(self, fact: Fact | None, cores_per_device: int | None = None) -> float | None:
        """The share of a per-chip figure (peak, HBM, PCIe ...) that one ``jax.Device`` has; None for None.

        On TPU, ``cores_per_device=device.num_cores`` makes it exact: a TPU v4 chip is ONE device of 2 cores (megacore)
        on a running slice but TWO devices of 1 core in an ahead-of-time topology made without
        ``chip_config_name="megacore"``, under the same ``device_kind``. Without it, ``devices_per_chip`` decides.
        """
        if fact is None:
            return None
        if cores_per_device is None:
            return fact.value / self.devices_per_chip.value
        if cores_per_device < 1 or self.cores.value % cores_per_device:
            raise ValueError(
                f"{self.name}: cores_per_device={cores_per_device} does not divide {self.cores.value} cores"
            )
        return fact.value * cores_per_device / self.cores.value


def chip(name: str) -> Chip:
    """The chip of that catalogue name ("v5p", "h100"). Raises ValueError that lists the nearest and all known names."""
    if name not in CHIPS:
        raise ValueError(f"unknown chip {name!r}{_hint(name, CHIPS)}; known chips: {', '.join(CHIPS)}")
    return CHIPS[name]


def find(device_kind: str) -> Chip | None:
    """The chip whose ``jax.Device.device_kind`` is exactly that string, or None: never a guess, no prefix match."""
    return _BY_DEVICE_KIND.get(device_kind)


def mfu(
    flops_per_s: float,
    device_kind: str,
    dtype: str = "bfloat16",
    devices: int = 1,
    peak_flops_per_s: float | None = None,
    cores_per_device: int | None = None,
) -> float | None:
    """Model flops utilisation: flops_per_s / (devices * dense peak of one jax device), between 0 and 1.

    ``flops_per_s`` is the total over all ``devices``, model flops only: recomputation does not count (PaLM, appendix B,
    https://arxiv.org/abs/2204.02311). ``peak_flops_per_s`` is the peak per DEVICE and replaces the catalogue's.
    ``cores_per_device``: as for ``Chip.per_device``; matters for TPU v4 only.

    None if the chip is unknown or no peak is published for ``dtype``, and none is given. float32 on a TPU is None: its
    matmuls are 1, 3 or 6 bfloat16 passes depending on ``jax.lax.Precision``, and Google prints no float32 peak. float32
    on a GPU is measured against TF32, jax's default there; at precision "highest" that is a lower bound.

    Raises ValueError if a number is not finite or out of range, if ``dtype`` is not a jax name, and if the result is
    above 1: then an input is wrong.
    """
    if not (math.isfinite(flops_per_s) and flops_per_s >= 0):
        raise ValueError(f"flops_per_s must be finite and at least 0, got {flops_per_s}")
    if not (math.isfinite(devices) and devices >= 1):
        raise ValueError(f"devices must be at least 1, got {devices}")
    if peak_flops_per_s is not None and not (math.isfinite(peak_flops_per_s) and peak_flops_per_s > 0):
        raise ValueError(f"peak_flops_per_s must be finite and above 0, got {peak_flops_per_s}")
    _dtype_key(dtype)

    peak, known = peak_flops_per_s, find(device_kind)
    if peak is None and known is not None:
        peak = known.per_device(known.peak(dtype), cores_per_device)
    if peak is None:
        return None
    result = flops_per_s / (devices * peak)
    if result > 1:
        raise ValueError(
            f"MFU {result:.4f} is above 1: {flops_per_s:.6g} flop/s over {devices} x {device_kind!r} with a {dtype} "
            f"peak of {peak:.6g} flop/s each; check the number of devices, the dtype, and that flops count once"
        )
    return result


_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8")


def _dtype_key(dtype: str) -> str:
    key = "float8" if dtype.startswith("float8_") else dtype
    if key not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}{_hint(dtype, _DTYPES)}; use one of {', '.join(_DTYPES)}")
    return key


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    return f", did you mean {near[0]!r}?" if near else ""


# The catalogue. _yes: confirmed at the source. _no: not, and the note says why it is believed.

_READ = "2026-11-30"
_GIB = 2**30

_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_V4, _V5E, _V5P, _V6E, _TPU7X = (_TPU_DOCS + page for page in ("v4", "v5e", "v5p", "v6e", "tpu7x"))
_V4_DEVICES = "https://github.com/huggingface/transformers/issues/20252"
_LIBTPU = "https://pypi.org/project/libtpu/0.0.42.1/"
_JAX = "https://github.com/jax-ml/jax/blob/main/jax/_src/pallas/mosaic/tpu_info.py"
_BOOK = "https://jax-ml.github.io/scaling-book/"
_XLA = "https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/"
_WARP = "https://nvidia.github.io/warp/v1.19/api_reference/_generated/warp.device_to_jax.html"
_DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob/main/README.md#peak-theoretical-throughput"
_MLPERF = "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/"
_MLPERF_H100, _MLPERF_H200 = _MLPERF + "DGX-H100_H100-SXM-80GBx8_TRT.json", _MLPERF + "H200-SXM-141GBx8_TRT.json"
_DGX_B200 = "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_PCI_SIG = "https://pcisig.com/specifications"


def _yes(value: float, source: str, note: str = "") -> Fact:
    return Fact(value, source, _READ, True, note)


def _no(value: float, source: str, note: str) -> Fact:
    return Fact(value, source, _READ, False, note)


def _peaks(**peaks: Fact) -> Mapping[str, Fact]:
    return MappingProxyType(peaks)


def _usable(gib: float, devices: int = 1, note: str = "") -> Fact:
    return _yes(int(gib * _GIB) * devices, _LIBTPU, f"'exceeds available HBM ({gib}G)' x {devices} devices" + note)


def _card(size_bytes: int, spec: str, printed: str) -> Fact:
    return _no(size_bytes, _XLA + spec, f"what the card reports to XLA; NVIDIA prints {printed}")


_ONE, _TWO = _yes(1, _JAX, "physical TensorCores per chip"), _yes(2, _JAX, "physical TensorCores per chip")
_ONE_DEVICE = _yes(1, _LIBTPU, "devices of a topology")
_ONE_GPU = _yes(1, _WARP, "one jax device per CUDA device")
_SLOW_HOST = _no(15e9, _BOOK + "tpus/", "'typically around 1.5e10 per chip'; Google's TPU pages print no figure")
_PCIE4 = _no(31.5e9, _PCI_SIG, "Gen4 x16 line rate: 16 GT/s x 16 x 128/130 / 8; standard not read")
_PCIE5 = _no(63e9, _PCI_SIG, "Gen5 x16 line rate: 32 GT/s x 16 x 128/130 / 8; standard not read")

_tpu = partial(Chip, platform="tpu", devices_per_chip=_ONE_DEVICE, pcie_bytes_per_s=_SLOW_HOST)
_gpu = partial(Chip, platform="cuda", cores=_ONE_GPU, devices_per_chip=_ONE_GPU, pcie_bytes_per_s=_PCIE5)

_TPU_V4 = _tpu(
    name="v4",
    device_kinds=("TPU v4",),
    cores=_TWO,
    devices_per_chip=_no(1, _V4_DEVICES, "a v4-32 (16 chips) lists 16 devices; libtpu topologies default to 2"),
    peak_flops_per_s=_peaks(bfloat16=_yes(275e12, _V4, "'bf16 or int8'"), int8=_yes(275e12, _V4, "'bf16 or int8'")),
    hbm_bytes=_yes(32 * _GIB, _V4),
    hbm_usable_bytes=_usable(30.75, note="; as two devices 15.25 each"),
    hbm_bytes_per_s=_yes(1200e9, _V4),
    links=_yes(6, _V4, "nearest neighbours in 3 dimensions"),
    link_bytes_per_s=_no(45e9, _BOOK + "tpus/", "Google's v4 page prints no ICI figure"),
)

_TPU_V5E = _tpu(
    name="v5e",
    device_kinds=("TPU v5 lite", "TPU v5e"),
    cores=_ONE,
    peak_flops_per_s=_peaks(bfloat16=_yes(197e12, _V5E), int8=_yes(393e12, _V5E)),
    hbm_bytes=_yes(16 * _GIB, _V5E, "printed '16 GB'; jax's tpu_info says 17.2e9 bytes"),
    hbm_usable_bytes=_usable(15.75),
    hbm_bytes_per_s=_yes(819e9, _V5E, "another copy of the page prints 800 GiBps (859e9); jax's tpu_info says 820e9"),
    links=_yes(4, _V5E, "'ICI ports per chip'"),
    link_bytes_per_s=_yes(50e9, _V5E, "400 GB/s per chip, bidirectional, / 2 / 4"),
    dcn_bytes_per_s=_yes(3.125e9, _V5E, "6.4 Tbit/s per pod / 256 chips / 8"),
)

_TPU_V5P = _tpu(
    name="v5p",
    device_kinds=("TPU v5", "TPU v5p"),
    cores=_TWO,
    peak_flops_per_s=_peaks(
        bfloat16=_yes(459e12, _V5P),
        int8=_yes(918e12, _JAX, "Google's v5p page prints none"),
        float8=_yes(459e12, _V5P, "no faster than bfloat16"),
    ),
    hbm_bytes=_yes(95 * _GIB, _V5P, "rounded down: less than hbm_usable_bytes; jax's tpu_info says 103e9 bytes"),
    hbm_usable_bytes=_usable(95.74),
    hbm_bytes_per_s=_yes(2765e9, _V5P, "jax's tpu_info says 2460e9"),
    links=_yes(6, _V5P, "'3D torus'"),
    link_bytes_per_s=_yes(100e9, _V5P, "1200 GB/s per chip, bidirectional, / 2 / 6"),
    dcn_bytes_per_s=_yes(6.25e9, _V5P, "50 Gbit/s per chip / 8"),
)

_TPU_V6E = _tpu(
    name="v6e",
    device_kinds=("TPU v6 lite", "TPU v6e"),
    cores=_ONE,
    peak_flops_per_s=_peaks(
        bfloat16=_yes(918e12, _V6E), int8=_yes(1836e12, _V6E), float8=_yes(918e12, _TPU7X, "no faster than bfloat16")
    ),
    hbm_bytes=_yes(32 * _GIB, _TPU7X, "the v6e page prints '32 GB', this one's comparison GiB"),
    hbm_usable_bytes=_usable(31.25),
    hbm_bytes_per_s=_yes(1638e9, _V6E),
    links=_yes(4, _V6E, "'ICI ports per chip'"),
    link_bytes_per_s=_yes(100e9, _V6E, "800 GB/s per chip, bidirectional, / 2 / 4"),
    pcie_bytes_per_s=_no(32e9, _BOOK + "tpus/", "'Trillium has 32GB/s'; Google's v6e page says only 'PCIe Gen5'"),
    dcn_bytes_per_s=_yes(12.5e9, _TPU7X, "100 Gbit/s per chip / 8"),
)

_TPU_7X = _tpu(
    name="tpu7x",
    device_kinds=("TPU7x",),
    cores=_TWO,
    devices_per_chip=_yes(2, _TPU7X, "'two TPU devices instead of the single logical core'; libtpu agrees"),
    peak_flops_per_s=_peaks(bfloat16=_yes(2307e12, _TPU7X), float8=_yes(4614e12, _TPU7X)),
    hbm_bytes=_yes(192 * _GIB, _TPU7X),
    hbm_usable_bytes=_usable(94.75, devices=2),
    hbm_bytes_per_s=_yes(7380e9, _TPU7X),
    links=_no(6, _TPU7X, "assumed, as v5p, from libtpu's 3D topologies; no count was read"),
    link_bytes_per_s=_no(100e9, _TPU7X, "1200 GB/s per chip, bidirectional (read), / 2 / 6 links (assumed)"),
    pcie_bytes_per_s=None,
    dcn_bytes_per_s=_yes(12.5e9, _TPU7X, "100 Gbit/s per chip / 8"),
)

_a100 = partial(_no, source=_NVIDIA + "a100/", note="quoted by others; 108 SMs x 1024 x 2 x 1.41 GHz = 311.9e12 agrees")
_A100_40 = _gpu(
    name="a100-40",
    device_kinds=("NVIDIA A100-SXM4-40GB",),
    peak_flops_per_s=_peaks(bfloat16=_a100(312e12), float16=_a100(312e12), float32=_a100(156e12), int8=_a100(624e12)),
    hbm_bytes=_card(42_331_013_120, "a100_sxm_40.txtpb", "40 GB"),
    hbm_bytes_per_s=_no(1555.2e9, _XLA + "a100_sxm_40.txtpb", "NVIDIA's '1,555 GB/s' is quoted by others"),
    links=_no(12, _BOOK + "gpus/", "NVIDIA's own page not read"),
    link_bytes_per_s=_no(25e9, _NVIDIA + "a100/", "'600 GB/s', bidirectional, quoted by others, / 2 / 12"),
    pcie_bytes_per_s=_PCIE4,
)
_A100_80 = replace(
    _A100_40,
    name="a100-80",
    device_kinds=("NVIDIA A100-SXM4-80GB",),
    hbm_bytes=_card(85_100_068_864, "a100_sxm_80.txtpb", "80 GB"),
    hbm_bytes_per_s=_no(2039.04e9, _XLA + "a100_sxm_80.txtpb", "NVIDIA's '2,039 GB/s' is quoted by others"),
)
# The PCIe card has the same peaks and memory, but NVLink only by an optional bridge to one neighbour: no link figure.
_A100_PCIE = replace(
    _A100_40, name="a100-40-pcie", device_kinds=("NVIDIA A100-PCIE-40GB",), links=None, link_bytes_per_s=None
)

_h100 = partial(_no, source=_NVIDIA + "h100/", note="half of the page's 'with sparsity' figure, quoted by others")
_H100 = _gpu(
    name="h100",
    device_kinds=("NVIDIA H100 80GB HBM3",),  # the SXM5 module; "NVIDIA H100 PCIe" and "NVIDIA H100 NVL" are slower
    peak_flops_per_s=_peaks(
        bfloat16=_yes(989.5e12, _DGXC, "'non-sparse': 989 (rounded), and FP8 1979, of which this is half"),
        float16=_h100(989.5e12),
        float32=_h100(494.5e12),
        int8=_h100(1979e12),
        float8=_yes(1979e12, _DGXC, "'non-sparse'"),
    ),
    hbm_bytes=_card(84_942_979_072, "h100_sxm.txtpb", "80 GB"),
    hbm_bytes_per_s=_no(3352.32e9, _XLA + "h100_sxm.txtpb", "NVIDIA's '3.35 TB/s' is quoted by others"),
    links=_yes(18, _MLPERF_H100, "NVIDIA's submission: '18x 4th Gen NVLink, 900GB/s'"),
    link_bytes_per_s=_yes(25e9, _MLPERF_H100, "900 GB/s, bidirectional, / 2 / 18"),
)

_h200 = partial(_no, source=_NVIDIA + "h200/", note="page not read; XLA gives H200 the 132 SMs and clocks of the H100")
_H200 = replace(
    _H100,
    name="h200",
    device_kinds=("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),  # the second is XLA's target config; "H200 NVL" is slower
    peak_flops_per_s=_peaks(**{dtype: _h200(fact.value) for dtype, fact in _H100.peak_flops_per_s.items()}),
    hbm_bytes=_card(151_397_597_184, "h200.txtpb", "141 GB"),
    hbm_bytes_per_s=_no(4800e9, _XLA + "h200.txtpb", "NVIDIA's '4.8 TB/s' is quoted by others"),
    links=_yes(18, _MLPERF_H200, "NVIDIA's submission: '18x 4th Gen NVLink, 900GB/s'"),
    link_bytes_per_s=_yes(25e9, _MLPERF_H200, "900 GB/s, bidirectional, / 2 / 18"),
)

_b200 = partial(_no, source=_NVIDIA + "hgx/", note="half of HGX B200's 'with sparsity' figure, quoted by others")
_B200 = _gpu(
    name="b200",
    device_kinds=("NVIDIA B200",),  # "NVIDIA GB200" is another part, faster
    peak_flops_per_s=_peaks(
        bfloat16=_yes(2250e12, _DGXC, "'non-sparse'"),
        float16=_b200(2250e12),
        float32=_b200(1100e12),
        int8=_b200(4500e12),
        float8=_yes(4500e12, _DGXC, "'non-sparse'"),
    ),
    hbm_bytes=_card(191_514_411_008, "b200.txtpb", "180 GB (1,440 GB per DGX B200)"),
    hbm_bytes_per_s=_no(7672.32e9, _XLA + "b200.txtpb", "NVIDIA's dgxc-benchmarking prints 7.7 TB/s, others quote 8"),
    links=_yes(18, _DGXC, "'18 Links per GPU'"),
    link_bytes_per_s=_yes(50e9, _DGX_B200, "14.4 TB/s per 8 GPUs, bidirectional, / 8 / 2 / 18"),
)

_ALL = (_TPU_V4, _TPU_V5E, _TPU_V5P, _TPU_V6E, _TPU_7X, _A100_40, _A100_PCIE, _A100_80, _H100, _H200, _B200)
CHIPS: Mapping[str, Chip] = MappingProxyType({c.name: c for c in _ALL})
_BY_DEVICE_KIND: Mapping[str, Chip] = MappingProxyType({kind: c for c in _ALL for kind in c.device_kinds})
