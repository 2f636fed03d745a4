"""Everything that a training step reads comes back from a checkpoint: the list of it, and a test
for each part on a real rank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import contextlib
import errno
import io
import json
import os
import tempfile
from types import SimpleNamespace

import pytest
import ray
import torch
from support.megatron_worker import local_batch
from support.options import write_run_inputs
from support.tiny_models import make_tiny_checkpoint

from slime.accelerator.host_memory import FileCopies, HostCopies
from slime.backends.megatron_utils.actor_state import STATE, load_actor_state
from slime.backends.megatron_utils.optimizer import training_tensors
from slime.exceptions import ConfigError, RolloutDataError
from slime.ray.placement_group import _critic_args
from slime.tracking.timer import Timer
from slime.utils.arguments import parse_args

NUM_GPUS = 0

# What a rank holds. A new attribute belongs in one of the two lists: it is restored, and compared
# below, or a step does not read it.
RESTORED = {"model", "optimizer", "opt_param_scheduler", "weights", "weight_version", "_last_train_step", "_moved_reference",
            "_weights_fingerprint", "weight_ages"}  # fmt: skip
NOT_READ_BY_A_STEP = {
    # given at the start
    "args", "role", "rank", "world_size", "with_ref", "with_opd_teacher", "model_shape",
    "master_addr", "master_port", "rollout_manager", "_asleep", "recorder",  # of this process
    "_last_rollout_id", "_weight_updates_since_start",  # of this rollout
}  # fmt: skip


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A function that starts the one rank of a run, ending the one before; the engines are not
    there.
    """
    from megatron.core import mpu

    from slime.backends.megatron_utils import actor as module

    model = make_tiny_checkpoint(tmp_path / "tiny", "llama")
    words = [
        *write_run_inputs(tmp_path),
        "--hf-checkpoint",
        str(model),
        "--save",
        str(tmp_path / "save"),
        "--accelerator",
        "cpu",
    ]
    words += [
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.1",
        "--ref-load",
        str(model),
        "--ref-update-interval",
        "2",
        "--keep-old-actor",
    ]
    words += [
        "--lr",
        "0.01",
        "--lr-decay-style",
        "constant",
        "--data-pad-size-multiplier",
        "8",
        "--hidden-dropout",
        "0.1",
    ]
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")  # --accelerator sets it for the process
    for name in (
        "configure_logger",
        "log_rollout_data",
        "log_consistency",
        "log_perf_data",
        "save_debug_train_data",
        "log",
    ):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "publish_weights", lambda *args: "fingerprint")
    monkeypatch.setattr(module, "inverse_timer", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(ray, "get_gpu_ids", list)  # it would start a cluster
    running = []

    def stop():
        for actor in running:
            mpu.destroy_model_parallel()
            actor.stop()
        running.clear()

    def start(*options):
        stop()
        # the test trains on fixed sequences with the loss that needs nothing but them
        args = parse_args([*words, *options])
        args.loss_type, args.compute_advantages_and_returns = "sft_loss", False
        actor = module.MegatronTrainRayActor(1, 0, "127.0.0.1", _free_port())
        running.append(actor)
        Timer().start_time.clear()
        actor.rollout_manager = None
        actor.first_rollout = actor.init(args, "actor", with_ref=True)
        return actor

    yield start
    stop()


def _free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _train(actor, rollout_id):
    """One rollout as the loop runs it: steps, and the weights to the engines."""
    data, _ = local_batch(actor.args)
    data["partition"] = list(range(len(data["tokens"])))
    data["sample_indices"] = data["partition"]
    data["global_batch_sizes"] = [4, 4]
    return actor.train_actor(rollout_id, data)


def mask_first(args, rollout_id, rollout_data):
    rollout_data["loss_masks"][0].zero_()


def unmask(args, rollout_id, rollout_data):
    rollout_data["loss_masks"] = [torch.ones(len(mask)) for mask in rollout_data["loss_masks"]]


def test_a_rank_says_which_planned_samples_did_not_train(rank):
    """A rank reports planned samples that did not train: one masked by a hook, all of two skipped
    steps; a hook that unmasks is refused."""
    actor = rank("--rollout-data-postprocess-path", f"{__name__}.mask_first")
    (masked,) = _train(actor, 0)["not_trained"]["masked_by_function"]
    actor.args.rollout_data_postprocess_path = None
    assert _train(actor, 1) == {"not_trained": {}}
    broken = actor.model[0].module.decoder.final_layernorm.register_forward_hook(
        lambda module, inputs, output: output * float("nan")
    )
    skipped = _train(actor, 2)["not_trained"]["update_skipped"]
    assert len(set(skipped)) == 8 and masked in skipped
    broken.remove()
    actor.args.rollout_data_postprocess_path = f"{__name__}.unmask"
    data, _ = local_batch(actor.args)
    data["partition"] = list(range(len(data["tokens"])))
    data["loss_masks"][3][0] = 0
    with pytest.raises(
        RolloutDataError,
        match="unmask set the loss mask of response token 0 of sample 3 to 1, and it was 0",
    ):
        actor.train_actor(3, data)


def _held(actor):
    """Everything in RESTORED as plain values, and the next random numbers, which dropout draws."""
    state = {
        name: parameter.detach().clone() for name, parameter in actor.model[0].named_parameters()
    }
    moments = {
        f"moment {index} {name}": value.clone()
        for part in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
        for index, entry in enumerate(part.optimizer.state.values())
        for name, value in entry.items()
    }
    sets = {
        f"set {tag} {name}": tensor.clone()
        for tag in sorted(actor.weights._sets)
        for name, tensor in actor.weights._sets[tag].items()
    }
    counters = {
        "weight_version": actor.weight_version,
        "train_step": actor._last_train_step,
        "moved": actor._moved_reference,
        "fingerprint": actor._weights_fingerprint,
        "ages": (actor.weight_ages.num_trained, dict(actor.weight_ages.trained_at)),
        "schedule": json.dumps(actor.opt_param_scheduler.state_dict(), default=str),
        "random": torch.random.get_rng_state().clone(),
    }
    return {**state, **moments, **sets, **counters}


def _assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        same = (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        )
        assert same, name


def test_everything_that_a_step_reads_is_restored(rank):
    """Everything that a step reads is restored, the moved reference included: it is not
    --ref-load's again."""
    actor = rank()
    actor.update_weights()
    for rollout_id in range(3):
        _train(actor, rollout_id)
        if rollout_id < 2:
            actor.update_weights()
    assert set(vars(actor)) - {"first_rollout"} == RESTORED | NOT_READ_BY_A_STEP
    actor.save_model(2)
    actor.update_weights()
    expected = _held(actor)
    assert expected["weight_version"] == 4 and expected["train_step"] == 5 and expected["moved"]
    (head,) = (
        name
        for name in expected
        if name.startswith("set ref ") and name.endswith("output_layer.weight")
    )
    assert not torch.equal(expected[head], expected[head.replace("set ref", "set actor")])

    resumed = rank("--load", str(Path(actor.args.save)))
    assert resumed.first_rollout == 3
    resumed.update_weights()  # the loop publishes the loaded weights first
    _assert_equal(_held(resumed), expected)

    _train(resumed, 3)
    continued = _held(resumed)
    again = rank("--load", str(Path(actor.args.save)), "--finetune")
    assert again.first_rollout == 0 and not again._moved_reference and again.weight_version == 0
    assert continued["train_step"] == 7


@pytest.mark.parametrize("kind", ["host", "file"])
def test_training_goes_on_after_its_state_was_out_of_the_device(rank, tmp_path, kind):
    """Every storage of training is emptied and filled again, and parameters stay views of flat
    buffers."""
    actor = rank()
    actor.update_weights()
    _train(actor, 0)
    expected, tensors = _held(actor), list(training_tensors(actor.model, actor.optimizer))
    counts = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    copies = HostCopies(tensors) if kind == "host" else FileCopies(tensors, str(tmp_path))
    assert copies.num_bytes == sum(counts.values()) > 0
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert all(
        parameter.untyped_storage().nbytes() == 0 for parameter in actor.model[0].parameters()
    )
    copies.restore()
    _assert_equal(_held(actor), expected)
    _train(actor, 1)
    assert actor._last_train_step == 3


def test_a_sleeping_rank_holds_no_memory_for_training(rank):
    """With --offload-train a rank's state is on the run folder's disk while engines generate, and
    comes back bit for bit."""
    actor = rank()
    actor.update_weights()
    _train(actor, 0)
    expected = _held(actor)
    tensors = list(training_tensors(actor.model, actor.optimizer))
    num_bytes = sum(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )
    for _ in range(2):
        actor.sleep()  # the second time it sleeps already
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    written = os.fstat(actor._asleep._file.fileno())
    assert (written.st_size, written.st_nlink, written.st_dev) == (
        num_bytes,
        0,
        os.stat(actor.args.run_dir).st_dev,
    )
    for _ in range(2):
        actor.wake_up()
    _assert_equal(_held(actor), expected)


def test_a_resumed_rank_may_sleep(rank, tmp_path):
    """What a checkpoint gives is memory of the process's own, which --offload-train can empty."""
    actor = rank()
    _train(actor, 0)
    actor.save_model(0)
    actor = rank("--load", str(tmp_path / "save"))
    expected = _held(actor)
    actor.sleep()
    actor.wake_up()
    _assert_equal(_held(actor), expected)


def test_a_full_disk_leaves_the_training_state_where_it_is(tmp_path, monkeypatch):
    """On a full disk the state stays in memory, and the error names the option and the folder."""

    class FullFile(io.BytesIO):
        def write(self, data):
            if self.tell():
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **kwargs: FullFile())
    tensors = [torch.arange(4.0), torch.ones(3, dtype=torch.bfloat16)]
    with pytest.raises(
        ConfigError,
        match=(
            f"--offload-train cannot write the training state below {tmp_path}: No space left on "
            "device"
        ),
    ):
        FileCopies(tensors, str(tmp_path))
    assert tensors[0].tolist() == [0, 1, 2, 3] and tensors[1].tolist() == [1, 1, 1]


