"""Each check of `slime doctor` on a machine that is broken in one way: the check fails and tells
what to do."""

import runpy
from pathlib import Path

import pytest

from slime import tested_versions
from slime.commands import doctor

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]

GOOD_TORCH = {
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "cuda_build": None,
    "cuda": False,
    "warnings": [],
}
CUDA_TORCH = {**GOOD_TORCH, "torch": "2.13.0", "cuda_build": "12.8", "cuda": True}


def refuse(host):
    raise PermissionError("Operation not permitted")


@pytest.mark.parametrize(
    ("finding", "state", "word"),
    [
        (doctor.check_python((3, 11, 7)), "ok", "3.11.7"),
        (doctor.check_python((3, 9, 1)), "fail", "3.10 to 3.13"),
        (doctor.check_python((3, 14, 0)), "fail", "3.10 to 3.13"),
        (doctor.check_cores(2.0), "ok", "2"),
        (doctor.check_cores(0.5), "warn", "0.5"),
        (doctor.check_memory(8.0, 16.0), "ok", "8.0 of 16.0"),
        (doctor.check_memory(1.0, 16.0), "fail", "4 GiB"),
        (doctor.check_shm(2 * doctor.GIB), "ok", "2.0 GiB"),
        (doctor.check_shm(64 * 1024**2), "warn", "--shm-size"),
        (doctor.check_shm(path="/no/such/folder"), "warn", "missing"),
        (doctor.check_disk(doctor.GIB // 4), "fail", "Free at least 4 GiB"),
        (doctor.check_disk(2 * doctor.GIB), "warn", "Free at least 4 GiB"),
        (doctor.check_package("ray", at_least="2.49", version="2.60.0"), "ok", "2.60.0"),
        (
            doctor.check_package("ray", at_least="2.49", version="2.9.0"),
            "fail",
            "2.9.0 is older than 2.49",
        ),
        (
            doctor.check_package("ray", at_least="2.49", version=None),
            "fail",
            "pip install 'ray>=2.49'",
        ),
        (
            doctor.check_tested("megatron-core", version="0.16.1"),
            "ok",
            "0.16.1 (tested: 0.16 to 0.19)",
        ),
        (
            doctor.check_tested("megatron-core", version="0.19.2"),
            "ok",
            "0.19.2 (tested: 0.16 to 0.19)",
        ),
        (
            doctor.check_tested("megatron-core", version="0.15.3"),
            "fail",
            "pip install 'megatron-core>=0.16,<0.20'",
        ),
        (doctor.check_tested("megatron-core", version="0.20.0"), "fail", "newer than slime knows"),
        (doctor.check_tested("megatron-core", version=None), "fail", "not installed"),
        (doctor.check_tested("ray", version="2.61.0"), "warn", "newer than what is tested (2.60)"),
        (doctor.check_torch(GOOD_TORCH), "ok", "CPU build"),
        (
            doctor.check_torch({**GOOD_TORCH, "torch": "2.14.1"}),
            "warn",
            "newer than what is tested (2.13)",
        ),
        (doctor.check_torch({**GOOD_TORCH, "torch": "2.6.0"}), "fail", "can execute code"),
        (
            doctor.check_torch(
                {
                    **GOOD_TORCH,
                    "bridge_error": "RuntimeError: Numpy is not available",
                    "numpy": "1.26",
                }
            ),
            "fail",
            "torch 2.13.0+cpu with numpy 1.26",
        ),
        (
            doctor.check_torch(
                {
                    **GOOD_TORCH,
                    "warnings": ["A module compiled using NumPy 1.x cannot be run in NumPy 2.4.6"],
                }
            ),
            "fail",
            "do not fit",
        ),
        (
            doctor.check_torch({"error": "ImportError: libcudart.so.12: cannot open"}),
            "fail",
            "libcudart.so.12",
        ),
        (doctor.check_gpu(GOOD_TORCH, devices=[], driver=None), "ok", "none"),
        (doctor.check_gpu(GOOD_TORCH, devices=["/dev/nvidia0"], driver="570"), "warn", "CPU build"),
        (doctor.check_gpu(CUDA_TORCH, devices=["/dev/nvidia0"], driver=None), "fail", "--gpus all"),
        (
            doctor.check_gpu({**CUDA_TORCH, "cuda": False}, devices=["/dev/nvidia0"], driver="470"),
            "fail",
            "470",
        ),
        (doctor.check_gpu(CUDA_TORCH, devices=["/dev/nvidia0"], driver="570"), "ok", "1 devices"),
        (doctor.check_ports(refuse), "fail", "not permitted"),
        (doctor.check_ports(), "ok", "can be opened"),
        (doctor.check_proxy({}), "ok", "none"),
        (doctor.check_proxy({"http_proxy": "http://p:1"}), "warn", "no_proxy"),
        (
            doctor.check_proxy({"HTTP_PROXY": "http://p:1", "no_proxy": "localhost"}),
            "warn",
            "127.0.0.1",
        ),
        (
            doctor.check_proxy({"http_proxy": "http://p:1", "NO_PROXY": "localhost, 127.0.0.1"}),
            "ok",
            "excluded",
        ),
        (doctor.check_hf_cache({"HF_HOME": "/dev/null/hf"}), "warn", "HF_HOME"),
        (doctor.check_hf_cache({"HF_HOME": "/tmp/hf", "HF_HUB_OFFLINE": "1"}), "ok", "offline"),
        (doctor.check_open_files(1024), "warn", "ulimit -n"),
        (doctor.check_open_files(65536), "ok", "65536"),
        (doctor.check_clock(0.0), "warn", "Set the clock"),
        (
            doctor.check_extras({package: None for package in doctor.EXTRAS}),
            "ok",
            "slime-rl[data,math,",
        ),
    ],
)
def test_a_check_sees_what_is_wrong_and_says_what_to_do(finding, state, word):
    """Each check fails on a broken machine with the remedy."""
    assert finding.state == state, finding
    assert word in f"{finding.detail} {finding.remedy}", finding
    assert bool(finding.remedy) == (state != "ok")


def test_a_containers_limits_count(tmp_path):
    """CPU and memory are the container's limits, and not the host's."""
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert doctor.usable_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.usable_cores(tmp_path) >= 1
    meminfo = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n"
    assert doctor.memory_gib(meminfo, tmp_path) == (8.0, 16.0)
    (tmp_path / "memory.max").write_text(str(4 * doctor.GIB))
    (tmp_path / "memory.current").write_text(str(1 * doctor.GIB))
    assert doctor.memory_gib(meminfo, tmp_path) == (3.0, 4.0)
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory_gib(meminfo, tmp_path) == (8.0, 16.0)


def test_an_interpreter_that_dies_is_a_finding(tmp_path):
    """A torch that crashes on import is a finding, and the doctor goes on."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Segmentation fault' >&2\nexit 139\n")
    python.chmod(0o755)
    assert doctor.probe_torch(str(python)) == {"error": "Segmentation fault"}
    assert "error" in doctor.probe_torch(str(tmp_path / "missing"))


def test_readme_and_setup_tell_the_tested_range(monkeypatch):
    """README and setup.py have the version ranges of slime/tested_versions.py."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {tested_versions.python_range()}" in readme
    assert f"megatron-core {tested_versions.tested_range('megatron-core')}" in readme
    captured = {}
    monkeypatch.setattr("setuptools.setup", captured.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert captured["python_requires"] == ">=3.10,<3.14"
    assert "megatron-core>=0.16,<0.20" in captured["install_requires"]
    extras = captured["extras_require"]
    assert any(one.startswith("starlette") for one in extras["viewer"])
    assert set(extras["viewer"]) <= set(extras["test"])


def test_versions_compare_by_number():
    """Versions compare by number: 2.9 is older than 2.49."""
    assert doctor.version_numbers("2.9") < doctor.version_numbers("2.49.1")
    assert doctor.version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert doctor.version_numbers("3.0.dev1") == (3, 0)


def test_findings_are_one_line_with_a_mark_and_the_remedy_below():
    """A finding is one line with a mark and the remedy below."""
    text = doctor.format_findings(
        [doctor.ok("A", "fine"), doctor.fail("Bee", "broken", "Repair it.")]
    )
    assert text.splitlines() == [
        "✓ A    fine",
        "✗ Bee  broken",
        "       -> Repair it.",
        "slime cannot run here yet: 1 ok, 0 warnings, 1 failures",
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
