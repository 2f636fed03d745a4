"""Every wait in the code has a bound that docs/loops.md states, and a test that reaches it."""

import ast
import asyncio
import logging
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import generate_docs  # noqa: E402
from support.fake_engine import FakeEngine  # noqa: E402
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts  # noqa: E402

from slime.config.endless_loops import WORKERS  # noqa: E402
from slime.config.specs import all_specs  # noqa: E402
from slime.config.waits import WAITS  # noqa: E402
from slime.exceptions import ConfigError, EngineError, RolloutDataError, SlimeError  # noqa: E402

NUM_GPUS = 0

# Calls that wait, by the name that is called.
WAITING = {"sleep", "wait", "wait_for", "result", "communicate", "urlopen", "accept", "recv", "barrier", "Popen"} | {
    "init_process_group", "new_group", "_new_process_group_helper",
}  # fmt: skip


def waiting_call(node: ast.Call) -> bool:
    """Whether a call may wait: by its name; `ray.get` and `actors.get`; `queue.get()` and
    `thread.join()`, which take no value.
    """
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in WAITING:
        return True
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    if name == "get":
        return owner in ("ray", "actors") or (
            not node.args and "context" not in owner and owner != "_parent"
        )
    return (name == "join" and not node.args) or (name == "run" and owner == "subprocess")


def waits_in(path: Path) -> set[str]:
    """ "Class.function" of everything in a file that waits."""
    found: set[str] = set()

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*names, child.name)
            if isinstance(child, ast.Call) and waiting_call(child):
                found.add(".".join(inside))
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), ())
    return found


def text_of(path: Path) -> str:
    """The source, each message that is split over lines in one piece."""
    return re.sub(r'"\s*\n\s*[rf]*"', "", path.read_text(encoding="utf-8"))


def waits_in_code() -> set[str]:
    folder = ROOT / "slime"
    # slime.testing is what a user's own tests import; no run waits for it
    files = [
        path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] != "testing"
    ]
    return {f"{path.relative_to(folder)}::{name}" for path in files for name in waits_in(path)}


def test_every_wait_in_the_code_stands_in_the_table_and_every_place_of_the_table_waits():
    """Every wait in the code has a row with bound, message and test, and every row's place
    waits."""
    told = {place for row in (*WAITS, *WORKERS) for place in row.places}
    assert sorted(waits_in_code() - told) == []
    # the place that asks for a bounded try need not contain the waiting call itself
    assert sorted(told - waits_in_code()) == []


def test_a_wait_is_found_by_its_call(tmp_path):
    """The search finds waits by their calls."""
    source = (
        "import time\nclass A:\n    def f(self, q):\n        time.sleep(1)\n        ', "
        "'.join([])\n        {}.get(1)\ndef g(q):\n    return q.get()\n"
    )
    (tmp_path / "m.py").write_text(source)
    assert waits_in(tmp_path / "m.py") == {"A.f", "g"}


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.what[:50])
def test_each_wait_has_an_option_a_message_and_a_test(wait):
    """The flags, messages and tests that the table names exist in the code."""
    flags = {flag for spec in all_specs() for flag in spec.flags}
    assert set(wait.options) <= flags
    assert all(generate_docs.constant_of(place) > 0 for place in wait.constants)
    said_in = wait.said_in or wait.places[0].split("::")[0]
    assert wait.message in text_of(ROOT / "slime" / said_in)
    file, name = wait.test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_the_page_of_loops_is_current_and_names_every_row(capsys):
    """docs/loops.md is current and names every row of the table."""
    assert generate_docs.main(["loops", "--check"]) == 0, capsys.readouterr().err
    page = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
    assert all(f"| {row.what} |" in page for row in (*WAITS, *WORKERS))
    assert (
        "`--max-engine-aborts` (`3`), `--step-timeout` (`7200.0`)" in page and "60 (fixed)" in page
    )


# --- tests of bounds that stand in no other file --------------------------------------------------


@pytest.fixture
def rig(tmp_path):
    """rig(engine options, **args) -> (args, data source) in front of a scripted engine."""
    import contextlib

    from slime.prompts.data_source import RolloutDataSourceWithBuffer

    with contextlib.ExitStack() as stack:

        def build(engine=None, **overrides):
            remote = stack.enter_context(FakeEngine(lambda prompt: [5, 4], **(engine or {})))
            stack.enter_context(fresh_rollout_state(remote.url))
            folder, prompts = (
                tokenizer_folder(tmp_path / "model"),
                write_prompts(tmp_path / "p.jsonl", 8),
            )
            args = rollout_args(
                **{
                    "hf_checkpoint": folder,
                    "prompt_data": prompts,
                    "rm_type": "random",
                    **overrides,
                }
            )
            return args, RolloutDataSourceWithBuffer(args)

        yield build


