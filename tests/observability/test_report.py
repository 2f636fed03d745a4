"""The report reads metrics.jsonl alone and reports samples, weights or rewards that do not add
up."""

import argparse
import io
import json
import struct

import pytest

from slime.harness import report
from slime.harness.report import Checks, print_summary, summarize_run, write_report
from slime.harness.run_records import LedgerTotals, read_run
from slime.view import report_command

NUM_GPUS = 0


def healthy_records(num_rollouts=10):
    """Per rollout 128 sampled = 120 trained + 8 dropped; reward rises by 0.05; weights change each
    time.
    """
    for step in range(num_rollouts):
        yield "rollout/step", step, {
            "rollout/raw_reward": 0.3 + 0.05 * step,
            "passrate/pass@1": 0.6 + 0.03 * step,
            "rollout/response_lengths": 3.0,
            "rollout/ledger/sampled": 128,
            "rollout/ledger/trained": 120,
            "rollout/ledger/dropped/truncated": 5,
            "rollout/ledger/dropped/empty": 3,
        }  # fmt: skip
        yield "rollout/step", step, {"perf/step_time": 1.5 + 0.1 * (step % 3)}
        for substep in range(2):
            yield "train/step", 2 * step + substep, {
                "train/loss": 0.1 - 0.01 * step,
                "train/ppo_kl": 1e-3 * (step + 1),
                "train/train_rollout_logprob_abs_diff": 2e-6,
                "train/weight_delta": 0.01,
            }  # fmt: skip
        if step % 3 == 0:
            yield (
                "eval/step",
                step,
                {"eval/addition": 0.3 + 0.05 * step, "eval/addition/failed_samples": 0},
            )


