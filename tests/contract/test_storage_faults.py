"""The disk fails, or the process dies, in the middle of a save: a restart finds the state of before
or the new one, and never a mixture. The tool behind these tests tries every place; here are a few.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from chaos.targets import TrainDump, all_targets  # noqa: E402

from slime.data.sample import Sample  # noqa: E402
from slime.exceptions import RolloutDataError  # noqa: E402
from slime.files.jsonl import JsonlTail, JsonlWriter, read_jsonl  # noqa: E402
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data  # noqa: E402
from slime.files.train_dump import read_train_dump  # noqa: E402

NUM_GPUS = 0


@pytest.mark.timeout(240)
def test_a_restart_finds_what_was_saved():
    """Kills and refusals at random places of the save of each kind of file: each restart goes on,
    and leaves nothing behind. A bit is turned in each: it is noticed. The tool forks, so it has a
    process of its own; before it begins, a target that writes in place must be found out."""
    command = [sys.executable, str(ROOT / "tools" / "chaos" / "storage.py"), "--cases", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases, fired, problems, _ = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert problems == 0 and cases == 4 * len(all_targets()) and fired > cases / 2, done.stdout
    assert all(target.name in done.stdout for target in all_targets())


# --- single bits ----------------------------------------------------------------------------------


def test_every_changed_bit_of_a_dump_of_lines_is_refused(tmp_path):
    """Half of them were read in silence: a digit of a log-prob became another digit."""
    samples = [Sample(index=3, tokens=[5, 6], rollout_log_probs=[-0.125], response="ab")]
    path = save_debug_rollout_data(
        f"{tmp_path}/{{rollout_id}}.jsonl", samples, rollout_id=1, evaluation=False
    )
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(RolloutDataError, match="1.jsonl"):
            read_rollout_dump(path)


def test_a_dump_of_an_earlier_version_is_still_read(tmp_path):
    """It has no seal, and its head says nothing of one."""
    path = save_debug_rollout_data(
        f"{tmp_path}/{{rollout_id}}.jsonl", [Sample(index=3)], rollout_id=1, evaluation=False
    )
    head, line, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head.replace(b',"sealed":true', b"") + line)
    assert [sample.index for sample in read_rollout_dump(path)] == [3]
    path.write_bytes(head + line)  # cut
    with pytest.raises(RolloutDataError, match="holds 0 samples, its head says 1"):
        read_rollout_dump(path)


def test_a_changed_record_of_metrics_is_left_out_and_counted(tmp_path):
    """A flipped bit gave another number to the report."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(3):
        writer.write({"step": step, "value": 0.125})
    writer.close()
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    rng = random.Random(0)
    for _ in range(300):
        place = rng.randrange(len(lines[0]), len(lines[0]) + len(lines[1]))
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        records, malformed = read_jsonl(path)
        values = [{k: v for k, v in one.items() if k in ("step", "value")} for one in records]
        assert all(one in [{"step": s, "value": 0.125} for s in range(3)] for one in values)
        assert malformed or len(records) == 3
    assert read_jsonl(path)[1] <= 2
    path.write_bytes(content)
    assert read_jsonl(path) == ([{"step": s, "value": 0.125} for s in range(3)], 0)


def test_a_changed_head_of_a_train_dump_is_refused_by_name(tmp_path):
    """A changed digit of an offset was an error of numpy without the file's name."""
    TrainDump().write(tmp_path, 1)
    path = tmp_path / "3.safetensors"
    content = path.read_bytes()
    for place in range(content.index(b"}}}") + 3 if b"}}}" in content else 400):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(RolloutDataError, match="3.safetensors"):
            read_train_dump(path)


def test_a_record_after_a_torn_line_stands_on_its_own(tmp_path):
    """A killed process had left half a line; the first record of the resumed run was lost with
    it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n{"ste')
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    writer.close()
    tail = JsonlTail(path)
    assert tail.read() == [{"step": 0}, {"step": 1}] and tail.malformed == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