async def ignores_the_abort(args, sample, sampling_params):
    from slime.rollout import sglang_rollout

    if sample.group_index:
        await asyncio.sleep(30)
    return await sglang_rollout.generate(args, sample, sampling_params)


def test_groups_that_ignore_the_abort_are_cancelled_and_given_back(rig, caplog):
    """A group that ignores the abort is cancelled after the limit, here 0.2 s, and its prompt is
    served again."""
    from slime.rollout.sglang_rollout import generate_rollout

    args, source = rig(
        custom_generate_function_path=f"{__name__}.ignores_the_abort", rollout_batch_size=1, over_sampling_batch_size=2, abort_timeout=0.2
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert len(generate_rollout(args, 0, source).samples) == 1
    assert "1 groups did not end within --abort-timeout 0.2 s" in caplog.text
    assert [group[0].group_index for group in source.buffer] == [1]


def test_an_evaluation_that_takes_too_long_says_how_far_it_was(rig, tmp_path):
    """An evaluation above its time limit ends with how far it was."""
    from slime.rollout.sglang_rollout import generate_rollout

    config = tmp_path / "eval.yaml"
    config.write_text(
        f"eval:\n  datasets:\n    - {{name: one, path: {write_prompts(tmp_path / 'e.jsonl', 4)}, "
        f"eval_task_timeout: 0.3}}\n"
    )
    args, source = rig(
        {"delay": lambda prompt: 0.0 if prompt.number == 0 else 20.0},
        eval_config=str(config),
        rollout_group_requests="off",
    )
    with pytest.raises(
        RolloutDataError, match="evaluation 'one': [01] of 4 samples within eval_task_timeout 0.3 s"
    ):
        generate_rollout(args, 0, None, evaluation=True)


def test_a_grader_that_does_not_start_is_an_outcome(monkeypatch):
    """A grader process that never gets ready is an outcome with a reason."""
    from slime.rollout.rm_hub import grader_pool

    monkeypatch.setattr(grader_pool, "START_TIMEOUT_S", 0.3)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]

    def popen(budget):
        pipes = os.pipe(), os.pipe()
        guard = subprocess.Popen(sleeper, stdin=subprocess.PIPE, pass_fds=(pipes[1][1],))
        os.close(pipes[0][0])
        os.close(pipes[1][1])
        return grader_pool.Spawned(guard, pipes[0][1], pipes[1][0])

    monkeypatch.setattr(grader_pool, "KILL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(grader_pool, "_popen", popen)
    pool = grader_pool.GraderPool(grader_pool.PoolSettings(num_workers=1))
    try:
        outcome = pool.grade("math", "\\boxed{1}", "1")
    finally:
        pool.close()
    assert outcome.value is None and "a grader process did not start" in outcome.detail


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            (
                "rollout 3: 2 of 3 actors gave no answer within --step-timeout 0.1 s; raise it if "
                "that "
                "is too short"
            ),
        ),
        (
            {"names": ["rank 0", "rank 1", "rank 2"], "option": "--startup-timeout"},
            (
                "rollout 3: 2 of 3 actors (rank 1, rank 2) gave no answer within --startup-timeout "
                "0.1 "
                "s; raise it if that is too short"
            ),
        ),
        ({"option": None}, "rollout 3: 2 of 3 actors gave no answer within 0 s"),
    ],
)
def test_actors_that_give_no_answer_are_named_with_the_option(monkeypatch, given, said):
    """Actors that do not answer are named with the option to raise; one of three has answered."""
    from slime.ray import utils

    monkeypatch.setattr(
        utils.actors,
        "wait",
        lambda refs, **kwargs: (
            [one for one in refs if one == "a"][:1],
            [one for one in refs if one != "a"],
        ),
    )
    monkeypatch.setattr(utils.actors, "get", lambda refs: refs)
    with pytest.raises(SlimeError) as caught:
        utils.wait_for(["a", "b", "c"], what="rollout 3", timeout_s=0.1, **given)
    assert str(caught.value) == said


