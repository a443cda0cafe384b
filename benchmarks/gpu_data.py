"""What the parts of the GPU benchmark share: random data on the device, our quantization, launches, the copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from olq_fx import numerics
from olq_fx.formats import Format, get_format
from olq_fx.gpu_timing import Entry, Run

DEVICE = "cuda"
COPY = "torch copy"


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed bfloat16 on the GPU."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).bfloat16()


def capability() -> int:
    """Of the GPU: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def copy_entry(size: int) -> Entry:
    """torch's copy of as many bytes as are moved in all."""

    def make(number: int) -> Run:
        source = torch.empty(size // 2, dtype=torch.uint8, device=DEVICE).random_(256)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Entry(COPY, make, size, size)


def launching(calls: Sequence[Any]) -> Run:
    """A function that launches prepared kernels and nothing else."""

    def run() -> None:
        for call in calls:
            call.run()

    return run


def empty_parts(format: Format, rows: int, k: int) -> list[Tensor]:
    """Where an (rows, k) tensor is quantized to."""
    specs = numerics.part_specs(format, rows, k)
    return [torch.empty(spec.shape, dtype=spec.dtype, device=DEVICE) for spec in specs]


def quantized(x: Tensor, format: str) -> list[Tensor]:
    """The parts of `x` by the Triton kernels, in the plain rule of the format."""
    from olq_fx.kernels.triton_quantize import quantize

    return quantize(x, format, get_format(format).rules[0], capability() >= 89)
