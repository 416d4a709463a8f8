"""Draws a trace document as SVG: one lane per request, chunks as bars over token positions.

Marks differ in shape, not in colour, so the picture survives a greyscale print: bars alternate two greys from step to
step; tokens that are run and not written are hatched; an export is a triangle above the bar, a published boundary a
diamond below it; a stroke with a dot is where the request itself resumed; below, a ring and a square are where the
same prompt and a longer one would.
"""

from typing import Any
from xml.sax.saxutils import escape

LANE, TOP, LEFT, WIDTH = 72, 80, 100, 960
MAX_GRID_LINES = 128
SHAPES = {  # what happened, drawn at (x, y)
    "exports": '<path d="M{x} {y}l-4 -7h8z" fill="#fff" stroke="#000"/>',
    "publishes": '<path d="M{x} {y}l4 5l-4 5l-4 -5z"/>',
    "cached": '<path d="M{x} {y}v30" stroke="#000" stroke-width="1.5"/><circle cx="{x}" cy="{y}" r="3"/>',
    "resend_hit": '<circle cx="{x}" cy="{y}" r="3" fill="none" stroke="#000"/>',
    "extend_hit": '<path d="M{x} {y}m-5 -5h10v10h-10z" fill="none" stroke="#000"/>',
}
LEGEND = {  # where each stands in the legend, and what it means
    "exports": (0, 52, "exported"),
    "publishes": (90, 43, "published"),
    "cached": (180, 36, "this request resumed here"),
    "resend_hit": (350, 48, "the same prompt again resumes here"),
    "extend_hit": (560, 48, "a longer prompt resumes here"),
}
DEFINITIONS = """<defs><pattern id="replay" width="6" height="6" patternUnits="userSpaceOnUse">
<path d="M0 6L6 0" stroke="#000" stroke-width="0.8"/></pattern></defs>
<rect width="100%" height="100%" fill="#fff"/>"""


def draw(document: dict[str, Any]) -> str:
    """The SVG text of a trace document (see trace.as_document)."""
    requests, block = document["requests"], document["block"]
    longest = max(request["prompt"] for request in requests)
    bottom = TOP + LANE * len(requests)
    view = f'viewBox="0 0 {LEFT + WIDTH + 20} {bottom + 30}" font-family="sans-serif" font-size="11"'
    title = f"{escape(document['policy'])}: block {block}, budget {document['budget']:,}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', DEFINITIONS]
    parts.append(f'<text x="{LEFT}" y="20" font-size="14">{title}</text>')
    parts += [*_legend(), *_grid(block, longest, bottom)]
    for lane, request in enumerate(requests):
        parts += _lane(request, TOP + LANE * lane, longest)
    for step in document["steps"]:
        for chunk in step["chunks"]:
            parts += _bar(chunk, step["step"], TOP + LANE * chunk["request"], longest)
    return "\n".join([*parts, "</svg>", ""])


def _x(position: int, longest: int) -> float:
    return round(LEFT + WIDTH * position / longest, 2)


def _mark(name: str, x: float, y: int) -> str:
    return SHAPES[name].format(x=x, y=y)


def _lane(request: dict[str, Any], y: int, longest: int) -> list[str]:
    """What belongs to the whole request: its length, where it resumed, and what later prompts hit."""
    parts = [f'<text x="8" y="{y + 24}">{request["prompt"]:,} tokens</text>']
    for name, below in (("cached", 0), ("resend_hit", 50), ("extend_hit", 50)):
        if request[name]:
            parts.append(_mark(name, _x(request[name], longest), y + below))
    return parts


def _bar(chunk: dict[str, Any], step: int, y: int, longest: int) -> list[str]:
    left, right = _x(chunk["start"], longest), _x(chunk["end"], longest)
    shade = "#d8d8d8" if step % 2 else "#b4b4b4"
    box = f'x="{left}" y="{y + 8}" height="22"'
    title = escape(f"step {step}: {chunk['start']:,} to {chunk['end']:,}; {chunk['reason']}")
    look = f'width="{right - left:.2f}" fill="{shade}" stroke="#444"'
    parts = [f"<rect {box} {look}><title>{title}</title></rect>"]
    if chunk["write_from"] > chunk["start"]:
        replayed = _x(min(chunk["write_from"], chunk["end"]), longest) - left
        parts.append(f'<rect {box} width="{replayed:.2f}" fill="url(#replay)"/>')
    if right - left > 18:
        parts.append(f'<text x="{(left + right) / 2:.2f}" y="{y + 23}" text-anchor="middle">{step}</text>')
    for name, below in (("exports", 8), ("publishes", 32)):
        parts += [_mark(name, _x(position, longest), y + below) for position in chunk[name]]
    return parts


def _grid(block: int, longest: int, bottom: int) -> list[str]:
    """Every n-th boundary, so that at most MAX_GRID_LINES are drawn; n is labelled."""
    every = block * -(-longest // (block * MAX_GRID_LINES))
    places = [_x(position, longest) for position in range(0, longest + 1, every)]
    lines = [f'<path d="M{x} {TOP}V{bottom}" stroke="#ddd"/>' for x in places]
    return [*lines, f'<text x="{LEFT}" y="{bottom + 18}">a line every {every:,} tokens</text>']


def _legend() -> list[str]:
    parts = [f'<rect x="{LEFT + 740}" y="42" width="16" height="12" fill="url(#replay)" stroke="#444"/>']
    parts += [_mark(name, LEFT + x + 4, y) for name, (x, y, _) in LEGEND.items()]
    texts = [(x + 14, meaning) for x, _, meaning in LEGEND.values()]
    texts += [(762, "run, not written"), (870, "numbers: the step")]
    return parts + [f'<text x="{LEFT + x}" y="52">{text}</text>' for x, text in texts]
