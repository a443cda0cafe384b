"""Which weights of a model a configuration may speak of, under which names, and what is left alone and why."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

from olq_fx.candidates import USE_UNKNOWN, Candidate, candidates_of, combine, module_paths, parameter_bytes
from olq_fx.errors import ConfigurationTypeError, PlanError
from olq_fx.plan import plan_for
from olq_fx.schemes import Slot


def by_path(model: nn.Module) -> dict[str, Candidate]:
    return {candidate.path: candidate for candidate in candidates_of(model)}


class Conv1D(nn.Module):
    """transformers' Conv1D, by its name and attributes."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Own(nn.Module):
    """A module with parameters of its own, under the names given."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def named(kind: str, *children: tuple[str, nn.Module], base: type[nn.Module] = nn.Module) -> nn.Module:
    """A module whose class is called `kind`, with children."""
    module: nn.Module = type(kind, (base,), {})()
    for name, child in children:
        module.add_module(name, child)
    return module


def test_a_linear_layer():
    found = candidates_of(nn.Sequential(nn.Linear(5, 3, dtype=torch.bfloat16)))
    assert found == (
        Candidate(
            path="0.weight",
            module_path="0",
            names=("0.weight",),
            module_names=("0",),
            kind="linear",
            shape=(3, 5),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            trainable=True,
        ),
    )
    assert (found[0].numel, found[0].bytes, found[0].obstacle) == (15, 30, "")


def test_a_model_that_is_one_layer_has_a_parameter_path_only():
    found = candidates_of(nn.Linear(4, 4))[0]
    assert (found.path, found.module_path, found.module_names) == ("weight", "", ())


def test_what_names_its_own_reduction_axis():
    model = nn.ModuleDict(
        {
            "conv1d": Conv1D(nf=12, nx=4),
            "attention": nn.MultiheadAttention(8, 2),
            "cross": nn.MultiheadAttention(8, 2, kdim=6, vdim=10, add_bias_kv=True),
            "quantizable": nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2),
            "subclass": type("MyLinear", (nn.Linear,), {})(4, 2),
        }
    )
    found = by_path(model)
    assert {path: (c.shape, c.transposed) for path, c in found.items()} == {
        "conv1d.weight": ((12, 4), True),
        "attention.in_proj_weight": ((24, 8), False),
        "attention.out_proj.weight": ((8, 8), False),
        "cross.q_proj_weight": ((8, 8), False),
        "cross.k_proj_weight": ((8, 6), False),
        "cross.v_proj_weight": ((8, 10), False),
        "cross.out_proj.weight": ((8, 8), False),
        "quantizable.weight": ((2, 4), False),
        "subclass.weight": ((2, 4), False),
    }
    assert all(c.kind == "linear" and not c.obstacle and not c.left_alone for c in found.values())
    assert found["attention.out_proj.weight"].module_names == ("attention.out_proj", "attention")
    assert found["attention.in_proj_weight"].module_names == ("attention",)


def test_what_is_no_candidate():
    model = nn.ModuleDict(
        {
            "conv1": nn.Conv1d(4, 4, 3),
            "conv2": nn.Conv2d(4, 4, 3),
            "bilinear": nn.Bilinear(3, 4, 5),
            "norm": nn.LayerNorm((4, 4)),
            "rms": nn.RMSNorm((4, 4)),
            "batch": nn.BatchNorm1d(4),
            "group": nn.GroupNorm(2, 4),
            "prelu": nn.PReLU(4),
            "act": nn.GELU(),
            "own_norm": named("MyNorm"),
            "biases": Own(gate_up_proj_bias=torch.zeros(4, 8), bias=torch.zeros(2, 2)),
            "integers": Own(table=torch.zeros(4, 4, dtype=torch.int64)),
            "vectors": Own(scale=torch.zeros(4), scalar=torch.tensor(1.0)),
            "tokens": Own(cls_token=torch.zeros(1, 1, 8), pos_embed=torch.zeros(1, 5, 8)),
        }
    )
    model["own_norm"].weight = nn.Parameter(torch.zeros(4, 4))
    assert candidates_of(model) == ()


def test_a_bare_matrix_has_an_unknown_use():
    found = by_path(nn.Sequential(Own(w=torch.zeros(3, 5))))["0.w"]
    assert (found.kind, found.use_known, found.obstacle) == ("linear", False, USE_UNKNOWN)


def test_recurrent_layers_are_no_linear_layers():
    found = candidates_of(nn.Sequential(nn.LSTM(4, 6), nn.GRUCell(4, 6)))
    assert [c.path for c in found] == ["0.weight_ih_l0", "0.weight_hh_l0", "1.weight_ih", "1.weight_hh"]
    assert all("recurrent" in c.obstacle for c in found)


def test_embeddings_are_left_alone():
    model = nn.ModuleDict(
        {"a": nn.Embedding(10, 4), "renorm": nn.Embedding(10, 4, max_norm=1.0), "bag": nn.EmbeddingBag(10, 4)}
    )
    found = by_path(model)
    assert list(found) == ["a.weight", "renorm.weight", "bag.weight"]
    assert {(c.kind, c.left_alone, c.shape) for c in found.values()} == {("embedding", "embedding", (10, 4))}
    assert [bool(c.obstacle) for c in found.values()] == [False, True, True]
    assert "max_norm" in found["renorm.weight"].obstacle


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "output_projection"])
def test_output_embeddings_by_name(name):
    found = by_path(nn.ModuleDict({"inner": nn.ModuleDict({name: nn.Linear(4, 10)}), "proj": nn.Linear(4, 4)}))
    assert found[f"inner.{name}.weight"].left_alone == "output embedding"
    assert found["proj.weight"].left_alone == ""


def test_output_embeddings_as_models_declare_them():
    inner: Any = nn.ModuleDict({"decoder": nn.Linear(4, 10), "other": nn.Linear(4, 4)})
    inner.get_output_embeddings = lambda: inner["decoder"]
    without: Any = nn.ModuleDict({"proj": nn.Linear(4, 4)})
    without.get_output_embeddings = lambda: None
    broken: Any = nn.ModuleDict({"proj": nn.Linear(4, 4)})

    def refuse() -> nn.Module:
        raise NotImplementedError

    broken.get_output_embeddings = refuse

    class Property(nn.Module):
        get_output_embeddings = property(lambda self: refuse())

    found = by_path(nn.ModuleDict({"inner": inner, "without": without, "broken": broken, "property": Property()}))
    assert [path for path, c in found.items() if c.left_alone] == ["inner.decoder.weight"]


def test_an_output_layer_tied_to_an_embedding():
    model = nn.ModuleDict({"tok": nn.Embedding(10, 4), "proj": nn.Linear(4, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["tok"].weight
    found = by_path(model)
    assert list(found) == ["tok.weight", "proj.weight"]
    tied = found["tok.weight"]
    assert (tied.kind, tied.names, tied.module_names) == ("linear", ("tok.weight", "head.weight"), ("tok", "head"))
    assert tied.left_alone == "output embedding (head.weight), tied to the embedding tok.weight"
    assert not tied.obstacle


def experts() -> nn.Module:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


ROUTERS = {
    "gate beside experts": named("Mlp", ("gate", nn.Linear(8, 4)), ("experts", experts())),
    "gate beside named experts": named("Mlp", ("gate", nn.Linear(8, 4)), ("local_experts", experts())),
    "gate beside a shared expert": named("Mlp", ("gate", nn.Linear(8, 4)), ("shared_expert", nn.Linear(8, 8))),
    "router": named("Mlp", ("router", nn.Linear(8, 4))),
    "shared gate": named("Mlp", ("shared_expert_gate", nn.Linear(8, 1))),
    "router class": named("Mlp", ("switch", named("MyTopKRouter", ("layer", nn.Linear(8, 4))))),
    "linear router class": named("Mlp", ("switch", type("PhiTopKRouter", (nn.Linear,), {})(8, 4))),
    "gating class": named("Mlp", ("switch", named("JetTopKGating", ("layer", nn.Linear(8, 4))))),
    "gate class": named("Mlp", ("wg", named("MoEGate", ("proj", nn.Linear(8, 4))))),
    "gate class beside experts": named("Mlp", ("wg", named("Gate", ("p", nn.Linear(8, 4)))), ("experts", experts())),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_left_alone(name):
    found = candidates_of(nn.ModuleDict({"mlp": copy.deepcopy(ROUTERS[name])}))
    routers = [c for c in found if "experts." not in c.path and "shared_expert." not in c.path]
    assert len(routers) == 1
    assert routers[0].left_alone == "router of a mixture of experts"
    assert routers[0].kind == "linear"
    assert all(not c.left_alone for c in found if c is not routers[0])


def test_half_of_a_gated_mlp_is_no_router():
    model = named("Model", ("mlp", named("GatedMLP", ("gate", nn.Linear(8, 8)), ("up", nn.Linear(8, 8)))))
    model.add_module("forget", named("ForgetGate", ("proj", nn.Linear(8, 8))))
    assert all(not c.left_alone for c in candidates_of(model))


def test_the_class_of_the_model_itself_makes_nothing_a_router():
    assert not candidates_of(named("SemanticRouter", ("proj", nn.Linear(4, 4))))[0].left_alone


MODULATIONS = {
    "DiT": named("Block", ("adaLN_modulation", nn.Sequential(nn.SiLU(), nn.Linear(8, 48)))),
    "AdaLayerNormZero": named("Block", ("norm1", named("AdaLayerNormZero", ("linear", nn.Linear(8, 48))))),
    "AdaLayerNormSingle": named("Model", ("adaln_single", named("AdaLayerNormSingle", ("linear", nn.Linear(8, 48))))),
    "CogVideoX": named("Block", ("norm", named("CogVideoXLayerNormZero", ("linear", nn.Linear(8, 48))))),
    "Lumina": named("Block", ("norm", named("LuminaRMSNormZero", ("linear", nn.Linear(8, 48))))),
    "Flux": named("Block", ("img_mod", named("Modulation", ("lin", nn.Linear(8, 48))))),
    "QwenImage": named("Block", ("txt_mod", nn.Sequential(nn.SiLU(), nn.Linear(8, 48)))),
    "direct": named("Block", ("modulation", nn.Linear(8, 16))),
    "FiLM": named("Block", ("cond", named("T5FiLMLayer", ("scale_bias", nn.Linear(8, 16))))),
    "scale shift": named("Block", ("scale_shift_proj", nn.Linear(8, 16))),
}


@pytest.mark.parametrize("name", MODULATIONS)
def test_modulation_layers_are_left_alone(name):
    model = nn.ModuleDict({"block": copy.deepcopy(MODULATIONS[name]), "proj": nn.Linear(8, 8)})
    found = candidates_of(model)
    assert [c.left_alone for c in found] == ["modulation layer", ""]


def test_a_resnet_projection_of_time_is_modulation_only_as_scale_and_shift():
    plain: Any = named("ResnetBlock2D", ("time_emb_proj", nn.Linear(8, 8)))
    scaling = copy.deepcopy(plain)
    plain.time_embedding_norm, scaling.time_embedding_norm = "default", "scale_shift"
    found = candidates_of(nn.ModuleList([plain, scaling]))
    assert [bool(c.left_alone) for c in found] == [False, True]


def test_other_things_called_modulation_are_no_modulation_layers():
    """FocalNet mixes tokens by what it calls focal modulation."""
    model = nn.Sequential(
        named("Layer", ("modulation", named("FocalNetModulation", ("projection_in", nn.Linear(8, 17)))))
    )
    assert not candidates_of(model)[0].left_alone


def test_lists_of_experts_are_of_kind_moe_and_shared_experts_are_dense():
    model = nn.ModuleDict(
        {
            "mlp": nn.ModuleDict(
                {
                    "gate": nn.Linear(8, 2),
                    "experts": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8)}) for _ in range(2)),
                    "shared_experts": nn.ModuleDict({"up": nn.Linear(8, 8)}),
                }
            )
        }
    )
    assert [(c.path, c.kind, c.left_alone != "", c.obstacle) for c in candidates_of(model)] == [
        ("mlp.gate.weight", "linear", True, ""),
        ("mlp.experts.0.up.weight", "moe", False, ""),
        ("mlp.experts.1.up.weight", "moe", False, ""),
        ("mlp.shared_experts.up.weight", "linear", False, ""),
    ]


def layouts(name, module):
    found = candidates_of(nn.ModuleDict({name: module}))
    assert all(candidate.kind == "moe" and not candidate.blocked and not candidate.left_alone for candidate in found)
    return [
        (c.path.rpartition(".")[2], c.shape, c.transposed, c.shards, c.interleaved) if c.use_known else c.path
        for c in found
    ]


@pytest.mark.parametrize("name", ["experts", "block"])
def test_the_shapes_of_both_weights_of_experts_tell_how_they_are_stored(name):
    stored = Own(gate_up_proj=torch.zeros(3, 20, 6), down_proj=torch.zeros(3, 6, 10))
    assert layouts(name, stored) == [
        ("gate_up_proj", (3, 20, 6), False, 2, False),
        ("down_proj", (3, 6, 10), False, 1, False),
    ]
    other = Own(gate_up_proj=torch.zeros(3, 6, 20), down_proj=torch.zeros(3, 10, 6))
    assert layouts(name, other) == [
        ("gate_up_proj", (3, 20, 6), True, 2, False),
        ("down_proj", (3, 6, 10), True, 1, False),
    ]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("concatenated", [False, True])
def test_a_module_of_experts_may_say_how_it_stores_them(transposed, concatenated):
    gate_up, down = ((3, 6, 12), (3, 6, 6)) if transposed else ((3, 12, 6), (3, 6, 6))
    module = Own(gate_up_proj=torch.zeros(gate_up), down_proj=torch.zeros(down))
    module.is_transposed, module.is_concatenated = transposed, concatenated
    assert layouts("experts", module) == [
        ("gate_up_proj", (3, 12, 6), transposed, 2, not concatenated),
        ("down_proj", (3, 6, 6), transposed, 1, False),
    ]


def test_sizes_tell_how_a_single_weight_of_experts_is_stored():
    module = named("GraniteMoeParallelExperts")
    module.weight = nn.Parameter(torch.zeros(2, 8, 4))
    assert layouts("linear", module) == ["linear.weight"]
    module.output_size, module.input_size = 8, 4
    assert layouts("linear", module) == [("weight", (2, 8, 4), False, 1, False)]
    module.output_size, module.input_size = 4, 8
    assert layouts("linear", module) == [("weight", (2, 4, 8), True, 1, False)]


@pytest.mark.parametrize(
    ("name", "module", "tensors"),
    [
        ("experts", Own(w1=torch.zeros(2, 8, 4), w2=torch.zeros(2, 4, 4)), ["experts.w1", "experts.w2"]),
        (
            "experts",
            Own(up_proj=torch.zeros(2, 8, 4), down_proj=torch.zeros(2, 4, 8)),
            ["experts.up_proj", "experts.down_proj"],
        ),
        ("mlp", named("DbrxExpertGLU"), ["mlp.weight"]),
    ],
)
def test_experts_whose_layout_nothing_tells_have_an_unknown_use(name, module, tensors):
    if not module._parameters:
        module.weight = nn.Parameter(torch.zeros(16, 4))
    assert layouts(name, module) == tensors


def test_computed_weights_are_listed_under_the_name_that_people_know():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.weight_norm(nn.Linear(5, 3))
    model = nn.ModuleDict(
        {
            "new": nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
            "orthogonal": nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
            "old": old,
            "pruned": nn.Linear(5, 3),
            "attention": nn.MultiheadAttention(8, 2),
        }
    )
    prune.random_unstructured(model["pruned"], "weight", 0.5)
    nn.utils.parametrize.register_parametrization(model["attention"], "in_proj_weight", nn.Identity())
    found = by_path(model)
    assert {path: c.shape for path, c in found.items()} == {
        "new.weight": (3, 5),
        "orthogonal.weight": (4, 4),
        "old.weight": (3, 5),
        "pruned.weight": (3, 5),
        "attention.in_proj_weight": (24, 8),
        "attention.out_proj.weight": (8, 8),
    }
    blocked = [path for path, c in found.items() if "is computed by" in c.obstacle]
    assert blocked == ["new.weight", "orthogonal.weight", "old.weight", "pruned.weight", "attention.in_proj_weight"]
    assert found["new.weight"].module_names == ("new",)


@pytest.mark.parametrize(("how", "what"), [("buffer", "a buffer"), ("attribute", "an attribute")])
@pytest.mark.parametrize("layer", [nn.Linear(4, 6), Conv1D(6, 4)])
def test_a_linear_weight_that_is_no_parameter_is_listed(how, what, layer):
    layer = copy.deepcopy(layer)
    weight = layer.weight.detach()
    del layer.weight
    if how == "buffer":
        layer.register_buffer("weight", weight)
    else:
        layer.weight = weight
    found = by_path(nn.Sequential(layer, nn.Linear(4, 4)))
    assert list(found) == ["0.weight", "1.weight"]
    assert (found["0.weight"].shape, found["0.weight"].obstacle) == ((6, 4), f"its weight is {what}, not a parameter")


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "_mkldnn"])
def test_weights_that_are_stored_otherwise_stay(kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weight = model[0].weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = weight.to_mkldnn() if kind == "_mkldnn" else weight.to_sparse(layout=getattr(torch, kind))
    model[0].weight = nn.Parameter(stored, requires_grad=False)
    plan = plan_for("int8", model)
    assert plan.lookup("0.weight").reason == f"it is stored as {kind}, not as a dense matrix"
    assert [row.path for row in plan.quantized] == ["1.weight"]


def test_one_parameter_under_several_names_is_one_candidate():
    shared: Any = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "c": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    model["c"].weight = shared.weight
    model["d"].weight = nn.Parameter(shared.weight.data)
    found = candidates_of(model)
    assert len(found) == 1
    assert found[0].names == ("a.0.weight", "b.weight", "c.weight", "d.weight")
    assert found[0].module_names == ("a.0", "b", "c", "d")


def test_one_storage_on_meta_too():
    with torch.device("meta"):
        first = nn.Linear(4, 4)
        model = nn.ModuleList([first, nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = nn.Parameter(first.weight.data)
    assert [c.names for c in candidates_of(model)] == [("0.weight", "1.weight"), ("2.weight",)]
    assert all(c.device.type == "meta" for c in candidates_of(model))


def test_views_of_one_storage_are_different_weights():
    whole = torch.zeros(8, 4)
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[0].weight, model[1].weight = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    assert len(candidates_of(model)) == 2


def test_a_weight_used_both_ways_cannot_be_converted():
    model = nn.ModuleDict({"linear": nn.Linear(4, 4), "conv": Conv1D(4, 4)})
    model["conv"].weight = model["linear"].weight
    assert "both as (N, K) and as (K, N)" in candidates_of(model)[0].obstacle


def test_a_linear_weight_registered_elsewhere_has_an_unknown_use():
    model: Any = nn.ModuleDict({"linear": nn.Linear(4, 4), "other": Own()})
    model["other"].register_parameter("w", model["linear"].weight)
    found = candidates_of(model)
    assert [(c.names, c.obstacle) for c in found] == [(("linear.weight", "other.w"), USE_UNKNOWN)]


def test_modules_that_hold_themselves_end():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].around = model
    assert [c.path for c in candidates_of(model)] == ["0.weight"]


def test_a_compiled_module_inside():
    model: Any = nn.Module()
    model.lm_head = torch.compile(nn.Linear(4, 8))
    model.block = torch.compile(nn.Linear(4, 4))
    found = by_path(model)
    assert list(found) == ["lm_head._orig_mod.weight", "block._orig_mod.weight"]
    assert found["lm_head._orig_mod.weight"].left_alone == "output embedding"


def test_weights_of_other_libraries_are_already_quantized():
    other = type("AffineQuantizedTensor", (nn.Parameter,), {"__module__": "torchao.dtypes"})
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
    model[0].weight = other(torch.zeros(4, 4))
    model[1].weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model[1].weight_scale_inv = nn.Parameter(torch.ones(1, 1))
    found = candidates_of(model)
    assert found[0].obstacle == "already quantized by torchao (AffineQuantizedTensor)"
    assert found[1].obstacle == "already quantized: it is stored as float8_e4m3fn beside its scales"


def stored(**tensors: torch.Tensor) -> nn.Module:
    """A module of another library, which keeps its weight in a form of its own."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if name.startswith("buffer_"):
            module.register_buffer(name.removeprefix("buffer_"), tensor)
        else:
            module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


