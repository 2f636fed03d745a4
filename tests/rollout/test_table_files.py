"""Prompts as a JSON array, CSV or a folder of `datasets`; other files are refused with what to
do."""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow
import pyarrow.parquet
import pytest
from support.options import write_run_inputs

from slime.exceptions import ConfigError
from slime.prompts.prompt_files import read_rows
from slime.utils.arguments import parse_args

NUM_GPUS = 0

ROWS = [{"input": f"{number}+1=", "label": str(number + 1)} for number in range(5)]


def written(folder, kind):
    """ROWS as a file or folder of that kind."""
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        path.write_text(
            f"\ufeffinput{mark}label\n"
            + "".join(f'"{row["input"]}"{mark}{row["label"]}\r\n' for row in ROWS),
            encoding="utf-8",
        )
    else:  # as datasets.save_to_disk writes it: two Arrow streams and two descriptions
        path.mkdir()
        names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
        for name, part in zip(names, (ROWS[:3], ROWS[3:]), strict=True):
            table = pyarrow.Table.from_pylist(part)
            with (
                pyarrow.OSFile(str(path / name), "wb") as sink,
                pyarrow.ipc.new_stream(sink, table.schema) as stream,
            ):
                stream.write_table(table)
        (path / "state.json").write_text(
            json.dumps(
                {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
            )
        )
        (path / "dataset_info.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", ["json", "csv", "tsv", "saved"])
@pytest.mark.parametrize(("part", "labels"), [("", "12345"), ("@[1:3]", "23"), ("@[-2:]", "45")])
def test_each_kind_gives_its_rows_and_their_slices(kind, part, labels, tmp_path):
    """Each kind gives the rows of the .jsonl file in order, each with its place, and slices of
    them."""
    rows = list(read_rows(f"{written(tmp_path, kind)}{part}"))
    assert [row.data for row in rows] == [ROWS[int(label) - 1] for label in labels]
    assert all("rows" in row.place or "data-" in row.place for row in rows)


@pytest.mark.parametrize("kind", ["json", "csv", "saved"])
def test_a_run_accepts_them_as_prompts(kind, tmp_path):
    """A command line with each kind passes the checks before a start, with keys and labels."""
    words = write_run_inputs(tmp_path)
    path = str(written(tmp_path, kind))
    assert parse_args([*words, "--prompt-data", path]).prompt_data == path


def test_a_file_named_json_may_hold_a_line_per_row(tmp_path):
    """A .json file may hold one row per line, as many data sets do."""
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row.data for row in read_rows(str(path))] == ROWS
    path.write_text('{"input": "1+1=", "label": "2"}\n{"input": "1+2=", "label"\n')
    with pytest.raises(ConfigError, match=r"rows\.json, line 2: not valid JSON"):
        list(read_rows(str(path)))


def test_a_cell_may_hold_commas_lines_and_a_long_conversation(tmp_path):
    """A cell may hold commas, line breaks and a long conversation."""
    path, text = tmp_path / "rows.csv", 'Say "a, b"\nand then ' + "x" * 200_000
    quoted = text.replace('"', '""')
    path.write_text(f'input,label\n"{quoted}",a\nshort,b\n')
    first, second = read_rows(str(path))
    assert first.data == {"input": text, "label": "a"} and second.place == f"{path}, line 4"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("mark", [";", "\t", "|", ","])
def test_a_table_is_read_by_the_separator_of_its_first_line(name, mark, tmp_path):
    """The separator is found in the first line: spreadsheets of countries with decimal commas write
    semicolons."""
    path = tmp_path / name
    path.write_text(
        f'\ufeffinput{mark}label\n"1{mark}5 and, more"{mark}3\nx{mark}4\n', encoding="utf-8"
    )
    assert [row.data for row in read_rows(str(path))] == [
        {"input": f"1{mark}5 and, more", "label": "3"},
        {"input": "x", "label": "4"},
    ]
    path.write_text(f"input{mark}label\nx{mark}4{mark}5\n")
    with pytest.raises(
        ConfigError,
        match=re.escape(f"line 2: 3 cells, but 2 columns. Put a cell with {mark!r} in quotes"),
    ):
        list(read_rows(str(path)))


