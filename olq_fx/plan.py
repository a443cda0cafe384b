"""The plan: what becomes of every weight of a model, decided once, before anything is changed. Both routes execute it.

API:
    plan_for(config, model, strict=True, candidates=None) -> Plan     from a model (config in any form that parse takes)
    make_plan(config, candidates, strict=True, all_paths=(), parameter_bytes=None) -> Plan
    Plan.rows, .lookup(path), .quantized, .problems, .bytes_before, .bytes_after, .share,
        .share_of_parameters, .to_dict(), .to_json(), str(plan)
    table_of_rows(rows, statuses, folded=True) -> str     as a plan and a report print them
    PlanRow: path, module_path, names, kind, shape, dtype, decision, slot, weight_rule, activation_rule, transposed,
        kernel, kernel_reason, reason, warning, bytes_before, bytes_after, trainable, asked
"""

import dataclasses
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from olq_fx.candidates import Candidate, ModulePaths, candidates_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, PlanError, nearest, shown
from olq_fx.folding import NUMBER, fold
from olq_fx.module_uses import CandidateKind
from olq_fx.parameters import Parameters
from olq_fx.schemes import Slot
from olq_fx.selection import select
from olq_fx.tables import size_of, table_of
from olq_fx.verdicts import Decision, Verdict, overridden_rules

COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "weight": "left",
    "count": "right",
    "kind": "left",
    "shape": "left",
    "dtype": "left",
    "status": "left",
    "weight / activation": "left",
    "kernel": "left",
    "bytes": "right",
    "why": "left",
}
"""The columns of the table of a plan or a report."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What becomes of one weight.

    Attributes:
        path, module_path: the parameter and its module, by their first names.
        names: every path of the parameter.
        kind: `linear`, `moe` or `embedding`.
        shape: (N, K) whatever the storage; of experts in one tensor (E, N, K), or as stored where that is not known.
        dtype: original precision.
        decision: `quantize`; `leave` in original precision; `already` converted before, and kept; `override` the
            activations only of a weight that was converted before.
        slot: its formats; None for `leave`.
        weight_rule, activation_rule: the scale rules; "" where there is none.
        transposed: whether it is stored as (K, N), or (E, K, N).
        kernel: the predicted kernel; "" for `leave`.
        kernel_reason: why no better kernel runs it, or "".
        reason: why it is left, or kept as it is; "" for `quantize`.
        warning: what a user should know of it, or "".
        bytes_before: its size in original precision.
        bytes_after: its size as this row has it.
        trainable: whether it required a gradient; a converted weight is frozen.
        asked: whether the configuration asks for it to be quantized.
        allow_nonfinite: whether it is converted even if it has NaN or Inf.
        requested_kernel: the kernel that the configuration asks for, or "".
        shards: how many matrices with scales of their own are merged along N (gate and up of experts).
        interleaved: whether these take turns row by row.
    """

    path: str
    module_path: str
    names: tuple[str, ...]
    kind: CandidateKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    decision: Decision
    slot: Slot | None
    weight_rule: str
    activation_rule: str
    transposed: bool
    kernel: str
    kernel_reason: str
    reason: str
    warning: str
    bytes_before: int
    bytes_after: int
    trainable: bool
    asked: bool
    allow_nonfinite: bool = False
    requested_kernel: str = ""
    shards: int = 1
    interleaved: bool = False

    @property
    def formats(self) -> str:
        """`weight / activation`, or "" for a weight in original precision."""
        return "" if self.slot is None else f"{self.slot.weight} / {self.slot.activation or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """The row in plain JSON values."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        slot = None if self.slot is None else {"weight": self.slot.weight, "activation": self.slot.activation}
        dtype = str(self.dtype).removeprefix("torch.")
        return row | {"names": list(self.names), "shape": list(self.shape), "dtype": dtype, "slot": slot}

    def cells(self, status: str) -> tuple[str, ...]:
        """The row for people, as `COLUMNS` has them; `status` is what to say of it."""
        return _cells(self.path, [self], status)

    @property
    def why(self) -> str:
        """Everything that is to be said of the row in words."""
        ties = f"also {', '.join(self.names[1:])}" if self.names[1:] else ""
        return "; ".join(part for part in (self.reason, self.warning, self.kernel_reason, ties) if part)


def table_of_rows(rows: Sequence[PlanRow], statuses: Sequence[str], *, folded: bool = True) -> str:
    """A table of rows with what to say of each, as text.

    Args:
        rows: of a plan.
        statuses: what to say of each.
        folded: whether equal layers of repeated blocks are one row with a count, and the bytes of all.
    """
    keys: list[Hashable] = list(range(len(rows)))
    if folded:
        keys = [_likeness(row, status) for row, status in zip(rows, statuses, strict=True)]
    found = fold([row.path for row in rows], keys)
    return table_of(
        COLUMNS, [_cells(one.text, [rows[i] for i in one.members], statuses[one.members[0]]) for one in found]
    )


