"""`slime show`: one sample of a dump, token by token."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from slime.exceptions import RolloutDataError
from slime.files.rollout_dump import save_debug_rollout_data
from slime.harness import show
from slime.testing import make_sample, make_tiny_tokenizer

NUM_GPUS = 0


@pytest.fixture
def dump(tmp_path):
    """A dump of two samples of group 3, below a run folder whose config names a tokenizer; "a" is
    id 15.
    """
    model = make_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"hf_checkpoint: {model}\n")
    from slime.testing import make_char_tokenizer

    tokenizer = make_char_tokenizer()
    common = {"tokenizer": tokenizer, "group_index": 3, "label": "ab"}
    samples = [
        make_sample(
            "x=", "ab", log_probs=[-0.25, -2.0], loss_mask=[1, 0], index=6, reward=1.0, **common
        ),
        make_sample(
            "x=", "a\n", index=7, reward=0.0, valid=False, invalid_reason="bad_format", **common
        ),
    ]
    template = str(tmp_path / "run" / "dumps" / "rollout_data" / "{rollout_id}.jsonl")
    return save_debug_rollout_data(template, samples, rollout_id=4, evaluation=False)


def test_a_sample_is_shown_token_by_token(dump, monkeypatch, capsys):
    """Of each token text, mask, engine's and trainer's log-prob and advantage are shown; of the
    sample prompt, label, reward and group."""
    trained = {
        "log_probs": [-0.5, -2.0],
        "advantages": [1.5, 0.0],
        "loss_masks": [1, 0],
        "sample_indices": 6,
    }
    monkeypatch.setattr(show, "trained_fields", lambda path, position, sample: trained)
    assert show.main([str(dump), "--sample", "6"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["prompt", "x="] in lines and ["label", "ab"] in lines and ["reward", "1.0"] in lines
    assert "group     3, rollout id None" in shown and "status    completed, valid" in shown
    assert ["0", "15", "'a'", "1", "-0.25", "-0.5", "-0.25", "1.5"] in lines
    assert ["1", "16", "'b'", "0", "-2", "-2", "0", "0"] in lines


def test_without_a_train_dump_its_columns_are_empty_and_the_output_says_why(dump, capsys):
    """Without a train dump its columns are empty, with the reason below; sampled control characters
    are escaped."""
    assert show.main([str(dump), "--sample", "7"]) == 0
    shown = capsys.readouterr().out
    assert "'\\n'" in shown and "response  a\\n" in shown and "invalid: bad_format" in shown
    assert ["0", "15", "'a'", "1", "-0.5", "-", "-", "-"] in [
        line.split() for line in shown.splitlines()
    ]
    assert "no train dump beside it" in shown


def test_without_a_number_every_sample_is_listed_and_json_has_them_all(dump, capsys):
    """Without --sample every sample is listed, and --json has them all."""
    assert show.main([str(dump)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2][:6] == ["6", "3", "1.0", "2", "completed", "yes"] and rows[3][5] == "bad_format"
    assert show.main([str(dump), "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["index"] for entry in objects] == [6, 7]
    assert objects[0]["tokens"][1] == {
        "token": 1,
        "id": 16,
        "text": "b",
        "mask": 0,
        "engine": -2.0,
        "trainer": None,
        "advantage": None,
    }


def test_what_cannot_be_shown_is_said(dump, tmp_path, capsys):
    """A sample or a dump that does not exist is an error with status 2 and what there is
    instead."""
    (tmp_path / "model" / "ledger.jsonl").write_text('{"blake2b":"00"}\n')  # was suggested
    for words, message in (
        ([str(dump), "--sample", "9"], "has no sample 9; it has 2 from 6 to 7"),
        ([str(tmp_path / "run")], f"is a folder; name one rollout dump. For instance {dump}"),
        ([str(tmp_path / "model")], "no recording and holds no dump. A recording (slime train"),
        ([str(tmp_path / "no.jsonl")], "There is no rollout dump at"),
        (
            [str(dump), "--sample", "6", "--train-dump", str(tmp_path / "no.safetensors")],
            "There is no train dump at",
        ),
    ):
        assert show.main(words) == 2
        assert message in capsys.readouterr().err


def test_columns_of_another_length_are_refused():
    """Columns of another length are refused; shifted by one token they would look right."""
    sample = make_sample("x", "ab", index=1)
    with pytest.raises(
        RolloutDataError, match="sample 1: 3 trainer log-probs for 2 response tokens"
    ):
        show.token_rows(sample, {"log_probs": [0.0, 0.0, 0.0]}, None)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