def test_ranks_that_were_ended_go_on_in_new_processes(rank, tmp_path):
    """--release-train and --recovery-interval write the whole state, also where checkpoints leave a
    part out, and new processes go on with it: also with the weights that sampled rollouts which
    were begun before."""
    actor = rank("--no-save-optim", "--no-save-rng")
    actor.update_weights()
    _train(actor, 0)
    actor.update_weights()
    folder = str(tmp_path / "state")
    actor.publish_state(folder, 1)
    expected, fingerprint = _held(actor), actor._weights_fingerprint
    written = sum(path.stat().st_size for path in Path(folder).rglob("*.distcp"))
    assert written < actor.state_bytes()
    _train(actor, 1)
    actor.publish_state(folder, 2)
    again = rank("--load", folder, "--ckpt-step", "1")
    _assert_equal(_held(again), expected)
    assert again._weights_fingerprint == fingerprint == "fingerprint"


def test_one_rank_logs_a_weight_update_also_after_a_resume(rank, tmp_path, monkeypatch):
    """Every rank loads the fingerprint of the weights; the one that exports them logs the next."""
    actor = rank()
    actor.update_weights()
    actor.publish_state(str(tmp_path / "state"), 0)
    again, logged, module = rank("--load", str(tmp_path / "state")), [], sys.modules[type(actor).__module__]  # fmt: skip
    monkeypatch.setattr(module, "log", lambda args, metrics, **_: logged.append(metrics))
    again._last_rollout_id = 0
    monkeypatch.setattr(module, "publish_weights", lambda *args: None)
    again.update_weights()
    assert logged == []
    again._weights_fingerprint = "fingerprint"
    monkeypatch.setattr(module, "publish_weights", lambda *args: "another")
    again.update_weights()
    assert [metrics["perf/weight_version"] for metrics in logged] == [3]


