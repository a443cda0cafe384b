"""The candidates: every weight of a model that a configuration may speak of, read from the module tree.

API:
    candidates_of(model) -> tuple[Candidate, ...]     in the order of the tree, one for each parameter, ties merged
    module_paths(model) -> tuple[str, ...]            every path that a pattern could mean (for messages)
    ModulePaths(model)                                the same, read when it is asked for
    parameter_bytes(model) -> int                     of all parameters, shared ones once, in original precision
    combine(tree, graph, whole=False) -> tuple[Candidate, ...]     the tree's, with what a traced graph knows better

What names its own reduction axis is known to be linear: nn.Linear, transformers' Conv1D, nn.MultiheadAttention. Any
other 2-D parameter has an unknown use (`x @ w` and `x @ w.T` cannot be told apart here).
"""

import dataclasses
import functools
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from olq_fx.configuration_components import longest_prefix
from olq_fx.declared import Declaration, declarations
from olq_fx.errors import ConfigurationTypeError
from olq_fx.expert_layouts import merged_shards
from olq_fx.left_alone import Place
from olq_fx.module_uses import ALREADY_QUANTIZED, CandidateKind, Use, output_embeddings, places, uses_of
from olq_fx.parameters import PLAIN, Parameters
from olq_fx.schemes import Slot

DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Element types of weights that can be converted."""

USE_UNKNOWN = "use unknown; pass example_inputs or use backend()"
NOT_USED = "the traced call does not use it"
_TWO_ORIENTATIONS = "it is used both as (N, K) and as (K, N), so that its reduction axis is not one"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One weight that a configuration may speak of, under all its names.

    Attributes:
        path: the parameter's first path in the tree.
        module_path: the path of the module that owns it there.
        names: every path of the parameter: aliases of shared modules and tied parameters.
        module_names: every module path by which a pattern may name it (of a MultiheadAttention's output projection
            also that of the attention).
        kind: `linear`, `moe` (weights of experts) or `embedding`. A weight tied to a linear layer is `linear`.
        shape: (N, K), output features and reduction axis, whatever the storage; of experts in one tensor (E, N, K), or
            as stored where it is not known which is which.
        transposed: whether it is stored as (K, N), or (E, K, N).
        shards: how many matrices with scales of their own are merged along N (gate and up of experts).
        interleaved: whether these take turns row by row.
        dtype, device: of the parameter; the original precision where it is converted already.
        left_alone: why it is left alone by default; "" otherwise. An exact target or `include` opts it in.
        blocked: why it cannot be converted at all, or not without tracing; "" otherwise.
        use_known: whether the tree, or a traced graph, says that its use is a linear layer.
        current: the formats that it has already.
        current_rules: the scale rules of weight and activation that it was converted with.
        trainable: whether it requires a gradient.
        checkpoint: what the model that it belongs to declares of a checkpoint that was quantized by others.
    """

    path: str
    module_path: str
    names: tuple[str, ...]
    module_names: tuple[str, ...]
    kind: CandidateKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    shards: int = 1
    interleaved: bool = False
    left_alone: str = ""
    blocked: str = ""
    use_known: bool = True
    current: Slot | None = None
    current_rules: tuple[str, str] | None = None
    trainable: bool = False
    checkpoint: Declaration | None = None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def bytes(self) -> int:
        """Its size in original precision."""
        return self.numel * self.dtype.itemsize

    @property
    def obstacle(self) -> str:
        """Why it cannot be converted: the reason of `blocked`, or that its use is unknown; "" when it can."""
        return self.blocked or ("" if self.use_known else USE_UNKNOWN)


