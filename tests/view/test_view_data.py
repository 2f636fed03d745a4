"""What the viewer reads: filters, tokens and their texts, row groups of a table, the state of a run."""

import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.view_runs import GOLDEN, copy_of_golden, make_run

from slime.exceptions import ConfigError, RolloutDataError
from slime.files import tables
from slime.files.jsonl import JsonlTail, JsonlWriter
from slime.harness import top
from slime.harness.run_state import state_of
from slime.view import command, jobs, rollout_table, run_rows
from slime.view.catalog import Catalog, rollouts_of
from slime.view.filters import filter_rows
from slime.view.pictures import picture
from slime.view.rollout_table import NotReady, RolloutTable
from slime.view.run_data import RunLibrary
from slime.view.run_rows import RunRows
from slime.view.templating import data_block
from slime.view.token_view import Decoders, differing_part, pieces, tokens_of

NUM_GPUS = 0
COLUMNS = {
    "reward": np.array([0.0, 0.5, np.nan, 1.0]),
    "length": np.array([3.0, 40.0, 5.0, 7.0]),
    "status": np.array(["completed", "truncated", "", "completed"], dtype=object),
}


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("reward < 0.6", [0, 1]),
        ("not reward < 0.6", [2, 3]),
        ("0 <= reward <= 0.5 and length > 10", [1]),
        ("reward == none", [2]),
        ("reward != none and status != 'truncated'", [0, 3]),
        ("'TRUNC' in status or length == 7", [1, 3]),
        ("status in ['completed', '']", [0, 2, 3]),
        ("abs(reward - 0.5) * 2 >= 1 and -length < -3", [3]),
        ("length / 0 > 1", [0, 1, 2, 3]),
    ],
)
def test_a_filter_chooses_rows(expression, rows):
    found = filter_rows(expression, COLUMNS.__getitem__, list(COLUMNS), 4)
    assert np.flatnonzero(found).tolist() == rows


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "cannot be read"),
        ("reward <", "cannot be read"),
        ("reward", "is no condition"),
        ("1 < 2 < ", "cannot be read"),
        ("rewards > 1", "Columns here: reward, length, status"),
        ("status < 'a'", "Texts are compared"),
        ("status == 1", "cannot be compared"),
        ("__import__('os').system('true')", "which it cannot"),
        ("reward.__class__", "which it cannot"),
        ("(lambda: 1)() == 1", "which it cannot"),
        ("[x for x in reward] == 1", "which it cannot"),
        ("reward ** 9 > 1", "which it cannot"),
        ("f'{reward}' == 'a'", "which it cannot"),
        (" and ".join(["reward > 1"] * 60), "characters"),
        ("+".join(["1"] * 90) + " > 1", "too many parts"),
        ("(" * 240 + "1" + ")" * 240, "cannot be read"),
    ],
)
def test_a_filter_that_is_none_says_so_and_executes_nothing(expression, said):
    with pytest.raises(ConfigError, match=said):
        filter_rows(expression, COLUMNS.__getitem__, list(COLUMNS), 4)


def test_a_character_of_several_tokens_is_the_text_of_the_first():
    parts = {1: b"a", 2: b"\xf0\x9f", 3: b"\x98", 4: b"\x80", 5: b"b", 6: b"\xff"}

    def decode(ids):
        return b"".join(parts[one] for one in ids).decode("utf-8", "replace")

    assert pieces([1, 2, 3, 4, 5], decode) == ["a", "\U0001f600", "", "", "b"]
    assert pieces([1, 6, 5], decode) == ["a", "\ufffd", "b"]  # a broken byte stands alone


def test_texts_that_differ_are_split_around_what_differs():
    assert differing_part("one two", "one two") is None
    assert differing_part("one two", "one 2 two") == ("one ", "", "2 ", "two")
    assert differing_part("", "a") == ("", "", "a", "")


def test_lengths_that_contradict_are_named_and_the_rest_is_shown():
    sample = {
        "tokens": [1, 2, 3],
        "response_length": 2,
        "rollout_log_probs": [-1.0],
        "loss_mask": [1, 1],
    }
    found = tokens_of(sample, {"log_probs": [-1.0, float("nan")]}, None)
    assert found.notes == ["1 entries of rollout_log_probs for 2 response tokens"]
    assert found.columns == {"trainer": [-1.0, "NaN"]} and found.ids == [2, 3]
    longer = tokens_of({"tokens": [1], "response_length": 5}, {}, None)
    assert longer.total == 1 and "response_length is 5" in longer.notes[0]


