"""Embeddings and output heads that a configuration includes: one copy, looked-up rows only, in both routes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_layer_close, assert_same_bits
from olq_fx.weights import QuantizedWeight

V, D = 50, 40


class Language(nn.Module):
    """Embedding, a layer, output head; tied or not."""

    def __init__(self, tied: bool, padding: int | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D, padding_idx=padding)
        self.up = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.lm_head(functional.silu(self.up(self.embed_tokens(ids))))
        return y


IDS = torch.tensor([[0, 1, 49], [7, 7, 3]])


def ask(scheme: str, *names: str) -> dict[str, Any]:
    return {"quantization": scheme, "include": list(names)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_an_included_embedding_looks_up_dequantized_rows(route, scheme, padding):
    model = Language(tied=False, padding=padding)
    quantized = route(model, ask(scheme, "embed_tokens"), IDS)
    table: Any = model.embed_tokens.weight
    assert isinstance(table, QuantizedWeight)
    assert (table.spec.weight, table.spec.activation) == (SCHEMES[scheme].linear.weight, "")
    assert not isinstance(model.lm_head.weight, QuantizedWeight)
    rows = table.dequantize()[IDS]
    assert_same_bits(model.embed_tokens(IDS), rows)
    hidden = functional.silu(model.up(rows))
    assert_same_bits(quantized(IDS), functional.linear(hidden, model.lm_head.weight))
    row = quantized.report.plan.lookup("embed_tokens.weight")
    assert (row.kind, row.slot.activation, row.warning) == ("embedding", None, "")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tied_weights_keep_their_tie_and_one_copy(route, scheme, name):
    model = Language(tied=True)
    quantized = route(model, ask(scheme, name), IDS)
    table: Any = model.embed_tokens.weight
    assert table is model.lm_head.weight
    assert isinstance(table, QuantizedWeight)
    assert quantized.converted == ("embed_tokens.weight", "up.weight")
    rows = table.dequantize()[IDS]
    assert_same_bits(model.embed_tokens(IDS), rows)
    hidden = functional.silu(model.up(rows))
    assert_layer_close(quantized(IDS), hidden, table)


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4_weight_only", "fp8_per_block"])
def test_only_the_rows_that_are_asked_for_are_decoded(scheme):
    """A table of 64 MiB in float32, of which three rows are read: nothing of its size is made."""
    table = nn.Embedding(1 << 16, 256)
    olq_fx.quantize_(table, ask(scheme, "*") | {"ignore": None})
    with LargestResult() as largest:
        table(torch.tensor([0, 5, (1 << 16) - 1]))
    assert 3 * 256 <= largest.numel <= 128 * 256
    with LargestResult() as largest:
        functional.linear(torch.zeros(1, 256), table.weight)
        table.weight.dequantize()
    assert largest.numel == table.weight.numel()
    assert_same_bits(table(torch.tensor([5])), table.weight.dequantize()[5:6])


class LargestResult(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers how many elements the largest new tensor of plain operators has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # so that what a converted weight does inside is seen too
            if QuantizedWeight in types:
                return QuantizedWeight.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        fresh = isinstance(result, Tensor) and not isinstance(result, QuantizedWeight) and not func.is_view
        if fresh:
            self.numel = max(self.numel, result.numel())
        return result


def test_ids_of_every_shape_and_type():
    table = nn.Embedding(V, D)
    olq_fx.quantize_(table, ask("mxfp8", "*"))
    values = table.weight.dequantize()
    for ids in (torch.tensor(3), torch.zeros(0, dtype=torch.long), torch.zeros(2, 0, 3, dtype=torch.int32), IDS.int()):
        assert_same_bits(table(ids), values[ids.long()])
    with pytest.raises(IndexError):
        table(torch.tensor([V]))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inductor_reads_an_included_embedding(tied):
    model = Language(tied)
    backend = olq_fx.backend(ask("mxfp4_weight_only", "embed_tokens", "lm_head"))
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        y = compiled(IDS)
        table: Any = model.embed_tokens.weight
        assert isinstance(table, QuantizedWeight)
        torch.testing.assert_close(y, model(IDS), rtol=1e-4, atol=1e-4)
        assert compiled(IDS[:, :2]).shape == (2, 2, V)
    assert backend.report.share == 1.0


def test_what_cannot_be_looked_up_quantized_says_so():
    for module, words in (
        (nn.EmbeddingBag(4, 4), "a quantized EmbeddingBag has no implementation"),
        (nn.Embedding(4, 4, max_norm=1.0), "its lookup writes into the table"),
    ):
        with pytest.raises(olq_fx.OlqFxError, match=words):
            olq_fx.quantize_(nn.ModuleDict({"table": module, "up": nn.Linear(4, 4)}), ask("fp8", "table"))
