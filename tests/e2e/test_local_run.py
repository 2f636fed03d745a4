"""`slime train --local`: the whole run in one process, with the numbers of a run in Ray, and usable
with a debugger."""

import argparse
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import small_run

from slime.harness import show
from slime.harness.diff.inputs import compare_paths
from slime.harness.trace import summarize
from slime.harness.trace_files import read_traces, windows_of
from slime.local import LocalResult, words_of

NUM_GPUS = 0

THRICE = """
import json, os, subprocess, sys
import ray  # sets a variable when it is imported
from slime.local import train

words = json.loads(sys.argv[1])
before = dict(os.environ)
first, second = (train(words, run_dir=folder, dump_details=f"{folder}/dumps") for folder in sys.argv[2:4])
train(words, run_dir=sys.argv[4], trace=True)
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout.splitlines()
assert len(children) == 1, children  # ps itself
"""

PAUSING_REWARD = """
async def reward(args, sample):
    seen = sample.label
    if sample.index == 5:
        breakpoint()
    return 0.5
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from examples.addition.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("addition")))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Run folders of the same two rollouts: in Ray, and three times in one process of its own, the
    third time with --trace."""
    root = tmp_path_factory.mktemp("local")
    options = [
        "--num-rollout",
        2,
        "--eval-prompt-data",
        "addition",
        data / "eval.jsonl@[:64]",
        "--eval-interval",
        1,
    ]
    options += [
        "--eval-max-response-len",
        6,
        "--eval-temperature",
        0,
        "--check-weight-update-equal",
    ]
    in_ray = small_run.start(data, root / "ray", *options, "--dump-details", root / "ray" / "dumps")
    words = small_run.command(data, root / "first", *options)[3:]
    local = small_run.launch(
        [
            *[sys.executable, "-c", THRICE, json.dumps(words)],
            *[str(root / name) for name in ("first", "second", "traced")],
        ],
        root / "first",
    )
    for process in (in_ray, local):
        small_run.finish(process)
    return root


def numbers(run_dir):
    """Every logged number by (axis, step, name), without times and what is made of them."""
    found = {}
    for record in small_run.records(run_dir):
        for name, value in record.get("metrics", {}).items():
            timed = (
                name.startswith(("perf/request", "perf/prefill", "perf/decode"))
                or "time" in name
                or "per_sec" in name
                or "per_s" in name
                or "tflops" in name
                or name.startswith("gate/perf")
            )
            if not timed:
                found[record["step_key"], record["step"], name] = value
    return found


@pytest.mark.timeout(300)
def test_the_local_run_has_the_numbers_of_the_run_in_ray(runs):
    """Rewards, log-probs, losses, gradient norms, evaluation and the engine's weights are those of
    the run in Ray, bit for bit."""
    expected = numbers(runs / "ray")
    assert len(expected) > 300 and ("train/step", 3, "train/grad_norm") in expected
    for folder in ("first", "second"):
        assert numbers(runs / folder) == expected
        assert all(
            one.identical
            for one in compare_paths(runs / "ray" / "dumps", runs / folder / "dumps").rollouts
        )


PHASES = {
    "rollout-manager": (
        "rollout generate response_gate gate rollout_metrics dump convert_samples rewards columns "
        "schedule put evaluation request reward"
    ),
    "actor-0": (
        "train data_preprocess get localize log_probs advantages actor_train train_step "
        "forward_backward consistency optimizer_step weight_change update_weights gather_weights "
        "hash_weights send_weights sleep wake_up train_wait"
    ),
    "engine-0": "prefill decode pause receive_weights apply_weights release_memory resume_memory",
}


@pytest.mark.timeout(300)
def test_a_trace_of_the_run_has_every_phase_and_covers_the_iterations(runs):
    """With --trace the spans of a run name all that its processes do, those of a thread nest, and
    together they cover the time of its rollouts; the numbers are those of a run without it."""
    assert numbers(runs / "traced") == numbers(runs / "first")
    assert not (runs / "first" / "trace").exists()
    traces, num_unreadable = read_traces(runs / "traced")
    assert num_unreadable == 0
    assert [trace.process for trace in traces] == ["driver", *PHASES]
    for trace in traces[1:]:
        assert {*PHASES[trace.process].split()} <= {span.name for span in trace.spans}
    summary = summarize(traces, windows_of(traces))
    assert summary.rollouts == [0, 1] and summary.idle_seconds < 0.1 * summary.seconds
    around = {(row.phase, row.depth) for row in summary.rows}
    assert {("train", 0), ("actor_train", 1), ("train_step", 2), ("optimizer_step", 3)} <= around
    assert small_run.series(runs / "traced", "perf/request/count")[0] >= 32


