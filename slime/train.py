"""The synchronous loop: generate, train, publish the weights, evaluate. It reads as the algorithm.

python -m slime.train --config run.yaml        or        slime train --config run.yaml
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime.commands import launch
from slime.config.resume import evaluates_only, nothing_left, schedule_problem
from slime.config.yaml_file import write_resolved_config
from slime.data.ledger import finished_metrics
from slime.exceptions import ConfigError, NothingLeft, SaveError
from slime.harness.live_view import live_view
from slime.harness.run_records import SAVE_FAILED
from slime.metrics.statistics import compute_rollout_step
from slime.ray.healing import NoHealing, RunHealer
from slime.ray.placement import create_placement_groups
from slime.ray.placement_group import create_rollout_manager, create_training_models
from slime.ray.run_ledger import TrainLedger
from slime.ray.run_watch import RunWatch
from slime.ray.session import run_session
from slime.ray.utils import STOP_TIMEOUT_S, slime_error_of, wait_for
from slime.recording.run_record import begin_recording
from slime.supervision.watch import Loss
from slime.tracking import tracking
from slime.tracking.progress import report
from slime.tracking.spans import start_tracing
from slime.utils.misc import should_run_periodic_action

logger = logging.getLogger("slime")


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything a loop drives: the actors, and which rollouts to run."""

    args: Any
    rollout_manager: Any
    actor: Any
    critic: Any | None
    start_rollout_id: int
    num_rollout: int
    num_rollout_per_epoch: int | None
    # rollout -> versions published when it was begun
    versions_at_start: dict[int, int] = dataclasses.field(default_factory=dict)
    ledger: TrainLedger | None = None  # of the whole run; None where a test drives the loop
    # whatever asks something of the training ranks does so through it
    healer: NoHealing = dataclasses.field(default_factory=NoHealing)

    @property
    def trainers(self) -> list[Any]:
        """The groups of training ranks, the critic's first, as they train."""
        return [group for group in (self.critic, self.actor) if group is not None]

    def is_due(self, rollout_id: int, interval: int | None) -> bool:
        """True after the rollouts at which a periodic action (save, evaluation) falls due."""
        return should_run_periodic_action(
            rollout_id, interval, self.num_rollout_per_epoch, self.num_rollout
        )

    def is_due_to_save(self, rollout_id: int) -> bool:
        """True after every --save-interval rollouts, and after the last one: nothing that was asked
        for ends unsaved.
        """
        asked = self.args.save or self.args.save_hf
        return bool(asked) and (
            rollout_id == self.num_rollout - 1 or self.is_due(rollout_id, self.args.save_interval)
        )


@contextlib.contextmanager
def build_run(args: argparse.Namespace, watch: RunWatch) -> Iterator[Run]:
    """Starts the actors, loads the weights and publishes them to the engines; takes everything down
    again. A process that is lost meanwhile ends the block by its name.
    """
    report(phase="starting engines and trainers")
    placements = create_placement_groups(args)
    healer = RunHealer.from_args(args, watch)
    place = placements["rollout"]
    rollout_manager = healer.start_manager(
        functools.partial(create_rollout_manager, args, place), place
    )
    actor = critic = None
    if args.use_fault_tolerance:
        tell = functools.partial(tell_of_lost_engine, rollout_manager)
        watch.subscribe("engine", healer.unless_with_manager(tell))
    try:
        with watch.needed():
            num_rollout_per_epoch = None
            if args.num_rollout is None:
                counted = rollout_manager.get_num_rollout_per_epoch.remote()
                num_rollout_per_epoch = _at_start(args, counted, "counting the prompts")
            num_rollout, num_rollout_per_epoch = planned_rollouts(args, num_rollout_per_epoch)
            args = with_num_rollout(args, num_rollout)
            if not args.debug_rollout_only:
                report(phase="loading trainers")
                actor, critic, start = healer.create(
                    functools.partial(create_training_models, args, placements, rollout_manager)
                )
            else:
                start = 0
            report(phase="starting engines")
            _at_start(args, rollout_manager.ready.remote(), "starting the engines")
            start = start if args.start_rollout_id is None else args.start_rollout_id
            if start > 0 and args.load:
                loaded = rollout_manager.load.remote(start - 1)
                _at_start(args, loaded, "loading the data position")
            begun = rollout_manager.begin_ledger.remote(start)
            start_name = _at_start(args, begun, "opening the ledger")
            ledger = TrainLedger(args, start_name)
            healer.begin(start, ledger.go_on)
            if actor is not None and not args.debug_train_only:
                report(phase="updating weights")
                healer.update(actor)
            if actor is not None:
                healer.publish(start - 1, is_first=True)
            yield Run(
                args,
                rollout_manager,
                actor,
                critic,
                start,
                num_rollout,
                num_rollout_per_epoch,
                ledger=ledger,
                healer=healer,
            )
    finally:
        for group in (critic, actor):
            if group is not None:
                _quietly(group.release)
        _quietly(healer.close)
        _quietly(
            lambda: wait_for(
                [rollout_manager.dispose.remote()],
                what="stopping the engines",
                timeout_s=STOP_TIMEOUT_S,
                option=None,
            )
        )


