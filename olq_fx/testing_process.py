"""A second Python process that runs functions: for what must not happen in this one.

Triton decides at import whether kernels are compiled or interpreted, its compiler may crash, and some settings of torch
hold for a whole process. Functions travel by the name or the file of their module, tensors by their bytes.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_SERVE = "import sys; from olq_fx.testing_process import serve; serve(int(sys.argv[1]))"


class ProcessDied(RuntimeError):  # noqa: N818
    """The process ended or was ended while it ran a function; the next call starts another one."""


class PythonProcess:
    """Runs functions in a Python process of its own, which starts with the first call.

    Args:
        environment: variables that it has besides those of this process.
        timeout: seconds that one call may take.
        setup: a function without arguments that it runs first.

    Its module search path is that of this process. A context manager: the process ends with it. Calls of several
    threads wait for each other.
    """

    def __init__(  # noqa: D107
        self,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
        setup: Callable[[], None] | None = None,
    ) -> None:
        self._environment = dict(environment or {})
        self._timeout = timeout
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._aborted = False

    def __enter__(self) -> "Self":
        """The process itself, which starts with the first call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def abort(self) -> None:
        """End the process for good, also in the middle of a call of another thread, which raises `ProcessDied`."""
        self._aborted = True
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, run there.

        Args:
            function: one that stands in a module (no method, lambda or inner function), or a kernel of Triton's.
            args: whatever pickle takes, and tensors of any dtype, layout and CPU storage. They arrive as copies.
            kwargs: likewise.

        Returns:
            A copy of what it returns.

        Raises:
            ProcessDied: the process ended, or the call took longer than `timeout`.
            Exception: what the function raises, with the traceback of the other process as its cause.
        """
        message = _dumps((Reference.of(function), args, kwargs))
        with self._lock:
            if self._connection is None and not self._aborted:
                self._start()
            if self._aborted:  # asked after the start: a process that came too late for `abort` ends here
                self._stop()
                raise ProcessDied("the process was ended for good")
            return self._exchange(message)

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path} | self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what it has started ends with it, an assembler that hangs too
            )
        self._connection = ours
        if self._setup is not None:
            try:
                self._exchange(_dumps((Reference.of(self._setup), (), {})))
            except BaseException:
                self._stop()
                raise

    def _exchange(self, message: bytes) -> Any:
        succeeded, result = self._ask(message)
        if succeeded:
            return result
        error, text = result
        raise error from RuntimeError(f"in the other process:\n{text}")

    def _ask(self, message: bytes) -> tuple[bool, Any]:
        connection = self._connection
        assert connection is not None
        try:
            connection.send_bytes(message)
            if connection.poll(self._timeout):
                reply: tuple[bool, Any] = _loads(connection.recv_bytes())
                return reply
            reason = f"it was ended after {self._timeout:g} s in one call"
        except (EOFError, OSError):
            process = self._process
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert process is not None
                process.wait(5)
            reason = f"exit status {None if process is None else process.returncode}"
        except BaseException:  # an interruption leaves an answer behind that is no answer to the next call
            self._stop()
            raise
        self._stop()
        raise ProcessDied(f"the process that ran the function is gone: {reason}")

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._kill()
            self._process.wait()
        self._process = self._connection = None


def serve(descriptor: int) -> None:
    """The other side of a `PythonProcess`: run what arrives on this file descriptor until it is closed."""
    connection = Connection(descriptor)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(message))


def _answer(message: bytes) -> bytes:
    try:
        reference, args, kwargs = _loads(message)
        return _dumps((True, reference.find()(*args, **kwargs)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            answer = _dumps((False, (error, text)))
            _loads(answer)
            return answer
        except Exception:  # not every exception can travel
            return _dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """Where a function stands: the name of its module, its file, its name there."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Reference":
        """That of `function`, which may be a kernel of Triton's.

        Raises:
            TypeError: it does not stand in a module by a name of its own.
        """
        plain = inspect.unwrap(getattr(function, "fn", function))
        name, module = plain.__qualname__, plain.__module__
        if not name.isidentifier():
            raise TypeError(f"{module}.{name} cannot be found by another process: it is no function of a module")
        return cls(module, os.path.abspath(inspect.getfile(plain)), name)

    def find(self) -> Callable[..., Any]:
        """The function, in the process that this is called in."""
        found: Callable[..., Any] = getattr(_module(self.module, self.file), self.name)
        return found


def _module(name: str, file: str) -> ModuleType:
    """The module by its name, or from its file where it cannot be imported (a test, a script)."""
    known = sys.modules.get(name)
    if known is not None and name != "__main__":
        return known
    if name != "__main__" and importlib.util.find_spec(name.partition(".")[0]) is not None:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    name = f"{name.strip('_')}_of_another_process"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module can be made of {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _Pickler(pickle.Pickler):
    """Tensors as the bytes of their storage: torch's own way of it fails for some dtypes."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if type(value) is not Tensor or value.device.type not in ("cpu", "meta"):
            raise TypeError(f"only plain CPU tensors travel between processes, not {type(value)} on {value.device}")
        if value.is_meta:
            return _without_values, (tuple(value.shape), value.stride(), value.dtype)
        storage = torch.empty(0, dtype=torch.uint8).set_(value.detach().untyped_storage())
        where = (value.storage_offset(), tuple(value.shape), value.stride())
        return _tensor, (storage.numpy().tobytes(), value.dtype, *where)


def _tensor(data: bytes, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    storage = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), offset, shape, stride)


def _without_values(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return pickle.loads(data)
