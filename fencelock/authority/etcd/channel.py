"""gRPC over one HTTP/2 connection, without its socket: calls become bytes, and bytes become answers."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Final
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import hpack

from fencelock.authority.etcd.messages import OK, UNAVAILABLE, UNKNOWN, Answer, Call

#: HTTP/2 has 31 bits for the number of a stream, and a client uses odd numbers.
_LAST_STREAM: Final = 2**31 - 1
_FRAME: Final = 16_384
_LONGEST_DETAIL: Final = 500  # bytes of a server's sentence that an error shows
_DIGITS: Final = 4  # of a status: gRPC has 17
_LONGEST_MESSAGE: Final = 64 << 20
_CONFIG: Final = h2.config.H2Configuration(
    client_side=True,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
)

#: Events that have headers, and those that end a call.
_HEADERS: Final = (h2.events.ResponseReceived, h2.events.TrailersReceived)
_ENDS: Final = (h2.events.StreamEnded, h2.events.StreamReset)


class ChannelError(ConnectionError):
    """The connection cannot be used any more."""


class _Encoder(hpack.Encoder):
    """Encodes headers as literals outside of HPACK's table, so that a method's headers are encoded once."""

    def __init__(self) -> None:
        super().__init__()
        self._encoded: dict[tuple[bytes, ...], bytes] = {}

    def encode(self, headers: Any, huffman: bool = True) -> bytes:  # noqa: ARG002, FBT002 - as h2 calls it
        key = tuple(value for _, value in headers)
        if (found := self._encoded.get(key)) is None:
            found = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)
            self._encoded[key] = found
        return found


class _Decoder(hpack.Decoder):
    """Remembers decoded blocks that only refer to HPACK's table, as most do, until it may have changed."""

    def __init__(self) -> None:
        super().__init__(h2.connection.H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE)
        self._decoded: dict[bytes, Any] = {}

    def decode(self, data: bytes, raw: bool = False) -> Any:  # noqa: FBT002 - as h2 calls it
        block = bytes(data)
        if (found := self._decoded.get(block)) is None:
            found = list(super().decode(block, raw))
            if min(block, default=0) >= 0x80:  # only indexed fields, of one byte each
                self._decoded[block] = found
            else:
                self._decoded.clear()
        return found


def _literal(text: bytes) -> bytes:
    """Return a string of HPACK, without Huffman's code."""
    return bytes(hpack.hpack.encode_integer(len(text), 7)) + text


class _Stream:
    __slots__ = ("answer", "buffer", "goes_on", "most", "number", "to_send")

    def __init__(self, call: Call) -> None:
        self.answer = Answer([])
        self.number = 0
        self.goes_on, self.most = call.goes_on, call.most
        self.buffer = bytearray()  # the received part of a message that is not complete
        self.to_send = b"".join([b"\0" + len(each).to_bytes(4, "big") + each for each in call.requests])


