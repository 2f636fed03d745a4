"""A recording from someone else is data: what it holds is read within limits, or refused with a
sentence; nothing outside its folder is read, and nothing runs.
"""

import argparse
import json
import stat
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from support.gate_samples import sound_sample
from support.rollout_args import rollout_args

from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.sample_table import sample_table
from slime.recording import manifest
from slime.recording.manifest import ROLLOUT, Manifest
from slime.recording.reader import Recording
from slime.recording.run_record import begin_recording, options_of
from slime.recording.writer import PartWriter

NUM_GPUS = 0


@pytest.fixture
def recording(tmp_path):
    """A recording of rollout 0 with the samples of a table."""
    root = tmp_path / "rec"
    root.mkdir()
    (root / "run_0000.json").write_text(json.dumps({"format": manifest.FORMAT, "options": {}}))
    writer = PartWriter(root, ROLLOUT, run=0)
    writer.begin(0)
    writer.add("gate", lambda path: path.write_text('{"a": 1}') and None)
    table = sample_table([sound_sample(i) for i in range(4)])
    writer.add("samples", lambda path: tables.write_table_to(path, table))
    writer.finish()
    writer.close()
    assert Recording(root).rollout(0).problems() == []
    return Recording(root)


def folder_of(recording: Recording) -> Path:
    return manifest.rollout_folder(recording.root, 0)


def test_a_part_that_is_a_link_is_not_followed(recording, tmp_path):
    """It could name any file that the reader's user may read."""
    secret = tmp_path / "secret"
    secret.write_text('{"a": "secret"}')
    part = folder_of(recording) / "gate.json"
    part.unlink()
    part.symlink_to(secret)
    rollout = recording.rollout(0)
    with pytest.raises(RolloutDataError, match="gate.json is a link"):
        rollout.json("gate")
    assert "is a link" in rollout.problems()[0]


@pytest.mark.parametrize("name", ["run_0000.json", "rollout_000000/manifest.rollout.json"])
def test_a_manifest_or_run_record_that_is_a_link_is_refused(recording, tmp_path, name):
    """The same for what lists the parts."""
    path = recording.root / name
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(RolloutDataError, match="is a link"):
        Recording(recording.root).rollout(0)
        Recording(recording.root).run_record(0)


def test_a_rollout_that_is_a_link_is_not_there(recording, tmp_path):
    """It is neither listed nor opened."""
    (recording.root / "rollout_000001").symlink_to(folder_of(recording))
    assert recording.rollouts == [0]
    with pytest.raises(RolloutDataError, match="has no rollout 1; it has 0"):
        recording.rollout(1)


