"""The viewer's pages: what may be seen by whom, that texts of a run are texts, and that what is
missing is said.
"""

import html
import html.parser
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support import view_runs
from support.view_runs import HOSTILE, copy_of_golden, make_run

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from slime.files.jsonl import JsonlWriter
from slime.view import jobs
from slime.view.app import PAGES, build_app
from slime.view.catalog import Catalog

NUM_GPUS = 0
TOKEN = "a-token"
BASE = "http://127.0.0.1:7860"
SAMPLES = "/run/{}/rollout/rollout-0"


def client_of(*roots, host="127.0.0.1", signed_in=True):
    """A client of a viewer over the folders."""
    app = build_app(Catalog([Path(root) for root in roots]), token=TOKEN, host=host, port=7860)
    client = TestClient(app, base_url=BASE)
    if signed_in:
        assert client.get(f"/?token={TOKEN}").status_code == 200
    return client


def pages_of(client, slug, key="rollout-0"):
    """The address of every kind of page of a run that has samples, with its parameters filled in."""
    values = {"slug": slug, "key": key, "row": "0", "group": "0"}
    paths = [re.sub(r"\{(\w+)\}", lambda m: values[m[1]], path) for path, _ in PAGES]
    return [f"{path}?run={slug}" if path.endswith("trends") else path for path in paths]


class Structure(html.parser.HTMLParser):
    """The elements of a page with the names of their attributes; the text; what scripts hold."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.addresses = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, *sorted(name for name, _ in attributes)))
        self.addresses += [value for name, value in attributes if name in ("href", "src", "action")]

    def handle_data(self, data):
        self.text.append(data)


FOUND = {
    "samples": 1, "steps": 1, "evaluations": 0, "files": 1, "unreadable": [{"file": "a", "why": "b"}],
    "notes": ["c"], "identical": False, "first_cause": "reward", "runs": [], "only_in_a": ["d"],
    "only_in_b": [], "rollouts": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def answered(monkeypatch, request):
    """Audits and comparisons are answered at once, with texts of the run, but where a test asks for
    the real ones.
    """
    if "real_jobs" in request.fixturenames:
        return

    def ask(self, *words, stamp=""):
        text = HOSTILE[1] if "bad" in str(words[1]) else "plain"
        place = {"where": "step 0", "index": 1, "group": text, "note": text, "text": text}
        finding = {"name": text, "level": "error", "sentence": text, "remedy": text}
        first = {"rollout": "rollout 0", "stage": text, "text": text, "context": [text]}
        content = {
            **FOUND,
            "findings": [{**finding, "evidence": [place]}],
            "first_difference": first,
        }
        return jobs.Outcome(content, "")

    monkeypatch.setattr(jobs.Jobs, "ask", ask)


@pytest.fixture
def real_jobs():
    """Marks a test that starts the real commands."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run whose texts are hostile, and one of the same shape whose texts are not."""
    root = tmp_path_factory.mktemp("hostile")
    texts = tuple(f"plain {chr(97 + i)}" for i in range(len(HOSTILE)))
    return make_run(root / "bad", HOSTILE), make_run(root / "good", texts)


@pytest.mark.parametrize("path", [path for path, _ in PAGES])
def test_texts_of_a_run_add_no_element_and_no_address_to_any_page(path, hostile):
    found = []
    for folder in hostile:
        client, number = client_of(folder), [p for p, _ in PAGES].index(path)
        answer = client.get(pages_of(client, folder.name)[number])
        assert answer.status_code == 200, answer.text
        found.append(answer)
    if "json" in found[0].headers["content-type"]:
        found[0].json()
        return
    bad, good = (Structure(one.text) for one in found)
    # one spark more or less is no text
    assert [e for e in bad.elements if e[0] != "path"] == [
        e for e in good.elements if e[0] != "path"
    ]
    assert all(re.match(r"/|#|$|\?|data:image", one) for one in bad.addresses), bad.addresses
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", found[0].text.replace("\r", "")
    )


