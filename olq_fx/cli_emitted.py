"""`olq-fx kernels --emitted`: the kernels that Inductor emits for a model on a GPU, quantized and not, without a GPU.

The model is built and compiled in a process of its own that takes a GPU for present; nothing is launched.
"""

import contextlib
import dataclasses
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx import torch_private
from olq_fx.cli_answers import Answer, ModelError, paragraph
from olq_fx.cli_emitted_tables import Lane, answer
from olq_fx.cli_inputs import first_call
from olq_fx.cli_models import Factory, Folder, source_of
from olq_fx.comparison_runs import invoke
from olq_fx.configuration import QuantizationConfig
from olq_fx.cost_model import Architecture
from olq_fx.errors import ConfigurationError, OlqFxError, OlqFxWarning
from olq_fx.optional_packages import optional_package
from olq_fx.progress import Bar, progress_bar
from olq_fx.quantize import quantize_
from olq_fx.testing_emitted import Emitter, emitted
from olq_fx.testing_emitted_calls import calls_made
from olq_fx.testing_machine_code import Compiler, MachineCode
from olq_fx.weights import QuantizedWeight

LONGEST = 3600.0
"""Seconds that one compilation of a model may take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmittedOptions:
    """What to compile: see the options of the command of the same names. `tokens` are sequences and their length."""

    inputs: str | None
    tokens: tuple[int, int]
    blocks: int | None
    dtype: torch.dtype
    strict: bool
    meta: bool
    code: bool
    dump: str | None


def kernels(model: str, config: QuantizationConfig, architecture: Architecture, options: EmittedOptions) -> Answer:
    """Compile a model twice, as it is and quantized, and say which kernels come out.

    Args:
        model: a folder or `module:callable`.
        config: what the second is quantized to.
        architecture: the GPU.
        options: what else.

    Raises:
        ConfigurationError: an option has no meaning for this model.
        MissingPackageError: triton is not installed.
        ModelError: the model could not be built or compiled.
    """
    optional_package("triton", "test", "compiling for a GPU")
    source = source_of(model)
    if options.blocks is not None and (isinstance(source, Factory) or not options.meta):
        raise ConfigurationError("--blocks goes with a folder in Hugging Face's layout, built without weights (--meta)")
    folder = None if options.dump is None else _empty_folder(options.dump)
    configs = {str(options.dtype).removeprefix("torch."): None, _name(config): config}
    lanes = []
    with Emitter(timeout=LONGEST) as emitter, Compiler() as compiler, progress_bar(True) as bar:
        bar.start("compile the model", len(configs))
        for name, one in configs.items():
            dumped = None if folder is None else folder / name
            lanes.append(_emit(emitter, model, one, architecture, options, name, dumped))
            bar.advance()
        codes = _machine_code(compiler, lanes, bar) if options.code else {}
    if folder is not None:
        for lane in lanes:
            _write(lane, folder / lane.name)
    return answer(lanes, codes, architecture, _notes(options, source, folder))


def _name(config: QuantizationConfig) -> str:
    """The scheme, where a configuration is one and nothing else."""
    keys = config.to_dict()
    return str(keys["quantization"]) if keys.keys() == {"quantization"} else "quantized"


def _emit(
    emitter: Emitter,
    model: str,
    config: QuantizationConfig | None,
    architecture: Architecture,
    options: EmittedOptions,
    name: str,
    dump: Path | None,
) -> Lane:
    try:
        keys = None if config is None else config.to_dict()
        lane, said = emitter.call(_lane, model, keys, architecture.capability, options, name, dump)
    except OlqFxError:
        raise
    except Exception as error:
        raise ModelError(f"cannot compile {model!r} ({name}) for {architecture.name}: {_plain(error)}") from error
    for text in said:
        warnings.warn(text, OlqFxWarning, stacklevel=2)
    found: Lane = lane
    return found


def _plain(error: Exception) -> str:
    """What went wrong, without the hints, links and tracebacks that torch adds."""
    text = re.split(r"\n\n(?:While executing|from user code|Set TORCH)|For more details about", str(error))[0]
    text = re.sub(r"Hint: .*?(?=Hint: |Developer debug context: |\Z)", "", text, flags=re.DOTALL)
    return paragraph(RuntimeError(text)).replace("RuntimeError", type(error).__name__, 1)


# In the process of the emitter


def _lane(
    model: str,
    keys: Mapping[str, Any] | None,
    capability: int,
    options: EmittedOptions,
    name: str,
    dump: Path | None,
) -> tuple[Lane, list[str]]:
    """Build a model, quantize and compile it; what came out, and the warnings of ours meanwhile."""
    if "TORCH_LOGS" not in os.environ:
        logging.disable()  # what fails is raised, too
    with contextlib.redirect_stdout(sys.stderr), _our_warnings() as said:
        built, call = _built(source_of(model), options)
        config = None
        if keys is not None:
            quantize_(built, QuantizationConfig.parse(keys), strict=options.strict, example_inputs=_example(call))
            _without_data(built)
            config = QuantizationConfig.parse(None)  # every weight says by itself what it is
        module = _Called(built, call)
        code = emitted(module, module.tensors, config, capability, dump_dir=dump)
        reasons = tuple(reason.replace(": model.", ": ", 1) for reason in code.reasons)  # the paths of the model itself
        notes = tuple(re.sub(r"(^|, )model\.", r"\1", note) for note in code.notes)
        return Lane(name, dataclasses.replace(code, inputs=(), reasons=reasons, notes=notes), calls_made(code)), said


@contextlib.contextmanager
def _our_warnings() -> Iterator[list[str]]:
    """The texts of warnings of ours, filled when the context ends; those of others are not for users of a command."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if issubclass(each.category, OlqFxWarning)]


