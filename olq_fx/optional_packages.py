"""Packages that are not needed by the library itself: imported on first use, with a clear message where missing."""

import importlib
from types import ModuleType

from olq_fx.errors import MissingPackageError


def optional_package(name: str, extra: str, purpose: str) -> ModuleType:
    """Import a package (or one of its modules).

    Args:
        name: of the module.
        extra: the extra of olq-fx that brings it.
        purpose: what needs it, as the beginning of a sentence.

    Raises:
        MissingPackageError: it, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{purpose} needs the package {error.name}, which is not installed: pip install 'olq-fx[{extra}]'"
        ) from None
