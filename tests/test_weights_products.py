"""Products with a converted weight: values, dtypes, refusals and gradients are those of the layer it stands in."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import olq_fx
from olq_fx.errors import UnsupportedError
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_same_bits
from olq_fx.testing_layers import assert_layer_close
from olq_fx.weights import QuantizedWeight, WeightSpec, quantize_weight
from olq_fx.weights_functions import EinsumAxes, linear_axes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def spec_of(scheme: str, transposed: bool = False) -> WeightSpec:
    slot = SCHEMES[scheme].linear
    activation = FORMATS[slot.activation] if slot.activation else None
    return WeightSpec(
        weight=slot.weight,
        activation=slot.activation or "",
        weight_rule=FORMATS[slot.weight].weight_rule,
        activation_rule=activation.activation_rule if activation else "",
        transposed=transposed,
    )


def converted(values: Tensor, scheme: str = "fp8_per_block", transposed: bool = False) -> QuantizedWeight:
    return quantize_weight(values, spec_of(scheme, transposed))


def definition(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """The operator that defines the product, on the rows of `x` (M, K)."""
    spec = weight.spec
    rows = x.reshape(-1, x.shape[-1])
    parts = list(weight.parts)
    y = torch.ops.olq_fx.linear(rows, parts, spec.weight, spec.activation, spec.activation_rule, bias, None)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(40, 24), (33, 17), (1, 1), (130, 250), (17, 32), (16, 192)])
def test_linear_is_the_operator(scheme: str, n: int, k: int):
    weight, bias = converted(torch.randn(n, k), scheme), torch.randn(n)
    x = torch.randn(3, 4, k)
    with torch.no_grad():
        y = functional.linear(x, weight, bias)
    assert_same_bits(y, definition(x, weight, bias))
    assert_layer_close(y, x, weight, bias)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inference_mode_and_grad_mode_give_the_same_bits(scheme: str):
    weight, bias, x = converted(torch.randn(40, 96), scheme), torch.randn(40), torch.randn(2, 3, 96)
    with_graph = functional.linear(x.clone().requires_grad_(), weight, bias).detach()
    with torch.inference_mode():
        inference = functional.linear(x, weight, bias)
    assert_same_bits(with_graph, inference)
    assert_same_bits(with_graph, definition(x, weight, bias))


def strided(shape: tuple[int, ...], layout: str) -> Tensor:
    """A tensor of that shape that is not contiguous."""
    if layout == "transposed":
        return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
    if layout == "last axis transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT
    if layout == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return torch.randn(shape[-1]).expand(shape)
    assert layout == "channels last"
    return torch.randn(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["transposed", "last axis transposed", "strided", "expanded", "channels last"])
def test_strides_of_the_input_change_no_bit(layout: str, dtype: torch.dtype):
    """torch takes such calls apart in several ways, some of which would round the bias apart."""
    weight, bias = converted(torch.randn(40, 64).to(dtype)), torch.randn(40).to(dtype)
    x = strided((2, 3, 5, 64), layout).to(dtype)
    expected = definition(x.contiguous(), weight, bias)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same_bits(functional.linear(x, weight, bias), expected)
            assert_same_bits(x @ weight.T, definition(x.contiguous(), weight))


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp4_dualscale", "nvfp4_per_token", "int8"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (0, 5, 64)])
def test_empty_inputs(scheme: str, shape: tuple[int, ...]):
    weight, bias = converted(torch.randn(40, 64), scheme), torch.randn(40)
    y = functional.linear(torch.randn(shape), weight, bias)
    assert y.shape == (*shape[:-1], 40)
    assert y.dtype == torch.float32


def test_one_vector():
    weight, bias, x = converted(torch.randn(40, 64)), torch.randn(40), torch.randn(64)
    expected = definition(x[None], weight, bias)[0]
    assert_same_bits(functional.linear(x, weight, bias), expected)
    assert_same_bits(weight @ x + bias, definition(x[None], weight)[0] + bias)
    assert_same_bits(torch.mv(weight, x), definition(x[None], weight)[0])
    assert_same_bits(x @ weight.T, definition(x[None], weight)[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_to_write_a_linear_layer(scheme: str):
    values, x, bias = torch.randn(40, 64), torch.randn(6, 64), torch.randn(40)
    weight = converted(values, scheme)
    expected, with_bias = definition(x, weight), definition(x, weight, bias)
    assert_same_bits(x @ weight.T, expected)
    assert_same_bits(x.matmul(weight.t()), expected)
    assert_same_bits(torch.mm(x, weight.mT), expected)
    assert_same_bits(torch.matmul(x, weight.transpose(0, 1)), expected)
    assert_same_bits(torch.matmul(x, weight.permute(1, 0)), expected)
    assert_same_bits((weight @ x.T).T.contiguous(), expected)
    assert_same_bits(torch.addmm(bias, x, weight.T), with_bias)
    assert_same_bits(torch.tensordot(x, weight, dims=([1], [1])), expected)
    assert_same_bits(torch.inner(x, weight), expected)
    assert_same_bits(torch.bmm(x[None], weight.T.expand(1, 64, 40))[0], expected)


def test_matmul_of_more_dimensions_on_either_side():
    weight, x = converted(torch.randn(40, 64)), torch.randn(2, 3, 5, 64)
    expected = definition(x, weight)
    assert_same_bits(x @ weight.T, expected)
    assert_same_bits((weight @ x.mT).mT.contiguous(), expected)
    assert_same_bits(x.__matmul__(weight.T), expected)
    assert_same_bits(weight.T.__rmatmul__(x), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transposed_storage(scheme: str):
    """A Conv1D's weight reads (K, N) and is used as it is."""
    values, bias = torch.randn(64, 40), torch.randn(40)
    weight, x = converted(values, scheme, transposed=True), torch.randn(6, 64)
    assert weight.shape == (64, 40)
    assert weight.stride() == (40, 1)
    same = converted(values.t().contiguous(), scheme)
    for part, other in zip(weight.parts, same.parts, strict=True):
        assert_same_bits(part, other)
    assert_same_bits(torch.addmm(bias, x, weight), definition(x, same, bias))
    assert_same_bits(x @ weight, definition(x, same))
    assert_same_bits(functional.linear(x, weight.T, bias), definition(x, same, bias))
    assert_same_bits(weight.dequantize(), same.dequantize().t())


