"""How many kernels Inductor emits for the CPU, and what is fused in them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import Kernels, count_kernels

D = 256
PRODUCT = "torch.ops.olq_fx.quantized_linear.default"
DEFAULT = ("fp8_per_block", "nvfp4_per_token")
OTHERS = [name for name, scheme in SCHEMES.items() if scheme.linear.activation and name not in DEFAULT]
schemes = pytest.mark.parametrize("scheme", [*DEFAULT, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Projections(nn.Module):
    """Norm, then q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(x)
        return self.q(x), self.k(x), self.v(x)


class FeedForward(nn.Module):
    """Norm, SiLU(gate) x up, down, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate, self.up = (nn.Linear(D, 2 * D, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def kernels(module: nn.Module, scheme: str) -> Kernels:
    with torch.no_grad():
        return count_kernels(module.bfloat16(), torch.randn(2, 16, D).bfloat16(), backend=olq_fx.backend(scheme))


@schemes
def test_norm_and_the_quantization_for_q_k_and_v_are_one_kernel(scheme: str):
    found = kernels(Projections(), scheme)
    assert len(found.generated) == 1, found.generated
    assert "rsqrt" in found.generated[0]
    assert "quantize" in found.generated[0]
    assert found.external == (PRODUCT,) * 3


@schemes
def test_silu_times_up_and_quantization_are_one_kernel_and_the_residual_is_none(scheme: str):
    found = kernels(FeedForward(), scheme)
    assert len(found.generated) == 2, found.generated
    assert "silu" in found.generated[1]
    assert "quantize" in found.generated[1]
    assert found.external == (PRODUCT,) * 3
