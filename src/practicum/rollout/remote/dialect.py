"""What a completions server can do, found out by asking it; and requests and answers in its dialect.

The protocol leaves out what training needs: which token it was, and what a log-prob is the logarithm of. Some servers
name tokens by their ids, others by their texts; some give log-probs before temperature, others after it, others after
top-k and top-p too. None of them says which. So a few requests for one token find out, before anything is written.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.errors import RolloutError
from practicum.rollout.remote.completions import ServerFailure, Transport, chosen_log_probs, token_names
from practicum.types import RolloutRequest, SamplingParams

_SHAKE_S = 60.0
_TINY_TOP_P = 1e-3
# Log-probs this close are equal: far more than rounding, far less than what halving a temperature does.
_EQUAL = 1e-3
# A first token as certain as this one stays so at every temperature and tells nothing.
_CERTAIN = -0.02
_NUM_PROBES = 8
_REFUSED = (400, 404, 422)


@dataclass(frozen=True, slots=True)
class Dialect:
    """Of one server."""

    model: str
    owner: str
    most_tokens: int | None
    """Prompt and answer together; None where the server does not say."""
    is_rich: bool
    """It knows what vLLM has beside the protocol: top_k, stop_token_ids, ignore_eos, return_token_ids."""
    is_tempered: bool
    """Log-probs are those after temperature."""
    is_filtered: bool | None = None
    """Log-probs are those after top-k and top-p. None: not found out yet, since nobody wanted any."""

    @property
    def can_number_answers(self) -> bool:
        """Whether the answers of one request are drawn with seeds that follow each other."""
        return self.owner in ("vllm", "practicum")

    def check(self, params: SamplingParams, server: str) -> None:
        """Raise `RolloutError` for what it cannot do, or what its log-probs would be wrong for."""
        if not self.is_rich and (params.top_k > 0 or params.ignore_eos):
            asked = "top_k" if params.top_k > 0 else "ignore_eos"
            raise RolloutError(f"server {server} knows only the bare completions protocol, which has no {asked}.")
        if params.temperature == 0:
            return
        assert self.is_filtered is not None or not has_filters(params), "ask find_filtered first"
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

    def body(self, request: RolloutRequest, first: int, num: int, prompt: list[int], eos_ids: Sequence[int]) -> Any:
        """The request for answers number `first` and following to go on from `prompt`."""
        params = request.params
        num_before = len(prompt) - len(request.prompt_ids)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_new_tokens - num_before,
            "temperature": params.temperature,
            "top_p": params.top_p if params.temperature > 0 else 1.0,
            "n": num,
            "seed": seed_of(request, num_before) + first,
        } | extras(self.owner, self.is_rich)
        if self.is_rich:
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


def extras(owner: str, is_rich: bool) -> dict[str, Any]:
    """What is the same in every request: token ids and log-probs, and nothing else bent."""
    if not is_rich:
        return {"logprobs": 1}
    # A model's saved generation settings would count where a request is silent.
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    fields: dict[str, Any] = {"return_token_ids": True, "include_stop_str_in_output": True, **neutral}
    if owner == "practicum":  # which refuses what it does not know
        return fields | {"logprobs": 0}
    # In vLLM 0 stands for the drawn token alone. Elsewhere it may stand for none.
    return fields | {"return_tokens_as_token_ids": True, "logprobs": 0 if owner == "vllm" else 1}


def seed_of(request: RolloutRequest, num_before: int) -> int:
    """Of the request's first answer; those that follow count up. What is gone on with does not draw the same again."""
    words = f"{request.seed}:{num_before}:{request.first_answer if num_before else 0}"
    seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) >> 1  # fits whatever integer
    return seed if num_before else seed + request.first_answer


class TokenReader:
    """Token ids from a choice, whatever the server calls them."""

    def __init__(self, tokenizer: Any, server: str) -> None:
        self._tokenizer = tokenizer
        self._server = server
        self._by_text: dict[str, int | None] = {}

    def ids(self, choice: Mapping[str, Any]) -> list[int]:
        told = choice.get("token_ids")
        if told is not None:
            return [int(token) for token in told]
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


