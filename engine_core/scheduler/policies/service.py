"""Virtual token counters: how much service each tenant has had, per unit of weight."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

TenantKey = str | int
"""A name, or a client's number: so that no name can pose as a client's."""

_MOST_DEPARTED = 4_096
_FIRST_CAPACITY = 64


@dataclasses.dataclass(slots=True, eq=False)
class Tenant:
    """Its counters are in the columns while `number` is not None."""

    name: str
    weight: float
    number: int | None = None
    num_unfinished: int = 0
    counter: float = 0.0
    """Virtual tokens per unit of weight, when the tenant left."""
    served: float = 0.0
    """Weighted tokens that the tenant was served until it left."""


class ServiceCounters:
    """A tenant has a number while it has unfinished requests; numbers are used again, so that the
    columns stay as short as the most tenants at one time. Of a tenant without requests the counter
    is kept only above the floor, to which a newcomer is lifted anyway.

    Args:
        weights: shares by tenant's name; 1 for all others.
        output_weight: what an output token counts for.
    """

    def __init__(self, weights: Mapping[str, float], output_weight: float) -> None:
        self._weights = dict(weights)
        self._output_weight = output_weight
        self._present: dict[TenantKey, Tenant] = {}
        self.departed: dict[TenantKey, Tenant] = {}
        """Tenants that left, in the order in which they did."""
        self._num_numbers = 0
        self._free_numbers: list[int] = []
        self._counters = np.zeros(_FIRST_CAPACITY)
        self._served = np.zeros(_FIRST_CAPACITY)
        self._num_unsettled = 0
        """Output tokens not charged yet, while one tenant is present."""
        self._output_charges = np.ones(_FIRST_CAPACITY)
        """output_weight / weight, by number."""
        self.keys = np.full((2, _FIRST_CAPACITY), np.inf)
        """The counters of tenants that wait in each of two lanes, infinite for the others."""

    def enter(self, key: TenantKey) -> Tenant:
        """The tenant of that key, which has a number from now on."""
        tenant = self._present.get(key)
        if tenant is None:
            self._settle()
            tenant = self.departed.pop(key, None)
            if tenant is None:
                name = key if isinstance(key, str) else f"client {key}"
                tenant = Tenant(name, self._weights.get(name, 1.0))
            self._present[key] = tenant
            self._give_number(tenant)
        return tenant

    def leave(self, key: TenantKey, floor: float) -> None:
        """The tenant has no unfinished requests. Counters at or below `floor` need not be kept."""
        self._settle()
        tenant = self._present.pop(key)
        number = number_of(tenant)
        tenant.counter = float(self._counters[number])
        tenant.served = float(self._served[number])
        tenant.number = None
        self._free_numbers.append(number)
        self.departed[key] = tenant
        if len(self.departed) > _MOST_DEPARTED:
            kept = {k: t for k, t in self.departed.items() if t.counter > floor}
            for oldest in list(kept)[: max(0, len(kept) - _MOST_DEPARTED // 2)]:
                del kept[oldest]
            self.departed = kept

    def counter(self, tenant: Tenant) -> float:
        """Virtual tokens per unit of weight; of a departed tenant the last."""
        self._settle()
        return tenant.counter if tenant.number is None else float(self._counters[tenant.number])

    def lift(self, tenant: Tenant, floor: float) -> None:
        """Raise the tenant's counter to the floor, if it is below."""
        self._settle()
        number = number_of(tenant)
        self._counters[number] = max(float(self._counters[number]), floor)

    def start_waiting(self, tenant: Tenant, lane: int) -> None:
        """The tenant has a request in that lane."""
        self._settle()
        self.keys[lane, number_of(tenant)] = self._counters[number_of(tenant)]

    def stop_waiting(self, tenant: Tenant, lane: int) -> None:
        """The tenant has no request left in that lane."""
        self.keys[lane, number_of(tenant)] = np.inf

    def charge(self, tenant: Tenant, num_weighted_tokens: float) -> None:
        """Service to one tenant."""
        number = number_of(tenant)
        self._served[number] += num_weighted_tokens
        self._counters[number] += num_weighted_tokens / tenant.weight
        for lane in self.keys:  # two numbers, for which numpy takes longer than for one each
            lane[number] += num_weighted_tokens / tenant.weight

    @property
    def num_present(self) -> int:
        """Tenants with a number."""
        return len(self._present)

    @property
    def least_waiting(self) -> float:
        """The least counter of the waiting tenants; infinite if there are none."""
        self._settle()
        return float(self.keys.min())

    def charge_only_tenant(self, num_tokens: int) -> None:
        """Output tokens of the one tenant that has a number: added up, and charged when it
        matters."""
        self._num_unsettled += num_tokens

    def _settle(self) -> None:
        if self._num_unsettled:
            (tenant,) = self._present.values()
            num_tokens, self._num_unsettled = self._num_unsettled, 0
            self.charge(tenant, num_tokens * self._output_weight)

    def charge_output(self, num_tokens_by_tenant: npt.NDArray[np.int64]) -> None:
        """Service to all, by number. Infinite keys stay infinite."""
        n = min(len(num_tokens_by_tenant), len(self._counters))
        num_tokens = num_tokens_by_tenant[:n]
        charges = num_tokens * self._output_charges[:n]
        self._counters[:n] += charges
        self.keys[:, :n] += charges
        self._served[:n] += num_tokens * self._output_weight

    def served_by_tenant(self) -> dict[str, float]:
        """Weighted tokens, by the name of each tenant with unfinished requests."""
        self._settle()
        tenants = (tenant for tenant in self._present.values() if tenant.num_unfinished)
        return {tenant.name: float(self._served[number_of(tenant)]) for tenant in tenants}

    def _give_number(self, tenant: Tenant) -> None:
        if not self._free_numbers:
            self._free_numbers.append(self._num_numbers)
            self._num_numbers += 1
            if self._num_numbers > len(self._counters):
                self._grow()
        number = self._free_numbers.pop()
        tenant.number = number
        self._counters[number] = tenant.counter
        self._served[number] = tenant.served
        self._output_charges[number] = self._output_weight / tenant.weight
        self.keys[:, number] = np.inf

    def _grow(self) -> None:
        more = len(self._counters)
        self._counters = np.concatenate([self._counters, np.zeros(more)])
        self._served = np.concatenate([self._served, np.zeros(more)])
        self._output_charges = np.concatenate([self._output_charges, np.ones(more)])
        self.keys = np.concatenate([self.keys, np.full((2, more), np.inf)], axis=1)


def number_of(tenant: Tenant) -> int:
    """The number of a tenant that has one."""
    assert tenant.number is not None
    return tenant.number
