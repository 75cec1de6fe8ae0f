"""What nvidia-smi reads off a GPU while something runs: clock, power, temperature, why the driver lowers the clock.

Imports no JAX.
"""

from __future__ import annotations

import contextlib
import datetime
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_EACH = 20  # milliseconds from one reading to the next
_QUERIES = (
    "timestamp,clocks.sm,power.draw.instant,temperature.gpu,clocks_event_reasons.active",
    "timestamp,clocks.sm,power.draw,temperature.gpu",
)

Reading = tuple[datetime.datetime, Mapping[str, str]]
"""When, and "MHz", "W", "C" and (where the driver tells) "reasons", a hexadecimal mask, as nvidia-smi prints them."""


@contextlib.contextmanager
def watched(gpu: str) -> Iterator[list[Reading]]:
    """Readings of a GPU, there when the block has ended; none where there is no nvidia-smi."""
    readings: list[Reading] = []
    smi = shutil.which("nvidia-smi")
    if smi is None:
        yield readings
        return
    # What is still in its buffer when it is stopped would be lost.
    unbuffered = [stdbuf, "-oL"] if (stdbuf := shutil.which("stdbuf")) else []
    command = [*unbuffered, smi, "-i", gpu, "--format=csv,noheader,nounits", "-lms", str(_EACH)]
    with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody reads meanwhile is full after 20 s
        process = subprocess.Popen(
            [*command, f"--query-gpu={_query(smi)}"], stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield readings
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            readings += [reading for line in output if (reading := parsed(line))]


def parsed(line: str) -> Reading | None:
    """A line of nvidia-smi; None of one that is no reading."""
    moment, *values = (part.strip() for part in line.split(","))
    with contextlib.suppress(ValueError):
        at = datetime.datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f")
        return at, dict(zip(("MHz", "W", "C", "reasons"), values, strict=False))
    return None


def summary(readings: Sequence[Reading]) -> dict[str, Any]:
    """The least and the median clock, median and largest power, and every reason that there was; empty without any."""
    clocks = _numbers(readings, "MHz")
    power = _numbers(readings, "W")
    if not clocks or not power:
        return {}
    return {
        "MHz_least": min(clocks),
        "MHz": statistics.median(clocks),
        "W": statistics.median(power),
        "W_most": max(power),
        "reasons": sorted({values["reasons"] for _, values in readings if "reasons" in values}),
        "readings": len(readings),
    }


def _numbers(readings: Sequence[Reading], name: str) -> list[float]:
    found = []
    for _, values in readings:
        with contextlib.suppress(KeyError, ValueError):  # "[N/A]"
            found.append(float(values[name]))
    return found


def _query(smi: str) -> str:
    """The first of `_QUERIES` that this driver knows."""
    for query in _QUERIES[:-1]:
        known = subprocess.run([smi, f"--query-gpu={query}", "--format=csv"], capture_output=True, check=False)
        if known.returncode == 0:
            return query
    return _QUERIES[-1]
