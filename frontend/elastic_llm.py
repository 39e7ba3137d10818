"""A client of engines of one model that come and go."""

from collections.abc import Iterable

from frontend.async_llm import AsyncLLM
from frontend.engine_calls import Engine
from frontend.fleet.engine_group import EngineGroup
from frontend.sampling_params import as_invalid_input
from protocol.addresses import check_address


class ElasticLLM(AsyncLLM):
    """`AsyncLLM` of several addresses, which may change. What an engine had that has left, or was
    lost, goes on at another of equal tokens, also at one that comes later, within
    `reconnect_timeout_s`."""

    _make_client_session = AsyncLLM._make_group

    @property
    def session(self) -> EngineGroup:
        session = super().session
        assert isinstance(session, EngineGroup)
        return session

    @property
    def engines(self) -> list[Engine]:
        """Each engine that did not leave."""
        return [Engine(*each) for each in self.session.staying.items()]

    @property
    def is_served(self) -> bool:
        """Whether an engine takes requests now."""
        staying = self.session.staying.values()
        return any(each.is_connected and not each.is_draining for each in staying)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """The engines that there are now. One that is gone from the list gets no more requests;
        what it has goes on. Raises InvalidInput: an address of neither kind."""
        wanted = tuple(dict.fromkeys(addresses))
        with as_invalid_input():
            for each in wanted:
                check_address(each)
        self.addresses = wanted
        if self._session is None:
            return
        group = self.session
        for address in group.staying.keys() - set(wanted):
            group.remove_engine(address)
        for address in wanted:
            if address not in group.staying:
                group.add_engine(address)
