"""What `load_` has done, for people and programs."""

import dataclasses
from collections import Counter

from olq_fx.loading_plan import listed

_SHOWN = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_` has done.

    Attributes:
        source: what was loaded.
        converted: the quantized weights that were given values, by their paths.
        loaded: the other parameters and buffers that were.
        recomputed: buffers that no source brings, which the model's own code has computed.
        taken: weights that were quantized already, each with its format: codes and scales are taken as they are. Those
            that have no format here were dequantized; instead of a format they have the reason.
        left_out: tensors that are not needed, such as scales of activations.
        missing: what got no values, or not all (with `strict=False`).
        unexpected: tensors of the source that the model has no place for (with `strict=False`).
        bytes_read: bytes of the tensors that were read.
        seconds: that it took.
    """

    source: str
    converted: tuple[str, ...]
    loaded: tuple[str, ...]
    recomputed: tuple[str, ...]
    taken: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        """In a few lines."""
        speed = self.bytes_read / 1e9 / max(self.seconds, 1e-9)
        lines = [
            f"{self.source}: {self.bytes_read / 2**20:.1f} MiB read in {self.seconds:.2f} s ({speed:.2f} GB/s)",
            f"{len(self.converted)} weights converted, {len(self.loaded)} tensors loaded as they are, "
            f"{len(self.recomputed)} buffers computed",
        ]
        if self.taken:
            formats = ", ".join(f"{count} in {name}" for name, count in Counter(how for _, how in self.taken).items())
            lines.append(f"quantized already: {formats}")
        for what, names in (
            ("left out", self.left_out),
            ("without values", self.missing),
            ("not expected", self.unexpected),
        ):
            if names:
                lines.append(f"{what}: {listed(names[:_SHOWN], len(names))}")
        return "\n".join(lines)
