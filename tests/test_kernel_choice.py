"""The kernel that a configuration asks for runs the layer in both routes, or is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import PlanError
from olq_fx.kernels import native, reference
from olq_fx.plan import plan_for
from olq_fx.testing import assert_layer_close


class Block(nn.Module):
    """Two layers and a residual, which is fused into the second product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran products, in their order."""
    ran: list[str] = []

    def spy(module: Any, function: str, name: str) -> None:
        original = getattr(module, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, watched)

    spy(native, "_product", "native_cpu")
    spy(reference, "_product", "reference")
    return ran


@pytest.mark.parametrize("scheme", ["int8", "mxfp4_weight_only"])
@pytest.mark.parametrize("asked", ["auto", "native_cpu", "reference"])
def test_the_kernel_that_is_asked_for_runs(route, products, scheme, asked):
    model, x = Block(), torch.randn(3, 40)
    config = {"quantization": scheme, "linear_backend": asked}
    quantized = route(model, config, x)
    products.clear()
    quantized(x)
    name = "native_cpu" if asked == "auto" else asked
    assert products == [name, name]
    rows = quantized.report.plan.quantized
    assert {row.kernel for row in rows} == {name}
    assert {row.requested_kernel for row in rows} == {"" if asked == "auto" else asked}
    assert all(("asks for it" in row.kernel_reason) == (asked == "reference") for row in rows)
    assert_layer_close(model.up(x), x, model.up.weight, model.up.bias)


def test_gradients_flow_through_the_kernel_that_is_asked_for(route, products):
    model, x = Block(), torch.randn(3, 40, requires_grad=True)
    quantized = route(model, {"quantization": "int8", "linear_backend": "reference"}, x)
    products.clear()
    quantized.run(x).sum().backward()
    assert "native_cpu" not in products
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_inductor_calls_the_kernel_that_is_asked_for(products):
    model, x = Block(), torch.randn(3, 40)
    compiled = torch.compile(model, backend=olq_fx.backend("int8", linear_backend="reference"))
    with torch.no_grad():
        compiled(x)
        products.clear()
        compiled(x)
    assert products == ["reference", "reference"]


def test_experts_have_a_backend_of_their_own():
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "experts": nn.ModuleList([nn.Linear(8, 8)])})
    plan = plan_for({"quantization": "int8", "moe_backend": "reference"}, model)
    assert [(row.kind, row.requested_kernel) for row in plan.rows] == [("linear", ""), ("moe", "reference")]


@pytest.mark.parametrize("strict", [True, False])
def test_a_kernel_that_cannot_run_a_layer_is_an_error_that_names_it(strict):
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "experts": nn.ModuleList([nn.Linear(8, 8)])})
    for key, path in (("linear_backend", "up.weight"), ("moe_backend", "experts.0.weight")):
        with pytest.raises(PlanError) as caught:
            plan_for({"quantization": "int8", key: "native_cpu"}, model, device="cuda", strict=strict)
        assert str(caught.value) == (
            "linear_backend and moe_backend name kernels that cannot run these layers; name another or 'auto': "
            f"{path}: native_cpu: runs on cpu, not on cuda"
        )


def test_on_meta_no_kernel_is_refused_for_the_device():
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    row = plan_for({"quantization": "int8", "linear_backend": "native_cpu"}, model).rows[0]
    assert (row.kernel, row.requested_kernel) == ("native_cpu", "native_cpu")
    olq_fx.quantize_(model, {"quantization": "int8", "linear_backend": "reference"})
    model.load_state_dict(nn.Linear(8, 8).state_dict(), assign=True)
    weight: Any = model.weight
    assert weight.spec.kernel == "reference"


def test_fast_accum_says_what_it_comes_to():
    model = nn.ModuleDict({"up": nn.Linear(8, 8)})
    reason = plan_for({"quantization": "fp8", "fast_accum": True}, model).rows[0].kernel_reason
    assert "fast_accum changes nothing: this kernel accumulates in float32" in reason
    for config in ({"quantization": "fp8"}, {"quantization": "int8", "fast_accum": True}):
        assert "fast_accum" not in plan_for(config, model).rows[0].kernel_reason


def test_fast_accum_on_a_gpu_is_a_kernel_of_its_own():
    model = nn.ModuleDict({"up": nn.Linear(4096, 4096, device="meta", dtype=torch.bfloat16)})
    row = plan_for({"quantization": "fp8_per_channel", "fast_accum": True}, model, device="cuda").rows[0]
    assert (row.kernel, row.requested_kernel) == ("triton_fast_accum", "triton_fast_accum")
    assert "fast_accum asks for it" in row.kernel_reason
    row = plan_for({"quantization": "fp8_per_block", "fast_accum": True}, model, device="cuda").rows[0]
    assert (row.kernel, row.requested_kernel) == ("triton", "")
    assert "fast_accum changes nothing" in row.kernel_reason
    assert plan_for("fp8_per_channel", model, device="cuda").rows[0].kernel == "triton"


def test_expected_losses_are_said_and_can_be_skipped():
    sizes = {"tiny": (2, 2), "small": (256, 256), "large": (1024, 512)}
    with torch.device("cpu"):
        model = nn.ModuleDict({name: nn.Linear(*size, dtype=torch.bfloat16) for name, size in sizes.items()})
    warned = {row.module_path: row.warning for row in plan_for("mxfp8", model).rows}
    assert warned["tiny"]
    if not native.why_not():
        assert warned["small"] == (
            "expected to be slower than in bfloat16 for single rows: 65536 weights, fewer than 524288"
        )
        assert warned["large"] == ""
        plan = plan_for({"quantization": "mxfp8", "skip_unprofitable": True}, model)
        assert [row.module_path for row in plan.quantized] == ["large"]
        assert plan.lookup("small.weight").reason == f"unprofitable (skip_unprofitable): {warned['small']}"
    on_gpu = {row.module_path: row.warning for row in plan_for("fp8_per_block", model, device="cuda").rows}
    assert on_gpu["tiny"] == "expected to be slower than in bfloat16 whatever the number of rows"
    assert on_gpu["small"] == on_gpu["large"] == ""
    elsewhere = plan_for("mxfp8", model, device="mps")
    assert {row.warning for row in elsewhere.rows} == {
        "expected to be slower than in bfloat16: the reference decodes the weight in each call"
    }
    with pytest.raises(PlanError, match=r"nothing would be quantized; .*unprofitable \(skip_unprofitable\)"):
        plan_for({"quantization": "mxfp8", "skip_unprofitable": True}, model, device="mps")
    assert {row.warning for row in plan_for("mxfp8", model.to("meta")).rows} == {""}


def test_a_larger_weight_is_a_loss_on_every_device():
    with torch.device("meta"):
        model = nn.ModuleDict({"column": nn.Linear(1, 64, dtype=torch.bfloat16), "up": nn.Linear(64, 64)})
    row = plan_for("fp8_per_channel", model).lookup("column.weight")
    assert row.warning == "takes more bytes than before (320 instead of 128)"
    plan = plan_for({"quantization": "fp8_per_channel", "skip_unprofitable": True}, model)
    assert [row.module_path for row in plan.quantized] == ["up"]


def test_the_summary_counts_the_losses():
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
    text = str(plan_for("int8", model))
    assert "warning: 2 weights are expected to be larger or slower than before, up.weight among them" in text
    with torch.device("meta"):
        assert "warning" not in str(plan_for("int8", nn.Linear(64, 64)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 48, 40))
        self.down_proj = nn.Parameter(torch.randn(2, 40, 24))


def test_of_experts_in_one_tensor_only_what_runs_them_can_be_asked_for():
    """Their operators choose for themselves: what they would not run is refused, on meta too."""
    for device, runs in (("cpu", "native_cpu"), ("cuda", "triton"), ("meta", "native_cpu or triton")):
        with torch.device("meta"):
            model = nn.ModuleDict({"experts": Experts()})
        with pytest.raises(PlanError, match=f"experts in one tensor are run by {runs}"):
            plan_for({"moe": "int8", "moe_backend": "reference"}, model, device=None if device == "meta" else device)
    plan = plan_for({"moe": "int8", "moe_backend": "native_cpu"}, nn.ModuleDict({"experts": Experts()}))
    assert {row.kernel for row in plan.quantized} == {"native_cpu"}