def write_run(folder, records):
    lines = [
        json.dumps({"time": 1000.0 + n, "process": "a", "step_key": k, "step": s, "metrics": m})
        for n, (k, s, m) in enumerate(records)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def changed(change):
    """The healthy run with `change(step_key, step, metrics)` applied to every record."""
    for key, step, metrics in healthy_records():
        yield key, step, change(key, step, dict(metrics))


def test_the_summary_says_what_the_gate_costs(tmp_path):
    """The summary gives the gate's share of the iteration, without the first rollout, which has no
    earlier one to compare with."""

    def with_share(key, step, metrics):
        share = {"gate/time/share_of_iteration": None if step == 0 else 0.05 if step == 7 else 0.02}
        return metrics | share if key == "rollout/step" else metrics

    summary = summarize_run(read_run(write_run(tmp_path, changed(with_share))))
    (line,) = [fact for fact in summary.facts if fact.startswith("gate:")]
    assert line.startswith("gate: 2.0% of an iteration (median of ") and line.endswith(
        "; largest 5.0%)"
    )
    first = [record for record in changed(with_share) if record[1] == 0]
    assert not [
        fact
        for fact in summarize_run(read_run(write_run(tmp_path, first))).facts
        if fact.startswith("gate:")
    ]


def test_a_loss_that_is_no_number_from_a_step_on_is_a_problem(tmp_path, capsys):
    """A loss that is NaN from a step on is a problem with the steps, here 6 to 19 of 20, and not
    hidden by "loss 0.1 .. 0.1"."""

    def broken(key, step, metrics):
        lost = {"train/loss": "nan", "train/grad_norm": "inf", "train/update_skipped": 1.0}
        return metrics | lost if key == "train/step" and step >= 6 else metrics

    write_run(tmp_path, changed(broken))
    summary = summarize_run(read_run(tmp_path))
    assert summary.problems == [
        "14 of 20 optimizer steps changed nothing, the first at step 6: a gradient was not finite "
        "(train/update_skipped). "
        "Look at the reward, the log-probs and the learning rate of that step.",
        "train/grad_norm is not a finite number in 14 of 14 records, the first at step 6",
        "train/loss is not a finite number in 14 of 20 records, the first at step 6",
    ]
    (row,) = [row for row in summary.rows if row[0] == "loss"]
    assert row[1:3] == ("0.1", "nan")
    assert report_command.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("PROBLEM") == 3


def test_a_loss_that_never_was_a_number_is_a_problem_too(tmp_path):
    """A loss that was never a number is a problem as well."""
    lost = changed(
        lambda key, step, metrics: metrics | ({"train/loss": "nan"} if key == "train/step" else {})
    )
    assert problems_of(tmp_path, lost) == [
        "train/loss is not a finite number in 20 of 20 records, the first at step 0"
    ]


def test_an_evaluation_that_is_no_number_is_a_problem(tmp_path):
    """An evaluation that is NaN is a problem."""
    lost = changed(
        lambda key, step, metrics: (
            metrics | ({"eval/addition": "nan"} if key == "eval/step" and step == 9 else {})
        )
    )
    assert problems_of(tmp_path, lost) == [
        "eval/addition is not a finite number in 1 of 4 records, the first at step 9"
    ]


def problems_of(folder, records):
    return summarize_run(read_run(write_run(folder, records))).problems


def test_healthy_run_has_no_problem_and_its_summary_states_the_balance(tmp_path):
    """A healthy run has no problem, and its summary reads 1280 sampled = 1200 trained + 80 dropped
    (50 truncated, 30 empty)."""
    summary = write_report(write_run(tmp_path, healthy_records()))
    assert summary.problems == [] and summary.exit_status == 0
    assert (
        summary.facts[0]
        == "samples: 1280 sampled = 1200 trained + 80 dropped (30 empty, 50 truncated)"
    )
    assert summary.facts[1] == "weights: changed in 20 of 20 updates"
    rows = {row[0]: row[1:] for row in summary.rows}
    assert rows["reward"] == ("0.3", "0.75", "0.3 .. 0.75")
    assert rows["eval addition"] == ("0.3", "0.75", "0.3 .. 0.75")
    assert "eval addition/failed_samples" not in rows


def test_lost_sample_is_named_with_its_rollout(tmp_path):
    """A sample that is neither trained nor dropped is a problem that names its rollout."""

    def lose_one(key, step, metrics):
        if step == 4 and "rollout/ledger/trained" in metrics:
            metrics["rollout/ledger/trained"] -= 1
        return metrics

    (problem,) = problems_of(tmp_path, changed(lose_one))
    assert problem == (
        "ledger of rollout 4 does not balance: 128 sampled = 119 trained + 8 dropped (3 empty, 5 "
        "truncated), "
        "1 vanished without a reason"
    )


def test_sample_that_is_counted_twice_is_named_too(tmp_path):
    """A sample counted twice is a problem too and does not cancel a lost one in another rollout."""

    def shift(key, step, metrics):
        if "rollout/ledger/trained" in metrics:
            metrics["rollout/ledger/trained"] += {4: -1, 5: 1}.get(step, 0)
        return metrics

    problems = problems_of(tmp_path, changed(shift))
    assert [problem.split(":")[0] for problem in problems] == [
        "ledger of rollout 4 does not balance",
        "ledger of rollout 5 does not balance",
    ]


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        (None, 1),
        ("logprob_diff_alarm: 0.9\n", 0),
        ("logprob_diff_alarm: 2e-1\n", 1),
        ("debug_train_only: true\n", 0),
    ],
)
def test_the_command_uses_the_thresholds_that_the_run_was_started_with(
    tmp_path, config, problems, capsys
):
    """The command uses the run's own thresholds, here --logprob-diff-alarm 0.9 for a gap of 0.5,
    and compares no replay."""
    gap = {"rollout/logprob_abs_diff/mean": 0.5, "rollout/logprob_abs_diff/max": 0.7}
    write_run(
        tmp_path,
        changed(lambda key, step, metrics: metrics | (gap if key == "rollout/step" else {})),
    )
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    assert report_command.main([str(tmp_path)]) == problems
    assert capsys.readouterr().out.count("PROBLEM") == problems


