"""What `loading_memory.py` and `loading_speed.py` load and how; `main` is one loading in a process of its own."""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import parser, quiet_torchao
from demo_common import transformers_or_give_up
from torch import Tensor, nn

import olq_fx
from olq_fx.testing import live_bytes

HIDDEN, INTERMEDIATE, VOCABULARY, SHARDS = 2048, 5632, 8192, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What is loaded and how: `loader` is "olq_fx", or that of a peer; `scheme` is one of ours, or the peer's."""

    loader: str
    scheme: str
    source: str


def configuration(layers: int) -> Any:
    """A Llama of some layers; 11 of them and its embeddings are 1 GB of bfloat16."""
    transformers_or_give_up()
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def on_meta(layers: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(configuration(layers))
    return model


def write(folder: Path, layers: int) -> None:
    """A checkpoint of random values: shards and their index in `folder`, all in one file in `folder/whole`."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    names = list(on_meta(layers).state_dict().items())
    for number, (name, tensor) in enumerate(names):
        values = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        shards[number * SHARDS // len(names)][name] = values
    (folder / "whole").mkdir(parents=True, exist_ok=True)
    files = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    configuration(layers).save_pretrained(folder)
    save_file({name: tensor for shard in shards for name, tensor in shard.items()}, folder / "whole/all.safetensors")
    del shards
    assert len(load_file(folder / "whole/all.safetensors")) == len(names)


def source_of(kind: str, folder: Path) -> Any:
    """What `load_` is given: the paths, a state dict of mapped tensors, or an iterator over a file."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    whole = folder / "whole" / "all.safetensors"

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        with safe_open(whole, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)

    def sharded() -> dict[str, Tensor]:
        return {
            name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }

    sources: dict[str, Callable[[], Any]] = {
        "file": lambda: whole,
        "index": lambda: folder / "model.safetensors.index.json",
        "directory": lambda: folder / "whole",
        "Hugging Face directory": lambda: folder,
        "state dict": sharded,
        "iterator": one_by_one,
    }
    return sources[kind]()


SOURCES = ("file", "index", "directory", "Hugging Face directory", "state dict", "iterator")


def prepared(case: Case, folder: Path, layers: int) -> Callable[[], nn.Module]:
    """All that is done before the clock and the samples start; what it gives does the loading."""
    if case.loader == "olq_fx":
        model = on_meta(layers)
        if case.scheme:
            olq_fx.quantize_(model, case.scheme)
            warm = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
            olq_fx.quantize_(warm, case.scheme)

        def load() -> nn.Module:
            olq_fx.load_(model, source_of(case.source, folder), progress=False)
            return model

        return load
    from transformers import AutoModelForCausalLM

    if case.loader == "transformers":
        return lambda: AutoModelForCausalLM.from_pretrained(folder)
    quiet_torchao()
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config: Any = Int8WeightOnlyConfig() if case.scheme.startswith("int8") else Float8WeightOnlyConfig()
    quantize_(nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16)), config)

    def load_and_quantize() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
        quantize_(model, config)
        return model

    return load_and_quantize


def run(measure: Callable[[argparse.Namespace, Path], int], description: str | None) -> int:
    """Write a checkpoint and measure with it: 1 if that finds a limit exceeded."""
    options = parser(description)
    options.add_argument("--layers", type=int, default=11, help="of the model; 11 are 1 GB (default)")
    options.add_argument("--schemes", nargs="+", metavar="NAME")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.layers)
        return min(1, measure(arguments, Path(folder)))


def main() -> None:
    """Prepare, say so, wait for a line, load, and say how large the model is."""
    case, folder, layers, threads = Case(*sys.argv[1:4]), Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(threads)
    load = prepared(case, folder, layers)
    print("ready", flush=True)
    sys.stdin.readline()
    model = load()
    print("loaded", flush=True)
    sys.stdin.readline()
    largest = max(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"final": live_bytes(model), "alive": live_bytes(), "largest_float32": 4 * largest}), flush=True)
