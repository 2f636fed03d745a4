"""The main job: a tiny model learns two-digit addition by GRPO, through the whole stack, on two CPU
cores.

    python -m examples.addition.run                                    # make train
    python -m examples.addition.run --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2 # any
    `slime train` option

Data and an untrained model are made from nothing, then `slime train` runs twice: a supervised
warm-up (kept for the next time) and GRPO. The last line is the held-out greedy accuracy before and
after. Exit status 1 when training failed, when the run's books do not balance, or when a run of the
unchanged recipe did not at least double the accuracy.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.addition import prepare
from slime.harness.report import summarize_run
from slime.harness.run_records import read_run
from slime.tracking.plain_output import keep_output_plain

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EVAL_METRIC = "eval/addition"
MIN_RATIO = 2.0
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the ranks and the engine are the parallelism
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class StageFailed(Exception):
    """A stage ended with this exit status."""

    def __init__(self, stage: str, status: int) -> None:
        super().__init__(f"{stage} ended with status {status}")
        self.status = status


def warm_up_key() -> str:
    """Returns what the warm-up's result depends on: the recipe, the data and the model, as 12 hex
    digits.
    """
    digest = hashlib.sha256()
    for name in ("sft.yaml", "prepare.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:12]


def warm_up_command(data: Path, run_dir: Path, result: Path) -> list[str]:
    """Returns the command line of the supervised stage, which leaves a Hugging Face folder at
    `result`.
    """
    return [
        sys.executable, "-m", "slime.train", "--config", str(HERE / "sft.yaml"),
        "--prompt-data", str(data / "sft.jsonl"), "--hf-checkpoint", str(data / "model"),
        "--save-hf", str(result), "--run-dir", str(run_dir),
    ]  # fmt: skip


def grpo_command(data: Path, run_dir: Path, model: Path, extra: Sequence[str]) -> list[str]:
    """Returns the command line of the GRPO stage; `extra` options come last and win."""
    return [
        sys.executable, "-m", "slime.train", "--config", str(HERE / "grpo.yaml"),
        "--prompt-data", str(data / "train.jsonl"), "--eval-prompt-data", "addition", str(data / "eval.jsonl"),
        "--hf-checkpoint", str(model), "--run-dir", str(run_dir), *extra,
    ]  # fmt: skip


def _join_own_group() -> None:
    """Runs in the child: a group of its own, so that it gets each signal once, from us; it is ended
    when we die unheard.
    """
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def two_stages(
    recipes: Path, evaluation: str, *, data: Path, run_dir: Path, extra: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Returns warm-up and GRPO of an example, each a name and a command line, from
    `recipes`/{sft,grpo}.yaml; `evaluation` names the held-out set. `extra` options come last in
    GRPO's and win.
    """
    slime, warm = [sys.executable, "-m", "slime.train"], run_dir / "warm-up"
    sft = [
        "--prompt-data",
        data / "sft.jsonl",
        "--hf-checkpoint",
        data / "model",
        "--run-dir",
        warm,
    ]
    sft += ["--save-hf", warm / "model"]
    grpo = [
        "--prompt-data",
        data / "train.jsonl",
        "--eval-prompt-data",
        evaluation,
        data / "eval.jsonl",
    ]
    grpo += ["--hf-checkpoint", warm / "model", "--run-dir", run_dir, *extra]
    stages = (("the warm-up", "sft.yaml", sft), ("GRPO", "grpo.yaml", grpo))
    return [
        (name, [*slime, "--config", str(recipes / recipe), *map(str, rest)])
        for name, recipe, rest in stages
    ]


def example_parser(name: str, *, description: str, prepare: Any) -> argparse.ArgumentParser:
    """The options that every example has: where its run and its data stand. `prepare` is its module
    of that name.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}.run", description=description, allow_abbrev=False
    )
    parser.add_argument(
        "--run-dir", type=Path, help=f"Folder of this run; default: runs/{name}-<start time>."
    )
    parser.add_argument(
        "--data", type=Path, default=prepare.DATA, help="Folder of the data and the models."
    )
    return parser


def place_of_run(name: str, run_dir: Path | None) -> Path:
    """Returns the run's folder: the one that was asked for, else one named after the time."""
    return (run_dir or ROOT / "runs" / time.strftime(f"{name}-%Y%m%d-%H%M%S")).resolve()


