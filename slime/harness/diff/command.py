"""`slime diff A B`: two recordings, two rollouts of recordings, two files, or two folders of dumps,
compared field by field.

Samples are matched by their place in the whole batch, or by their identity where one side lacks
some, so that the layout they were trained on does not matter. The first difference is named in the
order in which things are computed. Exit status 0: identical (within tolerances), 1: different, 2:
cannot be read.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.files import atomic
from slime.harness.bounds import tolerance_of
from slime.harness.diff import pages
from slime.harness.diff.inputs import Choice, compare_paths
from slime.harness.diff.text import as_json, describe
from slime.harness.json_text import json_text
from slime.harness.output_paths import require_free


def parser_of_diff() -> argparse.ArgumentParser:
    """The command line of `slime diff`."""
    parser = argparse.ArgumentParser(
        prog="slime diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "a", type=Path, help="Recording, rollout folder of one, part, dump, or folder of dumps."
    )
    parser.add_argument("b", type=Path, help="What A is compared with, of the same kind.")
    parser.add_argument("--rollout", type=int, help="Of two recordings, this rollout alone.")
    parser.add_argument("--from", type=int, dest="first", help="The first rollout of recordings.")
    parser.add_argument("--to", type=int, dest="last", help="The last rollout of recordings.")
    parser.add_argument(
        "--allow-options",
        default="",
        metavar="NAMES",
        help="Options, versions or 'code' that may differ, with commas: lr,*_path,versions.torch. "
        "'all' allows every one. They are listed and do not count.",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        help="Relative tolerance of floats. Default: 0, and where the parallel layouts differ that "
        "of each field (1e-5 for what training computes, 1e-4 for gradient norms).",
    )
    parser.add_argument("--atol", type=float, help="Absolute tolerance of floats; as --rtol.")
    parser.add_argument("--top", type=int, default=10, help="Differing fields that are listed.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="Write a JUnit report, a case per stage."
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write one self-contained page.")
    return parser


def choice_of(options: argparse.Namespace) -> Choice:
    """What the options choose. `ConfigError` for bounds and tolerances that cannot be."""
    tolerance = tolerance_of(options)
    first, last = options.first, options.last
    if options.rollout is not None:
        if first is not None or last is not None:
            raise ConfigError("--rollout names one rollout; leave out --from and --to.")
        first = last = options.rollout
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--from {first} is behind --to {last}.")
    if options.top < 1:
        raise ConfigError(f"--top {options.top} must be at least 1.")
    allowed = tuple(word for word in options.allow_options.replace(" ", "").split(",") if word)
    return Choice(first, last, tolerance, allowed)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; returns 0 for what is identical, 1 for what is not."""
    options = parser_of_diff().parse_args(argv)
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("slime diff needs pyarrow: pip install 'slime-rl[data]'.")
    for option, path in (("--junit", options.junit), ("--html", options.html)):
        if path is not None:
            require_free(option, Path(path), read=map(Path, (options.a, options.b)))
    report = compare_paths(options.a, options.b, choice_of(options))
    for path, page in ((options.junit, pages.junit), (options.html, pages.html)):
        if path is not None:
            try:
                atomic.write_bytes(path, page(report))
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error}") from error
    if options.json:
        print(json_text(as_json(report)))
    else:
        print(*describe(report, top=options.top), sep="\n")
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
