"""Checks of a reward: labels before a run, equal responses during it, a dump after it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.gate_samples import sound_sample
from support.manager import manager_of
from support.rollout_args import rollout_args
from support.tiny_models import make_char_tokenizer

from slime.cli import main
from slime.commands.reward_probe import (
    as_generated,
    describe_probes,
    probe_rows,
    right_answers,
    sample_rows,
    turn_end,
)
from slime.data.sample import Sample
from slime.files.rollout_dump import save_debug_rollout_data
from slime.rollout.reward_checks import RewardWatch, find_reward_conflicts, find_reward_warnings
from slime.rollout.rm_hub import async_rm
from slime.rollout.scoring import scoring_args
from slime.utils.async_utils import run

NUM_GPUS = 0


def probes_of(labels, tokenizer=None, metadata=None, **args):
    rows = [
        (f"row {n}", Sample(prompt="p", label=label, metadata=metadata or {}))
        for n, label in enumerate(labels)
    ]
    return run(probe_rows(rollout_args(**args), rows, tokenizer))


def test_labels_that_the_grader_cannot_read_are_named_and_readable_ones_are_not():
    """Labels that no answer can match are reported; GSM8K's under exact_match can be matched by
    their last number and are not."""
    good = probes_of(["He adds.\n#### 72", "5", 7, ["a", "b"]], rm_type="exact_match")
    assert [probe.can_be_right for probe in good] == [True] * 4
    assert [probe.best_right for probe in good] == [1.0] * 4
    assert describe_probes(good) == ["4 of 4 rows: a right answer scores above a wrong one"]
    bad = probes_of(["10", "K"], rm_type="gpqa", metadata={"choices": ["1", "2", "3"]})
    # K is no letter of three choices, and no text of one
    assert [probe.can_be_right for probe in bad] == [True, False]
    (count, title, row) = describe_probes(bad)
    assert (
        count.startswith("1 of 2 rows")
        and "can never be right" in title
        and 'row 1: label "K"' in row
    )


def test_a_grader_that_accepts_a_wrong_answer_is_found(monkeypatch):
    """A grader that calls every boxed answer right is reported."""
    probes = probes_of(["1", "2"], custom_rm_path=f"{__name__}.loves_boxes")
    assert [probe.can_be_right for probe in probes] == [True, True]
    assert (
        probes[0].accepted_wrong == "</think>\n\\boxed{2}"
        and "scores as high" in describe_probes(probes)[1]
    )


async def loves_boxes(args, sample, **kwargs):
    return float("boxed" in sample.response)


async def fails_on_two(args, sample, **kwargs):
    if sample.label == "2":
        raise KeyError("two")
    return float(sample.response == sample.label)


def test_a_reward_function_that_fails_on_a_row_and_one_that_gives_a_dict_are_named():
    """A reward function that raises on a row, or returns a dict, is reported, and the other rows
    are graded."""
    probes = probes_of(["1", "2", "3"], custom_rm_path=f"{__name__}.fails_on_two")
    assert [probe.failure is None for probe in probes] == [True, False, True]
    assert any("row 1" in line and "KeyError" in line for line in describe_probes(probes))
    assert probes_of(["1"], rm_type="random") == []  # looks at no label


def test_probes_end_as_the_template_ends_a_turn():
    """Probe answers end as the chat template ends a turn, as real responses do."""
    tokenizer = make_char_tokenizer()
    assert turn_end(tokenizer, {}) == "<|im_end|>"
    assert (
        as_generated("72", tokenizer, end="<|im_end|>", skip_special_tokens=False)[0]
        == "72<|im_end|>"
    )
    text, ids = as_generated("72", tokenizer, end="<|im_end|>", skip_special_tokens=True)
    assert text == "72" and len(ids) == 3
    (probe,) = probes_of(["72"], tokenizer, rm_type="exact_match")
    assert probe.can_be_right


def test_right_answers_hold_every_form_and_a_choices_letter():
    """Probe answers include each form of the label, and the letter of an index among choices."""
    assert right_answers(Sample(label="7")) == [
        "7",
        "</think>\n\\boxed{7}",
        "Answer: 7",
        "The answer is 7.",
    ]
    sample = Sample(label=1, metadata={"choices": ["red", "green"]})
    assert "The answer is B." in right_answers(sample)
    assert sample_rows(range(100), 4) == [0, 25, 50, 75] and sample_rows(range(3), 4) == [0, 1, 2]


def prompt_file(folder, labels):
    path = folder / "p.jsonl"
    path.write_text(
        "".join(
            json.dumps({"input": "q", "label": label, "metadata": {"choices": ["1", "2"]}}) + "\n"
            for label in labels
        )
    )
    return str(path)


def test_slime_rewards_check_names_the_line_and_returns_1_where_a_row_can_never_be_right(
    tmp_path, capsys
):
    """`slime rewards check` names a row that can never be right and returns 1; otherwise it returns
    0, or 2 for a wrong command."""
    words = ["rewards", "check", "--label-key", "label"]
    assert (
        main([*words, "--prompt-data", prompt_file(tmp_path, ["A", "B"]), "--rm-type", "gpqa"]) == 0
    )
    assert (
        main([*words, "--prompt-data", prompt_file(tmp_path, ["A", "Q"]), "--rm-type", "gpqa"]) == 1
    )
    out = capsys.readouterr().out
    assert "p.jsonl, line 2" in out and "docs/rewards.md" in out
    path = prompt_file(tmp_path, ["A"])
    assert main(["rewards", "check", "--help"]) == 0
    page = capsys.readouterr().out
    assert (
        "usage: slime rewards check" in page and "--label-key" in page and "slime train" not in page
    )
    for given, said in (
        (["--prompt-data", path], "--rm-type"), (["--rm-type", "gpqa"], "--prompt-data"), (["--prompt-data", path, "--rm-type", "gppa"], "gpqa"),
        (["--prompt-data", path, "--rm-type", "gpqa", "--rows", "0"], "--rows"), (["--prompt-data", path, "--rm-type", "gpqa", "--no-such"], "no-such"),
    ):  # fmt: skip
        assert main([*words, *given]) == 2
        assert said in capsys.readouterr().err


def group(*pairs, **fields):
    return [
        Sample(group_index=0, index=n, response=text, reward=reward, label="1", **fields)
        for n, (text, reward) in enumerate(pairs)
    ]


def test_equal_responses_of_a_group_with_different_rewards_are_conflicts():
    """Equal responses of a group with different rewards are conflicts, counted against the first
    with that text; other groups, other states and rollouts of several samples are not compared."""
    found = find_reward_conflicts(group(("a", 1.0), ("b", 0.0), ("a", 1.0), ("a", 0.0)), None)
    assert [(one.first_index, one.second_index, one.rewards) for one in found] == [
        (0, 3, (1.0, 0.0))
    ]
    assert (
        find_reward_conflicts(
            group(("a", 1.0), ("a", 1.0 + 1e-9), ("b", 0.0), ("", 1.0), ("", 0.0)), None
        )
        == []
    )
    two = group(("a", 1.0), ("a", 0.0))
    two[1].group_index = 1
    assert find_reward_conflicts(two, None) == []
    two[1].group_index, two[1].status = 0, Sample.Status.TRUNCATED
    assert find_reward_conflicts(two, None) == []
    turns = group(("a", 1.0), ("b", 1.0), ("a", 0.0), ("c", 0.0))
    for sample, rollout in zip(turns, (1, 1, 2, 2), strict=True):
        sample.rollout_id = rollout
    assert find_reward_conflicts(turns, None) == []
    keyed = group(("a", {"score": 1.0}), ("a", {"score": 0.0}))
    assert (
        len(find_reward_conflicts(keyed, "score")) == 1
        and find_reward_conflicts(keyed, "typo") == []
    )


def test_a_rollouts_conflicts_are_a_metric_and_are_warned_about_once(caplog):
    """Conflicts are a metric and warned about once, except for random types and servers; a custom
    function counts unless --reward-is-random is given."""
    samples = group(("a", 1.0), ("a", 0.0))
    watch = RewardWatch(rollout_args(rm_type="exact_match"))
    assert watch.metrics(samples) == {"reward/conflict_count": 1.0} == watch.metrics(samples)
    assert caplog.text.count("samples 0 and 1 have the same response") == 1
    assert RewardWatch(rollout_args(rm_type="exact_match")).metrics(
        group(("a", 1.0), ("a", 1.0))
    ) == {"reward/conflict_count": 0.0}
    for options in (
        {"rm_type": "random"},
        {"rm_type": None},
        {"rm_type": "exact_match", "reward_is_random": True},
    ):
        assert RewardWatch(rollout_args(**options)).metrics(samples) == {}
    assert RewardWatch(rollout_args(rm_type=None, custom_rm_path="m.f")).metrics(samples) == {
        "reward/conflict_count": 1.0
    }


def test_the_rollout_manager_logs_the_conflicts_of_training_and_of_each_evaluation_set(
    tmp_path, monkeypatch
):
    """The rollout manager logs conflicts for training and for each evaluation set."""
    samples = [sound_sample(i, length=6 + i, reward=float(i % 3)) for i in range(16)]
    samples[1] = dataclasses.replace(
        samples[0], index=1, rollout_id=samples[1].rollout_id, reward=1.0
    )
    manager = manager_of(samples, tmp_path, monkeypatch)
    manager.generate(0)
    assert manager.logged["rollout/reward/conflict_count"] == 1.0
    manager.eval(0)
    assert manager.logged["eval/set/reward/conflict_count"] == 1.0


def test_a_reward_server_gets_the_text_without_the_turns_end_and_a_custom_function_the_sample(
    monkeypatch,
):
    """A reward server gets the text without the turn's end; a custom function gets the sample and
    may use graded_text."""
    sent = []

    async def request(method, url, payload, **kwargs):
        sent.append(payload)
        return 0.5

    monkeypatch.setattr("slime.rollout.rm_hub.remote.request_with_retries", request)
    sample = Sample(prompt="p", response="85<|im_end|>", label="85")
    assert (
        run(async_rm(rollout_args(rm_type="remote_rm", rm_url="http://127.0.0.1:1"), sample)) == 0.5
    )
    assert sent == [{"prompt": "p", "response": "85", "label": "85"}]
    assert run(async_rm(rollout_args(custom_rm_path=f"{__name__}.other_rule"), sample)) == len(
        "85<|im_end|>"
    )


def test_an_evaluation_sets_own_stop_strings_are_stripped_for_its_graders():
    """An evaluation set's own stop strings are stripped before grading, and not --rollout-stop."""
    args = rollout_args(rm_type="exact_match", rollout_stop=["###"])
    assert scoring_args(args, {"stop": ["###"]}) is args
    assert (
        run(async_rm(scoring_args(args, {"stop": ["END"]}), Sample(response="85END", label="85")))
        == 1
    )
    assert run(async_rm(args, Sample(response="85END", label="85"))) == 0


