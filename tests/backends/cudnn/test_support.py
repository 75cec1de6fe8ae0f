"""What cuDNN can run: rules, answers without a device, reasons; cuDNN's own answers where it is installed."""

from __future__ import annotations

import json

import pytest

from xla_fp8.backends.cudnn import CudnnMissingError, Support, deviceless, library, rules, stub_driver, support
from xla_fp8.backends.cudnn.backend import CudnnBackend
from xla_fp8.backends.cudnn.support import in_xla, shipped_properties, support_by_rules
from xla_fp8.backends.example_calls import graph_call, random_call
from xla_fp8.graph import OPS
from xla_fp8.target import GraphCall, Target, rule_of

H200 = Target.parse("h200")
SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
AMAX = "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);"

REFUSED = {
    "depthwise": (graph_call(SCALE, groups=32), "grouped-channels", "1 input channel in each of 32 groups"),
    "few": (graph_call(SCALE, groups=16), "grouped-channels", "2 input channels in each of 16 groups"),
    "amax": (graph_call(AMAX, groups=2), "grouped-amax", "2 groups and an amax"),
    "single": (graph_call(SCALE, channels=1, features=1), "single-channel", "one input and one output channel"),
    "transposed": (
        graph_call(SCALE, window="{size=3x3 pad=1_1x1_1 lhs_dilate=2x2}"),
        "input-dilation",
        "dilates its input",
    ),
    "reversed": (
        graph_call(SCALE, window="{size=3x3 pad=1_1x1_1 rhs_reversal=1x1}"),
        "reversed-window",
        "reverses its window",
    ),
    "twice": (
        graph_call("1:[f32]conv();2:[f32]scale(1);3:[f32]copy(2);"),
        "f32-twice",
        "stores one value twice in f32",
    ),
}


def why_no_cudnn() -> str | None:
    """Why cuDNN cannot be asked here."""
    try:
        deviceless.shared().ask(graph_call(SCALE), _properties(), (9, 0))
    except CudnnMissingError as error:
        return str(error)
    return None


def _properties() -> str:
    properties = shipped_properties(H200)
    assert properties is not None
    return properties


@pytest.fixture(scope="module")
def cudnn_version() -> str:
    """Skips where cuDNN cannot be asked."""
    if reason := why_no_cudnn():
        pytest.skip(reason)
    return support(graph_call(SCALE), H200).source


@pytest.mark.parametrize("name", REFUSED)
def test_each_rule_says_what_breaks_it(name: str) -> None:
    call, rule, words = REFUSED[name]
    found = rules.broken_rule(call)
    assert found is not None
    assert found[0].name == rule
    assert words in found[1]
    answer = support(call, H200)
    assert not answer.ok
    assert answer.rule == rule
    assert words in answer.reason
    assert answer.advice == found[0].advice != ""


def test_every_rule_has_a_case() -> None:
    assert {rule for _, rule, _ in REFUSED.values()} == {rule.name for rule in rules.RULES}


@pytest.mark.parametrize("image", [(16,), (16, 16), (4, 8, 8)])
def test_plain_convolutions_are_supported(image: tuple[int, ...]) -> None:
    answer = support(graph_call(SCALE, image=image, filter=(3,) * len(image)), H200)
    assert answer.ok
    assert answer.reason == ""
    assert str(answer).startswith("yes (")


def test_the_targets_versions_come_first() -> None:
    answer = support(graph_call(SCALE), Target.parse("a100"))
    assert not answer.ok
    assert "compute capability" in answer.reason
    assert answer.rule == "target"


def test_where_no_properties_ship_the_rules_answer_and_say_so() -> None:
    answer = support(graph_call(SCALE, groups=32), Target.parse("b200"))
    assert answer.rule == "grouped-channels"
    assert "no device properties ship for compute capability 10.0" in answer.source
    assert support(graph_call(SCALE), Target.parse("b200")).ok


