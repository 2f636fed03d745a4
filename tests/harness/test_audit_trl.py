"""`slime audit` on what TRL itself wrote: the estimator is found, and a fault planted into the file is
named.

With trl installed the run is made here; else it is the one of make_trl_completions.py in
tests/harness/data, of TRL 1.16.0.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from slime.harness.audit.audit import audit
from slime.harness.audit.findings import Level

NUM_GPUS = 0
DATA = Path(__file__).resolve().parent / "data" / "trl"
STEPS, SAMPLES = 4, 128


@pytest.fixture(scope="module")
def completions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    if importlib.util.find_spec("trl") is None:
        return Path(shutil.copytree(DATA, folder / "completions"))
    from harness.make_trl_completions import run

    return run(folder)


def problems(result):
    return {one.name for one in result.findings if one.level is not Level.INFO}


def test_a_real_run_of_trl_follows_grpo(completions):
    """TRL's default is the group's mean and standard deviation, with an epsilon of its own; an
    untrained model samples a vocabulary entry <|spare|> now and then, and nothing else is wrong."""
    result = audit(completions)
    assert (result.samples, result.steps, result.shapes) == (SAMPLES, STEPS, {"trl": STEPS})
    sentences = {one.name: one.sentence for one in result.findings}
    assert sentences["advantage_rule"] == (
        "Advantages follow GRPO (group mean, divided by the group's std) in 4 of 4 steps."
    )
    assert problems(result) <= {"special_tokens_in_text"}, sentences
    found = [place for one in result.findings for place in one.evidence if "spare" in place.text]
    assert found and all("<|spare|>" in place.text for place in found)


def test_a_fault_in_a_real_file_is_named(completions, tmp_path):
    """One step's advantages, moved by a row, are told from the estimator's own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(shutil.copytree(completions, tmp_path / "completions"))
    path = sorted(folder.iterdir())[1]
    table = pq.read_table(path)
    moved = table["advantage"].to_pylist()
    moved = moved[1:] + moved[:1]
    place = table.column_names.index("advantage")
    pq.write_table(table.set_column(place, "advantage", pa.array(moved)), path)
    (found,) = [one for one in audit(folder).findings if one.name == "misattributed_baseline"]
    assert found.level is Level.ERROR
    assert "of other samples: shifted by +1 (1 of 4 steps, first step 2)" in found.sentence


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
