"""The capabilities of a completions server, found out by probing it; requests and answers as the server has them.

The protocol leaves out what training needs: which token it was, and what a log-prob is the logarithm of. Some servers
name tokens by their ids, others by their texts; some give log-probs before temperature, others after it, others after
top-k and top-p too. None of them says which. So a few requests for one token find out, before anything is written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from practicum.errors import RolloutError
from practicum.rollout.engine.sequence import Sequence
from practicum.rollout.remote.client import ServerFailure, Transport, chosen_log_probs, token_names
from practicum.types import SamplingParams

_PROBE_S = 60.0
_TINY_TOP_P = 1e-3
# Log-probs this close are equal: far more than rounding, far less than what halving a temperature does.
_EQUAL = 1e-3
# A first token as certain as this one stays so at every temperature and tells nothing.
_CERTAIN = -0.02
_NUM_PROBES = 8
_REFUSED = (400, 404, 422)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a server."""

    model: str
    owner: str
    max_tokens: int | None
    """The room for prompt and answer together; None where the server does not say."""
    has_extensions: bool
    """Whether it knows what vLLM has beside the protocol: top_k, stop_token_ids, ignore_eos, return_token_ids."""
    is_tempered: bool
    """Whether log-probs are those after temperature."""
    is_filtered: bool | None = None
    """Whether log-probs are those after top-k and top-p. None: not probed yet, since nobody wanted filters."""

    @property
    def can_number_answers(self) -> bool:
        """True if the answers to one request are drawn with seeds that follow each other."""
        return self.owner in ("vllm", "practicum")

    def check(self, params: SamplingParams, server: str) -> None:
        """Raise `RolloutError` for what it cannot do, or what its log-probs would be wrong for."""
        if not self.has_extensions and (params.top_k > 0 or params.ignore_eos):
            asked = "top_k" if params.top_k > 0 else "ignore_eos"
            raise RolloutError(f"server {server} knows only the bare completions protocol, which has no {asked}.")
        if params.temperature == 0:
            return
        if params.temperature != 1 and not self.is_tempered:
            raise RolloutError(
                f"server {server} gives log-probs from before temperature: with temperature={params.temperature:g} "
                "they would not be those the tokens were drawn with. Use temperature=1, or a server that gives them "
                "after temperature (vLLM: --logprobs-mode processed_logprobs)."
            )
        if has_filters(params) and self.is_filtered:
            raise RolloutError(
                f"server {server} gives log-probs from after top-k and top-p, which the trainer does not apply. Leave "
                "top_k at 0 and top_p at 1, or use a server that gives them from before (vLLM: --logprobs-mode "
                "raw_logprobs, with temperature=1)."
            )

    def body(self, first: Sequence, num: int, eos_ids: Iterable[int]) -> dict[str, Any]:
        """Return the request for the answer `first` and those that follow it in number."""
        params = first.params
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": first.ids.tolist(),
            "max_tokens": params.max_new_tokens - first.num_written,
            "temperature": params.temperature,
            "top_p": params.top_p if params.temperature > 0 else 1.0,
            "n": num,
            "seed": seed_of(first),
        } | extras(self.owner, self.has_extensions)
        if self.has_extensions:
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
            body |= {
                "top_k": params.top_k if params.temperature > 0 else 0,
                "ignore_eos": params.ignore_eos,
                "stop_token_ids": sorted(stop_ids),
                # A text that began in the part written before is found here; the server sees the rest only.
                "stop": list(params.stop),
            }
        return body


def has_filters(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def extras(owner: str, has_extensions: bool) -> dict[str, Any]:
    """Return what is the same in every request: token ids and log-probs are asked for, and nothing else is changed."""
    if not has_extensions:
        return {"logprobs": 1}
    # A model's saved generation settings would count where a request is silent.
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    fields: dict[str, Any] = {"return_token_ids": True, "include_stop_str_in_output": True, **neutral}
    if owner == "practicum":  # which refuses what it does not know
        return fields | {"logprobs": 0}
    # In vLLM 0 stands for the drawn token alone. Elsewhere it may stand for none.
    return fields | {"return_tokens_as_token_ids": True, "logprobs": 0 if owner == "vllm" else 1}


def seed_of(sequence: Sequence) -> int:
    """Return the server's seed for an answer; those that follow count up.

    An answer that is continued does not draw the same random numbers again.
    """
    num_written = sequence.num_written
    words = f"{sequence.seed}:{num_written}:{sequence.number if num_written else 0}"
    seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) >> 1  # fits whatever integer
    return seed if num_written else seed + sequence.number


class TokenReader:
    """A reader of token ids and log-probs in choices, whatever the server calls its tokens."""

    def __init__(self, tokenizer: Any, server: str) -> None:
        self._tokenizer = tokenizer
        self._server = server
        self._by_text: dict[str, int | None] = {}

    def ids(self, choice: Mapping[str, Any]) -> list[int]:
        if (ids := choice.get("token_ids")) is not None:
            return [int(token) for token in ids]
        if choice.get("logprobs") is None:
            return []
        return [self._id(name) for name in token_names(choice)]

    def log_probs(self, choice: Mapping[str, Any], num: int) -> list[float]:
        found = chosen_log_probs(choice) if choice.get("logprobs") is not None else []
        if len(found) != num or not all(map(math.isfinite, found)):
            raise RolloutError(
                f"server {self._server} gave {num} tokens, but not the log-prob of each: training needs them all."
            )
        return found

    def _id(self, name: str) -> int:
        if name.startswith("token_id:"):
            return int(name.removeprefix("token_id:"))
        if not self._by_text:
            for token in range(len(self._tokenizer)):
                for text in {self._tokenizer.decode([token]), self._tokenizer.convert_ids_to_tokens(token)}:
                    self._by_text[text] = token if self._by_text.get(text, token) == token else None
        token_id = self._by_text.get(name)
        if token_id is None:
            why = "several tokens have" if name in self._by_text else "no token of the model has"
            raise RolloutError(
                f"server {self._server} gives no token ids, only texts, and {why} the text {name!r}. Use a server that "
                "knows return_token_ids (vLLM, practicum serve)."
            )
        return token_id


