"""Checks whether each row's label can be answered right: calls the run's own reward function with
right and with obviously wrong answers.

A probe is the text that the engine would return: the answer, ended as the chat template ends a
turn, through the tokenizer and back.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from slime.data.rewards import reward_number
from slime.data.sample import Sample, Status
from slime.prompts.template_limits import apply_template
from slime.rollout.rm_hub import BOXED_PREFIX, async_rm, batched_async_rm, split_rm_type_name
from slime.rollout.rm_hub.labels import label_texts
from slime.typing import Tokenizer

PROBE_SECONDS = 30.0
WRONG_ANSWER = "I do not know."
# How an answer is written for the graders that look for one.
FORMS = ("{}", "</think>\n\\boxed{{{}}}", "Answer: {}", "The answer is {}.")
ROWS_AT_ONCE = 64
# Rows of a file that a sample is drawn from: reading a large one whole only to look at 20 rows
# would take minutes.
ROWS_READ = 2000
# Types that look at no label, or whose answer is a program's.
WITHOUT_LABEL = frozenset({"random", "ifbench", "remote_rm"})


@dataclasses.dataclass(frozen=True)
class RowProbe:
    """What one row's right and wrong answers score. `failure`: the error of the reward function,
    where it had one.
    """

    place: str
    label: Any
    right: tuple[tuple[str, Any], ...]
    wrong: tuple[tuple[str, Any], ...]
    failure: BaseException | None = None

    @property
    def can_be_right(self) -> bool:
        """Whether some form of the label scores above every wrong answer without content."""
        return self.best_right > self.wrong[0][1]

    @property
    def best_right(self) -> float:
        """The highest score of a right answer."""
        return max(score for _, score in self.right)

    @property
    def accepted_wrong(self) -> str | None:
        """A wrong answer that scores as high as the best right one; None where there is none."""
        if not self.can_be_right:
            return None
        return next((text for text, score in self.wrong if score >= self.best_right), None)


def right_answers(sample: Sample) -> list[str]:
    """Every form of what the label accepts: bare, boxed, after "Answer:", in a sentence; choices
    also by their letter.
    """
    label = sample.label
    texts = label_texts(label)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    choices = metadata.get("choices")
    if (
        isinstance(label, int)
        and not isinstance(label, bool)
        and choices
        and 0 <= label < len(choices)
    ):
        texts = [list(choices)[label] if isinstance(choices, dict) else chr(ord("A") + label)]
    if isinstance(metadata.get("correct_letter"), str):
        texts.append(metadata["correct_letter"].upper())
    return list(dict.fromkeys(form.format(text) for text in texts for form in FORMS))


def wrong_answers(sample: Sample, other_label: object) -> list[str]:
    """An answer without content, and another row's answer (or this one with a digit more) in
    every form.
    """
    own = set(label_texts(sample.label))
    others = [text for text in label_texts(other_label)[-1:] if text not in own]
    if not others:
        others = [f"{(label_texts(sample.label) or ['0'])[-1]}1"]
    return [WRONG_ANSWER, *(form.format(text) for text in others for form in FORMS)]


def turn_end(tokenizer: Tokenizer | None, template_kwargs: dict[str, Any]) -> str:
    """What the chat template writes behind an assistant's text, up to the end of its turn; the end
    token without a template.
    """
    mark = "ANSWER"
    if tokenizer is not None and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": mark}]
        text = apply_template(tokenizer, messages, add_generation_prompt=False, **template_kwargs)
        _, found, end = text.rpartition(mark)
        if found:
            return end.rstrip("\n")
    return getattr(tokenizer, "eos_token", None) or ""


def as_generated(
    text: str, tokenizer: Tokenizer | None, *, end: str, skip_special_tokens: bool
) -> tuple[str, list[int]]:
    """(the text as an engine returns it, its ids): with the turn's end, unless special tokens are
    skipped.
    """
    if tokenizer is None:
        return text, []
    ids = tokenizer(text + end, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    # a tokenizer that does not know some character would make every answer wrong for a reason that
    # is not the reward's
    plain = tokenizer.decode(
        tokenizer(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True
    )
    return (decoded if plain.strip() == text.strip() else text), list(ids)


async def score_texts(
    args: argparse.Namespace, sample: Sample, texts: Sequence[str], tokenizer: Tokenizer | None
) -> list[Any]:
    """The reward of each text as the response to `sample`, by the run's own reward function; an
    exception takes a reward's place.
    """
    end = (
        turn_end(tokenizer, args.apply_chat_template_kwargs or {}) if tokenizer is not None else ""
    )
    samples = []
    for text in texts:
        probe = copy.deepcopy(sample)
        probe.response, ids = as_generated(
            text, tokenizer, end=end, skip_special_tokens=args.rollout_skip_special_tokens
        )
        probe.response_length, probe.tokens, probe.status = len(ids), ids, Status.COMPLETED
        samples.append(probe)
    calls = (
        [batched_async_rm(args, samples)]
        if args.group_rm
        else [async_rm(args, probe) for probe in samples]
    )
    limited = (asyncio.wait_for(call, PROBE_SECONDS) for call in calls)
    results = await asyncio.gather(*limited, return_exceptions=True)
    if args.group_rm:
        return (
            list(results[0])
            if isinstance(results[0], list | tuple)
            else [results[0]] * len(samples)
        )
    return list(results)


def looks_at_labels(args: argparse.Namespace, sample: Sample) -> bool:
    """Whether the row's grader compares with the label, as far as that is known: True for custom
    functions.
    """
    return (
        bool(sample.custom_rm_path or args.custom_rm_path)
        or split_rm_type_name(args, sample) not in WITHOUT_LABEL
    )


async def probe_row(
    args: argparse.Namespace,
    sample: Sample,
    place: str,
    other_label: object,
    tokenizer: Tokenizer | None,
) -> RowProbe:
    """One row's probe."""
    right, wrong = right_answers(sample), wrong_answers(sample, other_label)
    rewards = await score_texts(args, sample, [*right, *wrong], tokenizer)
    failures = [reward for reward in rewards if isinstance(reward, BaseException)]
    if failures:
        return RowProbe(place, sample.label, (), (), failures[0])
    try:
        numbers = [reward_number(reward, args.reward_key, index=sample.index) for reward in rewards]
    except ValueError as error:
        return RowProbe(place, sample.label, (), (), error)
    scored = list(zip([*right, *wrong], numbers, strict=True))
    return RowProbe(place, sample.label, tuple(scored[: len(right)]), tuple(scored[len(right) :]))


