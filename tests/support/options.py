"""A complete, valid command line and a short upstream-style namespace, for tests of options."""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path

HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 102,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_run_inputs(folder: Path) -> list[str]:
    """Writes a model folder (config only) and ten prompts; returns a command line that needs
    nothing else.
    """
    model, prompts = folder / "model", folder / "prompts.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    rows = [
        {"input": [{"role": "user", "content": f"{number}+1="}], "label": str(number + 1)}
        for number in range(10)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"--hf-checkpoint {model} --prompt-data {prompts} --label-key label --rm-type exact_match "
        "--rollout-batch-size 4 "
        f"--n-samples-per-prompt 2 --num-rollout 3 --rollout-max-response-len 8 --num-cpus 64 --run-dir {folder / 'run'}"
    ).split()


def write_weights(folder: Path, tensors: dict[str, tuple[int, ...]]) -> Path:
    """Writes a safetensors file of ones (float32) into `folder`; returns its path."""
    header, stop = {}, 0
    for name, shape in tensors.items():
        start, stop = stop, stop + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    ones = struct.pack("<f", 1.0) * (stop // 4)
    path.write_bytes(len(text).to_bytes(8, "little") + text + ones)
    return path


def upstream_namespace(**overrides) -> argparse.Namespace:
    """Returns the attributes that upstream's tests of `slime_validate_args` set, and no others,
    with harmless values.
    """
    values = dict.fromkeys(
        "eval_config eval_prompt_data ref_load opd_type opd_teacher_load load ref_ckpt_step "
        "ckpt_step start_rollout_id eval_interval "
        "save_interval save custom_tis_function_path max_tokens_per_gpu "
        "log_probs_max_tokens_per_gpu eps_clip_high eval_reward_key "
        "reward_key dump_details save_debug_rollout_data save_debug_train_data "
        "load_debug_rollout_data rollout_external_engine_addrs "
        "offload_train offload_rollout rollout_num_gpus eval_function_path num_steps_per_rollout "
        "over_sampling_batch_size num_epoch "
        "mtp_num_layers custom_config_path eval_max_context_len rollout_max_context_len "
        "rollout_max_prompt_len "
        "only_train_params_name_list freeze_params_name_list update_weight_disk_dir update_weight_local_checkpoint_dir".split()
    )
    values |= dict.fromkeys(
        "use_kl_loss use_opd no_load_optim no_load_rng finetune normalize_advantages "
        "use_rollout_logprobs use_tis get_mismatch_metrics "
        "use_dynamic_batch_size balance_by_flops balance_data debug_train_only offload "
        "debug_rollout_only colocate enable_mtp_training "
        "use_rollout_routing_replay use_routing_replay release_train keep_old_actor".split(),
        False,
    )
    values |= {
        "kl_coef": 0.0,
        "kl_loss_coef": 0.0,
        "hf_checkpoint": "/model",
        "advantage_estimator": "grpo",
        "eps_clip": 0.2,
        "actor_num_gpus_per_node": 8,
        "actor_num_nodes": 1,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "grpo_std_normalization": True,
        "num_rollout": 1,
        "rollout_global_dataset": True,
        "train_backend": "megatron",
        "update_weight_transport": "nccl",
        "update_weight_mode": "full",
        "rollout_temperature": 1.0,
        "megatron_to_hf_mode": "raw",
    }
    return argparse.Namespace(**{**values, **overrides})
