"""`slime audit PATH`: reads what an RL framework wrote about a run, and says what is wrong with it.

    slime audit runs/latest                      a run folder of ours
    slime audit rollout_data/                    rollout dumps of slime or miles, verl's rollout_data_dir,
                                                 NeMo-RL's train_data_step<N>.jsonl
    slime audit output/completions               TRL's completions
    slime audit run.jsonl --mapping keys.json    any JSON lines: {"prompt": "question", "response": "text"}

PATH is a file or a folder; the shape is recognised. Nothing is trained and nothing that a file holds
is executed. Exit status 0: no error and no warning; 1: some; 2: nothing could be read.
docs/audit.md has every finding with its meaning and remedy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.harness.audit.audit import AuditOptions, audit
from slime.harness.audit.json_lines import check_mapping, parse
from slime.harness.audit.reports import as_json, text_report, write_page
from slime.harness.audit.shapes import ReadOptions, open_regular
from slime.harness.consistency_report import printable
from slime.harness.output_paths import require_free


def main(argv: Sequence[str] | None = None) -> int:
    """Audits, prints, and returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.top < 0:
            raise ConfigError(f"--top {options.top} must not be negative.")
        if options.html is not None and not options.html.absolute().parent.is_dir():
            raise ConfigError(f"--html {options.html}: there is no such folder.")
        if options.html is not None:
            require_free("--html", options.html, read=[Path(options.path)])
        result = audit(options.path, _options(options))
        if options.html is not None:
            write_page(result, options.html)
    except SlimeError as error:
        print("error: " + "\n".join(map(printable, str(error).splitlines())), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(result), allow_nan=False))
    else:
        print("\n".join(text_report(result, top=options.top)))
    return result.exit_status


def _options(options: argparse.Namespace) -> AuditOptions:
    mapping = None if options.mapping is None else _read_mapping(options.mapping)
    return AuditOptions(
        read=ReadOptions(mapping=mapping, reward_key=options.reward_key),
        tokenizer=options.tokenizer,
        grader=options.grader,
    )


def _read_mapping(path: Path) -> dict[str, str]:
    try:
        with open_regular(path.resolve()) as file:
            value = parse(file.read(1 << 20))
    except RolloutDataError as error:
        raise ConfigError(f"--mapping {path}: {error}") from error
    return check_mapping(value, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="A file or a folder that a run wrote.")
    parser.add_argument(
        "--tokenizer",
        default=None,
        help="Folder of the tokenizer: responses are compared with their token ids.",
    )
    parser.add_argument(
        "--grader",
        default=None,
        help="A reward type of ours (math, math_verify, dapo, ...) to compare rewards with.",
    )
    parser.add_argument(
        "--reward-key", default=None, help="Which reward counts where a file has several."
    )
    parser.add_argument(
        "--mapping", type=Path, default=None, help="JSON file: our column -> the key of JSON lines."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--html", type=Path, default=None, help="Also write an HTML page.")
    parser.add_argument("--top", type=int, default=3, help="Samples that are shown per finding.")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
