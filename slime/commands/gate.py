"""`slime gate COMMAND`: applies the gate to a recorded rollout (a dump of samples) or a run, and
reports what it finds.

    slime gate check DUMP      run the gate on a dump, print reasons; exit status 1 if the share of
                               invalid samples exceeds --max-drop-rate
    slime gate ends DUMP       valid samples with the lowest and the highest rewards
    slime gate align DUMP      texts that differ from their tokens, with the cause; exit status 1 if
                               there are any
    slime gate groups DUMP     group sizes and mixed prompts; with --against RAW also membership;
                               exit status 1 on a problem
    slime gate suggest DUMP    thresholds measured on the dump; of a run folder, on its last
                               snapshot. --apply also writes them into
                               gate_options.yaml beside it, which --config takes
    slime gate doctor RUN      the first three steps when the loss spikes

All --gate-* options of training are understood; --rollout-id N (default 0) says where on a
--gate-schedule the dump stands. --hf-checkpoint FOLDER gives the tokenizer. For a run folder, and
for a snapshot in one, what is not given is taken from the run's config.yaml. Of a raw snapshot the
batch is read; --with-dropped adds what the rollout dropped before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.config.cli import OptionParser, build_parser, describe_unknown, format_help
from slime.config.specs import all_specs
from slime.config.yaml_file import read_option_file
from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.jsonl import read_jsonl
from slime.files.rollout_dump import read_rollout_dump
from slime.files.sample_table import samples_of
from slime.files.tables import read_table
from slime.gate import tools
from slime.gate.alignment import Codec, codec_of
from slime.gate.config import GateConfig
from slime.gate.gate import RECORD_FILE, gate_config_from_args
from slime.gate.integrity_checks import reward_problem
from slime.gate.judge import postprocess_output_data
from slime.gate.tables import samples_as_sent
from slime.utils import processing_utils

COMMANDS = ("check", "ends", "align", "groups", "suggest", "doctor")
_SHARED_OPTIONS = (
    "hf_checkpoint",
    "reward_key",
    "rollout_max_context_len",
    "rollout_stop",
    "rollout_skip_special_tokens",
    "vocab_size",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one gate command and returns its exit status: 0 fine, 1 a finding, 2 a command line that
    cannot be.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    command = words[0]
    if command not in COMMANDS:
        print(
            f"error: unknown gate command {command!r}. Commands: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    if any(word in ("-h", "--help") for word in words[1:]):
        print(__doc__)
        print(
            format_help(
                [spec for spec in all_specs() if _is_ours(spec.name)],
                usage=f"slime gate {command} DUMP [OPTIONS]",
            )
        )
        return 0
    own, rest = _own_parser(command).parse_known_args(words[1:])
    if own.apply and command != "suggest":
        raise ConfigError(
            f"--apply is an option of `slime gate suggest`, not of `slime gate {command}`."
        )
    if own.num < 1 or not 0 <= own.max_drop_rate <= 1:
        raise ConfigError(
            f"--num {own.num} must be >= 1 and --max-drop-rate {own.max_drop_rate} between 0 and 1."
        )
    args = with_recorded_options(_gate_args(rest), own.path)
    try:
        return _RUN[command](own, args)
    except (OSError, ValueError) as error:
        raise ConfigError(f"slime gate {command}: {error}") from error


def _own_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"slime gate {command}", add_help=False, allow_abbrev=False
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--max-drop-rate", type=float, default=0.5)
    parser.add_argument("--num", type=int, default=5)
    parser.add_argument("--against", type=Path, default=None)
    parser.add_argument("--rollout-id", type=int, default=0)
    parser.add_argument("--with-earlier-verdicts", action="store_true")
    parser.add_argument("--with-dropped", action="store_true")
    parser.add_argument("--apply", action="store_true")
    return parser


def _is_ours(name: str) -> bool:
    return name.startswith("gate_") or name in _SHARED_OPTIONS


def _gate_args(words: list[str]) -> Any:
    """A namespace of the gate's options; the other options have their defaults, as in training."""
    parser: OptionParser = build_parser(all_specs())
    args, unknown = parser.parse_known_args(words)
    flags = [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if _is_ours(action.dest)
    ]
    problems = [*parser.value_problems, *describe_unknown(unknown, flags)]
    if problems:
        raise ConfigError(" ".join(problems))
    return args


def run_folder_of(path: Path) -> Path | None:
    """Returns the run folder that `path` is or lies in (a snapshot is
    runs/<name>/gate/raw_*.parquet); None outside of one.
    """
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.yaml").is_file() and (
            (folder / RECORD_FILE).is_file() or (folder / "metrics.jsonl").is_file()
        ):
            return folder
    return None


