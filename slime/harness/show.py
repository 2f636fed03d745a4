"""`slime show`: a recording, a recorded rollout or a rollout dump; one sample token by token, with
what the trainer computed for it.

    slime show RECORDING                               its rollouts: parts, sizes, completeness
    slime show RECORDING --verify                      also reads every part; status 1 for damage
    slime show RECORDING/rollout_000000                one line per sample, with its number
    slime show RECORDING/rollout_000000 12             prompt, response, label, reward, group,
                                                       verdict; then a line per response token
    slime show runs/latest/dumps/rollout_data/7.parquet 12      the same of a dump

The trainer's numbers come from the recording, or from the train dump of the same rollout
(--train-dump, else train_data/7.parquet beside the folder rollout_data); the texts from the
recorded tokenizer, or from the one that the run's config.yaml names (--hf-checkpoint, else the
config.yaml above the dump).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.files.rollout_dump import is_rollout_dump, read_rollout_dump
from slime.files.train_dump import read_train_dump
from slime.harness.consistency_report import decoder_of, print_plain, printable, read_config
from slime.harness.json_text import json_text
from slime.harness.show_recording import (
    overview,
    recorded_at,
    shown_samples,
    starts,
    trained_of,
    verdict_of,
)
from slime.recording.reader import RecordedRollout, Recording

TOKEN_HEAD = ["token", "id", "text", "mask", "engine", "trainer", "difference", "advantage"]
LIST_HEAD = ["sample", "group", "reward", "tokens", "status", "valid", "label", "response"]
SHORT = 48


@dataclasses.dataclass(frozen=True)
class TokenRow:
    """One response token. None: not recorded."""

    token: int
    id: int
    text: str | None
    mask: int
    engine: float | None
    trainer: float | None
    advantage: float | None


def token_rows(
    sample: Sample, trained: dict[str, Any] | None, decode: Callable[[list[int]], str] | None
) -> list[TokenRow]:
    """One row per response token of a sample; `trained` are its fields in the train dump.
    RolloutDataError where lengths contradict.
    """
    length = sample.response_length
    ids = [int(token) for token in list(sample.tokens)[len(sample.tokens) - length :]]

    def column(name: str, values: Iterable[Any] | None) -> list[Any]:
        if values is None:
            return [None] * length
        values = list(values)
        if len(values) != length:
            raise RolloutDataError(
                f"sample {sample.index}: {len(values)} {name} for {length} response tokens."
            )
        return values

    trained = trained or {}
    masks = column("loss mask entries", trained.get("loss_masks", sample.loss_mask))
    engine = column("rollout log-probs", sample.rollout_log_probs)
    trainer = column("trainer log-probs", trained.get("log_probs"))
    advantages = column("advantages", trained.get("advantages"))
    return [
        TokenRow(
            token=number,
            id=token,
            text=None if decode is None else decode([token]),
            mask=1 if mask is None else int(mask),
            engine=None if at_engine is None else float(at_engine),
            trainer=None if at_trainer is None else float(at_trainer),
            advantage=None if advantage is None else float(advantage),
        )
        for number, (token, mask, at_engine, at_trainer, advantage) in enumerate(
            zip(ids, masks, engine, trainer, advantages, strict=True)
        )
    ]


def chosen(samples: Sequence[Sample], index: int, path: Path) -> list[int]:
    """Positions of the samples with that index (several where one execution emitted several).
    RolloutDataError that says which there are.
    """
    found = [position for position, sample in enumerate(samples) if sample.index == index]
    if not found:
        known = sorted({sample.index for sample in samples if sample.index is not None})
        span = f"; it has {len(known)} from {known[0]} to {known[-1]}" if known else ""
        raise RolloutDataError(
            f"{path} has no sample {index}{span}. The number is Sample.index; without --sample all "
            "are listed."
        )
    return found


def trained_fields(path: Path | None, position: int, sample: Sample) -> dict[str, Any] | None:
    """What the trainer recorded of the sample at that position of the rollout's batch; None where
    there is no dump, or it did not train.
    """
    if path is None:
        return None
    dump = read_train_dump(path)
    for i, where in enumerate(dump.positions.tolist()):
        fields = dump.sample(i)
        if (
            where == position
            and int(cast(int, fields.get("sample_indices", sample.index))) == sample.index
        ):
            return fields
    return None


def train_dump_beside(path: Path) -> Path | None:
    """train_data/<rollout>.parquet, or .safetensors, of a dump in rollout_data, where it exists."""
    folder = path.parent.parent / "train_data"
    files = [folder / f"{path.stem}{suffix}" for suffix in (".parquet", ".safetensors")]
    return next((file for file in files if file.is_file()), None)


def model_of(path: Path) -> str | None:
    """--hf-checkpoint of the run in whose folder the dump lies; None where no config.yaml is above
    it.
    """
    for folder in list(path.absolute().parents)[:4]:
        if (folder / "config.yaml").is_file():
            found = read_config(folder).get("hf_checkpoint")
            return None if found is None else str(found)
    return None


def format_number(value: float | None) -> str:
    """A log-prob or advantage; "-" where there is none."""
    return "-" if value is None else f"{value:.5g}"


def format_sample(sample: Sample) -> list[str]:
    """What concerns the sample as a whole, one fact per line; control characters are
    spelled out.
    """
    prompt = (
        sample.prompt
        if isinstance(sample.prompt, str)
        else json.dumps(sample.prompt, ensure_ascii=False, default=str)
    )
    facts = {
        "prompt": printable(prompt),
        "response": printable(sample.response or ""),
        "label": printable(str(sample.label)),
        "reward": printable(str(sample.reward)),
        "group": f"{sample.group_index}, rollout id {sample.rollout_id}",
        "status": f"{sample.status.value}, "
        + ("valid" if sample.valid else f"invalid: {printable(str(sample.invalid_reason))}")
        + (", removed by a filter" if sample.remove_sample else ""),
        "tokens": (
            f"{len(sample.tokens) - sample.response_length} prompt + "
            f"{sample.response_length} response"
        ),
        "weights": ", ".join(dict.fromkeys(map(str, sample.weight_versions))) or "-",
    }
    return [f"{name:9} {text}" for name, text in facts.items()]


def list_rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Head and one row per sample."""
    return [
        LIST_HEAD,
        *(
            [
                str(sample.index),
                str(sample.group_index),
                printable(str(sample.reward))[:SHORT],
                str(sample.response_length),
                sample.status.value,
                "yes" if sample.valid else printable(str(sample.invalid_reason)),
                printable(str(sample.label))[:SHORT],
                printable(sample.response or "")[:SHORT],
            ]
            for sample in samples
        ),
    ]


