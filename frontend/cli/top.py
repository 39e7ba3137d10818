"""`engine-client top`: a live view of an engine."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from frontend.cli.connected import connected
from frontend.cli.engine_watch import EngineWatch
from frontend.cli.info import request_lines
from frontend.cli.options import DaemonOptions
from protocol.explanations import RequestInfo

_PREFILL, _DECODE, _CACHED = "dark_orange", "green3", "deep_sky_blue3"
_BAR = 24

_Value = Callable[[RequestInfo, EngineWatch], Any]
_COLUMNS: dict[str, _Value] = {
    "status": lambda info, _: info.status,
    "progress": lambda info, _: info.num_output_tokens / (info.max_tokens * info.num_sequences),
    "tok/s": lambda info, watch: watch.token_rates.get(info.request_id, 0.0),
    "prompt": lambda info, _: info.num_prompt_tokens,
    "age s": lambda info, _: info.age_s or 0.0,
    "tenant": lambda info, _: info.tenant or "",
    "prio": lambda info, _: info.priority,
    "waits for": lambda info, _: info.waits_for or "",
    "id": lambda info, _: info.request_id,
}


async def run_top(daemon: DaemonOptions, interval_s: float) -> int:
    """Returns the exit code.

    Raises:
        EngineClientError: no engine answers.
    """
    async with connected(daemon, "top") as llm:
        app = TopApp(EngineWatch(llm), interval_s)
        await app.run_async()
        return app.return_code or 0


class _Requests(DataTable[Text]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Explain")]


class TopApp(App[None]):
    TITLE = "engine-client top"
    CSS = """
    #numbers { height: auto; padding: 0 1; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by the next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "show_all", "All", show=False),
        Binding("p", "hold", "Pause"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, watch: EngineWatch, interval_s: float) -> None:
        super().__init__()
        self._engine = watch
        self._interval_s = interval_s
        self._sorted_by: str | None = None
        self._is_reversed = False
        self._is_held = False
        self._wanted = ""

    def compose(self) -> ComposeResult:
        yield Static(id="numbers")
        yield Input(placeholder="part of an id, tenant, status or reason", id="filter")
        yield _Requests(cursor_type="row", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one(_Requests).focus()
        self.set_interval(self._interval_s, self._tick)
        self.call_later(self._tick)

    async def on_unmount(self) -> None:
        await self._engine.close()

    async def _tick(self) -> None:
        if not self._is_held:
            await self._engine.refresh()
            self._show()

    def _show(self) -> None:
        self.query_one("#numbers", Static).update(self._numbers())
        table = self.query_one(_Requests)
        selected, offset = self._selected(), table.scroll_offset
        shown = [each for each in self._engine.requests if self._wanted in _searched(each)]
        if self._sorted_by is not None:
            value = _COLUMNS[self._sorted_by]
            shown.sort(key=lambda info: value(info, self._engine), reverse=self._is_reversed)
        elif self._is_reversed:
            shown.reverse()
        table.clear(columns=True)
        for name in _COLUMNS:
            mark = (" v" if self._is_reversed else " ^") if name == self._sorted_by else ""
            table.add_column(name + mark, key=name)
        for info in shown:
            values = {name: value(info, self._engine) for name, value in _COLUMNS.items()}
            cells = [_cell(name, value, info) for name, value in values.items()]
            table.add_row(*cells, key=info.request_id)
        names = [info.request_id for info in shown]
        if selected in names:
            table.move_cursor(row=names.index(selected), scroll=False)
        table.scroll_to(*offset, animate=False)

    def _numbers(self) -> Text:
        watch, now = self._engine, self._engine.now
        text = Text().append(f"{watch.llm.model.name} at {watch.llm.address}", "bold")
        if watch.trouble is not None:
            text.append(f"\n{watch.trouble}", "bold red")
        if now is None:
            return text
        rates = watch.rates
        uptime = datetime.timedelta(seconds=int(now.uptime_s))
        text.append(f"  {now.state}, up {uptime}, {now.num_clients} clients")
        text.append("  HELD" if self._is_held else "", "bold yellow")
        oldest = f", the oldest for {now.max_wait_s:.1f} s" if now.num_waiting else ""
        finished = sum(now.num_finished.values())
        text.append(
            f"\nrequests  {now.num_running:,} running, {now.num_waiting:,} waiting{oldest}; "
            f"{finished:,} finished, {now.num_preemptions:,} preemptions"
        )
        ever = now.num_cached_prompt_tokens / max(1, now.num_prompt_tokens)
        prefill, decode = rates.prefill_tokens_per_step, rates.decode_tokens_per_step
        text.append("\na step    ")
        _append_bar(text, [(prefill or 0, _PREFILL), (decode or 0, _DECODE)], None)
        text.append(
            f" {_number(prefill)} prefill + {_number(decode)} decode tokens, "
            f"{_milliseconds(rates.step_s)}; {rates.steps_per_s:.1f} steps/s"
        )
        text.append(
            f"\ntokens/s  {rates.prefill_tokens_per_s:,.0f} prefill, "
            f"{rates.decode_tokens_per_s:,.0f} decode; "
            f"prefix hits {_share(rates.hit_rate)}, {ever:.0%} since the start"
        )
        text.append("\nblocks    ")
        in_use, cached = now.num_blocks_in_use, now.num_blocks_cached
        _append_bar(text, [(in_use, _DECODE), (cached, _CACHED)], now.num_blocks)
        text.append(f" {in_use:,} used, {now.num_blocks - in_use:,} free ({cached:,} cached)")
        text.append(
            f"\nlatency   first token {_milliseconds(rates.ttft_s)}, of it in the queue "
            f"{_milliseconds(rates.queue_s)}"
        )
        if watch.refusal is not None:
            text.append(f"\nrequests are not shown: {watch.refusal}", "yellow")
        if watch.num_unfinished > len(watch.requests):
            listed = f"{len(watch.requests)} of {watch.num_unfinished:,}"
            text.append(f"\nthe first {listed} unfinished requests", "yellow")
        if self._wanted:
            text.append(f"\nwith {self._wanted!r}; Escape shows all", "yellow")
        return text

    def _selected(self) -> str | None:
        table = self.query_one(_Requests)
        if not table.row_count:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # keys

    def action_sort(self) -> None:
        order = [None, *_COLUMNS]
        self._sorted_by = order[(order.index(self._sorted_by) + 1) % len(order)]
        self._show()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._show()

    def action_hold(self) -> None:
        self._is_held = not self._is_held
        self._show()

    def action_filter(self) -> None:
        self.query_one(Input).add_class("shown").focus()

    def action_show_all(self) -> None:
        self.query_one(Input).value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value.lower()
        self._show()

    def on_input_submitted(self) -> None:
        self.query_one(Input).remove_class("shown")
        self.query_one(_Requests).focus()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        request_id = event.row_key.value
        if request_id is not None:
            await self.push_screen(_Explanation(self._engine, request_id, self._interval_s))


class _Explanation(ModalScreen[None]):
    """Why one request is where it is; up to date while it is shown."""

    CSS = """
    _Explanation { align: center middle; }
    VerticalScroll { width: 90%; height: 85%; border: round $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Back"),
    ]

    def __init__(self, watch: EngineWatch, request_id: str, interval_s: float) -> None:
        super().__init__()
        self._engine = watch
        self._request_id = request_id
        self._interval_s = interval_s

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="explanation")

    async def on_mount(self) -> None:
        self._timer = self.set_interval(self._interval_s, self._tick)
        await self._tick()

    async def _tick(self) -> None:
        info = await self._engine.explain(self._request_id)
        text = f"request {self._request_id} is not known any more"
        if info is not None:
            text = request_lines(info)
            if info.status == "finished":
                self._timer.stop()
        with contextlib.suppress(LookupError):
            self.query_one("#explanation", Static).update(Text(text + "\n\nEscape: back"))


def _searched(info: RequestInfo) -> str:
    fields = (info.request_id, info.tenant, info.status, info.waits_for, info.why)
    return " ".join(str(each) for each in fields if each is not None).lower()


def _cell(name: str, value: Any, info: RequestInfo) -> Text:
    if name == "progress":
        most = info.max_tokens * info.num_sequences
        text = Text()
        if info.num_computed_tokens < info.num_prompt_tokens and not info.num_output_tokens:
            done = (info.num_computed_tokens, _PREFILL)
            _append_bar(text, [done], info.num_prompt_tokens, 8)
            return text.append(f" prompt {info.num_computed_tokens:,}/{info.num_prompt_tokens:,}")
        _append_bar(text, [(info.num_output_tokens, _DECODE)], most, 8)
        return text.append(f" {info.num_output_tokens:,}/{most:,}")
    if isinstance(value, float):
        return Text(f"{value:,.1f}", justify="right")
    if isinstance(value, int):
        return Text(f"{value:,}", justify="right")
    return Text("".join(each if each.isprintable() else "?" for each in str(value)))


def _append_bar(
    text: Text, parts: list[tuple[float, str]], whole: float | None, width: int = _BAR
) -> None:
    """Parts of a whole; None: the parts are all."""
    total = whole or sum(amount for amount, _ in parts)
    left = width
    for amount, style in parts:
        cells = min(left, round(width * amount / total)) if total else 0
        text.append("\u2588" * cells, style)
        left -= cells
    text.append("\u2591" * left, "dim")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:,.0f} ms"
