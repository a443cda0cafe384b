"""Saved models as a source of `load_`, and its cache of them.

restored(model, directory, device) -> LoadReport
from_cache(model, source, cache_dir, load, device, options) -> LoadReport
"""

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from olq_fx.cached_models import cached_load
from olq_fx.conversion import converted_weights_of
from olq_fx.loading_report import LoadReport
from olq_fx.loading_slots import bare_buffers, slots_of
from olq_fx.restoring import restore_


def restored(model: nn.Module, directory: str | os.PathLike[str], device: torch.device) -> LoadReport:
    """Map a saved model back.

    Raises:
        SavedModelError: it is damaged, stale, or of another model.
    """
    begun = time.perf_counter()
    restore_(model, directory, device)
    return _report(model, f"{os.fspath(directory)}, saved by olq_fx", begun)


def from_cache(
    model: nn.Module,
    source: object,
    cache_dir: str | os.PathLike[str],
    load: Callable[[], LoadReport],
    device: torch.device,
    options: Sequence[object],
) -> LoadReport:
    """Map what a cache has of a source, or load it and fill the cache.

    Raises:
        ConfigurationError: nothing tells whether such a source has changed.
    """
    begun = time.perf_counter()
    reports: list[LoadReport] = []
    cached_load(model, source, cache_dir, lambda: reports.append(load()), device, options)
    return reports[0] if reports else _report(model, f"{source}, from the cache {os.fspath(cache_dir)}", begun)


def _report(model: nn.Module, label: str, begun: float) -> LoadReport:
    converted = converted_weights_of(model)
    others = {slot.name: slot for slot in slots_of(model).values() if slot.weight is None}
    stored = sum(weight.stored_bytes for weight in converted.values())
    return LoadReport(
        source=label,
        converted=tuple(converted),
        loaded=tuple(others),
        recomputed=(),
        taken=(),
        left_out=(),
        missing=tuple(bare_buffers(model)),
        unexpected=(),
        bytes_read=stored + sum(slot.tensor.nbytes for slot in others.values()),
        seconds=time.perf_counter() - begun,
    )
