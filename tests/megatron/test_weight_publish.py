"""The calls that engines get when weights are published, their order, and what the fingerprint
covers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.update_weight import manager, publish
from slime.exceptions import EngineError
from slime.files.checksum import weights_checksum
from slime.ray import utils

NUM_GPUS = 0

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.ones(4),
}
BUCKETS = [[("a", TENSORS["a"])], [], [("b", TENSORS["b"]), ("c", TENSORS["c"])]]


class Recorder:
    """An actor that notes what it is asked; `answers` by method, raised where they are errors."""

    def __init__(self, calls, **answers):
        self._calls, self._answers = calls, answers

    def __getattr__(self, method):
        def remote(*values):
            self._calls.append((method, *values))
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)


@pytest.fixture
def published(monkeypatch):
    """publish_weights as version 7 to one engine, with the calls of actors made at once: (calls,
    result).
    """
    told = SimpleNamespace(get=lambda ref, timeout: ref, put=lambda value: value)
    for module in (publish, utils):
        monkeypatch.setattr(module, "actors", told)
    for module in (publish, manager):
        monkeypatch.setattr(module, "wait_for", lambda refs, **kw: refs)
    monkeypatch.setattr(publish, "iter_hf_weight_buckets", lambda *args: iter(BUCKETS))

    def call(*, check, **answers):
        calls = []
        engine, lock = Recorder(calls, **answers), Recorder(calls, acquire=True)
        manager = Recorder(calls, get_updatable_engines_and_lock=([engine], lock))
        args = SimpleNamespace(
            check_weight_update_equal=check,
            update_weight_transport="object-store",
            step_timeout=5.0,
        )
        try:
            return calls, publish.publish_weights(args, [], {}, manager, 7)
        except EngineError as error:
            return calls, error

    return call


def methods(calls):
    return [call[0] for call in calls]


@pytest.mark.parametrize("check", [False, True])
def test_engines_pause_take_every_bucket_and_go_on(published, check):
    """Under the lock engines pause, take every bucket and continue, with the expected checksum
    under --check-weight-update-equal."""
    calls, fingerprint = published(check=check)
    assert methods(calls) == [
        "get_updatable_engines_and_lock", "acquire", "pause", "begin_weight_update", "update_weights", "update_weights",
        "end_weight_update", "resume", "clear_updatable_num_new_engines", "release",
    ]  # fmt: skip
    told = {call[0]: call[1:] for call in calls}
    assert told["begin_weight_update"] == ("7",) and told["clear_updatable_num_new_engines"] == (7,)
    assert fingerprint == weights_checksum(TENSORS)
    assert told["end_weight_update"] == ("7", fingerprint if check else None)


def test_bfloat16_travels_as_its_bits(published):
    """bfloat16, which numpy lacks, is sent as uint16 bits."""
    calls, _ = published(check=False)
    sent = [call[1] for call in calls if call[0] == "update_weights"]
    assert [sorted(bucket) for bucket in sent] == [["a"], ["b", "c"]]
    assert sent[1]["b"].dtype == np.uint16
    assert torch.equal(torch.from_numpy(sent[1]["b"]).view(torch.bfloat16), TENSORS["b"])
    assert sent[1]["c"].dtype == np.float32


def test_the_lock_is_given_back_when_an_engine_refuses(published):
    """An engine that refuses an update does not leave the lock taken."""
    calls, error = published(check=False, update_weights=EngineError("weights refused"))
    assert isinstance(error, EngineError)
    assert methods(calls)[-1] == "release" and "end_weight_update" not in methods(calls)


def test_a_fingerprint_is_of_all_tensors_or_of_the_first_bytes():
    """With 24 bytes the fingerprint covers `a` alone and with 25 one tensor more; a rank that
    exported nothing has none."""
    for limit, names in ((float("inf"), "abc"), (24, "a"), (25, "ab"), (29, "abc")):
        fingerprint = publish.Fingerprint(limit=limit)
        for bucket in BUCKETS:
            fingerprint.add(bucket)
        assert fingerprint.value() == weights_checksum({name: TENSORS[name] for name in names}), (
            limit
        )
    assert publish.Fingerprint(limit=100).value() is None


def test_without_the_check_a_large_model_is_hashed_in_part(published, monkeypatch):
    """Only --check-weight-update-equal hashes every byte of a large model, which takes seconds."""
    monkeypatch.setattr(publish, "FINGERPRINT_BYTES", 24)
    assert published(check=False)[1] == weights_checksum({"a": TENSORS["a"]})
    assert published(check=True)[1] == weights_checksum(TENSORS)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