def _at_start(args: argparse.Namespace, ref: Any, what: str) -> Any:
    """What an actor answers before the first rollout."""
    limit, option = args.startup_timeout, "--startup-timeout"
    return wait_for([ref], what=what, timeout_s=limit, option=option)[0]


def tell_of_lost_engine(rollout_manager: Any, loss: Loss) -> bool:
    """The rollout manager replaces its engines, and ends the run where it cannot."""
    rollout_manager.lose_engine.remote(loss.number, loss.sentence(), loss.pid)
    return True


def planned_rollouts(
    args: argparse.Namespace, num_rollout_per_epoch: int | None
) -> tuple[int, int | None]:
    """(rollouts to run, rollouts per epoch where --num-epoch counts them). ConfigError for
    --num-epoch without a dataset.

    With --num-rollout an epoch's end is no event: nothing is saved or evaluated because of it.
    """
    if args.num_rollout is not None:
        return args.num_rollout, None
    if not num_rollout_per_epoch:
        raise ConfigError(
            f"--num-epoch {args.num_epoch} counts passes over prompts, and the data source has no "
            "length. Use --num-rollout."
        )
    return args.num_epoch * num_rollout_per_epoch, num_rollout_per_epoch


def with_num_rollout(args: argparse.Namespace, num_rollout: int) -> Any:
    """Returns a copy of `args` whose --num-rollout is the number that follows from --num-epoch: the
    trainers' schedule needs its end.

    NothingLeft where all rollouts are done; ConfigError where a resumed schedule does not reach the
    last one.
    """
    if args.num_rollout is not None:
        return args
    if (sentence := nothing_left(args, num_rollout=num_rollout)) is not None:
        raise NothingLeft(sentence)
    if (
        not args.debug_rollout_only
        and (problem := schedule_problem(args, num_rollout=num_rollout)) is not None
    ):
        raise ConfigError(problem)
    known = copy.copy(args)
    known.num_rollout = num_rollout
    return known


def _quietly(action: Callable[[], Any]) -> None:
    """Runs one step of the cleanup; its failure is logged and must not hide the error that ended
    the run.
    """
    try:
        action()
    except Exception as error:  # noqa: BLE001 - Ray reports dead actors by many exception types
        logger.debug("cleanup: %s", error)


def generate(run: Run, rollout_id: int) -> Any:
    """Begins rollout `rollout_id`; what `shards_of` waits for."""
    if run.actor is not None:
        run.versions_at_start[rollout_id] = run.actor.num_published
    return run.healer.generate(run.rollout_manager, rollout_id)


def shards_of(run: Run, asked: Any, rollout_id: int) -> list:
    """The shards of a rollout that `generate` began, one a data-parallel rank."""
    return run.healer.shards(asked, rollout_id, run.args.step_timeout)


