"""Multiple choice: the letter an answer settles on."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from practicum.reward.graders.base import Rule
from practicum.reward.graders.extract import answer_text, ground_truths, is_number
from practicum.types import Prompt, Sample, Score

# What says "here comes the answer" without words; it is read as if the words stood there.
_ANNOUNCEMENT = re.compile(r"\\boxed|####|<answer>")
_ORNAMENT = re.compile(r"\\(?:text|math)[a-z]*|\\[()\[\]]|\\(?:left|right|bf|rm)\b|[*_`${}\\]|</?[a-z]+>")
_STATEMENT = re.compile(
    r"(?:(?i:answer|choice|option)(?: (?i:choice|option|letter))?\s?(?:\s(?i:is|was|would be|should be|must be)|[:=：])"  # noqa: RUF001
    r"|\bI(?:'d|'ll|’d|’ll| would| will)? (?i:choose|pick|select|go with|say)"  # noqa: RUF001
    r"|答案(?:是|为|应为|选)?|故选|选择)"
    r"\s?[:：]?\s?(?:(?i:clearly|therefore|thus|definitely|most likely)\s)?(?:(?i:option|choice|letter)\s?)?[:：]?\s?"  # noqa: RUF001
    r"(?P<open>[(\[\"'“（]?)\s?(?P<letter>[A-Za-z])(?![A-Za-z0-9]|[-'’]\w)"  # noqa: RUF001
)
_VERDICT = re.compile(
    r"(?<![A-Za-z0-9])\(?(?P<letter>[A-Z])\)? is (?:the )?"
    r"(?:(?i:correct|right|best|only)(?: (?i:answer|choice|option))?\b(?! that)|(?i:answer)\b)"
)
_ANOTHER = re.compile(
    r"[)\].\"'”）]*\s?(?:,|/|&|(?i:or|and)\b|、|或|和)\s?(?:(?i:or|and|option|choice)\s)?[(\[\"']?"  # noqa: RUF001
    r"(?P<letter>[A-Z])(?![A-Za-z0-9])(?=\s?(?:[^\w\s]|\n|$|(?i:or|and|both|are|together|combined)\b))"
)
_LINE = re.compile(r"[\s(\[\"'>#-]*(?P<letter>[A-Za-z])(?![A-Za-z0-9])\s?(?P<mark>[).:\]]{0,2})(?P<rest>.*)")
_AT_END = re.compile(r"(?:^|[\s(\[:\"'])(?P<letter>[A-Z])[)\].\"'!]*$")
_OTHER_AT_END = re.compile(
    r"(?<![A-Za-z0-9])(?P<letter>[A-Z])[)\]]?\s?(?:,|/|&|(?i:or|and)\b)\s?(?:(?i:or|and)\s)?[(\[]?$"
)
_WORD_AFTER = re.compile(r" (?!(?i:because|since|as|which|due|based|for|with|from)\b)[A-Za-z]")


class Choice(Rule):
    r"""1 if the answer settles on the right letter, else 0; 0 also where no choice, or more than one, is found.

    The last statement counts: "the answer is (C)", "Answer: C", \boxed{C}, <answer>C</answer>, "C is correct". Where
    there is none: a line that is nothing but the letter, "C)" or "C. ..." before the chosen text, or the letter at the
    very end. "A or B" is no choice. The ground truth is a letter, or its index counted from 0 (a number, not a string:
    "1" may mean either); or a list of accepted ones. Thinking before </think> is not part of the answer. Logs as a part
    whether a choice was `found`.
    """

    letters: str = Field(default="ABCDEFGHIJ", pattern="^[A-Z]{2,26}$")
    """The letters of the choices, in order. Others are not taken for a choice."""

    @field_validator("letters")
    @classmethod
    def _all_different(cls, letters: str) -> str:
        if len(set(letters)) < len(letters):
            raise ValueError(f"letters={letters!r} has a letter twice")
        return letters

    def check(self, prompt: Prompt) -> None:
        self._truths(prompt)

    def grade(self, sample: Sample) -> Score:
        try:
            truths = self._truths(sample.prompt)
        except ValueError as error:
            return Score.failed("invalid", str(error))
        letter = chosen_letter(answer_text(sample), self.letters)
        return Score(float(letter in truths), {"found": float(letter is not None)}, answer=letter)

    def _truths(self, prompt: Prompt) -> set[str]:
        return {self._truth(truth) for truth in ground_truths(prompt, "choice")}

    def _truth(self, truth: Any) -> str:
        if isinstance(truth, str):
            letter = re.fullmatch(r"\(?([A-Za-z])[.):]?", truth.strip())
            if letter and letter[1].upper() in self.letters:
                return letter[1].upper()
        elif is_number(truth) and truth == int(truth) and 0 <= truth < len(self.letters):
            return self.letters[int(truth)]
        raise ValueError(
            f"choice needs a letter of {self.letters} or its index from 0 to {len(self.letters) - 1} as ground truth, "
            f"found {truth!r}"
        )


def chosen_letter(text: str, letters: str) -> str | None:
    text = _plain(text)
    stated, conflict = None, False
    for match in sorted(
        (*_STATEMENT.finditer(text), *_VERDICT.finditer(text)), key=lambda match: match.start("letter")
    ):
        letter = _stated_letter(match, text, letters)
        if letter is not None:
            another = _ANOTHER.match(text, match.end("letter"))
            conflict = another is not None and another["letter"] in letters and another["letter"] != letter
            stated = letter
    if stated is not None:
        return None if conflict else stated
    return _unstated_letter(text, letters)


def _plain(text: str) -> str:
    """Remove markup, and leave single spaces and line ends only: the patterns then cannot backtrack far."""
    text = _ORNAMENT.sub("", _ANNOUNCEMENT.sub("\nanswer: ", text))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()


def _stated_letter(match: re.Match[str], text: str, letters: str) -> str | None:
    letter, rest = match["letter"], text[match.end("letter") : match.end("letter") + 20]
    is_bracketed = bool(match.groupdict().get("open"))
    if letter.upper() not in letters:
        return None
    # "the answer is a prime number": a small letter counts only by itself.
    if letter.islower():
        return letter.upper() if is_bracketed or re.match(r"[).\]]?\s?(?:\n|$)", rest) else None
    # "the answer is A good idea", "the answer is I think": words, not letters.
    if letter in "AI" and match.re is _STATEMENT and not is_bracketed and _WORD_AFTER.match(rest):
        return None
    return letter


def _unstated_letter(text: str, letters: str) -> str | None:
    lines = [line for line in map(_LINE.fullmatch, text.split("\n")) if line and line["letter"].upper() in letters]
    last_line = text.rpartition("\n")[2]
    if lines and lines[-1].string == last_line and not lines[-1]["rest"].strip(" .)!"):
        return lines[-1]["letter"].upper()
    labelled = [line for line in lines if line["letter"].isupper() and (line["mark"] or not line["rest"].strip())]
    distinct = {line["letter"] for line in labelled}
    if len(distinct) > 1 and labelled[-1].string == last_line:
        return None  # the choices, copied from the question
    at_end = _AT_END.search(last_line)
    if at_end and at_end["letter"] in letters:
        other = _OTHER_AT_END.search(last_line[: at_end.start("letter")])
        return None if other and other["letter"] in letters else at_end["letter"]
    return distinct.pop() if len(distinct) == 1 else None
