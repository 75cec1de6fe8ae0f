"""How fast `xla_fp8.hlo` reads and prints HLO, against jaxlib's own parser and printer in the same process.

    python benchmarks/hlo_io.py [--sizes 1000,10000,100000] [--repeats 5]

Two texts of each size, both with metadata as XLA prints it: a chain of adds, and a training step of ResNet-50 (a real
dump) whose instructions are repeated until there are enough. The time is CPU time, the best of several repeats taken in
turn, of text -> module -> text with nothing left out. Memory is the peak that Python allocates for module and printed
text, beyond the input text (tracemalloc), for each instruction.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import gzip
import os
import pathlib
import platform
import shlex
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from xla_fp8 import _jax_compat, hlo

DUMP = pathlib.Path(__file__).parent.parent / "hlo_fixtures" / "dumps" / "resnet50_training_step.hlo.gz"
LIMIT_RATIO = 1.5
LIMIT_MEMORY = 3000  # bytes an instruction


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds to parse and to print, each the best of several."""

    parse: float
    print: float

    @property
    def total(self) -> float:
        return self.parse + self.print


@dataclasses.dataclass(frozen=True)
class Row:
    text_name: str
    instructions: int
    megabytes: float
    ours: Timing
    jaxlib: Timing
    memory: float

    @property
    def ratio(self) -> float:
        return self.ours.total / self.jaxlib.total


def chain(size: int) -> str:
    """`size` instructions, each adding the one before to the parameter, with the metadata and tables of a new dump."""
    frames = range(1, 8)
    tables = ["FileNames", '1 "/home/user/model.py"', "", "FunctionNames", '1 "train_step"', "", "FileLocations"]
    tables += [f"{i} {{file_name_id=1 function_name_id=1 line={i} end_line={i} column=1 end_column=9}}" for i in frames]
    tables += ["", "StackFrames", *(f"{i} {{file_location_id={i} parent_frame_id=1}}" for i in frames), ""]
    lines = ["  %p = f32[128]{0} parameter(0)"]
    previous = "p"
    for i in range(1, size):
        root = "ROOT " if i == size - 1 else ""
        metadata = f'{{op_name="jit(f)/while/body/add" stack_frame_id={i % 7 + 1}}}'
        lines.append(f"  {root}%add.{i} = f32[128]{{0}} add(%{previous}, %p), metadata={metadata}")
        previous = f"add.{i}"
    head, body = "\n".join(tables), "\n".join(lines)
    return f"HloModule chain\n\n{head}\n\nENTRY %main (p: f32[128]) -> f32[128] {{\n{body}\n}}\n"


def repeated_dump(size: int) -> str:
    """About `size` instructions of a real dump: its entry computation, cut short or repeated, and what that calls.

    Repetitions share parameters and called computations; every other instruction gets a name of its own.
    """
    module = hlo.parse(gzip.decompress(DUMP.read_bytes()).decode(), DUMP.name)
    entry = module.entry
    for name in ("entry_computation_layout", "input_output_alias", "buffer_donor"):
        module.attributes.pop(name, None)
    lines = [f"  {hlo.instruction_text(p)}" for p in entry.parameters]
    body = [i for i in entry if i.opcode != "parameter"]
    called: dict[hlo.HloComputation, None] = {}
    missing = size - len(lines)
    repetition = 0
    while missing > 0:
        suffix = f".{repetition}r"
        for i in body:
            if missing <= 0:
                break
            for computation in called_by(i):
                if computation not in called:
                    called[computation] = None
                    missing -= len(computation)
            operands = [o.name if o.opcode == "parameter" else o.name + suffix for o in i.operands]
            marked = [f"{f'/*index={n}*/' if n and n % 5 == 0 else ''}%{name}" for n, name in enumerate(operands)]
            arguments = i.payload if i.opcode == "constant" else ", ".join(marked)
            lines.append(f"  %{i.name}{suffix} = {i.shape} {i.opcode}({arguments}){i.attribute_text}")
            missing -= 1
        repetition += 1
    lines[-1] = "  ROOT " + lines[-1].strip()
    for computation in module.computations:
        if computation is not entry and computation not in called:
            module.remove_computation(computation)
    text = hlo.to_text(module)
    return f"{text[: text.index('ENTRY ')]}ENTRY %{entry.name} {{\n" + "\n".join(lines) + "\n}\n"


