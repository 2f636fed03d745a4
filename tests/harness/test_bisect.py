"""`slime bisect` finds the commit that changed a number, and leaves the checkout as it was."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from slime import cli
from slime.harness.bisect import main

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
IDENTITY = {
    "GIT_AUTHOR_NAME": "An Author",
    "GIT_AUTHOR_EMAIL": "author@example.org",
    "GIT_COMMITTER_NAME": "A Committer",
    "GIT_COMMITTER_EMAIL": "committer@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_DATE": "2024-03-01T12:00:00+0000",
}
# replays the baselines of every recorded rollout with the commit's own code
CHECK = """
import sys
import numpy as np
from slime.data.rewards import normalize_rewards
from slime.recording.reader import Recording
recording = Recording(sys.argv[1])
for rollout_id in recording.rollouts:
    batch, _ = recording.rollout(rollout_id).columns()
    again, _ = normalize_rewards(
        np.array(batch["raw_reward"]), batch["group_ids"], batch["valid"], divide_by_std=True
    )
    recorded = np.array(batch["rewards"])
    apart = np.flatnonzero(again.astype(np.float32) != recorded)
    if len(apart):
        print(f"first difference in the data: rollout {rollout_id}, baseline, row {apart[0]}")
        print("    sample    \\x1b[2J and more")
        print("unrelated")
        raise SystemExit(1)
