"""Options that are numbers, names of kernels or tables: what each may be, and the errors of what it may not."""

from typing import Any

import pytest

from olq_fx.configuration import OPTIONS, QuantizationConfig
from olq_fx.errors import ConfigurationError, ConfigurationTypeError, OlqFxError
from olq_fx.formats import BLOCK_COLUMNS, BLOCK_ROWS, FORMATS, block_formats, get_format
from olq_fx.schemes import Slot

# key, value, what it resolves to
TAKEN: list[tuple[str, Any, Any]] = [
    *(("weight_block_size", [n, k], (n, k)) for n in BLOCK_ROWS for k in BLOCK_COLUMNS),
    ("weight_block_size", (64, 32), (64, 32)),
    ("num_bf16_fallback_layers", None, None),
    ("num_bf16_fallback_layers", 0, 0),
    ("num_bf16_fallback_layers", 5, 5),
    ("fast_accum", True, True),
    ("skip_unprofitable", True, True),
    ("linear_backend", "auto", "auto"),
    ("linear_backend", "AUTO", "auto"),
    ("linear_backend", "native-cpu", "native_cpu"),
    ("linear_backend", "reference", "reference"),
    ("moe_backend", "reference", "reference"),
    ("packed_modules_mapping", None, ()),
    ("packed_modules_mapping", {}, ()),
    ("packed_modules_mapping", {"x": ["b", "a", "b"], "qkv": []}, (("qkv", ()), ("x", ("b", "a")))),
]

REFUSED: list[tuple[str, Any, type[OlqFxError], str]] = [
    ("weight_block_size", [128], ConfigurationError, "weight_block_size is a pair of numbers [N, K], not 1: [128]"),
    ("weight_block_size", [128, 128, 1], ConfigurationError,
     "weight_block_size is a pair of numbers [N, K], not 3: [128, 128, 1]"),
    ("weight_block_size", [16, 128], ConfigurationError,
     "weight_block_size: N cannot be 16; valid: 32, 64, 128, 256"),
    ("weight_block_size", [128, 256], ConfigurationError,
     "weight_block_size: K cannot be 256; valid: 32, 64, 128"),
    ("weight_block_size", 128, ConfigurationTypeError, "weight_block_size is a pair of numbers [N, K], not int: 128"),
    ("weight_block_size", None, ConfigurationTypeError,
     "weight_block_size is a pair of numbers [N, K], not NoneType: None"),
    ("weight_block_size", [128, 128.0], ConfigurationTypeError,
     "weight_block_size: K is a whole number, not float: 128.0"),
    ("weight_block_size", [True, 128], ConfigurationTypeError,
     "weight_block_size: N is a whole number, not bool: True"),
    ("num_bf16_fallback_layers", -1, ConfigurationError,
     "num_bf16_fallback_layers is a number of layers from 0, not -1"),
    ("num_bf16_fallback_layers", True, ConfigurationTypeError,
     "num_bf16_fallback_layers is a whole number or None, not bool: True"),
    ("num_bf16_fallback_layers", "5", ConfigurationTypeError,
     "num_bf16_fallback_layers is a whole number or None, not str: '5'"),
    ("fast_accum", 0, ConfigurationTypeError, "fast_accum is true or false, not int: 0"),
    ("skip_unprofitable", "yes", ConfigurationTypeError, "skip_unprofitable is true or false, not str: 'yes'"),
    ("linear_backend", "cutlass", ConfigurationError,
     "linear_backend: no kernel is called 'cutlass'; valid: auto, native_cpu, reference, triton, triton_fast_accum"),
    ("moe_backend", "native", ConfigurationError,
     "moe_backend: no kernel is called 'native'; did you mean 'native_cpu'?"),
    ("linear_backend", None, ConfigurationTypeError, "linear_backend is the name of a kernel, not NoneType: None"),
    ("packed_modules_mapping", ["a"], ConfigurationTypeError,
     "packed_modules_mapping is a dictionary of fused names to lists of shards, not list: ['a']"),
    ("packed_modules_mapping", {"a": "b"}, ConfigurationTypeError,
     "packed_modules_mapping['a'] is a list of names, not str: 'b'"),
    ("packed_modules_mapping", {"a": [1, 2]}, ConfigurationTypeError,
     "a name in packed_modules_mapping is a string, not int: 1"),
    ("packed_modules_mapping", {"a": ["b"]}, ConfigurationError,
     "packed_modules_mapping['a'] names ['b']; a fused layer has two shards or more (none at all takes the name out of "
     "the table), and is none of them"),
    ("packed_modules_mapping", {"a": ["a", "b"]}, ConfigurationError,
     "packed_modules_mapping['a'] names ['a', 'b']; a fused layer has two shards or more (none at all takes the name "
     "out of the table), and is none of them"),
    ("packed_modules_mapping", {"attn.qkv": ["q", "k"]}, ConfigurationError,
     "packed_modules_mapping: 'attn.qkv' is not the last part of a path, such as 'qkv_proj'"),
    ("packed_modules_mapping", {" ": ["q", "k"]}, ConfigurationError,
     "packed_modules_mapping: ' ' is not the last part of a path, such as 'qkv_proj'"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "given", "resolved"), TAKEN, ids=lambda value: str(value)[:40])
def test_an_option_resolves(key, given, resolved):
    config = QuantizationConfig.parse({"quantization": "fp8_per_block", key: given})
    assert getattr(config, key) == resolved
    assert QuantizationConfig.from_dict(config.to_dict()) == config
    assert (key in config.to_dict()) == (resolved != OPTIONS[key])
    hash(config)


@pytest.mark.parametrize(("key", "given", "kind", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_an_error_that_names_it(key, given, kind, message):
    with pytest.raises(OlqFxError) as caught:
        QuantizationConfig.parse({"quantization": "fp8_per_block", key: given})
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_blocks_choose_the_formats_of_weights_and_activations():
    config = QuantizationConfig.parse({"quantization": "fp8_per_block", "weight_block_size": [64, 32]})
    assert config.linear == Slot("fp8_per_block_static", "fp8_per_block_dynamic")
    found = config.with_blocks(config.linear)
    assert found == Slot("fp8_per_block_static_64x32", "fp8_per_block_dynamic_1x32")
    assert (get_format(found.weight).group, get_format(found.activation or "").group) == ((64, 32), (1, 32))
    assert config.with_blocks(Slot("mxfp8", "fp8_per_block_dynamic")) == Slot("mxfp8", "fp8_per_block_dynamic_1x32")
    assert config.with_blocks(Slot("mxfp8", None)) == Slot("mxfp8", None)
    assert config.activation_rule("fp8_per_block_dynamic_1x32") == "amax"
    assert QuantizationConfig("fp8_per_block", power_of_two_scales=True).activation_rule(
        "fp8_per_block_dynamic_1x32"
    ) == ("power_of_two")


def test_formats_of_other_blocks_are_reached_by_the_option_only():
    names = {name for n in BLOCK_ROWS for k in BLOCK_COLUMNS for name in block_formats(n, k)}
    assert len(names - FORMATS.keys()) == 11 + 2
    for name in names - FORMATS.keys():
        assert get_format(name.upper().replace("_", "-")).name == name
        with pytest.raises(ConfigurationError, match="unknown scheme or weight format"):
            QuantizationConfig.parse({"linear": name})
