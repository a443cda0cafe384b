"""Opens the functions of torch that hide linear layers: attention with its projections, and a whole encoder layer.

    %r = F.multi_head_attention_forward(%q, %k, %v, E, H, %in_proj_weight, %in_proj_bias, ...)
->
    in-projections as F.linear of %in_proj_weight or of row slices of it; scaled_dot_product_attention (or bmm, softmax,
    bmm where the weights are wanted); out-projection as F.linear

nn.MultiheadAttention and nn.TransformerEncoderLayer call them, the latter when gradients are off. Every combination of
flags works, since torch's own code says what each does; what cannot be opened is refused with the reason.
"""

import dataclasses
import types
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from olq_fx.passes.base import Context, PassResult, Reject
from olq_fx.passes.inline import InlineError, inline


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAttention:
    """Opens every attention that has a planned weight among its arguments; every one of all without a context."""

    context: Context | None = None
    name: ClassVar[str] = "open_attention"

    def __call__(self, gm: GraphModule) -> PassResult:
        """Open what can be opened."""
        opened = 0
        rejects = []
        for node in [node for node in gm.graph.nodes if node.target in _FUNCTIONS]:
            if not self._concerns(node):
                continue
            try:
                inline(node, _FUNCTIONS[node.target], node.args, dict(node.kwargs))
                opened += 1
            except InlineError as error:
                rejects.append(Reject(node.name, f"it cannot be opened: {error}"))
        return PassResult(opened, tuple(rejects))

    def _concerns(self, node: Node) -> bool:
        return self.context is None or any(self.context.find(other.name) for other in node.all_input_nodes)


# Asked whether arguments want their functions overridden, torch's own code would hand the call on to be recorded whole.
_attention_forward = types.FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda arguments: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
_attention_forward.__kwdefaults__ = functional.multi_head_attention_forward.__kwdefaults__


def _native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """torch._native_multi_head_attention: batch first, dense, in inference."""
    if query.is_nested:
        raise ValueError("its input is nested")
    padding, mask = _masks(mask, mask_type, num_head)
    q, k, v = _sequence_first(query, key, value)
    output, weights = _attention_forward(
        q,
        k,
        v,
        embed_dim,
        num_head,
        qkv_weight,
        qkv_bias,
        None,
        None,
        False,
        0.0,
        proj_weight,
        proj_bias,
        training=False,
        key_padding_mask=padding,
        need_weights=need_weights,
        attn_mask=mask,
        average_attn_weights=average_attn_weights,
    )
    return output.transpose(0, 1), weights


def _sequence_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed so that what was one tensor still is."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, q if value is query else k if value is key else value.transpose(0, 1)


def _masks(mask: Tensor | None, mask_type: int | None, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """(padding mask, attention mask) of the one mask of torch's fast path."""
    if mask is None:
        return None, None
    if mask_type == 0:
        return None, mask
    if mask_type == 1:
        return mask, None
    if mask_type == 2 and mask.dim() == 4:
        return None, mask.flatten(0, 1)
    raise ValueError(f"its mask of type {mask_type} and shape {tuple(mask.shape)} is not understood")


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """torch._transformer_encoder_layer_fwd, as nn.TransformerEncoderLayer is written without it."""

    def attend(x: Tensor) -> Tensor:
        attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
        return _native_attention(x, x, x, *attention)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


_FUNCTIONS: dict[Any, Any] = {
    functional.multi_head_attention_forward: _attention_forward,
    getattr(torch, "_native_multi_head_attention", None): _native_attention,
    getattr(torch, "_transformer_encoder_layer_fwd", None): _encoder_layer,
}
"""What is opened, and the Python function that does the same."""
