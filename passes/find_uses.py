"""What a graph does with its weights: which of them are linear layers, and why the others are none.

    annotate_owners(gm, owners)        says on each input whose parameter it is
    weight_uses(gm) -> tuple[WeightUses, ...]         of matrices
    stack_uses(gm) -> tuple[StackUses, ...]           of stacks of experts' matrices
    find_linear_uses(gm) -> tuple[Candidate, ...]     both as candidates for a plan
    merged(first, second) -> Candidate                of one weight that two graphs use

Only inputs with an owner are looked at: parameters, not activations or buffers.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from olq_fx import torch_private
from olq_fx.candidates import Candidate
from olq_fx.module_uses import CandidateKind
from olq_fx.passes import canonical
from olq_fx.passes.base import Reject
from olq_fx.passes.find_stacks import MULTIPLIED, TRANSFORMED, StackUses, uses_of_stacks, where
from olq_fx.passes.fxtools import target_name
from olq_fx.passes.linear_forms import LinearUse, contraction_of, resolve
from olq_fx.passes.weight_views import stored_matrix, uses_of
from olq_fx.schemes import Slot
from olq_fx.weights import QuantizedWeight

_OWNER = "olq_fx_owner"
_TWO_ORIENTATIONS = "it is used both as (N, K) and as (K, N), so that its reduction axis is not one"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose parameter comes into a graph.

    Attributes:
        names: its paths, the first being that of the plan.
        dtype, device, trainable: of the parameter.
        current: its formats, if it is converted already.
        current_rules: its scale rules, if it is converted already.
        obstacle: why it cannot be replaced ("" if it can).
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    trainable: bool = False
    current: Slot | None = None
    current_rules: tuple[str, str] | None = None
    obstacle: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUses:
    """What a graph does with one weight.

    Attributes:
        weight: the graph input.
        operands: the views of it that something computes with.
        linear: its uses as a linear layer.
        others: its other uses, each with the reason why it is none.
    """

    weight: Node
    operands: tuple[Node, ...]
    linear: tuple[LinearUse, ...]
    others: tuple[Reject, ...]


def owner_of_parameter(names: tuple[str, ...], parameter: Tensor, obstacle: str = "") -> Owner:
    """The owner of a parameter with these paths, converted or not."""
    current, rules = None, None
    if isinstance(parameter, QuantizedWeight):
        spec = parameter.spec
        current = Slot(spec.weight, spec.activation or None)
        rules = (spec.weight_rule, spec.activation_rule)
    return Owner(
        names=names,
        dtype=parameter.dtype,
        device=parameter.device,
        trainable=parameter.requires_grad,
        current=current,
        current_rules=rules,
        obstacle=obstacle,
    )


def annotate_owners(gm: GraphModule, owners: Mapping[str, Owner]) -> None:
    """Say on each input of a graph, by its name, whose parameter it is."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in owners:
            node.meta[_OWNER] = owners[node.name]


def owner_of(node: Node) -> Owner | None:
    """Whose parameter a graph input is, or None."""
    found: Owner | None = node.meta.get(_OWNER)
    return found


def weight_uses(gm: GraphModule) -> tuple[WeightUses, ...]:
    """The uses of every matrix that comes in and has an owner."""
    return _all_uses(gm)[0]


def stack_uses(gm: GraphModule) -> tuple[StackUses, ...]:
    """The uses of every stack of matrices that comes in, has an owner and is multiplied with as experts are."""
    return _all_uses(gm)[1]


def _all_uses(gm: GraphModule) -> tuple[tuple[WeightUses, ...], tuple[StackUses, ...]]:
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder" and owner_of(node) is not None]
    transformed = torch_private.transformed_nodes(gm.graph)
    matrices, tensors = _matrices(inputs, transformed), uses_of_stacks(inputs, transformed)
    weights = {operand for uses in matrices for operand in uses.operands}
    others = {operand for uses in tensors for operand in uses.operands}
    stacks = [uses for each in tensors if (uses := each.without_products_of(weights | others)).products]
    # What is no stack after all may well be the input of a linear layer.
    weights.update(operand for uses in stacks for operand in uses.operands)
    return tuple(_without_products_of_weights(uses, weights) for uses in matrices), tuple(stacks)


def uses_of_inputs(inputs: Iterable[Node]) -> tuple[WeightUses, ...]:
    """The uses of those of some graph inputs that are dense matrices of a static shape."""
    inputs = tuple(inputs)
    found = _matrices(inputs, torch_private.transformed_nodes(inputs[0].graph) if inputs else ())
    operands = {operand for uses in found for operand in uses.operands}
    return tuple(_without_products_of_weights(uses, operands) for uses in found)


