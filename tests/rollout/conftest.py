from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from practicum.models import load_model, load_tokenizer


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Any:
    return load_model(str(tiny_model)).eval()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(str(tiny_model))
