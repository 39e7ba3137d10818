"""What the scripted engine serves: a tokenizer of bytes, functions in place of a model, and the
fixed answers about them."""

import secrets
import struct
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers

from protocol.base import WIRE_VERSION
from protocol.calls import EngineStatistics, SchedulerSnapshot
from protocol.explanations import CacheLookup, LookupEnd, Preemption, RequestInfo, WaitReason
from protocol.multimodal import MultiModalInfo, TensorRef
from protocol.outputs import Logprobs, ModelInfo, RequestTimings, TokenizerInfo, Welcome
from protocol.pooling import Pooled, PoolingTask
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams, sequence_seed
from protocol.snapshots import (
    FIRST_REQUEST,
    BlockMap,
    RequestSummary,
    SchedulerView,
    StepSummary,
)

EOS = "<eos>"
MAX_MODEL_LEN = 512
HEARTBEAT_S = 0.05
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = {symbol: index for index, symbol in enumerate(_ALPHABET)} | {EOS: 256}
EOS_ID = VOCAB[EOS]
MEDIA_IDS = {"<image>": 257, "<audio>": 258}
"""Of a model that takes images and sounds."""


def byte_tokenizer() -> BackendTokenizer:
    """One token a byte, and end-of-sequence."""
    tokenizer = BackendTokenizer(models.BPE(vocab=VOCAB, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


NextToken = Callable[[EngineRequest, int], int]
"""From the request and the number of tokens that it has generated to the next one."""


def arithmetic(request: EngineRequest, num_generated: int) -> int:
    """Printable letters that depend on the prompt, the seed and the position."""
    seed = (request.sampling_params.seed or 0) if request.sampling_params.temperature else 0
    value = (sum(request.prompt_token_ids) * 31 + seed * 17 + num_generated * num_generated) % 26
    return ids_of(chr(ord("a") + value))[0]


def expected_text(prompt: str, num_tokens: int) -> str:
    """What `arithmetic` answers to a greedy request."""
    request = EngineRequest(
        request_id="",
        prompt_token_ids=ids_of(prompt),
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
    )
    return TOKENIZER.decode([arithmetic(request, number) for number in range(num_tokens)])


def saying(text: str, *, then_eos: bool = False) -> NextToken:
    """The tokens of a text, again and again or ended by end-of-sequence."""
    ids = ids_of(text) + ([EOS_ID] if then_eos else [])
    return lambda _request, num_generated: ids[num_generated % len(ids)]


def sequence_request(request: EngineRequest, index: int) -> EngineRequest:
    """The request that would give sequence `index` by itself."""
    params = request.sampling_params
    if index == 0 or params.seed is None:
        return request
    params = msgspec.structs.replace(params, seed=sequence_seed(params.seed, index))
    return msgspec.structs.replace(request, sampling_params=params)


def explanation(request: EngineRequest, num_output_tokens: int = 0) -> RequestInfo:
    """A request that waits for blocks, and was preempted before."""
    return RequestInfo(
        request_id=request.request_id,
        status="waiting",
        priority=request.priority,
        tenant=request.tenant,
        num_sequences=request.num_sequences,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        max_tokens=request.sampling_params.max_tokens,
        age_s=2.0,
        num_computed_tokens=0,
        waits_for=WaitReason.BLOCKS,
        why="needs 9 blocks, 3 are free",
        num_requests_ahead=2,
        cache_lookup=CacheLookup(
            num_tokens=32, num_host_tokens=0, num_disk_tokens=0, ended=LookupEnd.EVICTED
        ),
        preemptions=[
            Preemption(
                step_id=7, mode="recompute", reason="a needed a block", num_tokens=40, num_blocks=3
            )
        ],
    )


def welcome(
    fingerprint: str,
    *,
    with_tokenizer: bool,
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
    max_num_seqs: int = 64,
    recommends: bool = True,
    multimodal: MultiModalInfo | None = None,
    more_tokens: Sequence[str] = (),
) -> tuple[Welcome, list[bytes]]:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*more_tokens])
    if multimodal is not None:
        tokenizer.add_special_tokens([*MEDIA_IDS])
    document = tokenizer.to_str().encode()
    named = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
    info = TokenizerInfo(
        fingerprint="bytes",
        tokenizer_json=TensorRef(frame=0, dtype="uint8", shape=(len(document),)),
        chat_template=named["default"],
        named_chat_templates={name: named[name] for name in named if name != "default"},
        special_tokens={"eos_token": EOS},
    )
    model = ModelInfo(
        name="fake",
        architecture="Fake",
        fingerprint=fingerprint,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.get_vocab_size(),
        dtype="float32",
        num_blocks=64,
        block_size=16,
        eos_token_ids=(EOS_ID,),
        max_logprobs=20,
        max_num_seqs=max_num_seqs,
        default_sampling={"temperature": 0.25, "top_k": 7.0} if recommends else {},
        formats="Q4_1+Q8_0, KV cache int8, native",
        file_format="gguf",
        file_bytes=98_000_000,
        num_weights=134_515_008,
        tokenizer=info if with_tokenizer else None,
        multimodal=multimodal,
    )
    message = Welcome(
        wire_version=WIRE_VERSION,
        engine_id=secrets.token_hex(8),
        heartbeat_s=HEARTBEAT_S,
        model=model,
    )
    return message, [document] if with_tokenizer else []


