"""Checks the shape of the code: floors, circles, doors, state, sizes, hidden defaults. `python
tools/repo_shape.py`; exit 1 names every place.

Floors and exceptions stand in tools/house.py, an exception with its reason. A line that no longer excuses anything is an
error too, so the list only holds what is true.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import fnmatch
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from house import (  # noqa: E402
    ANY_ADDRESS,
    CHANGES,
    CONTAINERS,
    CORES,
    EXCEPTIONS,
    FLOORS,
    FORBIDDEN_BELOW_EDGES,
    FOREIGN_PRIVATE,
    GROUND,
)

FOLDERS = ("slime", "tools", "examples", "tests", ".github/workflows")

MAX_FILE_LINES = 600
MAX_TEST_FILE_LINES = 800  # tables of cases, one a line
MAX_FUNCTION_LINES = 80
MAX_TEST_FUNCTION_LINES = 100
MAX_PARAMETERS = 8
MAX_UNTYPED_SHARE = 0.03  # of the parameters in slime/


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place that breaks a rule."""

    rule: str
    place: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.place.split('::')[0]}:{self.line}: {self.rule}: {self.message}"


def module_name(path: str) -> str:
    """Returns the dotted module of a path relative to the root."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def floor_of(module: str) -> int | None:
    """Returns the number of the module's floor, None for what is not ours."""
    fitting = (
        floor
        for floor, patterns in enumerate(FLOORS)
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns if "*" not in pattern)
    )
    folder = (
        floor
        for floor, patterns in enumerate(FLOORS)
        if any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)
    )
    return next(fitting, next(folder, None))


def imported_modules(node: ast.AST) -> list[str]:
    """Returns the modules that an import statement names; `from a import b` may name the module
    a.b.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if (ROOT / node.module.replace(".", "/")).is_dir():
            return [f"{node.module}.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def is_type_checking_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields every node outside `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if not is_type_checking_block(child):
            yield child
            yield from runtime_nodes(child)


def check_imports(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Imports point down; cores import neither engines nor trackers; configuration imports the
    standard library; an import of ours inside a function needs a reason.
    """
    module = module_name(path)
    floor = floor_of(module)
    if floor is None:
        return
    inside = {
        id(node)
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    for node in runtime_nodes(tree):
        for name in imported_modules(node):
            line = getattr(node, "lineno", 0)
            target = floor_of(name)
            if target is not None and target > floor:
                yield Finding(
                    "floor", path, line, f"{module} imports {name}, which stands above it"
                )
            top = name.split(".")[0]
            if module.startswith(CORES) and top in FORBIDDEN_BELOW_EDGES:
                yield Finding(
                    "floor", path, line, f"{module} imports {top}, which is for the edges"
                )
            is_plain = top in sys.stdlib_module_names or top == "slime"
            if floor <= GROUND and not is_plain:
                yield Finding(
                    "stdlib", path, line, f"{module} imports {name}, not standard library"
                )
        if id(node) in inside and path.startswith("slime/"):
            if names := [name for name in imported_modules(node) if name.startswith("slime")]:
                yield Finding(
                    "local import", path, node.lineno, f"imports {names[0]} inside a function"
                )


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Returns which of these modules each of them imports, inside functions too."""
    graph: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for node in runtime_nodes(tree):
            for name in imported_modules(node):
                found = name if name in trees else name.rpartition(".")[0]
                if found in trees and found != module:
                    graph[module].add(found)
    return graph


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or through others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                circles.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return circles


def check_circles(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """No module imports what imports it."""
    for circle in find_circles(import_graph(trees)):
        yield Finding("circle", circle[0].replace(".", "/") + ".py", 1, " and ".join(circle))


def is_container(node: ast.AST | None) -> bool:
    """Returns whether an expression makes an empty or filled container that can change."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).split(".")[-1] in CONTAINERS
    return isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)


def check_state(path: str, tree: ast.Module) -> Iterator[Finding]:
    """No module keeps state: no `global`, and no container at its top that functions change."""
    if not path.startswith("slime/"):
        return
    containers = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_container(node.value):
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    for function in functions(tree):
        for node in own_nodes(function):
            if isinstance(node, ast.Global):
                for name in node.names:
                    yield Finding("state", f"{path}::{name}", node.lineno, f"global {name}")
            owner = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                owner = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value if node.func.attr in CHANGES else None
            if isinstance(owner, ast.Name) and owner.id in containers:
                yield Finding("state", f"{path}::{owner.id}", node.lineno, f"changes {owner.id}")


