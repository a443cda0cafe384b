"""Names of checkpoints and of models of transformers 5: its own rules, without tensors that are put together first.

transformers renames, and it merges, concatenates, splits and permutes tensors (`transformers.core_model_loading`). What
only puts tensors side by side (experts one by one, gate and up) is told here as a place in the parameter for each of
them, so that nothing is held but one tensor. What is computed of one tensor is computed of it when it comes; only
what needs several tensors to compute values has them all in memory, for one weight.
"""

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx.loading_names import Apart, Ignored, Naming, Piece, Route, Together, Whole
from olq_fx.loading_slots import Slot
from olq_fx.loading_stored import StoredTensor

_NUMBER = r"(?P<olq_fx_number>\d+)\."
_NOT_RECOMPUTED = {True: torch.nan, False: -(2**31) + 1}
"""What stands in a buffer of floating numbers, or of integers, before a model computes it."""


def naming_of(model: nn.Module, slots: Mapping[str, Slot], tensors: Sequence[StoredTensor]) -> Naming | None:
    """The rules for a model of transformers; None for any other."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    return TransformersNaming(model, slots, tensors)


class TransformersNaming(Naming):
    """The rules of transformers for one model."""

    def __init__(self, model: Any, slots: Mapping[str, Slot], tensors: Sequence[StoredTensor]) -> None:
        """Ask transformers for the rules.

        Args:
            model: a `transformers.PreTrainedModel`.
            slots: its places by their names.
            tensors: what is to be loaded, as far as it is known.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        super().__init__(slots)
        self._model, self._slots = model, {name: slot.tensor for name, slot in slots.items()}
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._unexpected, self._may_miss = _ignored(model)
        self._shapes: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
        for tensor in tensors:
            target, pattern = self._renamed(tensor.name)
            if pattern is not None:
                self._shapes[target, pattern].append(tensor.shape)

    def may_miss(self, name: str) -> bool:
        """`_keys_to_ignore_on_load_missing`."""
        return self._may_miss(name)

    def twin(self, name: str) -> str:
        """`_tied_weights_keys`, where the model ties by copying the reference later."""
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        if name in tied:
            return tied[name]
        return next((taker for taker, giver in tied.items() if giver == name), "")

    def route(self, tensor: StoredTensor) -> Route:
        """Where a tensor goes."""
        target, pattern = self._renamed(tensor.name)
        if target in self._slots:
            return Whole(target) if pattern is None else self._converted(tensor, target, pattern)
        return Ignored() if self._unexpected(target) or self._unexpected(tensor.name) else None

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The name of the place, the first of several, and the pattern of the converter that has matched."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        found, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._slots)
        if found not in self._slots and name in self._slots:
            return rename_source_key(name, [], [], prefix, self._slots)
        return found, pattern

    def _converted(self, tensor: StoredTensor, target: str, pattern: str) -> Route:
        rule = self._by_pattern[pattern]
        piece = self._piece(tensor, target, pattern, rule)
        if piece is not None:
            return piece
        alone = len(rule.source_patterns) == 1 and "*" not in pattern and len(self._shapes[target, pattern]) <= 1
        if alone:
            return Apart(lambda values: self._run(rule, target, [(tensor.name, pattern, values)]))

        def merge(found: Sequence[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
            from transformers.core_model_loading import dot_natural_key

            ordered = sorted(found, key=lambda pair: dot_natural_key(pair[0]))
            return self._run(rule, target, [(name, self._renamed(name)[1], values) for name, values in ordered])

        return Together(target, merge)

    def _run(self, rule: Any, target: str, found: Sequence[tuple[str, str | None, Tensor]]) -> dict[str, Tensor]:
        """Let transformers convert."""
        own = copy.deepcopy(rule)
        for name, pattern, values in found:
            own.add_tensor(target, name, pattern, values)
        made = own.convert(target, model=self._model, config=self._model.config)
        return {name: values[0] if isinstance(values, list) else values for name, values in made.items()}

    def _piece(self, tensor: StoredTensor, target: str, pattern: str, rule: Any) -> Piece | None:
        """The place of a tensor in a parameter, if the rule only puts tensors side by side."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        kinds = [type(operation) for operation in rule.operations]
        if (
            kinds not in ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate])
            or len(rule.target_patterns) > 1
        ):
            return None
        merge = rule.operations[0].dim if kinds[0] is MergeModulelist else None
        concatenate = rule.operations[-1] if kinds[-1] is Concatenate else None
        if (concatenate is None) != (len(rule.source_patterns) == 1) or "*" in target:
            return None
        if concatenate is not None and concatenate.num_shards_attribute is not None:
            return None
        number = self._number(tensor.name, pattern)
        if (number is None) != (merge is None):
            return None
        along = None if concatenate is None else concatenate.dim
        rows = None if along is None else self._rows(tensor, target, pattern, rule, along, merge)
        if along is not None and rows is None:
            return None
        whole = self._slots[target]
        count = 1 if merge is None else whole.shape[merge]
        siblings = "" if number is None else _with_gap(tensor.name, number)
        return Piece(target, (pattern, number or 0), _place(merge, number, along, rows), siblings, count)

    def _number(self, name: str, pattern: str) -> int | None:
        """The number that stands for the `*` of a pattern, of which there must be one."""
        from transformers.core_model_loading import apply_renamings

        if pattern.count("*.") != 1:
            return None
        found = re.search(pattern.replace("*.", _NUMBER), apply_renamings(name, self._renamings))
        return None if found is None else int(found["olq_fx_number"])

    def _rows(
        self, tensor: StoredTensor, target: str, pattern: str, rule: Any, along: int, merge: int | None
    ) -> tuple[int, int] | None:
        """Where a tensor begins along the dimension of the concatenation, and how long it is there."""
        whole, patterns = self._slots[target].shape, list(rule.source_patterns)

        def length(shape: tuple[int, ...]) -> int:
            merged = list(shape)
            if merge is not None:
                merged.insert(merge, 1)
            return merged[along] if -len(merged) <= along < len(merged) else -1

        own = length(tensor.shape)
        known = [{length(shape) for shape in self._shapes[target, other]} for other in patterns]
        if all(len(lengths) == 1 for lengths in known):
            before = sum(sum(lengths) for lengths in known[: patterns.index(pattern)])
            return before, own
        # Not all are known, as where they come one by one: of equal parts each knows its own place.
        if own > 0 and own * len(patterns) == whole[along]:
            return patterns.index(pattern) * own, own
        return None

    def recompute(self, buffers: Sequence[Slot]) -> dict[Slot, Tensor]:
        """What `_init_weights` computes, as `from_pretrained` has it (frequencies of rotary embeddings, positions)."""
        found: dict[Slot, Tensor] = {}
        for module in {id(site[0]): site[0] for slot in buffers for site in slot.sites}.values():
            own = [slot for slot in buffers if slot.sites[0][0] is module]
            found.update(_initialized(self._owner(module), module, own))
        return found

    def _owner(self, module: nn.Module) -> Any:
        """The innermost model of transformers that a module is in."""
        library = sys.modules["transformers"]
        inner = self._model
        for candidate in self._model.modules():
            if isinstance(candidate, library.PreTrainedModel) and any(part is module for part in candidate.modules()):
                inner = candidate
        return inner


def _initialized(owner: Any, module: nn.Module, buffers: Sequence[Slot]) -> dict[Slot, Tensor]:
    """Let a model initialize buffers of one of its modules, and nothing else of it."""
    from transformers.initialization import guard_torch_init_functions

    tensors = (*module.parameters(), *module.buffers())
    marked = [tensor for tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
    before = dict(module._buffers)
    made: dict[Slot, Tensor] = {}
    for slot in buffers:
        tensor = slot.tensor
        empty = _NOT_RECOMPUTED[tensor.is_floating_point()]
        if tensor.dtype not in (torch.bool, torch.uint8, torch.int8, torch.int16):
            made[slot] = torch.full(tensor.shape, empty, dtype=tensor.dtype, device="cpu")
            module._buffers[slot.sites[0][1]] = made[slot]
    try:
        for tensor in marked:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        with torch.no_grad(), guard_torch_init_functions(), torch.device("cpu"):
            owner._init_weights(module)
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]
        module._buffers.update(before)
    return {slot: values for slot, values in made.items() if not _unwritten(values)}


def _unwritten(values: Tensor) -> bool:
    if values.is_floating_point():
        return bool(values.isnan().any())
    return bool((values == _NOT_RECOMPUTED[False]).any())


def _place(
    merge: int | None, number: int | None, along: int | None, rows: tuple[int, int] | None
) -> Callable[[Tensor], Tensor]:
    """The view of a parameter: rows of it first, as they are counted in the merged tensor, then one of a list."""

    def place(parameter: Tensor) -> Tensor:
        if along is not None and rows is not None:
            parameter = parameter.narrow(along, *rows)
        return parameter if merge is None or number is None else parameter.select(merge, number)

    return place


def _with_gap(name: str, number: int) -> str:
    """A name with a gap where its number stands."""
    before, _, behind = name.rpartition(f".{number}.")
    return f"{before}.{{}}.{behind}"


def _ignored(model: Any) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    """What a model does without: of what is in a checkpoint, and of its own places."""
    unexpected = set(model._keys_to_ignore_on_load_unexpected or ())
    ends = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    # Buffers that old versions of transformers saved and new ones compute.
    if "inv_freq" in ends:
        unexpected.add(r"rotary_emb\.inv_freq")
    if "position_ids" in ends:
        unexpected.add(r"(^|\.)position_ids$")
    return _matching(unexpected), _matching(model._keys_to_ignore_on_load_missing or ())


def _matching(patterns: Any) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)
