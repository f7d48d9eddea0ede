"""Any service that grades over HTTP.

It is sent `{"prompt", "messages", "text", "ground_truth", "data_source", "metadata", "finish_reason"}` and answers a
number, or `{"score": 0.5, "parts": {"style": 1.0}}`, or, for what it cannot grade,
`{"status": "invalid", "reason": "..."}`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from practicum.reward.graders.remote import RemoteGrader, conversation, question_text
from practicum.reward.values import score_of
from practicum.types import Prompt, Sample, Score

if TYPE_CHECKING:
    from practicum.reward.client import RewardClient


class Endpoint(RemoteGrader):
    """What a service of yours answers: a number, or a mapping with `score`, and `parts` if it likes."""

    urls: tuple[str, ...] = Field(min_length=1)
    """Who is asked, such as http://grader-1:9000/score; a router shares the work among several."""

    def check(self, prompt: Prompt) -> None:
        try:
            json.dumps([prompt.answer, dict(prompt.metadata)])
        except (TypeError, ValueError) as error:
            raise ValueError(f"what the record holds cannot be sent as JSON: {error}") from error

    async def grade(self, sample: Sample, client: RewardClient) -> Score:
        prompt = sample.prompt
        body: dict[str, Any] = {
            "prompt": question_text(sample),
            "messages": conversation(prompt),
            "text": sample.text,
            "ground_truth": prompt.answer,
            "data_source": prompt.data_source,
            "metadata": dict(prompt.metadata),
            "finish_reason": sample.finish_reason,
        }
        return score_of(await client.post(self.target, self.path or "/", body, self.headers()))
