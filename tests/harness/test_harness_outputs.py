"""Where the commands of the harness may write, and JSON that every parser reads."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from slime.exceptions import ConfigError
from slime.harness import golden, trace
from slime.harness.audit import command as audit
from slime.harness.diff import command as diff
from slime.harness.json_text import json_text
from slime.harness.output_paths import require_free
from slime.view import report_command

NUM_GPUS = 0
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "run"


@pytest.fixture
def recording(tmp_path):
    """A copy of the golden run."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "recording"))


def files_of(folder):
    """The files below a folder with their bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "place", ["new", "rollout_000001/samples.parquet", "rollout_000001/x.html"]
)
def test_no_command_writes_into_a_recording(recording, place, capsys):
    """`slime golden new` put a golden run into the recording that it read, and --html of a diff or
    an audit replaced one of its parts."""
    before = files_of(recording)
    out = str(recording / place)
    with pytest.raises(ConfigError, match="lies in the recording|exists"):
        golden.main(["new", str(recording), "--out", out])
    for option in ("--html", "--junit"):
        with pytest.raises(ConfigError, match=f"{option} .* lies in the recording"):
            diff.main([str(GOLDEN), str(GOLDEN), option, out])
    for command, option in ((audit, "--html"), (trace, "--out"), (report_command, "--html")):
        assert command.main([str(recording), option, out]) == 2
        assert "lies in the recording" in capsys.readouterr().err
    assert files_of(recording) == before


def test_an_input_is_not_replaced_and_an_earlier_page_is(tmp_path):
    """Dumps and other files below a folder that is read stay; a page beside them may be new."""
    dump = tmp_path / "dumps" / "3.jsonl"
    dump.parent.mkdir()
    dump.write_text("{}")
    (tmp_path / "dumps" / "page.html").write_text("<html>")
    for read in (dump, dump.parent):
        with pytest.raises(ConfigError, match="would replace what is read"):
            require_free("--html", dump, read=[read])
    require_free("--html", tmp_path / "dumps" / "page.html", read=[dump.parent])
    require_free("--html", tmp_path / "dumps" / "new.html", read=[dump.parent])


def test_json_has_no_number_that_other_parsers_refuse(capsys):
    """The largest difference of two rollouts may be infinite."""
    sides = [str(GOLDEN / f"rollout_00000{number}") for number in (0, 1)]

    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    assert diff.main([*sides, "--json"]) == 1
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=refused)["identical"] is False
    assert '"inf"' in text
    assert (
        json_text({"a": [float("nan"), -float("inf"), (1.5,)]}) == '{"a": ["nan", "-inf", [1.5]]}'
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-v"]))
