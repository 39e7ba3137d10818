"""Attention of Llama-3.1-8B's prompts: our kernels in their variants beside what others have."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.triton.attention.work import AttentionVariant
from scripts.gpu.timing import TimingGroup, Work
from tests.gpu.checks import attention
from tests.gpu.checks.attention import LLAMA
from tests.gpu.checks.paged_step import Heads, Request

PROMPTS: dict[str, list[Request]] = {
    "1024": [(1024, 1024)],
    "4 x 2048": [(2048, 2048)] * 4,
    "8192": [(8192, 8192)],
    "32768": [(32768, 32768)],
    "2048 after 6144": [(8192, 2048)],
    "50 after 50000": [(50_050, 50)],
}
VARIANTS = {
    "ours": AttentionVariant(),
    "Gluon": AttentionVariant(prompts_in_gluon=True),
    "by bits": AttentionVariant(float8_by_bits=True),
}
FA3 = "fa3_fwd_interface"
"""Module of the package fa3-fwd."""


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    attend = importlib.import_module(FA3).flash_attn_func
    out: torch.Tensor = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return out.transpose(1, 2)


OTHERS = {"cuDNN": _cudnn, "fa3": _fa3}


def _dense(heads: Heads, prompts: Sequence[Request], device: str) -> list[torch.Tensor]:
    """q, k, v [prompts, heads, tokens, D] of equal prompts."""
    (length, queries), *_ = prompts
    H, K = heads.num_query_heads, heads.num_kv_heads
    make = partial(torch.randn, dtype=heads.dtype, device=device)
    return [make(len(prompts), *of, heads.head_size) for of in ((H, queries), *[(K, length)] * 2)]


def check_other(name: str, *, device: str = "cuda") -> float:
    """Largest difference to float32, over the largest result."""
    q, k, v = _dense(LLAMA, [(300, 300)], device)
    wide = (x.float() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    return float((OTHERS[name](q, k, v) - expected).abs().max() / expected.abs().max())


def time_prompts(
    name: str,
    heads: Heads,
    prefills: Sequence[Request],
    decodes: Sequence[Request] = (),
    *,
    products: bool = False,
    device: str = "cuda",
) -> Work:
    """Of `VARIANTS` or `OTHERS`; between a layer's products before and behind it, if asked for,
    whose operations count, too: then also "nothing"."""
    variant = VARIANTS.get(name, AttentionVariant())
    step = attention.make_step(heads, decodes, prefills, device=device, variant=variant)
    num_bytes, flops = step.num_bytes(), step.num_flops() if prefills else 0.0
    call: Callable[[], object] = partial(step.attend, torch.empty_like(step.q_THD))
    if name in OTHERS:
        call = partial(OTHERS[name], *_dense(heads, prefills, device))
    elif name == "nothing":
        call, flops = (lambda: None), 0.0
    if not products:
        return Work(call=call, num_bytes=num_bytes, num_flops=flops)
    size, of_keys = (n * heads.head_size for n in (heads.num_query_heads, heads.num_kv_heads))
    make = partial(torch.randn, dtype=heads.dtype, device=device)
    x_TE, qkv_NE, o_NE = (
        make(len(step.q_THD), size),
        make(size + 2 * of_keys, size),
        make(size, size),
    )
    return Work(
        call=lambda: (F.linear(x_TE, qkv_NE), call(), F.linear(x_TE, o_NE)),
        num_bytes=num_bytes,
        num_flops=flops + 2.0 * len(x_TE) * (qkv_NE.numel() + o_NE.numel()),
    )


def prompt_timings() -> list[TimingGroup]:
    """All prompts of both kernels; block sizes, an fp8 cache and what is between products at 8,192
    tokens."""

    def group(title: str, name: str, heads: Heads, prompts: Iterable[str]) -> TimingGroup:
        works = {f"{title} {at}": partial(time_prompts, name, heads, PROMPTS[at]) for at in prompts}
        if name in OTHERS:
            return TimingGroup(title, partial(check_other, name), attention.ROUNDING, works)
        decodes = attention.DECODES if name == "by bits" else []
        check = partial(attention.check, heads, decodes, attention.PREFILLS)
        check = partial(check, device="cuda", variant=VARIANTS[name])
        return TimingGroup(title, check, attention.ROUNDING, works)

    fp8 = attention.with_cache(LLAMA, torch.float8_e4m3fn)
    others = ["cuDNN", *["fa3"] * (importlib.util.find_spec(FA3) is not None)]
    whole = [at for at, ((length, queries), *_) in PROMPTS.items() if length == queries]
    groups = [group(f"prompts, {name},", name, LLAMA, PROMPTS) for name in ("ours", "Gluon")]
    for size, name in ((64, "ours"), (64, "Gluon"), (128, "ours"), (128, "Gluon")):
        heads = replace(LLAMA, block_size=size)
        groups.append(group(f"prompts, {name}, blocks of {size},", name, heads, ["8192"]))
    groups.append(group("prompts, ours, fp8 cache,", "ours", fp8, ["8192"]))
    by_bits = group("prompts, fp8 cache by bits,", "by bits", fp8, ["8192"])
    decode = partial(time_prompts, "by bits", fp8, [], [(1024, 1)] * 256)
    timings = {**by_bits.timings, "decode, fp8 cache by bits, 256 x 1024": decode}
    groups.append(replace(by_bits, timings=timings))
    # cuDNN's mask begins at the first key
    groups += [
        group(f"prompts, {name},", name, LLAMA, PROMPTS if name == "fa3" else whole)
        for name in others
    ]
    between = {
        f"prompts, {name} between products, 8192": partial(
            time_prompts, name, LLAMA, PROMPTS["8192"], products=True
        )
        for name in ("nothing", "ours", "Gluon", "cuDNN")
    }
    check = partial(attention.check, LLAMA, [], attention.PREFILLS, device="cuda")
    check = partial(check, variant=VARIANTS["Gluon"])
    groups.append(TimingGroup("prompts between products", check, attention.ROUNDING, between))
    return groups
