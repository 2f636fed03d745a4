"""How far it is from the training loop to the loss, measured in a real run: a reader who follows the
code makes as many jumps.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import small_run

NUM_GPUS = 0

MAX_CALLS = 9
MAX_FILES = 9
# Stands between the driver and an actor in place of Ray, and passes on what it is given.
TRANSPORT = "ray/actors.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a local run of one rollout passed on its way to the loss."""
    from examples.addition.prepare import prepare

    root = tmp_path_factory.mktemp("way")
    run_dir, words, out = root / "run", root / "words.json", root / "found.json"
    command = small_run.command(Path(prepare(root / "data")), run_dir, "--num-rollout", 1)
    words.write_text(json.dumps(command[3:]))
    program = [sys.executable, "-m", "support.way_to_loss", str(words), str(out)]
    small_run.finish(small_run.launch(program, run_dir))
    return json.loads(out.read_text())


@pytest.mark.timeout(300)
def test_the_loop_reaches_the_loss_in_few_calls(found):
    """From `train` to the policy loss there are at most nine calls of ours."""
    calls = [call for call in found["calls"] if not call.startswith(TRANSPORT)]
    assert calls[0] == "train.py train"
    assert calls[-1] == "backends/megatron_utils/loss.py policy_loss_function"
    assert len(calls) - 1 <= MAX_CALLS, calls


@pytest.mark.timeout(300)
def test_the_batch_visits_few_files_before_the_loss(found):
    """The rollout batch is in the hands of at most nine files between the train actor and the
    loss."""
    files = [path for path in found["files"] if path != TRANSPORT]
    assert {"utils/data.py", "backends/megatron_utils/actor.py", "data/batch.py"} < set(files)
    assert len(files) <= MAX_FILES, files


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
