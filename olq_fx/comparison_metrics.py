"""How far one tensor is from another: sums that are taken tensor by tensor, and the numbers that follow from them.

API:
    Difference()                              an empty sum
        .add(reference, candidate, logits=False)   add a pair of tensors of one shape
        .merge(other)                         add another sum
        .metrics() -> Metrics
    Metrics: count, cosine, mae, mse, rmse, max_abs, relative_l2, psnr_db, sqnr_db, kl, top1, exact, nonfinite
        .to_dict()                            strict JSON values: a number that is not finite becomes None
    finite_or_none(value)
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from olq_fx.errors import ComparisonError

_CHUNK = 1 << 20
"""Elements that are compared at once, in float64."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """How far a candidate is from its reference. All sums are in float64, over all elements of all tensors compared.

    Attributes:
        count: how many elements were compared.
        cosine: of the angle between both, in [-1, 1]; 1 where both are zero, 0 where one is.
        mae, mse, rmse, max_abs: of the absolute error, in the unit of the tensors (its square for `mse`).
        relative_l2: norm of the error over the norm of the reference; 0 without an error, else infinite where the
            reference is zero.
        psnr_db: 20 log10(largest - smallest value of the reference) - 10 log10(mse); infinite without an error.
        sqnr_db: 10 log10(energy of the reference / energy of the error); infinite without an error.
        kl: of logits, the mean over all positions of KL(reference || candidate) of their softmax, in nats; else None.
        top1: of logits, at which share of the positions the largest one is the same; else None.
        exact: whether both are equal.
        nonfinite: how many elements of either are NaN or infinite. Where both hold the same value there it is left
            out (a mask of -inf); otherwise, and where nothing else is left, every number is NaN.
    """

    count: int
    cosine: float
    mae: float
    mse: float
    rmse: float
    max_abs: float
    relative_l2: float
    psnr_db: float
    sqnr_db: float
    kl: float | None
    top1: float | None
    exact: bool
    nonfinite: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; infinite and undefined numbers are None (`exact` tells which of the two it is)."""
        return {field.name: finite_or_none(getattr(self, field.name)) for field in dataclasses.fields(self)}


def finite_or_none(value: Any) -> Any:
    """`value`, or None for a float that strict JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(slots=True)
class Difference:
    """The sums of a comparison, tensor by tensor."""

    count: int = 0
    absolute: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0
    broken: bool = False
    positions: int = 0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, reference: Tensor, candidate: Tensor, logits: bool = False) -> None:
        """Add a pair of tensors of one shape and any floating dtype, on any device.

        Args:
            reference, candidate: what to compare.
            logits: whether they are (..., classes) logits, so that their distributions are compared too.

        Raises:
            ComparisonError: the shapes differ.
        """
        if reference.shape != candidate.shape:
            shapes = f"{tuple(reference.shape)} and {tuple(candidate.shape)}"
            raise ComparisonError(f"shapes differ: {shapes}")
        with torch.no_grad():
            for there, here in _chunks(reference, candidate):
                self._add_values(there, here)
            if logits and reference.ndim and reference.shape[-1]:
                self._add_logits(reference, candidate)

    def merge(self, other: "Difference") -> None:
        """Add another sum to this one."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            joined = {"largest": max, "high": max, "low": min}.get(field.name, lambda a, b: a + b)(mine, theirs)
            setattr(self, field.name, type(mine)(joined))

    def _add_values(self, there: Tensor, here: Tensor) -> None:
        """Add two float64 vectors."""
        self.count += there.numel()
        finite = there.isfinite() & here.isfinite()
        outside = there.numel() - int(finite.sum())
        if outside:
            self.nonfinite += outside
            odd_there, odd_here = there[~finite], here[~finite]
            self.broken |= not bool(((odd_there == odd_here) | (odd_there.isnan() & odd_here.isnan())).all())
            there, here = there[finite], here[finite]
        if not there.numel():
            return
        error = (here - there).abs()
        self.absolute += float(error.sum())
        self.squares += float(error.square().sum())
        self.largest = max(self.largest, float(error.max()))
        self.reference += float(there.square().sum())
        self.candidate += float(here.square().sum())
        self.product += float(there @ here)
        self.low, self.high = min(self.low, float(there.min())), max(self.high, float(there.max()))

    def _add_logits(self, reference: Tensor, candidate: Tensor) -> None:
        classes = reference.shape[-1]
        step = max(1, _CHUNK // classes)
        given = (tensor.reshape(-1, classes) for tensor in (reference, candidate))
        rows = zip(*(torch.split(tensor, step) for tensor in given), strict=True)
        for there, here in rows:
            log_p, log_q = _exact(there).log_softmax(-1), _exact(here).log_softmax(-1)
            p = log_p.exp()
            self.positions += p.shape[0]
            # A class that the reference excludes adds nothing, whatever the candidate gives it.
            self.divergence += float(torch.where(p > 0, p * (log_p - log_q), 0.0).sum())
            self.agreed += int((there.argmax(-1) == here.argmax(-1)).sum())

    def metrics(self) -> Metrics:
        """What the sums say; NaN where no value was finite, or one was not in one of the two only."""
        compared = self.count - self.nonfinite
        undefined = self.broken or (self.count > 0 and compared == 0)
        spoilt = math.nan if undefined else 0.0
        mse = spoilt + (self.squares / compared if compared else 0.0)
        return Metrics(
            count=self.count,
            cosine=spoilt + self._cosine(),
            mae=spoilt + (self.absolute / compared if compared else 0.0),
            mse=mse,
            rmse=math.sqrt(mse),
            max_abs=spoilt + self.largest,
            relative_l2=spoilt + math.sqrt(_ratio(self.squares, self.reference)),
            psnr_db=spoilt + _decibel(max(self.high - self.low, 0.0) ** 2, mse),
            sqnr_db=spoilt + _decibel(self.reference, self.squares),
            kl=spoilt + max(self.divergence / self.positions, 0.0) if self.positions else None,
            top1=spoilt + self.agreed / self.positions if self.positions else None,
            exact=not undefined and self.largest == 0.0,
            nonfinite=self.nonfinite,
        )

    def _cosine(self) -> float:
        if self.reference == 0.0 or self.candidate == 0.0:
            return 1.0 if self.reference == self.candidate else 0.0
        # The roots one by one: a product of two sums of squares may overflow.
        value = self.product / math.sqrt(self.reference) / math.sqrt(self.candidate)
        return max(-1.0, min(1.0, value))


def _chunks(reference: Tensor, candidate: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of float64 vectors."""
    pieces = zip(*(torch.split(tensor.reshape(-1), _CHUNK) for tensor in (reference, candidate)), strict=True)
    for there, here in pieces:
        yield _exact(there), _exact(here)


def _exact(tensor: Tensor) -> Tensor:
    """In float64; on a device that has none, on the CPU."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def _ratio(part: float, whole: float) -> float:
    """0 / 0 is 0, x / 0 infinite."""
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise); infinite without noise, minus infinite without a signal."""
    if math.isnan(noise):
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf
