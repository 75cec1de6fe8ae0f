"""Python's garbage collector is paused for a while, and goes on as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from xla_fp8.hlo.garbage import collection_paused


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def was_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collection_goes_on_as_it_was(was_on: bool) -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "a pause within a pause ends nothing"
    assert gc.isenabled() == was_on


def test_collection_goes_on_after_an_error(was_on: bool) -> None:
    @collection_paused()
    def fails(count: int) -> None:
        assert not gc.isenabled()
        if count == 2:
            raise ValueError("no such luck")

    fails(1)
    with pytest.raises(ValueError, match="no such luck"):
        fails(2)
    assert gc.isenabled() == was_on


def test_no_collection_in_a_pause(was_on: bool) -> None:
    collections = []

    def count(phase: str, info: dict[str, int]) -> None:
        collections.append((phase, info["generation"]))

    gc.callbacks.append(count)
    try:
        with collection_paused():
            held = [[] for _ in range(10_000)]
            assert not collections
    finally:
        gc.callbacks.remove(count)
    assert len(held) == 10_000