def test_the_decoder_of_a_recording_needs_no_transformers():
    decode, why = Decoders().of([GOLDEN / "nothing", GOLDEN / "tokenizer"])
    assert why is None and decode([33, 35, 27]) == "sum"
    assert "no tokenizer.json" in Decoders().of([GOLDEN])[1]


def test_rows_of_a_large_table_are_read_by_the_groups_that_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_ENTRIES", 1000)
    import pyarrow

    lengths = np.full(300, 10)
    values = np.arange(3000, dtype=np.int32)
    table = pyarrow.table({"row": np.arange(300), "tokens": tables.list_column(values, lengths)})
    tables.write_table(tmp_path / "t.parquet", table)
    with tables.RowReader(tmp_path / "t.parquet") as reader:
        assert [first for first, _ in reader.groups(["row"])] == [0, 100, 200]
        found = reader.rows([250, 3, 3, 299], ["row", "tokens"]).to_pydict()
        assert found["row"] == [250, 3, 3, 299] and found["tokens"][0] == list(range(2500, 2510))
        assert reader.rows([100, 199, 200, 0], ["row"])["row"].to_pylist() == [100, 199, 200, 0]
        assert [reader.num_groups_of(rows) for rows in ([0, 99], [99, 100], [])] == [1, 2, 0]
        assert reader.rows([], ["row"]).num_rows == 0
        with pytest.raises(IndexError, match="300 rows"):
            reader.rows([300], ["row"])
    assert tables.read_table(tmp_path / "t.parquet").equals(table)


def test_a_recorded_rollout_joins_its_parts_by_row():
    catalog = Catalog([GOLDEN])
    entry = catalog.entries()[0]
    with ThreadPoolExecutor(1) as pool:
        table = RolloutTable(catalog.find_rollout(entry, "rollout-1"), pool)
    read = {
        name: tables.read_table(GOLDEN / "rollout_000001" / f"{name}.parquet")
        for name in ("columns", "schedule", "train")
    }
    place = read["columns"]["raw_row"].to_pylist().index(7)
    assert table.column("normalized")[7] == pytest.approx(read["columns"]["rewards"][place].as_py())
    assert table.column("micro_batch")[7] == read["schedule"]["micro_batch"][place].as_py()
    train = read["train"].slice(place, 1).to_pylist()[0]
    mask = np.array(train["loss_masks"], dtype=bool)
    gap = np.abs(np.array(train["log_probs"]) - np.array(train["rollout_log_probs"]))[mask].mean()
    assert table.column("gap")[7] == pytest.approx(gap, abs=1e-6)
    with pytest.raises(RolloutDataError, match="rollout 0 to rollout 2"):
        catalog.find_rollout(entry, "rollout-9")


def test_slugs_stay_apart_and_name_one_folder(tmp_path):
    for name in ("a/x", "b/x", "a b", "ab", "ä", "ö"):
        make_run(tmp_path / name, rollouts=1)
    catalog = Catalog([tmp_path / "a", tmp_path / "b", tmp_path])
    slugs = [entry.slug for entry in catalog.entries()]
    assert len(set(slugs)) == len(slugs) == 6
    assert all(catalog.find(entry.slug) == entry for entry in catalog.entries())
    assert [one.key for one in rollouts_of(catalog.entries()[0])] == ["rollout-0"]


