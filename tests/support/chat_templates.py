"""Chat templates in the manner of published models, written out here, and tokenizers
that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.tiny_models import CHAT_TEMPLATE, make_char_tokenizer

CHATML = CHAT_TEMPLATE

# As Qwen3 does it: consecutive tool results share one user turn; reasoning before the last real
# user message is stripped.
QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(open=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

# As Llama 3 does it: BOS in front, content trimmed, tool results under the role ipython.
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + "
    "'<|end_header_id|>\n\n' }}"
    "{{- m.content | trim }}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)

# BOS and roles as text; only the assistant's turn has an end.
BOS_TEXT_ROLES = (
    "{{- bos_token }}{%- for m in messages %}{{- m.role | upper + ': ' + m.content }}"
    "{{- '<|eot_id|>' if m.role == 'assistant' else '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}"
)

# No end mark: a turn ends where the next role's tag begins.
NO_END = (
    "{%- for m in messages %}{{- '[' + m.role[0] + ']' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[a]' }}{%- endif %}"
)

# A tool result is written under the name of the call it answers, and without such a call it is
# refused.
NAMED_RESULTS = (
    "{%- for m in messages %}{{- '<|im_start|>' }}{%- if m.role == 'tool' %}"
    "{%- set call = messages[loop.index0 - 1].tool_calls[0] %}{{- call.name + ':' + m.content }}"
    "{%- else %}{{- m.role + ':' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '!' + call.name + '(' + call.arguments | tojson + "
    "')' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant:' }}{%- endif %}"
)


def chat_tokenizer(chat_template: str) -> Any:
    """The character tokenizer of tiny_models with this template; Llama's marks are special tokens
    as well.
    """
    tokenizer = make_char_tokenizer(chat_template=chat_template)
    tokenizer.add_special_tokens(
        {"bos_token": LLAMA3_TOKENS[0], "extra_special_tokens": list(LLAMA3_TOKENS[1:])}
    )
    return tokenizer


def bpe_tokenizer(chat_template: str, *, merges: Sequence[tuple[str, str]] = ()) -> Any:
    """A byte-pair tokenizer that knows he, llo and hello, and further `merges`: ids -> text -> ids
    is not the identity.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), *merges]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        token: index
        for index, token in enumerate([*specials, *alphabet, *("".join(pair) for pair in merges)])
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def space_first_tokenizer(chat_template: str) -> Any:
    """A character tokenizer in the manner of sentencepiece: a text's first word gets a space in
    front of it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "▁", *"[]uatqrA"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
