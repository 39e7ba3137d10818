"""What is sent: requests of a load test, and the turns that follow their answers."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Prompt = list[int] | str | list[Message]
"""Token ids, text, or a chat's messages."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A later turn: `text` follows the answer before it, after `think_s` seconds."""

    text: list[int] | str
    num_output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class PlannedRequest:
    """`arrival_s` counts from the start of the measurement."""

    index: int
    prompt: Prompt
    num_output_tokens: int
    arrival_s: float = 0.0
    later_turns: tuple[PlannedTurn, ...] = ()

    def next_turn(self, answer: list[Any]) -> "PlannedRequest":
        """What is sent after this answer (token ids or pieces of text): all that was said so far,
        and the next turn's text."""
        turn, *later = self.later_turns
        prompt: Any = self.prompt
        if isinstance(turn.text, list):
            prompt = prompt + answer + turn.text
        elif isinstance(prompt, str):
            prompt = f"{prompt}{''.join(answer)}\n{turn.text}"
        else:
            said = {"role": "assistant", "content": "".join(answer)}
            prompt = [*prompt, said, {"role": "user", "content": turn.text}]
        return PlannedRequest(
            self.index + 1, prompt, turn.num_output_tokens, later_turns=tuple(later)
        )
