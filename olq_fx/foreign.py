"""Weights that others have quantized: told by the tensors that a checkpoint has of them, read without quantizing anew.

    groups(tensors, known, block) -> Groups       what belongs together, by names, shapes and dtypes alone
    Foreign.parts(tensors), Foreign.values(tensors)    of one group: our parts of it, or its values

| method | codes | scales |
| --- | --- | --- |
| compressed-tensors | `weight`; of 4 bits `weight_packed` | `weight_scale`; of nvfp4 `weight_global_scale` |
| fp8 blocks (DeepSeek, Qwen), fbgemm | `weight` | `weight_scale_inv`, `weight_scale` |
| modelopt | `weight` | `weight_scale`; of nvfp4 `weight_scale_2` |
| quark | `weight` | `weight_scale` |
| gpt-oss | `..._blocks` (E, N, K/32, 16) | `..._scales` (E, N, K/32) |
| packed integers (int4 and others) | `weight_packed` of int32 | `weight_scale`, `weight_zero_point` |
| our own mxfp4_dualscale | `weight_packed` | `weight_scale`, `weight_coarse_scale` |

Where a format of ours holds the same numbers, the codes are taken as they are and the scales keep their values. Others
(packed int4, groups of int8, zero points) have no format here: their values are computed, and what they are planned for
is done with those. Scales of activations are left out: activations are scaled in each forward pass.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from olq_fx.errors import ConversionError, LoadError
from olq_fx.formats import BLOCK_COLUMNS, BLOCK_ROWS, block_formats, get_format
from olq_fx.numerics import Parts, part_specs
from olq_fx.scales import decode_e8m0

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_SCALES = ("_scale_inv", "_scales", "_scale")
_OF_MODULE = (".scale", ".qscale_weight")
"""Names beside `weight` under which DeepSeek V4 and Mistral have its scales."""

_ACTIVATIONS = (
    *("input_scale", "input_global_scale", "input_scale_ub", "input_zero_point", "activation_scale"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale"),
)
_EXTRAS = ("_global_scale", "_scale_2", "_coarse_scale", "_zero_point", "_shape", "_g_idx")
_BYTES = (torch.uint8, E8M0)
_GROUP_OF_MX = 32
_NAN_OF_E8M0 = 255
"""NaN among the bytes of E8M0."""

_NAN_OF_E4M3 = 127
"""NaN among codes of E4M3, without their sign."""


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What is known of a parameter of the model.

    Attributes:
        shape: (N, K) or (E, N, K).
        shards: how many matrices its rows are (gate and up).
        interleaved: whether these take turns row by row.
        block: the rows and columns that share a scale, where it is planned so.
    """

    shape: tuple[int, ...]
    shards: int = 1
    interleaved: bool = False
    block: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One weight.

    Attributes:
        target: the name of its parameter.
        names: of its tensors, by what each is: `codes`, `scale`, and `global_scale`, `scale_2`, `coarse_scale`,
            `zero_point`, `shape`.
        shape: (N, K) or (E, N, K), whatever the parameter reads; of packed codes an odd K is told from the parameter.
        format: the format of ours that holds it exactly, or "".
        parts: makes the parts of that format of the tensors.
        values: makes the values of the tensors, in float32.
        why: where there is no such format, what it is.
    """

    target: str
    names: Mapping[str, str]
    shape: tuple[int, ...]
    format: str = ""
    parts: Callable[[Mapping[str, Tensor]], Parts] | None = None
    values: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """What a checkpoint has.

    Attributes:
        weights: those that others have quantized.
        left_out: scales of activations, which are not needed.
    """

    weights: tuple[Foreign, ...]
    left_out: tuple[str, ...]


def groups(tensors: Mapping[str, Header], known: Mapping[str, Known], block: tuple[int, int] | None = None) -> Groups:
    """Find the weights that others have quantized.

    Args:
        tensors: all that a checkpoint has, by their names.
        known: the model's parameters by their names. A model that has parameters or buffers of these names itself, as
            a layer of the other library has, takes them as they are.
        block: the extents of blocks that share a scale, if the checkpoint declares them.

    Raises:
        LoadError: codes without scales, with scales twice, or scales that do not fit; the message names them.
    """
    found, left_out = [], []
    for name, header in tensors.items():
        if name.rpartition(".")[2] in _ACTIVATIONS and name not in known:
            left_out.append(name)
        stem = _stem(name)
        if stem and name not in known and not name.endswith(_EXTRAS) and name not in left_out:
            weight = _group(stem, name, header, tensors, known, block)
            if weight is not None:
                found.append(weight)
    _refuse_scales_twice(found)
    taken = {name for weight in found for name in weight.names.values()}
    _refuse_codes_alone(tensors, known, taken)
    return Groups(tuple(found), tuple(left_out))


def _stem(name: str) -> str:
    """The name of the parameter whose scales are called `name`; "" if these are no scales."""
    for ending in _SCALES:
        if name.endswith(ending):
            return name.removesuffix(ending)
    for ending in _OF_MODULE:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    return ""


def _refuse_scales_twice(found: Sequence[Foreign]) -> None:
    scales: dict[str, str] = {}
    for weight in found:
        other = scales.setdefault(weight.target, weight.names["scale"])
        if other != weight.names["scale"]:
            raise LoadError(f"'{other}' and '{weight.names['scale']}' are both scales of '{weight.target}'")


def _refuse_codes_alone(tensors: Mapping[str, Header], known: Mapping[str, object], taken: set[str]) -> None:
    for name in tensors:
        stem = name.removesuffix("_packed").removesuffix("_blocks")
        if stem != name and name not in taken and name not in known and stem in known:
            wanted = "_scales" if name.endswith("_blocks") else "_scale"
            raise LoadError(f"'{name}' has codes of '{stem}', and there are no scales ('{stem}{wanted}') for them")


def _group(
    stem: str,
    scale: str,
    header: Header,
    tensors: Mapping[str, Header],
    known: Mapping[str, Known],
    block: tuple[int, int] | None,
) -> Foreign | None:
    """The weight whose scales are called `scale`; None if there are no codes for them."""
    codes = next((name for name in (f"{stem}_packed", f"{stem}_blocks", stem) if name in tensors), None)
    if codes is None or tensors[codes].dtype not in (E4M3, torch.int8, torch.uint8, torch.int32):
        return None
    names = {"codes": codes, "scale": scale}
    names |= {end[1:]: f"{stem}{end}" for end in _EXTRAS if f"{stem}{end}" in tensors}
    if "g_idx" in names:
        raise LoadError(f"'{codes}' has its columns in another order than its scales ('{names['g_idx']}')")
    extras = {what: tensors[name] for what, name in names.items()}
    return _told(_About(stem, names, tensors[codes], header, extras, known.get(stem), block))


@dataclasses.dataclass(frozen=True, slots=True)
class _About:
    """What a group is told by."""

    target: str
    names: Mapping[str, str]
    codes: Header
    scale: Header
    headers: Mapping[str, Header]
    parameter: Known | None
    declared: tuple[int, int] | None

    @property
    def known(self) -> tuple[int, ...] | None:
        """The shape of the parameter."""
        return None if self.parameter is None else self.parameter.shape

    @property
    def shards(self) -> int:
        """Of experts in one tensor, how many matrices its rows are."""
        return 1 if self.parameter is None or len(self.codes.shape) < 3 else self.parameter.shards

    @property
    def block(self) -> tuple[int, int] | None:
        """The blocks that the checkpoint declares, or that are planned."""
        return self.declared or (None if self.parameter is None else self.parameter.block)

    def foreign(self, format: str, shape: tuple[int, ...], scale: Callable[[Tensor], Tensor]) -> Foreign:
        """A weight in a format of ours: codes as they are, the scales as `scale` has them."""

        def parts(found: Mapping[str, Tensor]) -> Parts:
            codes = found["codes"].reshape(*shape[:-1], -1)
            made = [codes, scale(found["scale"])]
            if "coarse_scale" in found:
                made.append(found["coarse_scale"])
            elif get_format(format).coarse is not None:
                count = math.prod(shape[:-2])
                made.append(_reciprocal(found).reshape(-1).expand(count).reshape(*shape[:-2], 1, 1).contiguous())
            self.check(format, shape, made)
            return tuple(made)

        return Foreign(target=self.target, names=self.names, shape=shape, format=format, parts=parts)

    def check(self, format: str, shape: tuple[int, ...], parts: Sequence[Tensor]) -> None:
        """Refuse parts that are not those of a matrix of this shape."""
        *experts, n, k = shape
        for part, spec in zip(parts, part_specs(get_format(format), n, k), strict=True):
            wanted = (*experts, *spec.shape)
            if tuple(part.shape) != wanted or part.dtype != spec.dtype:
                raise LoadError(
                    f"'{self.target}' is quantized in {format}, {shape}, and its {spec.name} have the shape "
                    f"{tuple(part.shape)} and dtype {part.dtype} instead of {wanted} and {spec.dtype}"
                )
        check_finite(parts, format, self.target)

    def wrong(self, why: str) -> LoadError:
        """The error for tensors that do not belong together."""
        return LoadError(
            f"'{self.names['codes']}' ({_dtype(self.codes)} {self.codes.shape}) and '{self.names['scale']}' "
            f"({_dtype(self.scale)} {self.scale.shape}): {why}"
        )


def check_finite(parts: Sequence[Tensor], format: str, name: str) -> None:
    """Refuse numbers that are none.

    Raises:
        ConversionError: NaN or Inf among codes or scales.
    """
    for what, part in zip(("codes", "scale", "coarse"), parts, strict=False):
        if not _is_finite(part, nan_byte=_NAN_OF_E8M0 if what == "scale" else None):
            raise ConversionError(f"'{name}' is quantized in {format}, and its {what} has NaN or Inf")


def _is_finite(part: Tensor, nan_byte: int | None) -> bool:
    """Whether no number is NaN or Inf; `nan_byte` stands for NaN, where bytes are exponents."""
    if part.dtype == E4M3:
        return not part.numel() or int((part.view(torch.uint8) & _NAN_OF_E4M3).max()) < _NAN_OF_E4M3
    if part.dtype == torch.uint8:
        return nan_byte is None or not bool((part == nan_byte).any())
    return not part.is_floating_point() or bool(part.isfinite().all())


def _dtype(header: Header) -> str:
    return str(header.dtype).removeprefix("torch.")


def _told(about: _About) -> Foreign:
    """What a group is."""
    if len(about.codes.shape) < 2:
        raise about.wrong("codes belong to matrices, and these are none")
    if not about.scale.dtype.is_floating_point and about.scale.dtype not in _BYTES:
        raise about.wrong("scales are floating numbers, or bytes of exponents")
    if about.parameter is not None and about.parameter.interleaved and not about.names["codes"].endswith("_blocks"):
        raise about.wrong(
            "gate and up take turns in the parameter, and nothing tells in which order the codes have their rows; the "
            "parts of a state dict of olq_fx are known where the weight is planned in their format"
        )
    by_groups = about.codes.dtype == torch.int32 or "zero_point" in about.names
    is_empty = about.scale.numel == 0 and about.codes.numel > 0
    if is_empty or (by_groups and len(about.scale.shape) != 2):
        raise about.wrong("scales of integers in groups or with zero points are a matrix, and none is empty")
    if about.codes.dtype == torch.int32:
        return _packed_integers(about)
    if about.codes.dtype == torch.uint8:
        return _of_four_bits(about)
    if about.codes.dtype == torch.int8:
        return _of_integers(about)
    return _of_float8(about)


def _of_four_bits(about: _About) -> Foreign:
    codes = about.codes.shape
    if about.names["codes"].endswith("_blocks"):
        codes = (*codes[:-2], codes[-2] * codes[-1])
    k = 2 * codes[-1]
    if about.known is not None and about.known[-1] == k - 1:
        k -= 1
    shape = (*codes[:-1], k)
    if about.scale.dtype in _BYTES:
        if about.scale.shape != (*codes[:-1], math.ceil(k / _GROUP_OF_MX)):
            raise about.wrong("scales of mxfp4 belong to 32 columns of a row")
        format = "mxfp4_dualscale" if "coarse_scale" in about.names else "mxfp4"
        return about.foreign(format, shape, lambda scale: scale.view(torch.uint8))
    above = about.headers.get("global_scale") or about.headers.get("scale_2")
    if about.scale.dtype == E4M3 and above is None:
        raise about.wrong("scales of nvfp4 need a global one beside them (weight_global_scale or weight_scale_2)")
    if above is not None and above.numel not in (1, math.prod(shape[:-2])):
        raise about.wrong(f"there are {above.numel} global scales for {math.prod(shape[:-2])} matrices")
    if about.scale.dtype == E4M3 and about.scale.shape == (*codes[:-1], math.ceil(k / 16)):
        return about.foreign("nvfp4", shape, lambda scale: scale)
    raise about.wrong("four-bit codes have scales for 32 columns (bytes) or 16 (float8_e4m3fn)")


def _of_integers(about: _About) -> Foreign:
    *experts, n, k = shape = about.codes.shape
    per_row = about.scale.shape in ((*experts, n), (*experts, n, 1))
    per_matrix = about.scale.numel == math.prod(experts)
    if (per_row or per_matrix) and "zero_point" not in about.names:
        return about.foreign(
            "int8_per_channel_static",
            shape,
            lambda scale: scale.float().reshape(*experts, -1, 1).expand(*experts, n, 1).contiguous(),
        )
    groups_of_row = about.scale.shape[-1]
    if len(shape) != 2 or about.scale.shape != (n, groups_of_row) or k % groups_of_row:
        raise about.wrong("scales of int8 belong to a matrix, to rows or to equal pieces of rows")

    def values(found: Mapping[str, Tensor]) -> Tensor:
        return _scaled(found["codes"].float(), found, groups_of_row)

    return Foreign(
        target=about.target, names=about.names, shape=shape, values=values, why="int8 with zero points or groups"
    )


def _of_float8(about: _About) -> Foreign:
    *experts, n, k = shape = about.codes.shape
    scale = about.scale.shape
    one = (*experts, 1, 1)
    if scale == (*experts, n, math.ceil(k / _GROUP_OF_MX)) and about.scale.dtype in _BYTES:
        return about.foreign("mxfp8", shape, lambda found: found.view(torch.uint8))
    # A small matrix is one block: it is to be in the format of its larger neighbours.
    if math.prod(scale) == math.prod(one) and not (len(scale) == len(shape) and _is_declared(about, n, k)):
        return about.foreign("fp8_per_tensor_static", shape, lambda found: _float(found).reshape(one))
    if scale in ((*experts, n), (*experts, n, 1)):
        rows = (*experts, n, 1)
        return about.foreign("fp8_per_channel_static", shape, lambda found: _float(found).reshape(rows))
    block = _block(about, n, k)
    mixed = block is not None and about.shards > 1 and n // about.shards % block[0] != 0
    if block is not None and mixed and block != about.declared:
        raise about.wrong(
            f"blocks of {block[0]} rows would hold rows of gate and of up; the parts of a state dict of olq_fx, whose "
            "blocks do not, are known where the weight is planned in their format"
        )
    if block is None or len(scale) != len(shape):
        raise about.wrong(
            "scales of float8 belong to a matrix, to rows or to blocks of "
            f"{', '.join(map(str, BLOCK_ROWS))} rows by {', '.join(map(str, BLOCK_COLUMNS))} columns"
        )
    return about.foreign(block_formats(*block)[0], shape, _float)


def _block(about: _About, n: int, k: int) -> tuple[int, int] | None:
    """The blocks that scales belong to: those that are declared, or the usual ones that give so many."""
    choices = [(rows, columns) for rows in BLOCK_ROWS for columns in BLOCK_COLUMNS]
    choices.sort(key=lambda choice: (choice != about.block, choice != (128, 128), -choice[0], -choice[1]))
    for rows, columns in choices:
        if about.scale.shape[-2:] == (math.ceil(n / rows), math.ceil(k / columns)):
            return rows, columns
    return None


def _is_declared(about: _About, n: int, k: int) -> bool:
    """Whether the scales are those of the blocks that the checkpoint declares."""
    return about.block is not None and _block(about, n, k) == about.block


def _float(scale: Tensor) -> Tensor:
    """Scales in float32, which holds those of every narrower dtype, powers of two in a byte among them."""
    return decode_e8m0(scale.view(torch.uint8)) if scale.dtype in _BYTES else scale.to(torch.float32)


def _reciprocal(found: Mapping[str, Tensor]) -> Tensor:
    """The global scale as ours and compressed-tensors' has it; modelopt stores what that is the reciprocal of."""
    if "global_scale" in found:
        return found["global_scale"].float()
    return 1 / found["scale_2"].float()


