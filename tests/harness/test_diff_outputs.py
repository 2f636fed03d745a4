"""JSON, JUnit and HTML of a comparison are well-formed, whatever a model wrote."""

import html.parser
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.recordings import copy_of, edit_column

from slime import cli
from slime.harness.diff.command import main

NUM_GPUS = 0
HOSTILE = "</pre><script>alert(1)</script>]]>&\x00\x1b[2J\u202e{{7*7}}\"'\ufffe"


@pytest.fixture(scope="module")
def hostile(recorded_run, tmp_path_factory):
    """A copy whose sample 5 of rollout 1 has another response, which attacks what shows it."""
    other = copy_of(recorded_run, tmp_path_factory.mktemp("hostile") / "b")
    edit_column(other, "samples", "response", 5, lambda text: HOSTILE)
    edit_column(other, "samples", "detail", 5, lambda text: HOSTILE)
    edit_column(other, "train", "log_probs", 5, lambda values: values - 1)
    return other


def test_the_text_has_no_character_that_a_terminal_acts_on(recorded_run, hostile, capsys):
    """Control characters are spelled out, in the first difference and in its sample's text."""
    assert main([str(recorded_run), str(hostile)]) == 1
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "\\x1b[2J" in out and "first difference in the data: rollout 1, sampled token" in out
    assert "sample    index 37, group 9, position 5" in out
    assert "consequence" in out


def test_the_json_says_what_the_text_says(recorded_run, hostile, capsys):
    """One object: the first cause, the first difference with its sample, and every field."""
    assert main([str(recorded_run), str(hostile), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first_cause"] == "sampled token or reply" and not found["identical"]
    first = found["first_difference"]
    assert (first["rollout"], first["field"], first["position_a"]) == ("rollout 1", "response", 5)
    assert first["context"][0].startswith("sample ")
    fields = {(one["stage"], one["field"]): one for one in found["rollouts"]["rollout 1"]["fields"]}
    assert fields["log-prob", "log_probs"]["samples"] == 1
    assert fields["log-prob", "log_probs"]["new"] == 0  # it follows from the response
    assert fields["reward", "reward"]["entries"] == 0


def test_the_junit_report_has_a_case_per_rollout_and_stage(recorded_run, hostile, tmp_path, capsys):
    """CI shows which stage of which rollout failed; the file parses."""
    path = tmp_path / "report.xml"
    assert main([str(recorded_run), str(hostile), "--junit", str(path)]) == 1
    suite = ElementTree.parse(path).getroot().find("testsuite")
    cases = {(one.get("classname"), one.get("name")): one for one in suite}
    failed = {key for key, one in cases.items() if one.find("failure") is not None}
    assert failed == {
        ("rollout 1", "sampled token or reply"),
        ("rollout 1", "verdict"),
        ("rollout 1", "log-prob"),
    }
    assert int(suite.get("failures")) == 3 and int(suite.get("tests")) == len(cases)
    assert cases["evaluation 0", "log-prob"].find("skipped") is not None
    text = cases["rollout 1", "sampled token or reply"].find("failure").text
    assert "<script>" in text and "sample" in text
    assert main([str(recorded_run), str(recorded_run), "--junit", str(path)]) == 0
    assert ElementTree.parse(path).getroot().find("testsuite").get("failures") == "0"
    capsys.readouterr()


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.names = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)


def test_the_page_is_self_contained_and_runs_nothing(recorded_run, hostile, tmp_path, capsys):
    """Texts of a model are escaped; the page loads nothing."""
    path = tmp_path / "report.html"
    assert main([str(recorded_run), str(hostile), "--html", str(path)]) == 1
    page = path.read_text()
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names and "&lt;script&gt;" in page and "{{7*7}}" in page
    assert "default-src 'none'" in page and "49" not in page.split("{{7*7}}")[0][-40:]
    assert main([str(recorded_run), str(recorded_run), "--html", str(path)]) == 0
    assert "identical" in path.read_text()
    capsys.readouterr()


def test_reports_that_cannot_be_written_and_wrong_options_are_errors(
    recorded_run, tmp_path, capsys
):
    """Status 2 with the reason."""
    words = ["diff", str(recorded_run), str(recorded_run)]
    (tmp_path / "file").write_text("")
    assert cli.main([*words, "--junit", str(tmp_path / "file" / "x.xml")]) == 2
    assert "x.xml cannot be written" in capsys.readouterr().err
    for wrong, message in (
        (["--rtol", "-1"], "--rtol -1.0 must be a finite number of at least 0"),
        (["--atol", "nan"], "--atol nan must be a finite number of at least 0"),
        (["--top", "0"], "--top 0 must be at least 1"),
        (["--rollout", "1", "--to", "2"], "leave out --from and --to"),
    ):
        assert cli.main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_only_the_largest_fields_are_listed(recorded_run, hostile, capsys):
    """--top says how many; the rest are counted."""
    assert main([str(recorded_run), str(hostile), "--top", "1"]) == 1
    assert "and 2 more fields" in capsys.readouterr().out


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
