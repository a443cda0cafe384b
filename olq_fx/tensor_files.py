"""Safetensors files: written with their tensors in any order, looked at without reading them, and mapped into memory.

    Entry(name, shape, dtype)
    write_file(path, entries, values) -> dict[str, int]     the checksum of every tensor by its name
    layout_of(path) -> dict[str, Placed]                    what the header says, held against the size of the file
    mapped(path, names) -> dict[str, Tensor]                pages of the file, no memory of this process
    checksum(tensor) -> int, digest_of(path) -> str

The library `safetensors` writes a file at once, from tensors that are all in memory. What is converted weight by weight
is written weight by weight here: shapes and dtypes are known beforehand, and so is the place of every byte.
"""

import ctypes
import dataclasses
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from olq_fx.errors import SavedModelError, SaveError, shown

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How a safetensors file calls a dtype."""

_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100_000_000
_PREFIX = 8
_CHUNK = 1 << 24
_SAMPLES, _SAMPLE = 128, 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a file, with the place of its first byte and behind its last one."""

    entry: Entry
    start: int
    stop: int


def write_file(
    path: Path,
    entries: Sequence[Entry],
    values: Iterable[tuple[str, Tensor]],
    about: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Write a file and wait until it is on the disk.

    Args:
        path: where; what is there is overwritten.
        entries: all tensors of the file.
        values: each of them once, in any order, on any device. One at a time is brought to the CPU.
        about: texts for the header.

    Returns:
        The checksum of every tensor by its name.

    Raises:
        SaveError: the disk is full, say; or a dtype that such files do not have.
    """
    header, places = _header(entries, about or {})
    checksums = {}
    try:
        with path.open("wb", buffering=0) as file:
            _write(file, header)
            for name, tensor in values:
                place = places.pop(name)
                assert (tuple(tensor.shape), tensor.dtype) == (place.entry.shape, place.entry.dtype), name
                file.seek(place.start)
                checksums[name] = _write_tensor(file, tensor)
            assert not places, f"not written: {list(places)}"
            os.fsync(file.fileno())
    except OSError as error:
        raise SaveError(f"{path.name} cannot be written: {error.strerror or error}") from error
    return checksums


def _header(entries: Sequence[Entry], about: Mapping[str, str]) -> tuple[bytes, dict[str, Placed]]:
    """The first bytes of a file, and where its tensors go: by the size of their elements, so that all are aligned."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end, offsets = 0, {}
    for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
        kind = _NAMES.get(entry.dtype)
        if kind is None:
            raise SaveError(f"'{entry.name}' is of {entry.dtype}, which no safetensors file holds")
        said[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes]}
        offsets[entry] = end
        end += entry.nbytes
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PREFIX)
    begin = _PREFIX + len(text)
    places = {
        entry.name: Placed(entry, begin + start, begin + start + entry.nbytes) for entry, start in offsets.items()
    }
    return len(text).to_bytes(_PREFIX, "little") + text, places


def _write_tensor(file: BinaryIO | Any, tensor: Tensor) -> int:
    found = 0
    for chunk in _bytes_of(tensor):
        found = zlib.crc32(chunk, found)
        _write(file, chunk)
    return found


def _write(file: Any, content: bytes | memoryview) -> None:
    """All of it: the system may write less than it was asked to."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, piece by piece, without a copy where it is contiguous and on the CPU."""
    near = tensor.detach().to("cpu").contiguous()
    size = near.numel() * near.element_size()
    if size:
        whole = memoryview((ctypes.c_char * size).from_address(near.data_ptr())).cast("B")
        for start in range(0, size, _CHUNK):
            yield whole[start : start + _CHUNK]


def checksum(tensor: Tensor) -> int:
    """A checksum of all bytes of a tensor."""
    found = 0
    for chunk in _bytes_of(tensor):
        found = zlib.crc32(chunk, found)
    return found


def layout_of(path: Path) -> dict[str, Placed]:
    """Where the tensors of a file are.

    Raises:
        SavedModelError: it is not there, no safetensors file, or damaged; the message names the tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_PREFIX), "little")
            if size < _PREFIX or length > min(_LONGEST_HEADER, size - _PREFIX):
                raise SavedModelError(f"{path} is no safetensors file, or cut off")
            header = json.loads(file.read(length))
    except OSError as error:
        raise SavedModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SavedModelError(f"{path} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise SavedModelError(f"{path} is damaged: its header is {shown(header)}, not an object")
    begin = _PREFIX + length
    found = [_placed(path, name, about, begin) for name, about in header.items() if name != "__metadata__"]
    for place in found:
        if place.stop > size:
            raise SavedModelError(
                f"{path} is cut off: '{place.entry.name}' ends at byte {place.stop}, the file at byte {size}"
            )
    return {place.entry.name: place for place in found}


def _placed(path: Path, name: str, about: Any, begin: int) -> Placed:
    try:
        shape, (start, stop), dtype = tuple(about["shape"]), about["data_offsets"], _DTYPES[about["dtype"]]
        entry = Entry(name, shape, dtype)
        sound = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or stop - start != entry.nbytes:
        raise SavedModelError(f"{path} is damaged: its header says of '{name}' {shown(about)}")
    return Placed(entry, begin + start, begin + stop)


def mapped(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a file as pages of it. Writing to one changes this process' pages, and never the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise SavedModelError(f"{path} cannot be read: {error}") from error


def digest_of(path: Path) -> str:
    """A digest of the size, the header and blocks all over the file: some milliseconds whatever its size.

    It tells a file that was cut off, or written by another conversion; not a bit that has changed between its blocks,
    which `checksum` of the tensors tells.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_PREFIX)
        found = hashlib.sha256(f"{size} ".encode() + head)
        found.update(file.read(min(int.from_bytes(head, "little"), _LONGEST_HEADER)))
        last = max(0, size - _SAMPLE)
        for index in range(_SAMPLES):
            file.seek(last * index // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE))
    return found.hexdigest()
