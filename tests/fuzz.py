"""Runs the properties of the router's parser for some minutes, on other examples each time: `python -m tests.fuzz 10`.

Ends with an error and the smallest example that it finds as soon as one of them fails.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PRACTICUM_FUZZ_EXAMPLES", "200")  # of each in its turn; read when they are made

from tests.reward.router import test_fuzz, test_http1

PROPERTIES: list[Any] = [
    test_fuzz.test_what_is_passed_on_is_one_request_to_any_reader,
    test_fuzz.test_packets_change_nothing_about_what_is_passed_on,
    test_fuzz.test_what_a_worker_answers_is_one_response_to_any_reader,
    test_fuzz.test_packets_change_nothing_about_an_answer,
    test_http1.test_random_bytes_are_a_head_or_refused_and_nothing_else,
    test_http1.test_random_bytes_are_chunks_or_refused_and_nothing_else,
    test_http1.test_a_chunked_body_ends_exactly_where_it_does_however_it_is_cut,
]


def main(minutes: float) -> None:
    counts = dict.fromkeys((test.__name__ for test in PROPERTIES), 0)

    def counted(run: Callable[..., None], name: str) -> Callable[..., None]:
        @functools.wraps(run)
        def count(*args: Any, **kwargs: Any) -> None:
            counts[name] += 1
            run(*args, **kwargs)

        return count

    for test in PROPERTIES:
        test.hypothesis.inner_test = counted(test.hypothesis.inner_test, test.__name__)
    end = time.monotonic() + 60.0 * minutes
    while time.monotonic() < end:
        for test in PROPERTIES:
            test()
    for name, num in counts.items():
        print(f"{num:>10,} {name}")
    print(f"{sum(counts.values()):>10,} examples, none of which failed")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
