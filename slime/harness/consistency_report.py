"""`slime consistency RUN`: where trainer and engine disagree about the log-probs of sampled tokens,
from a run's folder.

One row per rollout from metrics.jsonl, with an alarm where the mean difference exceeds the
threshold. Where the run wrote train dumps (--dump-details), the tokens with the largest difference
are shown in their text. Exit status 1 with an alarm, 2 where there is no such run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from slime.config.observability import ObservabilityOptions
from slime.config.yaml_file import DERIVED
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.rollout_dump import dump_path, read_rollout_dump
from slime.files.train_dump import read_train_dump, train_dump_path
from slime.harness.run_records import RunRecords, read_run
from slime.metrics.consistency_alarms import SEEN, ConsistencyLimits, consistency_alarms
from slime.utils import processing_utils

if TYPE_CHECKING:
    from slime.data.sample import Sample
    from slime.files.train_dump import TrainDump

PREFIXES = ("rollout/logprob_abs_diff", "rollout/logprob_kl")
MEAN = "rollout/logprob_abs_diff/mean"
COLUMNS = {
    "mean": MEAN,
    "p50": "rollout/logprob_abs_diff/p50",
    "p90": "rollout/logprob_abs_diff/p90",
    "p99": "rollout/logprob_abs_diff/p99",
    "max": "rollout/logprob_abs_diff/max",
    "k1": "rollout/logprob_kl/k1",
    "k3": "rollout/logprob_kl/k3",
}
BEFORE, AFTER = 12, 6  # tokens of context


@dataclasses.dataclass(frozen=True)
class StepConsistency:
    """One rollout: its metrics below `rollout/logprob_`, in nats per token, and the alarm's words
    or None.
    """

    step: int
    metrics: dict[str, float]
    alarm: str | None


@dataclasses.dataclass(frozen=True)
class TokenGap:
    """A trained token: both log-probs in nats, where it stands, and the text around it. `text` is
    None without a tokenizer.
    """

    sample_index: Any
    position_in_batch: int
    response_token: int
    response_length: int
    token_id: int
    trainer: float
    engine: float
    source: str | None
    weight_versions: list[str]
    rank: int
    before: str | None = None
    text: str | None = None
    after: str | None = None

    @property
    def difference(self) -> float:
        return self.trainer - self.engine


@dataclasses.dataclass(frozen=True)
class Report:
    """What the command prints. `step` is the rollout the tokens are from; `note` says why there are
    none.
    """

    run_dir: str
    threshold: float
    steps: list[StepConsistency]
    step: int
    tokens: list[TokenGap]
    note: str | None

    @property
    def has_alarm(self) -> bool:
        return any(step.alarm is not None for step in self.steps)


# --- pure -----------------------------------------------------------------------------------------


def consistency_by_step(run: RunRecords, *, limits: ConsistencyLimits) -> list[StepConsistency]:
    """Every rollout that has the metrics, in order."""
    names = [name for name in run.series if name.startswith(SEEN)]
    steps = []
    for step in sorted(run.series.get(MEAN, {})):
        # float() also reads the "nan" and "inf" of a metrics file, which are the worst there is
        metrics = {
            name: float(run.series[name][step]) for name in names if step in run.series[name]
        }
        steps.append(
            StepConsistency(
                step, metrics, " ".join(consistency_alarms(metrics, limits).values()) or None
            )
        )
    return steps


def worst_step(steps: Sequence[StepConsistency]) -> StepConsistency:
    """The rollout with the largest mean difference; one whose mean is no number comes before all
    others.
    """
    return max(
        steps,
        key=lambda entry: math.inf if math.isnan(entry.metrics[MEAN]) else entry.metrics[MEAN],
    )


def worst_tokens(
    dump: TrainDump,
    *,
    top: int,
    samples: Mapping[Any, Sample] | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> list[TokenGap]:
    """The trained tokens with the largest |trainer - engine| difference, largest first. `samples`
    by index (for weight versions) and `decode` are optional. `RolloutDataError` where the dump
    lacks either kind of log-probs.
    """
    lacking = [name for name in ("log_probs", "rollout_log_probs") if name not in dump.token_fields]
    if lacking:
        raise RolloutDataError(
            f"{dump.path} has no {' and no '.join(lacking)}: nothing to compare."
        )
    import numpy as np

    fields = dump.token_fields
    gaps: list[tuple[float, int, int]] = []
    for i, (trainer, engine, mask) in enumerate(
        zip(fields["log_probs"], fields["rollout_log_probs"], fields["loss_masks"], strict=True)
    ):
        distance = np.where(mask != 0, np.abs(trainer.astype(np.float64) - engine), -1.0)
        # NaN is the worst there is, and must not be sorted away
        distance = np.where((mask != 0) & np.isnan(distance), np.inf, distance)
        for j in np.argsort(-distance, kind="stable")[:top].tolist():
            if distance[j] >= 0:
                gaps.append((-float(distance[j]), i, j))
    owners = dump.owner_ranks
    return [
        _token_gap(dump, i, j, rank=int(owners[i]), samples=samples or {}, decode=decode)
        for _, i, j in sorted(gaps)[:top]
    ]


def _token_gap(
    dump: TrainDump,
    i: int,
    j: int,
    *,
    rank: int,
    samples: Mapping[Any, Sample],
    decode: Callable[[list[int]], str] | None,
) -> TokenGap:
    sample, tokens = dump.sample(i), dump.token_fields["tokens"][i].tolist()
    response = len(dump.token_fields["loss_masks"][i])
    place = len(tokens) - response + j
    index = _plain(sample.get("sample_indices"))
    known = samples.get(index)
    pieces = (
        tokens[max(0, place - BEFORE) : place],
        tokens[place : place + 1],
        tokens[place + 1 : place + 1 + AFTER],
    )
    before, text, after = (None, None, None) if decode is None else map(decode, pieces)
    return TokenGap(
        sample_index=index,
        position_in_batch=int(dump.positions[i]),
        response_token=j,
        response_length=response,
        token_id=tokens[place],
        trainer=float(sample["log_probs"][j]),
        engine=float(sample["rollout_log_probs"][j]),
        source=sample.get("source_names"),
        weight_versions=[str(version) for version in known.weight_versions]
        if known is not None
        else [],
        rank=rank,
        before=before,
        text=text,
        after=after,
    )


def _plain(value: object) -> Any:
    return value.item() if hasattr(value, "item") else value  # numpy's scalars


def printable(text: str) -> str:
    """`text` on one line, with everything that a terminal would act on spelled out: a model may
    have sampled escape sequences.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rollout_of_step(step: int, config: Mapping[str, Any]) -> int:
    """The rollout whose metrics stand at this `rollout/step`."""
    if not config.get("wandb_always_use_train_step"):
        return step
    return (
        step
        * config["global_batch_size"]
        // (config["rollout_batch_size"] * config["n_samples_per_prompt"])
    )


