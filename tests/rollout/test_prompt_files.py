"""Prompt files and datasets: every bad row is named, none is skipped, memory is bounded, and the
order is repeatable."""

import json
import os
import random
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.tiny_models import make_char_tokenizer

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.files.table_files import read_arrow
from slime.prompts.dataset import (
    Dataset,
    _build_messages,
    compute_prompt_lengths,
    filter_long_prompt,
    get_source,
    read_file,
    render_prompt,
)
from slime.prompts.prompt_files import parse_generalized_path, read_rows

NUM_GPUS = 0


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def numbered(path, count):
    return write(
        path, "".join(json.dumps({"input": f"p{i}", "label": i}) + "\n" for i in range(count))
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("", "0123456789"), ("@[2:5]", "234"), ("@[:3]", "012"), ("@[7:]", "789"), ("@[-2:]", "89"), ("@[-4:-2]", "67"),
     ("@[5:3]", ""), ("@[:-8]", "01"), ("@[0:100]", "0123456789")],
)  # fmt: skip
def test_a_slice_takes_the_rows_that_python_would(tmp_path, spec, expected):
    """data.jsonl@[0:1000] takes the rows that Python's slice takes."""
    path = numbered(tmp_path / "d.jsonl", 10)
    assert [row["label"] for row in read_file(path + spec)] == [int(digit) for digit in expected]


def test_a_path_with_brackets_that_are_no_slice_stays_a_path():
    """Only @[a:b] at the end of a path is a slice."""
    assert parse_generalized_path("a@[1:2].jsonl") == ("a@[1:2].jsonl", None)
    assert parse_generalized_path("a.jsonl@[1:]") == ("a.jsonl", slice(1, None))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"input": "a"}\n{"input": "b"\n', ["d.jsonl, line 2", "not valid JSON", '{"input": "b"']),
        ('{"input": "a"}\n\n[1, 2]\n', ["line 3", "list, not an object"]),
        ('{"input": "a", "label": 1}\n{"text": "b", "label": 2}\n', ["line 2", "'input' is missing", "['label', 'text']", "--input-key"]),
        ('{"input": "a"}\n', ["line 1", "'label' is missing", "--label-key"]),
        ('{"input": "a", "label": null}\n', ["line 1", "'label' is null"]),
        ('{"input": "  ", "label": 1}\n', ["line 1", "is empty"]),
        ('{"input": [], "label": 1}\n', ["line 1", "empty list"]),
        ('{"input": 7, "label": 1}\n', ["line 1", "is a int"]),
        ('{"input": [{"content": "a"}], "label": 1}\n', ["line 1", "not an object with a role"]),
        ('{"input": "a", "label": 1, "metadata": 3}\n', ["line 1", "'metadata' is a int"]),
        ("", ["has no rows"]),
        ("\n\n", ["has no rows"]),
        ('{"input": "a"}\n'.encode("utf-16"), ["line 1", "UTF-16", "UTF-8"]),
    ],
)  # fmt: skip
def test_a_bad_row_stops_with_file_line_reason_and_remedy(tmp_path, content, words):
    """A malformed row, or one without its prompt key, is an error with file, line, reason and
    remedy, and is never skipped."""
    path = write(tmp_path / "d.jsonl", content)
    with pytest.raises(ConfigError) as error:
        Dataset(path, None, None, None, prompt_key="input", label_key="label")
    for word in words:
        assert word in str(error.value)


def test_a_utf8_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    """A byte order mark, as editors on Windows write it, is not part of the first row."""
    path = write(tmp_path / "d.jsonl", b'\xef\xbb\xbf{"input": "a"}\n{"input": "b"}')
    assert [row["input"] for row in read_file(path)] == ["a", "b"]
    assert [row["input"] for row in read_file(path + "@[-1:]")] == ["b"]


def test_missing_files_and_other_types_are_named(tmp_path):
    """A missing file or an unknown type is refused with the path and where it was looked for."""
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        list(read_file(str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match=r"\.csv"):
        list(read_file(write(tmp_path / "a.csv", "x")))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """A named pipe is refused; reading one without a writer would wait forever."""
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="rows.jsonl' is no regular file"):
            list(read_rows(str(path)))


def test_a_folder_or_pattern_is_its_files_in_order(tmp_path):
    """A folder or a pattern gives its files in order, and a slice counts over all of them."""
    for name in ("b", "a", "c"):
        write(
            tmp_path / f"{name}.jsonl",
            "".join(json.dumps({"input": f"{name}{i}"}) + "\n" for i in range(2)),
        )
    expected = ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert [row["input"] for row in read_file(str(tmp_path))] == expected
    assert [row["input"] for row in read_file(str(tmp_path / "*.jsonl"))] == expected
    assert [row["input"] for row in read_file(str(tmp_path) + "@[1:-1]")] == expected[1:-1]
    assert list(read_rows(str(tmp_path)))[3].place == f"{tmp_path / 'b.jsonl'}, line 2"


