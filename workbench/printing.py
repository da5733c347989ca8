"""Standard output and standard error of a command that goes on when they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, cast


class Printed:
    """A text stream that stops printing where its stream fails, and keeps the reason. What the stream's encoding does
    not have is printed as its escape. None: what Python has for a stream that was closed before it began."""

    def __init__(self, stream: IO[str] | None) -> None:
        self.trouble: OSError | ValueError | None = None
        if stream is None:
            self.trouble = OSError(errno.EBADF, "it is closed")
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
        self._stream = stream
        self.reader_gone = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._write(text)
        except (OSError, ValueError) as error:
            self._stop(error)
        return len(text)

    def flush(self) -> None:
        try:
            if not self._stopped:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._stop(error)

    @property
    def _stopped(self) -> bool:
        return self.reader_gone or self.trouble is not None

    def _write(self, text: str) -> int:
        if self._stopped:
            return len(text)
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def _stop(self, error: OSError | ValueError) -> None:
        """Python flushes the stream again at its end, and would complain: what is left goes nowhere."""
        if isinstance(error, BrokenPipeError):
            self.reader_gone = True
        else:
            self.trouble = error
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream in memory has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def keep_standard_descriptors() -> None:
    """Descriptors 0 to 2 that are closed lead nowhere from here on: else the next file that is opened would be one of
    them, and get what a child process prints."""
    while (taken := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(taken, True)
    os.close(taken)


@contextlib.contextmanager
def printing() -> Iterator[Printed]:
    """In place of `sys.stdout` and `sys.stderr`; yields the first, whose `trouble` is known in the end."""
    keep_standard_descriptors()
    out, err = Printed(sys.stdout), Printed(sys.stderr)
    with contextlib.redirect_stdout(cast(IO[str], out)), contextlib.redirect_stderr(cast(IO[str], err)):
        try:
            yield out
        finally:
            out.flush()
            err.flush()
