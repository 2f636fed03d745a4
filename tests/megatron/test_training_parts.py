"""Small parts between the training loop and its processes: weight sets by name, errors from actors,
the engines' data type."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import ray
import torch
from support.options import write_run_inputs
from support.patched_calls import OPTIMIZER, Chunk
from support.pretend_rank import pretend_rank
from support.rollout_args import rollout_args

from slime import train, train_async
from slime.backends.megatron_utils import model as model_steps
from slime.backends.megatron_utils.model import _in_local_order
from slime.backends.megatron_utils.update_weight.disk import update_problem
from slime.backends.megatron_utils.weights_backup import WeightsBackup
from slime.backends.torch_engine.engine_config import engine_config_from_args
from slime.commands import session  # noqa: E402
from slime.commands.session import print_failure  # noqa: E402
from slime.exceptions import ConfigError, EngineError
from slime.ray import utils
from slime.ray.placement_group import _check_critic_start
from slime.ray.rollout_servers import RolloutServers
from slime.ray.utils import reason_of_death, slime_error_of
from slime.utils.arguments import parse_args

NUM_GPUS = 0


def holding(value):
    """A model of one number."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def test_outputs_of_a_forward_pass_come_back_in_the_order_of_the_samples():
    """Outputs come back in the order of the samples, as one column for rows of tokens; a user's
    function may give a number per sample, or rows of several."""
    rows = [torch.full((n + 1,), float(n)) for n in range(3)]
    wide = [torch.full((n, 2), float(n)) for n in range(3)]
    numbers = [torch.tensor(float(n)) for n in range(3)]
    walked = [[2, 0], [1]]
    collected = [
        (
            torch.zeros(()),
            {"a": [rows[i] for i in w], "b": [wide[i] for i in w], "c": [numbers[i] for i in w]},
        )
        for w in walked
    ]
    results = _in_local_order(collected, walked, "my_")
    for name, expected in (("my_a", rows), ("my_b", wide), ("my_c", numbers)):
        assert all(map(torch.equal, results[name], expected)) and len(results[name]) == 3
    assert results.raw("my_a").values.tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(0, ["look"]), (2, ["look", "update", "update"])]
)
def test_log_probs_are_looked_at_once_before_the_weights_change(num_steps, expected, monkeypatch):
    """The look at the log-probs is before the first step's update alone, and is not left out where
    a rollout has no step."""
    events = []

    def step(*args, before_update, **sizes):
        if before_update is not None:
            before_update()
        events.append("update")
        return {}, 1.0

    monkeypatch.setattr(model_steps, "train_one_step", step)
    monkeypatch.setattr(model_steps, "is_megatron_main_rank", lambda: False)
    ones = [1] * num_steps
    iterator = SimpleNamespace(
        rollout_data={"num_microbatches": ones, "global_batch_sizes": ones}, reset=lambda: None
    )
    with pretend_rank():
        logged = model_steps.train(
            rollout_args(global_batch_size=8), 0, [Chunk()], OPTIMIZER, None, [iterator],
            before_update=lambda: events.append("look"),
        )  # fmt: skip
    assert events == expected and len(logged) == num_steps


def test_moved_weight_set_makes_room_for_the_next():
    """With --keep-old-actor each publish makes the engines' set the old one and the trained weights
    the engines' set."""
    model = holding(0.0)
    weights = WeightsBackup([model])
    weights.backup("actor")
    for published in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(model.weight, published)
        weights.move("rollout_actor", to="old_actor")
        weights.backup("rollout_actor")
    held = {}
    for tag in ("actor", "old_actor", "rollout_actor"):
        with weights.borrowed(tag):
            held[tag] = model.weight.item()
    assert held == {"actor": 0.0, "old_actor": 2.0, "rollout_actor": 3.0}
    assert model.weight.item() == 3.0


def raised_in_actor(error):
    """What ray.get raises when an actor's method raised `error`."""
    return ray.exceptions.RayTaskError(
        "call", "Traceback ...\n", error, pid=7, ip="127.0.0.1"
    ).as_instanceof_cause()