def with_recorded_options(args: argparse.Namespace, path: Path) -> Any:
    """Returns `args`, with what the run that `path` belongs to was started with in place of
    defaults: tokenizer folder, gate, reward key.

    A recorded tokenizer folder that is not on this machine is left out.
    """
    folder = run_folder_of(path)
    if folder is None:
        return args
    specs = {spec.name: spec for spec in all_specs() if _is_ours(spec.name)}
    recorded = read_option_file(str(folder / "config.yaml"), specs, strict=False).known
    changed = {
        name: value
        for name, value in recorded.items()
        if getattr(args, name) == specs[name].default and value is not None
    }
    if not Path(changed.get("hf_checkpoint", ".")).is_dir():
        print(
            f"the run's --hf-checkpoint {changed.pop('hf_checkpoint')} is not here", file=sys.stderr
        )
    return argparse.Namespace(**{**vars(args), **changed})


def load_samples(path: Path, *, with_dropped: bool = False) -> list[Sample]:
    """Samples of a rollout dump, or of a raw snapshot (.parquet), there with what the rollout
    dropped where that is asked for.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. Give a dump that --save-debug-rollout-data wrote, or a "
            "raw_*.parquet snapshot."
        )
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder. Give a dump in it, or a snapshot: a run's are gate/raw_*.parquet "
            "in its folder."
        )
    if path.suffix == ".parquet":
        return read_snapshot(path, with_dropped=with_dropped)
    return read_rollout_dump(path)


def read_snapshot(path: Path, *, with_dropped: bool = False) -> list[Sample]:
    """The raw samples of a snapshot's batch, or of the samples part of a recording, as the engine
    sent them, in row order; `with_dropped` also those that the rollout dropped, which stand behind.
    Of a rollout dump its samples as they are.
    """
    table = read_table(path, what="raw snapshot")
    try:
        if "raw_row" not in table.column_names:  # a rollout dump
            return samples_of(table)
        return samples_as_sent(table, with_dropped=with_dropped)
    except RolloutDataError as error:
        raise RolloutDataError(f"{path}: {error}") from error


def _tokenizer(args: argparse.Namespace) -> Any:
    if args.hf_checkpoint is None:
        return None
    return processing_utils.load_tokenizer(args.hf_checkpoint)


def _codec(args: argparse.Namespace, config: GateConfig) -> Codec:
    tokenizer = _tokenizer(args)
    if tokenizer is None:
        raise ConfigError(
            "this command decodes tokens: give --hf-checkpoint FOLDER, the folder with the "
            "tokenizer."
        )
    codec = codec_of(tokenizer, config)
    assert codec is not None, "only a missing tokenizer has no codec"
    return codec


def _check(own: argparse.Namespace, args: argparse.Namespace) -> int:
    samples, tokenizer = load_samples(own.path, with_dropped=own.with_dropped), _tokenizer(args)
    scored = any(reward_problem(sample.reward, args.reward_key) is None for sample in samples)
    config = dataclasses.replace(
        gate_config_from_args(args, tokenizer).at(own.rollout_id),
        rewards_expected=scored,
        compare_text=tokenizer is not None and args.gate_compare_text != "off",
        trust_earlier_verdicts=own.with_earlier_verdicts,
    )
    result = postprocess_output_data(samples, config, tokenizer=tokenizer)
    print("\n".join(tools.reason_table(result)))
    print(result.statistics.summary())
    if 2 * result.statistics.counts.get("cause_special_tokens", 0) > len(samples):
        print(
            "Most texts differ from their tokens in special tokens alone: give "
            "--rollout-skip-special-tokens if the run had it, leave it out if not."
        )
    return int(result.statistics.drop_rate > own.max_drop_rate)


def _ends(own: argparse.Namespace, args: argparse.Namespace) -> int:
    samples = load_samples(own.path, with_dropped=own.with_dropped)
    low, high = tools.reward_ends(samples, own.num, reward_key=args.reward_key)
    for title, positions in (("lowest rewards", low), ("highest rewards", high)):
        print(title)
        for position in positions:
            sample = samples[position]
            print("\n".join(tools.describe_end(position, sample)))
    print(
        "\n".join(
            [*tools.reward_shape(samples, reward_key=args.reward_key), tools.HOW_TO_READ_ENDS]
        )
    )
    return 0


def _align(own: argparse.Namespace, args: argparse.Namespace) -> int:
    config = gate_config_from_args(args)
    samples = load_samples(own.path, with_dropped=own.with_dropped)
    found = tools.find_mismatches(samples, _codec(args, config), stop_strings=config.stop_strings)
    for mismatch in found[: own.num]:
        print("\n".join(tools.describe_mismatch(mismatch)))
    causes = {cause.value: sum(m.cause is cause for m in found) for cause in tools.ADVICE_OF_CAUSE}
    print(f"{len(found)} of {len(samples)} texts differ from their tokens: {causes}")
    return int(bool(found))


def _groups(own: argparse.Namespace, args: argparse.Namespace) -> int:
    samples = load_samples(own.path, with_dropped=own.with_dropped)
    config = dataclasses.replace(gate_config_from_args(args), text_source="engine")
    groups = postprocess_output_data(samples, config).statistics.groups()
    print(
        f"{groups['count']} groups, sizes {groups['sizes']}, {groups['ungrouped']} samples without "
        "a group"
    )
    print(
        f"{groups['without_valid']} groups without a valid sample, {groups['with_one_valid']} with "
        "one"
    )
    problems = [f"group {group} holds samples of different prompts" for group in groups["mixed"]]
    if own.against is not None:
        problems += tools.compare_groups(samples, load_samples(own.against, with_dropped=True))
    print("\n".join(problems) or "no problem found")
    return int(bool(problems))


def _suggest(own: argparse.Namespace, args: argparse.Namespace) -> int:
    path = _last_snapshot(own.path) if own.path.is_dir() else own.path
    samples = load_samples(path, with_dropped=own.with_dropped)
    suggestion = tools.suggest_thresholds(samples, context_length=args.rollout_max_context_len)
    print(f"# measured on {suggestion.num_measured} responses that ended by themselves")
    print(
        f"--gate-min-response-tokens {suggestion.min_response_tokens} --gate-max-response-tokens "
        f"{suggestion.max_response_tokens} "
        f"--gate-context-margin {suggestion.margin}"
    )
    if own.apply:
        target = (own.path if own.path.is_dir() else own.path.parent) / "gate_options.yaml"
        target.write_text(
            f"# measured on {suggestion.num_measured} responses of {path.name} that ended by "
            "themselves\n"
            f"gate_min_response_tokens: {suggestion.min_response_tokens}\n"
            f"gate_max_response_tokens: {suggestion.max_response_tokens}\n"
            f"gate_context_margin: {suggestion.margin}\n",
            encoding="utf-8",
        )
        print(
            f"written to {target}: give it as --config, or copy its lines into the run's own "
            "options file"
        )
    return 0


def _snapshots(run: Path) -> list[Path]:
    """A run's raw snapshots and the samples of its recording, the last one written last: a resumed
    run writes lower numbers than those that the run before it left.
    """
    found = [*(run / "gate").glob("raw_*.parquet"), *_recorded_samples(run)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _recorded_samples(run: Path) -> list[Path]:
    """The samples of the rollouts in the recording that the run's config.yaml names."""
    path = run / "config.yaml"
    if not path.is_file():
        return []
    option = {spec.name: spec for spec in all_specs() if spec.name == "record"}
    folder = read_option_file(str(path), option, strict=False).known.get("record")
    return [] if folder is None else list(Path(folder).glob("rollout_*/samples.parquet"))


