"""What a backend plans and converts, per root module: once, however many graphs, recompilations and threads there are.

    Sessions(config, strict, root).prepare(frame, graph, sources, values) -> values

Plans judge the whole module tree and never a single graph. A graph adds what the tree cannot know: how a parameter is
used that no layer names. A weight whose use no graph has shown yet waits for the one that does.
"""

import dataclasses
import hashlib
import json
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from olq_fx import conversion, torch_private
from olq_fx.candidates import Candidate, candidates_of, combine, module_paths, parameter_bytes
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import PlanError
from olq_fx.owners import Ownership
from olq_fx.passes.find_uses import annotate_owners, find_linear_uses, merged, owner_of_parameter
from olq_fx.passes.open_attention import OpenAttention
from olq_fx.plan import Plan, PlanRow, make_plan
from olq_fx.report import Report
from olq_fx.weights import QuantizedWeight

_NOT_SEEN = "no compiled graph has used it so far"
_WAITS = "waits for a graph that uses it as a linear layer; {}"


class Session:
    """What was planned and done for one root module.

    Attributes:
        report: of all graphs so far.
        uses: what graphs have shown of the weights, by path.
        done: the rows as they were planned of what was converted.
    """

    def __init__(self) -> None:
        """Nothing is planned yet."""
        self.report: Report | None = None
        self.uses: dict[str, Candidate] = {}
        self.done: dict[str, PlanRow] = {}


class Sessions:
    """All sessions of a backend.

    Attributes:
        tag: what of the configuration enters the keys of compilers' caches.
    """

    def __init__(self, config: QuantizationConfig, strict: bool, root: nn.Module | None) -> None:
        """See `olq_fx.backend`."""
        self.tag = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
        self._config = config
        self._strict = strict
        self._root = None if root is None else weakref.ref(root)
        self._of_roots = WeakIdKeyDictionary()
        self._of_code: dict[Any, Session] = {}
        self._order: list[weakref.ref[Session]] = []
        self._lock = threading.RLock()

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of the sessions that are still there; the one planned last comes last."""
        found = (reference() for reference in self._order)
        return tuple(session.report for session in found if session is not None and session.report is not None)

    def prepare(
        self,
        frame: torch_private.Frame | None,
        graph: GraphModule,
        sources: Sequence[str | None],
        values: Sequence[Any],
    ) -> tuple[list[Any], Session | None]:
        """Convert what the plan says of the root of a graph.

        Args:
            frame: what runs the graph.
            graph: with fake values; its inputs are marked with their owners.
            sources: where each of its inputs comes from.
            values: what comes in.

        Returns:
            What comes in now, and the session (None for a graph without parameters).

        Raises:
            PlanError, ConversionError: configuration and model do not fit; nothing was changed.
        """
        root = None if self._root is None else self._root()
        owned = Ownership.of(frame, root, sources, values)
        if not owned.names:
            return list(values), None
        with self._lock:
            session = self._session(owned, frame)
            inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
            owners = {
                inputs[i]: owner_of_parameter(names, values[i], owned.obstacles.get(names[0], ""))
                for i, names in owned.names.items()
            }
            annotate_owners(graph, owners)
            for candidate in _uses(graph):
                known = session.uses.get(candidate.path)
                session.uses[candidate.path] = candidate if known is None else merged(known, candidate)
            plan, waiting = self._plan(session, owned)
            if any(_without_data(values[i]) for i in owned.names):
                return list(values), session
            self._convert(session, owned, [row for row in plan.rows if row.path not in waiting])
            return [owned.live(i, value) for i, value in enumerate(values)], session

    def _session(self, owned: Ownership, frame: torch_private.Frame | None) -> Session:
        known: Any = self._of_roots if owned.has_root else self._of_code
        key = owned.root if owned.has_root else None if frame is None else frame.code
        if key not in known:
            known[key] = Session()
        session: Session = known[key]
        self._order = [ref for ref in self._order if ref() not in (None, session)] + [weakref.ref(session)]
        return session

    def _plan(self, session: Session, owned: Ownership) -> tuple[Plan, frozenset[str]]:
        """The plan of the tree with what all graphs so far have shown, and the weights that wait for a graph."""
        trees = _trees(owned)
        tree = [candidate for module in trees for candidate in candidates_of(module)]
        known = [_obstructed(candidate, owned) for candidate in combine(tree, session.uses.values())]
        converted = {candidate.path: candidate for candidate in known if candidate.current is not None}
        waiting = frozenset(c.path for c in known if not (c.use_known or c.blocked or c.path in converted))
        # What has been converted stays as it was planned, unless it was given its original precision back.
        session.done = {path: row for path, row in session.done.items() if path in converted}
        judged = [_as_planned(candidate, session.done.get(candidate.path)) for candidate in known]
        plan = self._made(
            judged,
            waiting,
            strict=self._strict and owned.has_root,
            all_paths=[path for module in trees for path in module_paths(module)],
            parameter_bytes=sum(parameter_bytes(module) for module in trees),
        )
        now = {path: _as_it_is(row, converted[path]) for path, row in session.done.items()}
        unseen = {c.path: _WAITS.format(c.left_alone or _NOT_SEEN) for c in known if c.path in waiting}
        rows = [now.get(row.path, row) for row in plan.rows]
        plan = dataclasses.replace(plan, rows=tuple(_waiting(row, unseen.get(row.path, "")) for row in rows))
        report = Report(plan)
        for path, row in session.done.items():
            report.mark(path, "overridden" if row.decision == "override" else "converted")
        if session.report is not None:
            report.refusals, report.notes = session.report.refusals, session.report.notes
        session.report = report
        return plan, waiting

    def _made(self, candidates: Sequence[Candidate], waiting: frozenset[str], **options: Any) -> Plan:
        """A plan that leaves what waits alone; if only that makes sense of the configuration, one that counts on it."""

        def attempt(change: dict[str, Any]) -> Plan:
            judged = [dataclasses.replace(c, **change) if c.path in waiting else c for c in candidates]
            return make_plan(self._config, judged, **options)

        try:
            return attempt({"blocked": _NOT_SEEN})
        except PlanError:
            if not waiting:
                raise
            return attempt({"use_known": True})

    def _convert(self, session: Session, owned: Ownership, rows: Sequence[PlanRow]) -> None:
        """Convert what is planned and has data: everything is looked at before anything is changed."""
        assert session.report is not None
        plan = session.report.plan
        new = [row for row in rows if row.path not in session.done]
        todo = [(tree, tuple(row for row in new if _convertible(owned, tree, row))) for tree in _trees(owned)]
        for tree, own in todo:
            conversion.preflight(tree, own)
        for tree, own in todo:
            conversion.execute(tree, dataclasses.replace(plan, rows=own), session.report)
            for row in own:
                session.done[row.path] = row
                owned.put_outside(row.path)


def _trees(owned: Ownership) -> list[nn.Module]:
    return [owned.root] if owned.root is owned.others else [owned.root, owned.others]


def _uses(graph: GraphModule) -> tuple[Candidate, ...]:
    """The uses of a graph's weights, those inside attention too."""
    scratch = torch_private.copy_graph(graph)
    OpenAttention()(scratch)
    return find_linear_uses(scratch)


