"""A loop in which sequences get drafts after each step: right, wrong or none. Not a test."""

import random

from engine_loop import EngineLoop

from engine_core.scheduler.runner_output import DraftTokenIds


class DraftingLoop(EngineLoop):
    """
    Args:
        answers: by (request id, index), the tokens that a sequence gets without drafts.
        holds_back: sequences are not scheduled before their last token is known, so that they get
            drafts with a step in flight too.
    """

    def __init__(self, *args, answers, vocab_size, seed, most=5, holds_back=False, **options):
        super().__init__(*args, **options)
        self.answers, self.vocab_size, self.most = answers, vocab_size, most
        self.draw = random.Random(seed)
        self.holds_back = holds_back
        self.num_drafted = self.num_accepted = 0

    def take_in(self):
        plan = self.open[0]
        batch = self.scheduler.pool.batch
        drafts = plan.scheduled_spec_decode_tokens
        before = {place: len(tokens) for place, tokens in self.tokens.items()}
        super().take_in()
        self.num_drafted += sum(map(len, drafts.values()))
        for name in drafts:
            sequence = self.scheduler.pool.find_sequence(name)
            if sequence is not None:
                place = (sequence.request.request_id, sequence.index)
                self.num_accepted += len(self.tokens[place]) - before[place] - 1
        wanted = {}
        for name in plan.batch.req_ids:
            sequence = self.scheduler.pool.find_sequence(name)
            if sequence is None or sequence.row is None or sequence.request.beam_search:
                continue
            if self.holds_back and not sequence.is_prefill:
                batch.may_schedule_async[sequence.row] = self.draw.random() < 0.3
            if (guess := self._drafts(sequence)) is not None:
                wanted[name] = guess
        self.scheduler.update_draft_token_ids(DraftTokenIds([*wanted], [*wanted.values()]))
        self.scheduler.check()

    def _drafts(self, sequence):
        draw, number = self.draw, self.draw.randint(0, self.most)
        if draw.random() < 0.2 or not number:
            return None
        answer = self.answers.get((sequence.request.request_id, sequence.index), [])
        right = answer[sequence.num_output_tokens :][:number]
        right += [draw.randrange(self.vocab_size) for _ in range(number - len(right))]
        if draw.random() < 0.4:  # wrong from here on, or only here
            at = draw.randrange(number)
            right[at] = draw.randrange(self.vocab_size)
        return right
