"""What one number of a key or a value is stored as; named here so that nothing but the tensors needs torch."""

from __future__ import annotations

from enum import Enum


class KvDtype(Enum):
    """A storage type of the KV cache; the value is torch's name for it, but for the two eight-bit floats."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def itemsize_bytes(self) -> int:
        """Return the bytes of one number."""
        return _ITEMSIZE_BYTES[self]


_ITEMSIZE_BYTES = {
    KvDtype.FLOAT32: 4,
    KvDtype.FLOAT16: 2,
    KvDtype.BFLOAT16: 2,
    KvDtype.FP8_E4M3: 1,
    KvDtype.FP8_E5M2: 1,
}
