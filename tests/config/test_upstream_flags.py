"""Flags of upstream's scripts: each is honoured, mapped with a warning, ignored with a warning, or
refused with a reason."""

import ast
from pathlib import Path

import pytest

import slime
from slime.config.cli import parse_command_line
from slime.config.compat import FlagStatus, apply_compat, compat_flags
from slime.config.specs import all_specs, specs_by_name
from slime.exceptions import ConfigError

NUM_GPUS = 0

# What parse_args adds: derived values that are no options, and where options came from.
KNOWN_BESIDE_OPTIONS = {
    "use_critic",
    "num_experts",
    "rollout_external",
    "dry_run",
    "given_options",
    "flag_counts",
    "as_requested",
}

# Every option that upstream documents for the data path, and
# Megatron's in its example scripts.
UPSTREAM = """
--rollout-batch-size --n-samples-per-prompt --global-batch-size --num-steps-per-rollout --micro-batch-size --use-dynamic-batch-size
--max-tokens-per-gpu --log-probs-max-tokens-per-gpu --balance-data --balance-by-flops --over-sampling-batch-size --num-rollout --num-epoch
--start-rollout-id --prompt-data --input-key --label-key --metadata-key --tool-key --multimodal-keys --apply-chat-template
--apply-chat-template-kwargs --disable-rollout-global-dataset --data-source-path --rollout-shuffle --rollout-seed --rollout-temperature
--rollout-top-p --rollout-top-k --rollout-max-response-len --rollout-max-prompt-len --rollout-max-context-len --rollout-stop
--rollout-stop-token-ids --rollout-skip-special-tokens --partial-rollout --mask-offpolicy-in-partial-rollout --rollout-data-transport
--reward-key --eval-reward-key --rm-type --rm-url --group-rm --eval-interval --eval-prompt-data --eval-config --n-samples-per-eval-prompt
--eval-temperature --eval-top-p --eval-top-k --eval-max-response-len --eval-max-prompt-len --eval-min-new-tokens --eval-input-key
--eval-label-key --eval-tool-key --eval-max-context-len --skip-eval-before-train --loss-type --advantage-estimator --kl-coef --use-kl-loss
--kl-loss-coef --kl-loss-type --use-unbiased-kl --eps-clip --eps-clip-high --eps-clip-c --value-clip --entropy-coef --gamma --lambd
--normalize-advantages --disable-rewards-normalization --disable-grpo-std-normalization --disable-compute-advantages-and-returns
--use-rollout-logprobs --use-tis --tis-clip --tis-clip-low --get-mismatch-metrics --use-opsm --opsm-delta --use-opd --opd-type --opd-kl-coef
--opd-teacher-load --calculate-per-token-loss --recompute-loss-function --log-probs-chunk-size --use-rollout-entropy
--data-pad-size-multiplier --allgather-cp --loss-mask-type --use-routing-replay --use-rollout-routing-replay --log-passrate --log-multi-turn
--log-correct-samples --log-reward-category --use-wandb --wandb-project --wandb-group --wandb-key --wandb-team --wandb-mode --wandb-dir
--wandb-always-use-train-step --use-tensorboard --tb-project-name --tb-experiment-name --save-debug-rollout-data --save-debug-train-data
--load-debug-rollout-data --load-debug-rollout-data-subsample --debug-train-only --debug-rollout-only --dump-details --ci-test
--ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold --ci-save-grad-norm --ci-load-grad-norm --custom-config-path
--http-proxy --min-batch-collection-ratio --rollout-function-path --eval-function-path --custom-generate-function-path
--rollout-sample-hook-path --custom-rm-path --dynamic-sampling-filter-path --buffer-filter-path --rollout-sample-filter-path
--rollout-all-samples-process-path --custom-reward-post-process-path --custom-convert-samples-to-train-data-path
--custom-rollout-log-function-path --custom-eval-rollout-log-function-path --rollout-data-postprocess-path --custom-advantage-function-path
--custom-loss-function-path --custom-tis-function-path --custom-pg-loss-reducer-function-path --custom-megatron-init-path
--custom-megatron-before-log-prob-hook-path --custom-megatron-before-train-step-hook-path --custom-model-provider-path
--custom-update-weight-post-write-path --hf-checkpoint --load --save --save-interval --ref-load --ref-ckpt-step --ckpt-step --finetune
--no-load-optim --no-load-rng --no-save-optim --actor-num-nodes --actor-num-gpus-per-node --critic-num-nodes --critic-num-gpus-per-node
--rollout-num-gpus --rollout-num-gpus-per-engine --num-gpus-per-node --colocate --offload --offload-train --offload-rollout --release-train
--keep-old-actor --rollout-external-engine-addrs --update-weight-transport --update-weight-disk-dir --update-weight-mode
--update-weight-local-checkpoint-dir --update-weight-buffer-size --update-weights-interval --train-backend --megatron-to-hf-mode
--only-train-params-name-list --freeze-params-name-list --enable-mtp-training --mtp-num-layers --num-critic-only-steps --critic-load
--critic-save --critic-lr --sglang-mem-fraction-static --sglang-server-concurrency --sglang-enable-deterministic-inference
--sglang-router-ip --sglang-router-port --sglang-cuda-graph-bs --sglang-attention-backend --sglang-tp-size --sglang-speculative-algorithm
--swiglu --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention --num-query-groups --kv-channels
--use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --qk-layernorm --normalization --norm-epsilon --rotary-base
--rotary-percent --position-embedding-type --vocab-size --make-vocab-size-divisible-by --untie-embeddings-and-output-weights
--max-position-embeddings --seq-length --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
--expert-model-parallel-size --expert-tensor-parallel-size --sequence-parallel --decoder-last-pipeline-num-layers
--num-layers-per-virtual-pipeline-stage --recompute-granularity --recompute-method --recompute-num-layers --recompute-activations --optimizer
--lr --min-lr --lr-decay-style --lr-warmup-iters --lr-warmup-fraction --lr-decay-iters --weight-decay --clip-grad --adam-beta1 --adam-beta2
--adam-eps --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-precision-aware-optimizer --optimizer-cpu-offload
--overlap-cpu-optimizer-d2h-h2d --attention-dropout --hidden-dropout --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend --bf16 --fp16 --seed --distributed-backend --distributed-timeout-minutes --transformer-impl --use-flash-attn
--use-mcore-models --no-check-for-nan-in-loss-and-grad --no-rope-fusion --no-bias-swiglu-fusion --num-experts --moe-router-topk
--moe-ffn-hidden-size --moe-layer-freq --moe-grouped-gemm --moe-token-dispatcher-type --moe-router-score-function --moe-router-dtype
--moe-permute-fusion --moe-aux-loss-coeff --moe-router-load-balancing-type --moe-shared-expert-intermediate-size --moe-router-pre-softmax
--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-topk-scaling-factor --moe-router-num-groups
--moe-router-group-topk --moe-enable-deepep --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
--v-head-dim --apply-layernorm-1p --log-interval --train-iters --tokenizer-type --tokenizer-model --ckpt-format --auto-detect-ckpt-format
--no-gradient-accumulation-fusion --no-persist-layer-norm --use-fault-tolerance --train-memory-margin-bytes --model-name --train-env-vars
--async-save --megatron-config-path --rollout-health-check-interval --rollout-health-check-timeout --rollout-health-check-first-wait
--profile-target --memory-recorder --opd-teacher-ckpt-step --reset-optimizer-states --use-stateless-adam --load-forge-rollout-data
--update-weight-disk-keep-files --update-weight-delta-checksum --rollout-buffer-url --fetch-trajectory-retry-times --rollout-task-type
--padded-vocab-size --qwen-gdn-backend --freeze-indexer
""".split()


