"""The automatic cache: what was converted once is mapped the next time.

    cached_load(model, source, cache_dir, load, device=None, options=()) -> bool

An entry is a saved model under a name that is a digest of all that decides its bytes: the source, what every weight of
the model becomes, the version of olq_fx. Of a source it knows, for each file, name, size, time of change, header and
blocks of its content: a source that differs in one of these is converted anew. So is one that was merely copied.

Any number of processes may fill one cache: each writes a directory of its own, and who comes first puts it in place.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from olq_fx.errors import ConfigurationError, OlqFxWarning, PendingWeightError, SavedModelError, SaveError
from olq_fx.manifest import FORMAT_VERSION, is_saved
from olq_fx.restoring import restore_
from olq_fx.saved_contents import contents_of
from olq_fx.saving import save_beside_others
from olq_fx.tensor_files import digest_of
from olq_fx.version import __version__
from olq_fx.whole_directories import remove

_READ = (".safetensors", ".json")
"""The endings of the files of a source that decide what is loaded."""


def cached_load(
    model: nn.Module,
    source: object,
    cache_dir: str | os.PathLike[str],
    load: Callable[[], object],
    device: torch.device | None = None,
    options: Sequence[object] = (),
) -> bool:
    """Restore a planned model from a cache, or load it and fill the cache.

    Args:
        model: planned for quantization (`quantize_` on meta).
        source: the path of a file or directory.
        cache_dir: where entries are; it is made if it is not there.
        load: loads the source into `model`; called where the cache has nothing.
        device: where the model goes.
        options: what else decides the bytes, such as a dtype; anything with a `repr` that says all of it.

    Returns:
        Whether it was in the cache.

    Raises:
        ConfigurationError: the source is no path, so that nothing tells whether it has changed.
        Exception: whatever `load` raises.
    """
    key = key_of(model, source, options)
    entry = Path(os.path.realpath(os.fspath(cache_dir))) / key
    if is_saved(entry):
        try:
            restore_(model, entry, device)
        except SavedModelError as error:
            warnings.warn(f"an entry of the cache is made anew: {error}", OlqFxWarning, stacklevel=2)
            remove(entry)
        else:
            return True
    load()
    if key_of_source(source) != key.partition("-")[0]:
        warnings.warn(f"{source} was changed while it was loaded: it is not cached", OlqFxWarning, stacklevel=2)
        return False
    try:
        save_beside_others(model, entry, str(source))
    except (SaveError, PendingWeightError) as error:
        warnings.warn(f"the model is loaded, but not cached: {error}", OlqFxWarning, stacklevel=2)
    return False


def key_of(model: nn.Module, source: object, options: Sequence[object] = ()) -> str:
    """The name of an entry: a digest of the source, and one of everything else."""
    contents = contents_of(model)
    about = {
        "olq_fx": __version__,
        "format": FORMAT_VERSION,
        "torch": torch.__version__,
        "weights": [weight.to_dict() for weight in contents.weights],
        "tensors": [
            (entry.name, list(entry.shape), str(entry.dtype)) for group in contents.groups for entry in group.entries
        ],
        "options": [repr(option) for option in options],
    }
    rest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"{key_of_source(source)}-{rest[:32]}"


def key_of_source(source: object) -> str:
    """A digest that changes with a file or directory.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(source, (str, os.PathLike)) or not Path(source).exists():
        raise ConfigurationError(
            "cache_dir goes with a source that is a file or directory: of others nothing tells whether they changed"
        )
    path = Path(source)
    files = (
        sorted(path.iterdir()) if path.is_dir() else [path, *sorted(_named_by_index(path)), path.parent / "config.json"]
    )
    found = hashlib.sha256()
    for file in files:
        if file.name.endswith(_READ) and file.is_file():
            changed = file.stat().st_mtime_ns
            found.update(f"{file.name}\0{changed}\0{digest_of(file)}\n".encode())
    return found.hexdigest()[:32]


def _named_by_index(path: Path) -> list[Path]:
    """The files beside an index, any of which it may name."""
    return list(path.parent.glob("*.safetensors")) if path.name.endswith(".json") else []
