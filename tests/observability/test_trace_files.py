"""Spans of all processes stand on one time axis, cost nothing without --trace, and never end a run;
`slime trace` makes a table and a Chrome trace of them."""

import argparse
import ast
import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.full_disk import full_disk

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.files.jsonl import read_jsonl
from slime.harness import trace
from slime.harness.trace_export import chrome_trace
from slime.harness.trace_files import phases_of, read_traces, windows_of
from slime.harness.trace_names import SPANS
from slime.metrics.rollout_metrics import request_metrics
from slime.ray import actors
from slime.rollout.request_spans import traced_request
from slime.tracking import spans
from slime.tracking.timer import Timer, timer
from slime.tracking.tracing import build_sglang_meta_trace_attrs, trace_span

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
OTHER = """
import sys, time
from slime.tracking import spans

spans.open_writer(sys.argv[1], "actor-0", role="actor", rank=0)
print("go", flush=True)
sys.stdin.readline()
spans.set_rollout(0)
with spans.span("train"):
    time.sleep(0.05)
    with spans.span("log_probs"):
        time.sleep(0.02)
print("done", flush=True)
sys.stdin.readline() or time.sleep(60)  # killed here, nothing is closed
"""
META = {"prompt_tokens": 8, "completion_tokens": 3, "queue_time": 0.001, "e2e_latency": 0.01}
META |= {"prefill_launch_latency": 0.004, "inference_time": 0.009, "decode_throughput": 600.0}


def options(run_dir, **changes):
    return argparse.Namespace(
        **{"run_dir": str(run_dir), "trace": True, "trace_every": 1} | changes
    )


@pytest.fixture
def writing(tmp_path):
    """This process records as the rollout manager; the run's folder."""
    spans.start_tracing(options(tmp_path), "rollout-manager", role="rollout")
    yield tmp_path
    spans.stop_tracing()


def recorded(run_dir, process="rollout-manager"):
    traces, _ = read_traces(run_dir)
    return next(one for one in traces if one.process == process).spans


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """A run folder with spans of this process and of one that was killed: it trained while this one
    waited for it, between two phases of this one."""
    folder = tmp_path_factory.mktemp("run")
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder / spans.FOLDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert other.stdout.readline() == "go\n"
    spans.start_tracing(options(folder), "rollout-manager", role="rollout")
    spans.set_rollout(0)
    with spans.span("rollout"):
        with timer("generate"):
            sample = Sample(index=5, group_index=1)
            with traced_request([sample]) as note:
                time.sleep(0.012)
                note([{"meta_info": META}])
    with spans.span("wait", what="actor: train of rollout 0"):
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "done\n"
    spans.set_rollout(1)
    with spans.span("rollout"):
        time.sleep(0.01)
    spans.stop_tracing()
    time.sleep(2 * spans.FLUSH_INTERVAL_S)
    other.kill()
    other.communicate()
    return folder


def test_the_help_is_printed(capsys):
    """A percent sign in it was a format."""
    with pytest.raises(SystemExit) as end:
        trace.main(["--help"])
    assert end.value.code == 0 and "0.1 % of the time" in " ".join(capsys.readouterr().out.split())


def test_spans_of_two_processes_are_on_one_clock(two_processes):
    """What one process did while another waited for it lies inside that wait, in the order and for
    the time that it took; all but what a killed process did in its last second is there."""
    traces, num_unreadable = read_traces(two_processes)
    assert [trace.process for trace in traces] == ["rollout-manager", "actor-0"]
    assert num_unreadable == 0 and traces[1].head["rank"] == 0
    manager, actor = ({span.name: span for span in trace.spans} for trace in traces)
    wait, train, log_probs = manager["wait"], actor["train"], actor["log_probs"]
    assert wait.start < train.start < log_probs.start < log_probs.end <= train.end < wait.end
    assert 0.07 <= train.seconds < 1 and 0.02 <= log_probs.seconds < train.seconds
    assert abs(wait.start / 1e9 - time.time()) < 60, "nanoseconds since the epoch"
    assert [(span.name, span.rollout) for span in traces[1].spans] == [
        ("train", 0),
        ("log_probs", 0),
    ]


def test_the_clock_of_one_machine_is_one_although_the_time_of_day_was_set(tmp_path):
    """Two processes of one machine whose time of day differed by an hour when they started are in
    their true order."""
    for number, name in enumerate(("engine-0", "engine-1")):
        with_hour = {"boot_id": "m", "clock_offset": number * 3600 * 10**9, "version": 1}
        head = {"type": "head", "process": name, "pid": number, **with_hour}
        span = {"name": "decode", "start": 1000 + with_hour["clock_offset"], "dur": 5, "thread": 1}
        write_lines(tmp_path, f"{name}-{number}", head, span)
    assert [trace.spans[0].start for trace in read_traces(tmp_path)[0]] == [1000, 1000]


