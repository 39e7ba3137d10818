"""`engine-client top`: a live view of an engine."""

import datetime
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from frontend.cli.connected import connected
from frontend.cli.engine_watch import EngineWatch
from frontend.cli.info import drafts_by_method, request_lines
from frontend.cli.options import DaemonOptions
from protocol.explanations import RequestInfo

_PREFILL, _DECODE, _CACHED = "dark_orange", "green3", "deep_sky_blue3"
_STATES = {"running": "green3", "waiting": "yellow3"}
_PREEMPTED = "bold red3"
"""Colour of the states beside those of `_STATES`."""
_ID_CHARS = 13
"""A longer request id is shown by both its ends; the explanation has all of it."""

_COLUMNS: dict[str, Callable[[RequestInfo], Any]] = {
    "status": lambda info: info.status,
    "progress": lambda info: info.num_output_tokens / (info.max_tokens * info.num_sequences),
    "waits for": lambda info: info.waits_for or "",
    "tokens/s": lambda info: 0.0,
    "prompt": lambda info: info.num_prompt_tokens,
    "age s": lambda info: info.age_s or 0.0,
    "id": lambda info: info.request_id,
    "tenant": lambda info: info.tenant or "",
    "prio": lambda info: info.priority,
}


async def run_top(daemon: DaemonOptions, interval_s: float) -> int:
    """Returns the exit code. Raises EngineClientError if no engine answers."""
    async with connected(daemon, "top") as llm:
        app = TopApp(EngineWatch(llm), interval_s)
        await app.run_async()
        return app.return_code or 0


