"""Checks a run that resumes: whether rollouts are left, and whether its learning-rate schedule
reaches their end.

Reads the checkpoint's pointer and state.json, so that the answer comes before any process starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from slime.config.derive import CHECKPOINT_TRACKER

ITERATION_FOLDER = re.compile(r"iter_(\d{7})")


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from: the folder of one iteration."""

    folder: Path
    iteration: int

    @property
    def num_done(self) -> int:
        """Rollouts that the checkpoint has behind it."""
        return self.iteration + 1


def resume_point(args: argparse.Namespace) -> ResumePoint | None:
    """Returns where the policy resumes; None for a fresh start, and where --load is damaged (its
    loading says how).
    """
    if args.load is None or args.finetune:
        return None
    folder = Path(args.load)
    own = ITERATION_FOLDER.fullmatch(folder.name)
    if own:
        return ResumePoint(folder, int(own[1])) if folder.is_dir() else None
    try:
        text = (
            str(args.ckpt_step)
            if args.ckpt_step is not None
            else (folder / CHECKPOINT_TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        )
    except OSError:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        return None
    return ResumePoint(folder / f"iter_{int(text):07d}", int(text))


def first_rollout(args: argparse.Namespace) -> int:
    """Returns the id of the first rollout to run."""
    if args.start_rollout_id is not None:
        return args.start_rollout_id
    point = None if args.debug_rollout_only else resume_point(args)
    return 0 if point is None else point.num_done


def evaluates_only(args: argparse.Namespace) -> bool:
    """Whether the run evaluates the weights that it loads and trains nothing: --num-rollout 0 with
    --eval-interval.
    """
    return args.num_rollout == 0 and args.eval_interval is not None and not args.debug_train_only


def nothing_left(args: argparse.Namespace, *, num_rollout: int) -> str | None:
    """Returns the sentence for a run without a rollout to run; None where there is one."""
    start = first_rollout(args)
    if start < num_rollout or evaluates_only(args):
        return None
    asked = (
        f"--num-rollout {num_rollout}"
        if args.num_rollout is not None
        else f"--num-epoch {args.num_epoch} ({num_rollout} rollouts)"
    )
    if start == 0:
        hint = (
            " To evaluate only, add --eval-interval 1 and --eval-prompt-data."
            if args.num_rollout == 0
            else ""
        )
        return f"Nothing to do: {asked} asks for no rollout.{hint}"
    if args.start_rollout_id is not None:
        return (
            f"Nothing to do: --start-rollout-id {start} is not below {asked}. Lower the first, "
            "or raise the second."
        )
    more = (
        f"--num-rollout {2 * start}"
        if args.num_rollout is not None
        else f"--num-epoch {args.num_epoch + 1}"
    )
    return (
        f"Nothing to do: --load {args.load} has {start} rollouts behind it, and {asked} asks for "
        "no more. "
        f"To train on, raise it (for instance {more}); to start anew, leave out --load."
    )


def schedule_problem(args: argparse.Namespace, *, num_rollout: int) -> str | None:
    """Returns why the last rollouts of an extended run would train with learning rate 0; None where
    they do not.

    A checkpoint keeps its learning-rate schedule. One that decays to 0 at the old end leaves
    nothing for the rollouts beyond it.
    """
    point = resume_point(args)
    if (
        point is None
        or args.no_load_optim
        or args.override_opt_param_scheduler
        or args.use_checkpoint_opt_param_scheduler
        or args.lr == 0
    ):
        return None
    saved = _scheduler_of(point)
    if saved is None or saved["lr_decay_style"] == "constant" or saved["min_lr"] > 0:
        return None
    per_rollout = args.rollout_batch_size * args.n_samples_per_prompt
    decay_now = (
        args.lr_decay_iters * args.global_batch_size
        if args.lr_decay_iters is not None
        else num_rollout * per_rollout
    )
    left, reach = (
        num_rollout - first_rollout(args),
        max(0, saved["lr_decay_steps"] - saved["num_steps"]) // per_rollout,
    )
    if reach >= left or (
        args.lr_decay_style != "constant" and decay_now <= saved["lr_decay_steps"]
    ):
        return None
    return (
        f"--load {args.load}: its learning rate decays ({saved['lr_decay_style']}) to 0 over the "
        f"first {saved['lr_decay_steps'] // per_rollout} rollouts, "
        f"so {left - reach} of the {left} rollouts that are left up to {num_rollout} would train "
        "with learning rate 0. Use "
        "--override-opt-param-scheduler for the schedule of this command line (its end: "
        "--lr-decay-iters, else the last rollout; its form: "
        "--lr-decay-style), or --use-checkpoint-opt-param-scheduler if 0 is meant."
    )


def _scheduler_of(point: ResumePoint) -> dict[str, Any] | None:
    try:
        state = json.loads((point.folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    saved = state.get("scheduler") if isinstance(state, dict) else None
    names = ("lr_decay_style", "min_lr", "lr_decay_steps", "num_steps")
    return saved if isinstance(saved, dict) and all(name in saved for name in names) else None


def resume_problems(args: argparse.Namespace) -> list[str]:
    """Returns what is wrong with the rest of a run whose number of rollouts is known."""
    if (
        args.num_rollout is None
        or args.rollout_batch_size is None
        or args.global_batch_size is None
        or args.debug_rollout_only
    ):
        return []
    problem = schedule_problem(args, num_rollout=args.num_rollout)
    return [] if problem is None else [problem]
