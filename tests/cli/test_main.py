"""The entry point: help is quick, and what goes wrong is a message and a status."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xla_fp8.cli import opt
from xla_fp8.cli.color import choose


def start(*arguments: str | Path, **options: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "xla_fp8", *map(str, arguments)]
    # What runs in the background ignores interrupts, and its children inherit that.
    return subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options)


@pytest.mark.parametrize("arguments", [["--help"], ["opt", "--help"], ["explain", "--help"], ["--version"]])
def test_help_and_version(cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.status == 0
    assert "xla-fp8" in done.out


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["opt"], ["match", "x.hlo"], ["explain", "--format=x"]])
def test_wrong_usage(cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.status == 2
    assert "usage: xla-fp8" in done.err


def test_help_imports_neither_jax_nor_the_compiler() -> None:
    code = (
        "import sys; from xla_fp8.cli.main import build_parser; build_parser().format_help();"
        "print([name for name in ('jax', 'jaxlib', 'numpy', 'xla_fp8.hlo', 'xla_fp8.passes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_opt_does_not_import_jax(scaled_conv: Path) -> None:
    code = (
        "import sys; from xla_fp8.cli.main import main;"
        f"status = main(['opt', {str(scaled_conv)!r}, '--target=h200', '-o', '/dev/null']);"
        "print(status, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 False"


@pytest.mark.parametrize("command", ["opt", "explain", "graph", "update-checks"])
def test_a_file_that_is_not_there(cli, tmp_path: Path, command: str) -> None:
    done = cli(command, tmp_path / "nothing.hlo")
    assert done.status == 1
    assert "nothing.hlo: error: No such file or directory" in done.err


def test_a_directory_without_dumps(cli, tmp_path: Path) -> None:
    done = cli("opt", tmp_path)
    assert done.status == 1
    assert "--xla_dump_to" in done.err


@pytest.mark.parametrize("command", ["opt", "explain"])
def test_a_closed_pipe_is_quiet(plain: Path, command: str) -> None:
    child = start(command, plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()  # long before it writes
    assert child.stderr.read() == b""
    assert child.wait() == 141


def test_interrupt(tmp_path: Path) -> None:
    child = start("opt", "-", stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(bytes(1 << 20))  # more than a pipe holds: once this is written, it is reading
    child.stdin.flush()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, b"interrupted\n")


def test_an_error_of_the_system_is_a_message(cli, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(opt, "_opt", full)
    done = cli("opt", plain)
    assert (done.status, done.err) == (1, f"{plain}: error: No space left on device\n")


def test_color_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert choose("auto", sys.stdout).enabled
    assert not choose("never", sys.stdout).enabled
    monkeypatch.setenv("NO_COLOR", "1")
    assert not choose("auto", sys.stdout).enabled
    assert choose("always", sys.stdout).enabled
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not choose("auto", sys.stdout).enabled


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&-", "2>&-"])
def test_a_closed_standard_stream_is_dev_null(plain: Path, tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m xla_fp8 opt {plain} {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stdin_is_empty(tmp_path: Path) -> None:
    command = f"{sys.executable} -m xla_fp8 opt - <&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("<stdin>: error: the input is empty")
