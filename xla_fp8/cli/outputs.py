"""Writing results: whole or not at all. An error leaves the file that was there before."""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import sys
import tempfile

from xla_fp8.cli.errors import CliError


def write(path: str, text: str) -> None:
    """Writes `text` to a file, or to stdout for `-`.

    A regular file is written under another name in its directory and renamed, with the permissions it had. Anything
    else (a pipe, /dev/null, /dev/stdout) is written directly. A name that ends in `.gz` gets gzip.

    Raises:
        CliError: the directory is not there, or the name is one of a proto.
        OSError: the system refuses; it names `path`.
    """
    if path == "-":
        write_stdout(text)
        return
    if os.path.isdir(path):
        raise CliError(f"cannot write to {path}: it is a directory")
    if _plain_name(path).endswith(".pb"):
        raise CliError(f"cannot write to {path}: HLO is written as text; name it .hlo or .txt")
    try:
        _write(path, text.encode("utf-8"))
    except OSError as error:
        error.filename, error.filename2 = path, None  # not a temporary file, nor the input that was at work
        raise


def _write(path: str, data: bytes) -> None:
    if path.endswith(".gz"):
        data = gzip.compress(data, mtime=0)  # the same bytes every time
    if _is_special(path):
        with open(path, "ab") as stream:  # append: `-o /dev/stdout >>log` must not truncate the log
            stream.write(data)
        return
    _replace(os.path.realpath(path), path, data)  # through a link, which stays one


def write_stdout(text: str) -> None:
    """Writes to stdout as UTF-8, whatever the locale."""
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:
        sys.stdout.write(text)
        return
    sys.stdout.flush()
    buffer.write(text.encode("utf-8", "backslashreplace"))
    buffer.flush()


def _plain_name(path: str) -> str:
    return path.removesuffix(".gz")


def _is_special(path: str) -> bool:
    if path.startswith(("/dev/", "/proc/")):  # /dev/stdout leads to a regular file when stdout is redirected to one
        return True
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _replace(path: str, shown: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise CliError(f"cannot write to {shown}: there is no directory {os.path.dirname(shown) or folder}")
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if not os.access(path, os.W_OK):  # renaming over it would need no permission of the file's own
            raise PermissionError(13, "Permission denied", shown)
    except FileNotFoundError:
        mode = 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)[:200]}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)  # there is no way to only ask
    os.umask(mask)
    return mask