def test_nested_parquet_columns_read_the_same_in_one_row_group_and_in_many(tmp_path):
    """Nested Parquet columns read the same in one row group and in many, though Arrow cannot
    convert a nested column in chunks."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [
        {"messages": [{"role": "user", "content": f"{i}" * 1000}], "label": i} for i in range(200)
    ]
    for name, size in (("one", 200), ("many", 10)):
        pq.write_table(
            pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=size
        )
    one, many = (list(read_file(str(tmp_path / f"{name}.parquet"))) for name in ("one", "many"))
    assert one == many == rows
    assert [row["label"] for row in read_file(str(tmp_path / "many.parquet@[-3:]"))] == [
        197,
        198,
        199,
    ]
    write(tmp_path / "bad.parquet", "no parquet")
    with pytest.raises(ConfigError, match="bad.parquet"):
        list(read_file(str(tmp_path / "bad.parquet")))


def test_parquet_rows_have_the_keys_that_they_were_written_with(tmp_path):
    """Rows of a struct column have the keys that they were written with, without null keys of other
    rows."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}
    other = {
        "type": "function",
        "function": {"name": "g", "parameters": {"y": {"type": "str", "enum": ["a"]}}},
    }
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    rows = [
        {
            "input": [{"role": "user", "content": "q"}],
            "tools": [tool],
            "metadata": {"a": 1},
            "label": None,
        },
        {
            "input": [{"role": "user", "content": "q"}, call],
            "tools": [other],
            "metadata": {"b": "x"},
            "label": "l",
        },
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "structs.parquet")
    assert list(read_file(str(tmp_path / "structs.parquet"))) == rows
    with (
        pa.OSFile(str(tmp_path / "structs.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert list(read_arrow(tmp_path / "structs.arrow")) == rows
    schema = pa.schema([("input", pa.string()), ("metadata", pa.map_(pa.string(), pa.int64()))])
    pq.write_table(
        pa.Table.from_pylist([{"input": "q", "metadata": [("a", 1)]}], schema=schema),
        tmp_path / "map.parquet",
    )
    assert list(read_file(str(tmp_path / "map.parquet"))) == [{"input": "q", "metadata": {"a": 1}}]


ENCODES = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ "
    "c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
WRITES_TEXT = ENCODES.replace(
    "{{ c.function.arguments | tojson }}",
    (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ "
        "c.function.arguments | tojson }}{% endif %}"
    ),
)
NEEDS_VALUES = ENCODES.replace(
    "{{ c.function.arguments | tojson }}",
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ENCODES, '{"city": "Rome"}'),
        (WRITES_TEXT, '{"city":   "Rome"}'),
        (NEEDS_VALUES, "city=Rome;"),
    ],
    ids=["encodes", "writes text", "needs values"],
)
def test_tool_arguments_that_are_json_text_are_encoded_once(template, expected):
    """Tool arguments that are JSON text, as chat APIs record them, are encoded once, whether the
    template encodes or writes text."""
    from slime.prompts.chat_render import ChatTemplate

    tokenizer = make_char_tokenizer(chat_template=template)
    call = {"function": {"name": "f", "arguments": '{"city":   "Rome"}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert (
        render_prompt(tokenizer, messages, None, None)
        == ChatTemplate(tokenizer).render(messages)
        == f"q{expected}"
    )
    assert call["function"]["arguments"] == '{"city":   "Rome"}'
    plain = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}],
        }
    ]
    if template is not NEEDS_VALUES:
        assert "no JSON" in render_prompt(tokenizer, plain, None, None)


@pytest.mark.parametrize(
    ("media", "expected"),
    [
        ("cat.png", ["cat.png"]),
        (["a", "b"], ["a", "b"]),
        ({"bytes": b""}, [{"bytes": b""}]),
        (None, []),
        ("", []),
    ],
)
def test_a_media_column_may_hold_one_path_or_many(media, expected):
    """A media column may hold one path, which is not taken apart into characters, or a list."""
    row = {"text": "<image>" * len(expected) + "?", "images": media}
    messages = _build_messages(row, "text", True, {"image": "images"})
    parts = messages[0]["content"]
    assert [part["image"] for part in parts if part["type"] == "image"] == expected


