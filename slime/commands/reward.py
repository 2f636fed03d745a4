"""`slime rewards check` and `slime rescore`: check the reward function, before a run on its prompts
and after it on a dump.

    slime rewards check --prompt-data F --rm-type T grade each label against itself and against
    obvious wrong answers; names the rows
                                                        that can never be right; exit status 1 if
                                                        there are any
    slime rescore DUMP --custom-rm-path f | --rm-type T score a rollout dump (or a raw snapshot of
    the gate) again; the rows whose reward
                                                        changed; exit status 1 if there are any

`rewards check` takes the run's options for prompts, labels and rewards (--label-key,
--hf-checkpoint, --apply-chat-template, --rollout-stop, --reward-key ...), and --rows N to look at N
rows, evenly spaced, in place of all. `rescore` takes the options of rewards, and --num N (default
20), the rows that are shown. In both a row's own metadata.rm_type goes before --rm-type, as in
training.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.commands.gate import load_samples
from slime.commands.reward_probe import advice, describe_probes, probe_rows, sample_rows
from slime.config.cli import build_parser, describe_unknown, format_help
from slime.config.specs import all_specs
from slime.data.rewards import reward_number
from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.prompts.dataset import RowFormat, build_sample
from slime.prompts.prompt_files import read_rows
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.type_names import rm_type_problem
from slime.utils import processing_utils

_REWARD_OPTIONS = (
    "rm_type", "custom_rm_path", "group_rm", "reward_key", "rm_url", "rm_timeout", "grader_workers", "grader_timeout", "grader_max_length", "rollout_stop",
    "hf_checkpoint",
)  # fmt: skip
_PROMPT_OPTIONS = (
    "prompt_data", "input_key", "label_key", "tool_key", "metadata_key", "apply_chat_template", "apply_chat_template_kwargs", "rollout_skip_special_tokens",
)  # fmt: skip
SCORED_AT_ONCE = 256
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Rescored:
    """One sample's reward in the dump and now; NaN where there is none. `failure`: why there is
    none now.
    """

    position: int
    sample: Sample
    before: float
    after: float
    failure: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the two differ; no reward on both sides is no difference."""
        if math.isnan(self.before) or math.isnan(self.after):
            return math.isnan(self.before) != math.isnan(self.after)
        return abs(self.before - self.after) > TOLERANCE


