"""Options of the recording: what of a run is kept for `slime replay`, `slime diff` and audits."""

from __future__ import annotations

import dataclasses

from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class RecordingOptions:
    """Recording: everything that decided a rollout, for replay, diff and bisect."""

    record: str | None = option(
        None,
        "Record the run into this folder: samples with verdicts, rewards, columns, schedule, "
        "what training computed per token, metrics, options and versions. A run that resumes "
        "(--load) goes on with the recording; any other needs a new folder.",
    )
    record_every: int = option(1, "Record one of so many rollouts.", minimum=1)
    record_keep: int | None = option(
        None, "Keep only so many recorded rollouts, the newest; default: all.", minimum=1
    )
    record_max_gib: float | None = option(
        None,
        "Remove the oldest recorded rollouts beyond so many GiB; the newest always stays. "
        "Default: no limit.",
        above=0,
    )
    record_weights: bool = option(
        False,
        "Record the weights and the optimizer's state before each recorded rollout, so that "
        "`slime replay --stage train` starts from them. Without it, replay starts from a "
        "checkpoint of --save.",
    )
