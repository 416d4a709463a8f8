"""Draws a trace document as SVG: one lane per request, chunks as bars over token positions.

Marks differ in shape, not in colour, so the picture survives a greyscale print: bars alternate two greys from step to
step; tokens that are run and not written are hatched; an export is a triangle above the bar, a published boundary a
diamond below it; a stroke with a dot is where the request itself resumed; below, a ring and a square are where the
same prompt and a longer one would.
"""

from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

LANE, TOP, LEFT, WIDTH = 72, 80, 100, 960
MAX_GRID_LINES = 128
HATCH = (
    '<defs><pattern id="replay" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M0 6L6 0" stroke="#000" stroke-width="0.8"/></pattern></defs>'
)


def draw(document: dict[str, Any]) -> str:
    """The SVG text of a trace document (see trace.as_document)."""
    requests, block = document["requests"], document["block"]
    longest = max(request["prompt"] for request in requests)
    bottom = TOP + LANE * len(requests)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 30}"'
        ' font-family="sans-serif" font-size="11">',
        HATCH,
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(document["policy"])}: block {block},'
        f" budget {document['budget']:,}</text>",
        *_legend(),
        *_grid(block, longest, bottom),
    ]
    for lane, request in enumerate(requests):
        parts += _lane(request, TOP + LANE * lane, longest)
    for step in document["steps"]:
        for chunk in step["chunks"]:
            parts += _bar(chunk, step["step"], TOP + LANE * chunk["request"], longest)
    return "\n".join([*parts, "</svg>", ""])


def _x(position: int, longest: int) -> float:
    return round(LEFT + WIDTH * position / longest, 2)


def _export(x: float, y: float) -> str:
    return f'<path d="M{x} {y}l-4 -7h8z" fill="#fff" stroke="#000"/>'


def _published(x: float, y: float) -> str:
    return f'<path d="M{x} {y}l4 5l-4 5l-4 -5z"/>'


def _resumed(x: float, y: float) -> str:
    return f'<path d="M{x} {y}v30" stroke="#000" stroke-width="1.5"/><circle cx="{x}" cy="{y}" r="3"/>'


def _resend(x: float, y: float) -> str:
    return f'<circle cx="{x}" cy="{y}" r="3" fill="none" stroke="#000"/>'


def _extend(x: float, y: float) -> str:
    return f'<rect x="{round(x - 5, 2)}" y="{y - 5}" width="10" height="10" fill="none" stroke="#000"/>'


def _lane(request: dict[str, Any], y: int, longest: int) -> list[str]:
    """What belongs to the whole request: its length, where it resumed, and what later prompts hit."""
    parts = [f'<text x="8" y="{y + 24}">{request["prompt"]:,} tokens</text>']
    marks = (("cached", _resumed, 0), ("resend_hit", _resend, 50), ("extend_hit", _extend, 50))
    for name, mark, below in marks:
        if request[name]:
            parts.append(mark(_x(request[name], longest), y + below))
    return parts


def _bar(chunk: dict[str, Any], step: int, y: int, longest: int) -> list[str]:
    left, right = _x(chunk["start"], longest), _x(chunk["end"], longest)
    shade = "#d8d8d8" if step % 2 else "#b4b4b4"
    box = f'x="{left}" y="{y + 8}" height="22"'
    title = escape(f"step {step}: {chunk['start']:,} to {chunk['end']:,}; {chunk['reason']}")
    parts = [
        f'<rect {box} width="{right - left:.2f}" fill="{shade}" stroke="#444"><title>{title}</title></rect>'
    ]
    if chunk["write_from"] > chunk["start"]:
        replayed = _x(min(chunk["write_from"], chunk["end"]), longest) - left
        parts.append(f'<rect {box} width="{replayed:.2f}" fill="url(#replay)"/>')
    if right - left > 18:
        parts.append(f'<text x="{(left + right) / 2:.2f}" y="{y + 23}" text-anchor="middle">{step}</text>')
    parts += [_export(_x(position, longest), y + 8) for position in chunk["exports"]]
    return parts + [_published(_x(position, longest), y + 32) for position in chunk["publishes"]]


def _grid(block: int, longest: int, bottom: int) -> list[str]:
    """Every n-th boundary, so that at most MAX_GRID_LINES are drawn; n is labelled."""
    every = -(-longest // (block * MAX_GRID_LINES))
    lines = [
        f'<path d="M{_x(m, longest)} {TOP}V{bottom}" stroke="#ddd"/>'
        for m in range(0, longest + 1, block * every)
    ]
    return [*lines, f'<text x="{LEFT}" y="{bottom + 18}">a line every {block * every:,} tokens</text>']


def _legend() -> list[str]:
    marks: tuple[tuple[int, Callable[[float, float], str], int, str], ...] = (
        (0, _export, 52, "exported"),
        (90, _published, 43, "published"),
        (180, _resumed, 36, "this request resumed here"),
        (350, _resend, 48, "the same prompt again resumes here"),
        (560, _extend, 48, "a longer prompt resumes here"),
    )
    parts = [
        f'{mark(LEFT + x + 4, y)}<text x="{LEFT + x + 14}" y="52">{text}</text>' for x, mark, y, text in marks
    ]
    box = f'<rect x="{LEFT + 740}" y="42" width="16" height="12" fill="url(#replay)" stroke="#444"/>'
    return [
        *parts,
        f'{box}<text x="{LEFT + 762}" y="52">run, not written</text>',
        f'<text x="{LEFT + 870}" y="52">numbers: the step</text>',
    ]
