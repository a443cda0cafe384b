"""`olq-fx` on a model in Hugging Face's layout, and without the package transformers."""

import copy
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import olq_fx
from olq_fx.optional_packages import load_transformers
from olq_fx.testing import live_bytes

DATA = Path(__file__).parent / "data"
MODEL = str(DATA / "tiny-qwen3-wiki")
TEXT = str(DATA / "wiki_val_texts.json")
SHORT = ("--text", TEXT, "--tokens", "256", "--window", "64", "--batch", "2", "--repeat", "0")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_transformers().AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return load_transformers().AutoTokenizer.from_pretrained(MODEL)


def test_plan_reads_no_weights(olq, tmp_path, model):
    shutil.copy(f"{MODEL}/config.json", tmp_path)
    ended = olq("plan", ".", "-q", "fp8_per_block", "--json")
    assert ended.err == ""
    rows = ended.data["rows"]
    assert sum(row["decision"] == "quantize" for row in rows) == 28
    left = {row["path"]: row["reason"] for row in rows if row["decision"] == "leave"}
    assert left == {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output embedding"}
    assert ended.data["parameter_bytes"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert olq("plan", ".", "-q", "fp8_per_block", "--dtype", "float32", "--json").data["rows"][0]["dtype"] == "float32"


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


def test_plan_of_70_billion_parameters_takes_no_memory(olq, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    ended = olq("plan", ".", "-q", "mxfp4", "--json")
    assert sum(row["decision"] == "quantize" for row in ended.data["rows"]) == 80 * 7
    assert ended.data["parameter_bytes"] == pytest.approx(2 * 70.6e9, rel=0.01)
    assert live_bytes() < 2**30


def test_plan_is_what_is_done(olq, model):
    planned = olq("plan", MODEL, "-q", "mxfp4", "--quantization-config.ignore", "re:.*down_proj", "--json").data
    other = copy.deepcopy(model)
    report = olq_fx.quantize_(other, {"quantization": "mxfp4", "ignore": "re:.*down_proj"})
    assert planned == json.loads(report.plan.to_json())


def test_compare_on_a_text(olq, model, tokenizer):
    data = olq("compare", MODEL, "-q", "mxfp4", *SHORT, "--json").data
    text = tokenizer.eos_token.join(json.loads(Path(TEXT).read_text()))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :256].view(4, 64)
    other = copy.deepcopy(model)
    olq_fx.quantize_(other, "mxfp4")
    with torch.no_grad():
        logits = [lane(ids, use_cache=False).logits.double() for lane in (model, other)]
    for lane, name in zip(logits, ("reference", "candidate"), strict=True):
        loss = torch.nn.functional.cross_entropy(lane[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        # Batches of other sizes round otherwise in bfloat16.
        assert data["perplexity"][name] == pytest.approx(loss.exp().item(), rel=0.02)
    kl = torch.nn.functional.kl_div(
        *(x.log_softmax(-1).flatten(0, 1) for x in logits[::-1]), log_target=True, reduction="batchmean"
    )
    assert data["outputs"]["logits"]["kl"] == pytest.approx(kl.item(), rel=0.2)
    assert len(data["layers"]) == 28
    assert all(layer["calls"] == 2 and layer["metrics"]["sqnr_db"] > 10 for layer in data["layers"])


def test_compare_judges_perplexity(olq):
    failed = olq("compare", MODEL, "-q", "mxfp4", *SHORT, "--no-layers", "--fail-over", "perplexity_ratio=0.5")
    assert (failed.code, "perplexity_ratio of the candidate" in failed.out) == (1, True)
    passed = olq("compare", MODEL, "-q", "mxfp8", *SHORT, "--no-layers", "--fail-over", "perplexity_ratio=1.05,kl=0.01")
    assert passed.code == 0


def test_compare_without_a_text_says_what_it_ran_on(olq):
    ended = olq("compare", MODEL, "-q", "int8", "--repeat", "0", "--no-layers", "--dtype", "float32", "--json")
    assert ended.data["notes"] == ["inputs are random tokens; --text FILE takes a text"]
    assert ended.data["perplexity"] is None
    assert ended.data["outputs"]["logits"]["cosine"] > 0.999


def test_run_says_what_the_quantized_model_says(olq, model, tokenizer):
    prompts = ("The city of London is", "A")
    given = [word for prompt in prompts for word in ("--prompt", prompt)]
    data = olq("run", MODEL, "-q", "int8", *given, "--max-new-tokens", "8", "--json").data
    other = copy.deepcopy(model)
    report = olq_fx.quantize_(other, "int8")
    for prompt, result in zip(prompts, data["results"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        out = other.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert result["prompt"] == prompt
        assert result["text"] == tokenizer.decode(out, skip_special_tokens=True)
        assert result["tokens"] == len(out)
        assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    sizes = data["model_bytes"]
    assert sizes["quantized"] < 0.75 * sizes["original"]
    assert data["share_of_parameters"] == report.share_of_parameters
    assert data["peak_memory_bytes"] > sizes["original"]


def test_run_in_words(olq):
    ended = olq("run", MODEL, "-q", "mxfp8", "--prompt", "The city", "--max-new-tokens", "3", "--temperature", "0.7")
    assert ended.code == 0
    assert ended.out.startswith("The city")
    assert "3 tokens" in ended.out
    assert "a second" in ended.out


@pytest.mark.parametrize(
    "arguments", [("plan", MODEL), ("compare", MODEL), ("run", MODEL, "--prompt", "x")], ids=lambda a: a[0]
)
def test_without_transformers(olq, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ended = olq(*arguments, "-q", "fp8")
    assert ended.code == 3
    assert ended.err.count("\n") == 1
    assert "pip install 'olq-fx[transformers]'" in ended.err


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"architectures": ["NoSuchModel"], "model_type": "qwen3"}, 4, "NoSuchModel"),
        ({"model_type": "qwen3"}, 4, "module:callable"),
        ({"model_type": "no_such_type"}, 4, "no_such_type"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": "wide"}, 4, "hidden_size"),
        ([], 4, "cannot read the configuration"),
        ("{", 4, "cannot read the configuration"),
    ],
    ids=str,
)
def test_a_folder_that_transformers_cannot_read(olq, tmp_path, config, code, said):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    ended = olq("plan", ".", "-q", "fp8")
    assert (ended.code, ended.err.count("\n")) == (code, 1)
    assert said in ended.err


def test_a_folder_without_weights_or_tokenizer(olq, tmp_path):
    shutil.copy(f"{MODEL}/config.json", tmp_path)
    ended = olq("compare", ".", "-q", "fp8")
    assert (ended.code, "cannot load" in ended.err) == (4, True)
    ended = olq("run", ".", "-q", "fp8", "--prompt", "x")
    assert (ended.code, "tokenizer" in ended.err) == (4, True)


def test_a_model_that_cannot_speak(olq, tmp_path):
    library = load_transformers()
    config = library.BertConfig(
        vocab_size=2048, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    library.BertModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{MODEL}/{name}", tmp_path)
    ended = olq("run", ".", "-q", "fp8", "--prompt", "x")
    assert (ended.code, "cannot generate" in ended.err) == (2, True)
    ended = olq("compare", ".", "-q", "int8", "--text", TEXT, "--tokens", "40", "--repeat", "0", "--json")
    assert ended.data["perplexity"] is None
    assert ended.data["outputs"]["last_hidden_state"]["cosine"] > 0.99


def test_a_pipeline_of_models(olq, tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    ended = olq("plan", ".", "-q", "fp8")
    assert (ended.code, "pipeline" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.txt", None, "missing.txt"),
        ("empty.txt", "", "0 tokens"),
        ("list.json", "[1]", "list of strings"),
        ("broken.json", "[", "broken.json"),
    ],
)
def test_a_text_that_cannot_be_read(olq, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    ended = olq("compare", MODEL, "-q", "fp8", "--text", name)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert said in ended.err


def test_experts_in_one_tensor_are_planned_and_kernels_says_that_it_has_none_of_them(olq):
    model = str(DATA / "tiny-qwen3moe-wiki")
    rows = [row for row in olq("plan", model, "-q", "mxfp4", "--json").data["rows"] if row["kind"] == "moe"]
    assert [(row["decision"], row["shape"]) for row in rows] == [
        ("quantize", [8, 512, 256]),
        ("quantize", [8, 256, 256]),
    ] * 4
    (note,) = olq("kernels", model, "-q", "mxfp4", "--m", "1", "--json").data["notes"]
    assert note.startswith("8 weights of experts in one tensor are not in this table")
