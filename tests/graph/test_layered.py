"""The layered layout: boxes do not overlap, arrows point down, and what fits without a crossing has none."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from xla_fp8.graph.layered import Layout, layout

GAP = (10.0, 20.0)


def placed(arrows: list[tuple[int, int]], count: int) -> tuple[dict[str, tuple[float, float]], Layout]:
    sizes = {f"b{i}": (40.0 + 7 * (i % 5), 30.0) for i in range(count)}
    return sizes, layout(sizes, [(f"b{a}", f"b{b}") for a, b in arrows], GAP)


@given(st.integers(1, 25).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_boxes_are_apart_and_inside(graph: tuple[int, list[tuple[int, int]]]) -> None:
    count, arrows = graph
    sizes, result = placed(arrows, count)
    assert result.centers.keys() == sizes.keys()
    for a, b in itertools.combinations(sizes, 2):
        (xa, ya), (xb, yb) = result.centers[a], result.centers[b]
        beside = abs(xa - xb) >= (sizes[a][0] + sizes[b][0]) / 2 + GAP[0] - 1e-6
        assert beside or abs(ya - yb) >= (sizes[a][1] + sizes[b][1]) / 2
    for name, (x, y) in result.centers.items():
        assert -1e-6 <= x - sizes[name][0] / 2 <= x + sizes[name][0] / 2 <= result.width + 1e-6
        assert -1e-6 <= y - sizes[name][1] / 2 <= y + sizes[name][1] / 2 <= result.height + 1e-6


@given(st.integers(2, 25).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_arrows_point_down_and_join_their_boxes(graph: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = graph
    arrows = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    _, result = placed(arrows, count)
    for (source, target), route in zip(arrows, result.routes, strict=True):
        assert route[0][0] == result.centers[f"b{source}"][0]
        assert route[-1][0] == result.centers[f"b{target}"][0]
        assert all(upper[1] < lower[1] for upper, lower in itertools.pairwise(route))


def test_a_chain_is_a_straight_line() -> None:
    _, result = placed([(0, 1), (1, 2), (2, 3)], 4)
    assert len({round(x, 6) for x, _ in result.centers.values()}) == 1


def test_two_pairs_that_cross_as_listed_do_not_cross_as_drawn() -> None:
    _, result = placed([(0, 3), (1, 2)], 4)
    x = {name: center[0] for name, center in result.centers.items()}
    assert (x["b0"] < x["b1"]) == (x["b3"] < x["b2"])


def test_nothing() -> None:
    assert layout({}, []) == Layout({}, [], 0, 0)
