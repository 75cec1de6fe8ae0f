"""XLA is asked in a child process: its answers, its deaths, and what they leave behind (nothing)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from xla_fp8 import _jax_compat
from xla_fp8.hlo.xla_process import XlaAnswer, XlaProcess, XlaProcessError

GOOD = "HloModule m\n\nENTRY e {\n  a = f32[2,3]{1,0} parameter(0)\n  ROOT r = f32[2,3]{1,0} negate(a)\n}\n"


def body(*lines: str) -> str:
    """A module whose entry has parameter a: f32[2,3], constant z and then these lines."""
    head = ("HloModule m", "ENTRY e {", "  a = f32[2,3] parameter(0)", "  z = f32[] constant(0)")
    return "\n".join((*head, *lines, "}", ""))


# Text that a person can write by mistake and that kills, or has killed, the process it is parsed in. What jaxlib does
# with each depends on its version, so the tests ask for a "no" and that we live.
BAD = {
    "reshape to other element count": body("  ROOT r = f32[7] reshape(a)"),
    "to_apply of a missing computation": body("  ROOT r = f32[2] reduce(a, z), dimensions={1}, to_apply=gone"),
    "calls of a missing computation": body("  ROOT r = f32[2,3] fusion(a), kind=kLoop, calls=gone"),
    "recv-done of an array": body("  ROOT r = f32[2,3] recv-done(a)"),
    "constant token": body("  ROOT r = token[] constant(1)"),
    "parameter number with a gap": "HloModule m\nENTRY e { ROOT a = f32[] parameter(7) }",
    "tuple element of an array": body("  ROOT r = get-tuple-element(a), index=5"),
    "tuple types without end": "ENTRY e { ROOT a = " + "(" * 200_000 + "f32[]" + ")" * 200_000 + " parameter(0) }",
}
SHARDING_SIZES_DISAGREE = [
    body(f"  ROOT r = f32[2,3] negate(a), sharding={{devices={tiles}}}") for tiles in ("[2,2]<=[3]", "[2,2]0,1,2")
]
# Kills every jaxlib tried, and by a CHECK.
KILLER = BAD["parameter number with a gap"]


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaProcess]:
    with XlaProcess() as process:
        yield process


def test_good_text(xla: XlaProcess) -> None:
    assert xla.check(GOOD) == XlaAnswer(ok=True)
    assert xla.full_text(GOOD) == XlaAnswer(ok=True, text=_jax_compat.full_text(GOOD))
    assert "stablehlo.negate" in xla.stablehlo(GOOD).text


def test_protos(xla: XlaProcess) -> None:
    assert "negate(%a)" in xla.proto_to_text(_jax_compat.hlo_text_to_proto(GOOD)).text
    answer = xla.proto_to_text(b"HloModule m")
    assert not answer.ok
    assert not answer.crashed
    assert "no protocol buffer" in answer.message


def test_a_rejection_has_message_line_and_column(xla: XlaProcess) -> None:
    answer = xla.check("HloModule m\n\nENTRY e {\n  ROOT a = f32[] parametr(0)\n}\n")
    assert (answer.ok, answer.crashed, answer.line, answer.column) == (False, False, 4, 18)
    assert "parametr" in answer.message
    assert "\n" not in answer.message


def test_of_several_errors_the_innermost_counts(xla: XlaProcess) -> None:
    text = BAD["to_apply of a missing computation"]
    answer = xla.check(text)
    assert answer.message == "computation does not exist: gone"
    assert answer.line == 5
    assert answer.column is not None
    assert text.splitlines()[4][answer.column - 1 :] == "gone"


def test_columns_count_characters_not_bytes(xla: XlaProcess) -> None:
    lines = ["ENTRY e {", '  ROOT a = f32[] parameter(0), metadata={op_name="äöü"}, bogus=1', "}"]
    answer = xla.check("\n".join(lines))
    assert (answer.line, answer.column) == (2, lines[1].index("bogus") + 1)


def test_a_message_that_quotes_half_a_character_is_still_a_message(xla: XlaProcess) -> None:
    answer = xla.check("ENTRY e {\n  é = f32[] parameter(0)\n}\n")
    assert (answer.ok, answer.crashed, answer.line) == (False, False, 2)


def test_text_that_is_not_utf8_is_refused_with_its_position(xla: XlaProcess) -> None:
    answer = xla.check(b"HloModule m\n  \xff".decode("utf-8", "surrogateescape"))
    assert (answer.ok, answer.line, answer.column) == (False, 2, 3)
    assert "UTF-8" in answer.message


def test_stablehlo_refuses_what_the_parser_lets_pass(xla: XlaProcess) -> None:
    text = body("  b = f32[3,3] broadcast(z), dimensions={}", "  ROOT r = f32[2,3] add(a, b)")
    assert xla.check(text).ok
    answer = xla.stablehlo(text)
    assert not answer.ok
    assert not answer.crashed
    assert answer.message


@pytest.mark.parametrize("name", BAD)
def test_no_text_kills_this_process(xla: XlaProcess, name: str) -> None:
    answer = xla.full_text(BAD[name])
    assert not answer.ok
    assert answer.message
    if answer.crashed:
        assert answer.message.startswith("XLA crashed while it parsed this text (SIG")
    assert xla.check(GOOD).ok, "the next question is answered as if nothing had happened"


@pytest.mark.parametrize("text", SHARDING_SIZES_DISAGREE)
def test_shardings_whose_sizes_disagree_do_not_kill_this_process(xla: XlaProcess, text: str) -> None:
    xla.full_text(text)  # jaxlib 0.10.2 reads past the end of the list and answers anything; 0.12 says no
    assert xla.check(GOOD).ok


def test_a_death_says_which_check_failed(xla: XlaProcess) -> None:
    answer = xla.check(KILLER)
    assert answer == XlaAnswer(ok=False, message=answer.message, crashed=True)
    assert answer.message.startswith("XLA crashed while it parsed this text (SIGABRT): Check failed: param_no >= 0")


def test_a_death_leaks_nothing_to_stderr() -> None:
    program = (
        f"from xla_fp8.hlo.xla_process import XlaProcess\nwith XlaProcess() as x: print(x.check({KILLER!r}).crashed)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_child_killed_between_questions_is_replaced(xla: XlaProcess) -> None:
    assert xla.check(GOOD).ok
    child = xla._child
    assert child is not None
    child.kill()
    child.wait()
    assert xla.check(GOOD).ok


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP to make XLA slow")
def test_a_question_that_takes_too_long_is_given_up() -> None:
    with XlaProcess() as xla:
        assert xla.check(GOOD).ok
        xla._timeout = 0.2
        assert xla._child is not None
        os.kill(xla._child.pid, signal.SIGSTOP)
        answer = xla.check(GOOD)
        assert answer == XlaAnswer(ok=False, message="XLA gave no answer in 0.2 seconds", crashed=True)
        xla._timeout = 60
        assert xla.check(GOOD).ok


def test_a_child_that_cannot_start_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").write_text("raise ImportError('this jaxlib is broken')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with XlaProcess() as xla, pytest.raises(XlaProcessError, match="this jaxlib is broken"):
        xla.check(GOOD)


def test_leaving_the_context_ends_the_child() -> None:
    with XlaProcess() as xla:
        assert xla.check(GOOD).ok
        child = xla._child
    assert child is not None
    assert child.returncode is not None
    assert xla._child is None


def test_threads_share_one_child(xla: XlaProcess) -> None:
    texts = [GOOD.replace("HloModule m", f"HloModule m{i}") for i in range(8)]
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        answers[i] = xla.full_text(texts[i]).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[i].startswith(f"HloModule m{i},") for i in range(8))
