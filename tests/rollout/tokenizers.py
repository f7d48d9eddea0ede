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


# Role marks that are added tokens and not special, as DeepSeek's are.
UNMARKED = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
<@bot>{{ message['content'].split('</think>')[-1] | trim }}{% if message.tool_calls %}<call>{% endif %}<|end|>
{%- elif message['role'] == 'tool' -%}
<result>{{ message['content'] }}</result>
{%- else -%}
<@user>{{ message['content'] | trim }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<@bot><think>{% endif -%}"""
# The text of a message stands right beside parts of control tokens, and within JSON.
TIGHT = """\
{%- for message in messages -%}
<s>[{{ message['content'] }}]{{ message['content'] }}</s>{{ message | tojson(ensure_ascii=True) }}
{%- endfor -%}
{%- if add_generation_prompt %}<s>{% endif -%}"""


def _wrapped(backend: Any, template: str, special: list[Any], others: list[Any], **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)
    wrapped.add_special_tokens({"additional_special_tokens": special})
    wrapped.add_tokens(others)
    wrapped.chat_template = template
    return wrapped


def unmarked_tokenizer() -> Any:
    """Bytes, with tokens of a template that are not special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    others = ["<@user>", "<@bot>", "<think>", "</think>", "<call>", "<result>", "</result>"]
    return _wrapped(backend, UNMARKED, ["<|end|>"], others, eos_token="<|end|>")


def spaces_tokenizer() -> Any:
    """Pieces with a mark for the space before a word, as sentencepiece has them, also before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "\u2581", "\u2581a", *map(chr, range(33, 127)), "\n", "\u00e9"]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<|im_start|>", "<|im_end|>", "<s>", "[INST]", "T]", "1</s"]
    return _wrapped(backend, TIGHT, special, [], eos_token="</s>", unk_token="<unk>")


def lowercase_tokenizer() -> Any:
    """Control tokens are looked for in a text in small letters, from which some characters were removed."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, **{chr(i): i - 32 for i in range(33, 127)}}, unk_token="<unk>"))
    removed = normalizers.Replace(Regex("\u200b"), "")
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), removed])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = [AddedToken(token, normalized=True, special=True) for token in ("<|im_start|>", "<|im_end|>", "[SEP]")]
    return _wrapped(backend, HERMES, special, [], eos_token=AddedToken("<END>", normalized=True), unk_token="<unk>")


def slow_tokenizer(folder: Any = None) -> Any:
    """Characters, in Python."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        @property
        def vocab_size(self) -> int:
            return 0x3000

        def get_vocab(self) -> dict[str, int]:
            return {chr(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

        def _tokenize(self, text: str, **options: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token) if len(token) == 1 and ord(token) < self.vocab_size else 1

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

    tokenizer = Characters(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im", "_end|>"])
    tokenizer.chat_template = HERMES
    return tokenizer