def test_without_cudnn_the_rules_answer_and_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda *_: f"not installed: {library.PIP_LINE}")
    answer = support(graph_call(SCALE, channels=48), H200)
    assert answer.ok
    assert "pip install 'xla-fp8[cuda13]'" in answer.source
    assert answer.plans is None


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (graph_call(SCALE), ""),
        (graph_call(SCALE, groups=32), "grouped-channels"),
        (graph_call(SCALE, image=(4, 8, 8), filter=(3, 3, 3)), "spatial-dimensions"),
    ],
    ids=["plain", "depthwise", "3-D"],
)
def test_without_cudnn_the_backend_knows_what_xla_has_no_kernel_for_either(
    call: GraphCall, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain without a rule is left to XLA, which would fail on these."""
    monkeypatch.setattr(library, "why_missing", lambda *_: f"not installed: {library.PIP_LINE}")
    verdict = CudnnBackend().supports(call, H200)
    assert not verdict.ok
    assert rule_of(verdict) == rule
    assert library.PIP_LINE in verdict.reason


def test_xla_compiles_no_3d_convolution_though_cudnn_has_plans() -> None:
    call = graph_call(SCALE, image=(4, 8, 8), filter=(3, 3, 3))
    answer = support_by_rules(call, H200)
    assert answer.ok
    assert "3 spatial dimensions" in in_xla(answer, call).reason
    plain = graph_call(SCALE)
    assert in_xla(support_by_rules(plain, H200), plain).ok
    assert in_xla(support_by_rules(REFUSED["transposed"][0], H200), call).rule == "input-dilation", "cuDNN's own rule"


def test_the_shipped_properties_are_those_of_a_hopper_gpu() -> None:
    properties = json.loads(_properties())
    assert properties["deviceVer"] == 900
    assert properties["multiProcessorCount"] == 132


def test_a_no_and_a_yes_in_words() -> None:
    assert str(Support(False, "too few", "cuDNN 9.19.0")) == "no: too few [cuDNN 9.19.0]"
    assert str(Support(True, "", "cuDNN 9.19.0", 1)) == "yes (1 plan, none built yet; cuDNN 9.19.0)"


def test_reasons_are_sentences_not_conditions() -> None:
    message = """No valid engine configs for __
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: FORT conv fprop: grouped convolution is not supported. at: is_group_conv
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: check_for_support()
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: leading_dim_in_bits_in % 128 != 0
"""
    assert deviceless.reasons(message) == ["FORT conv fprop: grouped convolution is not supported"]
    assert deviceless.reasons("Reason: is_group_conv\nReason: a % 2\nReason: is_group_conv") == [
        "is_group_conv",
        "a % 2",
    ]
    assert deviceless.reasons("out of memory") == []


def test_without_a_compiler_the_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object, **__: object) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(stub_driver.ctypes, "CDLL", no_library)
    monkeypatch.setattr(stub_driver, "_which", lambda name: None)
    with pytest.raises(CudnnMissingError, match="no NVIDIA driver, and no C compiler"):
        stub_driver.load_if_missing()


# Where cuDNN is installed.


def _agree(call: GraphCall) -> None:
    answer = support(call, H200)
    assert answer.plans is not None, answer
    assert answer.ok == (rules.broken_rule(call) is None), f"{call.graph} {call}: {answer}"


def test_the_answer_names_cudnn_and_counts_plans(cudnn_version: str) -> None:
    assert cudnn_version.startswith("cuDNN ")
    answer = support(graph_call(SCALE, channels=256, features=256), H200)
    assert answer.ok
    assert answer.plans
    assert "none built yet" in str(answer)


def test_cudnns_own_words_follow_the_rule(cudnn_version: str) -> None:
    answer = support(graph_call(AMAX, groups=2), H200)
    assert cudnn_version.split(",")[0] in answer.reason


@pytest.mark.parametrize("op", [name for name in OPS if name not in ("conv", "amax", "copy")])
def test_every_op_has_a_plan(op: str, cudnn_version: str) -> None:
    _agree(graph_call(f"1:[f32]conv();2:[f32]{op}(1);3:[f8e4m3fn]scale(2);4:[f32]amax(2);5:[bf16]copy(2);"))


@pytest.mark.parametrize("output", ["f8e4m3fn", "f8e5m2", "f16", "bf16", "f32"])
@pytest.mark.parametrize("filter_type", ["f8e4m3fn", "f8e5m2"])
@pytest.mark.parametrize("input_type", ["f8e4m3fn", "f8e5m2"])
def test_every_mix_of_types_has_a_plan(input_type: str, filter_type: str, output: str, cudnn_version: str) -> None:
    _agree(graph_call(f"1:[f32]conv();2:[{output}]scale(1);", types=(input_type, filter_type)))


@pytest.mark.parametrize("side", ["f8e4m3fn", "f8e5m2", "f16", "bf16", "f32"])
def test_a_residual_of_any_type_has_a_plan(side: str, cudnn_version: str) -> None:
    _agree(graph_call("1:[f32]conv();2:[f32]add(1);3:[f8e4m3fn]scale(2);", side=side))


@pytest.mark.parametrize(
    "window",
    [
        "{size=3x3 stride=2x2 pad=0_1x0_1}",
        "{size=3x3 pad=2_2x2_2 rhs_dilate=2x2}",
        "{size=5x5 pad=4_0x0_3}",
        "{size=1x1 stride=2x2}",
    ],
)
def test_strides_dilation_and_uneven_padding_have_plans(window: str, cudnn_version: str) -> None:
    size = int(window[6])
    _agree(graph_call(SCALE, filter=(size, size), window=window))


@pytest.mark.parametrize("source", [1, 2, 3])
@pytest.mark.parametrize("copied", ["f8e4m3fn", "f16", "bf16", "f32"])
def test_copies_have_plans(copied: str, source: int, cudnn_version: str) -> None:
    _agree(graph_call(f"1:[f32]conv();2:[f32]relu(1);3:[f8e4m3fn]scale(2);4:[{copied}]copy({source});5:[f32]amax(2);"))


@pytest.mark.parametrize("per_group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 33])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_groups_are_as_the_rules_say(rank: int, per_group: int, cudnn_version: str) -> None:
    _agree(graph_call(SCALE, image=(8,) * rank, filter=(3,) * rank, channels=4 * per_group, groups=4))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8, 12, 16, 20, 24, 40, 100, 1000])
def test_any_number_of_channels_has_a_plan(channels: int, cudnn_version: str) -> None:
    _agree(graph_call(SCALE, channels=channels, features=64))
    _agree(graph_call(SCALE, channels=64, features=channels))


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_graphs_are_as_the_rules_say(start: int, cudnn_version: str) -> None:
    for seed in range(start, start + 50):
        _agree(random_call(seed))
