from __future__ import annotations

from pathlib import Path

import pytest

from tests.reward.serving.models import save_classifier


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier") / "model")
