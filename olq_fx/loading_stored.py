"""Tensors that are stored somewhere, by their headers: nothing of their values is read before they are asked for.

    stored_in(path) -> list[StoredTensor]      of a safetensors file, in the order of their values in it

A file is mapped into memory: what is read of it are pages of the file, which the system takes back when it likes, and
no memory of this process. All that a header says is held against the file before any of it is believed, so that a
file that was cut off names the first tensor that is not whole. Nothing is ever unpickled.
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olq_fx.errors import LoadError, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of a safetensors file by their names in it."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""The endings of files that are pickled."""

_LONGEST_HEADER = 100_000_000
_PREFIX = 8
_PAGE = mmap.PAGESIZE


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor that can be read.

    Attributes:
        name: its name where it is stored.
        shape, dtype: of its values.
        file: the file that it lies in, "" if it lies in memory.
        read: gives its values, which are not to be written to.
        touch: brings its values near, in another thread: from a disk into memory.
        release: says that its values are not needed any more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str = ""
    read: Callable[[], Tensor]
    touch: Callable[[], None] = _nothing
    release: Callable[[], None] = _nothing

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """Its name and file, for messages."""
        return f"'{self.name}' of {self.file}" if self.file else f"'{self.name}'"


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """What a header says of a tensor, with the place of its first and behind its last byte in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


def stored_in(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in the order in which their values lie.

    Raises:
        LoadError: there is no such file, it is none of safetensors, or it is damaged; the message names the tensor.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            entries = _entries(path, file.read(_PREFIX), file, size)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    return [_stored(path, mapped, entry) for entry in entries]


def _stored(path: Path, mapped: mmap.mmap, entry: _Entry) -> StoredTensor:
    label = f"'{entry.name}' of {path}"

    def content() -> Tensor:
        if mapped.size() < entry.stop:
            # Its pages are not there any more: to touch them would end the process.
            raise LoadError(f"{label} cannot be read: the file was cut off while it was being loaded")
        if entry.start == entry.stop:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=entry.start, count=entry.stop - entry.start)

    def touch() -> None:
        _advise(mapped, entry, "MADV_WILLNEED")
        content()[::_PAGE].sum()

    return StoredTensor(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        file=str(path),
        read=lambda: content().view(entry.dtype).view(entry.shape),
        touch=touch,
        release=lambda: _advise(mapped, entry, "MADV_DONTNEED"),
    )


def _advise(mapped: mmap.mmap, entry: _Entry, advice: str) -> None:
    """Tell the system about the pages of a tensor, where it can be told."""
    option = getattr(mmap, advice, None)
    first = entry.start // _PAGE * _PAGE
    if option is not None and entry.stop > entry.start:
        mapped.madvise(option, first, entry.stop - first)


def _entries(path: Path, prefix: bytes, file: Any, size: int) -> list[_Entry]:
    """What the header of a file says, held against the size of the file."""
    _refuse_others(path, prefix)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _PREFIX or length > _LONGEST_HEADER:
        raise LoadError(f"{path} is no safetensors file: it begins with {shown(prefix)}")
    if _PREFIX + length > size:
        raise LoadError(f"{path} is cut off: its header has {length} bytes, the whole file {size}")
    header = _header(path, file.read(length))
    begin = _PREFIX + length
    entries = [_entry(path, name, about, begin) for name, about in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_layout(path, entries, begin, size)
    return entries


def _refuse_others(path: Path, prefix: bytes) -> None:
    """Refuse files of other kinds by what is known of them.

    Raises:
        LoadError: it is pickled, or GGUF.
    """
    if path.suffix in PICKLED or prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise pickled(path)
    if prefix[:4] == b"GGUF":
        raise LoadError(f"{path} is a GGUF file, which is quantized already; load the original safetensors files")


def pickled(path: Path | str) -> LoadError:
    """The error for a file that would have to be unpickled."""
    return LoadError(
        f"{path} is a pickled file, which can run any code when it is read, and is never opened here. Fetch the "
        "model's safetensors files; or, where you trust it, pass the state dict of torch.load(FILE, weights_only=True, "
        "mmap=True), or write that with safetensors.torch.save_file"
    )


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise LoadError(f"{path} is damaged: its header has '{twice}' twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"{path} is no safetensors file or damaged: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise LoadError(f"{path} is damaged: its header is {shown(header)}, not an object")
    return header


def _entry(path: Path, name: str, about: Any, begin: int) -> _Entry:
    try:
        shape = tuple(about["shape"])
        start, stop = about["data_offsets"]
        kind = about["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path} is damaged: its header says of '{name}' {shown(about)}") from error
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise LoadError(f"{path} is damaged: its header says of '{name}' {shown(about)}")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise LoadError(f"'{name}' of {path} has the dtype {shown(kind)}; valid: {', '.join(DTYPES)}")
    wanted = math.prod(shape) * dtype.itemsize
    if stop - start != wanted:
        raise LoadError(f"{path} is damaged: '{name}', {kind} {shape}, has {stop - start} bytes instead of {wanted}")
    return _Entry(name, shape, dtype, begin + start, begin + stop)


def _check_layout(path: Path, entries: list[_Entry], begin: int, size: int) -> None:
    """Every byte behind the header is one of one tensor."""
    end = begin
    for entry in entries:
        if entry.stop > size:
            raise LoadError(
                f"{path} is cut off: '{entry.name}' ends at byte {entry.stop}, the file at byte {size}. "
                "Fetch the file again"
            )
        if entry.start != end:
            raise LoadError(f"{path} is damaged: '{entry.name}' begins at byte {entry.start} instead of {end}")
        end = entry.stop
    if end != size:
        raise LoadError(f"{path} is damaged: behind its last tensor are {size - end} bytes that belong to none")
