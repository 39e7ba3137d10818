"""docs/reference/models.md is what families' files say; each is compared with transformers."""

import pytest

from engine_core.models.families.table import FAMILIES
from tests.engine_core.models import decoder_cases, hybrid_cases, latent_cases, qwen_hybrid_cases
from tests.models_page import PAGE, page


def test_the_page_is_of_today():
    assert PAGE.read_text() == page(), "python tests/models_page.py writes it anew"


@pytest.mark.parametrize("family", sorted({f.model_type for f in FAMILIES if not f.is_encoder}))
def test_each_family_has_a_tiny_model(family):
    cases = (decoder_cases, hybrid_cases, latent_cases, qwen_hybrid_cases)
    assert family in {config.model_type for each in cases for config in each.CONFIGS.values()}
