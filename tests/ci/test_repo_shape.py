"""Layers, sizes and habits of the repository; each rule is shown to find its violation."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("repo_shape", ROOT / "tools" / "repo_shape.py")
repo_shape = importlib.util.module_from_spec(spec)
sys.modules["repo_shape"] = repo_shape
spec.loader.exec_module(repo_shape)


def rules(path, text):
    return [finding.rule for finding in repo_shape.check_file(path, text)]


def test_this_repository_has_no_findings():
    """The repository breaks none of the rules, except where an exception gives the reason."""
    assert [str(finding) for finding in repo_shape.check_repository()] == []


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("slime/algorithms/x.py", "from slime.ray.rollout import RolloutManager\n", "floor"),
        ("slime/algorithms/x.py", "def f():\n    import ray\n", "floor"),
        ("slime/data/x.py", "from slime.accelerator import cpu\n", "floor"),
        ("slime/files/x.py", "from slime.train import main\n", "floor"),
        ("slime/ray/x.py", "def f():\n    from slime.data import batch\n", "local import"),
        ("slime/ray/x.py", "seen = set()\ndef f(x):\n    seen.add(x)\n", "state"),
        ("slime/ray/x.py", "CACHE = {}\ndef f(x):\n    CACHE[x] = 1\n", "state"),
        ("slime/ray/x.py", "last = None\ndef f(x):\n    global last\n    last = x\n", "state"),
        (
            "slime/utils/x.py",
            "import sys\nsys.modules[__name__] = sys.modules['slime.data.x']\ndef f():\n    pass\n",
            "door",
        ),
        ("slime/config/x.py", "import yaml\n", "stdlib"),
        ("slime/ray/x.py", "from slime.train import main\n", "floor"),
        ("slime/ray/x.py", "def f(a, b, c, d, e, f, g, h, i):\n    pass\n", "parameters"),
        ("slime/ray/x.py", "def f(a, b, c, d, *, e, f, g, h, i):\n    pass\n", "parameters"),
        ("slime/ray/x.py", "def f():\n" + "    x = 1\n" * 80, "function size"),
        ("slime/ray/x.py", "x = 1\n" * 600, "file size"),
        ("slime/ray/x.py", "def f(args):\n    args.load = 1\n", "args"),
        ("slime/ray/x.py", "def f(self):\n    self.args.load = 1\n", "args"),
        ("slime/ray/x.py", "def f(args):\n    setattr(args, 'load', 1)\n", "args"),
        (
            "slime/ray/x.py",
            "def f(args):\n    return getattr(args, 'load', None)\n",
            "hidden default",
        ),
        ("slime/ray/x.py", "from slime.ray.y import _inner\n", "private name"),
        ("slime/ray/x.py", "from slime.ray import y\ny._inner()\n", "private name"),
        ("slime/ray/x.py", "def f(group):\n    return group._handlers\n", "private name"),
        ("slime/ray/x.py", "import torch\ntorch.load('x')\n", "unsafe load"),
        ("slime/ray/x.py", "import torch\ntorch.load('x', weights_only=False)\n", "unsafe load"),
        ("slime/ray/x.py", "import pickle\npickle.loads(b'')\n", "unsafe load"),
        ("slime/ray/x.py", "f(trust_remote_code=True)\n", "unsafe load"),
        ("slime/ray/x.py", "try:\n    pass\nexcept:\n    pass\n", "bare except"),
        (
            "slime/ray/x.py",
            "host = '.'.join('0000')\nhost = '0.0' + '.0.0'\nbind('0.0.0.0')\n",
            "open address",
        ),
        ("slime/ray/x.py", "def f(:\n", "syntax"),
        ("tests/test_x.py", "def test_one():\n    pass\n", "test file"),
        (
            "tests/test_x.py",
            "import pytest\nNUM_GPUS = 0\nif __name__ == '__main__':\n    test_one()\n",
            "test file",
        ),
        ("tests/test_x.py", "import pytest\nNUM_GPUS = 0\npytest.main([__file__])\n", "test file"),
    ],
)
def test_each_rule_finds_its_violation(path, text, rule):
    """Each rule reports the code that breaks it."""
    assert rule in rules(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("slime/ray/x.py", "from slime.algorithms import advantages\nimport ray\n"),
        (
            "slime/algorithms/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray\n",
        ),
        ("slime/ray/x.py", "def f(args):\n    args = parse()\n    other.load = args.load\n"),
        (
            "slime/ray/x.py",
            "def f(self, a, b, c, d, e, f, g, h):\n    return getattr(a, 'x', None)\n",
        ),
        ("slime/ray/x.py", "import torch\ntorch.load('x', weights_only=True)\n"),
        ("slime/ray/x.py", "import ray\nray._raylet()\n"),
        ("slime/ray/x.py", "def f(tensor):\n    return tensor._version\n"),
        (
            "slime/ray/x.py",
            "class A:\n    def __init__(self, b):\n        self._x = b._x\n",
        ),
        ("slime/ray/x.py", "NAMES = {}\ndef f(x):\n    return NAMES[x]\n"),
        ("slime/ray/x.py", "def f():\n    import torch\n"),
        ("slime/utils/x.py", "import sys\nsys.modules[__name__] = sys.modules['slime.data.x']\n"),
        (
            "tests/test_x.py",
            (
                "import pytest\nNUM_GPUS = 0\nif __name__ == '__main__':\n    "
                "pytest.main([__file__])\n"
            ),
        ),
    ],
)
def test_what_is_allowed_is_not_found(path, text):
    """Code close to a violation is not reported."""
    assert rules(path, text) == []


def test_modules_that_import_each_other_are_found():
    """A circle is found whatever its length, also through imports inside functions and through
    `from package import module`; a chain is none.
    """
    sources = {
        "slime.data.sample": "import slime.data.batch\n",
        "slime.data.batch": "def f():\n    from slime.data import columns\n",
        "slime.data.columns": "from slime.data.sample import Sample\n",
        "slime.data.rows": "from slime.data import sample\n",
    }
    graph = repo_shape.import_graph({name: ast.parse(text) for name, text in sources.items()})
    assert repo_shape.find_circles(graph) == [
        ["slime.data.batch", "slime.data.columns", "slime.data.sample"]
    ]
    del sources["slime.data.batch"]
    graph = repo_shape.import_graph({name: ast.parse(text) for name, text in sources.items()})
    assert repo_shape.find_circles(graph) == []


def test_every_module_stands_on_a_floor():
    """A new folder needs its place in tools/house.py, or nothing would check its imports."""
    files = (ROOT / "slime").rglob("*.py")
    modules = [repo_shape.module_name(path.relative_to(ROOT).as_posix()) for path in files]
    assert [module for module in modules if repo_shape.floor_of(module) is None] == []


def test_exception_excuses_its_place_and_must_be_needed():
    """An exception covers its place alone, and one that covers nothing is reported: it would hide
    the next violation there."""
    findings = repo_shape.check_file("slime/ray/x.py", "def f(args):\n    args.load = 1\n")
    excuse = ("args", "slime/ray/x.py::f", "a reason")
    assert repo_shape.apply_exceptions(findings, (excuse,)) == []
    (unneeded,) = repo_shape.apply_exceptions([], (excuse,))
    assert unneeded.rule == "exception"
    other = ("args", "slime/ray/x.py::g", "a reason")
    assert [finding.rule for finding in repo_shape.apply_exceptions(findings, (other,))] == [
        "args",
        "exception",
    ]


def test_every_exception_has_a_reason():
    """Every exception has a reason of at least four words."""
    assert all(len(reason.split()) >= 4 for _, _, reason in repo_shape.EXCEPTIONS)


def test_two_test_files_of_one_name_are_found():
    """Two test files with one name are reported: tests/ is no package, so the second would shadow
    the first."""
    (finding,) = repo_shape.check_basenames(
        ["tests/a/test_x.py", "tests/b/test_x.py", "tests/b/test_y.py"]
    )
    assert finding.place == "tests/b/test_x.py"


def test_untyped_parameters_are_counted_over_all_functions_of_slime():
    """A parameter is untyped where its annotation is exactly Any or missing; self and cls are no
    parameters, and *args is one. Up to the limit's share nothing is reported."""
    typed = "def f(a: int, b: list[Any], *, c: object) -> Any: ...\n"
    method = (
        "class C:\n    def g(self, a: int): ...\n    @classmethod\n    def h(cls, a: int): ...\n"
    )
    assert repo_shape.check_types({"slime/a.py": typed, "slime/b.py": method}) == []
    for untyped in ("a", "a: Any", "*args", "**kwargs: Any"):
        (finding,) = repo_shape.check_types(
            {"slime/a.py": typed, "slime/b.py": f"def f({untyped}): ...\n"}
        )
        assert finding.rule == "types" and "1 of 4" in finding.message, untyped
        assert "slime/b.py 1" in finding.message
    many = "".join(f"def f{i}(a: int): ...\n" for i in range(32))
    assert len(repo_shape.check_types({"slime/a.py": many + "def f(a): ...\n"})) == 1
    assert repo_shape.check_types({"slime/a.py": many + many + "def f(a): ...\n"}) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
