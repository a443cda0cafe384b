"""Which files of a directory that is being written are finished, so that an interrupted run can go on.

journal = Journal(directory, key)      whatever another key has left there is removed
journal.finished("model-00001-of-00002.safetensors")      (file, checksums) if every byte is as it was written
journal.add(file, checksums)
journal.close()                        the directory is finished: nothing tells of the journal any more
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olq_fx.errors import SavedModelError, SaveError
from olq_fx.manifest import SavedFile
from olq_fx.tensor_files import checksum, layout_of, mapped
from olq_fx.whole_directories import write_text

_JOURNAL = "olq_fx_unfinished.json"


class Journal:
    """What is known of the finished files.

    Attributes:
        replaced: whether something else was left in the directory, which is removed.
    """

    def __init__(self, directory: Path, key: str) -> None:
        """Read what is there.

        Args:
            directory: locked by this process.
            key: of all that decides the bytes of the files.

        Raises:
            SaveError: what another run has left cannot be removed, or the disk is full, say.
        """
        self._directory, self._key = directory, key
        self._files: dict[str, Any] = {}
        found = self._read()
        if found is not None and found.get("key") == key and isinstance(found.get("files"), dict):
            self._files = found["files"]
            self.replaced = False
            return
        self.replaced = _emptied(directory)
        self._save()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self._directory / _JOURNAL).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def finished(self, name: str) -> tuple[SavedFile, dict[str, int]] | None:
        """A file that is there as it was written, by the checksum of each of its tensors; else None."""
        about: Any = self._files.get(name)
        path = self._directory / name
        try:
            file, checksums = SavedFile(**about["file"]), dict(about["checksums"])
            if file.name != name or SavedFile.of(path) != file or set(layout_of(path)) != set(checksums):
                return None
            tensors = mapped(path, checksums)
        except (TypeError, KeyError, ValueError, OSError, SavedModelError):
            return None
        same = all(checksum(tensor) == checksums[name] for name, tensor in tensors.items())
        return (file, checksums) if same else None

    def add(self, file: SavedFile, checksums: Mapping[str, int]) -> None:
        """Note that a file is finished.

        Raises:
            SaveError: the disk is full, say.
        """
        self._files[file.name] = {"file": dataclasses.asdict(file), "checksums": dict(checksums)}
        self._save()

    def _save(self) -> None:
        """Write the journal: the old one is there until the new one is."""
        fresh = self._directory / f"{_JOURNAL}.new"
        write_text(fresh, json.dumps({"key": self._key, "files": self._files}))
        try:
            os.replace(fresh, self._directory / _JOURNAL)
        except OSError as error:
            raise SaveError(f"{self._directory / _JOURNAL} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove the journal."""
        (self._directory / _JOURNAL).unlink(missing_ok=True)


def _emptied(directory: Path) -> bool:
    """Remove what is in a directory; whether there was anything."""
    entries = list(directory.iterdir())
    try:
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise SaveError(f"{directory}: what another run has left cannot be removed: {error.strerror}") from error
    return bool(entries)
