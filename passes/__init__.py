"""Graph passes of olq_fx, one a file; `pipeline` holds their order.

- `base`: what a pass is and what it is told; `fxtools`: small tools for graphs; `pipeline`: the order, and the runner.
- `weight_views`, `linear_forms`, `find_uses`: how a weight is seen, the ways of writing a linear layer, who uses what.
- `stack_views`, `stack_forms`, `find_stacks`: the same of the matrices of experts in one tensor.
- `inline`, `open_attention`: functions of torch that hide linear layers, opened.
- `canonicalize`, `annotate`, `swap`, `hold_experts`, `share_quantization`, `fuse_residual`, `clean_up`: the passes;
  `part_inputs` makes graph inputs for the parts of weights.
- `fuse_experts`: a late pass, for what is between two products of experts.
- `fuse_quantize`: a late pass, on the graph of aten operators; `row_regions` finds what leads up to a quantization,
  `region_bodies` says it as a graph of matrices, `body_stages` as graphs of scalars; `on_load` finds the products that
  may quantize what they read by themselves.
- `merge_products`: a late pass after it, for the products that are left: those of one input are one kernel.
- `canonical`: the form of a linear layer between them.
- `dumps`: the graph before and after each pass, for people.
- `capture`: the same matching for `quantize_(example_inputs=...)`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from olq_fx.candidates import Candidate


def find_linear_uses_of(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> "tuple[Candidate, ...]":
    """See `olq_fx.passes.capture.linear_uses`, which is loaded when it is asked for."""
    from olq_fx.passes.capture import linear_uses

    return linear_uses(model, args, kwargs)
