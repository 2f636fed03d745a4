"""Flags that upstream scripts use and that mean something else here: renamed, without effect, or
refused, each with the reason.

Silence is a failure: a flag is honoured (declared as an option), mapped (rewritten to another flag,
with a warning), ignored (accepted with a warning, because nothing a user can observe depends on it
here) or refused (it would change results).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence


class FlagStatus(enum.Enum):
    """What happens to an upstream flag."""

    MAPPED = "mapped"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class CompatFlag:
    """One upstream flag that is not an option here. `becomes` holds the words that replace it when
    it is mapped.
    """

    flag: str
    status: FlagStatus
    reason: str
    becomes: tuple[str, ...] = ()


def _mapped(reason: str, **flags: str) -> list[CompatFlag]:
    return [
        _flag(name, FlagStatus.MAPPED, reason or f"is {target} here", tuple(target.split()))
        for name, target in flags.items()
    ]


def _listed(status: FlagStatus, reason: str, names: str) -> list[CompatFlag]:
    return [_flag(name, status, reason) for name in names.split()]


def _flag(name: str, status: FlagStatus, reason: str, becomes: tuple[str, ...] = ()) -> CompatFlag:
    return CompatFlag("--" + name.replace("_", "-"), status, reason, becomes)


IGNORED, REFUSED = FlagStatus.IGNORED, FlagStatus.REFUSED

TABLE: tuple[CompatFlag, ...] = (
    # Megatron's command line has other names for these fields of megatron-core's configs.
    *_mapped(
        "",
        norm_epsilon="--layernorm-epsilon",
        num_experts="--num-moe-experts",
        accumulate_allreduce_grads_in_fp32="--grad-reduce-in-fp32",
        check_for_nan_in_loss_and_grad="--check-for-nan-in-grad",
        no_check_for_nan_in_loss_and_grad="--no-check-for-nan-in-grad",
        no_rope_fusion="--no-apply-rope-fusion",
        no_bias_swiglu_fusion="--no-bias-activation-fusion",
        no_bias_gelu_fusion="--no-bias-activation-fusion",
        apply_layernorm_1p="--layernorm-zero-centered-gamma",
        embedding_init_std="--embedding-init-method-std",
        ddp_bucket_size="--bucket-size",
        ddp_average_in_collective="--average-in-collective",
        recompute_activations="--recompute-granularity selective",
        decoder_first_pipeline_num_layers="--num-layers-in-first-pipeline-stage",
        decoder_last_pipeline_num_layers="--num-layers-in-last-pipeline-stage",
    ),
    *_listed(
        IGNORED,
        "there is one implementation here, so nothing is to be chosen",
        "use_flash_attn use_mcore_models use_legacy_models attention_backend megatron_to_hf_mode "
        "use_rotary_position_embeddings tokenizer_type tokenizer_model auto_detect_ckpt_format "
        "ckpt_format "
        "dist_ckpt_strictness ckpt_fully_parallel_load ckpt_fully_parallel_save",
    ),
    *_listed(
        IGNORED,
        "Megatron's own training loop and data loader, which read it, do not run in slime",
        "train_iters train_samples eval_iters log_interval log_throughput log_params_norm "
        "log_timers_to_tensorboard "
        "timing_log_level num_workers data_path split data_cache_path mock_data exit_interval "
        "exit_duration_in_mins "
        "tensorboard_dir tensorboard_queue_size no_create_attention_mask_in_dataloader "
        "reset_position_ids "
        "reset_attention_mask eod_mask_loss no_mmap_bin_files manual_gc manual_gc_interval",
    ),
    *_listed(
        REFUSED,
        "an engine runs on one device here and none spans nodes, so nothing would read it; leave "
        "it out, and give the training ranks of a "
        "node with --actor-num-gpus-per-node, for instance 8",
        "num_gpus_per_node",
    ),
    *_listed(
        IGNORED,
        "it tunes CUDA kernels or memory only and changes no result",
        "empty_unused_memory_level train_memory_margin_bytes "
        "record_memory_history memory_snapshot_dir memory_snapshot_num_steps memory_recorder no_offload_train_allocator",
    ),
    *_listed(IGNORED, "the model family is read from --hf-checkpoint/config.json", "model_name"),
    *_listed(
        REFUSED,
        "a checkpoint is published whole before the next rollout begins; leave the flag out",
        "async_save",
    ),
    *_listed(
        REFUSED,
        (
            "there is no profiler inside a run; py-spy attaches to any of its processes, whose ids "
            "are "
            "in the run folder's logs"
        ),
        "profile_target use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
    ),
    *_listed(
        REFUSED,
        (
            "the optimizer keeps its state here; --reset-optimizer-states makes the steps of every "
            "rollout independent of earlier ones"
        ),
        "use_stateless_adam",
    ),
    *_listed(
        REFUSED,
        (
            "forged rollout data are not made here; --load-debug-rollout-data trains on recorded "
            "samples"
        ),
        "load_forge_rollout_data",
    ),
    *_listed(
        REFUSED,
        (
            "there is no rollout buffer server; write the requests to yours as a "
            "--rollout-function-path"
        ),
        "rollout_buffer_url fetch_trajectory_retry_times rollout_task_type",
    ),
    *_listed(
        REFUSED,
        (
            "the padded size follows from --vocab-size, --make-vocab-size-divisible-by and the "
            "tensor-parallel size; give those"
        ),
        "padded_vocab_size",
    ),
    *_listed(
        IGNORED,
        "train/entropy_loss is reported by default; --no-report-entropy leaves it out",
        "report_entropy",
    ),
    *_listed(
        REFUSED,
        "this model family is not supported yet: Llama, Qwen2 and Qwen3 are",
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor "
        "mscale mscale_all_dim "
        "enable_mtp_training mtp_loss_scaling vision_model freeze_vision_model spec qwen_gdn_backend freeze_indexer",
    ),
    *_listed(
        REFUSED,
        (
            "rows are always packed (thd): context parallelism and samples of any length need it. "
            "Leave the flag out"
        ),
        "qkv_format",
    ),
    *_listed(
        REFUSED,
        "every update sends all weights here; see --update-weight-transport",
        (
            "update_weight_mode update_weight_delta_encoding update_weight_delta_checksum "
            "update_weight_local_checkpoint_dir"
        ),
    ),
    *_listed(
        REFUSED,
        (
            "the critic's own options stand in a file: --megatron-config-path with `megatron: "
            "[{role: "
            "critic, overrides: {lr: 1.0e-5}}]`"
        ),
        "critic_lr critic_lr_warmup_iters",
    ),
    *_listed(
        REFUSED,
        "it edits the logits that tokens are drawn from, and the trainer cannot compute such "
        "log-probs again: importance ratios would be wrong from "
        "the first step on. Use it in evaluation only (--eval-config), or shape the text by the reward",
        (
            "rollout_repetition_penalty rollout_frequency_penalty rollout_presence_penalty "
            "rollout_logit_bias rollout_min_new_tokens"
        ),
    ),
    *_listed(
        REFUSED,
        "it is read nowhere in upstream and would do nothing",
        "http_proxy min_batch_collection_ratio",
    ),
    *_listed(
        REFUSED,
        "context parallelism is zigzag here, for every model; leave the flag out",
        "allgather_cp",
    ),
    *_listed(
        REFUSED,
        (
            "the experts that the engine chose are not replayed in training; compare the two with "
            "`slime consistency` and leave the flag out"
        ),
        "use_routing_replay use_rollout_routing_replay",
    ),
    *_listed(
        REFUSED, "every engine does prefill and decode; leave the flag out", "prefill_num_servers"
    ),
    *_listed(
        REFUSED,
        "requests are sent by the rollout manager alone; leave the flag out",
        "use_distributed_post",
    ),
    *_listed(
        REFUSED,
        "the router here is SGLang's: --use-sglang-router",
        (
            "slime_router_middleware_paths use_slime_router slime_router_timeout "
            "slime_router_max_connections"
        ),
    ),
    *_listed(
        REFUSED, "--advantage-estimator ppo trains a critic, no other estimator does", "use_critic"
    ),
    *_listed(
        REFUSED,
        "--num-critic-only-steps says for how many rollouts only the critic trains",
        "critic_train_only",
    ),
)


# Whole families of flags: every flag that begins so.
FAMILIES: tuple[CompatFlag, ...] = (
    *_listed(
        REFUSED,
        "DeepGEMM's fp8 matrix products are not supported; train in --bf16",
        "megatron_deepgemm",
    ),
)

SGLANG_IGNORED = frozenset(
    "chunked_prefill_size schedule_policy schedule_conservativeness "
    "cuda_graph_bs cuda_graph_max_bs disable_cuda_graph disable_cuda_graph_padding "
    "enable_torch_compile torch_compile_max_bs "
    "attention_backend decode_attention_backend prefill_attention_backend sampling_backend "
    "grammar_backend watchdog_timeout "
    "enable_metrics enable_memory_saver enable_mixed_chunk num_continuous_decode_steps "
    "disable_custom_all_reduce enable_nccl_nvls enable_mscclpp triton_attention_num_kv_splits "
    "log_requests log_requests_level "
    "show_time_cost decode_log_interval stream_interval page_size swa_full_tokens_ratio "
    "hicache_ratio enable_hierarchical_cache "
    "skip_server_warmup tokenizer_worker_num nccl_port dist_timeout max_queued_requests".split()
)
SGLANG_REFUSED = {
    "speculative decoding is not in the embedded engine": (
        "speculative_algorithm speculative_draft_model_path speculative_num_steps "
        "speculative_eagle_topk speculative_num_draft_tokens"
    ),
    "the embedded engine runs one process per engine": (
        "tp_size tensor_parallel_size dp_size data_parallel_size ep_size expert_parallel_size "
        "pp_size pipeline_parallel_size "
        "enable_dp_attention enable_dp_lm_head moe_a2a_backend enable_ep_moe enable_deepep_moe deepep_mode nnodes node_rank"
    ),
    "the embedded engine computes in the checkpoint's type without quantization": "quantization kv_cache_dtype torchao_config",
    "adapters are not supported": "lora_paths enable_lora max_loras_per_batch",
}

# What code and plug-ins written for upstream read on the namespace although the flag is refused
# here: its "off" value.
OFF_VALUES: dict[str, object] = {
    **dict.fromkeys(
        (
            "use_routing_replay",
            "use_rollout_routing_replay",
            "allgather_cp",
            "enable_mtp_training",
        ),
        False,
    ),
    **dict.fromkeys(
        (
            "update_weight_local_checkpoint_dir",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
        )
    ),
    "update_weight_mode": "full",
}


def off_values(declared: Iterable[str]) -> dict[str, object]:
    """Returns `OFF_VALUES` without the names that are options by now."""
    declared = frozenset(declared)
    return {name: value for name, value in OFF_VALUES.items() if name not in declared}


def compat_flags() -> dict[str, CompatFlag]:
    """Returns the table by flag, with the `--sglang-*` flags added."""
    table = {entry.flag: entry for entry in TABLE}
    for name in SGLANG_IGNORED:
        entry = _flag(
            "sglang_" + name,
            IGNORED,
            "the embedded engine sizes and schedules itself; nothing in its results depends on it",
        )
        table.setdefault(entry.flag, entry)
    for reason, names in SGLANG_REFUSED.items():
        for entry in _listed(REFUSED, reason, " ".join("sglang_" + name for name in names.split())):
            table.setdefault(entry.flag, entry)
    return table


@dataclasses.dataclass(frozen=True)
class CompatOutcome:
    """A command line after the table was applied: the words to parse, what to print, and what
    cannot go on.
    """

    words: tuple[str, ...]
    mapped: tuple[str, ...]
    ignored: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def warnings(self) -> list[str]:
        """One line per flag that was mapped or ignored."""
        return [*self.mapped, *self.ignored]


def _entry_of(flag: str, table: Mapping[str, CompatFlag]) -> CompatFlag | None:
    """The table's answer to `flag`: its own, else that of the family whose name it begins with."""
    family = next(
        (entry for entry in FAMILIES if flag == entry.flag or flag.startswith(f"{entry.flag}-")),
        None,
    )
    return table.get(flag, family)


def apply_compat(
    words: Sequence[str], declared: Iterable[str], *, help_words: Iterable[str] = ()
) -> CompatOutcome:
    """Returns `words` with upstream flags rewritten or taken out (with their values). A flag in
    `declared` is left alone.
    """
    table, declared = compat_flags(), frozenset(declared) | frozenset(help_words)
    kept: list[str] = []
    notes: dict[FlagStatus, list[str]] = {status: [] for status in FlagStatus}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        flag, equals, inline = word.partition("=")
        entry = _entry_of(flag, table) if flag not in declared else None
        if entry is None:
            kept.append(word)
            continue
        if entry.status is FlagStatus.MAPPED:
            kept += [*entry.becomes, inline] if equals else entry.becomes
            notes[entry.status].append(
                f"{flag} {entry.reason}; it was read as {' '.join(entry.becomes)}."
            )
            continue
        while index < len(words) and not words[index].startswith("--"):
            index += 1
        notes[entry.status].append(f"{flag}: {entry.reason}.")
    return CompatOutcome(
        tuple(kept),
        *(
            tuple(notes[status])
            for status in (FlagStatus.MAPPED, FlagStatus.IGNORED, FlagStatus.REFUSED)
        ),
    )
