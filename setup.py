"""Packaging of slime. The distribution is `slime-rl`, because `slime` on PyPI is an unrelated
package; the import name is `slime`.
"""

import re
import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
TESTED = runpy.run_path(str(ROOT / "slime" / "tested_versions.py"))
FIRST_PYTHON, LAST_PYTHON = TESTED["PYTHON"]

CORE = [
    # below 2.10 torch.load(weights_only=True) can still execute code
    TESTED["requirement"]("torch"),
    "numpy>=1.26",
    TESTED["requirement"]("ray"),
    "requests>=2.31",
    TESTED["requirement"]("transformers"),
    TESTED["requirement"]("megatron-core"),
    "aiohttp>=3.10",
    "jinja2>=3.1",
    "matplotlib>=3.8",
    "orjson>=3.10",
    "packaging>=23",
    "py-spy>=0.4",  # the first that reads Python 3.13
    "PyYAML>=6",
    "rich>=13.7",
    "safetensors>=0.4.5",
    "tokenizers>=0.20",
    "tyro>=0.9",
]

EXTRAS = {
    "math": ["math-verify>=0.8"],
    "data": ["pyarrow>=15"],
    "wandb": ["wandb>=0.18"],
    "tensorboard": ["tensorboard>=2.17"],
    "viewer": ["pyarrow>=15", "starlette>=0.40", "uvicorn>=0.29"],
    "router": ["sglang-router>=0.3", "setproctitle>=1.3", "fastapi>=0.110", "uvicorn>=0.29"],
}
EXTRAS["test"] = sorted(
    {requirement for extra in EXTRAS.values() for requirement in extra}
    | {
        "check-jsonschema>=0.29",
        "duckdb>=1.0",
        "httpx>=0.27",
        "hypothesis>=6.100",
        "mypy>=1.11",
        "playwright>=1.45",  # drives the system's Chromium; it downloads none
        "pandas>=2.2.2",
        "polars>=1.0",
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",  # `make test` runs on two cores
        "ruff>=0.6",
        "scipy>=1.11",
        "types-PyYAML",
        "zizmor>=1.5",
    }
)


def read_version() -> str:
    """Returns the version that slime/__init__.py states; there is no second copy."""
    text = (ROOT / "slime" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


setup(
    name="slime-rl",
    version=read_version(),
    description=(
        "RL post-training for language models whose data path is exact, visible and "
        "testable on two CPU cores"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_namespace_packages(include=["slime", "slime.*"]),
    package_data={
        "": ["*.html", "*.css", "*.js", "*.jinja", "*.svg", "*.yaml", "*.json", "*.txt", "*.md"]
    },
    python_requires=f">={FIRST_PYTHON[0]}.{FIRST_PYTHON[1]},<{LAST_PYTHON[0]}.{LAST_PYTHON[1] + 1}",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["slime = slime.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        *(
            f"Programming Language :: Python :: 3.{minor}"
            for minor in range(FIRST_PYTHON[1], LAST_PYTHON[1] + 1)
        ),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