def test_deepscaler_without_one_answer_mark_in_a_rollout_is_warned_about():
    """A rollout of deepscaler without one answer mark is warned about, because every reward is 0
    then."""
    args = rollout_args(rm_type="deepscaler")
    (text,) = find_reward_warnings(args, group(("\\boxed{1}", 0), ("\\boxed{2}", 0)), []).values()
    assert "</think>" in text and "math" in text
    assert find_reward_warnings(args, group(("\\boxed{1}", 0), ("</think>", 0)), []) == {}
    assert find_reward_warnings(rollout_args(rm_type="math"), group(("\\boxed{1}", 0)), []) == {}


async def other_rule(args, sample, **kwargs):
    return float(len(sample.response))


async def by_group(args, samples, **kwargs):
    return [float(sample.group_index) for sample in samples]


def test_slime_rescore_shows_the_rows_whose_reward_changed(tmp_path, capsys):
    """`slime rescore` shows the rows whose reward changed, leaves the dump and unscored samples
    alone, and returns 0 if none changed."""
    samples = group(("1", 1.0), ("2", 0.0), ("1", 0.0))
    samples.append(Sample(group_index=0, index=9, response="1", label="1"))
    path = str(
        save_debug_rollout_data(
            str(tmp_path / "{rollout_id}"), samples, rollout_id=0, evaluation=False
        )
    )
    assert main(["rescore", path, "--rm-type", "exact_match"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "1 of 3 rewards changed: 1 rose, 0 fell, 0 have none now; mean 0.3333 -> 0.6667"
    )
    assert lines[1].startswith("  #2 group 0 index 2: 0 -> 1; label '1'") and len(lines) == 2
    save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"), samples[:2], rollout_id=0, evaluation=False
    )
    assert main(["rescore", path, "--rm-type", "exact_match"]) == 0
    assert main(["rescore", path, "--custom-rm-path", f"{__name__}.other_rule"]) == 1
    assert main(["rescore", path, "--custom-rm-path", f"{__name__}.by_group", "--group-rm"]) == 1
    assert main(["rescore", path, "--custom-rm-path", f"{__name__}.fails"]) == 2
    capsys.readouterr()
    for given, said in (
        ([path], "--rm-type"),
        ([path, "--rm-type", "exact"], "exact_match"),
        ([str(tmp_path / "no"), "--rm-type", "f1"], "does not exist"),
    ):
        assert main(["rescore", *given]) == 2
        assert said in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