@pytest.mark.timeout(300)
def test_a_sample_of_a_run_is_shown_with_the_trainers_numbers(runs, capsys):
    """`slime show` finds the train dump beside the rollout dump, and the sample in it by its place
    and index."""
    dump = runs / "first" / "dumps" / "rollout_data" / "0.parquet"
    assert show.main([str(dump), "--sample", "3", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert tokens and all(abs(row["trainer"] - row["engine"]) < 1e-4 for row in tokens)
    assert len({row["advantage"] for row in tokens}) == 1 and tokens[0]["text"] is not None


@pytest.mark.timeout(300)
def test_a_breakpoint_in_a_reward_stops_and_goes_on(data, tmp_path):
    """breakpoint() in a reward function stops the run, and it goes on after `continue`."""
    (tmp_path / "pausing.py").write_text(PAUSING_REWARD)
    words = small_run.command(
        data, tmp_path / "run", "--num-rollout", 1, "--local", "--debug-rollout-only"
    )
    words += ["--custom-rm-path", "pausing.reward"]
    environment = {**os.environ, **small_run.ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(small_run.ROOT), str(small_run.ROOT / "tests"), str(tmp_path)]
    )
    # as a Ray session of the parent process leaves it
    environment["PYTHONBREAKPOINT"] = "ray.util.rpdb.set_trace"
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        words, cwd=small_run.ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = read_until(main, "(Pdb) ")
    os.write(main, b"p 'label', seen\n")
    shown += read_until(main, "(Pdb) ")
    os.write(main, b"c\n")
    shown += read_until(main, None)
    assert process.wait(timeout=60) == 0, shown
    assert shown.count("(Pdb) ") == 2 and "('label', '" in shown
    assert small_run.series(tmp_path / "run", "rollout/reward/mean") == [0.5]


def test_quitting_the_debugger_is_no_samples_failure():
    """Quitting the debugger ends the run and is not counted as a sample's failure."""
    import asyncio
    import bdb

    from slime.data.sample import Sample
    from slime.rollout import scoring

    sample = Sample(
        index=0, response="1", response_length=1, tokens=[1], status=Sample.Status.COMPLETED
    )
    with pytest.raises(bdb.BdbQuit):
        asyncio.run(
            scoring.score_group(
                argparse.Namespace(custom_rm_path=f"{__name__}.quits"), [sample], None
            )
        )


async def quits(args, sample):
    import bdb

    raise bdb.BdbQuit


def read_until(descriptor, text, *, seconds=120):
    """What the terminal shows until `text` appears, or until it is closed where `text` is None."""
    shown, deadline = "", time.monotonic() + seconds
    while text is None or text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([descriptor], [], [], 1.0)[0]:
            try:
                part = os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                part = b""
            if not part:
                break
            shown += part.decode(errors="replace")
    return shown


def test_keywords_become_words_of_the_command_line():
    """Keyword arguments of a notebook become options, and a wrong name is answered with the nearest
    one."""
    words = words_of(
        {
            "lr": 1e-3,
            "colocate": True,
            "rollout_stop": ["a", "b"],
            "rewards_normalization": False,
            "load": None,
        }
    )
    assert (
        words == "--lr 0.001 --colocate --rollout-stop a b --disable-rewards-normalization".split()
    )
    assert words_of({"rollout_sample_hook_path": ["a.b", "c.d"], "colocate": False}) == [
        "--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'num_rolout'. Did you mean 'num_rollout'?"):
        words_of({"num_rolout": 1})


def test_a_series_that_was_not_logged_is_answered_with_the_nearest(tmp_path):
    """Asking for a series that was not logged is an error with the nearest name."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step_key": "train/step", "step": 3, "metrics": {"train/loss": 0.5}}\n'
    )
    result = LocalResult(None, tmp_path)
    assert result.series("train/loss") == {3: 0.5}
    with pytest.raises(KeyError, match="Did you mean train/loss?"):
        result.series("train/los")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
