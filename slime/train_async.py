"""The asynchronous loop: generates one rollout while the one before trains (off-policy by one).

    python -m slime.train_async --config run.yaml        or slime train-async --config run.yaml

Engines and trainers need devices of their own, so `--colocate` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.commands import launch
from slime.train import (
    Run,
    enter_trained,
    evaluate,
    evaluate_at_start,
    generate,
    save,
    shards_of,
    train_on,
    update_weights,
)


def train(run: Run) -> None:
    """Runs rollouts `start_rollout_id .. num_rollout - 1` with one rollout in flight ahead of the
    trainer.
    """
    args = run.args
    launch.require_two_sides(args)
    evaluates = args.eval_interval is not None and not args.debug_train_only
    evaluate_at_start(run)
    ahead = generate(run, run.start_rollout_id) if run.start_rollout_id < run.num_rollout else None
    for rollout_id in range(run.start_rollout_id, run.num_rollout):
        shards = shards_of(run, ahead, rollout_id)
        ahead = generate(run, rollout_id + 1) if rollout_id + 1 < run.num_rollout else None
        if args.debug_rollout_only:
            continue
        enter_trained(run, rollout_id, shards, train_on(run, rollout_id, shards))
        if run.is_due_to_save(rollout_id):
            save(run, rollout_id)
        if (rollout_id + 1) % args.update_weights_interval == 0 and not args.debug_train_only:
            if ahead is not None:
                # No weights may change under a running generation, or one sample would mix two
                # policies unnoticed.
                run.healer.wait(ahead, rollout_id + 1, args.step_timeout)
            update_weights(run)
            # between two updates the ranks are ahead of the engines, which may need weights again
            if rollout_id + 1 < run.num_rollout:
                run.healer.publish(rollout_id)
        if evaluates and run.is_due(rollout_id, args.eval_interval):
            if ahead is not None:
                # The end of a generation aborts every request on the engines, those of an
                # evaluation too.
                run.healer.wait(ahead, rollout_id + 1, args.step_timeout)
            evaluate(run, rollout_id + 1)


def main(argv: Sequence[str] | None = None) -> int:
    """`slime train-async`."""
    return launch.train_async(argv)


if __name__ == "__main__":
    raise SystemExit(main())
