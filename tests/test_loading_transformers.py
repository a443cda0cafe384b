"""`olq_fx.load_` on directories of Hugging Face: the bytes are those of quantizing what `from_pretrained` loads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.conversion_mapping as conversion_mapping
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import olq_fx
from olq_fx import loading_transformers
from olq_fx.errors import InterruptedLoadError, LoadError
from olq_fx.loading_transformers import TransformersNaming
from olq_fx.testing import assert_same_bits, record_allocations
from olq_fx.weights import QuantizedWeight

DATA = Path(__file__).parent / "data"
DENSE, EXPERTS = DATA / "tiny-qwen3-wiki", DATA / "tiny-qwen3moe-wiki"
ROOT = Path(__file__).parent.parent


def waiting(folder: Path, scheme: Any) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if scheme is not None:
        olq_fx.quantize_(model, scheme)
    return model.eval()


def pretrained(folder: Path, scheme: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    if scheme is not None:
        olq_fx.quantize_(model, scheme)
    return model


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(found[name], tensor)
    for (name, buffer), (other, kept) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert name == other
        assert_same_bits(buffer, kept)


@pytest.mark.parametrize("scheme", ["fp8_per_block", "fp8_per_tensor", "nvfp4_per_token", {"moe": "mxfp4"}, None])
@pytest.mark.parametrize("folder", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_directory_gives_what_quantizing_the_pretrained_model_gives(folder, scheme):
    if folder is DENSE and isinstance(scheme, dict):
        scheme = "mxfp4"
    model, expected = waiting(folder, scheme), pretrained(folder, scheme)
    report = olq_fx.load_(model, folder, progress=False)
    assert_equal(model, expected)
    assert report.recomputed == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "int8"])
def test_experts_that_come_in_any_order_or_one_by_one(scheme):
    state = list(load_file(EXPERTS / "model.safetensors").items())
    expected = pretrained(EXPERTS, scheme)
    order = torch.randperm(len(state), generator=torch.Generator().manual_seed(0)).tolist()
    for source in (dict(state[i] for i in order), iter([state[i] for i in reversed(order)])):
        model = waiting(EXPERTS, scheme)
        olq_fx.load_(model, source, progress=False)
        assert_equal(model, expected)


@pytest.mark.parametrize("scheme", ["fp8_per_block", None])
def test_experts_are_refreshed_where_they_lie(scheme):
    model, expected = pretrained(EXPERTS, scheme), pretrained(EXPERTS, scheme)
    before = {name: [part.data_ptr() for part in getattr(p, "parts", (p,))] for name, p in model.named_parameters()}
    state = load_file(EXPERTS / "model.safetensors")
    olq_fx.load_(model, {name: torch.zeros_like(tensor) for name, tensor in state.items()}, progress=False)
    assert not model.model.layers[0].mlp.experts.down_proj[0].any()
    olq_fx.load_(model, EXPERTS, progress=False)
    assert_equal(model, expected)
    assert before == {n: [part.data_ptr() for part in getattr(p, "parts", (p,))] for n, p in model.named_parameters()}


def test_a_missing_expert_is_called_by_its_name():
    state = load_file(EXPERTS / "model.safetensors")
    del state["model.layers.1.mlp.experts.3.up_proj.weight"]
    model = waiting(EXPERTS, "int8")
    wanted = r"'model.layers.1.mlp.experts.gate_up_proj', of which 'model.layers.1.mlp.experts.3.up_proj.weight'"
    with pytest.raises(LoadError, match=wanted):
        olq_fx.load_(model, state, progress=False)
    state["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.zeros(256, 256)
    with pytest.raises(LoadError, match=r"experts.8.up_proj.weight'.*there is no place for it"):
        olq_fx.load_(model, state, progress=False)


def test_an_interruption_between_experts_can_be_gone_on_from():
    state = load_file(EXPERTS / "model.safetensors")
    for scheme in ("fp8_per_tensor", "fp8_per_block"):
        model = waiting(EXPERTS, scheme)

        def broken():
            for name, tensor in state.items():
                if name == "model.layers.2.mlp.experts.4.up_proj.weight":
                    raise OSError("gone")
                yield name, tensor

        with pytest.raises(InterruptedLoadError, match=r"gone.*'model.layers.2.mlp.experts.gate_up_proj'"):
            olq_fx.load_(model, broken(), progress=False)
        olq_fx.load_(model, EXPERTS, progress=False)
        assert_equal(model, pretrained(EXPERTS, scheme))


def test_experts_are_never_put_together():
    model = waiting(EXPERTS, "fp8_per_block")
    with record_allocations() as allocations, allocations.mark("load"):
        olq_fx.load_(model, EXPERTS, progress=False)
    final = sum(
        parameter.stored_bytes if isinstance(parameter, QuantizedWeight) else parameter.nbytes
        for parameter in model.parameters()
    )
    [experts] = {layer.mlp.experts.gate_up_proj.numel() * 2 for layer in model.model.layers}
    assert allocations.peak("load") < final + experts // 2


def small_llama(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        vocab_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", ["int8", None])
def test_tied_heads(tmp_path, tied, scheme):
    torch.manual_seed(0)
    LlamaForCausalLM(small_llama(tied)).to(torch.bfloat16).save_pretrained(tmp_path)
    model, expected = waiting(tmp_path, scheme), pretrained(tmp_path, scheme)
    olq_fx.load_(model, tmp_path, progress=False)
    assert_equal(model, expected)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_tie_that_was_lost_is_tied_again():
    torch.manual_seed(0)
    whole = LlamaForCausalLM(small_llama(True)).to(torch.bfloat16)
    state = {name: tensor for name, tensor in whole.state_dict().items() if name != "lm_head.weight"}
    with torch.device("meta"):
        model = LlamaForCausalLM(small_llama(True)).to(torch.bfloat16)
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    olq_fx.load_(model, state, progress=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_names_of_the_base_model_and_names_that_are_ignored():
    state = load_file(DENSE / "model.safetensors")
    base = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    base["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    model = waiting(DENSE, "int8")
    report = olq_fx.load_(model, base, progress=False)
    assert report.unexpected == ()
    assert_equal(model, pretrained(DENSE, "int8"))
    inner = waiting(DENSE, "int8").model
    state.pop("lm_head.weight")
    olq_fx.load_(inner, state, progress=False)
    assert_equal(inner, model.model)


def test_other_conversions_of_transformers():
    """A tensor that is split, some that are joined at unequal lengths, one that is permuted: by its own code."""
    from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter

    class Net(nn.Module):
        base_model_prefix = "net"
        config = None

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
            self.joined, self.turned = nn.Linear(32, 96, bias=False), nn.Linear(32, 64, bias=False)

    def rules() -> list[Any]:
        return [
            WeightConverter("qk.weight", ["q.weight", "k.weight"], [Chunk(dim=0)]),
            WeightConverter(["a.weight", "b.weight"], "joined.weight", [Concatenate(dim=0)]),
            WeightConverter("t.weight", "turned.weight", [Transpose(0, 1)]),
        ]

    torch.manual_seed(0)
    state = {"qk.weight": torch.randn(128, 32), "a.weight": torch.randn(64, 32), "b.weight": torch.randn(32, 32)}
    state["t.weight"] = torch.randn(32, 64)
    expected = Net()
    plain = {"q.weight": state["qk.weight"][:64], "k.weight": state["qk.weight"][64:]}
    plain |= {
        "joined.weight": torch.cat([state["a.weight"], state["b.weight"]]),
        "turned.weight": state["t.weight"].t(),
    }
    expected.load_state_dict(plain)
    olq_fx.quantize_(expected, "fp8_per_tensor")
    for source in (lambda: state, lambda: iter(state.items())):
        with torch.device("meta"):
            model = Net()
        olq_fx.quantize_(model, "fp8_per_tensor")
        with pytest.MonkeyPatch.context() as patch:
            naming(patch, rules())
            olq_fx.load_(model, source(), progress=False)
        assert_equal(model, expected)


def naming(patch: pytest.MonkeyPatch, rules: list[Any]) -> None:
    """Let a model that is none of transformers' have rules."""
    patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: rules)
    patch.setattr(loading_transformers, "_ignored", lambda model: (lambda name: False, lambda name: False))
    patch.setattr(loading_transformers, "naming_of", TransformersNaming)


