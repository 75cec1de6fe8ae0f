"""`xla-fp8 run`: what it compares, what it prints, and with which status."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ADD = """\
HloModule add

ENTRY main {
  a = f32[2,3] parameter(0)
  b = f32[] parameter(1)
  wide = f32[2,3] broadcast(b), dimensions={}
  ROOT r = (f32[2,3], (f32[])) tuple(sum, inner)
}
""".replace("  ROOT", "  sum = f32[2,3] add(a, wide)\n  inner = (f32[]) tuple(b)\n  ROOT")


@pytest.fixture
def add(tmp_path: Path) -> Path:
    path = tmp_path / "add.hlo"
    path.write_text(ADD)
    return path


@pytest.mark.parametrize("dialect", ["xla", "extended"])
def test_a_rewritten_module_equals_the_original(cli, scaled_conv: Path, dialect: str) -> None:
    done = cli("run", scaled_conv, "--target=h200", f"--dialect={dialect}", "--platform=cpu")
    assert done.status == 0
    assert "1 rewritten, 0 not" in done.err
    header, line = done.out.splitlines()
    assert header.split() == ["output", "shape", "max", "abs", "max", "rel", "ulps", "norm", "mismatches", "where"]
    assert line.startswith("{}      f8e4m3fn[8,28,28,128]")
    assert line.endswith("ok")


def test_run_and_graph_rewrite_as_opt_does(cli) -> None:
    depthwise = Path(__file__).resolve().parents[2] / "hlo_fixtures/cudnn-fused-conv-rewriter/depthwise.hlo"
    for supports, count in (("rules", 0), ("any", 1)):
        done = cli("run", depthwise, "--target=h200", "--platform=cpu", f"--supports={supports}")
        assert f"{count} rewritten, {1 - count} not" in done.err
        assert ("runs in bf16" in done.err) == (count == 0)
        assert ("#1 conv" in cli("graph", depthwise, "--target=h200", f"--supports={supports}").out) == (count == 1)


def test_two_modules_that_differ(cli, add: Path, tmp_path: Path) -> None:
    other = tmp_path / "subtract.hlo"
    other.write_text(ADD.replace("add(a, wide)", "subtract(a, wide)"))
    done = cli("run", add, other)
    assert done.status == 1
    lines = done.out.splitlines()
    assert lines[1].endswith("FAIL")
    assert lines[1].startswith("{0}     f32[2,3]")
    assert lines[2].startswith("{1,0}   f32[] ")
    assert lines[2].endswith("ok")
    assert lines[3] == "1 of 2 outputs differ by more than the tolerance"


def test_an_empty_module_is_named(cli, add: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.hlo"
    empty.touch()
    done = cli("run", add, empty)
    assert done.status == 1
    assert done.err.startswith(f"{empty}: error: the input is empty")


def test_tolerance_decides(cli, add: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.hlo"
    other.write_text(
        ADD.replace("sum =", "c = f32[] constant(1.001)\n  cs = f32[2,3] broadcast(c), dimensions={}\n  x =").replace(
            "  inner", "  sum = f32[2,3] multiply(x, cs)\n  inner"
        )
    )
    assert cli("run", add, other).status == 1
    assert cli("run", add, other, "--tolerance=0.01").status == 0
    assert cli("run", add, add, "--tolerance=0").status == 0


CHAIN = """\
HloModule chain

