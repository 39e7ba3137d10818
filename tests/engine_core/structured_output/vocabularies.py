"""A small tokenizer that can write every text: bytes, and some longer tokens."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_core.structured_output.compiler import GrammarCompiler

_WORDS = (
    '{"',
    '":',
    '", "',
    "},",
    "true",
    "null",
    "-1",
    "00",
    " the",
    "name",
    "Ann",
    "é",
    "🙂",
    "\n  ",
)
EOS = 0


@functools.cache
def tokenizer_json() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [byte_level.pre_tokenize_str(word) for word in _WORDS]
    tokens = ["</s>", *alphabet, *("".join(part for part, _ in word) for word in words)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return json.dumps(json.loads(tokenizer.to_str())).encode()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json().decode())


VOCAB_SIZE = 300
"""More than the tokenizer has, as in padded models."""


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
