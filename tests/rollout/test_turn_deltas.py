"""Multi-turn responses: sampled ids stay, everything else is masked, and a template that changes
earlier turns is detected."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import (
    BOS_TEXT_ROLES,
    CHATML,
    LLAMA3,
    NAMED_RESULTS,
    NO_END,
    QWEN3,
    bpe_tokenizer,
    chat_tokenizer,
    space_first_tokenizer,
)

from slime.data.sample import Sample
from slime.data.structure import flatten_samples, validate_rollout_id_annotated
from slime.exceptions import ConfigError, RolloutDataError
from slime.prompts.chat_render import ChatTemplate
from slime.rollout.turns import (
    _without_emitted_ids,
    append_turn_delta,
    compute_turn_delta,
    turn_text,
)

NUM_GPUS = 0

END_MARKS = {
    CHATML: "<|im_end|>",
    QWEN3: "<|im_end|>",
    LLAMA3: "<|eot_id|>",
    BOS_TEXT_ROLES: "<|eot_id|>",
    NO_END: "",
}
NAMES = {
    CHATML: "chatml",
    QWEN3: "qwen3",
    LLAMA3: "llama3",
    BOS_TEXT_ROLES: "bos",
    NO_END: "no end mark",
}
TEMPLATES = {text: ChatTemplate(chat_tokenizer(text)) for text in END_MARKS}
every_template = pytest.mark.parametrize("name", END_MARKS, ids=NAMES.get)


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


class Rollout:
    """A rollout whose engine is this test: `turn` samples given ids and answers with given
    messages.
    """

    def __init__(self, template, *prompt, index=7, on_rerender="keep"):
        self.template, self.messages, self.on_rerender = template, list(prompt), on_rerender
        text = template.render(self.messages, add_generation_prompt=True)
        self.sample = Sample(index=index, tokens=template.encode(text), prompt=list(prompt))
        self.rows, self.sampled, self.deltas = [self.sample], [], []

    def sampled_turn(self, sampled, message):
        ids = self.template.encode(sampled) if isinstance(sampled, str) else list(sampled)
        self.sampled.append(ids)
        self.messages.append(assistant(message) if isinstance(message, str) else message)
        log_probs = [-(position + 1) / 8 for position in range(len(ids))]
        context = list(self.sample.tokens)
        self.sample.append_response_tokens(
            tokens=ids, log_probs=log_probs, text=self.template.decode(ids)
        )
        return context, ids

    def turn(self, sampled, message, *new_messages, **options):
        context, ids = self.sampled_turn(sampled, message)
        delta = compute_turn_delta(
            context,
            ids,
            template=self.template,
            messages=self.messages,
            new_messages=list(new_messages),
            **options,
        )
        self.messages += new_messages
        self.deltas.append(delta)
        self.sample = append_turn_delta(self.sample, delta, on_rerender=self.on_rerender)
        if self.sample is not self.rows[-1]:
            self.rows.append(self.sample)
        return delta

    @property
    def full_ids(self):
        return self.template.encode(self.template.render(self.messages, add_generation_prompt=True))

    @property
    def trained(self):
        sample = self.sample
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        return [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]


# --- the boundary of a turn -----------------------------------------------------------------------


def test_tokens_he_llo_stay_two_tokens_in_the_next_prompt():
    """Sampled ids stay as they are in the next turn's prompt; decoding and encoding again would
    turn [he, llo] into [hello]."""
    template = ChatTemplate(bpe_tokenizer(CHATML))
    he, llo, hello, end = template.tokenizer.convert_tokens_to_ids(
        ["he", "llo", "hello", "<|im_end|>"]
    )
    assert template.encode("hello") == [hello] and template.decode([he, llo]) == "hello"
    rollout = Rollout(template, user("q"))
    prompt = list(rollout.sample.tokens)
    delta = rollout.turn([he, llo, end], "hello", tool("hello"))
    assert rollout.sample.tokens[: len(prompt) + 3] == [*prompt, he, llo, end]
    assert hello in delta.token_ids and delta.rerender is None
    assert rollout.sample.loss_mask == [1, 1, 1] + [0] * len(delta.token_ids)


@every_template
def test_ids_of_three_tool_turns_equal_the_whole_render(name):
    """The ids of three tool turns equal the whole render; one lost separator per boundary (Qwen's
    newline, id 198) would make them three short."""
    template, end = TEMPLATES[name], END_MARKS[name]
    rollout = Rollout(template, user("2+3+4+5="))
    for call, result in (("2+3", "5"), ("5+4", "9"), ("9+5", "14")):
        delta = rollout.turn(call + end, call, tool(result))
        assert rollout.sample.tokens == rollout.full_ids and delta.rerender is None
    rollout.sampled_turn("14" + end, "14")
    sample = rollout.sample
    assert sum(sample.loss_mask) == len(template.encode(f"2+3{end}5+4{end}9+5{end}14{end}"))
    assert rollout.trained == [token for ids in rollout.sampled for token in ids]
    assert sample.response == template.decode(sample.tokens[-sample.response_length :])


def test_the_separator_that_the_model_never_emits_is_added_and_masked():
    """The newline behind <|im_end|>, which the model never emits, is added and masked."""
    delta = Rollout(TEMPLATES[CHATML], user("q")).turn("A<|im_end|>", "A", tool("r"))
    assert delta.text == "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"


def test_parallel_tool_results_share_a_turn_and_serial_ones_do_not():
    """Qwen3 merges consecutive tool results into one user turn, and so does the delta."""
    template = TEMPLATES[QWEN3]
    parallel = Rollout(template, user("q"))
    delta = parallel.turn("c1c2<|im_end|>", "c1c2", tool("r1"), tool("r2"))
    response = "\n<tool_response>\n{}\n</tool_response>"
    header = "<|im_end|>\n<|im_start|>assistant\n"
    assert (
        delta.text == "\n<|im_start|>user" + response.format("r1") + response.format("r2") + header
    )
    assert parallel.sample.tokens == parallel.full_ids
    serial = Rollout(template, user("q"))
    for number in "12":
        delta = serial.turn(f"c{number}<|im_end|>", f"c{number}", tool(f"r{number}"))
        assert delta.text == "\n<|im_start|>user" + response.format(f"r{number}") + header
    assert serial.sample.tokens == serial.full_ids


THINK_AND_CALL = "<think>\n12</think>c<|im_end|>"  # 20 ids with the character tokenizer


@pytest.mark.parametrize("policy", ["keep", "fork"])
def test_reasoning_that_the_template_strips_is_kept_or_forked_and_never_cut(policy):
    """Reasoning that the template strips later is kept, or the sample is forked; an observation is
    never cut by offsets of an earlier render."""
    template = TEMPLATES[QWEN3]
    assert len(template.encode(THINK_AND_CALL)) == 20
    rollout = Rollout(template, user("q"), on_rerender=policy)
    first = rollout.sample
    delta = rollout.turn(THINK_AND_CALL, THINK_AND_CALL.removesuffix("<|im_end|>"), user("result"))
    rollout.sampled_turn("yes<|im_end|>", "yes")
    assert delta.rerender is not None and "'<think>" in str(delta.rerender)
    texts = [template.decode(row.tokens) for row in rollout.rows]
    assert all(
        "<|im_start|>user\nresult<|im_end|>\n<|im_start|>assistant\n" in text for text in texts
    )
    assert first.tokens[-first.response_length :][:20] == template.encode(THINK_AND_CALL)
    if policy == "keep":
        assert len(rollout.rows) == 1 and sum(first.loss_mask) == 20 + 4
        return
    kept, forked = rollout.rows
    assert kept is first and (kept.rollout_id, forked.rollout_id, forked.index) == (7, 7, 7)
    assert (sum(kept.loss_mask), sum(forked.loss_mask), forked.response_length) == (20, 4, 4)
    assert "<think>" not in texts[1] and texts[1].startswith(
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )
    assert forked.tokens[:-4] == delta.rerender.token_ids


def test_reasoning_inside_a_tool_loop_stays_and_nothing_is_forked():
    """Reasoning inside a tool loop stays, since Qwen3 strips only what stands before the last user
    message; nothing is forked."""
    rollout = Rollout(TEMPLATES[QWEN3], user("q"), on_rerender="fork")
    sampled = "<think>\nx\n</think>\n\ncall"
    assert rollout.turn(sampled + "<|im_end|>", sampled, tool("r")).rerender is None
    assert len(rollout.rows) == 1 and rollout.sample.tokens == rollout.full_ids


def test_reasoning_given_as_its_own_key_and_calls_as_json_are_not_looked_for_behind_the_turn():
    """reasoning_content and tool_calls of an API message are not rendered a second time; their text
    was sampled."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = assistant("", reasoning_content="x", tool_calls=[call])
    sampled = (
        '<think>\nx\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'
    )
    rollout = Rollout(TEMPLATES[QWEN3], user("q"))
    delta = rollout.turn(sampled + "<|im_end|>", message, tool("r"))
    assert (
        delta.text.startswith("\n<|im_start|>user\n<tool_response>\nr") and "add" not in delta.text
    )
    # the only difference is how the template writes the arguments: {"a": 1}
    assert (delta.rerender.kept[:2], delta.rerender.rendered[:2]) == ("1}", " 1")


