"""olq_fx: online quantization of any PyTorch model, as a torch.compile graph-rewriting pass.

    fast = torch.compile(model, backend=olq_fx.backend("fp8_per_block"))
    olq_fx.quantize_(model, {"linear": "fp8_per_block", "ignore": ["re:.*[qkv]_proj"]})

`olq_fx.testing` (not imported here) is for the tests of those who use or extend it.
"""

import typing

from olq_fx.configuration import QuantizationConfig
from olq_fx.dynamo import backend
from olq_fx.errors import OlqFxError, OlqFxWarning
from olq_fx.formats import FORMATS
from olq_fx.plan import Plan, plan_for
from olq_fx.plan_diff import PlanDiff, diff_plans
from olq_fx.quantize import dequantize_, quantize_
from olq_fx.report import Report
from olq_fx.schemes import SCHEMES
from olq_fx.weights import QuantizedWeight

if typing.TYPE_CHECKING:
    from olq_fx.comparison import compare
else:

    def __getattr__(name):
        """`olq_fx.compare`, imported on first use: what only measures is no part of quantizing."""
        if name != "compare":
            raise AttributeError(f"module 'olq_fx' has no attribute {name!r}")
        from olq_fx.comparison import compare

        globals()[name] = compare
        return compare


__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "SCHEMES",
    "OlqFxError",
    "OlqFxWarning",
    "Plan",
    "PlanDiff",
    "QuantizationConfig",
    "QuantizedWeight",
    "Report",
    "__version__",
    "backend",
    "compare",
    "dequantize_",
    "diff_plans",
    "plan_for",
    "quantize_",
]
