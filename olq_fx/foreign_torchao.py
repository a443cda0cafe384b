"""Parameters that torchao has quantized, taken over in place: codes and scales stay the tensors that they are.

    take_over(model) -> TakenOver      .undo() puts back what stood there

| class | format here |
| --- | --- |
| Float8Tensor | fp8 by tensor, row or block |
| Int8Tensor without zero points | int8 by row |
| MXTensor | mxfp8, mxfp4; scales are brought from the order of tensor cores into that of rows |
| NVFP4Tensor | nvfp4; the scale of the tensor is stored as its reciprocal |

Classes are known by their names and attributes: torchao is not imported. What is none of these stays as it is.
"""

import dataclasses
import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from olq_fx import state
from olq_fx.formats import block_formats, get_format
from olq_fx.numerics import Parts, part_specs
from olq_fx.weights import QuantizedWeight, WeightSpec

_LIBRARY = "torchao"
_BLOCK = (128, 4)
"""The rows and columns of scales that tensor cores read as one block, 32 rows by 4 of these after another."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakenOver:
    """What was taken over.

    Attributes:
        formats: paths of parameters, each with its format.
        originals: what stood where.
    """

    formats: tuple[tuple[str, str], ...]
    originals: tuple[tuple[nn.Module, str, Any], ...]

    def undo(self) -> None:
        """Put the parameters of torchao back."""
        for module, leaf, original in self.originals:
            module._parameters[leaf] = original
            if not state.converted_weights(module):
                state.detach(module)


def take_over(model: nn.Module) -> TakenOver:
    """Make converted weights of the parameters of torchao whose format is one of ours; tied ones stay tied."""
    made: dict[int, Any] = {}
    formats: list[tuple[str, str]] = []
    originals: list[tuple[nn.Module, str, Any]] = []
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if type(parameter).__module__.partition(".")[0] != _LIBRARY:
                continue
            name = f"{path}.{leaf}" if path else leaf
            if id(parameter) not in made:
                made[id(parameter)] = _taken(parameter, name)
            weight = made[id(parameter)]
            if weight is not None:
                originals.append((module, leaf, parameter))
                formats.append((name, weight.spec.weight))
                state.attach(module)
                module._parameters[leaf] = weight
    return TakenOver(tuple(formats), tuple(originals))


def _taken(parameter: Any, path: str) -> nn.Parameter | None:
    kind = type(parameter).__name__
    read = _READERS.get(kind)
    found = None if read is None or parameter.dim() != 2 else read(parameter)
    if found is None:
        return None
    format, parts = get_format(found[0]), found[1]
    n, k = parameter.shape
    for part, spec in zip(parts, part_specs(format, n, k), strict=True):
        if tuple(part.shape) != spec.shape or part.dtype != spec.dtype:
            return None
    activation = "" if getattr(parameter, "act_quant_kwargs", None) is None else format.default_activation or ""
    spec_of_weight = WeightSpec(
        weight=format.name,
        activation=activation,
        weight_rule=format.weight_rule,
        activation_rule=get_format(activation).activation_rule if activation else "",
    )
    weight = nn.Parameter(QuantizedWeight(parts, spec_of_weight, parameter.dtype, (n, k)), requires_grad=False)
    taken: Any = weight
    taken.path, taken.was_trainable = path, parameter.requires_grad
    return weight


def _float8(tensor: Any) -> tuple[str, Parts] | None:
    n, k = tensor.qdata.shape
    scale, block = tensor.scale, tuple(tensor.block_size)
    if tensor.qdata.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        return None
    if scale.numel() == 1:
        return "fp8_per_tensor_static", (tensor.qdata, scale.reshape(1, 1))
    if block == (1, k):
        return "fp8_per_channel_static", (tensor.qdata, scale.reshape(n, 1))
    return block_formats(*block)[0], (tensor.qdata, scale)


def _int8(tensor: Any) -> tuple[str, Parts] | None:
    n, k = tensor.qdata.shape
    zeros = getattr(tensor, "zero_point", None)
    if tuple(tensor.block_size) != (1, k) or (zeros is not None and bool(zeros.count_nonzero())):
        return None
    return "int8_per_channel_static", (tensor.qdata, tensor.scale.float().reshape(n, 1))


def _mx(tensor: Any) -> tuple[str, Parts] | None:
    if tensor.block_size != 32 or tensor.qdata.dtype not in (torch.float8_e4m3fn, torch.uint8):
        return None
    n, k = tensor.shape
    scale = tensor.scale.view(torch.uint8)
    name = "mxfp8" if tensor.qdata.dtype == torch.float8_e4m3fn else "mxfp4"
    return name, (tensor.qdata, _by_rows(scale, n, math.ceil(k / 32), swizzled=bool(tensor.is_swizzled_scales)))


def _nvfp4(tensor: Any) -> tuple[str, Parts] | None:
    n, k = tensor.shape
    scale = tensor.scale.view(torch.uint8)
    scale = _by_rows(scale, n, math.ceil(k / 16), swizzled=bool(tensor.is_swizzled_scales)).view(torch.float8_e4m3fn)
    whole = tensor.per_tensor_scale
    one = torch.ones((), device=scale.device)
    return "nvfp4", (tensor.qdata.view(torch.uint8), scale, (one if whole is None else 1 / whole.float()).reshape(1, 1))


def _by_rows(scale: Tensor, n: int, columns: int, *, swizzled: bool) -> Tensor:
    """Scales (n, columns), out of the blocks in which tensor cores read them."""
    if not swizzled:
        return scale.reshape(n, columns)
    down, across = math.ceil(n / _BLOCK[0]), math.ceil(columns / _BLOCK[1])
    pattern = "(down across low high column) -> (down high low) (across column)"
    rows = rearrange(
        scale.reshape(-1), pattern, down=down, across=across, low=32, high=_BLOCK[0] // 32, column=_BLOCK[1]
    )
    return rows[:n, :columns].contiguous()


_READERS = {"Float8Tensor": _float8, "Int8Tensor": _int8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}
