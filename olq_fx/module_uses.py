"""What a module does with its parameters: which are weights of linear layers, of experts, of embeddings.

API:
    places(model)                every module under every one of its names, in the order of the tree
    uses_of(place, outputs)      the weights among a module's own parameters, each with what is done with it
    output_embeddings(modules)   identities of the modules that models declare as their output embedding

Classes of other libraries are known by their names; nothing is imported for them.
"""

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from olq_fx import torch_distributed
from olq_fx.expert_layouts import layout_of
from olq_fx.left_alone import Place, holds_experts, in_experts, reason_for
from olq_fx.schemes import Slot

CandidateKind = Literal["linear", "moe", "embedding"]

SCRIPTED = "its module is TorchScript, whose code takes plain tensors only; quantize the module that it was made from"
ALREADY_QUANTIZED = "already quantized"
COMPUTED = "its weight is computed by {how}, not stored; remove the parametrization first"
NO_PARAMETER = "its weight is {what}, not a parameter"

_ATTENTION_WEIGHTS = frozenset({"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"})
_EXPERT_WEIGHTS = frozenset({"gate_up_proj", "down_proj"})
_QUANTIZERS = frozenset({"torchao", "bitsandbytes", "optimum", "quanto", "compressed_tensors"})
_PACKED = re.compile(r"qweight|weight_packed|\w+_(packed|blocks)")
"""Names of packed weights: compressed-tensors, GPTQ and AWQ, the experts of gpt-oss."""

_DECLARES_OUTPUT = "get_output_embeddings"
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One occurrence of a weight in the tree, and what its owner does with it.

    Attributes:
        place, leaf: the owner, and the parameter's name there.
        tensor: the parameter; of a computed weight one of those that it is computed from.
        kind: `linear`, `moe` or `embedding`.
        shape: (N, K); of experts in one tensor (E, N, K), or as stored where that is not known.
        transposed: stored as (K, N), or (E, K, N).
        shards: how many matrices with scales of their own are merged along N.
        interleaved: whether these take turns row by row.
        known: whether the owner says that its use is a linear layer, or an embedding.
        left_alone: why it is left alone by default, or "".
        blocked: why it cannot be converted, or "".
        computed: the name of the weight where it is computed from parameters, or "".
    """

    place: Place
    leaf: str
    tensor: Tensor
    kind: CandidateKind
    shape: tuple[int, ...]
    transposed: bool = False
    shards: int = 1
    interleaved: bool = False
    known: bool = True
    left_alone: str = ""
    blocked: str = ""
    computed: str = ""

    @property
    def path(self) -> str:
        """The parameter's path."""
        return self.place.of(self.leaf)

    @property
    def module_names(self) -> tuple[str, ...]:
        """The module paths that mean this weight: the owner's; of an attention's output projection its parent's too."""
        around = self.place.parent
        if around is not None and isinstance(around.module, nn.MultiheadAttention):
            return tuple(path for path in (self.place.path, around.path) if path)
        return (self.place.path,) if self.place.path else ()

    @property
    def current(self) -> Slot | None:
        """The formats of a weight that is converted already."""
        spec = _spec(self.tensor)
        return None if spec is None else Slot(spec.weight, spec.activation or None)

    @property
    def current_rules(self) -> tuple[str, str] | None:
        """The scale rules of weight and activation of a weight that is converted already."""
        spec = _spec(self.tensor)
        return None if spec is None else (spec.weight_rule, spec.activation_rule)


def places(model: nn.Module) -> Iterator[Place]:
    """Every module under every one of its names, in the order of the tree; none is entered within itself."""
    pending = [Place.root(model)]
    while pending:
        place = pending.pop()
        yield place
        children = [(name, child) for name, child in place.module._modules.items() if child is not None]
        pending.extend(place.below(name, child) for name, child in reversed(children) if not place.within(child))


