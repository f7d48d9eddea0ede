"""Tiny tokenizers with chat templates like those of large models."""

from __future__ import annotations

from typing import Any

HERMES = """\
{%- if tools or messages[0]['role'] == 'system' -%}
<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{%- if tools %}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message['content'] }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>
{% endif -%}
{%- elif message['role'] in ('user', 'assistant') -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% elif message['role'] != 'system' -%}
{{ raise_exception('no such role: ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
# As some do: thoughts of earlier turns are left out, so that a conversation changes as it grows.
FORGETFUL = HERMES.replace(
    "{{ message['content'] }}<|im_end|>",
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|im_end|>",
)
# With a place for the calls of earlier turns.
CALLING = HERMES.replace(
    "{{ message['content'] }}<|im_end|>",
    """{{ message['content'] }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>""",
)
STRICT = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]
{%- elif message['role'] == 'assistant' %} {{ message['content'] }}
{%- if message['tool_calls'] is defined %}[TOOL_CALLS]{{ message['tool_calls'] | length }}{% endif %}</s>
{%- elif message['role'] == 'tool' and (loop.previtem['role'] == 'tool' or loop.previtem['tool_calls'] is defined) %}
{{- '[TOOL_RESULTS]' -}}
{{- message['tool_call_id'] }} {{ message['content'] }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('a tool without a call') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1]['role'] == 'tool' %}|{% endif %}"""


def byte_tokenizer(template: str | None = HERMES, *, merges: bool = True) -> Any:
    """Bytes, with some pairs of them merged, so that the same text has several tokenisations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("1", "2"), ("a", "d"), ("ad", "d"), ("\u010a", "\u010a"), ("e", "r"), ("{", '"'), ("o", "l")]
    pairs = pairs if merges else []
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped
