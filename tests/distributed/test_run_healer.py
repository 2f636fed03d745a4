"""The driver's side of --recovery-interval: what is asked of ranks and managers that die, and of those
in their place. Groups of ranks, and the manager, are stand-ins that count what they have done."""

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from slime.backends.megatron_utils.checkpoint_files import iteration_folder
from slime.exceptions import ConfigError, ProcessDied, SaveError, SlimeError
from slime.ray import actors, healing, manager_seat, train_states
from slime.ray.healing import NoHealing, RunHealer
from slime.ray.run_watch import RunWatch
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.records import end_by_force, register
from slime.supervision.watch import Loss
from slime.utils.misc import Box

NUM_GPUS = 0


class Ranks:
    """A group whose state is the list of what it has trained; `dies` are the calls, by number, in
    which a rank dies."""

    world_size = 1

    def __init__(self, role, log, dies=()):
        self.role, self.log, self.dies = role, log, set(dies)
        self.is_running, self.state, self.folders, self.num_calls = True, [], [], 0
        self.lose = lambda: None

    def _call(self, what):
        self.log.append(f"{self.role} {what}")
        self.num_calls += 1
        if self.num_calls in self.dies:
            self.state = None
            self.lose()
            died = ProcessDied(f"{what}: the process died")
            died.whose = f"{self.role} rank 0"
            raise died

    def train(self, rollout_id):
        self._call(f"train {rollout_id}")
        self.state.append(rollout_id)

    def state_bytes(self):
        return 1000

    def async_publish_state(self, folder, number):
        self._call(f"publish {number}")
        self.folders.append(folder)
        place = iteration_folder(folder, number)
        place.mkdir(parents=True, exist_ok=True)
        (place / "state.json").write_text(json.dumps(self.state))
        return []

    def finish_publish_state(self, refs):
        pass

    def end_now(self):
        self.is_running = False

    def end(self):
        self.is_running = False
        raise ProcessDied("stop: it died by itself")

    def recreate(self, manager, folder, number):
        self._call(f"recreate {number}")
        self.state = json.loads((iteration_folder(folder, number) / "state.json").read_text())
        self.is_running = True

    def start_again(self, manager):
        self._call("start again")
        self.state, self.is_running = [], True

    def skip_logged(self, offset):
        self.log.append(f"{self.role} logged {offset}")

    def update_weights(self):
        self._call("update")
        self.state.append("update")
        Manager.living.weights = list(self.state)

    def count_update(self):
        self._call("count update")
        self.state.append("update")

    def send_weights_again(self):
        self._call("send again")
        Manager.living.weights = list(self.state)

    def set_rollout_manager(self, manager):
        assert manager is Manager.living


class Method:
    """A method of an actor: what `remote` returns is what `get` gives."""

    def __init__(self, call):
        self.remote = call


class Manager:
    """Hands out rollouts, and dies when it is told to: `dies` holds (rollout, when). Its engines have
    `weights`. What it has generated is in `generated`, over all processes."""

    living = None

    def __init__(self, log, generated, dies, folder):
        self.log, self.generated, self.dies, self.folder = log, generated, dies, folder
        self.is_dead, self.weights, self.lose = False, None, lambda: None
        Manager.living = self

    def _die(self, moment):
        if moment in self.dies:
            self.dies.discard(moment)
            self.is_dead = True
            self.lose()
        if self.is_dead:
            raise ray.exceptions.RayActorError()

    def __getattr__(self, name):
        return Method(lambda *values: self._answer(name, *values))

    def _answer(self, name, *values):
        try:
            self._die((name, *values))
            self.log.append(" ".join(["manager", name, *map(str, values)]))
            if name == "generate":
                self.generated.append((values[0], self.weights))
                return [Box(f"shard {values[0]}", 1)]
            return f"start {values[0] + 1}" if name == "go_on" else None
        except ray.exceptions.RayActorError as error:
            return error


