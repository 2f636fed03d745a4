"""`slime supervise` restarts what can go on, stops at what would fail again, and leaves no process; and
real runs that are killed in the middle lose no sample and train none twice.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import small_run
from support.ledger_runs import proof_of

from slime.commands.supervise import Command, command_of, without_options
from slime.config.derive import CHECKPOINT_TRACKER
from slime.exceptions import ConfigError
from slime.harness.trace import build_summary

NUM_GPUS = 0
PRETEND = small_run.ROOT / "tests" / "support" / "pretend_run.py"
SUPERVISE = """
import json, sys
from slime.commands import supervise
words = json.loads(sys.argv[1])
command = supervise.Command(tuple(words), (), None, None, sys.argv[2], {})
supervise.prctl(supervise.PR_SET_CHILD_SUBREAPER, 1)
supervise.END_S = float(sys.argv[4])
raise SystemExit(supervise.Supervisor(command, max_restarts=int(sys.argv[3]), pause_s=0.1).run())
"""


def supervised(folder, plan, *, max_restarts=5, end_s=1.0):
    """A supervisor over a run that follows `plan`."""
    (folder / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, str(PRETEND), str(folder / "plan.json")]
    return small_run.launch(
        [sys.executable, "-c", SUPERVISE, json.dumps(words), str(folder), str(max_restarts), str(end_s)],
        folder,
    )  # fmt: skip


def until(condition, what, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout} s"
        time.sleep(0.01)


def running(folder):
    """Command lines of the processes that have the run's folder in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{small_run.RUN_VARIABLE}={folder}".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


PLANS = {
    "finishes after a failure and a kill": (
        [{"rollouts": 1, "end": 1}, {"rollouts": 3, "end": -9}, {"rollouts": 5}],
        0,
        "the run is finished, after 2 restarts",
        3,
    ),
    "stops at a rollout that fails twice": (
        [
            {"rollouts": 4, "end": 1},
            {"rollouts": 2, "end": 1},
            {"first": 2, "rollouts": 2, "end": 1},
        ],
        1,
        "rollout 4 failed for the second time",
        3,
    ),
    "stops at a start that fails twice": ([{"silent": True, "end": 7}], 7, "its start failed", 2),
    "stops at a configuration error": ([{"silent": True, "end": 2}], 2, "correct the options", 1),
    "stops at the last restart": (
        [{"rollouts": 1, "end": 1}, {"rollouts": 2, "end": 1}, {"rollouts": 3, "end": -11}],
        139,
        "--max-restarts 2 are used up",
        3,
    ),
    "keeps the status of a run that failed behind its last rollout": (
        [{"rollouts": 3, "end": 1}, {"silent": True, "end": 0}],
        1,
        "is its status",
        2,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_attempt_is_followed_by_another_where_that_can_help(tmp_path, name):
    """What it does, its exit status, the sentence, and one line of the log per attempt."""
    plan, status, words, attempts = PLANS[name]
    process = supervised(tmp_path, plan, max_restarts=2)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, words in output) == (status, True), output
    lines = [json.loads(line) for line in (tmp_path / "supervise.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, attempts + 1))
    assert not running(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_nothing_is_left(tmp_path, number):
    """Passed on once; a run that does not listen is ended by force, and its daemons with it."""
    process = supervised(
        tmp_path, [{"hang": number == signal.SIGTERM, "waits": True, "child": True}]
    )
    until(lambda: (tmp_path / "ready").exists(), "run")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (130, 137) and "interrupted" in output
    assert not running(tmp_path)


def test_a_supervisor_that_is_killed_takes_its_run_along(tmp_path):
    """The kernel tells the run when its supervisor is gone."""
    process = supervised(tmp_path, [{"waits": True}])
    until(lambda: (tmp_path / "ready").exists(), "run")
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not running(tmp_path), "end of the run", timeout=10)


def test_a_restart_goes_on_from_its_own_checkpoint_and_not_from_where_the_first_began(tmp_path):
    """Before a checkpoint the command stays as it is; then --load is the folder of --save, and what
    said where the first attempt begins is gone."""
    words = [
        "slime",
        "train",
        "--save",
        str(tmp_path),
        "--load=/old",
        "--ckpt-step",
        "7",
        "--finetune",
    ]
    command = command_of([*words, "--lr", "1e-3"])
    assert command.words()[4:-2] == [*words[2:], "--lr", "1e-3"]
    assert command.beginning == f"as the first began: {tmp_path} holds no checkpoint yet"
    (tmp_path / CHECKPOINT_TRACKER).write_text("12\n")
    assert command.words()[4:] == [
        "--save", str(tmp_path), "--lr", "1e-3", "--run-dir", command.run_dir, "--load", str(tmp_path),
    ]  # fmt: skip
    assert command.beginning == f"from the checkpoint after rollout 12 in {tmp_path}"
    given = Command(("x",), (), str(tmp_path), "/old", "/run", {"ckpt_step": "run.yaml"})
    assert given.words()[-2:] == ["--ckpt-step", "12"]
    assert without_options(["--load", "a", "--lr", "1"], ["load"]) == ["--lr", "1"]


@pytest.mark.parametrize(
    "words", [[], ["ls"], ["slime", "doctor"], ["slime", "train", "--dry-run"], ["slime", "train", "--lrr"]]
)  # fmt: skip
def test_what_cannot_be_supervised_is_refused(words):
    """Nothing behind --, another command, one that only prints, a wrong flag."""
    with pytest.raises(ConfigError):
        command_of(words)


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_in_generation_and_in_a_save_loses_and_repeats_nothing(
    tmp_path, capsys
):
    """A real run with partial batches given back; killed with -9 in a rollout and inside a
    checkpoint, restarted by `slime supervise`: `slime ledger` says OK, over metrics, checkpoints,
    recording and dumps; `slime trace` names both gaps."""
    from examples.addition.prepare import prepare

    data, run = Path(prepare(tmp_path / "addition")), tmp_path / "run"
    options = [
        "--num-rollout", 5, "--save", run / "ckpt", "--save-interval", 1, "--keep-checkpoints", 2,
        "--over-sampling-batch-size", 10, "--partial-rollout", "--local", "--record", run / "rec",
        "--save-debug-rollout-data", run / "dumps" / "{rollout_id}.parquet", "--trace",
    ]  # fmt: skip
    words = small_run.command(data, run, *options)
    run.mkdir()
    process = small_run.launch(
        [sys.executable, "-m", "slime.cli", "supervise", "--pause", "0.2", "--", *words], run
    )
    ledger, pointer = run / "ckpt" / "ledger.jsonl", run / "ckpt" / CHECKPOINT_TRACKER

    def driver():
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        return int(found.stdout.split()[0])

    until(lambda: pointer.exists() and '"rollout":1,' in ledger.read_text(), "rollout 1", 120)
    os.kill(driver(), signal.SIGKILL)
    until(lambda: list((run / "ckpt").glob(".iter_0000003.writing")), "save", 120)
    os.kill(driver(), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    status, proof = proof_of(run, capsys)
    assert (status, proof["culprits"]) == (0, []), proof
    assert proof["rollouts"] == 5 and proof["starts"] == 3 and proof["superseded"]
    kinds = ("metrics", "the recording", "dumps")
    checked = {f"rollouts in {kind}": 5 for kind in kinds}
    assert proof["checked"] == {"checkpoints": 2, **checked}
    assert output.count("from the checkpoint after rollout") == 2, output
    summary, _, _ = build_summary(run)
    assert [(row.phase, row.count) for row in summary.rows if row.process == "restarts"] == [
        ("restart", 2)
    ]
    assert not running(run)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
