"""The workflow that runs the tests: rendered from its template, complete, and red when a test fails
or does not run."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jinja2
import pytest
import yaml

from slime import tested_versions

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
RUNNER = ROOT / "tests" / "ci" / "run_test_file.py"
JOB_TOOL = ROOT / "tools" / "run_workflow_job.py"
TEST_FILE = textwrap.dedent(
    """
    import pytest

    def test_one():
        assert {condition}

    if __name__ == "__main__":
        raise SystemExit(pytest.main([__file__, "-q"]))
    """
)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load(WORKFLOWS / "generate_github_workflows.py")
runner = load(RUNNER)
job_tool = load(JOB_TOOL)


def run(*command, cwd=ROOT):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def checkout(tmp_path):
    """A small repository with two registered test files, rendered by the real generator."""
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    shutil.copy(WORKFLOWS / "pr-test.yml.j2", folder)
    template = folder / "pr-test.yml.j2"
    text = template.read_text()
    start = text.index("<% set cpu_unittest = [")
    end = text.index("] %>", start)
    entries = "".join(
        f"  {{'test_file': '{name}', 'num_gpus': 0}},\n" for name in ("test_a.py", "sub/test_b.py")
    )
    text = text[:start] + "<% set cpu_unittest = [\n" + entries + text[end:]
    start = text.index("<% set slow_layouts = [")
    template.write_text(
        text[:start] + "<% set slow_layouts = [\n" + text[text.index("] %>", start) :]
    )
    (folder / "pr-test.yml").write_text(generator.render(template))
    tests = tmp_path / "tests"
    (tests / "sub").mkdir(parents=True)
    (tests / "ci").mkdir()
    shutil.copy(RUNNER, tests / "ci")
    for name in ("test_a.py", "sub/test_b.py"):
        (tests / name).write_text(TEST_FILE.format(condition="True"))
    return tmp_path


def registration_problems(checkout):
    return generator.find_registration_problems(
        checkout / ".github" / "workflows" / "pr-test.yml", checkout / "tests"
    )


def run_job(checkout, *options):
    workflow = checkout / ".github" / "workflows" / "pr-test.yml"
    return run(
        JOB_TOOL,
        "cpu-unittest",
        "--no-install",
        "--workflow",
        workflow,
        "--root",
        checkout,
        *options,
    )


def test_committed_workflow_is_what_its_template_renders_to():
    """The committed workflow equals the rendered template; otherwise CI would run something else
    than what reviewers read."""
    assert generator.find_differences() == []


def test_every_test_file_of_this_repository_is_registered():
    """Every test file is in a job of the workflow; a file in no job never runs in CI."""
    assert generator.find_registration_problems(WORKFLOWS / "pr-test.yml", ROOT / "tests") == []


def test_every_file_with_slow_layouts_is_in_the_job_that_runs_that_mark():
    """Files with slow layouts are in a job of their own, because `make test` and cpu-unittest leave
    them out."""
    tests = ROOT / "tests"
    marked = {
        p.relative_to(tests).as_posix()
        for p in tests.rglob("test_*.py")
        if "mark.slow_layouts" in p.read_text()
    }
    marked -= {"ci/test_workflows.py"}
    job = yaml.safe_load((WORKFLOWS / "pr-test.yml").read_text())["jobs"]["slow-layouts"]
    assert "if" not in job and job["env"]["PYTEST_ADDOPTS"] == "-m slow_layouts"
    assert {entry["test_file"] for entry in job["strategy"]["matrix"]["info"]} == marked


def test_planted_faults_run_in_a_job_of_their_own():
    """A sample of the planted faults runs on every push."""
    job = yaml.safe_load((WORKFLOWS / "pr-test.yml").read_text())["jobs"]["planted-faults"]
    assert "if" not in job
    assert job["steps"][-1]["run"] == "python tools/mutants/run.py --sample 30 --seed 0 --jobs 2"


def test_no_change_is_too_small_for_the_cpu_tests():
    """The job of all CPU tests runs for every push and pull request, whatever files changed."""
    workflow = yaml.safe_load((WORKFLOWS / "pr-test.yml").read_text())
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert {"push", "pull_request"} <= set(triggers)
    assert not [
        name for event in triggers.values() for name in event or {} if name.startswith("paths")
    ]
    assert "if" not in workflow["jobs"]["cpu-unittest"]


def test_every_tested_python_runs_in_a_job():
    """Each Python version of the range that README and `slime doctor` name runs in a job, the
    newest megatron-core with it."""
    jobs = yaml.safe_load((WORKFLOWS / "pr-test.yml").read_text())["jobs"]
    setups = [
        step["with"]["python-version"]
        for job in jobs.values()
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    ]
    run = {version for version in setups if "matrix" not in version} | set(
        jobs["interpreters"]["strategy"]["matrix"]["python"]
    )
    (_, first), (_, last) = tested_versions.PYTHON
    assert run == {f"3.{minor}" for minor in range(first, last + 1)}
    commands = " ".join(step.get("run", "") for step in jobs["interpreters"]["steps"])
    assert "make PYTHON=python train" in commands and "tests/megatron" in commands


def test_consistent_checkout_has_no_problems(checkout):
    """A consistent checkout has no problems; the other cases differ from it in one respect each."""
    assert generator.find_differences(checkout / ".github" / "workflows") == []
    assert registration_problems(checkout) == []


def test_unregistered_test_file_is_named(checkout):
    """A test file that is not in the template is reported."""
    (checkout / "tests" / "test_new.py").write_text(TEST_FILE.format(condition="True"))
    assert registration_problems(checkout) == ["tests/test_new.py is in no job of pr-test.yml"]


def test_registered_file_that_is_missing_is_named(checkout):
    """A registered file that does not exist is reported, as after a renaming."""
    (checkout / "tests" / "sub" / "test_b.py").unlink()
    assert registration_problems(checkout) == [
        "cpu-unittest registers tests/sub/test_b.py, which is not there"
    ]


def test_file_registered_twice_is_named(checkout):
    """A file that is registered twice is reported."""
    workflow = checkout / ".github" / "workflows" / "pr-test.yml"
    entry = '          - {"num_gpus": 0, "test_file": "test_a.py"}\n'
    assert entry in workflow.read_text()
    workflow.write_text(workflow.read_text().replace(entry, entry + entry))
    assert registration_problems(checkout) == ["cpu-unittest registers tests/test_a.py twice"]


@pytest.mark.parametrize("change", ["entry removed", "file deleted"])
def test_rendered_workflow_that_differs_from_its_template_is_found(checkout, change):
    """A workflow that is missing or differs from its rendered template is reported."""
    folder = checkout / ".github" / "workflows"
    workflow = folder / "pr-test.yml"
    if change == "file deleted":
        workflow.unlink()
    else:
        workflow.write_text(workflow.read_text().replace("sub/test_b.py", "sub/test_c.py"))
    (problem,) = generator.find_differences(folder)
    assert problem.startswith("pr-test.yml is ")


def test_a_name_that_the_template_does_not_define_stops_the_rendering(tmp_path):
    """An undefined name in the template is an error and not an empty text."""
    template = tmp_path / "x.yml.j2"
    template.write_text("run: << comand >>\n")
    with pytest.raises(jinja2.UndefinedError, match="comand"):
        generator.render(template)


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["pr-test.yml is missing"], 1)])
def test_the_check_ends_with_a_status_that_a_job_sees(monkeypatch, capsys, problems, status):
    """`--check` prints its findings and returns 1."""
    monkeypatch.setattr(generator, "find_differences", lambda: problems)
    monkeypatch.setattr(sys, "argv", ["generate_github_workflows.py", "--check"])
    assert generator.main() == status
    assert capsys.readouterr().err.splitlines() == problems


def test_expressions_of_github_pass_through_the_template():
    """`${{ }}` belongs to GitHub; << >> and <% %> are ours and none is left after rendering."""
    rendered = generator.render(WORKFLOWS / "pr-test.yml.j2")
    assert "${{ matrix.info.test_file }}" in rendered
    assert "<%" not in rendered and "<<" not in rendered and "<#" not in rendered
    assert [set(line) for line in rendered.splitlines()[:3:2]] == [{"#"}, {"#"}]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (TEST_FILE.format(condition="True"), 0),
        (TEST_FILE.format(condition="False"), 1),
        # no __main__ block: python runs nothing and exits with 0
        ("def test_one():\n    assert False\n", 5),
        # no case, status not passed on
        ("import pytest\n\nif __name__ == '__main__':\n    pytest.main([__file__])\n", 5),
        (TEST_FILE.format(condition="pytest.skip('all')"), 5),
    ],
    ids=["passes", "fails", "no main block", "no case", "all skipped"],
)
def test_a_file_passes_only_if_a_case_ran_and_none_failed(tmp_path, content, status):
    """A file passes only if a test case ran and none failed: no main block, no case and only skips
    are failures."""
    file = tmp_path / "test_x.py"
    file.write_text(content)
    assert run(RUNNER, file, cwd=tmp_path).returncode == status


def test_local_run_of_the_job_runs_every_entry_and_says_what_it_skips(checkout):
    """The local run of a job runs every entry with the workflow's own script and prints which steps
    it skips."""
    result = run_job(checkout)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 entries passed" in result.stdout
    assert (
        "Checkout: skipped, actions/checkout" in result.stdout
        and "Install: skipped" in result.stdout
    )
    assert "tests/sub/test_b.py: 1 ran, 0 skipped, exit status 0" in result.stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (TEST_FILE.format(condition="False"), "status 1"),
        ("def test_one():\n    pass\n", "status 5"),
    ],
    ids=["failing file", "file that runs no test"],
)
def test_job_fails_when_one_entry_fails_or_runs_nothing(checkout, content, reason):
    """One failing or empty test file fails the job."""
    (checkout / "tests" / "sub" / "test_b.py").write_text(content)
    result = run_job(checkout)
    assert result.returncode == 1
    assert f"FAILED sub/test_b.py: step 'Run' ended with {reason}" in result.stderr
    assert "1 of 2 entries passed" in result.stdout


def test_only_runs_the_named_entry_and_refuses_an_unknown_one(checkout):
    """--only runs the named entry and refuses an unknown one."""
    assert "1 of 1 entries passed" in run_job(checkout, "--only", "test_a.py").stdout
    unknown = run_job(checkout, "--only", "test_z.py")
    assert unknown.returncode == 2 and "not in this job: test_z.py" in unknown.stderr


def test_expressions_are_evaluated_or_refused():
    """An expression that the local runner does not know is an error and not an empty text."""
    context = {
        "matrix": {"info": {"test_file": "test_a.py"}},
        "github": {"sha": "local", "event": {}},
    }
    assert job_tool.substitute("tests/${{ matrix.info.test_file }}", context) == "tests/test_a.py"
    assert (
        job_tool.substitute("${{ github.event.inputs.infinite_run || 'false' }}", context)
        == "false"
    )
    assert job_tool.substitute("[${{ matrix.info.test_args }}]", context) == "[]"
    with pytest.raises(ValueError, match="does not know"):
        job_tool.substitute("${{ contains(github.ref, 'x') }}", context)


def test_workflow_matches_githubs_schema(tmp_path):
    """The workflow matches GitHub's schema; a typo in a key is found before a push."""
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    result = run(*command, WORKFLOWS / "pr-test.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    broken = tmp_path / "broken.yml"
    broken.write_text((WORKFLOWS / "pr-test.yml").read_text().replace("runs-on:", "runs:"))
    assert run(*command, broken).returncode != 0


def test_workflow_has_no_security_findings(tmp_path):
    """The offline check finds no broad permission, kept credential or template injection, and finds
    one that is put in."""
    zizmor = Path(sys.executable).parent / "zizmor"

    def findings(workflow):
        command = [zizmor, "--offline", "--config", ROOT / ".github" / "zizmor.yml", workflow]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    result = findings(WORKFLOWS / "pr-test.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    broken = tmp_path / "broken.yml"
    broken.write_text(
        (WORKFLOWS / "pr-test.yml").read_text().replace("contents: read", "contents: write")
    )
    result = findings(broken)
    assert result.returncode and "excessive-permissions" in result.stdout


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
