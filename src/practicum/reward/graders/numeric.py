r"""Numeric match: the number an answer states is the ground truth.

Read as numbers: 1,234.50  -3  $5  3/4  1 3/4  \frac{3}{4}  1.5e-3  2 \times 10^{5}  2^{10}  40%. They are exact
fractions here, so that long whole numbers are compared digit by digit.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

from pydantic import Field

from practicum.reward.graders.base import Rule
from practicum.reward.graders.extract import TRUTH_MARKER, answer_text, ground_truths, last_boxed
from practicum.types import Prompt, Sample, Score

_SEPARATOR = r"(?:,\\!|\{,\}|\\,|[,\u00a0\u2009\u202f])"
_MINUS = "-−–"  # noqa: RUF001 (models write all three)
_PLAIN = rf"(?:(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_SIGNED = rf"[{_MINUS}+]?{_PLAIN}"
_POWER = rf"(?:\^ ?(?:\{{ ?(?:[{_MINUS}+]?\d+) ?\}}|[{_MINUS}+]?\d+)|[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)"
_NUMBER = re.compile(
    # Digits that belong to a name (x2), an index (a_1), a unit's power (cm^2) or the number before are none.
    rf"(?<![A-Za-z_\d^])(?<!\d\.)(?<![_^]\{{)(?<![_^][{_MINUS}])(?<![_^]\{{[{_MINUS}])"
    rf"(?:(?<![A-Za-z\d_)\]}}])(?P<sign>[{_MINUS}])[\\$€£¥]{{0,2}})?"
    r"(?:"
    rf"(?P<whole_of_frac>\d+)? ?\\[dt]?frac ?(?:\{{ ?(?P<top>{_SIGNED}) ?\}}|(?P<top1>\d)) ?"
    rf"(?:\{{ ?(?P<bottom>{_SIGNED}) ?\}}|(?P<bottom1>\d))"
    r"|(?P<whole>\d+) (?P<over>\d+) ?/ ?(?P<under>\d+)"
    rf"|(?P<dividend>{_PLAIN}) ?/ ?(?P<divisor>{_PLAIN})"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<e>[{_MINUS}+]?\d+)(?!\w)"
    rf"| ?(?:\\times|\\cdot|[×·*x]) ?10 ?(?P<ten>{_POWER})|(?P<power>{_POWER}))?"  # noqa: RUF001
    r")(?P<percent> ?(?:\\?%|％|[Pp]ercent))?"  # noqa: RUF001 (full-width, in Chinese answers)
)
# A number that is part of one of these is not the result: \sqrt{2} is not 2, 3\pi is not 3.
_ROOT_BEFORE = re.compile(r"(?:\\sqrt(?:\[\d+\])?\s?\{?|√\(?)\s?$")
_FACTOR_AFTER = re.compile(r"(?:\s|\*|\\cdot|\\,|\})*(?:\\pi\b|π|\\sqrt|√|\\infty)")
# `x = - 3`: a space after the sign. Elsewhere a dash before a space is a bullet or a subtraction.
_LOOSE_SIGN = re.compile(rf"(?<=[=({{:])\s*[{_MINUS}]\s+(?=[\d.\\$])")
_GLUED_COMMAND = re.compile(r"(\\[A-Za-z]+)(?=\d)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺" + _MINUS, "0123456789-+---", "{}^ ")
_NOT_DIGITS = re.compile(r"[^\d.+-]")
_LONGEST = 400  # digits, and powers of ten: what lies beyond costs memory and is nobody's answer
_SHORT = 10**4  # amounts of money and the like must be right to the cent, however large; 0.333333 may stand for 1/3
_DEFAULT_RELATIVE = Fraction(1, 10**5)


class Number(NamedTuple):
    value: Fraction
    is_percent: bool = False

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.is_percent else ''}"


class Numeric(Rule):
    r"""1 if the number in the answer is the ground truth, else 0; 0 also where the answer holds no number.

    That number is the last one in the last \boxed{}, or else in the text. 40% equals both 40 and 0.4. The ground truth
    is a number, or a string with a single number in it, or one where it follows #### or stands in \boxed{}; or a list
    of accepted ones. Commas are thousands separators; 3,14 is not read as a decimal. Thinking before </think> is not
    part of the answer. Logs as a part whether a number was `found`.
    """

    marker: str | None = Field(default=None, min_length=1)
    """Text the answer must write before its number, such as "####" or "answer is"; case does not matter. The first
    number after the last marker counts. None needs no marker."""
    relative_tolerance: float | None = Field(default=None, ge=0)
    """How far the number may be off, as a share of the ground truth: 0.01 is one percent. None: numbers of up to
    four decimals must be equal, others may be off by one in 100,000."""
    absolute_tolerance: float = Field(default=0.0, ge=0)
    """A number off by no more than this is right too."""

    def check(self, prompt: Prompt) -> None:
        _read_truths(prompt)

    def grade(self, sample: Sample) -> Score:
        try:
            truths = _read_truths(sample.prompt)
        except ValueError as error:
            return Score.failed("invalid", str(error))
        number = self._read_answer(answer_text(sample))
        if number is None:
            return Score(0.0, {"found": 0.0})
        is_right = any(self._equal(number, truth) for truth in truths)
        return Score(float(is_right), {"found": 1.0}, answer=str(number))

    def _read_answer(self, text: str) -> Number | None:
        if self.marker is not None:
            places = [match.end() for match in re.finditer(re.escape(self.marker), text, re.IGNORECASE)]
            return first_number(text[places[-1] :]) if places else None
        boxed = last_boxed(text)
        return last_number(text if boxed is None else boxed)

    def _equal(self, number: Number, truth: Number) -> bool:
        if number.is_percent == truth.is_percent:
            return self._close(number.value, truth.value)
        return (
            self._close(number.value, truth.value)
            or (number.is_percent and self._close(number.value / 100, truth.value))
            or (truth.is_percent and self._close(number.value, truth.value / 100))
        )

    def _close(self, value: Fraction, truth: Fraction) -> bool:
        off = abs(value - truth)
        if self.relative_tolerance is not None:
            relative = Fraction(self.relative_tolerance)
        else:
            both_short = (value * _SHORT).denominator == (truth * _SHORT).denominator == 1
            relative = Fraction(0) if both_short else _DEFAULT_RELATIVE
        return off <= max(relative * abs(truth), Fraction(self.absolute_tolerance))


def last_number(text: str) -> Number | None:
    """Return the last number in a text; None where there is none, or where it is only part of an expression."""
    text = _tidy(text)
    match = None
    for match in _NUMBER.finditer(text):  # noqa: B007
        pass
    return _value(match, text) if match else None


def first_number(text: str) -> Number | None:
    text = _tidy(text)
    match = _NUMBER.search(text)
    return _value(match, text) if match else None


def _read_truths(prompt: Prompt) -> list[Number]:
    return [_read_truth(truth) for truth in ground_truths(prompt, "numeric")]


def _read_truth(truth: Any) -> Number:
    if not isinstance(truth, str):
        return Number(Fraction(str(truth)))  # the decimal 0.1, not the binary fraction next to it
    stated = truth.rpartition(TRUTH_MARKER)[2]
    boxed = last_boxed(stated)
    text = _tidy(stated if boxed is None else boxed)
    matches = list(_NUMBER.finditer(text))
    number = _value(matches[0], text) if matches else None
    if number is None:
        raise ValueError(f"numeric needs a number as ground truth, found {truth[:80]!r}")
    if len(matches) > 1:
        raise ValueError(
            f"the ground truth {truth[:80]!r} holds {len(matches)} numbers: write {TRUTH_MARKER} before the right one"
        )
    return number


def _tidy(text: str) -> str:
    return _GLUED_COMMAND.sub(r"\1 ", _LOOSE_SIGN.sub(" -", text))


def _value(match: re.Match[str], text: str) -> Number | None:
    if _ROOT_BEFORE.search(text[max(0, match.start() - 20) : match.start()]) or _FACTOR_AFTER.match(text, match.end()):
        return None
    groups = match.groupdict()
    try:
        if top := groups["top"] or groups["top1"]:
            bottom = groups["bottom"] or groups["bottom1"]
            value = _plain(groups["whole_of_frac"] or "0") + _plain(top) / _plain(bottom)
        elif groups["whole"]:
            value = _plain(groups["whole"]) + _plain(groups["over"]) / _plain(groups["under"])
        elif groups["dividend"]:
            value = _plain(groups["dividend"]) / _plain(groups["divisor"])
        else:
            value = _scaled(_plain(groups["plain"]), groups)
    except (OverflowError, ZeroDivisionError):
        return None
    return Number(-value if groups["sign"] else value, groups["percent"] is not None)


def _plain(text: str) -> Fraction:
    if len(text) > _LONGEST:
        raise OverflowError(f"a number of {len(text)} digits")
    return Fraction(_NOT_DIGITS.sub("", text.translate(_SUPERSCRIPTS)))


def _scaled(value: Fraction, groups: dict[str, Any]) -> Fraction:
    if power := groups["power"]:
        base, exponent = value, int(_plain(power))
    elif shift := groups["e"] or groups["ten"]:
        base, exponent = Fraction(10), int(_plain(shift))
    else:
        return value
    if abs(exponent) * max(len(str(base.numerator)), len(str(base.denominator))) > 2 * _LONGEST:
        raise OverflowError(f"a power of {exponent}")
    return base**exponent if groups["power"] else value * base**exponent