def _built(source: Folder | Factory, options: EmittedOptions) -> tuple[nn.Module, Any]:
    """The model and one call of it, with inputs where the model is and in its precision."""
    if isinstance(source, Folder) and options.meta:
        built = source.on_meta(options.dtype, options.blocks)
    else:
        built = source.on_meta(options.dtype) if options.meta else source.load(options.dtype, None)
    call = first_call(source, built, options.inputs, options.tokens)

    tensors, joined = torch_private.split_tensors(call)
    device = "meta" if options.meta else "cpu"
    return built, joined([each.to(device, options.dtype if each.is_floating_point() else None) for each in tensors])


def _example(call: Any) -> Any:
    return (call,) if isinstance(call, Tensor) else call


def _without_data(model: nn.Module) -> None:
    """Let weights that wait for their data be used: code depends on shapes only."""
    for parameter in model.parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.pending = None


class _Called(nn.Module):
    """A model as a function of the tensors of one call; its other arguments are constants."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__()
        self.model = model
        self.tensors, self._joined = torch_private.split_tensors(call)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of the model's result."""
        found, _ = torch_private.split_tensors(invoke(self.model, self._joined(tensors)))
        return found


# Machine code and files


def _machine_code(compiler: Compiler, lanes: Sequence[Lane], bar: Bar) -> dict[tuple[str, str], MachineCode | str]:
    """What each kernel becomes, by lane and name: its machine code, or why there is none."""
    found: dict[tuple[str, str], MachineCode | str] = {}
    known: dict[str, MachineCode | str] = {}
    bar.start("compile kernels", sum(len(lane.code.kernels) for lane in lanes))
    for lane in lanes:
        for kernel in lane.code.kernels:
            if kernel.source not in known:
                try:
                    known[kernel.source] = kernel.machine_code(compiler)
                except Exception as error:  # a kernel that does not compile is a row of the table, not its end
                    known[kernel.source] = f"does not compile: {paragraph(error)}"
            found[lane.name, kernel.name] = known[kernel.source]
            bar.advance()
    return found


def _empty_folder(name: str) -> Path:
    """A folder for dumps, which is new or empty.

    Raises:
        ConfigurationError: it is not.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(f"--dump {name!r}: {error.strerror}") from None
    if filled:
        raise ConfigurationError(f"--dump {name!r} is not empty")
    return folder


def _write(lane: Lane, folder: Path) -> None:
    """The emitted module, and each kernel by itself."""
    kernels = folder / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "module.py").write_text(lane.code.source)
    for kernel in lane.code.kernels:
        # A name may be longer than a file's may be.
        (kernels / f"{kernel.name[:100]}_{kernel.name.rpartition('_')[2]}.py").write_text(kernel.source)


def _notes(options: EmittedOptions, source: Folder | Factory, folder: Path | None) -> list[str]:
    found = []
    if options.inputs is None:
        batch, length = options.tokens
        found.append(f"one call on {batch} x {length} tokens")
    if options.blocks is not None:
        found.append(f"only {options.blocks} of the repeated blocks are built (--blocks)")
    if options.meta:
        found.append("weights have no data (--meta)")
    if folder is not None:
        found.append(f"sources and graphs are in {folder}")
    return found
