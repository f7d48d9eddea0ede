from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from practicum.errors import ModelError
from practicum.models import load_classifier, load_tokenizer
from practicum.rollout.serving.classifier import Classifier
from tests.rollout.serving.models import save_classifier, texts

CPU = torch.device("cpu")


def open_classifier(folder: Path, dtype: torch.dtype = torch.float32) -> Classifier:
    return Classifier(str(folder), device=CPU, dtype=dtype, max_batch_tokens=4096)


def of_transformers(model: Any, ids: np.ndarray) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0])


@pytest.mark.parametrize("pad_token_id", [None, 0], ids=["names no padding", "names its padding"])
def test_scores_are_those_of_transformers_alone_and_in_company(tmp_path: Path, pad_token_id: int | None) -> None:
    folder = save_classifier(tmp_path, pad_token_id=pad_token_id)
    classifier, model = open_classifier(folder), load_classifier(str(folder)).eval()
    inputs = [classifier.encoder.text(text) for text in texts(64)]
    expected = [of_transformers(model, ids) for ids in inputs]
    alone = [classifier.scores([ids])[0] for ids in inputs]
    assert alone == expected  # bit for bit
    together = classifier.scores(inputs)
    difference = max(abs(a - b) for a, b in zip(together, expected, strict=True))  # type: ignore[operator, type-var]
    print(f"largest difference in company: {difference:.1e} of {max(map(abs, expected)):.1f}")
    assert difference < 1e-5 * max(map(abs, expected))


def test_an_input_may_end_with_any_token_there_is(tmp_path: Path) -> None:
    """Inputs end with every id, so that none is left to pad all of them with."""
    folder = save_classifier(tmp_path)
    classifier, model = open_classifier(folder), load_classifier(str(folder)).eval()
    inputs = [np.array([4] * (1 + last % 5) + [last], np.int32) for last in range(18)]
    assert classifier.scores(inputs) == pytest.approx([of_transformers(model, ids) for ids in inputs], abs=1e-5)


def test_a_model_of_another_build_works_too(tmp_path: Path) -> None:
    """BERT looks at the first token, and its tokenizer has no end-of-text token."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"vocab_size": 18, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1}
    BertForSequenceClassification(BertConfig(**shape, intermediate_size=64)).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(save_classifier(tmp_path / "other")))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    classifier, model = open_classifier(tmp_path), load_classifier(str(tmp_path)).eval()
    inputs = [classifier.encoder.text(text) for text in texts(8)]
    assert classifier.scores(inputs) == pytest.approx([of_transformers(model, ids) for ids in inputs], abs=1e-5)


def test_asleep_and_awake_again_it_scores_the_same(classifier_folder: Path) -> None:
    classifier = open_classifier(classifier_folder, torch.bfloat16)
    inputs = [classifier.encoder.text(text) for text in texts(16)]
    before = classifier.scores(inputs)
    classifier.weights.sleep()
    classifier.weights.wake()
    assert classifier.scores(inputs) == before


def test_what_is_no_number_is_an_error_of_that_input(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    folder = save_classifier(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    model.save_pretrained(folder)
    good, bad = open_classifier(folder).scores([np.array([4, 5], np.int32), np.array([4, 9], np.int32)])
    assert isinstance(good, float)
    assert isinstance(bad, ModelError) and "gave nan, which is no score" in str(bad)
