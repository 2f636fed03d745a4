"""docs/flags.md equals what the options generate."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402

from slime.config.specs import all_specs  # noqa: E402

NUM_GPUS = 0


def test_the_page_in_the_repository_is_current(capsys):
    """The committed page is current."""
    assert generate_docs.main(["flags", "--check"]) == 0, capsys.readouterr().err


def test_every_flag_stands_on_the_page_in_one_table_row():
    """Every flag has one table row, without a bar or line break that would cut the table."""
    page = generate_docs.flags_page()
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    for spec in all_specs():
        assert sum(f"`{spec.flags[0]}`" in row.split(" | ")[0] for row in rows) == 1, spec.flags
    assert all(row.replace("\\|", "").count("|") in (3, 5) for row in rows)


def test_an_outdated_page_is_noticed(tmp_path, monkeypatch, capsys):
    """An outdated page fails the check."""
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    assert generate_docs.main(["--check"]) == 1
    assert "out of date: docs/flags.md" in capsys.readouterr().err
    assert generate_docs.main([]) == 0 and generate_docs.main(["--check"]) == 0


def test_another_megatron_core_is_no_outdated_page(monkeypatch):
    """With another megatron-core only the other sections are compared."""
    page = generate_docs.flags_page()
    monkeypatch.setattr(generate_docs, "_megatron_version", lambda: "99.1")
    start = page.index("\n## Megatron: transformer config")
    other = (
        page[:start]
        + "\n## Megatron: transformer config\n\nother fields\n"
        + page[page.index("\n## Fields of megatron-core") :]
    )
    assert generate_docs.is_current(page, other)
    assert not generate_docs.is_current(page, other.replace("`--prompt-data`", "`--prompts`"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
