"""The gate's shell: reads `args`, keeps the statistics of earlier rollouts, writes records and
snapshots, logs alarms.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib.metadata
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.data.reasons import NEVER_KEPT, PENALIZABLE, REASON_OF_VALUE, REASONS, InvalidReason
from slime.data.split import SplitPlan
from slime.exceptions import ConfigError
from slime.files.jsonl import JsonlWriter, size_of
from slime.gate.alarms import Alarm, find_alarms, find_level_alarms
from slime.gate.alignment import codec_of
from slime.gate.before_rewards import SHIFTED_IDS, ResponseTally
from slime.gate.config import (
    FORMAT_PRESETS,
    FormatSpec,
    GateConfig,
    Level,
    MissingLogProbs,
    Policy,
    ScheduleStep,
    TaskRules,
)
from slime.gate.history import GateHistory
from slime.gate.judge import Outcome, PostprocessResult, adapt, assemble, judge
from slime.gate.parallel import judge_in_parallel
from slime.gate.snapshots import DroppedGroups, SnapshotWriter
from slime.models.hf_folder import read_eos_token_ids
from slime.typing import Tokenizer

logger = logging.getLogger(__name__)
SNAPSHOTS_KEPT = 3  # without --gate-snapshots
RECORD_FILE = "gate.jsonl"
COMPARED_SAMPLES = 8  # of a rollout, whose text is compared with their tokens unasked


def _num_snapshots(args: argparse.Namespace) -> int:
    """Rollouts whose raw samples are kept; none where a recording of every rollout holds them."""
    if args.gate_snapshots is not None:
        return args.gate_snapshots
    return 0 if args.record is not None and args.record_every == 1 else SNAPSHOTS_KEPT


class Gate:
    """The gate of one run. `run` is called once per rollout with the whole batch, after rewards.

    Holds the statistics of the last `window` rollouts (training and evaluation apart; `save` and
    `load` carry them over a resume), the writer of <run_dir>/gate.jsonl, and the raw snapshots in
    <run_dir>/gate. A full disk is logged once per rollout and never stops training.
    """

    def __init__(
        self,
        config: GateConfig,
        *,
        tokenizer: Tokenizer | None = None,
        run_dir: str | Path | None = None,
        window: int = 5,
        snapshots: SnapshotWriter | None = None,
        parallel_above: int = 0,
        rewards_in_samples: bool = True,
    ):
        self.config = config
        self.snapshots = snapshots
        self._tokenizer = tokenizer
        self._parallel_above = parallel_above
        self._rewards_in_samples = rewards_in_samples
        self._writer = None if run_dir is None else JsonlWriter(Path(run_dir) / RECORD_FILE)
        self._history = GateHistory(window)
        # of the check before rewards, which is handed it
        self.tally = ResponseTally()
        self._saved: tuple[str | Path, int] | None = None  # the last checkpoint
        # the last rollout at which a reason's level was warned about
        self._warned_at: dict[str, int] = {}

    @staticmethod
    def from_args(args: argparse.Namespace, tokenizer: Tokenizer | None = None) -> Gate:
        """The gate that the options describe; its records go to `args.run_dir`."""
        snapshots = None
        if args.run_dir is not None and (keep := _num_snapshots(args)) > 0:
            max_bytes = int(args.gate_snapshots_max_gib * 2**30)
            snapshots = SnapshotWriter(Path(args.run_dir) / "gate", keep=keep, max_bytes=max_bytes)
        gate = Gate(
            gate_config_from_args(args, tokenizer),
            tokenizer=tokenizer,
            run_dir=args.run_dir,
            window=args.gate_window,
            snapshots=snapshots,
            parallel_above=args.gate_parallel_above,
            # else the user's function makes rewards of what the samples carry, a teacher's reply
            # for instance
            rewards_in_samples=args.custom_reward_post_process_path is None,
        )
        gate.tally.started(args.start_rollout_id or 0)
        return gate

    def config_at(self, rollout_id: int) -> GateConfig:
        """The config that the schedule gives for a rollout, by its number and by the last measured
        bad-format rate.
        """
        return self.config.at(rollout_id, self._bad_format_rate())

    def _bad_format_rate(self) -> float | None:
        history = self._history.last(evaluation=False)
        return history[-1].rate_of(InvalidReason.BAD_FORMAT) if history else None

    def run(
        self,
        samples: Sequence[Any],
        rollout_id: int,
        *,
        evaluation: bool = False,
        iteration_seconds: float | None = None,
        dropped_groups: DroppedGroups = (),
    ) -> PostprocessResult:
        """Judges the whole scored batch of one rollout; returns new samples, statistics and alarms,
        after recording them.

        evaluation: report only; samples come back unmarked and only sane scores are expected of
        them. iteration_seconds: length of an iteration (the last complete one will do), for the
        gate's share of it. dropped_groups: (reason, samples) of what the rollout dropped itself;
        they are no part of the batch and of its statistics, only of the raw snapshot.
        """
        started = time.perf_counter()
        rewards_expected = evaluation or self._rewards_in_samples
        config = dataclasses.replace(
            self.config_at(rollout_id), rewards_expected=rewards_expected, evaluation=evaluation
        )
        if evaluation or self.tally.compares_all(rollout_id):
            config = dataclasses.replace(config, compare_every=1)
        if evaluation:
            config = dataclasses.replace(config, reward_key=config.eval_reward_key)
        history = self._history.last(evaluation=evaluation)
        samples = adapt(samples, config)
        outcome = self._judge(samples, config)
        if config.compare_every > 1 and outcome.counts.get(SHIFTED_IDS, 0):
            self.tally.found_shifted_ids = True
            config = dataclasses.replace(config, compare_every=1)
            outcome = self._judge(samples, config)
        result = assemble(samples, outcome, config, previous=history)
        statistics = result.statistics.with_iteration(iteration_seconds).with_elapsed(
            time.perf_counter() - started
        )
        if not evaluation:
            statistics = statistics.with_early_check(*self.tally.take())
            self.tally.reached(rollout_id + 1, statistics.rate_of(InvalidReason.BAD_FORMAT))
        self._history.add(rollout_id, statistics, evaluation=evaluation)
        alarms = tuple(find_alarms(statistics, history))
        if not evaluation:
            alarms += tuple(find_level_alarms(*self._history.level_of_failures(), config.policy_of))
        if evaluation and self._saved is not None and self._saved[1] == rollout_id - 1:
            # the evaluation of the weights in that checkpoint is part of what came before its
            # resume
            self.save(*self._saved)
        result = dataclasses.replace(result, statistics=statistics, alarms=alarms)
        self._report(result, rollout_id, evaluation, config)
        if self.snapshots is not None and not evaluation:
            self.snapshots.submit(rollout_id, samples, result.verdicts, dropped_groups)
        return result

    def _judge(self, samples: Sequence[Any], config: GateConfig) -> Outcome:
        if 0 < self._parallel_above < len(samples):
            return judge_in_parallel(samples, config, self._tokenizer)
        return judge(samples, config, codec_of(self._tokenizer, config))

    def save(self, folder: str | Path, rollout_id: int) -> None:
        """Writes, into a checkpoint folder, what this gate remembers with rollout `rollout_id` the
        last one trained. A full disk is logged.
        """
        self._saved = (folder, rollout_id)
        path = history_path(folder, rollout_id)
        try:
            self._history.write(path, rollout_id)
        except OSError as error:
            logger.error(
                "rollout %d: the gate's history could not be written to %s: %s",
                rollout_id,
                path,
                error,
            )

    def load(self, folder: str | Path, rollout_id: int) -> None:
        """Remembers what `save` wrote after rollout `rollout_id`, so that the next rollout gets the
        record, the drift, the alarms and the level that it would have had without the interruption.
        What is missing or damaged is warned about once and left out.
        """
        missing = self._history.read(history_path(folder, rollout_id), rollout_id)
        if missing is not None:
            logger.warning(
                "drift and alarms of the rollouts after %d compare with less than they could: %s",
                rollout_id,
                missing,
            )
        self.tally.reached(rollout_id + 1, self._bad_format_rate())

    def keep(self, folder: str | Path, rollout_id: int) -> dict[str, Any]:
        """Writes the history into `folder`, and returns the rest of what another process needs to
        go on in place of this one, as JSON-able values.
        """
        self._history.write(history_path(folder, rollout_id), rollout_id)
        return {
            "saved": None if self._saved is None else [str(self._saved[0]), self._saved[1]],
            "warned_at": self._warned_at,
            "found_shifted_ids": self.tally.found_shifted_ids,
            "first_rollout": self.tally.first_rollout_id,
            "recorded": 0 if self._writer is None else size_of(self._writer.path),
        }

    def go_on(self, folder: str | Path, rollout_id: int, kept: Mapping[str, Any]) -> None:
        """Restores what `keep` wrote and returned. Records of later rollouts are removed: these are
        judged again.
        """
        if self._writer is not None and size_of(self._writer.path) > kept["recorded"]:
            os.truncate(self._writer.path, kept["recorded"])
        self.tally.started(kept["first_rollout"])
        self.load(folder, rollout_id)
        self.tally.found_shifted_ids = kept["found_shifted_ids"]
        self._saved = None if kept["saved"] is None else (kept["saved"][0], kept["saved"][1])
        self._warned_at = dict(kept["warned_at"])

    def metrics(self, result: PostprocessResult) -> dict[str, float]:
        """gate/... numbers of a result, with gate/alarm/<name> = 1 for each alarm."""
        return {
            **result.statistics.to_metrics(),
            **{f"gate/alarm/{alarm.name}": 1 for alarm in result.alarms},
        }

    def record_placement(self, rollout_id: int, raw_rows: Sequence[int], plan: SplitPlan) -> None:
        """Writes where each row of the train data went; `raw_rows` [N]: the raw row of each."""
        if self.snapshots is not None:
            self.snapshots.submit_placement(rollout_id, raw_rows, plan)

    def close(self) -> None:
        """Waits for snapshots that are being written."""
        if self.snapshots is not None:
            self.snapshots.close()
        if self._writer is not None:
            self._writer.close()

    def _is_repeated(self, alarm: Alarm, rollout_id: int) -> bool:
        """True for an alarm about a level that lasts, and was warned about within the last window
        of rollouts; the record has it every time.
        """
        if alarm.subject is None:
            return False
        last = self._warned_at.get(alarm.subject)
        if last is not None and 0 <= rollout_id - last < self._history.window:
            return True
        self._warned_at[alarm.subject] = rollout_id
        return False

    def _report(
        self, result: PostprocessResult, rollout_id: int, evaluation: bool, config: GateConfig
    ) -> None:
        kind = "evaluation" if evaluation else "rollout"
        logger.info("%s %d %s", kind, rollout_id, result.statistics.summary())
        for alarm in result.alarms:
            if not self._is_repeated(alarm, rollout_id):
                logger.warning(
                    "%s %d gate alarm [%s]: %s", kind, rollout_id, alarm.name, alarm.message
                )
        if self._writer is None:
            return
        record = {
            "rollout_id": rollout_id,
            "evaluation": evaluation,
            "level": config.level.value,
            **result.statistics.to_record(),
            "alarms": [dataclasses.asdict(alarm) for alarm in result.alarms],
        }
        try:
            self._writer.write(record)
        except OSError as error:
            logger.error(
                "%s %d: the gate's record could not be written to %s: %s",
                kind,
                rollout_id,
                self._writer.path,
                error,
            )


def history_path(folder: str | Path, rollout_id: int) -> Path:
    """Where a checkpoint folder keeps what the gate remembers after a rollout: beside the data
    position.
    """
    return Path(folder) / "rollout" / f"gate_history_{rollout_id}.jsonl"


def gate_config_from_args(
    args: argparse.Namespace, tokenizer: Tokenizer | None = None
) -> GateConfig:
    """The frozen config behind the --gate-* options. ConfigError names the option that is wrong and
    what it takes.
    """
    custom_text = args.custom_generate_function_path is not None
    text_source = (
        args.gate_text_source
        if args.gate_text_source != "auto"
        else ("engine" if custom_text else "tokens")
    )
    debugging = args.ci_test or args.debug_rollout_only
    uses_log_probs = args.use_rollout_logprobs or args.use_tis or args.get_mismatch_metrics
    missing = args.gate_missing_log_probs
    if missing == "auto":
        missing = "error" if uses_log_probs else "allow"
    num_samples = (args.rollout_batch_size or 1) * args.n_samples_per_prompt
    return GateConfig(
        policies=_policies(args),
        failure_reward=args.gate_failure_reward,
        level=Level(args.gate_level),
        levels={
            name: _member(Level, level, "--gate-levels")
            for name, level in (args.gate_levels or {}).items()
        },
        schedule=tuple(parse_schedule_step(text) for text in args.gate_schedule or ()),
        min_response_tokens=args.gate_min_response_tokens,
        max_response_tokens=args.gate_max_response_tokens,
        context_length=args.rollout_max_context_len,
        margin=args.gate_context_margin,
        vocab_size=args.vocab_size,
        eos_token_ids=_end_ids(args),
        text_source=text_source,
        compare_text=args.gate_compare_text == "on"
        or (args.gate_compare_text == "auto" and (debugging or text_source == "tokens")),
        compare_unasked=args.gate_compare_text == "auto" and not debugging,
        compare_every=1
        if debugging or args.gate_compare_text == "on"
        else max(1, num_samples // COMPARED_SAMPLES),
        correct_text=args.gate_correct_text,
        hide_special_tokens=args.rollout_skip_special_tokens,
        keep_special_tokens=tuple(args.gate_keep_special_tokens or ()),
        stop_strings=tuple(args.rollout_stop or ()),
        format=_format(
            args.gate_format_spec if args.gate_format_spec is not None else args.gate_format
        ),
        tasks={name: _task_rules(name, rules) for name, rules in (args.gate_tasks or {}).items()},
        missing_log_probs=MissingLogProbs(missing),
        repetition_window=args.gate_repetition_window,
        repetition_max_period=args.gate_repetition_max_period,
        reward_key=args.reward_key,
        eval_reward_key=args.eval_reward_key,
        engine_version=engine_version(),
        tokenizer_version=tokenizer_version(tokenizer),
    )


def _end_ids(args: argparse.Namespace) -> frozenset[int]:
    """Every id at which the engine ends a response: the checkpoint's and the stop ids of the
    options.
    """
    of_model = read_eos_token_ids(args.hf_checkpoint) if args.hf_checkpoint else ()
    return frozenset([*of_model, *(args.rollout_stop_token_ids or ())])


def parse_schedule_step(text: str) -> ScheduleStep:
    """`100:lenient` (from rollout 100 on) or `rate<0.02:lenient` (once the bad-format rate is below
    0.02).
    """
    condition, _, level = text.partition(":")
    try:
        if condition.startswith("rate<"):
            return ScheduleStep(Level(level), below_rate=float(condition[5:]))
        return ScheduleStep(Level(level), rollout_id=int(condition))
    except ValueError as error:
        raise ConfigError(
            f"--gate-schedule '{text}' is not understood ({error}). Use 100:lenient or "
            "rate<0.02:lenient."
        ) from error


def engine_version() -> str:
    """SGLang's version where it is installed, else the embedded engine's, i.e. torch's."""
    for package in ("sglang", "torch"):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def tokenizer_version(tokenizer: Tokenizer | None) -> str | None:
    """Class and vocabulary size of the tokenizer and the version of the library it comes from; None
    for None.
    """
    if tokenizer is None:
        return None
    package = type(tokenizer).__module__.partition(".")[0]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "local"
    return f"{type(tokenizer).__name__}({len(tokenizer)}) {package} {version}"


