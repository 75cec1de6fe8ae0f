"""The corpus of dumps: there are enough, XLA's parser takes each, and nothing of the machine that made them is inside.

That our own parser and printer keep each is tested in the round-trip tests.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xla_fp8._jax_compat import jaxlib_version
from xla_fp8.hlo.xla_process import XlaProcess

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"
FILES = sorted(path for suffix in (".hlo", ".hlo.gz", ".hlo.pb") for path in DUMPS.glob(f"*{suffix}"))


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaProcess]:
    with XlaProcess() as process:
        yield process


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def test_there_are_at_least_30_and_they_stay_small() -> None:
    programs = {path.name.split(".")[0] for path in FILES}
    assert len(programs) >= 30
    assert sum(path.stat().st_size for path in FILES) < 6_000_000


def test_the_index_lists_exactly_the_files() -> None:
    listed = re.findall(r"^\| (\S+\.hlo\S*) \|", (DUMPS / "INDEX.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_xla_accepts(path: Path, xla: XlaProcess) -> None:
    data = read(path)
    answer = xla.proto_to_text(data) if path.suffix == ".pb" else xla.full_text(data.decode())
    assert answer.ok, f"{path.name}:{answer.line}:{answer.column}: {answer.message}"
    # XLA numbers the tables anew, in the order in which it meets the frames; the second print is a fixed point.
    second = xla.full_text(answer.text)
    assert xla.full_text(second.text) == second


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_of_the_machine_is_inside(path: Path) -> None:
    data = read(path)
    assert not re.search(rb'["/](home|root|Users|tmp|work|usr|opt)/|site-packages|0x[0-9a-f]{8}', data)
    for file in re.findall(rb'(?:source_file=|^\d+ )"([^"]*\.py)"', data, re.MULTILINE):
        assert not file.startswith(b"/"), file


@pytest.mark.skipif(jaxlib_version() != "0.10.2", reason="the corpus was written by jaxlib 0.10.2")
def test_the_script_writes_these_files(tmp_path: Path, xla: XlaProcess) -> None:
    def text(path: Path) -> str:  # the bytes of a proto depend on how many came before it
        return xla.proto_to_text(read(path)).text if path.suffix == ".pb" else read(path).decode()

    lowered = [path for path in FILES if "_compiled." not in path.name]  # compiled modules depend on the CPU
    names = [path.name.split(".")[0] for path in lowered]
    command = [sys.executable, str(DUMPS / "regenerate.py"), *names, "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in lowered if text(tmp_path / path.name) != text(path)] == []


# Each kind of thing that the corpus is there for, by a text that only such a dump has.
KINDS = {
    "tables of stack frames": r"^StackFrames$",
    "old metadata": r'source_file="[^"]+" source_line=\d+',
    "no percent signs": r"^  ROOT [a-z]",
    "operands with types": r"add\(f32\[[0-9,]*\]\{[0-9,]*\} %",
    "operand index comments": r"/\*index=5\*/",
    "elided constants": r"constant\(\{\.\.\.\}\)",
    "a module without header": r"\A(?!HloModule)",
    "fusions": r" fusion\(.*kind=kLoop, calls=",
    "a schedule": r"is_scheduled=true",
    "aliased arguments": r"input_output_alias=\{",
    "donated arguments": r"buffer_donor=\{",
    "tiled layouts": r"\{1,0:T\(8,128\)\(2,1\)S\(1\)\}",
    "bounded dynamic dimensions": r"f32\[<=8,4\]",
    "unbounded dynamic dimensions": r"f32\[\?,4\]",
    "JSON": r'backend_config=\{"',
    "opaque backend_config": r'backend_config="',
    "graph strings": r'"serialized_graph":"21:\[f32\]conv\(\);',
    "control dependencies": r"control-predecessors=\{",
    "iota replica groups": r"replica_groups=\[4,2\]<=\[2,4\]T\(1,0\)",
    "shardings": r"sharding=\{devices=\[",
    "complex constants": r"c128\[14\]\{0\} constant\(\{\(",
    "special floats": r"constant\(\{inf, -inf, nan, -0, ",
    "execution threads": r'execution_thread="side"',
    "algorithms": r"algorithm=rng_philox",
}
OPCODES = """
    all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all async-done
    async-start async-update batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert broadcast call
    cholesky clamp collective-permute collective-permute-done collective-permute-start complex concatenate
    conditional convert convolution copy-done copy-start custom-call custom-call-done custom-call-start
    custom-call-update domain dot dynamic-reshape dynamic-slice dynamic-update-slice erf fft fusion gather
    get-dimension-size get-tuple-element infeed iota opt-barrier outfeed pad partition-id recv recv-done reduce
    reduce-precision reduce-scatter reduce-window reshape reverse rng rng-bit-generator scatter select-and-scatter
    send send-done set-dimension-size slice sort topk transpose triangular-solve tuple while
"""
TYPES = """
    pred s2 s4 s8 s16 s32 s64 u2 u4 u8 u32 f16 bf16 f32 f64 c64 c128 token f4e2m1fn f8e3m4 f8e4m3 f8e4m3b11fnuz
    f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu
"""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [read(path).decode() for path in FILES if path.suffix != ".pb"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus_has(kind: str, texts: list[str]) -> None:
    assert any(re.search(KINDS[kind], text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize("opcode", OPCODES.split())
def test_the_corpus_has_opcode(opcode: str, texts: list[str]) -> None:
    assert any(f" {opcode}(" in text for text in texts)


@pytest.mark.parametrize("element_type", TYPES.split())
def test_the_corpus_has_type(element_type: str, texts: list[str]) -> None:
    assert any(f" {element_type}[" in text for text in texts)
