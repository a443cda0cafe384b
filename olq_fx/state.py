"""Converted weights in state dicts: saved as plain tensors, loaded from those or from original precision.

| format | keys of a parameter `weight` | scale |
| --- | --- | --- |
| fp8, int8 | `weight`, `weight_scale` | float32: (1,) per tensor, (N, 1) per channel, else the grid of blocks |
| mxfp8 | `weight`, `weight_scale` | e8m0 bytes (N, K/32) |
| mxfp4 | `weight_packed`, `weight_scale` | e8m0 bytes (N, K/32) |
| nvfp4 | `weight_packed`, `weight_scale`, `weight_global_scale` | e4m3 (N, K/16); G = 1 / g as (1,) |
| mxfp4_dualscale | `weight_packed`, `weight_scale`, `weight_coarse_scale` | e8m0 bytes; float32 (N, K/512) |

These are the names and layouts of compressed-tensors where it has the format. A parameter called `in_proj_weight` has
`in_proj_weight_scale`, and so on. Codes are laid out by rows of N, also where the parameter reads (K, N).

Of experts in one tensor each part has E in front; where gate and up are merged, those of the gate come before those of
the up, also where the parameter has them by turns. A scale of a whole matrix is (E, 1, 1), or (E, 2, 1) of the two.

Loading writes into the storage that is there, so that compiled code and CUDA graphs stay valid; a weight on meta gets
storage on the device of what is loaded. With `assign=True` loaded parts are taken as they are, as torch does.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import sharded, torch_distributed
from olq_fx.errors import OlqFxError
from olq_fx.formats import Format
from olq_fx.torch_distributed import Placement
from olq_fx.weights import FLOATING, QuantizedWeight, become, fill


def part_names(parameter: str, format: Format) -> tuple[str, ...]:
    """The keys of the parts of a parameter, in the order of the parts.

    >>> from olq_fx.formats import FORMATS
    >>> part_names("weight", FORMATS["nvfp4"])
    ('weight_packed', 'weight_scale', 'weight_global_scale')
    """
    names = [f"{parameter}_packed" if format.packed else parameter, f"{parameter}_scale"]
    if format.coarse is not None:
        names.append(f"{parameter}_global_scale" if format.coarse == (None, None) else f"{parameter}_coarse_scale")
    return tuple(names)


def part_shapes(weight: QuantizedWeight) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each part as it is saved: a scale of a whole matrix is (1,), not a grid of (1, 1)."""
    single = _single(weight)
    return tuple(
        ((1,) if one else tuple(part.shape), part.dtype) for part, one in zip(weight.parts, single, strict=True)
    )


def _single(weight: QuantizedWeight) -> list[bool]:
    """Of each part, whether there is one number for the whole matrix; experts have some each."""
    format, matrix = weight.spec.format, weight.codes.dim() == 2
    single = [False, matrix and format.group == (None, None)]
    return single if format.coarse is None else [*single, matrix and format.coarse == (None, None)]


def attach(module: nn.Module) -> None:
    """Let a module that owns converted weights save and load them; a second time does nothing."""
    if save_parts not in module._state_dict_hooks.values():
        untyped: Any = module
        untyped.register_state_dict_post_hook(save_parts)
        untyped.register_load_state_dict_pre_hook(load_parts)


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (save_parts, load_parts):
                del hooks[key]


_IGNORED = "_ddp_params_and_buffers_to_ignore"
_OURS = "_olq_fx_left_out_of_ddp"


def leave_out_of_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel around a model leave converted weights where they are.

    They are frozen, so that there is nothing to reduce; and what it sends when it is built are flat buffers of
    parameters, which these are not. What others have listed there stays.
    """
    held = model.__dict__
    others = [path for path in held.get(_IGNORED, ()) if path not in held.get(_OURS, ())]
    converted = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in converted_weights(module)
    ]
    if converted or _OURS in held:
        held[_IGNORED], held[_OURS] = [*others, *converted], converted


def converted_weights(module: nn.Module) -> dict[str, QuantizedWeight]:
    """The converted weights among a module's own parameters; of those that are distributed, this process's pieces."""
    found = {name: sharded.weight_of(parameter) for name, parameter in module._parameters.items()}
    return {name: weight for name, weight in found.items() if weight is not None}


def save_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """A hook of `state_dict()`: put the parts in the place of each converted weight. A pending one stays as it is."""
    for name, weight in converted_weights(module).items():
        if prefix + name not in state_dict or weight.pending is not None:
            continue
        del state_dict[prefix + name]
        placement = torch_distributed.placement_of(module._parameters[name])
        parts: Sequence[Any] = weight.parts if placement is None else sharded.parts_of(weight, placement)
        for key, part, whole in zip(part_names(name, weight.spec.format), parts, _single(weight), strict=True):
            state_dict[prefix + key] = part.reshape(1) if whole else part


def load_parts(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A hook of `load_state_dict()`: load what is there for each converted weight, and leave torch nothing to do."""
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    for name, weight in converted_weights(module).items():
        keys = part_names(name, weight.spec.format)
        parameter: Any = module._parameters[name]
        found, own = state_dict, torch_distributed.placement_of(parameter)
        if own is not None:
            if state_dict.get(prefix + name) is parameter:
                continue
            found, assign = _pieces(weight, own, prefix, name, keys, state_dict), False
        message = _load(weight, prefix, name, keys, found, missing_keys, assign)
        if message is None:
            continue
        if message:
            error_msgs.append(message)
        for key in keys:
            state_dict.pop(prefix + key, None)
        # torch finds the parameter itself under its name, and copies or assigns it to itself.
        state_dict[prefix + name] = parameter