def raised_in_constructor(error):
    """What ray.get raises when the actor's constructor raised `error`: Ray keeps the text alone."""
    text = (
        "\x1b[36mray::RolloutManager.__init__()\x1b[39m (pid=7)\n  File "
        f"...\n{type(error).__module__}.{type(error).__name__}: {error}"
    )
    return ray.exceptions.ActorDiedError(
        ray.exceptions.RayTaskError("__init__", text, error, pid=7, ip="127.0.0.1")
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda error: error,
        raised_in_actor,
        raised_in_constructor,
        lambda e: raised_in_actor(raised_in_actor(e)),
    ],
)
def test_error_from_an_actor_is_its_message_alone(wrapped, capsys):
    """A configuration error from an actor is its message without Ray's stack, with the exit status
    of wrong options."""
    found = slime_error_of(wrapped(ConfigError("--load x is not there.\nUse another.")))
    assert type(found) is ConfigError
    assert str(found) == "--load x is not there.\nUse another."
    assert print_failure(wrapped(ConfigError("--load x is not there."))) == 2
    assert print_failure(wrapped(EngineError("engine 0 is gone."))) == 1
    assert capsys.readouterr().err == "error: --load x is not there.\nerror: engine 0 is gone.\n"


def test_other_error_from_an_actor_names_the_actor_and_the_cause(capsys):
    """Another error from an actor names actor and cause with the end of its stack."""
    assert slime_error_of(raised_in_actor(KeyError("x"))) is None
    assert print_failure(raised_in_actor(KeyError("x"))) == 1
    assert "error in an actor" in capsys.readouterr().err


def test_death_of_a_process_is_one_sentence():
    """The death of an actor's process is one sentence that names the actor and where to look."""
    page = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: "
        "EngineActor\n\tpid: 4711\n\tnamespace: x\n"
    )
    killed = ray.exceptions.RayActorError(
        error_msg=page
        + "The actor is dead because ... Worker exit type: SYSTEM_ERROR Worker exit detail: ..."
    )
    assert reason_of_death(killed).startswith(
        "It had process id 4711. It crashed or was killed from outside;"
    )
    assert reason_of_death(ray.exceptions.RayActorError(error_msg="gone")) == "gone"


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("", "float32"),
        ("--bf16", "bfloat16"),
        ("--fp16", "float16"),
        ("--bf16 --sglang-dtype float32", "float32"),
    ],
)
def test_engine_computes_in_the_trainers_type(words, dtype, tmp_path):
    """The engine takes the trainer's data type: a float32 checkpoint trained in bfloat16 is served
    in bfloat16."""
    args = parse_args([*write_run_inputs(tmp_path), *words.split()])
    assert engine_config_from_args(args, 0).dtype == dtype


def test_server_that_has_other_weights_is_noticed():
    """A reply with status 200 that reports a failed load is an error, and
    --check-weight-update-equal compares every byte."""
    assert update_problem({"success": True}, expected=None) is None
    assert update_problem({"success": True, "checksum": "ab"}, expected="ab") is None
    assert update_problem({"success": False, "message": "no such folder"}, expected=None) == (
        "it answered {'success': False, 'message': 'no such folder'}"
    )
    assert (
        update_problem({"success": True, "checksum": "ab"}, expected="cd")
        == "its checksum is ab, the trainer's cd"
    )
    assert "reports no checksum" in update_problem({"success": True}, expected="cd")


def test_engine_that_does_not_answer_is_reported_and_not_waited_for(monkeypatch):
    """An engine that does not answer a health check is reported after its time limit."""
    health = {
        "well": None,
        "stuck": ray.exceptions.GetTimeoutError("no reply"),
        "failed": raised_in_actor(EngineError("engine 2 has failed")),
    }

    def get(ref, timeout=None):
        assert timeout is not None and 0 < timeout <= 60, "a stuck engine would be waited for"
        if health[ref] is not None:
            raise health[ref]

    monkeypatch.setattr(ray, "get", get)
    engines = [
        SimpleNamespace(health=SimpleNamespace(remote=lambda name=name: name)) for name in health
    ]
    stuck, failed = RolloutServers(engines, ["http://a", "http://b", "http://c"]).failures()
    assert RolloutServers([], ["http://external"]).failures() == []
    assert (
        stuck == "engine 1 (http://b) does not answer within 10 s."
        and failed == "engine 2 has failed"
    )


def test_critic_continues_with_its_policy():
    """Critic and policy resume at the same rollout, or the critic starts new; another combination
    is refused."""
    args = SimpleNamespace(load="policy", critic_load="critic")
    _check_critic_start(args, 3, {3})
    _check_critic_start(args, 3, {0})
    with pytest.raises(ConfigError, match="would start at rollout 3, the critic .* at 2"):
        _check_critic_start(args, 3, {2})


