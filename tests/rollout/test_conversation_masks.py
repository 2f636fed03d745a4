"""Loss masks: ids equal the full render, exactly the assistant's turns are trained, and a turn that
cannot be located is refused."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json

import pytest
from support.chat_templates import bpe_tokenizer
from support.rollout_args import rollout_args
from support.tiny_models import make_char_tokenizer

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.prompts.masks import MultiTurnLossMaskGenerator, get_response_lengths, mask_of_spans
from slime.rollout import sft_rollout

NUM_GPUS = 0

# Qwen3's behaviour in short: consecutive tool results share one user turn, and reasoning stays only
# behind the last question.
QWEN3_LIKE = (
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- "
    "endif -%}{%- endfor -%}"
    "{%- if tools -%}{{ '<|im_start|>system\n' + tools[0].function.name + '<|im_end|>\n' }}{%- "
    "endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- "
    "endif -%}"
    "{{ '\n<tool>' + m.content + '</tool>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif "
    "-%}"
    "{%- elif m.role == 'assistant' -%}"
    "{%- set c = m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] -%}"
    "{{ '<|im_start|>assistant\n' + c + '<|im_end|>\n' }}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# A turn ends where the next role's tag begins.
NO_END_MARK = (
    "{% for m in messages %}{{ '[' + m.role[0] + ']' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a]' }}{% endif %}"
)


def say(*contents, roles="ua"):
    names = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    return [
        {"role": names[role], "content": text} for role, text in zip(roles, contents, strict=True)
    ]


def trained(messages, *, template=None, kind="qwen", tools=None):
    """(the decoded trained runs, ids, mask); the ids are checked against the full render."""
    tokenizer = (
        make_char_tokenizer() if template is None else make_char_tokenizer(chat_template=template)
    )
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages, tools)
    full = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert ids == tokenizer(full, add_special_tokens=False)["input_ids"] and len(ids) == len(mask)
    return generator.get_text_from_loss_mask(ids, mask), ids, mask


def test_a_token_in_which_the_answer_begins_is_trained_and_one_that_goes_beyond_its_end_is_not():
    """A token that joins the header's end with the answer's beginning is trained, since the answer
    begins in it; one that reaches beyond the answer's end is not."""
    offsets = [(0, 3), (3, 6), (6, 9), (9, 9)]
    assert mask_of_spans(offsets, [(4, 9)]) == [0, 1, 1, 0] and mask_of_spans(
        offsets, [(3, 7)]
    ) == [0, 1, 0, 0]
    assert mask_of_spans(offsets, [(3, 9)]) == [0, 1, 1, 0]
    assert mask_of_spans(offsets, [(0, 3), (6, 10)]) == [1, 0, 1, 1]


def test_an_answer_that_begins_with_a_line_break_is_learned_with_it():
    """A token "\n\n" that is both the header's and the answer's is trained, also where it is the
    whole answer."""
    from tokenizers import pre_tokenizers

    tokenizer = bpe_tokenizer(QWEN3_LIKE, merges=[("Ċ", "Ċ")])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    generator = MultiTurnLossMaskGenerator(tokenizer)
    for answer, runs in (
        ("\nhe", ["\n\nhe<|im_end|>\n"]),
        ("\n\n", ["\n\n\n<|im_end|>\n"]),
        ("he", ["he<|im_end|>\n"]),
    ):
        ids, mask = generator.get_loss_mask(say("q", answer))
        assert generator.get_text_from_loss_mask(ids, mask) == runs
        assert (
            ids
            == tokenizer(tokenizer.apply_chat_template(say("q", answer), tokenize=False))[
                "input_ids"
            ]
        )


def test_every_assistant_turn_is_trained_with_its_end_and_nothing_else():
    """In user, assistant, user, assistant both answers are trained with their end marks, and no
    character of the user's."""
    runs, ids, mask = trained(say("1+1", "2", "1+2", "3", roles="uaua"))
    assert runs == ["2<|im_end|>\n", "3<|im_end|>\n"]
    assert sum(mask) == 6 and get_response_lengths([mask]) == [len(mask) - mask.index(1)]


def test_a_turn_marked_with_step_loss_mask_0_is_left_out():
    """A turn with step_loss_mask 0 is in the context and not trained."""
    messages = say("1+1", "2", "1+2", "3", roles="uaua")
    messages[1]["step_loss_mask"] = 0
    assert trained(messages)[0] == ["3<|im_end|>\n"]


