"""The fully asynchronous worker: exact batches, first in first out, a bounded lead, and aborted
groups that are returned to the source."""

import sys
import time
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.fake_engine import FakeEngine
from support.rollout_args import fresh_rollout_state, rollout_args, tokenizer_folder, write_prompts

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.rollout import fully_async_rollout as fully_async

NUM_GPUS = 0


@pytest.fixture
def rig(tmp_path):
    with FakeEngine(lambda prompt: [5, 4]) as engine, fresh_rollout_state(engine.url):
        args = rollout_args(
            hf_checkpoint=tokenizer_folder(tmp_path / "tok"),
            prompt_data=write_prompts(tmp_path / "p.jsonl", 100),
            rm_type="random",
        )
        yield engine, args, RolloutDataSourceWithBuffer(args)
        fully_async.stop_global_worker()


def test_each_rollout_takes_exactly_its_batch_and_no_group_is_lost_or_repeated(rig):
    """Three rollouts of 4 groups use 12 different groups; finished groups beyond a batch wait for
    the next."""
    engine, args, source = rig
    ids = []
    for rollout_id in range(3):
        output = fully_async.generate_rollout_fully_async(args, rollout_id, source)
        assert len(output.samples) == 4 and all(len(group) == 2 for group in output.samples)
        indices = [sample.index for group in output.samples for sample in group]
        assert indices == sorted(indices)
        ids += [group[0].group_index for group in output.samples]
    assert len(set(ids)) == 12
    worker = fully_async._get_global_worker(args, source)
    time.sleep(0.1)
    assert (
        worker.queue_size() <= 2 * worker.concurrency
        and source.sample_group_index <= 12 + 2 * worker.concurrency + 1
    )


def test_the_state_knows_which_groups_are_out(rig, tmp_path):
    """The state lists groups that were dispatched and not trained, so that a resume generates them
    again."""
    engine, args, source = rig
    source.args.save = str(tmp_path / "run")
    used = {
        group[0].group_index
        for group in fully_async.generate_rollout_fully_async(args, 0, source).samples
    }
    fully_async.stop_global_worker()
    state = source.state_dict(0)
    assert {origin["group_index"] for origin in state["untrained"]} == set(
        range(source.sample_group_index)
    ) - used


def test_the_position_moves_with_what_was_used(rig, tmp_path):
    """A resume after rollout 1 repeats no group of rollouts 0 and 1 and loses none that was not
    trained."""
    engine, args, source = rig
    source.args.save = str(tmp_path / "run")
    used = [
        {
            group[0].group_index
            for group in fully_async.generate_rollout_fully_async(args, r, source).samples
        }
        for r in (0, 1)
    ]
    fully_async.stop_global_worker()
    untrained = [
        {origin["group_index"] for origin in source.state_dict(r)["untrained"]} for r in (0, 1)
    ]
    everything = set(range(source.sample_group_index))
    assert untrained == [everything - used[0], everything - used[0] - used[1]]
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(source.state_dict(1))
    again = {group[0].group_index for group in resumed.get_samples(len(untrained[1]) + 1)}
    assert again == untrained[1] | {len(everything)}


def test_the_callback_never_blocks_and_the_queue_is_first_in_first_out(rig):
    """The callback runs on the event loop and never waits, even with 1001 finished groups in the
    queue."""
    _, args, source = rig
    worker = fully_async.AsyncRolloutWorker(args, source, concurrency=2)
    for gid in range(1001):
        worker._make_done_cb(gid)(types.SimpleNamespace(result=lambda gid=gid: [gid]))
    assert worker.queue_size() == 1001
    assert [gid for gid, _ in worker.get_completed_groups(limit=3)] == [0, 1, 2]
    assert len(worker.get_completed_groups()) == 998 and worker.get_completed_groups() == []


def test_no_new_work_is_begun_while_the_trainer_is_behind(rig):
    """No group is started while the trainer is behind; a queue without a bound would hold stale
    samples only."""
    _, args, source = rig
    worker = fully_async.AsyncRolloutWorker(args, source, concurrency=3)
    worker.poll_interval = 0.01
    worker.start()
    time.sleep(0.5)
    first = worker.queue_size()
    worker.stop()
    assert 3 <= first <= 6 and not worker.worker_thread.is_alive()


class ScriptedWorker:
    """Stands for the worker of this process: the groups it has finished are given."""

    poll_interval = 0.01

    def __init__(self, groups):
        self.groups = groups

    def get_completed_groups(self, limit=None):
        taken, self.groups = self.groups[:limit], self.groups[limit:]
        return [(group[0].group_index, group) for group in taken]


@pytest.mark.parametrize("partial", [False, True])
def test_an_aborted_group_goes_back_as_the_configuration_says(rig, monkeypatch, partial):
    """An aborted group goes back as its prompt alone, or with its tokens under partial rollout, and
    is not trained now."""
    _, args, source = rig
    args.partial_rollout, args.rollout_batch_size = partial, 1
    aborted, done = source.get_samples(2)
    for sample in aborted:
        sample.tokens, sample.status = [1], Sample.Status.ABORTED
        sample.append_response_tokens(tokens=[7, 8], log_probs=[-1.0, -1.0])
    for sample in done:
        sample.status, sample.reward = Sample.Status.COMPLETED, 1
    monkeypatch.setattr(
        fully_async, "_get_global_worker", lambda args, buffer: ScriptedWorker([aborted, done])
    )
    output = fully_async.generate_rollout_fully_async(args, 0, source)
    assert output.samples == [done]
    (back,) = source.buffer
    assert [sample.response_length for sample in back] == ([2, 2] if partial else [0, 0])
    assert [sample.index for sample in back] == [sample.index for sample in aborted]


def test_an_error_of_the_worker_reaches_the_rollout_that_waits(rig):
    """An error of the worker is raised in the rollout that waits for it."""
    _, args, source = rig
    args.rm_type = "ifbench"
    with pytest.raises(ConfigError, match="IFBench"):
        fully_async.generate_rollout_fully_async(args, 0, source)
    with pytest.raises(ValueError, match="no evaluation"):
        fully_async.generate_rollout_fully_async(args, 0, source, evaluation=True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
