"""What of upstream's interface is missing or different here: `python tools/interface_check.py`;
exit 1 where a difference has no reason.

The table tools/interface/table.jsonl has one row per name, option, `Sample` field and metric that
upstream documents: what upstream says, and, where this package differs, the reason. A row without a
reason must hold; a row with one must still differ, or the reason is out of date.

    python tools/interface_check.py                       check the table against the code, print
                                                          what differs
    python tools/interface_check.py --source interface.md print what a description of upstream's
    interface names and the table lacks

A description is Markdown: names stand in back-ticks, `function(arguments)` below the last dotted
`slime.` path before it, options begin with two dashes, fields of `Sample` are rows of the table in
the section on `slime.utils.types`, and metrics are back-ticked or comma-separated keys with a
prefix.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TABLE = ROOT / "tools" / "interface" / "table.jsonl"
METRIC_PREFIXES = (
    "rollout",
    "train",
    "perf",
    "eval",
    "passrate",
    "multi_turn",
    "request",
    "prefill",
    "decode",
)
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class Row:
    """One fact of the interface. kind: name, option, field or metric. `says`: signature or default
    as text; None: the name alone.
    """

    kind: str
    name: str
    says: str | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name


def read_table(path: Path = TABLE) -> list[Row]:
    """Returns the rows of the table."""
    return [
        Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line
    ]


# --- the code against a row -----------------------------------------------------------------------


def difference(row: Row) -> str | None:
    """What is missing or different here, as a sentence; None where the row holds."""
    return {
        "name": _name_differs,
        "option": _option_differs,
        "field": _field_differs,
        "metric": _metric_differs,
    }[row.kind](row)


def resolve(path: str) -> Any:
    """Returns the object at a dotted path: a module, or attributes below one. `_NOTHING` where
    there is none.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                found = _attribute(found, part)
            return found
    return _NOTHING


def _attribute(owner: Any, name: str) -> Any:
    if owner is _NOTHING:
        return _NOTHING
    if hasattr(owner, name):
        return getattr(owner, name)
    fields = getattr(owner, "__dataclass_fields__", {})  # a field without a class attribute
    if name in fields or name in getattr(owner, "__annotations__", {}):
        return fields.get(name)
    own_code = inspect.getsource(owner) if inspect.isclass(owner) else ""
    return None if re.search(rf"self\.{name}\b", own_code) else _NOTHING  # an instance attribute


def _name_differs(row: Row) -> str | None:
    found = resolve(row.name)
    if found is _NOTHING:
        return "is missing"
    if row.says is None or not callable(found):
        return None
    try:
        ours = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    return _signature_differs(row.says, ours)