def write_lines(run_dir, name, *records, end="\n"):
    folder = run_dir / spans.FOLDER
    folder.mkdir(exist_ok=True)
    lines = "\n".join(json.dumps(record) for record in records) + end
    (folder / f"{name}.jsonl").write_text(lines)


def test_without_the_option_nothing_is_kept(tmp_path):
    """Without --trace no folder is made, no span is kept, and a sample has no trace: its dump does
    not grow."""
    spans.start_tracing(options(tmp_path, trace=False), "driver")
    sample = Sample(index=0)
    with spans.span("x"), timer("y"), traced_request([sample]) as note:
        note([{"meta_info": META}])
    assert spans.current_writer() is None and not spans.is_tracing()
    assert not (tmp_path / spans.FOLDER).exists() and "trace" not in sample.to_dict()
    Timer().reset("y")


def test_each_sample_of_a_request_has_the_span_that_the_metrics_are_made_of(writing):
    """`sglang_generate` of each sample holds the engine's times, and request/, prefill/ and decode/
    metrics are computed from them."""
    samples = [Sample(index=index, group_index=0) for index in (0, 1)]
    with traced_request(samples) as note:
        note([{"meta_info": {**META, "queue_time": queue}} for queue in (0.001, 0.003)])
    start, end = samples[1].trace["events"]
    assert (start["type"], end["type"], end["name"]) == (
        "span_start",
        "span_end",
        "sglang_generate",
    )
    measured = {**META, "queue_time": 0.003, "decode_duration": pytest.approx(0.005)}
    del measured["inference_time"]
    assert end["attrs"] == measured and end["duration"] >= 0
    metrics = request_metrics(samples)
    assert metrics["request/count"] == metrics["request/profiled_count"] == 2
    assert metrics["request/queue_time/mean"] == pytest.approx(0.002)
    assert metrics["prefill/launch_latency/max"] == 0.004
    assert metrics["decode/duration/min"] == pytest.approx(0.005)
    assert metrics["decode/throughput/mean"] == 600.0
    spans.stop_tracing()
    first, second = recorded(writing)
    assert (first.attrs["sample"], second.attrs["sample"]) == (0, 1)
    assert first.attrs["queue_time"] == 0.001 and first.track == "requests"


def test_stages_below_a_request_are_in_the_metrics():
    """A generate function that traces its own requests, with the engine's stages as spans below
    them, has the same metrics."""
    sample = Sample(index=0)
    with trace_span(sample, "sglang_generate") as attrs:
        attrs.update(build_sglang_meta_trace_attrs(META))
    metrics = request_metrics([sample])
    assert metrics["request/count"] == 1 and metrics["prefill/launch_latency/max"] == 0.004


def test_a_failed_request_is_a_span_with_the_error(writing):
    """A request that raises leaves a span in the sample's trace and raises."""
    sample = Sample(index=0)
    with pytest.raises(KeyError):
        with traced_request([sample]):
            raise KeyError("x")
    assert sample.trace["events"][-1]["attrs"] == {"error": "KeyError: 'x'"}
    with pytest.raises(KeyError), spans.span("put"):
        raise KeyError("x")
    spans.stop_tracing()
    assert [(s.name, s.attrs.get("error")) for s in recorded(writing)][1:] == [("put", "KeyError")]


def test_only_every_nth_rollout_is_recorded(tmp_path):
    """--trace-every 2 records rollouts 0 and 2, and what came before them."""
    spans.start_tracing(options(tmp_path, trace_every=2), "actor-0")
    with spans.span("load"):
        pass
    for rollout_id in range(4):
        spans.set_rollout(rollout_id)
        with spans.span("train"):
            pass
    spans.stop_tracing()
    assert [span.rollout for span in recorded(tmp_path, "actor-0")] == [None, 0, 2]


@pytest.mark.parametrize("cause", ["full disk", "vanished folder"])
def test_a_disk_that_takes_no_more_ends_the_recording_with_one_warning(writing, cause, caplog):
    """A full disk or a removed folder costs the trace, with one warning, and nothing else."""
    writer = spans.current_writer()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with spans.span("x", text="y" * 4096):
                pass
            if cause == "full disk":
                with full_disk(after=1024):
                    writer.flush()
            else:
                shutil.rmtree(writing / spans.FOLDER, ignore_errors=True)
                writer.flush()
    assert [record.getMessage().count("--trace") for record in caplog.records] == [1]
    assert not spans.is_tracing()
    spans.stop_tracing()


