"""Options of observability: where a run writes, which trackers it feeds, what it prints."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time

from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class ObservabilityOptions:
    """Observability: the run folder, trackers, the terminal."""

    run_name: str | None = option(
        None,
        (
            "Name of this run: its folder under runs/ and its name in trackers; default: the start "
            "time."
        ),
    )
    run_dir: str | None = option(
        None,
        "Folder of this run's metrics.jsonl, progress.jsonl and report, on a file system that "
        "every node shares; "
        "default: runs/<run name>. An existing one is continued.",
    )
    live_view: bool = option(
        True, "Show progress in the terminal (plain lines when it is not a terminal)."
    )
    write_report: bool = option(
        True,
        (
            "Print a summary and write report.png when the run ends; a problem in it makes the "
            "exit "
            "status 1."
        ),
    )
    trace: bool = option(
        False,
        "Record what every process of the run does when, in <run dir>/trace: slime trace shows it.",
    )
    trace_every: int = option(
        1,
        "Record rollouts 0, N, 2N, ... alone, with --trace; the driver and the engines record "
        "throughout.",
        minimum=1,
    )
    use_wandb: bool = option(False, "Send metrics to Weights & Biases.")
    wandb_mode: str | None = option(
        None, "online sends, offline writes files to sync later; default: WANDB_MODE, else online.",
        choices=("online", "offline", "disabled"),
    )  # fmt: skip
    wandb_dir: str | None = option(None, "Folder of W&B's own files; default: the run folder.")
    wandb_key: str | None = option(
        None, "W&B API key; the environment variable WANDB_API_KEY keeps it out of process lists."
    )
    wandb_host: str | None = option(None, "Address of a W&B server that is not the public one.")
    wandb_team: str | None = option(None, "W&B entity that owns the project.")
    wandb_project: str | None = option(None, "W&B project; default: slime.")
    wandb_group: str | None = option(None, "W&B group; default: the run name.")
    wandb_random_suffix: bool = option(
        True,
        "Add the run's id to the W&B group, so that repeated runs stay apart.",
        disable_flag="--disable-wandb-random-suffix",
    )
    wandb_run_id: str | None = option(
        None,
        (
            "W&B run to write to; default: derived from the run folder, so a resumed run continues "
            "its "
            "own."
        ),
    )
    wandb_always_use_train_step: bool = option(
        False, "Number rollout and evaluation records by optimizer steps instead of rollouts."
    )
    use_tensorboard: bool = option(False, "Write TensorBoard event files.")
    tb_project_name: str | None = option(
        None,
        "First folder below the TensorBoard root (TENSORBOARD_DIR, else <run dir>/tensorboard).",
    )
    tb_experiment_name: str | None = option(None, "Second folder below the TensorBoard root.")
    log_passrate: bool = option(False, "Log unbiased pass@k of every rollout.")
    log_multi_turn: bool = option(
        False, "Log numbers of turns and of tokens that the environment wrote."
    )
    log_correct_samples: bool = option(
        False, "Log lengths and entropy of the samples with reward 1."
    )
    logprob_diff_alarm: float = option(
        0.1,
        (
            "Mean |trainer - engine| log-prob difference, nats per token, above which a rollout "
            "raises "
            "an alarm."
        ),
        minimum=0,
        infinite=True,
    )
    logprob_diff_stop: float | None = option(
        None,
        "Mean |trainer - engine| log-prob difference, nats per token, above which the run ends "
        "before the optimizer step. Samples of older weights "
        "than those being trained, as in slime train-async, do not count.",
        minimum=0,
    )
    untrained_tokens_alarm: float = option(
        0.01,
        "Share of sampled tokens outside the loss, in samples that train, above which a rollout "
        "raises an alarm; 1 where your generate function "
        "masks sampled tokens on purpose.",
        minimum=0,
        maximum=1,
    )
    log_reward_category: str | None = option(
        None, "Key of a dict reward whose values are counted as categories."
    )


def resolve_run_dir(
    run_dir: str | None, run_name: str | None, *, started: float | None = None
) -> str:
    """Returns the run folder's absolute path: `run_dir` as given, else runs/<run_name>, else
    runs/<start time>-<process id>.
    """
    if run_dir is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
        run_dir = os.path.join("runs", run_name or f"{stamp}-{os.getpid()}")
    return os.path.abspath(run_dir)


def resolve_wandb_run_id(wandb_run_id: str | None, run_dir: str) -> str:
    """Returns the id every process and every resumed process of this run folder uses: the given
    one, else 8 hex digits of the folder's path.
    """
    return wandb_run_id or hashlib.sha256(os.path.abspath(run_dir).encode()).hexdigest()[:8]
