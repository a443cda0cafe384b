"""What a layer will cost once it is quantized: the kernel that runs it, its size, and whether it is a loss.

API:
    Forecaster(device=None).of(candidate, slot, config) -> Forecast(kernel, kernel_reason, bytes_after, loss)

A quantized layer is a loss by one of four rules, each of which the plan shows as a warning with its numbers and
`skip_unprofitable` follows:

1. Its codes and scales take more bytes than the original.
2. No kernel runs it but the reference, which decodes the weight in each call.
3. `native_cpu` runs it, and it has fewer than 2^19 weights. With one row of activations a call then costs more than
   the bytes that it saves: measured on one core, eager, against bfloat16, 512 x 512 takes twice the time in 8 and 4
   bits, 1024 x 1024 0.8 to 1.2 times, and larger ones less. (With many rows all sizes are faster than bfloat16.)

4. Another kernel runs it on a GPU, and by `olq_fx.cost_model` it is slower than in bfloat16 with 1, 64 and 4096 rows.
   Where that holds for some of these only, the plan says so without calling it a loss. The GPU is the one that is here;
   where none is, the rule must hold on every architecture of the model.

The last three speak of a device, so they say nothing of a weight on meta unless the device is named. Lookups in an
embedding decode the rows that are asked for and are never a loss of speed.
"""

import dataclasses

import torch

from olq_fx.candidates import Candidate
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_options import AUTO
from olq_fx.cost_model import ARCHITECTURES, ROWS, Architecture, of_capability, rows_lost
from olq_fx.formats import get_format
from olq_fx.kernels import native, registry
from olq_fx.kernels.triton_ops import FAST_ACCUM
from olq_fx.numerics import quantized_bytes
from olq_fx.schemes import Slot

SMALL = 1 << 19
"""Weights below which `native_cpu` is expected to lose against bfloat16 with one row of activations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What becomes of a layer in given formats.

    Attributes:
        kernel: the name of the kernel that will run it.
        kernel_reason: why no better kernel runs it, or "".
        bytes_after: the size of its codes and scales.
        loss: why it is better left as it is, or "".
        requested: the kernel that the configuration asks for, or "".
        refusal: why that kernel cannot run it, or "".
    """

    kernel: str
    kernel_reason: str
    bytes_after: int
    loss: str
    requested: str = ""
    refusal: str = ""


class Forecaster:
    """Forecasts for the layers of one plan; equal layers are looked at once."""

    def __init__(self, device: str | None = None) -> None:
        """`device`: the type of the device where the model will run; None is where each weight is."""
        self._device = device
        self._known: dict[tuple[object, ...], Forecast] = {}

    def of(self, candidate: Candidate, slot: Slot, config: QuantizationConfig) -> Forecast:
        """The forecast for a weight in the formats of `slot`; an expert that is a layer of its own is a linear one."""
        device = self._device or candidate.device.type
        kind = "embedding" if candidate.kind == "embedding" else "linear" if len(candidate.shape) == 2 else "experts"
        backend = {"linear": config.linear_backend, "moe": config.moe_backend}.get(candidate.kind, AUTO)
        shape = (candidate.shape, candidate.shards)
        key = (kind, slot, shape, candidate.dtype, device, backend, config.fast_accum)
        if key not in self._known:
            self._known[key] = _forecast(kind, slot, candidate, device, backend, config.fast_accum)
        return self._known[key]


def _forecast(kind: str, slot: Slot, candidate: Candidate, device: str, backend: str, fast_accum: bool) -> Forecast:
    *stacked, n, k = candidate.shape
    matrices = candidate.shards * (stacked[0] if stacked else 1)
    before, after = candidate.bytes, matrices * quantized_bytes(get_format(slot.weight), n // candidate.shards, k)
    product = (kind, slot.weight, slot.activation, n, k, device, candidate.dtype)
    choice = registry.select(*product)
    refusal = ""
    if backend not in (AUTO, choice.name) or (kind == "experts" and backend != AUTO):
        refusal = registry.refusal(backend, *product)
        choice = registry.KernelChoice(backend, "the configuration asks for it")
    elif fast_accum and not registry.refusal(FAST_ACCUM, *product):
        backend = FAST_ACCUM
        choice = registry.KernelChoice(FAST_ACCUM, "fast_accum asks for it")
    loss = f"takes more bytes than before ({after} instead of {before})" if after > before else ""
    note = ""
    if kind != "embedding" and device != "meta":
        lost = _rows_lost_on_gpu(slot, n, k) if device == "cuda" and choice.name != "reference" else ()
        loss = loss or _slow(choice.name, n * k, device, lost)
        note = "" if loss else _slow_for_some(lost)
    reason = "; ".join(part for part in (choice.reason, _fast_accum(slot, fast_accum, choice.name), note) if part)
    return Forecast(choice.name, reason, after, loss, "" if backend == AUTO else backend, refusal)


def _slow(kernel: str, weights: int, device: str, lost: tuple[int, ...]) -> str:
    """Why a product is expected to be slower than in bfloat16, or ""."""
    if kernel == "reference":
        return "expected to be slower than in bfloat16: the reference decodes the weight in each call"
    if device == "cuda":
        return "expected to be slower than in bfloat16 whatever the number of rows" if lost == ROWS else ""
    if kernel == native.NAME and weights < SMALL:
        return f"expected to be slower than in bfloat16 for single rows: {weights} weights, fewer than {SMALL}"
    return ""


def _slow_for_some(lost: tuple[int, ...]) -> str:
    """With which numbers of rows a product is expected to be slower than in bfloat16, or ""."""
    return f"expected to be slower than in bfloat16 with {' and '.join(map(str, lost))} rows" if lost else ""


def _rows_lost_on_gpu(slot: Slot, n: int, k: int) -> tuple[int, ...]:
    """Of `ROWS`, those with which the layer is slower by the cost model."""
    here: Architecture | None = None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        here = of_capability(10 * major + minor)
    return rows_lost(slot, n, k, ARCHITECTURES.values() if here is None else (here,))


def _fast_accum(slot: Slot, asked: bool, kernel: str) -> str:
    """What the option comes to where no kernel with a less precise accumulation runs the layer."""
    floats = slot.activation is not None and get_format(slot.activation).element == "e4m3" and kernel != FAST_ACCUM
    return "fast_accum changes nothing: this kernel accumulates in float32" if asked and floats else ""