class _Requests(DataTable[Text]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Explain")]


class TopApp(App[None]):
    CSS = """
    #numbers { height: auto; max-height: 60%; padding: 0 1; }
    #filter, #explained { display: none; }
    #explained { height: 50%; border-top: solid $primary; padding: 0 1; }
    #filter.shown, #explained.shown { display: block; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("s", "sort", "Sort by the next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "back", "Back"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, engine: EngineWatch, interval_s: float) -> None:
        super().__init__()
        self._engine = engine
        self._interval_s = interval_s
        self._sorted_by: str | None = None
        self._is_reversed = False
        self._explained: str | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="numbers")
        yield Input(placeholder="part of an id, tenant, status or reason", id="filter")
        yield _Requests(cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="explained"):
            yield Static(id="explanation")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one(_Requests).focus()
        self.set_interval(self._interval_s, self._tick)
        self.call_later(self._tick)

    async def on_unmount(self) -> None:
        await self._engine.close()

    async def _tick(self) -> None:
        await self._engine.refresh()
        self.query_one("#numbers", Static).update(self._numbers())
        self._show_requests()
        await self._explain()

    def _show_requests(self) -> None:
        engine, table = self._engine, self.query_one(_Requests)
        selected = None
        if table.row_count:
            selected = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        offset, wanted = table.scroll_offset, self.query_one(Input).value.lower()
        rows = [
            {name: value(info) for name, value in _COLUMNS.items()}
            | {"tokens/s": engine.token_rates.get(info.request_id, 0.0), "info": info}
            for info in engine.unfinished.requests
            if wanted in f"{info.request_id} {info.tenant} {info.status} {info.why}".lower()
        ]
        if (key := self._sorted_by) is not None:
            rows.sort(key=lambda row: row[key])
        if self._is_reversed:
            rows.reverse()
        table.clear(columns=True)
        for name in _COLUMNS:
            mark = (" v" if self._is_reversed else " ^") if name == self._sorted_by else ""
            table.add_column(name + mark)
        for number, row in enumerate(rows):
            table.add_row(*(_cell(name, row) for name in _COLUMNS), key=row["id"])
            if row["id"] == selected:
                table.move_cursor(row=number, scroll=False)
        table.scroll_to(*offset, animate=False)

    def _numbers(self) -> Text:
        engine, mean = self._engine, self._engine.mean
        text = Text().append(f"{engine.llm.model.name} at {engine.llm.address}", "bold")
        if engine.trouble is not None:
            text.append(f"\n{engine.trouble}", "bold red")
        if not engine.history:
            return text
        columns = self.size.width
        now, width = engine.history[-1], 24 if columns >= 100 else 12 if columns >= 60 else 0
        uptime = datetime.timedelta(seconds=int(now.uptime_s))
        text.append(f"  {now.state}, up {uptime}, {now.num_clients} clients")
        oldest = f", the oldest for {now.max_wait_s:.1f} s" if now.num_waiting else ""
        finished, listed = sum(now.num_finished.values()), len(engine.unfinished.requests)
        text.append(f"\nrequests  {now.num_running:,} running, {now.num_waiting:,} waiting{oldest}")
        text.append(f"; {finished:,} finished, {now.num_preemptions:,} preemptions")
        if engine.unfinished.num_unfinished > listed:
            text.append(f"; the first {listed} of {engine.unfinished.num_unfinished:,} are listed")
        prefill, decode = (
            mean(f"num_{kind}_tokens", "num_steps") for kind in ("prefill", "decode")
        )
        text.append("\na step    ")
        _append_bar(text, width, {_PREFILL: prefill or 0.0, _DECODE: decode or 0.0})
        text.append(f"{_shown(prefill, '.1f')} prefill + {_shown(decode, '.1f')} decode tokens, ")
        text.append(f"{_milliseconds(mean('step_time_s', 'num_steps'))}; ")
        text.append(f"{_shown(mean('num_steps', 'uptime_s'), '.1f')} steps/s")
        text.append(
            f"\ntokens/s  {_shown(mean('num_prefill_tokens', 'uptime_s'), ',.0f')} prefill, "
        )
        text.append(f"{_shown(mean('num_decode_tokens', 'uptime_s'), ',.0f')} decode; prefix hits ")
        ever = now.num_cached_prompt_tokens / max(1, now.num_prompt_tokens)
        hits = mean("num_cached_prompt_tokens", "num_prompt_tokens")
        text.append(f"{_shown(hits, '.0%')}, {ever:.0%} since the start\nKV blocks ")
        used, cached, whole = now.num_blocks_in_use, now.num_blocks_cached, now.num_blocks
        _append_bar(text, width, {_DECODE: used, _CACHED: cached}, whole)
        text.append(
            f"{used:,} used, {whole - used:,} free ({cached:,} cached)\nlatency   first token "
        )
        queue_s, ttft_s = (mean(name, "num_first_tokens") for name in ("queue_time_s", "ttft_s"))
        text.append(f"{_milliseconds(ttft_s)}, of it in the queue {_milliseconds(queue_s)}")
        drafts = drafts_by_method(now)
        return text.append(f"\ndrafts    {drafts}") if drafts else text

    async def _explain(self) -> None:
        if self._explained is not None:
            info = await self._engine.explain(self._explained)
            text = "it is not known any more" if info is None else request_lines(info)
            self.query_one("#explanation", Static).update(Text(text))

    # keys

    def action_sort(self) -> None:
        order = [None, *_COLUMNS]
        self._sorted_by = order[(order.index(self._sorted_by) + 1) % len(order)]
        self._show_requests()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._show_requests()

    def action_filter(self) -> None:
        self.query_one(Input).add_class("shown").focus()

    async def action_back(self) -> None:
        """Closes the explanation, else ends the filter."""
        if self._explained is not None:
            self._explained = None
            self.query_one("#explained").remove_class("shown")
        else:
            self.query_one(Input).remove_class("shown").value = ""
        self.query_one(_Requests).focus()

    def on_input_changed(self) -> None:
        self._show_requests()

    def on_input_submitted(self) -> None:
        self.query_one(_Requests).focus()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self._explained = event.row_key.value
        self.query_one("#explained").add_class("shown").focus()
        await self._explain()


def _cell(name: str, row: dict[str, Any]) -> Text:
    value, info = row[name], row["info"]
    if name == "progress":
        text, computed, prompt = Text(), info.num_computed_tokens, info.num_prompt_tokens
        if computed < prompt and not info.num_output_tokens:
            _append_bar(text, 8, {_PREFILL: computed}, prompt)
            return text.append(f"prompt {computed:,}/{prompt:,}")
        most = info.max_tokens * info.num_sequences
        _append_bar(text, 8, {_DECODE: info.num_output_tokens}, most)
        return text.append(f"{info.num_output_tokens:,}/{most:,}")
    if isinstance(value, str):
        shown = "".join(each if each.isprintable() else "?" for each in value)
        if name == "id" and len(shown) > _ID_CHARS:
            shown = f"{shown[: _ID_CHARS // 2]}\u2026{shown[-(_ID_CHARS // 2) :]}"
        return Text(shown, _STATES.get(value, _PREEMPTED) if name == "status" else "")
    return Text(f"{value:,.1f}" if isinstance(value, float) else f"{value:,}", justify="right")


def _append_bar(
    text: Text, width: int, parts: dict[str, float], whole: float | None = None
) -> None:
    """Parts of a whole by their colours; None: they are all of it."""
    total, left = whole or sum(parts.values()), width
    for style, amount in parts.items():
        cells = min(left, round(width * amount / total)) if total else 0
        text.append("\u2588" * cells, style)
        left -= cells
    text.append("\u2591" * left + " " * bool(width), "dim")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:,.0f} ms"
