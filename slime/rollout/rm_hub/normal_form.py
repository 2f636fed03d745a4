"""One spelling for answers that are written alike: Unicode, LaTeX dressing and spacing, but no
meaning.

    "\\dfrac12" and "½" -> "\\frac{1}{2}"      "$\\left( 1,\\; 2 \\right)$" -> "(1, 2)" "−３ cm²" ->
                                               "-3 cm^{2}"

Text in \\text{...}, \\mathrm{...} and their kin is kept between MARKS, so that a unit is never
taken for a variable.
"""

from __future__ import annotations

import re
import unicodedata

from slime.rollout.rm_hub.boxes import closing_brace

OPEN, CLOSE = "\u27ea", "\u27eb"  # around what LaTeX sets as text
MARKS = OPEN + CLOSE
ROW_END = "\u21b5"

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣－⁻", "-"),
        **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\n\r\f\v", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062\u00ad", ""),
        **dict.fromkeys("’‘ʼ′`", "'"), **dict.fromkeys("“”„″", '"'), **dict.fromkeys("×✕", "\\times "), **dict.fromkeys("·⋅∙•∗", "\\cdot "),
        "÷": "/", "⁄": "/", "∕": "/", "π": "\\pi ", "Π": "\\Pi ", "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ",
        "≠": "\\ne ", "≈": "\\approx ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "∓": "\\mp ", "∅": "\\emptyset ", "°": "\\degree ",
        "º": "\\degree ", "˚": "\\degree ", "，": ", ", "、": ", ", "（": "(", "）": ")", "［": "[", "］": "]", "｛": "\\{", "｝": "\\}", "：": ":", "；": ";",
        "。": ".", "．": ".", "％": "%", "٫": ".", "٬": ",", "＝": "=", "＋": "+", "＊": "*", "／": "/", "＜": "<", "＞": ">", "…": "\\ldots ", "⋯": "\\ldots ",
        "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "θ": "\\theta ", "λ": "\\lambda ", "μ": "µ", "∨": "\\vee ", "→": "\\to ",
        "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    }
)  # fmt: skip
_VULGAR = re.compile(r"(?P<whole>\d?)(?P<fraction>[¼-¾⅐-⅞↉])")
_SCRIPTED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+|[{''.join(_SUBSCRIPTS)}]+")