def test_spans_are_written_within_a_second(writing):
    """What a process did is in its file a second later, though it goes on: a run can be read while
    it runs, and one that is killed has lost no more."""
    with spans.span("x"):
        pass
    time.sleep(2 * spans.FLUSH_INTERVAL_S)
    assert [span.name for span in recorded(writing)] == ["x"]


def test_what_has_not_ended_is_shown_until_now(writing, capsys):
    """A run that hangs or was killed shows the phases in which it stands, around those that ended;
    a process that ended in good order has none."""
    Timer().start("train_wait")
    spans.set_rollout(3)
    with timer("generate"):
        time.sleep(1.2 * spans.FLUSH_INTERVAL_S)
        with spans.span("put"):
            pass
        spans.current_writer().flush()
        phases = [phase for thread in phases_of(recorded(writing)).values() for phase in thread]
        titles = [(path, phase.span.title) for phase in phases for path, phase in phase.walk()]
        wait, generate = "train_wait (unfinished)", "generate (unfinished)"
        assert titles == [((), wait), ((wait,), generate), ((wait, generate), "put")]
        assert trace.main([str(writing), "--rollout", "3"]) == 0
        table = capsys.readouterr().out.splitlines()
        (row,) = (line for line in table if generate in line)
        assert float(row.split()[-2]) >= spans.FLUSH_INTERVAL_S, "it stands there until now"
    spans.stop_tracing()
    Timer().end("train_wait")
    Timer().reset()
    assert [span.title for span in recorded(writing)] == ["generate", "put"]


def test_text_that_is_no_unicode_is_written_as_ascii(writing):
    """Half a character from a model does not end the recording."""
    with spans.span("search", query="\ud83d", number=7):
        pass
    with spans.span("next"):
        pass
    spans.stop_tracing()
    first, second = recorded(writing)
    assert "\\ud83d" in str(first.attrs) and second.name == "next"


def test_a_torn_last_line_is_skipped_and_counted(two_processes, tmp_path, capsys):
    """The line that a killed process could not finish is left out and counted, as is what is no
    record of a span."""
    shutil.copytree(two_processes, tmp_path / "run")
    file = next((tmp_path / "run" / spans.FOLDER).glob("actor-0-*"))
    odd = b'{"name": 3}\n{"name": "x", "start": "y", "dur": 1, "thread": 1}\n7\n{"type": "open"}\n'
    file.write_bytes(file.read_bytes() + odd + b'{"name": "tra')
    assert trace.main([str(tmp_path / "run")]) == 0
    assert "5 lines could not be read" in capsys.readouterr().out


def check_chrome_trace(document):
    """What ui.perfetto.dev and chrome://tracing ask of a file; slices of a lane nest."""
    events = document["traceEvents"]
    assert isinstance(events, list) and events
    slices = {}
    for event in events:
        assert event["ph"] in "XMCsf" and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index") or event["tid"]
            continue
        assert event["ts"] >= 0 and event["ts"] == event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["args"], dict)
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
    for lane in slices.values():
        open_ends = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1.1, f"{event['name']} overlaps"
            open_ends.append(end)
    flows = [event for event in events if event["ph"] in "sf"]
    for event in flows:  # an arrow starts and ends inside a slice
        lane = slices[event["pid"], event["tid"]]
        assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in lane)
    starts, ends = ({e["id"] for e in flows if e["ph"] == kind} for kind in "sf")
    assert starts == ends
    return slices


def test_the_file_is_a_chrome_trace_in_which_nothing_collides(two_processes, capsys):
    """The written JSON has processes, lanes, slices that nest, and a request's stages."""
    assert trace.main([str(two_processes)]) == 0
    document = json.loads((two_processes / "trace.json").read_text())
    slices = check_chrome_trace(document)
    names = {event["name"] for lane in slices.values() for event in lane}
    assert {"rollout", "generate", "request", "queue", "prefill", "decode", "train"} <= names
    processes = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert [name.split()[0] for name in processes] == ["rollout-manager", "actor-0"]
    counts = [e["args"]["requests"] for e in document["traceEvents"] if e["ph"] == "C"]
    assert counts == [1, 0]
    table = capsys.readouterr().out
    assert "rollouts 0 to 1" in table and "nothing ran, in any process, for" in table