def _signature_differs(theirs: str, ours: inspect.Signature) -> str | None:
    """A call that is right for `theirs` must be right for `ours`; ours may take more."""
    wanted = _parameters_of(theirs)
    if wanted is None:
        return None
    have = [parameter for name, parameter in ours.parameters.items() if name not in ("self", "cls")]
    by_name = {parameter.name: parameter for parameter in have}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in have)
    for position, (name, default, keyword_only) in enumerate(wanted):
        mine = by_name.get(name)
        if mine is None:
            if keyword_only and takes_any:
                continue
            if not keyword_only and any(
                parameter.kind is parameter.VAR_POSITIONAL for parameter in have
            ):
                continue
            return f"has no parameter {name}: {ours}"
        if not keyword_only and (have.index(mine) != position or mine.kind is mine.KEYWORD_ONLY):
            return f"has {name} at another place: {ours}"
        if (
            default is not _NOTHING
            and mine.default != default
            and mine.default is not inspect.Parameter.empty
        ):
            return f"has the default {mine.default!r} for {name}"
        if default is not _NOTHING and mine.default is inspect.Parameter.empty:
            return f"needs {name}: {ours}"
    known = {name for name, _, _ in wanted}
    extra = [
        p.name
        for p in have
        if p.name not in known
        and p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return f"needs {', '.join(extra)} too: {ours}" if extra else None


def _parameters_of(text: str) -> list[tuple[str, Any, bool]] | None:
    """(name, default or `_NOTHING`, keyword-only) per parameter of a signature; None for one that
    is only hinted at.
    """
    inner = text.strip()[1:-1].strip()
    if "..." in inner:
        return None
    try:
        arguments = ast.parse(f"def f({inner}): ...").body[0].args  # type: ignore[attr-defined]
    except SyntaxError:
        return None
    found: list[tuple[str, Any, bool]] = []
    defaults: list[ast.expr | None] = [None] * (
        len(arguments.args) - len(arguments.defaults)
    ) + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        found.append((argument.arg, _literal(default), False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, _literal(default), True))
    return [entry for entry in found if entry[0] not in ("self", "cls")]


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return _NOTHING
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _NOTHING


def _option_differs(row: Row) -> str | None:
    from slime.config.compat import compat_flags
    from slime.config.specs import all_specs

    for spec in all_specs():
        if row.name in spec.flags:
            if row.says is None or spec.required or _same_value(row.says, spec.default):
                return None
            return f"has the default {spec.default!r}"
    entry = compat_flags().get(row.name)
    return "is not known" if entry is None else f"is {entry.status.value}: {entry.reason}"


def _same_value(said: str, default: Any) -> bool:
    if said == str(default):
        return True
    try:
        return float(said) == float(default)
    except (TypeError, ValueError):
        return False


def _field_differs(row: Row) -> str | None:
    from slime.utils.types import Sample

    fields = {field.name: field for field in dataclasses.fields(Sample)}
    if row.name not in fields:
        return "is missing"
    value = getattr(Sample(), row.name)
    said = {
        "PENDING": Sample.Status.PENDING,
        "Sample.SpecInfo()": Sample.SpecInfo(),
        "Sample.PrefixCacheInfo()": Sample.PrefixCacheInfo(),
    }
    expected = said.get(row.says or "", _NOTHING)
    if expected is _NOTHING:
        expected = ast.literal_eval(row.says or "None")
    return None if value == expected else f"has the default {value!r}"


def _metric_differs(row: Row) -> str | None:
    """Whether the strings of the code make up the key: whole, or one after the other as an f-string
    joins them.
    """
    rest = row.name.partition("/")[2]
    missing = [
        piece
        for key in _alternatives(rest)
        for piece in re.split(r"<[^>]*>", key)
        if not _is_made_of_texts(piece)
    ]
    return (
        f"is not emitted: no strings of the code make up {', '.join(missing)}" if missing else None
    )


def _alternatives(text: str) -> list[str]:
    """`a_{mean,max}` stands for a_mean and a_max."""
    match = re.search(r"\{([^}]*)\}", text)
    if not match:
        return [text]
    return [
        other
        for word in match[1].split(",")
        for other in _alternatives(text[: match.start()] + word + text[match.end() :])
    ]


def _is_made_of_texts(piece: str) -> bool:
    texts = _texts_of_the_code()
    reached = [True] + [False] * len(piece)
    for end in range(1, len(piece) + 1):
        reached[end] = any(
            reached[start] and (piece[start:end] in texts or piece[start:end] in ("/", "_", "-"))
            for start in range(end)
        )
    return reached[-1]


_texts: set[str] = set()


def _texts_of_the_code() -> set[str]:
    if not _texts:
        for path in (ROOT / "slime").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and 2 < len(node.value) < 80
                ):
                    _texts.update(
                        {node.value, node.value.strip("_/-"), node.value.partition("/")[2]}
                    )
                elif isinstance(node, ast.keyword) and node.arg:
                    _texts.add(node.arg)
    return _texts


# --- a description of the interface ---------------------------------------------------------------


def rows_of_description(text: str) -> Iterator[Row]:
    """Yields what the description names, each once."""
    seen: set[tuple[str, str]] = set()
    for row in _all_rows(text):
        if row.key not in seen:
            seen.add(row.key)
            yield row


