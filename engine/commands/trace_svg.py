"""Draws a trace document as SVG: one lane per request, chunks as bars over token positions.

Marks differ in shape, not in colour, so the picture survives a greyscale print: bars alternate two greys; replayed
tokens (run, not written) are hatched; an export is a triangle, a published boundary a filled diamond, and the place
a hit resumes from a vertical stroke with a dot.
"""

from typing import Any
from xml.sax.saxutils import escape

LANE, TOP, LEFT, WIDTH = 64, 70, 90, 960
MAX_GRID_LINES = 128


def draw(document: dict[str, Any]) -> str:
    """The SVG text of a trace document (see trace.as_document)."""
    requests = document["requests"]
    longest = max(request["prompt"] for request in requests)
    height = TOP + LANE * len(requests) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" font-family="sans-serif"'
        ' font-size="11">',
        '<defs><pattern id="replay" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path d="M0 6L6 0" stroke="#000" stroke-width="0.8"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(document["policy"])}: block {document["block"]},'
        f" budget {document['budget']}</text>",
        *_legend(),
        *_grid(document["block"], longest, TOP + LANE * len(requests)),
    ]
    for lane, request in enumerate(requests):
        y = TOP + LANE * lane
        parts.append(f'<text x="8" y="{y + 24}">{request["prompt"]:,} tokens</text>')
        if request["cached"]:
            x = _x(request["cached"], longest)
            parts.append(f'<path d="M{x} {y}v34" stroke="#000"/><circle cx="{x}" cy="{y}" r="3"/>')
    for step in document["steps"]:
        for index, chunk in enumerate(step["chunks"]):
            parts += _bar(chunk, step["step"], TOP + LANE * chunk["request"], longest, index)
    return "\n".join([*parts, "</svg>", ""])


def _x(position: int, longest: int) -> float:
    return round(LEFT + WIDTH * position / longest, 2)


def _bar(chunk: dict[str, Any], step: int, y: int, longest: int, index: int) -> list[str]:
    left, right = _x(chunk["start"], longest), _x(chunk["end"], longest)
    shade = "#d8d8d8" if step % 2 else "#b4b4b4"
    box = f'x="{left}" y="{y + 8}" height="22"'
    title = escape(f"step {step}: {chunk['start']:,} to {chunk['end']:,}; {chunk['reason']}")
    parts = [
        f'<rect {box} width="{right - left:.2f}" fill="{shade}" stroke="#444"><title>{title}</title></rect>'
    ]
    if right - left > 18:
        parts.append(f'<text x="{(left + right) / 2:.2f}" y="{y + 23}" text-anchor="middle">{step}</text>')
    if chunk["write_from"] > chunk["start"]:
        replayed = _x(min(chunk["write_from"], chunk["end"]), longest) - left
        parts.append(f'<rect {box} width="{replayed:.2f}" fill="url(#replay)"/>')
    for position in chunk["exports"]:
        parts.append(f'<path d="M{_x(position, longest)} {y + 8}l-4 -7h8z" fill="#fff" stroke="#000"/>')
    for position in chunk["publishes"]:
        parts.append(f'<path d="M{_x(position, longest)} {y + 32}l4 5l-4 5l-4 -5z"/>')
    return parts


def _grid(block: int, longest: int, bottom: int) -> list[str]:
    """Every n-th boundary, so that at most MAX_GRID_LINES are drawn; n is labelled."""
    every = -(-longest // (block * MAX_GRID_LINES))
    lines = [
        f'<path d="M{_x(m, longest)} {TOP}V{bottom}" stroke="#ddd"/>'
        for m in range(0, longest + 1, block * every)
    ]
    return [*lines, f'<text x="{LEFT}" y="{bottom + 18}">a line every {block * every:,} tokens</text>']


def _legend() -> list[str]:
    y = 40
    return [
        f'<path d="M{LEFT + 4} {y}l-4 -7h8z" fill="#fff" stroke="#000"/><text x="{LEFT + 14}" y="{y}">exported</text>',
        f'<path d="M{LEFT + 90} {y - 9}l4 5l-4 5l-4 -5z"/><text x="{LEFT + 100}" y="{y}">published</text>',
        f'<path d="M{LEFT + 180} {y - 10}v12" stroke="#000"/><circle cx="{LEFT + 180}" cy="{y - 10}" r="3"/>',
        f'<text x="{LEFT + 190}" y="{y}">resumes here (hit)</text>',
        f'<rect x="{LEFT + 310}" y="{y - 10}" width="16" height="12" fill="url(#replay)" stroke="#444"/>',
        f'<text x="{LEFT + 332}" y="{y}">run, not written</text>',
        f'<text x="{LEFT + 440}" y="{y}">numbers: the step</text>',
    ]
