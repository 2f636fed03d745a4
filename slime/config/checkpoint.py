"""Options of checkpoints, initial weights and weight updates."""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints and initial weights"""

    hf_checkpoint: str | None = option(
        None,
        (
            "Hugging Face model folder: model shape, tokenizer, and the initial weights where "
            "--load "
            "has none."
        ),
    )
    load: str | None = option(
        None,
        (
            "Folder to resume from: a Megatron checkpoint folder of an earlier --save, or a "
            "Hugging "
            "Face folder (weights only)."
        ),
    )
    save: str | None = option(
        None, "Folder for checkpoints; each is an iter_0000012 below it, published as a whole."
    )
    save_interval: int | None = option(
        None, "Save after every this many rollouts; None: only after the last one.", minimum=1
    )
    ckpt_step: int | None = option(
        None, "Iteration of --load to resume from; None: the latest published one.", minimum=0
    )
    finetune: bool = option(
        False, "Take only the weights from --load and start counting rollouts at 0."
    )
    no_load_optim: bool = option(False, "Do not load optimizer and scheduler state from --load.")
    no_load_rng: bool = option(False, "Do not load random states from --load.")
    override_opt_param_scheduler: bool = option(
        False,
        (
            "Resume with the learning-rate and weight-decay schedule of this command line, at the "
            "checkpoint's position, in place of the checkpoint's."
        ),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        (
            "Resume with the checkpoint's schedule even where it ends before the run does. It is "
            "the "
            "default elsewhere."
        ),
    )
    no_save_optim: bool = option(
        False,
        (
            "Leave optimizer and scheduler state out of checkpoints; such a checkpoint cannot be "
            "resumed exactly."
        ),
    )
    no_save_rng: bool = option(False, "Leave random states out of checkpoints.")
    save_failure: str = option(
        "end",
        (
            "What a checkpoint that could not be written means: the run ends with status 1 and the "
            "cause, or continues, tries again at the next save, and has status 1 at its end. The "
            "last save of a run ends it either way. Earlier checkpoints stay intact."
        ),
        choices=("end", "continue"),
    )
    keep_checkpoints: int | None = option(
        None,
        (
            "Checkpoints to keep in --save, newest first; older ones are deleted after a verified "
            "save. None: all."
        ),
        minimum=1,
    )
    recovery_interval: int = option(
        0,
        (
            "Keep the whole training state in memory after every this many rollouts, so that the "
            "run goes on when a training rank or the rollout manager dies or freezes: they start "
            "again from it. 0: such a loss ends the run."
        ),
        minimum=0,
    )
    ref_load: str | None = option(
        None,
        (
            "Weights of the reference policy: Megatron checkpoint or Hugging Face folder; None: "
            "the "
            "initial weights."
        ),
    )
    ref_ckpt_step: int | None = option(
        None, "Iteration of --ref-load; None: its latest.", minimum=0
    )
    ref_update_interval: int | None = option(
        None, "Rollouts after which the policy becomes the new reference; None: never.", minimum=1
    )
    critic_load: str | None = option(
        None,
        "Folder the critic resumes from; None: the critic that was saved with the policy of --load "
        "(critic/ in it, or --critic-save), else one from "
        "--hf-checkpoint with a new value head.",
    )
    critic_save: str | None = option(
        None, "Folder for the critic's checkpoints; None: critic/ in --save."
    )
    save_hf: str | None = option(
        None,
        (
            "Also export Hugging Face weights here at every save; {rollout_id} in the path is "
            "replaced "
            "by the rollout's number."
        ),
    )


@dataclasses.dataclass(frozen=True)
class WeightUpdateOptions:
    """Weight updates of the engines"""

    update_weight_buffer_size: int = option(
        512 * 1024 * 1024, "Bytes of weights gathered and sent at a time.", minimum=1
    )
    update_weight_transport: str = option(
        "tensor",
        (
            "How weights reach the engines: in memory without a file, through a folder both sides "
            "see, "
            "or (refused, with what to use) by NCCL."
        ),
        choices=("tensor", "disk", "nccl"),
    )
    update_weight_disk_dir: str | None = option(None, "Folder for --update-weight-transport disk.")
    update_weight_disk_keep_files: bool = option(
        False, "Keep the folders of earlier versions in --update-weight-disk-dir."
    )
    custom_update_weight_post_write_path: str | None = option(
        None, help_of("custom_update_weight_post_write_path")
    )
    check_weight_update_equal: bool = option(
        False,
        (
            "After each update compare the engines' weight checksum with the trainer's; stop if "
            "they "
            "differ."
        ),
    )


@dataclasses.dataclass(frozen=True)
class TrainedParameterOptions:
    """Which parameters train"""

    only_train_params_name_list: list[str] | None = option(
        None, "Regular expressions; only parameters whose Megatron name matches one are trained."
    )
    freeze_params_name_list: list[str] | None = option(
        None, "Regular expressions; parameters whose Megatron name matches one are not trained."
    )
    custom_megatron_init_path: str | None = option(None, help_of("custom_megatron_init_path"))
    custom_model_provider_path: str | None = option(None, help_of("custom_model_provider_path"))
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, help_of("custom_megatron_before_log_prob_hook_path")
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, help_of("custom_megatron_before_train_step_hook_path")
    )
    rollout_data_postprocess_path: str | None = option(
        None, help_of("rollout_data_postprocess_path")
    )