@pytest.mark.parametrize(
    ("log", "age", "word", "note"),
    [
        (None, 0, "running", ""),
        (None, 900, "died", "it stopped while: train 3/8"),
        ("slime: finished with status 0 after 3 s\n", 900, "ended", ""),
        ("Traceback\nslime.X: no\nValueError: lr is 0\n[x] slime: finished with status 1 after 3 s\n", 900, "failed", "ValueError: lr is 0"),
        ("RuntimeError: rank 1 died\n", 900, "died", "RuntimeError: rank 1 died"),
        ("E: no\nslime: finished with status 130 after 3 s\n", 900, "failed", "interrupted"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["driver.log", "local.log"])
def test_a_run_goes_on_has_ended_or_died(tmp_path, name, log, age, word, note):
    now = 1_000_000.0
    record = {"time": now - age, "pid": 2**30, "phase": "train", "done": 3, "total": 8}
    JsonlWriter(tmp_path / "progress.jsonl").write(record)
    if log:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / name).write_text(log)
    found = state_of(tmp_path, now=now)
    assert (found.word, found.note) == (word, note)


def test_the_end_of_a_file_is_read_from_the_first_whole_line(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write_all([{"step": i} for i in range(100)])
    tail = JsonlTail(tmp_path / "m.jsonl")
    tail.skip_to_end(100)
    found = tail.read()
    assert found[-1] == {"step": 99} and 1 <= len(found) < 5 and tail.malformed == 0
    writer.write({"step": 100})
    assert tail.read() == [{"step": 100}]
    every = JsonlTail(tmp_path / "m.jsonl")
    every.skip_to_end(10**6)
    assert len(every.read()) == 101


def test_a_port_that_is_taken_is_the_next_one(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        if port < 65000:
            with command.listen("127.0.0.1", port) as found:
                assert port < found.getsockname()[1] <= port + command.PORTS_TRIED
    with pytest.raises(ConfigError, match="no port could be had"):
        command.listen("192.0.2.1", 7860)


def test_what_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(command, "NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(
        ConfigError, match=r"needs no_such_package: pip install 'slime-rl\[viewer\]'"
    ):
        command.check_packages()
    with pytest.raises(ConfigError, match="There is no /nowhere"):
        Catalog([Path("/nowhere")])
    with pytest.raises(ConfigError, match="give its recording"):
        Catalog([GOLDEN / "rollout_000001"])


def test_vendored_scripts_have_their_licences_and_fetch_nothing():
    static = Path(command.__file__).parent / "static"
    licences = {path.stem.partition("-")[0] for path in (static / "licenses").iterdir()}
    assert licences == {"uPlot", "htmx"}
    for path in [*static.glob("*.js"), *static.glob("*.css")]:
        if ".min." not in path.name:
            assert "http://" not in path.read_text() and "https://" not in path.read_text()


def test_a_job_that_hangs_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(jobs.sys, "executable", str(script))
    monkeypatch.setattr(jobs, "TIMEOUT_S", 0.2)
    held = jobs.Jobs()
    for _ in range(200):
        found = held.ask("audit", "x")
        if found is not None:
            break
        time.sleep(0.05)
    assert found.error == "it was stopped after 0 s"
    held.close()


@pytest.mark.parametrize(
    ("status", "code", "said"), [(0, 0, "has ended"), (1, 1, "has failed: ValueError: no")]
)
def test_top_shows_a_run_from_its_start_and_ends_with_it(tmp_path, capsys, status, code, said):
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "driver.log").write_text(
        f"ValueError: no\nslime: finished with status {status} after 1 s\n"
    )
    assert top.main([str(run)]) == code
    shown = capsys.readouterr().out
    assert "rollout 1" in shown and "reward nan" in shown and said in shown
    with pytest.raises(ConfigError, match="is no run folder"):
        top.main([str(tmp_path)])


def test_a_picture_places_curves_marks_and_values_that_are_not_finite():
    series = [
        {"run": 0, "label": "a", "x": [0, 1, 2], "y": [1.0, 10.0, 100.0], "bad": [[3, "NaN"]]},
        {"run": 0, "label": "b", "x": [], "y": [], "bad": [[0, "inf"]]},
    ]
    mark = {"step": 1, "kind": "skipped", "text": "t"}
    chart = {
        "title": "t",
        "unit": "",
        "axis": "train",
        "log": True,
        "stacked": False,
        "series": series,
        "marks": [mark],
    }
    found = picture(chart)
    assert [line.last for line in found.lines] == ["NaN", "inf"]
    ys = [float(point.split(",")[1]) for point in found.lines[0].path[1:].split(" L")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2])  # logarithmic
    assert [text for _, text in found.y_ticks] == ["1", "10", "100"]
    assert found.marks[0][0] == pytest.approx(found.lines[0] and 54 + (420 - 54 - 8) / 3, abs=0.1)
    empty = picture({**chart, "series": [{**series[1], "bad": []}], "marks": []})
    assert empty.lines[0].path == ""


@pytest.mark.parametrize("damaged", ["", "samples", "train"])
def test_a_large_rollout_is_shown_while_its_hashes_are_compared(tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(rollout_table, "SMALL_PART", 0)
    root = copy_of_golden(tmp_path / "rec")
    if damaged:  # a page that nobody asks for at first
        path = root / "rollout_000001" / f"{damaged}.parquet"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    catalog = Catalog([root])
    ref = catalog.find_rollout(catalog.entries()[0], "rollout-1")
    with ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        pool.submit(gate.wait, 30)
        table = RolloutTable(ref, pool)
        assert table.is_preparing and not table.has_token_statistics()
        assert "being compared with their hashes" in table.problems[-1]
        with pytest.raises(NotReady, match="being computed"):
            table.column("gap")
        with pytest.raises(NotReady, match="being read"):
            table.search("tool")
        assert table.excerpts([0], "response") or damaged == "samples"
        gate.set()
    assert not table.is_preparing
    found = [one for one in table.problems if f"{damaged}.parquet is damaged" in one]
    assert bool(found) == bool(damaged)
    if not damaged:
        assert table.problems == [] and table.search("tool").sum() == 4
        assert np.isfinite(table.column("gap")).any()


def themes():
    """(name, colours by variable) of the style sheet's two themes."""
    css = (Path(command.__file__).parent / "static" / "view.css").read_text()
    for name, start in (("light", ":root {"), ("dark", ':root[data-theme="dark"] {')):
        block = css.split(start, 1)[1].split("}", 1)[0]
        yield name, dict(re.findall(r"--([a-z0-9-]+): #([0-9a-f]{3,6});", block))


def luminance(colour):
    """The relative luminance of WCAG 2."""
    full = colour if len(colour) == 6 else "".join(2 * one for one in colour)
    parts = [int(full[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("name", "colours"), themes(), ids=lambda one: one if isinstance(one, str) else ""
)
def test_every_text_has_the_contrast_of_wcag_aa(name, colours):
    def contrast(a, b):
        low, high = sorted((luminance(colours[a]), luminance(colours[b])))
        return (high + 0.05) / (low + 0.05)

    texts = ("ink", "soft", "link", "bad", "good", "warn")
    pairs = [(text, under) for text in texts for under in ("paper", "band")]
    pairs += [
        ("ink", f"{kind}{n}")
        for kind, most in (("s", 4), ("n", 3), ("p", 3))
        for n in range(1, most + 1)
    ]
    pairs += [("ink", "nan"), ("ink", "mark"), ("paper", "link")]
    assert {pair: round(contrast(*pair), 2) for pair in pairs if contrast(*pair) < 4.5} == {}
    lines = [f"c{n}" for n in range(8)] + ["bar-in", "bar-out"]
    assert {line: contrast(line, "paper") for line in lines if contrast(line, "paper") < 3} == {}


def test_data_in_a_page_cannot_end_its_element():
    value = {"</script>": ["<!--<script>", "&lt;", "\u2028"], "n": 1.5}
    shown = str(data_block(value))
    assert not set("<>&\u2028") & set(shown) and json.loads(shown) == value


def test_rows_of_runs_are_kept_and_made_anew_when_the_run_writes(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    catalog = Catalog([run])
    rows = RunRows(catalog, RunLibrary(catalog))
    entry = catalog.entries()[0]
    monkeypatch.setattr(run_rows, "LARGE", 10)
    assert rows.row(entry, patient=False).state.word == "being read"
    first = rows.row(entry, patient=True)
    assert first.reward.last == "NaN" and rows.row(entry, patient=False).reward is first.reward
    record = {"step_key": "rollout/step", "step": 3, "metrics": {"rollout/reward/mean": 0.5}}
    JsonlWriter(run / "metrics.jsonl").write(record)
    assert rows.row(entry, patient=False).reward.last == "0.5"


def test_another_run_in_the_folder_has_none_of_the_first_ones_numbers(tmp_path):
    run = make_run(tmp_path / "run", rollouts=5)
    catalog = Catalog([run])
    data = RunLibrary(catalog).get(catalog.entries()[0])
    before = data.now()
    assert before.records.numbers("train/loss")[0] == [0, 1, 2, 3, 4]
    (run / "metrics.jsonl").rename(run / "metrics.1.jsonl")
    record = {"step_key": "train/step", "step": 7, "metrics": {"train/loss": 2.0}}
    JsonlWriter(run / "metrics.jsonl").write_all([record] * 40)  # longer than the first was
    after = data.now()
    assert after.records.numbers("train/loss") == ([7], [2.0])
    assert "rollout/reward/mean" not in after.records.series and after.version > before.version


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
