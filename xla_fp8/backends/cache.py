"""What the autotuner found, on disk: one small JSON file for each choice, safe under concurrent processes.

The folder is `XLA_FP8_CACHE_DIR`, else `xla_fp8` in `XDG_CACHE_HOME` or `~/.cache`. A file is written whole under
another name and then renamed, so a reader sees a choice or none; what cannot be read counts as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from xla_fp8.backends import call_text

_SUFFIX = ".choice.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way to run one call on one device.

    Attributes:
        key: what the choice depends on: the call, device, backend and versions, by name.
        config: text of the config that won.
        microseconds: how long it takes.
        first_microseconds: how long the config that the heuristic prefers takes; None where it did not run.
        candidates: how many were timed.
        tuning_seconds: what it cost to find out.
        date: when, ISO 8601 in UTC.
    """

    key: Mapping[str, str]
    config: str
    microseconds: float
    first_microseconds: float | None
    candidates: int
    tuning_seconds: float
    date: str


def folder() -> Path:
    """Where choices are kept; it need not exist."""
    if path := os.environ.get("XLA_FP8_CACHE_DIR"):
        return Path(path)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "xla_fp8"


def load(key: Mapping[str, str]) -> Choice | None:
    """The choice for a key, or None where there is none (or what is there cannot be read)."""
    choice = _read(folder() / _file_name(key))
    return choice if choice is not None and choice.key == dict(key) else None


def store(choice: Choice) -> None:
    """Keeps a choice. A folder that cannot be written to is no error: the next process tunes again."""
    path = folder() / _file_name(choice.key)
    text = json.dumps(dataclasses.asdict(choice), indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def choices() -> Iterator[Choice]:
    """Every choice that can be read, newest last."""
    found = [choice for path in _files() if (choice := _read(path)) is not None]
    yield from sorted(found, key=lambda choice: choice.date)


def clear() -> int:
    """Deletes every choice, and nothing else in the folder; returns how many there were."""
    count = 0
    for path in _files():
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count


def _files() -> list[Path]:
    return sorted(folder().glob(f"*{_SUFFIX}"))


def _file_name(key: Mapping[str, str]) -> str:
    return call_text.digest(key) + _SUFFIX


def _read(path: Path) -> Choice | None:
    try:
        choice = Choice(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return choice if isinstance(choice.key, dict) and isinstance(choice.config, str) else None