# Commands that change the look of what they hold, and those that set it as text.
_STYLES = r"mathbf|mathit|mathsf|mathtt|boldsymbol|bm|bold|displaystyle|mathstrut|ensuremath|underline|mathbin|mathrel|mathopen|mathclose|mathord|mathpunct"
_TEXTS = r"text|textbf|textit|textrm|textsf|texttt|textnormal|textup|mathrm|mbox|hbox|rm|operatorname\*?|emph|textsc|underbar|unit|si"
_STYLE = re.compile(rf"\\(?:{_STYLES})\s*(?=\{{)")
_TEXT = re.compile(
    rf"\\(?:{_TEXTS})(?![A-Za-z])\s*(?:(?=\{{)|(?P<bare>[A-Za-z])(?![A-Za-z])|\s+(?P<word>[A-Za-z]+))"
)
_SPACES = re.compile(
    r"\\(?:,|;|:|!|>|/|\s|$|quad(?![a-z])|qquad(?![a-z])|enspace(?![a-z])|thinspace(?![a-z])|hspace\*?\{[^{}]*\}|phantom\{[^{}]*\}|displaystyle(?![a-z])"
    r"|textstyle(?![a-z])|scriptstyle(?![a-z])|limits(?![a-z])|nolimits(?![a-z])|left(?![a-z])|right(?![a-z])|[bB]igg?[lrm]?(?![a-z])|middle(?![a-z])"
    r"|mathstrut(?![a-z])|strut(?![a-z])|null(?![a-z]))|~"
)
# (pattern, what it becomes); the commands must end where the pattern ends.
_ALIASES = tuple(
    (re.compile(pattern + ("(?![A-Za-z])" if pattern[-1].isalpha() or pattern[-1] == ")" else "")), value)
    for pattern, value in (
        (r"\\[dtc]frac", r"\\frac"), (r"\\(?:leq|leqslant|leqq|lte)", r"\\le "), (r"\\(?:geq|geqslant|geqq|gte)", r"\\ge "), (r"\\lt", "<"), (r"\\gt", ">"),
        (r"\\neq", r"\\ne "), (r"\\not\s*=", r"\\ne "),
        (r"\\(?:rightarrow|longrightarrow|implies|Rightarrow)", r"\\to "), (r"\\(?:varnothing|empty)", r"\\emptyset "),
        (r"\\(?:dots|cdots|dotsc|dotsb)", r"\\ldots "), (r"\\(?:lbrace)", r"\\{"), (r"\\(?:rbrace)", r"\\}"), (r"\\(?:lbrack)", "["), (r"\\(?:rbrack)", "]"),
        (r"\\(?:lvert|rvert|vert|mid)", "|"), (r"\\(?:ast|star)", "*"), (r"\\div", "/"), (r"\\(?:circ|degree|degrees)", r"\\degree "), (r"\\colon", ":"),
        (r"\\(?:sim|simeq|cong|doteq)", r"\\approx "), (r"\\(?:pounds|textsterling)", "£"), (r"\\(?:euro|texteuro)", "€"), (r"\\(?:textdegree)", r"\\degree "),
        (r"\\(?:percent)", "%"), (r"\\langle", "("), (r"\\rangle", ")"), (r"\\(?:land|wedge)", r"\\wedge "), (r"\\(?:lor)", r"\\vee "),
    )
)  # fmt: skip
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\degree\s*\}|\\degree)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?P<top>\{|[A-Za-z0-9]|\\[a-z]+)")
_OVER = re.compile(r"^\s*\{?\s*(?P<top>[^{}]+?)\s*\\over(?![a-z])\s*(?P<bottom>[^{}]+?)\s*\}?\s*$")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(?P<what>\d|[A-Za-z](?![A-Za-z])|\\pi(?![a-z]))")
_SHORT_SCRIPT = re.compile(r"([\^_])\s*(\d+|[A-Za-z])")
_WORD_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt\s*(?=[\({0-9A-Za-z])")
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def normal_form(text: str) -> str:
    """The text in the one spelling, with single spaces, without the marks of a formula and the full
    stop around it.
    """
    text = _plain_characters(text).strip()
    # Two backslashes end a matrix's row; elsewhere a file was escaped twice.
    text = text.replace("\\\\", ROW_END if "\\begin" in text else "\\")
    text = _without_formula_marks(text)
    text = text.replace("\\%", "%").replace("\\#", "#").replace("\\&", "&").replace("\\_", "_")
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ",", text)
    text = re.sub(r"(?<=\d),\s*\\!\s*(?=\d)", ",", text)
    text = _with_marked_text(_without_styles(text))
    text = _SPACES.sub(" ", text)
    for pattern, value in _ALIASES:
        text = pattern.sub(value, text)
    text = _DEGREE.sub(r"\\degree ", text)
    text = _OVER.sub(r"\\frac{\g<top>}{\g<bottom>}", text)
    text = re.sub(r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}", text)
    text = _WORD_ROOT.sub(r"\\sqrt ", text)
    text = re.sub(r"(?<=\d)_(?=\d{3}(?!\d))", "", text)  # 10_000
    text = _SHORT_SCRIPT.sub(r"\1{\2}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\g<what>}", text)
    text = _with_braced_fractions(text)
    # "2\frac{1}{2}" is written with a space, as "2 1/2" is
    text = re.sub(r"(?<=[\d}])(?=\\[a-z])", " ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s*([,;])\s+", r"\1 ", text)
    return _without_outer_dress(text)


def squeezed(text: str) -> str:
    """A normal form without case, marks, quotes and the spaces that part no two numbers: equal
    texts are equal answers.
    """
    text = text.translate(str.maketrans("", "", MARKS + "\"'")).lower()
    text = re.sub(r"(?<=\d) (?=\d)|(?<=\d) (?=\\frac)", "\0", text)
    return re.sub(r"\s|(?<=[a-z])\.", "", text).rstrip(".").replace("\0", " ")


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text.translate(_CHARACTERS)
    text = _VULGAR.sub(_spelled_fraction, text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)  # the sign covers the number, \sqrt one digit
    text = _SCRIPTED.sub(_spelled_script, text)
    return "".join(_digit(character) for character in text.translate(_CHARACTERS))


def _digit(character: str) -> str:
    if character.isascii():
        return character
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    # full width, mathematical letters
    if "\uff01" <= character <= "\uff5e" or "\U0001d400" <= character <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", character)
    return character


def _spelled_fraction(match: re.Match) -> str:
    top, bottom = unicodedata.normalize("NFKC", match["fraction"]).split("⁄")
    return f"{match['whole']} " * bool(match["whole"]) + f"\\frac{{{top}}}{{{bottom}}}"


def _spelled_script(match: re.Match) -> str:
    table, mark = (_SUPERSCRIPTS, "^") if match[0][0] in _SUPERSCRIPTS else (_SUBSCRIPTS, "_")
    return f"{mark}{{{''.join(table[character] for character in match[0])}}}"


def _without_formula_marks(text: str) -> str:
    text = _without_full_stop(text)
    for start, end in _PAIRS:
        inner = text[len(start) : len(text) - len(end)]
        if (
            len(text) > len(start + end)
            and text.startswith(start)
            and text.endswith(end)
            and start not in inner
        ):
            return _without_formula_marks(inner.strip())
    return text


def _without_full_stop(text: str) -> str:
    """An ellipsis is none: 0.333... goes on."""
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def _without_styles(text: str) -> str:
    return _replace_groups(text, _STYLE, "", "")


def _with_marked_text(text: str) -> str:
    return _replace_groups(text, _TEXT, OPEN, CLOSE)


def _replace_groups(text: str, command: re.Pattern, before: str, after: str) -> str:
    """`\\command{x}` as before + x + after, from the inside out; an unclosed one keeps the rest of
    the text.
    """
    pieces = list(command.finditer(text))
    for match in reversed(pieces):
        named = match.groupdict()
        word = named.get("bare") or named.get("word")
        if word:
            text = text[: match.start()] + before + word + after + text[match.end() :]
            continue
        end = closing_brace(text, match.end())
        if end is None:
            text = text[: match.start()] + text[match.end() :]
            continue
        text = (
            text[: match.start()] + before + text[match.end() + 1 : end] + after + text[end + 1 :]
        )
    return text


def _with_braced_fractions(text: str) -> str:
    """\\frac12, \\frac1{72} and \\frac{1}2 with both arguments in braces."""
    position = 0
    while (match := _SHORT_FRACTION.search(text, position)) is not None:
        position = match.start() + len("\\frac")
        end = match.end()
        if match["top"] == "{":
            closing = closing_brace(text, match.end() - 1)
            if closing is None:
                continue
            top, end = text[match.end() - 1 : closing + 1], closing + 1
        else:
            top = f"{{{match['top']}}}"
        bottom = re.compile(r"\s*([A-Za-z0-9]|\\[a-z]+)").match(text, end)
        if bottom is not None:
            text = f"{text[: match.start()]}\\frac{top}{{{bottom[1]}}}{text[bottom.end() :]}"
        else:
            rest = text[end:]
            rest = rest.lstrip() if rest.lstrip().startswith("{") else rest
            text = f"{text[: match.start()]}\\frac{top}{rest}"
    return text


def _without_outer_dress(text: str) -> str:
    """Without one pair of braces around everything, and without a full stop at the end."""
    text = _without_full_stop(text.strip())
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