async def probe_rows(
    args: argparse.Namespace, rows: Iterable[tuple[str, Sample]], tokenizer: Tokenizer | None
) -> list[RowProbe]:
    """The probes of all rows that have a label and a grader that looks at it, in order."""
    probes: list[RowProbe] = []
    rows = iter(rows)
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        asked = [
            (place, sample)
            for place, sample in batch
            if label_texts(sample.label) and looks_at_labels(args, sample)
        ]
        others = [sample.label for _, sample in asked[1:]] + [
            sample.label for _, sample in asked[:1]
        ]
        calls = [
            probe_row(args, sample, place, other, tokenizer)
            for (place, sample), other in zip(asked, others, strict=True)
        ]
        probes += await asyncio.gather(*calls)
    return probes


def sample_rows(rows: Iterable[Any], count: int) -> list[Any]:
    """`count` of the first rows, evenly spaced; all of them where there are no more."""
    read = list(itertools.islice(rows, ROWS_READ))
    if len(read) <= count:
        return read
    return [read[position * len(read) // count] for position in range(count)]


def describe_probes(probes: Sequence[RowProbe], *, shown: int = 5) -> list[str]:
    """Lines: how many rows can be answered right, and the rows that cannot, or that accept a wrong
    answer, each with its label.
    """
    failed = [probe for probe in probes if probe.failure is not None]
    graded = [probe for probe in probes if probe.failure is None]
    never = [probe for probe in graded if not probe.can_be_right]
    loose = [probe for probe in graded if probe.accepted_wrong is not None]
    lines = [
        f"{len(graded) - len(never)} of {len(probes)} rows: a right answer scores above a wrong one"
    ]
    for title, found, detail in (
        (
            "the reward function failed",
            failed,
            lambda probe: f"{type(probe.failure).__name__}: {probe.failure}",
        ),
        ("can never be right: no form of the label scores above a wrong answer", never, _scores_of),
        (
            "a wrong answer scores as high as the right one",
            loose,
            lambda probe: f"{probe.accepted_wrong!r} -> {probe.best_right:g}",
        ),
    ):
        if found:
            lines.append(f"{len(found)} of {len(probes)} rows: {title}")
            lines += [
                f"    {probe.place}: label {_short(probe.label)}: {detail(probe)}"
                for probe in found[:shown]
            ]
            lines += [f"    ... and {len(found) - shown} more"] * (len(found) > shown)
    return lines


def _scores_of(probe: RowProbe) -> str:
    return (
        f"all of {len(probe.right)} forms score {probe.best_right:g} or less, as "
        f"{WRONG_ANSWER!r} does"
    )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:38]}...{text[-38:]}"


def advice(rm_type: str | None) -> str:
    """What to do about labels that can never be right."""
    name = (rm_type or "").removeprefix(BOXED_PREFIX)
    if not name:
        return "Compare the labels with what the reward function reads."
    return (
        f"--rm-type {name} does not read these labels: docs/rewards.md says which type to "
        "choose; or change the labels, or --label-key."
    )
