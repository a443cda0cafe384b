"""`olq-fx run`: load a language model, quantize it, let it speak; how fast that is and what memory it takes.

The whole checkpoint is loaded in original precision before the first weight is converted, which is the peak of memory.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from olq_fx.cli_answers import Answer, ModelError, paragraph
from olq_fx.cli_models import Factory, source_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, OlqFxError
from olq_fx.progress import progress_bar
from olq_fx.quantize import quantize_
from olq_fx.tables import size_of
from olq_fx.testing_memory import live_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run: see the options of the command of the same names. `temperature` 0 takes the likeliest token."""

    prompts: Sequence[str]
    max_new_tokens: int
    temperature: float
    seed: int
    strict: bool
    progress: bool
    dtype: torch.dtype | None
    device: torch.device | None


def run(model: str, config: QuantizationConfig, options: RunOptions) -> Answer:
    """Load, quantize, generate.

    Raises:
        OlqFxError: of what was asked for.
        ModelError: the model failed.
    """
    source = source_of(model)
    if isinstance(source, Factory):
        raise ConfigurationError("`olq-fx run` needs a folder in Hugging Face's layout, with a tokenizer")
    with progress_bar(options.progress) as bar:
        bar.start("load", None)
        tokenizer = source.tokenizer()
        start = time.perf_counter()
        loaded = source.load(options.dtype, None)
        if not getattr(loaded, "can_generate", lambda: False)():
            raise ConfigurationError(f"MODEL {model!r} ({type(loaded).__name__}) cannot generate text")
        loading, before = time.perf_counter() - start, live_bytes(loaded)
        bar.start("quantize", None)
        start = time.perf_counter()
        report = quantize_(loaded, config, device=options.device, strict=options.strict)
        quantizing, after = time.perf_counter() - start, live_bytes(loaded)
        bar.start("generate", len(options.prompts))
        texts = []
        for prompt in options.prompts:
            texts.append(_generated(loaded, tokenizer, prompt, options))
            bar.advance()
    data = {
        "model": model,
        "config": config.to_dict(),
        "results": texts,
        "load_seconds": loading,
        "quantize_seconds": quantizing,
        "share_of_parameters": report.share_of_parameters,
        "model_bytes": {"original": before, "quantized": after},
        "peak_memory_bytes": _peak(loaded),
    }
    return Answer(data, _text(data))


def _generated(model: nn.Module, tokenizer: Any, prompt: str, options: RunOptions) -> dict[str, Any]:
    """What the model says after a prompt, and how fast."""
    device = next(model.parameters()).device
    ids = tokenizer(prompt, return_tensors="pt").to(device)
    if not ids.input_ids.shape[1]:
        raise ConfigurationError(f"--prompt {prompt!r} has no tokens")
    torch.manual_seed(options.seed)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    start = time.perf_counter()
    try:
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=options.max_new_tokens, **sampling)  # type: ignore[operator]
    except OlqFxError:
        raise
    except Exception as error:
        raise ModelError(f"cannot generate: {paragraph(error)}") from error
    said = out[0, ids.input_ids.shape[1] :].cpu()
    seconds = time.perf_counter() - start
    return {
        "prompt": prompt,
        "text": tokenizer.decode(said, skip_special_tokens=True),
        "tokens": len(said),
        "seconds": seconds,
        "tokens_per_second": len(said) / seconds if seconds else 0.0,
    }


def _peak(model: nn.Module) -> int | None:
    """The most memory that the process had: of the GPU, else resident; None where the system does not tell."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _text(data: dict[str, Any]) -> str:
    lines = []
    for result in data["results"]:
        speed = f"{result['tokens']} tokens, {result['tokens_per_second']:.1f} a second"
        lines += [result["prompt"] + result["text"], f"  {speed}"]
    sizes = data["model_bytes"]
    lines.append(
        f"model: {size_of(sizes['original'])} -> {size_of(sizes['quantized'])}, "
        f"{data['share_of_parameters']:.1%} of its parameters quantized"
    )
    peak = data["peak_memory_bytes"]
    if peak is not None:
        lines.append(f"peak memory of the process: {size_of(peak)}")
    lines.append(f"loaded in {data['load_seconds']:.1f} s, quantized in {data['quantize_seconds']:.1f} s")
    return "\n".join(lines)
