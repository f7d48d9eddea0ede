from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from practicum.config import AgentConfig, RolloutConfig


def test_sampling_is_what_the_section_says() -> None:
    config = RolloutConfig(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=3, answers_per_prompt=4, stop=("\n",))
    params = config.sampling
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 3)
    assert (params.num_answers, params.stop) == (4, ("\n",))


def test_several_turns_are_set_by_tools_or_an_environment() -> None:
    assert not RolloutConfig().agent.is_set
    assert AgentConfig(tools=("a.py:f",)).is_set
    assert AgentConfig(environment="a.py:World").is_set


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"engine": "warp"}, "'native', 'hf', 'vllm' or 'openai'"),
        ({"engine": "vllm"}, "rollout.engine=vllm cannot be hybrid: set rollout.placement=colocated or standalone"),
        ({"engine": "openai"}, "set rollout.placement=standalone"),
        ({"engine": "openai", "placement": "standalone"}, "needs rollout.openai.servers"),
        ({"vllm": {"in_process": True, "python": "/opt/vllm/bin/python"}}, "set python or in_process, not both"),
        ({"vllm": {"in_process": True, "tensor_parallel": 2}}, "takes several processes"),
        ({"replicas": 2}, "rollout.replicas is for colocated and standalone placement"),
        ({"stop": [""]}, "an empty text would end every answer at once"),
        ({"cache_gb": 0}, "greater than 0"),
        ({"agent": {"tools": ["a.py:f"], "environment": "a.py:World"}}, "set tools or environment, not both"),
    ],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutConfig.model_validate(config)
    assert words in str(caught.value)