def candidates_of(model: nn.Module, parameters: Parameters | None = None) -> tuple[Candidate, ...]:
    """Every weight that a configuration may speak of, in the order of the module tree.

    Args:
        model: the model.
        parameters: of the model, where they are known already.

    Parameters that are one storage (tied, or registered under several modules) are one candidate with several names.
    Nothing is read but shapes and types: weights on meta and fake tensors are as good as others.

    Raises:
        ConfigurationTypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    shared = parameters or Parameters(model)
    outputs = output_embeddings(shared.modules)
    alike = _Alike(outputs, shared.shared)
    groups: dict[object, list[Use]] = {}
    found: list[Candidate | list[Use]] = []
    everywhere = list(places(model))
    for place in everywhere:
        plain = alike.of(place)
        if plain is not None:
            found.append(plain)
            continue
        for use in uses_of(place, outputs):
            key = (use.computed, id(use.tensor)) if use.computed else shared.shared.get(id(use.tensor))
            if key is None:
                found.append(_unshared(use))
            elif key in groups:
                groups[key].append(use)
            else:
                found.append(groups.setdefault(key, [use]))
    read = [_candidate(one) if isinstance(one, list) else one for one in found]
    return tuple(_as_declared(read, declarations(everywhere)))


def _as_declared(found: list[Candidate], declared: Mapping[str, Declaration]) -> list[Candidate]:
    """The candidates with what their model declares of its checkpoint, where that is true of it.

    Weights that are stored in quantized form speak for themselves, and those without data yet are what the checkpoint
    will bring. If some are there in original precision that it has quantized, they were dequantized when they were
    loaded, and those without data wait elsewhere.
    """
    if not declared:
        return found
    placed = [longest_prefix(candidate.path, declared) for candidate in found]
    own = {path: [c for c, at in zip(found, placed, strict=True) if at == path] for path in declared}
    stored = {path for path, those in own.items() if any(c.blocked.startswith(ALREADY_QUANTIZED) for c in those)}
    awaited = {path for path, those in own.items() if _awaits(those, declared[path])} - stored
    return [
        _declared(candidate, declared[path], awaited=path in awaited) if path in stored | awaited else candidate
        for candidate, path in zip(found, placed, strict=True)
    ]


def _awaits(candidates: Sequence[Candidate], declaration: Declaration) -> bool:
    """Whether a model is without data, and nothing of it is there that its checkpoint has quantized."""
    brought = [c for c in candidates if not c.left_alone and declaration.covers(c.kind, c.module_path)]
    return any(c.device.type == "meta" for c in candidates) and all(c.device.type == "meta" for c in brought)


def _declared(candidate: Candidate, declaration: Declaration, *, awaited: bool) -> Candidate:
    """A candidate of a model with this declaration; if its weights are awaited, it says which come quantized."""
    if candidate.current is not None:
        return candidate
    blocked = candidate.blocked
    without_data = awaited and candidate.device.type == "meta" and not candidate.left_alone
    if without_data and declaration.covers(candidate.kind, candidate.module_path):
        blocked = f"{ALREADY_QUANTIZED}: {declaration}"
    return dataclasses.replace(candidate, blocked=blocked, checkpoint=declaration)


class _Alike:
    """Candidates of ordinary linear layers: what those of one kind have in common is looked at once."""

    def __init__(self, outputs: frozenset[int], shared: Container[int]) -> None:
        """`outputs`: as `uses_of` takes them; `shared`: identities of weights with several names, which are none."""
        self._outputs = outputs
        self._shared = shared
        self._known: dict[tuple[object, ...], Candidate | None] = {}

    def of(self, place: Place) -> Candidate | None:
        """The candidate of a module that has one, as another of its kind has; None where it has to be looked at."""
        module, around = place.module, place.parent
        if not isinstance(module, nn.Linear) or module._modules or module._buffers:
            return None
        weight = module._parameters.get("weight")
        if weight is None or type(weight) not in PLAIN or id(weight) in self._shared:
            return None
        if around is None or isinstance(around.module, nn.MultiheadAttention):
            return None
        where = (place.name, place.experts, place.router, place.modulation, id(module) in self._outputs)
        what = (weight.shape, weight.dtype, weight.device, weight.requires_grad)
        key = (type(module), *module._parameters, *what, *where)
        if key not in self._known:
            uses = list(uses_of(place, self._outputs))
            self._known[key] = _unshared(uses[0]) if len(uses) == 1 and not uses[0].computed else None
        first = self._known[key]
        return None if first is None else _at(place, first)


def _at(place: Place, like: Candidate) -> Candidate:
    """A candidate with the weight of the module at `place`, in all else like another."""
    path = place.path + ".weight"
    return Candidate(
        path=path,
        module_path=place.path,
        names=(path,),
        module_names=(place.path,),
        kind=like.kind,
        shape=like.shape,
        transposed=like.transposed,
        dtype=like.dtype,
        device=like.device,
        left_alone=like.left_alone,
        blocked=like.blocked,
        use_known=like.use_known,
        current=like.current,
        current_rules=like.current_rules,
        trainable=like.trainable,
    )


def module_paths(model: nn.Module) -> tuple[str, ...]:
    """The paths of all modules and parameters, under every one of their names: what a pattern could mean to say."""
    found: list[str] = []
    for place in places(model):
        found.append(place.path)
        found.extend(place.of(leaf) for leaf, tensor in place.module._parameters.items() if tensor is not None)
    return tuple(path for path in dict.fromkeys(found) if path)


class ModulePaths(Collection[str]):
    """`module_paths` of a model, read when they are asked for: a plan without mistakes does not need them."""

    def __init__(self, model: nn.Module) -> None:
        """The paths of `model`."""
        self._model = model

    @functools.cached_property
    def _paths(self) -> tuple[str, ...]:
        return module_paths(self._model)

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._paths)

    def __contains__(self, path: object) -> bool:
        """Whether a module or parameter has this path."""
        return path in self._known

    def __iter__(self) -> Iterator[str]:
        """In the order of the tree."""
        return iter(self._paths)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._paths)


def parameter_bytes(model: nn.Module) -> int:
    """The size of all parameters, shared ones once, a converted one in its original precision."""
    return Parameters(model).bytes


def combine(tree: Iterable[Candidate], graph: Iterable[Candidate], *, whole: bool = False) -> tuple[Candidate, ...]:
    """The candidates of the module tree with what a traced graph adds: uses that the tree could not know.

    Args:
        tree: of `candidates_of`.
        graph: the weights whose use a graph shows. A weight that is used by an operation other than a linear layer
            says so in `left_alone`; one that is in the graph only is added.
        whole: whether there are no other graphs: what this one does not show as a linear layer's is none then.
    """
    traced = {name: candidate for candidate in graph for name in candidate.names}
    combined: list[Candidate] = []
    known: set[str] = set()
    for candidate in tree:
        found = next((traced[name] for name in candidate.names if name in traced), None)
        enriched = candidate if found is None else _enrich(candidate, found)
        if whole and not enriched.use_known and not enriched.blocked:
            why = NOT_USED if found is None else found.left_alone or found.blocked
            enriched = dataclasses.replace(enriched, blocked=why)
        combined.append(enriched)
        known.update(candidate.names)
    added = dict.fromkeys(c for c in traced.values() if not known.intersection(c.names))
    return (*combined, *(dataclasses.replace(one, shards=_shards_of(one, one)) for one in added))


def _enrich(candidate: Candidate, traced: Candidate) -> Candidate:
    """A candidate of the tree with what its graph says; where both know its use, they must agree."""
    left_alone = candidate.left_alone or traced.left_alone
    blocked = candidate.blocked or traced.blocked
    if candidate.use_known and candidate.kind != "embedding":
        if candidate.transposed != traced.transposed and traced.use_known:
            blocked = blocked or _TWO_ORIENTATIONS
        return dataclasses.replace(candidate, left_alone=left_alone, blocked=blocked)
    if not traced.use_known or traced.kind == "embedding":
        return dataclasses.replace(candidate, left_alone=left_alone, blocked=blocked)
    return dataclasses.replace(
        candidate,
        kind="moe" if candidate.kind == "moe" else traced.kind,
        shape=traced.shape,
        transposed=traced.transposed,
        shards=_shards_of(candidate, traced),
        use_known=True,
        left_alone=left_alone,
        blocked=blocked,
    )


def _shards_of(candidate: Candidate, traced: Candidate) -> int:
    """Of experts in one tensor, how many matrices its name says that each consists of, once N is known."""
    shards = merged_shards(candidate.path.rpartition(".")[2]) if len(traced.shape) == 3 else 1
    return shards if traced.shape[-2] % shards == 0 else 1


def _candidate(uses: list[Use]) -> Candidate:
    """One weight of all its uses in the tree."""
    first = uses[0]
    if len(uses) == 1:
        return _unshared(first)
    products = [use for use in uses if use.kind != "embedding"]
    judged = products[0] if products else first
    names = [use.path for use in uses]
    return Candidate(
        path=names[0],
        module_path=first.place.path,
        names=tuple(dict.fromkeys(names)),
        module_names=tuple(dict.fromkeys([name for use in uses for name in use.module_names])),
        kind="moe" if any(use.kind == "moe" for use in uses) else judged.kind,
        shape=judged.shape,
        transposed=judged.transposed,
        shards=judged.shards,
        interleaved=judged.interleaved,
        dtype=first.tensor.dtype,
        device=first.tensor.device,
        left_alone=_left_alone(uses, products),
        blocked=_blocked(uses, products),
        use_known=all(use.known for use in uses),
        current=first.current,
        current_rules=first.current_rules,
        trainable=any(use.tensor.requires_grad for use in uses),
    )


def _unshared(use: Use) -> Candidate:
    """A weight with one use: what `_candidate` makes of it, without looking for a second."""
    path = use.path
    return Candidate(
        path=path,
        module_path=use.place.path,
        names=(path,),
        module_names=use.module_names,
        kind=use.kind,
        shape=use.shape,
        transposed=use.transposed,
        shards=use.shards,
        interleaved=use.interleaved,
        dtype=use.tensor.dtype,
        device=use.tensor.device,
        left_alone=use.left_alone,
        blocked=use.blocked,
        use_known=use.known,
        current=use.current,
        current_rules=use.current_rules,
        trainable=use.tensor.requires_grad,
    )


def _left_alone(uses: list[Use], products: list[Use]) -> str:
    """The reason by which a weight is left alone by default; a tie to an embedding is one."""
    embedding = next((use for use in uses if use.kind == "embedding"), None)
    if embedding is not None and products:
        return f"output embedding ({products[0].path}), tied to the embedding {embedding.path}"
    return next((use.left_alone for use in uses if use.left_alone), "")


def _blocked(uses: list[Use], products: list[Use]) -> str:
    """The reason by which a weight cannot be converted."""
    if len(products) > 1 and len({use.transposed for use in products}) > 1:
        return _TWO_ORIENTATIONS
    return next((use.blocked for use in uses if use.blocked), "")
