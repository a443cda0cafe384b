"""`load_`: a checkpoint into a model in one stream, every weight converted when its last value is there.

All names, shapes and dtypes are matched first, by the headers of the files; whatever does not fit is refused while the
model is as it was. Then the tensors are read in the order of the files: one is converted on the device while another
thread brings the next one into memory, and none is held any longer.
"""

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from olq_fx import loading_transformers
from olq_fx.conversion import note
from olq_fx.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    InterruptedLoadError,
    LoadError,
    OlqFxError,
    shown,
)
from olq_fx.loading_foreign import regrouped
from olq_fx.loading_names import Naming
from olq_fx.loading_plan import Planner, Step, listed
from olq_fx.loading_report import LoadReport
from olq_fx.loading_saved import from_cache, restored
from olq_fx.loading_slots import Filling, Slot, bare_buffers, obstacle, slots_of
from olq_fx.loading_sources import Source, in_memory, opened
from olq_fx.manifest import is_saved
from olq_fx.progress import Bar, progress_bar
from olq_fx.weights import FLOATING

_SHOWN = 24


def load_(
    model: nn.Module,
    source: object,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    strict: bool = True,
    progress: bool = True,
    offload: torch.device | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> LoadReport:
    """Load a checkpoint into `model`, and convert the weights that `quantize_` has planned as they arrive.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        olq_fx.quantize_(model, "fp8_per_block")
        olq_fx.load_(model, "path/of/the/checkpoint")

    Memory never exceeds the loaded model by more than its largest weight in float32 and 64 MiB. A model that is not
    quantized is loaded as it is; the weights of one that is converted get new values in the storage that they have. The
    values of a weight are converted from the dtype that the source has. Of transformers' models the names in
    checkpoints are converted by transformers' own rules. Hooks of `load_state_dict` are not run.

    Args:
        model: any module, usually built under `torch.device("meta")`.
        source: the path of a safetensors file, of an index of such files, or of a directory with either; a state
            dict; or an iterator of (name, tensor), whose faults are found only when they come. Pickled files are
            refused. The files that an index names are in its directory or below, or linked there. A directory that
            `save` has written is mapped back, bit by bit, into a model that needs no configuration.
        device: where what has no storage yet gets it, and where weights are converted; by default where the rest of
            the model has its storage, or the CPU. What has storage keeps it.
        dtype: of floating parameters and buffers from then on; by default each keeps its own, whatever the source has.
        strict: whether missing and unexpected names are errors, or listed in the report. Names that a model of
            transformers says it does without are neither.
        progress: show a bar, on a terminal.
        offload: "cpu" for models larger than the device: converted weights are moved there from the device, into
            pinned memory if that is a GPU.
        cache_dir: where what was converted is kept, and found the next time; for sources that are files. A source that
            was changed, another configuration and another version are loaded anew.

    Returns:
        What was loaded and converted.

    Raises:
        LoadError: names, shapes or dtypes do not fit, or a file is damaged, pickled or not there; the model is as it
            was. Of an iterator: the tensors before are loaded.
        SavedModelError: a directory of `save` is damaged, stale, or of another model; the model is as it was.
        ConversionError: a weight has NaN or Inf; the message says which, and how far loading was.
        InterruptedLoadError: an error on the way. Every weight has its values or is pending; calling again goes on.
        ConfigurationError, ConfigurationTypeError: an argument has no meaning.
    """
    root = _module(model)
    filling = _options(root, device, dtype, offload)
    target = filling.device if filling.offload is None else filling.offload
    if isinstance(source, (str, os.PathLike)) and is_saved(source):
        if dtype is not None:
            raise ConfigurationError(f"dtype: {source} is a saved model, which has the dtypes that it was saved with")
        return restored(root, source, target)
    load = functools.partial(_loaded, root, source, filling, strict=strict, progress=progress, moved=device is not None)
    return load() if cache_dir is None else from_cache(root, source, cache_dir, load, target, (dtype,))


def _loaded(
    model: nn.Module, source: object, filling: Filling, *, strict: bool, progress: bool, moved: bool
) -> LoadReport:
    """Load a checkpoint."""
    begun = time.perf_counter()
    job = Job(model, opened(source, model), filling, strict=strict)
    job.check(moved=moved)
    with progress_bar(progress) as bar, torch.inference_mode(False), torch.no_grad():
        bar.start("loading", job.count())
        job.run(bar)
    return job.report(time.perf_counter() - begun)


class Job:
    """One call of `load_`, or of what loads a model part by part (`olq_fx.loading_parts`).

    Attributes:
        slots: the places of the model, by their names.
        filling: how values get there.
        taken: names of weights that come quantized, each with its format, or with what it is dequantized from.
    """

    def __init__(self, model: nn.Module, source: Source, filling: Filling, *, strict: bool) -> None:
        """Match all names, shapes and dtypes; nothing is refused and nothing read before `check` and `run`."""
        self._source, self._strict = source, strict
        self.slots, self.filling = slots_of(model), filling
        naming = loading_transformers.naming_of(model, self.slots, source.tensors)
        self._naming = Naming(self.slots) if naming is None else naming
        found = regrouped(source, model, self.slots, self._naming)
        self.taken, self._left_out = found.taken, found.left_out
        source = dataclasses.replace(source, tensors=found.tensors)
        self._source = source
        self._planner = Planner(self.slots, self._naming)
        self._bare = list(dict.fromkeys(bare_buffers(model).values()))
        self._steps = [step for tensor in source.tensors for step in self._planner.add(tensor)]
        if source.arriving is None:
            self._steps += self._planner.finish()
        self._recomputed = self._naming.recompute(self._without_values() if self._bare or self._steps else [])
        self._filled: dict[Slot, None] = {}
        self._done = self._read = 0

    def _without_values(self) -> list[Slot]:
        """The buffers on meta that the source does not bring."""
        if self._source.arriving is not None:
            return self._bare
        missed = [slot for slot in self._untouched() if slot.is_buffer]
        return [*self._bare, *missed]

    def _untouched(self) -> list[Slot]:
        """Places without values that the source does not bring, and that are not called missing."""
        missing = self._planner.missing()
        return [
            slot
            for slot in dict.fromkeys(self.slots.values())
            if not slot.has_storage
            and slot not in missing
            and slot not in self._planner.twins
            and slot not in self._planner.refused
            and not self._planner.complete(slot)
        ]

    def check(self, *, moved: bool) -> None:
        """Refuse what does not fit, while the model is as it was.

        Args:
            moved: whether a device was asked for, on which everything must be then.

        Raises:
            LoadError: with all that was found.
        """
        found = list(self._planner.problems)
        for slot in dict.fromkeys(self.slots.values()):
            if reason := obstacle(slot, self.filling, moved=moved):
                found.append(f"'{slot.name}': {reason}")
        if self._strict:
            if self._planner.unexpected:
                found.append(f"the model has no place for {self._planner.nowhere()}")
            if self._source.arriving is None:
                found += self._absent()
            found += [self._bare_text(slot) for slot in self._bare if slot not in self._recomputed]
        if found:
            text = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            raise LoadError(f"{self._source.label} cannot be loaded: {text}. Nothing was loaded")

    def _absent(self) -> list[str]:
        """What no tensor of the source brings."""
        missing = list(self._planner.missing().values())
        found = [f"missing are {listed(missing[:_SHOWN], len(missing))}"] if missing else []
        return found + [self._bare_text(slot) for slot in self._untouched() if slot not in self._recomputed]

    @staticmethod
    def _bare_text(slot: Slot) -> str:
        return (
            f"'{slot.name}' is on meta, and its values are neither in the source nor computed by the model's own code: "
            "build it with values (with torch.device('cpu') around it)"
        )

    @property
    def has_twins(self) -> bool:
        """Whether places take the values of others, which are tied to them but another parameter."""
        return bool(self._planner.twins)

    def count(self, only: Collection[Slot] | None = None) -> int | None:
        """How many steps there are, or how many for these places; None where that is not known."""
        return None if self._source.arriving is not None else len(self._steps_for(only))

    def _steps_for(self, only: Collection[Slot] | None) -> list[Step]:
        return self._steps if only is None else [step for step in self._steps if any(s in only for s in step.slots)]

    def run(self, bar: Bar, only: Collection[Slot] | None = None) -> None:
        """Read, convert, and say how far it went if that stops.

        Args:
            bar: goes on with each step.
            only: the places that are filled; None for all, and for what needs no source too.
        """
        self._forget_interrupted()
        known = self._source.arriving is None
        try:
            for step in self._ahead(self._steps_for(only)) if known else self._arriving():
                self._do(step, only)
                bar.advance()
            if only is None:
                self.end()
        except OlqFxError as error:
            raise type(error)(f"{error}; {self._how_far()}") from error
        except Exception as error:
            raise InterruptedLoadError(f"{type(error).__name__}: {error}; {self._how_far()}") from error
        except BaseException as error:
            note(error, self._how_far())
            raise

    def _forget_interrupted(self) -> None:
        """Pieces that an interrupted call has left are read again with all others of their weight."""
        for slot in dict.fromkeys(self.slots.values()):
            weight = slot.weight
            all_come = self._planner.complete(slot) or (self._source.arriving is not None and self._strict)
            if weight is not None and weight.pending is not None and all_come:
                weight.arrival = None

    def _ahead(self, steps: Sequence[Step]) -> Iterator[Step]:
        """These steps, each once its tensors are in memory; those of the next are brought there meanwhile."""
        with concurrent.futures.ThreadPoolExecutor(1, "olq_fx.load_") as pool:
            waiting = [pool.submit(_touch, step) for step in steps[:1]]
            for number, step in enumerate(steps, 1):
                waiting.pop().result()
                waiting += [pool.submit(_touch, following) for following in steps[number : number + 1]]
                yield step

    def _arriving(self) -> Iterator[Step]:
        """The steps of what comes one by one, each checked when it is there."""
        assert self._source.arriving is not None
        for item in self._source.arriving:
            if not isinstance(item, Sequence) or len(item) != 2:
                raise LoadError(f"{self._source.label} gives {shown(type(item))}: a name and a tensor are needed")
            steps = self._planner.add(in_memory(*item))
            if self._planner.problems:
                raise LoadError("; ".join(self._planner.problems))
            if self._planner.unexpected and self._strict:
                raise LoadError(f"the model has no place for {self._planner.nowhere()}")
            yield from steps
        yield from self._planner.finish()
        found = [*self._planner.problems, *(self._absent() if self._strict else ())]
        if found:
            raise LoadError("; ".join(found))

    def _do(self, step: Step, only: Collection[Slot] | None) -> None:
        try:
            for delivery in step.deliver([tensor.read() for tensor in step.inputs]):
                if only is not None and delivery.slot not in only:
                    continue
                if not step.again:
                    self.filling.put(delivery.slot, delivery.place, delivery.values)
                elif self.filling.differs(delivery.slot, delivery.values):
                    raise LoadError(
                        f"'{delivery.slot.name}' has other values, and is the same parameter: the model ties them"
                    )
                self._filled[delivery.slot] = None
        except OlqFxError as error:
            raise type(error)(
                f"{listed([tensor.label for tensor in step.inputs], len(step.inputs))}: {error}"
            ) from error
        for tensor in step.inputs:
            tensor.release()
            self._read += tensor.nbytes
        self._done += 1

    def end(self) -> None:
        """What needs no source: ties, and buffers that the model computes."""
        for slot, twin in self._planner.twins.items():
            slot.install(twin.tensor)
        for slot, values in self._recomputed.items():
            slot.install(values.to(self.filling.device))

    def _how_far(self) -> str:
        without = [f"'{slot.name}'" for slot in dict.fromkeys(self.slots.values()) if not slot.has_storage]
        rest = f"without values are {listed(without, len(without))}" if without else "nothing is without values"
        return (
            f"loading stopped after {self._done} tensors: every parameter has all its old values, all its new ones or "
            f"none, and {rest}; load_ again goes on"
        )

    def report(self, seconds: float) -> LoadReport:
        """What was done."""
        filled = [slot for slot in self._filled if slot not in self._planner.missing()]
        absent = [*self._planner.missing(), *(slot for slot in self._bare if slot not in self._recomputed)]
        return LoadReport(
            source=self._source.label,
            converted=tuple(slot.name for slot in filled if slot.weight is not None),
            loaded=tuple(slot.name for slot in filled if slot.weight is None),
            recomputed=tuple(slot.name for slot in self._recomputed),
            taken=self.taken,
            left_out=self._left_out,
            missing=tuple(slot.name for slot in absent),
            unexpected=tuple(tensor.name for tensor in self._planner.unexpected),
            bytes_read=self._read,
            seconds=seconds,
        )


def _touch(step: Step) -> None:
    for tensor in step.inputs:
        tensor.touch()


def _module(model: object) -> nn.Module:
    """The module itself, or what torch.compile has wrapped."""
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    original = getattr(model, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else model


def _options(
    model: nn.Module,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    offload: torch.device | str | None,
) -> Filling:
    """How values get to their places.

    Raises:
        ConfigurationError: a device or dtype that cannot be had.
    """
    if dtype is not None and dtype not in FLOATING:
        raise ConfigurationError(f"dtype: {shown(dtype)} is none of {', '.join(map(str, FLOATING))}")
    where = _usable("device", device) if device is not None else _usual_device(slots_of(model).values())
    return Filling(device=where, dtype=dtype, offload=None if offload is None else _usable("offload", offload))


def _usable(argument: str, device: torch.device | str) -> torch.device:
    """A device, once a tensor has been there."""
    try:
        found = torch.empty(1, device=device).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigurationError(f"{argument}: nothing can be put on {shown(device)}: {reason}") from error
    if found.type == "meta":
        raise ConfigurationError(f"{argument}: what is put on 'meta' loses its data")
    return found


def _usual_device(slots: Iterable[Slot]) -> torch.device:
    """Where a model has its storage, or will have it."""
    places = {slot.tensor.device for slot in slots}
    found = sorted({torch.empty(0, device=place).device for place in places if place.type != "meta"}, key=str)
    if len(found) > 1 and len(places) > len(found):
        raise ConfigurationError(
            f"device: the model has storage on {' and '.join(map(str, found))}: say where the rest goes"
        )
    return found[0] if found else torch.device("cpu")
