"""A reward model with one output: a sequence-classification model that reads question and answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from practicum.reward.graders.remote import RemoteGrader, conversation
from practicum.types import Sample, Score

if TYPE_CHECKING:
    from practicum.reward.client import RewardClient


class Classifier(RemoteGrader):
    """What a model with one output makes of question and answer, as it is: it need not lie between 0 and 1."""

    model_kind: ClassVar[str | None] = "classifier"

    model: str | None = None
    """The model's name, for servers that hold several."""

    async def grade(self, sample: Sample, client: RewardClient) -> Score:
        # Asked in the shape of vLLM's /classify; raw outputs, since a reward need not lie between 0 and 1.
        body: dict[str, Any] = {"use_activation": False, **({"model": self.model} if self.model else {})}
        if sample.prompt.messages is None:
            body["input"] = f"{sample.prompt.text}{sample.text}"
        else:
            body["messages"] = [*conversation(sample.prompt), {"role": "assistant", "content": sample.text}]
        reply = await client.post(self.target, self.path or "/classify", body, self.headers())
        try:
            (row,) = reply["data"]
            (value,) = row["probs"]
            value = float(value)
        except (KeyError, TypeError, ValueError):
            return Score.failed("invalid", f"the reward model answered without one number: {str(reply)[:200]}")
        if not math.isfinite(value):
            return Score.failed("invalid", f"the reward model answered {value}")
        return Score(value)