def output_embeddings(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Identities of what `get_output_embeddings()` of these modules returns."""
    found = set()
    declares: dict[type, bool] = {}  # nn.Module takes long to say that a name is none of its attributes
    for module in modules:
        kind = type(module)
        if kind not in declares:
            declares[kind] = hasattr(kind, _DECLARES_OUTPUT)
        if declares[kind] or _DECLARES_OUTPUT in module.__dict__:
            try:
                declared = getattr(module, _DECLARES_OUTPUT)
                found.add(id(declared() if callable(declared) else None))
            except Exception:  # a model of another library that has none, and says so in its own way
                continue
    return frozenset(found - {id(None)})


def uses_of(place: Place, outputs: Container[int]) -> Iterator[Use]:
    """The weights among the parameters of one module (not those of its children), with their uses."""
    module = place.module
    if isinstance(module, torch.jit.ScriptModule):
        yield from _scripted(place, outputs)
        return
    if not (module._parameters or module._buffers or "parametrizations" in module._modules or _is_linear(module)):
        return
    packed = _packed(module)
    yield from (_foreign(place, leaf, codes, outputs) for leaf, codes in packed.items())
    computed = _computed(module)
    for weight, (how, source, _) in computed.items():
        use = _use(place, weight, source, outputs)
        if use is not None:
            yield dataclasses.replace(use, blocked=COMPUTED.format(how=how), computed=weight)
    consumed = {name for _, _, names in computed.values() for name in names} | _no_weights(module, packed)
    for leaf, tensor in module._parameters.items():
        if tensor is not None and leaf not in consumed:
            use = _use(place, leaf, tensor, outputs)
            if use is not None:
                yield use
    if _is_linear(module) and module._parameters.get("weight") is None and not computed and not packed:
        yield from _held(place, outputs)


def _held(place: Place, outputs: Container[int]) -> Iterator[Use]:
    """The weight of a linear layer that has made a buffer of it, or an attribute like any other."""
    module = place.module
    for held, what in ((module._buffers, "a buffer"), (module.__dict__, "an attribute")):
        tensor = held.get("weight")
        if isinstance(tensor, Tensor) and tensor.dim() == 2:
            use = _linear(place, "weight", tensor, outputs, transposed=_is_conv1d(module))
            yield dataclasses.replace(use, blocked=use.blocked or NO_PARAMETER.format(what=what))
            return


def _no_weights(module: nn.Module, packed: Container[str]) -> set[str]:
    """The parameters that are nothing by themselves: the originals of parametrizations, and the scales of codes."""
    found = {name for name in module._parameters if name in packed}
    if isinstance(module, parametrize.ParametrizationList):
        found |= {name for name in module._parameters if name.startswith("original")}
    if _has_scales(module) and (found or any(_narrow(tensor) for tensor in module._parameters.values())):
        found |= {name for name in module._parameters if "scale" in name}
    return found


def _packed(module: nn.Module) -> dict[str, Tensor]:
    """The weights that a module keeps in a packed form of others, parameters or buffers, beside their scales."""
    if not _has_scales(module):
        return {}
    held = {**module._parameters, **module._buffers}
    return {
        name: tensor
        for name, tensor in held.items()
        if tensor is not None and _PACKED.fullmatch(name) and not tensor.is_floating_point() and tensor.dim() > 1
    }


def _foreign(place: Place, leaf: str, tensor: Tensor, outputs: Container[int]) -> Use:
    """A packed weight of a checkpoint that was quantized by others: its shape is that in which it is stored."""
    experts = in_experts(place) or holds_experts(place)
    return Use(
        place=place,
        leaf=leaf,
        tensor=tensor,
        kind="moe" if experts and not reason_for(place, outputs) else "linear",
        shape=tuple(tensor.shape),
        left_alone=reason_for(place, outputs),
        blocked=_already(tensor),
    )


def _scripted(place: Place, outputs: Container[int]) -> Iterator[Use]:
    """The matrices of a compiled module, whose class no longer says what it does with them."""
    for leaf, tensor in place.module._parameters.items():
        use = None if tensor is None else _bare(place, leaf, tensor, outputs)
        if use is not None:
            yield dataclasses.replace(use, blocked=SCRIPTED)


def _use(place: Place, leaf: str, tensor: Tensor, outputs: Container[int]) -> Use | None:
    """What the module at `place` does with its parameter `leaf`; None for biases, norms, convolutions and the like."""
    module = place.module
    if _is_linear(module) and leaf == "weight":
        return _linear(place, leaf, tensor, outputs, transposed=_is_conv1d(module))
    if isinstance(module, nn.MultiheadAttention) and leaf in _ATTENTION_WEIGHTS:
        return _linear(place, leaf, tensor, outputs, transposed=False)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and leaf == "weight":
        return _embedding(place, leaf, tensor, module)
    return _bare(place, leaf, tensor, outputs)


def _linear(place: Place, leaf: str, tensor: Tensor, outputs: Container[int], *, transposed: bool) -> Use:
    """The weight of a layer that is linear by its class. A router among the experts is none of them."""
    reason = reason_for(place, outputs)
    return Use(
        place=place,
        leaf=leaf,
        tensor=tensor,
        kind="moe" if in_experts(place) and not reason else "linear",
        shape=_logical_shape(tensor, transposed),
        transposed=transposed,
        left_alone=reason,
        blocked=_obstacle(place.module, tensor),
    )


def _embedding(place: Place, leaf: str, tensor: Tensor, module: nn.Embedding | nn.EmbeddingBag) -> Use:
    """The table of an embedding, (V, D)."""
    blocked = _obstacle(module, tensor)
    if isinstance(module, nn.EmbeddingBag):
        blocked = blocked or "a quantized EmbeddingBag has no implementation"
    elif module.max_norm is not None:
        blocked = blocked or "its lookup writes into the table (max_norm)"
    return Use(
        place=place,
        leaf=leaf,
        tensor=tensor,
        kind="embedding",
        shape=_logical_shape(tensor, False),
        left_alone="embedding",
        blocked=blocked,
    )


def _bare(place: Place, leaf: str, tensor: Tensor, outputs: Container[int]) -> Use | None:
    """A parameter whose owner is no known layer: a weight of experts, or a matrix of unknown use."""
    module = place.module
    if nn.parameter.is_lazy(tensor) or not tensor.is_floating_point() or "bias" in leaf:
        return None
    if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
        return None
    shape = _logical_shape(tensor, False)
    if tensor.dim() == 3 and _may_be_stacked(place, leaf, tensor):
        return _stacked(place, leaf, tensor, outputs)
    if tensor.dim() != 2:
        return None
    return Use(
        place=place,
        leaf=leaf,
        tensor=tensor,
        kind="moe" if holds_experts(place) and not reason_for(place, outputs) else "linear",
        shape=shape,
        transposed=_stored_transposed(tensor),
        known=_spec(tensor) is not None,
        left_alone=reason_for(place, outputs),
        blocked="used by a recurrent layer, not by a linear one"
        if isinstance(module, _RECURRENT)
        else _obstacle(module, tensor),
    )


def _are_experts(place: Place, leaf: str, tensor: Tensor) -> bool:
    """Whether class or names say that a parameter is the weight of experts, or it was converted as such."""
    return holds_experts(place) or leaf in _EXPERT_WEIGHTS or _spec(tensor) is not None


def _may_be_stacked(place: Place, leaf: str, tensor: Tensor) -> bool:
    """Whether a parameter of three dimensions may be several matrices: a table for positions is one, (1, N, D)."""
    known = isinstance(place.module, (nn.modules.conv._ConvNd, nn.Bilinear))
    return _are_experts(place, leaf, tensor) or (not known and min(tensor.shape) > 1)


def _stacked(place: Place, leaf: str, tensor: Tensor, outputs: Container[int]) -> Use:
    """The weights of all experts in one tensor. Where their orientation is not known, only their use shows it."""
    module = place.module
    layout = layout_of(module, leaf, tensor) if _are_experts(place, leaf, tensor) else None
    shape = tuple(tensor.shape)
    return Use(
        place=place,
        leaf=leaf,
        tensor=tensor,
        kind="moe" if _are_experts(place, leaf, tensor) else "linear",
        shape=shape if layout is None else layout.logical(shape),
        transposed=layout is not None and layout.transposed,
        shards=1 if layout is None else layout.shards,
        interleaved=layout is not None and layout.interleaved,
        known=layout is not None,
        left_alone=reason_for(place, outputs),
        blocked=_obstacle(module, tensor, dimensions=3),
    )


def _obstacle(module: nn.Module, tensor: Tensor, dimensions: int = 2) -> str:
    """Why a linear layer's or an embedding's weight cannot be converted, judged by how it is stored."""
    if _spec(tensor) is not None:
        return ""
    if nn.parameter.is_lazy(tensor):
        return "not initialised yet; run the model once"
    library = type(tensor).__module__.partition(".")[0]
    if library in _QUANTIZERS:
        return f"{ALREADY_QUANTIZED} by {library} ({type(tensor).__name__})"
    if _narrow(tensor) and _has_scales(module):
        return _already(tensor)
    if tensor.dim() != dimensions:
        return f"it is stored with shape {tuple(tensor.shape)}, not as a matrix"
    if tensor.layout != torch.strided:
        return f"it is stored as {str(tensor.layout).removeprefix('torch.')}, not as a dense matrix"
    return "" if tensor.numel() else "it has no elements"


def _already(tensor: Tensor) -> str:
    """What to say of a weight that is stored beside its scales."""
    return f"{ALREADY_QUANTIZED}: it is stored as {str(tensor.dtype).removeprefix('torch.')} beside its scales"


def _narrow(tensor: Tensor | None) -> bool:
    """Whether a parameter is a matrix of codes of one byte or less."""
    return tensor is not None and tensor.dtype.itemsize == 1 and tensor.dim() > 1


def _computed(module: nn.Module) -> dict[str, tuple[str, Tensor, tuple[str, ...]]]:
    """The tensors of a module that are computed: by what, a parameter of the shape, all parameters used up."""
    found: dict[str, tuple[str, Tensor, tuple[str, ...]]] = {}
    chains = module._modules.get("parametrizations")
    if isinstance(chains, nn.ModuleDict):
        for name, chain in chains.items():
            originals = [p for key, p in chain._parameters.items() if key.startswith("original") and p is not None]
            if originals:
                found[name] = ("a parametrization", max(originals, key=Tensor.numel), ())
    for leaf, tensor in module._parameters.items():
        if leaf == "weight" or not leaf.endswith(("_v", "_orig")):
            continue
        base = leaf[:-2] if leaf.endswith("_v") else leaf.removesuffix("_orig")
        if tensor is None or base in module._parameters:
            continue
        if leaf.endswith("_v") and f"{base}_g" in module._parameters:
            found[base] = ("weight_norm", tensor, (leaf, f"{base}_g"))
        elif leaf.endswith("_orig"):
            found[base] = ("pruning or spectral_norm", tensor, (leaf,))
    return found


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is by its class a linear layer with one weight."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D (GPT-2): a linear layer that stores (K, N)."""
    # The name first: nn.Module takes long to say that `nf` is none of its attributes.
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def _logical_shape(tensor: Tensor, transposed: bool) -> tuple[int, ...]:
    """(N, K) of a matrix stored either way; the stored shape of anything else."""
    if nn.parameter.is_lazy(tensor):
        return (0, 0)
    shape = tuple(tensor.shape)
    return shape[::-1] if len(shape) == 2 and (transposed or _stored_transposed(tensor)) else shape


def _stored_transposed(tensor: Tensor) -> bool:
    spec = _spec(tensor)
    return spec is not None and bool(spec.transposed)


def _spec(tensor: Tensor) -> Any:
    """The `WeightSpec` of a converted weight, or None (told by a mark: its class stands on a higher floor)."""
    own: Any = torch_distributed.local_tensor(tensor) if torch_distributed.is_distributed(tensor) else tensor
    return own.spec if getattr(type(own), "__olq_fx_quantized__", False) else None


def _has_scales(module: nn.Module) -> bool:
    """Whether a module keeps scales of its weight, as the layers of quantized checkpoints do."""
    return any("scale" in name for name in (*module._parameters, *module._buffers))
