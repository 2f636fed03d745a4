"""The sorting example's rows, recipes, and its table of excluded and penalized cuts from
hand-written records.
"""

import json

import pytest

from examples.addition.run import StageFailed
from examples.sorting import prepare, run
from slime.harness.run_records import read_run

NUM_GPUS = 0

LEDGER = {"rollout/ledger/sampled": 100, "rollout/ledger/trained": 100, "train/weight_delta": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare.prepare(tmp_path_factory.mktemp("sorting"))


def write_records(folder, cuts, *, kept=None, accuracies=(0.25, 0.75), totals=None):
    """Writes a run of one rollout per cut share; the mean over everything sampled is half the share
    that was not cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points = [
        ("eval/step", step, {run.ACCURACY: accuracy}) for step, accuracy in enumerate(accuracies)
    ]
    for step, cut in enumerate(cuts):
        metrics = {
            run.CUT: cut,
            run.TOTAL: (totals or [100] * len(cuts))[step],
            run.OF_SAMPLED: (1 - cut) / 2,
            **LEDGER,
        }
        if kept is None or kept[step] is not None:
            metrics[run.OF_KEPT] = 0.5 if kept is None else kept[step]
        points.append(("rollout/step", step, metrics))
    lines = [
        json.dumps({"time": 1.0, "step_key": key, "step": step, "metrics": metrics})
        for key, step, metrics in points
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_held_out_rows_are_in_no_training_data_and_labels_are_sorted(folder):
    """Held-out rows are in no training data, labels are sorted, and the response limit is the
    longest right answer with its end."""
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval", "sft")
    }
    prompts = {
        name: {row["prompt"][0]["content"] for row in rows[name]} for name in ("train", "eval")
    }
    assert (len(prompts["train"]), len(prompts["eval"])) == (4096, 512) and not prompts[
        "train"
    ] & prompts["eval"]
    assert {row["messages"][0]["content"] for row in rows["sft"]} == prompts["train"]
    for row in rows["train"] + rows["eval"]:
        assert row["prompt"][0]["content"] == f"sort {row['prompt'][0]['content'][5:-1]}=" and list(
            row["label"]
        ) == sorted(row["label"])
        assert sorted(row["prompt"][0]["content"][5:-1]) == list(row["label"])
    assert {len(row["label"]) for row in rows["train"]} == {6, 7, 8}
    assert prepare.conversation("539152")[1]["content"] == "123559"


def test_the_recipes_parse_and_the_comparison_differs_in_one_policy(folder, tmp_path):
    """The recipes parse, the comparison differs from the recommended one in the policy for cuts
    alone, and the limit leaves room for every right answer."""
    from slime.data.reasons import InvalidReason
    from slime.gate.gate import gate_config_from_args
    from slime.utils.arguments import parse_args

    words = dict(run.commands(folder, tmp_path / "run", ["--hf-checkpoint", str(folder / "model")]))
    sft, grpo = (parse_args(words[name][3:]) for name in ("the warm-up", "GRPO"))
    assert sft.loss_type == "sft_loss" and grpo.rollout_max_response_len == prepare.LONGEST + 1
    excluded = parse_args(
        [*words["GRPO"][3:], "--gate-policies", json.dumps({"truncated": run.RECIPES["exclude"]})]
    )
    policies = [
        gate_config_from_args(args).policies[InvalidReason.TRUNCATED].value
        for args in (grpo, excluded)
    ]
    assert policies == ["penalize", "mark"]


def test_the_table_is_what_the_records_say(tmp_path):
    """Eight rollouts; the last five have 10, 20, 30, 40 and 50 % cut: 30 %. All eight: (4 + 4 + 2 +
    150) / 800 = 20 %.
    """
    shares = [0.04, 0.04, 0.02, 0.1, 0.2, 0.3, 0.4, 0.5]
    one = run.read_outcome(
        read_run(write_records(tmp_path, shares, kept=[0, 0, 0, 0.5, 0.6, 0.7, 0.8, 0.9]))
    )
    assert run.format_table([(7, "exclude", one)]).splitlines() == [
        (
            "| seed | cut answers | held out | cut at first | in the last 5 | in all | reward of "
            "all, "
            "last 5 | of the kept |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 7 | exclude | 0.25 -> 0.75 | 4% | 30% | 20% | 0.35 | 0.70 |",
    ]


def test_rollouts_count_by_their_samples_and_one_that_kept_nothing_has_no_mean(tmp_path):
    """(0.5 x 100 + 1.0 x 300) / 400 = 0.875 of the samples were cut; where everything was, nothing
    was kept.
    """
    one = run.read_outcome(
        read_run(write_records(tmp_path / "a", [0.5, 1.0], totals=[100, 300], kept=[0.4, None]))
    )
    assert (one.cut_all, one.reward_kept, one.reward_sampled) == (0.875, 0.4, 0.0625)
    one = run.read_outcome(read_run(write_records(tmp_path / "b", [1.0], kept=[None])))
    assert run.format_table([(1, "exclude", one)]).endswith("| 100% | 100% | 100% | 0.00 | - |")


@pytest.mark.parametrize(
    ("accuracies", "cuts", "said"),
    [((0.2,), [0.1], "logged 1 times"), ((0.2, 0.3), [], "truncated 0 times")],
)
def test_records_without_a_before_and_after_are_refused(accuracies, cuts, said, tmp_path):
    """A run without the evaluation before and after becomes no row of the table."""
    with pytest.raises(run.IncompleteRun, match=said):
        run.read_outcome(read_run(write_records(tmp_path, cuts, accuracies=accuracies)))


def fake_stages(monkeypatch, *, cuts, status, accuracies=(0.25, 0.75)):
    """Stages write records instead of training: cut shares by policy, and end with `status` where
    the model fails more.
    """
    commands = []

    def run_stage(stage, command):
        commands.append(command)
        if stage == "the warm-up":
            return
        place = next(
            b
            for a, b in reversed(list(zip(command, command[1:], strict=False)))
            if a == "--run-dir"
        )
        policy = json.loads(command[-1])["truncated"]
        write_records(run.Path(place), cuts[policy], accuracies=accuracies)
        if status and policy == "mark":
            raise StageFailed(stage, status)

    monkeypatch.setattr(run, "run_stage", run_stage)
    return commands


STEADY, RISING = [0.05] * 9 + [0.04], [0.05] * 5 + [0.45] * 5


def test_both_recipes_of_a_seed_start_from_one_warm_up_and_a_rise_of_cuts_is_a_result(
    monkeypatch, folder, tmp_path, capsys
):
    """Both recipes of a seed start from one warm-up; status 1 because the model fails more is a
    result of the comparison and not an error."""
    commands = fake_stages(monkeypatch, cuts={"mark": RISING, "penalize": STEADY}, status=1)
    assert (
        run.main(
            [
                "--compare",
                "--seeds",
                "3",
                "4",
                "--run-dir",
                str(tmp_path),
                "--data",
                str(folder),
                "--lr",
                "0.1",
            ]
        )
        == 0
    )
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        [f"| {seed}", recipe] for seed in (3, 4) for recipe in ("exclude", "penalize")
    ]
    assert "| 5% | 45% | 25% |" in table[2] and "| 5% | 5% | 5% |" in table[3]
    models = [command[command.index("--hf-checkpoint") + 1] for command in commands]
    assert (
        models[1] == models[2] == str(tmp_path / "seed-3" / "warm-up" / "model")
        and models[4] == models[5] != models[1]
    )
    assert (
        commands[0][-4:] == ["--seed", "3", "--rollout-seed", "3"]
        and "0.1" in commands[1]
        and "0.1" not in commands[0]
    )


@pytest.mark.parametrize(
    ("cuts", "accuracies", "status"),
    [(RISING, (0.25,), 1), (STEADY, (0.25, 0.75), 1), (RISING, (0.25, 0.75), 130)],
)
def test_a_run_that_failed_otherwise_ends_the_comparison(
    cuts, accuracies, status, monkeypatch, folder, tmp_path, capsys
):
    """A crash before the last evaluation, another problem or an interrupt ends the comparison
    without a table."""
    fake_stages(
        monkeypatch, cuts={"mark": cuts, "penalize": STEADY}, status=status, accuracies=accuracies
    )
    assert run.main(["--compare", "--run-dir", str(tmp_path), "--data", str(folder)]) == status
    captured = capsys.readouterr()
    assert "| " not in captured.out and f"GRPO ended with status {status}" in captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "1"], "--seeds belongs to --compare"),
        (["--compare", "--gate-policies={}"], "sets --gate-policies itself"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        run.main(words)
    assert said in capsys.readouterr().err


def test_the_last_line_of_a_single_run(tmp_path, capsys):
    assert run.conclude(write_records(tmp_path / "whole", STEADY), started=0.0) == 0
    assert capsys.readouterr().out.startswith("accuracy: 0.25 -> 0.75, cut answers 5% -> 5% in ")
    assert (
        run.conclude(write_records(tmp_path / "half", STEADY, accuracies=(0.25,)), started=0.0) == 1
    )
    assert "eval/sorting was logged 1 times" in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