def _obstructed(candidate: Candidate, owned: Ownership) -> Candidate:
    obstacle = owned.obstacles.get(candidate.path)
    return candidate if obstacle is None else dataclasses.replace(candidate, blocked=obstacle)


def _as_planned(candidate: Candidate, row: PlanRow | None) -> Candidate:
    """A weight as this session has decided: if others have changed its activations since, that contradicts nothing."""
    if row is None or row.slot is None or candidate.current is None or candidate.current.weight != row.slot.weight:
        return candidate
    return dataclasses.replace(candidate, current=row.slot, current_rules=(row.weight_rule, row.activation_rule))


def _waiting(row: PlanRow, reason: str) -> PlanRow:
    """A row that is planned, with the reason why it is not converted yet."""
    return dataclasses.replace(row, reason=reason) if reason and row.decision == "quantize" else row


def _as_it_is(row: PlanRow, candidate: Candidate) -> PlanRow:
    """A row with the activations that its weight has now."""
    current, rules = candidate.current, candidate.current_rules
    if current is None or rules is None or row.slot is None or current.weight != row.slot.weight:
        return row
    return dataclasses.replace(row, slot=current, activation_rule=rules[1])


def _convertible(owned: Ownership, tree: nn.Module, row: PlanRow) -> bool:
    """Whether a row is to be converted now, in this tree: it is not yet, and there is data."""
    if row.decision not in ("quantize", "override") or owned.owner_of(row.path) is not tree:
        return False
    parameter = tree.get_parameter(row.path)
    if row.decision == "override":
        return isinstance(parameter, QuantizedWeight)
    return not isinstance(parameter, QuantizedWeight) and not _without_data(parameter)


def _without_data(value: torch.Tensor) -> bool:
    return value.is_meta or torch_private.is_fake(value)
