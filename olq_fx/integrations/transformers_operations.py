"""The operations that transformers runs on what it reads for a weight, before it sets the result as the parameter.

transformers logs the errors of operations, and then raises one that names none: these note them in `Faults` and go on.

    FillWeight(faults)                              values of a planned weight -> the weight, converted
    streamed(conversion, faults)                    experts one by one into their weight, instead of merging them first
    parts_converter(weights, faults, quantizer)     parts that were saved -> the weight
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from olq_fx.errors import ConversionError, OlqFxError
from olq_fx.integrations.hub_models import weight_at
from olq_fx.stored_weights import StoredWeight, take_parts
from olq_fx.weights import QuantizedWeight, fill, quantize_weight

_PATTERNS = ("olq_fx::codes", "olq_fx::scale", "olq_fx::coarse")
"""What transformers collects the parts of a weight under."""


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """What was wrong with the values of weights.

    Attributes:
        unfit: paths of weights whose values have another shape, which is for transformers to judge.
        messages: of all else, each with the path.
    """

    unfit: set[str] = dataclasses.field(default_factory=set)
    messages: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of this library instead of raising it."""
        try:
            yield
        except OlqFxError as error:
            self.messages.append(str(error))

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            ConversionError: something was.
        """
        if self.messages:
            raise ConversionError("; ".join(self.messages))


class FillWeight(ConversionOps):
    """Converts the values of planned weights; others pass as they are."""

    def __init__(self, faults: Faults) -> None:
        """For the weights of one model."""
        self.faults = faults

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """The weight in the place of its values, which nothing here refers to afterwards."""
        found: dict[str, Any] = {}
        for name, values in input_dict.items():
            values = values[0] if isinstance(values, list) else values
            weight = weight_at(kwargs["model"], name)
            if weight is None or values is weight:
                found[name] = values
            elif values.shape != weight.shape:
                self.faults.unfit.add(name)  # transformers says so, and raises or gives it new values
                found[name] = values
            else:
                found[name] = weight
                with self.faults.noted():
                    found[name] = _filled(weight, values)
        return found


def _filled(weight: QuantizedWeight, values: Tensor) -> Tensor:
    """The weight with its values; another one where it has others already, from a tensor that it was to be tied to."""
    if weight.pending is not None:
        fill(weight, values, values.dtype)
        return weight
    other = quantize_weight(values, weight.spec)
    if all(torch.equal(own, given) for own, given in zip(weight.parts, other.parts, strict=True)):
        return weight
    parameter: Any = nn.Parameter(other, requires_grad=False)
    parameter.path, parameter.was_trainable = weight.path, weight.was_trainable
    return parameter  # type: ignore[no-any-return]


class StreamExperts(ConversionOps):
    """Gives a pending weight the matrices of its experts one by one: merged first, they would be there twice."""

    def __init__(self, operations: Sequence[Any], faults: Faults) -> None:
        """For the weights of one model; `operations` are what is done for all other parameters."""
        self.operations, self.faults = operations, faults

    def __deepcopy__(self, memo: object) -> "StreamExperts":
        """Itself: transformers copies an operation for each weight."""
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """The weight in the place of its matrices, or these merged."""
        name = kwargs["full_layer_name"]
        weight = weight_at(kwargs["model"], name)
        shards = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if weight is not None and weight.pending is not None and _fit(weight, shards):
            input_dict.clear()
            with self.faults.noted():
                for place, values in _places(weight, shards):
                    place.copy_(values)
            return {name: weight}
        for operation in self.operations:
            input_dict = operation.convert(
                input_dict, source_patterns=source_patterns, target_patterns=target_patterns, **kwargs
            )
        return input_dict


def _fit(weight: QuantizedWeight, shards: Sequence[Any]) -> bool:
    """Whether lists of matrices (n, K), one list a shard, are the experts (E, N, K) of a weight."""
    if not shards or not all(isinstance(matrices, list) and len(matrices) == weight.shape[0] for matrices in shards):
        return False
    heights = [matrices[0].shape[0] for matrices in shards]
    return sum(heights) == weight.shape[1] and all(
        matrix.dtype == weight.dtype and matrix.shape == (height, weight.shape[2])
        for matrices, height in zip(shards, heights, strict=True)
        for matrix in matrices
    )


def _places(weight: QuantizedWeight, shards: Sequence[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each place in a weight with the matrix for it, which is freed afterwards."""
    for expert in range(weight.shape[0]):
        top = 0
        for matrices in shards:
            matrix = matrices.pop(0)
            yield weight[expert, top : top + matrix.shape[0]], matrix
            top += matrix.shape[0]


def streamed(conversion: Any, faults: Faults) -> Any:
    """A conversion of transformers, without merging first where it merges the experts of a layer; else itself."""
    if not isinstance(conversion, WeightConverter):
        return conversion
    steps = [(type(operation), operation.dim) for operation in conversion.operations if hasattr(operation, "dim")]
    chains = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
    if len(steps) != len(conversion.operations) or steps not in chains:
        return conversion
    return conversion.copy(
        list(conversion._original_source_patterns),
        list(conversion._original_target_patterns),
        operations=[StreamExperts(conversion.operations, faults)],
    )


class TakeParts(ConversionOps):
    """Gives a pending weight the parts that were saved of it."""

    def __init__(self, weights: Mapping[str, StoredWeight], faults: Faults, quantizer: object) -> None:
        """For the weights of one model, by their paths.

        `quantizer` is not used: transformers casts no tensor for an operation with a `hf_quantizer`.
        """
        self.weights, self.faults = weights, faults
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo: object) -> "TakeParts":
        """Itself: transformers copies an operation for each weight."""
        return self

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """The weight, in the place of its parts."""
        model, name = kwargs["model"], kwargs["full_layer_name"]
        weight = self.weights[name]
        parts = {weight.parts[_PATTERNS.index(pattern)]: tensors[0] for pattern, tensors in input_dict.items()}
        with self.faults.noted():
            take_parts(model, weight, parts)
        return {name: model.get_parameter(name)}


class PartsConverter(WeightConverter):
    """Collects the parts of each stored weight; the names are looked up, since patterns would be tried one by one."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, tuple[str, str]], operation: TakeParts) -> None:
        """Collect parts.

        Args:
            names: of each part the path of its weight, and which part it is (one of `_PATTERNS`).
            operation: what gets them.
        """
        super().__init__(list(_PATTERNS), ["olq_fx::weight"], [operation])
        self.names = names

    def __deepcopy__(self, memo: object) -> "PartsConverter":
        """One that has collected nothing."""
        operation: Any = self.operations[0]
        return PartsConverter(self.names, operation)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The weight that a tensor in the files is a part of, and which."""
        found = self.names.get(source_key)
        if found is None:
            return source_key, None
        self._was_used = True
        return found


def parts_converter(weights: Mapping[str, StoredWeight], faults: Faults, quantizer: object) -> PartsConverter:
    """What collects and takes the parts of the stored weights of a model, by their paths."""
    names = {
        part: (path, pattern)
        for path, weight in weights.items()
        for part, pattern in zip(weight.parts, _PATTERNS, strict=False)
    }
    return PartsConverter(names, TakeParts(weights, faults, quantizer))