def _policies(args: argparse.Namespace) -> dict[InvalidReason, Policy]:
    general = Policy(args.gate_policy)
    others = Policy.MARK if general is Policy.PENALIZE else general
    policies = {reason: general if reason in PENALIZABLE else others for reason in REASONS}
    if args.gate_keep_truncated:
        policies[InvalidReason.TRUNCATED] = Policy.KEEP
    for name, policy in (args.gate_policies or {}).items():
        if name not in REASON_OF_VALUE:
            raise ConfigError(
                f"--gate-policies names the reason '{name}'. Known: {sorted(REASON_OF_VALUE)}."
            )
        policies[REASON_OF_VALUE[name]] = _member(Policy, policy, "--gate-policies")
        if policies[REASON_OF_VALUE[name]] is Policy.KEEP and REASON_OF_VALUE[name] in NEVER_KEPT:
            raise ConfigError(
                f"--gate-policies cannot keep '{name}': such a sample cannot be trained. Use mark "
                "or drop."
            )
        if (
            policies[REASON_OF_VALUE[name]] is Policy.PENALIZE
            and REASON_OF_VALUE[name] not in PENALIZABLE
        ):
            raise ConfigError(
                f"--gate-policies cannot penalize '{name}'. It can penalize "
                f"{sorted(reason.value for reason in PENALIZABLE)}, which the model wrote and "
                "which "
                "can be trained. Use mark or drop."
            )
    return policies


def _member(kind: type[enum.Enum], value: object, flag: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(
            f"{flag}: '{value}' is not one of {[member.value for member in kind]}."
        ) from error


def _format(spec: object) -> FormatSpec | None:
    if isinstance(spec, Mapping):
        return FormatSpec.from_dict(spec)
    if spec not in FORMAT_PRESETS:
        raise ConfigError(
            f"Gate format '{spec}' is unknown. Known: {sorted(FORMAT_PRESETS)}, or a JSON object."
        )
    return FORMAT_PRESETS[spec]


def _task_rules(name: str, rules: Mapping[str, Any]) -> TaskRules:
    known = {"min_response_tokens", "max_response_tokens", "keep_truncated", "format"}
    if not isinstance(rules, Mapping) or set(rules) - known:
        raise ConfigError(
            f"--gate-tasks: rules of '{name}' are {rules!r}; they must be an object with keys "
            f"among {sorted(known)}."
        )
    structure = _format(rules["format"]) if "format" in rules else None
    plain = {key: value for key, value in rules.items() if key != "format"}
    return TaskRules(**plain, format=structure, skip_format="format" in rules and structure is None)
