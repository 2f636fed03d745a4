"""Draws docs/architecture.svg from the code: the folders of slime/ on their floors, and who imports
whom. `python tools/generate_docs.py architecture.svg` writes it.

Floors are those of tools/house.py. A folder's sentence is the first line of its docstring; where
some of its modules stand on another floor, the smaller parts name their modules instead. A square
in a row means that the row's modules import some of the column's.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))

from repo_shape import ROOT, floor_of, import_graph, module_name  # noqa: E402

ROW, CELL, GAP = 22, 15, 6  # height of a row, side of a matrix cell, space between floors
NAME_X, TEXT_X, MATRIX_X, TOP = 12, 212, 800, 190
FONT = "font-family='Helvetica, Arial, sans-serif'"
COLORS = {
    "floor": "#f1f4f8",
    "box": "#2f5d8a",
    "text": "#1d2733",
    "import": "#d9822b",
    "line": "#c9d3de",
}


@dataclasses.dataclass(frozen=True)
class Box:
    """Modules of one folder that stand on one floor. text: the line beside it."""

    floor: int
    folder: str
    modules: tuple[str, ...]
    text: str = ""


def read_modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """Returns the syntax tree of every module of slime/ by its dotted name."""
    return {
        module_name(path.relative_to(root).as_posix()): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / "slime").rglob("*.py"))
    }


def first_line(tree: ast.Module) -> str:
    """Returns the first line of a module's docstring, "" without one."""
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def folder_of(module: str) -> str:
    """Returns the folder that a module is drawn in: the one below slime/, and one deeper for
    backends/, which holds folders only. Modules at the top of slime/ are drawn by themselves.
    """
    words = module.split(".")
    depth = 3 if words[1:2] == ["backends"] else 2
    return "/".join(words[:depth])


def find_boxes(trees: dict[str, ast.Module], graph: dict[str, set[str]]) -> list[Box]:
    """Returns the boxes from the top floor down; on a floor, importers come first."""
    members: dict[tuple[int, str], list[str]] = collections.defaultdict(list)
    for module in trees:
        floor = floor_of(module)
        if floor is None:
            raise ValueError(f"{module} stands on no floor of tools/house.py")
        if module not in ("slime", "slime.backends"):
            members[floor, folder_of(module)].append(module)
    largest = {
        folder: max(len(names) for (_, other), names in members.items() if other == folder)
        for _, folder in members
    }
    boxes = []
    for (floor, folder), names in members.items():
        package = folder.replace("/", ".")
        if len(names) == largest[folder]:
            text = first_line(trees[package])
        else:
            text = "here: " + ", ".join(
                name.removeprefix(package + ".") for name in names if name != package
            )
        boxes.append(Box(floor, folder, tuple(names), text))
    return sorted(
        boxes,
        key=lambda box: (
            -box.floor,
            -sum(imports(graph, box, other) for other in boxes if other.floor == box.floor),
            box.folder,
        ),
    )


def imports(graph: dict[str, set[str]], box: Box, other: Box) -> bool:
    """Whether a module of `box` imports one of `other`."""
    return box != other and any(graph[module] & set(other.modules) for module in box.modules)


def draw(trees: dict[str, ast.Module]) -> str:
    """Returns the picture as SVG; the same code gives the same text."""
    graph = import_graph(trees)
    boxes = find_boxes(trees, graph)
    tops: list[int] = []
    y = TOP
    for box, above in zip(boxes, [None, *boxes], strict=False):
        y += GAP if above is not None and above.floor != box.floor else 0
        tops.append(y)
        y += ROW
    right = MATRIX_X + CELL * len(boxes)
    width, height = right + NAME_X, y + NAME_X
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        _text(NAME_X, 30, "slime/, floor by floor", 20, weight="bold"),
        _text(NAME_X, 54, "A folder imports from its own floor and from those below.", 13),
        f"<rect x='{NAME_X}' y='64' width='11' height='11' fill='{COLORS['import']}'/>",
        _text(
            NAME_X + 18,
            74,
            "the row imports the column; squares at the diagonal stand for the row itself",
            13,
        ),
    ]
    for floor in dict.fromkeys(box.floor for box in boxes):
        rows = [top for box, top in zip(boxes, tops, strict=True) if box.floor == floor]
        parts.append(
            f"<rect x='{NAME_X - 6}' y='{rows[0]}' width='{right - NAME_X + 12}' "
            f"height='{rows[-1] + ROW - rows[0]}' fill='{COLORS['floor']}'/>"
        )
    for column, (box, top) in enumerate(zip(boxes, tops, strict=True)):
        x = MATRIX_X + CELL * column
        name = _short(box)
        parts += [
            f"<rect x='{NAME_X}' y='{top + 2}' width='190' height='{ROW - 4}' rx='3' "
            f"fill='{COLORS['box']}'/>",
            _text(NAME_X + 8, top + 15, name, 12, color="white", weight="bold"),
            _text(TEXT_X, top + 15, box.text, 11.5),
            f"<path d='M{x} {TOP}V{y}' stroke='{COLORS['line']}' stroke-width='0.5'/>",
            _text(0, 0, name, 11, place=f"translate({x + 11} {TOP - 6}) rotate(-90)"),
            f"<rect x='{x + 4}' y='{top + 7}' width='7' height='7' fill='{COLORS['line']}'/>",
        ]
        parts += [
            f"<rect x='{MATRIX_X + CELL * other + 2}' y='{top + 5}' width='11' height='11' "
            f"fill='{COLORS['import']}'/>"
            for other, below in enumerate(boxes)
            if imports(graph, box, below)
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(box: Box) -> str:
    return box.folder.removeprefix("slime/")


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    color: str = COLORS["text"],
    weight: str = "normal",
    place: str | None = None,
) -> str:
    where = f"transform='{place}'" if place else f"x='{x}' y='{y}'"
    return (
        f"<text {where} font-size='{size}' font-weight='{weight}' fill='{color}'>"
        f"{escape(text)}</text>"
    )


@functools.cache
def picture() -> str:
    """Returns docs/architecture.svg as the code is now."""
    return draw(read_modules())
