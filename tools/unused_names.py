"""Functions, methods, classes and constants of slime/ that only tests use, or nothing: `python tools/unused_names.py`; exit 1 names each.

A name is used where code of slime/, tools/ or examples/ loads it, outside its own definition and outside definitions that are unused
themselves; where a string is it, or is a dotted path that ends with it; and where an example of docs/ writes it. Names are compared, not
objects: two methods of one name are used when one is. An import alone, of a door for instance, is no use.

An exception is one line in EXCEPTIONS with its reason. A line that excuses nothing any more is an error too.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFINED_IN = "slime"
USED_IN = ("slime", "tools", "examples")
THIS = "tools/unused_names.py"  # its exceptions are no uses
INTERFACE = "tools/interface/table.jsonl"

# (place or pattern of places, reason). A place is "file::name" or "file::Class.name".
UPSTREAM = "upstream's name: its tests or plug-ins use it"
OVERRIDE = "the base class, which is not ours, calls it"
EXCEPTIONS: tuple[tuple[str, str], ...] = (
    (
        "slime/config/*.py::*Options",
        "found as the option dataclasses of the modules in slime.config.CONCERNS",
    ),
    ("slime/testing/__init__.py::make_tiny_tokenizer", "slime.testing is for the tests of users"),
    (
        "slime/accelerator/cpu_megatron.py::_NoStream.*",
        "Megatron-core calls what a CUDA stream has",
    ),
    ("slime/backends/megatron_utils/weights_index.py::_IndexReader.*", OVERRIDE),
    ("slime/backends/megatron_utils/weights_state.py::_IndexedReader.read_metadata", OVERRIDE),
    ("slime/backends/megatron_utils/weights_state.py::_LoadPlanner.load_bytes", OVERRIDE),
    ("slime/backends/megatron_utils/megatron_to_hf/__init__.py::*convert*", UPSTREAM),
    (
        "slime/backends/megatron_utils/cp_utils.py::prepare_routed_experts_for_routing_replay",
        UPSTREAM,
    ),
    ("slime/backends/megatron_utils/forward.py::_build_topp_keep_mask", UPSTREAM),
    ("slime/config/cli.py::reset_arg", UPSTREAM),
    ("slime/data/sample.py::ParamInfo", UPSTREAM),
    ("slime/data/sample.py::Sample.effective_response_length", UPSTREAM),
    ("slime/prompts/masks.py::MultiTurnLossMaskGenerator.get_text_from_loss_mask", UPSTREAM),
    ("slime/ray/actor_group.py::RayTrainGroup.clear_memory", UPSTREAM),
    ("slime/ray/rollout.py::RolloutManager._split_train_data_by_dp", UPSTREAM),
    (
        "slime/rollout/filter_hub/dynamic_sampling_filters.py::check_reward_nonzero_std_with_fallback",
        UPSTREAM,
    ),
    ("slime/rollout/rm_hub/math_utils.py::extract_*answer", UPSTREAM),
    ("slime/rollout/rm_hub/math_utils.py::grade_answer_sympy", UPSTREAM),
    ("slime/rollout/sglang_rollout.py::get_model_url", UPSTREAM),
    ("slime/tracking/tracing.py::TraceSpanContext.update_attrs", UPSTREAM),
    ("slime/utils/arguments.py::slime_validate_args", UPSTREAM),
)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class Defined:
    """One definition: where it is, what it is called, the nodes that belong to it."""

    place: str
    name: str
    node: ast.stmt

    @property
    def key(self) -> str:
        """What its uses are counted under: a method's with a dot."""
        return f".{self.name}" if self.place.split("::")[1] != self.name else self.name

    @property
    def num_lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1