def declared_flags():
    return {flag for spec in all_specs() for flag in spec.flags}


def test_every_flag_of_upstreams_scripts_is_honoured_mapped_ignored_or_refused():
    """Every flag of upstream's scripts is honoured, mapped, ignored or refused."""
    unknown = [
        flag for flag in UPSTREAM if flag not in declared_flags() and flag not in compat_flags()
    ]
    assert unknown == []


def test_no_entry_of_the_table_is_out_of_date():
    """An option that is honoured is not in the table of refused ones."""
    assert sorted(set(compat_flags()) & declared_flags()) == []


def test_every_mapping_leads_to_a_flag_that_exists():
    """Every mapping leads to an existing flag."""
    for entry in compat_flags().values():
        if entry.status is FlagStatus.MAPPED:
            assert entry.becomes[0] in declared_flags(), entry
        else:
            assert entry.reason and not entry.becomes


def test_an_upstream_script_parses_and_every_flag_is_accounted_for():
    """An upstream script parses, and every flag of it has an effect or a warning."""
    line = parse_command_line(
        "--norm-epsilon 1e-5 --num-experts=8 --recompute-activations "
        "--accumulate-allreduce-grads-in-fp32 --no-rope-fusion --use-flash-attn "
        "--attention-backend flash --sglang-cuda-graph-bs 1 2 4 8 --log-interval 1 --lr 1e-6 --swiglu".split()
    )
    args = line.args
    assert (args.layernorm_epsilon, args.num_moe_experts, args.recompute_granularity) == (
        1e-5,
        8,
        "selective",
    )
    assert (args.grad_reduce_in_fp32, args.apply_rope_fusion, args.lr, args.swiglu) == (
        True,
        False,
        1e-6,
        True,
    )
    assert line.counts == {"honoured": 2, "mapped": 5, "ignored": 4}
    assert len(line.warnings) == 9 and all(text.startswith("--") for text in line.warnings)
    assert any(
        text.startswith("--norm-epsilon is --layernorm-epsilon here") for text in line.warnings
    )


