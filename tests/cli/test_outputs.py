"""Writing results: whole or not at all, with the permissions that were there, and to things that are no files."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xla_fp8.cli import outputs
from xla_fp8.cli.errors import CliError


def test_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.hlo"
    path.write_text("old")
    path.chmod(0o640)
    outputs.write(str(path), "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "out.hlo"
    before = os.umask(0o027)
    try:
        outputs.write(str(path), "new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.hlo", tmp_path / "link.hlo"
    target.write_text("old")
    link.symlink_to(target)
    outputs.write(str(link), "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_gzip_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.hlo.gz"
    outputs.write(str(path), "text\n")
    assert gzip.decompress(path.read_bytes()) == b"text\n"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    outputs.write(str(pipe), "text\n")
    reader.join(timeout=10)
    assert read == ["text\n"]
    assert pipe.is_fifo()


def test_dev_stdout_appended_to_a_file_keeps_what_was_there(tmp_path: Path, plain: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as stream:
        command = [sys.executable, "-m", "xla_fp8", "opt", str(plain), "--passes=", "-o", "/dev/stdout"]
        subprocess.run(command, stdout=stream, check=True)
    assert log.read_text() == "before\n" + plain.read_text()


@pytest.mark.parametrize("name", ["no/such/folder.hlo", ".", "out.pb", "out.hlo.pb.gz"])
def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError, match="cannot write to"):
        outputs.write(name, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.hlo"
    path.write_text("old")

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        outputs.write(str(path), "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.hlo"]
