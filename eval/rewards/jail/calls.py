"""Calls between the answer's process and the judge's, over two pipes: requests, replies, and who owns which object.

Both sides are alike. What is no plain data stays with its owner, under a number; the other side holds a stand-in,
which can be handed back. While one side waits for its reply it serves the other's requests, so calls may nest (a test's
lambda that the answer calls). Whether a request is served is for `perform` to say.
"""

import os
from collections.abc import Callable
from typing import Any

from eval.rewards.jail.codec import MAX_BYTES, Reader, Refused, Writer

ASK, REPLY = b"?", b"!"
HEADER_BYTES = 9
VALUE, RAISED, REFUSED = "value", "raised", "refused"


class Lost(BaseException):
    """The other side is gone, or no longer keeps to the protocol. No `Exception`, lest a test go on without it."""


class Peer:
    """The other process.

    stand_in: what represents the other's object of a number here. may_export: whether the other may hold this object.
    perform: does what the other asks. describe: an exception as plain data, revive: an exception from that.
    """

    def __init__(
        self,
        reading: int,
        writing: int,
        stand_in: Callable[["Peer", int], Any],
        may_export: Callable[[Any], bool],
        perform: Callable[..., Any],
        describe: Callable[[BaseException], Any],
        revive: Callable[..., BaseException],
    ) -> None:
        self.reading, self.writing = reading, writing
        self.make_stand_in, self.may_export, self.perform = stand_in, may_export, perform
        self.describe, self.revive = describe, revive
        self.is_lost = False
        self.exported: list[Any] = []
        self.export_numbers: dict[int, int] = {}
        self.stand_ins: dict[int, Any] = {}
        self.stand_in_numbers: dict[int, int] = {}

    def ask(self, *operation: Any) -> Any:
        """What the other replies to this. Raises what it raised; Refused where it gives no plain data; Lost."""
        writer = Writer(self.export)
        self.send(ASK, writer.write(operation))
        while True:
            kind, message = self.receive()
            if kind == ASK:
                self.serve(message)
                continue
            status, result, _ = self.read(Reader(self.resolve, writer.containers), message)
            if status == VALUE:
                return result
            if status == RAISED:
                raise self.revive(*result)
            raise Refused(str(result))

    def serve(self, message: bytes) -> None:
        """Do what one request asks, and reply; with the changeable containers that came with it, as they are now."""
        reader = Reader(self.resolve)
        outcome: tuple[Any, ...]
        try:
            outcome = (VALUE, self.perform(*self.read(reader, message)))
        except Lost:
            raise
        except Refused as error:
            outcome = (REFUSED, str(error))
        except BaseException as error:
            outcome = (RAISED, self.describe(error))
        received = reader.containers
        try:
            text = Writer(self.export, received).write((*outcome, tuple(received)))
        except Refused as error:
            text = Writer(self.export).write((REFUSED, str(error), ()))
        self.send(REPLY, text)

    def serve_forever(self) -> None:
        """Serve until the other is gone."""
        while True:
            kind, message = self.receive()
            if kind == ASK:
                self.serve(message)

    # ---- objects ----

    def export(self, value: Any) -> list[Any]:
        """The node for an object of this side or the other's."""
        if (number := self.stand_in_numbers.get(id(value))) is not None:
            return ["yours", number]
        if not self.may_export(value):
            raise Refused(f"a value of type {type(value).__name__} cannot be handed over as plain data")
        number = self.export_numbers.setdefault(id(value), len(self.exported))
        if number == len(self.exported):
            self.exported.append(value)
        return ["own", number]

    def resolve(self, owner: str, number: int) -> Any:
        """The object that a node names."""
        if owner == "yours":
            return self.exported[number]
        if number not in self.stand_ins:
            self.stand_ins[number] = made = self.make_stand_in(self, number)
            self.stand_in_numbers[id(made)] = number
        return self.stand_ins[number]

    # ---- bytes ----

    def read(self, reader: Reader, message: bytes) -> tuple[Any, ...]:
        """A message's value, which is a tuple."""
        value = reader.read(message)
        if not isinstance(value, tuple):
            raise Refused("a message that cannot be read")
        return value

    def send(self, kind: bytes, text: bytes) -> None:
        """Write a message. Lost when nobody reads."""
        left = memoryview(kind + len(text).to_bytes(HEADER_BYTES - 1, "big") + text)
        try:
            while left:
                left = left[os.write(self.writing, left) :]
        except OSError:
            raise self.lose() from None

    def receive(self) -> tuple[bytes, bytes]:
        """The next message. Lost when none comes any more."""
        header = self.read_bytes(HEADER_BYTES)
        size = int.from_bytes(header[1:], "big")
        if header[:1] not in (ASK, REPLY) or size > MAX_BYTES:
            raise self.lose()
        return header[:1], self.read_bytes(size)

    def read_bytes(self, count: int) -> bytes:
        """Exactly so many."""
        parts = bytearray()
        while len(parts) < count:
            part = os.read(self.reading, min(count - len(parts), 1 << 20))
            if not part:
                raise self.lose()
            parts += part
        return bytes(parts)

    def lose(self) -> Lost:
        """Remembered, whatever becomes of the exception."""
        self.is_lost = True
        return Lost("the other process ended")