def test_addmm_with_factors_and_a_full_addend():
    weight, x, bias = converted(torch.randn(40, 64)), torch.randn(6, 64), torch.randn(6, 40)
    y = torch.addmm(bias, x, weight.T, beta=0.5, alpha=2.0)
    torch.testing.assert_close(y, 0.5 * bias + 2.0 * definition(x, weight))
    torch.testing.assert_close(torch.addmm(bias, x, weight.T), bias + definition(x, weight))
    ignored = torch.full((40,), float("nan"))
    assert_same_bits(torch.addmm(ignored, x, weight.T, beta=0), definition(x, weight))


EINSUMS = [
    ("bi,oi->bo", (6, 64)),
    ("btk,nk->btn", (2, 3, 64)),
    ("...k,nk->...n", (2, 3, 64)),
    ("...k,nk", (2, 3, 64)),
    ("bkt,nk->bnt", (2, 64, 3)),
    ("b t k, n k -> n t b", (2, 3, 64)),
    ("k,nk->n", (64,)),
]


@pytest.mark.parametrize(("equation", "shape"), EINSUMS)
def test_einsum(equation: str, shape: tuple[int, ...]):
    values, x = torch.randn(40, 64), torch.randn(shape)
    weight = converted(values)
    plain = torch.einsum(equation, x, weight.dequantize())
    y = torch.einsum(equation, x, weight)
    assert y.shape == plain.shape
    axis = next(i for i, length in enumerate(shape) if length == 64)
    rows = definition(x.movedim(axis, -1).reshape(-1, 64), weight)
    assert_same_bits(y.flatten().sort().values, rows.flatten().sort().values)
    # The same elements, and each where the unquantized einsum has it.
    assert float((y - plain).norm() / plain.norm()) < 0.06
    left, _, right = equation.partition("->")
    swapped = ",".join(reversed(left.split(","))) + (f"->{right}" if right else "")
    assert_same_bits(torch.einsum(swapped, weight, x), y)


def test_einsum_of_a_transposed_weight():
    values, x = torch.randn(64, 40), torch.randn(6, 64)
    weight = converted(values, transposed=True)
    assert_same_bits(torch.einsum("bk,kn->bn", x, weight), x @ weight)


@pytest.mark.parametrize(
    ("equation", "rank"), [("bk,nk->bnk", 2), ("bk,nk->b", 2), ("bb,nb->bn", 2), ("bk,nn->bk", 2), ("bn,nk->bk", 2)]
)
def test_einsum_that_is_no_linear_layer(equation: str, rank: int):
    weight = converted(torch.randn(64, 64))
    with pytest.raises(UnsupportedError, match=r"einsum|other one"):
        torch.einsum(equation, torch.randn([64] * rank), weight)


