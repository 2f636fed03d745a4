"""Names that other trainers use, each with slime's option of the same meaning: the hint for an
unknown flag or key.

A synonym is never accepted: "batch size" or "steps" count different things in different trainers.
It is only named.
"""

from __future__ import annotations

# Our flag (with what else it takes) -> the words that others use for it, without the leading
# dashes.
OPTION_WORDS: dict[str, str] = {
    "--hf-checkpoint": (
        "model model-name model-path model-name-or-path pretrain pretrained "
        "actor-model policy-model base-model tokenizer tokenizer-path"
    ),
    "--ref-load": "ref-model reference-model reference-model-path ref-model-path",
    "--load": (
        "resume resume-from resume-from-checkpoint resume-path load-path ckpt-path "
        "checkpoint-path load-checkpoint"
    ),
    "--save": (
        "output-dir output output-path save-dir save-path ckpt-dir checkpoint-dir default-local-dir"
    ),
    "--save-interval": "save-steps save-freq save-every checkpoint-interval checkpoint-every",
    "--eval-interval": (
        "eval-steps eval-freq test-freq eval-every val-check-interval evaluation-interval"
    ),
    "--eval-prompt-data NAME PATH": (
        "eval-dataset eval-data test-data val-files val-data test-files validation-data eval-file"
    ),
    "--prompt-data": (
        "dataset dataset-name train-dataset train-file train-files train-data data "
        "prompts prompt-file input-data"
    ),
    "--input-key": (
        "prompt-key prompt-column query-key question-key input-column dataset-text-field"
    ),
    "--label-key": "answer-key answer-column target-key ground-truth-key label-column",
    "--num-rollout": (
        "max-steps num-steps steps total-steps num-iterations total-training-steps "
        "num-train-steps n-steps iterations"
    ),
    "--num-epoch": "num-train-epochs epochs num-epochs total-epochs max-epochs",
    "--rollout-batch-size": (
        "rollout-size num-prompts prompts-per-step gen-batch-size "
        "generation-batch-size num-prompts-per-step"
    ),
    "--global-batch-size": "batch-size train-batch-size ppo-mini-batch-size mini-batch-size",
    "--micro-batch-size": (
        "per-device-train-batch-size micro-train-batch-size ppo-micro-batch-size "
        "micro-batch-size-per-gpu per-device-batch-size"
    ),
    "--n-samples-per-prompt": "num-generations rollout-n group-size num-samples samples-per-prompt "
    "num-return-sequences "
    "num-samples-per-prompt n-samples num-rollouts-per-prompt",
    "--rollout-max-response-len": "max-new-tokens max-tokens max-completion-length "
    "max-response-length generate-max-len "
    "max-gen-len response-length max-response-len",
    "--rollout-max-prompt-len": "max-prompt-length prompt-max-len max-prompt-len",
    "--rollout-max-context-len": (
        "max-model-len max-seq-len max-sequence-length max-length context-length"
    ),
    "--rollout-temperature": "temperature sampling-temperature",
    "--rollout-top-p": "top-p",
    "--rollout-top-k": "top-k",
    "--rollout-stop": "stop stop-strings stop-sequences",
    "--rollout-shuffle": "shuffle shuffle-prompts",
    "--apply-chat-template-kwargs": "chat-template-kwargs template-kwargs",
    "--lr": "learning-rate actor-learning-rate actor-lr policy-lr",
    "--lr-warmup-iters": "warmup-steps num-warmup-steps lr-warmup-steps",
    "--lr-warmup-fraction": "warmup-ratio lr-warmup-ratio warmup-fraction",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler lr-schedule",
    "--clip-grad": (
        "max-grad-norm max-norm grad-clip gradient-clipping gradient-clip-val clip-grad-norm"
    ),
    "--adam-beta1 and --adam-beta2": "adam-betas betas",
    "--adam-eps": "adam-epsilon",
    "--use-kl-loss --kl-loss-coef": (
        "beta kl-beta kl-coeff kl-penalty-coef init-kl-coef kl-weight kl-loss-weight"
    ),
    "--kl-loss-type": "kl-estimator kl-penalty",
    "--eps-clip": (
        "clip-range cliprange clip-ratio clip-eps epsilon clip-epsilon ppo-clip clip-ratio-low"
    ),
    "--eps-clip-high": "epsilon-high clip-ratio-high clip-higher",
    "--eps-clip-c": "clip-ratio-c dual-clip",
    "--value-clip": "cliprange-value vf-clip value-clip-range clip-range-vf",
    "--entropy-coef": "entropy-coeff ent-coef entropy-bonus entropy-loss-coef",
    "--lambd": "lam gae-lambda lambda",
    "--gamma": "discount discount-factor",
    "--advantage-estimator": "algorithm algo adv-estimator rl-algorithm estimator",
    "--disable-grpo-std-normalization": "no-scale-rewards",
    "--custom-rm-path": (
        "reward-fn reward-function reward-func reward-funcs reward-functions "
        "custom-reward-function remote-rm-fn"
    ),
    "--rm-type remote_rm --rm-url": (
        "reward-model reward-model-path reward-pretrain remote-rm-url reward-url"
    ),
    "--reward-key": "reward-name score-key",
    "--tensor-model-parallel-size": (
        "tp tp-size tensor-parallel tensor-parallel-size model-parallel-size"
    ),
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size",
    "--context-parallel-size": "cp cp-size sp-size ulysses-sequence-parallel-size ring-attn-size",
    "--expert-model-parallel-size": "ep ep-size expert-parallel-size",
    "--actor-num-nodes": "nnodes num-nodes nodes",
    "--actor-num-gpus-per-node": (
        "num-gpus gpus n-gpus n-gpus-per-node nproc-per-node num-processes ngpus"
    ),
    "--rollout-num-engines": "num-engines vllm-num-engines num-workers-rollout",
    "--rollout-num-gpus-per-engine": "vllm-tensor-parallel-size rollout-tp engine-tp",
    "--sglang-mem-fraction-static": (
        "gpu-memory-utilization vllm-gpu-memory-utilization mem-fraction"
    ),
    "--recompute-granularity full": "gradient-checkpointing activation-checkpointing",
    "--use-wandb, --use-tensorboard": "report-to log-with logger tracker",
    "--wandb-project": "project project-name",
    "--run-name": "experiment-name experiment exp-name name",
    "--run-dir": "log-dir logging-dir logdir",
    "--use-dynamic-batch-size --max-tokens-per-gpu": (
        "ppo-max-token-len-per-gpu use-dynamic-bsz packing sample-packing"
    ),
    "--use-tis": "importance-sampling-correction truncated-importance-sampling",
    "--loss-type sft_loss": "sft finetuning-type",
    "--bf16": "dtype precision mixed-precision torch-dtype",
    "--seed (weights and dropout) or --rollout-seed (sampling)": "random-seed set-seed",
    "--colocate": "hybrid-engine colocate-all-models colocate-actor-ref",
    "--num-critic-only-steps": "critic-warmup critic-warmup-steps freezing-actor-steps",
}

