"""Every weight format with every activation format, and every size of blocks, by both routes."""

import pytest
import torch
from torch import Tensor, nn

import olq_fx
from olq_fx import numerics
from olq_fx.formats import BLOCK_COLUMNS, BLOCK_ROWS, FORMATS, block_formats, get_format
from olq_fx.kernels import reference
from olq_fx.schemes import SCHEMES, Slot, pairs
from olq_fx.testing import assert_layer_close, assert_same_bits

K, N = 200, 72


class Parallel(nn.Module):
    """Layers that read one input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(K, N) for _ in range(count)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def test_pairs_are_the_whole_product_and_know_their_schemes():
    weights = [name for name, format in FORMATS.items() if format.weight]
    activations = [None, *(name for name, format in FORMATS.items() if format.activation)]
    found = pairs()
    assert [pair.slot for pair in found] == [Slot(w, a) for w in weights for a in activations]
    assert {name for pair in found for name in pair.schemes} == set(SCHEMES)
    for pair in found:
        assert all(SCHEMES[name].linear == pair.slot for name in pair.schemes)
    assert [pair.slot.weight for pair in found if pair.default] == weights


def test_every_pair_works_in_both_routes(routes):
    """A pair that could not be executed would have to be refused where the configuration is built; none is."""
    slots = [pair.slot for pair in pairs()]
    targets = {f"layers.{i}": {"weight": s.weight, "activation": s.activation} for i, s in enumerate(slots)}
    x = torch.randn(5, K)
    outputs = {}
    for name, route in routes.items():
        torch.manual_seed(0)
        model = Parallel(len(slots))
        quantized = route(model, {"targets": targets}, x)
        assert [row.slot for row in quantized.report.rows("converted")] == slots
        outputs[name] = quantized(x)
        for layer, y in zip(model.layers, outputs[name], strict=True):
            assert_layer_close(y, x, layer.weight, layer.bias)
    for slot, eager, compiled in zip(slots, outputs["quantize_"], outputs["backend"], strict=True):
        assert_same_bits(eager, compiled, name=str(slot))


BLOCKS = [(n, k) for n in BLOCK_ROWS for k in BLOCK_COLUMNS]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(72, 200), (256, 128), (1, 1), (300, 65)], ids=str)
def test_blocks_of_every_size_are_what_the_definition_says(block, shape):
    weight, activation = block_formats(*block)
    for name in (weight, activation):
        format = get_format(name)
        x = torch.randn(shape)
        parts = torch.ops.olq_fx.quantize(x, name, "amax")
        assert_same_bits(tuple(parts), numerics.quantize(x, format, "amax"), name=name)
        rows, columns = format.group
        assert tuple(parts[1].shape) == (-(-shape[0] // (rows or 1)), -(-shape[1] // (columns or 1)))
        values = torch.ops.olq_fx.dequantize(parts, name, shape[1], torch.float32)
        assert_same_bits(values, reference.dequantize(parts, name, shape[1], torch.float32), name=name)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_every_size_work_in_both_routes(routes, block):
    x = torch.randn(3, K)
    outputs = []
    for route in routes.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, 40))
        quantized = route(model, {"quantization": "fp8_per_block", "weight_block_size": list(block)}, x)
        weight = model[0].weight
        assert tuple(weight.scale.shape) == (-(-N // block[0]), -(-K // block[1]))
        outputs.append(quantized(x))
        assert_layer_close(model[0](x), x, weight, model[0].bias)
    assert_same_bits(*outputs)


def test_blocks_survive_saving_and_loading():
    config = {"quantization": "fp8_per_block", "weight_block_size": [32, 64]}
    first, second = nn.Linear(K, N), nn.Linear(K, N)
    olq_fx.quantize_(first, config)
    olq_fx.quantize_(second, config)
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, K)
    assert_same_bits(first(x), second(x))
    again = olq_fx.quantize_(first, config)
    assert again.already == ("weight",)
    with pytest.raises(olq_fx.OlqFxError, match="other formats"):
        olq_fx.quantize_(first, "fp8_per_block")
