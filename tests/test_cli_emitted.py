"""`olq-fx kernels --emitted`: what is said of the kernels that Inductor emits for a model, quantized and not."""

from pathlib import Path

import pytest

from olq_fx.testing_emitted_calls import VIEWS

MODEL = str(Path(__file__).parent / "data" / "tiny-qwen3-wiki")
STACK = ("kernels", "cases:stack", "--emitted", "--inputs", "cases:inputs")


def test_both_compilations_and_their_machine_code(olq, tmp_path: Path):
    ended = olq(*STACK, "-q", "mxfp8", "--dump", "there", "--json")
    assert (ended.code, ended.err) == (0, "")
    plain, quantized = ended.data["lanes"]["bfloat16"], ended.data["lanes"]["mxfp8"]
    assert plain["summary"] | {"bytes": 0} == {
        "calls": 3, "templates": 0, "loops": 1, "operators": 2, "only_quantizing": 0, "bytes": 0,
    }  # fmt: skip
    assert quantized["summary"] | {"bytes": 0} == {
        "calls": 3, "templates": 2, "loops": 1, "operators": 0, "only_quantizing": 1, "bytes": 0,
    }  # fmt: skip
    # 4 rows of 64, 96 and 32 elements and both layers, in two bytes
    assert plain["summary"]["bytes"] == 2 * (4 * 64 + 96 * 65 + 4 * 96 * 4 + 32 * 97 + 4 * 32)
    assert quantized["summary"]["bytes"] < plain["summary"]["bytes"]
    fused, last = [kernel for kernel in quantized["kernels"] if kernel["kind"] == "template"]
    assert last["operators"][0] == "olq_fx.quantized_linear"
    assert "olq_fx.quantize" not in last["operators"]
    assert fused["operators"][0] == "olq_fx.quantized_linear"
    assert fused["operators"][-1] == "olq_fx.quantize"
    assert fused["spills"] == 0
    assert all(name.startswith("wgmma") for name in fused["instructions"])
    assert fused["instructions"]
    assert all("registers" in kernel for kernel in quantized["kernels"] if kernel["kind"] != "operator")
    _check_dump(tmp_path / "there", quantized["calls"])


def _check_dump(folder: Path, calls: list[str]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["bfloat16", "mxfp8"]
    source = (folder / "mxfp8" / "module.py").read_text()
    compile(source, "module.py", "exec")
    kernels = "".join(path.read_text() for path in (folder / "mxfp8" / "kernels").iterdir())
    for name in calls:
        assert name in source
        assert name.startswith("torch.ops") or f"def {name}(" in kernels
    graphs = folder / "mxfp8" / "graph_001"
    assert "#    +2 olq_fx.quantized_linear.default\n" in (graphs / "04_swap.txt").read_text()
    assert "torch.ops.higher_order.olq_fx_fused_quantize" in (graphs / "late_1" / "02_fuse_quantize.txt").read_text()


def test_a_folder_of_hugging_face_as_text(olq):
    ended = olq("kernels", MODEL, "--emitted", "-q", "fp8_per_block", "--blocks", "1", "--tokens", "2x16", "--no-code")
    assert (ended.code, ended.err) == (0, "")
    assert "one call on 2 x 16 tokens; only 1 of the repeated blocks are built (--blocks)" in ended.out
    assert "2 x olq_fx.quantized_linear, convert_element_type" in ended.out
    [line] = [line for line in ended.out.splitlines() if "that only quantize" in line]
    assert line.split()[-2:] == ["0", "1"]  # what attention gives
    assert not any(name.removeprefix("aten.") in ended.out.split() for name in VIEWS)
    projections = ", ".join(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert f"\n{projections} are one kernel\n" in ended.out


def test_what_is_not_fused_is_said_once_for_equal_blocks(olq):
    config = '{"linear": {"weight": "fp8_per_channel_static", "activation": "fp8_per_tensor_dynamic"}}'
    ended = olq("kernels", MODEL, "--emitted", "-c", config, "--blocks", "2", "--tokens", "1x16", "--no-code")
    [line] = [line for line in ended.out.splitlines() if "the product before its quantization is a kernel of" in line]
    assert line.startswith("model.layers.{0,1}.mlp.down_proj: ")
    assert "fp8_per_tensor_dynamic" in line
    projections = ", ".join(f"model.layers.N.self_attn.{name}_proj" for name in "qkv")
    assert f"\n{projections} are one kernel (2 blocks)\n" in ended.out


def test_weights_and_what_the_model_prints(olq):
    ended = olq(
        "kernels", "cases:speaks", "--emitted", "--inputs", "cases:inputs", "--no-meta", "--no-code", "--json",
        "-c", '{"linear": "int8", "ignore": ["0"]}', "--dtype", "float16", "--arch", "sm_80",
    )  # fmt: skip
    assert ended.code == 0
    assert list(ended.data["lanes"]) == ["float16", "quantized"]
    assert ended.data["architecture"] == "sm_80"
    names = ended.data["lanes"]["quantized"]["calls"]
    assert names[0] == "extern_kernels.addmm"
    assert names[-1].startswith("triton_tem_")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cases:Fails", "--inputs", "cases:inputs"), "ValueError('cannot do this')"),
        (("cases:broken", "--inputs", "cases:inputs"), "--no-meta builds it with memory): RuntimeError: no luck today"),
        ((MODEL, "--blocks", "5"), "the model has 4 blocks"),
        (("cases:stack",), "--inputs module:callable"),
    ],
)
def test_errors_of_the_other_process(olq, arguments, said):
    ended = olq("kernels", *arguments, "--emitted", "-q", "mxfp8")
    assert ended.code == (4 if "cases:inputs" in arguments else 2)
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert "Hint" not in ended.err