def train_on(
    run: Run, rollout_id: int, shards: list, *, num_updates: int | None = None
) -> list[Any]:
    """One rollout's optimizer steps on every rank, with the critic's values where there is one.
    Returns what the policy's ranks do. num_updates: weight updates since the rollout was begun,
    where it is trained again; None: those until now.
    """
    report(phase="training")
    if num_updates is None:
        num_updates = run.actor.num_published - run.versions_at_start[rollout_id]
    unhealed = dataclasses.replace(run, healer=NoHealing())
    again = functools.partial(train_on, unhealed, rollout_id, shards, num_updates=num_updates)
    results: list[Any] = []
    for attempt in run.healer.attempts(again, rollout_id=rollout_id):
        with attempt:
            values = None
            if run.critic is not None:
                refs = run.critic.async_train(rollout_id, shards)
                values = run.critic.finish_train(refs, rollout_id)
            if run.critic is None or rollout_id >= run.args.num_critic_only_steps:
                refs = run.actor.async_train(
                    rollout_id, shards, values, weight_updates_since_start=num_updates
                )
                results = run.actor.finish_train(refs, rollout_id)
    return results


def enter_trained(run: Run, rollout_id: int, shards: list, results: list[Any]) -> None:
    """Metrics and the ledger of the whole run learn that a rollout has trained. results: what
    `train_on` returned.
    """
    del run.versions_at_start[rollout_id]
    log_trained(run.args, rollout_id, shards, results, run.healer.metrics())
    if run.ledger is not None:
        num_planned = sum(box.num_trained for box in shards)
        run.ledger.enter(rollout_id, num_planned, not_trained_of(results))


def log_trained(
    args: argparse.Namespace,
    rollout_id: int,
    shards: list,
    results: Sequence[Any] = (),
    healed: Mapping[str, float] | None = None,
) -> None:
    """Closes the rollout's ledger: what was planned has trained, but for what the policy's ranks
    say in their `results`. healed: metrics of the ranks' healing.
    """
    counts = {reason: len(indices) for reason, indices in not_trained_of(results).items()}
    metrics = finished_metrics(sum(box.num_trained for box in shards), counts)
    tracking.log(
        args,
        {**metrics, **(healed or {}), "rollout/step": compute_rollout_step(args, rollout_id)},
        step_key="rollout/step",
    )


def not_trained_of(results: Sequence[Any]) -> dict[str, list[int | None]]:
    """{reason: `Sample.index` of the planned samples that did not train}, by all the policy's
    ranks.
    """
    found: dict[str, list[int | None]] = collections.defaultdict(list)
    for result in filter(None, results):
        for reason, indices in result["not_trained"].items():
            found[reason] += indices
    return found


def begin_training(run: Run) -> None:
    """Engines give their memory back and trainers take theirs, as --offload-rollout,
    --offload-train and --release-train ask.
    """
    if run.args.offload_rollout and not run.args.debug_train_only:
        what = "freeing the engines' memory"
        run.healer.sleep_engines(lambda: ask_manager(run, "offload", what=what))
    if run.args.release_train or run.args.offload_train:
        run.healer.resume(run.trainers, run.rollout_manager, ends=run.args.release_train)


def end_training(run: Run) -> None:
    """Trainers give their memory back until the next rollout is generated."""
    if run.args.release_train or run.args.offload_train:
        run.healer.suspend(run.trainers, ends=run.args.release_train)


def update_weights(run: Run) -> None:
    """Gives the engines the trained weights, after the memory that they gave back for training."""
    report(phase="updating weights")
    if run.args.offload_rollout:
        what = "giving the engines memory"
        run.healer.wake_engines(lambda: ask_manager(run, "onload", what=what))
    run.healer.update(run.actor)


def ask_manager(run: Run, method: str, *values: object, what: str) -> None:
    """Returns when the rollout manager has done it."""
    refs = [getattr(run.rollout_manager, method).remote(*values)]
    wait_for(refs, what=what, timeout_s=run.args.step_timeout)