@pytest.mark.parametrize("fault", ["truncated", "shard"])
def test_damaged_directories(tmp_path, fault):
    for file in DENSE.iterdir():
        shutil.copy(file, tmp_path)
    file = tmp_path / "model.safetensors"
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        message = "is cut off: '.*' ends at byte"
    else:
        names = load_file(file)
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        file.unlink()
        message = "names model-00001-of-00001.safetensors, which is not there; 47 tensors"
    model = waiting(tmp_path, "int8")
    with pytest.raises(LoadError, match=message):
        olq_fx.load_(model, tmp_path, progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())


MEMORY = """
import sys, threading, time
import torch
from torch import nn
import olq_fx

def anonymous():
    text = open("/proc/self/status").read()
    return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(32)))
olq_fx.quantize_(model, "int8")
warm = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
olq_fx.quantize_(warm, "int8")
seen, over = [anonymous()], threading.Event()

def watch():
    while not over.wait(0.002):
        seen.append(anonymous())

thread = threading.Thread(target=watch)
thread.start()
olq_fx.load_(model, sys.argv[1], progress=False)
seen.append(anonymous())
over.set()
thread.join()
print(max(seen) - seen[0], sum(weight.stored_bytes for weight in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_the_original_never_exists_whole(tmp_path):
    """64 MiB of bfloat16 become 32 of int8: a copy of the original, or of a quarter of it, would not fit below."""
    state: dict[str, Tensor] = {f"{i}.weight": torch.randn(1024, 1024).bfloat16() for i in range(32)}
    save_file(state, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    peak, final = map(int, run.stdout.split())
    assert final < peak + 2**20
    assert peak < final + 4 * 1024 * 1024 + 12 * 2**20
