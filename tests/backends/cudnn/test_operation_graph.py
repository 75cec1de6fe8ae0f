"""Which operations a graph becomes, with a front end that only notes what it is asked for."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from xla_fp8.backends.cudnn import library, operation_graph
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.target import GraphCall

AMAX = "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);"


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    cudnn = MagicMock()
    cudnn.cudnnGraphNotSupportedError = RuntimeError
    monkeypatch.setattr(library, "cudnn", lambda: cudnn)
    return cudnn


def operations(cudnn: MagicMock, call: GraphCall) -> list[str]:
    operation_graph.build(call)
    names = [name for name, *_ in cudnn.pygraph.return_value.method_calls]
    return [name for name in names if name not in ("tensor", "validate", "build_operation_graph")]


def test_a_node_is_an_operation(front_end: MagicMock) -> None:
    graph = "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f8e4m3fn]invscale(3);5:[f32]amax(3);"
    assert operations(front_end, graph_call(graph)) == ["conv_fprop", "mul", "relu", "div", "reduction"]


@pytest.mark.parametrize("image", [(3,), (3, 3), (3, 3, 3)])
def test_the_amax_of_one_element_is_its_magnitude(front_end: MagicMock, image: tuple[int, ...]) -> None:
    window = f"{{size={'x'.join('3' for _ in image)}}}"
    call = graph_call(AMAX, batch=1, features=1, image=image, filter=image, window=window)
    assert operations(front_end, call) == ["conv_fprop", "mul", "abs"]


@pytest.mark.parametrize("more", [{"batch": 2}, {"features": 2}, {"image": (4, 3)}], ids=str)
def test_the_amax_of_two_elements_is_a_reduction(front_end: MagicMock, more: dict[str, object]) -> None:
    sizes = {"batch": 1, "features": 1, "image": (3, 3), **more}
    call = graph_call(AMAX, **sizes, window="{size=3x3}")  # type: ignore[arg-type]
    assert operations(front_end, call) == ["conv_fprop", "mul", "reduction"]


@pytest.mark.parametrize(("copied", "identities"), [("f32", []), ("bf16", ["identity"])])
def test_an_f32_copy_is_the_value_itself(front_end: MagicMock, copied: str, identities: list[str]) -> None:
    call = graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[{copied}]copy(2);")
    assert operations(front_end, call) == ["conv_fprop", "mul", "mul", *identities]
