"""Smaller archives: wheels with the same members, compressed by libdeflate, which finds shorter encodings than zlib."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import deflate

LEVEL = 12
"""libdeflate's highest."""
_MEMBER = struct.Struct("<4s5H3L2H")
_LISTED = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_VERSION = 20
"""Of the format: the first one with deflate."""
_UNIX = 3 << 8 | _VERSION
"""Permissions are in the upper half of a member's attributes."""


def compress(wheel: Path) -> None:
    """Rewrite a wheel. Names, contents, times and permissions of its files stay; entries of folders are left out."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist() if not info.is_dir()]
    packed, listed = bytearray(), bytearray()
    for info, contents in members:
        data = bytes(deflate.deflate_compress(contents, LEVEL))
        method = zipfile.ZIP_DEFLATED
        if len(data) >= len(contents):
            data, method = contents, zipfile.ZIP_STORED
        name = info.filename.encode("ascii")
        year, month, day, hour, minute, second = info.date_time
        time, date = hour << 11 | minute << 5 | second // 2, year - 1980 << 9 | month << 5 | day
        common = (_VERSION, 0, method, time, date, info.CRC, len(data), len(contents), len(name), 0)
        listed += _LISTED.pack(b"PK\1\2", _UNIX, *common, 0, 0, 0, info.external_attr, len(packed)) + name
        packed += _MEMBER.pack(b"PK\3\4", *common) + name + data
    end = _END.pack(b"PK\5\6", 0, 0, len(members), len(members), len(listed), len(packed), 0)
    wheel.write_bytes(packed + listed + end)
