"""The corpus of dumps as a fixture, and XLA's own parser in a child process."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from xla_fp8 import _jax_compat
from xla_fp8.hlo.xla_process import XlaProcess

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"
FILES = sorted(path for suffix in (".hlo", ".hlo.gz", ".hlo.pb") for path in DUMPS.glob(f"*{suffix}"))


@dataclasses.dataclass(frozen=True)
class Dump:
    """One file of the corpus, as text."""

    name: str
    text: str

    @property
    def is_printed_by_xla(self) -> bool:
        """Whether XLA's printer wrote it; the others are hand-written, in forms that it never writes."""
        return not self.name.startswith(("computations_without_header", "nested_instructions", "single_instruction"))


def read_dump(path: Path) -> Dump:
    data = path.read_bytes()
    if path.suffix == ".pb":
        return Dump(path.name, _jax_compat.module_proto_to_text(data))
    return Dump(path.name, (gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dump" in metafunc.fixturenames:
        metafunc.parametrize("dump", FILES, ids=lambda path: path.name, indirect=True)


@pytest.fixture
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


@pytest.fixture(scope="session")
def corpus() -> dict[str, str]:
    """Name -> text of every dump."""
    dumps = [read_dump(path) for path in FILES]
    return {dump.name: dump.text for dump in dumps}


@pytest.fixture(scope="session")
def xla() -> Iterator[XlaProcess]:
    with XlaProcess() as process:
        yield process