def test_assistant_turns_of_the_prompt_are_not_trained():
    """Assistant turns of the prompt are not trained: of prompt, 4 + 2 sampled tokens and 5 of a
    tool, 6 are trained."""
    rollout = Rollout(TEMPLATES[NO_END], user("q"), assistant("abc"), user("p"))
    delta = rollout.turn("defg", "defg", tool("result"))
    assert delta.text == "[t]result[a]"
    rollout.sampled_turn("hi", "hi")
    sample = rollout.sample
    assert sum(sample.loss_mask) == 6 and sample.response_length == 4 + len(delta.token_ids) + 2
    assert [log_prob for log_prob in sample.rollout_log_probs if log_prob] == [
        -0.125,
        -0.25,
        -0.375,
        -0.5,
        -0.125,
        -0.25,
    ]


@pytest.mark.parametrize(
    ("behind", "sampled", "left"),
    [
        ([9, 8, 3], [5, 9], [8, 3]),
        ([9, 8, 3], [5, 9, 8], [3]),
        ([9, 9, 3], [5, 9, 9], [3]),  # a turn that ends with two equal ids: both were sampled
        ([9, 8, 3], [5], [9, 8, 3]),
    ],
)
def test_all_that_was_sampled_of_a_turns_end_is_left_out_of_the_delta(behind, sampled, left):
    """What the model sampled of the turn's end is not repeated in the delta."""
    assert _without_emitted_ids(behind, sampled, ()) == left


