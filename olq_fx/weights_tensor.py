"""The type of a converted weight: a thin traceable tensor over the parts of a quantized matrix.

Only what every use needs is here: construction, the protocols of torch (flattening for the compiler, pickle,
deepcopy) and the two tables through which operations reach their implementations. `olq_fx.weights` says what can be
done with a converted weight and imports the modules that fill the tables.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from olq_fx import torch_private
from olq_fx.errors import PendingWeightError, UnsupportedError
from olq_fx.formats import Format, get_format
from olq_fx.kernels import expert_gate_ops, expert_ops, ops  # noqa: F401 (they register torch.ops.olq_fx)
from olq_fx.numerics import Parts
from olq_fx.weights_gathered import Gathered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """How a converted weight is stored and used: strings, an int and booleans only, so that equal layers are equal.

    Attributes:
        weight: name of the weight's format.
        activation: name of the format to which inputs are quantized, or "" for inputs in original precision.
        weight_rule, activation_rule: the scale rules of the two; `activation_rule` is "" without an activation format.
        transposed: whether the tensor reads (K, N) while its parts are (N, K), as a view `w.t()` or a Conv1D's weight.
        skip: how many leading rows of the parts are outside the tensor. Rows cut from within a block of 128 keep the
            whole block, since its scale belongs to all of it.
        rows_of_larger: whether this is a view of some rows of a larger weight.
        kernel: name of the kernel that must run its products, "" for the best there is.
        shards: of a stack of experts, how many matrices with scales of their own a weight consists of (gate and up).
        interleaved: whether the rows of these take turns in the tensor; in the parts they lie one after the other.
    """

    weight: str
    activation: str
    weight_rule: str
    activation_rule: str
    transposed: bool = False
    skip: int = 0
    rows_of_larger: bool = False
    kernel: str = ""
    shards: int = 1
    interleaved: bool = False

    @property
    def format(self) -> Format:
        """The weight's format."""
        return get_format(self.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """Says that a weight has no data yet.

    Attributes:
        path: the parameter's path, for messages.
        device: where the tensor claims to be (meta, or wherever `to_empty` has put it).
    """

    path: str
    device: torch.device


_KEEP = Pending("", torch.device("meta"))
"""Default of an argument: keep what is there."""

Handler = Callable[..., Any]

ATEN: dict[Any, Handler] = {}
"""What each aten operator does on a converted weight; filled by `implements`."""

FUNCTIONS: dict[Any, Handler] = {}
"""Functions of torch that must be caught above autograd and autocast; filled by `overrides`."""

METADATA_ONLY: set[Any] = set()
"""The operators of `ATEN` that need no data, and so are allowed on a pending weight."""


def implements(*operators: Any, metadata_only: bool = False) -> Callable[[Handler], Handler]:
    """Register the handler of aten operators: called with the operator and its arguments, below autograd."""

    def register(handler: Handler) -> Handler:
        for operator in operators:
            ATEN[operator] = handler
            if metadata_only:
                METADATA_ONLY.add(operator)
        return handler

    return register


def overrides(*functions: Any) -> Callable[[Handler], Handler]:
    """Register the handler of functions of torch: called with the function and its arguments, above autograd."""

    def register(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return register


class QuantizedWeight(Gathered, torch.Tensor):
    """A quantized matrix that stands where the original weight stood.

    Its shape, dtype, device and strides are the original's (so `weight.dtype` is what LoRA and autocast expect); the
    data are plain tensors.

    Attributes:
        codes, scale, coarse: the parts, laid out by rows of N whatever the shape says; `coarse` is None in one-level
            formats. See `olq_fx.numerics.part_specs`.
        spec: how they are stored and used.
        pending: set while there is no data.
        path: the parameter's path for messages, "" if unknown. No part of the metadata: repeated blocks stay equal.
        was_trainable: whether the original required a gradient; `dequantize_` gives that back.
        root: of an alias of a pending weight (`weight.data`), the weight itself, which is what data must reach.
        arrival: of a pending weight, the values that have arrived of it, if some have (`olq_fx.weights_arrival`).
    """

    __olq_fx_quantized__: ClassVar[bool] = True

    _table: ClassVar[dict[Any, Handler]] = ATEN
    """What aten operators do on weights of this kind."""

    codes: Tensor
    scale: Tensor
    coarse: Tensor | None
    spec: WeightSpec
    pending: Pending | None
    path: str
    was_trainable: bool
    root: "QuantizedWeight | None"
    arrival: Any = None

    @staticmethod
    def __new__(
        cls: type["QuantizedWeight"],
        parts: Sequence[Tensor],
        spec: WeightSpec | None = None,
        dtype: torch.dtype | None = None,
        size: Sequence[int] = (),
        stride: Sequence[int] | None = None,
        pending: Pending | None = None,
        *,
        requires_grad: bool = False,
    ) -> "QuantizedWeight":
        """Wrap `parts`; or make a parameter of a weight, as `type(parameter)(tensor, requires_grad=...)` does.

        Args:
            parts: (codes, scale) or (codes, scale, coarse) of an (N, K) matrix in `spec.format`.
            spec: how they are stored and used.
            dtype: the nominal dtype: the original's.
            size: (N, K); (K, N) if transposed; (K,) of a single row; with leading dimensions along which it is
                broadcast.
            stride: nominal strides; contiguous by default.
            pending: set if the parts have no data.
            requires_grad: of the parameter.

        Raises:
            UnsupportedError: a parameter is to be made of a tensor that is no converted weight with data.
        """
        if isinstance(parts, Tensor):
            return _parameter_of(parts, requires_grad)
        assert spec is not None
        device = parts[0].device if pending is None else pending.device
        self: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), strides=None if stride is None else tuple(stride), dtype=dtype, device=device
        )
        self.codes, self.scale = parts[0], parts[1]
        self.coarse = parts[2] if len(parts) == 3 else None
        self.spec = spec
        self.pending = pending
        self.path = "" if pending is None else pending.path
        self.was_trainable = False
        self.root = None
        return self

    @property
    def parts(self) -> Parts:
        """(codes, scale) or (codes, scale, coarse)."""
        return (self.codes, self.scale) if self.coarse is None else (self.codes, self.scale, self.coarse)

    @property
    def reduction_size(self) -> int:
        """K: the length of the axis along which groups and products run."""
        return int(self.shape[-2] if self.spec.transposed else self.shape[-1])

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts (`nbytes` would be those of the nominal dtype)."""
        return sum(part.nbytes for part in self.parts)

    @property
    def label(self) -> str:
        """The parameter's path in quotes, or what can be said without one."""
        return f"'{self.path}'" if self.path else f"a weight in {self.spec.weight}"

    def like(
        self,
        *,
        parts: Sequence[Tensor] | None = None,
        spec: WeightSpec | None = None,
        dtype: torch.dtype | None = None,
        size: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        pending: Pending | None = _KEEP,
    ) -> "QuantizedWeight":
        """A weight that differs from this one in what is given; a new size without strides is contiguous."""
        if size is None:
            size, stride = self.shape, self.stride() if stride is None else stride
        with self.ordinary():
            result = self._wrapped(
                self.parts if parts is None else parts,
                self.spec if spec is None else spec,
                self.dtype if dtype is None else dtype,
                size,
                stride,
                self.pending if pending is _KEEP else pending,
            )
        result.path, result.was_trainable = self.path, self.was_trainable
        return result

    def _wrapped(
        self,
        parts: Sequence[Tensor],
        spec: WeightSpec,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int] | None,
        pending: Pending | None,
    ) -> "QuantizedWeight":
        """A weight of this kind: the arguments are those of its class."""
        return QuantizedWeight(parts, spec, dtype, size, stride, pending)

    @property
    def unflattened(self) -> "type[QuantizedWeight]":
        """The class of weights of this kind that cannot be flattened."""
        return UnflattenedWeight

    def view_like(self, **changes: Any) -> "QuantizedWeight":
        """`like`, for views: data that are copied into one reach this weight, also while it is pending."""
        result = self.like(**changes)
        if self.pending is not None:
            result.root = root_of(self)
        return result

    def ordinary(self) -> contextlib.AbstractContextManager[object]:
        """What is made of an ordinary tensor in inference mode is one too, so that it can be refreshed outside."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            return torch.inference_mode(False)
        return contextlib.nullcontext()

    def ready(self) -> "QuantizedWeight":
        """This weight, if it has data.

        Raises:
            PendingWeightError: it has none; the message names it.
        """
        if self.pending is not None:
            arrival = root_of(self).arrival
            some = "" if arrival is None else f" ({arrival.missing} of {self.numel()} values are missing)"
            raise PendingWeightError(
                f"{self.label} is planned for {self.spec.weight} but has no data yet{some}: load it with "
                "load_state_dict or copy_ before it is used"
            )
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of this shape.

        Args:
            dtype: of the result; by default the nominal one.
        """
        self.ready()
        with torch._C.DisableTorchFunctionSubclass():
            operator = torch.ops.olq_fx.dequantize.default
            matrix: Tensor = operator(self.parts, self.spec.weight, self.reduction_size, dtype or self.dtype)
            if self.spec.skip:
                matrix = matrix[self.spec.skip :]
            if self.dim() == 1:
                return matrix[0]
            return (matrix.t() if self.spec.transposed else matrix).expand(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[WeightSpec, torch.dtype, Pending | None]]:
        """The names of the parts, and metadata that is equal for equal layers."""
        names = ["codes", "scale"] if self.coarse is None else ["codes", "scale", "coarse"]
        return names, (self.spec, self.dtype, self.pending)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        metadata: tuple[WeightSpec, torch.dtype, Pending | None],
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> "QuantizedWeight":
        """The inverse of `__tensor_flatten__`."""
        spec, dtype, pending = metadata
        return QuantizedWeight(list(inner.values()), spec, dtype, outer_size, outer_stride, pending)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache distinguishes weights by: everything but the data."""
        parts = [(tuple(part.shape), str(part.dtype), str(part.device)) for part in self.parts]
        return repr((self.__tensor_flatten__()[1], tuple(self.shape), self.stride(), self.requires_grad, parts))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it is, without reading data."""
        about = f"{self.spec.weight}, activation {self.spec.activation or 'original'}, shape {tuple(self.shape)}"
        state = ", pending" if self.pending is not None else ""
        return f"{type(self).__name__}({about}, dtype {self.dtype}, device {self.device}{state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedWeight":
        """A weight over copies of the parts; a part that several weights share is shared by their copies too."""
        if id(self) in memo:
            known: QuantizedWeight = memo[id(self)]
            return known
        result = self.like(parts=[copy.deepcopy(part, memo) for part in self.parts])
        memo[id(self)] = _with_attributes(result, self.requires_grad, _extra_attributes(self, memo))
        return result

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle plain tensors, float8 ones as bytes (plain pickle of float8 fails in some versions of torch)."""
        parts = tuple(as_bytes(part) for part in self.parts)
        arguments = (self.spec, self.dtype, tuple(self.shape), self.stride(), self.pending)
        extra = _extra_attributes(self, {})
        return _rebuild, (parts, *arguments, self.requires_grad, self.path, self.was_trainable, extra, type(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dynamo records functions as they are; they are caught when the graph is run or traced further."""
        if not torch.compiler.is_dynamo_compiling():
            handler = FUNCTIONS.get(func)
            if handler is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    return handler(func, *args, **(kwargs or {}))
            if not all(issubclass(type_, torch.Tensor) for type_ in types):
                return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look the operator up; one without an entry is taken apart if it is composite, or refused by name."""
        kwargs = kwargs or {}
        # Operators of other libraries are known by their names.
        handler = cls._table.get(func) or cls._table.get(str(func))
        if handler is None:
            decompose = getattr(func, "decompose", None)
            result = NotImplemented if decompose is None else decompose(*args, **kwargs)
            if result is NotImplemented:
                raise unsupported(func, args, kwargs)
            return result
        if func not in METADATA_ONLY:
            for argument in args:
                if isinstance(argument, QuantizedWeight):
                    argument.ready()
        return handler(func, *args, **kwargs)


# A converted weight that runs by itself, in a frame that Dynamo has given up, is nothing for Dynamo to compile.
torch_private.hide_from_dynamo(QuantizedWeight.__torch_function__)
torch_private.hide_from_dynamo(QuantizedWeight.__torch_dispatch__)


class UnflattenedWeight(QuantizedWeight):
    """What `Module.to` and the like are given, who keep it only for the time of `parameter.data = ...`.

    For a tensor that can be flattened they would exchange the content of two tensors instead, which torch refuses where
    somebody holds a weak reference to the parameter; a compiled training step does.
    """

    @property
    def __tensor_flatten__(self) -> Any:
        """Not there."""
        raise AttributeError("__tensor_flatten__")


def _parameter_of(tensor: Tensor, requires_grad: bool) -> QuantizedWeight:
    """A parameter around a weight, for libraries that move weights and make the type of a parameter anew."""
    if isinstance(tensor, QuantizedWeight) and tensor.pending is None:
        parameter: Any = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return parameter  # type: ignore[no-any-return]
    what = tensor.label if isinstance(tensor, QuantizedWeight) else f"a plain tensor of shape {tuple(tensor.shape)}"
    raise UnsupportedError(
        f"no quantized parameter can be made of {what}: whatever puts the data of weights aside and sets them again by "
        "one name (the offload hooks of accelerate) would take its parts apart; keep the model on one device, or move "
        "whole modules (cpu_offload_with_hook, diffusers' group offloading). copy_ and load_state_dict give it values"
    )


def root_of(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight that data must reach when they are copied into `weight`: of `parameter.data`, the parameter."""
    return weight if isinstance(weight, torch.nn.Parameter) or weight.root is None else weight.root


