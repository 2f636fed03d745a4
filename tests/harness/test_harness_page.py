"""Every command of docs/harness.md runs, in a copy of what the page is about; its workflow is one that
GitHub takes.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import yaml
from support import small_run

from slime import cli
from slime.config.cli import parse_command_line
from slime.config.specs import all_specs
from slime.config.yaml_file import format_resolved
from slime.recording.reader import Recording

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
    "runA": "run",
    "runB": "run",
}
# a recording of three rollouts has no seventh
NUMBERS = {"--rollout 7": "--rollout 1", "--from 3 --to 9": "--from 1 --to 2",
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
REST = [line for line in commands() if line not in OWN]
TRAIN = [line for line in REST if line.split()[1] == "train"]
BISECT = [line for line in REST if line.split()[1] == "bisect"]
OTHERS = [line for line in REST if line not in TRAIN + BISECT]
FAULT = "golden-end-tokens-are-scored"
# what the commit's scorers read of a recorded response
CHECK = """
import sys
from pathlib import Path
from slime.rollout.rm_hub.end_tokens import without_end_tokens

assert (Path(sys.argv[1]) / "run_0000.json").is_file()
text = without_end_tokens("to by to is is forty two<|im_end|>")
if text.endswith("<|im_end|>"):
    print(f"first difference in the data: reward: 'forty two' in A, {text!r} in B")
    sys.exit(1)
"""
RUNS = """
import json, sys
from slime import cli

for words in json.loads(sys.argv[1]):
    status = cli.main(words)
    assert status == 0, (status, words)
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder in which the page's names are real recordings, below the repository's tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path / "recording")
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path / "second")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("lr: 0.001\nderived:\n  seq_length: 128\n")
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


@pytest.mark.timeout(300)
def test_commands_that_train_run(tmp_path):
    """A run is recorded, goes on in the same folder, and is trained on again, with the words of the
    page."""
    from examples.addition.prepare import prepare

    data = Path(prepare(tmp_path / "data"))
    first, resumed, again = (shlex.split(line, comments=True)[1:] for line in TRAIN)
    words = small_run.command(data, tmp_path / "run", "--local", "--save", "runs/ckpt")[3:]
    args = parse_command_line(words).args
    (tmp_path / "run.yaml").write_text(format_resolved(args, all_specs()))
    # the page's run.yaml counts its own rollouts
    runs = [[*first, "--num-rollout", "1"], [*resumed, "--num-rollout", "2"],
            [*again, "--num-rollout", "2", "--save", "runs/other"]]  # fmt: skip
    environment = {**os.environ, **small_run.ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(runs)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    recording = Recording(tmp_path / "runs" / "rec")
    assert [recording.rollout(number).run for number in recording.rollouts] == [0, 1]
    assert Recording(tmp_path / "runs" / "again").rollouts == [0, 1]


def git(folder, *words):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": "/dev/null"}
    identity = ["-c", "user.name=An Author", "-c", "user.email=author@example.org"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, env=environment, check=True, text=True,
        capture_output=True, timeout=60,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout of slime of two commits, v1.2 and one that collapses the reward, in which the
    page's names are the golden run."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in git(ROOT, "ls-files", "slime").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    (folder / "check.py").write_text(CHECK)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Release 1.2")
    git(folder, "tag", "v1.2")
    faults = yaml.safe_load((ROOT / "tools" / "mutants" / "golden.yaml").read_text())
    (fault,) = (one for one in faults if one["id"] == FAULT)
    source = folder / fault["file"]
    text = source.read_text()
    assert text.count(fault["old"]) == 1
    source.write_text(text.replace(fault["old"], fault["new"]))
    git(folder, "commit", "-qam", "Scorers are simpler")
    (folder / "tests").mkdir()
    (folder / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    shutil.copytree(ROOT / "tests" / "golden" / "run", folder / "recording")
    return folder


(INLINE,) = re.findall(r"`(slime bisect \S+ --good OLD .*?)`", PAGE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "line",
    [*BISECT, pytest.param(INLINE.replace("OLD", "v1.2"), marks=pytest.mark.slow_layouts)],
)
def test_commands_of_bisect_find_the_commit(line, checkout, monkeypatch, capsys):
    """The commit that scored the token that ends a response, by hash, with its first cause."""
    monkeypatch.chdir(checkout)
    assert cli.main(words_of(line.replace("NEW", "HEAD"))) == 0
    out = capsys.readouterr().out
    assert f"first bad commit: {git(checkout, 'rev-parse', 'HEAD').strip()}" in out
    assert "first difference in the data: " in out and "reward: " in out and "in A" in out


def test_the_collapsed_run_is_what_the_page_says(workplace, capsys):
    """The first cause is the reward of the sample that the page shows, and today's code gives the
    other score."""
    assert cli.main(shlex.split("diff tests/golden/run tests/golden/collapsed --to 1")) == 1
    shown = capsys.readouterr().out
    walk = sections()["My reward collapsed"]
    for line in re.search(r"```\n(different: .*?)```", walk, re.DOTALL)[1].splitlines():
        assert line.strip() in shown, line
    words = "replay tests/golden/collapsed --rollout 0 --stage rewards"
    assert cli.main(shlex.split(words)) == 1
    assert "0.22222222222222224 in A, 0.4444444444444445 in B" in capsys.readouterr().out
    assert "end_tokens.py" in walk
    table = yaml.safe_load((ROOT / "tools" / "mutants" / "golden.yaml").read_text())
    (fault,) = (one for one in table if one["id"] == FAULT)
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
