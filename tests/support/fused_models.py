"""Blocks of real models in small, with their inputs, for what Inductor emits of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

D, HIDDEN, HEADS, ROWS, BATCH = 256, 384, 4, 9, 2


class RMSNorm(nn.Module):
    """As the models of transformers write it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that no kernel of torch computes, so that it is a product, a softmax and a product on every device."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return torch.matmul(torch.softmax(scores.float(), -1).to(v.dtype), v)


class Attention(nn.Module):
    """Queries, keys and values of heads; normed by head where a norm is given; bias where it is wanted."""

    def __init__(self, bias: bool = False, norm: bool = False, rotary: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=bias) for _ in range(4))
        self.norms = nn.ModuleList([RMSNorm(D // HEADS), RMSNorm(D // HEADS)]) if norm else None
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        return self.o(attention(q, k, v).transpose(1, 2).flatten(-2))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] / 7.0
    first, second = x[..., :half], x[..., half:]
    turned = torch.cat((-second, first), -1)
    return (x * torch.cos(angle) + turned * torch.sin(angle)).to(x.dtype)


class FeedForward(nn.Module):
    """The second half of a block of Llama, or (GELU by tanh) of T5 1.1."""

    def __init__(self, approximate: str = "") -> None:
        super().__init__()
        self.after = RMSNorm(D)
        self.gate, self.up = nn.Linear(D, HIDDEN, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, D, bias=False)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(x)
        gate = self.gate(y)
        gate = functional.gelu(gate, approximate=self.approximate) if self.approximate else functional.silu(gate)
        return x + self.down(gate * self.up(y))


class Llama(nn.Module):
    """A block of Llama; with norms of heads, of Qwen3; with another activation and no rotation, of T5 1.1."""

    def __init__(self, norm: bool = False, rotary: bool = True, approximate: str = "") -> None:
        super().__init__()
        self.attention = Attention(norm=norm, rotary=rotary)
        self.before = RMSNorm(D)
        self.feed_forward = FeedForward(approximate)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(x + self.attention(self.before(x)))


class GPT2(nn.Module):
    """A block of GPT-2: LayerNorm, bias, GELU by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(bias=True, rotary=False)
        self.before, self.after = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(functional.gelu(self.up(self.after(x)), approximate="tanh"))


class BERT(nn.Module):
    """A block of BERT: norms after the addition, GELU by erf."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(bias=True, rotary=False)
        self.first, self.second = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attention(x))
        return self.second(x + self.down(functional.gelu(self.up(x))))


class DiT(nn.Module):
    """A block of a diffusion transformer: norms without weights, modulated by a conditioning (AdaLN-Zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(bias=True, rotary=False)
        self.before, self.after = (nn.LayerNorm(D, elementwise_affine=False) for _ in range(2))
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.modulation = nn.Linear(D, 6 * D)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        found = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = found
        x = x + gate * self.attention(self.before(x) * (1 + scale) + shift)
        y = self.after(x) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.down(functional.gelu(self.up(y), approximate="tanh"))


class Captured(nn.Module):
    """A product and a norm with tensors of other dtypes and layouts before a quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        rows = ROWS * BATCH
        self.register_buffer("row", torch.randint(0, 3000, (BATCH, ROWS, 1)))
        self.register_buffer("batch", torch.rand(2, BATCH, 1, 1))
        self.register_buffer("mask", torch.rand(BATCH, ROWS, HIDDEN) > 0.5)
        self.register_buffer("column", torch.randn(2 * HIDDEN + 1))
        self.register_buffer("wide", torch.randn(rows + 5, HIDDEN + 7))
        self.register_buffer("turned", torch.randn(D, rows + 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = self.turned.t()[3:].unflatten(0, (BATCH, ROWS))
        x = functional.layer_norm(x, (D,)) * turned + self.row * self.batch[1]
        x = torch.softmax(x.float(), -1).to(x.dtype)
        y = self.up(x) * self.wide[5:, 7:].unflatten(0, (BATCH, ROWS)) + self.row
        y = torch.where(self.mask, y, self.column[1::2] * self.batch[1])
        return self.down(functional.silu(y)), x


class Projections(nn.Module):
    """Queries, keys and values of grouped heads, none of whole tiles; then another product with a residual."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, columns, bias=bias) for columns in (136, 40, 40, 72))

    def forward(self, x: Tensor, other: Tensor, stream: Tensor) -> tuple[Tensor, ...]:
        # With a reduction before it a quantization is one of our templates, which the interpreter is quick with.
        x, other = (each + 0 * each.mean(-1, keepdim=True) for each in (x, other))
        return self.q(x), self.k(x), self.v(x), stream + self.o(other)


class Activated(nn.Module):
    """A layer whose result is computed with element by element, and not quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(D, 72)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        x = x + 0 * x.mean(-1, keepdim=True)
        return torch.relu(self.o(x)) * row - 0.25


BLOCKS: dict[str, Any] = {
    "llama": Llama,
    "qwen3": lambda: Llama(norm=True),
    "gpt2": GPT2,
    "bert": BERT,
    "dit": DiT,
    "t5": lambda: Llama(rotary=False, approximate="tanh"),
}


class Experts(nn.Module):
    """A layer of experts as the models of transformers run it in grouped products."""

    def __init__(self, count: int = 8, inner: int = HIDDEN, turns: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, D) / 16)
        self.down_proj = nn.Parameter(torch.randn(count, D, inner) / 16)
        self.is_transposed, self.is_concatenated = False, not turns

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        top_k, flat = ids.shape[1], ids.reshape(-1)
        order = torch.sort(flat, stable=True).indices
        tokens = order // top_k
        counts = functional.one_hot(flat, len(self.gate_up_proj)).sum(0)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        y = functional.grouped_mm(x[tokens], self.gate_up_proj.mT, offs=ends)
        gate, up = y.chunk(2, -1) if self.is_concatenated else (y[:, ::2], y[:, 1::2])
        y = functional.grouped_mm(functional.silu(gate) * up, self.down_proj.mT, offs=ends)
        return torch.zeros_like(x).index_add(0, tokens, y * weights.reshape(-1)[order][:, None])


def experts(rows: int = 40, turns: bool = False) -> tuple[nn.Module, list[Tensor]]:
    """A layer of eight experts, of which each token has two, and its inputs."""
    torch.manual_seed(0)
    ids = torch.rand(rows, 8).topk(2).indices
    weights = torch.rand(rows, 2, dtype=torch.bfloat16)
    return Experts(turns=turns).bfloat16().eval(), [torch.randn(rows, D, dtype=torch.bfloat16), ids, weights]


def feed_forward(rows: int = ROWS) -> tuple[nn.Module, list[Tensor]]:
    """The second half of a block of Llama, and its inputs."""
    torch.manual_seed(0)
    return FeedForward().bfloat16(), [torch.randn(BATCH, rows, D, dtype=torch.bfloat16)]


def feed_forward_on_load(rows: int) -> tuple[nn.Module, list[Tensor]]:
    """`feed_forward` in a process in which kernels cost so much that quantizing on load saves time on every GPU."""
    from olq_fx.kernels import on_load_cost

    on_load_cost.KERNEL = 1.0
    return feed_forward(rows)


def layers(count: int = 3) -> tuple[nn.Module, list[Tensor]]:
    """Layers one after the other, some with nothing between, and their input."""
    torch.manual_seed(0)
    found: list[nn.Module] = [nn.LayerNorm(D)]
    for i in range(count):
        found += [nn.Linear(D, D), nn.ReLU()] if i == 0 else [nn.Linear(D, D)]
    return nn.Sequential(*found).bfloat16(), [torch.randn(24, D, dtype=torch.bfloat16)]


def captured(dtype: str = "bfloat16") -> tuple[nn.Module, list[Tensor]]:
    """What reads more than activations, and its input."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    return Captured().to(kind).eval(), [torch.randn(BATCH, ROWS, D, dtype=kind)]


def projections(rows: int = ROWS, dtype: str = "bfloat16", bias: bool = False) -> tuple[nn.Module, list[Tensor]]:
    """Siblings and one layer apart, and their inputs."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    return Projections(bias).to(kind).eval(), [torch.randn(rows, columns, dtype=kind) for columns in (D, D, 72)]


def activated(rows: int = ROWS) -> tuple[nn.Module, list[Tensor]]:
    """A layer with more after it than a quantization, and its inputs."""
    torch.manual_seed(0)
    return Activated().bfloat16().eval(), [torch.randn(rows, columns, dtype=torch.bfloat16) for columns in (D, 1)]


def normed(columns: int) -> tuple[nn.Module, list[Tensor]]:
    """A norm of rows of this length before a layer."""
    return nn.Sequential(nn.LayerNorm(columns), nn.Linear(columns, 128)).bfloat16(), [
        torch.randn(8, columns, dtype=torch.bfloat16)
    ]


def build(name: str, dtype: str = "bfloat16", rows: int = ROWS, blocks: int = 1) -> tuple[nn.Module, list[Tensor]]:
    """Some blocks, one after the other, and their inputs."""
    torch.manual_seed(0)
    parts = nn.ModuleList(BLOCKS[name]() for _ in range(blocks))
    kind = getattr(torch, dtype)
    inputs = [torch.randn(BATCH, rows, D, dtype=kind)]
    if name == "dit":
        inputs.append(torch.randn(BATCH, D, dtype=kind))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = parts

        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, *rest)
            return x

    return Stack().to(kind).eval(), inputs