def called_by(instruction: hlo.HloInstruction) -> list[hlo.HloComputation]:
    """What it calls, and what that calls."""
    found: list[hlo.HloComputation] = []
    pending = list(instruction.called_computations)
    while pending:
        computation = pending.pop()
        found.append(computation)
        pending += [c for i in computation for c in i.called_computations]
    return found


def measure(name: str, text: str, repeats: int) -> Row:
    """Times both sides in turn, so that a busy moment of the machine does not fall on one of them only."""
    ours: list[Timing] = []
    theirs: list[Timing] = []
    for _ in range(repeats):
        ours.append(once(hlo.parse, hlo.to_text, text))
        theirs.append(once(_jax_compat.hlo_text_to_module, _jax_compat.module_full_text, text))
    gc.collect()
    tracemalloc.start()
    module = hlo.parse(text)
    printed = hlo.to_text(module)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    count = module.instruction_count
    assert hlo.parse(printed).instruction_count == count
    return Row(name, count, len(text) / 1e6, best(ours), best(theirs), peak / count)


def once(parse: Callable[[str], Any], show: Callable[[Any], str], text: str) -> Timing:
    gc.collect()
    start = time.process_time()
    module = parse(text)
    parsed = time.process_time()
    show(module)
    return Timing(parsed - start, time.process_time() - parsed)


def best(timings: list[Timing]) -> Timing:
    return Timing(min(t.parse for t in timings), min(t.print for t in timings))


def table(rows: list[Row]) -> str:
    """Times in microseconds an instruction."""
    lines = [
        "| text | instructions | MB | parse | print | sum | jaxlib parse | print | sum | ratio | memory (B/instr.) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        micros = [
            f"{seconds / row.instructions * 1e6:.2f}"
            for timing in (row.ours, row.jaxlib)
            for seconds in (timing.parse, timing.print, timing.total)
        ]
        cells = [row.text_name, f"{row.instructions:,}", f"{row.megabytes:.1f}", *micros, f"{row.ratio:.2f}x"]
        lines.append(f"| {' | '.join(cells)} | {row.memory:,.0f} |")
    return "\n".join(lines)


def growth(rows: list[Row]) -> str:
    """How the time of one instruction grows from the second-largest text to the largest."""
    lines = []
    for name in dict.fromkeys(row.text_name for row in rows):
        *_, small, large = [row for row in rows if row.text_name == name]
        ours, theirs = (
            (getattr(large, side).total / large.instructions) / (getattr(small, side).total / small.instructions)
            for side in ("ours", "jaxlib")
        )
        lines.append(
            f"{name}: from {small.instructions:,} to {large.instructions:,} instructions the time of one grows "
            f"{ours:.2f}x, jaxlib's {theirs:.2f}x"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times xla_fp8.hlo against jaxlib's HLO parser and printer.")
    parser.add_argument("--sizes", default="1000,10000,100000", help="numbers of instructions, comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed; the best counts")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    print(
        f"{datetime.date.today()}  Python {platform.python_version()}, jaxlib {_jax_compat.jaxlib_version()}, ", end=""
    )
    print(f"{platform.machine()}, {os.cpu_count()} CPUs")
    print(f"command: {shlex.join(['python', *sys.argv])}")
    print("times: microseconds of CPU time an instruction, best of", arguments.repeats, end="\n\n")
    rows = [
        measure(name, make(size), arguments.repeats)
        for name, make in (("chain of adds", chain), ("ResNet-50 training step", repeated_dump))
        for size in sizes
    ]
    print(table(rows))
    print()
    if len(sizes) > 1:
        print(growth(rows))
    worst = max(rows, key=lambda row: row.ratio)
    heaviest = max(rows, key=lambda row: row.memory)
    print(f"slowest against jaxlib: {worst.ratio:.2f}x (limit {LIMIT_RATIO}x)")
    print(f"most memory: {heaviest.memory:,.0f} B an instruction (limit {LIMIT_MEMORY:,})")
    return int(worst.ratio > LIMIT_RATIO or heaviest.memory > LIMIT_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
