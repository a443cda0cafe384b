"""`from_pretrained(..., quantization_config=OlqFxConfig(...))`: the weights of quantize_, and what becomes of them."""

import copy
import json
import logging
import pickle
import select
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    ConversionError,
    OlqFxWarning,
    PendingWeightError,
    PlanError,
)
from olq_fx.testing import assert_same_bits

DATA = Path(__file__).parent / "data"
DENSE, MIXTURE = DATA / "tiny-qwen3-wiki", DATA / "tiny-qwen3moe-wiki"
IDS = torch.arange(14).reshape(2, 7)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def hub() -> Any:
    """The package transformers, which knows of olq_fx."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found = pytest.importorskip("transformers")
    found.utils.logging.disable_progress_bar()
    found.utils.logging.set_verbosity_error()
    return found


@pytest.fixture(scope="module")
def load(hub: Any) -> Callable[..., Any]:
    """A model from a folder, quantized by what else is given."""
    from olq_fx.integrations.transformers import OlqFxConfig

    def of(path: object, *config: object, strict: bool = True, **options: Any) -> Any:
        if config:
            options["quantization_config"] = OlqFxConfig(*config, strict=strict)
        return hub.AutoModelForCausalLM.from_pretrained(path, **options)

    return of


@pytest.fixture
def saved(hub: Any, tmp_path: Path) -> Callable[..., Path]:
    """A folder with a model of random weights."""

    def of(name: str, **options: Any) -> Path:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(hub, f"{name}Config")(**{"tie_word_embeddings": False, **SIZES, **options})
            model = getattr(hub, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model.to(options.get("dtype", torch.float32)).save_pretrained(tmp_path / name)
        return tmp_path / name

    return of


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    """The same state dict, bit for bit."""
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert_same_bits(mine[name], value)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("path", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("scheme", ["fp8_per_block", "nvfp4_per_token", "mxfp4_dualscale"])
def test_loading_gives_what_quantize_gives_and_so_does_loading_what_was_saved(
    load: Any, path: Path, scheme: str, tmp_path: Path
):
    expected = load(path)
    report = olq_fx.quantize_(expected, scheme)
    model = load(path, scheme)
    assert model.hf_quantizer.report.converted == report.converted
    assert not model.hf_quantizer.report.pending
    assert_same_model(model, expected)
    y = logits(model)
    assert_same_bits(y, logits(expected))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_model(again, expected)
    assert_same_bits(logits(again), y)
    assert again.hf_quantizer.report.already == report.converted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GptOss", "Qwen3"])
@pytest.mark.parametrize("scheme", sorted(olq_fx.SCHEMES))
@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.bfloat16], ids=str)
def test_every_layout_scheme_and_dtype(load: Any, saved: Any, name: str, scheme: str, dtype: Any, tmp_path: Path):
    path = saved(name)
    expected = load(path, dtype=dtype)
    olq_fx.quantize_(expected, scheme)
    model = load(path, scheme, dtype=dtype)
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "again")
    assert_same_model(load(tmp_path / "again", dtype=dtype), expected)
    assert_same_bits(logits(model), logits(expected))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_that_are_merged_or_stored_transposed(load: Any, saved: Any, name: str, tmp_path: Path):
    path = saved(name)
    expected = load(path)
    olq_fx.quantize_(expected, "mxfp4")
    model = load(path, "mxfp4")
    assert any(type(weight) is olq_fx.weights.QuantizedStack for weight in model.parameters())
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    assert_same_model(load(tmp_path / "again"), expected)


def test_the_dtype_that_is_asked_for_is_the_one_that_is_converted(load: Any):
    expected = load(DENSE, dtype=torch.float32)
    olq_fx.quantize_(expected, "int8")
    model = load(DENSE, "int8", dtype=torch.float32)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert_same_model(model, expected)


def test_the_configuration_in_all_its_forms(hub: Any, tmp_path: Path):
    from olq_fx.integrations.transformers import OlqFxConfig

    file = tmp_path / "config.json"
    file.write_text('{"linear": "mxfp8", "ignore": ["lm_head"]}')
    forms = [
        OlqFxConfig({"linear": "mxfp8", "ignore": ["lm_head"]}),
        OlqFxConfig(linear="mxfp8", ignore="lm_head"),
        OlqFxConfig('{"linear": "mxfp8", "ignore": ["lm_head"]}'),
        OlqFxConfig(str(file)),
        OlqFxConfig(olq_fx.QuantizationConfig(linear="mxfp8", ignore="lm_head")),
    ]
    for form in forms:
        assert form == forms[0]
        assert hash(form) == hash(forms[0])
        assert OlqFxConfig.from_dict(json.loads(form.to_json_string())) == form
        assert hub.quantizers.auto.AutoQuantizationConfig.from_dict(form.to_dict()) == form
    assert OlqFxConfig("int8") != forms[0]
    loose = OlqFxConfig("int8", strict=False)
    assert loose.to_dict() == {"quant_method": "olq_fx", "strict": False, "quantization": "int8"}
    assert OlqFxConfig.from_dict(loose.to_dict()) == loose != OlqFxConfig("int8")
    assert OlqFxConfig.from_dict(loose.to_dict(), return_unused_kwargs=True, other=1) == (loose, {"other": 1})


def test_a_configuration_that_means_nothing_is_an_error_at_once(hub: Any):
    from olq_fx.integrations.transformers import OlqFxConfig

    with pytest.raises(ConfigurationError, match="did you mean 'fp8_per_block'"):
        OlqFxConfig("fp8_per_blok")
    with pytest.raises(ConfigurationTypeError, match="strict is a bool, not str"):
        OlqFxConfig("int8", strict="no")  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing(load: Any):
    config = {"linear": "int8", "ignore": ["*.q_porj"]}
    with pytest.raises(PlanError, match="q_porj"):
        load(DENSE, config)
    with pytest.warns(OlqFxWarning, match="q_porj"):
        model = load(DENSE, config, strict=False)
    assert len(model.hf_quantizer.report.converted) == 28


def test_config_json_says_what_was_asked_for_and_is_all_that_loading_needs(load: Any, tmp_path: Path):
    model = load(DENSE, {"linear": "int8", "ignore": ["*.mlp.*"]})
    model.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["quantization_config"] == {
        "quant_method": "olq_fx",
        "linear": {"weight": "int8_per_channel_static", "activation": "int8_per_token"},
        "ignore": ["*.mlp.*"],
    }
    again = load(tmp_path)
    assert_same_model(again, model)
    # What is in the files counts, whatever a plan would say.
    about["quantization_config"] = {"quant_method": "olq_fx", "linear": "int8", "ignore": ["*.self_attn.*"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert_same_model(load(tmp_path), model)


def test_files_that_do_not_say_how_they_are_quantized(load: Any, tmp_path: Path):
    import safetensors.torch

    load(DENSE, "int8").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PlanError, match="no file says how"):
        load(tmp_path)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt", "olq_fx": '{"version": 99}'})
    with pytest.raises(PlanError, match="version 99; this olq_fx reads 1"):
        load(tmp_path)


def test_parts_that_are_missing_or_have_another_shape(load: Any, tmp_path: Path):
    import safetensors
    import safetensors.torch

    load(DENSE, "int8").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safetensors.safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    scale = tensors.pop(name)
    safetensors.torch.save_file(tensors, file, metadata=about)
    with pytest.raises(PendingWeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \(all\)"):
        load(tmp_path)
    safetensors.torch.save_file({**tensors, name: scale[:3].clone()}, file, metadata=about)
    with pytest.raises(
        ConversionError, match=r"up_proj\.weight: .*expected float32 \(512, 1\), found float32 \(3, 1\)"
    ):
        load(tmp_path)


def without(source: Path, target: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a folder with some tensors changed or left out."""
    import safetensors.torch

    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors: dict[str, Any] = {**safetensors.torch.load_file(target / "model.safetensors"), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.torch.save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


MISSING = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("value", [None, torch.ones(3, 3)], ids=["missing", "of another shape"])
def test_a_weight_that_no_file_has_is_given_random_values_and_converted(load: Any, tmp_path: Path, value: Any):
    path = without(DENSE, tmp_path / "less", {MISSING: value})
    torch.manual_seed(3)
    expected = load(path, ignore_mismatched_sizes=True)
    olq_fx.quantize_(expected, "int8")
    torch.manual_seed(3)
    model, about = load(path, "int8", ignore_mismatched_sizes=True, output_loading_info=True)
    assert MISSING in {*about["missing_keys"], *(key[0] for key in about["mismatched_keys"])}
    assert_same_model(model, expected)


def test_a_bias_that_no_file_has_beside_a_weight_that_one_has(load: Any, saved: Any, tmp_path: Path):
    bias = "model.layers.0.self_attn.q_proj.bias"
    path = without(saved("Llama", attention_bias=True), tmp_path / "less", {bias: None})
    model = load(path, "int8")
    assert model.get_parameter(bias).tolist() == [0.0] * 64


def test_another_shape_is_an_error_where_nothing_allows_it(load: Any, tmp_path: Path):
    path = without(DENSE, tmp_path / "less", {MISSING: torch.ones(3, 3)})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(path, "int8")


def test_a_weight_with_nan_is_refused(load: Any, tmp_path: Path):
    values = torch.ones(256, 256)
    values[3, 4] = torch.nan
    path = without(DENSE, tmp_path / "less", {MISSING: values})
    with pytest.raises(ConversionError, match=rf"'{MISSING}' cannot be given these values: 1 of 65536 are NaN or Inf"):
        load(path, "int8")


def test_experts_with_nan_are_refused(load: Any, saved: Any, tmp_path: Path):
    values = torch.full((64, 96), torch.inf)
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    path = without(saved("Mixtral"), tmp_path / "less", {name: values})
    with pytest.raises(ConversionError, match=r"experts\.down_proj' cannot be given these values: 6144 of 6144"):
        load(path, "int8")


def test_what_is_loaded_can_be_planned_again(load: Any):
    model = load(DENSE, {"linear": "int8", "ignore": ["*.mlp.*"]})
    decisions = [row.decision for row in olq_fx.plan_for("int8", model).rows]
    assert (decisions.count("already"), decisions.count("quantize")) == (16, 12)
    olq_fx.quantize_(model, "int8")
    assert_same_model(model, load(DENSE, "int8"))


def test_a_saved_configuration_alone_says_that_the_weights_are_quantized(hub: Any, load: Any, tmp_path: Path):
    load(DENSE, "int8").save_pretrained(tmp_path)
    with torch.device("meta"):
        model = hub.AutoModelForCausalLM.from_config(hub.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(PlanError, match="declares that it is quantized by 'olq_fx'"):
        olq_fx.plan_for("int8", model)


def test_copies(load: Any, tmp_path: Path):
    model = load(DENSE, "int8")
    for index, twin in enumerate([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]):
        twin.save_pretrained(tmp_path / str(index))
        assert_same_model(load(tmp_path / str(index)), model)


@pytest.mark.parametrize("key", ["both", "one"])
def test_a_tied_embedding_that_is_opted_in_stays_tied(load: Any, saved: Any, key: str, tmp_path: Path):
    path = saved("Llama", tie_word_embeddings=True)
    if key == "both":
        path = without(path, tmp_path / "both", {"lm_head.weight": embedding_of(path)})
    config = {"linear": "int8", "include": ["lm_head"]}
    model = load(path, config)
    assert isinstance(model.lm_head.weight, olq_fx.QuantizedWeight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = load(path)
    olq_fx.quantize_(expected, config)
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_same_model(again, model)
    assert_same_bits(logits(again), logits(expected))


def embedding_of(path: Path) -> torch.Tensor:
    import safetensors.torch

    return safetensors.torch.load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()


def test_tensors_that_were_to_be_tied_and_differ_are_not(load: Any, saved: Any, tmp_path: Path):
    path = saved("Llama", tie_word_embeddings=True)
    path = without(path, tmp_path / "both", {"lm_head.weight": 2 * embedding_of(path)})
    expected = load(path)
    assert expected.lm_head.weight is not expected.model.embed_tokens.weight
    model = load(path, {"linear": "int8", "include": ["lm_head"]})
    y = model.lm_head.weight.dequantize() / model.model.embed_tokens.weight.dequantize()
    torch.testing.assert_close(y.nan_to_num(2.0), torch.full_like(y, 2.0))


def test_one_device_and_sizes_by_quantized_bytes(load: Any, hub: Any):
    from transformers.integrations.accelerate import compute_module_sizes

    plain, model = load(DENSE), load(DENSE, "mxfp4", device_map="auto")
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    sizes, _ = compute_module_sizes(model, model.hf_quantizer)
    expected = sum(w.stored_bytes if isinstance(w, olq_fx.QuantizedWeight) else w.nbytes for w in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert sizes[""] == expected + buffers
    assert sizes["model.layers.0.mlp"] == pytest.approx(0.265625 * compute_module_sizes(plain)[0]["model.layers.0.mlp"])


def test_accelerators_keep_room_for_the_weight_that_is_being_converted(load: Any):
    quantizer = load(DENSE, "mxfp4").hf_quantizer
    largest = 512 * 256 * 2
    found = quantizer.adjust_max_memory({0: 10 * largest, 1: 5, "cpu": 7})
    assert found == {0: 9 * largest, 1: 0, "cpu": 7}


@pytest.mark.parametrize("offloaded", ["disk", "cpu"])
def test_offloading_is_refused_by_name(load: Any, tmp_path: Path, offloaded: str):
    modules = ["model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb"]
    device_map = {**dict.fromkeys(modules, "meta" if offloaded == "cpu" else "cpu"), "lm_head": offloaded}
    with pytest.raises(ConfigurationError, match=f"device_map puts 'lm_head' on '{offloaded}'"):
        load(DENSE, "int8", device_map=device_map, offload_folder=tmp_path)


def test_generating_gives_the_tokens_that_quantize_gives(load: Any):
    expected, model = load(DENSE), load(DENSE, "nvfp4_per_token")
    olq_fx.quantize_(expected, "nvfp4_per_token")
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    tokens = model.generate(IDS, **options)
    assert torch.equal(tokens, expected.generate(IDS, **options))
    assert torch.equal(tokens, model.generate(IDS, **options, cache_implementation="static"))


def test_a_pipeline_takes_the_configuration(hub: Any, load: Any):
    from olq_fx.integrations.transformers import OlqFxConfig

    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    found = hub.pipeline("text-generation", str(DENSE), model_kwargs={"quantization_config": OlqFxConfig("int8")})
    assert len(found.model.hf_quantizer.report.converted) == 28
    model = load(DENSE, "int8")
    expected = hub.pipeline("text-generation", model, tokenizer=hub.AutoTokenizer.from_pretrained(DENSE))
    assert found("The river", **options) == expected("The river", **options)


def test_compiling_and_gradients(load: Any):
    model = load(DENSE, {"linear": "int8", "ignore": ["re:.*layers.[1-3].*"]})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, model(IDS).logits)
    x = model.model.embed_tokens(IDS).detach().requires_grad_()
    model(inputs_embeds=x).logits.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_compileable
    assert model.hf_quantizer.is_serializable()


def test_dequantize_gives_an_ordinary_model_that_saves_as_one(load: Any, tmp_path: Path):
    model = load(MIXTURE, "mxfp4")
    y = logits(model)
    values = {name: weight.dequantize() for name, weight in model.named_parameters() if hasattr(weight, "spec")}
    model.dequantize()
    assert not hasattr(model, "hf_quantizer")
    for name, value in values.items():
        assert_same_bits(model.get_parameter(name).detach(), value)
    assert not torch.equal(logits(model), y)  # activations are not quantized any more
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same_model(load(tmp_path), model)


CHILD = """
import json, sys, olq_fx
assert "transformers" not in sys.modules
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known
assert "olq_fx" not in known
from olq_fx.integrations.transformers import OlqFxConfig, OlqFxHfQuantizer, register_quantization
assert known["olq_fx"] is OlqFxHfQuantizer
register_quantization()
from olq_fx.testing import live_bytes
warm, path, scheme = sys.argv[1:]
load = transformers.AutoModelForCausalLM.from_pretrained
load(warm, quantization_config=OlqFxConfig(scheme))
print("ready", flush=True)
input()
model = load(path, quantization_config=OlqFxConfig(scheme))
print(json.dumps([live_bytes(model), len(model.hf_quantizer.report.converted)]), flush=True)
input()
"""


def anonymous_bytes(pid: int) -> int:
    """What a process holds that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("name", "warm", "sizes"),
    [
        pytest.param("Llama", DENSE, {"intermediate_size": 4096, "num_hidden_layers": 4}, marks=pytest.mark.slow),
        ("Mixtral", MIXTURE, {"intermediate_size": 512, "num_hidden_layers": 5, "num_local_experts": 6}),
    ],
)
def test_importing_registers_and_memory_never_holds_the_original(
    hub: Any, saved: Any, name: str, warm: Path, sizes: dict[str, int]
):
    wide = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 8, "dtype": torch.bfloat16}
    path = saved(name, **wide, **sizes)
    original = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    command = [sys.executable, "-c", CHILD, str(warm), str(path), "mxfp4"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, bufsize=1) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = peak = anonymous_bytes(child.pid)
        child.stdin.write("\n")
        while not select.select([child.stdout], [], [], 0.005)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        final, converted = json.loads(child.stdout.readline())
        child.stdin.write("\n")
    experts = sizes.get("num_local_experts", 1)
    largest = 4 * (2 if experts > 1 else 1) * experts * sizes["intermediate_size"] * 1024
    assert converted == (7 if name == "Llama" else 6) * sizes["num_hidden_layers"]
    assert final + largest + 24 * 2**20 < original
    assert peak - before < final + largest + 24 * 2**20


@pytest.mark.parametrize("scheme", ["mxfp4_dualscale", "fp8_per_tensor"])
def test_what_save_has_written_is_read_by_from_pretrained(scheme: str, tmp_path: Path):
    """`olq_fx.save` and `save_pretrained` say in one way how weights are stored."""
    from transformers import AutoModelForCausalLM

    folder = Path(__file__).parent / "data" / "tiny-qwen3moe-wiki"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    olq_fx.quantize_(model, scheme)
    olq_fx.save(model, tmp_path / "saved")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, other.eval()(tokens).logits)
