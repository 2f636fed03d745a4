"""What every page is made with: templates in which each value is text, and how values are shown."""

from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from slime import __version__
from slime.view.charts import Spark, number_text

HERE = Path(__file__).parent
LONGEST_TEXT = 200_000  # characters of a text on one page
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def environment() -> jinja2.Environment:
    """The templates of all pages."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    made.globals.update(version=__version__, number=number_text, when=when, Spark=Spark)
    made.filters["data"] = data_block
    made.filters["cut"] = cut
    return made


def visible(value: Any) -> Any:
    """A text with its control characters, and those that are invisible or change the order of
    others, spelled out. Every value of a page goes through this.
    """
    if type(value) is not str or (value.isascii() and value.isprintable()):
        return value
    return _HIDDEN.sub(_spelled_out, value)


def _spelled_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def when(seconds: float | None) -> markupsafe.Markup:
    """A time, as UTC, which the page's script shows in the reader's zone."""
    if seconds is None:
        return markupsafe.Markup("")
    try:
        moment = datetime.datetime.fromtimestamp(float(seconds), datetime.timezone.utc)
    except (OverflowError, OSError, ValueError):
        return markupsafe.Markup("")
    return markupsafe.Markup('<time datetime="{}">{} UTC</time>').format(
        moment.isoformat(timespec="seconds"), moment.strftime("%Y-%m-%d %H:%M")
    )


def data_block(value: Any) -> markupsafe.Markup:
    """JSON that stands in a page: no text in it can end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)  # the characters of markup are escaped above


def cut(text: object, limit: int = LONGEST_TEXT) -> str:
    """A text, without what is beyond the limit."""
    shown = "" if text is None else str(text)
    return shown if len(shown) <= limit else f"{shown[:limit]} ... {len(shown) - limit:,} more"


def as_plain(value: Any) -> Any:
    """A value of a file as JSON has it: NaN and infinities are texts, bytes and others described."""
    if isinstance(value, dict):
        return {str(key): as_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return number_text(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
