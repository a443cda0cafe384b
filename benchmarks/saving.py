"""Time of loading a saved model against a plain safetensors load of the same bytes, in one run.

`restore_` of a directory into a model on meta, files held against the manifest, against `safetensors.torch.load_file`
alone. Both map the files, so both are measured until every byte of every tensor has been read once, with the files in
the cache of the system. The aim: at most 1.2 times.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import interleaved, medians, parser, report
from safetensors.torch import load_file
from torch import nn

import olq_fx
from olq_fx.restoring import restore_
from olq_fx.saving import save
from olq_fx.schemes import SCHEMES

AIM = 1.2
COLUMNS = ("scheme", "entry", "MB", "ms", "over plain")


def model_of(layers: int, size: int) -> nn.Module:
    """Linear layers without biases."""
    return nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(layers)])


def touched(state: dict[str, Any]) -> int:
    """Read every byte."""
    return sum(int(value.view(torch.uint8).max()) for value in state.values())


def entries(directory: Path, layers: int, size: int) -> dict[str, Callable[[], object]]:
    """The two ways."""

    def plain() -> int:
        return touched(load_file(directory / "model.safetensors"))

    def restored() -> int:
        with torch.device("meta"):
            model = model_of(layers, size)
        restore_(model, directory)
        return touched(model.state_dict())

    return {"plain": plain, "restored": restored}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", type=int, default=2048, help="of the square layers (default 2048)")
    options.add_argument("--layers", type=int, default=64, help="how many (default 64)")
    options.add_argument("--schemes", nargs="+", default=["int8", "mxfp4", "nvfp4_per_token"], choices=list(SCHEMES))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, measured, missed = [], [], []
    for scheme in arguments.schemes:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            model = model_of(arguments.layers, arguments.size).bfloat16()
            olq_fx.quantize_(model, scheme)
            saved = save(model, Path(folder) / "saved", max_shard_size="1TB")
            del model
            times = interleaved(entries(saved.directory, arguments.layers, arguments.size), arguments.rounds)
        found = medians(times)
        ratio = found["restored"] / found["plain"]
        for name, seconds in found.items():
            over = f"{seconds / found['plain']:.2f}"
            rows.append((scheme, name, f"{saved.nbytes / 1e6:.0f}", f"{1e3 * seconds:.1f}", over))
            measured.append({"scheme": scheme, "entry": name, "bytes": saved.nbytes, "seconds": times[name]})
        if ratio > AIM:
            missed.append(scheme)
    notes = [f"Over {AIM}: {', '.join(missed)}." if missed else f"Every scheme is restored within {AIM} times."]
    title = f"{arguments.layers} layers of {arguments.size} x {arguments.size}, mapped and read once, medians"
    report("saving", arguments, title, COLUMNS, rows, measured, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