def test_parallel_tool_results_are_one_turn_as_at_inference():
    """Parallel tool results are one user turn, as at inference; rendered message by message they
    would be two. Serial calls stay as they are."""
    messages = say("q", "call", "r1", "r2", "done", roles="uatta")
    runs, ids, _ = trained(
        messages, template=QWEN3_LIKE, kind="qwen3", tools=[{"function": {"name": "add"}}]
    )
    assert runs == ["call<|im_end|>\n", "done<|im_end|>\n"]
    text = make_char_tokenizer().decode(ids)
    assert (
        text.count("<|im_start|>user") == 2
        and "<tool>r1</tool>\n<tool>r2</tool>" in text
        and text.count("add") == 1
    )


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_reasoning_that_the_template_strips_later_is_neither_rendered_nor_trained(kind):
    """Reasoning that the template strips from earlier turns is not trained; turns are found by
    their markers, because earlier renders are no prefix of the full one."""
    messages = say("a?", "<think>x</think>A", "b?", "<think>y</think>B", roles="uaua")
    runs, ids, _ = trained(messages, template=QWEN3_LIKE, kind=kind)
    assert runs == ["A<|im_end|>\n", "<think>y</think>B<|im_end|>\n"]


def test_qwen3_5_leaves_the_think_tag_that_the_prompt_already_holds_out():
    """The <think> that ends the generation prompt is not trained, because the model never produces
    it."""
    template = QWEN3_LIKE.replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
    )
    messages = say("a?", "<think>\nx</think>A", "b?", "<think>\ny</think>B", roles="uaua")
    runs, _, _ = trained(messages, template=template, kind="qwen3_5")
    assert runs == ["A<|im_end|>\n", "y</think>B<|im_end|>\n"]


def test_where_the_next_role_tag_ends_a_turn_the_tag_is_trained():
    """Without an end mark the next role tag is trained as the turn's end; the user's text is not,
    and the last turn has no tag."""
    runs, _, _ = trained(say("1+1", "2", "1+2", "3", roles="uaua"), template=NO_END_MARK)
    assert runs == ["2[u]", "3"]


@pytest.mark.parametrize("said", ["u", "]", "[u]", "2", ""])
def test_the_tag_is_found_whatever_the_next_turn_says(said):
    """The role tag is found by its place, also where the next message is "u" or empty."""
    runs, _, _ = trained(say("1+1", "2", said, "3", roles="uaua"), template=NO_END_MARK)
    assert runs == ["2[u]", "3"]


def test_distill_qwen_keeps_the_reasoning_of_its_last_message():
    """The reasoning of the last message is trained, though the template would strip it."""
    template = QWEN3_LIKE.replace("loop.index0 > ns.last", "false")
    tokenizer = make_char_tokenizer(chat_template=template)
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    ids, mask = generator.get_loss_mask(say("q", "<think>x</think>A"))
    assert generator.get_text_from_loss_mask(ids, mask) == ["<think>x</think>A<|im_end|>"]
    with pytest.raises(ConfigError, match="last message"):
        generator.get_loss_mask(say("q", "A", "r", roles="uau"))


def test_what_cannot_be_located_is_refused_and_never_trained_whole():
    """A conversation whose turns cannot be located is refused; a mask of all ones would train on
    the question."""
    with pytest.raises(ConfigError, match="nothing to train"):
        trained(say("q", roles="u"))
    messages = say("a?", "<think>x</think>A <|im_start|>assistant\n", "b?", "B", roles="uaua")
    with pytest.raises(ConfigError, match="3 assistant headers for 2 assistant messages"):
        trained(messages, template=QWEN3_LIKE)
    for broken, words in (
        (type("Slow", (), {"is_fast": False})(), "fast tokenizer"),
        (make_char_tokenizer(chat_template=None), "chat template"),
    ):
        with pytest.raises(ValueError, match=words):
            MultiTurnLossMaskGenerator(broken)
    with pytest.raises(ConfigError, match="loss-mask-type"):
        MultiTurnLossMaskGenerator(make_char_tokenizer(), "other")


def test_media_in_front_shift_the_mask_and_media_behind_are_refused():
    """Image tokens in front of the text get zeros in front of the mask; image tokens behind it are
    refused."""
    generator = MultiTurnLossMaskGenerator(make_char_tokenizer())
    messages = say("q", "A")
    ids, mask = generator.get_loss_mask(messages)
    assert generator.get_loss_mask_with_multimodal_alignment(messages, [0, 0, *ids]) == (
        [0, 0, *ids],
        [0, 0, *mask],
    )
    with pytest.raises(ConfigError, match="cannot be aligned"):
        generator.get_loss_mask_with_multimodal_alignment(messages, [*ids, 0, 0])