def test_an_external_engine_that_does_not_answer_ends_the_start(monkeypatch):
    """An external engine at an address where nothing listens ends the start after a few tries, and
    not after the time of a loading server."""
    from slime.ray import rollout_servers
    from slime.utils.async_utils import run

    monkeypatch.setattr(rollout_servers, "pause_before_try", lambda attempt: 0.01)
    with pytest.raises(
        EngineError,
        match="the engine at http://127.0.0.1:9 does not answer.*--rollout-external-engine-addrs",
    ):
        run(rollout_servers._check_external_engines(["http://127.0.0.1:9"], timeout_s=30))


def test_an_engine_that_is_silent_is_named_as_the_cause(monkeypatch):
    """Many failed samples are then its consequence."""
    from slime.ray import servers

    def silent(*args, **kwargs):
        raise servers.ray.exceptions.GetTimeoutError("no answer")

    monkeypatch.setattr(servers.actors, "get", silent)
    engine = types.SimpleNamespace(health=types.SimpleNamespace(remote=lambda: "ref"))
    found = servers.RolloutServers([engine], ["http://x:1"])
    assert found.failures() == ["engine 0 (http://x:1) does not answer within 10 s."]


def test_a_process_group_whose_other_ranks_do_not_come_is_given_up(tmp_path):
    """--distributed-timeout-minutes reaches torch: rank 0 of 2 waits for a second, then torch's
    error comes."""
    import datetime

    from slime.accelerator.process_groups import init_process_group

    store = f"file://{tmp_path / 'store'}"
    with pytest.raises(Exception, match="(?i)time"):
        init_process_group(
            "gloo", store, datetime.timedelta(seconds=1), world_size=2, rank=0, group_name="lonely"
        )


def test_devices_that_ray_cannot_place_end_the_start(monkeypatch):
    """A cluster without free devices ends the start with a message."""
    from slime.ray import placement_group

    group = types.SimpleNamespace(ready=lambda: "ref")
    monkeypatch.setattr(placement_group, "placement_group", lambda *args, **kwargs: group)
    monkeypatch.setattr(placement_group, "_check_resources", lambda count: None)
    monkeypatch.setattr(placement_group.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr(placement_group.ray, "available_resources", lambda: {"CPU": 1.0})
    with pytest.raises(
        ConfigError, match=r"Ray could not place 2 x .* within 60 s; it has \{'CPU': 1.0\}"
    ):
        placement_group._create_placement_group(2)


def test_a_reward_that_hangs_in_the_dry_run_is_said(monkeypatch):
    """A reward that hangs in the dry run is reported, and the dry run goes on."""
    from support.tiny_models import make_char_tokenizer

    from slime.commands import reward_probe
    from slime.data.sample import Sample

    monkeypatch.setattr(reward_probe, "PROBE_SECONDS", 0.1)
    args = rollout_args(rm_type=None, custom_rm_path=f"{__name__}.waits_for_ever")
    rewards = asyncio.run(
        reward_probe.score_texts(
            args, Sample(index=0, prompt="p", label="1"), ["1", "2"], make_char_tokenizer()
        )
    )
    assert [type(reward) for reward in rewards] == [asyncio.TimeoutError, asyncio.TimeoutError]


async def waits_for_ever(args, sample, **kwargs):
    await asyncio.Event().wait()


def test_what_ends_is_not_waited_for_without_a_bound():
    """Every join, wait and stop at a run's end has a time limit."""
    unbounded = []
    for row in WAITS:
        if row.message != "stopping the engines":
            continue
        for place in row.places:
            file, name = place.split("::")
            tree = ast.parse((ROOT / "slime" / file).read_text(encoding="utf-8"))
            (function,) = [
                n for n in ast.walk(tree) if getattr(n, "name", None) == name.split(".")[-1]
            ][-1:]
            calls = [
                call
                for call in ast.walk(function)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            ]
            unbounded += [
                f"{place}: {ast.unparse(call)}"
                for call in calls
                if call.func.attr == "join" and not (call.args or call.keywords)
            ]
    # what was killed is gone; a queue of writes ends with its disk
    assert sorted(unbounded) == [
        "gate/snapshots.py::SnapshotWriter.close: self._thread.join()",
        "gate/snapshots.py::SnapshotWriter.flush: self._queue.join()",
        "utils/http_utils.py::terminate_process: process.join()",
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