def test_a_weight_update_does_not_wait_for_ever_for_its_lock(monkeypatch):
    """An update whose lock another one holds gives up after its limit."""
    monkeypatch.setattr(utils.actors, "get", lambda value, **kwargs: value)
    lock = SimpleNamespace(acquire=SimpleNamespace(remote=lambda holder: False))
    with (
        pytest.raises(EngineError, match="another weight update has held the engines for 0 s"),
        utils.held(lock, timeout_s=0.05),
    ):
        pass


class Recorder:
    """Stands for an actor or a group of ranks: notes what it is told, in the list
    that all share.
    """

    def __init__(self, name, events):
        self.name, self.events, self.num_published = name, events, 0

    def __getattr__(self, method):
        def call(*args, **kwargs):
            self.events.append(f"{self.name} {method}")
            return [SimpleNamespace(num_trained=1)]

        call.remote = call
        return call


def run_of(monkeypatch, num_rollout=2, **options):
    """What the synchronous loop tells engines, policy and critic, in order."""
    events = []
    values = {"offload_train": False, "offload_rollout": False, "release_train": False, "eval_interval": None, "debug_train_only": False,
              "debug_rollout_only": False, "step_timeout": 1.0, "num_critic_only_steps": 0, "save": None, "save_hf": None,
              "num_rollout": num_rollout}  # fmt: skip
    engines, policy, critic = (Recorder(name, events) for name in ("engines", "policy", "critic"))
    for module in ("train", "ray.healing"):
        monkeypatch.setattr(f"slime.{module}.wait_for", lambda refs, **kwargs: list(refs))
    monkeypatch.setattr(train, "report", lambda **kwargs: None)
    monkeypatch.setattr(train, "log_trained", lambda *args: None)
    train.train(
        train.Run(
            SimpleNamespace(**{**values, **options}), engines, policy, critic, 0, num_rollout, None
        )
    )
    return events


def test_trainers_and_engines_take_turns_with_the_devices_memory(monkeypatch):
    """While one side works the other's memory is free, and both are there when weights are sent."""
    training = [
        f"{who} {what}" for who in ("critic", "policy") for what in ("async_train", "finish_train")
    ]
    plain = ["engines generate", *training, "policy update_weights"]
    assert run_of(monkeypatch) == plain * 2
    sleep, wake = ["critic offload", "policy offload"], ["critic onload", "policy onload"]
    assert run_of(monkeypatch, offload_train=True) == [
        *sleep, "engines generate", *wake, *plain[1:], *sleep, "engines generate", *wake, *plain[1:]]  # fmt: skip
    assert run_of(monkeypatch, num_rollout=1, offload_rollout=True) == [
        "engines generate", "engines offload", *training, "engines onload", "policy update_weights"]  # fmt: skip
    assert run_of(monkeypatch, num_rollout=1, offload_train=True, release_train=True) == [
        "critic suspend", "policy suspend", "engines generate", "critic recreate", "policy recreate", *plain[1:]]  # fmt: skip


@pytest.mark.parametrize("name", ["colocate", "offload_train", "offload_rollout", "release_train"])
def test_sides_that_work_at_the_same_time_cannot_take_turns(name):
    """Colocation, offloading and --release-train are refused in train-async, which generates while
    it trains."""
    options = {
        "colocate": False,
        "offload_train": False,
        "offload_rollout": False,
        "release_train": False,
        "local": False,
        name: True,
    }
    run = SimpleNamespace(args=SimpleNamespace(**options))
    with pytest.raises(ConfigError, match=f"remove --{name.replace('_', '-')}, or use slime train"):
        train_async.train(run)


def test_a_loop_that_cannot_take_turns_refuses_the_options_at_parsing(
    tmp_path, capsys, monkeypatch
):
    """Every option that the loop cannot honour is named at parsing, all at once, also in a dry
    run."""
    monkeypatch.setattr(session, "run_to_the_end", lambda *args: pytest.fail("the run was started"))
    for more in ([], ["--dry-run"]):
        assert (
            train_async.main([*write_run_inputs(tmp_path), "--local", "--offload-train", *more])
            == 2
        )
        said = capsys.readouterr().err
        assert (
            "use slime train --local" in said
            and "remove --offload-train, or use slime train" in said
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
