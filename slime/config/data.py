"""Options of the prompt dataset and of the data source that hands prompts out."""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Data: prompt files, their keys, chat template, order."""

    prompt_data: str | None = option(
        None,
        "Prompts as .jsonl, .parquet, .json (an array), .csv, .tsv, or a folder of "
        "datasets.save_to_disk; a slice like "
        "data.jsonl@[0:1000] takes those rows, a folder or a pattern like 'd/*.jsonl' all its files.",
    )
    input_key: str = option(
        "input", "Key of the prompt in each row: a text, or a list of chat messages."
    )
    label_key: str | None = option(
        None, "Key of the label (ground truth) in each row; every row must have it."
    )
    metadata_key: str = option("metadata", "Key of a row's free dictionary, if it has one.")
    tool_key: str = option(
        "tools",
        "Key of a row's tool definitions, if it has them; they are rendered by the chat template.",
    )
    multimodal_keys: dict | None = option(
        None, 'Keys of media per kind, as JSON: {"image": "images"}.'
    )
    apply_chat_template: bool = option(
        False, "Render prompts with the tokenizer's chat template when the dataset is read."
    )
    apply_chat_template_kwargs: dict = option(
        {}, 'Extra arguments of the chat template, as JSON: {"enable_thinking": false}.'
    )
    rollout_global_dataset: bool = option(
        True,
        "Serve prompts from --prompt-data; off: the rollout function manages its own data.",
        disable_flag="--disable-rollout-global-dataset",
    )
    data_source_path: str = option(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", help_of("data_source_path")
    )
    rollout_shuffle: bool = option(
        False, "Shuffle the prompts anew in each epoch, from --rollout-seed."
    )
    rollout_seed: int = option(
        42, "Seed of the prompt order and, with deterministic inference, of every sampled response."
    )
    accept_changed_prompts: bool = option(
        False,
        "Resume although --prompt-data has other rows than the checkpoint was trained on: the run "
        "warns and goes on at the same number of a prompt.",
    )
    loss_mask_type: str = option(
        "qwen",
        "How conversations become token ids and loss masks in SFT.",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
    )
