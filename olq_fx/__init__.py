"""olq_fx: online quantization of any PyTorch model, as a torch.compile graph-rewriting pass.

    fast = torch.compile(model, backend=olq_fx.backend("fp8_per_block"))
    olq_fx.quantize_(model, {"linear": "fp8_per_block", "ignore": ["re:.*[qkv]_proj"]})

`olq_fx.testing` (not imported here) is for the tests of those who use or extend it.
"""

import importlib
import typing

from olq_fx.errors import OlqFxError, OlqFxWarning
from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES
from olq_fx.version import __version__
from olq_fx.weights import QuantizedWeight

if typing.TYPE_CHECKING:
    from olq_fx.comparison import compare
    from olq_fx.configuration import QuantizationConfig
    from olq_fx.dynamo import backend
    from olq_fx.kernels.tuned_tables import TunedTable, use_tuned
    from olq_fx.loading import load_
    from olq_fx.loading_report import LoadReport
    from olq_fx.plan import Plan, plan_for
    from olq_fx.plan_diff import PlanDiff, diff_plans
    from olq_fx.quantize import dequantize_, finalize, quantize_
    from olq_fx.report import Report
    from olq_fx.saving import save
else:
    # Imported on first use: together they take as long as all the rest. The operators are there from the start.
    _MODULE_OF = {
        "LoadReport": "loading_report",
        "Plan": "plan",
        "PlanDiff": "plan_diff",
        "QuantizationConfig": "configuration",
        "Report": "report",
        "TunedTable": "kernels.tuned_tables",
        "backend": "dynamo",
        "compare": "comparison",
        "dequantize_": "quantize",
        "diff_plans": "plan_diff",
        "finalize": "quantize",
        "load_": "loading",
        "plan_for": "plan",
        "quantize_": "quantize",
        "save": "saving",
        "use_tuned": "kernels.tuned_tables",
    }

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'olq_fx' has no attribute {name!r}")
        found = getattr(importlib.import_module(f"olq_fx.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found

    def __dir__():
        return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "FORMATS",
    "SCHEMES",
    "LoadReport",
    "OlqFxError",
    "OlqFxWarning",
    "Plan",
    "PlanDiff",
    "QuantizationConfig",
    "QuantizedWeight",
    "Report",
    "TunedTable",
    "__version__",
    "backend",
    "compare",
    "dequantize_",
    "diff_plans",
    "finalize",
    "load_",
    "plan_for",
    "quantize_",
    "save",
    "use_tuned",
]