PART = {"name": "gate", "file": "gate.json", "num_bytes": 8, "blake2b": "00", "schema": 1}
GOOD = {"format": manifest.FORMAT, "rollout_id": 0, "run": 0, "evaluation": False, "facts": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": {"gate": {**PART, "file": "../../../etc/passwd"}}},
        {"parts": {"gate": {**PART, "file": "/etc/passwd"}}},
        {"parts": {"gate": {**PART, "file": "samples.parquet"}}},
        {"parts": {"other": PART}},
        {"parts": {"gate": {**PART, "schema": 2}}},
        {"parts": {"gate": {**PART, "more": 1}}},
        {"parts": {"gate": [1]}},
        {"parts": [PART]},
        {"parts": None},
        {"parts": {}, "rollout_id": 1e400},
        {"parts": {}, "rollout_id": "x"},
        {"parts": {}, "run": 1e308 * 10},
        {"parts": {}, "facts": 3},
        {"parts": {}, "format": "slime-recording-9"},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_manifest_lists_only_files_of_the_format(recording, changes):
    """A part has one file name, and a damaged manifest is a sentence."""
    text = json.dumps({**GOOD, **changes}).replace("Infinity", "1e999")
    manifest.manifest_path(folder_of(recording), ROLLOUT).write_text(text)
    with pytest.raises(RolloutDataError):
        recording.rollout(0)


@pytest.mark.parametrize(
    "text", ["[" * 900 + "]" * 900, "[" * 200_000, '{"a":' * 900 + "1" + "}" * 900, "\x00", ""]
)
def test_json_that_is_deep_or_none_is_a_sentence(recording, text):
    """Python's own reader ends in a RecursionError."""
    path = folder_of(recording) / "gate.json"
    path.write_text(text)
    try:
        recording.rollout(0).json("gate")
    except RolloutDataError as error:
        assert "gate.json" in str(error)
    else:
        assert text.startswith('{"a":')  # orjson reads 900 levels; they are only data


def test_a_run_record_of_a_gigabyte_is_not_read(recording):
    """The file is sparse: only its size says so."""
    with open(recording.root / "run_0000.json", "r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(RolloutDataError, match="has more than .* bytes"):
        recording.rollout(0).options()


# --- tables that expand ---------------------------------------------------------------------------


def bomb_of_numbers(path):
    pyarrow.parquet.write_table(
        pyarrow.table({"tokens": np.zeros(60_000_000, dtype=np.int64)}), path, compression="zstd"
    )


def bomb_of_nulls(path):
    column = pyarrow.nulls(60_000_000, pyarrow.int64())
    pyarrow.parquet.write_table(pyarrow.table({"tokens": column}), path)


def bomb_of_texts(path):
    text = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(np.zeros(200_000, dtype=np.int32)), pyarrow.array(["x" * 100_000])
    )
    pyarrow.parquet.write_table(pyarrow.table({"rest": text}), path, compression="zstd")


@pytest.mark.parametrize("write", [bomb_of_numbers, bomb_of_nulls, bomb_of_texts])
def test_a_small_file_that_expands_to_gigabytes_is_refused(tmp_path, write):
    """Its footer, or the index of its texts, says how far it would expand."""
    path = tmp_path / "samples.parquet"
    write(path)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(RolloutDataError, match="would take .* in memory"):
        tables.read_table(path)


def test_texts_that_repeat_within_bounds_are_read(tmp_path):
    """A dataset's name or a system prompt is the same in every row."""
    texts = ["system prompt " * 2000] * 20_000
    table = pyarrow.table({"prompt": pyarrow.array(texts[:3000], pyarrow.large_string())})
    tables.write_table(tmp_path / "t.parquet", table)
    assert tables.read_table(tmp_path / "t.parquet").equals(table)


def test_long_texts_that_differ_keep_their_type(tmp_path):
    """A traced run's samples: their spans are a column of long texts, which came back as `string`
    and could not be put beside fresh ones."""
    texts = [f"{number} " * 900 for number in range(1500)]
    table = pyarrow.table({"rest": pyarrow.array(texts, pyarrow.large_string())})
    tables.write_table(tmp_path / "t.parquet", table)
    assert tables.read_table(tmp_path / "t.parquet").equals(table)


@pytest.mark.parametrize("damage", ["cut", "flipped", "footer", "empty"])
def test_a_damaged_table_is_named(recording, damage):
    """Verifying finds it by its hash, reading by the checksum of a page."""
    path = folder_of(recording) / "samples.parquet"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[40] ^= 4
    elif damage == "footer":
        data[-20:-9] = b"\xff" * 11
    else:
        data = bytearray()
    path.write_bytes(data)
    rollout = recording.rollout(0)
    assert len(rollout.problems()) == 1 and "samples.parquet" in rollout.problems()[0]
    with pytest.raises(RolloutDataError, match=r"samples\.parquet"):
        rollout.judged_samples()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_flipped_bit_in_a_large_table_is_found(tmp_path, monkeypatch, is_sealed):
    """By the file's own hash, which is computed once for all columns, or by a page's checksum."""
    monkeypatch.setattr(tables, "SMALL_FILE", 0)
    hashed = []
    real = tables.table_seal.is_unchanged
    monkeypatch.setattr(
        tables.table_seal, "is_unchanged", lambda path: (hashed.append(path), real(path))[1]
    )
    path = tmp_path / "table.parquet"
    numbers = pyarrow.array(np.arange(1000.0))
    write = tables.write_table if is_sealed else tables.write_table_to
    write(path, pyarrow.table({"a": numbers, "b": numbers}))
    file = tables.TableFile(path)
    assert file.column("a").to_pylist() == numbers.to_pylist()
    assert file.column("b").to_pylist() == numbers.to_pylist()
    assert not is_sealed or len(hashed) == 1
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    with pytest.raises(RolloutDataError, match=r"table\.parquet"):
        tables.TableFile(path).column("a")


def test_a_table_with_other_columns_or_types_is_a_sentence(recording):
    """Numbers where texts belong, and texts that are no JSON."""
    path = folder_of(recording) / "samples.parquet"
    table = tables.read_table(path)
    for name, column in {
        "rest": pyarrow.array([1, 2, 3, 4]),
        "status": pyarrow.array(["odd"] * 4),
        "metadata": pyarrow.array(["{"] * 4, pyarrow.large_string()),
        "kinds": pyarrow.array(['{"tokens": "array object"}'] * 4, pyarrow.large_string()),
        "tokens": pyarrow.array([1, 2, 3, 4]),
        "label": pyarrow.array(
            ['{"__array__": "AA", "dtype": "O", "shape": [1]}'] * 4, pyarrow.large_string()
        ),
    }.items():
        place = table.column_names.index(name)
        tables.write_table(path, table.set_column(place, name, column))
        with pytest.raises(RolloutDataError):
            recording.rollout(0).judged_samples()


# --- secrets --------------------------------------------------------------------------------------


def test_no_secret_is_in_the_run_record(tmp_path, monkeypatch):
    """Options, URLs, dicts of variables, attributes of --custom-config-path, the command line."""
    secret = "sEcrEt77x"
    words = [
        "--wandb-key", secret, f"--wandb-key={secret}", "--rm-url", f"http://me:{secret}@host/score?token={secret}",
        "--train-env-vars", json.dumps({"HF_TOKEN": secret, "NCCL_DEBUG": "INFO"}),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["slime", *words, "\udcff"])
    args = rollout_args(record=str(tmp_path / "rec"))
    args = argparse.Namespace(
        **{
            **vars(args),
            "wandb_key": secret,
            "rm_url": f"https://user:{secret}@host/x?api_key={secret}&k=1",
            "train_env_vars": {"OPENAI_API_KEY": secret, "NCCL_DEBUG": "INFO"},
            "judge_password": secret,
            "judge_token": secret,
            "judge": {"authorization": f"Bearer {secret}", "model": "m"},
            "reward_key": "accuracy",
            "eval_sets": [{"input_key": "prompt", "label_key": "label2025"}],
        }
    )
    begin_recording(args)
    path = tmp_path / "rec" / "run_0000.json"
    text = path.read_text()
    assert secret not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    options = options_of(json.loads(text))
    assert (options.reward_key, options.train_env_vars["NCCL_DEBUG"]) == ("accuracy", "INFO")
    assert options.eval_sets == [{"input_key": "prompt", "label_key": "label2025"}]
    assert options.judge["model"] == "m"


def test_manifests_are_small(recording):
    """A reader refuses a manifest of more than a MiB; ours stay far below."""
    parts = manifest.read_manifest(folder_of(recording), ROLLOUT).parts
    whole = Manifest(10**9, ROLLOUT, 9999, False, dict.fromkeys(manifest.PARTS, parts["gate"]))
    assert len(whole.to_json()) < 1 << 14


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
