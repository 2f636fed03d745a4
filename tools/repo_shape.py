"""Checks the shape of the code: layers, sizes, hidden defaults, changes of `args`. `python
tools/repo_shape.py`; exit 1 names every place.

An exception is one line in EXCEPTIONS with its reason. A line that no longer excuses anything is an
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
FOLDERS = ("slime", "tools", "examples", "tests", ".github/workflows")

MAX_FILE_LINES = 600
MAX_TEST_FILE_LINES = 800  # tables of cases, one a line
MAX_FUNCTION_LINES = 100
MAX_PARAMETERS = 8
MAX_UNTYPED_SHARE = 0.03  # of the parameters in slime/

# The first pattern that fits a module gives its layer; imports point to the same layer or to a
# lower one.
LAYERS: tuple[tuple[str, int], ...] = (
    ("slime", 0),
    ("slime.exceptions", 0),
    ("slime.tested_versions", 0),
    ("slime.typing", 0),
    ("slime.config", 0),
    ("slime.config.CONCERNS", 0),
    ("slime.config.dry_run", 4),
    ("slime.config.doctor", 4),
    ("slime.config.*", 0),
    ("slime.files.atomic", 0),
    ("slime.data.sample", 1),
    ("slime.data.fields", 1),
    ("slime.data.reasons", 1),
    ("slime.data.number_list", 1),
    ("slime.files.exact_json", 1),
    ("slime.algorithms.table", 0),
    ("slime.algorithms*", 2),
    ("slime.data.batch", 2),
    ("slime.data.schedule", 2),
    ("slime.data.partitioning", 2),
    ("slime.utils.ppo_utils", 2),
    ("slime.utils.misc", 1),
    ("slime.data.ragged", 2),
    ("slime.data.packing", 2),
    ("slime.data.flops", 2),
    ("slime.data.rows", 2),
    ("slime.data.split", 2),
    ("slime.data.context_parallel", 2),
    ("slime.metrics.statistics", 2),
    ("slime.prompts.masks", 2),
    ("slime.prompts.chat_render", 2),
    ("slime.rollout.generation", 2),
    ("slime.rollout.turns", 2),
    ("slime.rollout.tool_calls", 2),
    ("slime.data.columns", 2),
    ("slime.data.weight_versions", 2),
    ("slime.data.trained_sampling", 2),
    ("slime.data.declared_fields", 2),
    ("slime.data.rewards", 2),
    ("slime.data.length_penalty", 2),
    ("slime.gate.gate", 3),
    ("slime.gate.parallel", 3),
    ("slime.commands.gate", 4),
    ("slime.commands.reward", 4),
    ("slime.gate*", 2),
    ("slime.metrics.contributions", 2),
    ("slime.metrics.consistency_alarms", 2),
    ("slime.files.jsonl", 2),
    ("slime.train", 4),
    ("slime.train_async", 4),
    ("slime.cli", 4),
    ("slime.local", 4),
    ("slime.testing", 4),
    ("slime.harness*", 4),
    ("slime.viewer*", 4),
    ("slime.*", 3),
    ("examples*", 4),
    ("tools*", 4),
    ("tests*", 5),
)

ANY_ADDRESS = ".".join("0000")
FORBIDDEN_BELOW_EDGES = ("ray", "megatron", "sglang", "sglang_router", "wandb", "aiohttp")

# Private names of other packages' objects that have no public one.
FOREIGN_PRIVATE = {
    "_actions": "argparse's options of a parser",
    "_cdata": "torch's identity of a storage",
    "_get_model_param_range_map": "Megatron-core's place of a parameter in an optimizer shard",
    "_version": "torch's count of a tensor's edits",
}
UPSTREAM_NAME = "the name is upstream's, and private there too"

SHORT_NAMESPACE = (
    "upstream's tests call this with a namespace that has only the options they are about"
)

# (rule, path or path::function, reason)
EXCEPTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "args",
        "slime/config/derive.py",
        "derivation is the last part of parsing; the namespace is final after it",
    ),
    (
        "stdlib",
        "slime/config/yaml_file.py",
        "PyYAML reads --config; it is imported inside the function that needs it",
    ),
    (
        "layer",
        "slime/utils/misc.py",
        "get_free_port and its kin ask Ray, imported inside the function, only in a Ray process",
    ),
    (
        "layer",
        "slime/utils/ppo_utils.py",
        "context-parallel variants under upstream's names import the layout inside the function",
    ),
    (
        "layer",
        "slime/rollout/generation.py",
        "decodes the engine's base64 arrays with the engine's own codec, numpy only",
    ),
    (
        "parameters",
        "slime/backends/megatron_utils/forward.py::get_log_probs_and_entropy",
        "upstream's signature, pinned by its tests",
    ),
    *(
        (
            "parameters",
            f"slime/backends/megatron_utils/model.py::{name}",
            "upstream's parameters, and what is called before the first update",
        )
        for name in ("train", "train_one_step")
    ),
    (
        "parameters",
        "slime/prompts/dataset.py::__init__",
        "upstream's signature of Dataset, pinned by its tests",
    ),
    ("parameters", "slime/ray/actor_group.py::__init__", "upstream's signature of RayTrainGroup"),
    *(
        ("file size", f"slime/{path}", "grew when lines became shorter; is to be split")
        for path in (
            "config/rules.py",
            "data/batch.py",
            "gate/checks.py",
        )
    ),
    *(
        ("private name", f"slime/{path}", UPSTREAM_NAME)
        for path in (
            "backends/megatron_utils/hf_to_megatron/__init__.py",
            "backends/megatron_utils/loss.py",
            "ray/rollout.py",
            "rollout/engine_client.py",
        )
    ),
    *(
        ("hidden default", f"slime/{path}", SHORT_NAMESPACE)
        for path in (
            "rollout/engine_client.py",
            "rollout/group_selection.py",
            "rollout/rm_hub/__init__.py",
            "rollout/sample_hooks.py",
            "rollout/scoring.py",
            "rollout/sglang_rollout.py",
            "data/schedule.py",
            "prompts/eval_config.py",
            "data/flops.py",
            "utils/http_utils.py",
            "data/sample.py",
        )
    ),
)


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


def layer_of(module: str) -> int | None:
    """Returns the module's layer, None for what is not ours."""
    return next((layer for pattern, layer in LAYERS if fnmatch.fnmatchcase(module, pattern)), None)


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
    """Imports point down; low layers import neither engines nor trackers; configuration imports the
    standard library.
    """
    module = module_name(path)
    layer = layer_of(module)
    if layer is None:
        return
    for node in runtime_nodes(tree):
        for name in imported_modules(node):
            line = getattr(node, "lineno", 0)
            target = layer_of(name)
            if target is not None and target > layer:
                yield Finding(
                    "layer", path, line, f"{module} (layer {layer}) imports {name} (layer {target})"
                )
            top = name.split(".")[0]
            if layer <= 2 and top in FORBIDDEN_BELOW_EDGES:
                yield Finding(
                    "layer",
                    path,
                    line,
                    f"{module} (layer {layer}) imports {top}, which belongs to the edges",
                )
            is_plain = top in sys.stdlib_module_names or top == "slime"
            if layer == 0 and not is_plain:
                yield Finding(
                    "stdlib",
                    path,
                    line,
                    f"{module} imports {name}; layer 0 has the standard library only",
                )


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
        if length > MAX_FUNCTION_LINES:
            yield Finding(
                "function size",
                place,
                function.lineno,
                f"{function.name} has {length} lines, at most {MAX_FUNCTION_LINES}",
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
    return apply_exceptions(findings, EXCEPTIONS)


def main() -> int:
    findings = check_repository()
    for finding in findings:
        print(finding, file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    raise SystemExit(main())