async def shake_hands(client: Transport, server: str, model: str | None, tokenizer: Any) -> Dialect:
    """Find out a server's dialect. Raises `RolloutError` where it cannot be used."""
    try:
        entry = await _model_entry(client, server, model)
        name, owner, most = str(entry["id"]), str(entry.get("owned_by") or ""), entry.get("max_model_len")
        asked = _Asked(client, server, name, extras(owner, True), tokenizer)
        is_rich = await _is_rich(asked)
        if not is_rich:
            asked = _Asked(client, server, name, extras(owner, False), tokenizer)
            await _check_tokens(asked, tokenizer)
        if owner == "practicum":  # gives them as the contract of engines asks for, and tells of no other tokens
            return Dialect(name, owner, int(most) if most else None, is_rich, is_tempered=True, is_filtered=False)
        is_tempered = await _changes(asked, temperature=0.5) is True
    except ServerFailure as failure:
        raise RolloutError(f"{failure}. Is it up, and does it serve this model?") from failure
    return Dialect(name, owner, int(most) if most else None, is_rich, is_tempered)


async def find_filtered(client: Transport, server: str, dialect: Dialect, tokenizer: Any) -> bool:
    """Whether log-probs are those after top-k and top-p; in doubt they are."""
    asked = _Asked(client, server, dialect.model, extras(dialect.owner, dialect.is_rich), tokenizer)
    try:
        return await _changes(asked, top_p=_TINY_TOP_P) is not False
    except ServerFailure as failure:
        raise RolloutError(f"{failure}.") from failure


async def _model_entry(client: Transport, server: str, model: str | None) -> Mapping[str, Any]:
    try:
        listed = await client.call(server, "GET", "/v1/models", timeout_s=_SHAKE_S)
    except ServerFailure as failure:
        if failure.status not in (404, 405) or model is None:
            raise
        return {"id": model}
    entries = (listed or {}).get("data") or []
    if model is None:
        if not entries:
            raise RolloutError(f"server {server} lists no model: name one with rollout.openai.model.")
        first: Mapping[str, Any] = entries[0]
        return first
    for entry in entries:
        if entry.get("id") == model:
            found: Mapping[str, Any] = entry
            return found
    known = ", ".join(str(entry.get("id")) for entry in entries) or "none"
    raise RolloutError(f"server {server} does not serve rollout.openai.model={model!r}; it lists: {known}.")


class _Asked:
    """One token after one prompt, drawn in various ways."""

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
        answer = await self._client.call(self.server, "POST", "/v1/completions", body, _SHAKE_S)
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not choices:
            raise RolloutError(f"server {self.server} answered /v1/completions without choices.")
        choice: Mapping[str, Any] = choices[0]
        return choice

    async def largest(self, prompt: list[int], temperature: float = 1.0, top_p: float = 1.0) -> float | None:
        """The log-prob of the likeliest token; None where the server does not tell."""
        choice = await self.choice(prompt, temperature, top_p, logprobs=1)
        tops = (choice.get("logprobs") or {}).get("top_logprobs")
        return max(map(float, tops[0].values())) if tops and tops[0] else None


async def _is_rich(asked: _Asked) -> bool:
    """Whether the server takes what vLLM has beside the protocol, and names tokens by their ids."""
    try:
        choice = await asked.choice(asked.prompts[0])
    except ServerFailure as failure:
        if failure.status not in _REFUSED:
            raise
        return False
    names = token_names(choice) if choice.get("logprobs") else []
    return choice.get("token_ids") is not None or any(name.startswith("token_id:") for name in names)


async def _check_tokens(asked: _Asked, tokenizer: Any) -> None:
    """That the tokens of an answer can be known at all."""
    choice = await asked.choice(asked.prompts[0])
    reader = TokenReader(tokenizer, asked.server)
    ids = reader.ids(choice)
    if not ids and choice.get("finish_reason") != "stop":
        raise RolloutError(
            f"server {asked.server} returns neither token ids nor the tokens of its answers (logprobs.tokens), so "
            "nothing can be learnt from them. Use a server that knows return_token_ids (vLLM, practicum serve)."
        )
    reader.log_probs(choice, len(ids))


async def _changes(asked: _Asked, **drawing: float) -> bool | None:
    """Whether another way of drawing shows in the log-probs; None where that cannot be told."""
    for prompt in asked.prompts:
        plain = await asked.largest(prompt)
        if plain is None:
            return None
        if plain < _CERTAIN:
            other = await asked.largest(prompt, **drawing)
            return None if other is None else abs(other - plain) > _EQUAL
    return None