def logprobs(token_id: int, num_top: int) -> Logprobs:
    """The sampled token at -0.5 and rank 1, then others at -1, -2 ..."""
    top = [(token_id + offset) % len(VOCAB) for offset in range(num_top)]
    values = [-0.5, *([-0.5] if num_top else []), *(-float(n) for n in range(1, num_top))]
    width = 1 + num_top
    return Logprobs(
        num_positions=1,
        width=width,
        token_ids=struct.pack(f"<{width}i", token_id, *top),
        logprobs=struct.pack(f"<{width}f", *values),
        ranks=[1],
    )


def prompt_logprobs(prompt_token_ids: list[int], num_top: int) -> Logprobs | None:
    """Of each token but the first at -1, -2 ... by its place; then as `logprobs` has them."""
    parts = []
    for place, token_id in enumerate(prompt_token_ids[1:], start=1):
        found = logprobs(token_id, num_top)
        values = struct.pack("<f", -float(place)) + found.logprobs[4:]
        parts.append(msgspec.structs.replace(found, logprobs=values, ranks=[place]))
    return Logprobs.joined(parts)


def pooled(request: EngineRequest) -> Pooled:
    """Of embed the prompt's length and its first and last token, of tokens a row each, of labels
    1/4 and 3/4, and a score that grows with the length."""
    ids = request.prompt_token_ids
    rows = {
        PoolingTask.EMBED: [[float(len(ids)), float(ids[0]), float(ids[-1]), 0.5]],
        PoolingTask.CLASSIFY: [[0.25, 0.75]],
        PoolingTask.SCORE: [[len(ids) / 64]],
    }.get(request.pooling_params.task, [[float(token_id), 1.0] for token_id in ids])
    shape = (len(rows), len(rows[0]))
    data = struct.pack(f"<{shape[0] * shape[1]}f", *(value for row in rows for value in row))
    return Pooled(shape=shape if request.pooling_params.task.of_tokens else shape[1:], data=data)


def timings() -> RequestTimings:
    return RequestTimings(
        first_scheduled_s=0.1, first_token_s=0.2, finished_s=0.3, num_preemptions=0
    )


def statistics(num_running: int) -> EngineStatistics:
    return EngineStatistics(
        uptime_s=1.5, num_clients=1, num_running=num_running, num_waiting=0, num_blocks=64,
        num_blocks_in_use=0, num_blocks_cached=0, block_size=16, num_steps=0, num_prompt_tokens=0,
        num_cached_prompt_tokens=0, num_generated_tokens=0, num_preemptions=0,
        num_finished={"stop": 1, "length": 2}, num_steps_by_tokens=[1] * 14,
        num_lookups_by_end={"complete": 2}, num_lookup_hits_by_end={"complete": 1},
        num_preemptions_by_cause={"blocks": 0},
        step_time_s=0.0, model_time_s=0.0,
    )  # fmt: skip


def snapshot(step_id: int, running: list[EngineRequest]) -> SchedulerSnapshot:
    """A step in which the first of `running` prefills and the others decode; each holds a block."""
    requests = [
        RequestSummary(
            number=index + 1,
            request_id=request.request_id,
            tenant=request.tenant,
            status="running",
            num_sequences=1,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=None,
            num_computed_tokens=step_id,
            num_output_tokens=0,
            max_tokens=request.sampling_params.max_tokens,
            num_preemptions=0,
            num_blocks=1,
        )
        for index, request in enumerate(running)
    ]
    step = StepSummary(
        step_id=step_id,
        token_budget=64,
        num_decode_tokens=len(running),
        prefill_chunks=[(1, 16)],
        num_preempted=0,
        duration_s=0.01,
    )
    owners = [FIRST_REQUEST + index for index in range(len(running))] + [0] * (64 - len(running))
    blocks = BlockMap(
        blocks_per_cell=1,
        owners=struct.pack("<64H", *owners),
        levels=bytes([255 if owner else 0 for owner in owners]),
        prefixes=[],
    )
    return SchedulerSnapshot(
        statistics=statistics(len(running)),
        view=SchedulerView(steps=[step] if running else [], requests=requests, blocks=blocks),
    )
