"""How tensors are distributed over processes: what the library touches of torch.distributed, loaded where it is used.

    placement_of(tensor) -> Placement | None      how a DTensor lies on its mesh
    local_tensor, distributed, placed_like        from it and to it
    reduce_over(value, placement, "max" | "sum", dims)  a value of all processes that have pieces
    managed_by_fsdp, sharded_by_fsdp              what `fully_shard` does

`_local_tensor` and the names of FSDP's functions are private, and were tried with torch 2.13.
"""

# mypy: disable-error-code="no-untyped-call"

import dataclasses
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How a distributed tensor lies on a mesh of processes.

    Attributes:
        mesh: the mesh.
        placements: of each of its dimensions, as torch has them.
        shape, stride: of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def cuts(self) -> dict[int, int]:
        """Of each dimension of the tensor that is cut, the dimension of the mesh along which its pieces lie."""
        return {one.dim % len(self.shape): axis for axis, one in enumerate(self.placements) if one.is_shard()}

    def pieces(self, dim: int) -> int:
        """Into how many pieces a dimension of the tensor is cut."""
        return 1 if dim not in self.cuts else int(self.mesh.size(self.cuts[dim]))

    @property
    def unusual(self) -> str:
        """A placement that is neither a copy nor a plain piece, "" if there is none."""
        for one in self.placements:
            if not (type(one).__name__ == "Replicate" or (type(one).__name__ == "Shard" and one.is_shard())):
                return str(one)
        dims = [one.dim % len(self.shape) for one in self.placements if one.is_shard()]
        return f"two cuts along dimension {dims[0]}" if len(dims) != len(set(dims)) else ""


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is a DTensor; asking loads nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> Tensor:
    """The piece of a DTensor that this process has, without a step of autograd."""
    found: Tensor = tensor._local_tensor
    return found


def placement_of(tensor: Any) -> Placement | None:
    """How a tensor is distributed; None if it is not."""
    if not is_distributed(tensor):
        return None
    return Placement(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))


def distributed(local: Tensor, placement: Placement) -> Any:
    """A DTensor of the pieces that the processes have."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        placement.mesh,
        placement.placements,
        run_check=False,
        shape=torch.Size(placement.shape),
        stride=placement.stride,
    )


def placed_like(value: Any, placement: Placement) -> Tensor:
    """This process's piece of a value: of a DTensor on the same mesh however it lies there, or of a whole tensor."""
    from torch.distributed.tensor import distribute_tensor

    if not is_distributed(value):
        return local_tensor(distribute_tensor(value, placement.mesh, placement.placements, src_data_rank=None))
    if (value.device_mesh, tuple(value.placements)) == (placement.mesh, placement.placements):
        return local_tensor(value)
    # Not every way between processes takes float8.
    codes = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
    return local_tensor(codes.redistribute(placement.mesh, placement.placements)).view(value.dtype)


def shard_of(dim: int) -> Any:
    """The placement of pieces along a dimension."""
    from torch.distributed.tensor import Shard

    return Shard(dim)


def replicated() -> Any:
    """The placement of copies."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def reduce_over(value: Tensor, placement: Placement, operation: str, dims: Iterable[int]) -> Tensor:
    """Combine a value in place, by "max" or "sum", over the processes that have pieces along dimensions of a tensor."""
    import torch.distributed as dist

    operator = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[operation]
    for dim in dims:
        dist.all_reduce(value, op=operator, group=placement.mesh.get_group(placement.cuts[dim]))
    return value


def managed_by_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` has taken a module's parameters; asking loads nothing."""
    found = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(found, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


_DEPTH = 12
"""Frames between a tensor's own function and the one of FSDP that called it, at most."""


def sharded_by_fsdp() -> bool:
    """Whether the caller was called by `fully_shard` for a parameter that it cuts, or has cut and looks at again."""
    if "torch.distributed.fsdp._fully_shard._fsdp_param" not in sys.modules:
        return False
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name in _FSDP and "_fsdp_param" in frame.f_code.co_filename:
            return True
    return False


_FSDP = frozenset({"_init_sharded_param", "reset_sharded_param"})
