"""Which grader a row gets, which number of a reward counts, and labels that reach the grader as they stand in the file."""

import json
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from slime.exceptions import RolloutDataError
from slime.observability.jsonl import encode, read_jsonl
from slime.rollout.evaluation import eval_columns
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.utils import exact_json
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.prompt_files import read_rows
from slime.utils.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.utils.types import Sample

NUM_GPUS = 0
BIG = 123456789012345678901  # 21 digits: a 64-bit integer has at most 20


def test_in_evaluation_as_in_training_a_rows_own_type_goes_before_rm_type():
    """The same model and rows must not score 0.375 in training and 0.0 in evaluation. A type that the evaluation names itself
    goes before both."""
    args = types.SimpleNamespace(rm_type="math")
    plain, named = build_eval_dataset_configs(args, [{"name": "a", "path": "p"}, {"name": "b", "path": "p", "rm_type": "f1"}])
    (by_default,) = build_eval_dataset_configs(args, [{"name": "a", "path": "p"}], {"rm_type": "gpqa"})
    row = {"rm_type": "dapo", "k": 1}
    assert plain.inject_metadata(row) == row and plain.rm_type == "math"
    assert plain.inject_metadata({"k": 1})["rm_type"] == plain.inject_metadata({"rm_type": None})["rm_type"] == "math"
    assert named.inject_metadata(row)["rm_type"] == "f1" and by_default.inject_metadata(row)["rm_type"] == "gpqa"


@pytest.mark.parametrize(("key", "words"), [(None, "Choose one of them"), ("scroe", "no key 'scroe'")])
def test_a_reward_of_several_values_without_a_usable_key_is_named_with_its_keys_everywhere(key, words):
    """Evaluation, the dynamic filter and the sample itself say what training says, in place of a TypeError or KeyError."""
    args = types.SimpleNamespace(reward_key=key, eval_reward_key=None)
    sample = Sample(index=7, reward={"score": 1.0, "acc": True})
    calls = [lambda: eval_columns(args, [sample]), lambda: check_reward_nonzero_std(args, [sample])]
    calls += [lambda: sample.get_reward_value(args)] if key else []
    for call in calls:
        with pytest.raises(RolloutDataError, match=rf"sample 7 .*\['acc', 'score'\].*{words}.*--eval-reward-key"):
            call()
    good = types.SimpleNamespace(reward_key="acc", eval_reward_key="score")
    assert eval_columns(good, [sample])["rewards"] == [1.0] and sample.get_reward_value(good) is True


def test_an_integer_of_21_digits_is_the_same_number_in_the_prompt_file_the_sample_and_the_dump(tmp_path):
    """As a float it is 123456789012345680000, and the right answer scores 0."""
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"input": "p", "label": BIG, "metadata": {"all": [BIG, -BIG, 0.5]}}) + "\n")
    (row,) = read_rows(str(file))
    assert row.data["label"] == BIG and type(row.data["label"]) is int
    assert row.data["metadata"]["all"] == [BIG, -BIG, 0.5]
    save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"), [Sample(label=BIG, metadata=row.data["metadata"])], rollout_id=0, evaluation=False
    )
    (sample,) = read_rollout_dump(tmp_path / "0")
    assert sample.label == BIG and sample.metadata == row.data["metadata"]
    (tmp_path / "r.jsonl").write_bytes(encode({"label": BIG}))
    assert read_jsonl(tmp_path / "r.jsonl") == ([{"label": BIG}], 0)


def test_numbers_that_fit_and_what_json_lacks_are_treated_as_before():
    """The two borders of 64 bits; a text of digits stays text; a set is refused, also beside a long integer."""
    for value in (2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, "1" * 25, 1e30):
        assert exact_json.loads(exact_json.dumps({"a": [value]})) == {"a": [value]}
    for value in ({"a": {1}}, {"a": [BIG, {1}]}):
        with pytest.raises(TypeError):
            exact_json.dumps(value)
    with pytest.raises(exact_json.JSONDecodeError):
        exact_json.loads(b"1234567890123456789012,")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