def test_linear_axes_reads_the_order_of_the_output():
    assert linear_axes("bi,oi->bo", 1, 2) == EinsumAxes(1, True, (0, 1))
    assert linear_axes("io,bi->ob", 0, 2) == EinsumAxes(1, False, (1, 0))
    assert linear_axes("...k,nk", 1, 3) == EinsumAxes(2, True, (0, 1, 2))
    assert linear_axes("bi,oi,bo->b", 1, 2) is None
    assert linear_axes("bi,oij->bo", 1, 2) is None


def test_the_other_axis_is_refused_by_name():
    weight = converted(torch.randn(40, 64))
    weight.path = "encoder.weight"
    with pytest.raises(UnsupportedError, match=r"'encoder.weight'.*other one"):
        torch.randn(6, 40) @ weight
    with pytest.raises(UnsupportedError, match=r"'encoder.weight'"):
        functional.linear(torch.randn(6, 40), weight.T)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16])
def test_dtypes_are_accepted_refused_and_given_as_by_the_unquantized_layer(
    x_dtype: torch.dtype, w_dtype: torch.dtype, autocast: torch.dtype | None, bias_dtype: torch.dtype | None
):
    values, x = torch.randn(8, 16).to(w_dtype), torch.randn(2, 3, 16).to(x_dtype)
    bias = None if bias_dtype is None else torch.randn(8).to(bias_dtype)
    weight = converted(values, "int8")

    def outcome(w: Tensor, x: Tensor) -> object:
        with torch.no_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            try:
                return functional.linear(x, w, bias).dtype
            except RuntimeError:
                return RuntimeError

    for shape in (x, x[0], x.transpose(0, 1)):
        assert outcome(weight, shape) == outcome(values, shape)


def test_autocast_computes_in_the_lower_dtype():
    weight, x, bias = converted(torch.randn(40, 64)), torch.randn(2, 3, 64), torch.randn(40)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(x, weight, bias)
    low = weight.to(torch.bfloat16)
    assert_same_bits(y, definition(x.bfloat16(), low, bias.bfloat16()))


