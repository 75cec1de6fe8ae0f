"""Asks XLA about HLO text in a child process, because XLA's parser aborts or segfaults on some bad text.

    with XlaProcess() as xla:
        answer = xla.check(text)
        if not answer.ok:
            print(answer.line, answer.column, answer.message)

One child (`python -m xla_fp8.hlo.xla_process`) answers any number of questions; when one kills it, that is the answer,
and the next question starts another child. It imports jaxlib's HLO library but not jax.

Both pipes carry frames: 8 bytes of big-endian length, then that many bytes. A question is the operation's name, a
newline and its text or proto; an answer is `+` and the result, or `-` and the message. The first frame that a child
sends says that it is ready. It writes everything else, XLA's log among it, to a temporary file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, BinaryIO

from xla_fp8 import _jax_compat
from xla_fp8.errors import XlaFp8Error

_LENGTH = struct.Struct(">Q")
_LOG_TAIL = 64 * 1024  # bytes of the child's log that are searched for why it died: a stack trace is a tenth of it


class XlaProcessError(XlaFp8Error):
    """The child process could not start (as opposed to: a text killed it)."""


@dataclasses.dataclass(frozen=True)
class XlaAnswer:
    """What XLA said.

    Attributes:
        ok: XLA took the text.
        text: what was asked for; empty for `check`, and unless `ok`.
        message: why not, in one line without the position; empty if `ok`.
        line, column: 1-based position of the error (column in characters), or None where XLA gave none.
        crashed: the question killed the child (or took longer than the timeout).
    """

    ok: bool
    text: str = ""
    message: str = ""
    line: int | None = None
    column: int | None = None
    crashed: bool = False


class XlaProcess:
    """XLA's HLO parser, in a process that may die.

    Entering the context starts the child without waiting for it: what you do before the first question overlaps with
    the fifth of a second that it takes to start. Questions may come from several threads; they are asked one by one.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        """Starts nothing yet. `timeout`: seconds for each question, after which the child is killed."""
        self._timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._log: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> XlaProcess:
        with self._lock:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child. A later question starts another one."""
        with self._lock:
            self._stop()
            if self._log is not None:
                self._log.close()
                self._log = None

    def check(self, text: str) -> XlaAnswer:
        """Does XLA's parser accept this HLO text?"""
        return self._ask_about_text("check", text)

    def full_text(self, text: str) -> XlaAnswer:
        """HLO text as XLA prints it after parsing: every attribute, all metadata, every constant.

        Equal modules print equal text, but for elided constants: for `{...}`, XLA's parser makes up numbers, and counts
        on from question to question. Compare texts that have them as first questions to two processes.
        """
        return self._ask_about_text("full_text", text)

    def stablehlo(self, text: str) -> XlaAnswer:
        """HLO text as StableHLO (MLIR text), accepted by its verifier, which checks shapes (the parser does not)."""
        return self._ask_about_text("stablehlo", text)

    def proto_to_text(self, proto: bytes) -> XlaAnswer:
        """The full HLO text of a serialized HloProto or HloModuleProto."""
        return self._ask("proto_to_text", proto)

    def _ask_about_text(self, operation: str, text: str) -> XlaAnswer:
        try:
            question = text.encode()
        except UnicodeEncodeError as error:  # a file that was read with surrogateescape
            line, column = _position(text, error.start)
            return XlaAnswer(False, message="this character is not valid UTF-8", line=line, column=column)
        answer = self._ask(operation, question)
        if answer.line is not None and answer.column is not None:  # XLA counts bytes
            return dataclasses.replace(answer, column=_column_in_characters(question, answer.line, answer.column))
        return answer

    def _ask(self, operation: str, question: bytes) -> XlaAnswer:
        with self._lock:
            if self._child is not None and self._child.poll() is not None:
                self._stop()  # died between questions: someone killed it
            child = self._start()
            timed_out = threading.Event()

            def kill() -> None:
                timed_out.set()
                child.kill()

            # Killing the child ends a blocked read or write of ours on every platform; select() needs POSIX for pipes.
            timer = threading.Timer(self._timeout, kill)
            timer.start()
            try:
                reply = self._exchange(child, operation.encode() + b"\n" + question)
            finally:
                timer.cancel()
                timer.join()
            if reply is None or timed_out.is_set():
                child.wait()
                was_ready, log = self._ready, self._log_tail()
                self._stop()
                if timed_out.is_set():
                    return XlaAnswer(False, message=f"XLA gave no answer in {self._timeout:g} seconds", crashed=True)
                if not was_ready:
                    raise XlaProcessError(f"the process that asks XLA did not start:\n{log.strip()}")
                return XlaAnswer(False, message=_death(child.returncode, operation, log), crashed=True)
            body = reply[1:].decode()
            return XlaAnswer(True, text=body) if reply[:1] == b"+" else _rejection(body)

    def _exchange(self, child: subprocess.Popen[bytes], frame: bytes) -> bytes | None:
        """Sends a frame and returns the reply; None if the child died."""
        assert child.stdin is not None
        assert child.stdout is not None
        if not self._ready:
            self._ready = _read_frame(child.stdout) is not None
        try:
            _write_frame(child.stdin, frame)
        except OSError:  # broken pipe
            return None
        return _read_frame(child.stdout)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None:
            return self._child
        if self._log is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        self._log.seek(0)
        self._log.truncate()
        # The child finds the packages that this process finds, and (-P) nothing that lies in the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._ready = False
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "xla_fp8.hlo.xla_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()  # it holds nothing that needs an orderly end
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # closing flushes what a dead child did not read
                pipe.close()
        child.wait()

    def _log_tail(self) -> str:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL))
        return self._log.read().decode("utf-8", "replace")