def test_an_end_token_that_the_model_did_not_emit_has_mask_0():
    """After a stop string the template's end token is added with mask 0."""
    rollout = Rollout(TEMPLATES[CHATML], user("q"))
    delta = rollout.turn("ab", "ab", tool("r"))
    end = TEMPLATES[CHATML].tokenizer.eos_token_id
    assert delta.token_ids[0] == end
    assert rollout.sample.loss_mask[:3] == [1, 1, 0] and rollout.sample.rollout_log_probs[:3] == [
        -0.125,
        -0.25,
        0.0,
    ]
    assert rollout.sample.tokens == rollout.full_ids and sum(rollout.sample.loss_mask) == 2


def test_another_end_token_than_the_templates_ends_the_turn_where_it_is_declared():
    """A declared second end token, such as Llama 3's <|eom_id|>, ends the turn without the
    template's own behind it."""
    template = TEMPLATES[LLAMA3]
    eom, eot = template.tokenizer.convert_tokens_to_ids(["<|eom_id|>", "<|eot_id|>"])
    sampled = [*template.encode("call"), eom]
    declared = Rollout(template, user("q")).turn(sampled, "call", tool("r"), end_token_ids={eom})
    undeclared = Rollout(template, user("q")).turn(sampled, "call", tool("r"))
    assert undeclared.token_ids == [eot, *declared.token_ids]
    assert declared.rerender.kept.startswith(
        "m_id|><|start"
    ) and declared.rerender.rendered.startswith("t_id|><|start")