# --- reading a run --------------------------------------------------------------------------------


def read_config(run_dir: Path) -> dict[str, Any]:
    """The options in force in the run, from its config.yaml; {} where it has none."""
    import yaml

    path = run_dir / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {} if path.exists() else {}
        return {**config, **config.get(DERIVED, {})}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def build_report(
    run_dir: Path, *, step: int | None = None, top: int = 10, threshold: float | None = None
) -> Report:
    """Reads the run and its dumps. `step` restricts the report to one rollout; without it the
    tokens are of the rollout with the largest mean difference. ConfigError where the folder is no
    run, or it has no such step or no such metrics.
    """
    try:
        run = read_run(run_dir)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    config = read_config(run_dir)
    if threshold is None:
        threshold = float(
            config.get("logprob_diff_alarm", ObservabilityOptions().logprob_diff_alarm)
        )
    untrained = float(
        config.get("untrained_tokens_alarm", ObservabilityOptions().untrained_tokens_alarm)
    )
    steps = consistency_by_step(run, limits=ConsistencyLimits(threshold, untrained))
    if not steps:
        raise ConfigError(
            f"{run_dir} logged no {MEAN}: no rollout had log-probs of both an engine and the "
            "trainer."
        )
    if step is not None:
        known = [entry.step for entry in steps]
        steps = [entry for entry in steps if entry.step == step]
        if not steps:
            raise ConfigError(
                f"{run_dir} has no rollout {step} with log-prob metrics; it has {known[0]} to "
                f"{known[-1]}."
            )
    shown = worst_step(steps)
    tokens, note = _tokens_of_step(config, rollout_of_step(shown.step, config), top=top)
    return Report(str(run_dir), threshold, steps, shown.step, tokens, note)


