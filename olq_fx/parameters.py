"""The parameters of a model: how many bytes they take, and which of them are one weight under several names.

API:
    Parameters(model).modules     every module once
        .bytes                    the size of all parameters, shared ones once, in original precision
        .shared                   identity of a tensor -> what stands for its weight, for weights with several names
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

PLAIN = (nn.Parameter, Tensor)
"""Types of tensors whose storage tells which weight they are; others hide it."""


class Parameters:
    """What one walk through the modules of a model tells of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        """Look at every parameter once; nothing is read but shapes and types."""
        self.modules: list[nn.Module] = []
        self.shared: dict[int, object] = {}
        self._again: list[nn.Module] = []
        self._sizes: dict[object, int] = {}
        self._first: dict[object, int] = {}
        storages: list[object] = []  # kept alive: their identities are keys
        for module in self._distinct(model):
            self.modules.append(module)
            for tensor in module._parameters.values():
                if tensor is not None:
                    self._add(tensor, storages)
        for module in self._again:
            self._share(module)

    @property
    def bytes(self) -> int:
        """The size of all parameters, shared ones once, a converted one in its original precision."""
        return sum(self._sizes.values())

    def _distinct(self, model: nn.Module) -> Iterator[nn.Module]:
        """Every module once; those that have several places are noted."""
        seen = {id(model)}
        pending = [model]
        while pending:
            module = pending.pop()
            yield module
            for child in module._modules.values():
                if child is None:
                    continue
                if id(child) in seen:
                    self._again.append(child)
                else:
                    seen.add(id(child))
                    pending.append(child)

    def _add(self, tensor: Tensor, storages: list[object]) -> None:
        key: object = id(tensor)
        if type(tensor) in PLAIN and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages.append(storage)
            count = tensor.numel()
            if count:
                key = (id(storage), tensor.storage_offset(), *tensor.shape, *tensor.stride(), tensor.dtype)
        elif nn.parameter.is_lazy(tensor):
            count = 0
        else:
            count = tensor.numel()
        if key in self._first:
            self.shared[self._first[key]] = self.shared[id(tensor)] = key
        else:
            self._first[key] = id(tensor)
            self._sizes[key] = count * tensor.dtype.itemsize

    def _share(self, module: nn.Module) -> None:
        """Note that all parameters in a module have several names: the module has."""
        for inner in module.modules():
            for tensor in inner._parameters.values():
                if tensor is not None:
                    self.shared.setdefault(id(tensor), id(tensor))
