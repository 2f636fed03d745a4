"""Every command of docs/harness.md runs, in a copy of what the page is about; its workflow is one that
GitHub takes.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import yaml

from slime import cli

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "harness.md").read_text()
# what stands for a user's own folders
NAMES = {
    "REC": "recording",
    "runs/rec": "recording",
    "A": "recording",
    "B": "second",
    "GOLDEN": "golden",
    "runA/dumps": "dumps",
    "runB/dumps": "dumps",
}
# a recording of three rollouts has no seventh, and samples are numbered from 100 times its number
NUMBERS = {"rollout_000007 12": "rollout_000001 112", "--rollout 7": "--rollout 1", "--from 3 --to 9": "--from 1 --to 2",
           "rollout_000007": "rollout_000001"}  # fmt: skip
TRAINS = re.compile(r"--stage (train|all)|golden update|--samples")


def commands(text=PAGE):
    """Every `slime` command of the page's bash blocks, without its comment."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.split("  #")[0].strip()
            if line.startswith("slime "):
                found.append(line)
    return found


def sections():
    """The text of the page by heading."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


OWN = [
    line for name in ("Golden runs", "My reward collapsed") for line in commands(sections()[name])
]
# bisect and audit have pages of tests of their own
OTHERS = [
    line
    for name, text in sections().items()
    for line in commands(text)
    if line not in OWN and line.split()[1] in ("replay", "diff", "show")
]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder in which the page's names are real recordings, below the repository's tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path / "recording")
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path / "second")
    (tmp_path / "dumps").mkdir()
    for number in (0, 1):
        shutil.copy(
            tmp_path / "recording" / f"rollout_00000{number}" / "samples.parquet",
            tmp_path / "dumps" / f"{number}.parquet",
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(line):
    """The command's words, with real names and numbers for the page's."""
    for written, real in NUMBERS.items():
        line = line.replace(written, real)
    return [real_name(word) for word in shlex.split(line)[1:]]


def real_name(word):
    for name, real in NAMES.items():
        if word == name or word.startswith(f"{name}/"):
            return real + word[len(name) :]
    return word


def run(line):
    """The exit status of a command of the page."""
    words = words_of(line)
    if words[0] == "golden" and words[1] != "new" and "golden" in words[2:]:
        if not Path("golden").exists():
            shutil.copytree("recording", "golden")
    return cli.main(words)


def params(lines):
    return [
        pytest.param(line, marks=[pytest.mark.slow_layouts] if TRAINS.search(line) else [])
        for line in lines
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", params(OWN))
def test_commands_of_golden_runs_run(line, workplace, capsys):
    """Status 0, or 1 where the page says that something differs."""
    status = run(line)
    text = capsys.readouterr()
    differs = "collapsed" in line and "show" not in line
    assert status == int(differs), text.out + text.err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", params(OTHERS))
def test_commands_of_replay_and_diff_run(line, workplace, capsys):
    """No command of the page is refused; another option or gate than the recorded one differs."""
    status = run(line)
    text = capsys.readouterr()
    assert status in (0, 1) and "error:" not in text.err, text.out + text.err


def test_the_collapsed_run_is_what_the_page_says(workplace, capsys):
    """The first cause is the reward of the sample that the page shows, and today's code gives the
    other score."""
    assert cli.main(shlex.split("diff tests/golden/run tests/golden/collapsed --to 1")) == 1
    shown = capsys.readouterr().out
    walk = sections()["My reward collapsed"]
    for line in re.search(r"```\n(first difference.*?)```", walk, re.DOTALL)[1].splitlines():
        assert line.strip() in shown, line
    words = "replay tests/golden/collapsed --rollout 0 --stage rewards"
    assert cli.main(shlex.split(words)) == 1
    assert "0.22222222222222224 in A, 0.4444444444444445 in B" in capsys.readouterr().out
    assert "end_tokens.py" in walk
    table = yaml.safe_load((ROOT / "tools" / "mutants" / "golden.yaml").read_text())
    (fault,) = (one for one in table if one["id"] == "golden-end-tokens-are-scored")
    assert fault["file"] == "slime/rollout/rm_hub/end_tokens.py"


def test_the_workflow_is_one_that_github_takes(tmp_path):
    """It matches GitHub's schema, and the security check finds nothing."""
    text = re.search(r"```yaml\n(name: Golden run.*?)```", PAGE, re.DOTALL)[1]
    path = tmp_path / ".github" / "workflows" / "golden.yml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    schema = [sys.executable, "-m", "check_jsonschema", "--builtin-schema",
              "vendor.github-workflows", path]  # fmt: skip
    zizmor = [Path(sys.executable).parent / "zizmor", "--offline", "--config",
              ROOT / ".github" / "zizmor.yml", path]  # fmt: skip
    for command in (schema, zizmor):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    steps = yaml.safe_load(text)["jobs"]["golden"]["steps"]
    assert steps[-1]["run"] == "slime golden check tests/golden --stage all"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