def rewards(argv: Sequence[str] | None = None) -> int:
    """`slime rewards check`: 0 every row can be right, 1 some cannot, 2 a command line that cannot
    be.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or any(word in ("-h", "--help") for word in words):
        return _help(
            (*_PROMPT_OPTIONS, *_REWARD_OPTIONS),
            usage="slime rewards check [OPTIONS]",
            asked=bool(words),
        )
    if words[0] != "check":
        raise ConfigError(f"slime rewards has no command {words[0]!r}. Commands: check.")
    own_parser = argparse.ArgumentParser(
        prog="slime rewards check", add_help=False, allow_abbrev=False
    )
    own_parser.add_argument("--rows", type=int, default=None)
    own, rest = own_parser.parse_known_args(words[1:])
    if own.rows is not None and own.rows < 1:
        raise ConfigError(f"--rows {own.rows} must be at least 1.")
    args = _options(rest, (*_PROMPT_OPTIONS, *_REWARD_OPTIONS))
    if not args.prompt_data:
        raise ConfigError("slime rewards check needs --prompt-data FILE.")
    _require_reward(args, "slime rewards check")
    return check_prompt_file(args, num_rows=own.rows)


def check_prompt_file(args: argparse.Namespace, *, num_rows: int | None) -> int:
    """Grades the labels of --prompt-data and prints what was found. Returns the exit status."""
    if args.label_key is None:
        raise ConfigError(
            "the labels have no name: give --label-key, for instance --label-key label."
        )
    probes = asyncio.run(probe_rows(args, _rows_of(args, num_rows), _tokenizer_of(args)))
    if not probes:
        raise ConfigError(
            f"no row of {args.prompt_data} has a label that {args.custom_rm_path or args.rm_type} "
            "looks at."
        )
    print("\n".join(describe_probes(probes, shown=20)))
    never = any(probe.failure is None and not probe.can_be_right for probe in probes)
    if never:
        print(advice(None if args.custom_rm_path else args.rm_type))
    return int(never or any(probe.failure is not None for probe in probes))


def _rows_of(args: argparse.Namespace, num_rows: int | None) -> Iterator[tuple[str, Sample]]:
    tokenizer = _tokenizer_of(args)
    form = RowFormat(
        prompt_key=args.input_key,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        apply_chat_template=args.apply_chat_template and tokenizer is not None,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs or {},
    )
    rows = read_rows(args.prompt_data)
    for row in rows if num_rows is None else sample_rows(rows, num_rows):
        yield row.place, build_sample(row, form, tokenizer)


def _tokenizer_of(args: argparse.Namespace) -> Any:
    return processing_utils.shared_tokenizer(args.hf_checkpoint) if args.hf_checkpoint else None


def rescore(argv: Sequence[str] | None = None) -> int:
    """`slime rescore`: 0 no reward changed, 1 some did, 2 a command line that cannot be."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or any(word in ("-h", "--help") for word in words):
        return _help(_REWARD_OPTIONS, usage="slime rescore DUMP [OPTIONS]", asked=bool(words))
    parser = argparse.ArgumentParser(prog="slime rescore", add_help=False, allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--num", type=int, default=20)
    own, rest = parser.parse_known_args(words)
    if own.num < 1:
        raise ConfigError(f"--num {own.num} must be at least 1.")
    args = _options(rest, _REWARD_OPTIONS)
    _require_reward(args, "slime rescore")
    found = asyncio.run(rescore_samples(args, load_samples(own.path)))
    print("\n".join(describe_rescored(found, shown=own.num)))
    return int(any(one.is_changed for one in found))


async def rescore_samples(args: argparse.Namespace, samples: Sequence[Sample]) -> list[Rescored]:
    """Every sample that has a reward in the dump, scored again; groups together with --group-rm.
    The samples are not changed.
    """
    scored = [
        (position, sample) for position, sample in enumerate(samples) if sample.reward is not None
    ]
    fresh = []
    for _, sample in scored:
        one = copy.deepcopy(sample)
        one.reward = None
        if args.custom_rm_path:
            one.custom_rm_path = None
        fresh.append(one)
    values: list[Any] = []
    for batch in _batches(fresh, by_group=args.group_rm):
        if args.group_rm:
            values += await batched_async_rm(args, batch)
        else:
            values += await asyncio.gather(
                *(async_rm(args, sample) for sample in batch), return_exceptions=True
            )
    return [
        _rescored(args, position, sample, value)
        for (position, sample), value in zip(scored, values, strict=True)
    ]


def _batches(samples: list[Sample], *, by_group: bool) -> list[list[Sample]]:
    if by_group:
        return [
            list(group)
            for _, group in itertools.groupby(samples, key=lambda sample: sample.group_index)
        ]
    return [
        samples[start : start + SCORED_AT_ONCE] for start in range(0, len(samples), SCORED_AT_ONCE)
    ]


def _rescored(args: argparse.Namespace, position: int, sample: Sample, value: object) -> Rescored:
    if isinstance(value, ConfigError | NotImplementedError):
        raise ConfigError(str(value)) from value
    before = reward_number(sample.reward, args.reward_key, index=sample.index)
    if isinstance(value, BaseException):
        return Rescored(position, sample, before, math.nan, f"{type(value).__name__}: {value}")
    return Rescored(
        position, sample, before, reward_number(value, args.reward_key, index=sample.index)
    )


def describe_rescored(found: Sequence[Rescored], *, shown: int) -> list[str]:
    """Lines: how many rewards changed, the means, and the rows that did, each with label and the
    end of its response.
    """
    if not found:
        return ["no sample of the dump has a reward"]
    changed = [one for one in found if one.is_changed]
    lines = [
        f"{len(changed)} of {len(found)} rewards changed: "
        f"{sum(one.after > one.before for one in changed)} rose, "
        f"{sum(one.after < one.before for one in changed)} fell, "
        f"{sum(one.failure is not None for one in changed)} have none now; "
        f"mean {_mean([one.before for one in found])} -> {_mean([one.after for one in found])}"
    ]
    for one in changed[:shown]:
        sample = one.sample
        after = one.failure or f"{one.after:g}"
        lines.append(
            f"  #{one.position} group {sample.group_index} index {sample.index}: {one.before:g} -> "
            f"{after}; label {str(sample.label)[:80]!r}; "
            f"response ends {str(sample.response)[-120:]!r}"
        )
    return lines + [f"  ... and {len(changed) - shown} more (--num)"] * (len(changed) > shown)


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    return f"{math.fsum(known) / len(known):.4f}" if known else "-"


def _require_reward(args: argparse.Namespace, command: str) -> None:
    if args.rm_type is None and args.custom_rm_path is None:
        raise ConfigError(
            f"{command} needs the reward function: --rm-type NAME or --custom-rm-path "
            "MODULE.FUNCTION."
        )
    if problem := rm_type_problem(args.rm_type):
        raise ConfigError(f"--rm-type {problem}")


def _options(words: list[str], names: Sequence[str]) -> argparse.Namespace:
    """A namespace of the run's options, those in `names` from the command line, the others with
    their defaults.
    """
    parser = build_parser(all_specs())
    args, unknown = parser.parse_known_args(words)
    flags = [
        flag for action in parser._actions for flag in action.option_strings if action.dest in names
    ]
    problems = [*parser.value_problems, *describe_unknown(unknown, flags)]
    if problems:
        raise ConfigError(" ".join(problems))
    return args


def _help(names: Sequence[str], *, usage: str, asked: bool) -> int:
    print(__doc__)
    if asked:
        print(format_help([spec for spec in all_specs() if spec.name in names], usage=usage))
    return 0 if asked else 2
