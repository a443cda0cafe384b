"""Experts in the models of transformers 5 and in a trained one: every form of them, both routes, nothing left out."""

import copy
from typing import Any

import pytest
import torch
from moe_models import FORMS, MODELS, built, logits, stacks, words

import olq_fx
from olq_fx.errors import ConfigurationError
from olq_fx.integrations.transformers import use_experts
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits, assert_sqnr, sqnr

NAMES = (*MODELS, "trained_1")
DTYPES = (torch.float32, torch.bfloat16)

DEFAULT = {
    ("mixtral", "grouped_mm", torch.bfloat16, "fp8_per_block"),
    ("qwen2_moe", "batched_mm", torch.float32, "int8"),
    ("qwen3_moe", "grouped_mm", torch.float32, "mxfp4"),
    ("gpt_oss", "grouped_mm", torch.float32, "nvfp4_per_token"),
    ("gpt_oss", "batched_mm", torch.bfloat16, "mxfp8_weight_only"),
    ("deepseek_v3", "batched_mm", torch.bfloat16, "fp8_per_tensor"),
    ("llama4", "", torch.bfloat16, "mxfp4_weight_only"),
    ("trained_1", "grouped_mm", torch.bfloat16, "nvfp4_weight_only"),
}
"""Each model, form, dtype and most kinds of format at least once; a compilation takes some seconds."""

without_caches = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
"""transformers asks a cached function which torch this is, within what is compiled."""

LOOPED = ("fp8_per_block", "mxfp4_weight_only")
"""Schemes for the loop over hit experts, whose body is compiled in many small pieces."""


def cases() -> list[Any]:
    found = []
    for name in NAMES:
        for form in ("",) if name == "llama4" else FORMS:
            for dtype in DTYPES:
                for scheme in LOOPED if form == "eager" else SCHEMES:
                    marks = () if (name, form, dtype, scheme) in DEFAULT else pytest.mark.slow
                    found.append(
                        pytest.param(name, form, dtype, scheme, marks=marks, id=f"{name}-{form}-{dtype}-{scheme}")
                    )
    return found


def assert_all_experts_converted(model: torch.nn.Module, report: olq_fx.Report) -> None:
    """Every stack has a row, and that row says that it was converted; of the experts' bytes all are quantized."""
    paths = stacks(model)
    rows = {row.path: row for row in report.plan.rows}
    assert paths
    assert paths.keys() <= rows.keys()
    experts = [row for row in rows.values() if row.path in paths]
    assert {row.kind for row in experts} == {"moe"}
    converted = sum(row.bytes_before for row in experts if report.status(row.path) == "converted")
    assert converted / sum(row.bytes_before for row in experts) > 0.9
    assert (
        converted == sum(p.numel() * p.element_size() for p in paths.values()) == sum(r.bytes_before for r in experts)
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("bias"):
            row = rows[name]
            assert report.status(name) == "converted" or row.reason, f"{name} was skipped in silence"


def assert_same_weights(actual: torch.nn.Module, expected: torch.nn.Module) -> None:
    others = dict(expected.named_parameters())
    for path, parameter in actual.named_parameters():
        assert type(parameter) is type(others[path])
        assert_same_bits(parameter, others[path], name=path)


@without_caches
@pytest.mark.parametrize(("name", "form", "dtype", "scheme"), cases())
def test_both_routes_are_bit_equal(name: str, form: str, dtype: torch.dtype, scheme: str):
    source, ids = built(name, form, dtype), words()
    in_place, compiled = copy.deepcopy(source), copy.deepcopy(source)
    before = logits(source, ids)
    report = olq_fx.quantize_(in_place, scheme)
    assert_all_experts_converted(in_place, report)

    torch.compiler.reset()
    backend = olq_fx.backend(scheme, inner="aot_eager")
    actual = logits(torch.compile(compiled, backend=backend), ids)
    assert_all_experts_converted(compiled, backend.report)
    assert backend.report.converted == report.converted
    assert_same_weights(compiled, in_place)

    expected = logits(in_place, ids)
    assert_same_bits(actual, expected, name="logits of the two routes")
    assert_same_bits(logits(compiled, ids), expected, name="eager call after the backend")
    assert actual.dtype == before.dtype == dtype
    assert sqnr(actual, before) < 90, "nothing was quantized"


def forms_of(name: str, scheme: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The logits of one quantized model in each form, ours among them."""
    model = built(name, "", dtype)
    olq_fx.quantize_(model, scheme)
    found = {}
    for form in FORMS:
        model.set_experts_implementation(form)
        found[form] = logits(model, words())
    assert use_experts(model) == {}
    return found | {"use_experts": logits(model, words())}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama4"])
def test_all_forms_agree(name: str, dtype: torch.dtype):
    """In float32 they differ by the order of a sum of two; in bfloat16 a form rounds where another one does not."""
    schemes = list(SCHEMES)
    first = NAMES.index(name)
    for scheme in (schemes[first], schemes[(first + 7) % len(schemes)]):
        found = forms_of(name, scheme, dtype)
        for form, values in found.items():
            least = 100 if dtype == torch.float32 else 30
            assert_sqnr(values, found["grouped_mm"], least, name=f"{name} {scheme} {form}")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama4"])
def test_all_forms_agree_in_every_scheme(name: str, scheme: str):
    found = forms_of(name, scheme, torch.float32)
    for form, values in found.items():
        assert_sqnr(values, found["grouped_mm"], 100, name=f"{name} {scheme} {form}")


def test_experts_without_a_choice_of_forms_are_refused():
    with pytest.raises(ConfigurationError, match="no module of this Llama4ForCausalLM takes an implementation"):
        use_experts(built("llama4"))


@without_caches
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiled_use_experts_is_one_operator_and_right(name: str):
    """Quantized first, then compiled: the graph has one operator for each layer of experts, and no other."""
    model = built(name)
    olq_fx.quantize_(model, "mxfp4")
    assert use_experts(model) == {}
    expected = logits(model, words())
    called: list[str] = []

    def recorded(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch.compiler.reset()
    backend = olq_fx.backend("mxfp4", inner=recorded)
    actual = logits(torch.compile(model, backend=backend, fullgraph=True), words())
    assert called.count("olq_fx.experts.default") == 1
    assert not [one for one in called if "grouped" in one or "gathered" in one]
    assert_same_bits(actual, expected)
