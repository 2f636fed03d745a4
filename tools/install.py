"""Installs slime with its test extras into the environment that runs this file: `python
tools/install.py`.

Standard library and pip only. torch comes first, so that nothing else can pull another build of it.
Where pip can get a CPU build and this machine has no NVIDIA GPU, that is the one; the size is
printed before anything is downloaded, and pip's progress is shown.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13.0"
# Measured: (download, on disk) in GB of torch with what it requires, and of everything else.
SIZES = {"cpu": (0.2, 0.8), "cuda": (2.7, 4.8), "slime": (0.5, 1.8)}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
SHOWN = re.compile(r"\s*(Downloading|Installing|Successfully|Building|ERROR)\b")


@dataclasses.dataclass(frozen=True)
class Build:
    """A build of torch that pip would install. `kind` is a key of SIZES, or "here" when it is
    installed already.
    """

    requirement: str
    version: str
    kind: str


def build_of_report(requirement: str, report: dict) -> Build:
    """Returns which build a report of `pip install --dry-run --no-deps --report` describes."""
    entries = [
        entry["metadata"]
        for entry in report["install"]
        if entry["metadata"]["name"].lower() == "torch"
    ]
    wanted = " ".join(entries[0].get("requires_dist", []))
    needs_cuda = (
        bool(re.search(r"\b(nvidia|cuda)-", wanted)) and "+cpu" not in entries[0]["version"]
    )
    return Build(requirement, entries[0]["version"], "cuda" if needs_cuda else "cpu")


def ask_pip(requirement: str) -> Build | None:
    """Returns the build of torch that pip would install for `requirement`, without installing it;
    None where there is none.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *PIP,
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report",
            str(report),
            requirement,
        ]
        if subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        ).returncode:
            return None
        return build_of_report(requirement, json.loads(report.read_text(encoding="utf-8")))


def installed_torch() -> str:
    """Returns the version of torch in this environment; empty without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def choose_build(
    *, has_gpu: bool, installed: str = "", ask: Callable[[str], Build | None] = ask_pip
) -> Build:
    """Returns what is installed where it is the right version; else the CPU build on a machine
    without a GPU where pip can get one; else what pip takes by itself.
    """
    if installed.split("+")[0] == TORCH:
        return Build(f"torch=={TORCH}", installed, "here")
    wanted = [f"torch=={TORCH}"] if has_gpu else [f"torch=={TORCH}+cpu", f"torch=={TORCH}"]
    for requirement in wanted:
        build = ask(requirement)
        if build is not None:
            return build
    return Build(wanted[-1], TORCH, "cuda")  # pip's own error follows at the installation


def announcement(build: Build, *, has_gpu: bool, free_gb: float) -> tuple[list[str], bool]:
    """Returns what to print before the download, and whether the disk has room for it."""
    if build.kind == "here":
        return [f"torch {TORCH} is installed already"], True
    download, disk = (a + b for a, b in zip(SIZES[build.kind], SIZES["slime"], strict=True))
    lines = [
        f"torch {build.version} ({'CPU build' if build.kind == 'cpu' else 'CUDA build'}) and the "
        f"rest: about {download:.1f} GB to download, "
        f"{disk:.1f} GB on disk ({free_gb:.0f} GB free)"
    ]
    if build.kind == "cuda" and not has_gpu:
        saved = SIZES["cuda"][1] - SIZES["cpu"][1]
        lines.append(
            "This machine has no NVIDIA GPU, but pip finds no CPU build for this Python. One "
            f"saves {saved:.1f} GB: stop here and give pip "
            "an index that has it, with PIP_EXTRA_INDEX_URL (PyTorch's install page names its index of CPU builds), or a folder, with PIP_FIND_LINKS."
        )
    if free_gb < disk:
        lines.append(
            f"error: {free_gb:.1f} GB are free here, {disk:.1f} GB are needed. Free some, or set "
            "VENV to a folder on another disk."
        )
    return lines, free_gb >= disk


def shown_lines(lines: Iterable[str]) -> Iterable[str]:
    """Returns the lines of pip's output that tell progress where there is no terminal for a
    progress bar.
    """
    return (line.strip() for line in lines if SHOWN.match(line))


def pip_install(words: Sequence[str]) -> int:
    """Runs `pip install`: with its progress bars on a terminal, else with one line per download.
    Returns pip's status.
    """
    command = [*PIP, "install", *words]
    if sys.stdout.isatty():
        return subprocess.run(command, check=False).returncode
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in shown_lines(process.stdout or ()):
            print(f"  {line}", flush=True)
    return process.returncode


def main() -> int:
    has_gpu = Path("/dev/nvidiactl").exists()
    print("[2/3] torch: asking pip which build it takes", flush=True)
    build = choose_build(has_gpu=has_gpu, installed=installed_torch())
    lines, fits = announcement(
        build, has_gpu=has_gpu, free_gb=shutil.disk_usage(sys.prefix).free / 1e9
    )
    for line in lines:
        print(f"  {line}", flush=True)
    if not fits:
        return 1
    status = pip_install([build.requirement]) if build.kind != "here" else 0
    if status:
        return status
    print("[3/3] slime and what it needs", flush=True)
    return pip_install(["-e", f"{ROOT}[test]"])


if __name__ == "__main__":
    raise SystemExit(main())
