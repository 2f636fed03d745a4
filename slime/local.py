"""Training in this process, as `slime train --local` does, for notebooks and debuggers.


    result = train(["--config", "grpo.yaml"], custom_rm_path="__main__.reward", num_rollout=2)
    result.series("rollout/raw_reward")                   {0: 0.25, 1: 0.31}

    with local_run(["--config", "grpo.yaml"]) as run:     the loop by hand
        shards = generate(run, 0)

Options are words of the command line, or keywords with the options' names; keywords win. Errors are
raised, with their stacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.specs import nearest_names, specs_by_name
from slime.exceptions import ConfigError
from slime.files.jsonl import read_jsonl
from slime.harness.report import finish_run
from slime.ray import actors
from slime.tracking.tracking import FILE_NAME
from slime.train import Run, check_ledger, open_run, train_on, update_weights
from slime.train import generate as start_rollout
from slime.train import train as training_loop
from slime.utils.arguments import parse_args

__all__ = [
    "LocalResult",
    "generate",
    "local_run",
    "train",
    "train_on",
    "update_weights",
    "words_of",
]


@dataclasses.dataclass(frozen=True)
class LocalResult:
    """A run that is over."""

    args: Any
    run_dir: Path

    def series(self, name: str) -> dict[int, float]:
        """step -> value of one metric. KeyError with the nearest names where nothing was logged
        under it.
        """

        records = [
            record for record in read_jsonl(self.run_dir / FILE_NAME)[0] if "metrics" in record
        ]
        found = {
            record["step"]: record["metrics"][name]
            for record in records
            if name in record["metrics"]
        }
        if not found:
            near = nearest_names(
                name, sorted({key for record in records for key in record["metrics"]}), count=3
            )
            raise KeyError(
                f"no record has {name!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        return found


def words_of(options: dict[str, Any]) -> list[str]:
    """The words of the command line that say `options`. None leaves an option out. ConfigError for
    an unknown name.
    """
    specs, words = specs_by_name(), []
    for name, value in options.items():
        if name not in specs:
            near = nearest_names(name, specs)
            raise ConfigError(
                f"unknown option {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
            )
        spec = specs[name]
        if value is None:
            continue
        if spec.kind is bool:
            flag = spec.flag if value else spec.off_flag
            if flag is not None:  # without one, the value is the default
                words.append(flag)
            continue
        assert spec.flag is not None
        values = list(value) if isinstance(value, list | tuple) else [value]
        texts = [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
        words += (
            [word for text in texts for word in (spec.flag, text)]
            if spec.repeat
            else [spec.flag, *texts]
        )
    return words


@contextlib.contextmanager
def local_run(options: Sequence[str] = (), **named: object) -> Iterator[Run]:
    """A run in this process, its models loaded and the weights published to the engine; everything
    is stopped at the end.
    """

    args = parse_args([*map(str, options), *words_of(named), "--local"])
    try:
        with open_run(args) as run:
            yield run
    finally:
        finish_run(args)


def generate(run: Run, rollout_id: int) -> list[Any]:
    """One rollout, generated and scored: what `train_on(run, rollout_id, ...)` takes."""

    return actors.get(start_rollout(run, rollout_id))


def train(options: Sequence[str] = (), **named: object) -> LocalResult:
    """Trains to the end in this process and returns where the records are."""
    with local_run(options, **named) as run:
        training_loop(run)
        check_ledger(run)
    return LocalResult(run.args, Path(run.args.run_dir))