@pytest.mark.parametrize(
    ("sampled", "delta_text"),
    [("A[u]", "more[a]"), ("A", "[u]more[a]"), ("A[", "[u]more[a]"), ("[u]", "more[a]")],
    ids=["tag emitted", "stopped by length", "half a tag is content", "nothing but the tag"],
)
def test_a_role_tag_that_ends_the_turn_is_trained_when_it_was_emitted_and_never_doubled(
    sampled, delta_text
):
    """A role tag that the model emitted as the turn's end is trained and stands there once."""
    rollout = Rollout(TEMPLATES[NO_END], user("u"))
    content = turn_text(
        TEMPLATES[NO_END].encode(sampled), template=TEMPLATES[NO_END], stops=["[u]"]
    )
    delta = rollout.turn(sampled, content, user("more"))
    assert delta.text == delta_text and delta.rerender is None
    assert rollout.template.decode(rollout.trained) == sampled


def test_a_tag_emitted_in_other_tokens_or_without_its_space_is_not_doubled():
    """A tag emitted in other tokens, or without the space behind it, is not repeated."""
    template_text = (
        "{% for m in messages %}{{ '\\n' + m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nassistant:' }}{% endif %}"
    )
    template = ChatTemplate(bpe_tokenizer(template_text))
    rollout = Rollout(template, user("hello"))
    delta = rollout.turn(" hello\nuser:", "hello", user("hello"))
    assert delta.text == " hello\nassistant:" and delta.rerender is None


def test_a_tool_result_is_written_under_the_call_it_answers():
    """A tool result is rendered together with its call, because some templates refuse it alone."""
    template = ChatTemplate(chat_tokenizer(NAMED_RESULTS))
    call = {"name": "add", "arguments": {"a": 1}}
    rollout = Rollout(template, user("q"))
    for result in ("r1", "r2"):
        delta = rollout.turn(
            'so!add({"a": 1})<|im_end|>', assistant("so", tool_calls=[call]), tool(result)
        )
        assert delta.text == f"<|im_start|>add:{result}<|im_end|><|im_start|>assistant:"
        assert rollout.sample.tokens == rollout.full_ids
    with pytest.raises(
        RolloutDataError, match=r"cannot render the roles \['user', 'assistant', 'tool'\]"
    ):
        Rollout(template, user("q")).turn("so<|im_end|>", "so", tool("r"))


def test_tokenizers_that_put_a_space_before_the_first_word_do_not_put_one_before_a_delta():
    """Sentencepiece tokenizers, which put a space before a text, put none before a delta."""
    template = ChatTemplate(space_first_tokenizer(NO_END))
    space = template.tokenizer.convert_tokens_to_ids("▁")
    assert template.encode("[u]")[0] == space
    rollout = Rollout(template, user("q"))
    delta = rollout.turn(template.encode("A")[1:], "A", user("r"))
    assert space not in delta.token_ids and rollout.sample.tokens == rollout.full_ids


# --- what cannot be handled, and policies ---------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}",  # content is not shown
        "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",  # shown twice
        # what follows depends on it
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content | length }}",
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}{{ messages[1].content[:1] }}",
    ],
    ids=["hidden", "twice", "length behind", "first letter behind"],
)
def test_a_template_that_does_not_show_where_a_turn_ends_is_refused(body):
    """A template that does not show where a turn ends is refused with what to do instead."""
    template = ChatTemplate(chat_tokenizer(body))
    with pytest.raises(RolloutDataError, match=r"does not show where turn 1 ends.*build the ids"):
        compute_turn_delta(
            [9],
            [8],
            template=template,
            messages=[user("q"), assistant("A")],
            new_messages=[tool("r")],
        )