@pytest.fixture
def sft(tmp_path):
    def build(rows, **overrides):
        make_char_tokenizer().save_pretrained(tmp_path / "model")
        path = tmp_path / "sft.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "hf_checkpoint": str(tmp_path / "model"),
            "prompt_data": str(path),
            "n_samples_per_prompt": 1,
            "label_key": None,
        }
        args = rollout_args(**{**values, "loss_type": "sft_loss", **overrides})
        return args, RolloutDataSourceWithBuffer(args)

    return build


def test_a_supervised_rollout_has_ids_masks_and_lengths_and_generates_nothing(sft):
    """Messages, and a prompt whose label is the answer, make the same sample without generation."""
    pairs = [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(4)]
    chats = [{"input": say(row["input"], row["label"])} for row in pairs]
    made = []
    for rows, label_key in ((pairs, "label"), (chats, None)):
        args, source = sft(rows, label_key=label_key)
        output = sft_rollout.generate_rollout(args, 0, source)
        made.append(
            [
                (s.tokens, s.loss_mask, s.response_length, s.reward, s.status)
                for (s,) in output.samples
            ]
        )
    assert made[0] == made[1] and len(made[0]) == 4
    tokens, mask, length, reward, status = made[0][3]
    text = "<|im_start|>user\n3+1=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert tokens == make_char_tokenizer()(text)["input_ids"] and mask == [1, 1, 1] and length == 3
    assert reward == 0 and status is Sample.Status.PENDING


def test_conversations_over_the_context_are_counted_and_a_rendered_prompt_is_refused(sft):
    """Conversations longer than the context are dropped and counted, and a prompt that was rendered
    to text is refused."""
    rows = [
        {"input": say("1", "2")},
        {"input": say("1" * 200, "2")},
        {"input": say("3", "4")},
        {"input": say("5", "6")},
    ]
    args, source = sft(rows, rollout_max_context_len=100)
    output = sft_rollout.generate_rollout(args, 0, source)
    assert len(output.samples) == 3 and output.dropped == {"too_long": 1}
    assert [(reason, [s.index for s in group]) for reason, group in output.dropped_groups] == [
        ("too_long", [1])
    ]
    args, source = sft(rows, apply_chat_template=True)
    with pytest.raises(ConfigError, match="--apply-chat-template"):
        sft_rollout.generate_rollout(args, 0, source)
    with pytest.raises(ValueError, match="no evaluation"):
        sft_rollout.generate_rollout(args, 0, source, evaluation=True)
    args, source = sft([{"input": "q"}])
    with pytest.raises(ConfigError, match="nothing to train"):
        sft_rollout.generate_rollout(args, 0, source)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"input": say("q", roles="u")}, {}, "without an assistant message has nothing to train"),
        ({"input": "q"}, {}, "without an assistant message has nothing to train"),
        (
            {"input": "q", "label": 7},
            {"label_key": "label"},
            "the label 7 is a int; supervised training needs a text",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a", "step_loss_mask": 0},
                ]
            },
            {},
            "step_loss_mask other than 1",
        ),
        (
            {"input": say("q", "a", "r", roles="uau")},
            {"loss_mask_type": "distill_qwen"},
            "trains the last message",
        ),
    ],
)
def test_a_row_with_nothing_to_train_is_named_with_its_line_when_the_data_are_read(
    sft, row, options, words
):
    """A row without a trainable turn is refused with its line when the data are read, and not hours
    later in the rollout."""
    good = {"input": say("1", "2"), "label": "2"}
    with pytest.raises(ConfigError) as caught:
        sft(
            [good, good, row, good],
            rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
            **options,
        )
    assert "sft.jsonl, line 3: " in str(caught.value) and words in str(caught.value)


def test_a_conversation_that_its_template_hides_is_named_by_its_sample(sft):
    """A conversation without a trainable token after rendering is refused with its sample's number
    at the rollout."""
    bad = say("a?", "<think>x</think>A <|im_start|>assistant\n", "b?", "B", roles="uaua")
    args, source = sft([{"input": bad if number == 2 else say("1", "2")} for number in range(4)])
    generator = MultiTurnLossMaskGenerator(make_char_tokenizer(chat_template=QWEN3_LIKE))
    samples = [group[0] for group in source.get_samples(4)]
    with pytest.raises(ConfigError, match=r"^sample 2 \(group 2\): "):
        sft_rollout.fill_samples(samples, generator)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