BYTES = torch.zeros(8, 16, dtype=torch.uint8)
CHECKPOINTS = {
    "compressed-tensors": stored(
        weight_packed=BYTES, weight_scale=torch.ones(8, 2), weight_shape=torch.tensor([8, 32])
    ),
    "block fp8": stored(weight=torch.zeros(256, 256).to(torch.float8_e4m3fn), weight_scale_inv=torch.ones(2, 2)),
    "awq": stored(buffer_qweight=torch.zeros(8, 4, dtype=torch.int32), buffer_scales=torch.ones(1, 32).half()),
    "gpt-oss": stored(
        gate_up_proj_blocks=torch.zeros(2, 8, 4, 16, dtype=torch.uint8),
        gate_up_proj_scales=torch.zeros(2, 8, 4, dtype=torch.uint8),
        gate_up_proj_bias=torch.zeros(2, 8),
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_others_have_packed_is_one_candidate_that_says_so(name):
    model = nn.ModuleDict({"experts" if name == "gpt-oss" else "proj": CHECKPOINTS[name], "rest": nn.Linear(32, 32)})
    found = candidates_of(model)
    assert len(found) == 2
    assert re.fullmatch(r"already quantized: it is stored as \w+ beside its scales", found[0].obstacle)
    assert found[0].kind == ("moe" if name == "gpt-oss" else "linear")
    plan = plan_for("mxfp8", model)
    assert [(row.path.partition(".")[0], row.decision) for row in plan.rows] == [
        (found[0].path.partition(".")[0], "leave"),
        ("rest", "quantize"),
    ]
    assert plan.rows[0].reason == found[0].obstacle
    for pattern in (found[0].path, found[0].module_path):
        with pytest.raises(PlanError, match=f"targets: '{pattern}' names {found[0].path}, .*already quantized"):
            plan_for({"targets": {pattern: "mxfp8", "rest": "mxfp8"}}, model)
    key = "moe" if name == "gpt-oss" else "linear"
    with pytest.raises(PlanError, match=f"{key}: an activation format without .*already quantized: it is stored as"):
        plan_for({"linear": "fp8", "moe": "fp8"} | {key: {"activation": "mxfp8"}}, model)
    assert plan_for({"quantization": "fp8", "ignore": [found[0].module_path]}, model).rows[1].decision == "quantize"


def test_integers_without_scales_are_no_weights():
    assert candidates_of(stored(weight_packed=BYTES, buffer_qweight=BYTES, codes=BYTES)) == ()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_linear_weight_of_another_dtype_is_a_candidate_with_its_dtype(dtype):
    """Whether that is an error depends on what is asked for."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    assert [(c.dtype, c.obstacle) for c in candidates_of(model)] == [(dtype, "")]


def test_what_has_no_data_or_shape_yet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(0, 4), nn.Linear(4, 4))
    model[2].weight = nn.Parameter(torch.zeros(16))
    assert [(c.shape, c.obstacle) for c in candidates_of(model)] == [
        ((0, 0), "not initialised yet; run the model once"),
        ((4, 0), "it has no elements"),
        ((16,), "it is stored with shape (16,), not as a matrix"),
    ]


def test_fake_tensors_do():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        assert [c.names for c in candidates_of(model)] == [("0.weight", "1.weight")]


class Quantized(torch.nn.Parameter):
    """What is known of a converted weight from below: a mark on the class and a specification."""

    __olq_fx_quantized__ = True

    class spec:  # noqa: N801
        weight, activation, weight_rule, activation_rule, transposed = "mxfp4", "", "mse", "", True


def test_a_converted_weight_is_known_by_its_mark():
    model = nn.Sequential(Conv1D(nf=12, nx=4), Own())
    model[0].weight = Quantized(torch.zeros(4, 12))
    model[1].register_parameter("w", Quantized(torch.zeros(5, 7)))
    found = candidates_of(model)
    assert [c.current for c in found] == [Slot("mxfp4", None)] * 2
    assert [c.current_rules for c in found] == [("mse", "")] * 2
    assert [(c.shape, c.transposed, c.obstacle) for c in found] == [((12, 4), True, ""), ((7, 5), True, "")]


def test_all_paths_and_bytes():
    shared = nn.Linear(4, 4, dtype=torch.bfloat16)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.LayerNorm(4)), "b": shared})
    assert module_paths(model) == (
        "a", "a.0", "a.0.weight", "a.0.bias", "a.1", "a.1.weight", "a.1.bias", "b", "b.weight", "b.bias",
    )  # fmt: skip
    assert parameter_bytes(model) == 2 * (16 + 4) + 4 * 8
    model["c"] = nn.Linear(4, 4, bias=False)
    model["c"].weight = nn.Parameter(shared.weight.data)
    assert parameter_bytes(model) == 2 * (16 + 4) + 4 * 8
    assert parameter_bytes(nn.LazyLinear(4, bias=False)) == 0


def test_what_is_no_module_is_an_error():
    with pytest.raises(ConfigurationTypeError, match=r"torch\.nn\.Module, not Tensor"):
        candidates_of(torch.zeros(3))  # type: ignore[arg-type]


def traced(path: str, shape: tuple[int, ...], **known: object) -> Candidate:
    place = {"path": path, "module_path": path.rpartition(".")[0], "names": (path,), "module_names": ()}
    rest = {"kind": "linear", "dtype": torch.float32, "device": torch.device("cpu")}
    return Candidate(shape=shape, **{**place, **rest, **known})  # type: ignore[arg-type]


def test_a_graph_adds_what_the_tree_cannot_know():
    model = nn.ModuleDict({"own": Own(w=torch.zeros(3, 5), v=torch.zeros(3, 5)), "linear": nn.Linear(4, 4)})
    model["tok"] = nn.Embedding(10, 4)
    graph = [
        traced("own.w", (5, 3), transposed=True),
        traced("linear.weight", (4, 4), left_alone="also used by add"),
        traced("tok.weight", (10, 4)),
        traced("functional.w", (2, 2)),
    ]
    found = {c.path: c for c in combine(candidates_of(model), graph)}
    assert list(found) == ["own.w", "own.v", "linear.weight", "tok.weight", "functional.w"]
    assert (found["own.w"].shape, found["own.w"].transposed, found["own.w"].obstacle) == ((5, 3), True, "")
    assert found["own.w"].module_names == ("own",)
    assert found["own.v"].obstacle == USE_UNKNOWN
    assert found["linear.weight"].left_alone == "also used by add"
    assert (found["tok.weight"].kind, found["tok.weight"].left_alone) == ("linear", "embedding")
    contrary = combine(candidates_of(model), [traced("linear.weight", (4, 4), transposed=True)])
    assert "both as" in contrary[2].obstacle
    assert combine(candidates_of(model), []) == candidates_of(model)
    (*_, experts) = combine(candidates_of(model), [traced("own.gate_up_proj", (4, 6, 2), kind="moe")])
    assert (experts.shape, experts.shards, experts.obstacle) == ((4, 6, 2), 2, "")


def test_stacks_of_matrices_of_unknown_use_are_listed():
    """Whoever multiplies with them, the tree does not say so; tables for positions and convolutions are none."""
    model = nn.ModuleDict(
        {"own": Own(w=torch.zeros(4, 3, 2), positions=torch.zeros(1, 7, 3), scale=torch.zeros(4, 1, 1))}
    )
    model["conv"], model["bilinear"] = nn.Conv1d(2, 3, 5), nn.Bilinear(2, 3, 4)
    found = [candidate for candidate in candidates_of(model) if len(candidate.shape) == 3]
    assert [(c.path, c.kind, c.shape, c.obstacle) for c in found] == [("own.w", "linear", (4, 3, 2), USE_UNKNOWN)]