ENTRY main {
  x = f8e4m3fn[1,8,8,16] parameter(0)
  w = f8e4m3fn[16,3,3,16] parameter(1)
  factor = f32[] constant(FACTOR)
  factors = f32[1,8,8,16] broadcast(factor), dimensions={}
  low = f32[] constant(-448)
  lows = f32[1,8,8,16] broadcast(low), dimensions={}
  high = f32[] constant(448)
  highs = f32[1,8,8,16] broadcast(high), dimensions={}
  wide = f32[16,3,3,16] convert(w)
  LAYERS
  ROOT last = TYPE[1,8,8,16] copy(OUTPUT)
}
"""
LAYER = """
  xNUMBER = f32[1,8,8,16] convert(INPUT)
  yNUMBER = f32[1,8,8,16] convolution(xNUMBER, wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f
  scaledNUMBER = f32[1,8,8,16] multiply(yNUMBER, factors)
  cNUMBER = f32[1,8,8,16] clamp(lows, scaledNUMBER, highs)
  qNUMBER = f8e4m3fn[1,8,8,16] convert(cNUMBER)
"""


def chain(path: Path, layers: int, factor: float, output: str = "q{}", type_: str = "f8e4m3fn") -> Path:
    lines = [LAYER.replace("NUMBER", str(i)).replace("INPUT", f"q{i - 1}" if i else "x") for i in range(layers)]
    text = CHAIN.replace("FACTOR", repr(factor)).replace("LAYERS", "".join(lines))
    path.write_text(text.replace("OUTPUT", output.format(layers - 1)).replace("TYPE", type_))
    return path


def test_chains_behind_chains_are_judged_by_share_and_norm(cli, tmp_path: Path) -> None:
    """A factor 0.02% larger puts a few values one step on, and behind other layers some further."""
    one = cli("run", *(chain(tmp_path / f"{f}.hlo", 1, f) for f in (0.1, 0.10002)))
    assert one.status == 0
    assert "roundings" not in one.out
    two = cli("run", *(chain(tmp_path / f"{f}.hlo", 2, f) for f in (0.1, 0.10002)))
    assert two.status == 0, two.out
    assert "{}: behind 2 FP8 roundings: 7% of the elements may differ, and the norm may be 0.024" in two.out
    wide = cli("run", *(chain(tmp_path / f"{f}.hlo", 2, f, "scaled{}", "f32") for f in (0.1, 0.10002)))
    assert wide.status == 0, wide.out
    assert "{}: behind 1 FP8 roundings: the norm may be 0.0064" in wide.out
    wrong = cli("run", *(chain(tmp_path / f"{f}.hlo", 2, f) for f in (0.1, 0.103)))
    assert wrong.status == 1
    assert "the norm may be 0.024" in wrong.out
    assert "1 of 1 outputs differ by more than the tolerance" in wrong.out


NAN = """\
HloModule lost

larger {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] maximum(a, b)
}

