"""What `engine-client http` and `serve` are told: options of the command line, declared once."""

import difflib
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from frontend.errors import InvalidInput
from frontend.http.api_keys import KEY_VARIABLE, ApiKey, ApiKeys, command_line_keys, read_key_file
from frontend.http.mcp.options import ToolServerOption, parse_servers
from frontend.http.tools.stream import FORMATS, format_of_template
from frontend.http.traces import check_endpoint
from frontend.multimodal.media import MediaSources
from frontend.reasoning_formats import REASONING_FORMATS, reasoning_name_of_template
from protocol.logs import LogFormat
from protocol.outputs import ModelInfo

MetricsNames = Literal["engine-core", "vllm"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the server listens, whom it answers, and how much it takes."""

    host: str = "127.0.0.1"
    """The address to listen on. One beyond this machine needs keys or --insecure."""
    port: int = 8000
    """The port; 0 picks one."""
    uds: Path | None = None
    """Listen on this Unix socket instead, which only this user may enter."""
    api_key: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Answer only requests with this key; may be repeated. Others can read a command line: the
    variable VLLM_API_KEY and --api-key-file keep it from them."""
    api_key_file: Path | None = None
    """A TOML or JSON file of keys with names and limits; see docs/guides/http_limits.md."""
    insecure: Annotated[bool, Parameter(negative="")] = False
    """Let a network reach the server without keys."""
    ssl_certfile: Path | None = None
    """Serve HTTPS with this certificate (PEM)."""
    ssl_keyfile: Path | None = None
    """Its private key, unless it is in the same file."""
    cors_origin: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """A web origin whose pages may use the server, as https://chat.example, or *; may be
    repeated."""
    forwarded_allow_ips: str | None = None
    """Proxies (addresses or networks, with commas) whose X-Forwarded-For names the caller."""
    max_body_size: int = 16 * 1024**2
    """Most bytes of a request."""
    allowed_local_media_path: Path | None = None
    """A folder: requests may name files below it as images and sounds."""
    allow_media_url: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """A host, as images.example.org, *.example.org or HOST:PORT: requests may have images and
    sounds by http(s) URLs of it; may be repeated."""
    max_concurrent_requests: int = 4096
    """Further requests are refused with status 429."""
    request_timeout: float = 60.0
    """Seconds for a client to send a whole request."""
    health_timeout: float = 5.0
    """Seconds for an engine to answer /health, which it does between two steps."""
    tool_call_parser: str | None = None
    """How models write tool calls, one of --list-parsers; default: as their chat templates show."""
    reasoning_parser: str | None = None
    """How models mark their reasoning, one of --list-parsers; default: as their chat templates
    show."""
    mcp: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """NAME=COMMAND or NAME=URL: a server of tools (MCP) that callers may have called; may be
    repeated. Needs the extra `mcp`; see docs/guides/mcp.md."""
    mcp_timeout: float = 60.0
    """Seconds for a call of such a tool."""
    list_parsers: Annotated[bool, Parameter(negative="")] = False
    """Print the names that these two take, and exit."""
    unknown_tools: Literal["ignore", "refuse"] = "ignore"
    """Tools of the Responses API that nobody here runs, such as web_search: leave them out, with a
    line in the log, or refuse the request."""
    responses_dir: Path | None = None
    """A folder: responses that were asked to be stored are kept there, also beyond a restart."""
    enable_in_reasoning: Annotated[
        bool, Parameter(name="--structured-outputs-config.enable_in_reasoning", negative="")
    ] = False
    """Let structured outputs hold from the first token on, so that a model cannot think before."""
    files_dir: Path | None = None
    """Keep uploaded files and batches in this folder, so that they survive a restart; one server at
    a time. Default: a temporary one."""
    max_files_size: int = 1024**3
    """Most bytes of all uploaded files."""
    slot_save_path: Path | None = None
    """A folder: the prompts of llama.cpp's slots may be saved there, in tokens, and restored."""
    drain_timeout: int = 30
    """Seconds for running requests to end after SIGTERM."""
    metrics_names: MetricsNames = "engine-core"
    """Names of the metrics at /metrics: our own, or vLLM's for its dashboards."""
    otlp_traces_endpoint: str | None = None
    """Send a trace of each request to this OpenTelemetry collector, over HTTP:
    http://localhost:4318/v1/traces. Needs the extra `otel`."""
    access_log: Literal["off", "text", "json"] = "off"
    """A line on stderr for each request: never prompts, answers or keys."""
    log_format: LogFormat = "text"
    """Of all lines on stderr, those of daemons that are started and of the access log, too."""

    def check(self) -> ApiKeys | None:
        """The keys, if there are any.

        Raises:
            InvalidInput: values outside their limits, files that cannot be used, or a server that
                a network could reach without a key.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and field.name != "port" and not 0 < value < float("inf"):
                option = field.name.replace("_", "-")
                raise InvalidInput(f"--{option} is {value:g}, it must be a number above 0")
        if not 0 <= self.port <= 65_535:
            raise InvalidInput(f"--port is {self.port}, it must be 0 to 65535")
        for option, given, known in (
            ("--tool-call-parser", self.tool_call_parser, FORMATS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_FORMATS),
        ):
            if given is not None and given not in known:
                near = ", ".join(difflib.get_close_matches(given, known)) or ", ".join(known)
                raise InvalidInput(f"{option} is {given!r:.100}; it must be one of {near}")
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            what = (
                f"--slot-save-path {self.slot_save_path} is not a directory; make it, or name one"
            )
            raise InvalidInput(what)
        _ = self.media_sources
        _ = self.tool_servers
        self._check_tls()
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        keys = self._keys()
        if keys is None and not self.insecure and self.uds is None and not self.is_local:
            raise InvalidInput(
                f"--host {self.host} can be reached by others, and there are no keys; give "
                "--api-key-file or --api-key, or --insecure to answer everybody"
            )
        return keys

    def told_formats(self, model: ModelInfo) -> str:
        """How calls and reasoning of a model's answers are read; empty: it takes no chats. A format
        that was chosen against its chat template is named."""
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            return ""
        tool_use = model.tokenizer.named_chat_templates.get("tool_use", "")
        templates = (tool_use, model.tokenizer.chat_template)
        tools = next(filter(None, map(format_of_template, templates)), "unknown")
        reasoning = next(filter(None, map(reasoning_name_of_template, templates)), "none")
        chosen = self.tool_call_parser or tools
        told = f"tools: {chosen}, reasoning: {self.reasoning_parser or reasoning}"
        if tools in FORMATS and FORMATS[tools] is not FORMATS[chosen]:
            told += f"; warning: the chat template has calls of {tools}, which --tool-call-parser "
            told += f"{chosen} leaves as text; omit the option, or name {tools}"
        return told

    @property
    def media_sources(self) -> MediaSources:
        """The folder and the hosts whose files requests may name.
        Raises InvalidInput: no folder, no host."""
        return MediaSources.of(self.allowed_local_media_path, self.allow_media_url)

    @property
    def tool_servers(self) -> list[ToolServerOption]:
        """The servers of tools to run. Raises InvalidInput: see `parse_servers`."""
        return parse_servers(self.mcp)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach `host`.

        Raises:
            InvalidInput: there is no such host.
        """
        return all(ipaddress.ip_address(each).is_loopback for each in self.ip_addresses())

    def ip_addresses(self) -> list[str]:
        """The addresses of `host`, each once.

        Raises:
            InvalidInput: it has none.
        """
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise InvalidInput(
                f"--host {self.host} has no address ({error}); give one of this machine"
            ) from None
        return list(dict.fromkeys(str(each[4][0]) for each in found))

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise InvalidInput("--ssl-keyfile needs --ssl-certfile; give both")
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # an encrypted key would make the server ask on its terminal
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"--ssl-certfile {self.ssl_certfile}, --ssl-keyfile {self.ssl_keyfile}: {error}; "
                "give a certificate and its unencrypted key in PEM"
            ) from None

    def _keys(self) -> ApiKeys | None:
        given = self.api_key or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
        keys: list[ApiKey] = command_line_keys(given)
        if self.api_key_file is not None:
            keys += read_key_file(self.api_key_file)
        return ApiKeys(keys) if keys else None
