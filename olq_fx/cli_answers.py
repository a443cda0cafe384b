"""What a command says and with which exit code it ends.

API:
    Answer(data, text, code=0)
    DONE, BOUND, USAGE, MISSING, FAILED, INTERRUPTED
    code_of(error) -> int
    paragraph(error) -> str
    say(text, stream), say_json(data)
"""

import dataclasses
import json
import sys
from typing import Any, TextIO

from olq_fx.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    MissingPackageError,
    OlqFxError,
    PlanError,
)

DONE, BOUND, USAGE, MISSING, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 130

EXIT_CODES = {
    DONE: "done",
    BOUND: "a bound of --fail-under or --fail-over does not hold",
    USAGE: "an option, a configuration or a path has no meaning, or the plan does not fit the model",
    MISSING: "an optional package is needed and not installed",
    FAILED: "the model could not be built, loaded, converted or run, or a kernel is at fault or has no tile that runs",
    INTERRUPTED: "interrupted",
}
"""Every exit code with its meaning."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a command found: as JSON values, as text, and its exit code."""

    data: Any
    text: str
    code: int = DONE


class ModelError(OlqFxError, RuntimeError):
    """A model cannot be built, loaded or run."""


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    if isinstance(error, MissingPackageError):
        return MISSING
    if isinstance(error, (ConfigurationError, ConfigurationTypeError, PlanError)):
        return USAGE
    return FAILED


def paragraph(error: BaseException) -> str:
    """An error as one paragraph; one that is not ours with its type."""
    text = " ".join(str(error).split())
    if isinstance(error, OlqFxError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text to a stream, characters that it cannot hold as escapes."""
    stream = sys.stdout if stream is None else stream
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def say_json(data: Any) -> None:
    """Print strict JSON."""
    say(json.dumps(data, allow_nan=False, indent=2))