ENTRY main {
  x = f32[64,64] parameter(0)
  start = f32[] constant(-inf)
  largest = f32[] reduce(x, start), dimensions={0,1}, to_apply=larger
  ROOT r = (f32[], f32[64,64]) tuple(largest, x)
}
"""


def test_a_nan_that_xla_lost_is_told_and_one_that_the_other_module_lost_fails(cli, tmp_path: Path) -> None:
    lost, kept, none = (tmp_path / name for name in ("lost.hlo", "kept.hlo", "none.hlo"))
    lost.write_text(NAN)
    kept.write_text(
        NAN.replace("ROOT r = f32[] maximum", "m = f32[] maximum").replace(
            "maximum(a, b)",
            "maximum(a, b)\n  nb = pred[] compare(b, b), direction=NE\n  s = f32[] select(nb, b, m)\n"
            "  na = pred[] compare(a, a), direction=NE\n  ROOT r = f32[] select(na, a, s)",
        )
    )
    none.write_text(NAN.replace("tuple(largest, x)", "tuple(start, x)"))
    np.savez(tmp_path / "in.npz", x=np.full((64, 64), np.nan, np.float32))
    told = cli("run", lost, kept, "--inputs", tmp_path / "in.npz")
    assert told.status == 0, told.out
    assert "-inf and nan" in told.out, "XLA on a CPU has learned to keep it: keep_nan is of no use any more"
    assert "{0}: XLA drops a NaN in a maximum over elements on this device" in told.out
    failed = cli("run", none, kept, "--inputs", tmp_path / "in.npz")
    assert failed.status == 1
    assert "drops" not in failed.out


def test_inputs_from_a_file_decide_the_numbers(cli, add: Path, tmp_path: Path) -> None:
    other = tmp_path / "constant.hlo"
    other.write_text(ADD.replace("broadcast(b)", "broadcast(c)").replace("  wide", "  c = f32[] constant(2.5)\n  wide"))
    np.savez(tmp_path / "in.npz", **{"a": np.ones((2, 3), np.float32), "1": np.float32(2.5)})
    assert cli("run", add, other, "--inputs", tmp_path / "in.npz", "--tolerance=0").status == 0
    assert cli("run", add, other, "--seed=3").status == 1


def test_fp8_inputs_survive_numpy_s_file_format(cli, scaled_conv: Path, tmp_path: Path) -> None:
    from xla_fp8 import hlo
    from xla_fp8.backends.inputs import random_inputs, read_inputs

    module = hlo.parse(scaled_conv.read_text())
    arrays = random_inputs([parameter.shape for parameter in module.entry.parameters], seed=5)
    np.savez(tmp_path / "in.npz", *arrays)
    assert any(array.dtype == ml_dtypes.float8_e4m3fn for array in arrays)
    for array, read in zip(arrays, read_inputs(tmp_path / "in.npz", module), strict=True):
        np.testing.assert_array_equal(array, read)
    assert cli("run", scaled_conv, "--target=h200", "--inputs", tmp_path / "in.npz").status == 0


FITTING = {"a": np.ones((2, 3), np.float32), "b": np.float32(1)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {**FITTING, "a": np.ones((2, 3))},
            "parameter 0 (%a) is f32[2,3], but its array is float64[2, 3]",
        ),
        ({**FITTING, "a": np.asarray([1, None])}, "in.npz: a is an array of Python objects: save it as one of numbers"),
        ({**FITTING, "a": np.asarray(["x"])}, "parameter 0 (%a) is f32[2,3], but its array is <U1[1]"),
        ({"a": np.ones((2, 3), np.float32)}, "no array for parameter 1: expected one named b or 1 or arr_1, found a"),
        (
            {"a": np.ones((3, 2), np.float32), "b": np.float32(1)},
            "parameter 0 (%a) is f32[2,3], but its array is float32[3, 2]",
        ),
    ],
)
def test_a_file_that_does_not_fit(cli, add: Path, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "in.npz", **arrays)
    done = cli("run", add, "--inputs", tmp_path / "in.npz")
    assert done.status == 1
    assert message in done.err
    assert "pickle" not in done.err


EXPECTED = "expected a file that numpy.savez wrote, with an array for each parameter"


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive_of(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", f"in.npz is empty: {EXPECTED}"),
        (b"a,b\n1,2\n", f"in.npz is no .npz file: {EXPECTED}"),
        (pickle.dumps([1.0]), f"in.npz is no .npz file: {EXPECTED}"),
        (npy(FITTING["a"]), f"in.npz is an .npy file, which holds one array: {EXPECTED}"),
        (npz(**FITTING)[:300], "in.npz is broken, or was not written to its end (File is not a zip file)"),
        (npz(**FITTING).replace(b"\x80?", b"\x81?", 1), "in.npz: a cannot be read, the file is broken: Bad CRC-32"),
        (archive_of(a=b"text", b=b"text"), f"in.npz: a is no array: {EXPECTED}"),
        (archive_of(a=npy(FITTING["a"])[:20]), "in.npz: a cannot be read, the file is broken: EOF"),
        (archive_of(), "in.npz has no array for parameter 0: expected one named a or 0 or arr_0, found none"),
    ],
)
def test_a_file_that_is_no_npz(cli, add: Path, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "in.npz").write_bytes(data)
    done = cli("run", add, "--inputs", tmp_path / "in.npz")
    assert done.status == 1
    assert message in done.err
    assert "pickle" not in done.err


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, compressed: bool) -> None:
    from xla_fp8 import hlo
    from xla_fp8.backends.inputs import InputError, read_inputs

    module, path = hlo.parse(ADD), tmp_path / "in.npz"
    (np.savez_compressed if compressed else np.savez)(path, **FITTING)
    data = path.read_bytes()
    flips = [(i, data[i] ^ 16) for i in range(len(data))]
    refused = 0
    for damaged in (*(data[:i] for i in range(len(data))), *(data[:i] + bytes([b]) + data[i + 1 :] for i, b in flips)):
        path.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # zipfile tells of names that it finds twice
                read_inputs(path, module)
        except InputError:
            refused += 1
    assert refused > len(data)


def test_no_such_file(cli, add: Path, tmp_path: Path) -> None:
    done = cli("run", add, "--inputs", tmp_path / "none.npz")
    assert done.status == 1
    assert "none.npz: error: No such file or directory" in done.err


def test_an_elided_constant_is_refused_by_name(cli, tmp_path: Path) -> None:
    path = tmp_path / "elided.hlo"
    path.write_text("HloModule m\n\nENTRY e {\n  big = f32[64] constant({...})\n  ROOT r = f32[64] negate(big)\n}\n")
    done = cli("run", path)
    assert done.status == 1
    assert "the value of constant %big in computation e was left out" in done.err


def test_calls_that_no_graph_took_are_refused_by_name(cli, scaled_conv: Path) -> None:
    done = cli("run", scaled_conv, "--passes=call-inliner,conv-rewriter", "--target=h200")
    assert done.status == 1
    assert "__cudnn$convForward" in done.err
    assert "conv-restorer" in done.err


def test_modules_with_other_parameters_are_refused(cli, add: Path, plain: Path) -> None:
    done = cli("run", add, plain)
    assert done.status == 1
    assert "the modules have 2 and 1 parameters" in done.err


def test_iterations_print_a_median(cli, add: Path) -> None:
    done = cli("run", add, "--iterations=3")
    assert done.status == 0
    assert "median of 3 runs" in done.out
    assert "compares the module with itself" in done.err


@pytest.mark.parametrize("arguments", [["--tolerance=-1"], ["--passes=dce", "{add}"], ["--seed=x"]])
def test_wrong_usage(cli, add: Path, arguments: list[str]) -> None:
    assert cli("run", add, *(a.format(add=add) for a in arguments)).status == 2


def test_an_unknown_platform_is_told(cli, add: Path) -> None:
    done = cli("run", add, "--platform=abacus")
    assert done.status == 1
    assert "abacus" in done.err


@pytest.mark.parametrize(
    "transfer",
    [
        "t = token[] outfeed(x, after), outfeed_shape=f32[2]{0}",
        "t = ((f32[2]{0}), token[]) infeed(after)",
    ],
)
def test_what_waits_for_another_process_is_refused_and_not_waited_for(cli, tmp_path: Path, transfer: str) -> None:
    path = tmp_path / "transfer.hlo"
    path.write_text(
        "HloModule m\n\nENTRY e {\n  x = f32[2]{0} parameter(0)\n  after = token[] after-all()\n"
        f"  {transfer}\n  ROOT y = f32[2]{{0}} negate(x)\n}}\n"
    )
    done = cli("run", path)
    assert done.status == 1
    assert "%t in computation e waits for the process" in done.err


def test_a_callback_into_another_process_is_refused_and_not_called(cli, tmp_path: Path) -> None:
    path = tmp_path / "callback.hlo"
    path.write_text(
        "HloModule m\n\nENTRY e {\n  x = f32[2]{0} parameter(0)\n"
        '  call = () custom-call(x), custom_call_target="xla_ffi_python_cpu_callback", '
        "custom_call_has_side_effect=true\n"
        "  ROOT y = f32[2]{0} negate(x)\n}\n"
    )
    done = cli("run", path)
    assert done.status == 1
    assert "custom call %call in computation e has target xla_ffi_python_cpu_callback" in done.err
    assert "not here" in done.err