def unsupported(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> UnsupportedError:
    """The error for an operator that has no meaning on the converted weights among its arguments."""
    weights = _weights_in((*args, *kwargs.values()))
    names = ", ".join(weight.label for weight in weights) or "a converted weight"
    if _written_by(func, args):
        advice = (
            "its values cannot be changed in place: copy_ or load_state_dict give it new ones, "
            "olq_fx.dequantize_(model) gives the original precision back"
        )
    else:
        advice = (
            "weight.dequantize() gives its values as a plain tensor, olq_fx.dequantize_(model) undoes the conversion"
        )
    return UnsupportedError(f"{func} is not defined for {names}, which is quantized; {advice}")


def _weights_in(values: Sequence[Any]) -> list[QuantizedWeight]:
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in flat if isinstance(item, QuantizedWeight)]


def _written_by(func: Any, args: Sequence[Any]) -> list[QuantizedWeight]:
    """The converted weights that an operator would write to."""
    schema = getattr(func, "_schema", None)
    named = zip(args, schema.arguments if schema is not None else (), strict=False)
    return _weights_in([value for value, argument in named if argument.alias_info and argument.alias_info.is_write])


def as_bytes(part: Tensor) -> tuple[Tensor, torch.dtype]:
    """A part as plain pickle can take it, and its dtype."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part, part.dtype


OWN_ATTRIBUTES = frozenset({"codes", "scale", "coarse", "spec", "pending", "path", "was_trainable", "root", "ids"})
"""The attributes that this file sets on a weight."""


def _extra_attributes(weight: QuantizedWeight, memo: dict[int, Any]) -> dict[str, Any]:
    """What others have set on the tensor: nn.Parameter's mark, tags of tensor parallelism, hooks of optimizers."""
    return {k: copy.deepcopy(v, memo) for k, v in weight.__dict__.items() if k not in OWN_ATTRIBUTES}


def _with_attributes(weight: QuantizedWeight, requires_grad: bool, extra: dict[str, Any]) -> QuantizedWeight:
    weight.requires_grad_(requires_grad)
    weight.__dict__.update(extra)
    return weight


def _rebuild(
    parts: Sequence[tuple[Tensor, torch.dtype]],
    spec: WeightSpec,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    pending: Pending | None,
    requires_grad: bool,
    path: str,
    was_trainable: bool,
    extra: dict[str, Any],
    kind: type[QuantizedWeight],
) -> QuantizedWeight:
    """What pickle calls."""
    weight = kind([part.view(kept) for part, kept in parts], spec, dtype, size, stride, pending)
    weight.path, weight.was_trainable = path, was_trainable
    return _with_attributes(weight, requires_grad, extra)