def test_a_delta_needs_a_sampled_turn_before_and_a_message_behind_it():
    """A delta without a sampled turn before it, or a message behind it, is refused."""
    template = TEMPLATES[CHATML]
    for messages, new in (
        ([user("q")], [tool("r")]),
        ([user("q"), assistant("A")], []),
        ([], [tool("r")]),
    ):
        with pytest.raises(RolloutDataError, match="a turn delta lies between"):
            compute_turn_delta([9], [8], template=template, messages=messages, new_messages=new)


def test_a_changed_history_can_be_refused_and_leaves_the_sample_alone():
    """By option a template that changes the history is an error, and the sample stays as it was."""
    rollout = Rollout(TEMPLATES[QWEN3], user("q"), on_rerender="refuse")
    with pytest.raises(
        RolloutDataError, match="sample 7: the conversation is not what was sampled: from character"
    ):
        rollout.turn(THINK_AND_CALL, THINK_AND_CALL.removesuffix("<|im_end|>"), user("r"))
    assert rollout.sample.response_length == 20
    with pytest.raises(ConfigError, match="on_rerender is 'merge'"):
        append_turn_delta(
            rollout.sample, rollout.deltas[0] if rollout.deltas else None, on_rerender="merge"
        )


def test_a_fork_keeps_identity_and_metadata_and_nothing_generated():
    """A forked sample keeps identity and metadata and nothing generated, and shares the loss
    denominator through rollout_id; without any identity it is refused."""
    rollout = Rollout(TEMPLATES[QWEN3], user("q"), index=3, on_rerender="fork")
    rollout.sample.metadata["round_number"] = 1
    rollout.sample.reward = 1.0
    rollout.turn(THINK_AND_CALL, THINK_AND_CALL.removesuffix("<|im_end|>"), user("r"))
    first, second = rollout.rows
    assert (second.rollout_id, second.index, second.metadata) == (3, 3, {"round_number": 1})
    assert (second.reward, second.response, second.loss_mask, second.status) == (
        None,
        "",
        None,
        Sample.Status.PENDING,
    )
    second.metadata["round_number"] = 2
    assert first.metadata == {"round_number": 1}
    nameless = Rollout(TEMPLATES[QWEN3], user("q"), index=None, on_rerender="fork")
    with pytest.raises(RolloutDataError, match="cannot be forked"):
        nameless.turn(THINK_AND_CALL, THINK_AND_CALL.removesuffix("<|im_end|>"), user("r"))


def test_forked_samples_share_one_loss_denominator_and_one_baseline_entry():
    """Forked samples share one denominator and one entry of the baseline: 20 + 4 trained tokens,
    rewards normalized over two rollouts."""
    from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards

    forked = Rollout(TEMPLATES[QWEN3], user("q"), index=7, on_rerender="fork")
    forked.turn(THINK_AND_CALL, THINK_AND_CALL.removesuffix("<|im_end|>"), user("result"))
    forked.sampled_turn("yes<|im_end|>", "yes")
    plain = Rollout(TEMPLATES[QWEN3], user("q"), index=8)
    plain.sampled_turn("no<|im_end|>", "no")
    output = [[forked.rows, [plain.sample]]]
    samples = flatten_samples(output)
    for sample, reward in zip(samples, (1.0, 1.0, 0.0), strict=True):
        sample.reward, sample.status, sample.group_index = reward, Sample.Status.COMPLETED, 0
    validate_rollout_id_annotated(output)
    config = ColumnsConfig(divide_by_std=False)
    rewards = compute_rewards(samples, config)[:2]
    batch = build_train_columns(samples, rewards, config)
    ids = list(batch["rollout_ids"])
    assert ids[0] == ids[1] == 7 != ids[2] and [
        int(mask.sum()) for mask in batch["loss_masks"]
    ] == [20, 4, 3]
    assert rewards[1] == [0.5, 0.5, -0.5]


