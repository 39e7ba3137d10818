"""What a router knows of the engines' loads: all of it, or what it saw when it looked last.

A gateway that polls its engines sees loads as they were then, and knows besides what it has sent
since; what is over since then it does not know. It looks at 0, period, 2 periods ..., before
anything else that happens at that moment.
"""

import math


class RouterView:
    """Loads are prompt tokens of the requests that were sent and are not over.

    Args:
        period_s: from one look to the next; 0: whatever happens is seen at once.
    """

    def __init__(self, num_engines: int, period_s: float = 0.0) -> None:
        self._period_s = period_s
        self._exact = [0] * num_engines
        self.loads = [0] * num_engines if period_s else self._exact
        """An engine each, as the router sees them. To be read only."""
        self.next_look_s = period_s or math.inf

    def sent(self, engine: int, num_tokens: int) -> None:
        """The router sent a request of so many tokens."""
        self._exact[engine] += num_tokens
        if self._period_s:
            self.loads[engine] += num_tokens

    def left(self, engine: int, num_tokens: int) -> None:
        """A request of so many tokens is over."""
        self._exact[engine] -= num_tokens

    def last_look_s(self, now_s: float) -> float:
        """The last look up to this moment, which is `now_s` itself if nothing is missed."""
        return self._count(now_s) * self._period_s if self._period_s else now_s

    def look(self, now_s: float) -> None:
        """Take the looks that are due up to now: what came before them was told, and no more."""
        if now_s >= self.next_look_s:
            self.loads[:] = self._exact
            self.next_look_s = (self._count(now_s) + 1) * self._period_s

    def _count(self, now_s: float) -> int:
        """Looks up to this moment, behind the one at 0."""
        count = math.floor(now_s / self._period_s)
        # the quotient is rounded; the products are the moments
        while (count + 1) * self._period_s <= now_s:
            count += 1
        while count * self._period_s > now_s:
            count -= 1
        return count