def test_a_recorded_config_that_cannot_be_read_is_named(tmp_path, capsys):
    """A recorded config that cannot be read is an error; other thresholds are not used in its
    place."""
    (write_run(tmp_path, healthy_records()) / "config.yaml").write_text("lr: [1\n")
    assert report_command.main([str(tmp_path)]) == 2 and "config.yaml" in capsys.readouterr().err


def test_a_supervised_run_is_reported_as_one(tmp_path, capsys):
    """A supervised run has no rewards, and neither the command nor the report at the end calls that
    a problem."""
    write_run(
        tmp_path,
        changed(
            lambda key, step, metrics: {
                n: v for n, v in metrics.items() if "reward" not in n and "pass" not in n
            }
        ),
    )
    assert report_command.main([str(tmp_path)]) == 1
    (tmp_path / "config.yaml").write_text("loss_type: sft_loss\n")
    assert report_command.main([str(tmp_path)]) == 0


def test_a_converters_copies_stand_beside_what_was_sampled(tmp_path):
    """Copies that a converter made are named beside the sampled ones: 128 samples in two rows each,
    240 rows trained and 16 dropped."""

    def twice(key, step, metrics):
        if step == 4 and "rollout/ledger/trained" in metrics:
            counts = {"trained": 240, "copies": 128, "dropped/truncated": 10, "dropped/empty": 6}
            return metrics | {f"rollout/ledger/{name}": count for name, count in counts.items()}
        return metrics

    summary = summarize_run(read_run(write_run(tmp_path, changed(twice))))
    assert summary.problems == [] and summary.facts[0].startswith(
        "samples: 1280 sampled + 128 copies = 1320 trained + 88 dropped"
    )


def test_samples_of_a_skipped_step_are_not_counted_as_trained(tmp_path):
    """Samples of skipped steps do not count as trained, and the ledger balances: 19 x 120
    trained."""

    def skip(key, step, metrics):
        if step == 4 and "rollout/ledger/trained" in metrics:
            return {
                **metrics,
                "rollout/ledger/trained": 0,
                "rollout/ledger/not_trained/update_skipped": 120,
            }
        return metrics

    summary = summarize_run(read_run(write_run(tmp_path, changed(skip))))
    assert not [problem for problem in summary.problems if "ledger" in problem]
    assert (
        "1080 trained + 200 dropped (30 empty, 50 truncated, 120 update_skipped)"
        in summary.facts[0]
    )


def test_rollout_whose_training_did_not_finish_is_not_counted_as_trained(tmp_path):
    """A rollout that was killed while it trained does not count as trained: 9 x 120."""

    def crash(key, step, metrics):
        if "rollout/ledger/trained" in metrics:
            planned = {**metrics, "rollout/ledger/planned": 120}
            return (
                planned
                if step < 9
                else {
                    name: value
                    for name, value in planned.items()
                    if name != "rollout/ledger/trained"
                }
            )
        return metrics

    summary = summarize_run(read_run(write_run(tmp_path, changed(crash))))
    assert summary.problems == []
    assert summary.facts[0] == (
        "samples: 1280 sampled = 1080 trained + 200 dropped (30 empty, 120 "
        "training_not_finished, 50 truncated)"
    )


def test_zero_learning_rate_is_found(tmp_path):
    """A run whose weights never change is a problem."""

    def freeze(key, step, metrics):
        return (
            {**metrics, "train/weight_delta": 0.0} if "train/weight_delta" in metrics else metrics
        )

    (problem,) = problems_of(tmp_path, changed(freeze))
    assert "weights never changed" in problem and "learning rate" in problem


def test_constant_reward_is_found(tmp_path):
    """A constant reward is a problem."""

    def flatten(key, step, metrics):
        return (
            {**metrics, "rollout/raw_reward": 0.5} if "rollout/raw_reward" in metrics else metrics
        )

    (problem,) = problems_of(tmp_path, changed(flatten))
    assert problem.startswith("reward did not move: rollout/raw_reward is 0.5 in all 10 rollouts")