def _likeness(row: PlanRow, status: str) -> Hashable:
    """What equal layers have in common. Their ties differ in the numbers of paths, as they do themselves."""
    why = NUMBER.sub("N", row.why) if row.names[1:] else row.why
    return row.kind, row.shape, row.dtype, status, row.slot, row.kernel, why, row.bytes_after


def _cells(text: str, rows: Sequence[PlanRow], status: str) -> tuple[str, ...]:
    """Rows that are equal but for their paths, for people, as `COLUMNS` has them."""
    row = rows[0]
    size = size_of(sum(one.bytes_before for one in rows))
    if row.slot is not None:
        size += f" -> {size_of(sum(one.bytes_after for one in rows))}"
    shape = " x ".join(map(str, row.shape))
    dtype = str(row.dtype).removeprefix("torch.")
    count = str(len(rows)) if rows[1:] else ""
    return (text, count, row.kind, shape, dtype, status, row.formats, row.kernel, size, row.why)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A row for each weight that a configuration may speak of.

    Attributes:
        config: what was asked for.
        rows: in the order of the model.
        parameter_bytes: size of all parameters of the model in original precision; that of the rows if unknown.
        problems: what `strict=False` let pass: patterns and requests without effect.
    """

    config: QuantizationConfig
    rows: tuple[PlanRow, ...]
    parameter_bytes: int
    problems: tuple[str, ...] = ()
    _by_name: dict[str, PlanRow] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the rows by every name."""
        object.__setattr__(self, "_by_name", {name: row for row in self.rows for name in row.names})

    def get(self, path: str) -> PlanRow | None:
        """The row of the parameter with this path, under any of its names, or None."""
        return self._by_name.get(path)

    def lookup(self, path: str) -> PlanRow:
        """The row of the parameter with this path, under any of its names.

        Raises:
            PlanError: no row has it; the message offers the nearest paths.
        """
        row = self._by_name.get(path)
        if row is None:
            raise PlanError(f"the plan has no weight {path!r}; {nearest(path, self._by_name)}")
        return row

    @property
    def quantized(self) -> tuple[PlanRow, ...]:
        """The rows that are quantized, or will be."""
        return tuple(row for row in self.rows if row.decision != "leave")

    @property
    def bytes_before(self) -> int:
        """Size of all rows in original precision."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Size of all rows when the plan is executed."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def share(self) -> float:
        """Which share of the bytes of all rows is quantized (in original precision); 0 without rows."""
        return sum(row.bytes_before for row in self.quantized) / max(self.bytes_before, 1)

    @property
    def share_of_parameters(self) -> float:
        """Which share of the bytes of all parameters is quantized (in original precision)."""
        return sum(row.bytes_before for row in self.quantized) / max(self.parameter_bytes, 1)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain JSON values."""
        return {
            "config": self.config.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "problems": list(self.problems),
            "parameter_bytes": self.parameter_bytes,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "share": self.share,
            "share_of_parameters": self.share_of_parameters,
        }

    def to_json(self) -> str:
        """The plan as strict JSON (no NaN or Infinity)."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=2)

    def __str__(self) -> str:
        """A table, equal layers of repeated blocks in one line, and the totals."""
        return self.text()

    def text(self, *, folded: bool = True) -> str:
        """The table and the totals; with `folded` false one line a weight."""
        table = table_of_rows(self.rows, [row.decision for row in self.rows], folded=folded)
        count = f"{len(self.quantized)} of {len(self.rows)} weights to be quantized or quantized before"
        return "\n".join([table, f"{count}: {self.share:.1%} of their bytes", *self.summary()])

    def summary(self) -> list[str]:
        """Lines on the whole: sizes, experts that stay in original precision, losses, what `strict=False` let pass."""
        sizes = f"{size_of(self.bytes_before)} -> {size_of(self.bytes_after)}"
        lines = [
            f"size of these weights: {sizes}; of all parameters in original precision: {size_of(self.parameter_bytes)}"
        ]
        experts = sum(row.bytes_before for row in self.rows if row.kind == "moe" and row.decision == "leave")
        if experts:
            share = experts / max(self.parameter_bytes, 1)
            lines.append(f"experts in original precision: {size_of(experts)}, {share:.1%} of all parameters")
        losses = [row.path for row in self.rows if row.decision == "quantize" and row.warning]
        if losses:
            lines.append(
                f"warning: {len(losses)} weights are expected to be larger or slower than before, {losses[0]} among "
                "them; skip_unprofitable leaves them alone"
            )
        return lines + [f"warning: {problem}" for problem in self.problems]


def plan_for(
    config: object,
    model: nn.Module,
    *,
    strict: bool = True,
    candidates: Sequence[Candidate] | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """The plan of a model.

    Args:
        config: in any form that `QuantizationConfig.parse` takes.
        model: only shapes and types are read, so it may be on meta.
        strict: whether a pattern or request without effect is an error; otherwise it is a warning.
        candidates: instead of those of the module tree, e.g. combined with what a traced graph shows.
        device: where the model will run, which kernels and expected losses depend on; by default where each weight is.

    Raises:
        ConfigurationError: the configuration has no meaning.
        PlanError: it does not fit the model.
    """
    parsed = QuantizationConfig.parse(config)
    parameters = Parameters(model) if isinstance(model, nn.Module) else None
    return make_plan(
        parsed,
        candidates_of(model, parameters) if candidates is None else candidates,
        strict=strict,
        all_paths=ModulePaths(model),
        parameter_bytes=None if parameters is None else parameters.bytes,
        device=device,
    )


def make_plan(
    config: QuantizationConfig,
    candidates: Sequence[Candidate],
    *,
    strict: bool = True,
    all_paths: Collection[str] = (),
    parameter_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """The plan of a set of candidates: see `plan_for` and `selection.select`."""
    selection = select(config, candidates, strict=strict, all_paths=all_paths, device=_kind_of(device))
    rows = _rows(candidates, selection.verdicts)
    total = sum(row.bytes_before for row in rows) if parameter_bytes is None else parameter_bytes
    return Plan(config, rows, total, selection.problems)


def _kind_of(device: torch.device | str | None) -> str | None:
    """The kind of a device, which need not be here."""
    try:
        return None if device is None else torch.device(device).type
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"device: there is no {shown(device)}: {reason}") from None


def _rows(candidates: Sequence[Candidate], verdicts: Sequence[Verdict]) -> tuple[PlanRow, ...]:
    """A row for each candidate. Layers that share their verdict are alike, so that what it means is looked up once."""
    first: dict[int, PlanRow] = {}
    rows = []
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        like = first.get(id(verdict))
        row = _row(candidate, verdict) if like is None else _row_like(candidate, like)
        first.setdefault(id(verdict), row)
        rows.append(row)
    return tuple(rows)


def _row_like(candidate: Candidate, like: PlanRow) -> PlanRow:
    """The row of a candidate that shares the verdict of another: its kind, shape and dtype, formats and obstacles."""
    return PlanRow(
        path=candidate.path,
        module_path=candidate.module_path,
        names=candidate.names,
        kind=like.kind,
        shape=like.shape,
        dtype=like.dtype,
        decision=like.decision,
        slot=like.slot,
        weight_rule=like.weight_rule,
        activation_rule=like.activation_rule,
        transposed=candidate.transposed,
        kernel=like.kernel,
        kernel_reason=like.kernel_reason,
        reason=like.reason,
        warning=like.warning,
        bytes_before=like.bytes_before,
        bytes_after=like.bytes_after,
        trainable=candidate.trainable,
        asked=like.asked,
        allow_nonfinite=like.allow_nonfinite,
        requested_kernel=like.requested_kernel,
        shards=candidate.shards,
        interleaved=candidate.interleaved,
    )


def _row(candidate: Candidate, verdict: Verdict) -> PlanRow:
    """The row of a candidate of which the verdict is known."""
    slot, config, forecast = verdict.slot, verdict.config, verdict.forecast
    before = candidate.bytes
    if slot is not None and verdict.decision == "override":
        rules = overridden_rules(config, candidate, slot)
    else:
        rules = candidate.current_rules or (("", "") if slot is None else config.rules(slot))
    return PlanRow(
        path=candidate.path,
        module_path=candidate.module_path,
        names=candidate.names,
        kind=candidate.kind,
        shape=candidate.shape,
        dtype=candidate.dtype,
        decision=verdict.decision,
        slot=slot,
        weight_rule=rules[0],
        activation_rule=rules[1],
        transposed=candidate.transposed,
        kernel="" if forecast is None else forecast.kernel,
        kernel_reason="" if forecast is None else forecast.kernel_reason,
        reason=verdict.reason,
        warning=_warning(candidate, verdict),
        bytes_before=before,
        bytes_after=before if forecast is None else forecast.bytes_after,
        trainable=candidate.trainable,
        asked=verdict.asked,
        allow_nonfinite=config.allow_nonfinite,
        requested_kernel="" if forecast is None else forecast.requested,
        shards=candidate.shards,
        interleaved=candidate.interleaved,
    )


def _warning(candidate: Candidate, verdict: Verdict) -> str:
    if candidate.kind == "moe" and verdict.decision == "leave" and verdict.asked:
        return f"{candidate.bytes} bytes of experts stay in original precision"
    return verdict.forecast.loss if verdict.decision == "quantize" and verdict.forecast is not None else ""