def _all_rows(text: str) -> Iterator[Row]:
    section, module, inner = "", "", ""
    for line in text.splitlines():
        heading = re.match(r"#+ (.*)", line)
        if heading:
            section, module, inner = heading[1], "", ""
        if re.match(r"3\.1", section):
            yield from _field_rows(line)
        yield from _option_rows(line)
        yield from _metric_rows(line)
        for token in re.findall(r"`([^`]+)`", line):
            path = re.match(r"(slime\.[\w.]*\w)(\(.*\))?$", token)
            if path:
                module, inner = (
                    (path[1], "")
                    if resolve(path[1]) is not _NOTHING and inspect.ismodule(resolve(path[1]))
                    else (path[1].rpartition(".")[0], "")
                )
                yield Row("name", path[1], path[2])
                continue
            called = re.match(r"(?:async )?([A-Za-z_]\w*)(\(.*\))$", token)
            if module and called:
                yield Row("name", _place(module, inner, called[1]), called[2])
            elif module and re.match(r"[A-Za-z_]\w*$", token):
                if importlib.util.find_spec(f"{module}.{token}") if _is_package(module) else None:
                    inner = token
                    yield Row("name", f"{module}.{token}")
                elif resolve(f"{module}.{token}") is not _NOTHING:
                    yield Row("name", f"{module}.{token}")


def _is_package(module: str) -> bool:
    return hasattr(resolve(module), "__path__")


def _place(module: str, inner: str, name: str) -> str:
    """The dotted path of a function that is named below `module`: there, in the submodule named
    last, or in a class of either.
    """
    for owner in ([f"{module}.{inner}"] if inner else []) + [module]:
        if resolve(f"{owner}.{name}") is not _NOTHING:
            return f"{owner}.{name}"
        found = resolve(owner)
        for member in vars(found).values() if inspect.ismodule(found) else ():
            if (
                inspect.isclass(member)
                and member.__module__.startswith("slime")
                and hasattr(member, name)
            ):
                return f"{owner}.{member.__name__}.{name}"
    return f"{module}.{inner}.{name}" if inner else f"{module}.{name}"


def _field_rows(line: str) -> Iterator[Row]:
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    if len(cells) == 3 and cells[0].startswith("`"):
        for name in re.findall(r"`(\w+)`", cells[0]):
            yield Row("field", name, cells[1].strip("`"))


def _option_rows(line: str) -> Iterator[Row]:
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    in_table = len(cells) == 3 and cells[0].startswith("--")
    source = cells[0] if in_table else line
    for match in re.finditer(
        r"(--[a-z][a-z0-9-]*[a-z0-9])(?: \(?\"?(-?\d[\d.e-]*|True|False))?", source
    ):
        default = match[2]
        if (
            in_table
            and default is None
            and source.count("--") == 1
            and re.fullmatch(r"-?\d[\d.e-]*|None|\w+", cells[1])
        ):
            default = cells[1]
        yield Row(
            "option", match[1], None if default in ("required", "off", "on", "class") else default
        )


def _metric_rows(line: str) -> Iterator[Row]:
    for token in re.findall(r"`([^`]+)`", line):
        match = re.fullmatch(
            r"(" + "|".join(METRIC_PREFIXES) + r")/[\w<>@{}|,/-]+", token.replace(" ", "")
        )
        if match and "*" not in token and not token.endswith(".py"):
            yield Row("metric", token.replace(" ", ""))


# --- the command ----------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """(differences with their reasons, problems: differences without one and reasons without a
    difference).
    """
    explained, problems = [], []
    for row in rows:
        found = difference(row)
        if found and row.reason:
            explained.append(f"{row.kind} {row.name} {found}\n    {row.reason}")
        elif found:
            problems.append(f"{row.kind} {row.name} {found}, and the table has no reason")
        elif row.reason:
            problems.append(
                f"{row.kind} {row.name} is as upstream's now; the table's reason is out of date: "
                f"{row.reason}"
            )
    return explained, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        type=Path,
        help="a description of upstream's interface, to find what the table lacks",
    )
    words = parser.parse_args(argv)
    rows = read_table()
    if words.source is not None:
        known = {row.key for row in rows}
        new = [
            row
            for row in rows_of_description(words.source.read_text(encoding="utf-8"))
            if row.key not in known
        ]
        for row in new:
            print(
                json.dumps(
                    {
                        name: value
                        for name, value in dataclasses.asdict(row).items()
                        if value is not None
                    }
                )
            )
        return 1 if new else 0
    explained, problems = report(rows)
    print("\n".join(explained + [f"PROBLEM: {problem}" for problem in problems]))
    print(
        f"{len(rows)} rows: {len(rows) - len(explained) - len(problems)} as upstream's, "
        f"{len(explained)} differ for a reason, {len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