def run_two_stages(
    name: str,
    argv: Sequence[str] | None,
    *,
    description: str,
    prepare: Any,
    commands: Callable[..., list[tuple[str, list[str]]]],
    conclude: Callable[..., int],
) -> int:
    """The command line of the example `name`: what --help says of it, its module `prepare`, its
    stages `commands(data, run_dir, extra)`, and `conclude(run_dir, started=...)`, which gives the
    exit status.
    """
    started = time.monotonic()
    keep_output_plain()
    options, extra = example_parser(
        name, description=description, prepare=prepare
    ).parse_known_args(argv)
    run_dir = place_of_run(name, options.run_dir)
    data = prepare.prepare(options.data.resolve())
    try:
        for stage, command in commands(data, run_dir, extra):
            run_stage(stage, command)
    except StageFailed as failure:
        print(f"{failure}; its messages are above", file=sys.stderr)
        return failure.status
    return conclude(run_dir, started=started)


def run_stage(stage: str, command: Sequence[str]) -> None:
    """Runs one stage in this terminal. StageFailed for a status other than 0. Ctrl-C and SIGTERM
    reach the stage, which stops cleanly.
    """
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_join_own_group
    )

    def forward(number: int, frame: Any) -> None:
        process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in signals}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status:
        raise StageFailed(stage, status if status > 0 else 128 - status)


def warm_up(data: Path, run_dir: Path, *, redo: bool) -> Path:
    """Returns the warmed-up model's folder, trained now unless an earlier run of the same recipe
    left one.
    """
    result = data / f"warm-up-{warm_up_key()}"
    if redo and result.exists():
        shutil.rmtree(result)
    if (result / "config.json").exists():
        print(
            f"[2/3] supervised warm-up: reusing {result.name} (--redo-warm-up trains it again)",
            flush=True,
        )
        return result
    print("[2/3] supervised warm-up, to about a third of the held-out problems", flush=True)
    temporary = result.with_name(f"{result.name}.{os.getpid()}.tmp")
    try:
        run_stage("the warm-up", warm_up_command(data, run_dir, temporary))
        # whole or not at all: a warm-up that was interrupted is never reused
        temporary.rename(result)
    except OSError:
        # else another run, started beside this one, was faster
        if not (result / "config.json").exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    keep_output_plain()
    parser = example_parser("addition", description=__doc__.split("\n", 1)[0], prepare=prepare)
    parser.add_argument(
        "--redo-warm-up", action="store_true", help="Train the warm-up again although one is kept."
    )
    options, extra = parser.parse_known_args(argv)
    run_dir = place_of_run("addition", options.run_dir)
    print(f"[1/3] problems, tokenizer and an untrained model in {options.data}", flush=True)
    data = prepare.prepare(options.data.resolve())
    try:
        model = warm_up(data, run_dir / "warm-up", redo=options.redo_warm_up)
        print(f"[3/3] GRPO; run folder {run_dir}", flush=True)
        run_stage("GRPO", grpo_command(data, run_dir, model, extra))
    except StageFailed as failure:
        print(f"{failure}; its messages are above", file=sys.stderr)
        return failure.status
    return conclude(run_dir, started=started, is_recipe=not extra)


def conclude(run_dir: Path, *, started: float, is_recipe: bool) -> int:
    """Prints how to look at the run and the last line, `accuracy: 0.31 -> 0.78 (x2.5) in 281 s`, and
    returns the exit status.
    """
    run = read_run(run_dir)
    problems = summarize_run(run).problems
    accuracies = run.numbers(EVAL_METRIC)[1]
    if len(accuracies) < 2:
        problems.append(
            f"{EVAL_METRIC} was logged {len(accuracies)} times; before and after are needed"
        )
    elif is_recipe and accuracies[-1] < MIN_RATIO * accuracies[0]:
        problems.append(
            f"held-out accuracy {accuracies[0]:.2f} -> {accuracies[-1]:.2f} did not reach "
            f"x{MIN_RATIO:g}"
        )
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)
    slime = os.path.relpath(Path(sys.executable).with_name("slime"))
    print(f"look at it: {slime} view {run_dir}", flush=True)
    if len(accuracies) >= 2:
        first, last = accuracies[0], accuracies[-1]
        ratio = f"x{last / first:.1f}" if first > 0 else "from nothing"
        print(
            f"accuracy: {first:.2f} -> {last:.2f} ({ratio}) in {time.monotonic() - started:.0f} s",
            flush=True,
        )
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