# Words without an option of the same meaning: what to know instead.
EXPLAINED_WORDS: dict[str, str] = {
    "gradient-accumulation-steps accumulate-grad-batches": (
        "It follows from --global-batch-size, "
        "--micro-batch-size and the number of data-parallel ranks."
    ),
    "logging-steps log-freq log-every log-steps": (
        "Every step is logged, to metrics.jsonl of the run folder."
    ),
    "lora lora-rank lora-r lora-alpha use-peft peft": (
        "Adapters are not supported: all weights train."
    ),
    "deepspeed zero-stage fsdp fsdp-config": (
        "Training runs on Megatron-core; --use-distributed-optimizer shards the optimizer state."
    ),
    "use-vllm vllm vllm-mode": (
        "Rollouts come from engines that speak SGLang's HTTP API; there is nothing to switch on."
    ),
    "attn-implementation use-liger-kernel flash-attn": (
        "There is one attention implementation per device, so nothing is to be chosen."
    ),
    "push-to-hub hub-model-id": (
        "Nothing is uploaded; --save-hf FOLDER writes a Hugging Face folder."
    ),
}


def synonym_hint(word: str) -> str | None:
    """Returns the sentence for a word of another trainer ("--learning-rate", "learning_rate"); None
    for a word that is no synonym.
    """
    return _hints().get(word.lower().lstrip("-").replace("_", "-").partition("=")[0])


def _hints() -> dict[str, str]:
    hints = {
        word: f"Did you mean {flag}?"
        for flag, words in OPTION_WORDS.items()
        for word in words.split()
    }
    hints |= {
        word: sentence for words, sentence in EXPLAINED_WORDS.items() for word in words.split()
    }
    return hints
