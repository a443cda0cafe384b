"""A checkpoint that is loaded part by part, and forgotten again: a model that is never in memory as a whole.

    parts = Parts(model_on_meta, source)
    parts.load(["model.layers.0.mlp.up_proj.weight", ...], bar)     these have their values
    parts.forget()                                                  and are on meta again

Names, shapes and dtypes of all of it are matched at the beginning, as `load_` does.
"""

from collections.abc import Sequence

import torch
from torch import nn

from olq_fx.errors import ConfigurationError
from olq_fx.formats import FORMATS
from olq_fx.loading import Job
from olq_fx.loading_slots import Filling, Slot
from olq_fx.loading_sources import opened
from olq_fx.progress import Bar
from olq_fx.weights import Pending, QuantizedWeight, become, without_values


class Parts:
    """A model on meta and the checkpoint that its values come from."""

    def __init__(self, model: nn.Module, source: object, device: torch.device | None = None) -> None:
        """Match the checkpoint with the model, tie what the checkpoint has once, and compute what it does not have.

        Args:
            model: on meta, planned.
            source: as for `load_`, but no iterator.
            device: where weights are converted; by default the CPU.

        Raises:
            LoadError: names, shapes or dtypes do not fit, or a file is damaged; the model is as it was.
            ConfigurationError: a weight comes quantized, and is not planned in the format that it has.
        """
        filling = Filling(device=torch.device("cpu") if device is None else device)
        self._job = Job(model, opened(source, model), filling, strict=True)
        self._job.check(moved=False)
        self._refuse_unplanned()
        with torch.inference_mode(False), torch.no_grad():
            again = self._job.has_twins
            self._job.end()
            if again:  # a place that was tied to another one is that one by now
                self._job = Job(model, opened(source, model), filling, strict=True)
                self._job.check(moved=False)
        self._there: list[tuple[Slot, torch.Tensor, Pending | None]] = []

    def _refuse_unplanned(self) -> None:
        """What comes quantized would take the place of a parameter that the files are laid out for."""
        slots = self._job.slots
        for name, format in self._job.taken:
            if format in FORMATS and (name not in slots or slots[name].weight is None):
                raise ConfigurationError(
                    f"'{name}' comes quantized in {format}, and the configuration leaves it alone: ask for that "
                    "format, or save what load_ makes of the checkpoint"
                )

    def count(self, names: Sequence[str]) -> int:
        """How many tensors are read for these parameters."""
        return self._job.count(self._slots(names)) or 0

    def load(self, names: Sequence[str], bar: Bar) -> None:
        """Read and convert these parameters and buffers.

        Raises:
            LoadError, ConversionError, InterruptedLoadError: as `load_`.
        """
        slots = self._slots(names)
        for slot in slots:
            weight = slot.weight
            self._there.append((slot, slot.tensor, None if weight is None else weight.pending))
        with torch.inference_mode(False), torch.no_grad():
            self._job.run(bar, slots)

    def forget(self) -> None:
        """Take the values of all that was loaded away."""
        with torch.inference_mode(False), torch.no_grad():
            for slot, tensor, pending in self._there:
                if isinstance(tensor, QuantizedWeight):
                    become(tensor, tensor.like(parts=without_values(tensor.spec, tensor.shape), pending=pending))
                else:
                    slot.install(tensor)
        self._there.clear()

    def _slots(self, names: Sequence[str]) -> dict[Slot, None]:
        return dict.fromkeys(self._job.slots[name] for name in names)
