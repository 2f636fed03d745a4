"""The prompt stream after any number of resumes equals the uninterrupted one; dispatched and
untrained groups are sent again, once."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.rollout_args import rollout_args, write_prompts

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.prompts.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.generation import reset_to_prompt

NUM_GPUS = 0


@pytest.fixture
def make(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 12)

    def build(**overrides):
        folder = str(tmp_path / "run")
        values = {
            "prompt_data": path,
            "save": folder,
            "load": folder,
            "rollout_shuffle": True,
            **overrides,
        }
        return RolloutDataSourceWithBuffer(rollout_args(**values))

    return build


def names(groups):
    return [
        (group[0].group_index, group[0].prompt, [sample.index for sample in group])
        for group in groups
    ]


def step(source, rollout_id, count=3):
    groups = source.get_samples(count)
    source.commit(rollout_id, [group[0].group_index for group in groups])
    return names(groups)


def test_groups_and_samples_are_numbered_for_ever(make):
    """Ids are given at dispatch and never repeat: the same prompt in two epochs makes two
    groups."""
    source = make()
    groups = source.get_samples(24)
    assert [group[0].group_index for group in groups] == list(range(24))
    assert [sample.index for group in groups for sample in group] == list(range(48))
    assert all(sample.rollout_id is None for group in groups for sample in group)
    first_epoch, second_epoch = (
        [group[0].prompt for group in groups[start : start + 12]] for start in (0, 12)
    )
    assert sorted(first_epoch) == sorted(second_epoch) == sorted(f"p{i}=" for i in range(12))
    assert first_epoch != second_epoch, "each epoch has an order of its own"


def test_members_share_no_container(make):
    """Members of a group have lists and dicts of their own and share the image, which nobody
    edits."""
    source = make()
    image = object()
    for prompt in source.dataset.origin_samples:
        prompt.multimodal_inputs = {"images": [image]}
    one, two = source.get_samples(1)[0]
    one.metadata["x"] = 1
    one.tokens.append(1)
    assert two.metadata == {} and two.tokens == [] and source.dataset[0].metadata == {}
    assert one.multimodal_inputs["images"][0] is two.multimodal_inputs["images"][0] is image


@pytest.mark.parametrize("save_at", [[0], [0, 1], [2], [0, 2, 4], [1, 5, 6]])
def test_the_stream_after_any_number_of_resumes_is_the_uninterrupted_one(make, save_at):
    """The stream is the uninterrupted one, though the process dies after each save."""
    expected = [step(source := make(load=None, save=None), 0)]
    expected += [step(source, rollout_id) for rollout_id in range(1, 9)]
    seen, source = [], make(load=None)
    for rollout_id in range(9):
        seen.append(step(source, rollout_id))
        if rollout_id in save_at:
            source.save(rollout_id)
            source.get_samples(2)  # fetched for a next rollout that never came
            source = make()
            source.load(rollout_id)
    assert seen == expected


def test_dispatched_but_untrained_groups_come_again_exactly_once(make):
    """With 10 prompts dispatched, 4 trained and the process dead, the other 6 come first, in order,
    and then the stream goes on."""
    source = make()
    groups = source.get_samples(10)
    source.commit(0, [group[0].group_index for group in groups[:4]])
    # generated ahead, not trained
    source.commit(1, [group[0].group_index for group in groups[4:6]])
    source.save(0)
    resumed = make()
    resumed.load(0)
    assert names(resumed.get_samples(6)) == names(groups[4:10])
    assert names(resumed.get_samples(2)) == names(source.get_samples(2))


def test_the_buffer_is_part_of_the_state_with_the_tokens_of_unfinished_responses(make):
    """Partial responses in the buffer survive a resume; groups without tokens are made again from
    their prompt."""
    source = make(partial_rollout=True)
    groups = source.get_samples(4)
    partial = groups[1][0]
    partial.tokens, partial.status = [9, 9], Sample.Status.ABORTED
    partial.append_response_tokens(
        tokens=[1, 2], log_probs=[-0.5, -0.25], meta_info={"finish_reason": {"type": "abort"}}
    )
    source.add_samples([groups[1], [reset_to_prompt(sample) for sample in groups[2]]])
    source.commit(0, [groups[0][0].group_index, groups[3][0].group_index])
    source.save(0)
    resumed = make(partial_rollout=True)
    resumed.load(0)
    again = resumed.get_samples(2)
    assert names(again) == names(groups[1:3])
    assert again[0][0].tokens == [9, 9, 1, 2] and again[0][0].rollout_log_probs == [-0.5, -0.25]
    assert again[0][0].status is Sample.Status.ABORTED and again[1][0].tokens == []
    assert json.loads((source_file(source)).read_text())["state"]["rollout_id"] == 0


def source_file(source, rollout_id=0):
    from slime.prompts.data_source import state_path

    return state_path(source.args.save, rollout_id)


def test_a_rollout_function_that_never_commits_resumes_behind_what_it_took(make):
    """For a rollout function of upstream's kind, which knows no commit, what it took and did not
    give back counts as used."""
    source = make()
    source.get_samples(5)
    source.save(0)
    resumed = make()
    resumed.load(0)
    assert names(resumed.get_samples(1)) == names(source.get_samples(1))


def test_another_dataset_seed_or_group_size_is_refused_on_resume(make, tmp_path):
    """A resume with another dataset, seed or group size is refused; it would repeat and skip
    prompts."""
    source = make()
    source.save(3)
    for change, word in (
        ({"rollout_seed": 1}, "shuffle_seed: saved 42, now 1"),
        ({"n_samples_per_prompt": 4}, "n_samples_per_prompt: saved 2, now 4"),
        (
            {"prompt_data": write_prompts(tmp_path / "other.jsonl", 11)},
            "num_prompts: saved 12, now 11",
        ),
    ):
        with pytest.raises(ConfigError, match=word):
            make(**change).load(3)


def test_a_missing_or_damaged_position_stops_the_run(make):
    """A missing or damaged data position is an error and not a fresh start."""
    source = make()
    with pytest.raises(ConfigError, match="no data position"):
        source.load(7)
    source.load(None)
    source.load(-1)
    source.save(7)
    source_file(source, 7).write_text('{"format": 1, "epo')
    with pytest.raises(ConfigError, match="damaged"):
        make().load(7)


@pytest.mark.parametrize("edit", ["one label", "one prompt", "order"])
def test_an_edited_file_with_as_many_rows_is_refused_on_resume(make, tmp_path, edit):
    """A prompt file that was edited since is refused, also with the same number of rows: a position
    would mean another prompt."""
    source = make()
    step(source, 0)
    source.save(0)
    rows = (tmp_path / "p.jsonl").read_text().splitlines()
    if edit == "order":
        rows.reverse()
    else:
        row = json.loads(rows[5])
        row["label" if edit == "one label" else "input"] = "changed"
        rows[5] = json.dumps(row)
    (tmp_path / "p.jsonl").write_text("\n".join(rows) + "\n")
    number = 1 if edit == "order" else 6
    with pytest.raises(
        ConfigError,
        match=rf"the prompts of .*p\.jsonl .*rows_checksum: saved [0-9a-f]{{32}}, now .*"
        rf"the first difference is in prompt {number} of 12\).*--accept-changed-prompts",
    ):
        make().load(0)


def test_an_edited_file_is_accepted_where_that_is_asked_for(make, tmp_path, caplog):
    """--accept-changed-prompts goes on at the same number of a prompt and warns; another seed is
    refused all the same, and so is a file that has lost a prompt that is to be served again."""
    source = make(rollout_shuffle=False)
    step(source, 0, 5)
    source.get_samples(1)
    source.save(0)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    rows[7]["label"] = "changed"
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    again = make(rollout_shuffle=False, accept_changed_prompts=True)
    again.load(0)
    groups = again.get_samples(3)
    assert [group[0].prompt for group in groups] == ["p5=", "p6=", "p7="]
    assert groups[2][0].label == "changed" and "num_prompts: saved 12, now 13" in caplog.text
    with pytest.raises(ConfigError, match="shuffle_seed"):
        make(accept_changed_prompts=True).load(0)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    with pytest.raises(ConfigError, match="prompt 6 are to be served again, and .* has 4"):
        make(rollout_shuffle=False, accept_changed_prompts=True).load(0)


def test_a_difference_in_a_long_file_is_told_by_its_part(make, tmp_path):
    """Of 1,000 prompts the message names the 16 among which the first difference stands."""
    path = write_prompts(tmp_path / "long.jsonl", 1000)
    source = make(prompt_data=path)
    step(source, 0)
    source.save(0)
    text = Path(path).read_text()
    Path(path).write_text(text.replace("p499=", "p-499="))
    with pytest.raises(ConfigError, match="in prompt 485 to 500 of 1000"):
        make(prompt_data=path).load(0)


def test_a_row_written_another_way_is_the_same_row(make, tmp_path):
    """Spaces and the order of keys in the file do not change a row."""
    source = make()
    expected = step(source, 0)
    source.save(0)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps(dict(reversed(row.items())), indent=None) + "\n\n" for row in rows)
    )
    again = make()
    again.load(0)
    assert names(again.get_samples(3)) != expected


def test_no_flipped_bit_of_a_data_position_gives_another_stream(make):
    """Every single-bit flip of a saved position is refused; without a checksum 474 of 8,040 gave
    another stream."""
    source = make()
    step(source, 0)
    source.add_samples(source.get_samples(1))
    source.save(0)
    path = source_file(source, 0)
    content = path.read_bytes()
    again = make()
    for position in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(bytes(changed))
            with pytest.raises(ConfigError):
                again.load(0)
    path.write_bytes(content)
    again.load(0)


def test_a_position_of_an_earlier_version_is_read_and_its_damage_named(make, caplog):
    """A position of an earlier version, without hash and checksum, is read with a warning, and a
    damaged one is refused."""
    source = make()
    step(source, 0)
    state = source.state_dict(0)
    del state["stream"]["rows_checksum"], state["stream"]["part_checksums"]
    path = source_file(source, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state))
    make().load(0)
    assert "no checksum of the prompts" in caplog.text
    for name in ("stream", "untrained", "epoch_id", "buffer_groups"):
        path.write_text(json.dumps({key: value for key, value in state.items() if key != name}))
        with pytest.raises(
            ConfigError, match=f"not one that this version wrote .KeyError: '{name}'"
        ):
            make().load(0)
    path.write_text(json.dumps({**state, "untrained": 7}))
    with pytest.raises(ConfigError, match="not one that this version wrote .TypeError"):
        make().load(0)


def test_a_failed_write_leaves_the_last_state_and_no_temporary_file(make, monkeypatch):
    """A full disk costs the new state, leaves the old one, and no temporary file stays."""
    source = make()
    source.save(0)
    before = source_file(source).read_bytes()
    monkeypatch.setattr(
        "os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    source.get_samples(3)
    with pytest.raises(OSError, match="No space left"):
        source.save(0)
    assert source_file(source).read_bytes() == before
    assert [path.name for path in source_file(source).parent.iterdir()] == [
        source_file(source).name
    ]


def test_what_comes_next_does_not_depend_on_when_a_group_came_back(make):
    """The next prompts are the same whether 4 or 6 groups were read ahead, and in whatever order
    they were returned."""
    early, late = make(), make()
    first = early.get_samples(4)
    early.add_samples(first[2:])
    ahead = late.get_samples(6)
    late.add_samples([ahead[5], ahead[3]])
    late.add_samples([ahead[2], ahead[4]])
    assert names(early.get_samples(5)) == names(late.get_samples(5))


def test_the_buffer_is_served_first_and_takes_only_full_groups():
    """The buffer is served first, removes what it returns, and accepts whole groups only."""
    args = rollout_args(rollout_global_dataset=False)
    source = RolloutDataSourceWithBuffer(args)
    mine = [[Sample(index=100), Sample(index=101)]]
    source.add_samples(mine)
    assert source.buffer == mine
    got = source.get_samples(2)
    assert got[0] is mine[0] and [sample.index for sample in got[1]] == [0, 1]
    for bad in ("x", [Sample()], [[Sample()]]):
        with pytest.raises(AssertionError):
            source.add_samples(bad)
    buffer = [1, 2, 3]
    assert pop_first(args, None, buffer, 2) == [1, 2] and buffer == [3]
    with pytest.raises(RuntimeError):
        RolloutDataSource(args).add_samples(mine)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
