"""How the tensors of a saved model are spread over files.

bytes_from("5GB") -> int
lay_out(groups, limit, stem) -> tuple[Shard, ...]     groups of tensors that stay together, in their order
index_of(shards) -> str                               the index that Hugging Face's libraries read
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence

from olq_fx.errors import ConfigurationError, ConfigurationTypeError, shown
from olq_fx.tensor_files import Entry

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A file: its name, and its tensors, those of one parameter together."""

    name: str
    groups: tuple[tuple[Entry, ...], ...]

    @property
    def entries(self) -> list[Entry]:
        """All its tensors."""
        return [entry for group in self.groups for entry in group]


def bytes_from(size: object) -> int:
    """A number of bytes.

    >>> bytes_from("5GB"), bytes_from("1.5 MiB"), bytes_from(100)
    (5000000000, 1572864, 100)

    Raises:
        ConfigurationError, ConfigurationTypeError: it is none, or not positive.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ConfigurationTypeError(f"max_shard_size is a number of bytes or a text such as '5GB', not {shown(size)}")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or not (found := int(float(match[1]) * _UNITS[match[2]])):
        raise ConfigurationError(f"max_shard_size {shown(size)} is no size; write it as 5GB, 500MB or 2GiB")
    return found


def lay_out(groups: Iterable[Sequence[Entry]], limit: int, stem: str) -> tuple[Shard, ...]:
    """Spread groups over files of at most `limit` bytes; a larger group has a file of its own.

    Args:
        groups: tensors that stay together, in the order in which they are to lie.
        limit: bytes of a file.
        stem: how the files are called, `model` of `model-00001-of-00003.safetensors`.
    """
    shards: list[list[tuple[Entry, ...]]] = [[]]
    size = 0
    for group in groups:
        more = sum(entry.nbytes for entry in group)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(tuple(group))
        size += more
    if len(shards) == 1:
        return (Shard(f"{stem}.safetensors", tuple(shards[0])),)
    return tuple(
        Shard(f"{stem}-{number:05}-of-{len(shards):05}.safetensors", tuple(content))
        for number, content in enumerate(shards, 1)
    )


def index_of(shards: Sequence[Shard]) -> str:
    """The text of an index of several files."""
    where = {entry.name: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
