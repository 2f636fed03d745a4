"""`slime train --dry-run`: shows what would run, tries prompts, template and reward for real, and
stops before any process starts.

Works without Ray and without an engine. Returns 0 when everything it tried worked, 1 when a prompt,
the template or the reward failed. The texts come from pure functions; `dry_run` only loads and
prints.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

from slime.commands.reward_probe import (
    WRONG_ANSWER,
    advice,
    describe_probes,
    probe_rows,
    right_answers,
    sample_rows,
    score_texts,
)
from slime.config.derive import (
    DerivedSizes,
    derived_sizes,
    has_megatron_checkpoint,
    process_layout,
)
from slime.config.resume import nothing_left
from slime.config.rules.rollout import SUPERVISED
from slime.config.secrets import without_secrets
from slime.config.specs import all_specs
from slime.config.yaml_file import write_resolved_config
from slime.exceptions import ConfigError, SlimeError
from slime.models.shape import read_model_shape
from slime.preflight.functions import format_hooks
from slime.preflight.weights import WeightsReport, check_weights, tokenizer_problem
from slime.prompts.dataset import RowFormat, build_sample, compute_prompt_lengths, prompt_text
from slime.prompts.masks import MultiTurnLossMaskGenerator
from slime.prompts.prompt_files import read_rows
from slime.prompts.template_limits import TemplateLimit, apply_template
from slime.rollout.sft_rollout import fill_samples
from slime.typing import Tokenizer
from slime.utils import processing_utils

PROMPTS_SHOWN = 3
RANKS_SHOWN = 16
ROWS_GRADED = 20
PROBE_MESSAGES = (
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nIt is 2."},
    {"role": "user", "content": "And 2 + 2?"},
)
TOOL_MESSAGES = (
    {"role": "user", "content": "Look up two things."},
    {"role": "assistant", "content": "Looking."},
    {"role": "tool", "content": "first result"},
    {"role": "tool", "content": "second result"},
)


def format_options(args: argparse.Namespace) -> list[str]:
    """Returns one line per option that differs from its default: name, value, where it comes from;
    secrets are not shown.
    """
    lines = []
    for spec in all_specs():
        value = getattr(args, spec.name)
        if value == spec.default:
            continue
        shown = "(a secret)" if spec.is_secret else without_secrets(value)
        lines.append(f"{spec.name:38} {shown!s:40} {args.given_options.get(spec.name, 'derived')}")
    return lines


def format_counts(counts: dict[str, int]) -> str:
    """Returns how many of the given options are honoured, mapped to another flag, or ignored (each
    of those had its warning).
    """
    total = counts["honoured"] + counts["mapped"] + counts["ignored"]
    return (
        f"{total} options given: {counts['honoured']} honoured, {counts['mapped']} mapped, "
        f"{counts['ignored']} ignored, 0 refused"
    )


def format_sizes(sizes: DerivedSizes) -> list[str]:
    """Returns the table of sizes, each named once, and the batch algebra that connects them."""
    lines = [
        f"{name.replace('_', ' '):28} {value:g}"
        for name, value in dataclasses.asdict(sizes).items()
    ]
    return [
        *lines,
        f"{sizes.prompts_per_rollout} prompts x {sizes.samples_per_prompt} = "
        f"{sizes.samples_per_rollout} samples = "
        f"{sizes.steps_per_rollout} optimizer steps x {sizes.samples_per_step}",
    ]


def format_layout(sizes: DerivedSizes, *, ranks_per_node: int, is_colocated: bool) -> list[str]:
    """Returns one line per training rank with its coordinates, then the engines with
    their devices.
    """
    places = process_layout(sizes, ranks_per_node=ranks_per_node)
    lines = [f"{'rank':>6} {'node':>5} {'TP':>4} {'CP':>4} {'DP':>4} {'PP':>4}"]
    lines += [
        f"{p.rank:6d} {p.node:5d} {p.tensor:4d} {p.context:4d} {p.data:4d} {p.pipeline:4d}"
        for p in places[:RANKS_SHOWN]
    ]
    if len(places) > RANKS_SHOWN:
        lines.append(f"  ... and {len(places) - RANKS_SHOWN} more")
    first = 0 if is_colocated else sizes.actor_ranks
    for engine in range(sizes.engines):
        start = first + engine * sizes.gpus_per_engine
        stop = start + sizes.gpus_per_engine - 1
        lines.append(f"engine {engine}: device {start}" + (f" to {stop}" if stop > start else ""))
    return lines


def first_difference(kept: Sequence[int], longer: Sequence[int]) -> int | None:
    """Returns the first position at which `longer` does not continue `kept`; None when `kept` is a
    prefix of `longer`.
    """
    for position, (one, other) in enumerate(zip(kept, longer, strict=False)):
        if one != other:
            return position
    return None if len(longer) >= len(kept) else len(longer)


def template_difference(
    tokenizer: Tokenizer, messages: Sequence[dict], kept: int, template_kwargs: dict
) -> str | None:
    """Returns how the render of all `messages` departs from the render of the first `kept` of them;
    None when it only adds tokens.
    """

    def ids_of(some: Sequence[dict]) -> list[int]:
        text = apply_template(tokenizer, list(some), add_generation_prompt=False, **template_kwargs)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before, after = ids_of(messages[:kept]), ids_of(messages)
    position = first_difference(before, after)
    if position is None:
        return None

    def around(ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(list(ids[max(0, position - 4) : position + 4])))

    def at(ids: Sequence[int]) -> str:
        return (
            f"{ids[position]} {tokenizer.decode([ids[position]])!r}"
            if position < len(ids)
            else "the end"
        )

    return (
        f"token {position} was {at(before)} and became {at(after)} when a message was added "
        f"(around it: {around(before)} -> {around(after)})"
    )


def probe_template(tokenizer: Tokenizer, template_kwargs: dict) -> tuple[list[str], bool]:
    """Returns (lines, whether later renders keep the tokens of earlier turns). Multi-turn training
    needs that.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ["- the tokenizer has no chat template; prompts must be plain text"], True
    lines, is_stable = [], True
    for name, messages, kept in (
        ("a user turn after an answer", PROBE_MESSAGES, 2),
        ("a second tool result", TOOL_MESSAGES, 3),
    ):
        try:
            difference = template_difference(tokenizer, messages, kept, template_kwargs)
        except TemplateLimit:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program of its own and may raise anything
            lines.append(
                f"- {name}: the template does not render it "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )
            continue
        is_stable = is_stable and difference is None
        lines.append(
            f"✓ {name} keeps all earlier tokens"
            if difference is None
            else f"✗ {name} changes earlier tokens: {difference}"
        )
    if not is_stable:
        lines.append(
            "  Single-turn training is not affected. For several turns, append token ids instead "
            "of rendering the conversation anew."
        )
    return lines, is_stable