def save(run: Run, rollout_id: int) -> None:
    """One checkpoint: the data position first, then the models, whose published pointer makes both
    current. What cannot be written ends the run, or, with --save-failure continue and a later save
    to come, is logged.
    """
    report(phase="saving")
    failed = 0
    try:
        if run.ledger is not None:
            run.ledger.sync()
        what = "saving the data position"
        run.healer.ask(lambda: ask_manager(run, "save", rollout_id, what=what))
        run.healer.do(lambda: [group.save_model(rollout_id) for group in run.trainers])
    except Exception as error:
        known = slime_error_of(error)
        ends = run.args.save_failure == "end" or rollout_id == run.num_rollout - 1
        if ends or not isinstance(known, SaveError):
            raise
        failed = 1
        logger.error("rollout %d: the run continues without it: %s", rollout_id, known)
    if run.args.save_failure == "continue":
        step = compute_rollout_step(run.args, rollout_id)
        metrics = {SAVE_FAILED: failed, "rollout/step": step}
        tracking.log(run.args, metrics, step_key="rollout/step")


def evaluate_at_start(run: Run) -> None:
    """The evaluation of weights that no rollout of this run has trained: those of a first start,
    or, with --num-rollout 0, the loaded ones alone.
    """
    args = run.args
    is_first = (
        run.start_rollout_id == 0
        and args.eval_interval is not None
        and not args.debug_train_only
        and not args.skip_eval_before_train
    )
    if is_first or evaluates_only(args):
        evaluate(run, run.start_rollout_id)


def evaluate(run: Run, rollout_id: int) -> None:
    """Scores the evaluation datasets with the engines' current weights."""
    report(phase="evaluating")
    run.healer.ask(lambda: ask_manager(run, "eval", rollout_id, what="evaluation"))


def train(run: Run) -> None:
    """Runs rollouts `start_rollout_id .. num_rollout - 1`, one after the other."""
    args = run.args
    evaluates = args.eval_interval is not None and not args.debug_train_only
    evaluate_at_start(run)
    end_training(run)  # of the trainers' start
    for rollout_id in range(run.start_rollout_id, run.num_rollout):
        shards = shards_of(run, generate(run, rollout_id), rollout_id)
        if args.debug_rollout_only:
            continue
        begin_training(run)
        enter_trained(run, rollout_id, shards, train_on(run, rollout_id, shards))
        if run.is_due_to_save(rollout_id):
            save(run, rollout_id)
        if not args.debug_train_only:
            update_weights(run)
        if rollout_id + 1 < run.num_rollout:
            run.healer.publish(rollout_id)
            end_training(run)
        if evaluates and run.is_due(rollout_id, args.eval_interval):
            evaluate(run, rollout_id + 1)


def check_ledger(run: Run) -> None:
    """RolloutDataError where the books of a run that is over do not add up."""
    if run.ledger is not None:
        run.ledger.close()


def finish_recording(run: Run) -> None:
    """Waits for what --record still writes: processes that stop have no time for it."""
    if run.args.record is None:
        return
    run.healer.do(lambda: [group.finish_recording() for group in run.trainers])
    what = "finishing the recording"
    run.healer.ask(lambda: ask_manager(run, "finish_recording", what=what))


@contextlib.contextmanager
def open_run(args: argparse.Namespace) -> Iterator[Run]:
    """A run of parsed options, ready for its loop, with its records, live view and actors.
    `finish_run(args)` is the caller's to call.
    """
    write_resolved_config(args, f"{args.run_dir}/config.yaml")
    args = begin_recording(args)
    with live_view(args):
        tracking.init_tracking(args, primary=True)
        start_tracing(args, "driver", role="driver")
        with run_session(args) as watch, build_run(args, watch) as run:
            yield run
            finish_recording(run)


def main(argv: Sequence[str] | None = None) -> int:
    """`slime train`."""
    return launch.train(argv)


if __name__ == "__main__":
    raise SystemExit(main())
