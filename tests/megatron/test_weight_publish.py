"""The calls that engines get when weights are published, their order, and what the fingerprint
covers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.update_weight import disk, manager, publish
from slime.exceptions import EngineError, ProcessDied
from slime.files.checksum import weights_checksum
from slime.ray import servers, utils

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
            if isinstance(answer, Exception) and not isinstance(answer, ProcessDied):
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

    def wait_for(refs, **options):
        if any(isinstance(ref, ProcessDied) for ref in refs):
            raise refs[0]
        return refs

    for module in (servers, manager):
        monkeypatch.setattr(module, "wait_for", wait_for)
    monkeypatch.setattr(publish, "iter_hf_weight_buckets", lambda *args: iter(BUCKETS))

    def call(*, check, outlives=False, **answers):
        calls = []
        engine, lock = Recorder(calls, **answers), Recorder(calls, acquire=True)
        other = Recorder(other_calls := [], end_weight_update="sum7")
        manager = Recorder(
            calls,
            get_updatable_engines_and_lock=([engine], lock),
            begin_weight_update=({0: engine, 1: other}, {}),
        )
        call.other = other_calls
        args = SimpleNamespace(
            check_weight_update_equal=check,
            use_fault_tolerance=outlives,
            update_weight_transport="object-store",
            step_timeout=5.0,
        )
        try:
            return calls, publish.publish_weights(args, [], {}, manager, 7)
        except (EngineError, ProcessDied) as error:
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


def test_an_engine_that_dies_in_an_update_is_left_out_and_the_others_get_all_of_it(published):
    """With --use-fault-tolerance the manager hears of the death, the other engine takes every
    bucket and applies the version, and what it took is kept for the successor."""
    calls, fingerprint = published(check=False, outlives=True, update_weights=ProcessDied("gone"))
    assert fingerprint == weights_checksum(TENSORS)
    assert methods(calls) == [
        "get_updatable_engines_and_lock", "acquire", "begin_weight_update", "pause", "begin_weight_update", "update_weights",
        "lose_engine", "keep_published", "clear_updatable_num_new_engines", "release",
    ]  # fmt: skip
    told = {call[0]: call[1:] for call in calls}
    assert told["lose_engine"] == (0, "it died in a weight update (update_weights)")
    assert methods(published.other) == [
        "pause", "begin_weight_update", "update_weights", "update_weights", "end_weight_update", "resume",
    ]  # fmt: skip
    (kept,) = told["keep_published"]
    assert (kept.version, kept.checksum) == ("7", "sum7")
    sent = [call[1] for call in published.other if call[0] == "update_weights"]
    assert list(kept.buckets) == sent


def test_without_fault_tolerance_a_death_in_an_update_ends_it(published):
    """The error names the engine, and the lock is given back."""
    calls, error = published(check=False, update_weights=ProcessDied("the process of engine 0"))
    assert isinstance(error, ProcessDied) and methods(calls)[-1] == "release"


def test_a_server_that_is_gone_when_weights_come_over_the_disk_is_left_out(monkeypatch, tmp_path):
    """With --use-fault-tolerance the others load the folder, which is kept for the successor; a
    server that refuses the weights ends the run."""
    replies = {
        "http://a": EngineError("connection refused"),
        "http://b": {"success": True, "checksum": "sum7"},
    }

    def request(url, *rest):
        reply = replies[url.rpartition("/")[0]]
        if isinstance(reply, Exception):
            raise reply
        return reply

    calls = []
    for name, value in {
        "run": lambda reply: reply,
        "post": request,
        "request_once": lambda method, url, timeout_s: request(url),
        "init_http_client": lambda args: None,
    }.items():
        monkeypatch.setattr(disk, name, value)
    monkeypatch.setattr(manager, "wait_for", lambda refs, **options: refs)
    addresses = {0: "http://a", 1: "http://b"}
    asked = Recorder(calls, begin_weight_update=({}, addresses))
    args = SimpleNamespace(
        use_fault_tolerance=True,
        check_weight_update_equal=False,
        rollout_health_check_timeout=3.0,
        step_timeout=5.0,
    )
    fingerprint = publish.Fingerprint(limit=100)
    disk._load_everywhere(args, asked, 7, tmp_path, fingerprint)
    told = {call[0]: call[1:] for call in calls}
    assert told["lose_engine"] == (0, "connection refused")
    published, taken = told["keep_published"]
    assert (published.version, published.checksum, published.folder, taken) == (
        "7", "sum7", str(tmp_path.resolve()), [1],
    )  # fmt: skip
    replies["http://b"] = {"success": False}
    with pytest.raises(EngineError, match="the engine at http://b did not load the weights of"):
        disk._load_everywhere(args, asked, 8, tmp_path, fingerprint)


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
