"""Messages in a stream of bytes: each behind a header of its length and checksum. No I/O here.

A frame is `DRG`, the version (1 byte), the body's length and CRC-32, the CRC-32 of these 12 bytes (4 bytes each,
big-endian), and the body. The header has its own checksum so that a damaged length is not waited for. Checksums find
damage, not an attacker: that takes TLS. A damaged stream cannot be read on, as it is not known where a frame begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from zlib import crc32

from ondevice.dragon.messages import VERSION

LIMIT = 2**20  # bytes of a body
HEADER = 16  # bytes
_MAGIC = b"DRG"
_START = _MAGIC + bytes([VERSION])
_LENGTHS = struct.Struct(">II")


def pack(body: bytes, limit: int = LIMIT) -> bytes:
    """The frame of a body. Raises ValueError on an empty one and on one over the limit, which no reader would take."""
    _check_length(len(body), limit)
    start = _START + _LENGTHS.pack(len(body), crc32(body))
    return start + crc32(start).to_bytes(4, "big") + body


class Stranger(ValueError):
    """The first bytes of the stream are of no frame: whoever sends them does not speak this protocol."""


class OtherVersion(ValueError):
    """The other side speaks another version of the protocol: no new connection helps."""


class Reader:
    """Finds the bodies in a stream that comes in pieces of any size.

    limit: most bytes of a body; a larger one is refused by its header, before any of it is kept.
    After the first ValueError the stream is lost, and every further call raises the same.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        if not 0 < limit < 2**32:
            raise ValueError(f"A frame's limit is from 1 to 2^32 - 1 bytes, not {limit}.")
        self.limit = limit
        self._held = bytearray()
        self._failed: str | None = None
        self._begun = False  # whether there was a whole frame: after it other bytes are damage

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole with these bytes, in order; what is not taken now comes with the next call.

        Taking them raises ValueError at the first frame that is none, or is damaged, too large or of another version.
        """
        if self._failed is None:
            self._held += data
        return self._bodies()

    def end(self) -> None:
        """The stream has ended. Raises ValueError if that was within a frame, and if the stream was lost before."""
        if self._failed is None and self._held:
            self._failed = f"The connection ended within a frame, after {len(self._held)} bytes of it."
        self._check()

    def _bodies(self) -> Iterator[bytes]:
        while True:
            self._check()
            try:
                body = self._first()
            except ValueError as error:
                self._failed = str(error)
                self._held.clear()
                raise
            if body is None:
                return
            yield body

    def _first(self) -> bytes | None:
        """The first body, taken out of what is held; None while it is not whole."""
        held = self._held
        for byte, wanted in zip(held, _START, strict=False):  # each as it comes, so that a stranger is told at once
            if byte != wanted and wanted == VERSION:
                raise OtherVersion(f"The other side speaks version {byte} of the protocol, this one {VERSION}.")
            if byte != wanted:
                kind = ValueError if self._begun else Stranger
                raise kind(f"A frame begins with {_MAGIC.decode()}, not with a byte {byte} there.")
        if len(held) < HEADER:
            return None
        length, checksum = _LENGTHS.unpack_from(held, len(_START))
        if crc32(held[: HEADER - 4]).to_bytes(4, "big") != held[HEADER - 4 : HEADER]:
            raise ValueError("A frame's header is damaged: its checksum is wrong.")
        _check_length(length, self.limit)
        if len(held) < HEADER + length:
            return None
        body = bytes(held[HEADER : HEADER + length])
        if crc32(body) != checksum:
            raise ValueError(f"A frame of {length} bytes is damaged: its checksum is wrong.")
        del held[: HEADER + length]
        self._begun = True
        return body

    def _check(self) -> None:
        if self._failed is not None:
            raise ValueError(self._failed)


def _check_length(length: int, limit: int) -> None:
    if not 0 < length <= limit:
        raise ValueError(f"A frame holds from 1 to {limit} bytes, not {length}.")
