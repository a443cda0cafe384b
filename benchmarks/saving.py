"""Time of loading a saved model against a plain safetensors load of the same bytes, in one run.

`restore_` of a directory into a model on meta, files held against the manifest, against `safetensors.torch.load_file`
and `load_state_dict(assign=True)` into a model on meta with a buffer for every tensor of the file. Both map the file,
and both end with the tensors in the model: that is the first figure. The second is taken until every byte has been read
once too. The files are in the cache of the system, the models on meta are made beforehand. The aim: at most 1.2 times.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import interleaved, medians, parser, report
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import olq_fx
from olq_fx.restoring import restore_
from olq_fx.saving import save
from olq_fx.schemes import SCHEMES

AIM = 1.2
COLUMNS = ("scheme", "entry", "MB", "ms", "over plain")
READ = ", read once"


def model_of(layers: int, size: int) -> nn.Module:
    """Linear layers without biases."""
    return nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(layers)])


def converted(scheme: str, layers: int, size: int) -> nn.Module:
    """The same values in every layer, converted as they arrive: the bf16 model is never there."""
    with torch.device("meta"):
        model = model_of(layers, size).bfloat16()
    olq_fx.quantize_(model, scheme)
    weight = torch.randn(size, size).bfloat16()
    model.load_state_dict({f"{index}.weight": weight for index in range(layers)}, assign=True)
    return model


def holder_of(file: Path) -> nn.Module:
    """A model on meta with a buffer for every tensor of a file, without a library of quantization."""
    model = nn.Module()
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            path, _, leaf = name.rpartition(".")
            if path not in model._modules:
                model.add_module(path, nn.Module())
            model.get_submodule(path).register_buffer(leaf, opened.get_tensor(name).to("meta"))
    return model


def touched(state: dict[str, Any]) -> int:
    """Read every byte."""
    return sum(int(value.view(torch.uint8).max()) for value in state.values())


class Ways:
    """The two ways, each with and without reading what was loaded."""

    def __init__(self, directory: Path, layers: int, size: int) -> None:
        self.directory, self.layers, self.size = directory, layers, size
        self.file = directory / "model.safetensors"
        self.prepare()

    def prepare(self) -> None:
        """New models on meta."""
        self.holder = holder_of(self.file)
        with torch.device("meta"):
            self.model = model_of(self.layers, self.size)

    def plain(self) -> nn.Module:
        self.holder.load_state_dict(load_file(self.file), assign=True)
        return self.holder

    def restored(self) -> nn.Module:
        restore_(self.model, self.directory)
        return self.model

    def entries(self) -> dict[str, Callable[[], object]]:
        """What is measured, by name."""
        return {
            "plain": self.plain,
            "restored": self.restored,
            f"plain{READ}": lambda: touched(self.plain().state_dict()),
            f"restored{READ}": lambda: touched(self.restored().state_dict()),
        }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", type=int, default=4096, help="of the square layers (default 4096)")
    options.add_argument("--layers", type=int, default=64, help="how many (default 64)")
    options.add_argument("--schemes", nargs="+", default=["int8", "mxfp4", "nvfp4_per_token"], choices=list(SCHEMES))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, measured, missed = [], [], []
    for scheme in arguments.schemes:
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            model = converted(scheme, arguments.layers, arguments.size)
            saved = save(model, Path(folder) / "saved", max_shard_size="1TB")
            del model
            ways = Ways(saved.directory, arguments.layers, arguments.size)
            times = interleaved(ways.entries(), arguments.rounds, ways.prepare)
        found = medians(times)
        for name, seconds in found.items():
            over = seconds / found[name.replace("restored", "plain")]
            rows.append((scheme, name, f"{saved.nbytes / 1e6:.0f}", f"{1e3 * seconds:.1f}", f"{over:.2f}"))
            measured.append({"scheme": scheme, "entry": name, "bytes": saved.nbytes, "seconds": times[name]})
            if over > AIM:
                missed.append(f"{scheme} ({name}: {over:.2f})")
    notes = [f"Over {AIM}: {', '.join(missed)}." if missed else f"Every scheme is restored within {AIM} times."]
    title = f"{arguments.layers} layers of {arguments.size} x {arguments.size}, medians"
    report("saving", arguments, title, COLUMNS, rows, measured, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