def test_one_column_stays_one_column(tmp_path):
    """A table of one column stays one, whatever separators its rows or its quoted name hold."""
    path = tmp_path / "a.csv"
    path.write_text("input\na;b\nc|d\n")
    assert [row.data["input"] for row in read_rows(str(path))] == ["a;b", "c|d"]
    path.write_text('"in;put"\na\n')
    assert [row.data for row in read_rows(str(path))] == [{"in;put": "a"}]


@pytest.mark.parametrize("suffix", ["JSONL", "Json", "CSV", "TSV", "Parquet"])
def test_a_file_type_in_capitals_is_the_type(suffix, tmp_path):
    """A suffix in capitals is the type, alone, with a slice from the end, and in a folder."""
    path = tmp_path / f"DATA.{suffix}"
    if suffix == "Parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif suffix == "JSONL":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        written(tmp_path, suffix.lower()).rename(path)
    assert [row.data for row in read_rows(str(path))] == ROWS
    assert [row.data for row in read_rows(f"{path}@[-2:]")] == ROWS[3:]
    if suffix != "Json":
        assert [row.data for row in read_rows(str(tmp_path))] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.json",
            '{"train": [{"input": "x"}]}',
            "holds one object, not an array of rows. Its key 'train' holds one",
        ),
        ("a.json", "[1]", "a.json, item 1: the value is a int, not an object"),
        ("a.json", "[{]", "not valid JSON"),
        ("a.json", "7", "holds a int, not an array"),
        ("a.json", "[]", "has no rows"),
        (
            "a.csv",
            "input,label\nx,1,2\n",
            "line 2: 3 cells, but 2 columns. Put a cell with ',' in quotes",
        ),
        ("a.csv", "input,input\nx,1\n", "the first line must name each column once"),
        ("a.csv", "", "the first line must name each column once"),
        ("a.csv", "input,label\n", "has no rows"),
        ("a.csv", b"input,label\nx,\xff\n", "is not UTF-8"),
        ("a.csv", 'input,label\n"x,1\n', "not valid CSV"),
        ("a.xlsx", "x", "has the type '.xlsx'; use one of .jsonl, .parquet, .json, .csv, .tsv"),
    ],
)
def test_a_file_that_is_no_table_is_named_with_the_reason(name, content, words, tmp_path):
    """A file that is no table is refused with the reason; no row is skipped or made up."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        list(read_rows(str(path)))
    assert words in str(caught.value) and name in str(caught.value)


def test_a_damaged_data_set_folder_is_named(tmp_path):
    """A cut file, a folder of splits, and a selection that was never written out are refused by
    name."""
    folder = written(tmp_path, "saved")
    (folder / "data-00001-of-00002.arrow").write_bytes(b"cut")
    with pytest.raises(
        ConfigError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow data"
    ):
        list(read_rows(str(folder)))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(ConfigError, match=r"flatten_indices"):
        list(read_rows(str(folder)))
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ConfigError,
        match=rf"holds the splits train, test of a data set. Give one, for instance {splits}/train",
    ):
        list(read_rows(str(splits)))


def test_a_name_on_a_hub_and_an_empty_folder_get_their_own_answers(tmp_path, monkeypatch):
    """A name on a hub and an empty folder have a message of their own, without suggesting the given
    path."""
    monkeypatch.chdir(tmp_path)
    words = write_run_inputs(tmp_path)
    with pytest.raises(
        ConfigError,
        match=(
            r"As a name on the Hugging Face hub it must be downloaded "
            r"first.*load_dataset\(\"openai/gsm8k\""
        ),
    ):
        parse_args([*words, "--prompt-data", "openai/gsm8k"])
    with pytest.raises(ConfigError, match=r"no such file; .* exists, but has no 'data'"):
        parse_args([*words, "--prompt-data", "data/gsm8k.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        parse_args([*words, "--prompt-data", str(tmp_path / "empty")])
    assert "has no .jsonl, .parquet, .csv, .tsv file and is no data set folder" in str(
        caught.value
    ) and "Did you mean" not in str(caught.value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
