"""What --trace costs a step of the main job.

Measured twice. Directly: a run with --trace says how many requests and other spans a step has; as
many are made here, with and without a writer in turn, with the metrics and the writing that follow
from them, and the processor's time is compared with the step's. All of it counts, as though no
process worked beside another. And end to end: runs with and without --trace take turns, from the
same warmed-up model with the same seeds, so that rollout i is the same work in each; off against
off says how much of that ratio is the machine's noise. The first steps are left out.

    python tools/bench/bench_trace.py MODEL [--rollouts 12] [--pairs 2]
                                      # MODEL: the warm-up that `make train` keeps in
                                      examples/addition/data
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.addition import prepare  # noqa: E402
from slime.data.sample import Sample  # noqa: E402
from slime.harness.trace_files import REQUESTS, read_traces, windows_of  # noqa: E402
from slime.metrics.rollout_metrics import request_metrics  # noqa: E402
from slime.rollout.request_spans import traced_request  # noqa: E402
from slime.tracking import spans  # noqa: E402

SKIPPED = 3
LIMIT = 0.01
ROUNDS = 15
META = {
    "id": "1f0c9a4be2d7-1234",
    "finish_reason": {"type": "stop", "matched": 3},
    "prompt_tokens": 8,
    "completion_tokens": 3,
    "cached_tokens": 8,
    "weight_version": "7",
    "e2e_latency": 0.0123456789,
    "queue_time": 0.00123456789,
    "prefill_launch_latency": 0.00412345678,
    "inference_time": 0.01111111111,
    "decode_throughput": 429.3219876,
    "output_token_logprobs_b64": "",
}


def step_seconds(
    model: Path, data: Path, run_dir: Path, *, rollouts: int, extra: Sequence[str]
) -> list[float]:
    """Seconds of each step of one run of `slime train` in steady state, between the ends of two
    successive updates of the weights.
    """
    command = [sys.executable, "-m", "slime.train"]
    command += ["--config", str(ROOT / "examples/addition/grpo.yaml")]
    command += ["--prompt-data", str(data / "train.jsonl")]
    command += ["--eval-prompt-data", "addition", str(data / "eval.jsonl")]
    command += ["--hf-checkpoint", str(model), "--run-dir", str(run_dir)]
    command += ["--num-rollout", str(rollouts), "--eval-interval", str(10 * rollouts)]
    command += ["--skip-eval-before-train", "--no-live-view", "--no-write-report", *extra]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = sorted(
        record["time"] for record in records if "perf/weight_version" in record.get("metrics", {})
    )
    steps = [later - earlier for earlier, later in zip(ends[:-1], ends[1:], strict=True)]
    # the last one may hold the evaluation at the end
    return steps[SKIPPED - 1 : -1]


def ratio(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> float:
    """The median over rollouts of (median over runs of `over`) / (median over runs of `under`)."""
    pairs = zip(zip(*over, strict=True), zip(*under, strict=True), strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def spans_per_step(run_dir: Path, rollouts: int) -> tuple[int, int]:
    """(requests' samples, other spans of all processes) of a step of this run."""
    traces, _ = read_traces(run_dir)
    first = windows_of(traces)[0][0]
    found = [span for trace in traces for span in trace.spans if span.start >= first]
    requests = sum(span.track == REQUESTS for span in found)
    return round(requests / rollouts), round((len(found) - requests) / rollouts)


def one_step(num_requests: int, num_spans: int) -> float:
    """Processor seconds of a step's spans, with the metrics and the writing that follow."""
    samples = [Sample(index=index, group_index=index // 8) for index in range(num_requests)]
    replies = [{"meta_info": META}] * 8
    started = time.thread_time()
    for place in range(0, num_requests, 8):
        group = samples[place : place + 8]
        with traced_request(group) as note:
            note(replies[: len(group)])
    for _ in range(num_spans):
        with spans.span("forward_backward", num_microbatches=2):
            pass
    request_metrics(samples)
    writer = spans.current_writer()
    if writer is not None:
        writer.flush()
    return time.thread_time() - started


def direct_cost(num_requests: int, num_spans: int, folder: Path) -> float:
    """Seconds that a step has more with a writer than without: the median of pairs that take
    turns.
    """
    costs = []
    for _ in range(ROUNDS + 1):
        off = one_step(num_requests, num_spans)
        spans.open_writer(str(folder), "bench")
        costs.append(one_step(num_requests, num_spans) - off)
        spans.stop_tracing()
    return statistics.median(costs[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, help="Warmed-up Hugging Face folder.")
    parser.add_argument("--rollouts", type=int, default=12, help="Rollouts of each run.")
    parser.add_argument(
        "--pairs", type=int, default=2, help="Runs with, and runs without, --trace."
    )
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(prepare.prepare(Path(scratch) / "data"))
        for pair in range(options.pairs):
            for name, extra in (("off", []), ("on", ["--trace"])):
                run_dir = Path(scratch) / f"{name}-{pair}"
                steps = step_seconds(
                    options.model, data, run_dir, rollouts=options.rollouts, extra=extra
                )
                found[name].append(steps)
                print(f"{name:3} {statistics.median(steps):.3f} s a step", flush=True)
        num_requests, num_spans = spans_per_step(run_dir, options.rollouts)
        size = sum(file.stat().st_size for file in (run_dir / "trace").glob("*")) / options.rollouts
        cost = direct_cost(num_requests, num_spans, Path(scratch) / "direct")
    step = statistics.median(min(runs) for runs in zip(*found["off"], strict=True))
    line = f"end to end x{ratio(found['on'], found['off']):.3f}"
    if options.pairs > 1:
        half = options.pairs // 2
        line += f", off against off x{ratio(found['off'][half:], found['off'][:half]):.3f}"
    print(line)
    print(
        f"directly {1e3 * cost:.1f} ms for {num_requests} requests and {num_spans} other spans "
        f"a step ({size / 1e3:.0f} kB), {cost / step:.2%} of {step:.3f} s (limit {LIMIT:.0%})"
    )
    return int(cost / step > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