def test_words_of_the_conversation_are_never_taken_for_the_probe():
    """A tool result that contains the probe's word is not taken for the probe."""
    rollout = Rollout(TEMPLATES[CHATML], user("Zq0jX"))
    delta = rollout.turn("Zq1jX<|im_end|>", "Zq1jX", tool("Zq2jX Zq0jX"))
    assert "Zq2jX Zq0jX<|im_end|>" in delta.text and rollout.sample.tokens == rollout.full_ids


def test_the_text_of_a_turn_has_no_end_marks_and_no_padding():
    """The text that rewards and parsers read has no end mark and no padding."""
    template = TEMPLATES[CHATML]
    answer = "<think>x</think><answer>4</answer>"
    assert (
        turn_text(template.encode(answer + "<|im_end|>" + "<|pad|>" * 3), template=template)
        == answer
    )
    assert turn_text(template.encode("4</s>"), template=template, stops=["s>", "</s>", ""]) == "4"
    assert turn_text(template.encode("<|im_end|>"), template=template) == ""


# --- any ids, any template ------------------------------------------------------------------------


BPE = {name: ChatTemplate(bpe_tokenizer(name)) for name in (CHATML, NO_END)}
turns = st.lists(
    st.tuples(st.lists(st.integers(3, 262), max_size=8), st.booleans()), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(BPE)),
    turns,
    st.text("helo \n[u]", max_size=6),
    st.sampled_from(["keep", "fork"]),
)
def test_whatever_is_sampled_is_stored_as_sampled(name, sampled_turns, result, policy):
    """Random ids, which mostly no text encodes to, are stored as sampled, with mask and log-probs
    of the same length."""
    template = BPE[name]
    rollout = Rollout(template, user("hello"), on_rerender=policy)
    num_rows = {}
    for ids, ends in sampled_turns:
        ids = ids + [template.tokenizer.eos_token_id] * ends
        row = len(rollout.rows)
        num_rows[row] = num_rows.get(row, []) + ids
        rollout.turn(ids, turn_text(ids, template=template), tool(result))
    for number, row in enumerate(rollout.rows, start=1):
        response = row.tokens[len(row.tokens) - row.response_length :]
        mask = row.loss_mask or []
        assert len(mask) == len(row.rollout_log_probs or []) == row.response_length
        assert [t for t, m in zip(response, mask, strict=True) if m] == num_rows.get(number, [])
        assert all(
            (p < 0) == bool(m) for p, m in zip(row.rollout_log_probs or [], mask, strict=True)
        )


results = st.lists(st.text("0123 \nab", max_size=4), min_size=1, max_size=3)
calls = st.lists(st.tuples(st.text("0123456789+= ", max_size=5), results), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([CHATML, BOS_TEXT_ROLES, NO_END, QWEN3]), calls)
def test_append_only_templates_give_the_whole_render_whatever_is_said(name, conversation):
    """With an append-only template the ids equal the whole render, for random calls and parallel
    results with white space at their borders."""
    template, end = TEMPLATES[name], END_MARKS[name]
    rollout = Rollout(template, user("q"))
    for call, results in conversation:
        delta = rollout.turn(call + end, call, *map(tool, results))
        assert delta.rerender is None and rollout.sample.tokens == rollout.full_ids


def test_tools_and_template_arguments_reach_every_render():
    """Tools and template arguments are in every render."""
    template = ChatTemplate(chat_tokenizer(QWEN3), [{"name": "add"}], {"enable_thinking": False})
    rollout = Rollout(template, user("q"))
    prompt = template.decode(rollout.sample.tokens)
    assert json.dumps({"name": "add"}) in prompt and prompt.endswith("<think>\n\n</think>\n\n")
    delta = rollout.turn("A<|im_end|>", "A", user("r"))
    assert delta.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert delta.rerender.kept.startswith(
        "<think>\n\n</think>\n\nA"
    ) and delta.rerender.rendered.startswith("A<|im_end|>")


def test_the_code_in_the_documentation_runs():
    """The code of docs/multi_turn.md runs."""
    page = Path(__file__).resolve().parents[2] / "docs" / "multi_turn.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert code.count("assert") == 3
    exec(compile(code, str(page), "exec"), {})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
