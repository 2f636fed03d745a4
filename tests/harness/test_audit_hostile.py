"""`slime audit` on broken and hostile files: an error that names the cause, or text shown as text;
nothing of a file is run, and no link out of the folder is followed.
"""

import json
import os
import pickle
import sys
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
import torch
from support import audit_files as files
from support import recordings

from slime.exceptions import ConfigError, RolloutDataError
from slime.harness.audit import command
from slime.harness.audit.audit import audit
from slime.harness.audit.findings import Level
from slime.harness.audit.torch_file import read_torch_file

NUM_GPUS = 0

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "run"


def problems(result):
    return {one.name for one in result.findings if one.level is not Level.INFO}


def names(folder):
    return [name for name, _ in audit(folder).unreadable]


class Runs:
    """A pickle that runs a command where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_runs_is_named_and_not_run(tmp_path, capsys):
    """The type is named, the exit status is 2, and its command did not run."""
    mark = tmp_path / "ran"
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    samples[0]["metadata"] = {"x": Runs(mark)}
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    assert command.main([str(tmp_path / "0.pt")]) == 2
    assert "posix.system" in capsys.readouterr().err
    assert not mark.exists()


def test_the_rest_of_a_folder_is_audited(tmp_path):
    """A hostile, a cut and a foreign file are listed; the two sound steps are audited."""
    samples = {step: files.samples_of(step) for step in range(4)}
    for step in range(4):
        files.write_slime_rollout(tmp_path, step, samples[step])
    folder = tmp_path / "rollout_data"
    cut = (folder / "2.pt").read_bytes()
    (folder / "2.pt").write_bytes(cut[: len(cut) // 2])
    torch.save({"rollout_id": 3, "samples": [{"metadata": Runs("/tmp/never")}]}, folder / "3.pt")
    (folder / "notes.jsonl").write_text('{"some": "thing"}\n')
    result = audit(tmp_path)
    assert result.samples == 2 * files.GROUPS * files.SIZE and result.steps == 2
    assert [name for name, _ in result.unreadable] == ["rollout_data/2.pt", "rollout_data/3.pt"]
    assert [name for name, _ in result.skipped] == ["rollout_data/notes.jsonl"]
    assert problems(result) == {"unreadable_file"} and result.exit_status == 1


def link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def folder(path):
    path.unlink()
    path.mkdir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def shorter(path):
    path.write_bytes(path.read_bytes()[:3])


def changed_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def elsewhere(path):
    path.write_text(path.read_text().replace("steps.jsonl", "../../../../etc/passwd"))


@pytest.mark.parametrize("name, damage, why", [
    ("samples.parquet", link, "is a link"),
    ("samples.parquet", folder, "is listed and is no file"),
    ("samples.parquet", pipe, "is listed and is no file"),
    ("samples.parquet", Path.unlink, "is listed and is no file"),
    ("steps.jsonl", shorter, "has 3 bytes, its manifest says"),
    ("train.parquet", changed_bit, "is damaged: its hash is"),
    ("manifest.train.json", shorter, "cannot be read"),
    ("manifest.train.json", pipe, "is no file"),
    ("manifest.train.json", elsewhere, "lists the part 'steps' as '../../../../etc/passwd'"),
])  # fmt: skip
def test_a_recorded_file_that_is_not_as_it_was_written_is_named(tmp_path, name, damage, why):
    """Once, with the reason, and nothing of it is audited; the rest of the recording is."""
    recording = recordings.copy_of(GOLDEN, tmp_path / "rec")
    damage(recording / "rollout_000001" / name)
    result = audit(recording)
    assert [file for file, _ in result.unreadable] == [f"rollout_000001/{name}"]
    assert result.unreadable[0][1].startswith(why)
    assert "unreadable_file" in problems(result) and result.exit_status == 1
    assert f"rollout_000001/{name}" not in dict(result.skipped) and result.steps >= 2


@pytest.mark.parametrize("name", ["samples.parquet", "train.parquet"])
def test_a_part_that_is_audited_alone_is_held_against_its_manifest(tmp_path, name, capsys):
    """Status 2, as `slime diff` has it; a neighbour's damage is not this part's."""
    recording = recordings.copy_of(GOLDEN, tmp_path / "rec")
    folder_of_part = recording / "rollout_000001"
    shorter(folder_of_part / "steps.jsonl")
    assert command.main([str(folder_of_part / name)]) in (0, 1)
    changed_bit(folder_of_part / name)
    assert command.main([str(folder_of_part / name)]) == 2
    assert f"{name} is damaged: its hash is" in capsys.readouterr().err


def test_numpy_values_of_a_dump_are_read_without_numpy_unpickling(tmp_path):
    """Rewards of reward functions are numpy numbers, routed experts arrays; an array of objects is
    refused."""
    path = tmp_path / "0.pt"
    value = {"a": np.float64(0.5), "b": np.arange(6, dtype=np.int32).reshape(2, 3), "c": [1, 2]}
    torch.save(value, path)
    with path.open("rb") as file:
        read = read_torch_file(file)
    assert read["a"] == 0.5 and read["c"] == [1, 2]
    np.testing.assert_array_equal(read["b"], value["b"])
    torch.save({"a": np.array([{}], dtype=object)}, path)
    with path.open("rb") as file, pytest.raises(RolloutDataError, match="not numbers"):
        read_torch_file(file)


def test_what_another_library_allows_is_not_allowed(tmp_path):
    """Megatron-core allows types of its own for the whole process; a dump may not name them, and
    they are allowed again afterwards."""
    torch.save({"rollout_id": 0, "samples": [{"when": Path("x")}]}, tmp_path / "0.pt")
    name = type(Path("x"))
    with torch.serialization.safe_globals([name]):
        with pytest.raises(ConfigError, match="names pathlib"):
            audit(tmp_path / "0.pt")
        assert name in torch.serialization.get_safe_globals()
    assert name not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("length", [1, 47, 48, 1000, 1001, 2500])
def test_long_lists_of_numbers_come_back_as_they_were(tmp_path, length, monkeypatch):
    """Long lists are cut out of the pickle and decoded as arrays: ids of every width, negative ones,
    floats, masks, and lists that are not only numbers."""
    monkeypatch.setattr("slime.harness.audit.torch_file._WORTH_IT", 1)
    rng = np.random.default_rng(length)
    wide = rng.choice([0, 255, 256, 65535, 65536, 2**31 - 1, -1, -(2**31)], size=length).tolist()
    value = {
        "ids": wide,
        "small": rng.integers(0, 256, size=length).tolist(),
        "floats": [*rng.normal(size=length - 1).tolist(), float("nan")],
        "mixed": [*range(length), "end"],
        "nested": [list(range(length)), [0.5] * length],
        "text": "(" + "Ka" * 60 + "e",
        "huge": [2**70, *range(length)],
    }
    torch.save(value, tmp_path / "x.pt")
    with (tmp_path / "x.pt").open("rb") as file:
        read = read_torch_file(file)
    for name in ("ids", "small"):
        assert list(read[name]) == value[name]
    np.testing.assert_array_equal(read["floats"], value["floats"])
    assert list(read["mixed"]) == value["mixed"] and read["huge"] == value["huge"]
    assert [list(one) for one in read["nested"]] == value["nested"]
    assert read["text"] == value["text"]


def test_numbers_that_never_end_are_looked_at_once(tmp_path):
    """Every second byte begins a list of numbers that has no end: looking from each of them to the
    end of the file would take minutes."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}" + b"(K" * 40_000)
    begun = time.process_time()
    with path.open("rb") as file, pytest.raises(RolloutDataError):
        read_torch_file(file)
    assert time.process_time() - begun < 6