def test_memory_is_bounded_by_what_is_kept(tmp_path):
    """Reading 100 rows of a 100 MB file adds less than 20 MB of memory."""
    path = write(tmp_path / "big.jsonl", (json.dumps({"input": "x" * 1000}) + "\n") * 100_000)
    code = f"""
import resource
from slime.prompts.dataset import Dataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(Dataset({path!r} + "@[99000:99100]", None, None, None, prompt_key="input")) == 100
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20_000, f"{done.stdout} KiB"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


class WordTokenizer:
    """One id per word; its chat template adds three words."""

    chat_template = "words"

    def __call__(self, texts, add_special_tokens=True):
        assert add_special_tokens is False
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(
        self, messages, tools=None, tokenize=True, add_generation_prompt=False, **kwargs
    ):
        assert tokenize is False and add_generation_prompt is True
        names = [tool["function"]["name"] for tool in tools or []]
        return " ".join(
            [
                "<user>",
                *names,
                *(message["content"] for message in messages),
                "</user>",
                "<assistant>",
            ]
        )


@pytest.mark.parametrize("template", [False, True])
def test_prompt_length_counts_what_will_be_sent_for_every_prompt_type(tmp_path, template):
    """The length limit counts the ids that are sent, for texts and message lists; a prompt of
    exactly the limit stays."""
    extra = 3 if template else 0
    rows = [
        {"input": "a b c d e"},  # 5 words
        {"input": "a b c d e f g h i j k l"},  # 12
        {"input": [{"role": "user", "content": "a b c d e f g h i"}]},  # 9 + 3 as messages
        # 2 + 3 + 1
        {"input": [{"role": "user", "content": "a b"}], "tools": [{"function": {"name": "add"}}]},
    ]
    path = write(tmp_path / "d.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset(
        path,
        WordTokenizer(),
        None,
        5 + extra,
        prompt_key="input",
        tool_key="tools",
        apply_chat_template=template,
    )
    first = "<user> a b c d e </user> <assistant>" if template else "a b c d e"
    if template:
        assert [sample.prompt for sample in data.samples] == [
            first,
            "<user> add a b </user> <assistant>",
        ]
        assert (data.num_read, data.num_too_long) == (4, 2)
    else:
        # the tool's name makes the last one 6 long
        assert [sample.prompt for sample in data.samples] == [first]
        assert (data.num_read, data.num_too_long) == (4, 3)
    assert compute_prompt_lengths(data.samples, WordTokenizer())[0] == 5 + extra


def test_filter_keeps_order_and_measures_media_by_the_processor(monkeypatch):
    """The filter keeps the order, measures texts in one tokenizer call, and prompts with images by
    their processor."""

    def processor(text, **media):
        return {"input_ids": [text.split() + ["<image>"] * 4 * len(media["images"])]}

    samples = [
        Sample(prompt="one two", index=0),
        Sample(prompt="a b", index=1, multimodal_inputs={"images": ["i"], "videos": None}),
        Sample(prompt="a b c d e f g", index=2),
    ]
    assert [s.index for s in filter_long_prompt(samples, WordTokenizer(), processor, 6)] == [0, 1]
    assert [s.index for s in filter_long_prompt(samples, WordTokenizer(), processor, 5)] == [0]
    assert filter_long_prompt(samples, WordTokenizer(), processor, None) is samples


def test_nothing_left_after_the_filter_is_an_error_with_counts(tmp_path):
    """A filter that leaves no prompt is an error with counts, and not an endless search."""
    path = numbered(tmp_path / "d.jsonl", 3)
    with pytest.raises(ConfigError, match="3 prompts are longer than 0 tokens"):
        Dataset(path, WordTokenizer(), None, 0, prompt_key="input")


def test_shuffle_is_a_function_of_seed_and_epoch_and_leaves_the_global_generator_alone(tmp_path):
    """The order depends on seed and epoch alone, so that a resume repeats it, and the global random
    generator is not touched."""
    path = numbered(tmp_path / "d.jsonl", 50)
    data, other = (Dataset(path, None, None, None, prompt_key="input", seed=7) for _ in range(2))
    random.seed(1)
    before = random.getstate()
    data.shuffle(3)
    assert random.getstate() == before
    other.shuffle(0)
    assert [s.prompt for s in data.samples] != [s.prompt for s in other.samples]
    other.shuffle(3)
    assert [s.prompt for s in data.samples] == [s.prompt for s in other.samples]
    assert sorted(s.prompt for s in data.samples) == sorted(f"p{i}" for i in range(50))


def test_media_take_the_places_of_their_placeholders():
    """Media stand where their placeholders are in the text, and a count that does not fit is an
    error."""
    data = {"q": "see <image> and <image>!", "pics": ["A", "B"]}
    (message,) = _build_messages(data, "q", True, {"image": "pics"})
    assert message["content"] == [
        {"type": "text", "text": "see "}, {"type": "image", "image": "A"}, {"type": "text", "text": " and "},
        {"type": "image", "image": "B"}, {"type": "text", "text": "!"},
    ]  # fmt: skip
    for pics, words in (([], "more <image> placeholders"), (["A", "B", "C"], "unused")):
        with pytest.raises(ValueError, match=words):
            _build_messages({"q": data["q"], "pics": pics}, "q", True, {"image": "pics"})
    assert _build_messages({"q": "plain"}, "q", False) == "plain"
    assert _build_messages({"q": "plain"}, "q", True) == [{"role": "user", "content": "plain"}]


def test_the_source_of_a_sample_is_its_attribute_then_its_metadata():
    """A sample's source is its attribute, else the one in its metadata."""
    sample = Sample(metadata={"source_name": "gsm"})
    assert get_source(sample) == "gsm" and get_source(Sample()) == "unknown"
    assert get_source(types.SimpleNamespace(source="own", metadata={"source_name": "gsm"})) == "own"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