def test_every_hostile_text_can_be_opened_and_found(hostile):
    client = client_of(hostile[0])
    for row, text in enumerate(HOSTILE):
        page = client.get(f"{SAMPLES.format('bad')}/sample/{row}")
        assert page.status_code == 200
        start = (
            html.escape(text[:8], quote=True).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")
        )
        assert not text[:8].isprintable() or not text[:8].isascii() or start in page.text, text[:8]
    found = client.get(SAMPLES.format("bad"), params={"q": "ONERROR"})
    assert "1 samples" in found.text


def test_the_token_is_asked_for_and_then_kept_in_a_cookie(hostile):
    client = client_of(hostile[1], signed_in=False)
    for path in ("/", "/run/good", "/static/view.css", "/live", "/nothing"):
        assert client.get(path).status_code == 401, path
    assert client.get("/?token=another").status_code == 401
    assert client.get("/", headers={"cookie": "slime_view_7860=another"}).status_code == 401
    answer = client.get(f"/run/good?token={TOKEN}&x=1", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/run/good?x=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"headers": {"host": "evil.example"}}, 421),
        ({"headers": {"host": "127.0.0.1.evil.example:7860"}}, 421),
        ({"headers": {"host": "192.168.0.9:7860"}}, 421),
        ({"headers": {"host": "localhost:9999"}}, 200),  # forwarded by ssh
        ({"headers": {"origin": "http://evil.example"}}, 403),
        ({"headers": {"origin": "null"}}, 403),
        ({"headers": {"origin": BASE}}, 200),
        ({"headers": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}}, 403),
        ({"headers": {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}}, 403),
        ({"method": "POST"}, 405),
        ({"method": "PUT"}, 405),
        ({"method": "OPTIONS"}, 405),
        ({"url": "/?q=" + "x" * 5000}, 414),
    ],
)
def test_who_is_refused(hostile, change, status):
    client = client_of(hostile[1])
    request = {"method": "GET", "url": "/", **change}
    assert client.request(**request).status_code == status


def test_the_token_leads_to_no_other_site(hostile):
    client = client_of(hostile[1], signed_in=False)
    for path in ("//evil.example/", "/\\evil.example", "/%5Cevil.example", "/http://evil.example"):
        answer = client.get(f"{path}?token={TOKEN}", follow_redirects=False)
        location = answer.headers.get("location", "/")
        assert re.match(r"/(?![/\\])", location), location