def check_door(path: str, tree: ast.Module) -> Iterator[Finding]:
    """A path that is another module under upstream's name defines nothing itself."""
    is_door = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sys.modules[__name__]"
        for node in tree.body
    )
    if not is_door:
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Finding("door", path, node.lineno, f"defines {node.name}")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Returns the parameters that have a name of their own; self, cls, *args and **kwargs are not
    among them.
    """
    arguments = function.args
    own = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument for argument in own if argument.arg not in ("self", "cls")]


def check_sizes(path: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    """Files, functions and parameter lists stay small enough to read."""
    num_lines = text.count("\n") + 1
    most = MAX_TEST_FILE_LINES if path.startswith("tests/") else MAX_FILE_LINES
    if num_lines > most:
        yield Finding("file size", path, 1, f"{num_lines} lines, at most {most}")
    for function in functions(tree):
        place = f"{path}::{function.name}"
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        most = MAX_TEST_FUNCTION_LINES if path.startswith("tests/") else MAX_FUNCTION_LINES
        if length > most:
            yield Finding(
                "function size",
                place,
                function.lineno,
                f"{function.name} has {length} lines, at most {most}",
            )
        names = parameters(function)
        if len(names) > MAX_PARAMETERS and not path.startswith("tests/"):
            yield Finding(
                "parameters",
                place,
                function.lineno,
                f"{function.name} has {len(names)} parameters, at most {MAX_PARAMETERS}",
            )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def bound_names(tree: ast.Module) -> set[str]:
    """Returns every name and attribute that the module itself defines or assigns."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            bound.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def check_private_names(path: str, tree: ast.Module) -> Iterator[Finding]:
    """No module of slime reads another one's private names: neither a module's nor an object's."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                imported[name] = f"{module}.{alias.name}" if module else alias.name
                if (module or "").startswith("slime") and is_private(alias.name):
                    yield Finding(
                        "private name", path, node.lineno, f"imports {alias.name} of {module}"
                    )
    bound = bound_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        owner = ast.unparse(node.value)
        origin = imported.get(owner.split(".")[0])
        if origin is None:  # an object: its class is of this module, or of another one
            is_own = owner in ("self", "cls", "super()") or node.attr in bound
            is_read = not is_own and node.attr not in FOREIGN_PRIVATE
        else:
            is_read = origin.startswith("slime")
        if is_read:
            yield Finding("private name", path, node.lineno, f"reads {owner}.{node.attr}")


def is_args(node: ast.AST) -> bool:
    """Returns whether the node is `args` or `self.args`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "args" and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id == "args"