def test_a_tensor_of_claimed_size_is_refused(tmp_path):
    """One number with stride 0 claims 10^12 tokens: the file is listed, and no memory taken."""
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    samples[0]["tokens"] = torch.zeros(1, dtype=torch.int64).expand(10**12)
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    files.write_slime_rollout(tmp_path, 1, files.samples_of(1))
    result = audit(tmp_path)
    assert result.samples == files.GROUPS * files.SIZE
    ((name, why),) = result.unreadable
    assert name == "0.pt" and "claims 1000000000000 entries" in why


def test_an_archive_that_claims_more_than_it_has_is_refused(tmp_path):
    """torch.save neither compresses nor overlaps its parts: what does is no such file."""
    torch.save({"rollout_id": 0, "samples": []}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        archive.writestr("archive/data/0", b"\0" * 10_000_000)
    (tmp_path / "plain.pt").unlink()
    with pytest.raises(ConfigError, match="compressed parts"):
        audit(tmp_path / "0.pt")


def test_lists_that_hold_each_other_are_no_trap(tmp_path):
    """A value of ten levels with ten references each has 10^10 leaves, and one may hold itself."""
    value = ["x"]
    for _ in range(10):
        value = [value] * 10
    itself = []
    itself.append(itself)
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    for name in ("prompt", "label", "tokens", "loss_mask", "reward"):
        samples[0][name] = value
    samples[1]["prompt"] = itself
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    result = audit(tmp_path / "0.pt")
    assert result.samples == files.GROUPS * files.SIZE
    assert "broken_record" in problems(result)


def test_links_are_not_followed(tmp_path):
    """A link out of the folder, a loop of links and a pipe are listed, not read; the path itself may
    be a link."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    files.write_verl(outside, 1, files.samples_of(1))
    files.write_verl(run, 0, files.samples_of(0))
    (run / "1.jsonl").symlink_to(outside / "1.jsonl")
    (run / "more").symlink_to(outside)
    (run / "loop").symlink_to(run)
    os.mkfifo(run / "2.jsonl")
    (tmp_path / "latest").symlink_to(run)
    result = audit(tmp_path / "latest")
    assert result.steps == 1 and result.samples == files.GROUPS * files.SIZE
    assert sorted(name for name, _ in result.skipped) == ["1.jsonl", "2.jsonl", "loop", "more"]


def verl_line(**fields):
    return {
        "input": "What is 1 + 1?",
        "output": "two",
        "gts": "2",
        "score": 1.0,
        "step": 0,
        **fields,
    }


def test_terminal_codes_and_markup_are_shown_as_text(tmp_path, capsys):
    """A response cannot move the cursor, recolour the terminal, reverse the text or run a script."""
    evil = "\x1b[2J\x1b]0;title\x07\u202e<script>alert(1)</script> \ufffd \x9b31m"
    names = {"score<img src=x onerror=alert(2)>": 0.5}
    files.write_lines(tmp_path / "0.jsonl", [verl_line(output=evil, input=evil + "?", **names)] * 4)
    page = tmp_path / "page.html"
    assert command.main([str(tmp_path), "--html", str(page), "--top", "9"]) == 1
    shown = capsys.readouterr().out
    assert not any(code in shown for code in ("\x1b", "\x07", "\u202e", "\x9b"))
    assert "\\x1b[2J" in shown
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    assert "\x1b" not in html and "\u202e" not in html and "http" not in html.split("</style>")[1]
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


def test_json_of_every_kind_of_number_is_one_object(tmp_path, capsys):
    """NaN, infinities, integers beyond a float and half an emoji come out as one JSON object."""
    lines = [
        verl_line(score=float("nan")),
        verl_line(score=float("inf"), output="\ud83d"),
        verl_line(score=10**400, input=["a", {"b": 1}], gts=10**300),
        verl_line(score="1.5", output=7),
    ]
    files.write_lines(tmp_path / "0.jsonl", lines)
    assert command.main([str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 4 and found["exit_status"] == 1
    assert "reward_not_finite" in {one["name"] for one in found["findings"]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"input": ' * 50_000,
        b'{"input": "a", "output": "b", "score": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'"text"\n',
        b"\xff\xfe" + '{"input": 1}'.encode("utf-16-le"),
        b"PK\x03\x04rubbish",
        b"PAR1rubbishPAR1",
    ],
    ids=[
        "empty",
        "blank",
        "zeros",
        "deep",
        "deeper",
        "deep value",
        "text",
        "utf-16",
        "zip",
        "parquet",
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".pt", ".parquet", ".safetensors"])
def test_rubbish_is_an_error_with_the_reason(content, suffix, tmp_path, capsys):
    """Whatever the bytes, the exit status is 2 with a reason and no traceback; within a folder the
    file is listed and its neighbour audited."""
    path = tmp_path / f"1{suffix}"
    path.write_bytes(content)
    assert command.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    files.write_verl(tmp_path, 0, files.samples_of(0))
    result = audit(tmp_path)
    assert result.samples == files.GROUPS * files.SIZE
    assert len(result.unreadable) + len(result.skipped) == 1


def test_a_torn_line_costs_itself(tmp_path):
    """A file cut within a line, and a line of nothing but brackets: the other lines are audited, and
    the first bad one is named."""
    path = files.write_verl(tmp_path, 0, files.samples_of(0))
    whole = path.read_bytes()
    path.write_bytes(b"[" * 10_000 + b"\n" + whole[:-30])
    with pytest.raises(ConfigError, match="no known shape|nested too deeply|not JSON"):
        audit(path)
    path.write_bytes(whole[:-30])
    result = audit(path)
    assert result.samples == files.GROUPS * files.SIZE - 1
    ((_, why),) = result.unreadable
    assert why.startswith("line 24: not JSON") and "23 lines were read" in why


def test_a_line_of_100_mb_is_read(tmp_path):
    """One response of 100 MB is cut for the report, and does not end it."""
    lines = [
        verl_line(output="word " * 20_000_000),
        *[verl_line(output=f"no {i}") for i in range(3)],
    ]
    files.write_lines(tmp_path / "0.jsonl", lines)
    result = audit(tmp_path / "0.jsonl")
    assert result.samples == 4
    assert "looping_response" in problems(result)


def test_a_batch_on_one_long_line_is_taken_apart(tmp_path, monkeypatch):
    """A line that is too long to be parsed whole gives what the same line gives parsed, and a line
    behind it is read."""
    samples = files.samples_of(0)
    samples[3]["response"] = 'quotes " and \\ ] [ } in a text, \u2028 and é'
    files.write_nemo(tmp_path / "whole", 0, samples, batch=True)
    path = files.write_nemo(tmp_path / "apart", 0, samples, batch=True)
    path.write_text(path.read_text() + json.dumps({"content": ["x"], "rewards": [1.0]}) + "\n")
    whole = audit(tmp_path / "whole")
    monkeypatch.setattr("slime.harness.audit.json_lines.LONG_LINE", 1 << 9)
    apart = audit(tmp_path / "apart")
    assert (whole.samples, apart.samples) == (len(samples), len(samples) + 1)
    assert apart.unreadable == []
    both = ("tokens", "masks", "rollout_log_probs", "log_probs", "advantage")
    assert all(whole.columns[name] == apart.columns[name] == len(samples) for name in both)
    assert [one.sentence for one in whole.findings] == [one.sentence for one in apart.findings]


@pytest.mark.parametrize(
    "text",
    [
        '{"content": [' + "[" * 500 + "]" * 500 + "]}",
        '{"content": ["a", "rewards": [1.0]}',
        '{"content": "not closed',
        '{"rewards": [[1.0], [2.0}',
        '{"token_ids": [[1, 2], [3',
        '{"token_ids": [[1, "]"], [3]]}',
        '{"rewards" [1.0]}',
        '{"rewards": [1.0]} trailing',
    ],
)
def test_a_long_line_that_is_damaged_is_an_error(text, tmp_path, monkeypatch):
    """Brackets that do not close, no colon, more behind the object: named, not crashed on."""
    monkeypatch.setattr("slime.harness.audit.json_lines.LONG_LINE", 4)
    path = tmp_path / "train_data_step0.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError):
        audit(path)


def test_shapes_that_lie_about_lengths_are_named(tmp_path):
    """Lengths beyond the tokens, negative or not numbers, are a broken record and no crash."""
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    for i, length in enumerate([10**18, -5, "many", None, 2.5, float("nan"), True]):
        samples[i]["response_length"] = length
    samples[8]["tokens"] = ["a", "b"]
    samples[9].update(group_index=[1], index={"a": 1}, metadata=7, status=3, weight_versions="v")
    samples[10].update(rollout_log_probs=[None, 1], loss_mask=[[1]], reward={"a": "b"})
    torch.save({"rollout_id": 10**30, "samples": samples}, tmp_path / "0.pt")
    result = audit(tmp_path / "0.pt")
    assert result.samples == len(samples)
    assert {"broken_record", "reward_not_finite"} <= problems(result)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"samples": None},
        {"samples": [1]},
        {"rollout_data": {}},
        {"rollout_data": {"response_lengths": 3}},
        {"rollout_data": {"response_lengths": [1, 2], "tokens": [torch.ones(3)], "advantages": {}}},
        {"format_version": 2, "samples": 5},
        {"format_version": 2, "samples": [{"tokens": torch.ones(2, 2)}], "raw_reward": "x"},
    ],
)
def test_dumps_of_another_form_are_errors(content, tmp_path):
    """A dump that is one in name only is an error or has no problem-free samples; never a crash."""
    torch.save(content, tmp_path / "0.pt")
    try:
        result = audit(tmp_path / "0.pt")
    except ConfigError as error:
        assert str(tmp_path) in str(error)
    else:
        assert result.samples <= 2


def test_a_legacy_pickle_is_refused(tmp_path):
    """A plain pickle with the suffix .pt is not even looked into."""
    (tmp_path / "0.pt").write_bytes(pickle.dumps({"samples": Runs("/tmp/never")}))
    with pytest.raises(ConfigError, match="no file of torch.save"):
        audit(tmp_path / "0.pt")
    assert not Path("/tmp/never").exists()
    (tmp_path / "0.pt").rename(tmp_path / "0.pkl")
    with pytest.raises(ConfigError, match="It is a pickle: .pt dumps of the shapes below"):
        audit(tmp_path / "0.pkl")


def test_arrays_that_samples_share_are_counted(tmp_path):
    """A tensor that a thousand samples refer to, and one that claims memory which no byte of the
    file fills, would take a thousand times the file: refused."""
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)] * 200
    shared = torch.zeros(100_000, dtype=torch.int32)
    for one in samples:
        one.update(tokens=shared, response_length=10)
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    assert command.main([str(tmp_path / "0.pt")]) == 2
    ((_, why),) = audit_with_neighbour(tmp_path).unreadable
    assert "more numbers than the file has bytes" in why


def audit_with_neighbour(folder):
    files.write_verl(folder, 1, files.samples_of(1))
    return audit(folder)


def test_labels_of_any_form_are_compared(tmp_path):
    """A label may be a list that holds itself, or an integer that Python cannot print."""
    value = ["x"]
    for _ in range(10):
        value = [value] * 10
    samples = [files.slime_sample(one, 0) for one in files.samples_of(0)]
    for one, label in zip(samples, [value, 10**600, {"a": value}, 1.5, None], strict=False):
        one["label"] = label
    samples[6].update(group_index=10**600, rollout_id="r" * 10**6)
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    assert audit(tmp_path / "0.pt").samples == len(samples)


@pytest.mark.parametrize(
    "record",
    [
        {"step_key": "s", "step": "a", "metrics": {"rollout/raw_reward": 1}},
        {"step_key": "s", "step": [1], "metrics": {"rollout/raw_reward": 1}},
        {"step_key": "s", "step": 3, "metrics": {"rollout/raw_reward": 10**400}},
        {"step_key": "s", "step": 3, "metrics": ["rollout/raw_reward"]},
        {"step_key": "s", "step": 10**30, "metrics": {"rollout/raw_reward": {}}},
        {"step_key": "s"},
        ["no", "object"],
    ],
)
def test_metrics_of_any_form_end_nothing(record, tmp_path):
    """A record of metrics.jsonl that no run writes is passed over or named; the samples are audited."""
    sound = {"step_key": "s", "step": 1, "metrics": {"rollout/raw_reward": 0.5}}
    files.write_lines(tmp_path / "metrics.jsonl", [sound, record])
    assert audit_with_neighbour(tmp_path).samples == files.GROUPS * files.SIZE


def test_a_new_reward_name_in_every_record_is_no_column_each(tmp_path):
    """Columns are of the most frequent names: otherwise their number grows with the samples."""
    lines = [verl_line(output=f"{i}", **{f"x{i}-{k}": 1.0 for k in range(50)}) for i in range(400)]
    files.write_lines(tmp_path / "0.jsonl", lines)
    assert audit(tmp_path / "0.jsonl").samples == 400


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