def _matrices(inputs: Iterable[Node], transformed: Container[Node]) -> list[WeightUses]:
    return [uses for node in inputs if (uses := _uses(node, transformed)) is not None]


def _uses(weight: Node, transformed: Container[Node]) -> WeightUses | None:
    view = stored_matrix(weight)
    if view is None:
        return None
    linear: list[LinearUse] = []
    others: list[Reject] = []
    operands: list[Node] = []
    for user, operand, seen in uses_of(view):
        if user.target is canonical.linear:
            continue
        operands.append(operand)
        if user in transformed:
            others.append(Reject(where(user), TRANSFORMED))
            continue
        contraction = contraction_of(user, operand)
        if contraction is None:
            others.append(Reject(where(user), f"used by {target_name(user)}, which is no linear layer"))
            continue
        use = contraction if isinstance(contraction, str) else resolve(user, contraction, seen)
        if isinstance(use, str):
            others.append(Reject(where(user), f"{use} ({target_name(user)})"))
        else:
            linear.append(use)
    return WeightUses(weight, tuple(operands), tuple(linear), tuple(others))


def _without_products_of_weights(uses: WeightUses, operands: Container[Node]) -> WeightUses:
    """A product of two weights is no linear layer of either."""
    products = [use for use in uses.linear if use.x in operands]
    if not products:
        return uses
    rejects = tuple(Reject(where(use.node), MULTIPLIED) for use in products)
    linear = tuple(use for use in uses.linear if use not in products)
    return dataclasses.replace(uses, linear=linear, others=uses.others + rejects)


def find_linear_uses(gm: GraphModule) -> tuple[Candidate, ...]:
    """The weights of a graph as candidates of a plan: those used as linear layers, others with the reason.

    A stack of matrices is one if a product uses it as experts; any other tensor of three dimensions is none.
    """
    matrices, stacks = _all_uses(gm)
    linear = tuple(_candidate(uses) for uses in matrices if uses.linear or uses.others)
    return linear + tuple(_stack_candidate(uses) for uses in stacks)


def _candidate(uses: WeightUses) -> Candidate:
    orientations = {use.matrix.transposed for use in uses.linear}
    matrix = uses.linear[0].matrix if uses.linear else None
    view = stored_matrix(uses.weight)
    assert view is not None
    return _owned(
        uses,
        kind="linear",
        shape=view.stored if matrix is None else (matrix.rows, matrix.columns),
        transposed=matrix is not None and matrix.transposed,
        use_known=matrix is not None,
        blocked=_TWO_ORIENTATIONS if len(orientations) > 1 else "",
    )


def _stack_candidate(uses: StackUses) -> Candidate:
    first = uses.products[0]
    return _owned(
        uses,
        kind="moe",
        shape=first.shape,
        transposed=first.transposed,
        use_known=True,
        blocked=_TWO_ORIENTATIONS if len({use.transposed for use in uses.products}) > 1 else "",
    )


def _owned(
    uses: WeightUses | StackUses,
    *,
    kind: CandidateKind,
    shape: tuple[int, ...],
    transposed: bool,
    use_known: bool,
    blocked: str,
) -> Candidate:
    """A candidate with what its owner and its other uses say of it."""
    owner = owner_of(uses.weight)
    assert owner is not None
    return Candidate(
        path=owner.names[0],
        module_path=owner.names[0].rpartition(".")[0],
        names=owner.names,
        module_names=tuple(dict.fromkeys(name.rpartition(".")[0] for name in owner.names)),
        kind=kind,
        shape=shape,
        transposed=transposed,
        dtype=owner.dtype,
        device=owner.device,
        left_alone="; ".join(dict.fromkeys(reject.reason for reject in uses.others)),
        blocked=owner.obstacle or blocked,
        use_known=use_known,
        current=owner.current,
        current_rules=owner.current_rules,
        trainable=owner.trainable,
    )


def merged(first: Candidate, second: Candidate) -> Candidate:
    """What two graphs together show of one weight: it is a linear layer only if it is one in each."""
    known, other = (first, second) if first.use_known or not second.use_known else (second, first)
    blocked = second.blocked or first.blocked
    if known.use_known and other.use_known and known.transposed != other.transposed:
        blocked = blocked or _TWO_ORIENTATIONS
    reasons = [reason for one in (first, second) for reason in one.left_alone.split("; ") if reason]
    return dataclasses.replace(
        second,
        shape=known.shape,
        transposed=known.transposed,
        use_known=known.use_known,
        left_alone="; ".join(dict.fromkeys(reasons)),
        blocked=blocked,
    )
