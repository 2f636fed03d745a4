"""What slime is tested with, stated once, for setup.py, `slime doctor` and the installer.

Standard library only, and no imports: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

# Every version of Python on which the main job and the core test folders pass.
PYTHON = ((3, 10), (3, 13))

# package -> (lowest that works, lowest and highest that the tests ran with, first version that pip
# must not take)
PACKAGES: dict[str, tuple[str, str, str, str | None]] = {
    "torch": ("2.10", "2.13", "2.13", None),
    # pip takes 0.16.1 on Python 3.10 and 3.11, and 0.19 on newer ones. slime replaces functions
    # inside it.
    "megatron-core": ("0.16", "0.16", "0.19", "0.20"),
    "transformers": ("5", "5.20", "5.24", "6"),  # pip takes 5.20 on Python 3.10
    # 2.52 is the first that asks clients of a cluster for a token
    "ray": ("2.52", "2.60", "2.60", "3"),
}


def requirement(package: str) -> str:
    """Returns the requirement of a package in pip's words: "megatron-core>=0.16,<0.20"."""
    lowest, _, _, below = PACKAGES[package]
    return f"{package}>={lowest}" + (f",<{below}" if below else "")


def tested_range(package: str) -> str:
    """Returns "0.16 to 0.19", or the one version where there is one."""
    _, first, last, _ = PACKAGES[package]
    return first if first == last else f"{first} to {last}"


def python_range() -> str:
    """Returns "3.10 to 3.13"."""
    return " to ".join(".".join(map(str, version)) for version in PYTHON)
