"""What each span of a run is about, for readers of a trace: `slime trace --names` prints it."""

from __future__ import annotations

import dataclasses

DRIVER, MANAGER, RANK, ENGINE = "driver", "rollout manager", "training rank", "engine"
ANY = "any"


@dataclasses.dataclass(frozen=True)
class SpanName:
    """A name, the process that records it, and what is under way meanwhile."""

    name: str
    process: str
    what: str


SPANS: tuple[SpanName, ...] = (
    SpanName("wait", ANY, "waits for actors; `what` says for which call, and the table adds it"),
    SpanName("rollout", MANAGER, "one rollout, from the first prompt to the shards"),
    SpanName(
        "generate", MANAGER, "the rollout function: requests, response gate, rewards, filters"
    ),
    SpanName(
        "request",
        MANAGER,
        "one sample's request, from its sending to the reply; below it `queue`, `prefill` and "
        "`decode`. Samples that share a request end together",
    ),
    SpanName("response_gate", MANAGER, "one pass of the gate over the groups that just finished"),
    SpanName("reward", MANAGER, "scoring a group"),
    SpanName(
        "gate", MANAGER, "the gate over the whole rollout: group checks, statistics, snapshots"
    ),
    SpanName("dump", MANAGER, "writing the rollout dump, where there is one"),
    SpanName(
        "record", ANY, "what --record keeps of the rollout is gathered, for a background write"
    ),
    SpanName("rollout_metrics", MANAGER, "the rollout's metrics"),
    SpanName("convert_samples", MANAGER, "samples to shards: the four below"),
    SpanName("columns", MANAGER, "samples become columns"),
    SpanName("rewards", MANAGER, "rewards normalized by group"),
    SpanName("schedule", MANAGER, "which sample goes to which rank, step and micro-batch"),
    SpanName("ledger", MANAGER, "what became of each sample, into the ledger of the run"),
    SpanName("put", ANY, "a shard, or a bucket of weights, into the object store"),
    SpanName(
        "keep_state",
        MANAGER,
        "what another manager needs to go on in this one's place, with --recovery-interval",
    ),
    SpanName("collect_garbage", MANAGER, "once, after the first rollout"),
    SpanName("evaluation", MANAGER, "generating and scoring the evaluation sets"),
    SpanName("save_data_position", MANAGER, "the manager's part of a checkpoint"),
    SpanName("train_wait", RANK, "between two rollouts; what is inside is not waiting"),
    SpanName(
        "train",
        RANK,
        "one rollout, from its shard to the trained weights; two spans, around the timers' own log",
    ),
    SpanName("data_preprocess", RANK, "the shard becomes this rank's batch on its device"),
    SpanName("get", RANK, "the shard out of the object store"),
    SpanName("localize", RANK, "the shard becomes this rank's batch; `samples` are its samples"),
    SpanName("log_probs", RANK, "forward passes: log-probs of the weights before the update"),
    SpanName("ref_log_probs", RANK, "forward passes of the reference"),
    SpanName("teacher_log_probs", RANK, "forward passes of the teacher of on-policy distillation"),
    SpanName("values", RANK, "forward passes of the critic"),
    SpanName("advantages", RANK, "advantages and returns"),
    SpanName(
        "actor_train", RANK, "all optimizer steps of the rollout, of the policy or the critic"
    ),
    SpanName("train_step", RANK, "one optimizer step: the three below"),
    SpanName("forward_backward", RANK, "the step's micro-batches, forward and backward"),
    SpanName(
        "consistency", RANK, "trainer and engine log-probs are compared, before the first step"
    ),
    SpanName("optimizer_step", RANK, "gradients are checked and clipped, weights updated"),
    SpanName("weight_change", RANK, "how far the weights moved"),
    SpanName("save_model", RANK, "one checkpoint, written and read back"),
    SpanName("save_hf", RANK, "a Hugging Face folder: of a checkpoint, or for the engines' update"),
    SpanName("sleep", RANK, "weights, gradients and optimizer state leave the device"),
    SpanName("wake_up", RANK, "and come back"),
    SpanName("update_weights", RANK, "publishing the weights to all engines"),
    SpanName("gather_weights", RANK, "one bucket of weights from all ranks, in the engines' names"),
    SpanName("hash_weights", RANK, "the bucket's fingerprint"),
    SpanName("send_weights", RANK, "the bucket to every engine"),
    SpanName("load_engine", ENGINE, "the model is loaded and served"),
    SpanName("prefill", ENGINE, "one pass over new prompts: `requests`, and `tokens` not cached"),
    SpanName(
        "decode",
        ENGINE,
        "decode steps without another pass between them: `steps`, `tokens`, and at most "
        "`most_requests` at a time",
    ),
    SpanName("pause", ENGINE, "until no step is under way, before an update"),
    SpanName("receive_weights", ENGINE, "one bucket of weights arrives"),
    SpanName("apply_weights", ENGINE, "the new weights replace the old ones"),
    SpanName("release_memory", ENGINE, "the cache's memory is given back while training runs"),
    SpanName("resume_memory", ENGINE, "and taken again"),
)


def names_table() -> str:
    """The names as a Markdown table."""
    rows = [f"| `{one.name}` | {one.process} | {one.what} |" for one in SPANS]
    return "\n".join(["| span | process | what |", "|---|---|---|", *rows])
