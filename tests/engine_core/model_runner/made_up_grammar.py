"""A grammar that is a function of a sequence's tokens: a third of the vocabulary, drawn anew for
each text, or a single token. So masks of a wrong row, or behind a wrong draft, change tokens."""

import zlib
from array import array

import numpy as np

from engine_core.scheduler.plan import MaskRows
from engine_core.scheduler.rules.constrained_steps import ConstrainedSteps


def constrain(scheduler, constraints):
    """Structured outputs of a scheduler that was made without."""
    scheduler.parts.join([ConstrainedSteps(scheduler.pool, constraints, scheduler.config)])


class MadeUpMasks:
    def __init__(self, rows):
        self._rows = rows
        self.num_waits = 0

    def wait(self):
        self.num_waits += 1
        return self._rows

    def failures(self):
        return {}

    def refused(self):
        return ()


def is_led(request_id):
    """Every second one follows the grammar."""
    return zlib.crc32(request_id.encode()) % 2 == 1


class MadeUpGrammar:
    """Constraints, and the grammar of each request whose name is in `names`. Nothing waits."""

    is_ready = True

    def __init__(self, vocab_size, *, drafts_forced=False):
        self._vocab_size = vocab_size
        self._drafts_forced = drafts_forced
        self.num_forced = 0
        self.num_masks = 0

    def take_compiled(self):
        return ()

    def allows(self, token_ids):
        """bool [V], of the token behind these; sometimes a single one."""
        draw = np.random.default_rng(zlib.crc32(array("i", token_ids).tobytes()))
        if draw.random() < 0.4:
            return np.arange(self._vocab_size) == draw.integers(20, self._vocab_size)
        return draw.random(self._vocab_size) < 0.33

    def forced_tokens(self, sequences):
        for sequence, num_output_tokens, last_token in sequences:
            if sequence.request.grammar is not self:
                continue
            assert sequence.output_from(num_output_tokens - 1) == [last_token]
            forced = []
            while self._drafts_forced and len(forced) < 9:
                possible = np.flatnonzero(self.allows([*sequence.all_token_ids, *forced]))
                if len(possible) > 1:
                    break
                forced.append(int(possible[0]))
            self.num_forced += len(forced)
            yield sequence, forced

    def begin_masks(self, constrained):
        rows = []
        for each in constrained:
            tokens = each.sequence.all_token_ids
            for offset in range(len(each.drafts) + 1):
                mask = self.allows([*tokens, *each.drafts[:offset]])
                bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
                bits[: self._vocab_size] = mask
                packed = np.packbits(bits, bitorder="little").view(np.int32)
                rows.append((each.place, offset, packed))
        self.num_masks += len(rows)
        places, offsets, masks = zip(*rows, strict=True)
        return MadeUpMasks(
            MaskRows(np.array(places, np.int64), np.array(offsets, np.int64), np.stack(masks))
        )

    def lead(self, scheduler):
        """Every second request of this scheduler follows it."""
        constrain(scheduler, self)
        add_request = scheduler.add_request

        def add(request):
            if is_led(request.request_id):
                request.grammar = self
            add_request(request)

        scheduler.add_request = add
        return scheduler

    def follows(self, requests, tokens):
        """Whether the outputs of those that follow it are allowed; by (request id, index)."""
        prompts = {name: prompt for name, prompt, *_ in requests}
        led = [key for key in tokens if is_led(key[0])]
        assert led
        return all(
            self.allows([*prompts[name], *tokens[name, index][:at]])[token_id]
            for name, index in led
            for at, token_id in enumerate(tokens[name, index])
        )
