"""A process that is killed while it records leaves only whole parts, and nothing after the next
start.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

import kill_recording  # noqa: E402

from slime.recording.writer import clean_up  # noqa: E402

NUM_GPUS = 0


def test_whatever_a_manifest_lists_is_whole_after_a_kill(capsys):
    """Five kills of the two hundred that the tool makes."""
    assert kill_recording.main(["--times", "5", "--seed", "3"]) == 0
    assert "0 kills with problems" in capsys.readouterr().out


def test_the_next_start_removes_temporary_files_and_nothing_else(tmp_path):
    """Files of users and checkpoints of --record-weights have names of their own."""
    folder = tmp_path / "rollout_000000"
    (folder / "weights").mkdir(parents=True)
    (tmp_path / ".removed.rollout_000001.77").mkdir()
    kept = [folder / ".samples.parquet", folder / ".mine.123", folder / "weights" / ".gate.json.1"]
    for path in (*kept, folder / ".samples.parquet.123", folder / ".manifest.train.json.9"):
        path.write_text("x")
    clean_up(tmp_path)
    assert sorted(path for path in tmp_path.rglob(".*")) == sorted(kept)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