def judge_rewards(
    texts: Sequence[str], rewards: Sequence[Any], reward_key: str | None
) -> tuple[list[str], bool]:
    """Returns (lines, whether the reward works): no exception, and some form of the right answer
    beats the wrong one, which is last.
    """

    def number(reward: object) -> Any:
        return reward[reward_key] if isinstance(reward, dict) and reward_key in reward else reward

    lines = [
        f"  {text!r:48} -> {_shown(number(reward))}"
        for text, reward in zip(texts, rewards, strict=True)
    ]
    failed = [reward for reward in rewards if isinstance(reward, BaseException)]
    if failed:
        return [*lines, f"✗ the reward function failed: {_shown(failed[0])}"], False
    numbers = [number(reward) for reward in rewards]
    odd = [
        value for value in numbers if isinstance(value, bool) or not isinstance(value, int | float)
    ]
    if odd:
        return [
            *lines,
            f"✗ the reward must be a number, got {odd[0]!r}; for a dictionary give --reward-key",
        ], False
    if max(numbers[:-1]) > numbers[-1]:
        return [*lines, "✓ a right answer scores above a wrong one"], True
    return [
        *lines,
        (
            "! no form of the label scores above a wrong answer: fine if the reward does not look "
            "at "
            "labels, else a mistake"
        ),
    ], True


def _shown(value: object) -> str:
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)


