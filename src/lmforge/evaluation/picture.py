"""A picture of an evaluation as SVG: the reliability diagram and the bits per byte of every domain."""

from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

INK, QUIET, BLUE, RED = "#1f2937", "#9ca3af", "#3b82f6", "#dc2626"
SIDE, LEFT, TOP, GAP, ROW = 280, 56, 64, 84, 18  # pixels
MOST = 40  # domains drawn
NAME, BARS = 150, 260  # widths of a domain's name and of the longest bar


def draw(result: dict[str, Any]) -> str | None:
    """The whole SVG file, None when the evaluation has neither calibration nor domains."""
    parts: list[str] = []
    right, low = LEFT, TOP
    if "calibration" in result:
        parts += _reliability(result)
        right, low = LEFT + SIDE + GAP, TOP + SIDE + 44
    if "domains" in result:
        parts += _domains(result["domains"], right)
        low = max(low, TOP + ROW * min(len(result["domains"]), MOST + 1) + 16)
        right += NAME + BARS + 64
    if not parts:
        return None
    title = f"{result['split']}, step {result['step']}, {result['targets']:,} targets"
    frame = f'<rect width="{right}" height="{low}" fill="white"/>' + _text(LEFT, 24, title, weight="bold")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{low}" font-family="sans-serif">'
    return "\n".join([head, frame, *parts, "</svg>\n"])


def _reliability(result: dict[str, Any]) -> Iterator[str]:
    """Bars of accuracy over confidence; what lacks to the diagonal in red, darker where there are more targets."""
    bins = result["calibration"]["bins"]
    most = max(entry["targets"] for entry in bins)
    yield _text(LEFT, TOP - 14, f"reliability: expected calibration error {result['ece']:.4f}")
    for entry in bins:
        x, width = LEFT + SIDE * entry["above"], SIDE * (entry["to"] - entry["above"])
        low, high = sorted((entry["accuracy"], entry["confidence"]))
        shade = 0.25 + 0.75 * (entry["targets"] / most) ** 0.5
        yield _rect(x, TOP + SIDE * (1 - entry["accuracy"]), width - 1, SIDE * entry["accuracy"], BLUE, shade)
        yield _rect(x, TOP + SIDE * (1 - high), width - 1, SIDE * (high - low), RED, 0.35)
    yield f'<path d="M{LEFT} {TOP + SIDE} l{SIDE} {-SIDE}" stroke="{INK}" stroke-dasharray="4 4"/>'
    yield f'<path d="M{LEFT} {TOP} v{SIDE} h{SIDE}" stroke="{QUIET}" fill="none"/>'
    for tick in (0.0, 0.5, 1.0):
        yield _text(LEFT + SIDE * tick, TOP + SIDE + 16, f"{tick:g}", anchor="middle", fill=QUIET)
        yield _text(LEFT - 8, TOP + SIDE * (1 - tick) + 4, f"{tick:g}", anchor="end", fill=QUIET)
    yield _text(LEFT + SIDE / 2, TOP + SIDE + 34, "confidence (bar: accuracy, red: the gap)", anchor="middle")


def _domains(domains: dict[str, dict[str, Any]], x: float) -> Iterator[str]:
    key = "bits_per_byte" if all("bits_per_byte" in row for row in domains.values()) else "loss"
    yield _text(x, TOP - 14, f"{key.replace('_', ' ')} by domain, the hardest first")
    longest = max(row[key] for row in domains.values()) or 1.0
    for number, (name, row) in enumerate(list(domains.items())[:MOST]):
        y = TOP + ROW * number
        yield _text(x + NAME - 8, y + 12, name if len(name) < 20 else f"{name[:18]}…", anchor="end")
        yield _rect(x + NAME, y + 2, BARS * row[key] / longest, ROW - 5, BLUE, 0.8)
        yield _text(x + NAME + BARS * row[key] / longest + 6, y + 12, f"{row[key]:.3f}", fill=QUIET)
    if len(domains) > MOST:
        yield _text(x + NAME, TOP + ROW * MOST + 12, f"and {len(domains) - MOST} more", fill=QUIET)


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" fill-opacity="{opacity:.2f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = INK, weight: str = "normal") -> str:
    style = f'font-size="12" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    shown = "".join(character for character in text if character.isprintable())
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(shown)}</text>'
