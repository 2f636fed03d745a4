"""Every place that waits or retries: for what, how long at most, which option sets the bound, and
the message. docs/loops.md is generated from it.

A test looks for waits in the code and fails for one that stands in no row; another looks for each
row's message and test.
"""

from __future__ import annotations

import dataclasses

DRIVER = ("--step-timeout",)
ASKED = "gave no answer within"


@dataclasses.dataclass(frozen=True)
class Wait:
    """One wait or repetition.

    places: "file::Class.function" of the calls that wait, below slime/. options: flags that bound
    it; constants: "file::NAME" of fixed bounds in seconds or tries. message: words of the message
    at the end, which stand in `said_in` (default: the first place's file); "" where the words are
    another library's. test: "file::function" below tests/ of a test that reaches the bound.
    """

    group: str
    what: str
    places: tuple[str, ...]
    then: str
    message: str
    test: str
    options: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    said_in: str | None = None


GENERATION = "Generation"
REWARDS = "Rewards"
ENGINES = "Engines and the router"
DRIVING = "The driver and the training ranks"
AROUND = "Around a run"

WAITS = (
    Wait(
        GENERATION,
        "the trial of a chat template, in a process of its own before its first render",
        ("prompts/template_limits.py::_try",),
        "the prompts are refused, with the reason",
        "did not end within",
        "config/test_model_folder.py::test_the_dry_run_ends_with_any_chat_template",
        constants=(
            "prompts/template_limits.py::TRIAL_SECONDS",
            "prompts/template_limits.py::RENDER_SECONDS",
        ),
    ),
    Wait(
        GENERATION,
        "an engine's answer to a generation request: connection errors, timeouts and 5xx replies "
        "are tried again on the next engine",
        ("rollout/engine_client.py::ask_engine",),
        "the sample fails with that reason",
        " follows",
        "rollout/test_rollout_over_http.py::test_an_unreachable_engine_stops_the_run_after_its_retries",
        options=("--rollout-request-retries", "--rollout-request-timeout"),
        said_in="rollout/engine_client.py",
    ),
    Wait(
        GENERATION,
        "one try of an HTTP request, and the lines of a stream",
        ("utils/http_utils.py::_close_at_exit",),
        "an error, tried again where that can help",
        "got no answer within",
        "rollout/test_rollout_over_http.py::test_a_timeout_is_tried_again_under_a_new_request_id",
        options=("--rollout-request-timeout",),
    ),
    Wait(
        GENERATION,
        "a group whose request an engine ended by itself: it is generated again while it gets new "
        "tokens, else a few times",
        ("rollout/group_loop.py::GroupLoop.run", "rollout/fully_async_rollout.py::_collect"),
        "its samples fail with that reason",
        "without a new token, more than --max-engine-aborts",
        "rollout/test_group_selection.py::test_an_engine_that_aborts_everything_ends_the_run",
        options=("--max-engine-aborts", *DRIVER),
        said_in="rollout/group_selection.py",
    ),
    Wait(
        GENERATION,
        "groups that the dynamic filter keeps: dropped ones are replaced",
        (),
        "the run ends with the reasons and an example of each",
        "more than --max-dropped-groups",
        "rollout/test_group_selection.py::test_a_filter_that_keeps_nothing_ends_the_run_with_reasons_and_examples",
        options=("--max-dropped-groups",),
        said_in="rollout/group_selection.py",
    ),
    Wait(
        GENERATION,
        "samples whose generation or reward does not fail",
        (),
        "the run ends with the reasons",
        "more than --max-failed-ratio",
        "rollout/test_rollout_over_http.py::test_too_many_failures_stop_the_run_with_their_reasons",
        options=("--max-failed-ratio",),
        said_in="plugins/failures.py",
    ),
    Wait(
        GENERATION,
        "prompts of a data source (those of --prompt-data begin again at the end of an epoch)",
        (),
        "the run ends, synchronous or asynchronous",
        "the data source has no more prompts",
        "rollout/test_group_selection.py::test_a_data_source_that_is_at_its_end_ends_the_run",
        options=("--num-rollout", "--num-epoch"),
        said_in="rollout/group_loop.py",
    ),
    Wait(
        GENERATION,
        "requests that were aborted because the batch is whole",
        ("rollout/group_loop.py::GroupLoop._end_rest",),
        "they are cancelled, and their groups go back to the data source",
        "did not end within --abort-timeout",
        "config/test_waits.py::test_groups_that_ignore_the_abort_are_cancelled_and_given_back",
        options=("--abort-timeout",),
    ),
    Wait(
        GENERATION,
        "the fully asynchronous worker, alive and not idle",
        (
            "rollout/fully_async_rollout.py::AsyncRolloutWorker.stop",
            "rollout/fully_async_rollout.py::_collect",
        ),
        "the run ends with the worker's error, or with the message that it was stopped",
        "the asynchronous worker was stopped",
        "rollout/test_group_selection.py::test_a_worker_that_was_stopped_is_not_waited_for",
        options=DRIVER,
    ),
    Wait(
        GENERATION,
        "all samples of an evaluation data set, where its entry in --eval-config has an "
        "eval_task_timeout",
        ("rollout/evaluation.py::evaluate_dataset",),
        "the run ends with how many were done",
        "within eval_task_timeout",
        "config/test_waits.py::test_an_evaluation_that_takes_too_long_says_how_far_it_was",
        options=("--eval-config", *DRIVER),
    ),
    Wait(
        GENERATION,
        "a custom generate function, and the hooks of a sample",
        (),
        "the sample fails with that reason; one that blocks its event loop, or keeps the "
        "interpreter, ends the run as below",
        "did not return within",
        "rollout/test_user_functions.py::test_a_generate_function_or_hook_that_waits_for_ever_costs_its_sample_only",
        options=("--generate-timeout",),
        said_in="plugins/watched_calls.py",
    ),
    Wait(
        REWARDS,
        "a custom reward function that waits for something",
        ("plugins/watched_calls.py::call_within",),
        "the sample has no reward, with the reason",
        "did not return within",
        "rollout/test_user_functions.py::test_a_reward_that_waits_for_ever_costs_its_sample_only",
        options=("--reward-timeout",),
    ),
    Wait(
        REWARDS,
        "a custom reward function that blocks its event loop",
        ("utils/async_utils.py::run",),
        "the run ends with function, sample and line",
        "has held its event loop for",
        "rollout/test_user_functions.py::test_a_reward_that_blocks_the_event_loop_ends_the_run_with_function_sample_and_line",
        options=("--reward-timeout",),
        said_in="plugins/watched_calls.py",
    ),
    Wait(
        REWARDS,
        "a custom reward function that keeps the interpreter to itself",
        (),
        "the process ends, and the driver names function and sample",
        "kept the interpreter to itself for more than",
        "rollout/test_user_functions.py::test_a_call_that_holds_the_interpreter_ends_its_process_and_leaves_its_name",
        options=("--reward-timeout",),
        constants=("plugins/watched_calls.py::HELD_GRACE_S",),
        said_in="plugins/watched_calls.py",
    ),
    Wait(
        REWARDS,
        "the remote reward model and the teacher of on-policy distillation: ten tries",
        ("utils/http_utils.py::request_with_retries",),
        "the sample fails with that reason",
        "follows",
        "rollout/test_rollout_utilities.py::test_post_tries_again_after_5xx_and_never_after_4xx",
        options=("--rm-timeout",),
    ),
    Wait(
        REWARDS,
        "a grader process: its answer, and a free one",
        ("rollout/rm_hub/grader_pool.py::GraderPool.grade",),
        "the grader is killed and replaced, the sample has no reward",
        "took longer than",
        "rollout/test_grader_pool.py::test_a_grader_that_hangs_is_killed_at_its_limit_and_replaced_once",
        options=("--grader-timeout",),
    ),
    Wait(
        REWARDS,
        "a grader process that starts",
        ("rollout/rm_hub/grader_pool.py::_Spawner.spawn",),
        "the sample has no reward, with the reason",
        "a grader process did not start",
        "config/test_waits.py::test_a_grader_that_does_not_start_is_an_outcome",
        constants=("rollout/rm_hub/grader_pool.py::START_TIMEOUT_S",),
    ),
    Wait(
        ENGINES,
        "the body of a request to the embedded engine, or the next part of weights",
        ("backends/torch_engine/http_json.py::arriving",),
        "the request is answered with 408 and its connection closed",
        "did not arrive within",
        "engine/test_torch_engine_connections.py::test_1500_half_sent_requests_are_closed_and_the_engine_answers_meanwhile",
        constants=(
            "backends/torch_engine/http_json.py::BODY_SECONDS",
            "backends/torch_engine/silent_connections.py::SILENT_SECONDS",
        ),
    ),
    Wait(
        ENGINES,
        "engines that load their model and listen",
        (
            "ray/rollout_servers.py::start_rollout_servers",
            "ray/engine_healing.py::EngineHealer._start",
            "backends/torch_engine/server_thread.py::EngineServerThread.start",
        ),
        "the run ends",
        "the engine did not listen within",
        "config/test_waits.py::test_actors_that_give_no_answer_are_named_with_the_option",
        options=("--rollout-engine-start-timeout",),
        said_in="backends/torch_engine/server_thread.py",
    ),
    Wait(
        ENGINES,
        "external engines that answer /health: at once where nothing listens, else while they load",
        ("ray/rollout_servers.py::_check_external_engines",),
        "the run ends",
        "correct --rollout-external-engine-addrs",
        "config/test_waits.py::test_an_external_engine_that_does_not_answer_ends_the_start",
        options=("--rollout-engine-start-timeout",),
    ),
    Wait(
        ENGINES,
        "health requests to the engines after a rollout failed",
        ("ray/servers.py::RolloutServers.failures",),
        "the engine is named as the cause",
        "does not answer within",
        "config/test_waits.py::test_an_engine_that_is_silent_is_named_as_the_cause",
        constants=("ray/servers.py::HEALTH_TIMEOUT_S",),
    ),
    Wait(
        ENGINES,
        "an engine's answer to a health check, with --use-fault-tolerance",
        (
            "ray/engine_healing.py::EngineHealer._check_in_time",
            "ray/engine_healing.py::EngineHealer._is_well",
            "backends/torch_engine/server_thread.py::EngineServerThread.answers",
        ),
        "the engine is ended and replaced, its requests are sent again",
        "no answer to a health check within",
        "distributed/test_engine_healer.py::test_a_frozen_engine_is_ended_and_replaced",
        options=("--rollout-health-check-timeout",),
    ),
    Wait(
        ENGINES,
        "an engine, or the successor of the last one, with --use-fault-tolerance",
        (
            "rollout/engine_roster.py::EngineRoster.wait_for_urls",
            "rollout/engine_roster.py::EngineRoster.watched",
        ),
        "the run ends",
        "no engine came back within",
        "rollout/test_lost_engines.py::test_a_wait_for_engines_that_do_not_come_back_ends_with_the_option",
        options=("--rollout-engine-start-timeout", "--rollout-request-timeout"),
    ),
    Wait(
        ENGINES,
        "the process of a lost engine that is ended before its successor starts",
        ("ray/engine_healing.py::EngineHealer._end",),
        "the run ends",
        "did not end within",
        "distributed/test_engine_healer.py::test_a_process_that_does_not_end_is_an_error",
        constants=("ray/engine_healing.py::END_S", "ray/engine_healing.py::REMOTE_END_S"),
    ),
    Wait(
        ENGINES,
        "the router, as it starts, adds an engine or removes one",
        ("backends/sglang_utils/router.py::SglangRouter._wait_until",),
        "the run ends with the last lines of the router's log",
        "the router did not",
        "engine/test_sglang_router.py::test_a_worker_that_does_not_answer_is_an_error_with_its_url",
        constants=(
            "backends/sglang_utils/router.py::START_TIMEOUT_SECONDS",
            "backends/sglang_utils/router.py::WORKER_TIMEOUT_SECONDS",
        ),
    ),
    Wait(
        ENGINES,
        "the lock that keeps two weight updates apart, and each engine's answer to an update",
        (
            "ray/utils.py::held",
            "ray/servers.py::ask_engines",
            "ray/engine_healing.py::EngineHealer.keep_published",
            "backends/megatron_utils/update_weight/manager.py::ask_manager",
        ),
        "the run ends with the step of the update",
        "another weight update has held the engines for",
        "megatron/test_training_parts.py::test_a_weight_update_does_not_wait_for_ever_for_its_lock",
        options=DRIVER,
        said_in="ray/utils.py",
    ),
    Wait(
        ENGINES,
        "the engine's thread, which takes weights between two of its steps",
        (
            "backends/torch_engine/weight_update.py::WeightUpdater._between_steps",
            "backends/torch_engine/ray_actor.py::EngineActor.pause",
            "backends/torch_engine/ray_actor.py::EngineActor.flush_cache",
            "backends/torch_engine/ray_actor.py::EngineActor.release_memory",
            "backends/torch_engine/ray_actor.py::EngineActor.resume_memory",
            "backends/torch_engine/server.py::EngineServer._health_generate",
        ),
        "the call fails; the caller waits at most --step-timeout",
        ASKED,
        "config/test_waits.py::test_actors_that_give_no_answer_are_named_with_the_option",
        options=DRIVER,
        constants=("backends/torch_engine/weight_update.py::APPLY_TIMEOUT_SECONDS",),
        said_in="ray/utils.py",
    ),
    Wait(
        DRIVING,
        "actors that start, load, and read the data position",
        ("train.py::build_run", "ray/actor_group.py::RayTrainGroup._allocate"),
        "the run ends; the message names what was waited for and the actors without an answer",
        ASKED,
        "config/test_waits.py::test_actors_that_give_no_answer_are_named_with_the_option",
        options=("--startup-timeout",),
        said_in="ray/utils.py",
    ),
    Wait(
        DRIVING,
        "a rollout, a training step, a weight update, a checkpoint, an evaluation: everything "
        "inside them as well",
        (
            "ray/utils.py::wait_for",
            "ray/actors.py::get",
            "ray/actors.py::wait",
            "ray/actors.py::LocalActor._call",
            "local.py::generate",
            "ray/utils.py::_death_among",
            "ray/utils.py::_hear",
            "ray/actor_group.py::RayTrainGroup._wait",
            "ray/train_actor.py::TrainRayActor.set_rollout_manager",
            "train.py::finish_recording",
            "train.py::save",
            "train.py::begin_training",
            "train.py::update_weights",
            "train.py::evaluate",
            "train.py::train",
            "train_async.py::train",
            "utils/data.py::process_rollout_data",
            "gate/parallel.py::judge_in_parallel",
        ),
        "the run ends; the message names what was waited for and the actors without an answer",
        ASKED,
        "config/test_waits.py::test_actors_that_give_no_answer_are_named_with_the_option",
        options=DRIVER,
        said_in="ray/utils.py",
    ),
    Wait(
        DRIVING,
        "the other ranks in a collective, and in making the process groups",
        (
            "backends/megatron_utils/initialize.py::init",
            "ray/train_actor.py::TrainRayActor.init",
            "accelerator/process_groups.py::init_gloo_group",
            "accelerator/process_groups.py::init_process_group",
            "backends/megatron_utils/update_weight/gather.py::HfWeightExporter._gather",
        ),
        "torch raises on the ranks that wait, and the driver names the first that failed",
        "",
        "config/test_waits.py::test_a_process_group_whose_other_ranks_do_not_come_is_given_up",
        options=("--distributed-timeout-minutes",),
    ),
    Wait(
        DRIVING,
        "Ray to place a run's devices",
        ("ray/placement.py::_create_placement_group",),
        "the run ends with what Ray has",
        "Ray could not place",
        "config/test_waits.py::test_devices_that_ray_cannot_place_end_the_start",
        constants=("ray/placement.py::PLACEMENT_TIMEOUT_S",),
    ),
    Wait(
        AROUND,
        "processes, threads and connections that end: they are asked, then ended by force or left "
        "behind",
        (
            "train.py::build_run",
            "ray/cluster_folder.py::end_processes_of",
            "ray/cluster_folder.py::remove_folder",
            "ray/store_watch.py::StoreWatch._watch",
            "ray/store_watch.py::watched_store",
            "backends/torch_engine/engine.py::Engine.stop",
            "backends/torch_engine/server_thread.py::EngineServerThread.stop",
            "backends/sglang_utils/router.py::SglangRouter.stop",
            "utils/http_utils.py::terminate_process",
            "harness/live_view.py::LiveView.stop",
            "tracking/tracking.py::Tracking.close",
            "tracking/spans.py::SpanWriter.close",
            "rollout/rm_hub/grader_pool.py::_Worker.kill",
            "rollout/rm_hub/grader_pool.py::_Worker._status",
            "rollout/rm_hub/grader_guard.py::kill_all_below",
        ),
        "the run ends all the same",
        "stopping the engines",
        "config/test_waits.py::test_what_ends_is_not_waited_for_without_a_bound",
        constants=(
            "ray/utils.py::STOP_TIMEOUT_S",
            "ray/store_watch.py::STOP_S",
            "tracking/spans.py::STOP_TIMEOUT_S",
            "backends/torch_engine/engine.py::STOP_JOIN_SECONDS",
            "backends/torch_engine/server_thread.py::STOP_TIMEOUT_SECONDS",
            "backends/sglang_utils/router.py::STOP_TIMEOUT_SECONDS",
            "rollout/rm_hub/grader_pool.py::KILL_TIMEOUT_S",
            "rollout/rm_hub/grader_guard.py::KILL_SECONDS",
        ),
    ),
    Wait(
        AROUND,
        "the answer of the Ray cluster of --ray-address",
        ("ray/session.py::_answers_as_ray",),
        "the run ends with one sentence",
        "does not answer as a Ray cluster within",
        "distributed/test_ray_session.py::test_a_server_that_is_no_cluster_is_given_up_after_the_deadline",
    ),
    Wait(
        AROUND,
        "a trial of the reward by the dry run and `slime rewards check`, and the doctor's of torch",
        ("commands/reward_probe.py::score_texts", "commands/doctor.py::probe_torch"),
        "the line names the time-out, and the status is 1",
        "",
        "config/test_waits.py::test_a_reward_that_hangs_in_the_dry_run_is_said",
        constants=("commands/reward_probe.py::PROBE_SECONDS",),
    ),
    Wait(
        AROUND,
        "the training of a replay",
        ("harness/replay/training.py::replay_training",),
        "its processes are ended, and `slime replay` with them; its log is named",
        "did not end within",
        "harness/test_replay.py::test_a_training_that_hangs_is_ended",
        constants=("harness/replay/training.py::TIMEOUT_S",),
    ),
    Wait(
        AROUND,
        "the snapshots of the gate that are still being written at the end",
        ("gate/snapshots.py::SnapshotWriter.flush", "gate/snapshots.py::SnapshotWriter.close"),
        "the driver ends the process",
        "stopping the engines",
        "config/test_waits.py::test_what_ends_is_not_waited_for_without_a_bound",
        constants=("ray/utils.py::STOP_TIMEOUT_S",),
        said_in="train.py",
    ),
    Wait(
        AROUND,
        "the parts of a recording that are still being written at the end",
        ("recording/writer.py::PartWriter.close",),
        "a warning names the folder, and the process ends without them",
        "its disk hangs",
        "recording/test_recording.py::test_a_disk_that_hangs_does_not_keep_the_run_from_ending",
        constants=("recording/writer.py::CLOSE_TIMEOUT_S", "recording/writer.py::STOP_TIMEOUT_S"),
    ),
    Wait(
        AROUND,
        "a replay that `slime bisect` runs (--timeout), and git",
        ("harness/bisect.py::run_in", "harness/bisect.py::Repository.try_git"),
        "the commit is skipped",
        "took more than",
        "harness/test_bisect.py::test_a_replay_that_hangs_is_skipped",
        constants=("harness/bisect.py::TRIAL_TIMEOUT_S", "harness/bisect.py::GIT_TIMEOUT_S"),
    ),
    Wait(
        AROUND,
        "a shell command of a plug-in",
        ("utils/misc.py::exec_command",),
        "the caller waits at most --step-timeout",
        ASKED,
        "config/test_waits.py::test_actors_that_give_no_answer_are_named_with_the_option",
        options=DRIVER,
        said_in="ray/utils.py",
    ),
)
