"""`slime report RUN`: what a run did, and what does not add up.

    slime report runs/latest                      a table, the problems, runs/latest/report.png
    slime report runs/latest --html report.html   the same and all curves as one file, to attach

Exit status 1 when samples, weights, rewards or numbers do not add up, 2 when there is no run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.files import atomic
from slime.harness.output_paths import require_free
from slime.harness.report import print_summary, recorded_checks, write_report
from slime.view.catalog import RUN, Entry
from slime.view.charts import chart_data, spark
from slime.view.pictures import picture
from slime.view.run_data import RunData, name_of_label
from slime.view.templating import environment


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of a run folder, with the thresholds that the run was started with, and
    writes what is asked for.
    """
    options = _parser().parse_args(argv)
    try:
        if options.html is not None:
            require_free("--html", options.html, read=[options.run])
        summary = write_report(options.run, checks=recorded_checks(options.run))
        if options.html is not None:
            page = html_report(options.run).encode("utf-8", "backslashreplace")
            atomic.write_bytes(options.html, [page])
    except (FileNotFoundError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the report was not written: {error}", file=sys.stderr)
        return 2
    print_summary(summary)
    if options.html is not None:
        print(f"page: {options.html}")
    return summary.exit_status


def html_report(run_dir: Path) -> str:
    """The report as one page without scripts, which fetches nothing."""
    name = run_dir.resolve().name
    run = RunData(Entry(name, name, run_dir, RUN)).now()
    curves = [
        (label, *cells, spark(run.records, name_of_label(run.records, label)))
        for label, *cells in run.summary.rows
    ]
    return (
        environment()
        .get_template("report.jinja")
        .render(
            title=name,
            run=run,
            rows=curves,
            pictures=[picture(chart) for chart in chart_data([(name, run)])],
            num_marks=len(run.marks),
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="Folder that holds metrics.jsonl.")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="Also write one self-contained HTML page."
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
