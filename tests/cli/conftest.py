"""What the tests of the command line share: running it in this process, and small modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from xla_fp8.cli.main import main

FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"

PLAIN = """\
HloModule plain, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %y = f32[2]{0} add(%x, %x), metadata={op_name="jit(f)/add" source_file="model.py" source_line=7}
}

"""

REFUSED = """\
HloModule refused

ENTRY main {
  x = f8e4m3fn[1,8,8,16] parameter(0)
  w = f8e4m3fn[3,3,16,32] parameter(1)
  xw = f32[1,8,8,16] convert(x)
  ww = f32[3,3,16,32] convert(w)
  ROOT conv = f32[1,8,8,32] convolution(xw, ww), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f,
    metadata={op_name="c" source_file="model.py" source_line=42}
}
"""


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line with these arguments."""

    def run(*arguments: str | Path) -> Done:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Done(status, out, err)

    return run


@pytest.fixture
def scaled_conv() -> Path:
    """A module with one FP8 chain that is rewritten on an h200."""
    return FIXTURES / "opt" / "scaled_conv.hlo"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A module without FP8, as XLA prints it."""
    path = tmp_path / "plain.hlo"
    path.write_text(PLAIN)
    return path


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """An FP8 convolution, refused on an a100, with a source line."""
    path = tmp_path / "refused.hlo"
    path.write_text(REFUSED)
    return path
