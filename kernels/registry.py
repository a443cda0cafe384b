"""Which kernel will run a product, and why that one: what the plan prints and what the operators follow.

A kernel states what it supports as a function of formats, shape and device, without tensors. The first that supports a
product runs it; the reference supports everything and is last.
"""

import dataclasses
from collections.abc import Callable

import torch

from olq_fx.formats import get_format
from olq_fx.kernels import native, support, triton_ops


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """What is multiplied: (M, K) activations with an (N, K) weight, M being unknown; `dtype` too where it is None."""

    kind: str
    weight_format: str
    activation_format: str
    n: int
    k: int
    device_type: str
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by its name.

    Attributes:
        name: as the plan shows it.
        device_type: the one device that it runs on; "" for any.
        refuses: why it cannot run a product there; "" if it can.
        asked_for: whether it runs only what asks for it by name.
    """

    name: str
    device_type: str
    refuses: Callable[[Product], str]
    asked_for: bool = False

    def refusal(self, product: Product) -> str:
        """Why it cannot run a product; "" if it can."""
        if self.device_type not in ("", product.device_type):
            return f"runs on {self.device_type}, not on {product.device_type}"
        return self.refuses(product)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel that will run a product.

    Attributes:
        name: its name.
        reason: why the better ones do not run it; "" if it is the best there is.
    """

    name: str
    reason: str


def select(
    kind: str,
    weight_format: str,
    activation_format: str | None,
    n: int,
    k: int,
    device_type: str,
    dtype: torch.dtype | None = None,
) -> KernelChoice:
    """The kernel for one planned layer.

    Args:
        kind: `linear`, `experts` (one product of the weights of many) or `embedding`.
        weight_format: name of the weight's format.
        activation_format: name of the activations' format; "" or None for original precision.
        n: output features.
        k: input features.
        device_type: `cpu`, `cuda`, ... as `torch.device.type` has it.
        dtype: original precision; None where it is unknown.
    """
    product = Product(kind, weight_format, activation_format or "", n, k, device_type, dtype)
    reasons: list[str] = []
    # Kernels for other devices are no reason where there are some for this one.
    free = [kernel for kernel in KERNELS if not kernel.asked_for]
    here = [kernel for kernel in free if kernel.device_type in ("", device_type)]
    for kernel in here if any(kernel.device_type for kernel in here) else free:
        refusal = kernel.refusal(product)
        if not refusal:
            return KernelChoice(kernel.name, "; ".join(reasons))
        reasons.append(f"{kernel.name}: {refusal}")
    raise AssertionError("the reference supports every product")


def refusal(
    name: str,
    kind: str,
    weight_format: str,
    activation_format: str | None,
    n: int,
    k: int,
    device_type: str,
    dtype: torch.dtype | None = None,
) -> str:
    """Why the kernel called `name` cannot run a planned layer; "" if it can. The other arguments are those of `select`.

    Of a weight on meta it is not known where it will run: no kernel is refused for the device. Operators of experts in
    one tensor choose for themselves, so that only what they choose is accepted.
    """
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    devices = ("cpu", "cuda") if device_type == "meta" else (device_type,)
    products = [Product(kind, weight_format, activation_format or "", n, k, one, dtype) for one in devices]
    reasons = [kernel.refusal(product) for product in products]
    if kind == "experts" and "" in reasons:
        chosen = {select(kind, weight_format, activation_format, n, k, one, dtype).name for one in devices}
        reasons = ["" if name in chosen else f"experts in one tensor are run by {' or '.join(sorted(chosen))}"]
    return "" if "" in reasons else reasons[0]


def _native_cpu(product: Product) -> str:
    return _not_linear(product) or native.refusal(product.dtype) or native.why_not()


def _triton(product: Product, fast_accum: bool = False) -> str:
    supports = support.grouped if product.kind == "experts" else support.product
    asked = supports(
        product.weight_format,
        product.activation_format,
        dtype=product.dtype,
        activation_dtype=product.dtype,
        fast_accum=fast_accum,
    )
    return _not_linear(product) or asked.reason


def _fast_accum(product: Product) -> str:
    return _triton(product, fast_accum=True)


def _not_linear(product: Product) -> str:
    return "" if product.kind in ("linear", "experts") else f"runs products, not {product.kind}"


def _reference(product: Product) -> str:
    get_format(product.weight_format)
    return ""


KERNELS = (
    Kernel(native.NAME, "cpu", _native_cpu),
    Kernel(triton_ops.NAME, "cuda", _triton),
    Kernel(triton_ops.FAST_ACCUM, "cuda", _fast_accum, asked_for=True),
    Kernel("reference", "", _reference),
)
"""Every kernel, best first."""
