"""`slime doctor`: checks this machine, one line and one remedy each. Exit status 1 when something
fails, 0 with warnings only.

Each check takes what it looks at as arguments (defaults ask the machine), so that a test can hand
it a broken one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime import tested_versions
from slime.commands.findings import Finding, fail, ok, warn
from slime.commands.run_security import security_findings
from slime.exceptions import ConfigError

GIB = 1024**3
# A default that means "ask the machine"; None is a valid answer of the machine.
ASK: Any = object()


def version_numbers(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def installed_version(package: str) -> str | None:
    """Returns a package's version without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Python is one of the versions that the tests run on."""
    text, tested = ".".join(map(str, version)), tested_versions.python_range()
    first, last = tested_versions.PYTHON
    if first <= tuple(version[:2]) <= last:
        return ok("Python", f"{text} (tested: {tested})")
    return fail("Python", text, f"Use Python {tested}: the tests run on each of them.")


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the cores this process may use: its CPU affinity, or the container's quota where that
    is less.
    """
    cores = (
        float(len(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else float(os.cpu_count() or 1)
    )
    quota, period = _cgroup_quota(cgroup_root)
    return min(cores, quota / period) if quota and period else cores


def _cgroup_quota(root: Path) -> tuple[float | None, float | None]:
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text().split()
            return (None if quota == "max" else float(quota)), float(period)
        quota_v1 = float((root / "cpu/cpu.cfs_quota_us").read_text())
        return (quota_v1 if quota_v1 > 0 else None), float(
            (root / "cpu/cpu.cfs_period_us").read_text()
        )
    except (OSError, ValueError):
        return None, None


def check_cores(cores: float | None = None) -> Finding:
    """Two cores: one for a trainer, one for an engine."""
    cores = usable_cores() if cores is None else cores
    if cores >= 2:
        return ok("CPU cores", f"{cores:g}")
    return warn(
        "CPU cores",
        f"{cores:g}",
        (
            "Trainers and engine take turns on one core: several times slower. Give the container "
            "2 or "
            "more."
        ),
    )


def memory_gib(
    meminfo: str | None = None, cgroup_root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """Returns (available, total) memory in GiB; a container's limit counts as total where it is
    lower.
    """
    text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    values = {
        line.split(":")[0]: float(line.split()[1]) / 1024**2
        for line in text.splitlines()
        if ":" in line
    }
    total, available = values["MemTotal"], values.get("MemAvailable", values["MemFree"])
    try:
        limit = float((cgroup_root / "memory.max").read_text()) / GIB
        used = float((cgroup_root / "memory.current").read_text()) / GIB
        return (min(available, limit - used), limit) if limit < total else (available, total)
    except (OSError, ValueError):
        return available, total


def check_memory(available: float | None = None, total: float | None = None) -> Finding:
    """4 GiB are needed for two ranks, an engine and Ray with a tiny model."""
    if available is None or total is None:
        available, total = memory_gib()
    detail = f"{available:.1f} of {total:.1f} GiB available"
    if available >= 4:
        return ok("Memory", detail)
    return fail(
        "Memory",
        detail,
        (
            "The smallest run needs 4 GiB: end other programs, or raise the container's limit "
            "(docker: "
            "--memory)."
        ),
    )


def check_shm(free: int | None = None, path: str = "/dev/shm") -> Finding:
    """Ray keeps its objects in /dev/shm."""
    if free is None:
        if not os.path.isdir(path):
            return warn(
                "Shared memory",
                f"{path} is missing",
                "Ray falls back to slow files. In docker use --shm-size=2g.",
            )
        free = shutil.disk_usage(path).free
    if free >= GIB // 2:
        return ok("Shared memory", f"{free / GIB:.1f} GiB free in {path}")
    return warn(
        "Shared memory",
        f"{free / GIB:.2f} GiB free in {path}",
        "Ray falls back to slow files. In docker use --shm-size=2g.",
    )


def check_disk(free: int | None = None, path: str = ".") -> Finding:
    """Room for checkpoints and dumps in the current folder."""
    free = shutil.disk_usage(path).free if free is None else free
    detail = f"{free / GIB:.1f} GiB free in {os.path.abspath(path)}"
    if free >= 4 * GIB:
        return ok("Disk", detail)
    state = fail if free < GIB // 2 else warn
    return state("Disk", detail, "Free at least 4 GiB, or run from a folder on another disk.")


def check_package(package: str, *, at_least: str, version: str | None = ASK) -> Finding:
    """A required package is installed in a version that is new enough."""
    found = installed_version(package) if version is ASK else version
    remedy = f"pip install '{package}>={at_least}'"
    if found is None:
        return fail(package, "not installed", remedy)
    if version_numbers(str(found)) < version_numbers(at_least):
        return fail(package, f"{found} is older than {at_least}", remedy)
    return ok(package, str(found))


def check_tested(package: str, *, version: str | None = ASK) -> Finding:
    """A required package is installed in a version of the tested range: older fails, newer than all
    tests warns.
    """
    found = installed_version(package) if version is ASK else version
    lowest, _, last, below = tested_versions.PACKAGES[package]
    tested, remedy = (
        tested_versions.tested_range(package),
        f"pip install '{tested_versions.requirement(package)}'",
    )
    if found is None:
        return fail(package, "not installed", remedy)
    numbers = version_numbers(str(found))
    if numbers < version_numbers(lowest):
        return fail(package, f"{found} is older than {lowest}", remedy)
    if below is not None and numbers >= version_numbers(below):
        return fail(package, f"{found} is newer than slime knows (tested: {tested})", remedy)
    if numbers[: len(version_numbers(last))] > version_numbers(last):
        return warn(
            package,
            f"{found} is newer than what is tested ({tested})",
            "It may work; the tested range surely does.",
        )
    return ok(package, f"{found} (tested: {tested})")


# Imported in a process of its own: a mismatched pair may crash the interpreter, and torch needs
# seconds.
TORCH_PROBE = """
import json, sys, warnings
caught = []
warnings.showwarning = lambda message, *rest, **more: caught.append(str(message).splitlines()[0])
import torch
report = {"torch": torch.__version__, "cuda_build": torch.version.cuda, "cuda": torch.cuda.is_available(), "warnings": caught}
try:
    import numpy
    report["numpy"] = numpy.__version__
    torch.zeros(2).numpy()