def _pieces(
    weight: QuantizedWeight, own: Placement, prefix: str, name: str, keys: Sequence[str], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """What a state dict has for a distributed weight, cut as this process's piece is; what does not fit stays whole."""
    found = dict(state_dict)
    for key, place in zip(keys, sharded.part_placements(weight, own), strict=True):
        value = state_dict.get(prefix + key)
        if isinstance(value, Tensor) and key != name and value.numel() == math.prod(place.shape):
            found[prefix + key] = _piece(value, place)
    value = state_dict.get(prefix + name)
    if isinstance(value, Tensor) and tuple(value.shape) == own.shape:
        packed = weight.spec.format.packed
        codes = not packed and value.dtype == weight.codes.dtype
        found[prefix + name] = _piece(value, sharded.part_placements(weight, own)[0] if codes else own)
    return found


def _piece(value: Tensor, place: Placement) -> Tensor:
    single = value.dim() == 1 and len(place.shape) == 2
    piece = torch_distributed.placed_like(value.reshape(place.shape), place)
    return piece.reshape(1) if single else piece


def _load(
    weight: QuantizedWeight,
    prefix: str,
    name: str,
    keys: Sequence[str],
    state_dict: dict[str, Any],
    missing_keys: list[str],
    assign: bool,
) -> str | None:
    """Load one weight; None leaves it to torch, a text says what was wrong."""
    original: Any = state_dict.get(prefix + name)
    foreign = _foreign_keys(state_dict, prefix, name, keys)
    given = [key for key in keys if prefix + key in state_dict]
    if isinstance(original, QuantizedWeight) or (not given and not foreign and weight.pending is not None):
        return None
    try:
        if _is_original(original) and len([*given, *foreign]) == 1:
            if original.shape != weight.shape:
                return None
            _load_original(weight, original, assign)
        elif not foreign and len(given) < len(keys) and not _wrong_parts(weight, prefix, keys, state_dict):
            missing_keys.extend(prefix + key for key in keys if key not in given)
        elif message := _misfit(weight, prefix, name, keys, state_dict):
            return message
        else:
            _load_parts(weight, [state_dict[prefix + key] for key in keys], assign)
    except (OlqFxError, RuntimeError) as error:
        return f"{prefix}{name}: {error}"
    return ""


def _wrong_parts(weight: QuantizedWeight, prefix: str, keys: Sequence[str], state_dict: dict[str, Any]) -> list[str]:
    """Of the parts that are there, those that do not fit, each with what was expected and found."""
    return [
        f"{prefix}{key}: expected {_describe(dtype, shape)}, found {_found(state_dict[prefix + key])}"
        for key, (shape, dtype) in zip(keys, part_shapes(weight), strict=True)
        if prefix + key in state_dict and not _fits(state_dict[prefix + key], shape, dtype)
    ]


def _is_original(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOATING


def _foreign_keys(state_dict: dict[str, Any], prefix: str, name: str, keys: Sequence[str]) -> list[str]:
    """Keys that other formats use for this parameter, with what is under them."""
    known = [name, *(f"{name}_{suffix}" for suffix in ("packed", "scale", "global_scale", "coarse_scale"))]
    return [key for key in known if key not in keys and prefix + key in state_dict]


def _misfit(weight: QuantizedWeight, prefix: str, name: str, keys: Sequence[str], state_dict: dict[str, Any]) -> str:
    """What is wrong with the parts in a state dict, naming key, expected and found shape and dtype; "" if they fit."""
    wrong = _wrong_parts(weight, prefix, keys, state_dict)
    wrong += [
        f"{prefix}{key}: expected {_describe(dtype, shape)}, found nothing"
        for key, (shape, dtype) in zip(keys, part_shapes(weight), strict=True)
        if prefix + key not in state_dict
    ]
    wrong += [
        f"{prefix}{key}: not expected, found {_found(state_dict[prefix + key])}"
        for key in _foreign_keys(state_dict, prefix, name, keys)
    ]
    if not wrong:
        return ""
    return (
        f"{prefix}{name} is held in {weight.spec.weight}, and what is loaded is not: {'; '.join(wrong)}. "
        "Load what was saved in the same format, or original-precision values"
    )


def _fits(value: object, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype == dtype


def _found(value: object) -> str:
    if isinstance(value, Tensor):
        return _describe(value.dtype, tuple(value.shape))
    return "nothing" if value is None else type(value).__name__


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _load_original(weight: QuantizedWeight, values: Tensor, assign: bool) -> None:
    """Convert values into a weight. Assigning them gives the weight their dtype too; its storage stays its own."""
    if weight.pending is not None:
        fill(weight, values, values.dtype if assign else None)
        return
    with torch.no_grad():
        weight.copy_(values)
    if assign and values.dtype != weight.dtype:
        become(weight, weight.like(dtype=values.dtype))


def _load_parts(weight: QuantizedWeight, found: Sequence[Tensor], assign: bool) -> None:
    """Copy parts that fit into a weight, or assign them to it."""
    given = [part.detach().reshape(own.shape) for part, own in zip(found, weight.parts, strict=True)]
    if weight.pending is None and not assign:
        with torch.no_grad():
            for own, part in zip(weight.parts, given, strict=True):
                own.copy_(part)
        return
    if not assign:
        device = given[0].device if weight.is_meta else weight.device
        given = [part.to(device, copy=True) for part in given]
    become(weight, weight.like(parts=given, pending=None))
