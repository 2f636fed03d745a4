"""Every loop that has no bound because it lasts as long as its owner, and how it ends; what has a
bound stands in slime/config/waits.py. docs/loops.md is generated from both.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Worker:
    """A loop that lasts as long as its owner, and how it ends."""

    what: str
    places: tuple[str, ...]
    ends: str


WORKERS = (
    Worker(
        "the fully asynchronous worker keeps groups in flight",
        (
            "rollout/fully_async_rollout.py::AsyncRolloutWorker._loop",
            "rollout/fully_async_rollout.py::AsyncRolloutWorker._make_done_cb.done",
        ),
        "stopped with its process, or by an error that the rollout gets",
    ),
    Worker(
        "the engine's thread waits for requests",
        ("backends/torch_engine/engine.py::Engine._loop",),
        "stopped with the engine; its failure answers every request",
    ),
    Worker(
        "the watch over the engines of --use-fault-tolerance, and the call that ends with an engine",
        (
            "ray/engine_healing.py::EngineHealer._hear_deaths",
            "ray/engine_healing.py::EngineHealer._replace",
            "backends/torch_engine/ray_actor.py::EngineActor.until_shutdown",
        ),
        "stopped with the engines",
    ),
    Worker(
        "a stream waits for the next tokens of its request",
        ("backends/torch_engine/server.py::EngineServer._stream",),
        "the request ends, or the client goes away",
    ),
    Worker(
        "the engine's server",
        (
            "backends/torch_engine/serve.py::_serve",
            "backends/torch_engine/server_thread.py::EngineServerThread._serve",
            "backends/torch_engine/server_thread.py::EngineServerThread.server",
        ),
        "stopped by a signal or by its owner",
    ),
    Worker(
        "the thread that owns the router reads what it writes",
        (
            "backends/sglang_utils/router.py::SglangRouter._own",
            "backends/sglang_utils/router.py::SglangRouter.start",
        ),
        "the router's process ends",
    ),
    Worker(
        "the heart of a process beats",
        ("supervision/heart.py::Heart._beat_for_ever",),
        "ends with its process",
    ),
    Worker(
        "the live view follows the run's records",
        (
            "harness/live_view.py::LiveView._run_lines",
            "harness/live_view.py::LiveView._run_panel",
        ),
        "stopped with the run",
    ),
    Worker(
        "the trackers follow the records of all processes",
        ("tracking/tracking.py::Tracking._follow",),
        "stopped with the run",
    ),
    Worker(
        "spans of --trace are written twice a second",
        ("tracking/spans.py::SpanWriter._flush_often",),
        "stopped with its process",
    ),
    Worker(
        "the thread that watches calls of user functions",
        ("plugins/watched_calls.py::CallWatch._watch",),
        "ends with its process",
    ),
    Worker(
        "the thread that writes the gate's snapshots",
        ("gate/snapshots.py::SnapshotWriter._work",),
        "closed with the gate",
    ),
    Worker(
        "the thread that writes a recording",
        ("recording/writer.py::PartWriter._work",),
        "closed with its actor",
    ),
    Worker(
        "the thread that starts graders",
        (
            "rollout/rm_hub/grader_pool.py::_Spawner._serve",
            "rollout/rm_hub/grader_pool.py::_popen",
        ),
        "closed with the pool",
    ),
    Worker(
        "the thread that interrupts renders of chat templates",
        ("prompts/template_limits.py::_Watch._serve",),
        "ends with its process",
    ),
    Worker(
        "the task that closes connections without a request",
        ("backends/torch_engine/silent_connections.py::SilentConnections.sweep_for_ever",),
        "ends with its server",
    ),
    Worker(
        "a grader's guard",
        ("rollout/rm_hub/grader_guard.py::main",),
        "ends with its grader, the pool, or the pool's process",
    ),
    Worker(
        "`execute_train` and `slime supervise` run a training command",
        (
            "utils/external_utils/command_utils.py::execute_train",
            "commands/supervise.py::Supervisor._attempt",
            "commands/supervise.py::Supervisor._step",
        ),
        "the command ends; under `slime supervise` a signal ends it, after 90 s by force",
    ),
    Worker(
        "`slime.rollout.sleep_rollout.sleep` keeps engines up for a look at them",
        ("rollout/sleep_rollout.py::sleep",),
        "ended by hand; it is meant to wait",
    ),
    Worker(
        "a page of `slime view` that follows a run, and `slime top`, look whether it has written",
        ("view/live.py::Live._events", "harness/top.py::main"),
        "with the page or the viewer; with the run, or Ctrl-C",
    ),
    Worker(
        "an audit or a comparison that a page of `slime view` asks for",
        ("view/jobs.py::Jobs._run",),
        "the command ends, with the viewer or after 600 s by force, and the page says so",
    ),
)
