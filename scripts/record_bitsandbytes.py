#!/usr/bin/env python3
"""Records tests/fixtures/bitsandbytes.json with the CPU library of bitsandbytes, called through ctypes, without PyTorch.

usage: record_bitsandbytes.py libbitsandbytes_cpu.so > tests/fixtures/bitsandbytes.json

The library (from the wheel on PyPI; version 0.50.2 was used) dequantizes. The codes are computed here from the published definitions:
the maps from arXiv 2110.02861 (decades from 1e-6 to 1; in each, the midpoints of equal parts of 0.1..1, in f32), and NF4 from arXiv
2305.14314, section 3 and appendix E. Each code is that of the nearest value. (The library's own CPU quantizer uses a shortcut that does
not find the nearest value for small values; its operators for other devices do.) Needs numpy.
"""
import ctypes
import json
import struct
import sys

import numpy as np

f32 = np.float32
LEVELS = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                   -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                   0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                   0.7229568362236023, 1.0], dtype=f32)
LIB = ctypes.CDLL(sys.argv[1])


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def generated_values(count):
    """Returns numbers of all magnitudes between 2^-7 and 1, the same as in src/precision/weight_packing/tests.rs."""
    bits = []
    for i in range(count):
        h = (i * 2654435761 + 97) & 0xFFFFFFFF
        h = ((h ^ (h >> 15)) * 2246822519) & 0xFFFFFFFF
        bits.append((h & 0x80000000) | (120 + (h >> 23 & 7)) << 23 | (h & 0x7FFFFF))
    return np.array(bits, dtype=np.uint32).view(f32)


def linspace(count):
    """Returns torch.linspace(0.1, 1, count + 1) in f32."""
    start, end = f32(0.1), f32(1.0)
    step = f32(f32(end - start) / f32(count))
    low = [f32(start + f32(step * f32(i))) for i in range((count + 1) // 2)]
    high = [f32(end - f32(step * f32(count - i))) for i in range((count + 1) // 2, count + 1)]
    return low + high


def dynamic_map(signed):
    data = [f32(0), f32(1)]
    for i in range(7):
        edges = linspace(2**i if signed else 2 ** (i + 1))
        for a, b in zip(edges, edges[1:]):
            value = f32(f32(10.0 ** (i - 6)) * f32(f32(a + b) / f32(2)))
            data += [value, f32(-value)] if signed else [value]
    return np.array(sorted(data), dtype=f32)


def quantize(code, values, block):
    """Quantizes to the nearest values of the map, using the bounds between them, as the library's operator does."""
    bounds = ((code[:-1] + code[1:]) / f32(2)).astype(f32)
    blocks = [values[i:i + block] for i in range(0, len(values), block)]
    absmax = np.array([np.abs(b).max() for b in blocks], dtype=f32)
    scaled = [b * f32(f32(1) / max(largest, f32(1e-38))) for b, largest in zip(blocks, absmax)]
    return np.searchsorted(bounds, np.concatenate(scaled), side="left").astype(np.uint8), absmax


def dequantize(code, codes, absmax, block):
    out = np.zeros(len(codes), dtype=f32)
    LIB.cdequantize_blockwise_cpu_fp32(pointer(code), pointer(codes), pointer(absmax), pointer(out),
                                       ctypes.c_longlong(block), ctypes.c_longlong(len(codes)))
    return out


def nf4_quantize(values):
    blocks = [values[i:i + 64] for i in range(0, len(values), 64)]
    absmax = np.array([np.abs(b).max() for b in blocks], dtype=f32)
    codes = []
    for block, largest in zip(blocks, absmax):
        scaled = (block * f32(f32(1) / largest)).astype(np.float64)
        codes += [int(np.abs(LEVELS.astype(np.float64) - x).argmin()) for x in scaled]
    codes += [7] * (len(codes) % 2)
    packed = bytes(a << 4 | b for a, b in zip(codes[::2], codes[1::2]))
    return packed, absmax


def nf4_dequantize(packed, absmax, count, name, dtype):
    codes = np.frombuffer(packed, dtype=np.uint8).copy()
    out = np.zeros(count, dtype=dtype)
    getattr(LIB, f"cdequantize_blockwise_cpu_nf4_{name}")(
        pointer(codes), pointer(absmax), pointer(out), ctypes.c_longlong(64), ctypes.c_longlong(1),
        ctypes.c_longlong(count))
    return out.tobytes()


DTYPES = {"f32": ("fp32", np.float32), "bf16": ("bf16", np.uint16), "f16": ("fp16", np.float16)}


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def bf16(values):
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)
    return rounded.view(f32)


def nf4():
    count = 3 * 64 + 10
    packed, absmax = nf4_quantize(generated_values(count))
    rounded_absmax = bf16(absmax)
    return {"count": count, "codes": packed.hex(), "absmax": absmax.tobytes().hex(), "bf16_absmax": rounded_absmax.tobytes().hex(),
            "dequantized": {name: nf4_dequantize(packed, rounded_absmax, count, *how).hex() for name, how in DTYPES.items()}}


def nested():
    """Double-quantizes the scales in groups of 256, each as bitsandbytes quantizes the scales of a tensor with 256 blocks."""
    count, signed = 16384 + 5 * 64 + 6, dynamic_map(True)
    packed, absmax = nf4_quantize(generated_values(count))
    all_codes, offsets, second, restored = [], [], [], []
    for start in range(0, len(absmax), 256):
        group = absmax[start:start + 256]
        offset = f32(group.astype(np.float64).sum() / len(group))
        codes, absmax2 = quantize(signed, group - offset, 256)
        all_codes.append(codes.tobytes())
        offsets.append(offset)
        second.append(absmax2[0])
        restored.append(dequantize(signed, codes, absmax2, 256) + offset)
    restored = np.concatenate(restored).astype(f32)
    last = packed[8192:]
    last += b"\x77" * (-len(last) % 32)
    return {"count": count, "codes_of_second": last.hex(), "absmax_codes": b"".join(all_codes).hex(),
            "offsets": np.array(offsets).tobytes().hex(), "absmax2": np.array(second).tobytes().hex(),
            "hash_of_dequantized": {name: fnv1a(nf4_dequantize(packed, restored, count, *how))
                                    for name, how in DTYPES.items()}}


def dynamic(signed):
    count, code = 2 * 256 + 100, dynamic_map(signed)
    sizes = np.array([1.0, 0.03, 1e-3, 1e-5], dtype=f32)
    values = generated_values(count) * sizes[np.arange(count) % 4]
    values = values if signed else np.abs(values)
    codes, absmax = quantize(code, values, 256)
    return {"map": code.tobytes().hex(), "count": count, "codes": codes.tobytes().hex(), "absmax": absmax.tobytes().hex(),
            "hash_of_dequantized": fnv1a(dequantize(code, codes, absmax, 256).tobytes())}


json.dump({"note": "made by scripts/record_bitsandbytes.py: codes by the published definitions, values by the CPU "
                   "library of bitsandbytes 0.50.2; bytes in hexadecimal, floats little-endian",
           "nf4": nf4(), "nested": nested(), "dynamic": {"signed": dynamic(True), "unsigned": dynamic(False)}},
          sys.stdout, indent=1)
print()