"""
FAULT = ("value = rewards_N[chosen]", "value = rewards_N[chosen] ** 3")


def git(folder, *words):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | IDENTITY
    done = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *words],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """(repository with slime's package, hashes of its six commits, of which the fourth plants a
    fault in the baselines).
    """
    folder = tmp_path_factory.mktemp("history")
    git(folder, "init", "-q")
    for name in subprocess.run(
        ["git", "ls-files", "slime"], cwd=ROOT, text=True, capture_output=True, timeout=60
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    rewards = folder / "slime" / "data" / "rewards.py"
    commits = []
    for number in range(6):
        (folder / "notes.txt").write_text(f"note {number}\n")
        subject = f"Note {number}"
        if number == 3:
            source = rewards.read_text()
            assert source.count(FAULT[0]) == 1
            rewards.write_text(source.replace(*FAULT))
            subject = "Rewards are clearer"
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", subject)
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    return folder, commits


@pytest.fixture
def check(tmp_path):
    path = tmp_path / "check.py"
    path.write_text(CHECK)
    return f"python {path} {{recording}}"


def words_of(recorded_run, history, *more):
    folder, commits = history
    ends = ["--good", commits[0], "--bad", "main", "--repository", str(folder)]
    return [str(recorded_run), *ends, *more]


def test_the_planted_commit_is_found_with_its_cause(recorded_run, history, check, capsys):
    """Hash, subject, author, date and the first difference; the checkout and its changes stay."""
    folder, commits = history
    (folder / "notes.txt").write_text("not committed\n")
    assert main(words_of(recorded_run, history, "--command", check)) == 0
    out = capsys.readouterr().out
    assert f"first bad commit: {commits[3]}" in out and "subject: Rewards are clearer" in out
    assert "author:  An Author <author@example.org>" in out and "2024" in out
    assert "first difference in the data: rollout 0, baseline, row " in out
    assert "\\x1b[2J" in out and "\x1b" not in out and "unrelated" not in out
    assert (folder / "notes.txt").read_text() == "not committed\n"
    assert git(folder, "status", "--porcelain").strip() == "M notes.txt"
    assert git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip() == "main"
    assert len(git(folder, "worktree", "list").splitlines()) == 1
    assert not git(folder, "for-each-ref", "refs/bisect")
    git(folder, "checkout", "-q", "notes.txt")


def test_the_replay_of_each_commit_is_the_judge(recorded_run, history, capsys):
    """Without --command, `slime replay` of the commit itself decides, and names the first cause."""
    _, commits = history
    near = ["--good", commits[2], "--bad", commits[4]]  # a replay takes seconds
    words = words_of(recorded_run, history, "--rollout", "1", "--stage", "rewards", *near)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"first bad commit: {commits[3]}" in out and "subject: Rewards are clearer" in out
    assert "first difference in the data: rollout 1, baseline: sample " in out
    assert "rewards: " in out and "prompt " in out


def test_what_cannot_run_is_skipped(recorded_run, history, check, tmp_path, capsys):
    """A commit whose replay does not start is neither good nor bad; where only such are left, the
    candidates are named."""
    _, commits = history
    script = tmp_path / "skipping.py"
    skipped = [commits[2], commits[3]]
    script.write_text(
        "import subprocess, sys\n"
        "head = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True)\n"
        f"if head.stdout.strip() in {skipped!r}: sys.exit('does not start')\n"
        f"sys.argv = {['check', str(recorded_run)]!r}\n" + CHECK
    )
    words = words_of(recorded_run, history, "--command", f"python {script}", "--json")
    # a message as status is status 1, which is bad: the script must say 125
    script.write_text(script.read_text().replace("'does not start'", "125"))
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_bad"] is None
    assert {one["hash"] for one in found["candidates"]} == {*skipped, commits[4]}
    outcomes = {one["commit"]: one["outcome"] for one in found["trials"]}
    assert outcomes[commits[2]] == outcomes[commits[3]] == "skip"
    assert outcomes[commits[0]] == "good" and outcomes[commits[5]] == "bad"


def test_a_commit_that_does_not_start_is_no_bad_one(recorded_run, history, capsys):
    """Python ends with status 1 for a module that it cannot import, as a replay does for a
    difference: what was compared tells the two apart."""
    folder, commits = history
    git(folder, "checkout", "-q", "--detach", commits[2])
    cli_file = folder / "slime" / "cli.py"
    cli_file.write_text("import slime.is_not_there\n")
    git(folder, "commit", "-qam", "Does not start")
    broken = git(folder, "rev-parse", "HEAD").strip()
    git(folder, "checkout", "-q", "main")
    ends = ["--good", commits[0], "--bad", broken, "--repository", str(folder)]
    words = [str(recorded_run), *ends, "--rollout", "1", "--stage", "rewards"]
    assert cli.main(["bisect", *words]) == 2
    assert "is skip, so there is nothing to look for: status 1: " in capsys.readouterr().err


def test_a_replay_that_hangs_is_skipped(recorded_run, history, tmp_path, capsys):
    """It is ended with its children after --timeout, and the end it was for is named."""
    mark = tmp_path / "pid"
    script = tmp_path / "hangs.py"
    script.write_text(
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    words = words_of(recorded_run, history, "--command", f"python {script}", "--timeout", "2")
    begun = time.monotonic()
    assert cli.main(["bisect", *words]) == 2
    assert time.monotonic() - begun < 20
    captured = capsys.readouterr()
    assert "is skip, so there is nothing to look for: took more than 2 s" in captured.err
    time.sleep(0.2)
    state = Path(f"/proc/{mark.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert len(git(history[0], "worktree", "list").splitlines()) == 1


def test_ends_that_are_not_what_they_should_be_are_told(recorded_run, history, check, capsys):
    """Exit status 2 with the reason, before anything is bisected."""
    folder, commits = history
    base = ["bisect", str(recorded_run), "--repository", str(folder), "--command", check]

    def refused(*words):
        assert cli.main([*base, *words]) == 2
        return capsys.readouterr().err

    assert "is good, so there is nothing" in refused("--good", commits[0], "--bad", commits[2])
    assert "--good" in refused("--good", commits[4], "--bad", commits[5])
    assert "does not come before" in refused("--good", commits[5], "--bad", commits[0])
    assert "--bad nowhere is no commit" in refused("--good", commits[0], "--bad", "nowhere")
    assert "--good --help is no commit" in refused("--good=--help", "--bad", "main")
    assert "must be above 0" in refused("--good", commits[0], "--bad", "main", "--timeout", "0")
    assert "is no git repository" in refused(
        "--good", commits[0], "--bad", "main", "--repository", "/"
    )
    assert "No closing quotation" in refused(
        "--good", commits[0], "--bad", "main", "--command", "'x"
    )
    assert cli.main(["bisect", str(folder / "none"), "--good", "a", "--bad", "b"]) == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
