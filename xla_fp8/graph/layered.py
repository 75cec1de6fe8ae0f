"""A layered layout: boxes in rows so that arrows point down, in few crossings. Geometry only; nothing is drawn here.

The steps are those of Sugiyama, Tagawa and Toda (IEEE Transactions on Systems, Man, and Cybernetics 11(2), 1981): rows
by longest path, the order in each row by the mean place of what a box is joined to, then places as near to that as the
widths allow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

Point = tuple[float, float]

_SWEEPS = 6
_LONGEST_ROUTED = 12
"""Rows that an arrow may cross and still get a place in each of them; a longer one goes straight behind the boxes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything goes, in the unit of the sizes given.

    Attributes:
        centers: of the boxes.
        routes: of each arrow, in order, the points that it runs through, ends included.
        width, height: of the whole.
    """

    centers: dict[str, Point]
    routes: list[list[Point]]
    width: float
    height: float


def layout(
    sizes: Mapping[str, tuple[float, float]],
    arrows: Sequence[tuple[str, str]],
    gap: tuple[float, float] = (18, 30),
) -> Layout:
    """Places boxes.

    Args:
        sizes: (width, height) by name, each box after those that its arrows come from.
        arrows: (from, to) pairs. One that points up in the order of `sizes` is drawn and moves no box.
        gap: between boxes of a row, and between rows.
    """
    rows = _rows(list(sizes), arrows)
    grid = _Grid(rows, sizes, arrows, gap[0])
    for sweep in range(_SWEEPS):
        grid.order(down=sweep % 2 == 0)
    for sweep in range(_SWEEPS):
        grid.place(down=sweep % 2 == 0)
    return grid.layout(gap[1])


def _rows(names: Sequence[str], arrows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The row of each box: one below the lowest that it reads; one that reads nothing stands right above a reader."""
    position = {name: index for index, name in enumerate(names)}
    inputs, outputs = defaultdict(list), defaultdict(list)
    for source, target in arrows:
        if position[source] < position[target]:
            inputs[target].append(source)
            outputs[source].append(target)
    rows: dict[str, int] = {}
    for name in names:
        rows[name] = max((rows[source] + 1 for source in inputs[name]), default=0)
    for name in names:
        if not inputs[name] and outputs[name]:
            rows[name] = min(rows[target] for target in outputs[name]) - 1
    return rows


@dataclasses.dataclass(eq=False)
class _Cell:
    """A box, or the place where a long arrow crosses a row."""

    width: float
    above: list[_Cell] = dataclasses.field(default_factory=list)
    below: list[_Cell] = dataclasses.field(default_factory=list)
    index: float = 0
    x: float = 0

    def joined(self, down: bool) -> list[_Cell]:
        return self.above if down else self.below


class _Grid:
    """Rows of cells."""

    def __init__(
        self,
        rows: Mapping[str, int],
        sizes: Mapping[str, tuple[float, float]],
        arrows: Sequence[tuple[str, str]],
        gap: float,
    ) -> None:
        self.row_of, self.sizes, self.arrows, self.gap = rows, sizes, arrows, gap
        self.boxes = {name: _Cell(width) for name, (width, _) in sizes.items()}
        self.rows: list[list[_Cell]] = [[] for _ in range(max(rows.values(), default=-1) + 1)]
        for name, row in rows.items():
            self.rows[row].append(self.boxes[name])
        self.through = [self._joined(source, target) for source, target in arrows]
        for cells in self.rows:
            self._number(cells)
            self._spread(cells, [0.0] * len(cells))

    def _joined(self, source: str, target: str) -> list[_Cell]:
        """The cells of an arrow between its ends, joined to each other."""
        span = self.row_of[target] - self.row_of[source]
        if not 0 < span <= _LONGEST_ROUTED:
            return []
        crossings = [_Cell(0) for _ in range(span - 1)]
        for offset, cell in enumerate(crossings, self.row_of[source] + 1):
            self.rows[offset].append(cell)
        chain = [self.boxes[source], *crossings, self.boxes[target]]
        for upper, lower in itertools.pairwise(chain):
            upper.below.append(lower)
            lower.above.append(upper)
        return crossings

    def _number(self, cells: list[_Cell]) -> None:
        for index, cell in enumerate(cells):
            cell.index = index

    def order(self, down: bool) -> None:
        """Sorts each row by the mean index of what its cells are joined to in the row before."""
        for cells in self.rows if down else reversed(self.rows):
            means = {id(c): _mean([other.index for other in c.joined(down)], c.index) for c in cells}
            cells.sort(key=lambda cell: means[id(cell)])
            self._number(cells)

    def place(self, down: bool) -> None:
        """Moves each row's cells towards the mean place of what they are joined to in the row before."""
        for cells in self.rows if down else reversed(self.rows):
            self._spread(cells, [_mean([other.x for other in cell.joined(down)], cell.x) for cell in cells])

    def _spread(self, cells: Sequence[_Cell], wanted: Sequence[float]) -> None:
        """The places nearest to those wanted (least squares) at which cells keep their order and do not overlap.

        Without the widths this is isotonic regression, by pooling neighbours that are out of order.
        """
        offsets, edge = [], 0.0
        for cell in cells:
            offsets.append(edge + cell.width / 2)
            edge += cell.width + self.gap
        pools: list[tuple[float, int]] = []  # (mean, count)
        for want, offset in zip(wanted, offsets, strict=True):
            mean, count = want - offset, 1
            while pools and pools[-1][0] > mean:
                other, more = pools.pop()
                mean, count = (mean * count + other * more) / (count + more), count + more
            pools.append((mean, count))
        shifts = [mean for mean, count in pools for _ in range(count)]
        for cell, shift, offset in zip(cells, shifts, offsets, strict=True):
            cell.x = shift + offset

    def layout(self, gap: float) -> Layout:
        heights = [0.0] * len(self.rows)
        for name, row in self.row_of.items():
            heights[row] = max(heights[row], self.sizes[name][1])
        middles, top = [], 0.0
        for height in heights:
            middles.append(top + height / 2)
            top += height + gap
        cells = [cell for row in self.rows for cell in row]
        left = min((cell.x - cell.width / 2 for cell in cells), default=0)
        right = max((cell.x + cell.width / 2 for cell in cells), default=0)
        centers = {name: (cell.x - left, middles[self.row_of[name]]) for name, cell in self.boxes.items()}
        routes = []
        for (source, target), crossings in zip(self.arrows, self.through, strict=True):
            (x0, y0), (x1, y1) = centers[source], centers[target]
            first = self.row_of[source] + 1
            between = [(cell.x - left, middles[first + index]) for index, cell in enumerate(crossings)]
            ends = (x0, y0 + self.sizes[source][1] / 2), (x1, y1 - self.sizes[target][1] / 2)
            routes.append([ends[0], *between, ends[1]])
        return Layout(centers, routes, right - left, max(0.0, top - gap))


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