def _name_of(snapshot: Path) -> str:
    is_recorded = snapshot.name == "samples.parquet"
    return f"{snapshot.parent.name}/{snapshot.name}" if is_recorded else snapshot.name


def _last_snapshot(run: Path) -> Path:
    found = _snapshots(run)
    if not found:
        raise ConfigError(
            f"{run} has no raw snapshot of the gate (gate/raw_*.parquet) and names no recording. "
            "Give a dump, or run with --gate-snapshots above 0 or --record."
        )
    return found[-1]


def _doctor(own: argparse.Namespace, args: argparse.Namespace) -> int:
    path = own.path / RECORD_FILE
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give the folder of a run (runs/<name>).")
    records, malformed = read_jsonl(path)
    if malformed:
        print(f"{malformed} lines of {path} could not be read")
    print("\n".join(tools.diagnose_records(records)))
    snapshots = _snapshots(own.path)
    if not snapshots:
        print("(3) alignment: no raw snapshot in this run (--gate-snapshots, --record)")
        return 0
    samples = read_snapshot(snapshots[-1])
    print(
        "\n".join(f"    {line}" for line in tools.reward_shape(samples, reward_key=args.reward_key))
    )
    if args.hf_checkpoint is None:
        print(
            f"(3) alignment of {_name_of(snapshots[-1])}: give --hf-checkpoint FOLDER to compare "
            f"{own.num} samples with their tokens"
        )
        return 0
    config = gate_config_from_args(args)
    chosen = samples[:: max(1, len(samples) // own.num)][: own.num]
    found = tools.find_mismatches(chosen, _codec(args, config), stop_strings=config.stop_strings)
    print(
        f"(3) alignment of {_name_of(snapshots[-1])}: {len(found)} of {len(chosen)} samples differ "
        "from their tokens"
    )
    for mismatch in found:
        print("\n".join(tools.describe_mismatch(mismatch)))
    return int(bool(found))


_RUN = {
    "check": _check,
    "ends": _ends,
    "align": _align,
    "groups": _groups,
    "suggest": _suggest,
    "doctor": _doctor,
}


if __name__ == "__main__":
    raise SystemExit(main())
