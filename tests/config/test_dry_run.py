"""The dry run tries prompts, template and reward, and starts nothing."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs, write_weights
from support.tiny_models import make_char_tokenizer

from slime.commands.dry_run import (
    dry_run,
    first_difference,
    format_layout,
    format_sizes,
    judge_rewards,
    marked_text,
    probe_template,
    template_difference,
)
from slime.config.derive import DerivedSizes
from slime.models.shape import read_model_shape
from slime.models.weight_shapes import expected_tensors
from slime.utils.arguments import parse_args

NUM_GPUS = 0

STRIPPING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ "
    "message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)
MERGING_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'tool' or loop.first or messages[loop.index0 - 1]['role'] != 'tool' "
    "%}<|im_start|>{{ message['role'] }}\n{% endif %}"
    "{{ message['content'] }}"
    "{% if message['role'] != 'tool' or loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}{% endfor %}"
)


def run_inputs_with_tokenizer(folder, **tokenizer_options):
    words = write_run_inputs(folder)
    make_char_tokenizer(**tokenizer_options).save_pretrained(folder / "model")
    write_weights(folder / "model", dict(expected_tensors(read_model_shape(folder / "model"))))
    return [*words, "--apply-chat-template", "--dry-run"]


def test_a_prefix_is_told_from_a_change():
    """The comparison tells a render that only appends from one that changes earlier tokens."""
    assert first_difference([1, 2], [1, 2, 3]) is None
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3, 4]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) is None


def test_a_template_that_keeps_earlier_turns_passes():
    """A template that only appends, such as ChatML, passes."""
    lines, is_stable = probe_template(make_char_tokenizer(), {})
    assert is_stable and [line[0] for line in lines] == ["✓", "✓"]


def test_a_template_that_strips_earlier_thoughts_is_found_with_the_token():
    """A template that strips earlier reasoning is found with the first changed token; training on
    its second render would use tokens that were never sampled."""
    lines, is_stable = probe_template(make_char_tokenizer(chat_template=STRIPPING_TEMPLATE), {})
    assert not is_stable
    assert lines[0].startswith("✗ a user turn after an answer changes earlier tokens: token ")
    tokenizer = make_char_tokenizer(chat_template=STRIPPING_TEMPLATE)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>y"},
        {"role": "user", "content": "b"},
    ]
    # <|im_start|>user\na<|im_end|>\n is 9 tokens, <|im_start|>assistant\n is 11: position 20 held
    # the first thought, now the answer.
    difference = template_difference(tokenizer, messages, 2, {})
    assert difference.startswith(
        f"token 20 was {tokenizer.convert_tokens_to_ids('<')} '<' and became "
        f"{tokenizer.convert_tokens_to_ids('y')} 'y'"
    )


def test_a_template_that_merges_tool_results_is_found():
    """A template that merges tool results is found: a second tool message removes the first one's
    end."""
    lines, is_stable = probe_template(make_char_tokenizer(chat_template=MERGING_TEMPLATE), {})
    assert (
        not is_stable
        and lines[0].startswith("✓")
        and lines[1].startswith("✗ a second tool result changes earlier tokens")
    )


def test_a_template_that_cannot_render_a_role_is_not_an_error():
    """A template without a tool role is no error."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') "
        "}}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    lines, is_stable = probe_template(make_char_tokenizer(chat_template=template), {})
    assert (
        is_stable
        and lines[1] == "- a second tool result: the template does not render it (no tools)"
    )


def test_rewards_are_judged():
    """A reward that raises, returns a text, or does not tell right from wrong is reported."""
    texts = ["3", "boxed", "wrong"]
    assert judge_rewards(texts, [1, 0, 0], None)[1] is True
    assert judge_rewards(texts, [{"score": 1.0}, {"score": 0.0}, {"score": 0.0}], "score")[0][
        -1
    ].startswith("✓")
    lines, works = judge_rewards(texts, [0, 0, 0], None)
    assert works and lines[-1].startswith("!")
    lines, works = judge_rewards(texts, [ValueError("no digit"), 0, 0], None)
    assert not works and lines[-1] == "✗ the reward function failed: ValueError: no digit"
    lines, works = judge_rewards(texts, [{"score": 1.0}] * 3, None)
    assert not works and "--reward-key" in lines[-1]


