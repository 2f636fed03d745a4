"""The order in which a rollout is computed, which field belongs to which stage, and what is not
compared at all.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
from typing import Any

from slime.data.fields import (
    CONTRACT,
    GRADIENT_LAYOUT_TOLERANCE,
    LAYOUT_TOLERANCE,
    Origin,
)


class DiffStage(enum.IntEnum):
    """What of a rollout is computed when: a difference in an earlier stage is the cause of those
    that follow.
    """

    OPTION = 0
    CODE = 1
    WEIGHTS_BEFORE = 2
    PROMPT = 3
    REPLY = 4
    REWARD = 5
    VERDICT = 6
    BASELINE = 7
    COLUMN = 8
    SCHEDULE = 9
    ARRIVAL = 10
    LOG_PROB = 11
    ADVANTAGE = 12
    STEP = 13
    WEIGHTS = 14
    METRIC = 15

    @property
    def label(self) -> str:
        """The stage in words."""
        return LABELS[self]


LABELS = {
    DiffStage.OPTION: "option",
    DiffStage.CODE: "version or code",
    DiffStage.WEIGHTS_BEFORE: "weights before",
    DiffStage.PROMPT: "data position or prompt",
    DiffStage.REPLY: "sampled token or reply",
    DiffStage.REWARD: "reward",
    DiffStage.VERDICT: "verdict",
    DiffStage.BASELINE: "baseline",
    DiffStage.COLUMN: "mask or column",
    DiffStage.SCHEDULE: "schedule",
    DiffStage.ARRIVAL: "arrival on the ranks",
    DiffStage.LOG_PROB: "log-prob",
    DiffStage.ADVANTAGE: "value or advantage",
    DiffStage.STEP: "loss or gradient norm",
    DiffStage.WEIGHTS: "weights after",
    DiffStage.METRIC: "metric",
}
# --- which field belongs where --------------------------------------------------------------------

# fields of a sample; any other is a part of the reply
_SAMPLE_FIELDS = {
    DiffStage.PROMPT: (
        "position index group_index rollout_id prompt label multimodal_inputs "
        "generate_function_path custom_rm_path"
    ),
    DiffStage.REWARD: "reward",
    DiffStage.COLUMN: "loss_mask",
    DiffStage.VERDICT: (
        "valid reason detail dropped dropped_by changes invalid_reason remove_sample "
        "kept_in_spite_of"
    ),
}
STAGE_OF_SAMPLE_FIELD = {
    name: stage for stage, names in _SAMPLE_FIELDS.items() for name in names.split()
}
_BASELINES = frozenset(("raw_reward", "rewards", "local_raw_reward"))
_LOG_PROBS = frozenset(
    "log_probs ref_log_probs teacher_log_probs entropy ref_entropy teacher_entropy".split()
)
# The contract's order: what training is given comes before what it computes from that.
_CONTRACT_ORDER = {spec.name: place for place, spec in enumerate(CONTRACT)}
_FIRST_FIELDS = ("tokens", "rollout_log_probs", "position", "index", "prompt", "train/loss")


def stage_of_field(name: str) -> DiffStage:
    """The stage of a field of the columns, or of a train dump."""
    spec = CONTRACT.find(name)
    if name in _BASELINES:
        return DiffStage.BASELINE
    if spec is None or spec.origin is Origin.ROLLOUT:
        return DiffStage.COLUMN
    if spec.origin is not Origin.TRAINING:
        return DiffStage.SCHEDULE
    return DiffStage.LOG_PROB if name in _LOG_PROBS else DiffStage.ADVANTAGE


def is_computed(name: str) -> bool:
    """Whether the training ranks compute the field; else they are given it."""
    spec = CONTRACT.find(name)
    return spec is not None and spec.origin is Origin.TRAINING


def order_of_field(name: str) -> tuple[int, str]:
    """Sorts the fields of a stage: causes before effects."""
    if name in _FIRST_FIELDS:
        return _FIRST_FIELDS.index(name), name
    return len(_FIRST_FIELDS) + _CONTRACT_ORDER.get(name, len(_CONTRACT_ORDER)), name


def layout_tolerance_of(name: str) -> float:
    """How far entries of a field may be apart where the layouts differ."""
    spec = CONTRACT.find(name)
    return 0.0 if spec is None else spec.layout_tolerance


def layout_tolerance_of_metric(name: str) -> float:
    """How far a metric may be apart where the layouts differ."""
    return GRADIENT_LAYOUT_TOLERANCE if name.endswith("grad_norm") else LAYOUT_TOLERANCE


# --- what is not compared -------------------------------------------------------------------------
# Times, paths, ports, process ids and names drawn at random: two equal runs differ in them. And
# what another column says already.

NOT_COMPARED_FIELDS = frozenset(
    (
        "partition",  # where a sample trained; the schedule part says it
        "owner_ranks",
        "raw_row",
        "kinds",  # how a list was held in memory
    )
)
# of any JSON object: samples, replies, the gate's statistics
NOT_COMPARED_KEYS = frozenset(
    (
        "non_generation_time",
        "session_id",
        "prefix_cache_info",  # what the engine's cache still held depends on the order of requests
        "cached_tokens",
        "rid",
        "id",
        "url",
        "queue_time",
        "prefill_launch_delay",
        "request_received_ts",
        "response_sent_to_client_ts",
        "trace",  # when things happened
        "inference_time",
        "seconds",
        "gate_seconds",
        "share_of_iteration",
        "cache_hits",
    )
)
TIME_SUFFIXES = ("_latency", "_duration", "_throughput")  # of keys of a JSON object
_NOT_COMPARED_METRICS = (
    "*latency*",
    "*_duration*",
    "*queue_time*",
    "perf/*",
    "*/time/*",
    "*_time",
    "*_seconds",
    "*prefix_cache*",
    "*cached_tokens*",
)
# metrics of how a layout packs the batch, and one per parameter group of the optimizer
_METRICS_OF_LAYOUT = ("schedule/*", "train/lr-pg_*", "train/critic-lr-pg_*")
_NOT_COMPARED_OPTIONS = (
    "run_dir",
    "record",
    "record_*",
    "dump_details",
    "save_debug_*",
    "save",
    "save_hf",
    "critic_save",
    "*_host",
    "*_port",
    "*_addr*",
    "wandb_*",
    "use_wandb",
    "use_tensorboard",
    "tb_*",
    "tensorboard_*",
    "live_view",
    "write_report",
    "update_weight_disk_dir",
    "config_logger_dir",
    "num_cpus",
    "*_timeout",
    "config",
    # what the command line looked like; the options in force are compared
    "given_options",
    "as_requested",
    "flag_counts",
    "rank",
    "world_size",
    "local_rank",
)
# what of the options decides only where and in which order numbers are summed
_LAYOUT_OPTIONS = (
    "*_parallel_size*",
    "*_parallel_sizes",
    "sequence_parallel",
    "actor_num_*",
    "critic_num_*",
    "rollout_num_gpus*",
    "colocate",
    "local",
    "offload*",
    "micro_batch_size",
    "micro_batch_packing",
    "use_dynamic_batch_size",
    "max_tokens_per_gpu",
    "log_probs_max_tokens_per_gpu",
    "log_probs_chunk_size",
    "balance_*",
    "data_pad_size_multiplier",
    "use_distributed_optimizer",
    "recompute_*",
    "num_layers_per_virtual_pipeline_stage",
    "num_layers_in_*_pipeline_stage",
    "virtual_pipeline_*",
    "num_virtual_stages*",
    "allgather_cp",
    "overlap_*",
    "variable_seq_lengths",
)


@functools.lru_cache(maxsize=4096)  # a long recording has the same few names again and again
def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_compared_key(key: Any) -> bool:
    """False for times and names drawn at random in a JSON object."""
    if not isinstance(key, str):
        return True
    return key not in NOT_COMPARED_KEYS and not key.endswith(TIME_SUFFIXES)


def is_compared_metric(name: str, *, layout_differs: bool) -> bool:
    """False for times and rates, and for how a layout packs where the layouts differ."""
    if _fits(name, _NOT_COMPARED_METRICS):
        return False
    return not (layout_differs and _fits(name, _METRICS_OF_LAYOUT))


def is_compared_option(name: str) -> bool:
    """False for where a run writes, its ports, and what was typed."""
    return not _fits(name, _NOT_COMPARED_OPTIONS)


def is_layout_option(name: str) -> bool:
    """Whether the option decides only on which ranks, and in which order, numbers are summed."""
    return _fits(name, _LAYOUT_OPTIONS)


def short(value: Any, limit: int = 60) -> str:
    """A value on one line of at most `limit` characters; every control character is escaped."""
    # str() of a numpy number has the digits of its own dtype, and no more
    text = value if isinstance(value, Text) else str(value) if _is_scalar(value) else repr(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Text(str):
    """Words about a value, such as "absent", in the place of the value: shown without quotes."""


def _is_scalar(value: object) -> bool:
    return type(value).__module__ == "numpy"
