from __future__ import annotations

import pickle

from practicum import errors


def test_every_error_survives_pickling() -> None:
    plain = [errors.ConfigError, errors.DataError, errors.ModelError, errors.RewardError, errors.ResourceError]
    for cls in plain:
        copy = pickle.loads(pickle.dumps(cls("what, where, what to do")))
        assert type(copy) is cls and str(copy) == "what, where, what to do"
    for worker_error in (errors.WorkerError, errors.WorkerDied, errors.DeadlineError):
        original = worker_error("late", group="g", ranks=[1, 2], node="n", pid=3, cause=KeyError("k"))
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is worker_error
        assert (str(copy), copy.group, copy.ranks, copy.node, copy.pid) == ("late", "g", (1, 2), "n", 3)
        assert isinstance(copy.cause, KeyError)
