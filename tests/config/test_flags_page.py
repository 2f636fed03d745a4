"""docs/flags.md equals what the options generate."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402

from slime.cli import main  # noqa: E402
from slime.config import megatron  # noqa: E402
from slime.config.megatron import SOURCES, megatron_fields  # noqa: E402
from slime.config.specs import all_specs, specs_by_name  # noqa: E402

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
    assert all(row.replace("\\|", "").count("|") in (3, 4, 5) for row in rows)


def plain(text):
    """The words alone, in lower case, each between blanks."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def test_no_sentence_of_megatron_core_stands_in_the_repository():
    """Its descriptions are its authors' text. They are read from the installed package when help is asked for."""
    sentences = {
        plain(sentence): field.name
        for field in megatron_fields()
        for sentence in re.split(r"(?<=[.!?])\s", field.help)
        if len(sentence.split()) >= 5
    }
    assert len(sentences) > 300
    suffixes = {".py", ".md", ".yaml", ".yml", ".j2", ".jsonl", ".toml"}
    folders = ("slime", "tools", "examples", "docs", "tests", ".github")
    files = [
        *ROOT.glob("*.md"),
        *(
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*")
            if path.suffix in suffixes
        ),
    ]
    assert len(files) > 300
    copied = []
    for path in files:
        text = plain(path.read_text(encoding="utf-8"))
        copied += [
            (path.relative_to(ROOT).as_posix(), name)
            for sentence, name in sentences.items()
            if sentence in text
        ]
    assert copied == []


def test_help_shows_the_description_that_the_installed_megatron_core_has(
    tmp_path, monkeypatch, capsys
):
    """Another text in the package is another text of help."""
    source = 'class TransformerConfig:\n    a_new_field: int = 7\n    """How many of them there are.\nMore about it."""\n'
    sources = {"TransformerConfig": source}
    sources |= {name: f"class {name}:\n    pass\n" for name, _, _ in SOURCES if name not in sources}
    for name, path, _ in SOURCES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(sources[name])
    monkeypatch.setattr(megatron, "megatron_core_folder", lambda: tmp_path)
    caches = (megatron_fields, all_specs, specs_by_name)
    for cache in caches:
        cache.cache_clear()
    try:
        with pytest.raises(SystemExit):
            main(["train", "--help", "a-new-field"])
    finally:
        for cache in caches:
            cache.cache_clear()
    said = " ".join(capsys.readouterr().out.split())
    assert "--a-new-field INT How many of them there are. [megatron-core default: 7]" in said


def test_an_outdated_page_is_noticed(tmp_path, monkeypatch, capsys):
    """An outdated page fails the check."""
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for name in ("trace.md", "audit.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        (tmp_path / "docs" / name).write_text(text, encoding="utf-8")
    (tmp_path / "docs" / "gate.md").write_text(page.replace("| `too_long` |", "| `long` |"))
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    assert generate_docs.main(["--check"]) == 1
    error = capsys.readouterr().err
    assert "out of date: docs/flags.md" in error and "docs/gate.md" in error
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