# What XLA's words mean.


def _rejection(message: str) -> XlaAnswer:
    """The answer for XLA's own "no".

    XLA lists errors from the innermost out, each as `was parsing LINE:COLUMN: error: MESSAGE`, the line and a caret
    (HloParserImpl::Error in xla/hlo/parser/hlo_parser.cc). The first says what is wrong.
    """
    found = re.search(r"was parsing (\d+):(\d+): error: (.*)", message)
    if found:
        return XlaAnswer(False, message=found[3], line=int(found[1]), column=int(found[2]))
    message = re.sub(r"^(INVALID_ARGUMENT|INTERNAL|UNIMPLEMENTED): ", "", message.strip())
    return XlaAnswer(False, message=message or "XLA rejects this text and does not say why")


def _death(returncode: int, operation: str, log: str) -> str:
    """Says how the child died: the signal, and the CHECK that failed if its log (absl's, or LLVM's) names one."""
    doing = {
        "stablehlo": "while it made StableHLO of this text",
        "proto_to_text": "while it read this proto",
    }.get(operation, "while it parsed this text")
    try:
        how = signal.Signals(-returncode).name
    except ValueError:
        how = f"exit status {returncode}"
    check = re.search(r"^(?:F\d+ [^\]\n]*\]|LLVM ERROR:|.*: (?=Assertion )) *(.*)", log, re.MULTILINE)
    return f"XLA crashed {doing} ({how})" + (f": {check[1].strip()}" if check else "")


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _column_in_characters(text: bytes, line: int, column: int) -> int:
    lines = text.split(b"\n", line)
    return len(lines[line - 1][: column - 1].decode("utf-8", "replace")) + 1 if line <= len(lines) else column


def _write_frame(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(_LENGTH.pack(len(frame)))
    pipe.write(frame)
    pipe.flush()


def _read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None when the other side has closed the pipe."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    frame = pipe.read(length)
    return frame if len(frame) == length else None


# The child.


def _check(text: str) -> str:
    _jax_compat.hlo_text_to_module(text)
    return ""


def _stablehlo(text: str) -> str:
    return _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(text))


_TEXT_OPERATIONS: Mapping[str, Callable[[str], str]] = {
    "check": _check,
    "full_text": _jax_compat.full_text,
    "stablehlo": _stablehlo,
}


def _answer(question: bytes) -> bytes:
    operation, _, body = question.partition(b"\n")
    try:
        if operation == b"proto_to_text":
            text = _jax_compat.module_proto_to_text(body)
        else:
            text = _TEXT_OPERATIONS[operation.decode()](body.decode())
        return b"+" + text.encode()
    except UnicodeDecodeError as error:  # XLA's message quotes half of a UTF-8 character
        return b"-" + error.object.decode("utf-8", "replace").encode()
    except Exception as error:  # any "no" of XLA or MLIR is an answer, whatever class nanobind gives it
        return b"-" + str(error).encode("utf-8", "replace")


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    _jax_compat.full_text("ENTRY e { ROOT p = f32[] parameter(0) }")  # loads the library: what is missing shows now
    _write_frame(answers, b"ready")
    while (question := _read_frame(questions)) is not None:
        _write_frame(answers, _answer(question))


def _main() -> None:
    # The answers keep the real stdout; what a library prints there goes where stderr goes.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
