"""Speed of `olq_fx.load_` on a synthetic Llama in bfloat16, against the slower of its two halves, and torchao.

The halves are reading the file and converting the tensors in memory; torchao's `quantize_` comes after an ordinary
load. The file is in the page cache, or (cold) taken out of it before each run.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from common import interleaved, medians, report
from loading_cases import Case, on_meta, prepared, run, source_of
from torch import Tensor, nn

import olq_fx
from olq_fx.loading_stored import stored_in
from olq_fx.weights import QuantizedWeight, fill

TIMES_THE_SLOWER = 1.3


def forget(folder: Path) -> None:
    """Take the checkpoint out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    """Bring every page of the checkpoint into memory, as loading does."""
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in stored_in(path):
            tensor.touch()
            tensor.release()


def converting(values: dict[str, Tensor], layers: int, scheme: str) -> Callable[[], object]:
    """The same conversions and copies, of tensors that are in memory."""

    def convert() -> object:
        model = on_meta(layers)
        olq_fx.quantize_(model, scheme)
        copies = []
        for name, parameter in model.named_parameters():
            if isinstance(parameter, QuantizedWeight):
                fill(parameter, values[name])
            else:
                copies.append(values[name].clone())
        return model, copies

    return convert


def speed(arguments: argparse.Namespace, folder: Path) -> int:
    """The table of times; how many ratios are above the limit."""
    layers = arguments.layers
    values = {name: tensor.clone() for name, tensor in source_of("state dict", folder).items()}
    size = sum(tensor.nbytes for tensor in values.values())
    rows, found = [], []
    for scheme in arguments.schemes or ["fp8_per_channel", "fp8_per_block", "int8", "mxfp4", "nvfp4_per_token"]:
        for cold in (False, True):

            def load(scheme: str = scheme) -> nn.Module:
                return prepared(Case("olq_fx", scheme, "Hugging Face directory"), folder, layers)()

            peer = prepared(Case("torchao", "int8" if "int8" in scheme else "fp8", ""), folder, layers)
            entries: dict[str, Callable[[], object]] = {
                "load_": load,
                "read": lambda: read(folder),
                "convert": converting(values, layers, scheme),
                "torchao": peer,
            }
            before = (lambda: forget(folder)) if cold else (lambda: None)
            times = interleaved(entries, arguments.rounds, before, budget=60)
            middle = medians(times)
            ratio = middle["load_"] / max(middle["read"], middle["convert"])
            rows.append(
                (
                    scheme,
                    "cold" if cold else "cached",
                    *(f"{size / 1e9 / middle[name]:.2f}" for name in ("load_", "read", "convert")),
                    f"{ratio:.2f}",
                    f"{middle['torchao'] / middle['load_']:.1f}",
                )
            )
            found.append({"scheme": scheme, "cold": cold, "ratio": ratio, "seconds": times})
    above = [row for row in rows if float(row[5]) > TIMES_THE_SLOWER]
    columns = ("scheme", "file", "load_ GB/s", "read GB/s", "convert GB/s", "load_ / slower", "torchao / load_")
    notes = [
        "GB/s of the checkpoint, medians; the planning of the model is in load_ and convert; torchao: from_pretrained, "
        "then its quantize_ to int8 or fp8, weights only.",
        f"{len(above)} of {len(rows)} are above {TIMES_THE_SLOWER} times the slower half.",
    ]
    title = f"Loading a Llama of {size / 1e9:.2f} GB in bfloat16"
    report("loading_speed", arguments, title, columns, rows, found, notes)
    return len(above)


if __name__ == "__main__":
    sys.exit(run(speed, __doc__))