def test_overlapping_requests_have_lanes_of_their_own_and_arrows_to_their_rank(tmp_path):
    """Three requests at a time take three lanes, one after them the first again; each trained
    sample has an arrow from the request that made it, and none of a later one (an evaluation's), to
    the steps of the rank that got it."""
    spans.start_tracing(options(tmp_path), "rollout-manager", role="rollout")
    spans.set_rollout(0)
    now = time.perf_counter()
    for sample, start, end in [(0, 0, 3), (1, 1, 4), (2, 2, 5), (3, 6, 7), (3, 20, 21)]:
        about = {"sample": sample, "e2e_latency": 0.0005}
        spans.add_span(
            "request", now + start * 1e-3, now + end * 1e-3, track="requests", attrs=about
        )
    spans.start_tracing(options(tmp_path), "actor-0", role="actor")
    spans.set_rollout(0)
    spans.add_span("localize", now + 0.008, now + 0.009, attrs={"samples": [3, 1]})
    spans.add_span("actor_train", now + 0.010, now + 0.012)
    spans.stop_tracing()
    document = chrome_trace(read_traces(tmp_path)[0])
    slices = check_chrome_trace(document)
    requests = [
        [e["args"]["sample"] for e in lane if e["name"] == "request"] for lane in slices.values()
    ]
    assert [lane for lane in requests if lane] == [[0, 3, 3], [1], [2]]
    starts = [event for event in document["traceEvents"] if event["ph"] == "s"]
    ends = [event for event in document["traceEvents"] if event["ph"] == "f"]
    assert [round(event["ts"] / 1e3) for event in starts] == [6, 1]
    assert [(event["pid"], round(event["ts"] / 1e3)) for event in ends] == [(2, 10), (2, 10)]


def test_the_gap_of_a_restart_is_named(tmp_path, capsys):
    """Two starts of a run, the second by a process with another number or with the same: from the
    end of what the first did until the second does something; its driver may be the last of it."""
    clock = {"boot_id": "m", "clock_offset": 0, "version": 1}
    second = 10**9

    def head(process, pid, role):
        return {"type": "head", "process": process, "pid": pid, "role": role, **clock}

    def span(name, start, seconds, rollout):
        times = {"start": start * second, "dur": seconds * second}
        return {"name": name, **times, "thread": 1, "rollout": rollout}

    first, other = span("load", 1, 2, 0), span("load", 11, 1, 1)
    write_lines(tmp_path, "actor-0-2", head("actor-0", 2, "actor"), span("train", 2, 2, 0))
    write_lines(tmp_path, "actor-0-3", head("actor-0", 3, "actor"), span("train", 10, 3, 1))
    for number in (4, 1):
        write_lines(tmp_path, "driver-1", head("driver", 1, "driver"), first)
        again = head("driver", number, "driver"), other
        if number == 1:
            (tmp_path / spans.FOLDER / "driver-4.jsonl").unlink()
            write_lines(tmp_path, "driver-1", head("driver", 1, "driver"), first, *again)
        else:
            write_lines(tmp_path, "driver-4", *again)
        assert trace.main([str(tmp_path)]) == 0
        table = capsys.readouterr().out
        (row,) = (line.split() for line in table.splitlines() if line[:8] == "restarts")
        assert row == ["restarts", "restart", "1", "6.000", "50.0%"], table
        assert "nothing ran, in any process, for 6.000 s (50.0%)" in table
        document = json.loads((tmp_path / "trace.json").read_text())
        check_chrome_trace(document)
        (gap,) = (one for one in document["traceEvents"] if one["name"] == "restart")
        assert (gap["ts"], gap["dur"]) == (3e6, 6e6)


