"""Fixtures for pytest: put `pytest_plugins = ["slime.testing.fixtures"]` into your conftest.py.

def test_my_generate(tiny_engine):
    sample = call(my_generate, tiny_engine.args(rollout_max_response_len=4),
    make_sample(prompt="1+1="), {"max_new_tokens": 4})
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.server_thread import EngineServerThread
from slime.testing import FakeEngine, engines_at, make_args
from slime.testing.tiny_models import make_tiny_checkpoint


@dataclasses.dataclass(frozen=True)
class TinyEngine:
    """A real engine in this process: a random two-layer model behind SGLang's HTTP API."""

    url: str
    folder: Path

    def args(self, **overrides: object) -> argparse.Namespace:
        """`make_args` with this model; greedy unless asked otherwise, so that a test has one
        answer.
        """
        return make_args(
            **{"hf_checkpoint": str(self.folder), "rollout_temperature": 0.0, **overrides}
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer model whose tokenizer has one id
    per character.
    """
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def _serving(tiny_model: Path) -> Iterator[str]:
    with EngineServerThread(EngineConfig(str(tiny_model))) as server:
        yield server.url


@pytest.fixture
def tiny_engine(_serving: str, tiny_model: Path) -> Iterator[TinyEngine]:
    """The real engine (one per test session), to which this test's requests go."""
    with engines_at(_serving):
        yield TinyEngine(_serving, tiny_model)


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    """A scripted engine, to which this test's requests go: set `fake_engine.answer`."""
    with FakeEngine() as engine, engines_at(engine.url):
        yield engine