def _tokens_of_step(
    config: Mapping[str, Any], rollout_id: int, *, top: int
) -> tuple[list[TokenGap], str | None]:
    path = _dump_file(config, rollout_id)
    if path is None or not path.exists():
        wanted = f"there is no {path}" if path else "the run wrote no train dumps"
        return [], f"no tokens: {wanted}. Run with --dump-details FOLDER to keep them."
    decode, note = decoder_of(config.get("hf_checkpoint"))
    try:
        samples = _samples_by_index(config, rollout_id)
        return worst_tokens(read_train_dump(path), top=top, samples=samples, decode=decode), note
    except RolloutDataError as error:
        return [], f"no tokens: {error}"


def _samples_by_index(config: Mapping[str, Any], rollout_id: int) -> dict[Any, Sample]:
    """The samples of the rollout dump, written or replayed; {} where there is none."""
    written = config.get("save_debug_rollout_data") or _detail(config, "rollout_data", ".jsonl")
    template = written or config.get("load_debug_rollout_data")
    path = dump_path(template, rollout_id, evaluation=False) if template else None
    return (
        {sample.index: sample for sample in read_rollout_dump(path)}
        if path is not None and path.exists()
        else {}
    )


def _dump_file(config: Mapping[str, Any], rollout_id: int) -> Path | None:
    template = config.get("save_debug_train_data") or _detail(config, "train_data", ".safetensors")
    if not template:
        return None
    path = train_dump_path(template, rollout_id, rank=0)
    if not path.exists() and "{rank}" in template:
        return next(
            iter(sorted(path.parent.glob(train_dump_path(template, rollout_id, rank="*").name))),
            path,
        )
    return path


def _detail(config: Mapping[str, Any], kind: str, earlier: str) -> str | None:
    """Where --dump-details puts dumps of a kind; earlier versions gave them another suffix."""
    if not config.get("dump_details"):
        return None
    folder = Path(config["dump_details"]) / kind
    suffix = earlier if any(folder.glob(f"*{earlier}")) else ".parquet"
    return f"{folder}/{{rollout_id}}{suffix}"


def decoder_of(hf_checkpoint: str | None) -> tuple[Callable[[list[int]], str] | None, str | None]:
    """A function from token ids to text, or why there is none."""
    if not hf_checkpoint or not Path(hf_checkpoint).is_dir():
        return None, f"no text: the run's --hf-checkpoint {hf_checkpoint} is not here."
    try:
        tokenizer = processing_utils.shared_tokenizer(hf_checkpoint)
    except ConfigError as error:
        return None, f"no text: {error}"
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False), None


# --- saying it ------------------------------------------------------------------------------------


def step_rows(report: Report) -> list[list[str]]:
    """Head and rows of the table of rollouts."""
    rows = [["step", *COLUMNS, ""]]
    for step in report.steps:
        cells = [
            f"{step.metrics[name]:.3g}" if name in step.metrics else "-"
            for name in COLUMNS.values()
        ]
        rows.append([str(step.step), *cells, "ALARM" if step.alarm else ""])
    return rows


