"""Charts as SVG text. Colours and fonts come from the style sheet of the page, so a chart follows its theme.

Every chart carries its numbers as JSON in `data-chart`, from which the page shows the values under the pointer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from miles.report.signals import moving_mean
from miles.report.summary import Phase, number

LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 22
MAX_POINTS = 400  # more do not show on a screen


@dataclass(frozen=True, slots=True)
class Line:
    """`smooth` draws the moving mean over the single steps; `dots` draws points joined by a thin line."""

    label: str
    points: Sequence[tuple[float, float]]
    hue: str
    smooth: bool = True
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart's numbers lie in its picture."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low or 1.0
        return self.height - BOTTOM - (value - self.y_low) / span * (self.height - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    width: int = 360,
    height: int = 170,
    y_low: float | None = None,
    y_high: float | None = None,
    band: tuple[float, float] | None = None,
    band_title: str = "",
) -> str:
    """Lines over steps. `band` shades the healthy range. Points that are no finite number leave a gap."""
    lines = [_thinned(line) for line in lines if any(math.isfinite(y) for _, y in line.points)]
    if not lines:
        return '<p class="none">not logged</p>'
    values = [y for line in lines for _, y in line.points if math.isfinite(y)] + list(band or ())
    steps = [x for line in lines for x, _ in line.points]
    low, high = _padded(min(values), max(values))
    frame = Frame(
        width, height, min(steps), max(steps), low if y_low is None else y_low, high if y_high is None else y_high
    )
    parts = _axes(frame)
    if band is not None:
        top, bottom = frame.y(band[1]), frame.y(band[0])
        parts.append(
            f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{width - LEFT - RIGHT}" '
            f'height="{max(bottom - top, 1):.1f}"><title>{escape(band_title)}</title></rect>'
        )
    for line in lines:
        parts += _draw(line, frame)
    return _wrap(parts, frame, title, _chart_data(frame, [(line.label, line.hue, line.points) for line in lines]))


def _thinned(line: Line) -> Line:
    if len(line.points) <= MAX_POINTS:
        return line
    stride = math.ceil(len(line.points) / MAX_POINTS)
    return Line(line.label, line.points[::stride], line.hue, line.smooth, line.dots)


def _draw(line: Line, frame: Frame) -> list[str]:
    points = [(frame.x(x), frame.y(y)) for x, y in line.points if math.isfinite(y)]
    hue = f"s-{line.hue}"
    if len(points) == 1 or line.dots:
        marks = "".join(f'<circle class="f-{line.hue}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
        return [_path(points, f"{hue} thin"), marks]
    if not line.smooth or len(points) < 4:
        return [_path(points, f"{hue} bold")]
    means = moving_mean([y for _, y in line.points if math.isfinite(y)])
    smooth = [(x, frame.y(mean)) for (x, _), mean in zip(points, means, strict=True)]
    return [_path(points, f"{hue} faint"), _path(smooth, f"{hue} bold")]


def _path(points: Sequence[tuple[float, float]], classes: str) -> str:
    steps = " ".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))
    return f'<path class="{classes}" d="{steps}"/>'


def _padded(low: float, high: float) -> tuple[float, float]:
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return (0.0 if low == 0 else low - room), high + room
    room = (high - low) * 0.06
    # Numbers that cannot be negative keep 0 as their floor when they come near it.
    return (0.0 if 0 <= low < (high - low) * 0.5 else low - room), high + room


def _axes(frame: Frame) -> list[str]:
    parts = []
    right, bottom = frame.width - RIGHT, frame.height - BOTTOM
    for tick in ticks(frame.y_low, frame.y_high):
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(tick)}</text>')
    for tick in ticks(frame.x_low, frame.x_high, 5):
        if tick == int(tick):
            x = frame.x(tick)
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{_tick(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _tick(value: float) -> str:
    """Short enough for the margin: 1.5e-7, 20k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return re.sub(r"e([-+])0*", lambda match: "e" + match[1].strip("+"), f"{value:.4g}")


