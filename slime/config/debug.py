"""Options for looking inside a run, running half of it, and checking it in CI."""

from __future__ import annotations

import dataclasses

from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class DebugOptions:
    """Debugging: half runs, dumps and checks for CI."""

    local: bool = option(
        False,
        "Run driver, rollout manager, reward, one training rank and the engine in this process, "
        "without Ray: slower, the same numbers, and a "
        "debugger or profiler sees all of it.",
    )
    debug_rollout_only: bool = option(
        False, "Generate and score only; no training process is started."
    )
    debug_train_only: bool = option(
        False, "Train only, from --load-debug-rollout-data; no engine is started."
    )
    save_debug_rollout_data: str | None = option(
        None,
        (
            "Write each rollout's samples here, one file per rollout: a Parquet table where the path "
            "ends in .parquet, else JSON lines; {rollout_id} in the path is replaced."
        ),
    )
    load_debug_rollout_data: str | None = option(
        None,
        "Read samples from such files, or from the folder of a recording (--record), in place of "
        "generating; turns --debug-train-only on.",
    )
    load_debug_rollout_data_subsample: float | None = option(
        None, "Share of the loaded samples that is used.", above=0, maximum=1
    )
    save_debug_train_data: str | None = option(
        None,
        "Write what training computed per sample and token here, one file per rollout: a Parquet "
        "table where the path ends in .parquet, else safetensors; {rollout_id} in the path is "
        "replaced, and {rank} by the writing rank.",
    )
    dump_details: str | None = option(
        None,
        (
            "Folder for both kinds of dump, as Parquet tables: sets --save-debug-rollout-data and "
            "--save-debug-train-data where they are not given."
        ),
    )
    ci_test: bool = option(
        False, "Turn the consistency checks of CI on: KL of step one, log-prob gap, gradient norms."
    )
    ci_disable_kl_checker: bool = option(
        False, "With --ci-test: do not require zero KL in the first step."
    )
    ci_train_rollout_logprob_abs_diff_threshold: float = option(
        0.1, "With --ci-test: largest mean |trainer - engine| log-prob difference, nats.", minimum=0
    )
    ci_save_grad_norm: str | None = option(
        None,
        (
            "Write the gradient norm of each step here; {role}, {rollout_id} and {step_id} are "
            "replaced."
        ),
    )
    ci_load_grad_norm: str | None = option(
        None, "Compare the gradient norm of each step with such files."
    )
    custom_config_path: str | None = option(
        None,
        (
            "YAML file merged over all options last; it may hold keys of your plug-ins, which "
            "become "
            "attributes of args."
        ),
    )
