"""What `make` installs: the size is printed before the download, and a CPU build is taken where
there is one and no GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import install  # noqa: E402

NUM_GPUS = 0

CPU_WORDS, PLAIN = f"torch=={install.TORCH}+cpu", f"torch=={install.TORCH}"


def report_of(version, requires=()):
    """What `pip install --dry-run --report` writes, as far as it is read."""
    return {
        "install": [
            {"metadata": {"name": "torch", "version": version, "requires_dist": list(requires)}}
        ]
    }


@pytest.mark.parametrize(
    ("version", "requires", "kind"),
    [
        ("2.13.0+cpu", ["sympy", "jinja2"], "cpu"),
        ("2.13.0", ["sympy", "nvidia-cudnn-cu13==9.20; platform_system == 'Linux'"], "cuda"),
        ("2.13.0+cu130", ["cuda-bindings>=13"], "cuda"),
        ("2.13.0", ["sympy"], "cpu"),  # macOS, and Linux on ARM
    ],
)
def test_the_build_is_read_from_pips_own_report(version, requires, kind):
    """Whether a build needs CUDA is read from pip's report; the version does not tell, because
    PyPI's CUDA build has no suffix."""
    assert install.build_of_report(PLAIN, report_of(version, requires)) == install.Build(
        PLAIN, version, kind
    )


@pytest.mark.parametrize(
    ("has_gpu", "offered", "asked", "taken"),
    [
        (False, {CPU_WORDS, PLAIN}, [CPU_WORDS], CPU_WORDS),
        (False, {PLAIN}, [CPU_WORDS, PLAIN], PLAIN),
        (True, {CPU_WORDS, PLAIN}, [PLAIN], PLAIN),
    ],
)
def test_a_cpu_build_comes_first_only_where_no_gpu_is(has_gpu, offered, asked, taken):
    """Without a GPU the CPU build is asked for first: pip orders +cu130 after +cpu and would take
    the large one."""
    questions = []

    def ask(requirement):
        questions.append(requirement)
        return install.Build(requirement, "2.13.0", "cpu") if requirement in offered else None

    assert install.choose_build(has_gpu=has_gpu, ask=ask).requirement == taken
    assert questions == asked


def test_what_is_installed_stays():
    """An installed torch stays: a second `make` downloads nothing and replaces no build."""
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130"):
        assert (
            install.choose_build(
                has_gpu=False, installed=version, ask=lambda requirement: pytest.fail("asked")
            ).kind
            == "here"
        )


def test_the_size_is_told_first_and_a_full_disk_stops():
    """The size is printed before the download, and a disk without room for it ends the
    installation."""
    lines, fits = install.announcement(
        install.Build(PLAIN, "2.13.0", "cuda"), has_gpu=False, free_gb=50.0
    )
    assert (
        fits
        and "CUDA build" in lines[0]
        and "3.2 GB to download, 6.6 GB on disk (50 GB free)" in lines[0]
    )
    assert "One saves 4.0 GB" in lines[1] and "PIP_EXTRA_INDEX_URL" in lines[1]
    lines, fits = install.announcement(
        install.Build(CPU_WORDS, "2.13.0+cpu", "cpu"), has_gpu=False, free_gb=2.0
    )
    assert (
        not fits
        and len(lines) == 2
        and "error: 2.0 GB are free here, 2.6 GB are needed" in lines[1]
    )
    lines, fits = install.announcement(
        install.Build(PLAIN, "2.13.0", "cuda"), has_gpu=True, free_gb=50.0
    )
    assert fits and len(lines) == 1


def test_downloads_are_shown_without_a_terminal():
    """Downloads are shown in a log without a terminal, so that minutes of silence do not look like
    a hang."""
    output = [
        "Collecting torch\n",
        "  Downloading torch-2.13.0.whl (530 MB)\n",
        "Requirement already satisfied: x\n",
        "Installing collected packages: torch\n",
    ]
    assert list(install.shown_lines(output)) == [
        "Downloading torch-2.13.0.whl (530 MB)",
        "Installing collected packages: torch",
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