class Channel:
    """A connection to a member of etcd; `scheme` is "http" or "https", `authority` is host and port."""

    def __init__(self, scheme: str, authority: str) -> None:
        self._h2 = h2.connection.H2Connection(_CONFIG)
        self._h2.encoder, self._h2.decoder = _Encoder(), _Decoder()
        self._h2.initiate_connection()
        self._headers = [
            (b":method", b"POST"),
            (b":scheme", scheme.encode()),
            (b":path", b""),
            (b":authority", authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
        self._streams: dict[int, _Stream] = {}
        self._by_answer: dict[Answer, _Stream] = {}
        #: Calls that wait until the server allows one more stream.
        self._waiting: deque[tuple[_Stream, bytes]] = deque()
        #: Calls whose requests wait until the server allows more bytes.
        self._sending: deque[_Stream] = deque()
        self.is_ending: bool = False  # whether no call can begin, because the numbers of streams are used up

    def authenticate(self, token: bytes) -> None:
        """Send a token of `Auth/Authenticate` with each later call."""
        self._headers.append((b"token", token))

    def start(self, call: Call) -> Answer:
        """Begin a call; the caller has to send `data_to_send()` next."""
        if self.is_ending:
            raise ChannelError("the connection has carried as many calls as it can")
        stream = _Stream(call)
        self._by_answer[stream.answer] = stream
        if self._waiting or self._is_full():
            self._waiting.append((stream, call.path))
        else:
            self._open(stream, call.path)
        return stream.answer

    def _is_full(self) -> bool:
        """Return whether the server allows no more streams; h2 is slow, and asked only if it has a limit."""
        limit = self._h2.remote_settings.max_concurrent_streams
        return limit < _LAST_STREAM and self._h2.open_outbound_streams >= limit

    def _open(self, stream: _Stream, path: bytes) -> None:
        stream.number = number = self._h2.get_next_available_stream_id()
        self.is_ending = number >= _LAST_STREAM - 2
        self._streams[number] = stream
        headers = self._headers.copy()
        headers[2] = (b":path", path)
        self._h2.send_headers(number, headers)
        self._sending.append(stream)
        self._send()

    def _send(self) -> None:
        """Send the rest of the requests, as far as flow control allows."""
        while self._sending:
            stream = self._sending[0]
            if stream.number in self._streams:
                while stream.to_send:
                    room = min(_FRAME, self._h2.local_flow_control_window(stream.number))
                    if room <= 0:
                        return
                    part, stream.to_send = stream.to_send[:room], stream.to_send[room:]
                    is_last = not (stream.to_send or stream.goes_on)
                    self._h2.send_data(stream.number, part, end_stream=is_last)
            self._sending.popleft()

    def cancel(self, answer: Answer) -> None:
        """Forget a call, and cancel it on the server."""
        if (stream := self._by_answer.pop(answer, None)) is None:
            return
        if self._streams.pop(stream.number, None) is not None:
            self._h2.reset_stream(stream.number, h2.errors.ErrorCodes.CANCEL)
        else:
            self._waiting = deque(each for each in self._waiting if each[0] is not stream)

    @property
    def is_crowded(self) -> bool:
        """Whether at least half of the allowed streams are open: the rest is for other calls than watches."""
        return (len(self._streams) + 1) * 2 > self._h2.remote_settings.max_concurrent_streams

    def data_to_send(self) -> bytes:
        return self._h2.data_to_send()

    def receive(self, data: bytes) -> None:
        """Process received bytes, and notify the answers that they change; may raise ChannelError."""
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            raise ChannelError(f"this is no server of gRPC: {error}") from error
        for event in events:
            self._take(event)
        self._send()
        while self._waiting:
            if self._is_full():
                break
            self._open(*self._waiting.popleft())

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            raise ChannelError("the server shuts down, or has ended the connection")
        number = getattr(event, "stream_id", None)
        stream = self._streams.get(number or 0)
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if stream is not None:
                self._add(stream, event.data)
        elif stream is None:
            return
        elif isinstance(event, _HEADERS):
            its = dict(event.headers)
            if (status := its.get(b"grpc-status")) is not None:
                message = unquote(its.get(b"grpc-message", b"")[:_LONGEST_DETAIL].decode("utf-8", "replace"))
                known = len(status) < _DIGITS and status.isdigit()
                self._finish(stream, int(status) if known else UNKNOWN, message)
            elif its.get(b":status", b"200") != b"200":
                self._finish(stream, UNAVAILABLE, f"HTTP {its[b':status'].decode('ascii', 'replace')}")
        elif isinstance(event, _ENDS):
            self._finish(stream, UNAVAILABLE, "the server has broken off the call")

    def _add(self, stream: _Stream, data: bytes) -> None:
        stream.buffer += data
        before = len(stream.answer.messages)
        while len(stream.buffer) >= 5:
            length = int.from_bytes(stream.buffer[1:5], "big")
            if stream.buffer[0] or length > _LONGEST_MESSAGE:
                raise ChannelError("the server has sent a message that is compressed or far too long")
            if len(stream.buffer) < 5 + length:
                break
            stream.answer.messages.append(bytes(stream.buffer[5 : 5 + length]))
            del stream.buffer[: 5 + length]
        if 0 < stream.most <= len(stream.answer.messages):
            self._finish(stream, OK, "")
        elif len(stream.answer.messages) > before:
            stream.answer.notify()

    def _finish(self, stream: _Stream, status: int, detail: str) -> None:
        answer = stream.answer
        if self._by_answer.pop(answer, None) is not None and answer.status is None:
            answer.status, answer.detail = status, detail
            answer.notify()
        self._streams.pop(stream.number, None)
        if stream.goes_on:
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                self._h2.reset_stream(stream.number, h2.errors.ErrorCodes.CANCEL)

    def lose(self, reason: str) -> None:
        """End all calls, because the connection is lost."""
        for answer in list(self._by_answer):
            answer.status, answer.detail = UNAVAILABLE, reason
            answer.notify()
        self._by_answer.clear()
        self._streams.clear()
        self._waiting.clear()