def part_rows(report: Report) -> list[list[str]]:
    """Head and rows of the means by quarter of the response and by source, of the shown rollout."""
    shown = next(step for step in report.steps if step.step == report.step)
    prefix = f"{PREFIXES[0]}/"
    parts = {
        name.removeprefix(prefix): value
        for name, value in shown.metrics.items()
        if name.count("/") > 2
    }
    return [
        ["part", "mean"],
        *([printable(name), f"{value:.3g}"] for name, value in sorted(parts.items())),
    ]


def token_rows(report: Report) -> list[list[str]]:
    """Head and rows of the table of tokens."""
    rows = [
        ["sample", "token", "trainer", "engine", "difference", "id", "context", "source", "weights"]
    ]
    for gap in report.tokens:
        context = (
            "-"
            if gap.text is None
            else printable(f"{gap.before}") + f"[{printable(gap.text)}]" + printable(f"{gap.after}")
        )
        rows.append(
            [
                str(gap.sample_index),
                f"{gap.response_token}/{gap.response_length}",
                f"{gap.trainer:.5g}",
                f"{gap.engine:.5g}",
                f"{gap.difference:+.3g}",
                str(gap.token_id),
                context,
                printable(gap.source or "-"),
                ",".join(dict.fromkeys(gap.weight_versions)) or "-",
            ]
        )
    return rows


def print_report(report: Report, *, stream: TextIO | None = None) -> None:
    """Tables on a terminal, aligned plain text elsewhere."""
    stream = stream or sys.stdout
    tables = [
        ("|trainer - engine| log-prob of trained tokens, nats", step_rows(report)),
        (f"mean by part, step {report.step}", part_rows(report)),
        (f"worst tokens, step {report.step}", token_rows(report)),
    ]
    show = _print_rich if stream.isatty() else print_plain
    for title, rows in tables:
        if len(rows) > 1:
            show(title, rows, stream)
    lines = [report.note] if report.note else []
    lines += [f"ALARM step {step.step}: {step.alarm}" for step in report.steps if step.alarm]
    if not report.has_alarm:
        lines.append(f"no alarm: every mean is at most {report.threshold:g}")
    print(*lines, sep="\n", file=stream)


def _print_rich(title: str, rows: list[list[str]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows[1:]:
        table.add_row(*(Text(cell, style="bold red" if cell == "ALARM" else "") for cell in row))
    Console(file=stream, highlight=False).print(table)


def print_plain(title: str, rows: list[list[str]], stream: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(title, file=stream)
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(),
            file=stream,
        )
    print(file=stream)


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    tokens = [{**dataclasses.asdict(gap), "difference": gap.difference} for gap in report.tokens]
    return {
        "run": report.run_dir,
        "threshold": report.threshold,
        "alarm": report.has_alarm,
        "steps": [dataclasses.asdict(step) for step in report.steps],
        "step": report.step,
        "worst_tokens": tokens,
        "note": report.note,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of a run; returns 1 where the alarm threshold is exceeded, 2 where there is
    no such run.
    """
    parser = argparse.ArgumentParser(
        prog="slime consistency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, help="Run folder: it holds metrics.jsonl and config.yaml."
    )
    parser.add_argument(
        "--step",
        type=int,
        default=None,
        help="Look at this rollout only. Default: all, and tokens of the worst.",
    )
    parser.add_argument("--top", type=int, default=10, help="Tokens that are shown.")
    parser.add_argument(
        "--threshold",
        type=float,
        default=None,
        help="Nats per token. Default: the run's --logprob-diff-alarm.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)
    try:
        report = build_report(
            options.run, step=options.step, top=max(0, options.top), threshold=options.threshold
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report)
    return 1 if report.has_alarm else 0


if __name__ == "__main__":
    sys.exit(main())
