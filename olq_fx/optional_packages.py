"""Packages that are not needed by the library itself: imported on first use, with a clear message where missing.

API:
    optional_package(name, extra, purpose) -> ModuleType
    load_transformers() -> Any                             the package transformers, quiet
"""

import importlib
import logging
from types import ModuleType
from typing import Any

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


def load_transformers() -> Any:
    """The package transformers, its bars and notices off (torchao, which it loads, logs what it lacks without a GPU).

    Raises:
        MissingPackageError: it is not installed.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    library: Any = optional_package("transformers", "transformers", "a model in Hugging Face's layout")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library
