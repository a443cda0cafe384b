"""The full matrix compiled by Inductor: every scheme, route, dtype and model (`make sweep`); its table is committed.

The models of a group are compiled together, as one graph. The plugin `sweep_table` beside this file writes
benchmarks/results/sweep.json and sweep.md when all of it has run.
"""

import pytest
import torch

from olq_fx.schemes import SCHEMES
from olq_fx.testing import FLOAT_DTYPES, RecordingBackend, sqnr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("route", ["backend", "quantize_"])
@pytest.mark.parametrize("group", ["encoder", "decoder", "functional"])
def test_every_combination_compiled(
    group, route, scheme, dtype, several, zoo_groups, compare, compiled_original, record_property
):
    case = several(group, dtype)
    original = case.call_all(case.model)
    in_place = case.fresh()
    in_place.quantize(scheme)
    eager = in_place.call_all(in_place.model)
    baseline = compiled_original(group, dtype, original) if route == "quantize_" else original
    torch.compiler.reset()
    used = in_place if route == "quantize_" else case.fresh()
    recording = RecordingBackend(None if route == "quantize_" else scheme, inner="inductor")
    compiled = used.call_all(torch.compile(used.model, backend=recording))
    recording.assert_compilations(1)
    compare(route, original, eager, compiled, baseline)
    for name, before, expected, actual in zip(zoo_groups[group], original, eager, compiled, strict=True):
        row = {
            "scheme": scheme,
            "route": route,
            "dtype": str(dtype).removeprefix("torch."),
            "model": name,
            "eager to original (dB)": round(sqnr(expected, before), 2),
            "compiled to original (dB)": round(sqnr(actual, before), 2),
            "compiled to eager (dB)": round(min(sqnr(actual, expected), 999), 2),
        }
        record_property("sweep", row)
