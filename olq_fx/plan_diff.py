"""What two plans decide differently, weight by weight.

API:
    diff_plans(before, after) -> PlanDiff(only_before, only_after, changed, ...), which prints, and has to_dict
"""

import dataclasses
from typing import Any

from olq_fx.errors import ConfigurationTypeError
from olq_fx.folding import fold
from olq_fx.plan import Plan, PlanRow
from olq_fx.tables import size_of, table_of

_COMPARED = ("decision", "slot", "weight_rule", "activation_rule", "shape", "dtype", "transposed", "kernel")


@dataclasses.dataclass(frozen=True, slots=True)
class PlanDiff:
    """The difference of two plans.

    Attributes:
        only_before, only_after: rows of weights that the other plan does not have.
        changed: (before, after) rows of weights of which the plans decide differently.
        bytes_before, bytes_after: what all weights take when the one, and when the other plan is executed.
    """

    only_before: tuple[PlanRow, ...]
    only_after: tuple[PlanRow, ...]
    changed: tuple[tuple[PlanRow, PlanRow], ...]
    bytes_before: int
    bytes_after: int

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return bool(self.only_before or self.only_after or self.changed)

    def to_dict(self) -> dict[str, Any]:
        """The difference in plain JSON values."""
        return {
            "only_before": [row.to_dict() for row in self.only_before],
            "only_after": [row.to_dict() for row in self.only_after],
            "changed": [{"before": old.to_dict(), "after": new.to_dict()} for old, new in self.changed],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        """A table of what differs, repeated blocks folded, and the sizes."""
        sizes = f"size of all weights: {size_of(self.bytes_before)} -> {size_of(self.bytes_after)}"
        if not self:
            return f"the plans decide the same; {sizes}"
        pairs: list[tuple[PlanRow | None, PlanRow | None]] = [
            *((row, None) for row in self.only_before),
            *self.changed,
            *((None, row) for row in self.only_after),
        ]
        paths = [(new or old).path for old, new in pairs if old or new]  # type: ignore[union-attr]
        cells = [(_said(old), _said(new)) for old, new in pairs]
        rows = [(one.text, str(len(one.members)), *cells[one.members[0]]) for one in fold(paths, cells)]
        columns = ("weight", "count", "before", "after")
        return "\n".join([table_of({**dict.fromkeys(columns, "left"), "count": "right"}, rows), sizes])


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What two plans decide differently. A weight is the same if one of its paths is.

    Raises:
        ConfigurationTypeError: one of them is no plan.
    """
    for given in (before, after):
        if not isinstance(given, Plan):
            hint = "; its plan is `report.plan`" if isinstance(getattr(given, "plan", None), Plan) else ""
            raise ConfigurationTypeError(f"diff_plans compares two plans, not {type(given).__name__}{hint}")
    partners = [(row, after.get(row.path)) for row in before.rows]
    known = {new.path for _, new in partners if new is not None}
    return PlanDiff(
        only_before=tuple(row for row, new in partners if new is None),
        only_after=tuple(row for row in after.rows if row.path not in known and before.get(row.path) is None),
        changed=tuple((row, new) for row, new in partners if new is not None and _differ(row, new)),
        bytes_before=before.bytes_after,
        bytes_after=after.bytes_after,
    )


def _differ(first: PlanRow, second: PlanRow) -> bool:
    return any(getattr(first, name) != getattr(second, name) for name in _COMPARED)


def _said(row: PlanRow | None) -> str:
    """What a plan decides of a weight."""
    if row is None:
        return "not there"
    if row.slot is None:
        return f"{row.decision}: {row.reason}"
    rules = "" if row.weight_rule == "amax" else f", scales by {row.weight_rule}"
    return f"{row.formats}{rules} ({row.kernel}), {size_of(row.bytes_after)}"