@pytest.fixture
def healer(tmp_path, monkeypatch):
    """healer(interval, *groups): one whose groups are these."""
    monkeypatch.setattr(healing, "CAUSE_S", 0.05)
    monkeypatch.setattr(healing, "SETTLE_S", 0.0)
    monkeypatch.setattr(train_states, "free_host_bytes", lambda: 10**9)

    def memory_folder(folder):
        (tmp_path / "memory").mkdir(exist_ok=True)
        return tmp_path / "memory"

    monkeypatch.setattr(healing, "memory_folder", memory_folder)

    def get(value):
        if isinstance(value, Exception):
            raise value
        return value

    def wait_for(refs, **options):
        return [get(ref) for ref in refs]

    monkeypatch.setattr(healing, "wait_for", wait_for)
    monkeypatch.setattr(manager_seat, "wait_for", wait_for)
    monkeypatch.setattr(manager_seat, "end_by_force", lambda roles: [])
    monkeypatch.setattr(actors, "get", get)
    monkeypatch.setattr(actors, "put", lambda value: f"own {value}")
    monkeypatch.setattr(actors, "kill", lambda handle: None)

    def make(interval, *groups, dies=(), log=None, generated=None, **options):
        args = SimpleNamespace(**{
            "recovery_interval": interval, "release_train": False, "run_dir": str(tmp_path / "run"), "ray_address": None,
            "actor_num_nodes": 1, "actor_num_gpus_per_node": 1, "debug_rollout_only": False, "step_timeout": 5.0,
            "startup_timeout": 5.0, "offload_train": False, "rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, **options})  # fmt: skip
        found, left = RunHealer.from_args(args, RunWatch(run_folder="run")), set(dies)

        def start_manager(folder):
            manager = Manager(
                [] if log is None else log, [] if generated is None else generated, left, folder
            )
            manager.lose = lambda: found.lose(Loss(ROLLOUT_MANAGER, 8, ""))
            return manager

        found.seat = found.start_manager(start_manager, (None, [], []))
        policy, critic = groups[-1], groups[0] if len(groups) > 1 else None
        found.create(lambda: (policy, critic, 0))
        found.starts = []
        found.begin(0, lambda *start: found.starts.append(start))
        for group in groups:
            group.lose = lambda group=group: found.lose(Loss(f"{group.role} rank 0", 7, ""))
        return found

    return make


def train_through(healer, train, rollout_id):
    """`train` is called until no process is lost in it, as `train_on` does it."""
    for attempt in healer.attempts(train, rollout_id=rollout_id):
        with attempt:
            train()


def rollout(healer, rollout_id, *groups):
    """One rollout of the loop."""

    def train():
        for group in groups:
            group.train(rollout_id)

    train_through(healer, train, rollout_id)
    healer.publish(rollout_id)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("call", range(1, 14))
def test_whenever_a_rank_dies_the_ranks_have_done_everything_once(healer, interval, call):
    """Five rollouts of policy and critic, a death in any call of any of them, also while the state
    is published and while ranks start again: both have trained each rollout once, in order."""
    for dying in ("critic", "actor"):
        log = []
        groups = [Ranks(role, log, {call, call + 3} if role == dying else ()) for role in ("critic", "actor")]  # fmt: skip
        tended = healer(interval, *groups)
        tended.publish(-1, is_first=True)
        for rollout_id in range(5):
            rollout(tended, rollout_id, *groups)
        assert [group.state for group in groups] == [[0, 1, 2, 3, 4]] * 2, log
        has_died = any(line.startswith(("critic recreate", "critic start")) for line in log)
        assert has_died == any(group.num_calls >= call for group in groups if group.dies)
        assert (tended.metrics()["rollout/training_restarts"] > 0) == has_died
        tended.close()


def test_only_what_came_after_the_last_state_is_done_again(healer):
    log = []
    policy = Ranks("actor", log, {8})
    tended = healer(2, policy)
    tended.publish(-1, is_first=True)
    for rollout_id in range(5):
        rollout(tended, rollout_id, policy)
    assert log == [
        "actor publish 0", "actor train 0", "actor train 1", "actor publish 2", "actor train 2",
        "actor train 3", "actor publish 4", "actor train 4", "actor recreate 4", "actor logged 0",
        "actor train 4"]  # fmt: skip


def test_a_loss_that_nobody_waited_for_is_healed_before_the_next_call(healer):
    """A rank that dies while engines generate is noticed by the watch alone."""
    log = []
    policy = Ranks("actor", log)
    tended = healer(1, policy)
    rollout(tended, 0, policy)
    policy.lose()
    rollout(tended, 1, policy)
    assert policy.state == [0, 1] and log.count("actor recreate 1") == 1


def test_the_same_rollout_ends_the_run_after_three_losses(healer):
    """Losses are counted by rollout; the error names it, the process and what to do."""
    policy = Ranks("actor", [], {1, 4})  # the training of rollout 0, once, and of rollout 1
    tended = healer(1, policy)
    for rollout_id in range(3):
        rollout(tended, rollout_id, policy)
    tended.do(lambda: None)
    policy.dies = range(policy.num_calls, 1000)
    with pytest.raises(
        SlimeError,
        match=r"actor rank 0 .* lost 3 times since the training of rollout 3 began.*--load",
    ):
        rollout(tended, 3, policy)
    assert not tended.lose(Loss("actor rank 0", 7, "")), "from now on a loss ends the run"


def test_what_is_no_loss_ends_the_run_as_before(healer):
    policy = Ranks("actor", [])
    tended = healer(1, policy)
    for error in (ValueError("a bug"), ConfigError("an option"), ProcessDied("an engine")):

        def fail(error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            tended.do(fail)


def test_ranks_that_die_while_they_load_are_started_again(healer):
    tended, tries = healer(1, Ranks("actor", [])), []

    def start():
        tries.append(len(tries))
        if len(tries) < 3:
            died = ProcessDied("loading: the process died")
            died.whose = "critic rank 0"
            raise died
        return "policy", None, 4

    assert tended.create(start)[2] == 4 and tries == [0, 1, 2]
    tries[:] = [0, 1]
    with pytest.raises(SlimeError, match="lost 3 times since the start"):
        healer(1, Ranks("actor", [])).create(lambda: tries.clear() or start())


def test_ranks_that_cannot_be_ended_end_the_run(healer, monkeypatch):
    """A process that outlives SIGKILL (a disk that hangs) is named by its id."""
    monkeypatch.setattr(healing, "end_by_force", lambda roles: [4711])
    died = ProcessDied("loading: the process died")
    died.whose = "actor rank 0"

    def start():
        raise died

    with pytest.raises(SlimeError, match=r"training processes \[4711\] do not end"):
        healer(1, Ranks("actor", [])).create(start)


def test_a_state_that_does_not_fit_into_memory_is_kept_on_the_disk(healer, monkeypatch, caplog):
    """One warning says so, with the sizes; a state that no disk takes leaves the one before."""
    policy = Ranks("actor", [])
    tended = healer(1, policy)
    rollout(tended, 0, policy)
    tended.do(lambda: None)
    (memory,) = policy.folders
    assert Path(memory, "iter_0000001").is_dir()
    monkeypatch.setattr(train_states, "free_host_bytes", lambda: 2000)
    rollout(tended, 1, policy)
    rollout(tended, 2, policy)
    tended.do(lambda: None)
    disk = policy.folders[-1]
    assert disk.endswith("/run/recovery/actor") and memory.endswith("/memory/actor")
    assert os.listdir(disk) == ["iter_0000003"] and not os.path.exists(memory)
    assert caplog.text.count("does not fit into memory") == 1 and "1e-06 GB" in caplog.text

    def full(refs):
        raise SaveError("No space left on device")

    policy.finish_publish_state = full
    rollout(tended, 3, policy)
    tended.do(lambda: None)
    policy.lose()
    tended.do(lambda: None)
    assert "was not kept, an earlier one is: No space left" in caplog.text
    assert policy.state == [0, 1, 2, 3]


def test_without_the_option_nothing_is_kept():
    args = SimpleNamespace(recovery_interval=0, debug_rollout_only=False)
    assert type(RunHealer.from_args(args, RunWatch())) is NoHealing


def loop(healer, policy, num_rollout=4, *, ahead=False, offload=False, ends=False):
    """The loop of train.py, or with `ahead` that of train_async.py."""
    healer.update(policy)
    healer.publish(-1, is_first=True)
    asked = healer.generate(healer.seat, 0) if ahead else None
    seen = []
    for rollout_id in range(num_rollout):
        asked = asked if ahead else healer.generate(healer.seat, rollout_id)
        seen += [box.inner for box in healer.shards(asked, rollout_id, 5.0)]
        if ahead and rollout_id + 1 < num_rollout:
            asked = healer.generate(healer.seat, rollout_id + 1)
        if offload:
            healer.sleep_engines(lambda: healing.wait_for([healer.seat.offload.remote()]))
        if ends:
            healer.resume([policy], healer.seat, ends=True)

        def train(rollout_id=rollout_id):
            policy.train(rollout_id)

        train_through(healer, train, rollout_id)
        healer.ask(lambda: healing.wait_for([healer.seat.save.remote(rollout_id)]))  # noqa: B023
        if ahead and rollout_id + 1 < num_rollout:
            healer.wait(asked, rollout_id + 1, 5.0)
        if offload:
            healer.wake_engines(lambda: healing.wait_for([healer.seat.onload.remote()]))
        healer.update(policy)
        healer.publish(rollout_id)
        if ends and rollout_id + 1 < num_rollout:
            healer.suspend([policy], ends=True)
        healer.ask(lambda: healing.wait_for([healer.seat.eval.remote(rollout_id + 1)]))  # noqa: B023
    return seen


DONE = ["update", 0, "update", 1, "update", 2, "update", 3, "update"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("moment", [
    ("generate", 0), ("generate", 2), ("save", 1), ("eval", 2), ("eval", 4), ("offload",), ("onload",), ("go_on", 1)])  # fmt: skip
def test_whenever_the_manager_dies_each_rollout_is_handed_out_once(healer, ahead, interval, offload, moment):  # fmt: skip
    """A death in any call, also of the manager that takes the place of a dead one: the driver has each
    rollout once, sampled by the weights that an undisturbed run samples it with; the ledger's next
    start begins with the first rollout that was not handed out."""
    log, generated, expected = [], [], []
    undisturbed = healer(interval, Ranks("actor", []), generated=expected)
    loop(undisturbed, undisturbed._groups[0], ahead=ahead, offload=offload)
    policy = Ranks("actor", log)
    dies = {moment, ("generate", 2)} if moment[0] == "go_on" else {moment}
    tended = healer(interval, policy, log=log, dies=dies, generated=generated)
    seen = loop(tended, policy, ahead=ahead, offload=offload)
    assert seen == [f"own shard {number}" for number in range(4)]
    assert policy.state == DONE and generated == expected, log
    assert Manager.living.weights == DONE
    if offload or moment[0] not in ("offload", "onload"):
        assert tended.starts and f"manager go_on {tended.starts[-1][1] - 1}" in log
        assert tended.metrics()["rollout/manager_restarts"] == 1


def test_the_manager_and_a_rank_that_die_together_are_both_replaced(healer):
    """The rank in the weight update by which new engines get what those before had."""
    log, generated = [], []
    policy = Ranks("actor", log)
    tended = healer(1, policy, log=log, generated=generated, dies={("generate", 2)})
    policy.dies = {9}  # the first call for new engines
    loop(tended, policy)
    assert "actor send again" in log[log.index("manager go_on 1") :], log
    assert policy.state == DONE and Manager.living.weights == DONE
    assert [number for number, _ in generated] == [0, 1, 2, 3]


def test_ranks_that_ended_while_engines_generate_bring_weights_to_new_engines(healer):
    """With --release-train: they are started for it, and end again."""
    log, generated = [], []
    policy = Ranks("actor", log)
    tended = healer(1, policy, log=log, generated=generated, dies={("generate", 2)}, release_train=True)  # fmt: skip
    loop(tended, policy, ends=True)
    assert policy.state == DONE
    assert generated[2] == (2, ["update", 0, "update", 1, "update"])


@pytest.mark.parametrize("role", ["the router", "the lock of weight updates"])
def test_what_the_manager_needs_is_replaced_with_it(healer, role):
    """A node that goes takes them in any order: the lock may be heard of before the manager, which is
    heard of while it is replaced and counts once."""
    policy, log = Ranks("actor", []), []
    tended = healer(1, policy, log=log)
    end = tended.seat.end
    tended.seat.end = lambda: (tended.lose(Loss(ROLLOUT_MANAGER, 8, "")), end())
    tended.lose(Loss(role, 9, ""))
    loop(tended, policy)
    assert policy.state == DONE and Manager.living.weights == DONE
    assert sum(line.startswith("manager go_on") for line in log) == 1
    assert tended.metrics()["rollout/manager_restarts"] == 1


def test_what_ends_with_the_manager_is_no_loss_of_its_own(healer):
    """Its engines, the router and the lock end with it; an engine that dies by itself is."""
    tended, engine = healer(1, Ranks("actor", [])), Loss("engine 0", 9, "")
    assert tended.unless_with_manager(lambda loss: False)(engine) is False
    assert tended.unless_with_manager(lambda loss: True)(engine) is True
    answers, told = [], tended.unless_with_manager(lambda loss: False)
    end_now = tended._groups[0].end_now
    tended._groups[0].end_now = lambda: (answers.append(told(engine)), end_now())
    tended.lose(Loss("actor rank 0", 7, ""))
    tended.lose(Loss(ROLLOUT_MANAGER, 8, ""))
    assert told(engine) is True
    Manager._answer, answer = lambda self, *call: (answers.append(told(engine)), answer(self, *call))[1], Manager._answer  # fmt: skip
    try:
        tended.do(lambda: None)
    finally:
        Manager._answer = answer
    assert len(answers) > 2 and answers[:2] == [True, True], "until the new one is there"
    assert told(engine) is False


def test_a_manager_that_dies_before_the_run_begins_ends_it(healer):
    tended = healer(1, Ranks("actor", []))
    tended._on_manager = None
    assert tended.lose(Loss(ROLLOUT_MANAGER, 8, "")) is False


def test_processes_are_ended_by_their_role(tmp_path, monkeypatch):
    """Those of other roles stay, and none of them counts as a loss."""
    import subprocess

    monkeypatch.setenv("SLIME_WATCH_FOLDER", str(tmp_path))
    processes = {role: subprocess.Popen(["sleep", "60"]) for role in ("actor rank 0", "actor rank 10", "engine 0")}  # fmt: skip
    threads = []
    for role, process in processes.items():
        register(role, process.pid)
        threads.append(threading.Thread(target=process.wait))
        threads[-1].start()
    assert end_by_force(["actor rank 0"]) == []
    assert {role: process.poll() for role, process in processes.items()} == {
        "actor rank 0": -9, "actor rank 10": None, "engine 0": None}  # fmt: skip
    assert not list(tmp_path.glob("actor-rank-0.*")) and len(list(tmp_path.iterdir())) == 2
    assert end_by_force(["actor rank 10", "engine 0"]) == []
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