def test_pages_run_no_script_of_their_own_text_and_ask_no_other_machine(hostile):
    client = client_of(hostile[0])
    for path in pages_of(client, "bad"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["referrer-policy"] == "no-referrer"
        if "json" in answer.headers["content-type"]:
            continue
        inline = re.findall(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)", answer.text)
        assert (
            not inline
            and " style=" not in answer.text
            and not re.search(r"\son\w+=", _tags(answer.text))
        )


def _tags(page):
    return " ".join(re.findall(r"<[a-z][^<>]*>", page))


@pytest.mark.parametrize(
    "path",
    [
        "/run/../../etc/passwd",
        "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/static/../command.py",
        "/static/%2e%2e/command.py",
        "/static/..%2f..%2fcli.py",
        "/run/good/rollout/..%2f..%2f/sample/0",
        "/run/good/rollout/rollout-7",
        "/run/good/rollout/rollout-0/sample/99",
        "/run/good/rollout/rollout-0/sample/-1",
        "/run/good/rollout/rollout-0/group/x",
    ],
)
def test_what_is_not_there_or_outside_is_not_found(hostile, path):
    answer = client_of(hostile[1]).get(path)
    assert answer.status_code == 404 and "root:" not in answer.text and "import" not in answer.text


def test_links_out_of_the_given_folders_are_not_followed(tmp_path):
    outside = copy_of_golden(tmp_path / "outside")
    given = make_run(tmp_path / "given" / "run")
    (tmp_path / "given" / "link").symlink_to(outside)
    (given / "dumps" / "rollout_data" / "5.parquet").symlink_to(
        outside / "rollout_000000" / "samples.parquet"
    )
    client = client_of(tmp_path / "given")
    assert "link" not in Structure(client.get("/").text).text
    assert client.get("/run/given~run/rollout/rollout-5").status_code == 404
    (given / "config.yaml").write_text(f"record: {outside}\n")
    page = client_of(tmp_path / "given").get("/run/given~run")
    assert "is not in the given folders" in page.text and "rollout-1" not in page.text
    (given / "trace").rename(tmp_path / "trace")
    (given / "trace").symlink_to(tmp_path / "trace")
    overview = client_of(tmp_path / "given").get("/")
    assert "its trace is a link to" in overview.text and "/run/given~run" not in overview.text
    assert (
        client_of(tmp_path / "given", tmp_path / "trace").get("/run/given~run").status_code == 200
    )
    (given / "trace").unlink()
    both = client_of(tmp_path / "given", outside).get("/run/given~run")
    assert "rollout-1" in both.text


def test_a_sample_has_every_number_that_was_recorded(tmp_path):
    client = client_of(copy_of_golden(tmp_path / "rec"))
    content = client.get("/run/rec/rollout/rollout-1/sample/0.json").json()
    page = client.get("/run/rec/rollout/rollout-1/sample/0?view=gap").text
    data = json.loads(re.search(r'id="token-data">(.*?)</script>', page)[1])
    assert (
        data["ids"] == content["sample"]["tokens"][-24:]
        and "".join(data["pieces"]) == content["sample"]["response"]
    )
    trainer, engine = content["trained"]["log_probs"], content["sample"]["rollout_log_probs"]
    for i, gap in enumerate(data["columns"]["gap"]):
        expected = trainer[i] - engine[i] if data["mask"][i] else None
        assert gap == pytest.approx(expected, abs=1e-5) if expected is not None else gap is None
    assert "decoded tokens, character by character" in page


def test_the_table_sorts_filters_searches_and_pages(tmp_path):
    client = client_of(copy_of_golden(tmp_path / "rec"))
    address = "/run/rec/rollout/rollout-1"

    def rows(**query):
        return re.findall(
            r'data-row href="[^"]*/sample/(\d+)"', client.get(address, params=query).text
        )

    every = rows()
    assert len(every) == 29 and rows(sort="reward", dir="desc") != every
    assert rows(filter='"tool" in response') == rows(q="TOOL") == ["0", "1", "2", "3"]
    without = rows(filter="reward == none")
    assert 0 < len(without) < 29
    assert (
        rows(sort="reward")[-len(without) :]
        == rows(sort="reward", dir="desc")[-len(without) :]
        == without
    )
    trained = rows(filter='"trained" in verdict and rank == 0', sort="gap", dir="desc")
    assert trained and rows(page="99") == every and rows(q="no such text") == []
    refused = client.get(address, params={"filter": "__import__('os')"}).text
    assert 'role="alert"' in refused and len(re.findall("data-row", refused)) == 29


def test_the_fates_of_the_samples_add_up(tmp_path):
    client = client_of(copy_of_golden(tmp_path / "rec"))
    page = client.get("/run/rec/rollout/rollout-1").text
    table = page.split("samples went</th>")[1].split("</table>")[0]
    counts = [int(row) for row in re.findall(r'</a></td><td class="r num">(\d+)</td>', table)]
    assert sum(counts) == 29 and "dynamic_filter" in table
    # one of the batch has no place in an optimizer step
    assert [counts[0], counts[1], counts[-1]] == [17, 1, 1] and ">not trained<" in table


@pytest.mark.parametrize("damage", ["cut", "flip", "manifest", "no_train", "no_samples", "foreign"])
def test_damaged_recordings_show_what_is_there_and_say_what_is_missing(tmp_path, damage):
    root = copy_of_golden(tmp_path / "rec")
    folder = root / "rollout_000001"
    said = {"cut": "bytes, its manifest says", "flip": "its hash is", "manifest": "manifest.train.json",
            "no_train": "is listed and is no file", "no_samples": "is listed and is no file", "foreign": "of the format"}  # fmt: skip
    if damage == "cut":
        path = folder / "train.parquet"
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "flip":
        path = folder / "columns.parquet"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "manifest":
        (folder / "manifest.train.json").write_text("{")
    elif damage == "foreign":
        (folder / "manifest.train.json").write_text('{"format": "another"}')
    else:
        (folder / f"{damage[3:]}.parquet").unlink()
    client = client_of(root)
    for path in pages_of(client, "rec", "rollout-1"):
        assert client.get(path).status_code in (200, 404), path
    assert said[damage] in client.get("/run/rec/rollout/rollout-1").text
    assert client.get("/run/rec/rollout/rollout-0").status_code == 200


def test_empty_and_foreign_folders_say_what_they_lack(tmp_path):
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "1.jsonl").write_text('{"input": "a", "output": "b", "score": 1}\n')
    half = make_run(tmp_path / "half", rollouts=0)
    (half / "metrics.jsonl").write_bytes(b'{"step_key": "rollout/step", "st')
    client = client_of(tmp_path / "empty", foreign, half)
    assert "holds no run" in client.get("/run/empty").text
    assert "Audit its files" in client.get("/run/foreign").text
    assert "It has logged no metrics" in client.get("/run/half").text
    assert client.get("/").status_code == 200


