"""Asks cuDNN whether a graph has a plan on some device, on a machine that need not have one.

cuDNN 9.11 and newer take the properties of a device as JSON. It is asked in a child process, because where the driver
is missing a stand-in for it must be loaded, which nothing else in the process may see.

    python -m xla_fp8.backends.cudnn.deviceless

reads questions, one line of JSON each: {"call": ..., "properties": "...", "compute_capability": 90}, and writes a line
of JSON for each: {"version": [9, 19, 0], "plans": 8} or {"version": ..., "refusal": "..."}. The first line says that
it is ready, or {"missing": "..."}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import threading
from typing import IO, Any

from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import library, operation_graph, stub_driver
from xla_fp8.backends.cudnn.errors import CudnnError, CudnnMissingError, CudnnUnsupportedError
from xla_fp8.errors import XlaFp8Error
from xla_fp8.target import GraphCall


@dataclasses.dataclass(frozen=True)
class Answer:
    """What cuDNN said.

    Attributes:
        version: of libcudnn.
        plans: how many plans its heuristics propose; 0 is a no.
        refusal: its reasons, in one line; "" where there are plans.
    """

    version: tuple[int, ...]
    plans: int
    refusal: str = ""


class DevicelessCudnn:
    """cuDNN in a child process. Questions may come from several threads; they are asked one by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def ask(self, call: GraphCall, properties: str, compute_capability: tuple[int, ...]) -> Answer:
        """Has `call` a plan on the device with these properties (cuDNN's JSON)?

        Raises:
            CudnnMissingError: cuDNN is not installed, or does not load here.
            CudnnError: the child died.
        """
        question = {
            "call": call_text.encode(call),
            "properties": properties,
            "compute_capability": compute_capability[0] * 10 + compute_capability[1],
        }
        with self._lock:
            answer = self._exchange(question)
        return Answer(tuple(answer["version"]), answer.get("plans", 0), answer.get("refusal", ""))

    def close(self) -> None:
        """Ends the child; a later question starts another one."""
        with self._lock:
            self._stop()

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = ""
        if not line:
            status = child.wait()
            self._stop()
            raise CudnnError(f"cuDNN ended its process (status {status}) on the graph {question['call']}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        # The child finds the packages that this process finds, and (-P) nothing that lies in the current folder.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "xla_fp8.backends.cudnn.deviceless"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._child = child
        assert child.stdout is not None
        line = child.stdout.readline()
        ready = (
            json.loads(line) if line else {"missing": f"cuDNN ended its process (status {child.wait()}) as it loaded"}
        )
        if "missing" in ready:
            self._stop()
            raise CudnnMissingError(ready["missing"])
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()  # it holds nothing that needs an orderly end
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        child.wait()


@functools.cache
def shared() -> DevicelessCudnn:
    """The one that this process asks. Its child ends with this process, whose pipe it reads."""
    return DevicelessCudnn()


# The child.


def plan_count(call: GraphCall, properties: str, compute_capability: int) -> int:
    """How many plans cuDNN proposes. Raises CudnnUnsupportedError with its reasons where it proposes none."""
    cudnn = library.cudnn()
    refusals: list[str] = []
    # One by one, as a mode that proposes nothing is an error even where another one would.
    for mode in (cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK):
        built = operation_graph.build(
            call, device_property=cudnn.create_device_properties(properties), sm_version=compute_capability
        )
        try:
            built.graph.create_execution_plans([mode])
            built.graph.check_support()
            return int(built.graph.get_execution_plan_count())
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            refusals.append(str(error))
    raise CudnnUnsupportedError("; ".join(reasons("\n".join(refusals))) or "it proposes no plan")


_REASON_RE = re.compile(r"Reason: (.*)")
_WORDS_RE = re.compile(r"[A-Za-z][\w',:\- ]* [\w',:\- ]*\.?")


def reasons(message: str) -> list[str]:
    """What cuDNN's engines say against a graph in words, each thing once; the failed C++ conditions where none does.

    Its message is a stack of failed checks for each engine that was tried.
    """
    found = list(
        dict.fromkeys(re.sub(r"\s+at: .*", "", text).strip().rstrip(".") for text in _REASON_RE.findall(message))
    )
    spoken = [text for text in found if _WORDS_RE.fullmatch(text) and "engine is only supported" not in text]
    return spoken or found[:3]


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"version": library.version()}
    try:
        call = call_text.decode(question["call"])
        answer["plans"] = plan_count(call, question["properties"], question["compute_capability"])
    except XlaFp8Error as error:
        answer["refusal"] = str(error)
    return answer


def _serve(answers: IO[str]) -> None:
    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        stub_driver.load_if_missing()
        say({"version": library.version()})
    except CudnnMissingError as error:
        say({"missing": str(error)})
        return
    for line in sys.stdin:
        say(_answer(json.loads(line)))


def _main() -> None:
    # The answers keep the real stdout; what a library prints there goes where stderr goes.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(answers)


if __name__ == "__main__":
    _main()