def test_a_refused_flag_stops_with_its_reason():
    """A refused flag, which would change results, ends the start with its reason."""
    with pytest.raises(ConfigError) as caught:
        parse_command_line(
            "--q-lora-rank 512 --http-proxy x --sglang-tp-size 4 --num-gpus-per-node 8".split()
        )
    text = str(caught.value)
    assert "--q-lora-rank: this model family is not supported yet" in text
    assert "--http-proxy: it is read nowhere in upstream" in text
    assert "--sglang-tp-size: the embedded engine runs one process per engine" in text
    assert (
        "--num-gpus-per-node: an engine runs on one device here" in text and "leave it out" in text
    )


def test_a_family_of_flags_is_refused_by_its_beginning():
    """A family of flags is refused by its prefix."""
    with pytest.raises(
        ConfigError, match="--megatron-deepgemm-anything: DeepGEMM's fp8 matrix products"
    ):
        parse_command_line(["--megatron-deepgemm-anything", "1"])
    with pytest.raises(ConfigError, match="unknown|Unknown|not known"):
        parse_command_line(["--megatron-deepgemmish", "1"])


def test_a_declared_flag_wins_over_the_table():
    """A plug-in's declared option precedes the table."""
    outcome = apply_compat(["--http-proxy", "x"], ["--http-proxy"])
    assert outcome.words == ("--http-proxy", "x") and not outcome.refused
    outcome = apply_compat(["--http-proxy", "x", "--lr", "1"], ["--lr"])
    assert outcome.words == ("--lr", "1") and len(outcome.refused) == 1


def test_every_attribute_that_slime_reads_from_args_is_there():
    """Every attribute that slime reads from args is a declared option."""
    root = Path(slime.__file__).parent
    known = set(vars(parse_command_line([]).args)) | KNOWN_BESIDE_OPTIONS
    unknown = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                if (
                    getattr(owner, "id", getattr(owner, "attr", None)) == "args"
                    and node.attr not in known
                ):
                    unknown.add(f"{path.relative_to(root)}: args.{node.attr}")
    assert unknown == set()


def test_switches_keep_upstreams_spelling():
    """Options that are on by default are switched off by upstream's flag."""
    names = {
        "--disable-rewards-normalization": "rewards_normalization",
        "--disable-grpo-std-normalization": "grpo_std_normalization",
        "--disable-compute-advantages-and-returns": "compute_advantages_and_returns",
        "--disable-rollout-global-dataset": "rollout_global_dataset",
    }
    args = parse_command_line(list(names)).args
    for name in names.values():
        assert getattr(args, name) is False and specs_by_name()[name].default is True


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