def load_prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Any]:
    """Returns (place, sample) of up to ROWS_GRADED rows of --prompt-data, evenly spaced after the
    first PROMPTS_SHOWN, rendered as they would be sent; raises ConfigError for a row that cannot
    be.
    """
    form = RowFormat(
        prompt_key=args.input_key,
        label_key=args.label_key,
        tool_key=args.tool_key,
        metadata_key=args.metadata_key,
        apply_chat_template=args.apply_chat_template,
        apply_chat_template_kwargs=args.apply_chat_template_kwargs or {},
        supervised=args.loss_mask_type if args.rollout_function_path == SUPERVISED else None,
    )
    rows = read_rows(args.prompt_data)
    first = list(itertools.islice(rows, PROMPTS_SHOWN))
    chosen = [*first, *sample_rows(rows, ROWS_GRADED - len(first))]
    return [(row.place, build_sample(row, form, tokenizer)) for row in chosen]


def _section(title: str, lines: Sequence[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print("  " + line, flush=True)


def dry_run(args: argparse.Namespace) -> int:
    """Prints the whole preview of a run and returns the exit status: 0 all right, 1 something that
    was tried failed.
    """
    print("slime train --dry-run: nothing is started", flush=True)
    _section(format_counts(args.flag_counts), [])
    if (
        args.num_rollout is not None
        and (sentence := nothing_left(args, num_rollout=args.num_rollout)) is not None
    ):
        _section("Rollouts", [f"! {sentence}"])
    _section("Options (those that differ from their defaults)", format_options(args))
    path = os.path.join(args.run_dir, "config.yaml")
    write_resolved_config(args, path)
    print(f"\n  written to {path}; slime train --config {path} runs the same")
    if args.rollout_batch_size is not None and args.global_batch_size is not None:
        sizes = derived_sizes(args)
        _section("Derived sizes", format_sizes(sizes))
        layout = format_layout(
            sizes, ranks_per_node=args.actor_num_gpus_per_node, is_colocated=args.colocate
        )
        _section("Processes (training ranks, then engines)", layout)
    hooks = format_hooks(args)
    if hooks:
        _section(
            "Functions that the options name (loaded, and fit to be called: docs/hooks.md)", hooks
        )
    try:
        return 0 if _probe_all(args) else 1
    except SlimeError as error:
        _section("Failed", [f"✗ {error}"])
        return 1


def _probe_all(args: argparse.Namespace) -> bool:
    shape = read_model_shape(args.hf_checkpoint)
    lines, is_whole = ["- not read by this run"], True
    if reads_hf_weights(args):
        lines, is_whole = format_weights(check_weights(args.hf_checkpoint, shape))
    _section(f"Weights ({args.hf_checkpoint})", lines)
    tokenizer = processing_utils.load_tokenizer(args.hf_checkpoint)
    problem = tokenizer_problem(tokenizer, shape, args.hf_checkpoint)
    if problem is not None:
        raise ConfigError(problem)
    return _probe_inputs(args, tokenizer) and is_whole


def reads_hf_weights(args: argparse.Namespace) -> bool:
    """Whether the run reads the weights of --hf-checkpoint: engines that it starts do, and training
    that goes on from no checkpoint.
    """
    starts_engines = not args.debug_train_only and not args.rollout_external_engine_addrs
    return starts_engines or not has_megatron_checkpoint(args.load)


def format_weights(report: WeightsReport) -> tuple[list[str], bool]:
    """Returns (lines about a folder's weights, whether they fit its config.json)."""
    found = (
        f"{report.num_tensors} tensors, {report.num_bytes / 1e9:.3g} GB in {report.num_files} files"
    )
    if report.problems:
        return [f"✗ {problem}" for problem in report.problems], False
    return [
        f"✓ {found}: names, shapes and types as config.json has them; no NaN among the first "
        f"numbers of {report.num_sampled} tensors"
    ], True


def _probe_inputs(args: argparse.Namespace, tokenizer: Tokenizer) -> bool:
    lines, _ = probe_template(tokenizer, args.apply_chat_template_kwargs or {})
    _section("Chat template", lines)
    if args.load_debug_rollout_data:
        _section("Prompts", ["- none: the samples come from --load-debug-rollout-data"])
        return True
    if args.prompt_data is None or not args.rollout_global_dataset:
        _section("Prompts", ["- none from --prompt-data; the rollout function brings its own"])
        return True
    if args.multimodal_keys and processing_utils.load_processor(args.hf_checkpoint) is None:
        _section(
            "Prompts", ["✗ --multimodal-keys is given, but the model's folder has no processor"]
        )
        return False
    rows = load_prompts(args, tokenizer)
    shown = [sample for _, sample in rows[:PROMPTS_SHOWN]]
    if args.rollout_function_path == SUPERVISED:
        _section(
            (
                f"Conversations (the first {len(shown)} rows of {args.prompt_data}; [[ ]] is what "
                "is "
                "trained)"
            ),
            format_conversations(shown, tokenizer, args.loss_mask_type),
        )
        return True
    _section(
        f"Prompts (the first {len(shown)} rows of {args.prompt_data})",
        format_prompts(shown, tokenizer),
    )
    return _probe_reward(args, rows, tokenizer)


def format_prompts(
    samples: Sequence[Any], tokenizer: Tokenizer, *, longest: int = 600
) -> list[str]:
    """Returns each prompt's text with its token count and label; long texts are cut in
    the middle.
    """
    lines = []
    for number, (sample, length) in enumerate(
        zip(samples, compute_prompt_lengths(list(samples), tokenizer), strict=True)
    ):
        text = prompt_text(sample, tokenizer)
        if len(text) > longest:
            text = (
                f"{text[: longest // 2]} [... {len(text) - longest} characters ...] "
                f"{text[-longest // 2 :]}"
            )
        lines.append(f"{number}: {length} tokens, label {sample.label!r}")
        lines += ["   | " + line for line in text.splitlines()]
    return lines


def format_conversations(
    samples: Sequence[Any], tokenizer: Tokenizer, loss_mask_type: str
) -> list[str]:
    """Returns each conversation's text as it is trained on, with the tokens of loss mask 1 between
    [[ and ]], and how many there are.
    """
    filled = copy.deepcopy(list(samples))
    fill_samples(filled, MultiTurnLossMaskGenerator(tokenizer, loss_mask_type))
    lines = []
    for number, sample in enumerate(filled):
        mask = [0] * (len(sample.tokens) - sample.response_length) + list(sample.loss_mask)
        lines.append(f"{number}: {len(mask)} tokens, {sum(mask)} of them trained")
        lines += [
            "   | " + line for line in marked_text(sample.tokens, mask, tokenizer).splitlines()
        ]
    return lines


def marked_text(tokens: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns the text of `tokens`, each run of tokens with mask 1 between [[ and ]]."""
    runs = itertools.groupby(zip(tokens, mask, strict=True), key=lambda pair: bool(pair[1]))
    texts = [(trained, tokenizer.decode([token for token, _ in run])) for trained, run in runs]
    return "".join(f"[[{text}]]" if trained else text for trained, text in texts)


def _probe_reward(
    args: argparse.Namespace, rows: Sequence[tuple[str, Any]], tokenizer: Tokenizer
) -> bool:
    if args.rm_type is None and args.custom_rm_path is None:
        sets_it = args.custom_generate_function_path
        _section(
            "Reward",
            [f"- not tried: {sets_it} sets it" if sets_it else "- no reward function in this run"],
        )
        return True
    if (args.rm_type or "").endswith("remote_rm"):
        _section("Reward", [f"- not tried: it is a server ({without_secrets(args.rm_url)})"])
        return True
    samples = [sample for _, sample in rows]
    sample = next((sample for sample in samples if sample.label is not None), samples[0])
    texts = [*(right_answers(sample) or ["some answer"]), WRONG_ANSWER]
    rewards = asyncio.run(score_texts(args, sample, texts, tokenizer))
    lines, works = judge_rewards(texts, rewards, args.reward_key)
    _section(f"Reward ({args.custom_rm_path or args.rm_type}; label {sample.label!r})", lines)
    return works and _probe_labels(args, rows, tokenizer)


def _probe_labels(
    args: argparse.Namespace, rows: Sequence[tuple[str, Any]], tokenizer: Tokenizer
) -> bool:
    """Grades the labels of the sampled rows against themselves. A built-in type that can call none
    of them right fails the dry run.
    """
    probes = asyncio.run(probe_rows(args, rows, tokenizer))
    if not probes:
        return True
    never = [probe for probe in probes if probe.failure is not None or not probe.can_be_right]
    is_hopeless = len(never) == len(probes) and not args.custom_rm_path
    mark = "✓" if not never else "✗" if is_hopeless else "!"
    lines = describe_probes(probes)
    lines[0] = f"{mark} {lines[0]}"
    if any(probe.failure is None for probe in never):
        lines.append(advice(None if args.custom_rm_path else args.rm_type))
    _section(f"Labels ({len(probes)} rows graded against themselves)", lines)
    return not is_hopeless
