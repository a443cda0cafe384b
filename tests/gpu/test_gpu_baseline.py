"""On a GPU: the baseline of the benchmark multiplies, so that its time means something."""

import gpu_baseline
import pytest
import torch

from olq_fx.kernels import reference

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="the GPU has no float8"
)
@pytest.mark.parametrize("shape", [(1, 128, 128), (70, 300, 640), (512, 1024, 4096)], ids=str)
def test_the_baseline_is_right(shape):
    m, n, k = shape
    x = reference.quantize(torch.randn(m, k), "fp8_per_block_dynamic", "amax")
    weight = reference.quantize(torch.randn(n, k), "fp8_per_block_static", "amax")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    gpu_baseline.multiply(*(part.cuda() for part in (x[0], weight[0], x[1], weight[1])), out)
    decoded = reference.dequantize(x, "fp8_per_block_dynamic", k, torch.float64)
    expected = decoded @ reference.dequantize(weight, "fp8_per_block_static", k, torch.float64).T
    assert float((out.cpu().double() - expected).norm() / expected.norm()) < 0.01