def _chart_data(frame: Frame, lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]) -> str:
    data = {
        "x": [LEFT, frame.width - RIGHT, frame.x_low, frame.x_high],
        "lines": [
            {"label": label, "hue": hue, "points": [[x, number(y)] for x, y in points]} for label, hue, points in lines
        ],
    }
    return json.dumps(data, separators=(",", ":"))


def _wrap(parts: Sequence[str], frame: Frame, title: str, data: str = "") -> str:
    attribute = f' data-chart="{escape(data, quote=True)}"' if data else ""
    return (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(title, quote=True)}"{attribute}>{"".join(parts)}</svg>'
    )


def stacked_bars(
    columns: Sequence[tuple[int, Sequence[Phase]]], *, title: str, width: int = 520, height: int = 200, unit: str = "s"
) -> str:
    """One column per step, made of phases (or of anything with a name, a colour and a size)."""
    columns = [column for column in columns if column[1]]
    if not columns:
        return '<p class="none">not logged</p>'
    stride = math.ceil(len(columns) / 200)
    columns = columns[::stride]
    highest = max(sum(phase.seconds for phase in phases) for _, phases in columns)
    first, last = columns[0][0], columns[-1][0]
    frame = Frame(width, height, first - 0.5 * stride, last + 0.5 * stride, 0.0, highest * 1.05 or 1.0)
    parts = _axes(frame)
    room = (width - LEFT - RIGHT) / (len(columns) + 0.0)
    for step, phases in columns:
        base = 0.0
        for phase in phases:
            top, bottom = frame.y(base + phase.seconds), frame.y(base)
            base += phase.seconds
            if bottom - top < 0.05:
                continue
            parts.append(
                f'<rect class="f-{phase.hue} shade-{phase.shade}" x="{frame.x(step) - room * 0.42:.1f}" y="{top:.1f}" '
                f'width="{max(room * 0.84, 0.8):.1f}" height="{bottom - top:.1f}">'
                f"<title>step {step}, {escape(phase.title)}: {number(phase.seconds)} {unit}</title></rect>"
            )
    return _wrap(parts, frame, title)


def phase_bars(phases: Sequence[Phase], *, title: str, width: int = 520, unit: str = "s") -> str:
    """One bar per phase with its number, the longest one as wide as the picture: where the time of one step goes."""
    if not phases:
        return '<p class="none">not logged</p>'
    row, label = 26, 120
    height = row * len(phases) + 8
    longest = max(phase.seconds for phase in phases) or 1.0
    total = sum(phase.seconds for phase in phases) or 1.0
    parts = []
    for index, phase in enumerate(phases):
        y = 4 + index * row
        size = phase.seconds / longest * (width - label - 130)
        parts.append(f'<text class="label" x="{label - 8}" y="{y + 15}" text-anchor="end">{escape(phase.title)}</text>')
        box = f'x="{label}" y="{y + 2}" width="{max(size, 1.5):.1f}" height="{row - 7}" rx="2"'
        parts.append(f'<rect class="f-{phase.hue} shade-{phase.shade}" {box}/>')
        share = f"{phase.seconds / total:.1%}"
        parts.append(
            f'<text class="value" x="{label + size + 8:.1f}" y="{y + 15}">{number(phase.seconds)} {unit} '
            f'<tspan class="tick">{share}</tspan></text>'
        )
    return _wrap(parts, Frame(width, height, 0, 1, 0, 1), title)


def sparkline(values: Sequence[float], hue: str, *, width: int = 120, height: int = 28) -> str:
    """A small line without axes."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span = high - low or 1.0
    points = [
        (2 + index / (len(finite) - 1) * (width - 4), height - 3 - (value - low) / span * (height - 6))
        for index, value in enumerate(finite)
    ]
    line = _path(points, f"s-{hue} bold")
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="xMinYMid"'
    return f'<svg class="spark" {box} aria-hidden="true">{line}</svg>'