def test_what_was_never_counted_is_a_problem_and_not_a_pass(tmp_path):
    """A run that logs no ledger, no weight change or no reward has a problem for each."""
    problems = problems_of(tmp_path, [("train/step", 0, {"train/loss": 1.0})])
    assert [problem.split(":")[0] for problem in problems] == [
        "no ledger",
        "no evidence that the weights changed",
        "no reward",
    ]


def test_equal_responses_with_different_rewards_are_a_problem(tmp_path):
    """Equal responses with different rewards are a problem that names the rollout and the command
    that shows them."""

    def with_conflicts(key, step, metrics):
        return (
            metrics | {"rollout/reward/conflict_count": 3.0 if step == 4 else 0.0}
            if key == "rollout/step"
            else metrics
        )

    (problem,) = summarize_run(read_run(write_run(tmp_path, changed(with_conflicts)))).problems
    assert (
        problem.startswith("3 samples have another reward")
        and "the first in rollout 4" in problem
        and "slime rescore" in problem
    )


def test_a_log_prob_alarm_is_a_problem_unless_the_run_replays(tmp_path):
    """A log-prob alarm is a problem, except in a replay."""
    records = [
        ("rollout/step", 0, {"rollout/mask/sampled_untrained": 0.36, "train/weight_delta": 0.1})
    ]
    run = read_run(write_run(tmp_path, records))
    (problem,) = summarize_run(run, Checks(ledger=False, reward=False)).problems
    assert "36.0% of the sampled tokens do not train" in problem
    assert summarize_run(run, Checks(ledger=False, reward=False, log_probs=None)).problems == []
    names = {
        "debug_rollout_only": False,
        "loss_type": "policy_loss",
        "custom_reward_post_process_path": None,
    }
    names |= {"logprob_diff_alarm": 0.2, "untrained_tokens_alarm": 0.5, "num_rollout": 3}
    assert report.checks_for(argparse.Namespace(**names, debug_train_only=True)).log_probs is None
    limits = report.checks_for(argparse.Namespace(**names, debug_train_only=False)).log_probs
    assert (limits.logprob_diff, limits.untrained) == (0.2, 0.5)


def test_a_run_that_only_evaluates_has_no_books_to_balance():
    """A run with --num-rollout 0 and --eval-interval has no problem."""
    options = {"num_rollout": 0, "eval_interval": 1, "debug_train_only": False}
    assert report.checks_for(argparse.Namespace(**options)) == Checks(
        ledger=False, weights=False, reward=False, log_probs=None
    )


def test_supervised_run_needs_no_reward(tmp_path):
    """A supervised run without reward has no problem."""
    run = read_run(
        write_run(tmp_path, [("train/step", 0, {"train/weight_delta": 0.1, "train/loss": 1.0})])
    )
    assert summarize_run(run, Checks(ledger=False, reward=False)).problems == []


def test_later_record_of_a_step_wins_and_torn_lines_are_counted(tmp_path):
    """Of two records of a step the later one counts, as after a resume, and cut lines are
    counted."""
    records = [("train/step", 0, {"train/loss": 1.0}), ("train/step", 0, {"train/loss": 2.0})]
    write_run(tmp_path, records)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 3, "step_key": "train/st\n')
    run = read_run(tmp_path)
    assert run.numbers("train/loss") == ([0], [2.0])
    assert run.num_unreadable == 1


def test_picture_is_a_png_of_readme_width(tmp_path):
    """The picture is a PNG of README's width, made without a display, and replaces an older one."""
    png = write_report(write_run(tmp_path, healthy_records())).png
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert 1000 <= width <= 1600 and 500 <= height <= 1000


def test_picture_of_an_almost_empty_run_is_drawn(tmp_path):
    """A run with one unfinished step still gets a picture."""
    assert write_report(write_run(tmp_path, [("train/step", 0, {"train/loss": 1.0})])).png.exists()


