"""Logits processors for tests, as an operator's package would have them. Not a test."""

import itertools

import torch


class NoRepeatedPair:
    """`no_repeated_pair`: no two tokens stand behind each other twice, prompt included."""

    extra_args = ("no_repeated_pair",)

    def __init__(self, vocabulary):
        self.vocab_size = vocabulary.vocab_size
        self.prompts = {}
        self.num_rows = []
        """Of each call."""

    def validate_params(self, params, extra_args):
        if not isinstance(extra_args.get("no_repeated_pair", False), bool):
            raise ValueError("no_repeated_pair must be true or false")

    def add_row(self, row, params, extra_args, prompt_token_ids, output_token_ids):
        self.prompts[row] = list(prompt_token_ids)
        return extra_args.get("no_repeated_pair", False)

    def remove_row(self, row):
        del self.prompts[row]

    def apply(self, logits, rows, output_token_ids):
        assert logits.shape == (len(rows), self.vocab_size)
        self.num_rows.append(len(rows))
        for at, (row, output) in enumerate(zip(rows, output_token_ids, strict=True)):
            tokens = self.prompts[row] + output.tolist()
            seen = [b for a, b in itertools.pairwise(tokens) if a == tokens[-1]]
            logits[at, seen] = -torch.inf
        return logits


class Fails:
    """`fails_at`: in `apply` with so many tokens; -1: in `add_row`; -2: in `validate_params`; -3:
    gives logits of another shape."""

    extra_args = frozenset({"fails_at"})

    def __init__(self, vocabulary):
        self.at = {}

    def validate_params(self, params, extra_args):
        if extra_args.get("fails_at") == -2:
            raise KeyError("as asked")

    def add_row(self, row, params, extra_args, prompt_token_ids, output_token_ids):
        self.at[row] = extra_args.get("fails_at")
        if self.at[row] == -1:
            raise RuntimeError("no such row")
        return self.at[row] is not None

    def remove_row(self, row):
        raise RuntimeError("nothing is removed")

    def apply(self, logits, rows, output_token_ids):
        logits += 5.0  # undone where it then fails; alike for every token
        for row, output in zip(rows, output_token_ids, strict=True):
            if self.at[row] == -3:
                return logits[:, :1]
            if len(output) >= self.at[row]:
                raise ZeroDivisionError("too long")
        return logits