async def probe(client: Transport, server: str, model: str | None, tokenizer: Any) -> Capabilities:
    """Find out what a server can do. Raises `RolloutError` where it cannot be used."""
    try:
        entry = await _model_entry(client, server, model)
        name, owner = str(entry["id"]), str(entry.get("owned_by") or "")
        max_tokens = int(entry["max_model_len"]) if entry.get("max_model_len") else None
        probes = _Probes(client, server, name, extras(owner, True), tokenizer)
        has_extensions = await _takes_extensions(probes)
        if not has_extensions:
            probes = _Probes(client, server, name, extras(owner, False), tokenizer)
            await _check_tokens(probes, tokenizer)
        if owner == "practicum":  # gives them as the contract of engines asks for, and tells of no other tokens
            return Capabilities(name, owner, max_tokens, has_extensions, is_tempered=True, is_filtered=False)
        is_tempered = await _changes(probes, temperature=0.5) is True
    except ServerFailure as failure:
        raise RolloutError(f"{failure}. Is it up, and does it serve this model?") from failure
    return Capabilities(name, owner, max_tokens, has_extensions, is_tempered)


async def probe_filters(client: Transport, server: str, known: Capabilities, tokenizer: Any) -> bool:
    """Return whether log-probs are those after top-k and top-p; in doubt they are."""
    probes = _Probes(client, server, known.model, extras(known.owner, known.has_extensions), tokenizer)
    try:
        return await _changes(probes, top_p=_TINY_TOP_P) is not False
    except ServerFailure as failure:
        raise RolloutError(f"{failure}.") from failure


async def _model_entry(client: Transport, server: str, model: str | None) -> Mapping[str, Any]:
    try:
        listed = await client.call(server, "GET", "/v1/models", timeout_s=_PROBE_S)
    except ServerFailure as failure:
        if failure.status not in (404, 405) or model is None:
            raise
        return {"id": model}
    entries: list[Mapping[str, Any]] = (listed or {}).get("data") or []
    if model is None:
        if not entries:
            raise RolloutError(f"server {server} lists no model: name one with rollout.openai.model.")
        return entries[0]
    for entry in entries:
        if entry.get("id") == model:
            return entry
    known = ", ".join(str(entry.get("id")) for entry in entries) or "none"
    raise RolloutError(f"server {server} does not serve rollout.openai.model={model!r}; it lists: {known}.")


class _Probes:
    """Requests for one token after one prompt, drawn in various ways."""

    def __init__(self, client: Transport, server: str, model: str, more: Mapping[str, Any], tokenizer: Any) -> None:
        self._client = client
        self._body = {"model": model, "max_tokens": 1, "n": 1, "seed": 0, **more}
        self.server = server
        # Any tokens will do, several in case the model is certain of what follows one.
        ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)) or [0]
        step = max(1, len(ids) // _NUM_PROBES)
        self.prompts = [[token] for token in ids[::step][:_NUM_PROBES]]

    async def choice(
        self, prompt: list[int], temperature: float = 1.0, top_p: float = 1.0, **more: Any
    ) -> Mapping[str, Any]:
        body = self._body | {"prompt": prompt, "temperature": temperature, "top_p": top_p} | more
        answer = await self._client.call(self.server, "POST", "/v1/completions", body, _PROBE_S)
        choices: list[Mapping[str, Any]] | None = answer.get("choices") if isinstance(answer, Mapping) else None
        if not choices:
            raise RolloutError(f"server {self.server} answered /v1/completions without choices.")
        return choices[0]

    async def largest(self, prompt: list[int], temperature: float = 1.0, top_p: float = 1.0) -> float | None:
        """Return the log-prob of the likeliest token; None where the server does not tell."""
        choice = await self.choice(prompt, temperature, top_p, logprobs=1)
        tops = (choice.get("logprobs") or {}).get("top_logprobs")
        return max(map(float, tops[0].values())) if tops and tops[0] else None


async def _takes_extensions(probes: _Probes) -> bool:
    """Return whether the server takes what vLLM has beside the protocol, and names tokens by their ids."""
    try:
        choice = await probes.choice(probes.prompts[0])
    except ServerFailure as failure:
        if failure.status not in _REFUSED:
            raise
        return False
    names = token_names(choice) if choice.get("logprobs") else []
    return choice.get("token_ids") is not None or any(name.startswith("token_id:") for name in names)


async def _check_tokens(probes: _Probes, tokenizer: Any) -> None:
    """Check that the tokens of an answer can be known at all."""
    choice = await probes.choice(probes.prompts[0])
    reader = TokenReader(tokenizer, probes.server)
    ids = reader.ids(choice)
    if not ids and choice.get("finish_reason") != "stop":
        raise RolloutError(
            f"server {probes.server} returns neither token ids nor the tokens of its answers (logprobs.tokens), so "
            "nothing can be learnt from them. Use a server that knows return_token_ids (vLLM, practicum serve)."
        )
    reader.log_probs(choice, len(ids))


async def _changes(probes: _Probes, **drawing: float) -> bool | None:
    """Return whether another way of drawing shows in the log-probs; None where that cannot be told."""
    for prompt in probes.prompts:
        plain = await probes.largest(prompt)
        if plain is None:
            return None
        if plain < _CERTAIN:
            other = await probes.largest(prompt, **drawing)
            return None if other is None else abs(other - plain) > _EQUAL
    return None
