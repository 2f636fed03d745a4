"""Text rules: what counts as nothing, and what a well-formed response looks like. Every function is
linear in the text.
"""

from __future__ import annotations

import functools
import re

from slime.gate.config import FormatSpec, Level

# Ranges of characters that show nothing: Unicode categories Zs, Zl, Zp (spaces), Cc (control), Cf
# (format: zero-width, BOM, soft hyphen, tags), Cs (lone surrogates), and joiners, fillers and
# variation selectors of other categories. Unassigned and private characters are not among them
# (newer emoji, a font's own signs), nor are format characters that are drawn (Arabic number signs).
# Written out because deriving them takes
# 0.2 s; a test derives them.
BLANK_RANGES = (
    (0x0000, 0x0020),
    (0x007F, 0x00A0),
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x1680, 0x1680),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x2000, 0x200F),
    (0x2028, 0x202F),
    (0x205F, 0x2064),
    (0x2066, 0x206F),
    (0x2800, 0x2800),
    (0x3000, 0x3000),
    (0x3164, 0x3164),
    (0xD800, 0xDFFF),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF9, 0xFFFB),
    (0x13430, 0x13438),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0001, 0xE0001),
    (0xE0020, 0xE007F),
    (0xE0100, 0xE01EF),
)
_VISIBLE = re.compile(
    "[^" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in BLANK_RANGES) + "]"
)


def is_blank(text: str) -> bool:
    """True if nothing a reader can see is left: whitespace, zero-width, BOM, NBSP, control, soft
    hyphen, selectors, tags ...

    Stops at the first visible character. Combining marks alone count as visible.
    """
    return _VISIBLE.search(text) is None


@functools.lru_cache(maxsize=64)
def _marker_pattern(spec: FormatSpec) -> re.Pattern:
    return re.compile(
        "|".join(re.escape(marker) for marker in sorted(spec.markers, key=len, reverse=True))
    )


def format_problem(
    text: str, spec: FormatSpec, level: Level, *, ends_with_end_token: bool | None = None
) -> str | None:
    """A message about what is wrong with the structure of `text`; None if it is well formed under
    `level`.

    lenient: required markers present, as many closing as opening ones. strict: also open before
    close, no nesting, counts, order, no role markers, end marker. `ends_with_end_token`: whether
    the last token is the end marker's token, None = unknown.
    """
    if not spec.markers and not spec.end_marker:
        return None
    found = _markers_in(text, spec)
    problem = _pairing_problem(found, spec)
    if problem is None and level is Level.STRICT:
        problem = _position_problem(found, spec) or _end_problem(text, spec, ends_with_end_token)
    return problem


def _markers_in(text: str, spec: FormatSpec) -> list[tuple[str, int]]:
    """(marker, character) in order, without what opaque pairs quote."""
    found = (
        [(m.group(), m.start()) for m in _marker_pattern(spec).finditer(text)]
        if spec.markers
        else []
    )
    return _outside_opaque_pairs(found, spec)


def _outside_opaque_pairs(found: list[tuple[str, int]], spec: FormatSpec) -> list[tuple[str, int]]:
    """`found` without the pair markers quoted inside an opaque pair; role markers stay."""
    opaque = {pair.open: pair.close for pair in spec.pairs if pair.opaque}
    if not opaque:
        return found
    kept, waiting_for = [], None
    for marker, position in found:
        if waiting_for is None or marker == waiting_for or marker in spec.forbidden:
            kept.append((marker, position))
        if waiting_for is None:
            waiting_for = opaque.get(marker)
        elif marker == waiting_for:
            waiting_for = None
    return kept


def _pairing_problem(found: list[tuple[str, int]], spec: FormatSpec) -> str | None:
    counts: dict[str, int] = {}
    for marker, _ in found:
        counts[marker] = counts.get(marker, 0) + 1
    for pair in spec.pairs:
        opened, closed = counts.get(pair.open, 0), counts.get(pair.close, 0)
        if pair.opened_by_prompt and closed == opened + 1:
            opened += 1
        if opened != closed:
            return f"{opened} x {pair.open} but {closed} x {pair.close}"
        if pair.required and not opened:
            return f"required {pair.open} ... {pair.close} is missing"
    return None


def _position_problem(found: list[tuple[str, int]], spec: FormatSpec) -> str | None:
    by_open = {pair.open: pair for pair in spec.pairs}
    by_close = {pair.close: pair for pair in spec.pairs}
    counts = {pair.open: 0 for pair in spec.pairs}
    first_at: dict[str, int] = {}
    inside = None
    opens = {marker for marker, _ in found if marker in by_open}
    for pair in spec.pairs:
        if (
            pair.opened_by_prompt
            and pair.open not in opens
            and any(marker == pair.close for marker, _ in found)
        ):
            inside, counts[pair.open], first_at[pair.open] = pair, 1, -1
    for marker, position in found:
        if marker in by_open:
            if inside is not None:
                return f"{marker} at character {position} inside {inside.open}"
            inside = by_open[marker]
            counts[marker] += 1
            first_at.setdefault(marker, position)
            if inside.max_count is not None and counts[marker] > inside.max_count:
                return (
                    f"{marker} appears {counts[marker]} times, at most {inside.max_count} allowed"
                )
        elif marker in by_close:
            if inside is not by_close[marker]:
                return f"{marker} at character {position} closes nothing"
            inside = None
        elif spec.forbidden_everywhere or inside is not None:
            return f"role marker {marker} at character {position}"
    present = [marker for marker in spec.order if marker in first_at]
    for before, after in zip(present, present[1:], strict=False):
        if first_at[before] > first_at[after]:
            return f"{after} comes before {before}"
    return None


def answer_of(text: str, spec: FormatSpec) -> str | None:
    """Stripped content of the last pair that `spec.answer` names, None if there is none. Neither
    reasoning outside the pair comes along, nor an answer that an opaque pair quotes.
    """
    pair = next((pair for pair in spec.pairs if pair.open == spec.answer), None)
    if pair is None:
        return None
    start, answer = 0 if pair.opened_by_prompt else None, None
    for marker, position in _markers_in(text, spec):
        if marker == pair.open:
            start = position + len(marker)
        elif marker == pair.close and start is not None:
            start, answer = None, text[start:position].strip()
    return answer


def _end_problem(text: str, spec: FormatSpec, ends_with_end_token: bool | None) -> str | None:
    if spec.end_marker is None or ends_with_end_token or text.rstrip().endswith(spec.end_marker):
        return None
    return f"end marker {spec.end_marker} is missing at the end"
