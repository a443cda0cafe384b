"""Small models that use linear weights in every way a passable model does, each with inputs that fit."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCase:
    """A model, a call, and what is known of it.

    Attributes:
        name: key in `MODELS`.
        model: in evaluation mode, its parameters of one dtype.
        args: arguments of one call.
        weights: paths of the linear weights, in the order of `named_parameters`.
        functional: whether the module tree alone does not tell how the weights are used, so that `quantize_` needs
            `example_inputs`.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    weights: tuple[str, ...]
    functional: bool

    def quantize_arguments(self) -> dict[str, Any]:
        """The further arguments that `olq_fx.quantize_` needs for this model."""
        return {"example_inputs": self.args} if self.functional else {}


class Conv1D(nn.Module):
    """A linear layer that keeps its weight as (in, out), as GPT-2's does in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        """Make a layer from `nx` to `nf` features."""
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """(..., nx) -> (..., nf)."""
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Functional(nn.Module):
    """One bare (N, K) parameter, used by `use(x, weight)`."""

    def __init__(self, rows: int, columns: int, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Make a model from `columns` to `rows` features."""
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return self.use(x, self.w)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one input, whose projection is one (3E, E) parameter."""

    def __init__(self, embed: int, heads: int) -> None:
        """Make a model of `embed` features."""
        super().__init__()
        self.attention = nn.MultiheadAttention(embed, heads, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """A decoder block: RMSNorm, q/k/v on one input, attention, residual, RMSNorm, SiLU(gate) x up, down, residual."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        """Make a block of `hidden` features."""
        super().__init__()
        self.heads = heads
        self.input_norm = nn.RMSNorm(hidden)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_norm = nn.RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden)."""
        batch, tokens, hidden = x.shape
        normed = self.input_norm(x)
        q, k, v = (
            projection(normed).view(batch, tokens, self.heads, hidden // self.heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        normed = self.post_norm(x)
        return x + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))  # type: ignore[no-any-return]


def _linear_stack() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(33, 40), nn.GELU(), nn.Linear(40, 130), nn.SiLU(), nn.Linear(130, 17)), (5, 33)


def _conv1d() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(Conv1D(96, 48), nn.GELU(), Conv1D(48, 96)), (2, 3, 48)


def _attention() -> tuple[nn.Module, tuple[int, ...]]:
    return SelfAttention(48, 4), (2, 5, 48)


def _llama_block() -> tuple[nn.Module, tuple[int, ...]]:
    return LlamaBlock(64, 4, 160), (2, 5, 64)


def _f_linear() -> tuple[nn.Module, tuple[int, ...]]:
    return Functional(40, 72, linear), (2, 3, 72)


def _times_transposed(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def _matmul_transposed() -> tuple[nn.Module, tuple[int, ...]]:
    return Functional(40, 72, _times_transposed), (2, 3, 72)


def _einsum_of(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bi,oi->bo", x, w)


def _einsum() -> tuple[nn.Module, tuple[int, ...]]:
    return Functional(40, 72, _einsum_of), (6, 72)


MODELS: MappingProxyType[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = MappingProxyType(
    {
        "linear_stack": _linear_stack,
        "conv1d": _conv1d,
        "attention": _attention,
        "llama_block": _llama_block,
        "f_linear": _f_linear,
        "matmul_transposed": _matmul_transposed,
        "einsum": _einsum,
    }
)
"""What makes each small model and the shape of its input."""

_FUNCTIONAL = frozenset({"f_linear", "matmul_transposed", "einsum"})


def model_case(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> ModelCase:
    """Make the small model `name` of `MODELS` with random weights, and an input for it.

    Equal arguments give equal bits; the global random state is left as it was.

    Args:
        name: a key of `MODELS`.
        dtype: of parameters and input.
        seed: of both.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, shape = MODELS[name]()
        x = torch.randn(shape)
    weights = tuple(path for path, parameter in model.named_parameters() if parameter.ndim == 2)
    return ModelCase(name, model.eval().to(dtype), (x.to(dtype),), weights, name in _FUNCTIONAL)
