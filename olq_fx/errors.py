"""Every error that olq_fx raises on purpose, one class a mistake.

Each also derives from the built-in exception that a caller would expect (`ValueError`, `TypeError`, `RuntimeError`),
so that code which knows nothing of olq_fx handles them too.
"""

import difflib
import reprlib
from collections.abc import Iterable


class OlqFxError(Exception):
    """Base of all errors of olq_fx."""


class ConfigurationError(OlqFxError, ValueError):
    """A configuration says something that has no meaning: an unknown name, a contradiction, a malformed pattern."""


class ConfigurationTypeError(OlqFxError, TypeError):
    """A configuration, or a value in it, is of a type that is never accepted."""


class PlanError(OlqFxError, ValueError):
    """Configuration and model do not fit: a pattern matches nothing, a layer is claimed twice, nothing is quantized."""


class ConversionError(OlqFxError, ValueError):
    """A weight cannot be converted (non-finite values, an unsupported dtype); the model is as it was."""


class PendingWeightError(OlqFxError, RuntimeError):
    """A planned weight has no data yet (it is on the meta device) and was used."""


class InterruptedConversionError(OlqFxError, RuntimeError):
    """A conversion stopped half way; every layer is wholly original or wholly converted and the message lists which."""


class LoadError(OlqFxError, ValueError):
    """A source cannot be loaded into a model: names, shapes or dtypes do not fit, a file is damaged or never read."""


class InterruptedLoadError(OlqFxError, RuntimeError):
    """Loading stopped half way; every weight has its values or is pending, and the message lists which are."""


class BackendError(OlqFxError, RuntimeError):
    """The inner compiler failed, or a converted weight was replaced by something the compiled code cannot use."""


class UnsupportedError(OlqFxError, NotImplementedError):
    """An operation on a converted weight that has no meaning, named with what to do instead."""


class SaveError(OlqFxError, OSError):
    """A model cannot be saved: the disk is full, the place is taken, or it holds what no file can."""


class SavedModelError(OlqFxError, ValueError):
    """A saved model cannot be taken: it is damaged, stale, not of olq_fx, or does not fit; the message says why."""


class ComparisonError(OlqFxError, ValueError):
    """Two runs cannot be compared: their outputs or steps differ in number, name or shape."""


class MissingPackageError(OlqFxError, ImportError):
    """An optional package is needed and not installed; the message says which extra brings it."""


class OlqFxWarning(UserWarning):
    """A questionable but harmless request, such as an unmatched pattern with `strict=False`."""


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 120
_SHOWN.maxlevel = 4


def shown(value: object) -> str:
    """What a user gave, for an error message: its `repr`, cut where it is long, deep or contains itself.

    >>> shown([1, "a"]), len(shown("x" * 10**6)) < 200
    ("[1, 'a']", True)
    """
    try:
        return _SHOWN.repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return f"<{type(value).__name__}>"


def nearest(name: str, valid: Iterable[str], count: int = 3) -> str:
    """The end of an error message: the valid names that look most like `name`, or all of them when few.

    >>> nearest("fp8_per_blok", ["fp8_per_block", "int8"])
    "did you mean 'fp8_per_block'?"
    """
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    if len(names) <= 24:
        return "valid: " + ", ".join(names)
    return f"none of the {len(names)} valid names is similar"
