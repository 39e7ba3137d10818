"""BGE-M3: XLM-R, whose vector of a text has weights and vectors of its tokens beside it."""

from dataclasses import replace

from engine_core.models.families.encoders import xlm_roberta

BGE_M3 = "BgeM3EmbeddingModel"
"""vLLM's name; the files say XLMRobertaModel."""

FAMILIES = tuple(
    replace(family, names=(BGE_M3,))
    for family in xlm_roberta.FAMILIES
    if "XLMRobertaModel" in family.names
)
