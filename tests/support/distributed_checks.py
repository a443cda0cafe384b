"""What is checked in each of two processes that share weights: pieces, `fully_shard`, checkpoints of other cuts."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import olq_fx
from olq_fx.errors import ConversionError, UnsupportedError
from olq_fx.numerics import part_specs
from olq_fx.testing import assert_same_bits, sqnr
from olq_fx.weights import QuantizedWeight

K, INNER = 512, 1024
FEW = ("fp8_per_tensor", "fp8_per_block", "int8", "mxfp4_dualscale", "nvfp4_per_token")


class Mlp(nn.Module):
    def __init__(self, hidden: int = K, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def mlp(hidden: int = K, inner: int = INNER) -> Mlp:
    torch.manual_seed(7)
    model = Mlp(hidden, inner)
    with torch.no_grad():  # a maximum that only one process has
        model.up.weight[-1, -1], model.down.weight[0, 0] = 3.0, 5.0
    return model


def parallel(model: Mlp) -> tuple[Mlp, object]:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, mesh


def local(parameter: torch.Tensor) -> QuantizedWeight:
    assert isinstance(parameter, DTensor)
    found = parameter._local_tensor
    assert isinstance(found, QuantizedWeight)
    return found


def assert_slice(piece: QuantizedWeight, whole: QuantizedWeight, dim: int, rank: int) -> None:
    """The parts of a piece are those of the whole between the cuts."""
    n, k = whole.shape
    own = part_specs(whole.spec.format, n // 2 if dim == 0 else n, k // 2 if dim == 1 else k)
    for part, all_of_it, spec in zip(piece.parts, whole.parts, own, strict=True):
        assert part.shape == spec.shape
        index = []
        for axis in (0, 1):
            same = part.shape[axis] == all_of_it.shape[axis]
            start = 0 if same else part.shape[axis] * rank
            index.append(slice(start, start + part.shape[axis]))
        assert_same_bits(part, all_of_it[tuple(index)].contiguous())


def check_tensor_parallel(rank: int, scheme: str) -> None:
    whole, (model, _) = mlp(), parallel(mlp())
    report = olq_fx.quantize_(model, scheme)
    assert report.converted == ("up.weight", "down.weight")
    olq_fx.quantize_(whole, scheme)
    assert_slice(local(model.up.weight), whole.up.weight, 0, rank)
    assert_slice(local(model.down.weight), whole.down.weight, 1, rank)
    assert (model.up.weight.shape, model.down.weight.shape) == ((INNER, K), (K, INNER))
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y, expected = model(x), whole(x)
    assert sqnr(y.detach(), expected.detach()) > 15  # activations are quantized by slices: another rounding
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    again = olq_fx.quantize_(model, scheme)
    assert not again.converted
    olq_fx.dequantize_(model)
    assert isinstance(model.up.weight, DTensor)
    assert_same_bits(model.up.weight.full_tensor().detach(), whole.up.weight.dequantize())


def check_illegal_cuts(rank: int) -> None:
    for hidden, inner, scheme, path, cut in (
        (192, 320, "fp8_per_block", "up.weight", "320 rows are cut after 160, within a group of 128.*is after 128"),
        (192, 96, "mxfp8", "down.weight", "96 columns are cut after 48, within a group of 32.*is after 64"),
        (512, 512, "mxfp4_dualscale", "down.weight", "512 columns are cut after 256.*is after 512"),
    ):
        model, _ = parallel(mlp(hidden, inner))
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        with pytest.raises(ConversionError, match=rf"{path}: its {cut}"):
            olq_fx.quantize_(model, scheme)
        assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    model, _ = parallel(mlp())
    with torch.no_grad():
        if rank == 1:  # only one process sees it, all refuse
            model.down.weight._local_tensor[0, 0] = torch.nan
    with pytest.raises(ConversionError, match=r"down\.weight: 1 of 524288 values are NaN"):
        olq_fx.quantize_(model, "int8")


def check_copies_and_experts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model, whole = mlp(), mlp()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Replicate()]))
    olq_fx.quantize_(model, {"linear": "nvfp4_per_token", "ignore": ["down"]})
    olq_fx.quantize_(whole, "nvfp4_per_token")
    for part, other in zip(local(model.up.weight).parts, whole.up.weight.parts, strict=True):
        assert_same_bits(part, other)
    experts = nn.Module()
    experts.experts = nn.Module()
    values = torch.randn(4, 64, 96, generator=torch.Generator().manual_seed(3))
    for name, shape in (("gate_up_proj", (4, 64, 96)), ("down_proj", (4, 96, 32))):
        given = values if name == "gate_up_proj" else torch.ones(shape)
        experts.experts.register_parameter(name, nn.Parameter(distribute_tensor(given, mesh, [Shard(0)])))
    olq_fx.quantize_(experts, "fp8_per_tensor")
    piece = local(experts.experts.gate_up_proj)
    assert piece.shape == (2, 64, 96)
    assert (piece.dequantize() - values[2 * rank : 2 * rank + 2]).abs().max() < 0.2


def check_fully_shard(rank: int, scheme: str) -> None:
    whole, model = mlp(), mlp()
    for one in (whole, model):
        olq_fx.quantize_(one, scheme)
    bytes_before = sum(part.nbytes for part in model.up.weight.parts)
    fully_shard(model)
    piece = local(model.up.weight)
    assert sum(part.nbytes for part in piece.parts) <= bytes_before // 2 + 8
    assert_slice(piece, whole.up.weight, 0, rank)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    other = x.detach().clone().requires_grad_()
    for _ in range(2):
        y, expected = model(x), whole(other)
        assert_same_bits(y.detach(), expected.detach())
    y.sum().backward()
    expected.sum().backward()
    assert_same_bits(x.grad, other.grad)
    assert local(model.up.weight).shape == (INNER // 2, K)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 96, generator=torch.Generator().manual_seed(4)))
        self.down_proj = nn.Parameter(torch.randn(4, 96, 32, generator=torch.Generator().manual_seed(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(x, self.gate_up_proj.mT).chunk(2, -1)
        return torch.bmm(nn.functional.silu(gate) * up, self.down_proj.mT)


def check_pieces_of_experts(rank: int) -> None:
    whole, model = nn.ModuleDict({"experts": Experts()}), nn.ModuleDict({"experts": Experts()})
    for one in (whole, model):
        olq_fx.quantize_(one, "fp8_per_block")
    fully_shard(model["experts"])
    assert local(model["experts"].gate_up_proj).shape == (2, 64, 96)
    x = torch.randn(4, 3, 96)
    assert_same_bits(model["experts"](x).detach(), whole["experts"](x).detach())


def check_compiled(rank: int) -> None:
    for backend in ("eager", "aot_eager"):
        model, _ = parallel(mlp())
        olq_fx.quantize_(model, "int8")
        x = torch.randn(3, K)
        assert_same_bits(torch.compile(model, backend=backend)(x).detach(), model(x).detach())


def check_adapters_train_beside_pieces(rank: int) -> None:
    model = nn.Sequential(nn.Linear(K, K), mlp())
    olq_fx.quantize_(model, {"linear": "fp8_per_block", "ignore": ["0"]})
    fully_shard(model)
    before = local(model[1].up.weight).codes.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x, losses = torch.randn(16, K), []
    for _ in range(3):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_bits(local(model[1].up.weight).codes, before)


def check_what_fully_shard_refuses(rank: int) -> None:
    model = mlp(192, 320)
    olq_fx.quantize_(model, "fp8_per_block")
    with pytest.raises(UnsupportedError, match=r"'up\.weight': fully_shard cuts its 320 rows after 160.*is after 128"):
        fully_shard(model)
    model = mlp(192, 321)
    olq_fx.quantize_(model, {"linear": "int8"})
    with pytest.raises(UnsupportedError, match=r"'up\.weight': fully_shard cuts its 321 rows into pieces of 161"):
        fully_shard(model)
    model = fully_shard(mlp())
    with pytest.raises(ConversionError, match=r"up\.weight: fully_shard has cut it.*call quantize_ before fully_shard"):
        olq_fx.quantize_(model, "int8")


def check_checkpoints(rank: int, folder: str, scheme: str) -> None:
    whole, (model, _) = mlp(), parallel(mlp())
    olq_fx.quantize_(whole, scheme)
    olq_fx.quantize_(model, scheme)
    state = model.state_dict()
    for name, value in state.items():
        assert type(value) is DTensor or name == "down.bias", name
        assert type(value._local_tensor) is torch.Tensor or isinstance(value._local_tensor, torch.Tensor)
        assert not isinstance(value._local_tensor, QuantizedWeight)
    dcp.save(state, checkpoint_id=f"{folder}/{scheme}")
    # Into a whole model, and from there into one that FSDP has cut along the other axis.
    fresh = Mlp()
    olq_fx.quantize_(fresh, scheme)
    loaded = fresh.state_dict()
    dcp.load(loaded, checkpoint_id=f"{folder}/{scheme}")
    fresh.load_state_dict(loaded)
    for name, part in whole.state_dict().items():
        assert_same_bits(part, fresh.state_dict()[name])
    dcp.save(fresh.state_dict(), checkpoint_id=f"{folder}/{scheme}-whole")
    cut = Mlp()
    olq_fx.quantize_(cut, scheme)
    fully_shard(cut)
    loaded = cut.state_dict()
    dcp.load(loaded, checkpoint_id=f"{folder}/{scheme}-whole")
    cut.load_state_dict(loaded)
    assert_slice(local(cut.down.weight), whole.down.weight, 0, rank)
    x = torch.randn(2, K)
    assert_same_bits(cut(x).detach(), whole(x).detach())
    # Whole tensors are cut by whoever loads them; pieces are put together by `full_tensor`.
    for name, part in whole.state_dict().items():
        piece = cut.state_dict()[name].detach()
        if part.dtype.itemsize == 1:  # gloo gathers no float8
            piece, part = piece.view(torch.uint8), part.view(torch.uint8)
        assert_same_bits(piece.full_tensor() if isinstance(piece, DTensor) else piece, part)
    other, _ = parallel(Mlp())
    olq_fx.quantize_(other, scheme)
    weights = {name: part for name, part in whole.state_dict().items() if "bias" not in name}  # torch cuts no biases
    other.load_state_dict(weights, strict=False)
    assert_slice(local(other.down.weight), whole.down.weight, 1, rank)
    dcp.load(again := other.state_dict(), checkpoint_id=f"{folder}/{scheme}")
    other.load_state_dict(again)
    assert_slice(local(other.up.weight), whole.up.weight, 0, rank)


def check_original_precision_refreshes_pieces(rank: int) -> None:
    whole, (model, _) = mlp(), parallel(Mlp())
    olq_fx.quantize_(model, "int8")
    pointer = local(model.up.weight).codes.data_ptr()
    source, _ = parallel(mlp())
    model.load_state_dict(source.state_dict())
    olq_fx.quantize_(whole, "int8")
    assert local(model.up.weight).codes.data_ptr() == pointer
    assert_slice(local(model.up.weight), whole.up.weight, 0, rank)


def check_data_parallel(rank: int) -> None:
    model, whole = mlp(), mlp()
    for one in (model, whole):
        olq_fx.quantize_(one, "mxfp8")
    ddp = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(3, K)
    assert_same_bits(ddp(x).detach(), whole(x).detach())
    ddp(x).sum().backward()


def everything(rank: int, folder: str, schemes: tuple[str, ...]) -> None:
    for scheme in schemes:
        check_tensor_parallel(rank, scheme)
        check_fully_shard(rank, scheme)
    check_illegal_cuts(rank)
    check_copies_and_experts(rank)
    check_pieces_of_experts(rank)
    check_compiled(rank)
    check_adapters_train_beside_pieces(rank)
    check_what_fully_shard_refuses(rank)
    for scheme in schemes[-2:]:
        check_checkpoints(rank, folder, scheme)
    check_original_precision_refreshes_pieces(rank)
    check_data_parallel(rank)