def test_plain_output_has_no_control_codes(tmp_path):
    """The plain summary has no control codes."""
    stream = io.StringIO()
    summary = summarize_run(
        read_run(write_run(tmp_path, changed(lambda k, s, m: {**m, "rollout/ledger/sampled": 1})))
    )
    print_summary(summary, stream=stream)
    text = stream.getvalue()
    assert "\x1b" not in text and "reward" in text and "PROBLEM: ledger of rollout 0" in text


def test_command_line_exits_with_what_it_found(tmp_path, capsys):
    """The exit status is 0 if all is right, 1 if something does not add up, 2 without a run."""
    assert report_command.main([str(write_run(tmp_path, healthy_records()))]) == 0
    assert (
        report_command.main([str(write_run(tmp_path, [("train/step", 0, {"train/loss": 1.0})]))])
        == 1
    )
    assert report_command.main([str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_end_of_a_run_prints_the_report_for_its_options(tmp_path, capsys):
    """The report at a run's end follows its options: a supervised run needs no reward, and a run
    without records is no error."""
    args = argparse.Namespace(
        run_dir=str(tmp_path), debug_rollout_only=False, loss_type="sft_loss", debug_train_only=False, logprob_diff_alarm=0.1,
        untrained_tokens_alarm=0.01, custom_reward_post_process_path=None, num_rollout=3,
    )  # fmt: skip
    report.report_at_end(args)
    assert "no report" in capsys.readouterr().err
    write_run(tmp_path, [("train/step", 0, {"train/weight_delta": 0.1})])
    report.report_at_end(args)
    out = capsys.readouterr().out
    assert "PROBLEM: no ledger" in out and "no reward" not in out


def test_ledger_equation_is_written_out():
    """The ledger is written out as an equation."""
    ledger = LedgerTotals(10, 7, {"truncated": 2, "stale": 0})
    assert str(ledger) == "10 sampled = 7 trained + 2 dropped (2 truncated)"
    assert ledger.missing == 1


def test_samples_that_were_given_back_are_not_sampled_twice():
    """A later rollout samples them again: `slime ledger` counts them once, and so does the summary."""
    ledger = LedgerTotals(24, 15, {"truncated": 1, "returned_pristine": 6, "returned_partial": 2})
    assert str(ledger) == (
        "16 sampled = 15 trained + 1 dropped (1 truncated); 8 more were begun and given back "
        "(2 returned_partial, 6 returned_pristine)"
    )
    assert ledger.missing == 0


def test_a_metric_that_was_never_finite_is_shown_and_is_a_problem(tmp_path, capsys):
    """A metric that is NaN in every record has its row, its problem, and marks in the pictures."""
    records = [
        (key, step, {n: "nan" if n == "rollout/raw_reward" else v for n, v in metrics.items()})
        for key, step, metrics in healthy_records()
    ]
    run = write_run(tmp_path, records)
    summary = summarize_run(read_run(run))
    assert ("reward", "nan", "nan", "no finite value") in summary.rows
    assert any("raw_reward is not a finite number in 10 of 10" in one for one in summary.problems)
    assert report_command.main([str(run), "--html", str(tmp_path / "r.html")]) == 1
    page = (tmp_path / "r.html").read_text()
    assert "raw, in the batch NaN" in page and page.count('class="nan"') >= 10
    assert "page: " in capsys.readouterr().out and (run / "report.png").stat().st_size > 10_000


def test_the_html_report_is_one_file_that_acts_on_nothing(tmp_path):
    """The page has no script, asks no other file, and shows names of metrics as text."""
    name = "eval/<script>x"
    records = [*healthy_records(), ("eval/step", 0, {name: 0.5}), ("eval/step", 9, {name: 0.6})]
    run = write_run(tmp_path, records)
    assert report_command.main([str(run), "--html", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "") and "src=" not in page
    assert report_command.main([str(run), "--html", str(tmp_path / "no" / "such.html")]) in (0, 2)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