def check_args(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Nobody assigns to `args` after parsing, and nobody hides a default in getattr."""
    for function in functions(tree):
        place = f"{path}::{function.name}"
        for node in own_nodes(function):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                for target in targets:
                    if isinstance(target, ast.Attribute) and is_args(target.value):
                        yield Finding("args", place, node.lineno, f"assigns to args.{target.attr}")
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Name)
                or not node.args
            ):
                continue
            if node.func.id == "setattr" and is_args(node.args[0]):
                yield Finding("args", place, node.lineno, "setattr on args")
            if node.func.id == "getattr" and is_args(node.args[0]) and len(node.args) == 3:
                yield Finding(
                    "hidden default",
                    place,
                    node.lineno,
                    f"{ast.unparse(node)}: the option's dataclass has the default",
                )


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)


def check_dangerous_calls(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Nothing executes what it reads, nothing listens on every address, no error is swallowed
    unnamed.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield Finding("bare except", path, node.lineno, "names no exception")
        if isinstance(node, ast.Constant) and node.value == ANY_ADDRESS:
            yield Finding(
                "open address",
                path,
                node.lineno,
                "servers bind to loopback unless an option says otherwise",
            )
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        called = ast.unparse(node.func)
        safe = keywords.get("weights_only")
        if called == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
            yield Finding("unsafe load", path, node.lineno, "torch.load without weights_only=True")
        if called in ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"):
            yield Finding("unsafe load", path, node.lineno, f"{called} executes what it reads")
        remote = keywords.get("trust_remote_code")
        if isinstance(remote, ast.Constant) and remote.value is True:
            yield Finding("unsafe load", path, node.lineno, "trust_remote_code=True")


def check_test_file(path: str, tree: ast.Module, text: str) -> Iterator[Finding]:
    """A test file states its GPUs and runs its tests under `python <file>`."""
    if not path.startswith("tests/") or not path.rsplit("/", 1)[-1].startswith("test_"):
        return
    if not any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NUM_GPUS"
        for node in tree.body
    ):
        yield Finding("test file", path, 1, "has no module constant NUM_GPUS")
    if "pytest.main(" not in text or "__main__" not in text:
        yield Finding(
            "test file",
            path,
            1,
            "has no __main__ block that calls pytest.main: python <file> would run nothing",
        )


def check_file(path: str, text: str) -> list[Finding]:
    """Returns everything that the file at `path` (relative to the root) with this text breaks."""
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        return [Finding("syntax", path, error.lineno or 1, error.msg)]
    findings = [*check_imports(path, tree), *check_sizes(path, tree, text)]
    findings += [*check_state(path, tree), *check_door(path, tree)]
    findings += check_test_file(path, tree, text)
    if not path.startswith("tests/"):
        findings += check_args(path, tree)
        findings += check_dangerous_calls(path, tree)
    if path.startswith("slime/"):
        findings += check_private_names(path, tree)
    return findings


def check_types(texts: Mapping[str, str]) -> list[Finding]:
    """Of the parameters in slime/, *args and **kwargs included, few are typed `Any` or not at all."""
    counts: collections.Counter[str] = collections.Counter()
    total = 0
    for path, text in texts.items():
        for function in functions(ast.parse(text)):
            rest = (function.args.vararg, function.args.kwarg)
            every = [*parameters(function), *(argument for argument in rest if argument)]
            total += len(every)
            counts[path] += sum(
                argument.annotation is None or ast.unparse(argument.annotation) == "Any"
                for argument in every
            )
    if counts.total() <= MAX_UNTYPED_SHARE * total:
        return []
    most = ", ".join(f"{path} {count}" for path, count in counts.most_common(5))
    message = (
        f"{counts.total()} of {total} parameters are typed Any or not at all, at most "
        f"{MAX_UNTYPED_SHARE:.0%} may be; the most: {most}"
    )
    return [Finding("types", "slime", 1, message)]


def check_basenames(paths: list[str]) -> list[Finding]:
    """Test files have different names, because tests/ is no package."""
    seen: dict[str, str] = {}
    findings = []
    for path in paths:
        name = path.rsplit("/", 1)[-1]
        if path.startswith("tests/") and name.startswith("test_"):
            if name in seen:
                findings.append(Finding("test file", path, 1, f"has the same name as {seen[name]}"))
            seen[name] = path
    return findings


def apply_exceptions(
    findings: list[Finding], exceptions: tuple[tuple[str, str, str], ...]
) -> list[Finding]:
    """Returns the findings that no exception excuses, and one for every exception that excuses
    nothing.
    """
    used = set()
    left = []
    for finding in findings:
        excuses = {
            index
            for index, (rule, place, _) in enumerate(exceptions)
            if rule == finding.rule and place in (finding.place, finding.place.split("::")[0])
        }
        used |= excuses
        if not excuses:
            left.append(finding)
    unused = [
        Finding("exception", place, 1, f"{rule!r} excuses nothing; remove the line")
        for index, (rule, place, _) in enumerate(exceptions)
        if index not in used
    ]
    return left + unused


def check_repository(root: Path = ROOT) -> list[Finding]:
    """Returns every unexcused finding in the repository."""
    paths = sorted(
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
    )
    findings = check_basenames(paths)
    texts = {path: (root / path).read_text(encoding="utf-8") for path in paths}
    for path, text in texts.items():
        findings += check_file(path, text)
    own = {path: text for path, text in texts.items() if path.startswith("slime/")}
    findings += check_types(own)
    ours = {path: text for path, text in texts.items() if path.startswith("slime/")}
    findings += check_circles({module_name(path): ast.parse(ours[path]) for path in ours})
    return apply_exceptions(findings, EXCEPTIONS)


def main() -> int:
    findings = check_repository()
    for finding in findings:
        print(finding, file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    raise SystemExit(main())
