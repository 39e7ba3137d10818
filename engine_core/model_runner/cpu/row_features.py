"""The features of a CPU runner's rows: one that is added stands here, and the runner knows nothing
of it."""

from collections.abc import Iterable

import torch

from engine_core.model_runner.adapter_rows import AdapterRows
from engine_core.model_runner.cache import BlockStorage, PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.draft_model import DraftModel
from engine_core.model_runner.cpu.drafter import Drafter, DraftSampling
from engine_core.model_runner.cpu.head_drafter import HeadDrafter
from engine_core.model_runner.cpu.input_batch import CPUInputBatch
from engine_core.model_runner.cpu.row_processors import RowProcessors
from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.cross_attention_rows import CrossAttentionRows
from engine_core.model_runner.encoder import EncoderRows
from engine_core.model_runner.row_features import row_features
from engine_core.model_runner.row_parts import RowPart, RowParts
from engine_core.model_runner.rows import RunnerRows
from engine_core.model_runner.vocabulary_rows import vocabulary_rows
from engine_core.models.heads.head import DraftHead
from engine_core.models.interface import EncoderDecoder
from engine_core.scheduler import SchedulerOutput
from kernels.interface.sampling import SamplingOperations


def make_sampler(config: RunnerConfig, batch: CPUInputBatch) -> CPUSampler:
    """Make the sampler over all ranks' tokens, with the operator's logits processors."""
    assert isinstance(config.ops, SamplingOperations), f"{config.ops.name} samples on its own"
    vocabulary, ops = vocabulary_rows(
        config.ops, config.collectives, config.vocab_size, reports_logits=config.reports_logits
    )
    processors = None
    if config.logits_processors:
        processors = RowProcessors(config.logits_processors, batch.token_ids)
    return CPUSampler(
        ops,
        max_num_rows=config.max_num_seqs,
        vocab_size=config.vocab_size,
        processors=processors,
        vocabulary=vocabulary,
        reports_processed=config.reports_processed,
        token_ids=batch.token_ids,
    )


def cpu_row_parts(
    config: RunnerConfig,
    *,
    rows: RunnerRows,
    batch: CPUInputBatch,
    cache: PagedKVCache,
    sampler: CPUSampler,
) -> RowParts:
    """All of the same runner."""
    parts = row_features(
        config,
        token_ids=torch.from_numpy(batch.token_ids),
        vocabulary=sampler.vocabulary,
        host_tensor=lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    if config.encoder is not None:
        encoder = EncoderRows(config, config.encoder, rows)
        parts.append(encoder)
        if isinstance(config.model, EncoderDecoder):
            parts.append(CrossAttentionRows(config, config.model, cache, encoder.outputs))
    if sampler.processors is not None:
        parts.append(sampler.processors)
    if config.draft is not None:
        sampling = DraftSampling(config, batch, sampler)
        parts.append(make_drafter(config, cache.storage, sampling, parts))
    return RowParts(parts)


def update_rows(
    plan: SchedulerOutput,
    rows: RunnerRows,
    batch: CPUInputBatch,
    sampler: CPUSampler,
    parts: RowParts,
) -> None:
    """Before a step: sequences that are over give up their rows, and new, resumed and forked ones
    get theirs."""
    freed, placed = rows.free(plan), rows.place(plan)
    for row in freed:
        sampler.free_row(row)
    for each in placed:
        batch.place(each, plan.step_id)
        sampler.write_row(
            each.row, each.request.sampling, each.token_ids, each.request.prompt_embeds
        )
    for update in plan.block_updates:
        batch.write_blocks(update.row, update.start, update.block_ids)
    parts.update(plan, freed, placed)


def make_drafter(
    config: RunnerConfig,
    storage: BlockStorage,
    sampling: DraftSampling,
    parts: Iterable[RowPart],
    *,
    num_captured_tokens: int = 0,
) -> Drafter:
    """Make the drafter of the config's draft model or head, beside the model's own `parts`.
    `num_captured_tokens`: see `HeadDrafter`."""
    assert config.draft is not None
    if isinstance(config.draft.model, DraftHead):
        return HeadDrafter(config, storage, sampling, num_captured_tokens=num_captured_tokens)
    adapters = next((part for part in parts if isinstance(part, AdapterRows)), None)
    return DraftModel(config, storage, sampling, adapters)
