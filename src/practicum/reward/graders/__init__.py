"""The built-in graders, by name, and how one is made from the config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from practicum.errors import RewardError
from practicum.reward.graders.base import Grader
from practicum.reward.graders.choice import Choice
from practicum.reward.graders.code import Code
from practicum.reward.graders.exact import Exact
from practicum.reward.graders.json_schema import JsonSchema
from practicum.reward.graders.judge import Judge
from practicum.reward.graders.math import Math
from practicum.reward.graders.numeric import Numeric
from practicum.reward.graders.penalties import Overlong, Repetition
from practicum.reward.graders.regex import Regex
from practicum.reward.graders.remote import Classifier, Endpoint

__all__ = ["GRADERS", "Grader", "make_grader"]

GRADERS: dict[str, type[Grader]] = {
    # Answers compared with the ground truth
    "exact": Exact,
    "numeric": Numeric,
    "math": Math,
    "choice": Choice,
    "code": Code,
    # Their form
    "regex": Regex,
    "json_schema": JsonSchema,
    # Somebody who is asked
    "classifier": Classifier,
    "judge": Judge,
    "endpoint": Endpoint,
    # Penalties, to be added to one of the others
    "overlong": Overlong,
    "repetition": Repetition,
}


def make_grader(name: str, options: Mapping[str, Any], where: str) -> Grader:
    """Make the grader of this name. `where` is the config key it stands under; errors begin with it."""
    if name not in GRADERS:
        near = _did_you_mean(name, GRADERS)
        raise RewardError(f"{where}: there is no grader {name!r};{near} the graders are: {', '.join(GRADERS)}.")
    try:
        return GRADERS[name].model_validate(dict(options))
    except ValidationError as error:
        raise RewardError(f"{where}: {_describe(error, name)}") from None


def _describe(error: ValidationError, grader: str) -> str:
    known = [field.alias or name for name, field in GRADERS[grader].model_fields.items()]
    lines = []
    for detail in error.errors():
        option = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            has = f"its options are: {', '.join(known)}" if known else "it has none"
            lines.append(f"grader {grader} has no option {option!r};{_did_you_mean(option, known)} {has}.")
        elif detail["type"] == "missing":
            lines.append(f"grader {grader} needs the option {option!r}.")
        elif detail["type"] == "value_error":
            lines.append(f"grader {grader}: {detail['ctx']['error']}.")
        else:
            allowed = detail["msg"].replace("Input ", "")
            lines.append(f"grader {grader}, option {option} = {detail['input']!r}: {allowed}.")
    return lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} mistakes", *(f"  - {line}" for line in lines)])


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" did you mean {near[0]!r}?" if near else ""
