"""Reading any input into HLO text: files, stdin, directories of dumps; text or proto; gzip of either."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence

from xla_fp8 import hlo
from xla_fp8._jax_compat import HloProtoError, hlo_proto_unwrap
from xla_fp8.cli.errors import CliError, UsageError
from xla_fp8.hlo.errors import HloError, HloParseError, HloVerifyError
from xla_fp8.hlo.xla_process import XlaAnswer, XlaProcess

_DUMP_RE = re.compile(r"(.*before_optimizations)\.(txt|hlo|hlo\.pb|pb)(\.gz)?")
_GZIP = b"\x1f\x8b"
_PROTO = b"\x0a"  # the tag of field 1, which HloProto and HloModuleProto open with


@dataclasses.dataclass(frozen=True)
class Source:
    """An input: where it is, and what messages call it.

    Attributes:
        path: a file, or `-` for stdin.
    """

    path: str

    @property
    def name(self) -> str:
        return "<stdin>" if self.path == "-" else self.path

    @property
    def output_name(self) -> str:
        """The name of what is made of it, in a directory of results: `x.hlo.pb.gz` becomes `x.hlo`."""
        base = "stdin.hlo" if self.path == "-" else os.path.basename(self.path)
        base = base.removesuffix(".gz")
        if base.endswith(".pb"):
            base = base.removesuffix(".pb").removesuffix(".hlo") + ".hlo"
        return base


def find(paths: Sequence[str]) -> list[Source]:
    """The inputs that arguments name; a directory stands for the dumps in it.

    Raises:
        CliError: a directory without dumps.
        UsageError: stdin more than once.
    """
    if list(paths).count("-") > 1:
        raise UsageError("stdin (-) can be read only once")
    sources: list[Source] = []
    for path in paths:
        if path != "-" and os.path.isdir(path):
            sources += [Source(os.path.join(path, name)) for name in _dumps(path)]
        else:
            sources.append(Source(path))
    return sources


def one(path: str) -> Source:
    """The input that an argument names, where there can be only one.

    Raises:
        CliError: a directory with several dumps.
    """
    sources = find([path])
    if len(sources) > 1:
        names = ", ".join(os.path.basename(source.path) for source in sources)
        raise CliError(f"{path}: there are several dumps in this directory; name one of {names}")
    return sources[0]


def _dumps(folder: str) -> list[str]:
    """The modules before optimization that XLA_FLAGS=--xla_dump_to wrote: one file each, text before proto."""
    best: dict[str, tuple[int, str]] = {}
    for name in sorted(os.listdir(folder)):
        match = _DUMP_RE.fullmatch(name)
        if match:
            rank = ("txt", "hlo", "hlo.pb", "pb").index(match[2])
            best[match[1]] = min(best.get(match[1], (9, "")), (rank, name))
    if not best:
        raise CliError(
            f"there is no file named *before_optimizations.txt or .hlo.pb in {folder}. "
            f"XLA_FLAGS=--xla_dump_to={folder} makes XLA write them; or name a file"
        )
    return [name for _, name in best.values()]


def read_text(source: Source, xla: XlaProcess) -> str:
    """The HLO text of an input.

    Args:
        source: what to read.
        xla: asked to turn a proto into text; not used otherwise.

    Raises:
        OSError: it cannot be read.
        CliError: empty, broken gzip, or a proto that holds no module.
        HloParseError: neither UTF-8 nor a proto.
    """
    data = read(source)
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise CliError(f"the gzip data is broken: {error}", source.name) from None
    if not data.strip():
        raise CliError("the input is empty: expected HLO text or an HLO proto", source.name)
    if _is_proto(source, data):
        answer = xla.proto_to_text(data)
        if not answer.ok:
            raise CliError(f"not an HLO proto: {answer.message}", source.name)
        return answer.text
    return decode(data, source.name)


def load(source: Source, xla: XlaProcess, *, verify_with_xla: bool = True) -> tuple[str, hlo.HloModule]:
    """The text of an input and the module it is.

    Args:
        source: what to read.
        xla: the process to ask; start it first, and it gets ready while this reads.
        verify_with_xla: whether XLA's parser must accept the text too.

    Raises:
        HloParseError: we or XLA's parser reject the text.
    """
    text = read_text(source, xla)
    module = hlo.parse(text, source.name)
    if verify_with_xla:
        answer = xla.check(text)
        if not answer.ok:
            raise rejection(answer, text, source.name, module)
    return text, module


@contextlib.contextmanager
def placed_errors(text: str, filename: str, module: hlo.HloModule) -> Iterator[None]:
    """Gives errors about a module a place in its text: XLA, which would have found one, need not have been asked."""
    try:
        yield
    except HloParseError:
        raise
    except HloError as error:
        raise placed(error, text, filename, module) from error


def placed(error: HloError, text: str, filename: str, module: hlo.HloModule) -> HloParseError:
    """An error about a module at its place in the text; at the top where that cannot be told."""
    if isinstance(error, HloVerifyError):
        return HloParseError.at(error.message, text, _place(text, error.computation, error.instruction), filename)
    return HloParseError.at(str(error), text, _unreadable(text, module), filename)


def _unreadable(text: str, module: hlo.HloModule) -> int:
    """The place of the first instruction whose attributes are none: what is wrong with them does not say whose."""
    for computation in module.computations:
        for instruction in computation:
            try:
                _ = instruction.attributes
            except HloError:
                return _place(text, computation.name, instruction.name)
    try:
        hlo.verify(module)
    except HloVerifyError as error:
        return _place(text, error.computation, error.instruction)
    return 0


def rejection(answer: XlaAnswer, text: str, filename: str, module: hlo.HloModule) -> HloParseError:
    """XLA's "no" as an error at a place of the text.

    XLA names no place when the text kills it or only its result is impossible. Our verifier may know what is wrong;
    else the error is at the top.
    """
    if answer.line is not None:
        lines = text.split("\n", answer.line)
        line_text = lines[answer.line - 1] if answer.line <= len(lines) else ""
        return HloParseError(answer.message, filename, answer.line, answer.column or 1, line_text)
    try:
        hlo.verify(module)
    except HloError as error:
        ours = placed(error, text, filename, module)
        return HloParseError(f"{ours.message} ({answer.message})", filename, ours.line, ours.column, ours.line_text)
    return HloParseError.at(answer.message, text, 0, filename)


def _place(text: str, computation: str | None, instruction: str | None) -> int:
    """Where an instruction, or a computation, is defined; 0 where that cannot be told."""
    start = 0
    for name, ending in ((computation, r"\s*[({]"), (instruction, r"\s*=")):
        if name and (match := re.compile(rf"%?(?<![\w.\-]){re.escape(name)}{ending}").search(text, start)):
            start = match.start()
    return start


def read(source: Source) -> bytes:
    if source.path == "-":
        return sys.stdin.buffer.read()
    with open(source.path, "rb") as stream:
        return stream.read()


def _is_proto(source: Source, data: bytes) -> bool:
    if source.path.removesuffix(".gz").endswith(".pb"):
        return True
    # Stdin and files of other names: text never holds NUL, and a proto nearly always does.
    if not data.startswith(_PROTO) or b"\0" not in data:
        return False
    try:
        hlo_proto_unwrap(data)
    except HloProtoError:
        return False
    return True


def decode(data: bytes, name: str) -> str:
    """The text of an input named `name`. Raises CliError or HloParseError, with the place, where it is no UTF-8."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise CliError("the input is UTF-16, as PowerShell's > writes it: save it as UTF-8", name)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        text = before + data[error.start :].decode("utf-8", "replace")
        raise HloParseError.at(
            f"byte 0x{data[error.start]:02x} is not valid UTF-8: expected HLO text, or a proto in a file named .pb",
            text,
            len(before),
            name,
        ) from None