def test_numbers_that_are_not_finite_are_shown_as_what_they_are(tmp_path):
    client = client_of(make_run(tmp_path / "run"))
    page = client.get("/").text
    assert "NaN" in page and "values are not finite" in page
    overview = client.get("/run/run").text
    assert "rollout/reward/mean is not a finite number" in overview
    assert "1 of 3 optimizer steps changed nothing" in overview
    charts = {one["title"]: one for one in client.get("/api/trends?run=run").json()["charts"]}
    assert charts["reward"]["series"][0]["bad"] == [[2, "NaN"]]
    assert [one["kind"] for one in charts["loss"]["marks"]] == ["skipped"]


def test_a_running_run_is_followed(tmp_path):
    run = make_run(tmp_path / "run")
    client = client_of(run)
    before = client.get("/api/trends?run=run").json()["versions"]
    record = {"step_key": "rollout/step", "step": 3, "metrics": {"rollout/reward/mean": 0.75}}
    later = threading.Timer(0.5, JsonlWriter(run / "metrics.jsonl").write, [record])
    later.start()
    events = client.get("/live?run=run&once=1").text
    later.join()
    assert events.startswith("retry") and "event: change\ndata: running" in events
    assert client.get("/api/trends?run=run").json()["versions"] > before


def test_runs_are_put_side_by_side_with_the_options_that_differ(tmp_path):
    make_run(tmp_path / "a", ("x", "y"))
    make_run(tmp_path / "b", ("x", "y", "z"))
    shutil.copytree(view_runs.GOLDEN / "tokenizer", tmp_path / "tokenizer")
    page = client_of(tmp_path).get("/").text
    assert (
        page.index("Options that differ") < page.index("<code>seed</code>")
        and "<code>lr</code>" not in page
    )
    name = tmp_path.name
    both = client_of(tmp_path).get(f"/api/trends?run={name}~a&run={name}~b").json()
    assert [one["run"] for one in both["charts"][0]["series"]] == [0, 1]


def test_the_schedule_has_every_trained_sample_once(tmp_path):
    client = client_of(copy_of_golden(tmp_path / "rec"))
    page = client.get("/run/rec/rollout/rollout-1/schedule").text
    steps = re.findall(
        r"Optimizer step (\d+) .*?>(\d+) samples, (\d+) tokens, (\d+) of padding", page
    )
    assert [int(step) for step, *_ in steps] == [0, 1]
    assert sum(int(samples) for _, samples, *_ in steps) == 18
    assert all((int(tokens) + int(padding)) % 16 == 0 for *_, tokens, padding in steps)
    batch = html.unescape(re.search(r'filter=(step[^"]*)"', page)[1])
    rows = client.get(f"/run/rec/rollout/rollout-1?filter={batch}").text
    assert f"{len(re.findall('data-row', rows))} samples" in html.unescape(page)


