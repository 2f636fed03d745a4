"""What is left of a resumed run is checked before anything starts: no rollout at all, or rollouts
beyond the end of the learning-rate schedule."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

from slime import train, train_async
from slime.commands import session  # noqa: E402
from slime.commands.launch import launch  # noqa: E402
from slime.config.resume import first_rollout, nothing_left, resume_point, schedule_problem
from slime.exceptions import (
    ConfigError,
    NothingLeft,  # noqa: E402
)
from slime.utils.arguments import parse_args

NUM_GPUS = 0


def write_checkpoint(folder, *, iteration=3, min_lr=0.0, style="linear", decay_samples=32):
    """A published checkpoint after rollouts of 8 samples (4 prompts x 2), as far as it is read
    here.
    """
    below = folder / f"iter_{iteration:07d}"
    below.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    schedule = {
        "lr_decay_style": style,
        "min_lr": min_lr,
        "lr_decay_steps": decay_samples,
        "num_steps": 8 * (iteration + 1),
    }
    (below / "state.json").write_text(json.dumps({"iteration": iteration, "scheduler": schedule}))
    return folder


def words_for(tmp_path, *more):
    """A command line of 4 prompts x 2 samples a rollout that resumes from tmp_path/run4; options
    given later win.
    """
    return [*write_run_inputs(tmp_path), "--load", str(tmp_path / "run4"), *more]


@pytest.fixture
def no_session(monkeypatch):
    """The loop must not be reached."""
    monkeypatch.setattr(
        session, "run_to_the_end", lambda *rest: pytest.fail("processes would have started")
    )


def test_a_finished_run_says_so_with_status_0_and_starts_nothing(tmp_path, capsys, no_session):
    """Resuming a finished run prints that it is finished, returns 0 and starts nothing."""
    write_checkpoint(tmp_path / "run4")
    assert launch(words_for(tmp_path, "--num-rollout", "4"), "slime.train") == 0
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence == (
        f"Nothing to do: --load {tmp_path / 'run4'} has 4 rollouts behind it, and --num-rollout 4 "
        "asks for no more. "
        "To train on, raise it (for instance --num-rollout 8); to start anew, leave out --load."
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--num-rollout 0",
            (
                "Nothing to do: --num-rollout 0 asks for no rollout. To evaluate only, add "
                "--eval-interval 1 and --eval-prompt-data."
            ),
        ),
        (
            "--num-rollout 3 --start-rollout-id 5",
            (
                "Nothing to do: --start-rollout-id 5 is not below --num-rollout 3. Lower the "
                "first, or "
                "raise the second."
            ),
        ),
    ],
)
def test_a_run_that_asks_for_nothing_says_so(words, sentence, tmp_path, capsys, no_session):
    """The neighbours of a finished run."""
    assert launch([*write_run_inputs(tmp_path), *words.split()], "slime.train") == 0
    assert capsys.readouterr().err.splitlines() == [sentence]


@pytest.mark.parametrize("loop", [train.train, train_async.train])
@pytest.mark.parametrize("start", [0, 4])
def test_a_run_of_no_rollout_evaluates_what_it_loads(loop, start, tmp_path, monkeypatch):
    """--num-rollout 0 with --eval-interval runs one evaluation, of the first weights or of those
    after rollout 3."""
    words = [
        "--num-rollout",
        "0",
        "--eval-interval",
        "1",
        "--eval-prompt-data",
        "one",
        str(tmp_path / "prompts.jsonl"),
    ]
    if start:
        write_checkpoint(tmp_path / "run4")
    args = parse_args(
        [*words_for(tmp_path), *words] if start else [*write_run_inputs(tmp_path), *words]
    )
    assert nothing_left(args, num_rollout=0) is None and first_rollout(args) == start
    evaluated = []
    monkeypatch.setattr(train, "evaluate", lambda run, rollout_id: evaluated.append(rollout_id))
    monkeypatch.setattr(train, "end_training", lambda run: None)
    args.colocate = args.offload_train = args.offload_rollout = False
    loop(train.Run(args, None, None, None, start, 0, None))
    assert evaluated == [start]


def test_passes_over_the_prompts_are_counted_before_they_are_called_done(tmp_path):
    """With --num-epoch the number of rollouts follows from the prompts: 10 prompts make 2 rollouts
    of 4."""
    write_checkpoint(tmp_path / "run4", min_lr=1e-7)
    args = parse_args(
        [
            word
            for word in words_for(tmp_path, "--num-epoch", "2")
            if word not in ("--num-rollout", "3")
        ]
    )
    with pytest.raises(
        NothingLeft,
        match=(
            r"has 4 rollouts behind it, and --num-epoch 2 \(4 rollouts\) asks for no "
            r"more.*--num-epoch 3"
        ),
    ):
        train.with_num_rollout(args, 4)
    known = train.with_num_rollout(args, 6)
    assert (known.num_rollout, args.num_rollout) == (6, None), (
        "the trainers get the number, the options stay as given"
    )
    args = argparse.Namespace(num_rollout=7)
    assert train.with_num_rollout(args, 7) is args


def test_where_a_run_resumes_is_read_from_the_pointer(tmp_path):
    """The start is read from the pointer, an iteration's folder or --ckpt-step; a fresh start and
    --finetune count from 0."""
    write_checkpoint(tmp_path / "run4")
    args = parse_args(words_for(tmp_path, "--num-rollout", "4"))
    assert resume_point(args).num_done == 4 == first_rollout(args)
    for changes, start in (
        ({"ckpt_step": 1}, 2),
        ({"load": str(tmp_path / "run4" / "iter_0000003")}, 4),
        ({"finetune": True}, 0),
        ({"load": None}, 0),
        ({"load": str(tmp_path)}, 0),
        ({"debug_rollout_only": True}, 0),
        ({"start_rollout_id": 1}, 1),
    ):
        changed = argparse.Namespace(**{**vars(args), **changes})
        assert first_rollout(changed) == start, changes
        assert (nothing_left(changed, num_rollout=4) is None) == (start < 4)


@pytest.mark.parametrize(
    ("num_rollout", "text"),
    [
        (8, "so 4 of the 4 rollouts that are left up to 8"),
        (5, "so 1 of the 1 rollouts that are left up to 5"),
    ],
)
def test_an_extended_run_at_learning_rate_0_is_refused_with_the_ways_out(
    num_rollout, text, tmp_path
):
    """An extended run whose linear decay has ended is refused with the two options that help,
    because its rollouts would train nothing."""
    write_checkpoint(tmp_path / "run4")
    with pytest.raises(ConfigError) as caught:
        parse_args(words_for(tmp_path, "--num-rollout", str(num_rollout)))
    assert "decays (linear) to 0 over the first 4 rollouts" in str(caught.value) and text in str(
        caught.value
    )
    for flag in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        assert flag in str(caught.value)
        assert (
            parse_args(words_for(tmp_path, "--num-rollout", str(num_rollout), flag)).num_rollout
            == num_rollout
        )


def test_a_part_of_the_rest_at_learning_rate_0_is_refused_too(tmp_path):
    """A run interrupted after 2 of 4 rollouts and extended to 8, of which four would be at rate 0,
    is refused."""
    write_checkpoint(tmp_path / "run4", iteration=1)
    with pytest.raises(
        ConfigError,
        match="so 4 of the 6 rollouts that are left up to 8 would train with learning rate 0",
    ):
        parse_args(words_for(tmp_path, "--num-rollout", "8"))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({}, "--num-rollout 4"),
        ({"iteration": 1}, "--num-rollout 4"),
        ({"style": "constant"}, "--num-rollout 8"),
        ({"min_lr": 1e-7}, "--num-rollout 8"),
        ({"decay_samples": 64}, "--num-rollout 8"),
        ({"decay_samples": 16, "iteration": 1}, "--num-rollout 4 --lr-decay-iters 2"),
        ({}, "--num-rollout 8 --no-load-optim"),
        ({}, "--num-rollout 8 --lr 0"),
    ],
)
def test_a_schedule_that_reaches_the_end_or_is_meant_to_end_early_is_accepted(
    saved, words, tmp_path
):
    """An interrupted run that resumes, another form of decay, and the same options with the same
    end are accepted."""
    write_checkpoint(tmp_path / "run4", **saved)
    assert parse_args(words_for(tmp_path, *words.split())).load == str(tmp_path / "run4")


def test_a_checkpoint_without_a_readable_schedule_is_left_to_its_loading(tmp_path):
    """A checkpoint without a readable schedule is left to the loading, which has a message of its
    own."""
    folder = write_checkpoint(tmp_path / "run4")
    args = parse_args(words_for(tmp_path, "--num-rollout", "4"))
    for text in ("{", "[]", '{"scheduler": null}', '{"scheduler": {"min_lr": 0}}'):
        (folder / "iter_0000003" / "state.json").write_text(text)
        assert schedule_problem(args, num_rollout=8) is None
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert resume_point(args) is None


def test_the_two_ways_out_exclude_each_other(tmp_path):
    """--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other,
    as in Megatron."""
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_args(
            [
                *write_run_inputs(tmp_path),
                "--override-opt-param-scheduler",
                "--use-checkpoint-opt-param-scheduler",
            ]
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
