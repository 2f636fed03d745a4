"""One small recorded run for the tests of this folder that read recordings."""

import pytest


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory):
    """The recording of two rollouts and an evaluation. Copy it to change it."""
    from support.recordings import record_small_run

    return record_small_run(tmp_path_factory.mktemp("recorded"))