except Exception as error:
    report["bridge_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(report))
"""


def probe_torch(python: str = sys.executable, timeout: float = 120.0) -> dict:
    """Returns what `import torch` reports in a fresh interpreter; {"error": ...} when it does not
    survive it.
    """
    try:
        done = subprocess.run(
            [python, "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"python ended with status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def check_torch(report: dict | None = None) -> Finding:
    """torch imports, is 2.10 or newer, and works with the installed numpy."""
    if report is None:
        report = probe_torch()
    if "error" in report:
        return fail(
            "torch",
            report["error"],
            (
                "pip install torch==2.13.0, in the environment of slime; a broken CUDA library "
                "shows "
                "here too."
            ),
        )
    numpy = report.get("numpy", "missing")
    pair = f"torch {report['torch']} with numpy {numpy}"
    bridge = report.get("bridge_error") or next(
        (text for text in report["warnings"] if "numpy" in text.lower()), None
    )
    if bridge:
        return fail(
            "torch",
            f"{pair} do not fit together: {bridge}",
            "pip install -U numpy (torch 2.10 and newer need numpy 2).",
        )
    if version_numbers(report["torch"]) < (2, 10):
        return fail(
            "torch",
            report["torch"],
            "pip install torch==2.13.0: below 2.10, reading a checkpoint can execute code.",
        )
    build = f"CUDA {report['cuda_build']}" if report["cuda_build"] else "CPU build"
    finding = check_tested("torch", version=report["torch"])
    return dataclasses.replace(
        finding,
        detail=f"{pair}, {build}" if finding.state == "ok" else f"{finding.detail}, {build}",
    )


def check_gpu(
    report: dict | None = None, devices: Sequence[str] | None = None, driver: str | None = ASK
) -> Finding:
    """Whether GPUs, driver and torch's build go together; a machine without GPUs is fine."""
    if devices is None:
        devices = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if driver is ASK:
        version_file = Path("/proc/driver/nvidia/version")
        driver = version_file.read_text().splitlines()[0] if version_file.is_file() else None
    report = report or {}
    if not devices:
        return ok("GPU", "none: training and engine run on the CPU")
    if report.get("cuda_build") is None:
        return warn(
            "GPU",
            f"{len(devices)} found, but torch is a CPU build",
            "Install the CUDA build of torch to use them.",
        )
    if driver is None:
        return fail(
            "GPU",
            f"{len(devices)} devices, no NVIDIA driver",
            "Install the driver, or start the container with --gpus all.",
        )
    if not report.get("cuda"):
        return fail(
            "GPU",
            f"torch for CUDA {report['cuda_build']} cannot use the driver: {driver}",
            "Update the driver, or install torch for its CUDA.",
        )
    return ok("GPU", f"{len(devices)} devices, torch for CUDA {report['cuda_build']}")


def check_ports(bind: Callable[[str], int] | None = None) -> Finding:
    """Two loopback ports can be opened: engines and Ray need them."""

    def bind_free(host: str) -> int:
        with socket.socket() as probe:
            probe.bind((host, 0))
            probe.listen()
            return probe.getsockname()[1]

    try:
        ports = [(bind or bind_free)("127.0.0.1") for _ in range(2)]
    except OSError as error:
        return fail(
            "Loopback ports",
            str(error),
            "A sandbox or firewall forbids servers on 127.0.0.1; allow them.",
        )
    return ok("Loopback ports", f"can be opened (tried {ports[0]} and {ports[1]})")


def check_proxy(environment: Mapping[str, str] = os.environ) -> Finding:
    """Engine calls to 127.0.0.1 do not go through a proxy."""
    proxies = [
        name
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        if environment.get(name)
    ]
    if not proxies:
        return ok("Proxy", "none")
    excluded = {
        part.strip()
        for name in ("no_proxy", "NO_PROXY")
        for part in environment.get(name, "").split(",")
    }
    if "*" in excluded or {"127.0.0.1", "localhost"} <= excluded:
        return ok("Proxy", f"{proxies[0]} is set, loopback is excluded")
    return warn(
        "Proxy",
        (
            f"{proxies[0]} is set and no_proxy has no loopback: programs that honour it would send "
            "engine calls to the proxy"
        ),
        "export no_proxy=127.0.0.1,localhost,<addresses of your nodes>",
    )


def check_hf_cache(environment: Mapping[str, str] = os.environ) -> Finding:
    """Where Hugging Face files would be read from; slime itself needs local folders only."""
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    existing = Path(home)
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return warn(
            "Hugging Face cache", f"{home} cannot be written", "export HF_HOME=<a folder of yours>"
        )
    return ok(
        "Hugging Face cache",
        f"{home}, {'offline' if offline else 'downloads allowed (HF_HUB_OFFLINE=1 forbids them)'}",
    )


def check_open_files(limit: int | None = None) -> Finding:
    """Ray and many connections need file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= 4096:
        return ok("Open files", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))
    return warn(
        "Open files",
        f"the limit is {limit}",
        "ulimit -n 65536 (docker: --ulimit nofile=65536:65536)",
    )


def check_clock(now: float | None = None) -> Finding:
    """The clock is not before this release: certificates, trackers and run names depend on it."""
    now = time.time() if now is None else now
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now < 1767225600:  # 2026-01-01
        return warn(
            "Clock", text, "Set the clock (for instance: systemctl restart systemd-timesyncd)."
        )
    return ok("Clock", text)


EXTRAS = {
    "math-verify": "math",
    "pyarrow": "data",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "sglang-router": "router",
}


def check_extras(versions: Mapping[str, str | None] | None = None) -> Finding:
    """Which optional packages are there; a missing one only matters when its feature is used."""
    if versions is None:
        versions = {package: installed_version(package) for package in EXTRAS}
    missing = sorted({extra for package, extra in EXTRAS.items() if versions[package] is None})
    present = (
        ", ".join(
            f"{package} {version}" for package, version in versions.items() if version is not None
        )
        or "none"
    )
    if not missing:
        return ok("Optional packages", present)
    return ok(
        "Optional packages",
        (
            f"{present}; missing extras: {', '.join(missing)} (pip install "
            f"'slime-rl[{','.join(missing)}]')"
        ),
    )


def all_findings() -> list[Finding]:
    """Runs every check on this machine."""
    torch_report = probe_torch()
    return [
        ok("Machine", f"{platform.system()} {platform.machine()}"),
        check_python(),
        check_cores(),
        check_memory(),
        check_shm(),
        check_disk(),
        check_torch(torch_report),
        check_gpu(torch_report),
        check_tested("megatron-core"),
        check_tested("ray"),
        check_tested("transformers"),
        check_package("aiohttp", at_least="3.10"),
        check_package("orjson", at_least="3.10"),
        check_package("safetensors", at_least="0.4.5"),
        check_extras(),
        check_ports(),
        check_proxy(),
        check_hf_cache(),
        check_open_files(),
        check_clock(),
    ]


MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


def format_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns one line per finding, and the remedy below what needs one."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]} {finding.name:{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"  {'':{width}}  -> {finding.remedy}")
    return lines


def format_findings(findings: Sequence[Finding]) -> str:
    """Returns one line per finding, the remedy below what needs one, and a verdict."""
    counts = {state: sum(finding.state == state for finding in findings) for state in MARKS}
    verdict = "slime can run here" if not counts["fail"] else "slime cannot run here yet"
    return "\n".join(
        [
            *format_lines(findings),
            f"{verdict}: {counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures",
        ]
    )


def doctor(json: bool = False, security: str | None = None) -> int:
    """Check this machine, or the security of one run: one line and one remedy each.

    Args:
        json: Print a JSON list of {name, state, detail, remedy} in place of lines.
        security: A run folder: its open ports, keys, file modes and pickles in place of the machine.

    Returns the exit status: 1 when a check failed (--security: or warned), 2 without such a folder,
    else 0.
    """
    if security is None:
        findings = all_findings()
        print(format_json(findings) if json else format_findings(findings))
        return 1 if any(finding.state == "fail" for finding in findings) else 0
    try:
        findings = security_findings(security)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_json(findings) if json else "\n".join(format_lines(findings)))
    return int(any(finding.state != "ok" for finding in findings))


def format_json(findings: Sequence[Finding]) -> str:
    """Returns the findings as a JSON list."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2)