def test_sizes_and_layout_are_written_out():
    """Each batch size and the layout are printed with one name and one number."""
    sizes = DerivedSizes(16, 8, 128, 64, 2, 32.0, 4, 2, 2, 1, 1, 2, 1)
    assert format_sizes(sizes)[-1] == "16 prompts x 8 = 128 samples = 2 optimizer steps x 64"
    lines = format_layout(sizes, ranks_per_node=4, is_colocated=False)
    assert lines[1].split() == ["0", "0", "0", "0", "0", "0"] and lines[4].split() == [
        "3",
        "0",
        "1",
        "0",
        "1",
        "0",
    ]
    assert lines[-2:] == ["engine 0: device 4", "engine 1: device 5"]
    assert format_layout(sizes, ranks_per_node=4, is_colocated=True)[-1] == "engine 1: device 1"


def test_the_whole_dry_run_shows_everything_and_returns_0(tmp_path, capsys):
    """The whole dry run shows every section and returns 0."""
    args = parse_args(run_inputs_with_tokenizer(tmp_path))
    assert args.dry_run is True and dry_run(args) == 0
    page = capsys.readouterr().out
    for part in (
        "nothing is started", "11 options given: 11 honoured, 0 mapped, 0 ignored, 0 refused", "global_batch_size", "derived",
        "4 prompts x 2 = 8 samples = 1 optimizer steps x 8", "engine 0: device 1", "✓ a user turn after an answer keeps all earlier tokens",
        "0: 23 tokens, label '1'", "| <|im_start|>assistant", "✓ a right answer scores above a wrong one",
        "✓ 10 of 10 rows: a right answer scores above a wrong one",
    ):  # fmt: skip
        assert part in page, part
    again = parse_args(["--config", str(tmp_path / "run" / "config.yaml")])
    assert (again.rollout_batch_size, again.global_batch_size, again.dry_run) == (4, 8, False)


def test_labels_that_the_reward_type_can_never_call_right_fail_the_dry_run(tmp_path, capsys):
    """Labels that the reward type can never match fail the dry run; one such row among others is
    named and does not."""
    words = run_inputs_with_tokenizer(tmp_path)
    metadata = {"rm_type": "gpqa", "choices": ["3", "4"]}  # Q is none of A and B
    rows = [
        {"input": [{"role": "user", "content": "2+2="}], "label": "B", "metadata": metadata}
        for _ in range(30)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps(row) + "\n" for row in [{**rows[0], "label": "Q"}, *rows])
    )
    assert dry_run(parse_args(words)) == 0
    page = capsys.readouterr().out
    assert (
        "! 19 of 20 rows: a right answer scores above a wrong one" in page
        and "prompts.jsonl, line 1: label" in page
    )
    prompts.write_text("".join(json.dumps({**row, "label": "Q"}) + "\n" for row in rows))
    assert dry_run(parse_args(words)) == 1
    assert "✗ 0 of 20 rows" in capsys.readouterr().out


def test_a_reward_that_raises_fails_the_dry_run(tmp_path, capsys, monkeypatch):
    """A reward that raises fails the dry run."""
    (tmp_path / "my_broken_reward.py").write_text(
        "async def score(args, sample, **kwargs):\n    raise KeyError('answer')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    args = parse_args(
        [*run_inputs_with_tokenizer(tmp_path), "--custom-rm-path", "my_broken_reward.score"]
    )
    assert dry_run(args) == 1
    assert "✗ the reward function failed: KeyError: 'answer'" in capsys.readouterr().out


def test_supervised_conversations_are_shown_as_they_are_trained(tmp_path, capsys):
    """Supervised conversations are shown with their mask and without a generation prompt: 2
    characters, the end token and the newline behind it are trained."""
    words = run_inputs_with_tokenizer(tmp_path)
    rows = [
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2!"}]}
    ] * 10
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drop = (
        "--apply-chat-template",
        "--rm-type",
        "exact_match",
        "--label-key",
        "label",
        "--rollout-max-response-len",
        "8",
    )
    words = [word for word in words if word not in drop]
    words += "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --input-key messages".split()
    words += "--debug-train-only --disable-compute-advantages-and-returns --n-samples-per-prompt 1".split()
    assert dry_run(parse_args(words)) == 0
    shown = capsys.readouterr().out
    assert "4 of them trained" in shown
    assert (
        "   | <|im_start|>user\n     | 1+1=<|im_end|>\n     | <|im_start|>assistant\n     | "
        "[[2!<|im_end|>\n     | ]]" in shown
    )
    assert shown.count("<|im_start|>assistant") == 3, "one per conversation, and none behind it"
    assert marked_text([15, 16, 17], [1, 0, 1], make_char_tokenizer()) == "[[a]]b[[c]]"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