def test_shapes_are_refused_as_by_torch():
    weight = converted(torch.randn(40, 64))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        functional.linear(torch.randn(2, 63), weight)
    with pytest.raises(RuntimeError, match="same dtype"):
        functional.linear(torch.randn(2, 64, dtype=torch.float64), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_gradient_is_that_of_the_dequantized_product(scheme: str, dtype: torch.dtype):
    weight, bias = converted(torch.randn(40, 96).to(dtype), scheme), torch.randn(40).to(dtype).requires_grad_()
    for expanded in (False, True):
        x = torch.randn(2, 3, 96).to(dtype).requires_grad_()
        bias.grad = None
        y = functional.linear(x, weight, bias)
        gradient = torch.ones(()).to(dtype).expand(y.shape) if expanded else torch.randn(y.shape).to(dtype)
        y.backward(gradient)
        flat = gradient.reshape(-1, 40).float()
        expected = (flat @ weight.dequantize(torch.float32)).to(dtype).reshape(2, 3, 96)
        assert x.grad is not None
        assert bias.grad is not None
        assert_same_bits(x.grad, expected)
        torch.testing.assert_close(bias.grad.float(), flat.sum(0), rtol=2e-2, atol=2e-2)


def test_sum_backward_and_gradients_of_other_forms():
    weight = converted(torch.randn(40, 64))
    values = weight.dequantize()
    for product in (
        lambda x: x @ weight.T,
        lambda x: (weight @ x.mT).mT,
        lambda x: torch.einsum("btk,nk->btn", x, weight),
        lambda x: torch.bmm(x, weight.T.expand(2, 64, 40)),
    ):
        x = torch.randn(2, 3, 64, requires_grad=True)
        product(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.ones(2, 3, 40) @ values)


class Lora(nn.Module):
    """An adapter as PEFT writes it: it reads dtype, shape, device and in_features of the layer below."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        options = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.Parameter(torch.randn(rank, base.in_features, **options))
        self.b = nn.Parameter(torch.zeros(base.weight.shape[0], rank, **options))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lora_over_a_converted_layer(scheme: str):
    base = nn.Linear(64, 40, dtype=torch.bfloat16)
    base.weight = nn.Parameter(converted(base.weight, scheme), requires_grad=False)
    model = Lora(base, 4)
    x = torch.randn(6, 64, dtype=torch.bfloat16)
    y = model(x)
    assert_same_bits(y.detach(), definition(x, base.weight, base.bias.detach()))
    y.float().square().sum().backward()
    assert model.a.dtype == torch.bfloat16
    for parameter in (model.a, model.b, base.bias):
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
    assert bool((model.a.grad == 0).all())
    assert base.weight.grad is None


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("zeros", ["rows of x", "channel of w", "w"])
def test_zeros_stay_zeros(scheme: str, zeros: str):
    values, x, bias = torch.randn(40, 64), torch.randn(6, 64), torch.randn(40)
    if zeros == "rows of x":
        x[2:4] = 0
    elif zeros == "channel of w":
        values[5] = 0
    else:
        values.zero_()
    y, with_bias = (functional.linear(x, converted(values, scheme), b) for b in (None, bias))
    assert bool(y.isfinite().all())
    if zeros == "rows of x":
        assert bool((y[2:4] == 0).all())
        assert_same_bits(with_bias[2:4], bias.expand(2, 40))
    elif zeros == "channel of w":
        assert bool((y[:, 5] == 0).all())
    else:
        assert bool((y == 0).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scale_of_the_weight_does_not_matter(scheme: str):
    values = torch.randn(40, 64)
    errors = []
    for factor in (1.0, 2.0**-13, 2.0**-23):
        dequantized = converted(values * factor, scheme).dequantize()
        errors.append(float((dequantized / factor - values).norm() / values.norm()))
    assert errors[0] == pytest.approx(errors[1], rel=1e-5)
    assert errors[0] == pytest.approx(errors[2], rel=1e-5)


def test_attention_quantizes_its_packed_projection_with_one_rounding():
    """batch_first hands non-contiguous inputs down, whose bias torch would add after a rounding of its own."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16).eval()
    nn.init.normal_(attention.in_proj_bias)
    weight = converted(attention.in_proj_weight)
    attention.in_proj_weight = nn.Parameter(weight, requires_grad=False)
    x, other = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 7, 64).bfloat16()
    outputs = []
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            outputs.append(attention(x, x, x, need_weights=False)[0].detach())
    for output in outputs[1:]:
        assert_same_bits(output, outputs[0])
    q, k, v = definition(x, weight, attention.in_proj_bias.detach()).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
    attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0], attention.out_proj(attended).detach())
    with torch.no_grad():
        cross = attention(x, other, other, need_weights=False)[0]
        q, k, v = (
            functional.linear(z, w, b)
            for z, w, b in zip((x, other, other), weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
        )
        heads = [z.unflatten(-1, (4, 16)).transpose(1, 2) for z in (q, k, v)]
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        torch.testing.assert_close(cross, attention.out_proj(attended))


@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder_takes_no_path_around_quantization(padded: bool):
    """In evaluation torch fuses whole encoder layers into one operator, which would not quantize activations."""
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    for module in encoder.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim() == 2:
                module._parameters[name] = nn.Parameter(converted(parameter, "mxfp4"), requires_grad=False)
    x = torch.randn(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    slow = encoder(x.clone().requires_grad_(), src_key_padding_mask=mask).detach()
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=mask)
    with torch.inference_mode():
        inference = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(inference, slow)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "_mkldnn", "meta"])
def test_inputs_that_are_no_dense_rows_are_refused_by_name(kind: str, bias: bool):
    """Each of them failed deep inside, in words that name neither the weight nor what was wrong."""
    x, layer = torch.ones(4, 64), nn.Linear(64, 32, bias=bias)
    made = {
        "sparse_coo": x.to_sparse,
        "sparse_csr": x.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([x[:1], x[1:]]),
        "_mkldnn": x.to_mkldnn,
        "meta": lambda: x.to("meta"),
    }
    olq_fx.quantize_(layer, "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: these tensors are in a beta state
        odd = made[kind]()
    with pytest.raises(RuntimeError if kind == "meta" else UnsupportedError, match=kind) as caught:
        layer(odd)
    assert "'weight'" in str(caught.value)


def test_jagged_input_is_its_rows():
    layer, rows = nn.Linear(64, 32), (torch.randn(2, 64), torch.randn(3, 64))
    olq_fx.quantize_(layer, "int8")
    jagged = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    assert_same_bits(layer(jagged).values(), layer(torch.cat(rows)))