def test_thresholds_say_what_would_be_dropped(tmp_path):
    client = client_of(copy_of_golden(tmp_path / "rec"))
    address = "/run/rec/rollout/rollout-1/gate"

    def dropped(**query):
        return int(re.search(r">(\d+)</b>\s*of 29", client.get(address, params=query).text)[1])

    lengths = [
        json.loads(client.get(f"/run/rec/rollout/rollout-1/sample/{row}.json").text)["sample"][
            "response_length"
        ]
        for row in range(29)
    ]
    assert dropped(low=5, high=20) == sum(n < 5 or n > 20 for n in lengths)
    assert dropped(low=0, high=0) == 0
    assert "measured on" in client.get(address).text


def test_the_gate_page_has_examples_of_each_reason(tmp_path):
    page = client_of(copy_of_golden(tmp_path / "rec")).get("/run/rec/gate").text
    for reason in ("bad_token", "empty", "too_short", "aborted"):
        row = page.split(f">{reason}</th>")[1].split("</tr>")[0]
        assert "/sample/" in row, reason


def test_the_timeline_nests_what_ran_and_its_table_has_the_seconds(tmp_path):
    client = client_of(make_run(tmp_path / "run", ("outer", "inner")))
    lanes = client.get("/api/run/run/timeline?rollout=0").json()
    assert [one[0] for one in lanes["lanes"][0]["spans"]] == ["outer", "inner"]
    assert lanes["end"] == 1900.0 and lanes["left_out"] == 0
    assert '<td class="r num">0.900</td>' in client.get("/run/run/timeline").text
    shutil.rmtree(tmp_path / "run" / "trace")
    assert "slime train --trace" in client_of(tmp_path / "run").get("/run/run/timeline").text


def test_two_recordings_are_compared_with_both_samples_side_by_side(tmp_path, real_jobs):
    from support.recordings import edit_column

    for name in "ab":
        copy_of_golden(tmp_path / name)
    edit_column(tmp_path / "b", "samples", "response", 5, lambda text: f"{text}!", rollout_id=1)
    client = client_of(tmp_path / "a", tmp_path / "b")
    for _ in range(900):
        page = client.get("/diff?a=a&b=b").text
        if "Comparing" not in page:
            break
        time.sleep(0.1)
    assert "sampled token or reply" in page and page.count("<article>") == 2
    assert (
        "/run/a/rollout/rollout-1/sample/5" in page and "/run/b/rollout/rollout-1/sample/5" in page
    )
    assert "<mark>!</mark>" in page
    assert "given folders hold 1" in client_of(tmp_path / "a").get("/diff?a=a").text


def test_an_error_of_a_command_is_shown(tmp_path, real_jobs):
    (tmp_path / "void").mkdir()
    client = client_of(tmp_path / "void")
    site_jobs = jobs.Jobs()
    for _ in range(900):
        found = site_jobs.ask("diff", str(tmp_path), str(tmp_path / "nowhere"))
        if found is not None:
            break
        time.sleep(0.1)
    assert found.content is None and "There is no dump" in found.error
    site_jobs.close()
    assert client.get("/run/void").status_code == 200


def test_samples_of_other_frameworks_are_shown(tmp_path):
    folder = tmp_path / "verl"
    folder.mkdir()
    rows = [
        {
            "input": f"question {i // 2}",
            "output": HOSTILE[i],
            "score": float(i),
            "step": 3,
            "gts": "a",
        }
        for i in range(4)
    ]
    (folder / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "4.jsonl").write_text("{")
    client = client_of(folder)
    overview = client.get("/run/verl").text
    assert "/run/verl/rollout/rollout-3" in overview
    page = client.get("/run/verl/rollout/rollout-3?sort=reward&dir=desc").text
    assert re.findall(r"/sample/(\d)", page)[0] == "3" and "&lt;script&gt;" in page
    assert client.get("/run/verl/rollout/rollout-3?view=groups").text.count("/group/") == 2
    for row in range(4):
        assert client.get(f"/run/verl/rollout/rollout-3/sample/{row}").status_code == 200


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
