"""The features of rows that both runners have."""

import torch

from engine_core.model_runner.adapter_rows import AdapterRows
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.given_states import GivenStates
from engine_core.model_runner.pooled_rows import PoolingRows
from engine_core.model_runner.prompt_logprobs import PromptReports
from engine_core.model_runner.row_parts import HostTensor, RowPart
from engine_core.model_runner.vocabulary_rows import VocabularyRows


def row_features(
    config: RunnerConfig,
    *,
    token_ids: torch.Tensor,
    vocabulary: VocabularyRows,
    host_tensor: HostTensor,
) -> list[RowPart]:
    """
    Args:
        token_ids: [row, position] on the model's device.
        vocabulary: that the model's logits are of.
        host_tensor: makes memory that the device copies results to.
    """
    num_rows = config.max_num_seqs
    parts: list[RowPart] = [
        GivenStates(num_rows, config.dtype),
        PromptReports(
            num_rows,
            token_ids=token_ids,
            model=config.model,
            vocabulary=vocabulary,
            host_tensor=host_tensor,
        ),
    ]
    if config.adapters is not None:
        parts.append(AdapterRows(config.adapters, num_rows=num_rows))
    if config.pooler is not None:
        parts.append(PoolingRows(config.pooler, host_tensor))
    return parts