def definitions(path: str, tree: ast.Module) -> Iterator[Defined]:
    """Yields functions and constants of a module, its classes, and their methods, but for those that something else calls by their kind:
    special methods, and functions with a decorator that may register them. Several names set at once are one enumeration, and left out."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not _is_special(target.id):
                    yield Defined(f"{path}::{target.id}", target.id, node)
        if isinstance(node, Definition):
            yield from _definitions_of(path, "", node)


def _definitions_of(path: str, prefix: str, node: Definition) -> Iterator[Defined]:
    if not _is_special(node.name) and not _is_registered(node):
        yield Defined(f"{path}::{prefix}{node.name}", node.name, node)
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, Definition):
                yield from _definitions_of(path, f"{prefix}{node.name}.", inner)


def _is_special(name: str) -> bool:
    return name == "_" or (name.startswith("__") and name.endswith("__"))


# These decorators change how a function is called, and call nothing themselves.
PLAIN_DECORATORS = {
    "property",
    "cached_property",
    "staticmethod",
    "classmethod",
    "dataclass",
    "contextmanager",
    "cache",
    "lru_cache",
    "no_grad",
}


def _is_registered(node: Definition) -> bool:
    names = {
        re.split(r"[.(]", ast.unparse(decorator).split("(")[0])[-1]
        for decorator in node.decorator_list
    }
    return bool(names - PLAIN_DECORATORS)


def uses(tree: ast.AST, visible: set[str], modules: set[str]) -> Counter[str]:
    """How often each name is used below a node. `visible`: the names that the file defines at its top or imports; `modules`: those of them
    that it imports. The name of a local variable is no use, and neither is an attribute of one: that may be a method, counted as ".name"."""
    found: Counter[str] = Counter()
    no_code: set[int] = (
        set()
    )  # docstrings and the elements of `__all__`; parents are walked before their children
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            no_code.add(id(node.value))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            no_code.update(map(id, ast.walk(node.value)))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in visible:
            found[node.id] += 1
        elif isinstance(node, ast.alias) and node.asname:
            found[node.name] += 1
        elif isinstance(node, ast.Attribute):
            found[f".{node.attr}"] += 1
            if _root_name(node) in modules:
                found[node.attr] += 1
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in no_code
        ):
            # a name, a dotted path, or "file::Class.function": its last part
            if re.fullmatch(r"[\w./:]*\w", node.value):
                name = re.split(r"[.:]", node.value)[-1]
                found.update([name, f".{name}"])
    return found


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None


def names_of_file(tree: ast.Module) -> tuple[set[str], set[str]]:
    """(names that the file defines at its top or imports anywhere, those that it imports)."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    own = {node.name for node in tree.body if isinstance(node, Definition)}
    own |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name)
    }
    return own | imported, imported


def uses_in_pages(root: Path) -> Counter[str]:
    """The words of code blocks and of back-ticked text in README and docs/."""
    found: Counter[str] = Counter()
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for block in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL):
            words = re.findall(r"\w+", block)
            found.update([*words, *(f".{word}" for word in words)])
    return found


def interface_names(root: Path) -> set[str]:
    """The names that upstream's interface documents: function, Class and Class.method."""
    path = root / INTERFACE
    rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        if path.exists()
        else []
    )
    parts = [row["name"].split(".") for row in rows if row["kind"] == "name"]
    return {
        ".".join(words[-2:] if words[-2:-1] and words[-2][:1].isupper() else words[-1:])
        for words in parts
    }


@dataclasses.dataclass(frozen=True)
class Scan:
    """All definitions of slime/ that upstream's interface does not name; how often each name is used, in all and by each of them."""

    candidates: list[Defined]
    total: Counter[str]
    own: dict[str, Counter[str]]


def scan(root: Path = ROOT) -> Scan:
    """Reads the code and the pages below `root`."""
    total, known = uses_in_pages(root), interface_names(root)
    candidates: list[Defined] = []
    own: dict[str, Counter[str]] = {}
    for path in (path for folder in USED_IN for path in sorted((root / folder).rglob("*.py"))):
        place = path.relative_to(root).as_posix()
        if place == THIS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = names_of_file(tree)
        total += uses(tree, *names)
        if place.startswith(f"{DEFINED_IN}/"):
            here = [
                defined
                for defined in definitions(place, tree)
                if defined.place.split("::")[1] not in known
            ]
            candidates += here
            own |= {defined.place: uses(defined.node, *names) for defined in here}
    return Scan(candidates, total, own)


def unused(scanned: Scan, *, excused: Sequence[str] = ()) -> list[Defined]:
    """Returns the definitions that nothing but tests uses, in order of their places, without those of an excused pattern. What only unused
    code uses is unused too; what excused code uses is not."""
    total, own = scanned.total.copy(), dict(scanned.own)
    candidates = [
        defined
        for defined in scanned.candidates
        if not any(fnmatch.fnmatchcase(defined.place, pattern) for pattern in excused)
    ]
    found: dict[str, Defined] = {}
    while True:
        new = [
            defined
            for defined in candidates
            if defined.place not in found and total[defined.key] <= own[defined.place][defined.key]
        ]
        if not new:
            outermost = (defined for defined in found.values() if not _is_inside(defined, found))
            return sorted(outermost, key=lambda defined: defined.place)
        for defined in new:
            found[defined.place] = defined
            # what it uses is used by it no longer
            total.subtract(own[defined.place])
            own[defined.place] = Counter()


def _is_inside(defined: Defined, found: dict[str, Defined]) -> bool:
    return any(defined.place.startswith(f"{place}.") for place in found)


def check_repository(
    root: Path = ROOT, exceptions: tuple[tuple[str, str], ...] = EXCEPTIONS
) -> list[str]:
    """Returns a sentence per unused definition without an exception, and per exception that excuses nothing."""
    scanned, patterns = scan(root), [pattern for pattern, _ in exceptions]
    places = [defined.place for defined in unused(scanned)]
    return [
        f"{defined.place} ({defined.num_lines} lines): nothing but tests uses it. Delete it, or give the reason in EXCEPTIONS."
        for defined in unused(scanned, excused=patterns)
    ] + [
        f"{pattern}: excuses nothing; remove the line"
        for pattern in patterns
        if not fnmatch.filter(places, pattern)
    ]


def main() -> int:
    problems = check_repository()
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
