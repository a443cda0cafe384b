"""Every scheme on every model in every dtype, by both routes, with each operator held to the definition."""

import pytest
import torch

import olq_fx
from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, assert_same_bits, assert_sqnr, sqnr

BITS = {name: 4 if "fp4" in scheme.linear.weight else 8 for name, scheme in SCHEMES.items()}

LEAST_SQNR = {8: 20.0, 4: 6.0}
"""dB of a whole small model against the original; far below what is usual, far above what a wrong scale gives."""


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_routes_are_right_and_bit_equal(zoo_name, scheme, dtype, original, checks):
    source = original(zoo_name, dtype)
    in_place, compiled = source.fresh(), source.fresh()

    report = in_place.quantize(scheme)
    assert report.converted == in_place.weights
    with checks.eager():
        expected = in_place.call(in_place.model)
    eager_calls, checks.calls = checks.calls, []
    assert eager_calls.count("linear") + eager_calls.count("quantized_linear") >= len(in_place.weights)

    backend = olq_fx.backend(scheme, inner=checks.compiler)
    actual = compiled.call(torch.compile(compiled.model, backend=backend))
    assert backend.report.converted == compiled.weights
    products = checks.calls.count("linear") + checks.calls.count("quantized_linear")
    assert products == len(compiled.weights)
    if SCHEMES[scheme].linear.activation:
        assert 1 <= checks.calls.count("quantize") <= products
    else:
        assert "quantize" not in checks.calls

    for path in compiled.weights:
        assert_same_bits(compiled.model.get_parameter(path), in_place.model.get_parameter(path), name=path)
    assert_same_bits(actual, expected, name="output of the two routes")
    assert_same_bits(compiled.call(compiled.model), expected, name="eager call after the backend")

    unquantized = source.call(source.model)
    assert actual.dtype == unquantized.dtype
    assert_sqnr(actual, unquantized, LEAST_SQNR[BITS[scheme]], name=f"{zoo_name} {scheme}")
    assert sqnr(actual, unquantized) < 90, "nothing was quantized"