def test_one_rollout_has_its_own_time(two_processes, tmp_path):
    """--rollout 1 leaves out what rollout 0 did, in the table and in the file."""
    out = tmp_path / "one.json"
    assert trace.main([str(two_processes), "--rollout", "1", "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["rollout"]
    traces = read_traces(two_processes)[0]
    whole, last = (trace.summarize(traces, windows_of(traces, r)) for r in (None, 1))
    assert whole.rollouts == [0, 1] and last.rollouts == [1]
    assert 0.01 <= last.seconds < whole.seconds - 0.07


def test_the_time_in_which_nothing_ran_is_what_no_phase_covers(two_processes):
    """Waiting is no work: the share of a process without a phase, and of all together, is exact."""
    traces = read_traces(two_processes)[0]
    summary = trace.summarize(traces, windows_of(traces))
    idle = {row.process: row.seconds for row in summary.rows if row.phase == trace.IDLE}
    busy = {row.process: row.seconds for row in summary.rows if row.phase in ("rollout", "train")}
    for process, seconds in busy.items():
        assert idle[process] + seconds == pytest.approx(summary.seconds, abs=1e-6)
    assert summary.idle_seconds == pytest.approx(summary.seconds - sum(busy.values()), abs=1e-6)


@pytest.mark.parametrize("made", [False, True])
def test_a_run_without_traces_is_answered_with_the_option_that_records_them(tmp_path, made, capsys):
    """The error names --trace; status 2."""
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    assert trace.main([str(folder)]) == 2
    assert "--trace" in capsys.readouterr().err


def test_a_rollout_that_was_not_recorded_is_answered_with_those_that_were(two_processes):
    """The error names the recorded rollouts."""
    with pytest.raises(ConfigError, match="no trace of rollout 7: it has rollouts 0 to 1"):
        trace.build_summary(two_processes, rollout=7)


def test_actors_of_one_process_have_files_of_their_own(tmp_path):
    """With --local each actor records for itself, and the driver goes on after their calls."""

    class Rank:
        def __init__(self, args):
            spans.start_tracing(args, "actor-0", role="actor")

        def train(self):
            with timer("train"):
                pass

        def stop(self):
            spans.stop_tracing()

    args = options(tmp_path)
    spans.start_tracing(args, "driver", role="driver")
    with actors.local_actors():
        rank = actors.start(Rank, args)
        actors.get(rank.train.remote())
        with spans.span("wait", what="rollout 0"):
            pass
        actors.get(rank.stop.remote())
    spans.stop_tracing()
    traces, _ = read_traces(tmp_path)
    assert [[span.title for span in trace.spans] for trace in traces] == [
        ["wait: rollout 0"],
        ["train"],
    ]


def test_phases_of_coroutines_do_not_swallow_each_other(writing):
    """Spans of one thread that overlap without nesting stand side by side."""

    async def both():
        async def one(seconds):
            with spans.span("hook"):
                await asyncio.sleep(seconds)

        first = asyncio.create_task(one(0.02))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, one(0.02))

    asyncio.run(both())
    spans.stop_tracing()
    (phases,) = phases_of(recorded(writing)).values()
    assert [phase.span.name for phase in phases] == ["hook", "hook"]
    check_chrome_trace(chrome_trace(read_traces(writing)[0]))


def test_processes_that_go_on_for_each_other_are_one_in_the_table(tmp_path):
    """Ranks whose processes end between rollouts, or a resumed run's, are counted together, and
    stand apart in the picture."""
    for pid in (1, 2):
        head = {"type": "head", "process": "actor-0", "pid": pid, "boot_id": "m", "version": 1}
        span = {"name": "train", "start": pid * 10**9, "dur": 10**8, "thread": pid, "rollout": pid}
        write_lines(tmp_path, f"actor-0-{pid}", {**head, "clock_offset": 0}, span)
    traces, _ = read_traces(tmp_path)
    summary = trace.summarize(traces, windows_of(traces))
    assert [(row.phase, row.count, round(row.seconds, 6)) for row in summary.rows] == [
        ("train", 2, 0.2),
        (trace.IDLE, 0, 0.9),
    ]
    names = [e for e in chrome_trace(traces)["traceEvents"] if e["name"] == "process_name"]
    assert len(names) == 2


def test_a_new_run_in_an_old_folder_moves_the_old_traces_aside(tmp_path):
    """A run that does not resume begins its traces anew, as it does its metrics."""
    from slime.tracking import tracking

    for _ in range(2):
        args = options(tmp_path / "run", load=None, finetune=False)
        tracking.start_run_folder(args)
        tracking._folders.clear()
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
        spans.start_tracing(args, "driver")
        spans.stop_tracing()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["metrics.1.jsonl", "metrics.jsonl", "trace", "trace.1"]
    records, _ = read_jsonl(next((tmp_path / "run" / "trace").glob("*.jsonl")))
    assert [record["type"] for record in records] == ["head"]


def named_spans():
    """The first argument of every call in slime/ that records a span or a timer."""
    calls = {
        "span",
        "spanned",
        "spanned_items",
        "add_span",
        "timer",
        "add",
        "start",
        "inverse_timer",
    }
    found = set()
    for file in (ROOT / "slime").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            holder = ast.unparse(function).rpartition(".")[0]
            if name in ("add", "start") and holder not in ("self._span_writer", "Timer()"):
                continue
            if name in calls and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


def test_every_span_of_the_code_is_explained(capsys):
    """`slime trace --names` and docs/trace.md have every name that slime records, and no other."""
    assert {one.name for one in SPANS} == named_spans()
    assert len(SPANS) == len({one.name for one in SPANS})
    assert trace.main(["--names"]) == 0
    table = capsys.readouterr().out.strip()
    assert table in (ROOT / "docs" / "trace.md").read_text()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