def table_of(rows: Sequence[TokenRow]) -> list[list[str]]:
    """Head and rows of the table of tokens."""
    table = [TOKEN_HEAD]
    for row in rows:
        gap = None if row.engine is None or row.trainer is None else row.trainer - row.engine
        text = "-" if row.text is None else f"'{printable(row.text)}'"
        numbers = (row.engine, row.trainer, gap, row.advantage)
        table.append(
            [str(row.token), str(row.id), text, str(row.mask), *map(format_number, numbers)]
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is in a recording or a dump; returns 1 for damage that it found, 2, with the
    reason, for what cannot be shown.
    """
    parser = argparse.ArgumentParser(
        prog="slime show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dump",
        type=Path,
        help="A recording of --record, a rollout's folder in it, or a rollout dump.",
    )
    parser.add_argument("index", type=int, nargs="?", default=None, help="The same as --sample.")
    parser.add_argument(
        "--sample",
        type=int,
        default=None,
        help="Sample.index of the sample to show. Default: list all.",
    )
    parser.add_argument(
        "--train-dump",
        type=Path,
        default=None,
        help="Train dump of the same rollout. Default: the one beside.",
    )
    parser.add_argument(
        "--hf-checkpoint", default=None, help="Folder with the tokenizer. Default: the run's."
    )
    parser.add_argument(
        "--verify", action="store_true", help="Read every part of a recording and check its hash."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object per sample.")
    options = parser.parse_args(argv)
    if options.sample is None:
        options.sample = options.index
    try:
        found = recorded_at(options.dump)
        if isinstance(found, Recording):
            return _show_recording(found, options, sys.stdout)
        if found is None:
            show(options, sys.stdout)
        else:
            _show_rollout(found, options, sys.stdout)
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _show_recording(recording: Recording, options: argparse.Namespace, stream: TextIO) -> int:
    if options.sample is not None:
        raise ConfigError(
            f"{recording.root} is a recording; name a rollout in it: "
            f"{recording.root}/rollout_{(recording.rollouts or [0])[-1]:06d} {options.sample}"
        )
    if options.json:
        raise ConfigError("--json prints samples: name a rollout of the recording, or a dump.")
    rows, damages = overview(recording, verify=options.verify)
    print_plain(f"{len(rows) - 1} rollouts and evaluations of {recording.root}", rows, stream)
    if changes := starts(recording):
        print(*changes, sep="\n", file=stream)
    print(*damages, sep="\n", end="\n" if damages else "", file=stream)
    if not damages:
        checked = "sizes and hashes" if options.verify else "sizes (--verify checks hashes too)"
        print(f"all parts are as they were written: {checked}", file=stream)
    return int(bool(damages))


def _show_rollout(rollout: RecordedRollout, options: argparse.Namespace, stream: TextIO) -> None:
    judged = rollout.judged_samples()
    samples = shown_samples(judged)
    if options.sample is None and not options.json:
        print_plain(f"{len(samples)} samples of {rollout.folder}", list_rows(samples), stream)
        return
    positions = (
        range(len(samples))
        if options.sample is None
        else chosen(samples, options.sample, rollout.folder)
    )
    trained_at = trained_of(rollout)
    recording = rollout.recording
    folder = None if recording is None else recording.tokenizer_folder
    decode, note = decoder_of(options.hf_checkpoint or (None if folder is None else str(folder)))
    for position in positions:
        trained = trained_at(position)
        rows = token_rows(samples[position], trained, decode)
        _show_sample(
            samples[position], rows, stream, as_json=options.json, more=verdict_of(judged, position)
        )
        if trained is None and not options.json:
            print("it did not train, or the recording has no train part", file=stream)
    if note and not options.json:
        print(note, file=stream)


def _show_sample(
    sample: Sample,
    rows: Sequence[TokenRow],
    stream: TextIO,
    *,
    as_json: bool,
    more: Sequence[str] = (),
) -> None:
    if as_json:
        print(_as_json(sample, rows), file=stream)
        return
    print(*format_sample(sample), *more, "", sep="\n", file=stream)
    print_plain("response tokens; log-probs in nats", table_of(rows), stream)


def show(options: argparse.Namespace, stream: TextIO) -> None:
    """Prints what the options ask for of a dump. SlimeError where a file is missing, damaged, or
    has no such sample.
    """
    path: Path = options.dump
    if path.is_dir():
        lines = (file for file in path.rglob("*.jsonl") if is_rollout_dump(file))
        dumps = sorted([*path.rglob("rollout_data/*.parquet"), *lines])
        if dumps:
            raise ConfigError(
                f"{path} is a folder; name one rollout dump. For instance {dumps[0]}."
            )
        raise ConfigError(
            f"{path} is no recording and holds no dump. A recording (slime train --record FOLDER) "
            "is a folder with run_0000.json, tokenizer/ and a rollout_000000/ per rollout, each "
            "with manifest.rollout.json and parts as samples.parquet. Dumps (--dump-details FOLDER) "
            "are FOLDER/rollout_data/0.parquet."
        )
    samples = read_rollout_dump(path)
    if options.sample is None and not options.json:
        print_plain(f"{len(samples)} samples of {path}", list_rows(samples), stream)
        return
    positions = (
        range(len(samples)) if options.sample is None else chosen(samples, options.sample, path)
    )
    train_dump = options.train_dump or train_dump_beside(path)
    decode, note = decoder_of(options.hf_checkpoint or model_of(path))
    for position in positions:
        sample = samples[position]
        trained = trained_fields(train_dump, position, sample)
        _show_sample(sample, token_rows(sample, trained, decode), stream, as_json=options.json)
    if options.json:
        return
    if train_dump is None:
        print(
            (
                "no train dump beside it: --train-dump FILE adds the trainer's log-probs and "
                "advantages"
            ),
            file=stream,
        )
    elif trained is None:
        print(f"the sample is not in {train_dump}: it did not train", file=stream)
    if note:
        print(note, file=stream)


def _as_json(sample: Sample, rows: Sequence[TokenRow]) -> str:
    tokens = [dataclasses.asdict(row) for row in rows]
    names = (
        "index",
        "group_index",
        "rollout_id",
        "prompt",
        "response",
        "label",
        "reward",
        "valid",
        "invalid_reason",
    )
    facts = {name: getattr(sample, name) for name in names}
    return json_text({**facts, "status": sample.status.value, "tokens": tokens})


if __name__ == "__main__":
    raise SystemExit(main())