def _packed_integers(about: _About) -> Foreign:
    """Integers of up to 8 bits in words of 32: offset binary, element by element from the lowest bits on."""
    n, words = about.codes.shape[-2:]
    k = about.known[-1] if about.known is not None else about.scale.shape[-1]
    bits = next((bits for bits in (4, 8, 2, 3, 5, 6, 7) if math.ceil(k * bits / 32) == words), None)
    if len(about.codes.shape) != 2 or bits is None or about.scale.shape[0] != n:
        raise about.wrong("it is not told how many bits each integer has")
    if k % about.scale.shape[-1]:
        raise about.wrong(f"{k} columns are no {about.scale.shape[-1]} groups of one size")

    def values(found: Mapping[str, Tensor]) -> Tensor:
        codes = unpacked(found["codes"], bits, k).float()
        zeros = found.get("zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpacked(zeros.t().contiguous(), bits, n).t()
        kept = {**found, **({} if zeros is None else {"zero_point": zeros})}
        return _scaled(codes, kept, about.scale.shape[-1])

    return Foreign(
        target=about.target, names=about.names, shape=(n, k), values=values, why=f"packed integers of {bits} bits"
    )


def unpacked(words: Tensor, bits: int, k: int) -> Tensor:
    """Signed integers (N, k) of the 32-bit words (N, ceil(k * bits / 32)) that hold them one after the other."""
    position = torch.arange(k, device=words.device) * bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.nn.functional.pad(wide, (0, 1))
    index = position // 32
    pair = wide[:, index] | (following[:, index + 1] << 32)
    return ((pair >> (position % 32)) & ((1 << bits) - 1)) - (1 << (bits - 1))


def _scaled(codes: Tensor, found: Mapping[str, Tensor], groups_of_row: int) -> Tensor:
    """Codes less their zero points, times their scales, each for an equal piece of a row."""
    n, k = codes.shape
    size = math.ceil(k / groups_of_row)
    zeros = found.get("zero_point")
    if zeros is not None:
        codes = codes - zeros.float().repeat_interleave(size, 1)[:, :k]
    return codes * found["scale"].float().repeat_interleave(size, 1)[:, :k].expand(n, k)