def test_a_checkpoint_of_an_earlier_version_has_no_counters_and_loads(rank, tmp_path):
    """A checkpoint of an earlier version without counters loads."""
    actor = rank()
    actor.update_weights()
    _train(actor, 0)
    actor.save_model(0)
    folder = tmp_path / "save" / "iter_0000000"
    for name in (STATE, "manifest.json"):
        (folder / name).unlink()
    resumed = rank("--load", str(tmp_path / "save"))
    assert (resumed.first_rollout, resumed.weight_version, resumed._moved_reference) == (
        1,
        1,
        False,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"weight_version": "1", "last_train_step": 0, "sets": []}',
        '{"weight_version": 1, "last_train_step": 0, "sets": ["../x"]}',
    ],
)
def test_a_damaged_state_is_named(tmp_path, text):
    (tmp_path / STATE).write_text(text)
    with pytest.raises(ConfigError, match="actor_state.json is damaged"):
        load_actor_state(tmp_path)


def test_the_critic_is_saved_with_its_policy_and_found_again(tmp_path):
    """--save saves the critic with its policy, and a resumed run loads it."""
    words = [
        *write_run_inputs(tmp_path),
        "--advantage-estimator",
        "ppo",
        "--save",
        str(tmp_path / "save"),
    ]
    assert parse_args(words).critic_save == str(tmp_path / "save" / "critic")
    assert parse_args([*words, "--critic-save", str(tmp_path / "c")]).critic_save == str(
        tmp_path / "c"
    )
    assert (
        parse_args([*write_run_inputs(tmp_path), "--save", str(tmp_path / "save")]).critic_save
        is None
    )
    for folder in (tmp_path / "save", tmp_path / "save" / "critic"):
        (folder / "iter_0000004").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("4")
    resume = ["--load", str(tmp_path / "save")]
    assert parse_args([*words, *resume]).critic_load == str(tmp_path / "save" / "critic")
    assert parse_args([*words, *resume, "--finetune"]).critic_load is None


def test_the_critic_resumes_after_the_rollout_of_its_policy(tmp_path, caplog):
    """A critic that a crash left one checkpoint ahead resumes at its policy's rollout."""
    for step in (3, 5):
        (tmp_path / f"iter_000000{step}").mkdir()
    args = SimpleNamespace(load="policy", critic_load=str(tmp_path), ckpt_step=None)
    assert _critic_args(args, 4).ckpt_step == 3
    # it has no iteration 4: the difference is refused by name later
    assert _critic_args(args, 5).ckpt_step is None
    assert _critic_args(args, 0) is args
    args.critic_load = None
    assert _critic_args(args, 4) is args
    assert (
        "--load policy has no critic: the policy goes on after rollout 3 with a new critic"
        in caplog.text
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *sys.argv[1:]]))
